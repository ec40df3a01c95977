"""Tells from vLLM's own source whether it can do without an extension module."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from pathlib import Path


def goes_without(package: Path, module: str, error: BaseException) -> list[str]:
    """The files of ``package`` that import ``module`` (``vllm._moe_C``), if all of them
    tolerate the import's ``error``; else none.

    A file tolerates it if it catches the error, or imports inside a function: then only
    callers of that function fail. File names are relative to ``package``.
    """
    name = module.rpartition(".")[2]
    found: dict[str, None] = {}
    for path in sorted(package.rglob("*.py")):
        text = path.read_text("utf-8", "replace")
        if name not in text:
            continue
        place = path.relative_to(package.parent)
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):  # damaged: no telling what it tolerates
            return []
        for borne in _imports(tree, place, module, error):
            if not borne:
                return []
            found[str(path.relative_to(package))] = None
    return list(found)


def _imports(
    node: ast.AST,
    place: Path,
    module: str,
    error: BaseException,
    *,
    borne: bool = False,
) -> Iterator[bool]:
    """For each import of ``module`` below ``node``: whether the error is tolerated."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        if module in _imported(node, place):
            yield borne
        return
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        borne = True
    elif isinstance(node, ast.With):
        calls = [item.context_expr for item in node.items]
        borne |= any(_suppresses(call, error) for call in calls)
    for field, value in ast.iter_fields(node):
        caught = (isinstance(node, ast.Try) and field == "body") and any(
            one.type is None or _catches(one.type, error) for one in node.handlers
        )
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _imports(child, place, module, error, borne=borne or caught)


def _imported(node: ast.Import | ast.ImportFrom, place: Path) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    above = place.parts[: -node.level] if node.level else ()
    base = ".".join([*above, *([node.module] if node.module else [])])
    return {base, *(f"{base}.{alias.name}" for alias in node.names)}


def _suppresses(call: ast.expr, error: BaseException) -> bool:
    return (
        isinstance(call, ast.Call)
        and ast.unparse(call.func) in ("suppress", "contextlib.suppress")
        and any(_catches(argument, error) for argument in call.args)
    )


def _catches(types: ast.expr, error: BaseException) -> bool:
    """Whether an ``except`` clause of ``types``, built-in ones, catches ``error``."""
    names = types.elts if isinstance(types, ast.Tuple) else [types]
    known = [getattr(builtins, ast.unparse(name), None) for name in names]
    return any(isinstance(one, type) and isinstance(error, one) for one in known)
