"""What each GPU of a job must hold in each of its phases, in bytes.

Every part is counted by a function that names where its formula is from. A phase takes
the worst of its moments; moments are not added up, since what one needs is gone in the
next.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from pytest_gkd.job import engine_memory
from pytest_gkd.job.engine_memory import GIB, Engine, Parts
from pytest_gkd.job.models import WIDTHS, Layer, Model

# A process's CUDA context with the kernels that it loads: 0.3 to 0.6 GiB as a rule.
CONTEXT = "CUDA context"
CONTEXT_BYTES = GIB // 2
# Buffers of NCCL's communicators, and what the caching allocator cannot give again.
# Estimates: no GPU was there to measure them.
RESERVE = "NCCL and fragmentation"
RESERVE_BYTES = GIB
# A plan that leaves less than this part of the memory free is tight: the aim is to be
# wrong by no more.
TIGHT = 0.1
# Of each sharding: whether weights, gradients and optimizer state are divided among
# the ranks (ZeRO, arXiv 1910.02054, section 5; torch's FSDP notes; Megatron-LM's
# docs on its distributed optimizer).
SHARDED = {
    "ddp": (False, False, False),
    "zero1": (False, False, True),
    "zero2": (False, True, True),
    "zero3": (True, True, True),
    "fsdp": (True, True, True),
    "fsdp2": (True, True, True),
    "megatron": (False, False, False),
    "megatron-distributed": (False, False, True),
}
# Bytes of optimizer state for an element of trained weights of so many bytes.
STATES = {"adamw": 2, "sgd": 1, "sgd-plain": 0}
# What a loss holds at its worst moment, forward or backward, for each token and entry
# of the vocabulary, the logits among it: (values in the logits' dtype, bytes in
# float32). Measured on the frameworks' own functions with random logits by torch's
# profiler (on a CPU, with the casts that CUDA's autocast makes):
# - topk: verl's compute_forward_kl_topk (trainer/distillation/fsdp/losses.py, after
#   0.9.1); the logits are divided by the temperature first
# - jsd-BETA: TRL's GKDTrainer.generalized_jsd_loss (1.x) on the float32 logits that
#   accelerate's mixed precision returns, the teacher's among them; 0, 1, or between
# - logprob: logits, their copy by the temperature, and flash-attn's cross entropy that
#   turns it into its own gradient (verl, utils/torch_functional.py)
# - fused: logits are never whole (liger, verl's fused kernels)
# - own-topk, own-jsd: pytest_gkd.workload.gkd.loss, the teacher's among them
LOSSES = {
    "topk": (2, 8),
    "jsd-0": (0, 36),
    "jsd-1": (0, 40),
    "jsd": (0, 68),
    "logprob": (2, 0),
    "fused": (0, 0),
    "own-topk": (1, 20),
    "own-jsd": (2, 43),
}


@dataclass(frozen=True)
class Trainer:
    """What the trainer's memory depends on; ``tokens`` are those of a micro-batch on a
    rank, padding included, before ``context`` parallelism divides them.

    ``weights`` is the dtype that is updated, ``compute`` that of the forward pass.
    ``shards`` is the ranks that share one copy, 0 for all. ``offload_weights`` and
    ``offload_states`` say when these are in host memory: "never", "between" phases that
    need them (verl), or "always" (FSDP2's CPUOffloadPolicy, ZeRO-Offload). ``keeps``
    says that gradients stay whole on each rank until the last micro-batch.
    """

    model: Model
    gpus: int = 1
    sharding: str = "fsdp"
    shards: int = 0
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    weights: str = "float32"
    compute: str = "bfloat16"
    optimizer: str = "adamw"
    foreach: bool = True
    offload_weights: str = "never"
    offload_states: str = "never"
    recompute: bool = True
    tokens: int = 0
    micro_batches: int = 1
    keeps: bool = False
    loss: str = "topk"
    lora_rank: int = 0
    teacher: Model | None = None

    @property
    def is_mixed(self) -> bool:
        """Whether float32 copies stand beside 16-bit weights: DeepSpeed, Megatron."""
        own = self.sharding.startswith(("zero", "megatron"))
        return own and WIDTHS[self.compute] == 2

    @property
    def split(self) -> int:
        """Ranks that tensor and pipeline parallelism divide the model among."""
        return self.tensor * self.pipeline

    @property
    def ranks(self) -> int:
        """Ranks among which what is sharded is divided."""
        whole = self.gpus // self.split
        return min(self.shards or whole, whole) or 1

    @property
    def trained(self) -> int:
        """Elements that are trained, of a rank's part of the model.

        LoRA's two matrices beside each of the layers' (arXiv 2106.09685, section 4.1).
        """
        own = self.lora_rank * self.model.matrices or self.model.elements
        return math.ceil(own / self.split)


@dataclass(frozen=True)
class Job:
    """Who is there. ``memory`` is that of each GPU in bytes, None where unknown;
    ``bucket`` the bytes that weights are sent in."""

    trainer: Trainer
    rollout: Engine | None = None
    teacher: Engine | None = None
    colocated: bool = True
    memory: int | None = None
    bucket: int = 2 * GIB


@dataclass(frozen=True)
class Row:
    """A role in a phase on one GPU. ``verdict`` is "fits", "tight" or "does-not-fit",
    None where ``available`` is unknown."""

    role: str
    phase: str
    bytes: Parts
    total: int
    available: int | None
    verdict: str | None


def plan(job: Job) -> list[Row]:
    """Every role and phase of a job on the fullest of its GPUs."""
    trainer, rollout = job.trainer, job.rollout
    shared = job.colocated and rollout is not None
    role = "trainer+rollout" if shared else "trainer"
    idle = resident(trainer, "idle")
    beside = engine_memory.beside(rollout, job.memory) if shared and rollout else {}
    found = [_row(job, role, "load", _sum(resident(trainer, "load"), beside))]
    if rollout:
        parts = _sum(idle if shared else {}, engine_memory.serving(rollout, job.memory))
        found += _shares(job, "rollout", rollout)
        found.append(_row(job, role if shared else "rollout", "rollout", parts))
    if job.teacher:
        found += _shares(job, "teacher", job.teacher)
        parts = engine_memory.serving(job.teacher, job.memory)
        found.append(_row(job, "teacher", "teacher forward", parts))
    moments = [_sum(moment, beside) for moment in updates(trainer)]
    worst = max(moments, key=lambda parts: sum(parts.values()))
    found.append(_row(job, role, "forward and backward", worst))
    parts = _sum(resident(trainer, "step"), stepping(trainer), beside)
    found.append(_row(job, role, "optimizer step", parts))
    if rollout:
        sent = sending(trainer, job.bucket)
        if shared:
            woken = {
                "engine's weights " + rollout.dtype: engine_memory.weights(rollout)
            }
            sent = _sum(sent, woken if rollout.sleeps else beside)
        found.append(_row(job, role, "weight sync", sent))
    saved = _sum(resident(trainer, "save"), gathered_tensor(trainer), beside)
    found.append(_row(job, role, "checkpoint", saved))
    return found


def _row(job: Job, role: str, phase: str, parts: Parts) -> Row:
    processes = 1 + (role == "trainer+rollout")
    parts = {name: size for name, size in parts.items() if size}
    parts |= {CONTEXT: processes * CONTEXT_BYTES, RESERVE: RESERVE_BYTES}
    return judged(role, phase, parts, job.memory)


def judged(role: str, phase: str, parts: Parts, available: int | None) -> Row:
    """The row with its sum and verdict."""
    total, verdict = sum(parts.values()), None
    if available is not None:
        roomy = total <= available * (1 - TIGHT)
        verdict = "fits" if roomy else "tight"
        verdict = verdict if total <= available else "does-not-fit"
    return Row(role, phase, parts, total, available, verdict)


def _shares(job: Job, role: str, engine: Engine) -> Iterator[Row]:
    """Whether the engine's share holds one sequence: without it vLLM does not start."""
    if job.memory is None:
        return
    cache = engine_memory.one_cache(engine)
    parts = {
        f"engine's weights {engine.dtype}": engine_memory.weights(engine),
        "engine's activations": engine_memory.working(engine),
        f"KV cache {engine.cache_dtype} of one sequence": cache,
    }
    yield judged(role, "engine start", parts, int(engine.share * job.memory))


def _sum(*several: Parts) -> Parts:
    found: Parts = {}
    for parts in several:
        for name, size in parts.items():
            found[name] = found.get(name, 0) + size
    return found


# -- trainer -----------------------------------------------------------------------


def resident(trainer: Trainer, phase: str) -> Parts:
    """Weights, gradients, optimizer state and master copies of a rank in a phase.

    Bytes an element, before sharding: weights 4, or 2 in DeepSpeed and Megatron beside
    4 of master copies; gradients as the weights (FSDP reduces to the dtype of the
    sharded weights; Megatron adds up in 4); AdamW's moments twice the updated dtype.
    ZeRO, arXiv 1910.02054, section 3.1; torch, _fsdp_param.py and adamw.py;
    Megatron-LM, docs on the distributed optimizer: 18 bytes, or 6 + 12 / ranks. verl's
    offload moves all of it back for the update (workers/engine/base.py, BaseEngineCtx),
    so that it lowers other phases only.
    """
    by_weights, by_gradients, by_states = SHARDED[trainer.sharding]
    whole = math.ceil(trainer.model.elements / trainer.split)
    compute = trainer.compute
    kept = compute if trainer.is_mixed else trainer.weights
    is_updating = phase in ("update", "step")
    needs_weights = is_updating or phase in ("load", "save", "sync")
    found: Parts = {}

    def add(name: str, size: int, sharded: bool) -> None:
        found[name] = math.ceil(size / trainer.ranks) if sharded else size

    if trainer.offload_weights == "never" or (
        trainer.offload_weights == "between" and needs_weights
    ):
        add(f"weights {kept}", whole * WIDTHS[kept], by_weights)
        if is_updating:
            dtype = "float32" if "megatron" in trainer.sharding else kept
            add(f"gradients {dtype}", trainer.trained * WIDTHS[dtype], by_gradients)
    if phase != "load" and (
        trainer.offload_states == "never"
        or (trainer.offload_states == "between" and is_updating)
    ):
        updated = "float32" if trainer.is_mixed else trainer.weights
        states = STATES[trainer.optimizer] * WIDTHS[updated] * trainer.trained
        add(f"optimizer states {updated}", states, by_states)
        if trainer.is_mixed:
            add("master copies float32", 4 * trainer.trained, by_states)
    if trainer.teacher:
        dtype = trainer.compute
        found[f"teacher's weights {dtype}"] = trainer.teacher.loaded_bytes(dtype)
    return found


def gathered(trainer: Trainer) -> Parts:
    """Weights that are whole on each rank while a layer of theirs is worked on.

    Two layers (the next is fetched while one computes) and what belongs to no layer,
    which stays from forward to backward (torch, distributed/fsdp notes on
    limit_all_gathers, and the root of fully_shard); ZeRO-3 alike.
    """
    if not SHARDED[trainer.sharding][0] or trainer.ranks == 1:
        return {}
    width = WIDTHS[trainer.compute]
    model = trainer.model
    layer = _largest(trainer).elements
    rest = model.elements - sum(layer.elements for layer in model.layers)
    return {f"gathered weights {trainer.compute}": (2 * layer + rest) * width}


def whole_gradients(trainer: Trainer) -> Parts:
    """Gradients that are not sharded yet.

    One layer's in the dtype of computing and once more in float32, to be reduced. With
    ``keeps`` all of the model: FSDP1's no_sync adds up in the dtype of computing,
    FSDP2's set_requires_gradient_sync(False) in that of the reduction, float32 (torch,
    _fsdp_param.py, to_accumulated_grad_if_needed; verl since 0.9.0,
    FSDPEngine._gradient_sync_context).
    """
    if not SHARDED[trainer.sharding][1] or trainer.ranks == 1:
        return {}
    width = WIDTHS[trainer.compute]
    share = trainer.trained / trainer.model.elements
    layer = int(_largest(trainer).elements * share)
    found = {f"a layer's gradients {trainer.compute}": layer * (width + 4)}
    if trainer.keeps and trainer.micro_batches > 1:
        dtype = "float32" if trainer.sharding == "fsdp2" else trainer.compute
        found[f"unsharded gradients {dtype}"] = trainer.trained * WIDTHS[dtype]
    return found


def layer_bytes(trainer: Trainer, layer: Layer) -> int:
    """What a layer keeps for its backward pass, on one rank.

    ``Layer`` has the counts; sequence parallelism divides all of it by the tensor
    parallel size (arXiv 2205.05198, section 4.2.2), Ulysses and context parallelism
    by theirs.
    """
    tokens = _tokens(trainer)
    kept = layer.items * WIDTHS[trainer.compute] + layer.floats * 4
    return math.ceil(tokens * kept / trainer.tensor)


def checkpoint_bytes(trainer: Trainer) -> int:
    """What a recomputed layer keeps: its input (torch.utils.checkpoint)."""
    width = trainer.model.width * WIDTHS[trainer.compute]
    return math.ceil(_tokens(trainer) * width / trainer.tensor)


def kept(trainer: Trainer) -> int:
    """What all layers, the final norm and the output matrix keep until the backward
    pass, on one rank."""
    layers = trainer.model.layers
    if trainer.recompute:
        body = len(layers) * checkpoint_bytes(trainer)
    else:
        body = sum(layer_bytes(trainer, layer) for layer in layers)
    return body + layer_bytes(trainer, trainer.model.end)


def updates(trainer: Trainer) -> Iterator[Parts]:
    """What is there at each moment of an update that can be its worst.

    In the loss all layers' activations and the logits; then the backward pass of the
    output matrix, of the last layer, whose activations are whole (again), and of the
    first, when all gradients are there. A pipeline's first stage keeps those of as many
    micro-batches as it has stages (arXiv 2104.04473, section 2.2), which is its part of
    the layers times these.
    """
    model, compute = trainer.model, trainer.compute
    tokens, width = _tokens(trainer), WIDTHS[compute]
    held = {**resident(trainer, "update")}
    gradients = {name: size for name, size in held.items() if "gradients" in name}
    # Without accumulation they come one by one, but for buffers that are made before.
    if trainer.micro_batches == 1 and trainer.sharding not in (
        *("zero1", "zero2", "zero3", "megatron", "megatron-distributed"),
    ):
        for name in gradients:
            del held[name]
    held = _sum(held, gathered(trainer))
    whole = {**whole_gradients(trainer)}
    unsharded = {n: whole.pop(n) for n in [*whole] if n.startswith("unsharded")}
    each = [
        checkpoint_bytes(trainer) if trainer.recompute else layer_bytes(trainer, layer)
        for layer in model.layers
    ]
    activations = f"activations {compute}"
    vocab = math.ceil(model.vocab / trainer.tensor)
    items, floats = LOSSES[trainer.loss]
    logits = tokens * vocab * (items * width + floats)
    yield _sum(held, unsharded, {activations: kept(trainer), "logits and loss": logits})
    head = (model.head or model.embedding) // trainer.tensor
    is_trained = not trainer.lora_rank
    one = {f"a matrix's gradient {compute}": head * width * is_trained}
    raw = width if trainer.loss.startswith(("topk", "logprob")) else 4
    dlogits = 0 if trainer.loss == "fused" else tokens * vocab * raw
    yield _sum(
        held,
        unsharded,
        one,
        {activations: kept(trainer), "logits' gradient": dlogits},
    )
    layer = _largest(trainer)
    again = layer_bytes(trainer, layer) if trainer.recompute else 0
    inner = 2 * (layer.inner + model.width) * width
    working = {
        activations: math.ceil(tokens * inner / trainer.tensor) + again,
    }
    yield _sum(held, unsharded, one, whole, working, {activations: sum(each)})
    yield _sum(held | gradients, unsharded, whole, working, {activations: each[0]})


def stepping(trainer: Trainer) -> Parts:
    """What AdamW takes for a moment: a root of the second moment of all weights at once
    (torch, optim/adam.py, _multi_tensor_adam), or of one without ``foreach``; ZeRO and
    Megatron work on float32 copies of the gradients (DeepSpeed, stage_1_and_2.py).
    """
    if trainer.offload_states == "always":
        return {}
    dtype = "float32" if trainer.is_mixed else trainer.weights
    share = trainer.ranks if SHARDED[trainer.sharding][2] else 1
    own = trainer.trained if trainer.foreach else 2 * trainer.model.largest
    found = {f"optimizer's temporaries {dtype}": math.ceil(own * WIDTHS[dtype] / share)}
    if trainer.sharding.startswith("zero") and trainer.is_mixed:
        found["gradients' copies float32"] = math.ceil(4 * trainer.trained / share)
    return found


def gathered_tensor(trainer: Trainer) -> Parts:
    """The largest tensor, made whole of its shards (DTensor.full_tensor)."""
    if not SHARDED[trainer.sharding][0] or trainer.ranks == 1:
        return {}
    width = WIDTHS[trainer.weights]
    return {f"a whole tensor {trainer.weights}": trainer.model.largest * width}


def sending(trainer: Trainer, bucket: int) -> Parts:
    """A push of weights: a tensor made whole after the other, in a bucket (verl,
    checkpoint_engine.update_weights_bucket_megabytes)."""
    whole = trainer.model.loaded_bytes(trainer.compute)
    sent = {"bucket of weights": min(bucket, whole)}
    return _sum(resident(trainer, "sync"), gathered_tensor(trainer), sent)


def _tokens(trainer: Trainer) -> int:
    return math.ceil(trainer.tokens / trainer.context)


def _largest(trainer: Trainer) -> Layer:
    return max(trainer.model.layers, key=lambda layer: (layer.elements, layer.items))
