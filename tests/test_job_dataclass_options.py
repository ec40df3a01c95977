"""Options read from a dataclass's source, held against transformers' own parser."""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import sys
from types import ModuleType
from typing import Any

import pytest

from pytest_gkd.job import dataclass_options
from pytest_gkd.job.arguments import parsed
from pytest_gkd.job.shell_values import Text, Word

SOURCE = """
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, Optional, Union


class When(Enum):
    NO = "no"
    STEPS = "steps"


@dataclass
class Base:
    rate: float = field(default=1e-5, metadata={"help": "speed"})
    steps: int = 10
    when: Union[When, str] = field(default="no")
    half: bool = True


@dataclass
class Config(Base):
    rate: float = field(default=1e-6)
    teacher: str | None = field(default=None)
    length: Optional[int] = field(default=512)
    exact: bool | None = None
    kwargs: dict[str, Any] | str | None = None
    names: list[str] = field(default_factory=lambda: ["a"])
    weights: list[float] | None = None
    side: Literal["left", "right"] = "left"
    kind: str = field(default="auto", metadata={"choices": ["auto", "own"]})
    short: int = field(default=1, metadata={"aliases": ["-s", "--brief"]})
    hidden: int = field(default=0, init=False)
    report: None | str | list[str] = None
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    path = tmp_path_factory.mktemp("config") / "gkd_test_config.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("gkd_test_config", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules["gkd_test_config"] = made
    spec.loader.exec_module(made)
    return made


def ours(line: str) -> dict[str, Any] | None:
    """The fields as we read them; None where a word is refused."""
    known = dataclass_options.classes(SOURCE)
    fields = dataclass_options.fields("Config", known)
    words = [Word(Text(w), "run.sh", 1, w) for w in shlex.split(line)]
    options = dataclass_options.options(fields, none=False)
    found = parsed(words, options, "it")
    if found.findings or found.rest:
        return None
    defaults = {name: field["default"] for name, field in fields.items()}
    return defaults | {one.key: one.value for one in found.said}


def theirs(line: str, module: ModuleType) -> dict[str, Any] | None:
    """The same by HfArgumentParser."""
    hf_argparser = pytest.importorskip("transformers.hf_argparser")
    parser = hf_argparser.HfArgumentParser(module.Config, exit_on_error=False)
    try:
        (read,) = parser.parse_args_into_dataclasses(shlex.split(line))
    except (SystemExit, ValueError, argparse.ArgumentError):
        return None
    return {k: v for k, v in vars(read).items() if k != "hidden"}


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--rate 2e-4 --steps 3",
        "--steps 1.5",
        "--when steps",
        "--when sometimes",
        "--half",
        "--half false",
        "--no_half",
        "--no-half",
        "--exact yes",
        "--exact",
        "--teacher none",
        "--length 5",
        "--length none",
        "--names a b --weights 1 2.5",
        "--names",
        "--side right",
        "--side up",
        "--kind own",
        "--kind other",
        "-s 3",
        "--brief 4",
        "--hidden 3",
        "--report wandb",
        "--teach x",
        "stray",
    ],
)
def test_the_options_are_those_of_the_parser(line: str, module: ModuleType) -> None:
    assert ours(line) == theirs(line, module)


@pytest.mark.parametrize(
    ("text", "classes", "passes"),
    [
        ("p = TrlParser((A, m.B))\np.parse_args_and_config()", ["A", "B"], ""),
        (
            "t = (A, B)\np = TrlParser(t, prog='x')\n"
            "p.parse_args_and_config(fail_with_unknown_args=False)",
            ["A", "B"],
            "config",
        ),
        ("HfArgumentParser(A).parse_args_into_dataclasses()", ["A"], "line"),
        (
            "p = TrlParser(dataclass_types=[A])\n"
            "p.parse_args_and_config(return_remaining_strings=True)",
            ["A"],
            "all",
        ),
        ("import argparse\nargparse.ArgumentParser().parse_args()", [], ""),
    ],
)
def test_what_a_script_reads_its_options_into(
    text: str, classes: list[str], passes: str
) -> None:
    found = dataclass_options.program(text)
    assert found == {"classes": classes, "passes": passes}


def test_a_default_that_is_computed_is_not_known() -> None:
    text = "@dataclass\nclass A:\n    a: str = field(default=where())\n    b: int\n"
    fields = dataclass_options.classes(text)["A"]["fields"]
    assert fields["a"] == {"type": "str", "unknown": "where()"}
    assert fields["b"] == {"type": "int", "required": True}


def test_a_class_with_an_unknown_base_is_not_known() -> None:
    known = dataclass_options.classes(
        "@dataclass\nclass A(Elsewhere):\n    a: int = 1\n"
    )
    with pytest.raises(KeyError, match="Elsewhere"):
        dataclass_options.fields("A", known)
