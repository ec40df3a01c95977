"""Runs stages in a worker process (or in-process): plan, needs, events, findings."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import (
    Callable,
    Generator,
    Iterable,
    Iterator,
)
from pathlib import Path
from typing import IO, Any

import pytest
from _pytest.runner import runtestprotocol

from pytest_gkd import sanitize, stage_plan
from pytest_gkd.clock import monotonic
from pytest_gkd.diagnosis import shadowed_imports
from pytest_gkd.options import SettingsError
from pytest_gkd.processes import cgroup, procfs, stacks, tree
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
from pytest_gkd.run.built_in_stages import StageModule, stages_dir
from pytest_gkd.run.selection import Request
from pytest_gkd.run.stage_cleanup import Leftovers, may_outlive_it
from pytest_gkd.run.surroundings import IN_STAGE
from pytest_gkd.run.watchdog import CLOSE_BUDGET_S, GENTLE_AFTER_S, STOPPED_S
from pytest_gkd.stage_api import StageContext, StageFault
from pytest_gkd.stage_events import (
    Broken,
    Bye,
    Closed,
    Collected,
    Event,
    Extra,
    Finish,
    Forked,
    Hello,
    Left,
    Raised,
    Start,
    Waiting,
)
from pytest_gkd.stage_plan import PlannedStage, StageItem

CONTEXT = pytest.StashKey[StageContext]()
POLL_S = 0.02
RAISED_LENGTH = 500
# Taken hold of before any stage replaces it, for the while of its test or for good.
_exit = os._exit
# The events without which the controller holds a worker to no budget.
BUDGETS = (Hello, Collected, Start)


class StageQuitError(Exception):
    """A stage tried to end the whole run; it fails, and the run goes on."""


class RunOnce:
    """Runs a stage in the place of plugins that would repeat it, or fork for it.

    A stage is judged once, in the process that its lane shares.
    """

    def __init__(self, is_stage: Callable[[pytest.Item], bool]) -> None:
        self._is_stage = is_stage

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> bool | None:
        if not self._is_stage(item):
            return None
        names = {"nodeid": item.nodeid, "location": item.location}
        item.ihook.pytest_runtest_logstart(**names)
        runtestprotocol(item, nextitem=nextitem)
        item.ihook.pytest_runtest_logfinish(**names)
        return True


class StageWorker:
    """Collects and runs stages, and says by ``link`` what happens, as it happens.

    ``creations`` is the list of what the run has created; ``isolated`` says that this
    process has nothing else to do.
    """

    def __init__(
        self,
        request: Request,
        context: StageContext,
        link: Link,
        creations: Path,
        *,
        isolated: bool,
    ) -> None:
        self.context = context
        self.plan: tuple[PlannedStage, ...] = ()
        self._request = request
        self._isolated = isolated
        self._link = link
        self._stood_s = 0.0
        self._creations = creations
        self._by_nodeid: dict[str, PlannedStage] = {}
        self._started: dict[str, float] = {}
        self._finished: dict[str, float] = {}
        self._blocked: dict[str, list[str]] = {}
        self._parent = os.getppid()
        self._armed: Path = Path()
        self._arms = False
        self._temporary: Path | None = None
        self._leftovers: Leftovers | None = None
        self._current: PlannedStage | None = None
        self._in_call = False
        # The subtests of the running stage that failed, and how they are shown.
        self._failed_parts: list[tuple[pytest.CallInfo[None], Any]] = []
        self._pid = os.getpid()
        self._unsaid = ""  # why an event could not be written
        self._captured: list[Descriptor] = []
        self._channel: list[Descriptor] = []
        self._streams: dict[str, IO[str]] = {}  # Python's own that are open
        self._streams_closed = ""  # by which stage, for those after it in one process
        context.emit = self._send
        self._imports = ImportClock(self._importing)
        self._below = ImportsBelow(
            context.run_dir / f"imports-{os.getpid()}",
            self._imports,
            lambda: self._importing(self._imports.seconds()),
        )
        self._imported_s = 0.0
        self._runs = False

    def _send(self, event: Event) -> None:
        event.t = monotonic()
        try:
            self._link.emit(event)
        except OSError as error:
            if isinstance(event, BUDGETS):
                raise  # a stage that nobody hears of would have no budget
            self._unsaid = str(error)

    def isolate(self, armed: Path, temporary: Path, *, guarded: bool) -> None:
        """Make this process a worker that can be ended with all it started.

        ``temporary`` becomes its directory for temporary files. ``guarded`` says that a
        guardian ends it should the controller be killed.
        """
        os.setsid()  # Ctrl-C is the controller's; it ends the workers itself
        tree.become_subreaper()
        cgroup.join(procfs.own_mark())
        if not guarded:
            tree.die_with_parent()
        self._armed = armed
        # Lanes share the cores: an idle OpenMP thread that spins takes them from the
        # other lane (measured: 0.07 s against 4 s for three tiny steps on 2 cores).
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        self._temporary = temporary
        self._make_directories()
        os.environ["TMPDIR"] = str(temporary)
        tempfile.tempdir = None
        here = procfs.stat(os.getpid())
        start = here.start if here else 0
        self._send(Hello(os.getpid(), start))

    def _make_directories(self) -> None:
        """Also once a stage has cleared the run's directory, which costs no other."""
        if self._temporary is not None:
            self.context.run_dir.mkdir(mode=0o700, exist_ok=True)
            self._temporary.mkdir(exist_ok=True)
        if self._arms and not stacks.is_armed(self._armed):
            stacks.arm(self._armed)

    def _importing(self, seconds: float) -> None:
        """Imports advance: what they take is not taken from a budget, within bounds."""
        seconds += self._below.seconds - self._imported_s
        if self._runs:
            self.context.allow("imports", seconds)
        else:
            self._send(Extra("", "imports", seconds))

    def _turn(self, *, runs: bool) -> None:
        """A stage begins to run, or has run."""
        self._runs = runs
        self._imported_s = self._imports.seconds() + self._below.seconds

    @pytest.hookimpl(trylast=True)
    def pytest_sessionstart(self) -> None:
        self._imports.start()
        if self._temporary is not None:
            # After pytest's own faulthandler plugin, which would write to the terminal.
            stacks.arm(self._armed)
            self._arms = True

    def pytest_configure(self, config: pytest.Config) -> None:
        config.pluginmanager.register(
            RunOnce(lambda item: item.nodeid in self._by_nodeid), "gkd-run-once"
        )

    # -- collection ----------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makemodule(
        self, module_path: Path, parent: pytest.Collector
    ) -> pytest.Module | None:
        if module_path.parent != stages_dir():
            return None
        # One name for a stage wherever the package is installed.
        module: pytest.Module = StageModule.from_parent(
            parent, path=module_path, nodeid=f"stages/{module_path.name}"
        )
        return module

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(
        self, session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
    ) -> Generator[None]:
        everything = list(items)
        yield
        selected = self._request.selection.names
        try:
            found = {item.nodeid: read_marker(item) for item in everything}
            names = [stage.name for stage in found.values() if stage is not None]
            # --lf leaves whole files unread, and some files cannot be read.
            all_known = not session.testsfailed and not getattr(config.option, "lf", 0)
            if all_known:
                self._request.check_names(names)
            left = [one for item in items if (one := found[item.nodeid])]
            self.plan = stage_plan.build(
                left,
                selected,
                self._request.budgets,
                names if all_known else None,
                gpus=self.context.settings.gpus,
                exclusive=self.context.settings.exclusive,
            )
        except SettingsError as error:
            # The controller turns this into a usage error; here nothing may run.
            self._send(Collected(error=str(error)))
            items.clear()
            return
        self._by_nodeid = {stage.nodeid: stage for stage in self.plan}
        asked = names if selected is None else selected
        chosen = {one.name for one in left}
        missing = [name for name in names if name in asked and name not in chosen]
        # What -k and -m leave out is no surprise to whoever wrote them.
        told = not config.option.keyword and not config.option.markexpr
        kept: list[pytest.Item] = []
        dropped: list[pytest.Item] = []
        for item in items:
            is_stage = found[item.nodeid] is not None
            keep = (
                item.nodeid in self._by_nodeid
                if is_stage
                else not self._request.selection.only
            )
            (kept if keep else dropped).append(item)
        if dropped:
            config.hook.pytest_deselected(items=dropped)
        position = {stage.nodeid: at for at, stage in enumerate(self._run_order())}
        kept.sort(key=lambda item: position.get(item.nodeid, len(position)))
        items[:] = kept
        gentle = config.pluginmanager.hasplugin("timeout")
        retries = config.pluginmanager.hasplugin("pytest-retry")
        for item in items:
            stage = self._by_nodeid.get(item.nodeid)
            # From within pytest_runtest_makereport, where a test has a marker for it.
            if stage is not None and retries and item.get_closest_marker("flaky"):
                item.add_marker(pytest.mark.flaky(condition=False), append=False)
            if stage is not None and gentle:
                after_s = _gentle_s(stage)
                item.add_marker(pytest.mark.timeout(after_s, method="signal"))
            if item.path.parent == stages_dir():
                # torch's and vLLM's own deprecations are not the user's business.
                item.add_marker(pytest.mark.filterwarnings("ignore"))
        self._send(Collected(self.plan, deselected=tuple(missing if told else ())))

    def _run_order(self) -> list[PlannedStage]:
        return [stage for lane in stage_plan.lanes(self.plan, 1) for stage in lane]

    # -- running -------------------------------------------------------------------

    # Outside of pytest-timeout's clock: to wait for a need costs nothing of the budget.
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item
    ) -> Generator[None, object, object]:
        stage = self._by_nodeid.get(item.nodeid)
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
            # Before pytest makes a traceback of it, for which it reads files.
            self._give_up(f"pytest failed during the stage: {_told(error)}")
            raise
        finally:
            os.environ.pop(IN_STAGE, None)  # a stage may have cleared all of it
            self._end_leftovers(item, stage)
        self._current = None
        self._send(Closed(stage.name))
        return result

    @pytest.hookimpl(optionalhook=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> bool | None:
        """pytest-timeout's clock for a stage, without its dump of every thread.

        That reads the sources of all that is on the stack, from a disk that may be what
        the stage hangs on; the controller takes the stacks, from outside. A limit that
        the stage's author has set, in a marker of pytest-timeout's, stays as it is.
        """
        stage = self._by_nodeid.get(item.nodeid)
        in_main = threading.current_thread() is threading.main_thread()
        if stage is None or settings.timeout != _gentle_s(stage) or not in_main:
            return None

        theirs = item.config.pluginmanager.getplugin("timeout")
        due = 0.0

        def arm(left_s: float) -> None:
            nonlocal due
            due = monotonic() + left_s
            signal.setitimer(signal.ITIMER_REAL, left_s)

        def ring(number: int, frame: object) -> None:
            __tracebackhide__ = True
            if self._isolated and monotonic() > due + STOPPED_S:
                # In vain by now, or all have stood still: then the controller, which
                # holds the budget as well, is to say for how long.
                arm(STOPPED_S)
                return
            left_s = self._gentle_at(stage) - monotonic()
            # A little early, by what came before its clock began to run; or imports got
            # on, or it has a verdict already. The signal has ended a wait in C that
            # would not have ended, so that it may not go unheeded once the budget is
            # over.
            if left_s >= GENTLE_AFTER_S:
                arm(left_s)
            elif settings.disable_debugger_detection or not theirs.is_debugging():
                pytest.fail(f"not over after {settings.timeout:g} s", pytrace=False)

        signal.signal(signal.SIGALRM, ring)
        arm(max(self._gentle_at(stage) - monotonic(), POLL_S))
        return True

    @pytest.hookimpl(optionalhook=True)
    def pytest_timeout_cancel_timer(self, item: pytest.Item) -> bool | None:
        if item.nodeid not in self._by_nodeid or hasattr(item, "cancel_timeout"):
            return None  # pytest-timeout's own
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return True

    def _gentle_at(self, stage: PlannedStage) -> float:
        """When a stage, or the end of its fixtures, is to be interrupted."""
        finished = self._finished.get(stage.nodeid)
        if finished is not None:
            return finished + CLOSE_BUDGET_S + GENTLE_AFTER_S
        started = self._started.get(stage.nodeid)
        if started is None:  # what there is of extra time is the last stage's
            return monotonic() + _gentle_s(stage)
        return started + self._limit_s(stage) + GENTLE_AFTER_S

    def _end_leftovers(self, item: pytest.Item, stage: PlannedStage) -> None:
        """Before the next stage: what a fixture of a wider scope may own is its own."""
        before, self._leftovers = self._leftovers, None
        info = getattr(item, "_fixtureinfo", None)
        definitions = () if info is None else info.name2fixturedefs.values()
        if before is None or may_outlive_it(d for some in definitions for d in some):
            return
        left = before.end(stage.name)
        if left.processes or left.memory:
            self._send(Left(stage.name, tuple(left.processes), tuple(left.memory)))

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, None, None]:
        stage = self._by_nodeid.get(item.nodeid)
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

        In a worker nobody presses Ctrl-C, and a run is not one stage's to end.
        """
        if item.nodeid not in self._by_nodeid:
            yield
            return
        try:
            with self._alone():
                yield
        except pytest.exit.Exception as error:
            if not self._isolated:
                raise
            raise StageQuitError(
                f"the stage called pytest.exit({error.msg!r}), which would end the "
                "whole run"
            ) from error
        except KeyboardInterrupt as error:
            if not self._isolated:
                raise
            raise StageQuitError(
                "KeyboardInterrupt in the stage: raised by its own code, or its "
                "process was sent SIGINT"
            ) from error
        finally:
            self._look_at_streams()
            own = {one.number: one for one in (*self._captured, *self._channel)}
            closed = [str(number) for number in own if not own[number].is_open()]
            if closed:
                self._give_up(
                    "the stage closed file descriptors of its process that were not "
                    f"its own ({', '.join(closed)}; by os.close or os.closerange?), by "
                    "which pytest works"
                )
            # pytest's capture, which these hooks lie within, has not read it yet.
            cut_captured([one.number for one in self._captured], OUTPUT_BYTES)

    def _look_at_streams(self) -> None:
        """Whether the stage has closed a stream of Python's that pytest reads after it.

        In one process pytest cannot go on either, but nobody replaces it.
        """
        closed = [name for name, stream in self._streams.items() if stream.closed]
        if closed and self._current is not None:
            self._streams = {}
            self._streams_closed = (
                f"the stage {self._current.name} closed {' and '.join(closed)} of its "
                f"process (by {closed[0]}.close(), or a with statement over it), by "
                "which pytest works"
            )
            self._give_up(self._streams_closed)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """End a process that the stage forked and that comes back from its code.

        It is a copy of this one, pytest and all: it would go on with the next stage,
        and speak to the controller in this one's name.
        """
        code: int | str | None = 0
        try:
            yield
        except SystemExit as error:
            code = error.code
            if os.getpid() == self._pid:
                raise
        except BaseException as error:
            code = 1
            if os.getpid() == self._pid:
                raise
            traceback.print_exception(error)
        finally:
            if os.getpid() != self._pid:
                assert self._current is not None
                self._send(Forked(self._current.name))
                _exit(code if isinstance(code, int) else code is not None)

    def pytest_keyboard_interrupt(
        self, excinfo: pytest.ExceptionInfo[BaseException]
    ) -> None:
        self._give_up(f"pytest was ended during the stage: {_told(excinfo.value)}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_internalerror(
        self, excinfo: pytest.ExceptionInfo[BaseException]
    ) -> None:
        self._give_up(f"pytest failed during the stage: {_told(excinfo.value)}")

    def _give_up(self, why: str) -> None:
        """End this process where it cannot go on after the stage that it runs.

        pytest-xdist takes a worker that says goodbye early for the end of the whole
        run. One that dies is replaced, and costs no more than its stage.
        """
        if self._isolated and self._current is not None:
            try:
                self._send(Broken(self._current.name, why))
            finally:
                _exit(pytest.ExitCode.INTERNAL_ERROR)

    def _begin(self, item: pytest.Item, stage: PlannedStage) -> None:
        blocked_by = self._blocked[item.nodeid]
        if blocked_by:
            pytest.skip(f"blocked by {', '.join(blocked_by)}")
        self._make_directories()
        self._leftovers = Leftovers(self._creations)
        if self._isolated:
            self._captured = captured_descriptors()
            self._channel = channel_descriptors(item.config)
        streams = {"sys.stdout": sys.stdout, "sys.stderr": sys.stderr}
        self._streams = {
            name: one
            for name, one in streams.items()
            if not getattr(one, "closed", True)  # or it may be anything, with -s
        }
        self._started[item.nodeid] = monotonic()
        self._stood_s = self._link.stood_still_s()
        self.context.begin(stage.name, stage.budget_s)
        self._turn(runs=True)
        captured = tuple(one.number for one in self._captured)
        self._send(Start(stage.name, stage.budget_s, captured))

    def _await_needs(self, stage: PlannedStage) -> list[str]:
        """The needs that did not pass, once they and what comes before have a verdict.

        No deadline: each need has its own, which the controller holds it to.
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
                self._send(Waiting(stage.name, tuple(waiting)))
            if self._isolated and os.getppid() != self._parent:
                raise RuntimeError(
                    f"the pytest process {self._parent} is gone; nobody is left who "
                    f"could say how {', '.join(waiting)} ended"
                )
            time.sleep(POLL_S)

    # The outermost: pytest's own verdict on xfail is within the report by then.
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        stage = self._by_nodeid.get(item.nodeid)
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
            # No budget is lifted by xfail: nor could it be for a hang in C.
            del report.wasxfail
            report.outcome = "failed"
        found: dict[str, Any] = {
            "stage": stage.name,
            "outcome": self._outcome(report, stage, duration_s),
            "duration_s": duration_s,
            "blocked_by": self._blocked[item.nodeid],
            "fault": None,
            "error": "",
            "ended": [],
            "unsaid": self._unsaid,
        }
        if report.failed and call.excinfo is None:
            found["error"] = report.longreprtext  # an xfail that is strict, and passed
        elif call.excinfo is not None and not report.skipped:
            error = call.excinfo.value
            found["error"] = _error_text(call.excinfo)
            if isinstance(error, StageQuitError):
                found["error"] = str(error)
            if self._streams_closed:
                found["error"] = f"{self._streams_closed}: {found['error']}"
            fault = error if isinstance(error, StageFault) else None
            if isinstance(error, (ImportError, AttributeError)):
                fault = shadowed(error, report.longreprtext)
            elif fault is not None:
                found["error"] = str(fault)
            found["fault"] = fault and fault.to_json()
        if failed_parts:
            first, _ = failed_parts[0]
            assert first.excinfo is not None
            said = _error_text(first.excinfo)
            if call is not first:  # then it failed by itself as well
                said = f"{said.partition(chr(10))[0]}; then: {found['error']}"
            count = f"{len(failed_parts)} subtest(s) failed"
            found["error"] = f"{count}; the first: {said}"
        if report.when == "call" or not report.passed:
            self._turn(runs=False)
            self._finished.setdefault(item.nodeid, monotonic())
            self._send(Finish(stage.name, found["outcome"], duration_s))
            self.context.release()
        found |= sanitize.data({name: found[name] for name in ("error", "fault")})
        if found["outcome"] == TIMEOUT:
            # What it started would go on, and hold ports and memory of later stages.
            assert self._leftovers is not None
            found["ended"], _ = tree.stop(
                os.getpid(), itself=False, spare=self._leftovers.before
            )
        sanitize_report(item.config, report)
        report.gkd = found  # type: ignore[attr-defined]
        self._unsaid = ""
        return report

    def _part(
        self,
        item: pytest.Item,
        call: pytest.CallInfo[None],
        report: pytest.TestReport,
    ) -> pytest.TestReport:
        """A subtest's report, which pytest asks for amid the stage's own call.

        The stage fails with it; it is no test of its own that would be told twice.
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
        """Say what a stage raised before anybody makes a text of it.

        That calls __repr__ and __str__ of the user's, which may hang as well, and is
        no part of what the stage has its budget for.
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
        self._send(Raised(stage.name, _raised(call.excinfo)))

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
        self._send(Bye())
        # Everything is delivered. The interpreter would spend seconds on taking torch
        # and vLLM down; the controller ends what this process has started.
        os._exit(0)


def shadowed(error: Exception, traceback: str) -> StageFault | None:
    """The finding that an import met a file of the user's in the place of a package."""
    shadow = shadowed_imports.met(f"{error}\n{traceback}")
    if shadow is None:
        return None
    facts = {"package": shadow.name, "file": str(shadow.file)}
    proof = ("import", None, str(shadow))
    return StageFault("env.module-shadowed", str(error), facts, (proof,))


def _raised(excinfo: pytest.ExceptionInfo[BaseException]) -> str:
    """An exception and where it was raised, without calling any code of its own."""
    args = BaseException.args.__get__(excinfo.value)  # type: ignore[attr-defined]
    said = f": {args[0][:RAISED_LENGTH]}" if args and type(args[0]) is str else ""
    last = excinfo.traceback[-1]
    where = f"{Path(last.path).name}:{last.lineno + 1}"
    return f"{type(excinfo.value).__name__}{said} ({where})"


def _error_text(excinfo: pytest.ExceptionInfo[BaseException]) -> str:
    text = excinfo.exconly(tryshort=True)
    return without_count(re.sub(r"^(?:\w+\.)+(?=\w+: )", "", text))


def _told(error: BaseException) -> str:
    """An exception and where it was raised, in a line.

    By what can go wrong least: the stage may have replaced half of ``os``.
    """
    said = "".join(traceback.format_exception_only(error)).strip()
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    return f"{said} ({frame.f_code.co_filename}:{line})"


def sanitize_report(config: pytest.Config, report: pytest.TestReport) -> None:
    """What pytest, its JUnit file and other plugins show of a stage.

    Here, since pytest-xdist cannot even carry half of a UTF-16 pair.
    """
    report.sections = sanitize.data(report.sections)
    report.user_properties = sanitize.data(report.user_properties)
    if report.longrepr is not None:
        data = config.hook.pytest_report_to_serializable(config=config, report=report)
        data["longrepr"] = sanitize.data(data["longrepr"])
        copy = config.hook.pytest_report_from_serializable(config=config, data=data)
        report.longrepr = copy.longrepr


def _gentle_s(stage: PlannedStage) -> float:
    return stage.budget_s + GENTLE_AFTER_S


def cut_captured(descriptors: Iterable[int], limit_bytes: int) -> None:
    """Keep only the end of what was captured, where it is longer than ``limit_bytes``.

    pytest reads all of it into memory and sends it to the controller: for 1 GB that
    took over 20 s.
    """
    for number in descriptors:
        size_bytes = os.fstat(number).st_size
        if size_bytes <= limit_bytes:
            continue
        with open(os.dup(number), "rb+", buffering=0) as file:  # noqa: PTH123
            file.seek(size_bytes - limit_bytes)
            end = file.read(limit_bytes)
            note = f"({size_bytes - limit_bytes} bytes before this were dropped)\n"
            # The position is shared with descriptors 1 and 2, which write on from it.
            file.seek(0)
            file.truncate()
            file.write(note.encode() + end)


def without_count(text: str) -> str:
    """An exception's text without pydantic's first line, which only counts errors.

    And without the input that it then shows: all of vLLM's arguments.
    """
    text = re.sub(
        r"^ValidationError: \d+ validation errors? for \w+\n(?:\S+\n)?\s+"
        r"(?:\w+ error, )?(?=\S)",
        "ValidationError: ",
        text,
    )
    return re.sub(r" \[type=\w+, input_value=.*, input_type=\w+\]", "", text)


def captured_descriptors() -> list[Descriptor]:
    """pytest's own descriptors of the files that stdout and stderr go to, if any.

    Those have no name; one that has a name is where the user sends the output, with -s.

    1 and 2 point there only while a test runs; these do all the time, so that the
    controller can read what a stage printed however the stage ends.
    """
    found = []
    for stream in (1, 2):
        if os.fstat(stream).st_nlink:
            continue
        target = Descriptor.of(stream)
        for entry in Path("/proc/self/fd").iterdir():
            number = int(entry.name)
            if number > 2 and target.is_same(number):
                found.append(Descriptor(number, target.file))
                break
    return found


def channel_descriptors(config: pytest.Config) -> list[Descriptor]:
    """What pytest-xdist's worker speaks to the controller by."""
    for plugin in config.pluginmanager.get_plugins():
        gateway = getattr(getattr(plugin, "channel", None), "gateway", None)
        if gateway is not None:
            ends = gateway._io
            return [Descriptor.of(end.fileno()) for end in (ends.infile, ends.outfile)]
    return []


def read_marker(item: pytest.Item) -> StageItem | None:
    """The stage that a test's ``gkd_stage`` marker describes, None without one.

    Raises SettingsError for a marker that cannot be read.
    """
    marker = item.get_closest_marker("gkd_stage")
    if marker is None:
        return None
    options = dict(marker.kwargs)
    lane, needs = options.pop("lane", None), options.pop("needs", None)
    timeout_s = options.pop("timeout", None)
    problem = ""
    if len(marker.args) != 1 or not isinstance(marker.args[0], str):
        problem = "takes the stage's name"
    elif options:
        problem = f"does not know {', '.join(options)}; it knows lane, needs, timeout"
    elif needs is not None and (
        isinstance(needs, str) or not all(isinstance(need, str) for need in needs)
    ):
        problem = f"takes needs as a list of stage names, not {needs!r}"
    elif timeout_s is not None and (
        isinstance(timeout_s, bool)
        or not isinstance(timeout_s, (int, float))
        or not 0 < timeout_s < float("inf")
    ):
        problem = f"takes timeout as seconds above 0, not {timeout_s!r}"
    if problem:
        raise SettingsError(f"{item.nodeid}: the marker gkd_stage {problem}")
    name = marker.args[0]
    callspec = getattr(item, "callspec", None)
    if callspec is not None:
        name = f"{name}[{callspec.id}]"
    if any(part in ("", ".", "..") for part in name.split("/")):
        raise SettingsError(
            f"{item.nodeid}: {name!r} cannot be the name of the stage's directory in "
            "the report: it has an empty, '.' or '..' part between slashes"
        )
    for shown in (name, item.nodeid):
        # Stages are looked up by both, so that they have to be shown as they are.
        if sanitize.plain(shown) != shown:
            raise SettingsError(
                f"{item.nodeid}: {shown!r} holds characters that a terminal or a CI "
                "runner would obey; give the stage and its file another name"
            )
    return StageItem(
        item.nodeid,
        name,
        lane,
        None if needs is None else tuple(needs),
        timeout_s,
    )
