"""What NeMo-RL reads from its configuration, according to its sources and examples/."""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterable, Iterator
from typing import Any

from pytest_gkd.job import documents
from pytest_gkd.job.sources import classes
from pytest_gkd.job.sources.files import (
    Files,
    Schema,
    Source,
    SourceError,
    matching,
    outlined,
)

KINDS = {"TypedDict", "BaseModel"}
CONFIG = re.compile(r"[\w.-]+\.yaml")
CONFIGS = "examples/configs"
CLASS = re.compile(r"^class\s+(\w+)\s*\(([^)]*)\)", re.M)
RESOLVER = re.compile(r'register_new_resolver\(\s*"(\w+)"')
# x["name"], x.get("name"), getattr(x, "name"), "name" in x
LOOKUP = re.compile(
    r"""(?<=[\w\])])\[\s*["']([a-z]\w*)["']\s*\]"""
    r"""|\.(?:get|pop|setdefault)\(\s*["']([a-z]\w*)["']"""
    r"""|\bgetattr\((?=(?:[^()]|\([^()]*\)){1,200}?,\s*["']([a-z]\w*)["'])"""
    r"""|["']([a-z]\w*)["']\s+(?:not\s+)?in\b"""
)


def read(files: Files) -> Schema:
    """The configurations and classes of a checkout, for ``gkd check``.

    - ``configs``: the configurations that its programs take by default, with those that
      they inherit from, as written; ``programs`` says whose they are;
    - ``classes``: each TypedDict and pydantic model with its fields, as ``annotation``
      or ``annotation = default``, and the names that its annotations use;
    - ``masters``: the class of the whole configuration by the module of its algorithm;
    - ``validates``: whether the programs validate a configuration against it;
    - ``resolvers``: OmegaConf's, as registered;
    - ``reads``: names that the code looks up but that are in no class.
    """
    code = matching(files, r"nemo_rl/.*\.py")
    programs = matching(files, r"examples/(?:.*/)?run_\w+\.py")
    takes = {
        posixpath.basename(program): name
        for program, text in programs.items()
        if (name := _own_config(text))
    }
    if not takes:
        raise SourceError("its examples/ with their configurations are not next to it")
    every = _classes(_modules(code))
    configs = _configs(files, sorted(set(takes.values())))
    masters = {
        found["module"].rpartition(".")[2]: name
        for name, found in every.items()
        if found["name"] == "MasterConfig"
    }
    names = classes.reached(every, masters.values())
    reached = {name: every[name] for name in names}
    known = {name for found in reached.values() for name in found["fields"]}
    known |= {
        part
        for settings in configs.values()
        for key in settings
        for part in key.split(".")
    }
    others = {n for found in every.values() for n in found["fields"]}
    for found in every.values():
        del found["module"], found["name"]
    registers = [code["nemo_rl/utils/config.py"], *programs.values()]
    return {
        "classes": reached,
        "configs": {name: _nested(settings) for name, settings in configs.items()},
        "masters": masters,
        "programs": takes,
        "reads": sorted((others | set(_lookups(code.values()))) - known),
        "resolvers": sorted({n for t in registers for n in RESOLVER.findall(t)}),
        "validates": any("MasterConfig(**" in text for text in programs.values()),
    }


def _own_config(text: str) -> str:
    """The configuration that a program takes if none is given."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "os.path.join":
            texts = [a.value for a in node.args if isinstance(a, ast.Constant)]
            if texts and CONFIG.fullmatch(str(texts[-1])):
                return "/".join(
                    t for t in map(str, texts) if t not in ("configs", "..")
                )
    return ""


def _configs(files: Files, names: list[str]) -> dict[str, dict[str, Any]]:
    """The files of these names, and all that they inherit from, as flat settings."""
    found: dict[str, dict[str, Any]] = {}
    while names:
        name = names.pop()
        path = f"{CONFIGS}/{name}"
        if name in found or path not in files:
            continue
        settings = documents.settings_of(files[path], path, documents.OMEGACONF)
        found[name] = {setting.key: setting.value for setting in settings}
        above = found[name].get("defaults", [])
        parents = [above] if isinstance(above, str) else above
        place = posixpath.dirname(name)
        names += [posixpath.normpath(posixpath.join(place, one)) for one in parents]
    return found


# -- classes -----------------------------------------------------------------------


def _modules(code: Files) -> dict[str, ast.Module]:
    """The modules that define the configuration's classes, each as an outline."""
    defined = [
        (file, found[1], set(re.findall(r"\w+", found[2])))
        for file, text in code.items()
        for found in CLASS.finditer(text)
    ]
    names, size = set(KINDS), 0
    while len(names) > size:
        size = len(names)
        names |= {name for _, name, bases in defined if bases & names}
    wanted = re.compile(rf"class\s+(?:{'|'.join(sorted(names))})\b")
    return {
        file.removesuffix(".py").replace("/", "."): outlined(code[file], wanted)
        for file in dict.fromkeys(file for file, name, _ in defined if name in names)
    }


def _classes(modules: dict[str, ast.Module]) -> classes.Classes:
    return classes.classes(
        modules,
        lambda node: bool(KINDS.intersection(classes.bases(node))),
        lambda _, one: one.value,
    )


def _nested(settings: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *above, last = key.split(".")
        place = tree
        for part in above:
            place = place.setdefault(part, {})
        place[last] = value
    return tree


def _lookups(texts: Iterable[str]) -> Iterator[str]:
    """Names that are looked up in a mapping or an object."""
    for text in texts:
        for found in LOOKUP.finditer(text):
            yield next(filter(None, found.groups()))


SOURCE = Source(
    {
        "nemo_rl": (
            "nemo_rl/**/*.py",
            "examples/**/run_*.py",
            "examples/configs/**/*.yaml",
        )
    },
    read,
)
