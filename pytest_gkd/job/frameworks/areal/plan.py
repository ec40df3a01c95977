"""The parts of an AReaL job under FSDP, RL or SFT, for its memory plan.

Rules are those of 1.0.4 and of the main branch at 4aef98d8; files are named below
areal/. SFT takes the same log-probabilities and entropies (engine/fsdp_engine.py,
_compute_logprobs_and_loss).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pytest_gkd.job import beside_memory, looking
from pytest_gkd.job.beside_memory import Beside, Scorer
from pytest_gkd.job.engine_memory import GIB, MOST_SEQUENCES, Engine
from pytest_gkd.job.findings import CheckError
from pytest_gkd.job.fitting import Recipe, number
from pytest_gkd.job.frameworks.areal.rules import Look
from pytest_gkd.job.frameworks.reading import names
from pytest_gkd.job.memory import Job
from pytest_gkd.job.models import WIDTHS, Model
from pytest_gkd.job.training_memory import Trainer

Values = Mapping[str, Any]
SFT = "SFTConfig"  # the root of its configuration
# Bytes of logits per token and vocabulary entry in a forward pass without training.
ASKED = 2
# Bytes of a chunk of weights sent (api/io_struct.py, weight_chunked_mem_mb).
BUCKET = GIB
# Model settings whose effect on the memory is unknown.
UNKNOWN = {
    "enable_tree_training": "the memory of tree training",
    "use_lora": "LoRA's dtypes under FSDP",
    "use_kernels": "what the hub's kernels keep",
    "fsdp.per_layer_optim_step": "the memory of an optimizer step by layers",
}


def recipe(look: Look) -> Recipe:
    """How its plan is made, with AReaL's keys."""
    facts = looking.plan_facts(_facts, look)
    if "doubt" in facts:
        return Recipe(_job, {}, facts)
    table = names("areal") | names("areal-fsdp")
    bound = ["nodes", "gpus_per_node"]
    if facts["engine"]:
        table |= names(f"areal-{facts['engine']}")
    elif not facts["length"]:  # a row longer than that ends the job
        bound += ["max_tokens_per_gpu"]
    keys = {name: (f"++{key}",) for name, key in table.items() if name not in bound}
    roles = {role: facts["paths"][role] for role in facts["scorers"]}
    return Recipe(_job, keys, facts, roles)


def _facts(look: Look) -> dict[str, Any]:
    """What the plan needs besides the values of ``gkd check``."""
    roles = look.roles()
    if "critic" in roles:
        raise CheckError("the memory of AReaL's critic is not known yet")
    scorers = [role for role in ("ref", "teacher") if role in roles]
    for role in ("actor", *scorers):
        _known(look, role)
    optimizer = look("actor.optimizer.type", "adam")
    if optimizer != "adam":
        raise CheckError(f"the state of the optimizer {optimizer} is not known")
    found = {
        "scorers": {role: _scorer(look, role) for role in scorers},
        "paths": {role: look(f"{role}.path") for role in scorers},
        "dtype": str(look("actor.dtype", "bfloat16")),
        "reduce": str(look("actor.grad_reduce_dtype", "float32")),
        "gpus": look.backend("actor").gpus,
        "context": look.backend("actor").context,
        "parts": look.size("actor.mb_spec.n_mbs", 1),
        "leaves": look.shares() or look.is_on("actor.offload"),
        "recomputes": look.is_on("actor.gradient_checkpointing"),
    }
    if "rollout" not in roles:
        kind = look("train_dataset.type", "sft")
        if look.root != SFT or kind != "sft" or look.is_on("actor.is_critic"):
            text = "the memory of AReaL without a rollout is known for SFT alone"
            raise CheckError(text)
        return found | {"engine": None, "length": look("train_dataset.max_length")}
    engine = look.backend("rollout")
    return found | {
        "engine": engine.kind,
        "engine_sizes": (engine.tensor, engine.pipeline),
        "minibatches": look.size("actor.ppo_n_minibatches", 4),
        "shares": look.shares(),
        "prefill": _prefill(look, engine.kind),
    }


def _known(look: Look, role: str) -> None:
    """Raises CheckError for a model whose memory is not known."""
    backend = look.backend(role)
    if backend.kind != "fsdp":
        text = f"the memory of AReaL's {role} under {backend.kind} is not known yet"
        raise CheckError(text)
    if backend.tensor > 1:
        raise CheckError(f"tensor parallelism under FSDP is not known yet ({role})")
    if look(f"{role}.attn_impl", "flash_attention_2") == "eager":
        raise CheckError("the memory of eager attention is not known")
    for key, text in UNKNOWN.items():
        if look.is_on(f"{role}.{key}"):
            raise CheckError(f"{text} is not known ({role}.{key})")


def _scorer(look: Look, role: str) -> dict[str, Any]:
    """A model that computes log-probabilities, and where it is."""
    backend = look.backend(role)
    away = look.is_on(f"{role}.fsdp.offload_params")
    return {
        "gpus": backend.gpus,
        "context": backend.context,
        "dtype": str(look(f"{role}.dtype", "bfloat16")),
        "most": look(f"{role}.mb_spec.max_tokens_per_mb"),
        "offload": "always"
        if away
        else "between"
        if look.is_on(f"{role}.offload")
        else "never",
        "shares": look.target(role) == "actor",
    }


def _prefill(look: Look, engine: str) -> int:
    """Tokens that an engine processes at once."""
    if engine == "vllm":
        return 8192
    chunk = look.whole("sglang.chunked_prefill_size", -1)
    return chunk if chunk > 0 else look.size("sglang.max_prefill_tokens", 32_768)


def _job(
    values: Values, student: Model, teacher: Model | None, room: int | None
) -> Job:
    """The parts of a job, at full lengths."""
    if values.get("doubt"):
        raise CheckError(values["doubt"])
    if not values["engine"]:
        return Job(_offline(values, student), memory=room)
    prompt, answer = number(values, "max_prompt_length", "max_response_length")
    row = prompt + answer
    batch, samples = number(values, "train_batch_size", "samples_per_prompt")
    rows = math.ceil(batch * samples / _replicas(values))
    trained = math.ceil(rows / values["minibatches"])
    # utils/data.py, split_padded_tensor_dict_into_mb_list: without a bound on tokens
    # there are n_mbs micro-batches.
    most = values.get("max_tokens_per_gpu")
    parts = values["parts"]
    tokens = max(most, row) if most else math.ceil(trained / parts) * row
    asked = max(most, row) if most else math.ceil(rows / parts) * row
    trainer = _trainer(values, student, tokens, several=trained * row > tokens)
    tensor, pipeline = values["engine_sizes"]
    engines = number(values, "rollout_gpus")[0] // (tensor * pipeline)
    at_once = math.ceil(batch * samples / max(engines, 1))
    engine = Engine(
        student,
        gpus=number(values, "rollout_gpus")[0],
        tensor=tensor,
        pipeline=pipeline,
        share=values.get("gpu_memory_utilization") or 0.9,
        length=values.get("max_model_len") or row,
        sequences=min(values.get("max_num_seqs") or MOST_SEQUENCES, at_once),
        batched_tokens=values["prefill"],
        sleeps=values["shares"],
        eager=bool(values.get("enforce_eager")),
        kind=values["engine"],
    )
    return Job(
        trainer,
        engine,
        colocated=values["shares"],
        memory=room,
        bucket=BUCKET,
        scores=beside_memory.asked(
            trainer, math.ceil(asked / values["context"]), ASKED
        ),
        others=tuple(_others(values, batch * samples, row)),
    )


def _replicas(values: Values) -> int:
    replicas: int = max(values["gpus"] // values["context"], 1)
    return replicas


def _offline(values: Values, student: Model) -> Trainer:
    """SFT's trainer: a row that is longer than a micro-batch ends the job
    (utils/seqpack.py, ffd_allocate).
    """
    rows = math.ceil(number(values, "train_batch_size")[0] / _replicas(values))
    most = values.get("max_tokens_per_gpu")
    row = values.get("max_prompt_length") or most
    if not row:
        raise CheckError(
            "nothing bounds the rows (train_dataset.max_length, "
            "actor.mb_spec.max_tokens_per_mb)"
        )
    tokens = most or math.ceil(rows / values["parts"]) * row
    tokens = min(tokens, rows * row)
    return _trainer(values, student, tokens, several=rows * row > tokens)


def _trainer(values: Values, student: Model, tokens: int, *, several: bool) -> Trainer:
    """The actor, in one or ``several`` micro-batches of ``tokens``."""
    for name in ("dtype", "reduce"):
        if values[name] not in WIDTHS:
            raise CheckError(f"actor.{name} is {values[name][:40]}")
    leaves = "between" if values["leaves"] else "never"
    leaves = "always" if values.get("offload_param") else leaves
    return Trainer(
        student,
        gpus=values["gpus"],
        sharding="fsdp2",
        apart=("embedding",),
        context=values["context"],
        weights=values["dtype"],
        compute=values["dtype"],
        step="fused",
        offload_weights=leaves,
        offload_states=leaves,
        recompute=bool(values.get("recompute", values["recomputes"])),
        tokens=tokens,
        micro_batches=1 + several,
        reduce=values["reduce"],
        loss="areal",
    )


def _others(values: Values, samples: int, row: int) -> list[Beside]:
    """Reference and teacher, which are separate engines (trainer/rl_trainer.py)."""
    found = []
    for role, own in values["scorers"].items():
        replicas = max(own["gpus"] // own["context"], 1)
        most = own["most"]
        whole = math.ceil(samples / replicas) * row
        tokens = max(most, row) if isinstance(most, int) else whole
        scorer = Scorer(
            "reference" if role == "ref" else role,
            values["models"][role],
            math.ceil(tokens / own["context"]),
            own["gpus"],
            dtype=own["dtype"],
            compute=own["dtype"],
            logits=ASKED,
            offload=own["offload"],
        )
        found.append(beside_memory.scored(scorer, shares=own["shares"]))
    return found
