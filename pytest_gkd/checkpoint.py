"""Reads a model's config.json and safetensors headers, but not its weights."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

# Bytes per element in safetensors files, by the format's dtype (safetensors, README).
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
# The largest header that the safetensors format allows (safetensors, README).
MAX_HEADER_BYTES = 100_000_000
# Model types' names for the same thing (transformers 5.19, the attribute maps of its
# configurations).
HEADS = ("num_attention_heads", "n_head", "n_heads")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers")
WIDTH = ("hidden_size", "n_embd", "d_model")


class HeaderError(ValueError):
    """What is wrong with a safetensors file, phrased as the end of a sentence.

    ``promised`` is the size in bytes that its header implies, if that is what is wrong.
    """

    promised: int | None = None


def read_header(path: Path) -> dict[str, Any]:
    """Map tensor names to ``{"dtype", "shape", "data_offsets"}`` for a complete file.

    A complete file is as long as its header says. Layout (safetensors, README): 8 bytes
    of little-endian header length, a JSON header with the offsets of each tensor, then
    the data. Raises HeaderError, and OSError if the file cannot be read.
    """
    size = path.stat().st_size
    if size < 8:
        raise HeaderError(f"is {size} bytes long")
    with path.open("rb") as file:
        start = file.read(8)
        (header_bytes,) = struct.unpack("<Q", start)
        if header_bytes > MAX_HEADER_BYTES:
            problem = f"is not a safetensors file: it starts with {start!r}, which "
            problem += f"would be a header of {header_bytes} bytes"
            raise HeaderError(problem)
        if 8 + header_bytes > size:
            problem = f"ends inside its header: it is {size} bytes long, the header "
            problem += f"alone takes {8 + header_bytes}"
            raise HeaderError(problem)
        raw = file.read(header_bytes)
    try:
        header = json.loads(raw)
        tensors = {name: v for name, v in header.items() if name != "__metadata__"}
        ends = [int(tensor["data_offsets"][1]) for tensor in tensors.values()]
    except (ValueError, AttributeError, KeyError, TypeError, IndexError) as error:
        problem = f"has no readable header: {type(error).__name__}: {error}"
        raise HeaderError(problem) from error
    promised = 8 + header_bytes + max(ends, default=0)
    if size != promised:
        problem = "is truncated" if size < promised else "has bytes after its tensors"
        problem += f": it is {size} bytes long, its header promises {promised}"
        wrong = HeaderError(problem)
        wrong.promised = promised
        raise wrong
    return tensors


def loaded(
    config: Mapping[str, Any], headers: Iterable[Mapping[str, Any]]
) -> dict[str, Any]:
    """The tensors in a model's files that are loaded: all but an output head tied to
    the embedding, which it is unless ``tie_word_embeddings`` says False."""
    found: dict[str, Any] = {}
    for header in headers:
        found |= header
    if config.get("tie_word_embeddings") is not False:
        found.pop("lm_head.weight", None)
    return found


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a multimodal model's config."""
    part = config.get("text_config")
    return part if isinstance(part, dict) else {}


def first(config: Mapping[str, Any], names: Iterable[str]) -> int | None:
    """The integer under the first of ``names`` that has one."""
    return next((config[n] for n in names if isinstance(config.get(n), int)), None)


def heads(config: Mapping[str, Any]) -> int | None:
    """Attention heads per layer; None if ``config`` uses another key."""
    return first(config, HEADS)


def head_size(config: Mapping[str, Any]) -> int | None:
    """Elements per head; None without the usual keys."""
    width, count = first(config, WIDTH), heads(config)
    return first(config, ["head_dim"]) or (width and count and width // count)


def cache_elements(config: Mapping[str, Any]) -> int | None:
    """Key and value elements per token over all layers; None without the usual keys."""
    size, layers = head_size(config), first(config, LAYERS)
    kv_heads = first(config, ["num_key_value_heads"]) or heads(config)
    return 2 * layers * kv_heads * size if size and layers and kv_heads else None
