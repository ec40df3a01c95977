"""A model's sizes, from config.json and its safetensors' headers alone."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_gkd import checkpoint
from pytest_gkd.job.findings import CheckError

WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.(.+)")
NORM = re.compile(r"norm|\bln_")
# Parts of attention that are not the queries, keys and values of every token.
OTHER_ATTENTION = re.compile(r"kv_a_proj|linear_attn|mamba|ssm|conv1d")
# Model types whose norms multiply by their weight in float32, with what these keep in
# float32 of each element: Cohere's subtract the mean twice (modeling_cohere.py,
# CohereLayerNorm).
WIDE_NORMS = {"gemma": 2, "olmo2": 2, "olmo3": 2, "cohere": 3}
TOWERS = ("vision", "audio")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
ROUTED = re.compile(r"(?<!shared_)experts\.")
# What tensor parallelism replicates: matrices of routers and into latent spaces, and
# all vectors but the biases of column-parallel matrices (Megatron-LM,
# transformer/moe/router.py, multi_latent_attention.py, tensor_parallel/layers.py).
WHOLE = re.compile(
    r"(?:^|\.)(?:gate|router|shared_expert_gate|q_a_proj|kv_a_proj\w*)\."
)
# The matrices of attention and of an MLP that read a norm's result, if not one for all.
READERS = tuple(
    re.compile(rf"(?:^|\.)(?:{kinds})_proj\.weight$") for kinds in ("q|k|v", "gate|up")
)
BY_OUTPUT = re.compile(r"(?:[qkv]|qkv|gate|up|gate_up|fc1|k?[qv]_b)_proj\.bias$")


@dataclass(frozen=True)
class Shape:
    """The widths of a decoder layer, in elements of a token.

    ``keys`` are as wide as the values; ``dense`` is the inner width of an MLP without
    routing, shared experts included, ``expert`` that of one of the ``count`` experts,
    of which ``chosen`` process each token. ``window`` is how far back attention looks,
    0 if it is not limited. ``experts`` are the elements of all of
    these, ``whole`` those that tensor parallelism does not divide. ``readers`` are the
    matrices that read the result of one of its two main norms. ``is_normed`` says
    that queries and keys have norms, ``is_gated`` that the MLP has a gate.
    """

    heads: int = 1
    queries: int = 0
    keys: int = 0
    dense: int = 0
    expert: int = 0
    chosen: int = 0
    count: int = 0
    experts: int = 0
    whole: int = 0
    window: int = 0
    readers: int = 2
    is_normed: bool = False
    is_gated: bool = True


@dataclass(frozen=True)
class Layer:
    """A decoder layer in elements.

    ``items`` and ``floats`` are what is kept of a token for its backward pass, in the
    compute dtype and in float32; ``inner`` is its widest intermediate.
    """

    elements: int
    items: int
    floats: int
    inner: int
    shape: Shape = Shape()


@dataclass(frozen=True)
class Model:
    """A model's sizes, in elements unless stated otherwise.

    ``stored_bytes`` is what its files hold, ``head`` is 0 if tied to the ``embedding``.
    ``end`` is what follows the layers, ``cached`` (elements per token, most tokens or
    0) describes each layer's cache. ``is_rough`` says that what its layers keep is not
    known in detail, ``is_multimodal`` that it has a tower for something other than
    text. ``positions`` is how long its sequences may be, 0 if config.json does not say,
    ``kind`` its model_type.
    """

    path: str
    elements: int
    stored_bytes: int
    is_quantized: bool
    vocab: int
    width: int
    embedding: int
    head: int
    largest: int
    layers: tuple[Layer, ...]
    end: Layer
    cached: tuple[tuple[int, int], ...]
    matrices: int
    is_rough: bool
    is_multimodal: bool = False
    positions: int = 0
    kind: str = ""

    @property
    def stored_dtype(self) -> str:
        """The dtype that its weights are stored in, judged by their width."""
        return "float32" if self.stored_bytes >= 4 * self.elements else "bfloat16"

    def loaded_bytes(self, dtype: str) -> int:
        """Bytes of the weights in ``dtype``; quantised ones stay as they are."""
        return self.stored_bytes if self.is_quantized else self.elements * WIDTHS[dtype]

    def cache_bytes(self, tokens: int, dtype: str) -> int:
        """Bytes of the cached keys and values of one sequence of ``tokens``.

        A layer with a sliding window keeps no more than that (vLLM,
        v1/kv_cache_interface.py, ``max_memory_usage_bytes``); blocks of 16 tokens are
        counted whole.
        """
        kept = (
            size * math.ceil(min(tokens, most or tokens) / 16) * 16
            for size, most in self.cached
        )
        return sum(kept) * WIDTHS[dtype]


def read(directory: Path) -> Model:
    """The sizes of a model directory.

    Raises CheckError if it has no config.json, or no complete safetensors.
    """
    try:
        config = json.loads((directory / "config.json").read_text("utf-8"))
        config = {**config, **checkpoint.text_part(config)}
        index = directory / "model.safetensors.index.json"
        if index.is_file():
            shards = json.loads(index.read_text("utf-8"))["weight_map"].values()
            files = [directory / name for name in sorted(set(shards))]
        else:
            files = sorted(directory.glob("*.safetensors"))
        headers = {
            path: checkpoint.read_header(path)
            for path in files
            if not path.name.startswith(("adapter", "consolidated"))
        }
    except (
        *(OSError, ValueError, KeyError, TypeError),
        *(AttributeError, RecursionError),
    ) as error:
        raise CheckError(f"{directory} cannot be read as a model: {error}") from None
    if not headers:
        raise CheckError(f"{directory} has no *.safetensors")
    tensors = checkpoint.loaded(config, headers.values())
    try:
        return _model(str(directory), config, tensors)
    except (TypeError, KeyError, ValueError, ArithmeticError) as error:
        said = f"{type(error).__name__}: {error}"
        raise CheckError(
            f"{directory}/config.json has not the usual keys: {said}"
        ) from None


def _model(
    path: str, config: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Any]]
) -> Model:
    sizes = {name: math.prod(tensor["shape"]) for name, tensor in tensors.items()}
    embedding = max(
        (n for name, n in sizes.items() if re.search(r"embed|wte", name)), default=0
    )
    grouped: dict[int, dict[str, list[int]]] = {}
    for name, tensor in tensors.items():
        found = LAYER.search(name)
        if found:
            grouped.setdefault(int(found[1]), {})[found[2]] = tensor["shape"]
    most = checkpoint.first(config, checkpoint.LAYERS) or len(grouped)
    names = [grouped[number] for number in sorted(grouped)[:most]]
    kept = tuple(_cached(config, number) for number in range(len(names)))
    offsets = [tensor["data_offsets"] for tensor in tensors.values()]
    return Model(
        path=path,
        elements=sum(sizes.values()),
        stored_bytes=sum(high - low for low, high in offsets),
        is_quantized="quantization_config" in config,
        vocab=int(config["vocab_size"]),
        width=_width(config),
        embedding=embedding,
        head=sizes.get("lm_head.weight", 0),
        largest=max(sizes.values()),
        layers=tuple(
            _layer(config, shapes, cached[1])
            for shapes, cached in zip(names, kept, strict=True)
        ),
        end=_end(config, sizes),
        cached=kept,
        matrices=sum(
            sum(shape)
            for shapes in names
            for shape in shapes.values()
            if len(shape) == 2
        ),
        positions=checkpoint.first(config, ["max_position_embeddings"]) or 0,
        kind=str(config.get("model_type") or ""),
        is_multimodal=any(config.get(f"{kind}_config") for kind in TOWERS),
        is_rough=any(OTHER_ATTENTION.search(" ".join(shapes)) for shapes in names),
    )


def _width(config: Mapping[str, Any]) -> int:
    found = checkpoint.first(config, checkpoint.WIDTH)
    if found is None:
        raise KeyError("hidden_size")
    return found


def _wide_norms(config: Mapping[str, Any]) -> int:
    kind = str(config.get("model_type"))
    return next((n for name, n in WIDE_NORMS.items() if kind.startswith(name)), 0)


def _end(config: Mapping[str, Any], names: Iterable[str]) -> Layer:
    """What the last norm and the output matrix keep of a token, as in ``_layer``; a
    logit cap keeps the capped logits, too.
    """
    width, wide = _width(config), _wide_norms(config)
    items, floats = (1, wide) if wide else (2, 1)
    last = (name for name in names if NORM.search(name) and not LAYER.search(name))
    if any(name.endswith(".bias") for name in last):  # torch's LayerNorm
        floats = 0
    capped = int(config["vocab_size"]) if config.get("final_logit_softcapping") else 0
    return Layer(0, items * width + capped, floats * width, 0)


def _layer(
    config: Mapping[str, Any], shapes: Mapping[str, list[int]], window: int
) -> Layer:
    """What a layer of a transformers model keeps of a token for its backward pass.

    Counted tensor by tensor, as Korthikanti et al. do (arXiv 2205.05198, section 4.1),
    from what PyTorch's derivatives save (derivatives.yaml) in transformers 5.19's
    layers with flash attention: the inputs of trained matrices; queries, keys, values,
    output and the softmax's sums of attention; an RMSNorm's input in float32 and what
    its weight multiplies; the gate, its activation, the other factor and their product.
    Megatron's fused kernels keep less.
    """
    width, heads = _width(config), checkpoint.heads(config) or 1
    wide = _wide_norms(config)
    elements = sum(math.prod(shape) for shape in shapes.values())
    text = " ".join(shapes)
    dense = checkpoint.first(config, ["intermediate_size", "n_inner"]) or 4 * width
    if OTHER_ATTENTION.search(text):
        used = [shape for shape in shapes.values() if len(shape) == 2]
        own = _shape(config, shapes, (heads, width, width), dense, window)
        return Layer(elements, sum(map(sum, used)), width, dense, own)
    size = checkpoint.head_size(config) or 1
    queries = heads * size
    keys = (checkpoint.first(config, ["num_key_value_heads"]) or heads) * size
    items, floats = 2 * width + 2 * queries + 2 * keys, heads
    # The values are a view that keeps the whole projection alive; Phi-3's result is
    # copied.
    if "query_key_value" in text:
        items += queries + keys
    elif "qkv_proj" in text:
        items += 2 * queries + keys
    for name, shape in shapes.items():
        if len(shape) != 1 or not NORM.search(name) or name.endswith(".bias"):
            continue
        spread = {"q": queries, "k": keys}.get(name.split("_norm")[0].split(".")[-1])
        normed = spread or shape[0]
        if name.replace(".weight", ".bias") in shapes:
            items += normed
        elif wide:
            floats += wide * normed + 1
        else:
            items, floats = items + normed, floats + normed + 1
    own = _shape(config, shapes, (heads, queries, keys), dense, window)
    if own.count:
        # Each chosen expert's rows are gathered, and its output is kept for the
        # weighting.
        items += own.chosen * (4 * own.expert + 2 * width) + 4 * own.dense
        inner = own.chosen * own.expert + own.dense
        return Layer(elements, items, floats + 2 * own.count, inner, own)
    items += (4 if own.is_gated else 2) * dense
    return Layer(elements, items, floats, dense, own)


def _shape(
    config: Mapping[str, Any],
    shapes: Mapping[str, list[int]],
    attention: tuple[int, int, int],
    dense: int,
    window: int,
) -> Shape:
    """The widths of a layer; ``attention`` has the heads, queries and keys."""
    text = " ".join(shapes)
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    routed = {name for name in shapes if ROUTED.search(name)}
    whole = {
        name
        for name in shapes.keys() - routed
        if WHOLE.search(name) or (len(shapes[name]) == 1 and not BY_OUTPUT.search(name))
    }
    inner = checkpoint.first(config, ["moe_intermediate_size"]) or dense
    shared = checkpoint.first(config, ["shared_expert_intermediate_size"]) or (
        inner * (checkpoint.first(config, ["n_shared_experts"]) or 0)
    )
    count = checkpoint.first(config, EXPERTS) or 0
    heads, queries, keys = attention
    return Shape(
        heads,
        queries,
        keys,
        dense=shared if routed else dense,
        expert=inner if routed else 0,
        chosen=checkpoint.first(config, ["num_experts_per_tok"]) or 1,
        count=count if routed else 0,
        experts=sum(sizes[name] for name in routed),
        whole=sum(sizes[name] for name in whole),
        window=window,
        readers=sum(
            max(sum(bool(kind.search(name)) for name in shapes.keys() - routed), 1)
            for kind in READERS
        ),
        is_normed="q_norm" in text,
        is_gated=bool(re.search(r"gate_proj|gate_up_proj|\bw3\b", text)),
    )


def _cached(config: Mapping[str, Any], number: int) -> tuple[int, int]:
    """Elements per token in a layer's cache, and the most tokens in it, 0 for all.

    Latent attention keeps one vector and its rotary part (vLLM, MLAAttentionSpec);
    linear attention nothing per token.
    """
    latent = checkpoint.first(config, ["kv_lora_rank"])
    if latent:
        return latent + (checkpoint.first(config, ["qk_rope_head_dim"]) or 0), 0
    kinds = config.get("layer_types") or []
    kind = str(kinds[number]) if number < len(kinds) else "full_attention"
    layers = checkpoint.first(config, checkpoint.LAYERS) or 1
    own = (checkpoint.cache_elements(config) or 0) // layers
    if kind in ("full_attention", "attention"):
        return own, 0
    window = checkpoint.first(config, ["sliding_window"])
    return (own, window) if kind == "sliding_attention" and window else (0, 0)
