"""The watch itself: looks at a job every second, judges it, and tells."""

from __future__ import annotations

import os
import time
from collections import deque
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from pytest_gkd.clock import monotonic
from pytest_gkd.diagnosis.phase_marks import Mark
from pytest_gkd.language import tr
from pytest_gkd.processes import background
from pytest_gkd.watch import (
    exits,
    notify,
    status_line,
    stuck_report,
    verdict_file,
    verdicts,
)
from pytest_gkd.watch.arguments import Asked
from pytest_gkd.watch.progress import Follower
from pytest_gkd.watch.samples import (
    AT_WORK,
    HELD,
    SLOW,
    STUCK,
    JobSample,
    ProcessSample,
    Progress,
    Usual,
    Verdict,
)
from pytest_gkd.watch.sampling import Sampler
from pytest_gkd.watch.screen import OwnScreen, SharedScreen

T = TypeVar("T")


@dataclass(frozen=True)
class End:
    """Why the command is to be ended, and the exit status that then says so."""

    why: str
    status: int


TICK_S = 0.25
SAMPLE_S = 1.0
LINE_S = 60.0
FIRST_STATUS_S = 1.0
# Silence after which a job is looked at closely: the guides' limit, or what is longer
# than is usual in a job that makes steps.
LOOK_AFTER_S = 120.0
LOOK_LEAST_S, LOOK_MOST_S = 10.0, 600.0
LOOK_STEPS, LOOK_SILENCES = 20.0, 2.0
STUCK_LEAST_S, STUCK_MOST_S = 10.0, 60.0
# A look costs each process some hundredths of a second; at most one in this time.
LOOK_EVERY_MOST_S = 600.0
# The watcher itself stood still for so long: a paused container, a stopped job.
STOOD_S = 10.0
# Without CPU time for so long, a job may have come to stand still.
IDLE_S = 5.0
MOST_ENDS = 64
SAY_TWICE_S = 600.0
NOTIFY_LIMIT_S = 12.0


class Watch:
    """What is known of a job, and what is said of it; see ``tick``.

    ``log`` is the file that holds the output, None without one.
    """

    def __init__(
        self,
        asked: Asked,
        directory: Path,
        screen: OwnScreen | SharedScreen,
        sampler: Sampler,
        usual: Usual,
    ) -> None:
        self.asked, self.directory, self.screen = asked, directory, screen
        self.sampler, self.usual = sampler, usual
        self.follower = Follower()
        self.log: Path | None = None
        self.began = self._ticked = monotonic()
        self.verdict = Verdict(AT_WORK)
        self.end: End | None = None
        self.causes: list[dict[str, Any]] = []
        self.telling: list[str] = []
        self.reported: stuck_report.Report | None = None
        self._kept: tuple[object, ...] = ()
        self._sample: JobSample | None = None
        self._cores: dict[int, float] = {}
        self._sampled_at = self._lined_at = self._drawn_at = self.began
        self._first: JobSample | None = None
        self._told_at: JobSample | None = None  # when a report was done
        self.look: Future[JobSample] | None = None
        self._report: Future[stuck_report.Report] | None = None
        self._why_slow: Future[dict[str, Any]] | None = None
        self._look_at = self._busy_at = self._stuck_since = 0.0
        self.ends: deque[tuple[float, ProcessSample]] = deque(maxlen=MOST_ENDS)
        self._looks = 0
        self._late: Mark | None = None
        self._late_told: Mark | None = None
        self._told: dict[str, float] = {}
        self._notified: list[Future[None]] = []

    # -- what is seen --------------------------------------------------------------

    @property
    def progress(self) -> Progress:
        return self.follower.feed(b"", 0.0)

    @property
    def look_after_s(self) -> float:
        """The silence after which the job is looked at closely."""
        if self.asked.look_after_s is not None:
            return self.asked.look_after_s
        progress = self.progress
        if self.follower.steps_made < 3 or progress.step_s is None:
            known = self.usual.silences.get(progress.phase, 0.0)
            return min(LOOK_MOST_S, max(LOOK_AFTER_S, 1.5 * known))
        usual_s = max(
            LOOK_SILENCES * self.follower.longest_s, LOOK_STEPS * progress.step_s
        )
        return min(LOOK_MOST_S, max(LOOK_LEAST_S, usual_s))

    @property
    def stuck_after_s(self) -> float:
        """How long it must stand still under close looks."""
        given = self.asked.stuck_after_s
        if given is not None:
            return given
        return min(STUCK_MOST_S, max(STUCK_LEAST_S, self.look_after_s / 2))

    def tick(self, data: bytes) -> None:
        """Take new output, look, judge, and show."""
        now = monotonic()
        if now - self._ticked > STOOD_S:
            self._stood_still(now - self._ticked)
        self._ticked = now
        if data:
            self.follower.feed(data, now)
        if now >= self._sampled_at + SAMPLE_S:
            self._take_sample(now)
            self._judge(now)
            self.keep_verdict()
        self._hear_report()
        self._hear_why_slow()
        self._tell_nodes()
        if self.asked.until_step and self.end is None and self.progress.trained:
            self.end = End("--until-step", 0)
            spent_s = self.progress.trained_at - self.began
            self.screen.say(f"a training step is done after {verdicts.span(spent_s)}")
        self._show(now)
        self.screen.flush()

    def _tell_nodes(self) -> None:
        """Which other nodes are seen, and which are not, once each."""
        while self.sampler.nodes.notes:
            self.screen.say(self.sampler.nodes.notes.pop(0))
        if self.sampler.elsewhere and self._may_tell(self.sampler.elsewhere, once=True):
            self.screen.say(self.sampler.elsewhere)

    def _take_sample(self, now: float) -> None:
        before, self._sample = self._sample, self.sampler.take()
        self._sampled_at = now
        if before is None:
            return
        used = verdicts.cpu_use(before, self._sample)
        self.ends.extend((now, one) for one in verdicts.gone(before, self._sample))
        if verdicts.uses_cpu(used, self._sample):
            self._busy_at = now
        # Another node answers less often: what it used last counts until then.
        self._cores = {
            one.pid: used.get(one.pid, self._cores.get(one.pid, 0.0))
            for one in self._sample.processes
        }
        if slept_s := verdicts.slept_s(before, self._sample):
            self.screen.say(f"the machine slept for {verdicts.span(slept_s)}")
            self._forget_looks()

    def _stood_still(self, seconds: float) -> None:
        """This process did not run: nor, as a rule, did the job."""
        self._forget_looks()
        if self._may_tell("stood"):
            self.screen.say(
                f"the watch itself did not run for {verdicts.span(seconds)} (a paused "
                "container, a suspended job, a crowded machine); what is silent is "
                "seen from now on"
            )

    def _forget_looks(self) -> None:
        self._first, self._looks, self.look = None, 0, None
        self._look_at = monotonic() + self.stuck_after_s

    # -- what is judged ------------------------------------------------------------

    def _judge(self, now: float) -> None:
        if self.end is not None:
            return  # to be ended makes it move, which is no news
        sample = self._sample
        assert sample is not None
        progress = self.progress
        silent_s = now - max(sample.output_at, self.began)
        since_step = now - (progress.step_at or now)
        overdue = progress.step_s is not None and since_step > max(
            self.look_after_s, LOOK_STEPS * progress.step_s
        )
        if self.look is not None and self.look.done():
            look, self.look = self.look, None
            if (seen := self._result("a look", look)) is not None:
                self._looked(seen)
                self._report_late(seen)
            self._report_overtime(seen or sample, now)
        if self.follower.late is not self._late_told:
            self._late = self._late_told = self.follower.late
        seems_still = silent_s >= self.look_after_s or overdue
        # What little it says, short of a step, does not end a standstill; a look does.
        doubted = seems_still or self.verdict.word in (STUCK, HELD)
        first = self._first or self._told_at
        stepped = first is not None and progress.step_at > first.at
        # To be asked for all that a report holds makes a job run, and print.
        is_asked = self._report is not None
        if first is not None and (
            stepped or (not (overdue or is_asked) and self._spoke(first, sample))
        ):
            self._goes_on(sample)
        elif (self.look or self._report) is None and (
            self._late is not None
            or self._is_overtime(now)
            or (doubted and (now >= self._look_at or self._fell_idle(now)))
        ):
            out = self.directory / f"look-{self._looks % 2}"
            self.look = background.begin("gkd-look", lambda: self.sampler.look(out))
        elif not seems_still and self.verdict.word in (AT_WORK, SLOW):
            told = verdicts.pace(progress, now, self.usual)
            self._is(told or Verdict(AT_WORK, phase=progress.phase))

    def _report_late(self, sample: JobSample) -> None:
        """Report a phase that takes longer than its program allows (see ``marks``)."""
        late, self._late = self._late, None
        if late is None or self._report is not None or self.verdict.word == STUCK:
            return
        whose = f"rank {late.rank}" if late.rank is not None else f"pid {late.pid}"
        limit = f" of {late.timeout_s:g} s" if late.timeout_s is not None else ""
        why = f"{late.name} of {whose} takes longer than its own limit{limit}"
        verdict = Verdict(
            SLOW, late.timeout_s or 0.0, (why,), phase=late.phase, odd=(late.pid,)
        )
        self.begin_report(verdict, sample)

    def _is_overtime(self, now: float) -> bool:
        """Whether the first step should be done by now (--within)."""
        limit_s = self.asked.within_s
        over = limit_s is not None and now >= self.began + limit_s
        return over and self._report is None and not self.progress.trained

    def _report_overtime(self, sample: JobSample, now: float) -> None:
        if not self._is_overtime(now):
            return
        if self.verdict.word == STUCK:  # it is reported already
            self.end = End("--within", exits.LATE)
            return
        why = f"no training step within {verdicts.span(self.asked.within_s or 0.0)}"
        last = self.verdict
        since_s = now - self.began
        verdict = Verdict(SLOW, since_s, (why, *last.why), phase=self.progress.phase)
        self.begin_report(verdict, sample)

    def _result(self, what: str, future: Future[T]) -> T | None:
        """What was worked out beside; what went wrong there does not end the watch."""
        error = future.exception()
        if error is None:
            return future.result()
        self.screen.say(f"{what} went wrong: {type(error).__name__}: {error}")
        return None

    def _fell_idle(self, now: float) -> bool:
        """Whether it computes no more, since a look that still saw it at work.

        Looks become rare while they find work, and must not be late when that ends.
        """
        if self._first is None or not (
            self._first.at < self._busy_at < now - IDLE_S
            and now > self._first.at + self.stuck_after_s
        ):
            return False
        self._looks = 1
        return True

    @staticmethod
    def _spoke(first: JobSample, sample: JobSample) -> bool:
        words = sample.output_bytes - first.output_bytes
        window_s = max(1.0, sample.at - first.at)
        return words > verdicts.CHATTER_BYTES_PER_S * window_s

    def _goes_on(self, sample: JobSample) -> None:
        was = self.verdict
        self._first, self._looks, self._look_at = None, 0, 0.0
        self._told_at = None
        if was.word in (STUCK, HELD):
            self.screen.say(
                f"it goes on, after {verdicts.span(was.since_s)} ({was.word})"
            )
        self._is(Verdict(AT_WORK, sample.at - sample.output_at))

    def _looked(self, sample: JobSample) -> None:
        first, self._first = self._first, sample
        self._looks += 1
        wait_s = self.stuck_after_s * 2 ** max(0, min(self._looks - 2, 4))
        self._look_at = sample.at + min(LOOK_EVERY_MOST_S, wait_s)
        if first is None:
            if found := verdicts.held(sample):
                self._is(found)
            return
        if not first.processes or not sample.processes:
            return
        found = verdicts.compare(first, sample, self.progress, self.usual)
        if found.word == STUCK:
            since = sample.at - found.since_s
            if self.verdict.word == STUCK:
                since = min(since, self._stuck_since)
            self._stuck_since = since
            found = replace(found, since_s=sample.at - since)
        self._is(found, sample)
        if found.word == SLOW and not any(one.threads for one in sample.processes):
            for one in sample.unseen:
                if self._may_tell(one, once=True):
                    self.screen.say(f"note: {one}")

    def _is(self, verdict: Verdict, sample: JobSample | None = None) -> None:
        """The verdict from now on; a new one is told, and a standstill reported."""
        was, self.verdict = self.verdict, verdict
        if (verdict.word, verdict.odd != ()) == (was.word, was.odd != ()) or (
            verdict.word in (was.word, AT_WORK) and not verdict.odd
        ):
            if verdict.word == AT_WORK and was.word == STUCK and verdict.why:
                self.screen.say(": ".join(["it moves again", *verdict.why]))
            return
        reports = verdict.word == STUCK or (verdict.word == SLOW and verdict.odd)
        if reports and sample is not None:
            self.begin_report(verdict, sample)
        elif self._may_tell(verdict.word):
            if verdict.word == SLOW and self.log is not None:
                self._ask_why_slow(self.log)
            else:
                self.tell(verdict, self.in_words(verdict))

    def _ask_why_slow(self, log: Path) -> None:
        """Ask the log, which may tell: a job that tries again, for ever, is slow."""
        rules = self.asked.rules
        self._why_slow = background.begin(
            "gkd-slow", lambda: stuck_report.diagnosed(log, rules)
        )

    def _hear_why_slow(self) -> None:
        if self._why_slow is None or not self._why_slow.done():
            return
        done, self._why_slow = self._why_slow, None
        found, verdict = self._result("the diagnosis", done), self.verdict
        if verdict.word != SLOW:
            self._told.pop(SLOW, None)
            return
        text = self.in_words(verdict)
        # After what is told as survived, steps were made.
        if found is not None and found.get("verdict") == "failed":
            self.follower.is_in(found["phase"])
            verdict = replace(verdict, phase=self.progress.phase)
            text += stuck_report.cause_lines(found, self.log)
        self.tell(verdict, text)

    def _may_tell(self, what: str, *, once: bool = False) -> bool:
        """Whether it was not told lately, or with ``once`` never."""
        now = monotonic()
        again_s = float("inf") if once else SAY_TWICE_S
        if what in self._told and now < self._told[what] + again_s:
            return False
        self._told[what] = now
        return True

    @staticmethod
    def in_words(verdict: Verdict) -> str:
        sure = "" if verdict.confidence == "certain" else " (likely)"
        return f"{verdict.word}{sure}: {'; '.join(verdict.why)}"

    def tell(self, verdict: Verdict, text: str, report: str = "") -> None:
        """Say it here, and to those who want to be told."""
        self.screen.say(text)
        self.notify(verdict, text, report)

    def notify(self, verdict: Verdict, text: str, report: str = "") -> None:
        """Tell those who want to be told, beside what goes on here."""
        self._tell_them(self.asked.notify, "--notify", verdict, text, report)

    def _tell_them(
        self,
        whom: tuple[str, ...],
        option: str,
        verdict: Verdict,
        text: str,
        report: str,
    ) -> None:
        verdict = replace(verdict, phase=verdict.phase or self.progress.phase)
        self._notified += notify.tell(
            whom, verdict, text, self.screen.say, report, option
        )

    def keep_verdict(self, exit_status: int | None = None) -> None:
        """Write down the verdict, if it is a new one; see ``verdict_file``."""
        report, progress = self.reported, self.progress
        state = (self.verdict, progress.phase, progress.trained, report, exit_status)
        if state == self._kept:
            return
        self._kept = state
        problem = verdict_file.write(
            self.directory,
            self.verdict,
            progress,
            self.began,
            log=self.log,
            report=report,
            phases_s=self.follower.phases,
            ended_for=self.end.why if self.end else "",
            exit_status=exit_status,
            causes=self.causes,
            telling=self.telling,
        )
        if problem and self._may_tell(problem):
            self.screen.say(problem)

    def close(self) -> None:
        """Wait until everybody is told, and give the terminal back."""
        self.sampler.nodes.close()
        futures.wait(self._notified, NOTIFY_LIMIT_S)
        self.screen.close()

    def begin_report(self, verdict: Verdict, sample: JobSample) -> None:
        at = datetime.now().strftime("%H%M%S")
        place = self.directory / f"{verdict.word.replace(' ', '-')}-{at}"
        text = self.follower.head + self.follower.tail
        progress = self.progress
        ended = tuple(one for _, one in self.ends)

        def work() -> stuck_report.Report:
            return stuck_report.make(
                place,
                verdict,
                sample,
                progress,
                text,
                self.log,
                self.asked.rules,
                ended,
                natively=self.sampler.natively,
            )

        self._report = background.begin("gkd-report", work)

    def _hear_report(self) -> None:
        if self._report is None or not self._report.done():
            return
        done, self._report = self._report, None
        self._forget_looks()
        self._take_sample(monotonic())  # what was printed until now was asked for
        self._told_at = self._sample
        report = self._result("the report", done)
        is_overtime = self._is_overtime(monotonic())
        if is_overtime:
            self.end = End("--within", exits.LATE)
        if report is None:
            return
        self.reported = report
        self.tell(report.verdict, report.text(), str(report.directory or ""))
        if report.verdict.word != STUCK:
            return
        kind, _, line = self.asked.on_stuck.partition(":")
        if kind == "end":
            self.end = End("--on-stuck=end", exits.STUCK)
        elif kind == "command":
            place = str(report.directory or "")
            whom = (f"command:{line}",)
            self._tell_them(whom, "--on-stuck", report.verdict, report.text(), place)

    # -- what is shown -------------------------------------------------------------

    def _show(self, now: float) -> None:
        if not self.asked.status:
            return
        if self.screen.has_line:
            if now < self._drawn_at + FIRST_STATUS_S:
                return
            self._drawn_at = now
            self.screen.show(
                status_line.line(self.verdict, self._parts(now), self.screen.columns)
            )
        elif now >= self._lined_at + LINE_S:
            self._lined_at = now
            at = time.strftime("%H:%M:%S")
            told = " · ".join([tr(self.verdict.word), *self._parts(now)])
            self.screen.say(f"{at} {told}")

    def _parts(self, now: float) -> list[str]:
        cores = sum(self._cores.values())
        return status_line.parts(
            self.verdict, self.progress, self.usual, self._sample, cores, now
        )


def new_directory(asked: Asked) -> Path:
    """Where this watch keeps what it sees; it is made by whoever writes there first."""
    at = datetime.now().strftime("%Y%m%d-%H%M%S")
    return Path(os.path.realpath(asked.directory)) / f"{at}-{os.getpid()}"
