"""What each rank of a trainer must hold at each moment, in bytes.

Every part is counted by a function that names where its formula is from.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pytest_gkd.job import loss_memory
from pytest_gkd.job.engine_memory import Parts
from pytest_gkd.job.loss_memory import CHUNK, TILES, WITHOUT_LOGITS
from pytest_gkd.job.models import WIDTHS, Layer, Model

# For each sharding, whether weights, gradients and optimizer state are divided among
# the ranks (ZeRO, arXiv 1910.02054, section 5; torch's FSDP notes).
SHARDED = {
    "ddp": (False, False, False),
    "zero1": (False, False, True),
    "zero2": (False, True, True),
    "zero3": (True, True, True),
    "fsdp": (True, True, True),
    "fsdp2": (True, True, True),
}
# ZeRO-3's stage3_prefetch_bucket_size, in elements (zero/config.py).
PREFETCH = 50_000_000
# The most layers whose weights FSDP2 has whole when a backward pass begins: two are
# fetched ahead.
AHEAD = 3
PLAIN = "plain attention float32"
# Optimizer state per element of trained weights, in multiples of the element's bytes.
STATES = {"adamw": 2, "sgd": 1, "sgd-plain": 0}


@dataclass(frozen=True)
class Trainer:
    """What the trainer's memory depends on; ``tokens`` are those of a micro-batch on a
    rank, padding included, before ``context`` parallelism divides them.

    ``weights`` is the dtype that is updated, ``compute`` that of the forward pass.
    ``shards`` is the number of ranks that share one copy, 0 for all.
    ``apart`` is what has an FSDP2 group of its own if it is not tied, "embedding" or
    "head" (with the final norm); what is neither there nor in a layer is the root's.
    ``offload_weights`` and ``offload_states`` say when these are in host memory:
    "never", "between" phases that need them (verl), "idle" (states while another model
    works), "but for steps" (states except in a step and for a checkpoint, prime-rl), or
    "always" (FSDP2's CPUOffloadPolicy, ZeRO-Offload). ``offload_inputs`` says that
    those of recomputed layers are there until their backward pass. ``keeps`` says that
    gradients stay whole on each rank until the last micro-batch; they are reduced in
    ``reduce``. ``step`` is how AdamW goes through the weights: "foreach", "single" or
    "fused".

    ``tensor`` parallelism is torch's (DTensor): it divides activations between
    matrices, and with ``sequence`` also those between the layers' parts. ``fetched``
    are the layers whose weights FSDP has whole at the end of a backward pass.
    ``fetches`` says that weights which are always in host memory are moved to the GPU
    to be sent. A recomputed layer keeps its input or, if its parts are recomputed one
    by one, their ``inputs``.

    LoRA's matrices are in the dtype ``adapters``, the weights' if that is empty.
    DeepSpeed has ``buckets`` elements in its gradient buffers, and ZeRO-3 up to
    ``live`` of gathered weights. ``answers`` are the tokens whose logits the loss
    takes, 0 for all, ``chunk`` those that it takes at once. ``row`` is the length of a
    row if attention is PyTorch's own, with whatever kernel it has, 0 if it is always
    fused. A ``teacher`` is in the trainer's processes, in ``teacher_dtype``, sharded
    among all ranks or whole.
    """

    model: Model
    gpus: int = 1
    sharding: str = "fsdp"
    shards: int = 0
    apart: tuple[str, ...] = ()
    tensor: int = 1
    sequence: bool = True
    context: int = 1
    weights: str = "float32"
    compute: str = "bfloat16"
    optimizer: str = "adamw"
    step: str = "foreach"
    offload_weights: str = "never"
    offload_states: str = "never"
    offload_inputs: bool = False
    fetched: int = 2
    fetches: bool = False
    recompute: bool = True
    inputs: int = 1
    tokens: int = 0
    micro_batches: int = 1
    answers: int = 0
    chunk: int = 0
    row: int = 0
    keeps: bool = False
    reduce: str = "float32"
    loss: str = "topk"
    lora_rank: int = 0
    adapters: str = ""
    buckets: int = 0
    live: int = 0
    teacher: Model | None = None
    teacher_dtype: str = "bfloat16"
    teacher_is_sharded: bool = False

    @property
    def is_mixed(self) -> bool:
        """Whether there are float32 copies beside 16-bit weights, as in DeepSpeed."""
        return self.sharding.startswith("zero") and WIDTHS[self.compute] == 2

    @property
    def casts(self) -> bool:
        """Whether autocast casts float32 weights to 16 bits for each forward pass: if
        nothing else does (torch, autocast_mode.cpp, cached_cast).
        """
        widths = WIDTHS[self.weights], WIDTHS[self.compute]
        return self.sharding == "ddp" and widths == (4, 2)

    @property
    def stream(self) -> int:
        """Bytes per element of the residual stream; autocast leaves embeddings in
        float32, and a sum with float32 is float32.
        """
        return 4 if self.casts else WIDTHS[self.compute]

    @property
    def updated(self) -> str:
        """The dtype of the weights that are trained."""
        return self.adapters or self.weights

    @property
    def ranks(self) -> int:
        """Ranks that shards are divided among."""
        whole = self.gpus // self.tensor
        return min(self.shards or whole, whole) or 1

    @property
    def trained(self) -> int:
        """Trained elements in a rank's part of the model.

        With LoRA, two matrices for each of the layers' (arXiv 2106.09685, section 4.1).
        """
        own = self.lora_rank * self.model.matrices or self.model.elements
        return math.ceil(own / self.tensor)

    @property
    def groups(self) -> tuple[int, int, int]:
        """Elements of FSDP's root group, and of an embedding and an output matrix that
        are groups of their own.
        """
        model = self.model
        rest = model.elements - sum(layer.elements for layer in model.layers)
        is_apart = self.sharding == "fsdp2" and model.head
        embedding = model.embedding if is_apart and "embedding" in self.apart else 0
        head = model.head if is_apart and "head" in self.apart else 0
        return rest - embedding - head, embedding, head

    @property
    def largest(self) -> Layer:
        """The layer with the most weights and activations."""
        return max(self.model.layers, key=lambda layer: (layer.elements, layer.items))


class Phases(NamedTuple):
    """What a rank holds in each phase; ``updates`` are moments of one."""

    load: Parts
    idle: Parts
    updates: list[Parts]
    step: Parts
    sync: Parts
    save: Parts


def phases(trainer: Trainer, bucket: int) -> Phases:
    """All phases of a rank; weights are sent in buckets of ``bucket`` bytes."""
    return Phases(
        load=resident(trainer, "load"),
        idle=resident(trainer, "idle"),
        updates=list(updates(trainer)),
        step=total(resident(trainer, "step"), stepping(trainer)),
        sync=sending(trainer, bucket),
        save=total(resident(trainer, "save"), gathered_tensor(trainer)),
    )


def total(*several: Parts) -> Parts:
    found: Parts = {}
    for parts in several:
        for name, size in parts.items():
            found[name] = found.get(name, 0) + size
    return found


def resident(trainer: Trainer, phase: str) -> Parts:
    """Weights, gradients, optimizer state and master copies of a rank in a phase.

    DDP's reducer has a copy of all gradients from the start (torch, reducer.cpp, with
    the default gradient_as_bucket_view=False).

    Bytes per element, before sharding: weights 4, or 2 in DeepSpeed plus 4 of master
    copies; gradients like the weights (FSDP reduces to the dtype of the sharded
    weights); AdamW's moments twice the updated dtype. ZeRO, arXiv 1910.02054, section
    3.1; torch, _fsdp_param.py and adamw.py. verl's offload moves everything back for
    the update (workers/engine/base.py, BaseEngineCtx), so it lowers other phases only.
    """
    by_weights, by_gradients, by_states = SHARDED[trainer.sharding]
    whole = math.ceil(trainer.model.elements / trainer.tensor)
    compute = trainer.compute
    kept = compute if trainer.is_mixed else trainer.weights
    own = compute if trainer.is_mixed else trainer.updated
    is_updating = phase in ("update", "step")
    needs_weights = is_updating or phase in ("load", "save", "sync")
    found: Parts = {}

    def add(name: str, size: int, sharded: bool) -> None:
        found[name] = math.ceil(size / trainer.ranks) if sharded else size

    if (
        trainer.offload_weights == "never"
        or (trainer.offload_weights == "between" and needs_weights)
        or (trainer.fetches and phase == "sync")
    ):
        add(f"weights {kept}", whole * WIDTHS[kept], by_weights)
        if trainer.adapters:
            size = trainer.trained * WIDTHS[trainer.adapters]
            add(f"adapters {trainer.adapters}", size, by_weights)
    # DeepSpeed's gradients go where the optimizer's states are (stage3.py,
    # grad_partitions_flat_buffer; stage_1_and_2.py, accumulated_grads_in_cpu).
    is_deepspeed = trainer.sharding.startswith("zero")
    away = trainer.offload_states if is_deepspeed else trainer.offload_weights
    # Stages 1 and 2 hold those of the last micro-batch beside the sum of the others,
    # and no buckets in the step (stage_1_and_2.py,
    # independent_gradient_partition_epilogue).
    is_halfway = trainer.sharding in ("zero1", "zero2") and trainer.micro_batches > 1
    if is_updating and away != "always":
        add(f"gradients {own}", trainer.trained * WIDTHS[own], by_gradients)
        if is_halfway and phase == "update":
            size = trainer.trained * WIDTHS[own]
            add(f"a micro-batch's gradients {own}", size, True)
    if trainer.sharding == "ddp" and trainer.gpus > 1:
        size = trainer.trained * WIDTHS[own]
        add(f"DDP's buckets {own}", size, False)
    if phase != "load":
        size = trainer.buckets * WIDTHS[trainer.compute]
        premade = phase == "update" or trainer.sharding == "zero3"
        add("DeepSpeed's buckets", size * premade, False)
    if phase != "load" and (
        trainer.offload_states == "never"
        or (trainer.offload_states == "between" and is_updating)
        or (trainer.offload_states == "idle" and phase != "idle")
        or (trainer.offload_states == "but for steps" and phase in ("step", "save"))
    ):
        updated = "float32" if trainer.is_mixed else trainer.updated
        states = STATES[trainer.optimizer] * WIDTHS[updated] * trainer.trained
        add(f"optimizer states {updated}", states, by_states)
        if trainer.is_mixed:
            add("master copies float32", 4 * trainer.trained, by_states)
    # ZeRO-3's offload of weights also applies to the teacher
    # (zero/parameter_offload.py).
    is_away = trainer.teacher_is_sharded and trainer.offload_weights == "always"
    if trainer.teacher and not is_away:
        dtype = trainer.teacher_dtype
        size = trainer.teacher.loaded_bytes(dtype)
        add(f"teacher's weights {dtype}", size, trainer.teacher_is_sharded)
    return found


def gathered(trainer: Trainer, layers: int = 2, apart: int | None = None) -> Parts:
    """Weights that are gathered on each rank while one of their layers is computed.

    The layers in flight (the next is fetched while one computes), the root group's,
    which stay from forward to backward (torch, distributed/fsdp notes on
    limit_all_gathers, and the root of fully_shard), and ``apart`` elements of groups
    apart, by default an output matrix'. ZeRO-3 keeps what it needs again
    soon, up to its max_live_parameters (partitioned_param_coordinator.py). FSDP2 copies
    weights even on a single rank (_fsdp_collectives.py, foreach_all_gather).
    """
    if not _is_divided(trainer, 0):
        return {}
    width = WIDTHS[trainer.compute]
    model = trainer.model
    if trainer.live:
        own = min(trainer.live, model.elements)
        # Each gather is copied from its flat buffer (AllGatherCoalescedHandle.wait).
        fetched = min(PREFETCH, model.elements) * width
        return {
            f"gathered weights {trainer.compute}": own * width,
            "a gather's buffer": fetched,
        }
    root, _, head = trainer.groups
    whole = layers * trainer.largest.elements + root
    whole += head if apart is None else apart
    size = math.ceil(whole * width / trainer.tensor)
    return {f"gathered weights {trainer.compute}": size}


def _is_divided(trainer: Trainer, part: int) -> bool:
    """Whether ranks have shards of weights (0) or gradients (1)."""
    several = trainer.ranks > 1 or trainer.sharding == "fsdp2"
    return SHARDED[trainer.sharding][part] and several


def whole_gradients(trainer: Trainer) -> Parts:
    """Gradients that are not sharded yet.

    One layer's in the compute dtype, and the copy that is reduced of the one before.
    With ``keeps`` the whole model's: FSDP1's no_sync accumulates in the compute dtype,
    FSDP2's set_requires_gradient_sync(False) in that of the reduction (torch,
    _fsdp_param.py, to_accumulated_grad_if_needed; verl since 0.9.0,
    FSDPEngine._gradient_sync_context).
    """
    if trainer.buckets or not _is_divided(trainer, 1):
        return {}
    width = WIDTHS[trainer.compute]
    share = trainer.trained / trainer.model.elements
    layer = int(trainer.largest.elements * share)
    size = layer * WIDTHS[trainer.reduce]
    size += _matrix(trainer) if _adds_in_place(trainer) else layer * width
    found = {f"a layer's gradients {trainer.compute}": size}
    if trainer.keeps and trainer.micro_batches > 1:
        dtype = trainer.reduce if trainer.sharding == "fsdp2" else trainer.compute
        found[f"unsharded gradients {dtype}"] = trainer.trained * WIDTHS[dtype]
    return found


def _adds_in_place(trainer: Trainer) -> bool:
    """Whether each matrix's gradient is added to the micro-batch's before at once:
    FSDP2 keeps those in the dtype of the reduction.
    """
    several = trainer.keeps and trainer.micro_batches > 1
    return several and (trainer.sharding, trainer.reduce) == ("fsdp2", trainer.compute)


def _matrix(trainer: Trainer) -> int:
    """The gradient of a layer's largest tensor; the layer's, if that is not known."""
    layer = trainer.largest
    widest = trainer.model.width * max(layer.shape.dense, layer.shape.queries)
    size = max(widest, layer.shape.experts) or layer.elements
    share = trainer.trained / trainer.model.elements
    return int(min(size, layer.elements) * share * WIDTHS[trainer.compute])


def layer_bytes(trainer: Trainer, layer: Layer) -> int:
    """What a layer keeps for its backward pass, on one rank.

    ``Layer`` has the counts; Ulysses and context parallelism divide all of it, tensor
    parallelism what is between the matrices of attention and MLP (arXiv 2205.05198,
    section 4.2.1). With sequence parallelism it also divides the rest except the
    matrices' inputs, which torch's DTensor keeps gathered.
    """
    tokens, compute = _tokens(trainer), WIDTHS[trainer.compute]
    mask = _mask(trainer, layer)
    kept = layer.items * compute + layer.floats * 4
    matrices = (2 if layer.elements else 1) * trainer.model.width
    if trainer.casts:  # the norms' results are float32: each matrix has a copy
        copies = layer.shape.readers if layer.elements else 1 + (trainer.loss in TILES)
        kept += copies * trainer.model.width * 2
    if trainer.tensor == 1:
        return math.ceil(tokens * kept) + mask
    shape, inner = layer.shape, 0
    if layer.elements:
        heads = shape.queries + shape.keys
        items = 2 * heads + (4 if shape.is_gated else 2) * shape.dense
        inner = items * compute + shape.heads * 4
        inner += heads * (compute + 4) * shape.is_normed
    whole = matrices * compute if trainer.sequence else kept - inner
    return math.ceil(tokens * (whole + (kept - whole) / trainer.tensor)) + mask


def checkpoint_bytes(trainer: Trainer) -> int:
    """What a recomputed layer keeps: its or its parts' inputs
    (torch.utils.checkpoint).
    """
    width = trainer.inputs * trainer.model.width * trainer.stream
    return math.ceil(_tokens(trainer) * width / _sequence(trainer))


def _sequence(trainer: Trainer) -> int:
    """The ranks that tokens between a layer's parts are divided among."""
    return trainer.tensor if trainer.sequence else 1


def _inner_bytes(trainer: Trainer, layer: Layer) -> int:
    """The peak inside a layer: its inner width twice, plus its input's."""
    width = 2 * WIDTHS[trainer.compute]
    each = layer.inner / trainer.tensor + trainer.model.width / _sequence(trainer)
    return math.ceil(_tokens(trainer) * each * width)


def _plain_attention(trainer: Trainer, layer: Layer) -> tuple[int, int]:
    """What a layer keeps, and what its backward pass takes beside that, where no fused
    kernel computes its attention: a softmax over the row for each head and token, with
    keys and values repeated for all heads; then three more of the softmax's size: its
    gradient, their product, and that of the scores (torch, cuda/SoftMax.cu,
    softmax_backward_cuda_out).

    CUDA's fused kernels need 16 bits where key and value heads are shared and there is
    no mask, as with rows of the same length (transformers, sdpa_attention.py,
    use_gqa_in_sdpa; torch, sdp_utils.cpp). Measured: docs/memory.md.
    """
    shape = layer.shape
    if (
        trainer.compute != "float32"
        or shape.keys >= shape.queries
        or _mask(trainer, layer)
    ):
        return 0, 0
    each = 4 * trainer.tokens / trainer.tensor
    whole = math.ceil(each * shape.heads * trainer.row)
    repeated = 2 * (shape.queries - shape.keys) - shape.heads
    return whole + math.ceil(each * repeated * bool(whole)), 3 * whole


def _mask(trainer: Trainer, layer: Layer) -> int:
    """What a layer keeps because a row is as long as its sliding window: PyTorch's own
    attention then has a mask in the compute dtype, and keys and values repeated for all
    heads (transformers, masking_utils.py, _ignore_causal_mask_sdpa; torch,
    attention.cpp, convert_boolean_attn_mask).
    """
    shape = layer.shape
    if not 0 < shape.window <= trainer.row:
        return 0
    repeated = 2 * max(shape.queries - shape.keys, 0) / trainer.tensor
    each = trainer.row + repeated
    return math.ceil(trainer.tokens * each * WIDTHS[trainer.compute])


def forward_bytes(
    model: Model, tokens: int, compute: str, *, tensor: int = 1, row: int = 0
) -> int:
    """The peak inside a layer of a forward pass that keeps nothing.

    Its inner width twice, plus its input's; or attention that no fused kernel computes,
    if rows of length ``row`` have that (_plain_attention): two matrices over the row
    for each head, queries twice, keys, values and scaled keys repeated for all heads,
    the mask. Measured on torch 2.13's own function.
    """
    most = 0
    for layer in model.layers:
        shape, width = layer.shape, WIDTHS[compute]
        each = 2 * (layer.inner / tensor + model.width) * width
        mask = 0
        if row and compute == "float32" and shape.keys < shape.queries:
            heads = 2 * shape.heads * row + 5 * shape.queries + 2 * shape.keys
            each = max(each, 4 * (heads / tensor + 2 * model.width))
            mask = 4 * row * row
        most = max(most, math.ceil(tokens * each) + mask)
    return most


def kept(trainer: Trainer) -> Parts:
    """What all layers, the final norm and the output matrix keep until the backward
    pass, on one rank."""
    layers, softmaxes = trainer.model.layers, 0
    if trainer.recompute:
        body = (1 if trainer.offload_inputs else len(layers)) * checkpoint_bytes(
            trainer
        )
    else:
        body = sum(layer_bytes(trainer, layer) for layer in layers)
        softmaxes = sum(_plain_attention(trainer, layer)[0] for layer in layers)
    return {
        f"activations {trainer.compute}": body
        + layer_bytes(trainer, trainer.model.end),
        PLAIN: softmaxes,
    }


def updates(trainer: Trainer) -> Iterator[Parts]:
    """What is held at each moment of an update that may be its peak.

    If autocast copies weights, all copies exist at the end of a forward pass; the
    output matrix's stays until the backward pass, as all do without recomputation. In
    the loss: all layers' activations and the logits; then the backward pass of the
    output matrix, of the last layer, whose activations are complete (again), and of the
    first, when all gradients exist.
    """
    model, compute = trainer.model, trainer.compute
    width = WIDTHS[compute]
    held = {**resident(trainer, "update")}
    gradients = {name: size for name, size in held.items() if "gradients" in name}
    whole = {**whole_gradients(trainer)}
    unsharded = {n: whole.pop(n) for n in [*whole] if n.startswith("unsharded")}
    # Without accumulation they appear one by one, except for buffers allocated before;
    # and those kept whole are freed as their shards appear.
    if unsharded or (trainer.micro_batches == 1 and trainer.sharding != "zero3"):
        for name in gradients:
            del held[name]
    bare = held
    backward = total(held, gathered(trainer, min(trainer.fetched, AHEAD), 0))
    each = [
        checkpoint_bytes(trainer) if trainer.recompute else layer_bytes(trainer, layer)
        for layer in model.layers
    ]

    softmaxes = [_plain_attention(trainer, layer)[0] for layer in model.layers]
    if trainer.recompute:
        softmaxes = [0]
    if trainer.offload_inputs:
        each = each[:1]
    activations, copies = f"activations {compute}", f"autocast's copies {compute}"
    vocab = math.ceil(model.vocab / trainer.tensor)
    answers = min(_answers(trainer), trainer.chunk or trainer.tokens)
    logits, dlogits = loss_memory.needed(trainer.loss, answers, vocab, width)
    kept_logits = {
        "logits and loss": loss_memory.kept(trainer.loss, answers, vocab, width)
    }
    head = math.ceil((model.head or model.embedding) / trainer.tensor)
    is_tiled = trainer.loss in TILES
    kept_copies = {copies: head * width * trainer.casts}
    if is_tiled:  # a slice at a time
        head_slice = min(vocab, CHUNK[1]) * model.width * width * trainer.casts
        kept_copies = {copies: head_slice}
    if not trainer.recompute:
        kept_copies = total(copied(trainer, model), kept_copies if is_tiled else {})
    behind = total(held, unsharded, kept(trainer))
    # At its end no layer is whole; the last is fetched when the backward pass begins.
    last = total(behind, gathered(trainer, 1))
    behind = total(behind, gathered(trainer, 0))
    if trainer.casts:
        raw = 0 if trainer.loss in WITHOUT_LOGITS else answers * vocab * width
        yield total(behind, copied(trainer, model), {"logits and loss": raw})
    if trainer.teacher:
        yield total(behind, kept_copies, teaching(trainer))
    yield total(behind, kept_copies, {"logits and loss": logits})
    is_trained = not trainer.lora_rank
    one = {f"a matrix's gradient {compute}": head * width * is_trained}
    first = one
    if is_tiled:
        # Both gradients are added up in float32, then cast to what the loss has seen.
        seen = trainer.weights if trainer.sharding == "ddp" else compute
        one = {f"a matrix's gradient {seen}": head * WIDTHS[seen] * is_trained}
        size = head * is_trained + answers * model.width
        first = {"gradients added up float32": 4 * size}
        first |= one if seen != "float32" else {}
    yield total(last, kept_copies, first, {"logits' gradient": dlogits})
    _, embedding, apart = (
        math.ceil(group * is_trained / trainer.tensor) for group in trainer.groups
    )
    if apart:  # reduced at once; what is reduced is kept until the next group's is
        sent = {"gradients to reduce": apart * WIDTHS[trainer.reduce]}
        others = {activations: sum(each), PLAIN: sum(softmaxes)}
        yield total(backward, unsharded, one, sent, others)
        one = {}
    layer = trainer.largest
    again = layer_bytes(trainer, layer) if trainer.recompute else 0
    softmax, backwards = _plain_attention(trainer, layer)
    working = {activations: again + _inner_bytes(trainer, layer)}
    working[PLAIN] = softmax * trainer.recompute
    # By the time of attention's backward pass the MLP's is done.
    shape = layer.shape
    gone = 4 * trainer.tokens * (4 if shape.is_gated else 2) * shape.dense
    if backwards - gone > _inner_bytes(trainer, layer):
        working[activations] = again - gone
        working[PLAIN] += backwards
    if trainer.casts:
        working[copies] = layer.elements * width
        if not trainer.recompute:
            working |= copied(trainer, model)
    others = {activations: sum(each), PLAIN: sum(softmaxes)}
    one = {} if _adds_in_place(trainer) else one
    yield total(backward, unsharded, one, whole, working, others, kept_logits)
    if apart:
        reduced = trainer.largest.elements * WIDTHS[trainer.reduce]
        first = {name: size - reduced for name, size in whole.items()}
        yield total(backward, unsharded, sent, first, working, others, kept_logits)
    if trainer.casts:
        working[copies] = layer.elements * width
    of_root = {} if apart or not trainer.sharding.startswith("fsdp") else one
    rest = gathered(trainer, trainer.fetched, embedding)
    held = total(bare | gradients, kept_logits)
    reached = held
    is_one_by_one = trainer.sharding == "ddp" and bool(gradients.keys() - bare.keys())
    if is_one_by_one and is_trained:
        # An embedding that is not tied is the last.
        size = model.embedding * bool(model.head) * WIDTHS[trainer.updated]
        reached = total(held, dict.fromkeys(gradients, -size))
        yield held
    others = {activations: each[0], PLAIN: softmaxes[0]}
    yield total(reached, rest, of_root, whole, working, others)
    if is_trained and trainer.sharding.startswith("fsdp"):
        yield from _ends(trainer, held)
    elif is_trained and not model.head:
        # autograd adds up the two gradients of a tied embedding (input_buffer.cpp).
        dtype = trainer.updated if trainer.sharding == "ddp" else compute
        size = (3 - is_one_by_one) * head * WIDTHS[dtype]
        yield total(held, {f"gradients of the embedding {dtype}": size})


def _ends(trainer: Trainer, held: Parts) -> Iterator[Parts]:
    """The end of an update under FSDP, when the gradients of the root group and of an
    embedding that is a group of its own are reduced, in that order: the last gradient
    in the compute dtype, all in that of the reduction, and their new shards, cast, if
    there are others to add them to (torch 2.13, _fsdp_state.py,
    _root_post_backward_final_callback; _fsdp_collectives.py, foreach_reduce; FSDP1
    copies to another dtype alone, _runtime_utils.py). Before that, autograd adds up
    the two gradients of a tied embedding.
    """
    if not _is_divided(trainer, 1):
        return
    root, embedding, _ = (math.ceil(group / trainer.tensor) for group in trainer.groups)
    width, reduce = WIDTHS[trainer.compute], WIDTHS[trainer.reduce]
    sent = reduce * (trainer.sharding == "fsdp2" or reduce != width)
    several, is_cast = trainer.micro_batches > 1, trainer.reduce != trainer.weights
    own = reduce if several and trainer.keeps and trainer.sharding == "fsdp2" else width
    shards = reduce * (several or is_cast)
    shards += WIDTHS[trainer.weights] * (several and is_cast)
    name, weights = (
        f"{what} {trainer.compute}"
        for what in ("unsharded gradients", "gathered weights")
    )
    if not trainer.model.head:
        size = math.ceil(trainer.model.embedding / trainer.tensor)
        layer = {"gradients to reduce": trainer.largest.elements * sent}
        yield total(held, gathered(trainer, 0), {name: 3 * size * width}, layer)
    for group, waits in ((root, embedding), (embedding, 0)):
        yield total(
            held,
            {weights: waits * width, name: (group + waits) * own},
            {"gradients to reduce": math.ceil(group * (sent + shards / trainer.ranks))},
        )


def copied(trainer: Trainer, model: Model) -> Parts:
    """Autocast's copies of all matrices but the embedding's and, where a loss computes
    the logits in tiles, the output matrix'.
    """
    own = model.elements - (model.embedding if model.head else 0)
    if trainer.loss in TILES:
        own -= model.head or model.embedding
    width = WIDTHS[trainer.compute] * trainer.casts
    return {f"autocast's copies {trainer.compute}": own * width}


def teaching(trainer: Trainer) -> Parts:
    """The end of the teacher's forward pass, with the student's logits.

    It keeps no layer's activations; autocast also copies its weights, since they are
    float32 and require gradients. Logits that accelerate returns are float32
    (utils/operations.py, ConvertOutputsToFp32).
    """
    teacher, width = trainer.teacher, WIDTHS[trainer.compute]
    if teacher is None:
        return {}
    found: Parts = {}
    if trainer.casts and trainer.teacher_dtype == "float32":
        found = copied(trainer, teacher)
    if trainer.teacher_is_sharded:
        own = min(trainer.live, teacher.elements)
        found = {"teacher's gathered weights": own * width}
    tokens = _answers(trainer)
    if trainer.loss not in WITHOUT_LOGITS:
        raw = width if trainer.loss.startswith("low") else 4
        found["logits and loss"] = tokens * trainer.model.vocab * raw
        found["teacher's logits"] = tokens * teacher.vocab * width
    row = trainer.row if trainer.teacher_dtype == "float32" else 0
    inner = forward_bytes(teacher, _tokens(trainer), trainer.compute, row=row)
    found["teacher's activations"] = max(inner - found.get("teacher's logits", 0), 0)
    return found


def stepping(trainer: Trainer) -> Parts:
    """What AdamW takes temporarily: a root of the second moment of all weights at once
    (torch, optim/adam.py, _multi_tensor_adam), or of one without ``foreach``; ZeRO
    works on float32 copies of the gradients (DeepSpeed, stage_1_and_2.py).
    """
    if trainer.offload_states == "always":
        return {}
    dtype = "float32" if trainer.is_mixed else trainer.updated
    share = trainer.ranks if SHARDED[trainer.sharding][2] else 1
    own = {
        "foreach": trainer.trained,
        "single": 2
        * math.ceil(min(trainer.model.largest / trainer.tensor, trainer.trained)),
        "fused": 0,
    }[trainer.step]
    found = {f"optimizer's temporaries {dtype}": math.ceil(own * WIDTHS[dtype] / share)}
    if trainer.sharding.startswith("zero") and trainer.is_mixed:
        # Made from one flat copy in 16 bits, which briefly exists beside them.
        size = (4 + WIDTHS[trainer.compute]) * trainer.trained
        found["gradients' copies"] = math.ceil(size / share)
    return found


def gathered_tensor(trainer: Trainer) -> Parts:
    """The largest tensor, gathered from its shards (DTensor.full_tensor)."""
    if not SHARDED[trainer.sharding][0] or trainer.gpus == 1:
        return {}
    width = WIDTHS[trainer.weights]
    return {f"a whole tensor {trainer.weights}": trainer.model.largest * width}


def sending(trainer: Trainer, bucket: int) -> Parts:
    """Sending weights: one tensor gathered after the other, in a bucket (verl,
    checkpoint_engine.update_weights_bucket_megabytes).
    """
    whole = trainer.model.loaded_bytes(trainer.compute)
    sent = {"bucket of weights": min(bucket, whole)}
    return total(resident(trainer, "sync"), gathered_tensor(trainer), sent)


def _tokens(trainer: Trainer) -> int:
    return math.ceil(trainer.tokens / trainer.context)


def _answers(trainer: Trainer) -> int:
    """Tokens whose logits the loss takes."""
    return math.ceil((trainer.answers or trainer.tokens) / trainer.context)
