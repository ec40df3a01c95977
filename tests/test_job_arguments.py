"""Command lines for argparse, held against argparse itself."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

import pytest

from pytest_gkd.job.arguments import Arguments, Option, parsed
from pytest_gkd.job.shell_values import Text, Word, unknown

OPTIONS = {
    "--learning_rate": Option("learning_rate", "float"),
    "--learning-rate": Option("learning_rate", "float"),
    "--steps": Option("steps", "int"),
    "--step-size": Option("step_size", "int"),
    "--bf16": Option("bf16", "bool", "?"),
    "--no_bf16": Option("bf16", "false"),
    "--colocate": Option("colocate", "true"),
    "--files": Option("files", "str", "+"),
    "--pair": Option("pair", "int", "2"),
    "--kind": Option("kind", "str", choices=("forward", "reverse")),
}


def words(line: str) -> list[Word]:
    return [Word(Text(w), "run.sh", 7, w) for w in shlex.split(line)]


def read(line: str) -> Arguments:
    return parsed(words(line), OPTIONS, "the trainer")


def argparse_reads(line: str) -> dict[str, Any] | None:
    """What argparse makes of the same line, None where it refuses it."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    kinds: dict[str, Any] = {"int": int, "float": float, "str": str}
    kinds["bool"] = lambda text: text.lower() in ("yes", "true", "t", "y", "1")
    for name, option in OPTIONS.items():
        if option.type in ("true", "false"):
            parser.add_argument(name, action=f"store_{option.type}", dest=option.key)
        else:
            nargs = int(option.nargs) if option.nargs.isdigit() else option.nargs
            parser.add_argument(
                name,
                type=kinds[option.type],
                dest=option.key,
                nargs=nargs or None,
                choices=option.choices or None,
                const=True if option.nargs == "?" else None,
            )
    parser.set_defaults(**dict.fromkeys((o.key for o in OPTIONS.values()), None))
    try:
        found = parser.parse_args(shlex.split(line))
    except (SystemExit, argparse.ArgumentError):
        return None
    return {key: value for key, value in vars(found).items() if value is not None}


@pytest.mark.parametrize(
    "line",
    [
        "--learning_rate 1e-6 --steps=3",
        "--learning-rate -1.5",
        "--learn 2",
        "--ste 3",
        "--steps",
        "--steps --bf16",
        "--steps three",
        "--bf16 --steps 3",
        "--bf16 no --colocate",
        "--no_bf16",
        "--colo",
        "--files a b c --pair 1 -2",
        "--files --steps 3",
        "--pair 1",
        "--kind forward",
        "--kind sideways",
        "--stepz 3",
        "--steps 3 --steps 4",
    ],
)
def test_it_reads_as_argparse_does(line: str) -> None:
    found = read(line)
    expected = argparse_reads(line)
    if expected is None:
        assert found.findings
    else:
        assert not found.findings
        assert {s.key: s.value for s in found.said} == expected


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--learning_rat_e 1", "the trainer has no option --learning_rat_e; did you"),
        ("--ste 1", "--ste may mean --step-size, --steps: the trainer refuses it"),
        ("--steps x", "--steps x: the trainer expects an integer"),
        ("--kind x", "--kind x: the trainer knows forward, reverse"),
        ("--steps --bf16", "--steps expects a value, and the next word is an option"),
    ],
)
def test_what_is_refused_is_told(line: str, says: str) -> None:
    (finding,) = read(line).findings
    assert says in finding.message
    assert (finding.level, finding.line) == ("error", 7)


def test_a_passed_over_option_is_a_warning() -> None:
    found = parsed(words("--stepz 3 x"), OPTIONS, "it", refuses=False)
    (finding,) = found.findings
    assert finding.level == "warning"
    assert "nothing reads it" in finding.message


def test_what_is_not_certain_stays_so() -> None:
    line = words("--steps 3")
    line[1] = Word(unknown("N"), "run.sh", 7, "$N")
    extra = Word(unknown("EXTRA"), "run.sh", 8, "$EXTRA")
    steps, other = parsed([*line, extra], OPTIONS, "it").said
    assert (steps.key, steps.value, steps.needs) == ("steps", None, frozenset({"N"}))
    assert (other.key, other.needs) == ("", frozenset({"EXTRA"}))
