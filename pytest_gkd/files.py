"""Files of ours, written whole or not at all, private, and through no link."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from typing import Any, BinaryIO


def write_json(path: Path, data: Any) -> None:
    """Write a whole file or leave the old one: write beside it, then rename."""
    write_whole(path, json_text(data))


def json_text(data: Any) -> str:
    """As it stands in a file; values that JSON does not know become their text."""
    return json.dumps(_finite(data), indent=1, default=str) + "\n"


def read_json_lines(path: Path) -> tuple[dict[str, Any], ...]:
    """The objects of a file, one a line; one still being written is left out.

    None where there is no file.
    """
    whole = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
    return tuple(json.loads(line) for line in whole.splitlines())


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
        raise OSError(errno.ELOOP, "a link has the place of a directory", place)


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
