"""Holds every worker to its deadline: dumps stacks, then kills its process tree."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import wait
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil

from pytest_gkd import stage_events as events
from pytest_gkd.clock import monotonic
from pytest_gkd.files import make_way
from pytest_gkd.processes import background, procfs, resource_use, stacks, stall, tree
from pytest_gkd.processes.stall import Look, Progress, QuietWatch
from pytest_gkd.run.events import EventReader
from pytest_gkd.run.worker_watch import (
    END_AFTER_S,
    STOPPED_S,
    Sample,
    WorkerWatch,
    read_output,
)
from pytest_gkd.stage_api import EXTRA_LIMIT_S

T = TypeVar("T")

TICK_S = 0.1
# Read per tick from all workers' events, and from one worker's while holding the lock:
# about three thousand events, a few hundredths of a second.
TICK_BYTES = 256 * 1024
# pytest-xdist notices a dead worker at once, unless another process holds its pipe.
NOTICE_S = 2.0
# How long before the end of a budget to take the first of the two looks that tell a
# slow stage from a stuck one.
LOOK_BEFORE_S = 3.0
LOOK_BEFORE_SHARE = 0.3
# A look takes 1.2 s at most, unless it gets stuck in the kernel.
LOOK_LIMIT_S = 4.0
NOT_INSPECTED = "a process tree could not be inspected"
# How long a worker's descendants have to die of SIGKILL, and then the worker itself.
END_LIMIT_S = 5.0
# An end that takes longer is stuck in the kernel; the run goes on without the worker.
GIVE_UP_S = 3 * END_LIMIT_S
# How often to check a worker that has not reported anything yet.
WAKE_S = 1.0


@dataclass(frozen=True)
class Overrun:
    """A worker that was ended because a phase overran its budget, or was stuck.

    Times are in seconds; ``early`` is set if it was ended before its budget was over.
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


@dataclass(eq=False, repr=False)
class Watchdog(threading.Thread):
    """Follows the workers' events and ends any worker whose budget is over.

    ``on_event`` gets every event, ``on_overrun`` every overrun before pytest-xdist
    learns that the processes are gone, ``on_heard`` the time after new events and
    ``on_tick`` the time, ten times a second.
    ``on_lost`` gets the name of a worker whose end pytest-xdist does not notice by
    itself, ``on_problem`` any error in here, which stops nothing else.
    ``end_stuck`` allows ending a stage that is provably stuck before its budget is over
    (see ``stall.QuietWatch``). ``prepare`` creates the directory of a file of stacks.
    ``on_kill`` gets each process that is about to be killed, from any thread.
    All are called with ``lock`` held and must not block, and neither do the methods for
    other threads. What may block, looking at a tree or ending it, runs in its own
    threads.
    """

    reader: EventReader
    armed: Path
    stacks_dir: Path
    on_event: Callable[[events.Event], None]
    on_overrun: Callable[[Overrun], None]
    on_heard: Callable[[float], None]
    on_tick: Callable[[float], None]
    on_lost: Callable[[str], None]
    on_problem: Callable[[str], None]
    _: KW_ONLY
    end_stuck: bool = True
    prepare: stacks.Prepare = make_way
    on_kill: Callable[[procfs.Stat], None] = lambda _: None
    lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        super().__init__(name="gkd-watchdog", daemon=True)
        self.workers: dict[str, WorkerWatch] = {}
        self.spared = {child.pid for child in tree.children(os.getpid())}
        self._over = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        """The thread's loop. If it fails, it ends the workers, too."""
        try:
            judges, begun = True, monotonic()
            while not self._over.wait(TICK_S):
                now = monotonic()
                # If it was stopped since the last tick, it first reads what its
                # guardian knows about that.
                judges = not judges or now < begun + STOPPED_S
                begun = now
                self._tick(now, judges=judges)
        except BaseException as error:
            self.error = error
            for worker in self.workers.values():
                worker.ended = True
                tree.stop(worker.pid, itself=True, start=worker.start)

    def stop(self) -> None:
        """End the thread; deadlines are no longer enforced."""
        self._over.set()
        self.join()
        for worker in self.workers.values():
            worker.close()

    def due(self, now: float, least_s: float) -> float:
        """When the first of the workers has to be ended, if it makes no progress.

        An idle worker may start its next stage unnoticed, with ``least_s`` for it.
        """
        open_now = [
            worker.deadline
            for worker in self.workers.values()
            if not worker.ended and worker.has_deadline
        ]
        return min([*open_now, now + least_s]) + END_AFTER_S

    def wait_longer(self, seconds: float) -> None:
        """Extend the deadlines by the time that this process was suspended, and restart
        the checks for stages without progress."""
        for worker in self.workers.values():
            worker.extra_s["stop"] = worker.extra_s.get("stop", 0.0) + seconds
            worker.give_up_at += seconds
            worker.look_anew()
            if worker.quiet is not None:
                worker.quiet = self._quiet_watch(worker)

    def drain(self, name: str | None = None) -> None:
        """Take in every event written so far, or all of one worker's.

        In chunks, so that whoever waits for the lock need not wait for a whole flood.
        """
        for one in self.reader.names() if name is None else [name]:
            at, until = self.reader.position(one)
            while True:
                self._hear(one, TICK_BYTES)
                before, at = at, self.reader.position(one)[0]
                if at in (before, until) or at > until:
                    break

    def _hear(self, name: str, limit_bytes: int) -> None:
        about = "the guardian could not be told of a deadline"
        with self.lock:  # the guardian must know of a stage before anybody sees it
            event = None
            for event in self.reader.read(limit_bytes, name):
                self.attempt("an event could not be processed", self._take_in, event)
            if event is not None:
                self.attempt(about, self.on_heard, monotonic())

    def _tick(self, now: float, *, judges: bool) -> None:
        # Deadlines first, each judged by its own worker's events, so that other
        # workers cannot delay one, however much they write.
        for worker in list(self.workers.values()) if judges else ():
            about = f"worker {worker.name} could not be monitored"
            self.attempt(about, self.judge, worker, now)
        names = self.reader.names()
        with self.lock:
            for name in names:
                about = f"the events of {name} could not be read"
                self.attempt(about, self._hear, name, TICK_BYTES // len(names))
            about = "the guardian could not be monitored"
            self.attempt(about, self.on_tick, monotonic())

    def attempt(self, what: str, work: Callable[..., T], *args: Any) -> T | None:
        """Run ``work``; a failure is reported and does not stop this thread."""
        try:
            return work(*args)
        except Exception as error:
            text = f"{what}: {type(error).__name__}: {error}"
            with self.lock:
                self.on_problem(text)
        return None

    def _take_in(self, event: events.Event) -> None:
        name = event.worker
        if isinstance(event, events.Hello):
            self.workers[name] = WorkerWatch(
                name, event.pid, since=event.t, start=event.start or None
            )
        worker = self.workers.get(name)
        if worker is not None:
            worker.follow(event)
            if isinstance(event, events.Start):
                worker.quiet = self._quiet_watch(worker)
        self.on_event(event)

    def judge(self, worker: WorkerWatch, now: float) -> None:
        """Hold one worker to its deadline."""
        if worker.ended:
            if now > worker.give_up_at:
                worker.give_up_at = float("inf")
                what = worker.stage or worker.name
                hangs = f"the processes of {what}; even inspecting them hangs"
                self._tell(worker, (), (hangs,))
                self._begin(worker, "loss", self._see_off)
            return
        if worker.phase != "done" and tree.is_dead(worker.pid, worker.start):
            worker.dead_since = worker.dead_since or now
            if now > worker.dead_since + NOTICE_S:
                worker.ended = True
                self._begin(worker, "cleanup", self._bury)
            return
        self._see(worker)
        if not worker.has_deadline:
            return
        if now >= worker.deadline:
            self._hear(worker.name, TICK_BYTES)  # it may have reported that it is done
        self._look(worker, now)
        end_at = worker.deadline + END_AFTER_S
        if now < end_at or (worker.looking and now < worker.deadline + LOOK_LIMIT_S):
            return
        worker.ended = True
        worker.give_up_at = now + GIVE_UP_S
        self._begin(worker, "end", self._end)

    def _begin(
        self, worker: WorkerWatch, what: str, work: Callable[[WorkerWatch], None]
    ) -> None:
        about = f"the {what} of worker {worker.name} failed"
        work_on_it = partial(self.attempt, about, work, worker)
        background.begin(f"gkd-{what}-{worker.name}", work_on_it)

    def _end(self, worker: WorkerWatch) -> None:
        ended: Iterable[str] = ()
        survived: Iterable[str] = ()
        tree.send(worker.pid, worker.start, signal.SIGSTOP)
        if self._is_in_time(worker):
            tree.send(worker.pid, worker.start, signal.SIGCONT)
            return
        try:
            ended, survived = self._kill(worker, itself=False)
        finally:
            # Only now, with everything recorded, may pytest-xdist see the worker go.
            self._tell(worker, ended, survived)
            self._kill(worker)
            worker.give_up_at = float("inf")
            self._see_off(worker)

    def _kill(
        self, worker: WorkerWatch, *, itself: bool = True
    ) -> tuple[list[str], list[str]]:
        return tree.stop(
            worker.pid,
            itself=itself,
            start=worker.start,
            before=self.on_kill,
            limit_s=END_LIMIT_S,
        )

    def _is_in_time(self, worker: WorkerWatch) -> bool:
        """Whether it had finished before it was stopped; if so, it is left alone."""
        self.drain(worker.name)
        with self.lock:
            worker.ended = monotonic() >= worker.deadline
            if not worker.ended:
                worker.give_up_at = float("inf")
            return not worker.ended

    def _tell(
        self, worker: WorkerWatch, ended: Iterable[str], survived: Iterable[str]
    ) -> None:
        with self.lock:
            if worker.told:
                return
            worker.told = True
            about = "the output of a stage could not be read"
            output = self.attempt(about, read_output, worker) or ""
            self.on_overrun(
                Overrun(
                    worker.name,
                    worker.stage,
                    worker.phase,
                    worker.limit_s,
                    monotonic() - worker.since,
                    worker.sample.stacks,
                    tuple(ended),
                    tuple(survived),
                    output,
                    worker.sample.progress,
                    worker.stuck_at is not None,
                )
            )

    def _see_off(self, worker: WorkerWatch) -> None:
        """Make sure that the run goes on without a worker.

        pytest-xdist does so by itself, unless the worker, or something else that holds
        its pipe, does not die.
        """
        until = monotonic() + NOTICE_S
        while monotonic() < until and not worker.noticed:
            time.sleep(TICK_S)
        with self.lock:
            if not worker.noticed and not self._over.is_set():
                self.on_lost(worker.name)

    def expect(self, name: str, pid: int) -> None:
        """Watch a worker just started; it has a budget before it reports anything."""
        here = procfs.stat(pid)
        with self.lock:
            self.workers[name] = WorkerWatch(
                name,
                pid,
                since=monotonic(),
                start=here.start if here else None,
                silent=True,
            )

    def gone(self, name: str) -> str:
        """Note that pytest-xdist itself noticed a worker's end; the phase it was in."""
        self.drain(name)
        with self.lock:
            worker = self.workers.get(name)
            if worker is None:
                return "starting"
            worker.ended = worker.noticed = True
            return worker.phase

    def _bury(self, worker: WorkerWatch) -> None:
        """End what a dead worker left, since pytest-xdist does not see that it died.

        A child that it forked holds its end of the pipe, possibly forever. Such orphans
        are now children of this process.
        """
        workers = {other.pid for other in self.workers.values()}
        # Ends its cgroup, if it had one.
        self._kill(worker)
        spare = workers | self.spared
        me, before = os.getpid(), self.on_kill
        tree.stop(me, itself=False, spare=spare, own=tree.is_child, before=before)
        self._see_off(worker)

    def _quiet_watch(self, worker: WorkerWatch) -> QuietWatch | None:
        watch = QuietWatch(worker.pid, worker.limit_s, self._takes(worker))
        # If little of the budget is left by then, there is nothing to gain.
        gains = watch.window_s < worker.limit_s - LOOK_BEFORE_S
        return watch if self.end_stuck and gains else None

    def _takes(self, worker: WorkerWatch) -> stall.Take:
        """A function that looks at the tree of the worker's current stage."""
        out = self.stacks_dir / (worker.stage or worker.name)
        return lambda below: stall.look(
            worker.pid, self.armed, out / below, self.prepare
        )

    def _look(self, worker: WorkerWatch, now: float) -> None:
        """Start the look at the worker's tree that is due, one at a time."""
        work = self._due(worker, now) if worker.looking is None else None
        if work is not None:
            worker.looked_at = worker.stage
            look = partial(self.attempt, NOT_INSPECTED, work)
            worker.looking = background.begin(f"gkd-look-{worker.name}", look)

    def await_look(self, worker: WorkerWatch) -> None:
        """Wait for a look in progress, but not forever, and record its result."""
        looking = worker.looking
        if looking is not None:
            wait([looking], LOOK_LIMIT_S)
            self.attempt(NOT_INSPECTED, self._see, worker)

    def _see(self, worker: WorkerWatch) -> None:
        """Record the result of a finished look, for the stage that it looked at."""
        with self.lock:
            if worker.looking is not None and worker.looking.done():
                seen, worker.looking = worker.looking, None
                if note := seen.result():
                    note()

    def _due(
        self, worker: WorkerWatch, now: float
    ) -> Callable[[], Callable[[], None]] | None:
        """The look that is due, if any; it returns a function to record its result."""
        if now >= worker.deadline:
            due, worker.wants_sample = worker.wants_sample, False
            take = self._takes(worker)
            return partial(self.sample, worker, take, worker.earlier) if due else None
        if worker.silent and now >= worker.next_wake:
            worker.next_wake = now + WAKE_S
            return partial(self._see_start, worker)
        if worker.phase != "running" or worker.stuck_at is not None:
            return None
        if worker.quiet is not None and worker.quiet.is_due(now):
            return partial(self.prove_stuck, worker, worker.quiet)
        lead_s = min(LOOK_BEFORE_S, LOOK_BEFORE_SHARE * worker.limit_s)
        if worker.earlier is None and now >= worker.deadline - lead_s:
            return partial(self._look_earlier, worker, self._takes(worker))
        return None

    def _see_start(self, worker: WorkerWatch) -> Callable[[], None]:
        """Count what a silent worker does before its first event as imports."""
        at = monotonic()
        try:
            status, woke = resource_use.main_thread(worker.pid)
        except psutil.NoSuchProcess:
            return lambda: None  # it has ended

        def note() -> None:
            works = status == psutil.STATUS_RUNNING or woke != worker.woke
            if worker.silent and works:
                worker.woke = woke
                imports_s = min(at - worker.since, EXTRA_LIMIT_S["imports"])
                worker.extra_s["imports"] = imports_s

        return note

    def prove_stuck(self, worker: WorkerWatch, quiet: QuietWatch) -> Callable[[], None]:
        stage = worker.looked_at
        proof = quiet.look(monotonic(), worker.said)

        def note() -> None:
            current = worker.phase == "running" and worker.quiet is quiet
            if proof is not None and current:
                progress, last = proof
                worker.samples[stage] = Sample(last.stacks, progress)
                worker.wants_sample = False
                # From here it has a last second to end by itself.
                worker.stuck_at = monotonic()

        return note

    def _look_earlier(
        self, worker: WorkerWatch, take: stall.Take
    ) -> Callable[[], None]:
        stage, seen = worker.looked_at, take("earlier")

        def note() -> None:
            if worker.stage == stage:
                worker.earlier = seen

        return note

    def sample(
        self, worker: WorkerWatch, take: stall.Take, earlier: Look | None
    ) -> Callable[[], None]:
        stage, last = worker.looked_at, take("")
        progress = stall.compare(earlier, last) if earlier is not None else None
        sample = Sample(last.stacks, progress)
        return partial(worker.samples.__setitem__, stage, sample)
