"""Every command's --help is a page of a manual, and true."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_usage_errors import PROSE

from pytest_gkd.__main__ import argument_parser, main
from pytest_gkd.columns import cells
from pytest_gkd.watch import arguments

ROOT = Path(__file__).parent.parent


def pages(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The commands below gkd, and those below them."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield command
                yield from pages(command)


COMMANDS = {command.prog: command for command in pages(argument_parser())}
EVERY = pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@EVERY
def test_it_has_all_parts_in_this_order(command: argparse.ArgumentParser) -> None:
    page = command.format_help()
    assert re.fullmatch(
        rf"usage: {command.prog} .*\n\n[A-Z].*\.\n\n.*options:\n.*\n\n"
        r"exit status:\n  .*\n\nexamples:\n  .*\n\nsee also: .*\n",
        page,
        re.DOTALL,
    ), page
    assert max(map(len, page.splitlines())) <= 80


@EVERY
def test_its_exit_statuses_are_told_one_a_line(
    command: argparse.ArgumentParser,
) -> None:
    told = command.format_help().partition("exit status:\n")[2].partition("\n\n")[0]
    numbers = [int(n) for n in re.findall(r"^  (\d+) ", told, re.MULTILINE)]
    assert numbers[0] == 0
    assert 2 in numbers
    assert numbers == sorted(numbers)


@EVERY
def test_its_examples_are_commands_that_gkd_takes(
    command: argparse.ArgumentParser,
) -> None:
    told = command.format_help().partition("examples:\n")[2].partition("\n\n")[0]
    own = [line for line in told.splitlines() if command.prog in line]
    assert own
    for line in own:
        words = shlex.split(line.partition("gkd ")[2].partition(" > ")[0])
        options, job = arguments.split(words)
        asked, rest = argument_parser().parse_known_args(options)
        assert not rest or hasattr(asked, "overrides"), line
        if words[0] == "watch":
            arguments.checked(asked, job)


@EVERY
def test_its_options_say_default_and_unit(command: argparse.ArgumentParser) -> None:
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            continue
        name = action.option_strings or action.dest
        assert action.help, name
        if action.nargs != 0 and action.default not in (None, "", [], "==SUPPRESS=="):
            assert "default" in action.help, name
        if action.metavar == "TIME":
            assert re.search(r"such as .*\d|default: .*\d", action.help), name


@EVERY
def test_what_to_see_also_is_there(command: argparse.ArgumentParser) -> None:
    told = " ".join(command.format_help().partition("see also: ")[2].split())
    if not (ROOT / "docs").exists():
        pytest.skip("this is no clone")
    for one in re.findall(r"gkd [\w-]+(?: check)?", told):
        assert one in COMMANDS
    for page in re.findall(r"docs/\S+\.md", told):
        assert (ROOT / page).is_file(), page
    for page, heading in re.findall(r'(docs/\S+\.md), "(.+?)"', told):
        assert f"\n## {heading}\n" in (ROOT / page).read_text("utf-8")


def test_a_narrow_terminal_gets_hanging_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    page = COMMANDS["gkd report"].format_help()
    assert re.search(r"^  1    a stage no longer passes.*\n {7}\S", page, re.MULTILINE)
    example = "  gkd report .gkd/last .gkd/runs/20261126-091500"
    assert example in page.splitlines()


@EVERY
def test_it_is_chinese_for_those_who_ask(
    command: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--lang=zh", *command.prog.split()[1:], "--help"])
    page = capsys.readouterr().out
    told = page.partition("\n\n")[2].partition("\n\n示例：\n")[0]
    assert "选项：\n" in told
    assert "退出码：\n" in told
    assert not PROSE.search(re.sub(r"\S*[=\"]\S*", "", told)), told
    assert max(map(cells, page.splitlines())) <= 80
