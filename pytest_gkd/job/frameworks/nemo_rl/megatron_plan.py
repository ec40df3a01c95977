"""Makes the trainer and the teacher of NeMo-RL's Megatron workers for a memory plan.

Rules are those of 0.6.0, 0.7.0 and the main branch at 7ea279ab (NVIDIA-NeMo/RL), files
are named below nemo_rl/: models/policy/workers/megatron_policy_worker.py and
models/megatron/setup.py unless stated otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pytest_gkd.job import megatron_memory
from pytest_gkd.job.beside_memory import Beside
from pytest_gkd.job.engine_memory import Parts
from pytest_gkd.job.findings import CheckError
from pytest_gkd.job.fitting import number
from pytest_gkd.job.frameworks import megatron_trainer
from pytest_gkd.job.frameworks.nemo_rl.rules import Look
from pytest_gkd.job.megatron_memory import Megatron
from pytest_gkd.job.models import WIDTHS, Model

Values = Mapping[str, Any]
# Settings whose name in NeMo-RL is not that of Megatron's argument.
RENAMED = {
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
    "use_megatron_fsdp": "use_custom_fsdp",
}
SECTIONS = ("optimizer.", "distributed_data_parallel_config.", "")
# Settings whose effect on the memory is unknown, with the values that have none.
UNKNOWN: dict[str, tuple[str, tuple[Any, ...]]] = {
    "use_fused_linear_logprobs": ("the memory of fused log-probabilities", (False,)),
    "cuda_graph_impl": ("the memory of CUDA graphs in training", ("none",)),
    "attention_backend": ("that attention's memory", ("flash", "fused", "auto")),
    "peft.enabled": ("what LoRA's layers keep in Megatron", (False,)),
    "fp8_cfg.enabled": ("the memory of training in fp8", (False,)),
}


def side(look: Look, section: str) -> dict[str, Any]:
    """What the plan needs about the model of ``section``.

    Raises CheckError if something has an unknown effect on the memory.
    """
    start = f"{section}.megatron_cfg"
    for key, (text, harmless) in UNKNOWN.items():
        value = look(f"{start}.{key}")
        if value is not None and value not in harmless:
            raise CheckError(f"{text} is not known ({start}.{key})")
    if look.mapping(f"{start}.model_overrides"):
        raise CheckError(f"what {start}.model_overrides changes is not known")
    precision = look(f"{section}.precision")
    if precision not in ("bfloat16", "float16"):
        raise CheckError(f"training in {precision} is not known ({section}.precision)")
    own = {
        "fp16": precision == "float16",
        "grad_reduce_in_bf16": not look.is_on(
            f"{start}.distributed_data_parallel_config.grad_reduce_in_fp32"
        ),
        "recompute_granularity": None,
        # Megatron Bridge does not pad the vocabulary.
        "make_vocab_size_divisible_by": 1,
        "fp8": None,
    }
    if look.is_on(f"{start}.activation_checkpointing"):
        own["recompute_granularity"] = look(f"{start}.recompute_granularity", "full")

    def find(key: str) -> Any:
        if key in own:
            return own[key]
        name = RENAMED.get(key, key)
        found = (look(f"{start}.{section}{name}") for section in SECTIONS)
        return next((value for value in found if value is not None), None)

    said = megatron_trainer.settings(find)
    return {
        "megatron": said,
        "recomputes": own["recompute_granularity"] == "full",
        "defers": look.is_on(f"{start}.defer_fp32_logits"),
        "fuses_loss": look.is_on(f"{section}.sequence_packing.fuse_loss"),
        "is_distributed": look.is_on(f"{start}.optimizer.use_distributed_optimizer"),
        "keeps_states": look(f"{section}.offload_optimizer_for_refit", True) is False,
        "fuses": look.is_on(f"{start}.gradient_accumulation_fusion"),
        "fuses_gates": bool(look(f"{start}.bias_activation_fusion", True)),
    }


def trained_loss(values: Values, own: Values, rows: int, tokens: int) -> int:
    """Bytes of the loss per token and vocabulary entry in an update.

    Measured on prepare_loss_input and the wrappers (algorithms/loss/), whose logits the
    schedule keeps until the backward pass; ``rows`` are those of a packed one. They are
    in 16 bits if float32 is deferred; log-probabilities process them in chunks since
    0.7.0, by policy.logprob_chunk_size.
    """
    chunk: int = own["chunk"] or tokens
    share: float = min(1, chunk * own["context"] / tokens)
    is_packed = own["way"] == "sequence_packing"
    is_row_by_row = is_packed and not own["fuses_loss"]
    defers = own["defers"]
    found: float
    if values["algorithm"] == "distillation":
        found = 10 if defers or not is_packed else 13
    elif own["chunk"] and defers and values["release"] != "0.6.0":
        found = 4 + 24 * share
        if is_row_by_row:
            found = max(found + 0.5, 6.5)
    elif is_row_by_row:
        found = max(8.5, 6 + 8 / rows) if defers else 16
    else:
        found = 14 if defers else 12
    return math.ceil(found)


def asked_loss(own: Values, tokens: int, *, topk: bool) -> int:
    """The same for a forward pass alone, for log-probabilities or the largest
    logits.
    """
    chunk: float = min(1, (own["chunk"] or tokens) * own["context"] / tokens)
    if not own["defers"]:
        return 6 if topk or own["chunk"] else 12
    return math.ceil(2 + (min(8 * chunk, 4) if topk else 12 * chunk))


def _made(
    values: Values, own: Values, model: Model, tokens: int, **more: Any
) -> Megatron:
    """A model of these workers."""
    return megatron_trainer.trainer(
        own["megatron"],
        values,
        model,
        tokens=tokens,
        is_distributed=own["is_distributed"],
        fuses=own["fuses"],
        fuses_gates=own["fuses_gates"],
        **more,
    )


def trainer(
    values: Values, own: Values, model: Model, tokens: int, asked: int
) -> tuple[Megatron, Parts, Parts]:
    """The policy, what scoring rows takes, and what it holds when weights are sent.

    ``tokens`` and ``asked`` are those of a micro-batch in training and in scoring.

    If it shares its GPUs, gradients and states are offloaded before weights are sent,
    weights after that (offload_before_refit, offload_after_refit); if not, only
    gradients are for log-probabilities (prepare_for_lp_inference), and for a teacher,
    since 0.7.0, all but the weights. Master copies that are not optimizer states stay
    (move_optimizer).
    """
    values = {**values, "train_tensor_parallel_size": own["tensor"]}
    context, length = own["context"], values["length"]
    said = own["megatron"]
    stages = said["pipeline_model_parallel_size"] or 1
    gpus = number(values, "trainer_gpus")[0]
    rows = values["batch"] * values["pairs"] * own["tensor"] * stages * context / gpus
    in_row = max(tokens // length, 1)
    states = set[str]() if own["keeps_states"] else {"states"}
    shares = values["shares"]
    to_send = {"gradients", *states} if shares else set[str]()
    away = {"weights", *to_send}
    if not shares:
        is_moved = values["teacher_side"] and values["release"] != "0.6.0"
        away = {"gradients", *states} if is_moved else set()
    found = _made(
        values,
        own,
        model,
        tokens,
        micro_batches=megatron_trainer.micro_batches(rows, length, tokens, stages),
        loss=trained_loss(values, own, in_row, tokens),
        away=frozenset(away),
        away_to_send=frozenset(to_send),
        keeps_masters=not said["use_precision_aware_optimizer"],
    )
    scores: Parts = {}
    if values["asks"]:
        leave = {"gradients"}
        if shares or values["states_leave_for_logprobs"]:
            leave |= states
        meanwhile = replace(
            found,
            away_to_send=frozenset(leave),
            loss=asked_loss(own, asked, topk=False),
        )
        scores = megatron_memory.scoring(meanwhile, asked, "sync")
    last = found.pipeline - 1
    return found, scores, megatron_memory.resident(found, last, "sync")


def teacher(
    values: Values, own: Values, model: Model, gpus: int, tokens: int
) -> Beside:
    """The teacher: weights alone, without a wrapper (load_optimizer is False)."""
    values = {
        **values,
        "trainer_gpus": gpus,
        "train_tensor_parallel_size": own["tensor"],
        "context_parallel_size": own["context"],
        "offload_optimizer": None,
        "recompute": None,
    }
    loss = asked_loss(own, tokens, topk=True)
    made = _made(values, own, model, tokens, loss=loss)
    stages = range(made.pipeline)
    most = max(sum(megatron_memory.elements(made, stage)) for stage in stages)
    weights = {f"teacher's weights {made.compute}": WIDTHS[made.compute] * most}
    asked = megatron_memory.scoring(made, tokens)
    names = ("logits and loss", "activations")
    at_work = weights | {f"teacher's {name}": asked[name] for name in names}
    return Beside("teacher", {}, (("forward", at_work),), True, {}, 1)
