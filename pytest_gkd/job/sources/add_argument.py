"""The options that add_argument calls and dataclasses define, from their source."""

from __future__ import annotations

import ast
import copy
import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

NUMBERS = ("int", "float")
# SGLang's own actions without a value, beside argparse's.
FLAG = re.compile("StoreTrue|StoreConst|store_const|^DeprecatedAction$")
SIGNS: Mapping[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Pow: operator.pow,
}
Record = dict[str, Any]


class NotCertainError(Exception):
    """A value that only running the package would tell."""


class Sources:
    """The constants and classes of some files, given as texts by name."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self.trees = {name: ast.parse(text) for name, text in files.items()}
        self.constants: dict[str, ast.expr] = {}
        self.classes: dict[str, ast.ClassDef] = {}
        for tree in self.trees.values():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    self.classes.setdefault(node.name, node)
                elif isinstance(node, ast.Assign):
                    for target in node.targets:
                        if isinstance(target, ast.Name):
                            self.constants.setdefault(target.id, node.value)

    def value(self, node: ast.expr) -> Any:
        """A literal, a constant, or the default of a class. Raises NotCertainError."""
        match node:
            case ast.Constant():
                return node.value
            case ast.List() | ast.Tuple():
                return [self.value(one) for one in node.elts]
            case ast.Dict():
                pairs = zip(node.keys, node.values, strict=True)
                return {self.value(k): self.value(v) for k, v in pairs if k}
            case ast.UnaryOp(op=ast.USub()):
                return -self.value(node.operand)
            case ast.BinOp() if type(node.op) in SIGNS:
                sign = SIGNS[type(node.op)]
                return sign(self.value(node.left), self.value(node.right))
            case ast.JoinedStr(values=parts):
                return "".join(str(self.value(part)) for part in parts)
            case ast.FormattedValue(value=inner, format_spec=None):
                return self.value(inner)
            case ast.IfExp(test=ast.Compare(left, [ast.Eq()], [right])):
                is_so = self.value(left) == self.value(right)
                return self.value(node.body if is_so else node.orelse)
            case ast.Name() if node.id in self.constants:
                return self.value(self.constants[node.id])
            case ast.Attribute(value=ast.Name(id=owner)) if owner in self.classes:
                fields = self.fields(self.classes[owner])
                if node.attr in fields and (default := fields[node.attr].value):
                    return self.value(default)
                members = self.members(self.classes[owner])
                if node.attr in members:
                    return node.attr
        raise NotCertainError(ast.unparse(node))

    def fields(self, node: ast.ClassDef) -> dict[str, ast.AnnAssign]:
        """A dataclass's fields, inherited ones first."""
        found: dict[str, ast.AnnAssign] = {}
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id in self.classes:
                found.update(self.fields(self.classes[base.id]))
        for part in node.body:
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                found[part.target.id] = part
        return found

    @staticmethod
    def members(node: ast.ClassDef) -> list[str]:
        """The member names of an enum; empty for any other class."""
        if not any("Enum" in ast.unparse(base) for base in node.bases):
            return []
        parts = [part for part in node.body if isinstance(part, ast.Assign)]
        return [t.id for part in parts for t in part.targets if isinstance(t, ast.Name)]


class Options(dict[str, Record]):
    """A parser's options by name, as its add_argument calls define them."""

    def __init__(self, sources: Sources) -> None:
        super().__init__()
        self.sources = sources

    def calls(
        self, node: ast.AST, prefix: str = "", skipped: Iterable[str] = ()
    ) -> None:
        """Take all add_argument and reset_arg calls below a node, in line order."""
        found = [n for n in ast.walk(node) if isinstance(n, ast.Call)]
        for call in sorted(found, key=lambda n: n.lineno):
            function = call.func
            if isinstance(function, ast.Attribute) and function.attr == "add_argument":
                self.call(call, call.args, prefix, skipped)
            elif isinstance(function, ast.Name) and function.id == "reset_arg":
                given = {k.arg: k.value for k in call.keywords}
                name = self.sources.value(call.args[1])
                if name not in self:
                    self.call(call, call.args[1:])
                elif "default" in given:
                    self[name]["default"] = self.sources.value(given["default"])

    def call(
        self,
        call: ast.Call,
        names: Iterable[ast.expr],
        prefix: str = "",
        skipped: Iterable[str] = (),
    ) -> None:
        """One call; its names get ``prefix``, as slime does with SGLang's."""
        said = [self._name(node) for node in names]
        keywords = {k.arg: k.value for k in call.keywords if k.arg}
        self.add(said, self._keywords(keywords), prefix, skipped)

    def _name(self, node: ast.expr) -> str:
        try:
            return str(self.sources.value(node))
        except NotCertainError:  # the router's f"--{prefix}policy"
            if not isinstance(node, ast.JoinedStr):
                raise
        parts = [
            str(part.value) if isinstance(part, ast.Constant) else "router-"
            for part in node.values
        ]
        return "".join(parts)

    def _keywords(self, keywords: Mapping[str, ast.expr]) -> Record:
        record: Record = {}
        for name in ("default", "choices", "nargs", "dest", "required"):
            if name in keywords:
                try:
                    record[name] = self.sources.value(keywords[name])
                except NotCertainError:
                    if name == "default":
                        record[name] = ...
        if "action" in keywords:
            record["action"] = ast.unparse(keywords["action"]).strip("'").split(".")[-1]
        if "type" in keywords:
            record["type"] = ast.unparse(keywords["type"])
        return record

    def add(
        self,
        names: list[str],
        said: Record,
        prefix: str = "",
        skipped: Iterable[str] = (),
    ) -> None:
        """An option from the arguments of add_argument."""
        long = next((n for n in names if n.startswith("--")), names[0])
        key = said.get("dest") or long.lstrip("-").replace("-", "_")
        if key in skipped:
            return
        if prefix:
            names = [f"--{prefix}-{name.lstrip('-')}" for name in names]
            if not key.startswith(f"{prefix}_"):
                key = f"{prefix.replace('-', '_')}_{key}"
        action = said.get("action", "")
        record: Record = {"key": key}
        if action == "BooleanOptionalAction":
            record["default"] = said.get("default")
            for name in names:
                self[name] = {**record, "type": "true"}
                self[f"--no-{name.lstrip('-')}"] = {**record, "type": "false"}
            return
        if action in ("store_true", "store_false"):
            record["type"] = "true" if action == "store_true" else "false"
            said.setdefault("default", action == "store_false")
        elif FLAG.search(action):
            record["type"] = "true"
        elif (kind := said.get("type", "str")) in NUMBERS:
            record["type"] = kind
        elif kind == "json.loads":
            record["type"] = "json"
        if action == "append":
            record["adds"] = True
        if said.get("nargs") not in (None, 1):
            record["nargs"] = str(said["nargs"])
        if said.get("choices") and record.get("type") not in ("true", "false"):
            record["choices"] = said["choices"]
        if said.get("required"):
            record["required"] = True
        if (default := said.get("default")) is not ...:
            record["default"] = default
        for name in names:
            self[name] = record

    def fields(self, name: str, excluded: Iterable[str]) -> None:
        """The options of Megatron's ArgumentGroupFactory, from a dataclass."""
        for field, node in self.sources.fields(self.sources.classes[name]).items():
            if field in excluded:
                continue
            said = self._annotated(node.annotation)
            names = [f"--{field.replace('_', '-')}"]
            said["dest"] = field
            meta: Record = {}
            default = node.value
            if isinstance(default, ast.Call):  # field(...)
                keywords = {k.arg: k.value for k in default.keywords}
                if "metadata" in keywords:
                    meta = self._metadata(keywords["metadata"])
                default = keywords.get("default")
            try:
                said["default"] = (
                    ... if default is None else self.sources.value(default)
                )
            except NotCertainError:
                said["default"] = ...
            if said.pop("is_bool", False) and "type" not in meta:
                on = said["default"] is False
                said["action"] = "store_true" if on else "store_false"
                if not on:
                    names = [f"--no-{names[0][2:]}", f"--disable-{names[0][2:]}"]
            said.update(meta)
            self.add(said.pop("arg_names", names), said)

    def _metadata(self, node: ast.expr) -> Record:
        pairs: Record = {}
        for call in ast.walk(node):
            if isinstance(call, ast.Dict):
                for key, value in zip(call.keys, call.values, strict=True):
                    name = key and self.sources.value(key)
                    if name == "type":
                        pairs["type"] = ast.unparse(value)
                    elif name != "argparse_meta":
                        pairs.update(self._keywords({str(name): value}))
                        if name == "arg_names":
                            pairs[name] = self.sources.value(value)
        return pairs

    def _annotated(self, node: ast.expr) -> Record:
        """What a type annotation says about an option."""
        match node:
            case ast.BinOp(op=ast.BitOr()):
                return self._annotated(node.left)
            case ast.Subscript(value=ast.Name(id="Optional")):
                return self._annotated(node.slice)
            case ast.Subscript(value=ast.Name(id="list" | "List")):
                return {**self._annotated(node.slice), "nargs": "+"}
            case ast.Subscript(value=ast.Name(id="Literal")):
                parts = self.sources.value(node.slice)
                choices = parts if isinstance(parts, list) else [parts]
                return {"choices": choices, "type": type(choices[0]).__name__}
            case ast.Name(id="bool"):
                return {"is_bool": True}
            case ast.Name() if node.id in self.sources.classes:
                members = self.sources.members(self.sources.classes[node.id])
                return {"choices": members} if members else {}
        return {"type": ast.unparse(node)}

    def annotated(self, name: str, prefix: str, skipped: Iterable[str]) -> None:
        """SGLang's add_cli_args_from_dataclass: ``field: A[type, Arg(...)]``."""
        for field, node in self.sources.fields(self.sources.classes[name]).items():
            match node.annotation:
                case ast.Subscript(
                    value=ast.Name(id="A"), slice=ast.Tuple(elts=[kind, *rest])
                ):
                    pass
                case _:
                    continue
            calls = [part for part in rest if isinstance(part, ast.Call)]
            given = {k.arg or "": k.value for c in calls for k in c.keywords}
            if "no_cli" in given:
                continue
            said = {**self._annotated(kind), **self._keywords(given)}
            if "action" in given:  # add_argument gets only what is named for it
                more = given.get("action_kwargs") or ast.Dict(keys=[], values=[])
                assert isinstance(more, ast.Dict)
                pairs = zip(more.keys, more.values, strict=True)
                told = {self.sources.value(k): v for k, v in pairs if k}
                said = self._keywords({"action": given["action"], **told})
            names = [f"--{field.replace('_', '-')}"]
            if "cli_name" in given:
                names = [self.sources.value(given["cli_name"])]
            if "aliases" in given:
                names += self.sources.value(given["aliases"])
            if "type_parser" in given:
                said["type"] = ast.unparse(given["type_parser"])
                if said.get("nargs") == "+" and "nargs" not in given:
                    said.pop("nargs")
            if said.pop("is_bool", False) and "action" not in said:
                said["action"] = "store_true"
            said["dest"] = field
            try:
                said["default"] = self.sources.value(node.value) if node.value else ...
            except NotCertainError:
                said["default"] = ...
            self.add(names, said, prefix, skipped)


def functions(tree: ast.AST, *names: str) -> Iterator[ast.FunctionDef]:
    """The functions of these names, in line order; all if none is named."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (not names or node.name in names):
            yield node


class Unrolled(ast.NodeTransformer):
    """Unrolls loops over literals, such as ``for prefix in ("actor", "critic")``."""

    def __init__(self, known: Mapping[str, ast.expr]) -> None:
        self.known = known

    def visit_For(self, node: ast.For) -> Any:
        """The body once per literal."""
        match node:
            case ast.For(target=ast.Name(id=name), iter=ast.Tuple(elts=parts)):
                bodies = [
                    Unrolled({**self.known, name: part}).visit(copy.deepcopy(one))
                    for part in parts
                    for one in node.body
                ]
                for number, one in enumerate(bodies):
                    for inner in ast.walk(one):  # they are ordered by line
                        if isinstance(inner, ast.Call):
                            inner.lineno = node.lineno + number
                return bodies
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """The literal in place of the loop's variable."""
        return self.known.get(node.id, node)


def short(name: str, record: Record) -> Record:
    """The option without what is implied: a key from its name, a default of None."""
    key = name.lstrip("-").replace("-", "_")
    clear = {"key": key, "default": None}
    if "default" not in record:
        record = {**record, "default": "?"}
    return {k: v for k, v in record.items() if k not in clear or clear[k] != v}


def tables(parsers: Mapping[str, Options]) -> dict[str, dict[str, Record]]:
    """Parsers' options as a schema records them."""
    return {
        table: {name: short(name, record) for name, record in sorted(of.items())}
        for table, of in parsers.items()
    }
