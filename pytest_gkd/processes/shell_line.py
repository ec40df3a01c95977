"""A command as it is typed into a shell: how it is run, and what is wrong with it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

# Nothing of the line is run to check it; even so, a shell may be slow to start.
LIMIT_S = 10.0
# A word that the shell takes as it stands.
_PLAIN = re.compile(r"[\w./+@%:,-]+")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=", re.ASCII)
# Files that a shell would run first.
_STARTUP = ("BASH_ENV", "ENV")


def words(line: str) -> list[str]:
    """The words that run it: in bash, or in sh where there is none."""
    return [_shell(), "-c", line]


def problem(line: str, directory: Path) -> str:
    """Why it cannot run in ``directory``, as far as that is certain beforehand."""
    if not line.strip():
        return "no command"
    if said := _refused("-n", "-c", line):
        return f"the shell cannot read it: {said}"
    try:
        typed = shlex.split(line)
    except ValueError:  # the shell knows more kinds of quotes
        return ""
    name = next((one for one in typed if not _ASSIGNMENT.match(one)), "")
    if not _PLAIN.fullmatch(name):
        return ""
    if "/" not in name:
        known = not _refused("-c", 'command -v -- "$1" || echo no >&2', "sh", name)
        beside = Path(sys.executable).with_name(name)
        there = f"; there is {beside}: name that" if beside.exists() else ""
        return "" if known else f"there is no command {name!r} on PATH{there}"
    place = directory / name
    if not place.exists():
        return f"there is no file {name!r} in {directory}"
    if place.is_dir() or not os.access(place, os.X_OK):
        return f"{name!r} is not executable; name what runs it, such as: bash {name}"
    return ""


def _shell() -> str:
    return shutil.which("bash") or "/bin/sh"


def _refused(*arguments: str) -> str:
    """The last line of the shell's complaint, empty without one."""
    environ = {name: one for name, one in os.environ.items() if name not in _STARTUP}
    try:
        done = subprocess.run(
            [_shell(), *arguments],
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=LIMIT_S,
            env=environ,
        )
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return ""  # the run itself will tell
    said = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return said[-1] if said else ""
