"""Checks that the train files exist and are what their names say.

A wrong path is reported before ``datasets`` is imported (which takes one to two
seconds), and a pipe that would stall its readers is never opened.
"""

from __future__ import annotations

import errno
import glob
import importlib.util
import os
import stat
import struct
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_gkd import hub_cache
from pytest_gkd.language import marked
from pytest_gkd.stage_api import StageFault
from pytest_gkd.workload import paths
from pytest_gkd.workload.data.json_lines import ZIP, ZSTD, check_json, corrupt

# The larger the files, the longer the data stage may take beyond its budget. Measured
# on two cores: a million rows of JSONL (110 MB) in 10 s; this is a fifth of that pace.
SLOW_BYTES_PER_S = 2_000_000
PARQUET_MAGIC = b"PAR1"
ARROW_MAGIC = b"ARROW1"
ARROW_STREAM = b"\xff\xff\xff\xff"
JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
OTHER_SUFFIXES = (".parquet", ".csv", ".arrow", ".feather")
SUFFIXES = JSON_SUFFIXES + OTHER_SUFFIXES
EXPECTED = marked("parquet, JSON, CSV or Arrow")  # for messages
# Which of two formats datasets takes if there are equally many files of both.
_FAVOURITES = (".parquet", ".arrow", ".jsonl", ".json", ".csv", ".ndjson")
# What verl, TRL, ms-swift and OpenRLHF read all or in part; the builders of datasets.
LOADERS = ("parquet", "json", "csv", "arrow")
# Left in a directory by Dataset.save_to_disk and DatasetDict.save_to_disk.
SAVED = ("state.json", "dataset_dict.json")

# Other formats that turn up with these suffixes, by their first bytes.
_OTHERS = (
    (b"PARE", "an encrypted parquet file"),
    (b"FEA1", "a Feather file of version 1, which datasets does not read"),
    (ZIP, "a zip archive"),
    (b"\xff\xfe", "UTF-16 text"),
    (b"\xfe\xff", "UTF-16 text"),
    (b"<", "HTML or XML"),
)


@dataclass(frozen=True)
class DataFile:
    """What one train file is, and its size in bytes (0 if only reading it would tell).

    ``origin`` says who named it, for messages.
    ``kind`` is parquet, json (JSON lines, or one JSON array), csv, arrow, ``folder`` (a
    directory of such files), ``disk`` (made by ``save_to_disk``) or ``hub`` (a name on
    the hub).
    """

    path: str
    kind: str
    size_bytes: int
    origin: str

    @property
    def local_kind(self) -> str:
        """Its kind, empty for an address (``s3://…``)."""
        return "" if "://" in self.path else self.kind


def check_files(files: Sequence[str], origin: str) -> tuple[DataFile, ...]:
    """Every train file, globs expanded, checked without loading it.

    The ends of parquet files and the first and last lines of JSON are read. Addresses
    (``s3://…``) and names on the hub are passed on unchecked. Raises StageFault
    ``data.file-missing``, ``data.empty``, ``data.corrupt``, ``data.schema``,
    ``data.loader-stall``, ``env.package-missing`` or ``env.permission``.
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
            found.append(DataFile(name, kind, 0, origin))
            continue
        path = Path(name).expanduser()
        if _is_on_hub(name, path):
            found.append(DataFile(name, "hub", 0, origin))
            continue
        for one in _expanded(path, origin):
            try:
                found.append(_checked(one, origin))
            except PermissionError as error:
                raise paths.denied(one, origin, error) from error
    return tuple(found)


def _is_on_hub(name: str, path: Path) -> bool:
    """Whether ``load_dataset`` would ask the hub for a name, as the user intended.

    A name with a known suffix, or in a directory that exists here, is a wrong path.
    """
    owner, _, rest = name.partition("/")
    return (
        bool(rest)
        and hub_cache.is_hub_id(name)
        and not name.lower().endswith(SUFFIXES)
        and not (Path(owner).exists() or os.path.lexists(path))
    )


def _expanded(path: Path, origin: str) -> list[Path]:
    if not glob.has_magic(str(path)):
        return [path]
    found = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207 - absolute too
    if os.path.lexists(path) and str(path) not in found:
        what = (
            "exists, but datasets takes its name for a pattern that does not match it; "
            "expected a name without [, ] and *"
        )
        raise _no_data(path, origin, what)
    if not found:
        raise _no_data(path, origin, "matches no file")
    return [Path(name) for name in found]


def _no_data(path: Path, origin: str, problem: str) -> StageFault:
    """The fault for a path that does not hold the data, and where to look."""
    place = path if path.is_dir() else paths.first_missing(path).parent
    return paths.fault(
        "data.file-missing", path, origin, problem, near=[], directory=str(place)
    )


def _checked(path: Path, origin: str) -> DataFile:
    try:
        status = path.stat()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        expected = f"a file or directory of {EXPECTED}"
        raise paths.missing(
            "data.file-missing", path, origin, expected, SUFFIXES
        ) from None
    if stat.S_ISDIR(status.st_mode):
        return _directory(path, origin)
    if not stat.S_ISREG(status.st_mode):
        kind = "a pipe" if stat.S_ISFIFO(status.st_mode) else "a device or socket"
        what = f"is {kind}, on which a reader may wait forever; expected a "
        what += "regular file"
        raise paths.fault("data.loader-stall", path, origin, what, file_type=kind)
    if status.st_size == 0:
        raise paths.fault("data.empty", path, origin, "is empty (0 bytes)", rows=0)
    with path.open("rb") as file:
        start = file.read(64)
    kind = _kind(path, start, status.st_size)
    return DataFile(str(path), kind, status.st_size, origin)


def _directory(path: Path, origin: str) -> DataFile:
    """Check that ``datasets`` can load a directory, without loading it."""
    if any((path / name).is_file() for name in SAVED):
        return DataFile(str(path), "disk", 0, origin)
    inside = _of_one_format(
        one
        for one in sorted(path.rglob("*"))
        if not _is_passed_over(one.relative_to(path)) and not one.is_dir()
    )
    if not inside or (path / "config.json").is_file():
        what = "a model's directory" if inside else "a directory without data files"
        raise _no_data(path, origin, f"is {what}; expected {EXPECTED}")
    size = sum(_checked(one, origin).size_bytes for one in inside)
    return DataFile(str(path), "folder", size, origin)


def _is_passed_over(path: Path) -> bool:
    """Whether ``datasets`` skips a file because of its name or a directory's."""
    hidden = any(part.startswith(".") for part in path.parts)
    return hidden or any(part.startswith("__") for part in path.parent.parts)


def _of_one_format(files: Iterable[Path]) -> list[Path]:
    """Those of the most common format, which is what ``datasets`` takes.

    A suffix counts anywhere in the name: ``x.parquet.lock`` is read as well
    (datasets 5.2, load.py, infer_module_for_data_files_list; data_files.py, filter).
    """
    ends = [(one, {suffix.lower() for suffix in one.suffixes}) for one in files]
    chosen = max(_FAVOURITES, key=lambda end: sum(end in own for _, own in ends))
    alike = set(JSON_SUFFIXES if chosen in JSON_SUFFIXES else [chosen])
    return [one for one, own in ends if own & alike]


def _kind(path: Path, start: bytes, size: int) -> str:
    """What a file is, by its content; its name must not say otherwise."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if paths.is_lfs_pointer(start):
        what = "is a git-lfs pointer, not the data itself"
        raise corrupt(path, what, lfs_pointer=True)
    if start.startswith(PARQUET_MAGIC):
        if any(suffix in JSON_SUFFIXES for suffix in suffixes):
            raise corrupt(path, "holds parquet, but its name says JSON")
        _check_parquet(path, size)
        return "parquet"
    if start.startswith(ZIP) and _holds_json(path):
        return "json"
    for magic, other in _OTHERS:
        if start.startswith(magic):
            raise corrupt(path, f"is {other}; expected {EXPECTED}")
    if ".parquet" in suffixes:
        problem = f"starts with {start[:16]!r} instead of {PARQUET_MAGIC!r}"
        raise corrupt(path, f"is not parquet: it {problem}")
    # Feather is the Arrow IPC file format since its version 2.
    if start.startswith(ARROW_MAGIC) or {".arrow", ".feather"} & set(suffixes):
        if not start.startswith((ARROW_MAGIC, ARROW_STREAM)):
            raise corrupt(path, f"is no Arrow file: it starts with {start[:16]!r}")
        return "arrow"
    if ".csv" in suffixes:
        return "csv"
    if not start.startswith(ZSTD):  # nothing here decompresses it
        check_json(path)
    elif importlib.util.find_spec("zstandard") is None:  # datasets 5.2, extract.py
        raise StageFault(
            "env.package-missing",
            f"{path} is zstd, for which datasets needs the package zstandard",
            facts={"package": "zstandard", "path": str(path)},
        )
    return "json"


def _holds_json(path: Path) -> bool:
    """Whether every file in a zip archive is JSON by its name, as datasets reads it."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if not name.endswith("/")]
    except zipfile.BadZipFile:
        return False
    return bool(names) and all(name.lower().endswith(JSON_SUFFIXES) for name in names)


def _check_parquet(path: Path, size: int) -> None:
    """A footer, its length, and the magic again (parquet-format, File format)."""
    if size < 12:
        raise corrupt(path, f"is truncated: {size} bytes cannot hold a parquet footer")
    with path.open("rb") as file:
        file.seek(-8, os.SEEK_END)
        footer_bytes, end = struct.unpack("<I4s", file.read(8))
    if end != PARQUET_MAGIC:
        problem = f"ends with {end!r} instead of {PARQUET_MAGIC!r}"
        raise corrupt(path, f"is truncated: it {problem}")
    if footer_bytes + 12 > size:
        problem = f"its footer would take {footer_bytes} bytes of {size}"
        raise corrupt(path, f"is damaged: {problem}")
