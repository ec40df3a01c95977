"""Holds every worker to its deadline: stacks, then the end of its process tree."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from pytest_gkd import process, stacks, stillness
from pytest_gkd.journal import EventReader
from pytest_gkd.stillness import Look, Progress, QuietWatch

# pytest-timeout, inside the worker, is the gentle line: a hang in Python ends with its
# fixtures torn down. It fires a little after the budget, when the stacks have been
# taken, and the tree is ended a little after that, whatever the worker does.
GENTLE_AFTER_S = 0.4
END_AFTER_S = 0.8
COLLECT_BUDGET_S = 60.0
CLOSE_BUDGET_S = 15.0
TICK_S = 0.1
# pytest-xdist notices a dead worker at once, unless somebody else holds its pipe.
NOTICE_S = 2.0
# How long before the end of a budget the first of two looks is taken that tell a slow
# stage from a stuck one.
LOOK_BEFORE_S = 3.0
LOOK_BEFORE_SHARE = 0.3
OUTPUT_BYTES = 64 * 1024


@dataclass
class WorkerWatch:
    """What the watchdog knows of one worker process. Times are ``time.monotonic()``.

    ``phase`` is starting, idle, running, closing (the stage's result is known, its
    fixtures are being torn down) or done.
    """

    name: str
    pid: int
    phase: str = "starting"
    stage: str = ""
    since: float = 0.0
    limit_s: float = COLLECT_BUDGET_S
    said: float = 0.0
    earlier: Look | None = None
    quiet: QuietWatch | None = None
    stuck_at: float | None = None
    progress: Progress | None = None
    sampled: list[stacks.Stack] = field(default_factory=list)
    has_sample: bool = False
    ended: bool = False
    dead_since: float | None = None
    output: list[BinaryIO] = field(default_factory=list)

    @property
    def deadline(self) -> float:
        """When the present phase should be over; infinite while idle."""
        if self.phase in ("idle", "done"):
            return float("inf")
        if self.stuck_at is not None:
            return self.stuck_at
        return self.since + self.limit_s


@dataclass(frozen=True)
class Overrun:
    """A worker was ended because a phase outlasted its budget, or was stuck. Seconds.

    ``early`` is set when it was ended before its budget was over.
    """

    worker: str
    stage: str
    phase: str
    limit_s: float
    after_s: float
    stacks: tuple[stacks.Stack, ...]
    ended: tuple[str, ...]
    survived: tuple[str, ...]
    output: str
    progress: Progress | None = None
    early: bool = False


class Watchdog(threading.Thread):
    """Follows the workers' events and ends the worker whose budget is over.

    ``on_event`` gets every event, ``on_overrun`` every ending before the processes
    are known to be gone to pytest-xdist, ``on_tick`` the time, ten times a second.
    ``end_stuck`` lets a stage that is proven to be stuck be ended before its budget is
    over (see ``stillness.QuietWatch``).
    All three are called with ``lock`` held, as are the methods for other threads.
    """

    def __init__(
        self,
        reader: EventReader,
        armed: Path,
        stacks_dir: Path,
        on_event: Callable[[dict[str, Any]], None],
        on_overrun: Callable[[Overrun], None],
        on_tick: Callable[[float], None],
        *,
        end_stuck: bool = True,
    ) -> None:
        super().__init__(name="gkd-watchdog", daemon=True)
        self.lock = threading.RLock()
        self.workers: dict[str, WorkerWatch] = {}
        self._reader = reader
        self._armed = armed
        self._stacks_dir = stacks_dir
        self._on_event = on_event
        self._on_overrun = on_overrun
        self._on_tick = on_tick
        self._end_stuck = end_stuck
        self.spared = {child.pid for child in process.children(os.getpid())}
        self._over = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        """The thread's loop; an exception in it is kept for the controller to raise."""
        try:
            while not self._over.wait(TICK_S):
                self.drain()
                now = time.monotonic()
                with self.lock:
                    self._on_tick(now)
                for worker in list(self.workers.values()):
                    self._judge(worker, time.monotonic())
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        """End the thread; deadlines are not held any more."""
        self._over.set()
        self.join()

    def drain(self) -> None:
        """Take in every event written so far."""
        with self.lock:
            for event in self._reader.read():
                self._follow(event)
                self._on_event(event)

    def _follow(self, event: dict[str, Any]) -> None:
        name, kind, now = event["worker"], event["event"], event.get("t", 0.0)
        if kind == "hello":
            self.workers[name] = WorkerWatch(name, event["pid"], since=now)
        worker = self.workers.get(name)
        if worker is None:
            return
        if kind == "collected":
            worker.phase = "idle"
        elif kind == "start":
            worker.phase, worker.stage, worker.since = "running", event["stage"], now
            worker.limit_s = event["budget_s"]
            worker.sampled, worker.has_sample = [], False
            worker.earlier = worker.progress = worker.stuck_at = None
            worker.said = now
            worker.quiet = self._quiet_watch(worker)
            worker.output = _captured(worker.pid, event["captured"])
        elif kind in ("step", "fact"):
            worker.said = now
        elif kind == "finish":
            worker.phase, worker.since = "closing", now
            worker.limit_s, worker.stuck_at = CLOSE_BUDGET_S, None
        elif kind == "closed":
            worker.phase = "idle"
        elif kind == "bye":
            worker.phase = "done"

    def _judge(self, worker: WorkerWatch, now: float) -> None:
        if not worker.ended and worker.phase != "done" and process.is_dead(worker.pid):
            worker.dead_since = worker.dead_since or now
            if now > worker.dead_since + NOTICE_S:
                self._bury(worker)
            return
        if worker.ended or worker.phase in ("idle", "done"):
            return
        self._look_ahead(worker, now)
        if now < worker.deadline:
            return
        if not worker.has_sample:
            self._sample(worker)
        if time.monotonic() < worker.deadline + END_AFTER_S:
            return
        # The worker may have finished while its stacks were taken.
        self.drain()
        if time.monotonic() < worker.deadline:
            return
        output = read_output(worker)
        worker.ended = True
        ended, survived = process.stop(worker.pid, itself=False)
        overrun = Overrun(
            worker.name,
            worker.stage,
            worker.phase,
            worker.limit_s,
            time.monotonic() - worker.since,
            tuple(worker.sampled),
            tuple(ended),
            tuple(survived),
            output,
            worker.progress,
            worker.stuck_at is not None,
        )
        with self.lock:
            self._on_overrun(overrun)
        # Only now may pytest-xdist see the worker go, with everything known.
        process.stop(worker.pid, itself=True)

    def gone(self, name: str) -> None:
        """pytest-xdist has noticed by itself that a worker is gone."""
        with self.lock:
            if name in self.workers:
                self.workers[name].ended = True

    def _bury(self, worker: WorkerWatch) -> None:
        """End what a dead worker left, since pytest-xdist does not see that it died.

        A child that it forked holds its end of the pipe, and that could go on for
        ever. Such orphans are this process's children now.
        """
        worker.ended = True
        living = {other.pid for other in self.workers.values()}
        for orphan in process.children(os.getpid()):
            if orphan.pid not in living | self.spared:
                process.stop(orphan.pid, itself=True)

    def _quiet_watch(self, worker: WorkerWatch) -> QuietWatch | None:
        watch = QuietWatch(
            worker.pid, worker.limit_s, self._armed, self._stacks_of(worker)
        )
        # With little left of the budget by then there is nothing to be gained.
        gains = watch.window_s < worker.limit_s - LOOK_BEFORE_S
        return watch if self._end_stuck and gains else None

    def _look_ahead(self, worker: WorkerWatch, now: float) -> None:
        """Take the first of two looks before a deadline; find what is stuck early."""
        if worker.phase != "running" or worker.stuck_at is not None:
            return
        if worker.quiet is not None:
            proof = worker.quiet.look(now, worker.said)
            if proof is not None:
                worker.progress, last = proof
                worker.sampled, worker.has_sample = list(last.stacks), True
                # Its last second to end by itself runs from here.
                worker.stuck_at = time.monotonic()
                return
        lead_s = min(LOOK_BEFORE_S, LOOK_BEFORE_SHARE * worker.limit_s)
        if worker.earlier is None and now >= worker.deadline - lead_s:
            out = self._stacks_of(worker) / "earlier"
            worker.earlier = stillness.look(worker.pid, self._armed, out)

    def _sample(self, worker: WorkerWatch) -> None:
        last = stillness.look(worker.pid, self._armed, self._stacks_of(worker))
        worker.sampled, worker.has_sample = list(last.stacks), True
        if worker.earlier is not None:
            worker.progress = stillness.compare(worker.earlier, last)

    def _stacks_of(self, worker: WorkerWatch) -> Path:
        return self._stacks_dir / (worker.stage or worker.name)


def _captured(pid: int, descriptors: list[int]) -> list[BinaryIO]:
    """The files that pytest captures a worker's stdout and stderr in, kept open.

    They have no name; a handle from /proc still reads them when the worker is dead.
    A pipe or a terminal is left alone: to read it would be to steal from it.
    """
    files: list[BinaryIO] = []
    for number in descriptors:
        path = Path(f"/proc/{pid}/fd/{number}")
        try:
            if stat.S_ISREG(path.stat().st_mode):
                files.append(path.open("rb"))
        except OSError:
            continue  # it ended meanwhile
    return files


def read_output(worker: WorkerWatch) -> str:
    """The end of what the worker's stage printed, at most 64 KiB a stream."""
    parts = []
    for file in worker.output:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - OUTPUT_BYTES))
        parts.append(file.read().decode("utf-8", "replace"))
    return "\n".join(part for part in parts if part.strip())
