"""Injects a fault into a process that has not started yet."""

from __future__ import annotations

import os

import psutil

from pytest_gkd.processes import tree
from pytest_gkd.workload.inject.site import Site


def signal_process(site: Site, title: str, number: int) -> object:
    """Send signal ``number`` to the first process below this one with that title."""

    def act() -> bool:
        found = below(title)
        if found:
            site.triggered()
            found[0].send_signal(number)
        return bool(found)

    return site.repeat(act)


def below(title: str) -> list[psutil.Process]:
    """The processes below this one whose command line holds ``title``."""
    return [p for p in tree.descendants(os.getpid()) if title in tree.describe(p)]
