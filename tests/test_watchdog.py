"""Deadlines held against real processes that do not keep them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pytest_gkd.clock import monotonic
from pytest_gkd.processes import resource_use, stall, tree
from pytest_gkd.run import watchdog
from pytest_gkd.run.events import EventReader, EventWriter
from pytest_gkd.run.watchdog import Overrun, Watchdog
from pytest_gkd.run.worker_watch import (
    CLOSE_BUDGET_S,
    END_AFTER_S,
    Sample,
    WorkerWatch,
)
from pytest_gkd.stage_api import EXTRA_LIMIT_S
from pytest_gkd.stage_events import (
    Bye,
    Closed,
    Collected,
    Event,
    Extra,
    Fact,
    Finish,
    Hello,
    Raised,
    Start,
    Step,
    Waiting,
)

PATIENCE_S = 120.0  # of a test, before it gives up waiting for what should happen

# A worker that hangs with a child in a session of its own.
HANGS = """
import json, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                         start_new_session=True)
def never_ends():
    print("the last words", flush=True)
    print(json.dumps(child.pid), file=sys.stderr, flush=True)
    time.sleep(600)
never_ends()
"""


class Bench:
    """A watchdog with the events that a test writes, and what it says of them."""

    def __init__(
        self,
        directory: Path,
        *,
        end_stuck: bool = True,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.directory = directory
        self.events: list[Event] = []
        self.due: list[float] = []
        self.overruns: list[Overrun] = []
        self.lost: list[str] = []
        self.problems: list[str] = []
        self.overran = threading.Event()
        self.told = threading.Event()
        self.ticked = threading.Event()
        self.ticks = 0
        self.at_tick: Callable[[], None] = lambda: None
        self.children: list[subprocess.Popen[str]] = []
        self.reader = EventReader(clock)
        self.watchdog = Watchdog(
            self.reader,
            directory / "armed",
            directory / "stacks",
            self.events.append,
            self._overrun,
            lambda now: self.due.append(self.watchdog.due(now, 60.0)),
            self._tick,
            self.lost.append,
            self._problem,
            end_stuck=end_stuck,
        )

    def _overrun(self, overrun: Overrun) -> None:
        self.overruns.append(overrun)
        self.overran.set()

    def _problem(self, text: str) -> None:
        if text not in self.problems:
            self.problems.append(text)
        self.told.set()

    def _tick(self, now: float) -> None:
        self.ticks += 1
        self.at_tick()
        self.ticked.set()

    def say(self, worker: str, event: Event, t: float | None = None) -> None:
        """Write one event, as a worker does."""
        event.t = monotonic() if t is None else t
        EventWriter(self.reader.add(worker)).write(event)

    def start(
        self,
        worker: str,
        stage: str,
        budget_s: float,
        captured: tuple[int, ...] = (),
        t: float | None = None,
    ) -> None:
        self.say(worker, Start(stage, budget_s, captured), t)

    def child(self, code: str = HANGS) -> subprocess.Popen[str]:
        """A process that stands in for a worker; it has said its child's pid."""
        out = self.directory / f"{len(self.children)}.out"
        with out.open("w") as file:
            child = subprocess.Popen(
                [sys.executable, "-c", code],
                stdout=file,
                stderr=subprocess.PIPE,
                text=True,
                # As a worker has, and so what it leaves behind.
                start_new_session=True,
            )
        self.children.append(child)
        return child

    def await_ticks(self, number: int) -> None:
        """Until the watchdog has looked at every worker so many times more."""
        until = self.ticks + number
        while self.ticks < until:
            self.ticked.clear()
            assert self.ticked.wait(PATIENCE_S)

    def close(self) -> None:
        if self.watchdog.is_alive():
            self.watchdog.stop()
        for name in self.watchdog.workers:
            self.watchdog.gone(name)
        # The end of what a worker left would take the next test's children. One of them
        # may be starting another, which cannot be joined yet.
        until = monotonic() + PATIENCE_S
        ends = ("gkd-cleanup-", "gkd-end-", "gkd-look-")
        while monotonic() < until and any(
            thread.name.startswith(ends) for thread in threading.enumerate()
        ):
            time.sleep(0.01)
        for child in self.children:
            tree.stop(child.pid, itself=True)
            child.communicate()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.close()


# -- an overrun --------------------------------------------------------------------


class Scene:
    """A worker that overran its budget, and another that has not."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.worker, self.other = bench.child(), bench.child()
        self.child = psutil.Process(self.read_pid(self.worker))
        self.read_pid(self.other)
        for name, worker in (("gw0", self.worker), ("gw1", self.other)):
            bench.say(name, Hello(worker.pid))
            bench.say(name, Collected())
        bench.start("gw0", "stuck", 0.2, captured=(1,))
        bench.start("gw1", "fine", 500)
        bench.watchdog.start()
        assert bench.overran.wait(PATIENCE_S), bench.watchdog.error
        self.status = self.worker.wait(PATIENCE_S)
        bench.await_ticks(2)
        (self.overrun,) = bench.overruns

    @staticmethod
    def read_pid(worker: subprocess.Popen[str]) -> int:
        assert worker.stderr is not None
        return int(json.loads(worker.stderr.readline()))


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    bench = Bench(tmp_path_factory.mktemp("overrun"))
    yield Scene(bench)
    bench.close()


def test_an_overrun_names_its_worker_and_stage(scene: Scene) -> None:
    assert (scene.overrun.worker, scene.overrun.stage) == ("gw0", "stuck")
    assert (scene.overrun.phase, scene.overrun.limit_s) == ("running", 0.2)
    assert scene.overrun.after_s >= 0.2


def test_a_worker_that_overran_is_ended_with_its_tree(scene: Scene) -> None:
    assert scene.status == -9
    assert not scene.child.is_running() or (
        scene.child.status() == psutil.STATUS_ZOMBIE
    )
    assert len(scene.overrun.ended) == 1
    assert scene.overrun.ended[0].startswith(f"{scene.child.pid} ")
    assert scene.overrun.survived == ()


def test_the_stacks_were_taken_before_the_end(scene: Scene) -> None:
    stacks = {stack.pid: stack for stack in scene.overrun.stacks}
    assert set(stacks) == {scene.worker.pid, scene.child.pid}
    stack = stacks[scene.worker.pid]
    assert stack.path.parent == scene.bench.directory / "stacks/stuck"
    assert stack.path.exists()


def test_what_the_worker_printed_is_kept(scene: Scene) -> None:
    assert scene.overrun.output == "the last words\n"


def test_a_worker_within_its_budget_is_left_alone(scene: Scene) -> None:
    assert scene.other.poll() is None
    assert scene.bench.watchdog.workers["gw1"].phase == "running"


def test_a_worker_is_ended_once(scene: Scene) -> None:
    scene.bench.await_ticks(3)
    assert len(scene.bench.overruns) == 1


def test_every_event_was_passed_on_in_order(scene: Scene) -> None:
    kinds = [e.kind for e in scene.bench.events if e.worker == "gw0"]
    assert kinds == ["hello", "collected", "start"]


# -- near overruns -----------------------------------------------------------------


def test_a_worker_that_finishes_while_its_stacks_are_taken_is_left_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = bench.child("import time; time.sleep(600)")
    bench.say("gw0", Hello(worker.pid))
    bench.start("gw0", "late", 0)
    look = stall.look

    def finish(*args: Any) -> stall.Look:
        bench.say("gw0", Finish("late", "passed", 0.0))
        return look(*args)

    monkeypatch.setattr(stall, "look", finish)
    bench.watchdog.start()
    while not bench.ticks or not bench.watchdog.workers["gw0"].samples:
        bench.await_ticks(1)
    assert bench.watchdog.workers["gw0"].phase == "closing"
    assert bench.overruns == []
    assert worker.poll() is None


def test_a_word_that_lies_unread_at_the_deadline_counts(bench: Bench) -> None:
    worker = bench.child("import time; time.sleep(600)")
    bench.say("gw0", Hello(worker.pid))
    bench.start("gw0", "late", 0)
    bench.watchdog.drain()
    bench.say("gw0", Finish("late", "passed", 0.0))
    bench.watchdog.start()
    bench.await_ticks(1)
    assert bench.watchdog.workers["gw0"].phase == "closing"
    assert bench.watchdog.workers["gw0"].looked_at == ""


def test_what_one_worker_says_puts_off_no_others_deadline(bench: Bench) -> None:
    worker, talker = bench.child(WAITS), bench.child(WAITS)
    for name, child in (("gw0", worker), ("gw1", talker)):
        Scene.read_pid(child)
        bench.say(name, Hello(child.pid))
    bench.start("gw1", "talks", 500)
    bench.start("gw0", "stuck", 0.1)
    line = b'{"event": "fact", "stage": "talks", "name": "x", "value": 1, "t": 0}\n'
    with bench.reader.add("gw1").events.open("ab", buffering=0) as file:
        for _ in range(64):
            file.write(line * 10_000)
    bench.watchdog.start()
    assert bench.overran.wait(PATIENCE_S), bench.watchdog.error
    heard = sum(isinstance(event, Fact) for event in bench.events)
    assert heard < 320_000


def test_a_worker_that_ended_by_itself_is_no_overrun_and_leaves_nothing(
    bench: Bench,
) -> None:
    worker, orphan = bench.child(""), bench.child("import time; time.sleep(6000)")
    worker.wait(PATIENCE_S)
    bench.say("gw0", Hello(worker.pid))
    bench.start("gw0", "gone", 0)
    bench.watchdog.start()
    bench.await_ticks(2)
    orphan.wait(PATIENCE_S)  # what was adopted is waited for, so its status is not here
    assert bench.overruns == []


# -- early ends --------------------------------------------------------------------


WAITS = """
import os, sys, threading
print(os.getpid(), file=sys.stderr, flush=True)
threading.Event().wait()
"""


def begin_wait(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that waits forever, with a budget of hours; proof takes 2 s."""
    monkeypatch.setattr(stall, "QUIET_S", 2.0)
    monkeypatch.setattr(stall, "QUIET_SHARE", 0.0)
    worker = bench.child(WAITS)
    Scene.read_pid(worker)
    bench.say("gw0", Hello(worker.pid))
    bench.start("gw0", "stuck", 20_000)


def test_what_is_proven_stuck_is_ended_long_before_its_budget(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_wait(bench, monkeypatch)
    bench.watchdog.start()
    assert bench.overran.wait(PATIENCE_S), bench.watchdog.error
    (overrun,) = bench.overruns
    assert overrun.early
    assert overrun.progress is not None
    assert overrun.progress.verdict == "stuck"
    assert overrun.stacks


def test_the_option_lets_it_use_its_budget_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, end_stuck=False)
    try:
        begin_wait(bench, monkeypatch)
        bench.watchdog.drain()
        assert bench.watchdog.workers["gw0"].quiet is None
    finally:
        bench.close()


def test_an_overrun_says_what_two_looks_have_shown(bench: Bench) -> None:
    worker = bench.child("while True: pass")
    bench.say("gw0", Hello(worker.pid))
    bench.start("gw0", "spins", 2)
    bench.watchdog.start()
    assert bench.overran.wait(PATIENCE_S), bench.watchdog.error
    (overrun,) = bench.overruns
    assert not overrun.early
    assert overrun.progress is not None
    assert overrun.progress.verdict != "stuck"
    assert overrun.progress.cpu_s > 0


def test_a_worker_that_was_ended_is_not_given_up_later(bench: Bench) -> None:
    worker = bench.child()
    bench.say("gw0", Hello(worker.pid))
    bench.start("gw0", "hangs", 0.5)
    bench.watchdog.start()
    assert bench.overran.wait(PATIENCE_S), bench.watchdog.error
    worker.wait(PATIENCE_S)
    for end in [t for t in threading.enumerate() if t.name == "gkd-end-gw0"]:
        end.join(PATIENCE_S)
    assert bench.watchdog.workers["gw0"].give_up_at == float("inf")


@pytest.mark.parametrize("noticed", [True, False])
def test_an_end_that_nobody_notices_is_told_once_the_others_had_their_time(
    bench: Bench, noticed: bool
) -> None:
    worker = bench.child(WAITS)
    Scene.read_pid(worker)
    bench.say("gw0", Hello(worker.pid))
    bench.start("gw0", "stuck", 0.1)
    bench.watchdog.start()
    assert bench.overran.wait(PATIENCE_S), bench.watchdog.error
    assert bench.lost == []
    if noticed:
        bench.watchdog.gone("gw0")
    (end,) = [t for t in threading.enumerate() if t.name == "gkd-end-gw0"]
    end.join(PATIENCE_S)
    assert bench.lost == ([] if noticed else ["gw0"])


def test_what_a_look_shows_is_its_own_stages_also_when_the_next_has_begun(
    still: Bench,
) -> None:
    worker = follow(still, "hello", "start")
    worker.looked_at = "s"
    seen = stall.Look(resource_use.read(os.getpid(), 0.0), ())
    note = still.watchdog.sample(worker, lambda _: seen, None)
    still.start("gw0", "next", 9, t=100.0)
    still.watchdog.drain()
    note()
    assert set(worker.samples) == {"s"}
    assert worker.sample is not worker.samples["s"]


def test_no_number_that_is_no_time_moves_a_deadline(still: Bench) -> None:
    worker = follow(still, "hello", "start")
    deadline = worker.deadline
    for seconds in (float("nan"), -5.0):
        still.say("gw0", Extra("", "data", seconds))
        still.watchdog.drain()
        assert worker.deadline == deadline
    assert "is not a time" in still.problems[0]


# -- phases ------------------------------------------------------------------------


@pytest.fixture
def still(tmp_path: Path) -> Bench:
    """A bench whose clock stands at 100."""
    return Bench(tmp_path, clock=lambda: 100.0)


EVENTS: dict[str, Event] = {
    "hello": Hello(1),
    "collected": Collected(),
    "waiting": Waiting("s", ("r",)),
    "start": Start("s", 9),
    "step": Step("s", "works"),
    "fact": Fact("s", "name", 1),
    "raised": Raised("s", "ValueError"),
    "finish": Finish("s", "passed", 1.0),
    "closed": Closed("s"),
    "bye": Bye(),
}


def follow(bench: Bench, *events: str) -> WorkerWatch:
    """The worker as the watchdog sees it after these events, all at time 100."""
    for event in events:
        bench.say("gw0", EVENTS[event], t=100.0)
    bench.watchdog.drain()
    return bench.watchdog.workers["gw0"]


@pytest.mark.parametrize(
    ("events", "phase", "deadline"),
    [
        ([], "starting", 160.0),
        (["collected"], "idle", float("inf")),
        (["collected", "waiting"], "idle", float("inf")),
        (["collected", "start"], "running", 109.0),
        (["collected", "start", "step", "fact"], "running", 109.0),
        (["collected", "start", "raised"], "closing", 100.0 + CLOSE_BUDGET_S),
        (["collected", "start", "finish"], "closing", 100.0 + CLOSE_BUDGET_S),
        (["collected", "start", "finish", "closed"], "idle", float("inf")),
        (["collected", "start", "finish", "closed", "bye"], "done", float("inf")),
    ],
)
def test_each_phase_has_its_deadline(
    still: Bench, events: list[str], phase: str, deadline: float
) -> None:
    worker = follow(still, "hello", *events)
    assert (worker.phase, worker.deadline) == (phase, deadline)


def test_the_next_stage_is_sampled_anew(bench: Bench) -> None:
    worker = follow(bench, "hello", "start")
    worker.wants_sample = False
    worker.samples["s"] = Sample((), None)
    assert not follow(bench, "finish", "closed").wants_sample
    assert follow(bench, "start").wants_sample
    assert not worker.samples


def test_a_word_of_a_worker_that_never_said_hello_changes_nothing(
    bench: Bench,
) -> None:
    bench.start("gw7", "stage", 9)
    bench.watchdog.drain()
    assert bench.watchdog.workers == {}
    assert len(bench.events) == 1


def test_a_worker_that_never_says_hello_is_held_to_a_budget(bench: Bench) -> None:
    worker = bench.child(WAITS)
    Scene.read_pid(worker)
    bench.watchdog.expect("gw0", worker.pid)
    bench.watchdog.workers["gw0"].limit_s = 0.5
    bench.watchdog.start()
    assert worker.wait(PATIENCE_S) == -9
    assert [o.phase for o in bench.overruns] == ["starting"]


# -- the thread --------------------------------------------------------------------


def fail(error: BaseException) -> None:
    raise error


def test_an_error_in_one_tick_is_told_once_and_budgets_are_held_on(
    bench: Bench,
) -> None:
    worker = bench.child(WAITS)
    Scene.read_pid(worker)
    bench.at_tick = lambda: fail(RuntimeError("broken"))
    bench.say("gw0", Hello(worker.pid))
    with bench.reader.add("gw1").events.open("a") as file:
        file.write('{"no event\n\n[1]\n{}\n')
    bench.start("gw0", "stuck", 1)
    bench.watchdog.start()
    assert worker.wait(PATIENCE_S) == -9
    assert [o.stage for o in bench.overruns] == ["stuck"]
    assert bench.problems == [
        "the guardian could not be monitored: RuntimeError: broken"
    ]
    assert bench.reader.unreadable == 3


@pytest.mark.parametrize("part", ["look", "stop", "read_output"])
def test_a_part_of_an_ending_that_fails_keeps_no_other_from_being_done(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    where: Any = {"look": stall, "stop": tree, "read_output": watchdog}[part]
    real, calls = getattr(where, part), []

    def fails_first(*args: Any, **more: Any) -> Any:
        calls.append(args)
        return fail(OSError("no")) if len(calls) == 1 else real(*args, **more)

    monkeypatch.setattr(where, part, fails_first)
    worker = bench.child(WAITS)
    Scene.read_pid(worker)
    bench.say("gw0", Hello(worker.pid))
    bench.start("gw0", "stuck", 0.1)
    bench.watchdog.start()
    assert worker.wait(PATIENCE_S) == -9
    assert [o.stage for o in bench.overruns] == ["stuck"]
    assert bench.told.wait(PATIENCE_S)  # after the worker's end, by another thread
    assert len(bench.problems) == 1
    assert "OSError: no" in bench.problems[0]


def test_a_look_that_fails_after_the_end_has_begun_is_told(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()

    def fails_late(*args: Any, **more: Any) -> Any:
        assert ended.wait(PATIENCE_S)
        return fail(OSError("late"))

    monkeypatch.setattr(stall, "look", fails_late)
    worker = bench.child(WAITS)
    Scene.read_pid(worker)
    bench.say("gw0", Hello(worker.pid))
    bench.start("gw0", "stuck", 0.1)
    bench.watchdog.start()
    assert worker.wait(PATIENCE_S) == -9
    ended.set()
    assert bench.told.wait(PATIENCE_S)
    assert "OSError: late" in bench.problems[0]


def test_a_watchdog_that_dies_takes_the_workers_with_it(bench: Bench) -> None:
    error = SystemExit("by a hook")
    worker = bench.child(WAITS)
    Scene.read_pid(worker)
    bench.say("gw0", Hello(worker.pid))
    bench.watchdog.drain()
    bench.at_tick = lambda: fail(error)
    bench.watchdog.start()
    assert worker.wait(PATIENCE_S) == -9
    assert bench.watchdog.error is error


def test_a_stopped_watchdog_holds_no_deadline(bench: Bench) -> None:
    bench.watchdog.start()
    bench.await_ticks(1)
    bench.watchdog.stop()
    assert not bench.watchdog.is_alive()
    assert bench.watchdog.error is None


# -- what a worker printed ---------------------------------------------------------


def test_a_pipe_is_not_read(bench: Bench) -> None:
    worker = bench.child()
    Scene.read_pid(worker)
    bench.say("gw0", Hello(worker.pid))
    bench.start("gw0", "stage", 9, captured=(1, 2))  # a file, and a pipe
    bench.watchdog.drain()
    assert len(bench.watchdog.workers["gw0"].output) == 1


def test_the_output_of_a_worker_that_is_gone_is_empty(bench: Bench) -> None:
    worker = bench.child("")
    worker.wait(PATIENCE_S)
    bench.say("gw0", Hello(worker.pid))
    bench.start("gw0", "stage", 9, captured=(1, 2))
    bench.watchdog.drain()
    assert bench.watchdog.workers["gw0"].output == []


# -- time on top of a budget -----------------------------------------------------------


def test_imports_that_get_on_put_off_the_deadline_within_a_bound(bench: Bench) -> None:
    """In collection, where a user's file may import torch, and in a stage."""

    def deadline() -> float:
        bench.watchdog.drain()
        worker = bench.watchdog.workers["gw0"]
        return worker.deadline - worker.since

    bench.say("gw0", Hello(bench.child().pid))
    collecting_s = deadline()
    bench.say("gw0", Extra("", "imports", 70.0))
    assert deadline() == collecting_s + 70
    bench.say("gw0", Collected())
    bench.start("gw0", "data", 20)
    assert deadline() == 20
    bench.say("gw0", Extra("data", "imports", 1e9))
    bench.say("gw0", Extra("data", "data", 5.0))
    assert deadline() == pytest.approx(20 + EXTRA_LIMIT_S["imports"] + 5)
    bench.say("gw0", Finish("data", "passed", 1.0))
    assert deadline() == CLOSE_BUDGET_S


def test_a_stop_of_its_own_process_puts_off_what_runs_and_nothing_after_it(
    bench: Bench,
) -> None:
    bench.say("gw0", Hello(bench.child().pid))
    bench.start("gw0", "data", 20)
    bench.watchdog.drain()
    worker = bench.watchdog.workers["gw0"]
    bench.watchdog.wait_longer(7)
    bench.watchdog.wait_longer(8)
    assert worker.deadline == pytest.approx(worker.since + 35)
    assert bench.watchdog.due(worker.since, 60) == pytest.approx(
        worker.deadline + END_AFTER_S
    )
    bench.start("gw0", "nccl", 10)
    bench.watchdog.drain()
    assert worker.deadline == pytest.approx(worker.since + 10)


def test_a_stop_amid_a_tick_ends_nothing_before_the_guardian_is_heard(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(watchdog, "monotonic", lambda: now[0])
    worker = bench.child(WAITS)
    Scene.read_pid(worker)
    bench.say("gw0", Hello(worker.pid))
    bench.start("gw0", "waits", 50)
    bench.watchdog.drain()
    watch = bench.watchdog.workers["gw0"]
    watch.since, watch.quiet = 100.0, None

    def stop() -> None:
        if bench.ticks == 2:
            now[0] += 500
        elif bench.ticks == 3:
            bench.watchdog.wait_longer(500)

    bench.at_tick = stop
    bench.watchdog.start()
    bench.await_ticks(5)
    assert watch.looked_at == ""
    assert bench.overruns == []
    assert worker.poll() is None


def test_after_a_stop_stillness_counts_from_then(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_wait(bench, monkeypatch)
    bench.watchdog.drain()
    watch = bench.watchdog.workers["gw0"]
    watch.looked_at, before = watch.stage, watch.quiet
    assert before is not None
    seen = stall.Look(resource_use.read(watch.pid, 0.0), ())
    proof = (stall.compare(seen, seen), seen)
    monkeypatch.setattr(before, "look", lambda now, said: proof)
    note = bench.watchdog.prove_stuck(watch, before)
    bench.watchdog.wait_longer(7)
    note()
    assert watch.quiet is not before
    assert watch.stuck_at is None


def test_a_worker_whose_word_lies_unread_has_not_died_early(bench: Bench) -> None:
    bench.say("gw0", Hello(bench.child("").pid))
    bench.say("gw0", Collected())
    assert bench.watchdog.gone("gw0") == "idle"
    assert bench.watchdog.workers["gw0"].noticed


@pytest.mark.parametrize("works", [True, False])
def test_before_its_first_word_a_worker_may_take_longer_while_it_is_at_work(
    bench: Bench, works: bool
) -> None:
    """As a conftest.py that imports torch from a slow disk does."""
    wakes = "import threading\nwhile not threading.Event().wait(0.05): pass"
    worker = bench.child(wakes if works else "import time; time.sleep(600)")
    bench.watchdog.expect("gw0", worker.pid)
    watch = bench.watchdog.workers["gw0"]
    watch.limit_s = 5
    bench.watchdog.start()
    if not works:
        assert bench.overran.wait(PATIENCE_S), bench.watchdog.error
        return
    while monotonic() < watch.since + 12:
        bench.await_ticks(1)
    assert bench.overruns == []
    assert worker.poll() is None
    assert watch.deadline > watch.since + 10


def test_where_no_deadline_is_known_one_is_due_all_the_same(bench: Bench) -> None:
    """A worker between two stages may begin the next one unseen."""
    assert bench.watchdog.due(5.0, 60.0) == 65.0 + END_AFTER_S
    bench.say("gw0", Hello(bench.child().pid))
    bench.say("gw0", Collected())
    bench.watchdog.drain()
    assert bench.watchdog.due(5.0, 60.0) == 65.0 + END_AFTER_S


def test_who_reads_an_event_tells_its_deadline_without_waiting_for_a_tick(
    bench: Bench,
) -> None:
    worker = bench.child("import time; time.sleep(600)")
    bench.say("gw0", Hello(worker.pid))
    bench.start("gw0", "short", 4)
    bench.watchdog.drain()
    assert bench.ticks == 0
    assert bench.due[-1] == bench.watchdog.workers["gw0"].deadline + END_AFTER_S
    told = len(bench.due)
    bench.watchdog.drain()
    assert len(bench.due) == told
