"""Watches the job that the user asked for: one to start, or one that runs."""

from __future__ import annotations

import contextlib
import os

from pytest_gkd.watch.arguments import Asked
from pytest_gkd.watch.attached import AttachedWatch
from pytest_gkd.watch.started import CommandWatch


def run(asked: Asked) -> int:
    """Watch the job until it ends; returns the exit status (see ``exits``)."""
    for number in (0, 1, 2):  # what is opened must not get the number of one of them
        with contextlib.suppress(OSError):
            os.fstat(number)
            continue
        os.open(os.devnull, os.O_RDWR)
    return (CommandWatch if asked.command else AttachedWatch)(asked).run()
