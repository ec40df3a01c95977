"""Shells complete what gkd takes, as a user types it."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import time
from pathlib import Path

import fresh_python
import pytest

from pytest_gkd import completion
from pytest_gkd.__main__ import argument_parser
from pytest_gkd.diagnosis import catalogue

LIMIT_S = 60
ASK = """
source "$1"
shift
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_gkd
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def bash(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bash") / "gkd"
    path.write_text(fresh_python.run("-m", "pytest_gkd", "completion", "bash").stdout)
    return path


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["exp"], ["explain"]),
        (["explain", "comm.p"], ["comm.p2p", "comm.peer-died", "comm.port-in-use"]),
        (["explain", "--l"], ["--list"]),
        (["diagnose", "--format", "="], ["text", "json"]),
        (["diagnose", "--format", "=", "j"], ["json"]),
        (["diagnose", "--format", "j"], ["json"]),
        (["diagnose", "--format", "=", "json", "tr"], ["train.log", "traces"]),
        (["report", "tr"], ["train.log", "traces"]),
        (["rules", ""], ["check"]),
        (["rules", "check", "tr"], ["train.log", "traces"]),
        (["watch", "--log", "=", "train"], ["train.log"]),
        (["bundle", "--report", "=", "tr"], ["traces"]),
        (["completion", ""], ["bash", "zsh", "fish"]),
    ],
)
def test_bash_completes_words(
    bash: Path, tmp_path: Path, typed: list[str], expected: list[str]
) -> None:
    (tmp_path / "traces").mkdir()
    (tmp_path / "train.log").touch()
    done = subprocess.run(
        ["bash", "--norc", "-c", ASK, "bash", bash, "gkd", *typed],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    assert sorted(done.stdout.split()) == sorted(expected), done.stderr


def test_bash_offers_every_command_and_every_cause(bash: Path) -> None:
    def offered(*typed: str) -> set[str]:
        command: list[str | Path] = [
            "bash",
            "--norc",
            "-c",
            ASK,
            "bash",
            bash,
            "gkd",
            *typed,
        ]
        return set(subprocess.check_output(command, text=True).split())

    assert offered("explain", "") == set(catalogue.load())
    usage = argument_parser().format_help()
    assert all(f"    {name}" in usage for name in offered(""))
    assert {"diagnose", "watch", "completion"} <= offered("")


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ("gkd expl\tcomm.peer\t", "gkd explain comm.peer-died"),
        ("gkd watch -- ./pr\t", "gkd watch -- ./prog"),
    ],
)
def test_the_tab_key_completes_at_a_prompt(
    bash: Path, tmp_path: Path, typed: str, wanted: str
) -> None:
    (tmp_path / "prog").touch()
    shell = ["bash", "--norc", "-i"]
    shown = at_a_prompt(shell, f"source {bash}", typed, wanted, tmp_path)
    assert wanted in shown


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_take_their_script(shell: str, tmp_path: Path) -> None:
    made = completion.script(argument_parser(), shell, ["comm.peer-died"])
    assert "comm.peer-died" in made
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    path = tmp_path / "_gkd"
    path.write_text(made)
    subprocess.run([shell, "-n", path], check=True, timeout=LIMIT_S)
    if shell == "fish":
        ask = f"source {path}; complete -C 'gkd explain comm.p'"
        said = subprocess.check_output(["fish", "--no-config", "-c", ask], text=True)
        assert "comm.peer-died" in said
        return
    setup = f"PS1='> '; fpath=({tmp_path} $fpath); autoload -U compinit; compinit -u -D"
    wanted = "comm.peer-died"
    started = ["zsh", "-f", "-i"]
    shown = at_a_prompt(started, setup, "gkd expl\tcomm.peer\t", wanted, tmp_path)
    assert wanted in shown


def at_a_prompt(
    shell: list[str], setup: str, typed: str, wanted: str, place: Path
) -> str:
    """What an interactive shell shows after ``typed``, up to ``wanted``."""
    ours, theirs = os.openpty()
    running = subprocess.Popen(
        shell,
        cwd=place,
        env=os.environ | {"TERM": "dumb"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    try:
        os.write(ours, f"{setup}; echo re''ady\n".encode())
        shown_until(ours, "\nready")
        os.write(ours, typed.encode())
        return shown_until(ours, wanted)
    finally:
        running.kill()
        running.wait()
        os.close(ours)
        os.close(theirs)


def shown_until(terminal: int, wanted: str) -> str:
    """What a terminal shows, bells aside, until it has this, or for LIMIT_S."""
    shown = ""
    until = time.monotonic() + LIMIT_S
    while wanted not in shown and time.monotonic() < until:
        if select.select([terminal], [], [], 1)[0]:
            shown += os.read(terminal, 65536).decode(errors="replace")
            shown = shown.replace("\a", "")
    return shown


def test_completion_costs_the_command_nothing_else() -> None:
    """shtab is imported for `gkd completion` alone, and never by pytest."""
    done = fresh_python.run(
        "-c",
        "import sys, pytest_gkd.plugin, pytest_gkd.run.session, pytest_gkd.__main__\n"
        "pytest_gkd.__main__.main(['explain', 'comm.p2p'])\n"
        "sys.exit('shtab' in sys.modules)",
    )
    assert done.returncode == 0, done.stdout + done.stderr
