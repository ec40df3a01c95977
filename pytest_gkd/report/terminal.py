"""What the terminal shows while stages run: result lines and the live line."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from _pytest.terminal import TerminalReporter

from pytest_gkd import sanitize
from pytest_gkd.columns import padded
from pytest_gkd.report import render
from pytest_gkd.report.record import StageRecord

PLAIN_EVERY_S = 10.0


def leave_dead_terminal() -> None:
    """Replace a terminal that is gone by /dev/null.

    Otherwise any further output of pytest would raise, in the middle of its shutdown.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for entry in Path("/proc/self/fd").iterdir():
        try:
            os.tcgetpgrp(int(entry.name))
        except OSError as error:
            if error.errno == errno.EIO:
                os.dup2(null, int(entry.name))
    os.close(null)


class Console:
    """Writes result lines and the live line, from two threads, one at a time."""

    def __init__(self, reporter: TerminalReporter | None) -> None:
        self.lock = threading.RLock()
        self._reporter = reporter
        quiet = reporter is None or reporter.verbosity < 0
        self._live = not quiet and bool(reporter and reporter.isatty)
        self._plain = not quiet and not self._live
        self._shown = False
        self._said: dict[str, tuple[str, float]] = {}

    @property
    def quiet(self) -> bool:
        """Whether nothing is shown while stages run."""
        return not self._live and not self._plain

    def line(self, text: str, **markup: bool) -> None:
        """Write a permanent line."""
        if self._reporter is None or self.quiet:
            return
        with self.lock, self._while_it_can():
            self._wipe()
            self._reporter.ensure_newline()
            self._reporter.write_line(sanitize.text(text), **markup)

    @contextlib.contextmanager
    def _while_it_can(self) -> Iterator[None]:
        """Stop writing to a terminal, pipe or file that accepts no more.

        Deadlines are enforced regardless: the watchdog's thread writes here, too.
        """
        try:
            yield
        except OSError:
            self._reporter = None

    def progress(self, stages: list[StageRecord], now: float) -> None:
        """Show what is running: one updating line, or now and then a plain one."""
        if self._reporter is None or self.quiet:
            return
        with self.lock, self._while_it_can():
            if self._live:
                width = self._reporter._tw.fullwidth
                line = render.live_line(stages, now, width)
                if line or self._shown:
                    # Its own erase counts characters, of which some are two columns.
                    self._reporter.rewrite(padded(line, width - 1))
                    self._shown = bool(line)
                return
            for record in stages:
                self._say(record, now)

    def _say(self, record: StageRecord, now: float) -> None:
        step, at = self._said.get(record.name, ("", 0.0))
        first = record.name not in self._said
        changed = record.step != step and now - at > 1.0
        if first or changed or now - at > PLAIN_EVERY_S:
            self._said[record.name] = (record.step, now)
            if not (first and not record.step):
                self.line("  ... " + render.live_line([record], now, 200))

    def _wipe(self) -> None:
        if self._shown and self._reporter is not None:
            self._reporter.rewrite("", erase=True)
            self._reporter.write("\r")
            self._shown = False
