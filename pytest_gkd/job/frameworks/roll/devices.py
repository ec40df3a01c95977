"""The GPUs of a device_mapping, which ROLL passes to eval but gkd check does not."""

from __future__ import annotations

import ast
from typing import Any

MOST_GPUS = 1 << 16
LONGEST = 1 << 16


class NotReadError(ValueError):
    """A text that Python may evaluate to a list, but that is not supported here."""


def numbers(text: str) -> list[int]:
    """The GPUs, from a list, range, list() or + of these, all of integers.

    Raises NotReadError for any other expression, SyntaxError for anything else.
    """
    if len(text) > LONGEST:
        raise NotReadError
    try:
        found = _value(ast.parse(text.strip(), mode="eval").body)
    except (RecursionError, MemoryError, OverflowError):
        raise NotReadError from None
    except ValueError as error:  # a NUL, or too many digits
        raise error if isinstance(error, NotReadError) else NotReadError from None
    if not isinstance(found, list):
        raise NotReadError
    return found


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.List | ast.Tuple):
        return [_whole(one) for one in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _value(node.left), _value(node.right)
        return _few(left + right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        name, given = node.func.id, node.args
        if name == "list" and len(given) == 1 and not node.keywords:
            return _value(given[0])
        if name == "range" and 1 <= len(given) <= 3 and not node.keywords:
            return _few(range(*(_whole(one) for one in given)))
    raise NotReadError


def _few(found: range | list[int]) -> list[int]:
    if len(found) > MOST_GPUS:
        raise NotReadError
    return list(found)


def _whole(node: ast.expr) -> int:
    sign = 1
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        sign, node = -1, node.operand
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return sign * node.value
    raise NotReadError
