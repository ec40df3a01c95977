"""Signals that end a run, in an orderly way however often they come."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

from pytest_gkd.clock import monotonic
from pytest_gkd.report.terminal import leave_dead_terminal

# A signal this soon after another means the same; this many mean "right now".
ENDS_AT_ONCE_S = 3.0
IMPATIENT = 5


class Interrupts:
    """Turns signals into KeyboardInterrupt, unless the run ``is_ending`` already."""

    def __init__(self, is_ending: Callable[[], object]) -> None:
        self._is_ending = is_ending
        self._old: dict[int, Any] = {}
        self._at = [float("-inf")]

    def heed(self, *, interrupt: bool) -> None:
        """Handle SIGTERM and SIGHUP, and SIGINT if ``interrupt`` is set.

        A cancelled CI job or a closed terminal still gets its report and has its
        processes ended. A disposition set by others, such as nohup, is left alone.
        """
        heeded: dict[int, Any] = dict.fromkeys(
            (signal.SIGTERM, signal.SIGHUP), signal.SIG_DFL
        )
        if interrupt:
            heeded[signal.SIGINT] = signal.default_int_handler
        for number, handler in heeded.items():
            if (
                threading.current_thread() is threading.main_thread()
                and signal.getsignal(number) is handler
            ):
                self._old[number] = signal.signal(number, self._interrupt)

    def restore(self) -> None:
        """Restore the previous handlers."""
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _interrupt(self, number: int, frame: object) -> None:
        """End the run in an orderly way; the next few signals do not speed it up.

        Each step of it has a time limit; cut short, the rest is left to the guardian.
        """
        if number == signal.SIGHUP:
            leave_dead_terminal()
        now = monotonic()
        ends = self._is_ending() or now < self._at[-1] + ENDS_AT_ONCE_S
        self._at.append(now)
        if ends and len(self._at) <= IMPATIENT:
            return
        said = () if number == signal.SIGINT else (signal.Signals(number).name,)
        raise KeyboardInterrupt(*said)
