"""The pydantic classes that prime-rl's programs read their configuration into."""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterator
from typing import Any, TypeGuard

from pytest_gkd.job.sources.files import Files, Schema, Source, SourceError, matching

CONFIGS = r"prime_rl/configs/\w+\.py"
ENTRYPOINTS = r"prime_rl/entrypoints/\w+\.py"
# Up to 0.5 the trainer and the orchestrator have no entry point of their own.
EARLIER = {
    "trainer": r"prime_rl/trainer/rl/train\.py",
    "orchestrator": r"prime_rl/orchestrator/orchestrator\.py",
}
ROOT = "BaseConfig"
VALIDATION = "prime_rl/utils/validation.py"
FUNCTION = re.compile(r"^\s*def (\w+)", re.MULTILINE)
BEFORE = re.compile(r"model_validator\(mode='before'\)")
PROGRAM = re.compile(r"\bcli\((\w+)")
Key = tuple[str, str]


class Sources:
    """The modules of configurations, with what their names refer to."""

    def __init__(self, files: Files) -> None:
        self.modules = {
            posixpath.basename(file).removesuffix(".py"): ast.parse(text)
            for file, text in sorted(files.items())
        }
        self.defined = {
            (module, node.name): node
            for module, tree in self.modules.items()
            for node in tree.body
            if isinstance(node, ast.ClassDef)
        }
        self._imported = {m: self._imports(tree) for m, tree in self.modules.items()}
        self._values = {m: _assigned(tree) for m, tree in self.modules.items()}
        several = [name for _, name in self.defined]
        self.called = {
            key: f"{key[1]}__at__{key[0]}" if several.count(key[1]) > 1 else key[1]
            for key in self.defined
        }

    def _imports(self, tree: ast.Module) -> dict[str, Key]:
        """Names that a module imports, with their module; "" for a foreign one."""
        found: dict[str, Key] = {}
        checked = (line.body for line in tree.body if isinstance(line, ast.If))
        for node in (*tree.body, *(line for body in checked for line in body)):
            if isinstance(node, ast.ImportFrom) and node.module:
                above, _, other = node.module.rpartition(".")
                is_ours = above.endswith("configs") and other in self.modules
                for one in node.names:
                    key = (other if is_ours else "", one.name)
                    found.setdefault(one.asname or one.name, key)
        return found

    def means(self, module: str, name: str) -> Key | tuple[str, ast.expr] | None:
        """A class, or a type with the module that it is in."""
        if (module, name) in self.defined:
            return module, name
        if name in self._imported[module]:
            other, own = self._imported[module][name]
            return self.means(other, own) if other else None
        value = self._values[module].get(name)
        is_type = isinstance(value, ast.Subscript | ast.BinOp | ast.Name)
        return (module, value) if value is not None and is_type else None

    def spelled(self, module: str, node: ast.expr) -> ast.expr:
        """An annotation or default with full names, and types instead of aliases."""
        sources = self
        names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
        if not any(self.means(module, name) for name in names):
            return node

        class Renamed(ast.NodeTransformer):
            def visit_Name(self, node: ast.Name) -> ast.expr:
                found = sources.means(module, node.id)
                if found is None:
                    return node
                if isinstance(found[1], str):
                    return ast.Name(sources.called[found[0], found[1]])
                return sources.spelled(found[0], found[1])

        copied = ast.parse(ast.unparse(node), mode="eval").body
        renamed: ast.expr = Renamed().visit(copied)
        return renamed


def _assigned(tree: ast.Module) -> dict[str, ast.expr]:
    """The first value that each name of a module is set to."""
    found: dict[str, ast.expr] = {}
    for line in tree.body:
        if isinstance(line, ast.AnnAssign | ast.Assign) and line.value:
            names = line.targets if isinstance(line, ast.Assign) else [line.target]
            for name in map(ast.unparse, names):
                found.setdefault(name, line.value)
    return found


def read(files: Files) -> Schema:
    """The classes of its configuration package, and those of its programs.

    - ``classes``: each with its bases and fields, as ``annotation`` or ``annotation =
      default`` (a lambda, where a call makes it), whether it takes ``any`` key beside,
      by ``aliases`` other names of a field, and validators that come ``before`` the
      fields, which may rename a key; ``folds`` are classes whose fields such a one also
      takes a level above;
    - ``programs``: the class that each program reads its command line into;
    - ``checks``: the functions that validate a configuration, and all others there.

    Classes go by their own names, namesakes by Name__at__module.
    """
    sources = Sources(matching(files, CONFIGS))
    classes = {
        sources.called[key]: described
        for key, node in sources.defined.items()
        if (described := _class(sources, key[0], node))
    }
    lost = {""}
    while lost:  # with a base that is not one of them
        lost = {n for n, one in classes.items() if set(one["bases"]) - classes.keys()}
        classes = {name: one for name, one in classes.items() if name not in lost}
    started = [(n, t) for n, f in EARLIER.items() for t in matching(files, f).values()]
    for file, text in matching(files, ENTRYPOINTS).items():
        started.append((posixpath.basename(file).removesuffix(".py"), text))
    programs = {}
    for name, text in started:
        found = PROGRAM.search(text)
        named = [key for key in sources.called if found and key[1] == found[1]]
        if named and sources.called[named[0]] in classes:
            programs[name] = sources.called[named[0]]
    if not programs:
        raise SourceError("none of its programs reads a class of prime_rl.configs")
    judging = matching(files, rf"{CONFIGS}|{VALIDATION}").values()
    checks = {name for text in judging for name in FUNCTION.findall(text)}
    return {"classes": classes, "programs": programs, "checks": sorted(checks)}


def _class(sources: Sources, module: str, node: ast.ClassDef) -> dict[str, Any]:
    bases = []
    for base in node.bases:
        found = sources.means(module, ast.unparse(base))
        if found and isinstance(found[1], str):
            bases.append(sources.called[found[0], found[1]])
        elif ast.unparse(base) != ROOT:
            return {}
    fields, aliases = dict[str, str](), dict[str, str]()
    for line in node.body:
        if not (isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)):
            continue
        name, text = line.target.id, ast.unparse(line.annotation)
        if text.startswith("ClassVar"):
            continue
        fields[name], other = _field(sources, module, line)
        aliases |= dict.fromkeys(other, name)
    described: dict[str, Any] = {"bases": bases, "fields": fields}
    if aliases:
        described["aliases"] = aliases
    if before := [line for line in node.body if _goes_before(line)]:
        described["before"] = [line.name for line in before]
        if folds := sorted(
            {n for one in before for n in _folded(sources, module, one)}
        ):
            described["folds"] = folds
    settings = (line for line in node.body if isinstance(line, ast.Assign))
    if any("extra='allow'" in ast.unparse(line) for line in settings):
        described["any"] = True
    return described


def _folded(sources: Sources, module: str, function: ast.AST) -> Iterator[str]:
    """The classes whose ``model_fields`` a validator looks keys up in."""
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and node.attr == "model_fields":
            key = sources.means(module, ast.unparse(node.value))
            if key and isinstance(key[1], str):
                yield sources.called[key[0], key[1]]


def _goes_before(line: ast.stmt) -> TypeGuard[ast.FunctionDef]:
    """Whether it is a validator that is given what the user wrote."""
    return isinstance(line, ast.FunctionDef) and any(
        BEFORE.fullmatch(ast.unparse(one)) for one in line.decorator_list
    )


def _parsed(node: ast.expr) -> ast.expr:
    """An annotation with forward references, which are strings, parsed."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return ast.parse(node.value, mode="eval").body
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Annotated":
        first, *others = getattr(node.slice, "elts", [node.slice])
        node.slice = ast.Tuple([_parsed(first), *others], ast.Load())
    return node


def _field(sources: Sources, module: str, line: ast.AnnAssign) -> tuple[str, list[str]]:
    """``annotation = default`` with the bounds of its Field, and its other names."""
    written = line.annotation
    node = sources.spelled(module, _parsed(written))
    value, bounds = line.value, list[ast.keyword]()
    other: list[str] = []
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "Field":
        bounds = [k for k in value.keywords if k.arg in ("ge", "gt", "le", "lt")]
        named = {k.arg: k.value for k in value.keywords}
        if "validation_alias" in named:
            texts = ast.walk(named["validation_alias"])
            other = [str(n.value) for n in texts if isinstance(n, ast.Constant)]
        value = value.args[0] if value.args else named.get("default_factory")
        if value is not None and ast.unparse(value) == "...":
            value = None
        if value is not None and value is named.get("default_factory"):
            is_class = isinstance(value, ast.Name)
            made = f"lambda: {ast.unparse(value)}()" if is_class else "..."
            value = ast.parse(made, mode="eval").body
    annotation = ast.unparse(node)
    if bounds:
        told = ", ".join(f"{k.arg}={ast.unparse(k.value)}" for k in bounds)
        annotation = f"Annotated[{annotation}, Field({told})]"
    if value is None:
        return annotation, other
    return f"{annotation} = {ast.unparse(sources.spelled(module, value))}", other


SOURCE = Source(
    {
        "prime_rl": (
            "prime_rl/configs/*.py",
            "prime_rl/entrypoints/*.py",
            "prime_rl/trainer/rl/train.py",
            "prime_rl/orchestrator/orchestrator.py",
            VALIDATION,
        )
    },
    read,
)
