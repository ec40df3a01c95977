"""How far a job has come, told by its output as it comes, in constant memory."""

from __future__ import annotations

import re
import statistics
from collections import deque
from dataclasses import replace

from ahocorasick_rs import BytesAhoCorasick

from pytest_gkd.diagnosis import log_phases, logs, phase_marks
from pytest_gkd.diagnosis.metrics.roles import role
from pytest_gkd.diagnosis.metrics.series import MARKERS, Collector
from pytest_gkd.marks import END, LATE
from pytest_gkd.watch.samples import Point, Progress

# A line without an end grows no longer than this; a progress bar is such a line.
LONGEST = 1 << 15
# What tells which kind of job it is: its first output, and its last.
HEAD, TAIL = 1 << 16, 1 << 16
# So many of the last steps tell what a step takes.
STEPS = 50
SHOWN = 60
_NUMBERED = re.compile(rb"(?i)(?:global_)?step|iter|epoch")
_SHOWN = ("reward", "loss", "policy loss", "validation loss")


class Follower:
    """Takes a job's output in order and knows how far the job has come.

    ``late`` is the last marked phase that took longer than its program allows.
    ``longest_s`` is the longest silence between two parts of output since the second
    step was made, ``silences`` the longest in each phase.
    """

    def __init__(self) -> None:
        self._metrics = Collector()
        self._automaton = BytesAhoCorasick(MARKERS)
        self._head = self._tail = self._open = b""
        self._bytes = self._lines = 0
        self._counted: int | None = None
        self._steps: deque[float] = deque(maxlen=STEPS)
        self._said_at = 0.0
        self.phases: dict[str, float] = {}
        self.silences: dict[str, float] = {}
        self.longest_s = 0.0
        self.steps_made = 0
        self._steps_since = False
        self._marks = phase_marks.Marks()
        self._marked = ""
        self.late: phase_marks.Mark | None = None
        self._trained = False
        self._progress = Progress()

    def feed(self, data: bytes, now: float) -> Progress:
        """Take more output, which came by ``now`` (``clock.monotonic()``)."""
        if not data:
            return self._progress
        self._hear(now)
        if len(self._head) < HEAD:
            self._head += data[: HEAD - len(self._head)]
        self._tail = (self._tail + data)[-TAIL:]
        text = self._open + data
        end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        whole, self._open = text[:end], text[end:][-LONGEST:]
        if whole:
            self._take(whole)
        # A bar that redraws itself is whole once the next begins; its text counts.
        last = next((x for x in reversed(text.splitlines()) if x.strip()), b"")
        step = self._metrics.last_step
        if step is None:
            step = self._counted
        self._step(step, now)
        self._phase(whole, now)
        self._bytes += len(whole)
        old, (metric, series) = self._progress, self._series()
        self._progress = Progress(
            phase=old.phase,
            phase_at=old.phase_at,
            step=old.step,
            total=self._metrics.total or None,
            step_at=old.step_at,
            step_s=self._pace(),
            steps_s=tuple(self._steps),
            metric=metric,
            series=series,
            last_line=last[-400:].decode("utf-8", "replace") if last else old.last_line,
            said_at=now,
            marked=bool(self._marked),
            trained_at=old.trained_at
            or (now if self._trained or self._metrics.trained else 0.0),
            finished=old.finished or log_phases.FINISHED.search(whole) is not None,
            failed=log_phases.FAILED.search(whole) is not None
            or (old.failed and not self._steps_since),
        )
        return self._progress

    def _hear(self, now: float) -> None:
        if self._said_at:
            silent_s = now - self._said_at
            phase = self._progress.phase
            self.silences[phase] = max(self.silences.get(phase, 0.0), silent_s)
            if self.steps_made > 1:
                self.longest_s = max(self.longest_s, silent_s)
        self._said_at = now

    def _take(self, whole: bytes) -> None:
        """The lines of metrics, and the steps of a log that numbers none."""
        done = 0
        for _, at, _ in self._automaton.find_matches_as_indexes(whole):
            if at < done:
                continue  # in the line that was taken last
            start = max(whole.rfind(b"\n", 0, at), whole.rfind(b"\r", 0, at)) + 1
            ends = (whole.find(mark, at) for mark in (b"\n", b"\r"))
            done = min(end for end in ends if end >= 0)
            number = self._lines + whole.count(b"\n", 0, start) + 1
            self._metrics.take(whole[start:done], number, self._bytes + start)
        self._lines += whole.count(b"\n")
        made = [found[0] for found in log_phases.STEP.finditer(whole)]
        if made:
            self._counted = (self._counted or 0) + len(made)
        # With a number, its metrics decide: verl's step 0 is a validation.
        self._trained |= any(_NUMBERED.match(one) is None for one in made)

    def _step(self, step: int | None, now: float) -> None:
        old = self._progress
        self._steps_since = False
        if step is None or step == old.step:
            return
        self._steps_since = True
        if old.step is not None and step > old.step and old.step_at:
            each = (now - old.step_at) / (step - old.step)
            self._steps.extend([each] * min(step - old.step, STEPS))
            self.steps_made += step - old.step
        self._progress = replace(old, step=step, step_at=now)

    def _phase(self, whole: bytes, now: float) -> None:
        for mark in self._marks.feed(whole):
            self.late = mark if mark.event == LATE else self.late
            ends_well = mark.event == END and not mark.error
            self._trained |= ends_well and mark.phase == "training-step"
        entered = self._marks.innermost
        self._marked = entered.phase if entered and entered.is_open else ""
        phase = self._marked or log_phases.last_phase(whole)
        if phase in ("after-step", "first-step") or (
            self._steps_since and phase == "unknown"
        ):
            phase = logs.next_phase(self._head + self._tail)
        old = self._progress
        if phase != "unknown" and phase != old.phase:
            if old.phase:
                spent = now - old.phase_at
                self.phases[old.phase] = max(self.phases.get(old.phase, 0.0), spent)
            self._progress = replace(old, phase=phase, phase_at=now)
        elif self._steps_since:
            self._progress = replace(old, phase_at=now)

    def is_in(self, phase: str) -> None:
        """It is in another phase than was seen, until the next sign of one."""
        if not self._marked and phase in log_phases.PHASES and phase != "unknown":
            self._progress = replace(self._progress, phase=phase)

    def _pace(self) -> float | None:
        if self._steps:
            return statistics.median(self._steps)
        return self._metrics.pace_s

    def _series(self) -> tuple[str, tuple[Point, ...]]:
        every = self._metrics.series()
        for wanted in _SHOWN:
            for one in every:
                if role(one.name) == wanted and len(one) > 1:
                    last = one.since(max(0, len(one) - SHOWN)).finite()
                    pairs = zip(last.steps, last.values, strict=True)
                    return one.name, tuple(Point(*pair) for pair in pairs)
        return "", ()

    @property
    def head(self) -> bytes:
        """The first output."""
        return self._head

    @property
    def tail(self) -> bytes:
        """The last output."""
        return self._tail
