"""Turns pytest's reports on stages into records, and into what reporters get."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_gkd import sanitize, typed_json
from pytest_gkd.clock import monotonic
from pytest_gkd.processes import cleanup, oom, stacks, tree
from pytest_gkd.report import render
from pytest_gkd.report.record import FAILED, PASSED, SKIPPED, TIMEOUT, StageRecord
from pytest_gkd.run.outcome import Loss, found, of_loss, of_report
from pytest_gkd.run.parts import RunParts
from pytest_gkd.run.pytest_report import (
    StageFailure,
    Traceback,
    add_to_junit,
    ending_of,
    properties,
    tell_junit,
)
from pytest_gkd.run.run_directory import temporary_name
from pytest_gkd.run.worker_watch import read_output
from pytest_gkd.stage_api import StageFault
from pytest_gkd.stage_events import StageResult, Verdict


class StageReports:
    """Processes pytest's reports on stages, and the loss of workers."""

    def __init__(self, run: RunParts) -> None:
        self._run = run
        self._told: dict[tuple[str, ...], str] = {}  # advice, and whose it was first

    def lost(self, nodeid: str, report: pytest.TestReport) -> None:
        """Handle a stage whose worker is gone; ``report`` is pytest-xdist's own."""
        node = getattr(report, "node")  # noqa: B009 - set by xdist
        worker = node.gateway.id
        run = self._run
        run.watchdog.drain(worker)
        record = self.named(nodeid)
        if record is None:
            return
        watch = run.watchdog.workers.get(worker)
        loss, fault, signal_name = Loss(run.overruns.get(worker)), None, None
        if loss.overrun is None:
            status, died = ending_of(node)
            # Its last events may have come after the connection was lost.
            run.watchdog.drain(worker)
            run.guardian.hear()
            given_up = worker in run.guardian.ended
            died = run.guardian.stood_still() if given_up else record.broken or died
            if status is not None and status < 0 and not given_up:
                signal_name = tree.exit_name(status).removeprefix("signal ")
            if signal_name == "SIGKILL" and watch is not None:
                fault, said = self._for_memory(record, watch.pid)
                died += said
                # The kernel's count proves that it was not the OOM killer.
                signal_name = None if said and not fault else signal_name
            loss = Loss(None, died, given_up)
        outcome = of_loss(record, loss, monotonic())
        outcome.write(record)
        report.location = (nodeid.split("::")[0], None, nodeid.split("::")[-1])
        report.when = "teardown" if outcome.closing else "call"
        report.duration = outcome.duration_s
        if loss.overrun is not None:
            run.findings.keep_stacks(record, loss.overrun.stacks)
            output = loss.overrun.output
        else:
            output = read_output(watch) if watch else ""
            if watch is not None:
                out = run.report.path / "stacks" / record.name
                left = stacks.of_crash(watch.pid, run.armed, out, run.make_way)
                run.findings.keep_stacks(record, left)
        self._clean_up_worker(record, worker)
        run.findings.settle(
            record,
            output,
            fault=fault,
            error="" if outcome.closing else record.raised,
            exit_signal=signal_name,
            crashed=outcome.crashed,
        )
        report.longrepr = self._failure(record, None)
        report.gkd_done = True  # type: ignore[attr-defined]

    def _for_memory(
        self, record: StageRecord, pid: int
    ) -> tuple[StageFault | None, str]:
        """The fault, if the kernel ended a stage's process for lack of memory.

        And what the kernel's count says about that; empty if it does not count.
        """
        before = self._run.recorder.kills_before.get(record.name)
        if before is None or not before.is_known:
            return None, ""
        kills, counted = before.since()
        if not kills:
            return None, "; by the kernel's count it was not for lack of memory"
        words = sanitize.line(oom.kernels_words(pid))
        proofs = [("kernel log", None, words), ("kernel", None, counted)]
        evidence = tuple(proof for proof in proofs if proof[2])
        facts = {"oom_kills": kills}
        return StageFault("env.host-oom", counted, facts, evidence), f"; {counted}"

    def _clean_up_worker(self, record: StageRecord, worker: str) -> None:
        """Remove what a dead worker left on disk and in memory, ahead of the next."""
        watch = self._run.watchdog.workers.get(worker)
        if watch is not None:
            # Including whatever is left in its cgroup, if it had one.
            note = self._run.manifest_writer.note_memory
            ended, left = tree.stop(
                watch.pid, itself=True, start=watch.start, before=note
            )
            record.cleaned += ended
            self._run.recorder.note_survivors(left)
            theirs = [
                s for s in self._run.manifest_writer.segments if s.worker == watch.pid
            ]
            self._run.recorder.note_left(record, [], cleanup.remove_segments(theirs)[0])
        cleanup.remove_tree(self._run.home.path / temporary_name(worker))

    def take_in(self, report: pytest.TestReport) -> StageRecord | None:
        """Process a report; the stage whose verdict it brought, if any."""
        if getattr(report, "gkd_done", False):
            record = self.named(report.nodeid)
            assert record is not None
            self._finish(record, report)
            return record
        told, run = getattr(report, "gkd", None), self._run
        if told is None:
            return None
        result = typed_json.loads(StageResult, told)
        if result.unsaid:
            said = f"{result.stage}: events could not be written: {result.unsaid}"
            run.recorder.note(said)
        if report.when == "teardown" and report.passed and not self._shows_output():
            report.sections = []  # nobody asks how an engine shuts down
        if run.workers:
            run.watchdog.drain(getattr(report, "node").gateway.id)  # noqa: B009
        record = run.record.stage(result.stage)
        if record is None or (report.passed and report.when != "call"):
            return None
        if record.outcome is not None and report.when != "teardown":
            return None
        if record.outcome in (FAILED, TIMEOUT):
            # Its verdict stands; a later failure of its fixtures is added to it.
            first, *_ = result.error.strip().splitlines() or [report.outcome]
            record.also.append(f"teardown: {first}")
            run.teller.changed()
            return None
        if report.when == "setup":
            # The engine is started in a fixture. If that fails, it is the stage's
            # failure, not an error of the test.
            report.when = "call"
        xfail = getattr(report, "wasxfail", None)
        skipped = ""
        if report.skipped and isinstance(report.longrepr, tuple):
            skipped = report.longrepr[2].removeprefix("Skipped: ")
        of_report(
            record, result, failed=report.failed, skipped=skipped, xfail=xfail
        ).write(record)
        if report.skipped and xfail is None:  # pytest and JUnit report xfail themselves
            report.longrepr = (record.nodeid.split("::")[0], 0, record.message)
        elif report.failed:
            self._failed(record, report, result)
        self._finish(record, report)
        return record

    def _failed(
        self, record: StageRecord, report: pytest.TestReport, result: StageResult
    ) -> None:
        node, run = getattr(report, "node", None), self._run
        watch = run.watchdog.workers.get(node.gateway.id) if node else None
        late = record.outcome == TIMEOUT
        if watch is not None and late:
            run.watchdog.await_look(watch)
        sample = watch.samples.get(record.name) if watch is not None else None
        if sample is not None:
            run.findings.keep_stacks(record, sample.stacks)
            if sample.progress is not None and late:
                record.progress = sample.progress.to_json()
                record.state = sample.progress.text()
        sections = "\n".join(
            f"-- {name}\n{text}" for name, text in report.sections if text.strip()
        )
        whole = report.longrepr
        if late:
            # The stacks show where it was better than the point of interruption does.
            run.findings.settle(record, sections)
        else:
            run.findings.settle(
                record,
                sections,
                traceback=Traceback.of(report),
                fault=found(result),
                error=result.error,
            )
        shown = self._shows_output()
        if not shown:
            report.sections = []  # in the report directory; -v shows them here, too
        report.longrepr = self._failure(record, whole if shown else None)

    def _shows_output(self) -> bool:
        config = self._run.config
        tracebacks = getattr(config.option, "tbstyle", "auto")  # -p no:terminal
        return config.get_verbosity() > 0 or tracebacks not in ("auto", "no", "line")

    def _failure(self, record: StageRecord, traceback: Any) -> Any:
        advice = record.diagnosis.advice if record.diagnosis else ()
        block = render.failure_block(record, self._run.shown_report, self._told)
        if advice:
            self._told.setdefault(advice, record.name)
        return StageFailure(record, block, traceback)

    def _finish(self, record: StageRecord, report: pytest.TestReport) -> None:
        outcome = record.outcome or SKIPPED
        if record.triggered is not None:
            record.verdict_after_s = monotonic() - record.triggered
        report.user_properties += self._properties(record).items()
        self._run.verdicts.write(Verdict(record.name, outcome))
        self._run.teller.changed()
        line = render.result_line(record)
        self._run.teller.console.line(line, **render.MARKUP[outcome])

    def _properties(self, record: StageRecord) -> dict[str, str]:
        return properties(record, self._run.shown_report)

    def give_up(self, record: StageRecord, why: str) -> None:
        """Report a stage as failed everywhere if the run ended before judging it."""
        if record.ended_with == PASSED:
            return  # it passed; only its report never arrived
        record.outcome, record.message = FAILED, why
        record.duration_s = monotonic() - (record.started or monotonic())
        report = self._own_report(record)
        report.gkd_done = True  # type: ignore[attr-defined]
        self._run.config.hook.pytest_runtest_logreport(report=report)

    def _own_report(self, record: StageRecord) -> pytest.TestReport:
        """The report for pytest's reporters on a stage that nobody else reports on."""
        path, _, name = record.nodeid.partition("::")
        failed = record.outcome != SKIPPED
        report = pytest.TestReport(
            record.nodeid,
            (path, None, name),
            {},
            "failed" if failed else "skipped",
            record.message if failed else (path, 0, record.message),
            "call",
        )
        report.duration = record.duration_s or 0.0
        for worker in self._run.watchdog.workers.values():
            if worker.stage == record.name:  # JUnit keys its setup by both
                report.node = self._run.nodes[worker.name]  # type: ignore[attr-defined]
        return report

    def tell_junit(self, record: StageRecord, report: pytest.TestReport) -> None:
        """Put a stage's output and properties into its entry in the JUnit file."""
        texts = self._run.findings.texts.get(record.name, ())
        tell_junit(self._run.config, report, self._properties(record), texts)

    def status(
        self, report: pytest.CollectReport | pytest.TestReport
    ) -> tuple[str, str, str] | None:
        """How pytest counts and shows a report, None to leave that to pytest."""
        if getattr(report, "gkd_part", False):
            return "", "", ""  # a subtest; its stage reports it
        if self.named(report.nodeid) is None or self._run.teller.console.quiet:
            return None
        assert isinstance(report, pytest.TestReport)
        # While stages run, each gets a line of its own; pytest only counts them.
        is_over = self._run.record.ended is not None
        if hasattr(report, "wasxfail"):
            counted = "xfailed" if report.skipped else "xpassed"
            return None if is_over else (counted, "", "")
        if report.skipped or report.when == "call":
            counted = report.outcome
        else:
            counted = "error" if report.failed else ""
        return counted, "", counted.upper() if is_over else ""

    def close_open(self) -> None:
        """Mark stages still open at the end of the run as interrupted."""
        for stage in self._run.record.stages:
            if stage.outcome is None and stage.ended_with == PASSED:
                stage.outcome = PASSED  # only its report never arrived
            if stage.outcome is None and stage.started is not None:
                stage.duration_s = monotonic() - stage.started
                stage.outcome = SKIPPED
                after = render.seconds(stage.duration_s)
                stage.message = f"interrupted after {after}{render.doing(stage)}"
                # Others count only finished stages; without this its case has no name.
                report = self._own_report(stage)
                add_to_junit(self._run.config, report)
                self.tell_junit(stage, report)

    def named(self, nodeid: str) -> StageRecord | None:
        return next((s for s in self._run.record.stages if s.nodeid == nodeid), None)
