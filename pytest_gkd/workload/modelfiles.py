"""Is there a model under this name, before anything heavy is imported?

Standard library only. A wrong path, a missing shard or a truncated file is reported in
milliseconds, where an engine would tell after half a minute, or not in these words.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_gkd.fault import StageFault
from pytest_gkd.workload import paths
from pytest_gkd.workload.modelpaths import is_offline, locate
from pytest_gkd.workload.weightfiles import check_weights

# Any one of these holds a vocabulary that transformers can build a tokenizer from.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tekken.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
)


@dataclass(frozen=True)
class ModelFiles:
    """What a model directory holds. ``weight_bytes`` is the sum of its files' sizes.

    ``vocab_size`` counts embedding rows; None where the config does not say.
    """

    directory: Path
    config: dict[str, Any]
    weight_files: tuple[Path, ...]
    weight_bytes: int
    vocab_size: int | None


def inspect(name: str, origin: str) -> ModelFiles | None:
    """Config, weights and tokenizer files of ``name``, checked.

    ``origin`` says where the name came from, such as ``--gkd-student``. None means
    that the hub has to answer: a hub id of which the cache holds nothing or a part.
    Raises StageFault ``checkpoint.missing``, ``checkpoint.corrupt``,
    ``tokenizer.load``, ``env.permission`` or ``env.hub-unreachable``.
    """
    found = locate(name, origin)
    if found is None:
        return None
    try:
        config = read_config(found.directory, origin)
        weights = check_weights(found.directory, origin)
        check_tokenizer_files(found.directory, origin)
    except StageFault as fault:
        if found.from_hub and fault.facts.get("absent") and not is_offline():
            return None  # the hub will bring what is not here yet
        raise
    return ModelFiles(
        directory=found.directory,
        config=config,
        weight_files=weights,
        weight_bytes=sum(path.stat().st_size for path in weights),
        vocab_size=vocab_size(config),
    )


def read_config(directory: Path, origin: str) -> dict[str, Any]:
    """``config.json`` of the directory, as an object.

    Raises StageFault ``checkpoint.missing`` or ``checkpoint.corrupt``.
    """
    path = directory / "config.json"
    if not path.is_file():
        deeper = sorted(str(found.parent) for found in directory.glob("*/config.json"))
        names = sorted(entry.name for entry in directory.iterdir())
        found_text = ", ".join(names[:6]) or "nothing"
        raise StageFault(
            "checkpoint.missing",
            f"{origin}: {directory} has no config.json; found {found_text}"
            f"{paths.did_you_mean(deeper[:3])}",
            facts={
                "path": str(directory),
                "origin": origin,
                "found": names[:20],
                "near": deeper[:3],
                "absent": True,
            },
        )
    return _read_object(path, origin, "checkpoint.corrupt")


def check_tokenizer_files(directory: Path, origin: str) -> tuple[Path, ...]:
    """The files that hold the vocabulary, looked at from outside.

    Raises StageFault ``tokenizer.load`` when there is none, or one is empty, cut off
    or a git-lfs pointer.
    """
    found = [directory / name for name in TOKENIZER_FILES]
    found = [path for path in found if path.is_file()]
    found += sorted(directory.glob("*.tiktoken"))
    config: dict[str, Any] = {}
    if (directory / "tokenizer_config.json").is_file():
        config = _read_object(
            directory / "tokenizer_config.json", origin, "tokenizer.load"
        )
    if not found and not config.get("auto_map"):
        names = sorted(entry.name for entry in directory.iterdir())
        raise StageFault(
            "tokenizer.load",
            f"{origin}: {directory} has no tokenizer; expected one of "
            f"{', '.join(TOKENIZER_FILES)}",
            facts={
                "path": str(directory),
                "origin": origin,
                "found": names[:20],
                "absent": True,
            },
        )
    for path in found:
        problem = _outside(path, origin)
        if problem:
            raise StageFault(
                "tokenizer.load",
                f"{origin}: {path} {problem}",
                facts={
                    "path": str(directory),
                    "file": path.name,
                    "origin": origin,
                    "size_bytes": path.stat().st_size,
                },
            )
    return tuple(found)


def vocab_size(config: dict[str, Any]) -> int | None:
    """Embedding rows, from the config or, for a multimodal model, its text part."""
    for part in (config, config.get("text_config"), config.get("llm_config")):
        if isinstance(part, dict) and isinstance(part.get("vocab_size"), int):
            return int(part["vocab_size"])
    return None


def _outside(path: Path, origin: str) -> str:
    """What is wrong with a vocabulary file, without parsing it; empty if nothing."""
    try:
        with path.open("rb") as file:
            start = file.read(64)
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 64))
            end = file.read().rstrip()
    except PermissionError as error:
        raise paths.denied(path, origin, error) from error
    if not start:
        return "is empty"
    if paths.is_lfs_pointer(start):
        return "is a git-lfs pointer, not the file itself"
    if path.suffix == ".json":
        if not start.lstrip(b"\xef\xbb\xbf \r\n\t").startswith(b"{"):
            return f"is not a JSON object: it starts with {start[:16]!r}"
        if not end.endswith(b"}"):
            return f"is cut off: it ends with {end[-16:]!r} instead of a closing brace"
    return ""


def _read_object(path: Path, origin: str, cause: str) -> dict[str, Any]:
    facts: dict[str, Any] = {"path": str(path), "origin": origin}
    try:
        raw = path.read_bytes()
    except PermissionError as error:
        raise paths.denied(path, origin, error) from error
    if paths.is_lfs_pointer(raw):
        raise StageFault(cause, f"{origin}: {path} is a git-lfs pointer", facts=facts)
    try:
        value = json.loads(raw)
    except json.JSONDecodeError as error:
        text = error.doc.splitlines()[error.lineno - 1 : error.lineno]
        raise StageFault(
            cause,
            f"{origin}: {path}:{error.lineno} is not JSON: {error.msg}",
            facts={**facts, "line": error.lineno},
            evidence=tuple((str(path), error.lineno, line[:200]) for line in text),
        ) from error
    except UnicodeDecodeError as error:
        raise StageFault(
            cause, f"{origin}: {path} is not UTF-8 text: {error}", facts=facts
        ) from error
    if not isinstance(value, dict):
        raise StageFault(
            cause,
            f"{origin}: {path} holds a JSON {type(value).__name__}; expected an object",
            facts=facts,
        )
    return value
