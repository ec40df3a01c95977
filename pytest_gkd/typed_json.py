"""Dataclasses as JSON or TOML; their fields are the only list of the keys."""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")
PLAIN: dict[Any, Any] = {str: str, int: int, float: (float, int), bool: bool}
# Taken hold of before any stage replaces them, for the while of its test or for good.
_dumps, _loads = json.dumps, json.loads


def dumps(value: Any) -> str:
    """A dataclass as one line of JSON; values that JSON does not know become text."""
    return _dumps(dataclasses.asdict(value), default=str)


def loads(kind: type[T], text: str) -> T:
    """The inverse of ``dumps``. Raises ValueError and TypeError as ``read`` does."""
    return read(kind, _loads(text))


def read(kind: type[T], values: Mapping[str, Any]) -> T:
    """The dataclass ``kind`` with these values of its fields.

    Lists become tuples, texts become paths and mappings dataclasses where a field is
    one. Raises ValueError for unknown or missing keys, and names them, and TypeError
    for a text, number or truth value that is none.
    """
    known, needed = _keys(kind)  # type: ignore[arg-type]
    if unknown := sorted(set(values) - set(known)):
        raise ValueError(f"unknown keys {', '.join(unknown)}")
    if missing := sorted(needed - set(values)):
        raise ValueError(f"{', '.join(missing)} missing")
    return kind(**{name: _as(known[name], value) for name, value in values.items()})


@cache
def _keys(kind: type) -> tuple[dict[str, Any], set[str]]:
    """The types of a dataclass's fields, and the names of those without a default."""
    hints = get_type_hints(kind)
    fields = dataclasses.fields(kind)
    none = dataclasses.MISSING
    needed = {f.name for f in fields if f.default is f.default_factory is none}
    return {f.name: hints[f.name] for f in fields}, needed


def _as(kind: Any, value: Any) -> Any:
    if isinstance(kind, types.UnionType):
        (kind,) = (one for one in get_args(kind) if one is not type(None))
        return None if value is None else _as(kind, value)
    if get_origin(kind) is tuple:
        return tuple(_as(get_args(kind)[0], one) for one in value)
    if kind is Path:
        return Path(value)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return read(kind, value)
    if kind in PLAIN and not isinstance(value, PLAIN[kind]):
        raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
    return value
