"""The parts of a NeMo-RL job, for its memory plan.

Rules are those of 0.6.0, 0.7.0 and the main branch at 7ea279ab (NVIDIA-NeMo/RL), files
are named below nemo_rl/. Policy, teacher and engine are separate processes. If they
share GPUs, only one of them is on these at a time: the engine sleeps (level 1) while
the policy works, the policy's states are offloaded before weights are sent, its weights
after that (algorithms/grpo.py, refit_policy_generation), and the teacher waits in host
memory except for its forward pass (algorithms/distillation.py). A reference model
replaces the policy's weights (workers' use_reference_model), and needs no GPU memory of
its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pytest_gkd.job import beside_memory, looking
from pytest_gkd.job.beside_memory import Beside, Scorer
from pytest_gkd.job.engine_memory import GIB, MOST_SEQUENCES, Engine, Parts
from pytest_gkd.job.findings import CheckError
from pytest_gkd.job.fitting import Recipe, number, sampling_engine
from pytest_gkd.job.frameworks.nemo_rl import megatron_plan, rules
from pytest_gkd.job.frameworks.nemo_rl.rules import GENERATION, VLLM, Look
from pytest_gkd.job.frameworks.reading import names
from pytest_gkd.job.megatron_memory import Megatron
from pytest_gkd.job.memory import CONTEXT_BYTES, Job
from pytest_gkd.job.models import WIDTHS, Model
from pytest_gkd.job.training_memory import Trainer, resident

Values = Mapping[str, Any]
ALGORITHMS = ("distillation", "grpo", "sft", "dpo")
# Weights are sent in buffers of a share of the free memory (_refit_buffer_size_gb) or,
# to engines elsewhere, in two of a share of the GPU (utils/packed_tensor.py), each
# concatenated from tensors that exist until then.
REFIT, PACKED, MOST_PACKED, COPIES = 0.3, 0.02, 5 * GIB, 4
# Bytes of logits per token and vocabulary entry in a forward pass without training,
# measured on the post-processors (models/automodel/train.py): 16 bits that FSDP2's
# output_dtype makes float32; these with their log-softmax, of all or of a chunk, and
# with a copy of several rows, or of what tensor parallelism divides.
TOPK, LOGPROBS, COPIED = 6, 8, 12
# Model settings whose effect on the memory is unknown, with the values that have none.
UNKNOWN: dict[str, tuple[str, tuple[Any, ...]]] = {
    "reward_model_cfg.enabled": ("a reward model's memory", (False,)),
    "draft.enabled": ("the memory of a draft model that is trained", (False,)),
}
UNKNOWN_DTENSOR: dict[str, tuple[str, tuple[Any, ...]]] = {
    "custom_parallel_plan": ("what a plan of one's own leaves on each rank", ()),
    "expert_parallel_size": ("the memory of experts in Automodel", (1,)),
    "automodel_kwargs.use_liger_kernel": ("what Liger's kernels keep", (False,)),
    "automodel_kwargs.backend": ("the memory of Automodel's own layers", ()),
    "automodel_kwargs.force_hf": ("the memory of Automodel's own layers", (True,)),
    "automodel_kwargs.attn_implementation": (
        "that attention's memory",
        ("sdpa", "flash_attention_2", "flash_attention_3"),
    ),
}
# Overrides of config.json that do not change a size.
HARMLESS_OVERRIDES = ("rope", "max_position", "router_aux", "sliding_window")
OPTIMIZERS = {"torch.optim.AdamW": "adamw", "torch.optim.Adam": "adamw"}


def recipe(look: Look, algorithm: str) -> Recipe:
    """How its plan is made, with NeMo-RL's keys."""
    facts = looking.plan_facts(_facts, look, algorithm)
    if "doubt" in facts:
        return without(facts["doubt"])
    backend = facts["backend"]
    table = names("nemo-rl") | names(f"nemo-rl-{backend}")
    bound = () if facts["shares"] or not facts["engine"] else ("nodes",)
    keys = {
        name: (key.format(algorithm=algorithm),)
        for name, key in table.items()
        if name not in bound and "|" not in key
    }
    if backend == "megatron":
        keys["recompute"] = ("policy.megatron_cfg.activation_checkpointing",)
    way = facts["way"]
    if way:
        keys["max_tokens_per_gpu"] = (f"policy.{way}.train_mb_tokens",)
    if facts["teacher_side"]:
        keys["teacher_tensor_parallel_size"] = (facts["teacher_side"]["tensor_key"],)
    return Recipe(_job, keys, facts)


def without(reason: str) -> Recipe:
    """The recipe of a job that cannot be planned; no teacher is read for it."""
    return Recipe(_job, {}, {"doubt": reason, "teacher_gpus": None})


def _facts(look: Look, algorithm: str) -> dict[str, Any]:
    """What the plan needs besides the values of ``gkd check``."""
    if algorithm not in ALGORITHMS:
        kind = algorithm or "a job without an algorithm"
        raise CheckError(f"the memory of NeMo-RL's {kind} is not known yet")
    if look.config.has("teachers"):
        raise CheckError("the memory of whole logits between tokenizers is not known")
    if look.is_on(f"{rules.OPD}.enabled"):
        raise CheckError(f"the memory of teachers of {rules.OPD} is not known yet")
    if look.is_on("loss_fn.zero_outside_topk"):
        raise CheckError("the memory of loss_fn.zero_outside_topk is not known")
    is_distillation = algorithm == "distillation"
    has_engine = algorithm in ("distillation", "grpo")
    if has_engine:
        _known_engine(look)
    length = look.size("policy.max_total_sequence_length")
    way = _way(look, "policy")
    own = _side(look, "policy")
    teacher = _side(look, "teacher") if is_distillation else None
    batch = look.size("policy.train_global_batch_size")
    return {
        "algorithm": algorithm,
        "backend": look.backend("policy"),
        "shares": has_engine and look.is_on(f"{GENERATION}.colocated.enabled"),
        "engine": _engine_facts(look) if has_engine else None,
        # The answer is included in the whole length.
        "max_prompt_length": None,
        "max_response_length": length,
        "length": length,
        "way": way,
        "max_tokens_per_gpu": own["train_tokens"],
        "pairs": 2 if algorithm == "dpo" else 1,
        "batch": batch,
        "policy": own,
        "teacher_side": teacher,
        "teacher_inside": teacher is not None,
        "asks": algorithm in ("grpo", "dpo"),
        "states_leave_for_logprobs": look.is_on("policy.offload_optimizer_for_logprob"),
    }


def _way(look: Look, section: str) -> str:
    """How a model's rows are put into micro-batches, "" for a fixed number of rows."""
    ways = ("dynamic_batching", "sequence_packing")
    return next((way for way in ways if look.is_on(f"{section}.{way}.enabled")), "")


def _known(look: Look, start: str, table: Mapping[str, tuple[str, Any]]) -> None:
    """Raises CheckError for settings whose effect on the memory is unknown."""
    for key, (text, harmless) in table.items():
        value = look(f"{start}.{key}")
        if value is not None and value not in harmless:
            raise CheckError(f"{text} is not known ({start}.{key})")


def _side(look: Look, section: str) -> dict[str, Any]:
    """A model of the trainer's workers: how it is sharded, and in what portions rows
    are processed (models/policy/lm_policy.py).
    """
    _known(look, section, UNKNOWN)
    overrides = look.mapping(f"{section}.hf_config_overrides")
    for key in overrides:
        if not str(key).startswith(HARMLESS_OVERRIDES):
            text = f"{section}.hf_config_overrides has {str(key)[:40]}"
            raise CheckError(f"the model's sizes are not those of its files: {text}")
    precision = str(look(f"{section}.precision"))
    if precision not in WIDTHS:
        raise CheckError(f"{section}.precision is {precision[:40]}")
    way = _way(look, section)
    train = look.size(f"{section}.{way}.train_mb_tokens") if way else None
    rows = look.size(f"{section}.train_micro_batch_size")
    backend = look.backend(section)
    tensor, _, context = look.parallel(section)
    found = {
        "backend": backend,
        "precision": precision,
        "way": way,
        "tensor": tensor,
        "context": context,
        "train_tokens": train,
        "logprob_tokens": look.size(f"{section}.{way}.logprob_mb_tokens", train)
        if way
        else None,
        "logprob_rows": look.size(f"{section}.logprob_batch_size", rows),
        "chunk": look(f"{section}.logprob_chunk_size"),
    }
    if backend == "megatron":
        key = f"{section}.megatron_cfg.tensor_model_parallel_size"
        return found | megatron_plan.side(look, section) | {"tensor_key": key}
    start = f"{section}.dtensor_cfg"
    _known(look, start, UNKNOWN_DTENSOR)
    return found | {
        "tensor_key": f"{start}.tensor_parallel_size",
        "worker": 2 if look.is_on(f"{start}._v2") else 1,
        "sequence": look.is_on(f"{start}.sequence_parallel"),
        "copies": look.size(f"{start}.dp_replicate_size", 1),
        "recomputes": look.is_on(f"{start}.activation_checkpointing"),
        "is_away": look.is_on(f"{start}.cpu_offload"),
        **(_optimizer(look) if section == "policy" else {}),
    }


def _optimizer(look: Look) -> dict[str, Any]:
    """The optimizer's kind, how it goes through the weights (torch chooses one by one
    for DTensors, optim/optimizer.py, _default_to_fused_or_foreach), and LoRA's
    matrices.
    """
    name = look("policy.optimizer.name")
    if name not in OPTIMIZERS:
        raise CheckError(f"the state of the optimizer {str(name)[:60]} is not known")
    is_set = [look.is_on(f"policy.optimizer.kwargs.{n}") for n in ("fused", "foreach")]
    step = "fused" if is_set[0] else "foreach" if is_set[1] else "single"
    rank, lora = rules.lora_rank(look), "policy.dtensor_cfg.lora_cfg"
    if rank and not look.is_on("policy.dtensor_cfg.activation_checkpointing"):
        raise CheckError("what LoRA's layers keep without recomputation is not known")
    if rank and not look(f"{lora}.match_all_linear", True):
        raise CheckError(f"which matrices LoRA has is not known ({lora})")
    return {"optimizer": OPTIMIZERS[name], "step": step}


def _known_engine(look: Look) -> None:
    """Raises CheckError for an engine whose memory is not known."""
    backend = look(f"{GENERATION}.backend")
    if backend != "vllm":
        raise CheckError(f"the memory of generation by {backend} is not known yet")
    if look(f"{VLLM}.precision") not in WIDTHS or look(f"{VLLM}.precision") == "fp8":
        raise CheckError(f"{VLLM}.precision is {look(f'{VLLM}.precision')}")
    if look(f"{GENERATION}.vllm_kwargs.speculative_config"):
        raise CheckError("the memory of speculative decoding is not known")
    top_k = look(f"{GENERATION}.top_k")
    if look.number(f"{GENERATION}.top_p", 1.0) != 1 or top_k not in (None, -1):
        text = "what filters of the sampling take in training is not known"
        raise CheckError(f"{text} ({GENERATION}.top_p and top_k)")


def _engine_facts(look: Look) -> dict[str, Any]:
    cache = str(look(f"{VLLM}.kv_cache_dtype", "auto"))
    kwargs = f"{GENERATION}.vllm_kwargs"
    return {
        "dtype": str(look(f"{VLLM}.precision")),
        "cache": "fp8" if cache.startswith("fp8") else "bfloat16",
        "sequences": look.size(f"{kwargs}.max_num_seqs", MOST_SEQUENCES),
        "batched": look.size(f"{kwargs}.max_num_batched_tokens", 8192),
        "eager": look.is_on(f"{VLLM}.enforce_eager"),
    }


def _job(
    values: Values, student: Model, teacher: Model | None, room: int | None
) -> Job:
    """The parts of a job, at full lengths."""
    if values.get("doubt"):
        raise CheckError(values["doubt"])
    own = {**values["policy"]}
    own["tensor"] = values.get("train_tensor_parallel_size") or 1
    own["context"] = values.get("context_parallel_size") or 1
    gpus = number(values, "trainer_gpus")[0]
    rollout = _engine(values, student) if values["engine"] else None
    others: tuple[Beside, ...] = ()
    if values["teacher_side"] and teacher:
        side = {**values["teacher_side"]}
        side["tensor"] = values.get("teacher_tensor_parallel_size") or 1
        others = (_teacher(values, side, teacher, gpus),)
    trainer: Trainer | Megatron
    if own["backend"] == "megatron":
        trainer, scores, held = megatron_plan.trainer(
            *(values, own, student),
            *(portion(values, own, "train"), _asked_tokens(values, own)),
        )
    else:
        trainer = _trainer(values, own, student, gpus)
        scores = _scores(values, own, trainer) if values["asks"] else {}
        held = resident(trainer, "sync")
    return Job(
        trainer,
        rollout,
        colocated=values["shares"],
        memory=room,
        bucket=_bucket(values, student, rollout, held, room, len(others)),
        scores=scores,
        others=others,
    )


def _bucket(
    values: Values,
    student: Model,
    rollout: Engine | None,
    held: Parts,
    room: int | None,
    others: int,
) -> int:
    """Bytes of the buffers that weights are sent in; if the GPU is unknown, of one with
    the largest tensor.
    """
    least = student.largest * WIDTHS[values["policy"]["precision"]]
    if rollout is None or room is None:
        return least
    if not values["shares"]:
        return COPIES * max(min(int(room * PACKED), MOST_PACKED), least)
    taken = sum(held.values()) + (2 + others) * CONTEXT_BYTES
    taken += math.ceil(student.loaded_bytes(rollout.dtype) / rollout.tensor)
    return max(int((room - taken) * REFIT), least)


def portion(values: Values, own: Values, kind: str, rows: int | None = None) -> int:
    """The most tokens of a micro-batch: at least those of the longest row.

    distributed/batched_data_dict.py, shard_by_batch_size; DTensor's packed rows are
    padded to the tokens of training, whatever their use (models/automodel/data.py).
    """
    length: int = values["length"]
    most: int = own[f"{kind}_tokens"] or 0
    if kind == "train" and values.get("max_tokens_per_gpu") and rows is None:
        most = values["max_tokens_per_gpu"]
    if own["way"] == "sequence_packing" and own["backend"] == "dtensor":
        most = max(most, own["train_tokens"])
    if own["way"]:
        return max(most, length)
    if kind == "train":
        each = number(values, "micro_batch_size")[0]
    else:
        each = own["logprob_rows"] if rows is None else rows
    pairs: int = values["pairs"]
    return each * length * pairs


def _trainer(values: Values, own: Values, student: Model, gpus: int) -> Trainer:
    """The policy of a DTensor worker, always of float32 weights (models/automodel/
    setup.py; workers/dtensor_policy_worker.py).

    The second worker's Automodel (24b47e85, components/distributed/parallelizer.py)
    recomputes layers of transformers' models whole, and wraps nothing on one GPU
    (fsdp2.py). Since 0.7.0 it prefetches two layers in a backward pass, and the next
    one in each forward pass: in a recomputed one that layer is already done, and stays
    until the backward pass ends (torch, _fsdp_param_group.py, finalize_backward). The
    first worker recomputes norms, attention and MLP one by one.
    """
    _divides(own, student, gpus)
    is_plain = own["worker"] == 2 and gpus == 1
    is_away = bool(values.get("offload_param") or values.get("offload_optimizer"))
    is_away = is_away and not is_plain
    shares = values["shares"]
    states = "between" if shares else "never"
    if values["teacher_side"] and not shares and values["release"] != "0.6.0":
        states = "idle"
    tokens = portion(values, own, "train")
    replicas = max(gpus // (own["tensor"] * own["context"]), 1)
    rows = max(values["batch"] * values["pairs"] // replicas, 1)
    if own["way"] != "sequence_packing":
        tokens = min(tokens, rows * values["length"])
    recompute = bool(values.get("recompute", own["recomputes"]))
    by_parts = own["worker"] == 1 and recompute
    if by_parts and student.kind.startswith(("gemma", "olmo")):
        raise CheckError("what norms keep that are not recomputed is not known")
    shards = gpus // own["tensor"] // own["copies"]
    fetched = 2
    if own["worker"] == 2 and shards > 1 and values["release"] != "0.6.0":
        fetched = len(student.layers) if recompute else 3
    packed = "packed-" * (own["way"] == "sequence_packing")
    kind = "topk" if values["algorithm"] == "distillation" else "logprob"
    return Trainer(
        student,
        gpus=gpus,
        sharding="ddp" if is_plain else "fsdp2",
        shards=shards,
        tensor=own["tensor"],
        sequence=own["sequence"],
        context=own["context"],
        compute=own["precision"],
        optimizer=own["optimizer"],
        step=own["step"],
        offload_weights="always" if is_away else "between" if shares else "never",
        offload_states="always" if is_away else states,
        fetches=is_away,
        fetched=fetched,
        recompute=recompute,
        inputs=4 if by_parts else 1,
        tokens=tokens,
        micro_batches=1 + (rows * values["length"] > tokens),
        row=_row(values, own),
        loss=f"nemo-{packed}{kind}",
        lora_rank=values.get("lora_rank") or 0,
    )


def _divides(own: Values, model: Model, gpus: int) -> None:
    """Raises CheckError if a model is not sharded like this, or its memory is not
    known.
    """
    tensor, context = own["tensor"], own["context"]
    if gpus % (tensor * context):
        raise CheckError(f"{gpus} GPUs are no multiple of {tensor} * {context}")
    if context > 1 and (own["way"] == "sequence_packing" or own["sequence"]):
        raise CheckError(
            "DTensor's context parallelism takes neither packed rows nor "
            "sequence parallelism"
        )
    has_experts = any(layer.shape.count for layer in model.layers)
    if has_experts and (own["worker"] == 2 or tensor > 1):
        raise CheckError("the memory of experts in Automodel is not known yet")
    shape = model.layers[0].shape
    if shape.heads % tensor or (shape.keys * shape.heads) % (shape.queries * tensor):
        raise CheckError(f"the model's heads are no multiple of {tensor}")


def logprob_bytes(own: Values, tokens: int, rows: int) -> float:
    """Bytes of logits per token and vocabulary entry when log-probabilities are
    computed; with chunks, the first worker concatenates the log-softmax of all
    (workers/dtensor_policy_worker.py, get_logprobs).
    """
    is_divided = own["tensor"] > 1 or own["context"] > 1
    if own["chunk"] and (is_divided or own["worker"] == 2):
        share: float = min(1, own["chunk"] * own["context"] * rows / tokens)
        return max(TOPK, 4 + (COPIED - 4) * share)
    if own["worker"] == 1 and not is_divided:
        return COPIED if own["chunk"] else LOGPROBS
    return COPIED if is_divided or rows > 1 else LOGPROBS


def _asked_tokens(values: Values, own: Values) -> int:
    """Tokens of a micro-batch whose log-probabilities are computed: for DPO in
    micro-batches as large as in training (algorithms/dpo.py).
    """
    if values["algorithm"] != "dpo":
        return portion(values, own, "logprob")
    return portion(values, own, "logprob", number(values, "micro_batch_size")[0])


def _scores(values: Values, own: Values, trainer: Trainer) -> Parts:
    """Log-probabilities of the policy, or of the reference model in its place."""
    tokens = _asked_tokens(values, own)
    in_it = max(tokens // values["length"], 1)
    if values["states_leave_for_logprobs"]:
        trainer = replace(trainer, offload_states="between")
    return beside_memory.asked(
        trainer,
        math.ceil(tokens / own["context"]),
        logprob_bytes(own, tokens, 1 if own["way"] == "sequence_packing" else in_it),
        unshards=own["worker"] == 1,
    )


def _teacher(values: Values, own: Values, teacher: Model, gpus: int) -> Beside:
    """The teacher, on the trainer's GPUs (algorithms/distillation.py, setup)."""
    if own["backend"] == "megatron":
        tokens = portion(values, own, "logprob")
        return megatron_plan.teacher(values, own, teacher, gpus, tokens)
    _divides(own, teacher, gpus)
    is_plain = own["worker"] == 2 and gpus == 1
    scorer = Scorer(
        "teacher",
        teacher,
        math.ceil(portion(values, own, "logprob") / own["context"]),
        gpus // own["tensor"] // own["copies"],
        tensor=own["tensor"],
        dtype="float32",
        compute=own["precision"],
        logits=TOPK,
        offload="always" if own["is_away"] else "between",
        live=teacher.elements if is_plain else 0,
        unshards=own["worker"] == 1,
        row=_row(values, own),
    )
    return beside_memory.scored(scorer, shares=True)


def _row(values: Values, own: Values) -> int:
    """The length of a row whose attention may be PyTorch's: a batch's mask is all ones
    (models/automodel/data.py); flash-attn has packed rows, and context parallelism its
    own kernels.
    """
    is_packed = own["way"] == "sequence_packing"
    return 0 if is_packed or own["context"] > 1 else int(values["length"])


def _engine(values: Values, student: Model) -> Engine:
    """vLLM engines, which sleep if they share GPUs (models/generation/vllm/
    vllm_generation.py, finish_generation).
    """
    said = values["engine"]
    return sampling_engine(
        values,
        student,
        values["length"],
        share=0.9,
        sequences=said["sequences"],
        batched_tokens=said["batched"],
        dtype=said["dtype"],
        cache_dtype=said["cache"],
        sleeps=values["shares"],
        eager=said["eager"],
    )
