"""Files of ours, written whole or not at all, private, and through no link."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

# Taken hold of before any stage replaces them, for the while of its test or for good.
_dumps, _loads, _write = json.dumps, json.loads, os.write


def write_json(path: Path, data: Any) -> None:
    """Write a whole file or leave the old one: write beside it, then rename."""
    write_whole(path, json_text(data))


def json_text(data: Any) -> str:
    """As it stands in a file; values that JSON does not know become their text."""
    return json.dumps(_finite(data), indent=1, default=str) + "\n"


def json_line(data: dict[str, Any], default: Callable[[Any], Any] = str) -> bytes:
    """An object as one line; ``default`` makes plain what JSON does not know."""
    return f"{_dumps(data, default=default)}\n".encode("utf-8", "replace")


def append_line(descriptor: int, line: bytes) -> None:
    """Append a ``json_line`` in one write call, which a kill cannot undo.

    A newline goes before it: after a line that a full disk or a kill cut off, the next
    is whole again. Raises OSError, also where a part of it found room.
    """
    if _write(descriptor, b"\n" + line) <= len(line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def json_object(line: bytes) -> dict[str, Any]:
    """What a line holds; nothing where it was cut off, which is no JSON then, where it
    is still being written, or where another hand wrote it."""
    try:
        found = _loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def json_lines(data: bytes) -> Iterator[dict[str, Any]]:
    """Every line's ``json_object`` that holds something."""
    return filter(None, map(json_object, data.splitlines()))


def read_json_lines(path: Path) -> tuple[dict[str, Any], ...]:
    """The ``json_lines`` of a file; none where there is no file."""
    return tuple(json_lines(path.read_bytes())) if path.exists() else ()


def make_way(path: Path) -> None:
    """Make the directory that a file goes to; ``path`` is absolute and without links.

    Raises OSError where a link stands on the way by now. A stage may have put it there,
    and what lies behind it is the user's.
    """
    _refuse_links(path.parent)
    path.parent.mkdir(parents=True, exist_ok=True)


def _refuse_links(directory: Path) -> None:
    place = str(directory)
    if os.path.realpath(place) != place:
        raise OSError(errno.ELOOP, "a link is where a directory should be", place)


def write_whole(path: Path, text: str) -> None:
    """As write_json, of a text; its directory must be there."""
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
    """A path as short as it can be said from the directory ``base``."""
    return str(path.relative_to(base) if path.is_relative_to(base) else path)


def read_end(file: BinaryIO, limit_bytes: int) -> str:
    """The last ``limit_bytes`` of an open file, as text."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - limit_bytes))
    return file.read().decode("utf-8", "replace")


def _finite(data: Any) -> Any:
    """NaN and infinities, which JSON has not, as their names."""
    if isinstance(data, float) and not math.isfinite(data):
        return str(data)
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return data


def cache_directory() -> Path | None:
    """Our directory in the user's cache; None for a user without a home.

    A relative ``$XDG_CACHE_HOME`` counts as unset, as its specification asks.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    # Not Path.home(), which raises when there is no home.
    base = given if given.startswith("/") else os.path.expanduser("~/.cache")  # noqa: PTH111
    return Path(base, "pytest-gkd") if base.startswith("/") else None
