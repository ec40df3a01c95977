"""Records the configuration classes of a release of prime-rl, for ``gkd check``.

    python tools/record_prime_rl.py SOURCES RELEASE

Reads a checkout; nothing of it is imported. Writes
pytest_gkd/job/schemas/prime-rl-RELEASE.json:

- ``classes``: each class of its package of configurations with its bases and fields, as
  ``annotation`` or ``annotation = default`` (a lambda, where a call makes it), and
  whether it takes ``any`` key beside;
- ``aliases``: of a class, other names of a field;
- ``programs``: the class that each program reads its command line into.

Names are the classes' own; of namesakes it is Name__at__module.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

PLACE = Path(__file__).parents[1] / "pytest_gkd/job/schemas"
CONFIGS = "packages/prime-rl-configs/src/prime_rl/configs"
ROOT = "BaseConfig"
PROGRAM = re.compile(r"cli\((\w+)")
Key = tuple[str, str]


class Sources:
    """The modules of configurations, with what their names mean."""

    def __init__(self, folder: Path) -> None:
        self.modules = {
            path.stem: ast.parse(path.read_text("utf-8"))
            for path in sorted(folder.glob("*.py"))
        }
        self.defined = {
            (module, node.name): node
            for module, tree in self.modules.items()
            for node in tree.body
            if isinstance(node, ast.ClassDef)
        }
        several = [name for _, name in self.defined]
        self.called = {
            key: f"{key[1]}__at__{key[0]}" if several.count(key[1]) > 1 else key[1]
            for key in self.defined
        }

    def means(self, module: str, name: str) -> Key | tuple[str, ast.expr] | None:
        """A class, or a type with the module that it stands in."""
        if (module, name) in self.defined:
            return module, name
        for node in ast.walk(self.modules[module]):
            if isinstance(node, ast.ImportFrom) and node.module:
                above, _, other = node.module.rpartition(".")
                for one in node.names:
                    if (one.asname or one.name) != name:
                        continue
                    is_ours = above.endswith("configs") and other in self.modules
                    return self.means(other, one.name) if is_ours else None
        for line in self.modules[module].body:
            if not isinstance(line, ast.AnnAssign | ast.Assign):
                continue
            names = line.targets if isinstance(line, ast.Assign) else [line.target]
            if line.value and name in map(ast.unparse, names):
                is_type = isinstance(line.value, ast.Subscript | ast.BinOp | ast.Name)
                return (module, line.value) if is_type else None
        return None

    def spelled(self, module: str, node: ast.expr) -> ast.expr:
        """An annotation or default with whole names, and types instead of aliases."""
        sources = self

        class Renamed(ast.NodeTransformer):
            def visit_Name(self, node: ast.Name) -> ast.expr:
                found = sources.means(module, node.id)
                if found is None:
                    return node
                if isinstance(found[1], str):
                    return ast.Name(sources.called[found[0], found[1]])
                return sources.spelled(found[0], found[1])

            def visit_Constant(self, node: ast.Constant) -> ast.expr:
                return node

        copied = ast.parse(ast.unparse(node), mode="eval").body
        renamed: ast.expr = Renamed().visit(copied)
        return renamed


def record(checkout: Path, release: str) -> Path:
    """Write the schema of one source tree; its path."""
    sources = Sources(checkout / CONFIGS)
    classes = {
        sources.called[key]: described
        for key, node in sources.defined.items()
        if (described := _class(sources, key[0], node))
    }
    programs = {}
    for path in sorted((checkout / "src/prime_rl/entrypoints").glob("*.py")):
        found = PROGRAM.search(path.read_text("utf-8"))
        if found:
            named = [m for m, name in sources.defined if name == found[1]]
            programs[path.stem] = sources.called[named[0], found[1]]
    schema = {"classes": classes, "programs": programs}
    path = PLACE / f"prime-rl-{release}.json"
    path.write_text(json.dumps(schema, indent=0, sort_keys=True) + "\n")
    return path


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
    if any("extra='allow'" in ast.unparse(line) for line in node.body):
        described["any"] = True
    return described


def _field(sources: Sources, module: str, line: ast.AnnAssign) -> tuple[str, list[str]]:
    """``annotation = default`` with the bounds of its Field, and its other names."""
    written = line.annotation
    if isinstance(written, ast.Constant) and isinstance(written.value, str):
        written = ast.parse(written.value, mode="eval").body  # a forward reference
    node = sources.spelled(module, written)
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


if __name__ == "__main__":
    print(record(Path(sys.argv[1]), sys.argv[2]))
