"""Are the train files there, and are they what their names say?

Standard library only, so that a wrong path is reported before ``datasets`` (one to two
seconds) is imported, and a pipe that would stall its readers is never opened.
"""

from __future__ import annotations

import glob
import os
import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_gkd.fault import StageFault
from pytest_gkd.workload import paths
from pytest_gkd.workload.jsonlines import ZSTD, check_json, corrupt

PARQUET_MAGIC = b"PAR1"
JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")

# Other formats that turn up under these names, by their first bytes.
_OTHERS = (
    (b"PARE", "an encrypted parquet file"),
    (b"ARROW1", "an Arrow file"),
    (b"PK\x03\x04", "a zip archive"),
    (b"\xff\xfe", "UTF-16 text"),
    (b"\xfe\xff", "UTF-16 text"),
    (b"<", "HTML or XML"),
)


@dataclass(frozen=True)
class DataFile:
    """One train file; ``kind`` is parquet or json (JSON lines, or one JSON array)."""

    path: str
    kind: str
    size_bytes: int


def check_files(files: Sequence[str], origin: str) -> tuple[DataFile, ...]:
    """Every train file, globs expanded, looked at from outside.

    Ends of parquet files and the first and last lines of JSON are read. Addresses
    (``s3://…``) are passed on unseen. Raises StageFault ``data.file-missing``,
    ``data.empty``, ``data.corrupt``, ``data.schema``, ``data.loader-stall`` or
    ``env.permission``.
    """
    if not files:
        raise StageFault(
            "data.file-missing",
            f"{origin}: no train file was named",
            facts={"origin": origin},
        )
    found: list[DataFile] = []
    for name in files:
        if "://" in name:
            kind = "parquet" if ".parquet" in name else "json"
            found.append(DataFile(name, kind, 0))
            continue
        path = Path(name).expanduser()
        for one in _expanded(path, origin):
            try:
                found.append(_checked(one, origin))
            except PermissionError as error:
                raise paths.denied(one, origin, error) from error
    return tuple(found)


def _expanded(path: Path, origin: str) -> list[Path]:
    if os.path.lexists(path) or not glob.has_magic(str(path)):
        return [path]
    found = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207 - absolute too
    if not found:
        raise StageFault(
            "data.file-missing",
            f"{origin}: no file matches {path}",
            facts={"path": str(path), "origin": origin, "near": []},
        )
    return [Path(name) for name in found]


def _checked(path: Path, origin: str) -> DataFile:
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise paths.missing(
            "data.file-missing", path, origin, "a parquet or JSONL file"
        ) from None
    if stat.S_ISDIR(status.st_mode):
        inside = sorted(
            str(one)
            for suffix in (".parquet", *JSON_SUFFIXES)
            for one in path.glob(f"*{suffix}")
        )
        raise StageFault(
            "data.file-missing",
            f"{origin}: {path} is a directory; expected a parquet or JSONL file"
            f"{paths.did_you_mean(inside[:3])}",
            facts={"path": str(path), "origin": origin, "near": inside[:3]},
        )
    if not stat.S_ISREG(status.st_mode):
        kind = "a pipe" if stat.S_ISFIFO(status.st_mode) else "a device or socket"
        raise StageFault(
            "data.loader-stall",
            f"{origin}: {path} is {kind}, on which a reader may wait for ever; "
            "expected a regular file",
            facts={"path": str(path), "origin": origin, "file_type": kind},
        )
    if status.st_size == 0:
        raise StageFault(
            "data.empty",
            f"{origin}: {path} is empty (0 bytes)",
            facts={"path": str(path), "origin": origin, "rows": 0},
        )
    with path.open("rb") as file:
        start = file.read(64)
    return DataFile(str(path), _kind(path, start, status.st_size), status.st_size)


def _kind(path: Path, start: bytes, size: int) -> str:
    """Parquet or json, by content; the name may not say something else."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if paths.is_lfs_pointer(start):
        fault = corrupt(path, "is a git-lfs pointer, not the data itself")
        fault.facts["lfs_pointer"] = True
        raise fault
    if start.startswith(PARQUET_MAGIC):
        if any(suffix in JSON_SUFFIXES for suffix in suffixes):
            raise corrupt(path, "holds parquet, but its name says JSON")
        _check_parquet(path, size)
        return "parquet"
    for magic, other in _OTHERS:
        if start.startswith(magic):
            raise corrupt(path, f"is {other}; expected parquet or JSON lines")
    if ".parquet" in suffixes:
        raise corrupt(
            path,
            f"is not parquet: it starts with {start[:16]!r} instead of "
            f"{PARQUET_MAGIC!r}",
        )
    if not start.startswith(ZSTD):  # left to the loader
        check_json(path)
    return "json"


def _check_parquet(path: Path, size: int) -> None:
    """A footer, its length, and the magic again (parquet-format, File format)."""
    if size < 12:
        raise corrupt(path, f"is truncated: {size} bytes cannot hold a parquet footer")
    with path.open("rb") as file:
        file.seek(-8, os.SEEK_END)
        footer_bytes, end = struct.unpack("<I4s", file.read(8))
    if end != PARQUET_MAGIC:
        raise corrupt(
            path, f"is truncated: it ends with {end!r} instead of {PARQUET_MAGIC!r}"
        )
    if footer_bytes + 12 > size:
        raise corrupt(
            path,
            f"is damaged: its footer would take {footer_bytes} bytes of {size}",
        )
