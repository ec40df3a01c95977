"""Runs code in a Python of its own, for what depends on what is imported already."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

LIMIT_S = 300


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
