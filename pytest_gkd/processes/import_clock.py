"""Measures how long a process has been importing, and whether it still progresses."""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from pytest_gkd.clock import monotonic

TELL_EVERY_S = 0.5
# Names the directory to which the processes below a stage report it, a file for each.
FOLDER = "PYTEST_GKD_IMPORTS"
STARTUP = Path(__file__).parent.parent / "startup"


class ImportClock:
    """Measures what the thread that created it spends on imports, from ``start`` on.

    ``tell`` is called with the seconds so far, at most twice a second and only when an
    import begins or returns, so not while one hangs. A fork of the process starts at 0
    and, below a stage, reports to its own file.
    """

    def __init__(self, tell: Callable[[float], None]) -> None:
        self._tell = tell
        self._thread = threading.get_ident()
        self._depth = 0
        self._begun = self._told = monotonic()
        self._spent_s = 0.0
        self._find: Callable[..., Any] | None = None

    def start(self) -> None:
        # Every import of a module that is not loaded yet goes through this, whether by
        # statement or by importlib; those already loaded cost nothing.
        self._find = _bootstrap._find_and_load
        _bootstrap._find_and_load = self._watched
        os.register_at_fork(after_in_child=self._begin_anew)

    def stop(self) -> None:
        if self._find is not None:
            _bootstrap._find_and_load = self._find

    def _begin_anew(self) -> None:
        self._tell = _teller()
        self._thread = threading.get_ident()
        self._begun = self._told = monotonic()
        self._spent_s = 0.0

    @property
    def goes_on(self) -> bool:
        return self._depth > 0

    def _watched(self, name: str, import_: Any) -> Any:
        __tracebackhide__ = True
        assert self._find is not None
        if threading.get_ident() != self._thread:
            return self._find(name, import_)
        now = monotonic()
        if self._depth == 0:
            self._begun = now
        self._depth += 1
        broken_off = False
        try:
            self._said(now)
            return self._find(name, import_)
        except BaseException as error:
            # An interrupted import hung, and a hang does not count. An Exception only
            # means that a package tried an optional import.
            broken_off = not isinstance(error, Exception)
            raise
        finally:
            self._depth -= 1
            now = max(self._told, self._begun) if broken_off else monotonic()
            if self._depth == 0:
                self._spent_s += now - self._begun
            self._said(now)

    def _said(self, now: float) -> None:
        if now - self._told >= TELL_EVERY_S:
            self._told = now
            self._tell(self.seconds(now))

    def seconds(self, now: float | None = None) -> float:
        """Seconds spent so far, including the import in progress."""
        going_on = self._depth and (monotonic() if now is None else now) - self._begun
        return self._spent_s + going_on


def tell_in_files() -> None:
    """Have this process, which a stage started, report its import time."""
    ImportClock(_teller()).start()


def _teller() -> Callable[[float], None]:
    folder = os.environ.get(FOLDER)
    return partial(_write, folder) if folder else lambda seconds: None


def _write(folder: str, seconds: float) -> None:
    # The run's directory may be gone; that must not stop a process that goes on.
    with contextlib.suppress(OSError):
        part = Path(folder, f".{os.getpid()}")
        part.write_text(f"{seconds:.3f}")
        part.replace(Path(folder, str(os.getpid())))


def _restore(before: dict[str, str | None]) -> None:
    """Remove from the environment what ``ImportsBelow`` put there, and no more."""
    now = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(STARTUP) in now:
        now.remove(str(STARTUP))
        path = os.pathsep.join(now)
        before = {**before, "PYTHONPATH": path or None}
    else:  # the stage has set another one, or removed it
        before = {FOLDER: before[FOLDER]}
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


class ImportsBelow:
    """Wall-clock time that the processes reporting to ``folder`` spend on imports.

    Of those that import at the same time only one counts, and none while ``above``, the
    clock of this process, is running. While ``watching``, ``tell`` is called at most
    twice a second, whenever ``seconds`` has grown.
    """

    def __init__(
        self, folder: Path, above: ImportClock, tell: Callable[[], None]
    ) -> None:
        self._folder = folder
        self._above = above
        self._tell = tell
        self._told: dict[str, float] = {}
        self._covered = 0.0
        self.seconds = 0.0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Have processes started from here on report; a thread listens meanwhile."""
        # Not at the top: every process below imports this module at startup.
        from pytest_gkd.processes import background

        with contextlib.suppress(OSError):
            self._folder.mkdir(exist_ok=True)
        before = {name: os.environ.get(name) for name in (FOLDER, "PYTHONPATH")}
        others = [path] if (path := before["PYTHONPATH"]) else []
        os.environ[FOLDER] = str(self._folder)
        os.environ["PYTHONPATH"] = os.pathsep.join([str(STARTUP), *others])
        self._covered = monotonic()
        try:
            with background.every(TELL_EVERY_S, "gkd-imports", self._listen):
                yield
        finally:
            _restore(before)

    def _listen(self) -> None:
        if self.look(monotonic()):
            self._tell()

    def look(self, now: float) -> bool:
        """Read the reports; whether anything was imported since the last look."""
        most_s = 0.0
        for name, seconds in self._read():
            most_s = max(most_s, seconds - self._told.get(name, 0.0))
            self._told[name] = seconds
        most_s = min(most_s, now - self._covered)
        if self._above.goes_on:
            self._covered = now
        elif most_s > 0:
            self._covered = now
            self.seconds += most_s
            return True
        return False

    def _read(self) -> Iterator[tuple[str, float]]:
        try:
            paths = [p for p in self._folder.iterdir() if p.name.isdigit()]
        except OSError:  # somebody has cleared the run's directory
            return
        for path in paths:
            with contextlib.suppress(OSError, ValueError):
                yield path.name, float(path.read_text())


_bootstrap: Any = importlib._bootstrap
