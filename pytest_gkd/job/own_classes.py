"""The configuration classes that a user's own program derives, read without import."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pytest_gkd.job import script_file
from pytest_gkd.job.findings import CheckError
from pytest_gkd.job.sources import classes

MOST_FILES = 20


class Own(NamedTuple):
    """All classes, recorded ones and the program's, and the class of the whole."""

    classes: Mapping[str, Any]
    root: str


def read(
    program: Path | None,
    recorded: Mapping[str, Any],
    takes: re.Pattern[str],
    made: Callable[[str], str] = str,
) -> Own | None:
    """The classes of a program and of the modules beside it that it imports.

    ``takes`` matches the name of the whole's class in the group ``name``; ``made``
    parses a file's text. None if the class cannot be determined for certain.
    """
    if program is None:
        return None
    try:
        texts = {name: made(text) for name, text in _texts(program).items()}
        names = {match["name"] for match in takes.finditer(texts[program.stem])}
        found = classes.dataclasses({f"{name}.py": t for name, t in texts.items()})
        trees = [ast.parse(text) for text in texts.values()]
    except (CheckError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if len(names) != 1:
        return None
    written = {
        node.name: classes.bases(node)
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
    every = dict(recorded)
    for name, one in found.items():
        bases = [base.rpartition(".")[2] for base in written.get(name, ())]
        every[name] = {"bases": bases, "fields": one["fields"]}
    root = names.pop()
    return Own(every, root) if root in found and _is_whole(root, every, ()) else None


def calls(program: Path, function: str) -> bool:
    """Whether a program calls a function of that name; False if it cannot be read."""
    try:
        tree = ast.parse(script_file.text_of(program, is_script=False))
    except (CheckError, SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    called = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return any(
        function in (getattr(one, "id", ""), getattr(one, "attr", "")) for one in called
    )


def _texts(program: Path) -> dict[str, str]:
    """The program and what it imports from its own folder, by module name."""
    texts = {program.stem: script_file.text_of(program, is_script=False)}
    waiting = [program.stem]
    while waiting and len(texts) < MOST_FILES:
        for node in ast.walk(ast.parse(texts[waiting.pop()])):
            if not isinstance(node, ast.ImportFrom):
                continue
            name = (node.module or "").rpartition(".")[2]
            path = program.parent / f"{name}.py"
            if name and name not in texts and path.is_file():
                texts[name] = script_file.text_of(path, is_script=False)
                waiting.append(name)
    return texts


def _is_whole(name: str, every: Mapping[str, Any], below: tuple[str, ...]) -> bool:
    """Whether all bases of a class are known, and none is derived from itself."""
    if name not in every or name in below:
        return False
    return all(_is_whole(b, every, (*below, name)) for b in every[name]["bases"])
