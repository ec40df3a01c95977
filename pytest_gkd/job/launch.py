"""Finds the command that starts the training among those of a script."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import NamedTuple

from pytest_gkd.job.shell_values import Command, Word

# The "file" of words that gkd check adds to a start itself.
ADDED = "an added argument"
PYTHON = re.compile(r"python[\d.]*|coverage|torchrun|deepspeed|accelerate")


class Launch(NamedTuple):
    """The start of a training: its framework, the program, and its words.

    ``document`` is the configuration file if that is what was checked, ``beside`` are
    all commands of the script.
    """

    framework: str
    program: str
    arguments: tuple[Word, ...]
    command: Command
    document: Path | None = None
    beside: tuple[Command, ...] = ()

    @property
    def name(self) -> str:
        """The program's name, without its folder, packages and suffix."""
        return posixpath.basename(self.program.removesuffix(".py")).rpartition(".")[2]

    @property
    def options(self) -> frozenset[str]:
        """The names of the long options that the program is given."""
        shapes = (word.text.shape.partition("=")[0] for word in self.arguments)
        return frozenset(shape for shape in shapes if shape.startswith("--"))

    @property
    def before(self) -> tuple[Word, ...]:
        """The words before the program: the launcher with its options."""
        words = self.command.words
        return words[: len(words) - len(self.arguments) - 1]

    def with_arguments(self, more: tuple[Word, ...]) -> Launch:
        """The same start with further words appended."""
        command = self.command._replace(words=(*self.command.words, *more))
        beside = tuple(command if c is self.command else c for c in self.beside)
        arguments = (*self.arguments, *more)
        return self._replace(arguments=arguments, command=command, beside=beside)


class Program(NamedTuple):
    """What starts a framework: a module, script or subcommand.

    A name in the group ``common``, such as train.py, may be anybody's. It is the
    framework's if ``is_own`` says so of the words and of the files that they are in.
    """

    name: re.Pattern[str]
    is_own: Callable[[AbstractSet[str]], bool]


def launches(
    commands: tuple[Command, ...], programs: Mapping[str, Program], asked: str = ""
) -> Iterator[Launch]:
    """The commands that start one of the frameworks, in order.

    ``asked`` is the framework, if any, that common names are taken for.
    """
    for command in commands:
        for program, arguments in _programs(command.words):
            said = {word.text.shape for word in arguments}
            said |= {word.file for word in command.words}
            for framework, (name, is_own) in programs.items():
                found = name.fullmatch(program)
                is_common = found and "common" in name.groupindex and found["common"]
                is_sure = framework == asked if asked else is_own(said)
                if found and (is_sure or not is_common):
                    yield Launch(
                        framework, program, arguments, command, beside=commands
                    )
                    break
            else:
                continue
            break


# The user's own script or module, whose name does not tell the framework.
OWN_PROGRAM = re.compile(r".*\.py|(?!torch\.|accelerate\.)[A-Za-z_]\w*(\.\w+)+")


# prime-rl's programs, whose names may be anybody's.
PRIME_RL = ("rl", "sft", "trainer", "orchestrator", "inference", "evals")
# Modules that run the module named by their first word as if it were the program
# (Megatron-LM's experimental/lite/examples/verl, launch.py).
RUNNERS = ("verl_mlite.launch",)


def _programs(words: tuple[Word, ...]) -> Iterator[tuple[str, tuple[Word, ...]]]:
    """What the words may start, whatever comes before it: ``uv run``, ``srun`` ..."""
    values = [word.text.value or "" for word in words]
    has_python = False
    for number, value in enumerate(values):
        following = values[number + 1] if number + 1 < len(values) else ""
        rest, name = words[number + 2 :], posixpath.basename(value)
        if value in ("-m", "--module") and has_python:
            yield following, rest
            if following in RUNNERS and rest:
                yield rest[0].text.value or "", rest[1:]
        elif name in ("trl", "swift", "megatron"):
            yield f"{name} {following}", rest
        elif name in PRIME_RL and (has_python or number == 0) and following[:1] in "@-":
            yield name, words[number + 1 :]
        elif value.endswith(".py") and (has_python or number == 0):
            yield value, words[number + 1 :]
        is_uv = name == "run" and number > 0 and values[number - 1] == "uv"
        has_python = has_python or is_uv or bool(PYTHON.fullmatch(name))
