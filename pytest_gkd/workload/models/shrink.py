"""Copies only a model's first layers, so that a large model can be tried out.

With a prefix no tensor needs renaming, and whatever a config says about a layer by its
number stays true. What is not in a layer (embeddings, head, norms, vision and audio
encoders) is kept whole, and so are heads, experts and vocabulary, by which tensor and
expert parallelism divide.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_gkd.checkpoint import LAYERS
from pytest_gkd.stage_api import StageFault
from pytest_gkd.workload import paths
from pytest_gkd.workload.models.model_files import read_config
from pytest_gkd.workload.models.weight_files import (
    Tensor,
    check_weights,
    tensors_named,
    write_safetensors,
)

# Most layers in a copy if covering every kind of layer takes more than LEAST.
MOST, LEAST = 12, 2
# What a run's other temporary files may still need.
SPARE_BYTES = 256 << 20
DEPTHS = (*LAYERS, "num_layers")
# The language model's part of a multimodal model's config.
PARTS = ("text_config", "llm_config")
# Keys that give each layer its kind: every n-th layer, from a layer on, or by number
# (transformers 5.19, the configurations of its text models).
PERIODS = (
    *("sliding_window_pattern", "full_attention_interval", "no_rope_layer_interval"),
    *("attn_layer_period", "expert_layer_period", "decoder_sparse_step"),
    *("interleave_moe_layer_step", "moe_layer_interval", "moe_layer_freq"),
    "layer_group_size",
)
STARTS = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
NUMBERS = (
    *("attn_layer_indices", "hybrid_layer_ids", "full_attn_idxs", "mlp_only_layers"),
    "moe_layers",
)
# One letter per layer.
PATTERN = "hybrid_override_pattern"
# As many entries as layers, if nothing else gives the number (nemotron_h).
LISTED = ("layers_block_type", "layer_types", PATTERN)
# Extra layers after the last, which draft tokens; a copy has none.
DRAFTING = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_DRAFTS = re.compile(r"(.*\.)?mtp\w*\..*")
_IN_LAYER = re.compile(r"(?P<stack>.*?)\.(?P<number>\d+)\.(?P<rest>.+)")
_OTHER_STACK = re.compile(r"vision|visual|image|audio|speech")
# What holds weights or refers to them, and belongs to neither tokenizer nor code.
_LEFT_BEHIND = re.compile(
    r".*\.(safetensors|bin|pt|pth|gguf|onnx|h5|msgpack|index\.json)|"
    r"config\.json|params\.json|\..*"
)


@dataclass(frozen=True)
class ShrunkCopy:
    """A possible copy of the model in ``source``: ``layers`` of its ``of``.

    ``lacks`` names the kinds of layers that are not among them. ``tensors`` are those
    that it keeps, None for random ones.
    """

    source: Path
    origin: str
    config: dict[str, Any]
    layers: int
    of: int
    lacks: tuple[str, ...]
    tensors: tuple[Tensor, ...] | None

    @property
    def text(self) -> str:
        """``2 of 32 layers``, with what else there is to say about it."""
        weights = "" if self.tensors is not None else ", random weights"
        lacks = ", ".join(self.lacks[:3])
        return f"{self.layers} of {self.of} layers{weights}" + (
            f" (none of the kind of {lacks})" if lacks else ""
        )

    def write(self, directory: Path) -> None:
        """Write all but random weights into ``directory``, which is empty.

        Files other than weights become links. Raises StageFault ``env.disk-full``.
        """
        cut = json.dumps(_cut_all(self.config, self.layers), indent=1)
        (directory / "config.json").write_text(cut, "utf-8")
        for path in self.source.iterdir():
            if not _LEFT_BEHIND.fullmatch(path.name):
                (directory / path.name).symlink_to(path.resolve())
        if self.tensors is not None:
            check_space(directory, sum(tensor.bytes for tensor in self.tensors))
            write_safetensors(directory / "model.safetensors", self.tensors)


def plan(
    source: Path, origin: str, layers: int | None, *, random: bool
) -> ShrunkCopy | None:
    """The copy of a model with ``layers`` layers; None: enough to have every kind.

    Returns None if that is the model itself. Raises StageFault for a model that cannot
    be copied, and as ``check_weights`` does.
    """
    config = read_config(source, origin)
    deep = next(_deep_parts(config), None)
    if deep is None:
        what = f"has no number of layers in config.json ({', '.join(DEPTHS)}), and "
        what += "so cannot be copied with fewer"
        raise paths.fault("config.missing-value", source, origin, what)
    of = _depth(deep)
    tensors = None if random else _tensors(source, origin)
    stack = "" if tensors is None else _decoder(tensors, of, source, origin)
    firsts = dict(_first_of_kinds(deep, of, tensors or (), stack))
    if layers is None:
        wanted = [number + 1 for number in firsts if number < MOST]
        layers = max(LEAST, *wanted)
    layers = min(layers, of)
    if layers == of and not random:
        return None
    if random and "quantization_config" in {**config, **deep}:
        what = "is quantized, which random weights cannot be; copy its real ones"
        raise paths.fault("vllm.quantization", source, origin, what)
    lacks = tuple(told for number, told in sorted(firsts.items()) if number >= layers)
    if tensors is None:
        return ShrunkCopy(source, origin, config, layers, of, lacks, None)
    if layers < of and deep.get("hidden_size_per_layer_input"):
        what = "has an embedding that all layers share (hidden_size_per_layer_input), "
        what += "which is not cut here; use --gkd-shrink-weights=random"
        raise paths.fault("model.unsupported-arch", source, origin, what)
    kept = tuple(one for one in tensors if _is_kept(one.name, stack, layers))
    return ShrunkCopy(source, origin, config, layers, of, lacks, kept)


def check_space(directory: Path, wanted_bytes: int) -> None:
    """Check that ``wanted_bytes`` are free. Raises StageFault ``env.disk-full``."""
    free = shutil.disk_usage(directory).free
    if free < wanted_bytes + SPARE_BYTES:
        raise StageFault(
            "env.disk-full",
            f"{directory} has {free / 2**30:.1f} GiB free, and a copy of the model "
            f"(--gkd-shrink) takes {wanted_bytes / 2**30:.1f} GiB; copy fewer layers, "
            "or name a larger disk: TMPDIR=DIR pytest ...",
            facts={"path": str(directory), "free_bytes": free},
        )


def _depth(part: Mapping[str, Any]) -> int:
    found = [part[key] for key in DEPTHS if isinstance(part.get(key), int)]
    found += [len(part[key]) for key in LISTED if isinstance(part.get(key), list | str)]
    return next(iter(found), 0)


def _deep_parts(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The parts of a config that say how many layers there are, innermost first."""
    for part in (*map(config.get, PARTS), config):
        if isinstance(part, dict) and _depth(part):
            yield part


def _cut_all(config: dict[str, Any], layers: int) -> dict[str, Any]:
    cut = {
        key: _cut(value, layers)
        if key in PARTS and isinstance(value, dict) and _depth(value)
        else value
        for key, value in config.items()
    }
    return _cut(cut, layers) if _depth(cut) else cut


def _cut(part: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """A config with only the first layers."""
    of = _depth(part)
    cut = {
        key: value[:layers] if _is_per_layer(key, value, of) else value
        for key, value in part.items()
    }
    cut |= {key: layers for key in DEPTHS if isinstance(part.get(key), int)}
    cut |= {key: 0 for key in DRAFTING if part.get(key)}
    # The last layers, this many, have no keys and values of their own.
    if shared := part.get("num_kv_shared_layers"):
        cut["num_kv_shared_layers"] = max(0, layers - (of - shared))
    # From this layer on attention is windowed; vLLM rejects some of these, and still
    # must.
    first = part.get("max_window_layers")
    if part.get("use_sliding_window") and isinstance(first, int) and first < of:
        cut["max_window_layers"] = min(first, layers - 1)
    return cut


def _is_per_layer(key: str, value: Any, of: int) -> bool:
    listed = isinstance(value, list) and not key.endswith(("token_id", "architectures"))
    return (listed or key == PATTERN) and len(value) == of


def _first_of_kinds(
    part: Mapping[str, Any], of: int, tensors: Iterable[Tensor], stack: str
) -> Iterator[tuple[int, str]]:
    """Number (from 0) of the first layer of each kind, and what to call it.

    By everything that tells layers apart: what the config says, and which tensors
    exist.
    """
    names = [set[str]() for _ in range(of)]
    for tensor in tensors:
        match = _IN_LAYER.fullmatch(tensor.name)
        if match and match["stack"] == stack and int(match["number"]) < of:
            names[int(match["number"])].add(re.sub(r"\d+", "", match["rest"]))
    told: list[list[Any]] = [[frozenset(found) for found in names]]
    for key, value in part.items():
        if _is_per_layer(key, value, of):
            told.append([json.dumps(one, sort_keys=True) for one in value])
        elif key in PERIODS and isinstance(value, int | str) and value:
            period = value if isinstance(value, int) else len(value)
            told.append([number % period for number in range(of)])
        elif key in STARTS and isinstance(value, int):
            told.append([number >= value for number in range(of)])
        elif key in NUMBERS and isinstance(value, list):
            told.append([number in value for number in range(of)])
    for kinds in told:
        for kind in dict.fromkeys(kinds):
            number = kinds.index(kind)
            name = f" ({json.loads(kind)})" if isinstance(kind, str) else ""
            yield number, f"layer {number}{name}"


def _tensors(source: Path, origin: str) -> list[Tensor]:
    """Every tensor of the weights. Raises StageFault for a pickled checkpoint."""
    # Files in Mistral's own format may lie next to those that are loaded.
    files = check_weights(source, origin)
    files = tuple(p for p in files if not p.name.startswith("consolidated")) or files
    if files[0].suffix != ".safetensors":
        what = f"has its weights in {files[0].name}, of which no part can be read; "
        what += "convert it to safetensors, or use --gkd-shrink-weights=random"
        raise paths.fault("checkpoint.missing", source, origin, what)
    return tensors_named(re.compile(r".*"), files, origin)


def _decoder(tensors: Iterable[Tensor], of: int, source: Path, origin: str) -> str:
    """The prefix of a layer's number, such as ``model.layers``.

    Raises StageFault if no tensors, or several groups of them, have such numbers.
    """
    last: dict[str, int] = {}
    for tensor in tensors:
        match = _IN_LAYER.fullmatch(tensor.name)
        if match and not _DRAFTS.fullmatch(tensor.name):
            number = int(match["number"])
            last[match["stack"]] = max(number, last.get(match["stack"], 0))
    found = [
        stack
        for stack, number in last.items()
        if number >= of - 1 and not _OTHER_STACK.search(stack)
    ]
    if len(found) != 1:
        told = ", ".join(f"{stack} 0 to {number}" for stack, number in last.items())
        what = f"has {of} layers by config.json, which its tensors do not show: "
        what += told[:300] or "none of them has a number"
        raise paths.fault("checkpoint.mismatch", source, origin, what)
    return found[0]


def _is_kept(name: str, stack: str, layers: int) -> bool:
    match = _IN_LAYER.fullmatch(name)
    if match and match["stack"] == stack:
        return int(match["number"]) < layers
    return not _DRAFTS.fullmatch(name)
