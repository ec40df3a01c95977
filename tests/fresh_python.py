"""Runs Python in a process of its own, for what depends on how it begins or ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

LIMIT_S = 300


def run(
    *arguments: str | Path,
    cwd: Path | None = None,
    environ: Mapping[str, str] | None = None,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Python with these arguments, until it has ended, and what it said.

    ``environ`` goes on top of this process's environment. With ``check`` raises
    subprocess.CalledProcessError where it fails.
    """
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=os.environ | dict(environ or {}),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=check,
    )


def output(
    code: str, environ: Mapping[str, str] | None = None, cwd: Path | None = None
) -> str:
    """What ``code`` prints; ``environ`` goes on top of this process's environment.

    Raises subprocess.CalledProcessError where it fails; its stderr goes to ours.
    """
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env=os.environ | dict(environ or {}),
        stdout=subprocess.PIPE,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    return done.stdout
