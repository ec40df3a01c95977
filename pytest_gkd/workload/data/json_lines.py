"""Checks that a file is JSON lines, and names the line that breaks it.

A line may hold several objects, and an object several lines, as ``datasets`` accepts.
Standard library only. Compressed files (gzip, xz, bzip2) are decompressed on the fly.
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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, cast

from pytest_gkd.stage_api import StageFault

PEEK_BYTES = 1 << 16  # read at either end before the loader reads all
WHOLE_BYTES = 16 << 20  # anything but one object a line is parsed here up to this size
# The JSON reader of datasets infers the column types from this much of the first file
# (datasets 5.2, packaged_modules/json/json.py, chunksize).
TYPED_BYTES = 10 << 20
# How deep objects and lists may be nested in a column: Arrow imports 64 levels
# (c/bridge.cc, kMaxImportRecursionLevel), including the row and the innermost value.
MOST_LEVELS = 62
GZIP, XZ, BZIP2, ZSTD = b"\x1f\x8b", b"\xfd7zXZ\x00", b"BZh", b"\x28\xb5\x2f\xfd"
ZIP = b"PK\x03\x04"
TAR, TAR_AT = b"ustar", 257  # POSIX.1-1988, ustar Interchange Format
# How to open a compressed file that starts with these bytes.
_OPENERS: dict[bytes, Callable[..., Any]] = {
    GZIP: gzip.open,
    XZ: lzma.open,
    BZIP2: bz2.open,
}
_BEFORE = b"\xef\xbb\xbf \r\n\t"  # may precede the first value
_BLANKS = re.compile(r"[ \t\n\r]*")
_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]')


def corrupt(path: Path | str, problem: str, **facts: Any) -> StageFault:
    """``data.corrupt`` for a file as a whole; ``problem`` follows its name."""
    facts = {"path": str(path), **facts}
    return StageFault("data.corrupt", f"{path} {problem}", facts=facts)


def no_rows(path: Path | str, more: str = "") -> StageFault:
    """``data.empty`` for a file."""
    facts = {"path": str(path), "rows": 0}
    return StageFault("data.empty", f"{path} has no rows{more}", facts=facts)


def _at_line(
    cause: str, path: Path | str, line: int, problem: str, raw: bytes, **facts: Any
) -> StageFault:
    """The fault in one line, which is its evidence; ``problem`` follows its number."""
    return StageFault(
        cause,
        f"{path}:{line}{problem}",
        facts={"path": str(path), "line": line, **facts},
        evidence=((str(path), line, _text(raw)[:200]),),
    )


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace").strip()


def first_bad_line(path: Path | str) -> StageFault | None:
    """The first line of a JSON lines file that is not a JSON object, as a fault.

    Reads the whole file; None if every line is one. Raises StageFault ``data.corrupt``
    if it cannot be decompressed.
    """
    with _unpacking(path), open_text(path) as file:
        return _first_fault(path, file)


def _first_fault(path: Path | str, lines: Iterable[bytes]) -> StageFault | None:
    faults = (_line_fault(path, number, raw) for number, raw in enumerate(lines, 1))
    return next(filter(None, faults), None)


def first_changed_type(path: Path | str) -> StageFault | None:
    """The first row where a column's JSON type differs from the rows above, as a fault.

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
                what = (
                    f": column {column!r} is {_short(repr(value))}, a {kind}; in line "
                    f"{line} it is a {before}"
                )
                return _at_line("data.schema", path, number, what, raw, changed=column)
    return None


def first_late_value(paths: Iterable[Path | str]) -> StageFault | None:
    """The first row with a value where all rows that types are inferred from have none.

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
                    f": {place!r} has a value here, and is null or absent in all of "
                    "the rows from which datasets takes the columns' types, the first "
                    f"{TYPED_BYTES >> 20} MB of the first file; it cannot change a "
                    "type later"
                )
                if index and place in row and place not in columns:
                    found = ", ".join(sorted(columns))
                    what = f": column {place!r} is not in the first file, which has "
                    what += found
                return _at_line("data.schema", path, number, what, raw, late=place)
            columns |= set() if index else row.keys()
            filled |= new
            read += len(raw) * (number != last)
            last = number
    return None


def _filled(value: Any, place: str = "") -> Iterator[str]:
    """Names of the columns, and fields in them, whose type a row reveals."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _filled(part, f"{place}.{name}" if place else name)
    elif isinstance(value, list):
        for part in value:
            yield from _filled(part, f"{place}[]")
    if place and value is not None:
        yield place


def first_too_deep(path: Path | str) -> StageFault | None:
    """The first row that is nested deeper than Arrow can import."""
    with open_text(path) as file:
        lines = [file.read()] if is_spread(path) else file
        for number, raw in enumerate(lines, 1):
            brackets = raw.count(b"{") + raw.count(b"[")  # cheap to compute
            if brackets > MOST_LEVELS and _levels(raw) > MOST_LEVELS:
                return _too_deep(path, number, raw)
    return None


def _too_deep(path: Path | str, number: int, raw: bytes) -> StageFault:
    levels = _levels(raw)
    what = (
        f" holds a value that is nested {levels} levels deep; Arrow, in which datasets "
        f"keeps the rows, allows {MOST_LEVELS}"
    )
    return _at_line("data.schema", path, number, what, raw, too_deep=levels)


def _levels(raw: bytes) -> int:
    """How deep objects and lists are nested, not counting the row itself."""
    depth = deepest = 0
    for found in _BRACKETS.finditer(raw):
        depth += {b"{": 1, b"[": 1, b"}": -1, b"]": -1}.get(found[0], 0)
        deepest = max(deepest, depth)
    return deepest - 1


def objects_of(path: Path | str) -> Iterator[tuple[int, Any, bytes]]:
    """Every value of a JSON lines file, with the number (from 1) and bytes of its line.

    Raises ValueError or RecursionError for a line that is not JSON.
    """
    with open_text(path) as file:
        for number, raw in enumerate(file, 1):
            for value in values(raw.decode("utf-8-sig")):
                yield number, value, raw


def values(text: str, decoder: json.JSONDecoder | None = None) -> Iterator[Any]:
    """The JSON values of a text, one after another, with or without blanks between.

    Raises ValueError if there is anything else, and RecursionError.
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
def _unpacking(path: Path | str) -> Iterator[None]:
    """Report what goes wrong with a compressed file as a fault of that file."""
    try:
        yield
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        if not _start(path).startswith(tuple(_OPENERS)):
            raise
        raise corrupt(path, f"cannot be unpacked: {error}") from error


def open_text(path: Path | str) -> IO[bytes]:
    """The bytes of a file, decompressed if it is gzip, xz or bzip2."""
    start = _start(path)
    found = (opener for magic, opener in _OPENERS.items() if start.startswith(magic))
    return cast(IO[bytes], next(found, Path.open)(Path(path), "rb"))


def _start(path: Path | str) -> bytes:
    with Path(path).open("rb") as file:
        return file.read(8)


def is_disguised(path: Path | str) -> bool:
    """Whether the file is compressed although its name does not say so."""
    start, end = _start(path), Path(path).suffix
    ends = {GZIP: ".gz", XZ: ".xz", BZIP2: ".bz2", ZSTD: ".zst", ZIP: ".zip"}
    return any(start.startswith(m) and end != own for m, own in ends.items())


def is_sealed(path: Path | str) -> bool:
    """Whether only ``datasets`` decompresses the file: zstd, or a zip archive."""
    return _start(path).startswith((ZSTD, ZIP))


def is_spread(path: Path | str) -> bool:
    """Whether rows are not lines: a JSON array, or objects that span lines."""
    with open_text(path) as file:
        start = file.read(PEEK_BYTES)
    if start.lstrip(_BEFORE).startswith(b"["):
        return True
    first, newline, _ = start.lstrip().partition(b"\n")
    if not newline or isinstance(_parsed(first), list):
        return False
    if Path(path).stat().st_size <= WHOLE_BYTES:
        return isinstance(_parsed_whole(path), list)
    # The bytes may be cut off in the middle of the next value.
    try:
        next(values(start.decode("utf-8-sig", "ignore")))
    except (ValueError, RecursionError):
        return False
    return True


def check_json(path: Path) -> None:
    """Check that the first and last lines are objects, or the file one JSON value.

    Raises StageFault ``data.corrupt``, ``data.schema`` or ``data.empty``.
    """
    with _unpacking(path), open_text(path) as file:
        start = file.read(PEEK_BYTES)
        whole = not file.read(1)
    if start[TAR_AT:].startswith(TAR) and b"\0" in start[:TAR_AT]:
        what = "is a tar archive, as WebDataset uses; expected the files inside it"
        raise corrupt(path, what, archive=True)
    if whole and not start.strip():
        raise no_rows(path, ", only blank lines")
    if is_spread(path):
        is_array = start.lstrip(_BEFORE).startswith(b"[")
        whole_fits = path.stat().st_size <= WHOLE_BYTES
        parsed = _parsed_whole(path) if whole_fits else []
        # A single object is read as a whole by pandas, the fallback of datasets.
        single = isinstance(parsed, list) and len(parsed) == 1
        with open_text(path) as file:  # is it more than datasets reads at once?
            is_long = len(file.read(TYPED_BYTES + 1)) > TYPED_BYTES
        if not is_array and not single and is_long:
            raise corrupt(
                path,
                "has objects that take several lines and more than "
                f"{TYPED_BYTES >> 20} MB: datasets cuts such files in the middle of an "
                "object; expected one object per line",
            )
        if isinstance(parsed, Exception):
            problem = f"is not a JSON array: {parsed}"
            raise first_too_deep(path) or corrupt(path, problem)
        if is_array and len(parsed) > 1:
            problem = f"holds {len(parsed)} JSON values after each other"
            raise corrupt(path, f"{problem}; expected an array, or an object per line")
        return
    lines = start.splitlines(keepends=True)
    if not whole:
        lines.pop()  # may have been cut off by our own read
    fault = _first_fault(path, lines)
    if fault is None and not whole:
        fault = _last_fault(path)
    if fault is not None:
        raise fault


def _last_fault(path: Path) -> StageFault | None:
    """Check the end of the file: a download that stopped early ends within a line."""
    if _start(path).startswith(tuple(_OPENERS)):
        return None  # only decompressing all of it would tell
    with path.open("rb") as file:
        file.seek(-PEEK_BYTES, os.SEEK_END)
        tail = file.read().rstrip()
    _, newline, last = tail.rpartition(b"\n")
    if not newline or isinstance(_parsed(last), list):
        return None
    with path.open("rb") as file:
        number = max(n for n, line in enumerate(file, 1) if line.strip())
    return _line_fault(path, number, last)


def _parsed(raw: bytes) -> list[Any] | Exception:
    """The values that the bytes hold, or why they are not JSON."""
    try:
        return list(values(raw.decode("utf-8-sig")))
    except (ValueError, RecursionError) as error:
        return error


def _parsed_whole(path: Path | str) -> list[Any] | Exception:
    with open_text(path) as file:
        return _parsed(file.read())


class _Twice(Exception):  # noqa: N818 - told on, not shown
    """An object has a key twice, of which json would keep the last one."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _Twice(repr(next(key for key in keys if keys.count(key) > 1)))
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)


def _line_fault(path: Path | str, number: int, raw: bytes) -> StageFault | None:
    """What is wrong with one line of JSON lines, if anything."""
    if not raw.strip():
        return None
    shown = _text(raw)
    try:
        text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
        found = list(values(text, _DECODER))
        json.dumps(found, ensure_ascii=False).encode()
    except RecursionError:
        return _too_deep(path, number, raw)
    except _Twice as error:
        problem = f" has the key {error} twice in an object"
    except UnicodeEncodeError as error:
        half = error.object[error.start].encode("ascii", "backslashreplace").decode()
        problem = (
            f" holds {half}, half of a surrogate pair (a cut emoji), which is not text"
        )
    except UnicodeDecodeError as error:
        problem = f" is not UTF-8: byte {raw[error.start]:#04x} at column {error.start}"
    except json.JSONDecodeError as error:
        # Only the last line may lack a line end.
        detail = f"{error.msg.removesuffix(' at')} at column {error.colno}"
        if raw.endswith((b"\n", b"\r")):
            problem = f" is not JSON ({detail}): {_short(shown)}"
        else:
            problem = f" is cut off ({detail}): {_short(shown)}"
    else:
        for value in found:
            if not isinstance(value, dict):
                what = (
                    f" holds a JSON {type(value).__name__}; expected an object with "
                    f"named columns: {_short(shown)}"
                )
                return _at_line("data.schema", path, number, what, raw)
        return None
    return _at_line("data.corrupt", path, number, problem, raw)


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
