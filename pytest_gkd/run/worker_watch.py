"""What the watchdog knows about one worker: its phase, its deadline, its output."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

from pytest_gkd import stage_events as events
from pytest_gkd.files import read_end
from pytest_gkd.processes.stacks import Stack
from pytest_gkd.processes.stall import Look, Progress, QuietWatch
from pytest_gkd.stage_api import EXTRA_LIMIT_S

# pytest-timeout, inside the worker, is the gentle way: a hang in Python ends with its
# fixtures torn down. It fires a little after the budget, when the stacks have been
# taken, and the tree is killed a little after that, whatever the worker does.
GENTLE_AFTER_S = 0.4
END_AFTER_S = 0.8
COLLECT_BUDGET_S = 60.0
CLOSE_BUDGET_S = 15.0
# Whatever is late by more than this may be so because the process was stopped.
STOPPED_S = 1.0
OUTPUT_BYTES = 64 * 1024


class Sample(NamedTuple):
    """The stacks of a stage's process tree at the end of its budget.

    ``progress`` compares it with an earlier look, if there was one.
    """

    stacks: tuple[Stack, ...]
    progress: Progress | None


@dataclass
class WorkerWatch:
    """One worker process. Times are ``clock.monotonic()``.

    ``phase`` is starting, idle, running, closing (the stage's result is known; its
    traceback is being rendered or its fixtures torn down) or done. ``ended`` is set as
    soon as we start ending it, ``told`` once the reason was reported, ``noticed`` once
    pytest-xdist knows.
    ``samples`` covers all its stages: a look may finish after the next has begun.
    ``silent`` is one that has not said hello: it may import what a conftest.py needs.
    ``woke`` is its main thread's number of context switches at the last look.
    """

    name: str
    pid: int
    phase: str = "starting"
    stage: str = ""
    since: float = 0.0
    limit_s: float = COLLECT_BUDGET_S
    extra_s: dict[str, float] = field(default_factory=dict)
    said: float = 0.0
    earlier: Look | None = None
    quiet: QuietWatch | None = None
    stuck_at: float | None = None
    looking: Future[Callable[[], None] | None] | None = None
    looked_at: str = ""
    wants_sample: bool = True
    samples: dict[str, Sample] = field(default_factory=dict)
    ended: bool = False
    give_up_at: float = float("inf")
    told: bool = False
    noticed: bool = False
    dead_since: float | None = None
    output: list[BinaryIO] = field(default_factory=list)
    start: int | None = None
    silent: bool = False
    woke: int = 0
    next_wake: float = 0.0

    @property
    def has_deadline(self) -> bool:
        return self.phase not in ("idle", "done")

    @property
    def deadline(self) -> float:
        """When the current phase should be over; infinite while idle."""
        if not self.has_deadline:
            return float("inf")
        if self.stuck_at is not None:
            return self.stuck_at
        return self.since + self.limit_s + sum(self.extra_s.values())

    @property
    def sample(self) -> Sample:
        """The current stage's sample; empty until there is one."""
        return self.samples.get(self.stage, Sample((), None))

    def follow(self, event: events.Event) -> None:
        """Update the state by one of the worker's events."""
        match event:
            case events.Collected() | events.Closed():
                self.phase = "idle"
            case events.Start():
                self.phase, self.stage, self.since = "running", event.stage, event.t
                self.limit_s, self.extra_s = event.budget_s, {}
                self.stuck_at, self.said = None, event.t
                self.look_anew()
                self.close()
                self.output = _captured(self.pid, event.captured)
            case events.Step() | events.Fact():
                self.said = event.t
            case events.Extra():
                self._extend(event.what, event.s)
                self.said = event.t
            case events.Raised() | events.Finish():
                self.phase, self.since, self.extra_s = "closing", event.t, {}
                self.limit_s, self.stuck_at = CLOSE_BUDGET_S, None
            case events.Bye():
                self.phase = "done"

    def _extend(self, what: str, seconds: float) -> None:
        """Grant time on top of the budget, within its limit."""
        if not float(seconds) >= 0:
            raise ValueError(f"{seconds!r} is not a time that can be granted")
        self.extra_s[what] = min(float(seconds), EXTRA_LIMIT_S[what])
        self.look_anew()

    def look_anew(self) -> None:
        """Discard what was seen of its stage so far, as it now has more time."""
        self.samples.pop(self.stage, None)
        self.earlier, self.wants_sample = None, True

    def close(self) -> None:
        """Close the files with its stage's output."""
        while self.output:
            self.output.pop().close()


def _captured(pid: int, descriptors: Iterable[int]) -> list[BinaryIO]:
    """The files that pytest captures a worker's stdout and stderr in, kept open.

    They are unnamed; opened through /proc they stay readable once the worker is dead.
    A pipe or a terminal is left alone: reading would take data from its reader.
    """
    files: list[BinaryIO] = []
    for number in descriptors:
        path = Path(f"/proc/{pid}/fd/{number}")
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if path.is_file():
                files.append(path.open("rb"))
    return files


def read_output(worker: WorkerWatch) -> str:
    """The end of what the worker's stage printed, at most 64 KiB per stream."""
    parts = [read_end(file, OUTPUT_BYTES) for file in worker.output]
    return "\n".join(part for part in parts if part.strip())
