"""Reads YAML, JSON and TOML as settings with their lines; tags are never executed."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from pytest_gkd.job import script_file
from pytest_gkd.job.findings import CheckError
from pytest_gkd.job.overrides import Override
from pytest_gkd.job.shell_values import NOBODY, Text, Word

SUFFIXES = (".yaml", ".yml", ".json", ".toml")
# An alias repeats all that it names: a few lines can mean billions of settings.
MOST_SETTINGS = 5_000
MOST_NODES = 3 * MOST_SETTINGS  # a key and a value, in sections
DEEPEST = 50
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
MERGE = "tag:yaml.org,2002:merge"
NUMBER = "tag:yaml.org,2002:int"
MOST_DIGITS = 4000  # Python's own limit is 4300
LONGEST_KEY = 1000  # including all levels above it
TOML_WORD = r"""(?:[A-Za-z0-9_-]++|"[^"\n]*+"|'[^'\n]*+')"""
TOML_PART = re.compile(TOML_WORD)
TOML_NAME = rf"{TOML_WORD}(?:[ \t]*+\.[ \t]*+{TOML_WORD})*+"
TOML_HEADER = re.compile(rf"[ \t]*+(\[\[?)[ \t]*+({TOML_NAME})[ \t]*+\]")
TOML_KEY = re.compile(rf"[ \t]*+({TOML_NAME})[ \t]*+=")
# tomllib keeps every prefix of a dotted key: memory grows with the square of its parts.
TOML_DEEP = re.compile(
    rf"(?<![\w-]){TOML_WORD}(?:[ \t]*+\.[ \t]*+{TOML_WORD}){{{DEEPEST}}}"
)
EXPONENT = r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)[eE][-+]?[0-9]+"


def _omegaconf() -> Any:
    """OmegaConf 2.3's loader (omegaconf/_utils.py, get_yaml_loader): 1e-6 is a number,
    a date is a text, and a duplicate key in a mapping is refused.
    """
    loader: Any = type("OmegaConfLoader", (LOADER,), {"refuses_twice": True})
    loader.yaml_implicit_resolvers = {
        first: [one for one in some if not one[0].endswith(":timestamp")]
        for first, some in LOADER.yaml_implicit_resolvers.items()
    }
    number = re.compile(f"^(?:{EXPONENT})$")
    loader.add_implicit_resolver(
        "tag:yaml.org,2002:float", number, list("-+0123456789.")
    )
    return loader


OMEGACONF = _omegaconf()


def settings(path: Path, loader: Any = LOADER) -> list[Override]:
    """All values of a file by their dotted keys, in file order.

    Values are as in YAML 1.1 (``1e-6`` is a text there), or as ``loader`` reads them;
    an empty mapping is a value, a list is one value. Raises CheckError if the file
    cannot be read, is broken, or is not a mapping.
    """
    return settings_of(script_file.text_of(path), str(path), loader)


def settings_of(text: str, file: str, loader: Any = LOADER) -> list[Override]:
    """The same for a text; ``file`` is the name of the file that it is from."""
    return list(_settings_of(text, file, loader))


@lru_cache(maxsize=8)
def _settings_of(text: str, file: str, loader: Any) -> tuple[Override, ...]:
    """Cached, as all paths through a script read the same files."""
    try:
        if file.endswith(".toml"):
            found = _toml_settings(file, text)
        else:
            # JSON is YAML except for tabs, which YAML does not allow outside texts.
            text = text.replace("\t", "  ") if file.endswith(".json") else text
            found = _yaml(file, text, loader)
    except tomllib.TOMLDecodeError as error:
        raise CheckError(f"{file} is not valid TOML: {error}") from None
    except CheckError:
        raise
    except ValueError as error:  # a number of thousands of digits
        raise CheckError(f"{file}: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        what = getattr(error, "problem", None) or str(error).partition("\n")[0]
        if "nesting depth" in what:  # PyYAML 6.0.4, which looks ahead
            raise _too_deep(file) from None
        kind = "JSON" if file.endswith(".json") else "YAML"
        line = mark.line + 1 if mark else 1
        told = f"{file} is not valid {kind}: {what} (line {line})"
        raise CheckError(told) from None
    except RecursionError:
        raise _too_deep(file) from None
    return tuple(found)


def _too_deep(file: str) -> CheckError:
    return CheckError(f"{file} is nested deeper than can be followed")


def value_of(text: str) -> Any:
    """What OmegaConf makes of a word's value. Raises ValueError for invalid YAML."""
    try:
        with _root("it", text, OMEGACONF) as (loader, root):
            if root is not None and _size(root, {}) > MOST_NODES:
                raise _too_many("it")
            return None if root is None else _plain(loader, root)
    except yaml.YAMLError as error:
        raise ValueError(
            getattr(error, "problem", None) or "it is not valid YAML"
        ) from None
    except RecursionError:
        raise ValueError("it is nested too deep") from None


@contextmanager
def _root(file: str, text: str, kind: Any) -> Iterator[tuple[Any, yaml.Node | None]]:
    """A text's loader and its root node."""
    # libyaml's composer recurses for each level, until the stack overflows, and keeps
    # every node.
    depth = nodes = 0
    for event in yaml.parse(text, kind):
        nodes += isinstance(event, yaml.NodeEvent)
        if nodes > MOST_NODES:
            raise _too_many(file)
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise RecursionError
    loader = kind(text)
    try:
        yield loader, loader.get_single_node()
    finally:
        loader.dispose()


def _yaml(file: str, text: str, kind: Any) -> list[Override]:
    with _root(file, text, kind) as (loader, root):
        if not isinstance(root, yaml.MappingNode):
            raise CheckError(
                f"{file} holds no settings: its top level is not a mapping"
            )
        if _size(root, {}) > MOST_NODES:
            raise _too_many(file)
        return list(_mapping(loader, file, root, ()))


def _too_many(file: str) -> CheckError:
    return CheckError(
        f"{file} stands for more than {MOST_SETTINGS:,} settings, which no job has; "
        "give its configuration itself, and let data lie in files of its own"
    )


def _mapping(
    loader: Any, file: str, node: yaml.MappingNode, above: tuple[str, ...]
) -> Iterator[Override]:
    if len(above) > DEEPEST:
        raise RecursionError
    for name, value in _pairs(loader, node, {}).items():
        key = (*above, name)
        if isinstance(value, yaml.MappingNode) and value.value:
            yield from _mapping(loader, file, value, key)
        else:
            yield _setting(file, value.start_mark.line + 1, key, _plain(loader, value))


def _pairs(
    loader: Any, node: yaml.MappingNode, known: dict[int, dict[str, yaml.Node] | None]
) -> dict[str, yaml.Node]:
    """A mapping's values with those that it merges; its own take precedence.

    ``known`` are the mappings already read, None for one that is being read.
    """
    if id(node) in known:
        found = known[id(node)]
        if found is None:
            raise RecursionError
        return found
    known[id(node)] = None
    own: dict[str, yaml.Node] = {}
    merged: dict[str, yaml.Node] = {}
    for key, value in node.value:
        if key.tag == MERGE:
            parts = value.value if isinstance(value, yaml.SequenceNode) else [value]
            for part in parts:
                if isinstance(part, yaml.MappingNode):
                    merged = _pairs(loader, part, known) | merged
        elif str(key.value) in own and getattr(loader, "refuses_twice", False):
            text = f"found duplicate key {key.value}"
            raise yaml.constructor.ConstructorError(None, None, text, key.start_mark)
        else:
            own[str(key.value)] = value
    known[id(node)] = found = merged | own
    return found


def _size(node: yaml.Node, known: dict[int, int], depth: int = 0) -> int:
    """How many nodes a node expands to, with all that its aliases name."""
    if depth > DEEPEST:
        raise RecursionError
    if id(node) not in known:
        parts: list[yaml.Node] = []
        if isinstance(node, yaml.SequenceNode):
            parts = node.value
        elif isinstance(node, yaml.MappingNode):
            parts = [part for pair in node.value for part in pair]
        known[id(node)] = 1 + sum(_size(part, known, depth + 1) for part in parts)
    return known[id(node)]


def _plain(loader: Any, node: yaml.Node, depth: int = 0) -> Any:
    """The value of a node; for one with a custom tag, the text as written."""
    if depth > DEEPEST:
        raise RecursionError
    if isinstance(node, yaml.MappingNode):
        pairs = _pairs(loader, node, {})
        return {name: _plain(loader, v, depth + 1) for name, v in pairs.items()}
    if isinstance(node, yaml.SequenceNode):
        return [_plain(loader, value, depth + 1) for value in node.value]
    if node.tag == NUMBER and len(node.value) > MOST_DIGITS:
        raise ValueError(f"a number exceeds the limit of {MOST_DIGITS} digits")
    if node.tag in loader.yaml_constructors:
        return loader.construct_object(node)
    return node.value


def _toml_settings(file: str, text: str) -> list[Override]:
    if TOML_DEEP.search(text):
        raise RecursionError
    found = list(_toml(file, tomllib.loads(text), toml_lines(text)))
    if len(found) > MOST_SETTINGS:
        raise _too_many(file)
    return found


def _toml(
    file: str, table: dict[str, Any], lines: dict[str, int], above: tuple[str, ...] = ()
) -> Iterator[Override]:
    for key, value in table.items():
        name = (*above, key)
        if isinstance(value, dict) and value:
            yield from _toml(file, value, lines, name)
        else:
            yield _setting(file, lines.get(".".join(name), 0), name, value)


def toml_lines(text: str) -> dict[str, int]:
    """The line of each key in a TOML file, and of each of its tables.

    Keys are dotted, with the index of a table in an array of tables.
    """
    found: dict[str, int] = {}
    counts: dict[str, int] = {}
    above: list[str] = []
    end = ""
    for number, line in enumerate(text.split("\n"), 1):
        if end:
            end = "" if end in line else end
            continue
        header, left = TOML_HEADER.match(line), TOML_KEY.match(line)
        if header:
            above = []
            for part in _parts(header[2]):
                above.append(part)
                if ".".join(above) in counts and above != _parts(header[2]):
                    above.append(str(counts[".".join(above)]))
            key = ".".join(above)
            found.setdefault(key, number)
            if header[1] == "[[":
                counts[key] = counts.get(key, -1) + 1
                above.append(str(counts[key]))
        elif left:
            found.setdefault(".".join([*above, *_parts(left[1])]), number)
        for quotes in ('"""', "'''"):
            if line.count(quotes) % 2:
                end = quotes
    return found


def _parts(dotted: str) -> list[str]:
    return [part.strip().strip("\"'") for part in TOML_PART.findall(dotted)]


def _setting(file: str, line: int, name: tuple[str, ...], value: Any) -> Override:
    key = ".".join(name)
    if len(key) > LONGEST_KEY:
        where = f"{file}, line {line}" if line else file
        said = f"the key {key[:40]}... has more than {LONGEST_KEY:,} characters"
        raise CheckError(f"{where}: {said}; no framework has such a one")
    word = Word(Text(key), file, line, f"{key}: {value}"[:200])
    return Override("", key, value, NOBODY, word)
