"""How does a stage's failure look in pytest's terminal and in JUnit?"""

from __future__ import annotations

import subprocess
from typing import Any

from _pytest._code.code import ReprFileLocation, TerminalRepr
from _pytest._io import TerminalWriter

from pytest_gkd import render
from pytest_gkd.record import StageRecord
from pytest_gkd.watchdog import Overrun


class StageFailure(TerminalRepr):
    """What pytest shows and JUnit stores for a failed stage."""

    def __init__(self, record: StageRecord, block: list[str], traceback: Any) -> None:
        self.reprcrash = ReprFileLocation(record.nodeid, 0, render.headline(record))
        self._block = block
        self._traceback = traceback

    def toterminal(self, tw: TerminalWriter) -> None:
        for number, line in enumerate(self._block):
            tw.line(line, red=number == 0, bold=number == 0)
        if self._traceback is None:
            return
        tw.line("")
        if hasattr(self._traceback, "toterminal"):
            self._traceback.toterminal(tw)
        else:
            tw.line(str(self._traceback))


def closing_message(overrun: Overrun | None) -> str:
    """What is wrong with a stage that had passed before its process was ended."""
    if overrun is None:
        return "it passed, then its process died while closing"
    return f"it passed, then did not close within {render.budget(overrun.limit_s)}"


def exit_status(node: Any) -> int | None:
    """How a worker process ended, negative for a signal; None when it is not known."""
    popen = getattr(getattr(node.gateway, "_io", None), "popen", None)
    if popen is None:
        return None
    try:
        return int(popen.wait(timeout=2))
    except subprocess.TimeoutExpired:
        return None
