"""Finds the command that starts the training among those of a script."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from pytest_gkd.job.shell_values import Command, Word

PYTHON = re.compile(r"python[\d.]*|coverage|torchrun|deepspeed|accelerate")


class Launch(NamedTuple):
    """A training's start: whose it is, the program, and the words it is given.

    ``document`` is the configuration file where that is what was given to check,
    ``beside`` are all commands of the script.
    """

    framework: str
    program: str
    arguments: tuple[Word, ...]
    command: Command
    document: Path | None = None
    beside: tuple[Command, ...] = ()

    @property
    def before(self) -> tuple[Word, ...]:
        """What stands before the program: the launcher with its options."""
        words = self.command.words
        return words[: len(words) - len(self.arguments) - 1]


def launches(
    commands: tuple[Command, ...], programs: Mapping[str, re.Pattern[str]]
) -> Iterator[Launch]:
    """The commands that start one of the frameworks, in their order.

    ``programs`` are the module, script or subcommand that each is started by.
    """
    for command in commands:
        for program, arguments in _programs(command.words):
            framework = next(
                (f for f, fits in programs.items() if fits.fullmatch(program)), ""
            )
            if framework:
                yield Launch(framework, program, arguments, command, beside=commands)
                break


# A script or a module of the user's own, whose name tells no framework.
OWN_PROGRAM = re.compile(r".*\.py|(?!torch\.|accelerate\.)[A-Za-z_]\w*(\.\w+)+")


def _programs(words: tuple[Word, ...]) -> Iterator[tuple[str, tuple[Word, ...]]]:
    """What the words may start, whatever stands before it: ``uv run``, ``srun`` ..."""
    values = [word.text.value or "" for word in words]
    has_python = False
    for number, value in enumerate(values):
        following = values[number + 1] if number + 1 < len(values) else ""
        rest, name = words[number + 2 :], posixpath.basename(value)
        if value == "-m" and has_python:
            yield following, rest
        elif name in ("trl", "swift", "megatron"):
            yield f"{name} {following}", rest
        elif value.endswith(".py") and (has_python or number == 0):
            yield value, words[number + 1 :]
        has_python = has_python or bool(PYTHON.fullmatch(name))
