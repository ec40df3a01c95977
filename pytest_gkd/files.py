"""Writes our files: atomically, private to the user, and never through a link."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

# Saved before any stage can monkeypatch them, for one test or for good.
_dumps, _loads, _write = json.dumps, json.loads, os.write


def write_json(path: Path, data: Any) -> None:
    """Write JSON atomically: to a temporary file next to it, then rename."""
    write_whole(path, json_text(data))


def json_text(data: Any) -> str:
    """Data as written to a file; values that JSON cannot represent become strings."""
    return json.dumps(_finite(data), indent=1, default=str) + "\n"


def json_line(data: dict[str, Any], default: Callable[[Any], Any] = str) -> bytes:
    """An object as one line; ``default`` converts what JSON cannot represent."""
    return f"{_dumps(data, default=default)}\n".encode("utf-8", "replace")


def append_line(descriptor: int, line: bytes) -> None:
    """Append a ``json_line`` in one write call, which a kill cannot undo.

    A newline precedes it, so that it stays intact after a line cut off by a full disk
    or a kill. Raises OSError, even if part of it was written.
    """
    if _write(descriptor, b"\n" + line) <= len(line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def json_object(line: bytes) -> dict[str, Any]:
    """The object in a line; empty if the line was cut off and so is not JSON, is still
    being written, or was written by something else."""
    try:
        found = _loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def json_lines(data: bytes) -> Iterator[dict[str, Any]]:
    """The non-empty ``json_object`` of every line."""
    return filter(None, map(json_object, data.splitlines()))


def read_json_lines(path: Path) -> tuple[dict[str, Any], ...]:
    """The ``json_lines`` of a file; none if there is no file."""
    return tuple(json_lines(path.read_bytes())) if path.exists() else ()


def make_way(path: Path) -> None:
    """Create a file's parent directory; ``path`` is absolute and without links.

    Raises OSError if there is a link in the path by now. A stage may have put it there,
    and whatever is behind it is the user's.
    """
    _refuse_links(path.parent)
    path.parent.mkdir(parents=True, exist_ok=True)


def _refuse_links(directory: Path) -> None:
    place = str(directory)
    if os.path.realpath(place) != place:
        raise OSError(errno.ELOOP, "a link is where a directory should be", place)


def write_whole(path: Path, text: str) -> None:
    """As write_json, for a text; its directory must exist."""
    _refuse_links(path.parent)
    temporary = path.with_name(path.name + ".part")
    try:
        write_private(temporary, text)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)  # the disk may be full
        raise


def write_private(path: Path, text: str) -> None:
    """Write a file that only this user can read, whatever the umask; no link is
    followed."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(text.encode("utf-8", "replace"))


def shown_from(base: Path, path: Path) -> str:
    """The shortest form of a path, seen from the directory ``base``."""
    return str(path.relative_to(base) if path.is_relative_to(base) else path)


def read_end(file: BinaryIO, limit_bytes: int) -> str:
    """The last ``limit_bytes`` of an open file, as text."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - limit_bytes))
    return file.read().decode("utf-8", "replace")


def _finite(data: Any) -> Any:
    """Replace NaN and infinities, which JSON lacks, by their names."""
    if isinstance(data, float) and not math.isfinite(data):
        return str(data)
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return data


def cache_directory() -> Path | None:
    """Our directory in the user's cache; None for a user without a home.

    A relative ``$XDG_CACHE_HOME`` counts as unset, as its specification requires.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    # Not Path.home(), which raises if there is no home.
    base = given if given.startswith("/") else os.path.expanduser("~/.cache")  # noqa: PTH111
    return Path(base, "pytest-gkd") if base.startswith("/") else None
