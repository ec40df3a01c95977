"""Signals that end a run: in order, however often they come."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

from pytest_gkd.clock import monotonic
from pytest_gkd.report.terminal import leave_dead_terminal

# So soon after a signal another one means the same; and so many mean to have it now.
ENDS_AT_ONCE_S = 3.0
IMPATIENT = 5


class Interrupts:
    """Makes KeyboardInterrupt of signals, unless the run ``is_ending`` already."""

    def __init__(self, is_ending: Callable[[], object]) -> None:
        self._is_ending = is_ending
        self._old: dict[int, Any] = {}
        self._at = [float("-inf")]

    def heed(self, *, interrupt: bool) -> None:
        """SIGTERM and SIGHUP, and SIGINT where ``interrupt`` is set.

        A CI job that is cancelled, or a terminal that is closed, still gets its report
        and its processes ended. A choice of others, as nohup's, is left as it is.
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
        """The handlers that were there before."""
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _interrupt(self, number: int, frame: object) -> None:
        """End the run, in order; the next few signals hasten nothing.

        Each part of that end has a limit. Cut off, it would leave it to the guardian.
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
