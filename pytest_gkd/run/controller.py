"""pytest's hooks in the controlling process; the run's parts do the actual work."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from _pytest.terminal import TerminalReporter

from pytest_gkd import sanitize
from pytest_gkd.language import tr, tr_filled
from pytest_gkd.processes import oom, prctl
from pytest_gkd.report import history, render, step_summary
from pytest_gkd.report.record import FAILED, PAGE, SKIPPED, TIMEOUT
from pytest_gkd.report.terminal import Console
from pytest_gkd.run.interrupts import Interrupts
from pytest_gkd.run.nodes import Nodes
from pytest_gkd.run.parts import RunParts, now
from pytest_gkd.run.pytest_report import ending_of, raised_in
from pytest_gkd.run.stage_reports import StageReports

# A worker that dies while starting is replaced; after this many in a row we give up.
LOST_EARLY = 3


class StageController:
    """Follows a run and reports it everywhere: terminal, JUnit, report.json."""

    def __init__(self, run: RunParts) -> None:
        self._run = run
        self._reports = StageReports(run)
        self._interrupts = Interrupts(lambda: run.record.interrupted)
        self._begun = self._ended = False
        self._lost_early = 0
        self._given_up = False
        self._nodes = Nodes(run)
        run.config.pluginmanager.register(self._nodes, "gkd-nodes")

    # -- hooks: start ----------------------------------------------------------------

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionstart(self) -> Generator[None, None, None]:
        self._begin()
        self._begun = True
        try:
            if self._run.workers:
                self._start_threads()
            yield
        except Exception as error:
            if not self._nodes.starts:
                raise
            told = (
                "the stages' processes could not be started: "
                f"{type(error).__name__}: {sanitize.line(str(error))}"
            )
            raise pytest.UsageError(tr_filled(told)) from error
        self._nodes.starts = False
        if self._run.workers:
            self._run.page.begin()  # while they start
        else:
            self._run.spare_plugins()
            self._run.home.hand_on_mark(of_run=True)

    def _begin(self) -> None:
        reporter = self._run.config.pluginmanager.getplugin("terminalreporter")
        self._run.teller.console = Console(reporter)
        self._run.shutdown.adopts = prctl.become_subreaper()
        if not self._run.shutdown.adopts:
            self._run.notes.append(
                "orphans cannot be adopted (prctl is refused): a daemon that wipes its "
                "environment may outlive its stage"
            )
        # Without workers, a debugger may need SIGINT.
        self._interrupts.heed(interrupt=bool(self._run.workers))
        self._run.recorder.kills_before[""] = oom.Count.now()
        self._run.teller.write()

    def _start_threads(self) -> None:
        self._nodes.begin()
        self._nodes.starts = True
        self._run.watchdog.start()
        self._run.teller.start()
        self._run.manifest_writer.start()
        self._nodes.starts = False

    def pytest_report_header(self) -> list[str]:
        return render.header(
            self._run.record, max(1, self._run.workers), self._run.notes
        )

    # -- hooks: results --------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        self._reports.lost(crashitem, report)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_logreport(
        self, report: pytest.TestReport
    ) -> Generator[None, object, object]:
        record = self._reports.take_in(report)
        if record is not None and report.when == "teardown":
            # This report closes its entry.
            self._reports.tell_junit(record, report)
        result = yield
        if record is not None and report.when != "teardown":
            self._reports.tell_junit(record, report)
        self._check_watchdog()
        limit = self._run.config.option.maxfail
        failed = sum(s.outcome in (FAILED, TIMEOUT) for s in self._run.record.stages)
        if self._run.workers and limit and failed >= limit:
            # pytest-xdist would let the other lanes run to their end first.
            raise pytest.Session.Failed(f"stopping after {failed} failures")
        return result

    def _check_watchdog(self) -> None:
        error = self._run.watchdog.error
        if error is not None and not self._given_up:
            self._given_up = True
            text = (
                "budgets can no longer be enforced, so the workers were ended: "
                f"{type(error).__name__}: {error}"
            )
            self._run.recorder.note(text)
            self._run.watchdog.drain()
            for record in self._run.record.stages:
                if record.outcome is None and record.started is not None:
                    self._reports.give_up(record, text)
            told = f"gkd: {tr_filled(text)}"
            pytest.exit(told, returncode=pytest.ExitCode.INTERNAL_ERROR)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodeready(self) -> None:
        self._check_watchdog()

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(
        self, report: pytest.CollectReport | pytest.TestReport
    ) -> tuple[str, str, str] | None:
        return self._reports.status(report)

    # -- hooks: the end --------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object | None) -> None:
        # Judged by all its events: it may have collected the stages.
        phase = self._run.watchdog.gone(node.gateway.id)
        self._check_watchdog()
        output = getattr(node, "workeroutput", {})
        if output.get("exitstatus") == pytest.ExitCode.USAGE_ERROR:
            raise pytest.UsageError(tr("the stages could not be collected; see above"))
        overrun = self._run.overruns.get(node.gateway.id)
        lost = error is not None and overrun is None and phase == "starting"
        self._lost_early = self._lost_early + 1 if lost else 0
        if self._lost_early == LOST_EARLY:
            _, counted = self._run.recorder.kills_before[""].since()
            told = (
                f"{LOST_EARLY} processes in a row died before they had collected the "
                f"stages: {error}; of the last, {ending_of(node)[1]}"
            )
            told += f"; {counted}" if counted else ""
            pytest.exit(f"gkd: {tr_filled(told)}", returncode=1)
        if overrun is not None and overrun.phase == "starting":
            where = self._run.findings.relative(self._run.report.path / "stacks")
            told = (
                "collecting the stages did not end within "
                f"{render.budget(overrun.limit_s)}; its stacks are in "
                f"{sanitize.line(where)}"
            )
            pytest.exit(f"gkd: {tr_filled(told)}", returncode=1)

    @pytest.hookimpl(tryfirst=True)
    def pytest_keyboard_interrupt(self) -> None:
        self._run.record.interrupted = "interrupted"
        self._run.watchdog.drain()  # a stage may have reported that it is done
        self._reports.close_open()

    @pytest.hookimpl(tryfirst=True)
    def pytest_internalerror(
        self, excinfo: pytest.ExceptionInfo[BaseException]
    ) -> None:
        path, line, hook = raised_in(excinfo)
        self._run.recorder.note(
            f"{self._run.findings.relative(path)}:{line} ({hook}) raised an error in "
            "pytest's own process, which ends the run: "
            f"{sanitize.line(excinfo.exconly(tryshort=True))}"
        )

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        run = self._run
        self._finish()
        unreached = any(s.message == render.NOT_REACHED for s in run.record.stages)
        if session.exitstatus == pytest.ExitCode.OK and (
            unreached or run.record.interrupted
        ):
            # Whatever caused it, such as pytest.exit(returncode=0): not all passed.
            session.exitstatus = pytest.ExitCode.INTERRUPTED
        self._sanitize_warnings()
        reporter = run.config.pluginmanager.getplugin("terminalreporter")
        if session.exitstatus == pytest.ExitCode.INTERNAL_ERROR and reporter:
            self.pytest_terminal_summary(reporter)  # which pytest skips in this case

    def _finish(self) -> None:
        """End what is left of the run and write the final report, once."""
        run = self._run
        if run.record.ended is not None:
            return
        if run.workers and run.watchdog.ident and not self._ended:
            # Even if its thread has died of an error.
            self._ended = True
            run.watchdog.stop()
            run.guardian.end()
            run.manifest_writer.stop()
            run.manifest_writer.scan()
            workers = {(w.pid, w.start) for w in run.watchdog.workers.values()}
            ended, survived = run.shutdown.end_all(workers)
            run.record.cleaned += ended
            run.recorder.note_survivors(survived)
            run.watchdog.drain()  # nobody writes events any more
            if run.events.unreadable:
                run.recorder.note(
                    f"{run.events.unreadable} line(s) written by the workers could not "
                    "be read (a full disk, or something else wrote there)"
                )
            self._reports.close_open()
            run.teller.stop()
        # In single-process mode this process still holds it.
        run.record.notes += run.shutdown.remove_memory(tell=bool(run.workers))
        for stage in run.record.stages:
            if stage.outcome is None and stage.started is None:
                stage.outcome, stage.message = SKIPPED, render.NOT_REACHED
        ran = (stage.name for stage in run.record.stages if stage.ran)
        run.record.notes += run.findings.sanitize_output(ran)
        self._tell_github()
        run.record.ended = now()
        self._remember()
        run.teller.write()
        if not run.workers:
            run.teller.stop()
        if run.record.stages and run.teller.could_write:
            problem = run.page.write(run.record)
            if problem:
                run.recorder.note(f"there is no {PAGE} of this run: {problem}")
                run.teller.write()  # else it may not be due yet, after a slow write

    def _remember(self) -> None:
        """Add the run to the history, unless nothing ran."""
        run = self._run
        if not any(stage.ran for stage in run.record.stages):
            return
        path = run.report.history
        try:
            run.make_way(path)
            history.append(path, history.entry(run.record.to_json()))
        except OSError as error:
            name = sanitize.line(run.findings.relative(path))
            why = error.strerror or str(error)
            run.recorder.note(f"this run is not in the history {name}: {why}")

    def _tell_github(self) -> None:
        page = os.environ.get(step_summary.VARIABLE)
        if page:
            report = self._run.shown_report
            problem = step_summary.append(self._run.record, report, Path(page))
            self._run.record.notes += [problem] if problem else []

    def _sanitize_warnings(self) -> None:
        """Sanitize the stages' warnings, which pytest's summary shows."""
        reporter = self._run.config.pluginmanager.getplugin("terminalreporter")
        for warning in reporter.stats.get("warnings", ()) if reporter else ():
            warning.message = sanitize.text(warning.message)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        run = self._run
        if self._begun:
            self._finish()  # pytest does not finish a session that failed at its start
        self._nodes.end()
        left = run.shutdown.end_late() if run.workers else []
        is_clean = not left and not (run.workers and run.shutdown.left())
        if not is_clean:
            self._say(
                "processes of this run are still alive; its guardian ends them as "
                f"soon as pytest has exited: {'; '.join(left)}"
            )
        theirs = run.shutdown.theirs() if run.workers and is_clean else []
        if theirs:
            self._say(
                "left running, since a plugin or conftest.py in pytest's own "
                f"process has started it: {'; '.join(theirs)}"
            )
        with run.watchdog.lock:
            run.events.close()
        run.verdicts.close()
        run.verdicts_file.close()
        problem = run.home.close(finished=is_clean)
        if problem:
            self._say(f"could not remove all of {run.home.path}: {problem}")
        self._interrupts.restore()

    def _say(self, text: str) -> None:
        self._run.teller.console.line(f"gkd: {tr_filled(text)}")

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: TerminalReporter) -> None:
        report = self._run.shown_report if self._run.teller.could_write else ""
        if self._run.page.path is not None:
            report = self._run.findings.relative(self._run.page.path)
        for line in render.summary(self._run.record, report):
            terminalreporter.write_line(line)
        if os.environ.get("GITHUB_ACTIONS") == "true":
            for line in render.github_annotations(self._run.record):
                terminalreporter.write_line(line)
