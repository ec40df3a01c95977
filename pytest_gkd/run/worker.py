"""Runs stages in a worker process (or in-process): plan, needs, events, findings."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from pytest_gkd import sanitize, typed_json
from pytest_gkd import stage_events as events
from pytest_gkd.clock import monotonic
from pytest_gkd.own_faults import own_fault
from pytest_gkd.processes import cgroup, prctl, procfs, stacks, tree
from pytest_gkd.processes.import_clock import ImportClock, ImportsBelow
from pytest_gkd.processes.procfs import Descriptor
from pytest_gkd.report.record import (
    BLOCKED,
    FAILED,
    OUTPUT_BYTES,
    PASSED,
    SKIPPED,
    TIMEOUT,
)
from pytest_gkd.run.assignment import Link
from pytest_gkd.run.built_in_stages import stages_dir
from pytest_gkd.run.captured_output import (
    captured_descriptors,
    channel_descriptors,
    cut_captured,
)
from pytest_gkd.run.collection import StageCollection
from pytest_gkd.run.exception_text import (
    error_text,
    raised,
    sanitize_report,
    shadowed,
    told,
)
from pytest_gkd.run.other_plugins import GentleTimeout, RunOnce, gentle_s
from pytest_gkd.run.selection import Request
from pytest_gkd.run.stage_cleanup import StageCleanup, may_outlive_it
from pytest_gkd.run.surroundings import IN_STAGE
from pytest_gkd.run.worker_watch import CLOSE_BUDGET_S, GENTLE_AFTER_S
from pytest_gkd.stage_api import StageContext, StageFault
from pytest_gkd.stage_plan import PlannedStage

CONTEXT = pytest.StashKey[StageContext]()
POLL_S = 0.02
# Saved before any stage can monkeypatch it, for one test or for good.
_exit = os._exit
# Events without which the controller cannot enforce a worker's budget.
BUDGETS = (events.Hello, events.Collected, events.Start)


class StageQuitError(Exception):
    """A stage tried to end the whole run; the stage fails, and the run goes on."""


class StageWorker:
    """Collects and runs stages, and reports over ``link`` what happens, as it happens.

    ``manifest_path`` is the list of what the run has created; ``isolated`` says that
    this process does nothing else.
    """

    def __init__(
        self,
        request: Request,
        context: StageContext,
        link: Link,
        manifest_path: Path,
        *,
        isolated: bool,
    ) -> None:
        self.context = context
        self._isolated = isolated
        self._link = link
        self._stood_s = 0.0
        self._manifest_path = manifest_path
        self._collection = StageCollection(request, self._send)
        self._started: dict[str, float] = {}
        self._finished: dict[str, float] = {}
        self._blocked: dict[str, list[str]] = {}
        self._parent = os.getppid()
        self._armed: Path = Path()
        self._arms = False
        self._temporary: Path | None = None
        self._cleanup: StageCleanup | None = None
        self._current: PlannedStage | None = None
        self._in_call = False
        # The running stage's failed subtests, and how they are shown.
        self._failed_parts: list[tuple[pytest.CallInfo[None], Any]] = []
        self._pid = os.getpid()
        self._unsaid = ""  # why an event could not be written
        self._captured: list[Descriptor] = []
        self._channel: list[Descriptor] = []
        self._streams: dict[str, IO[str]] = {}  # Python's own, as far as they are open
        self._streams_closed = ""  # which stage closed them, for later ones in-process
        context.emit = self._send
        self._imports = ImportClock(self.importing)
        self._below = ImportsBelow(
            context.run_dir / f"imports-{os.getpid()}",
            self._imports,
            lambda: self.importing(self._imports.seconds()),
        )
        self.imported_s = 0.0
        self._runs = False

    def _send(self, event: events.Event) -> None:
        event.t = monotonic()
        try:
            self._link.emit(event)
        except OSError as error:
            if isinstance(event, BUDGETS):
                raise  # a stage that nobody knows of would have no budget
            self._unsaid = str(error)

    def isolate(self, armed: Path, temporary: Path, *, guarded: bool) -> None:
        """Make this process a worker that can be ended with all it started.

        ``temporary`` becomes its directory for temporary files. ``guarded`` says that a
        guardian ends it if the controller is killed.
        """
        os.setsid()  # the controller handles Ctrl-C and ends the workers itself
        prctl.become_subreaper()
        cgroup.join(procfs.own_run_id())
        if not guarded:
            prctl.die_with_parent()
        self._armed = armed
        # Lanes share the cores, and a spinning idle OpenMP thread takes them from the
        # other lane (measured: 0.07 s against 4 s for three tiny steps on 2 cores).
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        self._temporary = temporary
        self._make_directories()
        os.environ["TMPDIR"] = str(temporary)
        tempfile.tempdir = None
        here = procfs.stat(os.getpid())
        start = here.start if here else 0
        self._send(events.Hello(os.getpid(), start))

    def _make_directories(self) -> None:
        """Create the directories, again if a stage has cleared the run's directory."""
        if self._temporary is not None:
            self.context.run_dir.mkdir(mode=0o700, exist_ok=True)
            self._temporary.mkdir(exist_ok=True)
        if self._arms and not stacks.is_armed(self._armed):
            stacks.arm(self._armed)

    def importing(self, seconds: float) -> None:
        """Report import progress; imports add to the budget, within limits."""
        # A rounding error below nothing is nothing.
        seconds = max(0.0, seconds + self._below.seconds - self.imported_s)
        if self._runs:
            self.context.allow("imports", seconds)
        else:
            self._send(events.Extra("", "imports", seconds))

    def _turn(self, *, runs: bool) -> None:
        """Note that a stage starts or stops running."""
        self._runs = runs
        self.imported_s = self._imports.seconds() + self._below.seconds

    @pytest.hookimpl(trylast=True)
    def pytest_sessionstart(self) -> None:
        self._imports.start()
        if self._temporary is not None:
            # After pytest's own faulthandler plugin, which would write to the terminal.
            stacks.arm(self._armed)
            self._arms = True

    def pytest_configure(self, config: pytest.Config) -> None:
        register, own = config.pluginmanager.register, self._isolated
        register(self._collection, "gkd-collection")
        register(RunOnce(self._stage_of), "gkd-run-once")
        gentle = GentleTimeout(self._stage_of, self._ends_at, own)
        register(gentle, "gkd-gentle-timeout")

    def _stage_of(self, item: pytest.Item) -> PlannedStage | None:
        return self._collection.by_nodeid.get(item.nodeid)

    # -- running -------------------------------------------------------------------

    # Outside pytest-timeout's clock: waiting for needs does not count as budget.
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item
    ) -> Generator[None, object, object]:
        stage = self._stage_of(item)
        if stage is None:
            return (yield)
        self._blocked[item.nodeid] = self._await_needs(stage)
        os.environ[IN_STAGE] = stage.name
        self._current = stage
        below = self._below.watching() if self._isolated else contextlib.nullcontext()
        try:
            with below:
                result = yield
        except BaseException as error:
            # Before pytest renders a traceback, for which it reads files.
            self._give_up(f"pytest failed during the stage: {told(error)}")
            raise
        finally:
            os.environ.pop(IN_STAGE, None)  # a stage may have cleared the environment
            self._clean_up(item, stage)
        self._current = None
        self._send(events.Closed(stage.name))
        return result

    def _ends_at(self, stage: PlannedStage) -> float:
        """When a stage, or its fixtures' teardown, is to be interrupted."""
        finished = self._finished.get(stage.nodeid)
        if finished is not None:
            return finished + CLOSE_BUDGET_S + GENTLE_AFTER_S
        started = self._started.get(stage.nodeid)
        if started is None:  # any extra time there is belongs to the previous stage
            return monotonic() + gentle_s(stage)
        return started + self._limit_s(stage) + GENTLE_AFTER_S

    def _clean_up(self, item: pytest.Item, stage: PlannedStage) -> None:
        """Clean up after a stage, unless a wider fixture may own what is left."""
        before, self._cleanup = self._cleanup, None
        info = getattr(item, "_fixtureinfo", None)
        definitions = () if info is None else info.name2fixturedefs.values()
        if before is None or may_outlive_it(d for some in definitions for d in some):
            return
        left = before.end(stage.name)
        if left.processes or left.memory:
            self._send(events.Left(stage.name, **vars(left)))

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, None, None]:
        stage = self._stage_of(item)
        if stage is not None:
            self._begin(item, stage)
        with self._held(item):
            yield

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        self._failed_parts, self._in_call = [], True
        try:
            with self._held(item):
                yield
        finally:
            self._in_call = False

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, None, None]:
        with self._held(item):
            yield

    @contextlib.contextmanager
    def _held(self, item: pytest.Item) -> Iterator[None]:
        """Keep what a stage does to its process from ending the run.

        Nobody presses Ctrl-C in a worker, and no single stage may end the run.
        """
        if self._stage_of(item) is None:
            yield
            return
        try:
            with self._alone():
                yield
        except (pytest.exit.Exception, KeyboardInterrupt) as error:
            if not self._isolated:
                raise
            why = "raised by its own code, or its process was sent SIGINT"
            why = f"KeyboardInterrupt in the stage: {why}"
            if isinstance(error, pytest.exit.Exception):
                called = f"the stage called pytest.exit({error.msg!r})"
                why = f"{called}, which would end the whole run"
            raise StageQuitError(why) from error
        finally:
            self._look_at_streams()
            own = {one.number: one for one in (*self._captured, *self._channel)}
            closed = [str(number) for number in own if not own[number].is_open()]
            if closed:
                self._give_up(
                    "the stage closed file descriptors of its process that it does not "
                    f"own ({', '.join(closed)}; by os.close or os.closerange?), which "
                    "pytest needs"
                )
            # pytest's capture, which wraps these hooks, has not read it yet.
            cut_captured([one.number for one in self._captured], OUTPUT_BYTES)

    def _look_at_streams(self) -> None:
        """Give up if the stage closed a Python stream that pytest still needs.

        In single-process mode pytest cannot go on either, but nothing can replace it.
        """
        closed = [name for name, stream in self._streams.items() if stream.closed]
        if closed and self._current is not None:
            self._streams = {}
            self._streams_closed = (
                f"the stage {self._current.name} closed {' and '.join(closed)} of its "
                f"process (by {closed[0]}.close(), or a with statement over it), which "
                "pytest needs"
            )
            self._give_up(self._streams_closed)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """End a process that the stage forked and that returns from the stage's code.

        It is a copy of this process, including pytest: it would go on with the next
        stage, and report to the controller in this process's name.
        """
        code: int | str | None = 0
        try:
            yield
        except BaseException as error:
            if os.getpid() == self._pid:
                raise
            if isinstance(error, SystemExit):
                code = error.code
            else:
                code = 1
                traceback.print_exception(error)
        finally:
            if os.getpid() != self._pid:
                assert self._current is not None
                self._send(events.Forked(self._current.name))
                _exit(code if isinstance(code, int) else code is not None)

    def pytest_keyboard_interrupt(
        self, excinfo: pytest.ExceptionInfo[BaseException]
    ) -> None:
        self._give_up(f"pytest was ended during the stage: {told(excinfo.value)}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_internalerror(
        self, excinfo: pytest.ExceptionInfo[BaseException]
    ) -> None:
        self._give_up(f"pytest failed during the stage: {told(excinfo.value)}")

    def _give_up(self, why: str) -> None:
        """End this process if it cannot go on after the stage that it is running.

        pytest-xdist takes a worker's early but regular exit for the end of the whole
        run. A worker that dies is replaced, and only its stage is lost.
        """
        if self._isolated and self._current is not None:
            try:
                self._send(events.Broken(self._current.name, why))
            finally:
                _exit(pytest.ExitCode.INTERNAL_ERROR)

    def _begin(self, item: pytest.Item, stage: PlannedStage) -> None:
        blocked_by = self._blocked[item.nodeid]
        if blocked_by:
            pytest.skip(f"blocked by {', '.join(blocked_by)}")
        self._make_directories()
        self._cleanup = StageCleanup(self._manifest_path)
        if self._isolated:
            self._captured = captured_descriptors()
            self._channel = channel_descriptors(item.config)
        streams = {"sys.stdout": sys.stdout, "sys.stderr": sys.stderr}
        self._streams = {
            name: one
            for name, one in streams.items()
            if not getattr(one, "closed", True)  # with -s it may be any object
        }
        self._started[item.nodeid] = monotonic()
        self._stood_s = self._link.stood_still_s()
        self.context.begin(stage.name, stage.budget_s)
        self._turn(runs=True)
        captured = tuple(one.number for one in self._captured)
        self._send(events.Start(stage.name, stage.budget_s, captured))

    def _await_needs(self, stage: PlannedStage) -> list[str]:
        """The needs that did not pass, once they and all in ``after`` have a verdict.

        No deadline: each need has its own, which the controller enforces.
        """
        waiting = [*stage.needs, *stage.after]
        said = False
        while True:
            waiting = [need for need in waiting if self._link.verdict(need) is None]
            failed = [
                n for n in stage.needs if self._link.verdict(n) not in (None, PASSED)
            ]
            if failed or not waiting:
                return failed
            if not said:
                said = True
                self._send(events.Waiting(stage.name, tuple(waiting)))
            if self._isolated and os.getppid() != self._parent:
                raise RuntimeError(
                    f"the pytest process {self._parent} is gone, so nothing can "
                    f"report how {', '.join(waiting)} ended"
                )
            time.sleep(POLL_S)

    # The outermost wrapper: by then the report includes pytest's verdict on xfail.
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        stage = self._stage_of(item)
        started = self._started.get(item.nodeid)
        duration_s = 0.0 if started is None else monotonic() - started
        if stage is not None and not self._in_call:
            self._tell_raised(item, stage, call)
        report = yield
        if stage is None:
            return report
        if self._in_call:
            return self._part(item, call, report)
        failed_parts = self._failed_parts if call.when == "call" else []
        if failed_parts and not report.failed:
            call, shown = failed_parts[0]
            report.outcome, report.longrepr = "failed", shown
            vars(report).pop("wasxfail", None)
        late = duration_s >= self._limit_s(stage)
        if late and report.skipped and hasattr(report, "wasxfail"):
            # xfail does not lift a budget, as it could not for a hang in C.
            del report.wasxfail
            report.outcome = "failed"
        result = events.StageResult(
            stage.name,
            self._outcome(report, stage, duration_s),
            duration_s,
            tuple(self._blocked[item.nodeid]),
            unsaid=self._unsaid,
        )
        if report.failed and call.excinfo is None:
            result.error = report.longreprtext  # a strict xfail that passed
        elif call.excinfo is not None and not report.skipped:
            error = call.excinfo.value
            result.error = error_text(call.excinfo)
            if isinstance(error, StageQuitError):
                result.error = str(error)
            if self._streams_closed:
                result.error = f"{self._streams_closed}: {result.error}"
            fault = error if isinstance(error, StageFault) else None
            if isinstance(error, (ImportError, AttributeError)):
                fault = shadowed(error, report.longreprtext)
            elif fault is not None:
                result.error = str(fault)
            if fault is None and (own := own_fault(error, stages_dir())):
                fault, result.error = own, str(own)
            result.fault = fault.to_json() if fault else None
        if failed_parts:
            first, _ = failed_parts[0]
            assert first.excinfo is not None
            said = error_text(first.excinfo)
            if call is not first:  # then the stage itself failed, too
                said = f"{said.partition(chr(10))[0]}; then: {result.error}"
            count = f"{len(failed_parts)} subtest(s) failed"
            result.error = f"{count}; the first: {said}"
        if report.when == "call" or not report.passed:
            self._turn(runs=False)
            self._finished.setdefault(item.nodeid, monotonic())
            self._send(events.Finish(stage.name, result.outcome, duration_s))
            self.context.release()
        result.error = sanitize.data(result.error)
        result.fault = sanitize.data(result.fault)
        if result.outcome == TIMEOUT:
            # What it started would live on and hold ports and memory later stages need.
            assert self._cleanup is not None
            mine = self._cleanup
            ended, _ = tree.stop(
                os.getpid(), itself=False, spare=mine.before, before=mine.note_memory
            )
            result.ended = tuple(ended)
        sanitize_report(item.config, report)
        report.gkd = typed_json.dumps(result)  # type: ignore[attr-defined]
        self._unsaid = ""
        return report

    def _part(
        self,
        item: pytest.Item,
        call: pytest.CallInfo[None],
        report: pytest.TestReport,
    ) -> pytest.TestReport:
        """Handle a subtest's report, which pytest requests during the stage's own call.

        The stage fails with it; as a test of its own it would be reported twice.
        """
        if report.failed:
            self._failed_parts.append((call, report.longrepr))
            report.outcome, report.longrepr = "passed", None
        sanitize_report(item.config, report)
        report.gkd_part = True  # type: ignore[attr-defined]
        return report

    def _tell_raised(
        self, item: pytest.Item, stage: PlannedStage, call: pytest.CallInfo[None]
    ) -> None:
        """Report what a stage raised before anybody renders it as text.

        Rendering calls the user's __repr__ and __str__, which may hang, too, and is not
        what the stage's budget is for.
        """
        told = (pytest.skip.Exception, pytest.xfail.Exception)
        if (
            call.when == "teardown"
            or call.excinfo is None
            or call.excinfo.errisinstance(told)
        ):
            return
        self._turn(runs=False)
        self._finished.setdefault(item.nodeid, monotonic())
        self._send(events.Raised(stage.name, raised(call.excinfo)))

    def _outcome(
        self, report: pytest.TestReport, stage: PlannedStage, duration_s: float
    ) -> str:
        if report.passed:
            return PASSED
        if report.skipped:
            return BLOCKED if self._blocked[report.nodeid] else SKIPPED
        return TIMEOUT if duration_s >= self._limit_s(stage) else FAILED

    def _limit_s(self, stage: PlannedStage) -> float:
        stood_s = self._link.stood_still_s() - self._stood_s
        return stage.budget_s + sum(self.context.extra_s.values()) + stood_s

    # -- the end -------------------------------------------------------------------

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        self._imports.stop()
        if not self._isolated:
            return
        self._send(events.Bye())
        # Everything is delivered. The interpreter would spend seconds tearing down
        # torch and vLLM; the controller ends what this process has started.
        os._exit(0)
