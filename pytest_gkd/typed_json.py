"""Dataclasses as JSON or TOML; their fields are the only list of the keys."""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")
Reader = Callable[[Any], Any]
PLAIN: dict[Any, Any] = {str: str, int: int, float: (float, int), bool: bool}
# Saved before any stage can monkeypatch them, for one test or for good.
_dumps, _loads = json.dumps, json.loads


def dumps(value: Any) -> str:
    """A dataclass as one line of JSON; what JSON cannot represent becomes a string."""
    return _dumps(dataclasses.asdict(value), default=str)


def loads(kind: type[T], text: str) -> T:
    """The inverse of ``dumps``. Raises ValueError and TypeError as ``read`` does."""
    return read(kind, _loads(text))


def read(kind: type[T], values: Mapping[str, Any]) -> T:
    """The dataclass ``kind`` with these values of its fields.

    Where a field's type says so, lists become tuples, strings paths and mappings
    dataclasses. Raises ValueError naming unknown or missing keys, and TypeError if a
    string, number or bool is expected and something else is given.
    """
    readers, needed = _fields(kind)  # type: ignore[arg-type]
    if unknown := [name for name in values if name not in readers]:
        raise ValueError(f"unknown keys {', '.join(sorted(unknown))}")
    if missing := needed.difference(values):
        raise ValueError(f"{', '.join(sorted(missing))} missing")
    return kind(**{name: readers[name](value) for name, value in values.items()})


@cache
def _fields(kind: type) -> tuple[dict[str, Reader], set[str]]:
    """A reader for each field of a dataclass, and the names of those without a default.

    Cached per class, as ``read`` is called for every event.
    """
    hints = get_type_hints(kind)
    fields = dataclasses.fields(kind)
    none = dataclasses.MISSING
    needed = {f.name for f in fields if f.default is f.default_factory is none}
    return {f.name: _reader(hints[f.name]) for f in fields}, needed


def _reader(kind: Any) -> Reader:
    if isinstance(kind, types.UnionType):
        (kind,) = (one for one in get_args(kind) if one is not type(None))
        some = _reader(kind)
        return lambda value: None if value is None else some(value)
    if get_origin(kind) is tuple:
        one = _reader(get_args(kind)[0])
        return lambda values: tuple(map(one, values))
    if kind is Path:
        return Path
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return partial(read, kind)
    if kind in PLAIN:
        return partial(_plain, kind)
    return lambda value: value


def _plain(kind: type, value: Any) -> Any:
    if not isinstance(value, PLAIN[kind]):
        raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
    return value
