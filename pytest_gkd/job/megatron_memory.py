"""What each rank of a Megatron trainer must hold at each moment, in bytes.

Counted from Megatron-LM's core 0.16 (files are named below megatron/core/) with
Transformer Engine's fused kernels; the activations by Korthikanti et al. 2022 (arXiv
2205.05198, section 4), tensor by tensor for layers with gates and grouped queries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from pytest_gkd.job.engine_memory import Parts
from pytest_gkd.job.findings import CheckError
from pytest_gkd.job.models import WIDTHS, Layer, Model
from pytest_gkd.job.training_memory import Phases, total

# What parts of a layer are recomputed in the backward pass, by recompute_modules'
# names.
MODULES = ("core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts")
PARTS = ("weights", "gradients", "states")
# With a larger fraction of elements outside layers and vocabulary it is not known which
# stage has them.
ELSEWHERE = 0.01


@dataclass(frozen=True)
class Megatron:
    """What the trainer's memory depends on; ``tokens`` are those of a micro-batch on
    all ranks of ``context`` parallelism, padding included.

    ``expert_tensor`` is 0 if it equals ``tensor``. ``chunks`` are a stage's parts of
    the layers (virtual pipeline), ``first`` and ``last`` the layers of those stages if
    given. ``master`` and ``moments`` are bytes of optimizer state per element,
    ``on_host`` the share of it that is always in host memory.

    ``away`` are the parts that are in host memory except for updates, ``away_to_send``
    those that are there while weights are sent, of which the GPU then holds ``copies``
    buckets; ``keeps_masters`` says that master copies stay when states leave.
    ``teacher_logits`` are bytes that the last stage has when an update begins.
    ``recompute`` is "", "selective" (``modules``) or "full", where ``layers`` are
    recomputed at once (method uniform), or the first ``layers`` of a stage one by one
    (``is_block``). ``padded`` divides the vocabulary.

    ``loss`` is the bytes that it holds at its peak per token and entry of a rank's part
    of the vocabulary, including logits, which the last stage makes float32
    (transformer/module.py, Float16Module). ``attention`` is "flash", or else the tokens
    of a row, whose scores are then materialised; ``fuses`` says that gradients are
    accumulated by the kernels that compute them, ``fuses_gates`` that one kernel
    computes a gate and its activation (without it each step's result is kept, for
    experts also that of the router's weights: transformer/mlp.py, moe/experts.py).
    """

    model: Model
    gpus: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 0
    chunks: int = 1
    first: int = 0
    last: int = 0
    sequence_parallel: bool = False
    compute: str = "bfloat16"
    gradients: str = "float32"
    is_distributed: bool = True
    master: int = 4
    moments: int = 8
    on_host: float = 0
    away: frozenset[str] = frozenset()
    away_to_send: frozenset[str] = frozenset()
    keeps_masters: bool = False
    copies: int = 1
    recompute: str = ""
    modules: tuple[str, ...] = ("core_attn",)
    layers: int = 1
    is_block: bool = False
    tokens: int = 0
    micro_batches: int = 1
    loss: float = 8
    teacher_logits: int = 0
    padded: int = 1
    attention: int | str = "flash"
    has_dropout: bool = False
    has_rotary: bool = True
    fuses: bool = True
    fuses_gates: bool = True

    @property
    def local(self) -> int:
        """Tokens of a micro-batch on a rank."""
        return math.ceil(self.tokens / self.context)

    @property
    def sequence(self) -> int:
        """The ranks that sequence parallelism divides tokens among."""
        return self.tensor if self.sequence_parallel else 1

    @property
    def vocab(self) -> int:
        """Entries of the vocabulary on a rank."""
        whole = math.ceil(self.model.vocab / self.padded) * self.padded
        return math.ceil(whole / self.tensor)

    @property
    def replicas(self) -> tuple[int, int]:
        """Ranks that share the states of weights, and of experts' weights
        (parallel_state.py, data parallel with context, and expert data parallel)."""
        own = self.gpus // (self.tensor * self.pipeline)
        wide = self.expert_tensor or self.tensor
        if self.expert == 1:  # experts are weights like any others
            return max(own, 1), max(own, 1)
        return max(own, 1), max(self.gpus // (wide * self.expert * self.pipeline), 1)


def stages(job: Megatron) -> list[tuple[Layer, ...]]:
    """The layers of each pipeline stage (transformer/transformer_block.py,
    get_num_layers_to_build).

    Raises CheckError if they cannot be divided.
    """
    whole, count = list(job.model.layers), job.pipeline
    ends = (job.first, job.last) if count > 1 else (0, 0)
    between = count - sum(1 for size in ends if size)
    left = len(whole) - sum(ends)
    if left < 0 or (left % between if between else left):
        raise CheckError(f"{len(whole)} layers are not divided among {count} stages")
    each = left // between if between else 0
    sizes = [each] * count
    sizes[0], sizes[-1] = job.first or sizes[0], job.last or sizes[-1]
    found = []
    for size in sizes:
        found.append(tuple(whole[:size]))
        del whole[:size]
    return found


def elements(job: Megatron, stage: int) -> tuple[int, int]:
    """Elements of a rank of a stage, with those of experts separate.

    The last stage has a copy of an embedding that is also the head
    (models/common/language_module, setup_embeddings_and_output_layer).
    """
    model, is_last = job.model, stage == job.pipeline - 1
    matrix = job.vocab * model.width
    own = routed = 0
    wide = job.expert_tensor or job.tensor
    for layer in stages(job)[stage]:
        whole, experts = layer.shape.whole, layer.shape.experts
        own += math.ceil((layer.elements - whole - experts) / job.tensor) + whole
        routed += math.ceil(experts / (job.expert * wide))
    rest = model.elements - model.embedding - model.head
    rest -= sum(layer.elements for layer in model.layers)
    if rest > ELSEWHERE * model.elements:
        raise CheckError("where the parts beside the language model lie is not known")
    if stage == 0:
        own += matrix
    if is_last:
        own += rest + (matrix if model.head or job.pipeline > 1 else 0)
    return own, routed


def resident(job: Megatron, stage: int, phase: str) -> Parts:
    """Weights, gradients, master copies and moments of a rank in a phase.

    Bytes per element: weights 2, gradients in a buffer for all of them 4 (2 without
    accumulate_allreduce_grads_in_fp32), and for the distributed optimizer a share of 4
    for master copies and 8 for Adam's moments (Megatron-LM's documentation of it: 6 +
    12 / ranks; distributed/param_and_grad_buffer.py, optimizer/distrib_optimizer.py).
    """
    own, routed = elements(job, stage)
    shares = job.replicas if job.is_distributed else (1, 1)
    sharded = math.ceil(own / shares[0]) + math.ceil(routed / shares[1])
    away = {"idle": job.away, "sync": job.away_to_send}.get(phase, frozenset())
    kept = 1 - job.on_host
    has_states = "states" not in away and phase != "load"
    has_masters = has_states or (job.keeps_masters and phase != "load")
    return {
        f"weights {job.compute}": ("weights" not in away)
        * (own + routed)
        * WIDTHS[job.compute],
        f"gradients {job.gradients}": ("gradients" not in away)
        * (own + routed)
        * WIDTHS[job.gradients],
        "master copies": has_masters * math.ceil(sharded * job.master * kept),
        "optimizer states": has_states * math.ceil(sharded * job.moments * kept),
    }


def loading(job: Megatron, stage: int) -> Parts:
    """The start: the distributed optimizer's buffers are allocated beside the weights
    that they absorb, chunk by chunk, those of experts last if these are parallel
    (distributed/param_and_grad_buffer.py).
    """
    own, routed = (WIDTHS[job.compute] * one for one in elements(job, stage))
    if job.expert == 1:
        own, routed = own + routed, 0
    ratio = WIDTHS[job.gradients] // WIDTHS[job.compute]
    # Beside all weights and the gradients of those already absorbed.
    moments = [(own, ratio * own), (routed, ratio * (own + routed))]
    copied, gradients = max(moments, key=sum)
    if not job.is_distributed:
        copied, gradients = 0, ratio * (own + routed)
    return {
        f"weights {job.compute}": own + routed,
        f"gradients {job.gradients}": gradients,
        "weights' new places": math.ceil(copied / job.chunks),
    }


def layer_bytes(job: Megatron, layer: Layer) -> int:
    """What a layer keeps of a micro-batch for its backward pass, on one rank.

    Without gates, groups and rotary embeddings, with dropout and materialised scores it
    is Korthikanti et al.'s s b h (34 + 5 a s / h) (section 4.1), or with tensor
    parallelism 10 + 24 / t + 5 a s / (h t), and all / t with sequence parallelism
    (4.2). Norms keep input and output, attention its inputs and its result, an MLP what
    is between its matrices.
    """
    shape, width = layer.shape, WIDTHS[job.compute]
    hidden, made = job.model.width, set(job.modules)
    is_selective = job.recompute == "selective"
    made = made if is_selective else set()
    outputs = 0 if "layernorm" in made else 2 * hidden
    normed = (2 * hidden + outputs) * width + 2 * hidden * job.has_dropout
    inputs = shape.queries + 2 * shape.keys
    if job.has_rotary:  # the values are a view that keeps the joint projection alive
        inputs += shape.queries + shape.keys + shape.queries * shape.is_normed
    attention: float = (inputs + shape.queries) * width
    if job.attention == "flash":
        attention += 4 * shape.heads
    elif "core_attn" not in made:
        attention += (5 if job.has_dropout else 2) * shape.heads * int(job.attention)
    inner = ((3 if job.fuses_gates else 5) if shape.is_gated else 2) * width
    again = {"moe", "shared_experts"} if shape.count else {"mlp"}
    dense = 0 if again & made else shape.dense
    found = normed / job.sequence + (attention + inner * dense) / job.tensor
    if shape.count and "moe" not in made:
        inside = 3 if job.fuses_gates else 6
        found += _routed_bytes(job, layer, 2 if "moe_act" in made else inside)
    return math.ceil(job.local * found)


def _routed_bytes(job: Megatron, layer: Layer, inner: int) -> float:
    """For each token: its rows for the chosen experts, evenly spread, what is between
    their matrices, and the router's scores in float32 (transformer/moe).
    """
    shape, width = layer.shape, WIDTHS[job.compute]
    wide = job.expert_tensor or job.tensor
    rows = shape.chosen * wide / job.sequence
    each = (job.model.width + inner * shape.expert / wide) * width
    return rows * each + 8 * shape.count / job.sequence


def input_bytes(job: Megatron) -> int:
    """A layer's input, which is all that full recomputation keeps of it."""
    width = job.model.width * WIDTHS[job.compute]
    return math.ceil(job.local * width / job.sequence)


def kept(job: Megatron, stage: int) -> int:
    """What the layers of a stage keep of one micro-batch."""
    layers = stages(job)[stage]
    if job.recompute != "full":
        return sum(layer_bytes(job, layer) for layer in layers)
    if job.is_block:
        again = job.layers * job.chunks
        rest = sum(layer_bytes(job, layer) for layer in layers[again:])
        return min(again, len(layers)) * input_bytes(job) + rest
    return math.ceil(len(layers) / job.layers) * input_bytes(job)


def in_flight(job: Megatron, stage: int) -> float:
    """Micro-batches whose activations a stage has at once: as many as there are stages
    from it on (arXiv 2104.04473, section 2.2); with interleaved chunks, the warm-up
    micro-batches (pipeline_parallel/schedules.py, get_pp_rank_microbatches).
    """
    behind = job.pipeline - stage
    if job.chunks == 1:
        return min(behind, job.micro_batches)
    warm = 2 * (behind - 1) + (job.chunks - 1) * job.pipeline + 1
    return min(warm / job.chunks, job.micro_batches)


def updates(job: Megatron, stage: int) -> Iterator[Parts]:
    """What is held at each moment of an update that may be its peak: in the loss, in
    the backward pass of the output matrix, and in that of the last layer.

    Sequence parallelism gathers the inputs of matrices in a buffer that stays
    (tensor_parallel/layers.py, get_global_memory_buffer).
    """
    width, hidden = WIDTHS[job.compute], job.model.width
    layers = stages(job)[stage]
    held = resident(job, stage, "update")
    whole = job.local * hidden * width
    if job.sequence > 1:
        held["gathered activations"] = whole
    name = f"activations {job.compute}"
    own = math.ceil(in_flight(job, stage) * kept(job, stage))
    if stage == job.pipeline - 1:
        held["teacher's logits"] = job.teacher_logits
        end = 2 * input_bytes(job)  # for the last norm and the output matrix
        behind = total(held, {name: own + end})
        each = job.local * job.vocab
        yield total(behind, {"logits and loss": math.ceil(each * job.loss)})
        matrix = job.vocab * hidden * width * (not job.fuses)
        parts = {"logits' gradient": each * (width + 4)}
        yield total(
            behind, parts, {"a matrix's gradient": matrix, "its input's": whole}
        )
    if not layers:
        return
    again = 0
    if job.recompute == "full":
        several = 1 if job.is_block else job.layers
        again = sum(sorted(layer_bytes(job, layer) for layer in layers)[-several:])
    largest = max(layers, key=lambda layer: layer.elements)
    working = whole + math.ceil(_inner_bytes(job, largest))
    found = {name: own + again + working}
    if not job.fuses:
        one = 2 * hidden * largest.shape.dense or 0
        found["a matrix's gradient"] = math.ceil(one * width / job.tensor)
    yield total(held, found)


def scoring(job: Megatron, tokens: int, phase: str = "update") -> Parts:
    """The last stage while it computes log-probabilities of a micro-batch of ``tokens``
    in a forward pass alone, of the student or a replacement, beside what is held in
    ``phase``.
    """
    local = math.ceil(tokens / job.context)
    last = job.pipeline - 1
    largest = max(job.model.layers, key=lambda layer: layer.elements)
    working = math.ceil(_inner_bytes(job, largest) * local / max(job.local, 1))
    each = math.ceil(local * job.vocab * job.loss)
    return total(
        resident(job, last, phase),
        {"logits and loss": each, "activations": max(working - each, 0)},
    )


def _inner_bytes(job: Megatron, layer: Layer) -> float:
    """The gradients at a layer's peak, before its inner matrix."""
    shape, width = layer.shape, WIDTHS[job.compute]
    inner = (3 if shape.is_gated else 2) * width
    found = inner * shape.dense / job.tensor
    if shape.count:
        wide = job.expert_tensor or job.tensor
        rows = shape.chosen * wide / job.sequence
        found = max(found, rows * (inner * shape.expert / wide))
    return job.local * found


def phases(job: Megatron, bucket: int) -> list[Phases]:
    """All phases of each pipeline stage; weights are sent in buckets of ``bucket``
    bytes.

    Fused Adam takes nothing besides its states; gradients that are not float32 are
    converted for it, a share at a time (optimizer/distrib_optimizer.py,
    _copy_model_grads_to_main_grads).
    """
    found = []
    for stage in range(job.pipeline):
        step = resident(job, stage, "step")
        if job.gradients != "float32":
            own, routed = elements(job, stage)
            shares = job.replicas if job.is_distributed else (1, 1)
            copies = own / shares[0] + routed / shares[1]
            step["gradients' copies float32"] = math.ceil(4 * copies)
        sent = min(bucket, job.model.loaded_bytes(job.compute)) * job.copies
        found.append(
            Phases(
                load=loading(job, stage),
                idle=resident(job, stage, "idle"),
                updates=list(updates(job, stage)),
                step=step,
                sync=total(resident(job, stage, "sync"), {"bucket of weights": sent}),
                save=resident(job, stage, "save"),
            )
        )
    return found
