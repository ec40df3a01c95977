"""The options that HfArgumentParser makes of dataclasses, read from their source.

Nothing is imported: classes, their bases and the parser's call are found in the text.
The rules are transformers' ``HfArgumentParser._parse_dataclass_field`` (5.19.0,
src/transformers/hf_argparser.py), of which TRL has a copy.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pytest_gkd.job.arguments import Option

# A class: {"bases": names, "fields": {name: arguments of add_argument}}; a field has
# type, and unless they are the usual ones: nargs, choices, none, names, required,
# default, or "unknown" in place of the default, with the expression.
Fields = dict[str, dict[str, Any]]
Classes = dict[str, dict[str, Any]]
PLAIN = ("int", "float", "str", "bool")
PLAIN_BASES = ("object", "ABC", "Generic", "Protocol")


def classes(text: str, known: Mapping[str, Any] | None = None) -> Classes:
    """The dataclasses of a module; ``known`` are classes and enums of others.

    An enum is recorded as {"values": {member: value}}. Raises SyntaxError.
    """
    found: Classes = {}
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ClassDef):
            continue
        bases = [_name(base) for base in node.bases]
        seen = {**(known or {}), **found}
        if "ExplicitEnum" in bases or "Enum" in bases:
            found[node.name] = {"values": _members(node)}
        elif any(_name(d) == "dataclass" for d in node.decorator_list):
            fields = {
                item.target.id: _field(item, seen)
                for item in node.body
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
                if _name(item.annotation) != "ClassVar" and _is_given(item)
            }
            found[node.name] = {"bases": bases, "fields": fields}
    return found


def program(text: str) -> dict[str, Any]:
    """The dataclasses that a script gives to its TrlParser or HfArgumentParser.

    ``passes`` says which unknown keys it silently ignores: "all" of them, those of the
    "config" file, or "" for none; "line" is for a parser that has no --config.
    """
    tuples: dict[str, list[str]] = {}
    found: dict[str, Any] = {"classes": [], "passes": ""}
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            tuples[node.targets[0].id] = _names(node.value)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        given = {k.arg: k.value for k in node.keywords}
        name = _name(node.func)
        if name in ("TrlParser", "HfArgumentParser") and not found["classes"]:
            value = node.args[0] if node.args else given.get("dataclass_types")
            names = _names(value) if value is not None else []
            found["classes"] = tuples.get(names[0], names) if names else []
        elif name in ("parse_args_and_config", "parse_args_into_dataclasses"):
            if "return_remaining_strings" in given:
                found["passes"] = "all"
            elif name == "parse_args_into_dataclasses":
                found["passes"] = "line"
            elif "fail_with_unknown_args" in given:
                found["passes"] = "config"
    return found


def fields(name: str, known: Mapping[str, Any]) -> Fields:
    """All fields of a class, those of its bases included.

    Raises KeyError if one of them is not known, or is not a dataclass.
    """
    own = known[name]
    found: Fields = {}
    for base in reversed(own["bases"]):
        if base not in PLAIN_BASES:
            found |= fields(base, {k: v for k, v in known.items() if k != name})
    found |= own["fields"]
    return found


def options(given: Fields, *, none: bool = True) -> dict[str, Option]:
    """The command-line options of these fields, by each of their spellings.

    ``none`` says whether the parser takes "none" for None, as TRL's own does.
    """
    found: dict[str, Option] = {}
    for name, field in given.items():
        option = Option(
            name,
            field["type"],
            field.get("nargs", ""),
            field.get("choices", ()),
            none=none and field.get("none", False),
        )
        hyphened = name.replace("_", "-")
        found |= dict.fromkeys([f"--{name}", f"--{hyphened}"], option)
        if field["type"] == "bool" and field.get("default") is True:
            off = [f"--no_{name}", f"--no-{hyphened}"]
            found |= dict.fromkeys(off, Option(name, "false"))
        found |= dict.fromkeys(field.get("names", ()), option)
    return found


# -- the source --------------------------------------------------------------------


def _name(node: ast.expr) -> str:
    """The last name of ``a.b.C(...)[...]``."""
    while isinstance(node, (ast.Call, ast.Subscript)):
        node = node.func if isinstance(node, ast.Call) else node.value
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _names(node: ast.expr) -> list[str]:
    parts = node.elts if isinstance(node, (ast.Tuple, ast.List)) else [node]
    return [_name(part) for part in parts if not isinstance(part, ast.Call)]


def _members(node: ast.ClassDef) -> dict[str, Any]:
    return {
        item.targets[0].id: item.value.value
        for item in node.body
        if isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name)
        if isinstance(item.value, ast.Constant)
    }


def _keywords(item: ast.AnnAssign) -> dict[str, ast.expr]:
    """The arguments of ``field(...)`` or ``HfArg(...)``; a plain value is a default."""
    value = item.value
    if isinstance(value, ast.Call) and _name(value) in ("field", "HfArg"):
        return {k.arg: k.value for k in value.keywords if k.arg}
    return {} if value is None else {"default": value}


def _is_given(item: ast.AnnAssign) -> bool:
    init = _keywords(item).get("init")
    return not (isinstance(init, ast.Constant) and init.value is False)


def _field(item: ast.AnnAssign, known: Mapping[str, Any]) -> dict[str, Any]:
    """What the parser makes of one field."""
    given = _keywords(item)
    metadata = dict(_pairs(given.get("metadata")))
    found: dict[str, Any] = {}
    default: Any = ...
    if "default" in given:
        default = _literal(given["default"], known)
    elif "default_factory" in given:
        default = _made(given["default_factory"], known)
    names, choices = metadata.get("aliases", given.get("aliases")), None
    if "choices" in metadata:
        choices = _literal(metadata["choices"], known)
    found |= _kind(list(_union(item.annotation)), default, known)
    if isinstance(choices, list | tuple):
        found["choices"] = list(choices)
    if names is not None:
        read = _literal(names, known)
        found["names"] = [read] if isinstance(read, str) else list(read or ())
    if default is ... and found["type"] == "bool" and found.get("nargs") == "?":
        default = False
    if default is ...:
        found["required"] = True
    elif isinstance(default, ast.expr):
        found["unknown"] = ast.unparse(default)
    else:
        found["default"] = default
    return found


def _kind(parts: list[ast.expr], default: Any, known: Mapping[str, Any]) -> Any:
    """Type, nargs, choices, and whether "none" stands for None."""
    names = [_name(p) or ast.unparse(p) for p in parts]
    part = parts[0]
    if len(parts) > 1 and "None" not in names:
        part = parts[0] if names[1] == "str" else parts[1]
    elif len(parts) > 1 and "bool" not in names:
        part = parts[0] if names[1] == "None" else parts[1]
    elif len(parts) > 1:
        part = parts[names.index("bool")] if len(parts) == 2 else parts[0]
    name = _name(part)
    has_text = {"str", "dict"} <= {n.lower() for n in names}
    if name in PLAIN:
        found: dict[str, Any] = {"type": "json" if has_text else name}
        if name == "bool" and (len(parts) == 1 or default not in (None, ...)):
            found["nargs"] = "?"
    elif name == "Literal" and isinstance(part, ast.Subscript):
        found = {"type": "str", "choices": _literal_choices(part.slice)}
    elif "values" in known.get(name, {}):
        found = {"type": "str", "choices": list(known[name]["values"].values())}
    elif name in ("list", "List") and isinstance(part, ast.Subscript):
        inner = _name(part.slice)
        found = {"type": inner if inner in PLAIN else "str", "nargs": "+"}
    else:
        found = {"type": "dict"}
    # Only for types that no text can be, not for lists and choices.
    usual = name not in ("str", "bool") and not {"nargs", "choices"} & found.keys()
    return {**found, "none": True} if usual and "None" in names else found


def _literal_choices(node: ast.expr) -> list[Any]:
    parts = node.elts if isinstance(node, ast.Tuple) else [node]
    return [part.value for part in parts if isinstance(part, ast.Constant)]


def _union(node: ast.expr) -> Iterator[ast.expr]:
    """The members of ``A | B``, ``Union[A, B]`` and ``Optional[A]``, in their order."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        node = ast.parse(node.value, mode="eval").body
    if isinstance(node, ast.BinOp):
        yield from _union(node.left)
        yield from _union(node.right)
    elif isinstance(node, ast.Subscript) and _name(node) in ("Union", "Optional"):
        inner = node.slice
        for part in inner.elts if isinstance(inner, ast.Tuple) else [inner]:
            yield from _union(part)
        if _name(node) == "Optional":
            yield ast.Constant(None)
    else:
        yield node


def _pairs(node: ast.expr | None) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant):
                yield str(key.value), value


def _made(node: ast.expr, known: Mapping[str, Any]) -> Any:
    """The default that a factory makes."""
    if isinstance(node, ast.Lambda):
        return _literal(node.body, known)
    return {"list": [], "dict": {}}.get(_name(node), node)


def _literal(node: ast.expr, known: Mapping[str, Any]) -> Any:
    """A literal, or an enum's member; else the node itself."""
    inner = node
    if isinstance(inner, ast.Attribute) and inner.attr == "value":
        inner = inner.value
    if isinstance(inner, ast.Attribute):
        values = known.get(_name(inner.value), {}).get("values", {})
        if inner.attr in values:
            return values[inner.attr]
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return node


def union_of(names: Iterable[str], known: Mapping[str, Any]) -> Fields:
    """The fields of several classes together."""
    found: Fields = {}
    for name in names:
        found |= fields(name, known)
    return found
