"""The files of an installed package, found and read without importing it."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata, util
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NamedTuple

MOST_FILES = 2000
MOST_BYTES = 32 << 20
# The files' texts by their paths below the folder that contains the module.
Files = Mapping[str, str]
Schema = dict[str, Any]


class SourceError(Exception):
    """Sources that do not exist, or have an unknown layout; the message is a clause."""


class Source(NamedTuple):
    """Where a framework's options are in its sources, and what reads them.

    ``modules`` are the globs of the files that ``read`` needs, by the importable name
    of the folder that they are in or beside. ``read`` may raise anything if the layout
    is a different one. ``complete`` adds what only the record of an older release
    tells: it makes the whole schema from ``schema, release, older_release,
    older_schema``. ``beside`` are other packages that define some of the options.
    """

    modules: Mapping[str, Sequence[str]]
    read: Callable[[Files], Schema]
    complete: Callable[[Schema, str, str, Schema], Schema] | None = None
    beside: tuple[str, ...] = ()


def version(package: str) -> str | None:
    """A package's version, "" if its metadata is broken, None if not installed."""
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, OSError):
        return ""
    return found or ""


def texts(source: Source, path: Sequence[str] | None = None) -> tuple[Path, Files]:
    """The folder that a source's first module is in, and all the needed files.

    They are searched for as an import would, along ``path`` or, without one, this
    process's import path: an editable checkout is found, too. Raises SourceError.
    """
    folders, found, size = [], dict[str, str](), 0
    for module, globs in source.modules.items():
        places = _places(module, path)
        if not places:
            raise SourceError(f"{module} is not found where modules are imported from")
        folders += places[:1]
        try:
            paths = _wanted(places, globs)
            if not paths:
                raise SourceError(f"{places[0].parent} has no {globs[0]} to be read")
            for name, file in sorted(paths.items()):
                size += file.stat().st_size
                if size > MOST_BYTES or len(found) > MOST_FILES:
                    raise SourceError(f"{places[0]} has more than is read")
                found[name] = file.read_bytes().decode("utf-8", "replace")
        except OSError as error:
            raise SourceError(f"{error.filename}: {error.strerror}") from error
    return folders[0], found


def _wanted(places: Sequence[Path], globs: Sequence[str]) -> dict[str, Path]:
    """The files by name; of several with one name the first found, as in an import."""
    return {
        file.relative_to(place.parent).as_posix(): file
        for place in reversed(places)
        for glob in globs
        for file in place.parent.glob(glob)
        if file.is_file()
    }


def matching(files: Files, wanted: str) -> Files:
    """The files whose names match a pattern."""
    return {name: text for name, text in files.items() if re.fullmatch(wanted, name)}


def outline(text: str, wanted: re.Pattern[str]) -> str:
    """A file's imports and values, and the classes that match; parsing all is slow.

    Returns the text unchanged if that breaks its syntax, as with multi-line strings
    that have lines at the margin.
    """
    kept = _outline(text, wanted, "")
    try:
        ast.parse(kept)
    except SyntaxError:
        return text
    return kept


def outlined(text: str, wanted: re.Pattern[str], decorator: str = "") -> ast.Module:
    """The same as a tree; decorators that match ``decorator`` are kept, too."""
    try:
        return ast.parse(_outline(text, wanted, decorator))
    except SyntaxError:
        return ast.parse(text)


def _outline(text: str, wanted: re.Pattern[str], decorator: str) -> str:
    blocks = re.split(r"^(?=[^\s#)\]}])", text, flags=re.MULTILINE)
    return "".join(
        block
        for block in blocks
        if not re.match(r"@|(?:async\s+)?def\s", block)
        or (decorator and re.match(decorator, block))
        if not block.startswith("class ") or wanted.search(block)
    )


def digest(files: Files) -> str:
    """A digest that is the same for the same files."""
    told = hashlib.sha256()
    for name, text in files.items():
        told.update(f"{name}\0{text}\0".encode())
    return told.hexdigest()


def _places(module: str, path: Sequence[str] | None) -> list[Path]:
    """The folders that a module of this name is imported from."""
    try:
        spec = PathFinder.find_spec(module, path) if path else util.find_spec(module)
    except (ImportError, AttributeError, ValueError, OSError):
        return []
    return [Path(p) for p in (spec and spec.submodule_search_locations) or ()]
