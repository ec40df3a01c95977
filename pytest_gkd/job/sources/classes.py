"""The classes that a configuration is read into, with their fields as written."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache
from typing import Any

from pytest_gkd.job.sources.files import Files, Schema, matching, outlined

Imports = dict[str, dict[str, str]]
Modules = Mapping[str, ast.Module]
# A class: {"bases": names, "fields": {name: "annotation" or "annotation = default"}},
# and "module" and "name", as written there.
Classes = dict[str, dict[str, Any]]
WORD_IN_USE = re.compile(r"[.\"']([a-z_]\w+)")


def classes(
    modules: Modules,
    is_own: Callable[[ast.ClassDef], bool],
    value: Callable[[ast.Module, ast.AnnAssign], ast.expr | None],
) -> Classes:
    """The classes that ``is_own`` accepts, and those derived from them.

    One that has namesakes is called name@module, also in annotations, where @ is
    ``__at__``. ``value`` is the default of a field.
    """
    defined = {
        (module, node.name): node
        for module, tree in modules.items()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
    imports = {module: _imports(tree) for module, tree in modules.items()}
    names = {key for key, node in defined.items() if is_own(node)}
    while True:
        more = {
            key
            for key, node in defined.items()
            if key not in names
            and any(_find(imports, names, key[0], base) for base in bases(node))
        }
        if not more:
            break
        names |= more
    called = _called(names)
    found: Classes = {}
    for key in sorted(names):
        module, node = key[0], defined[key]
        head = ast.unparse(node).partition("\n")[0]
        is_partial = "total=False" in head
        renamed = _Renamed(modules, imports, called, module)
        found[called[key]] = {
            "module": module,
            "name": key[1],
            "bases": [
                called[base]
                for name in bases(node)
                if (base := _find(imports, names, module, name))
            ],
            "fields": {
                line.target.id: ("NotRequired[%s]" if is_partial else "%s")
                % _field(renamed, line, value(modules[module], line))
                for line in node.body
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
                if ast.unparse(line.annotation).partition("[")[0] != "ClassVar"
            },
        }
        if "extra='forbid'" in head:
            found[called[key]]["closed"] = True
    return found


def _called(names: Collection[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """The name that each class is recorded by, with as much of its module as needed."""
    ways: tuple[Callable[[str, str], str], ...] = (
        lambda _, name: name,
        lambda module, name: f"{name}@{module.rpartition('.')[2]}",
        lambda module, name: f"{name}@{module.replace('.', '_')}",
    )
    found: dict[tuple[str, str], str] = {}
    for way in ways:
        left = [key for key in names if key not in found]
        called = [way(*key) for key in left]
        found |= {
            key: name
            for key, name in zip(left, called, strict=True)
            if called.count(name) == 1 or way is ways[-1]
        }
    return found


def reached(found: Classes, names: Iterable[str]) -> set[str]:
    """The classes that others name in their fields, and those derived from them."""
    seen, waiting = set[str](), list(names)
    while waiting:
        name = waiting.pop()
        if name in found and name not in seen:
            seen.add(name)
            text = " ".join(found[name]["fields"].values()).replace("__at__", "@")
            waiting += [*re.findall(r"[\w@]+", text), *found[name]["bases"]]
            waiting += [n for n, c in found.items() if name in c["bases"]]
    return seen


def module(file: str) -> str:
    """The module name that a file is imported as."""
    return file.removesuffix(".py").replace("/", ".")


def bases(node: ast.ClassDef) -> list[str]:
    """The bases of a class, as written."""
    return [ast.unparse(base) for base in node.bases]


def _imports(tree: ast.Module) -> dict[str, str]:
    """The module that each name is imported from."""
    found: dict[str, str] = {}
    for top in tree.body:
        if isinstance(top, ast.ClassDef | ast.FunctionDef | ast.Assign):
            continue
        for node in ast.walk(top):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    found.setdefault(alias.name, node.module or "")
    return found


def _find(
    imports: Imports, names: Iterable[tuple[str, str]], own: str, name: str
) -> tuple[str, str] | None:
    """The class that a name refers to in a module: its own, or an imported one."""
    if (own, name) in names:
        return own, name
    origin = imports[own].get(name)
    if origin is None:
        return None
    where = sorted(m for m, n in names if n == name)
    near = [m for m in where if m == origin or m.startswith(f"{origin}.")]
    return (near[0], name) if near else None


class _Renamed(ast.NodeTransformer):
    """Renames the classes in an expression to the names that they are recorded by."""

    def __init__(
        self,
        modules: Modules,
        imports: Imports,
        called: Mapping[tuple[str, str], str],
        own: str,
    ) -> None:
        self._modules, self._imports, self._called = modules, imports, called
        self._own = own

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """A class, the module's own type alias, or any other name."""
        if key := _find(self._imports, self._called, self._own, node.id):
            return ast.Name(self._called[key].replace("@", "__at__"))
        alias = _aliases(self._modules[self._own]).get(node.id)
        return self.visit(alias) if alias else node

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        """Left as it is."""
        return node


def _field(renamed: _Renamed, line: ast.AnnAssign, default: ast.expr | None) -> str:
    annotation = ast.unparse(renamed.visit(line.annotation)).replace("\n", " ")
    return annotation + (f" = {ast.unparse(default)}" if default else "")


@lru_cache(4)
def _aliases(tree: ast.Module) -> dict[str, ast.expr]:
    """A module's type aliases."""
    return {
        node.targets[0].id: node.value
        for node in reversed(tree.body)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        if isinstance(node.value, ast.Subscript | ast.BinOp)
    }


# -- dataclasses -------------------------------------------------------------------


DATACLASS = re.compile(r"(?m)^@(?:\w+\.)?dataclass\b")


def dataclasses(files: Files) -> Classes:
    """The dataclasses of all files; enums in annotations become their members' names.

    A default is the field's value when created: what its factory returns, without
    copies, and with the constants of its module. ``...`` is an unknown default; None in
    place of the whole means that the constructor requires a value.
    """
    modules = {
        module(file): _relevant(text)
        for file, text in files.items()
        if DATACLASS.search(text) or "Enum)" in text
    }
    enums = {
        node.name: [
            item.targets[0].id
            for item in node.body
            if isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name)
        ]
        for tree in modules.values()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and any("Enum" in b for b in bases(node))
    }
    modules = {n: _Enums(enums).visit(tree) for n, tree in modules.items()}
    return classes(modules, _is_dataclass, _default)


def _relevant(text: str) -> ast.Module:
    """Imports, constants and dataclasses with their decorators; parsing is slow."""
    return outlined(text, re.compile(r"^class\s", re.MULTILINE), DATACLASS.pattern)


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(one) for one in node.decorator_list)


class _Enums(ast.NodeTransformer):
    """Turns enums in annotations into Literals of their names, members into names."""

    def __init__(self, enums: Mapping[str, list[str]]) -> None:
        self._enums = enums

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """An enum as the type of a field."""
        names = self._enums.get(node.id)
        if not names:
            return node
        text = f"Literal[{', '.join(map(repr, names))}]"
        return ast.parse(text, mode="eval").body

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        """A member of an enum."""
        is_member = isinstance(node.value, ast.Name) and node.value.id in self._enums
        return ast.Constant(node.attr) if is_member else node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        """Only the contents of dataclasses, nothing of an enum itself."""
        if node.name not in self._enums:
            node.body = [
                self.visit(one) for one in node.body if isinstance(one, ast.AnnAssign)
            ] or [ast.Pass()]
        return node


def _default(tree: ast.Module, line: ast.AnnAssign) -> ast.expr | None:
    value = line.value
    if isinstance(value, ast.Call) and _last(value.func) == "field":
        given = {k.arg: k.value for k in value.keywords}
        value = given.get("default")
        if factory := given.get("default_factory"):
            if isinstance(factory, ast.Lambda):
                value = factory.body
            else:
                value = ast.Call(factory, [], [])
    if value is None or ast.unparse(value) == "MISSING":  # OmegaConf's MISSING
        return None
    plain: ast.expr = _Plain(_constants(tree)).visit(value)
    return plain


@lru_cache(4)
def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    return {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }


class _Plain(ast.NodeTransformer):
    """A default without copies, names of constants and calls that only build a path."""

    def __init__(self, constants: Mapping[str, ast.expr]) -> None:
        self._constants = constants

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """A constant of the module."""
        value = self._constants.get(node.id)
        is_plain = isinstance(value, ast.Constant | ast.Dict | ast.List | ast.Tuple)
        return value if is_plain and value is not None else node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """``list()``, ``dict()``, and calls that only pass their argument through."""
        name = _last(node.func)
        if name in ("list", "dict") and not (node.args or node.keywords):
            return ast.List([], ast.Load()) if name == "list" else ast.Dict([], [])
        if name in ("deepcopy", "copy", "expanduser") and len(node.args) == 1:
            inner: ast.expr = self.visit(node.args[0])
            return inner
        if name == "int" and len(node.args) == 1:
            value = getattr(node.args[0], "value", None)
            return ast.Constant(int(value)) if isinstance(value, int | float) else node
        self.generic_visit(node)
        return node


def _last(node: ast.expr) -> str:
    return ast.unparse(node).rpartition(".")[2]


def typed(
    files: Files,
    code: str,
    takes: re.Pattern[str],
    roots: Iterable[str] = (),
    handed_on: Collection[str] = (),
) -> Schema:
    """The classes that a framework's programs read its configuration into.

    ``code`` is the pattern of the files with the classes and of the programs, ``takes``
    matches the name of a program's class in the group ``name``. ``roots`` are classes
    that a user's own programs may take, ``handed_on`` those that are passed to a
    library whole.

    - ``classes``: those that the programs' classes consist of;
    - ``programs``: each program's class, by its module;
    - ``unread``: fields, by their class, whose names occur nowhere else in the code.
    """
    own = matching(files, code)
    found = dataclasses(own)
    by_place = {(c["module"], c["name"]): name for name, c in found.items()}
    taken = {}
    for file, text in own.items():
        for match in takes.finditer(text):
            place = module(file)
            key = _meant(by_place, place, match["name"], text)
            if key is not None:
                taken[place] = by_place[key]
    names = [*taken.values(), *(name for name in roots if name in found)]
    kept = {name: found[name] for name in sorted(reached(found, names))}
    unread = {n: u for n, u in _unread(kept, files).items() if n not in handed_on}
    for one in kept.values():
        del one["module"], one["name"]
    return {"classes": kept, "programs": taken, "unread": unread}


def _meant(
    names: Collection[tuple[str, str]], own: str, name: str, text: str
) -> tuple[str, str] | None:
    """The class that a program refers to: its own, the only one, or an imported one.

    A script also imports from its own folder.
    """
    same = [key for key in names if key[1] == name]
    if (own, name) in same or len(same) < 2:
        return (own, name) if (own, name) in same else next(iter(same), None)
    folder = own.rpartition(".")[0]
    beside = [key for key in same if key[0].rpartition(".")[0] == folder]
    imported = _find({own: _imports(_relevant(text))}, names, own, name)
    return imported or next(iter(beside), None)


def _unread(found: Classes, files: Files) -> dict[str, list[str]]:
    """Fields whose names occur nowhere, in classes some of whose fields are read.

    A class none of whose fields is read is passed on as a whole.
    """
    used = {name for text in files.values() for name in WORD_IN_USE.findall(text)}
    # A section may be read by a computed name.
    every = [field for one in found.values() for field in one["fields"].items()]
    used |= {field for field, text in every if text.endswith(")")}
    unread = {
        name: sorted(f for f in one["fields"] if f not in used)
        for name, one in found.items()
    }
    return {n: u for n, u in unread.items() if u and len(u) < len(found[n]["fields"])}
