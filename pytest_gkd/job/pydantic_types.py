"""Whether a value is valid for an annotated type under pydantic 2's defaults."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from functools import cache
from typing import Any

WHOLE = re.compile(r"\s*[+-]?\d+(?:_\d+)*(?:\.0*)?\s*")
TRUTHS = ("0", "off", "f", "false", "n", "no", "1", "on", "t", "true", "y", "yes")
WHOLES = ("int", "PositiveInt", "NonNegativeInt")
REALS = ("float", "PositiveFloat", "NonNegativeFloat")


@cache
def read(text: str) -> tuple[ast.expr, ast.expr | None]:
    """A field's annotation and its default, from ``annotation = default``."""
    line = ast.parse(f"x: {text}").body[0]
    assert isinstance(line, ast.AnnAssign)
    return line.annotation, line.value


def members(node: ast.expr) -> list[ast.expr]:
    """The members of a union, Optional or NotRequired; else the type itself."""
    if isinstance(node, ast.BinOp):
        return [*members(node.left), *members(node.right)]
    if isinstance(node, ast.Subscript):
        inside = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        name = ast.unparse(node.value)
        if name == "Annotated":
            return members(inside[0])
        if name in ("NotRequired", "Required", "Union", "Optional"):
            more = [ast.Constant(None)] if name == "Optional" else []
            return [one for part in inside for one in members(part)] + more
    return [node]


def fits(node: ast.expr, value: Any) -> bool:
    """Whether pydantic accepts the value, converted if need be.

    Classes accept a mapping, types that are not read anything.
    """
    return any(_fits(one, value) for one in members(node))


def _fits(node: ast.expr, value: Any) -> bool:
    if isinstance(node, ast.Constant):
        return bool(value == node.value)
    if isinstance(node, ast.Subscript):
        inside = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        name = ast.unparse(node.value)
        if name == "Literal":
            literals = (one.value for one in inside if isinstance(one, ast.Constant))
            return value in list(literals)
        if name in ("list", "List", "Sequence"):
            return isinstance(value, list) and all(fits(inside[0], v) for v in value)
        if name in ("dict", "Dict", "Mapping"):
            return isinstance(value, dict)
        return True
    name = ast.unparse(node)
    if name in WHOLES:
        if isinstance(value, str):
            return bool(WHOLE.fullmatch(value))
        if isinstance(value, float) and not (value.is_integer() and abs(value) < 2**63):
            return False
        least = {"PositiveInt": 1, "NonNegativeInt": 0}.get(name)
        return isinstance(value, int | float) and (least is None or value >= least)
    if name in REALS:
        return isinstance(value, int | float) or _is_number(value)
    if name == "bool":
        return value in (0, 1) or (isinstance(value, str) and value.lower() in TRUTHS)
    if name in ("str", "Path"):
        return isinstance(value, str)
    if name in ("list", "dict"):
        return isinstance(value, {"list": list, "dict": dict}[name])
    return name in ("Any", "object") or value is not None


BOUNDS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "ge": ("at least", operator.ge),
    "gt": ("above", operator.gt),
    "le": ("at most", operator.le),
    "lt": ("below", operator.lt),
}


def out_of_bounds(node: ast.expr, value: Any) -> str:
    """What a number must be by the ``Field(ge=...)`` of its type; empty if it is."""
    if not isinstance(value, int | float) or not isinstance(node, ast.Subscript):
        return ""
    told = []
    for call in node.slice.elts if isinstance(node.slice, ast.Tuple) else []:
        for bound in call.keywords if isinstance(call, ast.Call) else []:
            words, holds = BOUNDS.get(bound.arg or "", ("", operator.ge))
            limit = bound.value.value if isinstance(bound.value, ast.Constant) else None
            if not isinstance(limit, int | float) or holds(value, limit):
                continue
            told += [f"{words} {limit}"] if words else []
    return " and ".join(told)


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True
