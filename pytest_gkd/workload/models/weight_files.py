"""Checks that a model's weight files all exist, and are complete.

Standard library only: a truncated shard is found before anything heavy is imported.
"""

from __future__ import annotations

import json
import re
import struct
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from pytest_gkd import checkpoint
from pytest_gkd.stage_api import StageFault
from pytest_gkd.workload import paths

SAMPLES, SAMPLE_BYTES = 256, 4096
CHUNK_BYTES = 16 << 20
_SHARD = re.compile(
    r"(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})(?P<suffix>\..+)"
)


def check_weights(directory: Path, origin: str) -> tuple[Path, ...]:
    """The weight files that a loader would read, each checked.

    safetensors take precedence over ``pytorch_model*.bin``, as in transformers and
    vLLM. Raises StageFault ``checkpoint.missing``, ``checkpoint.corrupt`` or
    ``env.permission``.
    """
    for pattern, check in (
        ("*.safetensors", read_safetensors_header),
        ("pytorch_model*.bin", check_pickle),
    ):
        files = _listed(directory, pattern, origin)
        if files:
            for path in files:
                if not path.is_file():
                    expected = "a file of weights"
                    raise paths.missing("checkpoint.missing", path, origin, expected)
                try:
                    check(path, origin)
                except PermissionError as error:
                    raise paths.denied(path, origin, error) from error
            return files
    names = sorted(entry.name for entry in directory.iterdir())
    what = "has no weights; expected *.safetensors or pytorch_model*.bin, found "
    what += _some(names) + _training_state(names)
    raise paths.fault(
        "checkpoint.missing", directory, origin, what, found=names[:20], absent=True
    )


def read_safetensors_header(path: Path, origin: str) -> dict[str, Any]:
    """``checkpoint.read_header`` of a complete file.

    Raises StageFault ``checkpoint.corrupt``.
    """
    _start(path, origin)
    try:
        return checkpoint.read_header(path)
    except checkpoint.HeaderError as error:
        facts = {"expected_bytes": error.promised} if error.promised else {}
        raise _corrupt(path, origin, str(error), **facts) from error


@dataclass(frozen=True)
class Tensor:
    """One tensor of a safetensors file. ``start`` is its byte offset in the file."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    bytes: int


def tensors_named(
    pattern: re.Pattern[str], files: Iterable[Path], origin: str
) -> list[Tensor]:
    """The tensors in safetensors files whose full name matches."""
    found = []
    for path in files:
        if path.suffix != ".safetensors":
            continue
        header = read_safetensors_header(path, origin)
        data = path.stat().st_size - max(
            (tensor["data_offsets"][1] for tensor in header.values()), default=0
        )
        for name, tensor in header.items():
            if pattern.fullmatch(name):
                start, end = tensor["data_offsets"]
                shape = tuple(tensor["shape"])
                place = data + start, end - start
                found.append(Tensor(name, path, tensor["dtype"], shape, *place))
    return found


def write_safetensors(path: Path, tensors: Iterable[Tensor]) -> None:
    """Write other files' tensors, byte for byte, into a new file.

    Widest elements first, so that each tensor starts at a multiple of its element size.
    """
    placed = sorted(tensors, key=lambda t: (-t.bytes // max(1, prod(t.shape)), t.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in placed:
        start, end = end, end + tensor.bytes
        place = {"shape": tensor.shape, "data_offsets": (start, end)}
        header[tensor.name] = {"dtype": tensor.dtype, **place}
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("xb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        for tensor in placed:
            with tensor.path.open("rb") as source:
                source.seek(tensor.start)
                for left in range(tensor.bytes, 0, -CHUNK_BYTES):
                    file.write(source.read(min(left, CHUNK_BYTES)))


def differ(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors differ in shape, or in the values at sampled places.

    There are SAMPLES places, evenly from the first bytes to the last. Tensors of
    different dtypes are taken as equal: their values can be.
    """
    if one.shape != other.shape:
        return True
    if one.dtype != other.dtype:
        return False
    furthest = max(0, one.bytes - SAMPLE_BYTES)
    with one.path.open("rb") as first, other.path.open("rb") as second:
        for number in range(SAMPLES):
            offset = furthest * number // (SAMPLES - 1)
            length = min(SAMPLE_BYTES, one.bytes)
            first.seek(one.start + offset)
            second.seek(other.start + offset)
            if first.read(length) != second.read(length):
                return True
    return False


def check_pickle(path: Path, origin: str) -> None:
    """Check that the file is not empty, not a pointer, and its zip archive has its end.

    torch.save writes zip archives since torch 1.6; older files are left to torch.
    """
    start = _start(path, origin)
    if not start:
        raise _corrupt(path, origin, "is empty")
    if start.startswith(b"PK") and not zipfile.is_zipfile(path):
        raise _corrupt(path, origin, "is truncated: its archive has no end record")


def _start(path: Path, origin: str) -> bytes:
    with path.open("rb") as file:
        start = file.read(64)
    if paths.is_lfs_pointer(start):
        raise _corrupt(path, origin, "is a git-lfs pointer, not the weights")
    return start


def _listed(directory: Path, pattern: str, origin: str) -> tuple[Path, ...]:
    """Files of one kind: those that the index names, else those that exist.

    Every shard that the index or the other names imply is in the list, whether it
    exists or not.
    """
    for index in sorted(directory.glob(f"{pattern}.index.json")):
        return tuple(directory / name for name in _shards_of(index, origin))
    # A LoRA adapter next to or instead of the weights is not the model's.
    found = [p for p in sorted(directory.glob(pattern)) if "adapter" not in p.name]
    return tuple(dict.fromkeys([*found, *_siblings_of(found)]))


def _shards_of(index: Path, origin: str) -> list[str]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        return sorted({str(name) for name in weight_map.values()})
    except PermissionError as error:
        raise paths.denied(index, origin, error) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"is no index of weights: {type(error).__name__}: {error}"
        raise _corrupt(index, origin, problem) from error


def _siblings_of(files: Iterable[Path]) -> Iterator[Path]:
    """For ``x-00001-of-00003``, all three, in numeric order."""
    for path in files:
        match = _SHARD.fullmatch(path.name)
        if match:
            stem, _, count, suffix = match.groups()
            for number in range(1, int(count) + 1):
                yield path.with_name(f"{stem}-{number:05d}-of-{count}{suffix}")


def _corrupt(path: Path, origin: str, problem: str, **facts: int) -> StageFault:
    facts["size_bytes"] = path.stat().st_size
    directory = str(path.parent)
    return paths.fault(
        "checkpoint.corrupt", path, origin, problem, directory=directory, **facts
    )


def _some(names: list[str]) -> str:
    if not names:
        return "nothing"
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if names[6:] else "")


def _training_state(names: list[str]) -> str:
    """What the files are if a trainer wrote them in a format of its own."""
    kinds = (
        (r"model_world_size_\d+_rank_\d+\.pt", "verl's FSDP shards, not merged yet"),
        (r"(global_step|mp_rank_)\w*", "a DeepSpeed or Megatron checkpoint"),
        (r"adapter_model\.safetensors|adapter_config\.json", "a LoRA adapter alone"),
        (r".*\.distcp", "a torch.distributed checkpoint"),
        (r".*\.gguf", "a GGUF file"),
    )
    for pattern, kind in kinds:
        if any(re.fullmatch(pattern, name) for name in names):
            return f"; this looks like {kind}"
    return ""
