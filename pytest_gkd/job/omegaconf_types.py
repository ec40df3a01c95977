"""Whether OmegaConf's structured configurations take a value for an annotated type.

Modelled on the nodes of omegaconf 2.3 (omegaconf/nodes.py); 2.4 agrees.
"""

from __future__ import annotations

import ast
from typing import Any

from pytest_gkd.job import pydantic_types

TRUTHS = ("yes", "no", "y", "n", "on", "off", "true", "false")
LISTS = ("list", "tuple", "sequence", "set")


def fits(node: ast.expr, value: Any) -> bool:
    """Whether a value is accepted, converted if need be; a class accepts a mapping."""
    return any(_fits(one, value) for one in pydantic_types.members(node))


def _fits(node: ast.expr, value: Any) -> bool:
    if isinstance(node, ast.Constant):
        return bool(value == node.value)
    if isinstance(node, ast.Subscript):
        inside = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        name = ast.unparse(node.value).lower()
        if name == "literal":
            known = [one.value for one in inside if isinstance(one, ast.Constant)]
            return str(value).rpartition(".")[2] in map(str, known)
        if name in LISTS:
            return isinstance(value, list) and all(fits(inside[0], v) for v in value)
        return isinstance(value, dict) if name in ("dict", "mapping") else True
    name = ast.unparse(node)
    if name == "int":
        return type(value) is int or _is_text_of(int, value)
    if name == "float":
        return type(value) in (int, float) or _is_text_of(float, value)
    if name == "bool":
        is_text = isinstance(value, str) and not _is_text_of(int, value)
        return value.lower() in TRUTHS if is_text else _is_whole(value)
    if name in ("str", "Path"):
        return value is not None and not isinstance(value, list | dict)
    if name.lower() in LISTS:
        return isinstance(value, list)
    if name in ("Any", "object"):
        return True
    return isinstance(value, dict)


def _is_whole(value: Any) -> bool:
    return type(value) in (int, bool) or _is_text_of(int, value)


def _is_text_of(kind: type[int] | type[float], value: Any) -> bool:
    if not isinstance(value, str):
        return False
    try:
        kind(value)
    except ValueError:
        return False
    return True
