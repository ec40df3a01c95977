"""Records what a release of NeMo-RL reads from its configuration, for ``gkd check``.

    python tools/record_nemo_rl.py SOURCES [RELEASE]

Reads a checkout or an unpacked archive; nothing of it is imported. RELEASE is for
sources between two releases, whose own version is not theirs. Writes
pytest_gkd/job/schemas/nemo-rl-RELEASE.json:

- ``configs``: the configurations that its programs take by themselves, with those that
  they inherit from, as they are written; ``programs`` says whose they are;
- ``classes``: each TypedDict and pydantic model with its fields, as ``annotation`` or
  ``annotation = default``, and the names that its annotations use;
- ``masters``: the class of the whole configuration by the module of its algorithm;
- ``validates``: whether the programs hold a configuration against it;
- ``resolvers``: OmegaConf's, as registered;
- ``reads``: names that the code looks up, and that stand in no class.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pytest_gkd.job import documents
from pytest_gkd.job.releases import SCHEMAS

KINDS = {"TypedDict", "BaseModel"}
CONFIG = re.compile(r"[\w.-]+\.yaml")


def record(sources: Path, release: str = "") -> Path:
    """Write the schema of one source tree; its path."""
    modules = {
        path.relative_to(sources)
        .with_suffix("")
        .as_posix()
        .replace("/", "."): ast.parse(path.read_text("utf-8"))
        for path in sorted((sources / "nemo_rl").rglob("*.py"))
    }
    programs = sorted((sources / "examples").rglob("run_*.py"))
    takes = {p.name: name for p in programs if (name := _own_config(p))}
    classes = _classes(modules)
    texts = [path.read_text("utf-8") for path in programs]
    configs = _configs(sources / "examples" / "configs", sorted(set(takes.values())))
    masters = {
        found["module"].rpartition(".")[2]: name
        for name, found in classes.items()
        if found["name"] == "MasterConfig"
    }
    reached = {name: classes[name] for name in _reached(classes, masters.values())}
    known = {name for found in reached.values() for name in found["fields"]}
    known |= {
        part
        for settings in configs.values()
        for key in settings
        for part in key.split(".")
    }
    others = {n for found in classes.values() for n in found["fields"]}
    schema = {
        "classes": reached,
        "configs": {name: _nested(settings) for name, settings in configs.items()},
        "masters": masters,
        "programs": takes,
        "reads": sorted((others | set(_lookups(modules.values()))) - known),
        "resolvers": sorted(
            set(
                re.findall(
                    r'register_new_resolver\(\s*"(\w+)"',
                    (sources / "nemo_rl/utils/config.py").read_text("utf-8")
                    + "".join(texts),
                )
            )
        ),
        "validates": any("MasterConfig(**" in text for text in texts),
    }
    for found in classes.values():
        del found["module"], found["name"]
    path = SCHEMAS / f"nemo-rl-{release or _version(sources)}.json"
    path.write_text(json.dumps(schema, indent=0, sort_keys=True) + "\n")
    return path


def _version(sources: Path) -> str:
    text = (sources / "nemo_rl/package_info.py").read_text("utf-8")
    parts = [
        re.search(rf"^{name} = (\d+)", text, re.M)
        for name in ("MAJOR", "MINOR", "PATCH")
    ]
    return ".".join(part[1] for part in parts if part)


def _own_config(program: Path) -> str:
    """The configuration that a program takes where none is given."""
    for node in ast.walk(ast.parse(program.read_text("utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "os.path.join":
            texts = [a.value for a in node.args if isinstance(a, ast.Constant)]
            if texts and CONFIG.fullmatch(str(texts[-1])):
                return "/".join(
                    t for t in map(str, texts) if t not in ("configs", "..")
                )
    return ""


def _configs(place: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """The files of these names, and all that they inherit from, as flat settings."""
    found: dict[str, dict[str, Any]] = {}
    while names:
        name = names.pop()
        path = place / name
        if name in found or not path.is_file():
            continue
        settings = documents.settings(path, documents.OMEGACONF)
        found[name] = {setting.key: setting.value for setting in settings}
        above = found[name].get("defaults", [])
        parents = [above] if isinstance(above, str) else above
        real = ((path.parent / one).resolve() for one in parents)
        names += [one.relative_to(place.resolve()).as_posix() for one in real]
    return found


# -- classes -----------------------------------------------------------------------


def _classes(modules: dict[str, ast.Module]) -> dict[str, dict[str, Any]]:
    """The configuration's classes; one that has namesakes is called name@module."""
    defined = {
        (module, node.name): node
        for module, tree in modules.items()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
    names = {key for key, node in defined.items() if _bases(node) & KINDS}
    while True:
        more = {
            key
            for key, node in defined.items()
            if key not in names
            and any(_find(modules, names, key[0], base) for base in _bases(node))
        }
        if not more:
            break
        names |= more
    several = [name for _, name in names]
    called = {
        key: f"{key[1]}@{key[0].rpartition('.')[2]}"
        if several.count(key[1]) > 1
        else key[1]
        for key in names
    }
    found: dict[str, dict[str, Any]] = {}
    for key in sorted(names):
        module, node = key[0], defined[key]
        head = ast.unparse(node).partition("\n")[0]
        is_partial = "total=False" in head
        found[called[key]] = {
            "module": module,
            "name": key[1],
            "bases": sorted(
                called[base]
                for name in _bases(node)
                if (base := _find(modules, names, module, name))
            ),
            "fields": {
                line.target.id: ("NotRequired[%s]" if is_partial else "%s")
                % _field(modules, names, called, module, line)
                for line in node.body
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
            },
        }
        if "extra='forbid'" in head:
            found[called[key]]["closed"] = True
    return found


def _reached(classes: dict[str, dict[str, Any]], names: Iterable[str]) -> set[str]:
    """The classes that others name in their fields, and what is derived from them."""
    found, waiting = set[str](), list(names)
    while waiting:
        name = waiting.pop()
        if name in classes and name not in found:
            found.add(name)
            text = " ".join(classes[name]["fields"].values()).replace("__at__", "@")
            waiting += [*re.findall(r"[\w@]+", text), *classes[name]["bases"]]
            waiting += [n for n, c in classes.items() if name in c["bases"]]
    return found


def _nested(settings: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *above, last = key.split(".")
        place = tree
        for part in above:
            place = place.setdefault(part, {})
        place[last] = value
    return tree


def _bases(node: ast.ClassDef) -> set[str]:
    return {ast.unparse(base) for base in node.bases}


def _find(
    modules: dict[str, ast.Module], names: set[tuple[str, str]], module: str, name: str
) -> tuple[str, str] | None:
    """The class that a name means in a module: its own, or an imported one."""
    if (module, name) in names:
        return module, name
    for node in ast.walk(modules[module]):
        if isinstance(node, ast.ImportFrom) and any(a.name == name for a in node.names):
            where = [m for m, n in names if n == name]
            near = [
                m for m in where if m == node.module or m.startswith(f"{node.module}.")
            ]
            return (near[0], name) if near else None
    return None


def _field(
    modules: dict[str, ast.Module],
    names: set[tuple[str, str]],
    called: dict[tuple[str, str], str],
    module: str,
    line: ast.AnnAssign,
) -> str:
    class Renamed(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            if key := _find(modules, names, module, node.id):
                return ast.Name(called[key].replace("@", "__at__"))
            alias = _alias(modules[module], node.id)
            return self.visit(alias) if alias else node

        def visit_Constant(self, node: ast.Constant) -> ast.expr:
            return node

    annotation = ast.unparse(Renamed().visit(line.annotation)).replace("\n", " ")
    return annotation + (f" = {ast.unparse(line.value)}" if line.value else "")


def _alias(tree: ast.Module, name: str) -> ast.expr | None:
    """The type that a module calls by the name."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            is_type = isinstance(node.value, ast.Subscript | ast.BinOp)
            return node.value if is_type else None
    return None


def _lookups(trees: Iterable[ast.Module]) -> Iterator[str]:
    """Names that are looked up in a mapping: x["name"], x.get("name"), "name" in x."""
    for tree in trees:
        for node in ast.walk(tree):
            found: ast.AST | None = None
            if isinstance(node, ast.Subscript):
                found = node.slice
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                is_lookup = node.func.attr in ("get", "pop", "setdefault")
                found = node.args[0] if is_lookup and node.args else None
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
                found = node.args[1]
            elif isinstance(node, ast.Compare) and isinstance(
                node.ops[0], ast.In | ast.NotIn
            ):
                found = node.left
            name = found.value if isinstance(found, ast.Constant) else None
            if isinstance(name, str) and re.fullmatch(r"[a-z]\w*", name):
                yield name


if __name__ == "__main__":
    print(record(Path(sys.argv[1]), *sys.argv[2:3]))
