"""Injects a fault into a process that has not started yet."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import psutil

from pytest_gkd.processes import tree
from pytest_gkd.workload.inject.site import LATER, Site

POLL_S = 0.01


def signal_process(
    site: Site,
    title: str,
    number: int,
    ready: Callable[[], bool] = lambda: True,
) -> object:
    """Send signal ``number`` to the first process below this one with that title.

    As soon as it shows up and ``ready`` says so; a thread looks for it until the
    stage ends.
    """
    over = threading.Event()
    site.callback(over.set)

    def watch() -> None:
        while not over.wait(POLL_S):
            found = below(title) if ready() else []
            if found:
                site.triggered()
                found[0].send_signal(number)
                return

    threading.Thread(target=watch, name=f"fault: {title}", daemon=True).start()
    return LATER


def below(title: str) -> list[psutil.Process]:
    """The processes below this one whose command line holds ``title``."""
    return [p for p in tree.descendants(os.getpid()) if title in tree.describe(p)]
