"""Checks that a file is JSON lines, and names the line that breaks it.

Objects may stand several on a line or over several lines, as ``datasets`` takes them.
Standard library only. Compressed files (gzip, xz, bzip2) are read through.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import json
import lzma
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, cast

from pytest_gkd.stage_api import StageFault

PEEK_BYTES = 1 << 16  # read at either end before the loader reads all
WHOLE_BYTES = 16 << 20  # what is not one object a line is parsed here up to this size
# The JSON reader of datasets takes the columns' types from so much of the first file
# (datasets 5.2, packaged_modules/json/json.py, chunksize).
TYPED_BYTES = 10 << 20
# Objects and lists in each other that a column may hold: Arrow hands over 64 levels
# (c/bridge.cc, kMaxImportRecursionLevel), the row and the innermost value among them.
MOST_LEVELS = 62
GZIP, XZ, BZIP2, ZSTD = b"\x1f\x8b", b"\xfd7zXZ\x00", b"BZh", b"\x28\xb5\x2f\xfd"
ZIP = b"PK\x03\x04"
TAR, TAR_AT = b"ustar", 257  # POSIX.1-1988, ustar Interchange Format
_BAD = object()
_BEFORE = b"\xef\xbb\xbf \r\n\t"  # what may stand before the first value
_BLANKS = re.compile(r"[ \t\n\r]*")
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]')


def corrupt(
    path: Path | str, problem: str, line: int | None = None, text: str = ""
) -> StageFault:
    """``data.corrupt`` at a file or a line of it, with the line as evidence."""
    where = f"{path}:{line}" if line else str(path)
    facts: dict[str, Any] = {"path": str(path)}
    evidence: tuple[tuple[str, int | None, str], ...] = ()
    if line:
        facts["line"] = line
        evidence = ((str(path), line, text[:200]),)
    return StageFault(
        "data.corrupt", f"{where} {problem}", facts=facts, evidence=evidence
    )


def first_bad_line(path: Path | str) -> StageFault | None:
    """The first line of a JSON lines file that is no JSON object, as a fault.

    The whole file is read; None when every line is one. Raises StageFault
    ``data.corrupt`` where it cannot be unpacked.
    """
    with _unpacking(Path(path)), open_text(Path(path)) as file:
        for number, raw in enumerate(file, 1):
            fault = _line_fault(path, number, raw, last=False)
            if fault is not None:
                return fault
    return None


def first_changed_type(path: Path | str) -> StageFault | None:
    """The first row of which a column has another JSON type than above, as a fault.

    For files whose lines all parse. int and float count as one type, null as any.
    """
    seen: dict[str, tuple[str, int]] = {}
    for number, row, raw in objects_of(path):
        for column, value in row.items():
            kind = "number" if type(value) in (int, float) else type(value).__name__
            if value is None:
                continue
            before, line = seen.setdefault(column, (kind, number))
            if before != kind:
                return StageFault(
                    "data.schema",
                    f"{path}:{number}: column {column!r} is {_short(repr(value))}, a "
                    f"{kind}; in line {line} it is a {before}",
                    facts={"path": str(path), "line": number, "changed": column},
                    evidence=((str(path), number, raw.decode().strip()[:200]),),
                )
    return None


def first_late_value(paths: Iterable[Path | str]) -> StageFault | None:
    """The first row with a value where all rows that give the types have none.

    Those are in the first TYPED_BYTES of the first file. For files whose lines all
    parse.
    """
    filled: set[str] = set()
    columns: set[str] = set()
    read = 0
    for index, path in enumerate(paths):
        last = 0
        for number, row, raw in objects_of(path):
            new = set(_filled(row)) - filled
            if new and (index or read > TYPED_BYTES):
                place = min(new, key=len)
                what = (
                    f"{place!r} has a value here, and is null or absent in all of the "
                    "rows from which datasets takes the columns' types, the first "
                    f"{TYPED_BYTES >> 20} MB of the first file; it cannot change a "
                    "type later"
                )
                if index and place in row and place not in columns:
                    found = ", ".join(sorted(columns))
                    what = (
                        f"column {place!r} is not in the first file, which has {found}"
                    )
                shown = raw.decode("utf-8", "replace").strip()
                return StageFault(
                    "data.schema",
                    f"{path}:{number}: {what}",
                    facts={"path": str(path), "line": number, "late": place},
                    evidence=((str(path), number, shown[:200]),),
                )
            columns |= set() if index else row.keys()
            filled |= new
            read += len(raw) * (number != last)
            last = number
    return None


def _filled(value: Any, place: str = "") -> Iterator[str]:
    """Names of columns, and of fields in them, that a row gives a type to."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _filled(part, f"{place}.{name}" if place else name)
    elif isinstance(value, list):
        for part in value:
            yield from _filled(part, f"{place}[]")
    if place and value is not None:
        yield place


def first_too_deep(path: Path | str) -> StageFault | None:
    """The first row that is nested deeper than Arrow can hand it over."""
    with open_text(Path(path)) as file:
        lines = [file.read()] if is_spread(path) else file
        for number, raw in enumerate(lines, 1):
            if raw.count(b"{") + raw.count(b"[") > MOST_LEVELS:
                text = raw.decode("utf-8", "replace")
                if _levels(text) > MOST_LEVELS:
                    return _too_deep(path, number, text)
    return None


def _too_deep(path: Path | str, number: int, text: str) -> StageFault:
    return StageFault(
        "data.schema",
        f"{path}:{number} holds a value that is nested {_levels(text)} levels deep; "
        f"Arrow, in which datasets keeps the rows, takes {MOST_LEVELS}",
        facts={"path": str(path), "line": number, "too_deep": _levels(text)},
        evidence=((str(path), number, text.strip()[:200]),),
    )


def _levels(text: str) -> int:
    """How deep objects and lists stand in each other, the row itself not counted."""
    depth = deepest = 0
    for found in _BRACKETS.finditer(text):
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(found[0], 0)
        deepest = max(deepest, depth)
    return deepest - 1


def objects_of(path: Path | str) -> Iterator[tuple[int, Any, bytes]]:
    """Every value of a JSON lines file, with the number (from 1) and bytes of its line.

    Raises ValueError or RecursionError for a line that is no JSON.
    """
    with open_text(Path(path)) as file:
        for number, raw in enumerate(file, 1):
            for value in values(raw.decode("utf-8-sig")):
                yield number, value, raw


def values(text: str, decoder: json.JSONDecoder | None = None) -> Iterator[Any]:
    """The JSON values of a text, which stand after each other with or without blanks.

    Raises ValueError where there is something else, and RecursionError.
    """
    decoder = decoder or json.JSONDecoder()
    at = 0
    while True:
        blanks = _BLANKS.match(text, at)
        at = blanks.end() if blanks else at
        if at == len(text):
            return
        value, at = decoder.raw_decode(text, at)
        yield value


@contextlib.contextmanager
def _unpacking(path: Path) -> Iterator[None]:
    """What goes wrong with a packed file is told of the file."""
    try:
        yield
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        with path.open("rb") as file:
            if not file.read(8).startswith((GZIP, XZ, BZIP2)):
                raise
        raise corrupt(path, f"cannot be unpacked: {error}") from error


def open_text(path: Path) -> IO[bytes]:
    """The bytes of a file, uncompressed where it is gzip, xz or bzip2."""
    with path.open("rb") as file:
        start = file.read(8)
    opened: Any
    if start.startswith(GZIP):
        opened = gzip.open(path)  # noqa: SIM115 - the caller closes it
    elif start.startswith(XZ):
        opened = lzma.open(path)  # noqa: SIM115
    elif start.startswith(BZIP2):
        opened = bz2.open(path)  # noqa: SIM115
    else:
        opened = path.open("rb")
    return cast(IO[bytes], opened)


def is_disguised(path: Path | str) -> bool:
    """Whether the file is compressed, and its name does not say so."""
    with Path(path).open("rb") as file:
        start = file.read(8)
    packed = (
        *((GZIP, ".gz"), (XZ, ".xz"), (BZIP2, ".bz2"), (ZSTD, ".zst")),
        (ZIP, ".zip"),
    )
    return any(start.startswith(m) and Path(path).suffix != end for m, end in packed)


def is_sealed(path: Path | str) -> bool:
    """Whether only ``datasets`` unpacks the file: zstd, or a zip archive."""
    with Path(path).open("rb") as file:
        return file.read(4) in (ZSTD, ZIP)


def is_spread(path: Path | str) -> bool:
    """Whether rows are not lines: a JSON array, or objects over several lines."""
    path = Path(path)
    with open_text(path) as file:
        start = file.read(PEEK_BYTES)
    if start.lstrip(_BEFORE).startswith(b"["):
        return True
    first, newline, _ = start.lstrip().partition(b"\n")
    if not newline or _parsed(first) is not _BAD:
        return False
    if path.stat().st_size <= WHOLE_BYTES:
        return _parsed_whole(path) is not _BAD
    return _starts_with_value(start)


def _is_long(path: Path) -> bool:
    """Whether a file, unpacked, is more than datasets reads at once."""
    with open_text(path) as file:
        return len(file.read(TYPED_BYTES + 1)) > TYPED_BYTES


def _starts_with_value(start: bytes) -> bool:
    """Whether bytes, which may be cut off, begin with a JSON value."""
    try:
        next(values(start.decode("utf-8-sig", "ignore")))
    except (ValueError, RecursionError):
        return False
    return True


def check_json(path: Path) -> None:
    """The first and the last lines are objects; or the file is one JSON value.

    Raises StageFault ``data.corrupt``, ``data.schema`` or ``data.empty``.
    """
    with _unpacking(path), open_text(path) as file:
        start = file.read(PEEK_BYTES)
        whole = not file.read(1)
    if start[TAR_AT:].startswith(TAR) and b"\0" in start[:TAR_AT]:
        archive = corrupt(
            path,
            "is a tar archive, as of WebDataset; expected the files that are in it",
        )
        archive.facts["archive"] = True
        raise archive
    if whole and not start.strip():
        raise StageFault(
            "data.empty",
            f"{path} has no rows, only blank lines",
            facts={"path": str(path), "rows": 0},
        )
    if is_spread(path):
        is_array = start.lstrip(_BEFORE).startswith(b"[")
        whole_fits = path.stat().st_size <= WHOLE_BYTES
        parsed: Any = _parsed_whole(path) if whole_fits else _BAD
        # A single object is read as a whole, by pandas, which datasets falls back on.
        single = parsed is not _BAD and len(parsed) == 1
        if not is_array and not single and _is_long(path):
            raise corrupt(
                path,
                f"has objects that take several lines and more than "
                f"{TYPED_BYTES >> 20} MB: datasets cuts such files in the middle of an "
                "object; expected one object a line",
            )
        if not whole_fits:
            return
        if parsed is _BAD:
            fault = first_too_deep(path)
            raise fault or corrupt(path, "is not a JSON array: " + _whole_error(path))
        if is_array and len(parsed) > 1:
            problem = f"holds {len(parsed)} JSON values after each other"
            raise corrupt(path, f"{problem}; expected one array, or one object a line")
        return
    lines = start.splitlines(keepends=True)
    if not whole:
        lines.pop()  # may be cut by our own reading
    for number, raw in enumerate(lines, 1):
        last = whole and number == len(lines)
        fault = _line_fault(path, number, raw, last=last)
        if fault is not None:
            raise fault
    if not whole:
        _check_last_line(path)


def _check_last_line(path: Path) -> None:
    """A download that stopped early ends inside a line."""
    with path.open("rb") as file:
        if file.read(8).startswith((GZIP, XZ, BZIP2)):
            return  # only unpacking all of it would tell
        file.seek(-PEEK_BYTES, os.SEEK_END)
        tail = file.read().rstrip()
    _, newline, last = tail.rpartition(b"\n")
    if newline and _parsed(last) is _BAD:
        with path.open("rb") as file:
            number = max(n for n, line in enumerate(file, 1) if line.strip())
        fault = _line_fault(path, number, last, last=True)
        if fault is not None:
            raise fault


def _parsed(raw: bytes) -> Any:
    """The values that bytes hold, or _BAD."""
    try:
        return list(values(raw.decode("utf-8-sig")))
    except (ValueError, RecursionError):
        return _BAD


def _parsed_whole(path: Path) -> Any:
    with open_text(path) as file:
        return _parsed(file.read())


def _whole_error(path: Path) -> str:
    with open_text(path) as file:
        raw = file.read()
    try:
        list(values(raw.decode("utf-8-sig")))
    except ValueError as error:
        return str(error)
    return ""


class _Twice(Exception):  # noqa: N818 - told on, not shown
    """An object with one key twice, of which json keeps the last."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _Twice(repr(key))
        found[key] = value
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)


def _line_fault(
    path: Path | str, number: int, raw: bytes, *, last: bool
) -> StageFault | None:
    """What is wrong with one line of JSON lines, if anything."""
    if not raw.strip():
        return None
    shown = raw.decode("utf-8", "replace").strip()
    try:
        text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
        found = list(values(text, _DECODER))
        json.dumps(found, ensure_ascii=False).encode()
    except RecursionError:
        return _too_deep(path, number, shown)
    except _Twice as error:
        return corrupt(path, f"has the key {error} twice in an object", number, shown)
    except UnicodeEncodeError as error:
        half = error.object[error.start].encode("ascii", "backslashreplace").decode()
        problem = (
            f"holds {half}, half of a surrogate pair (a cut emoji), which is no text"
        )
        return corrupt(path, problem, number, shown)
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8: byte {raw[error.start]:#04x} at column {error.start}"
        return corrupt(path, problem, number, shown)
    except json.JSONDecodeError as error:
        # A line that breaks at its very end, in the last line, was cut off.
        cut = last and not raw.endswith(b"\n")
        problem = "is cut off" if cut else "is not JSON"
        detail = f"{error.msg.removesuffix(' at')} at column {error.colno}"
        return corrupt(path, f"{problem} ({detail}): {_short(shown)}", number, shown)
    for value in found:
        if not isinstance(value, dict):
            return StageFault(
                "data.schema",
                f"{path}:{number} holds a JSON {type(value).__name__}; expected an "
                f"object with named columns: {_short(shown)}",
                facts={"path": str(path), "line": number},
                evidence=((str(path), number, shown[:200]),),
            )
    return None


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
