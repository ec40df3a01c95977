"""Finds the messages in Python code, those with values in them as templates.

All prose in the bodies of functions is taken for a message, since most are put together
from several texts, and on request that in tables of modules, too; not docstrings, and
not what a text is compared with. What is added
to a text in the statements after it belongs to the same template, as does a text that
the next statement fills into its own.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

# Methods that look for a text in another one.
SIMPLE = (ast.Expr, ast.Return, ast.Assign, ast.AugAssign, ast.Raise)
LOOKING = {"startswith", "endswith", "removeprefix", "removesuffix", "partition"}
# Calls whose texts are patterns.
PATTERNS = {"re.compile"}
_WORD = re.compile(r"(?<![\w./-])[a-z]{2,}(?![\w/=-])")
_TWO = re.compile(r"\w\W* \W*\w")
_PLACE = re.compile(r"\{[^{}]*\}")
# Patterns, and code for other processes.
_CODE = re.compile(
    r"\\|^(?:from [\w.]+ )?import |^ *class |^lambda|^<|^gkd [a-z]+ \0+$|[{}]"
    r"|^(?:export|mkdir|command -v) |\(\)$|^\w+(?: \| \w+)+$"
    r"|^--\S+(?: --\S+)+$|^(?:megatron|swift) \w+$"
)


def messages(source: str, *, tables: bool = False) -> Iterator[str]:
    """The templates and texts of a module, ``{name}`` for what is filled in; with those
    of its ``tables``.

    A place is named after the last name in its expression.
    """
    tree = _Sums().visit(ast.parse(source))
    yield from filter(is_prose, _below(tree, told=tables))


def is_prose(text: str) -> bool:
    """Whether there are words in it that can be translated."""
    prose = _PLACE.sub("\0", text)
    is_told = _WORD.search(prose) and (_TWO.search(prose) or "\0" in prose)
    return bool(" " in prose and is_told and not _CODE.search(prose))


class _Sums(ast.NodeTransformer):
    """Turns ``text = a`` and ``text += b`` below each other into one sum, and ``text =
    a`` and ``f"{text} b"`` into one text."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for _, below in ast.iter_fields(super().generic_visit(node)):
            if isinstance(below, list) and below and isinstance(below[0], ast.stmt):
                below[:] = self._merged(below)
        return node

    def _merged(self, statements: list[ast.stmt]) -> Iterator[ast.stmt]:
        last: ast.Assign | ast.AugAssign | None = None
        for one in statements:
            if (
                last is not None
                and isinstance(one, ast.AugAssign)
                and isinstance(one.op, ast.Add)
                and ast.unparse(one.target) == _target(last)
            ):
                last.value = ast.BinOp(last.value, ast.Add(), one.value)
                ast.copy_location(last.value, one.value)
                continue
            if last is not None and (_is_text(last.value) or _is_sum(last.value)):
                filled = _Filled(_target(last), last.value)
                one = filled.visit(one) if isinstance(one, SIMPLE) else one
                again = isinstance(one, ast.Assign) and _target(one) == _target(last)
                kept = not again and any(map(filled.is_in, statements))
                if filled.places and not kept:
                    last.value = ast.copy_location(ast.Constant(None), last.value)
            yield one
            last = one if isinstance(one, (ast.Assign, ast.AugAssign)) else None


class _Filled(ast.NodeTransformer):
    """Puts a text into those that have ``{name}`` in them, and counts the places."""

    def __init__(self, name: str, text: ast.expr) -> None:
        self._name, self._text, self.places = name, text, 0

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.JoinedStr:
        """As NodeTransformer has it."""
        self.generic_visit(node)
        parts: list[ast.expr] = []
        for one in node.values:
            if not isinstance(one, ast.FormattedValue) or not self._is_it(one.value):
                parts.append(one)
                continue
            self.places += 1
            text = self._text
            parts += text.values if isinstance(text, ast.JoinedStr) else [text]
        return ast.copy_location(ast.JoinedStr(parts), node)

    def is_in(self, node: ast.AST) -> bool:
        """Whether the name is read in it."""
        return any(map(self._is_it, ast.walk(node)))

    def _is_it(self, node: ast.AST) -> bool:
        return (
            isinstance(node, ast.Name)
            and node.id == self._name
            and isinstance(node.ctx, ast.Load)
        )


def _target(node: ast.Assign | ast.AugAssign) -> str:
    """What is assigned to."""
    targets = [node.target] if isinstance(node, ast.AugAssign) else node.targets
    return ", ".join(map(ast.unparse, targets))


def _below(node: ast.AST, *, told: bool) -> Iterator[str]:
    """The texts in a node; ``told`` says that its plain ones are messages, too."""
    if isinstance(node, ast.Constant):
        if told and isinstance(node.value, str):
            yield node.value.replace("{}", "{value}")
    elif isinstance(node, ast.JoinedStr) or _is_sum(node):
        yield "".join(_parts(node, {}))
        for part in _operands(node):
            yield from _below(part, told=True)
    else:
        if isinstance(node, ast.Call) and ast.unparse(node.func) in PATTERNS:
            return
        told = told or isinstance(node, ast.FunctionDef)
        for child in ast.iter_child_nodes(node):
            docstring = isinstance(child, ast.Expr) and _is_text(child.value)
            if not docstring and not _compares(child):
                yield from _below(child, told=told)


def _compares(node: ast.AST) -> bool:
    """Whether it looks into a text, and says nothing itself."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in LOOKING
    return isinstance(node, ast.Compare)


def _is_sum(node: ast.AST) -> bool:
    """Whether it is a sum with a text in it."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add):
        return False
    sides = (node.left, node.right)
    return any(_is_text(one) or _is_sum(one) for one in sides)


def _is_text(node: ast.AST) -> bool:
    plain = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return plain or isinstance(node, ast.JoinedStr)


def _operands(node: ast.AST) -> Iterator[ast.AST]:
    """What is filled into an f-string or a sum of them."""
    if isinstance(node, ast.JoinedStr):
        for one in node.values:
            is_value = isinstance(one, ast.FormattedValue)
            yield from [one] if is_value else _operands(one)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        yield from (*_operands(node.left), *_operands(node.right))
    elif not isinstance(node, ast.Constant):
        yield node


def _parts(node: ast.AST, names: dict[str, str]) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        for one in node.values:
            yield from _parts(one, names)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        yield from (*_parts(node.left, names), *_parts(node.right, names))
    else:
        yield f"{{{_named(node, names)}}}"


def _named(node: ast.AST, names: dict[str, str]) -> str:
    """The name of a place; the same expression has the same one."""
    written = ast.unparse(node)
    if written not in names:
        called = {id(one.func) for one in ast.walk(node) if isinstance(one, ast.Call)}
        found = [
            (
                one.end_lineno,
                one.end_col_offset,
                one.id if isinstance(one, ast.Name) else one.attr,
            )
            for one in ast.walk(node)
            if isinstance(one, (ast.Name, ast.Attribute)) and id(one) not in called
        ]
        name = max(found)[2].strip("_") if found else "value"
        taken, number = set(names.values()), 2
        names[written] = name
        while names[written] in taken:
            names[written], number = f"{name}{number}", number + 1
    return names[written]
