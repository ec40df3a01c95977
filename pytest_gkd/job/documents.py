"""Reads YAML, JSON and TOML as settings with their lines; no tag is ever obeyed."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from pytest_gkd.job import script_file
from pytest_gkd.job.findings import CheckError
from pytest_gkd.job.overrides import Override
from pytest_gkd.job.shell_values import NOBODY, Text, Word

SUFFIXES = (".yaml", ".yml", ".json", ".toml")
# An alias stands for all that it names: a few lines can mean billions of settings.
MOST_SETTINGS = 20_000
DEEPEST = 50
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
MERGE = "tag:yaml.org,2002:merge"


def settings(path: Path) -> list[Override]:
    """All values of a file by their dotted keys, in the file's order.

    Values are as YAML 1.1 has them (``1e-6`` is a text there); an empty mapping is a
    value, a list is one value. Raises CheckError where the file cannot be read, is
    broken, or is no mapping.
    """
    text = script_file.text_of(path)
    try:
        if path.suffix == ".toml":
            found = list(_toml(str(path), tomllib.loads(text), text.split("\n")))
        else:
            # JSON is YAML but for tabs, which YAML has no place for outside of texts.
            text = text.replace("\t", "  ") if path.suffix == ".json" else text
            found = _yaml(path, text)
    except tomllib.TOMLDecodeError as error:
        raise CheckError(f"{path} is no TOML: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        what = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise CheckError(f"{path}{where}: {what}") from None
    except RecursionError:
        raise CheckError(f"{path} is nested deeper than can be followed") from None
    return found


def _yaml(path: Path, text: str) -> list[Override]:
    # libyaml's composer calls itself for each level, until the stack is full.
    depth = 0
    for event in yaml.parse(text, LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise RecursionError
    loader = LOADER(text)
    try:
        root = loader.get_single_node()
        if not isinstance(root, yaml.MappingNode):
            raise CheckError(f"{path} holds no settings: its top level is no mapping")
        found = []
        for setting in _mapping(loader, str(path), root, ()):
            found.append(setting)
            if len(found) > MOST_SETTINGS:
                raise CheckError(
                    f"{path} stands for more than {MOST_SETTINGS:,} settings"
                )
        return found
    finally:
        loader.dispose()


def _mapping(
    loader: Any, file: str, node: yaml.MappingNode, above: tuple[str, ...]
) -> Iterator[Override]:
    if len(above) > DEEPEST:
        raise RecursionError
    for key, value in node.value:
        if key.tag == MERGE:
            parts = value.value if isinstance(value, yaml.SequenceNode) else [value]
            for part in parts:
                if isinstance(part, yaml.MappingNode):
                    yield from _mapping(loader, file, part, above)
            continue
        name = (*above, str(key.value))
        if isinstance(value, yaml.MappingNode) and value.value:
            yield from _mapping(loader, file, value, name)
        else:
            yield _setting(file, value.start_mark.line + 1, name, _plain(loader, value))


def _plain(loader: Any, node: yaml.Node, depth: int = 0) -> Any:
    """The value of a node; of one with a tag of its own, the text that stands there."""
    if depth > DEEPEST:
        raise RecursionError
    if isinstance(node, yaml.MappingNode):
        return {str(k.value): _plain(loader, v, depth + 1) for k, v in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [_plain(loader, value, depth + 1) for value in node.value]
    if node.tag in loader.yaml_constructors:
        return loader.construct_object(node)
    return node.value


def _toml(
    file: str, table: dict[str, Any], lines: list[str], above: tuple[str, ...] = ()
) -> Iterator[Override]:
    for key, value in table.items():
        name = (*above, key)
        if isinstance(value, dict) and value:
            yield from _toml(file, value, lines, name)
        else:
            starts = (n for n, line in enumerate(lines, 1) if _names(line, key))
            yield _setting(file, next(starts, 0), name, value)


def _names(line: str, key: str) -> bool:
    left, equals, _ = line.partition("=")
    return bool(equals) and left.split(".")[-1].strip(" \t\"'") == key


def _setting(file: str, line: int, name: tuple[str, ...], value: Any) -> Override:
    key = ".".join(name)
    word = Word(Text(key), file, line, f"{key}: {value}"[:200])
    return Override("", key, value, NOBODY, word)
