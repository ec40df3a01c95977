"""Reports on a run in progress: the terminal's live line, and report.json."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from pytest_gkd.clock import monotonic
from pytest_gkd.files import json_text, write_whole
from pytest_gkd.report.record import RunRecord
from pytest_gkd.report.terminal import Console

SHOW_EVERY_S = 0.1
# However many events there are, the report is not written more often than this.
WRITE_EVERY_S = 0.5
# Without the thread, writing pauses for this many times as long as it took, beyond the
# first half second: a few changes in quick succession are all written.
REST = 10
STOP_LIMIT_S = 5.0
ATTEMPTS = 5


class Teller(threading.Thread):
    """Writes the report and the live line, in a thread apart from the one that enforces
    budgets, since a stopped terminal or a hung disk blocks whoever writes to it.

    ``lock`` is held while the ``record`` is read, and must be held to change it.
    ``tell`` gets any error. ``could_write`` says whether the last write succeeded.
    ``claim`` gets the stages that ran if the report cannot be written. ``prepare``
    ensures that the directory of ``path`` exists and is ours, or raises OSError.
    The thread need not be started; then whoever changes the record writes the report at
    once, unless writing has just taken long: stages may want to fork, so there is no
    thread to write it later.
    """

    def __init__(
        self,
        record: RunRecord,
        path: Path,
        lock: AbstractContextManager[object],
        tell: Callable[[str], None],
        prepare: Callable[[Path], None],
        claim: Callable[[list[str]], None],
    ) -> None:
        super().__init__(name="gkd-teller", daemon=True)
        self.console = Console(None)
        self._record = record
        self._path = path
        self._lock = lock
        self._tell = tell
        self._prepare = prepare
        self._claim = claim
        self._one = threading.RLock()
        self.could_write = True
        self._is_due = False
        self._next = 0.0
        self._over = threading.Event()

    def run(self) -> None:
        """The thread's loop."""
        while not self._over.wait(SHOW_EVERY_S):
            try:
                self._show()
                self._write_if_due()
            except Exception as error:
                self._tell(
                    f"the run could not be shown: {type(error).__name__}: {error}"
                )

    def stop(self) -> None:
        """End the thread, unless a disk or a terminal blocks it."""
        self._over.set()
        if self.is_alive():
            self.join(STOP_LIMIT_S)

    def changed(self) -> None:
        """Note that the record has changed, so that the report is soon rewritten."""
        self._is_due = True
        if not self.is_alive():
            self._write_if_due()

    def write(self) -> None:
        """Write the report now; if that fails, say so and leave it due."""
        if not self._one.acquire(timeout=STOP_LIMIT_S):
            self._tell(f"the report could not be written: {self._path} hangs")
            return
        try:
            begun, self._is_due = monotonic(), False
            with self._lock:
                record = copy.deepcopy(self._record)
            self._write(json_text(record.to_json()))
            self.could_write = True
        except Exception as error:
            self._is_due, self.could_write = True, False
            kind = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
            self._tell(f"the report could not be written: {kind}{error}")
            with self._lock:
                ran = [stage.name for stage in self._record.stages if stage.ran]
            with contextlib.suppress(OSError):  # the failure is already reported
                self._claim(ran)
        finally:
            now = monotonic()
            if self.is_alive():
                self._next = now + WRITE_EVERY_S
            else:
                rest_s = min(REST * (now - begun), 2 * WRITE_EVERY_S)
                self._next = max(self._next, now) + rest_s
            self._one.release()

    def _write(self, text: str) -> None:
        # A stage may remove the directory meanwhile; it then needs a new marker.
        for _ in range(ATTEMPTS - 1):
            self._prepare(self._path.parent)
            with contextlib.suppress(FileNotFoundError):
                write_whole(self._path, text)
                return
        self._prepare(self._path.parent)
        write_whole(self._path, text)

    def _write_if_due(self) -> None:
        ahead_s = 0.0 if self.is_alive() else WRITE_EVERY_S
        if self._is_due and monotonic() >= self._next - ahead_s:
            self.write()

    def _show(self) -> None:
        with self._lock:
            running = [
                stage
                for stage in self._record.stages
                if stage.started is not None and stage.outcome is None
            ]
        self.console.progress(running, monotonic())
