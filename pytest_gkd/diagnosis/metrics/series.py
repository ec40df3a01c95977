"""Collects what a run printed for each metric, step by step, in bounded memory."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field

from pytest_gkd.diagnosis.metrics.lines import Reading, Table, read
from pytest_gkd.diagnosis.metrics.roles import TRAINING, role
from pytest_gkd.diagnosis.patterns import Pattern
from pytest_gkd.language import marked

MOST_NAMES = 1000
MOST_POINTS = 20_000
# This many steps show that a run goes on.
GOES_ON = 5
# At most this many points per series are shown, and this many series.
SHOWN = 60
MOST_SHOWN = 40
# This many lines and bytes are read in order, and the end of the log. They are read
# before the scanner rebuilds its automaton, which then leaves MARKERS out.
MOST_LINES = 3_000
MOST_BYTES = 16 << 20
# In between, a block contributes this many bytes of metrics, from its first SAMPLED_OF
# bytes: every block, after SAMPLES of them every second, after twice as many every
# fourth, and so on.
SAMPLE = 4 << 10
SAMPLED_OF = 16 << 10
SAMPLES = 64
# Sampled series are thinned to this many values, evenly, and this many at the end.
EVENLY, AT_THE_END = 512, 64

# What a line of metrics contains: the scanner looks for these.
MARKERS: tuple[bytes, ...] = (b"loss", b"Loss", b"s/it", b"it/s", b"step:", b"step=")
MARKERS += (b'step":', b"step':")
MARKERS += (b"Step ", b"iteration ", b"reward", b" throughput: ", b"': '")
MARKERS += ("\u2022 ".encode(), "\u2502 ".encode())  # a bullet, a table's line
MARKERS += (b"step ", b"iter ", b"batch=", b"grad", b"throughput", b"/sec", b"tok/s")
MARKERS += ("\u2503 ".encode(), b"_requests_", b"MiB / ")  # another table's line
MARKERS += (b"per second", b"_return", b"SPS")
MARKERS += (b"entropy", b"_rew", b"_kl", b"perf/", b"memory.", b"Memory (")
MARKERS += ("\u635f\u5931".encode(), "\u5956\u52b1".encode())  # loss and reward

_PROCESS = Pattern(
    rb"^(?:\x1b\[[\d;]*m)*(?:\([\w.:]+ [^)]{0,60}\)|\[(?:[Rr]ank ?\d+|default\d+)\])"
)

# Settings that are named after a metric: kl_loss_coef, use_kl_loss.
_SETTING = re.compile(r"coef|weight|use_|_type|scale")


@dataclass
class Series:
    """One metric of one process: its ``values`` at its ``steps``, which increase.

    If the log gives no steps, a step counts the lines from 1. ``places`` are the line
    numbers and the byte offsets of the lines. ``counted`` says that the log gives no
    steps, ``by_line`` that steps are line numbers, of which not all were read,
    ``loose`` that its lines may be of different things: rows of a table that counts no
    steps, or layers, or samples.
    """

    name: str
    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)
    counted: bool = False
    by_line: bool = False
    loose: bool = False

    def __len__(self) -> int:
        return len(self.values)

    def add(self, step: int, value: float, place: tuple[int, int]) -> None:
        """Add a step's value; a run resumed from a checkpoint replaces later ones."""
        while self.steps and self.steps[-1] > step:
            self.drop_last()
        if self.steps and self.steps[-1] == step:
            self.drop_last()
        if len(self.values) >= MOST_POINTS:
            for kept in (self.steps, self.values, self.places):
                del kept[1:-1:2]
        self.steps.append(step)
        self.values.append(value)
        self.places.append(place)

    def drop_last(self) -> None:
        """Drop the last value."""
        for kept in (self.steps, self.values, self.places):
            kept.pop()

    @property
    def unit(self) -> str:
        """What its steps count: ``step``, ``logged value`` or ``line``."""
        counted = marked("logged value") if self.counted else "step"
        return marked("line") if self.by_line else counted

    def to_json(self) -> dict[str, object]:
        """At most SHOWN points, the last included; NaN and infinity become null."""
        stride = -(-len(self) // SHOWN) or 1
        shown = range((len(self) - 1) % stride, len(self), stride)
        points = [(self.steps[at], self.values[at]) for at in shown]
        return {
            "metric": self.name,
            "by": self.unit,
            "steps": [step for step, _ in points],
            "values": [one if math.isfinite(one) else None for _, one in points],
            "not_finite": [
                {"step": step, "value": str(one)}
                for step, one in points
                if not math.isfinite(one)
            ],
        }

    def evenly(self) -> Series:
        """About EVENLY of its values by place, its extremes and those at the end."""
        if len(self) <= EVENLY:
            return self
        finite = [at for at, one in enumerate(self.values) if math.isfinite(one)]
        extremes = {
            pick(finite, key=self.values.__getitem__) for pick in (min, max) if finite
        }
        end = len(self) - AT_THE_END
        start, last = self.places[0][1], self.places[end - 1][1]
        width = (last - start) / EVENLY or 1.0
        parts: dict[int, list[int]] = {}
        for at in range(end):
            parts.setdefault(int((self.places[at][1] - start) / width), []).append(at)
        kept = {part[len(part) // 2] for part in parts.values()}
        return self._only(sorted({*kept, *extremes, *range(end, len(self))}))

    def finite(self) -> Series:
        """The same without NaN and infinity."""
        kept = [at for at, value in enumerate(self.values) if math.isfinite(value)]
        return self._only(kept)

    def since(self, at: int) -> Series:
        """The same from an index on."""
        return self._only(range(at, len(self)))

    def _only(self, kept: Iterable[int]) -> Series:
        kept = list(kept)
        return Series(
            self.name,
            [self.steps[at] for at in kept],
            [self.values[at] for at in kept],
            [self.places[at] for at in kept],
            self.counted,
            self.by_line,
            self.loose,
        )


class Collector:
    """Takes those lines of a log that may hold metrics, in order.

    ``trained`` says that a training metric came with, or after, the number of its step;
    one without is as likely a line of the configuration (``kl_loss_coef: 0.001``).
    """

    markers = MARKERS

    def __init__(self) -> None:
        self.trained = False
        self._series: dict[tuple[bytes, str], Series] = {}
        self._step: dict[bytes, int] = {}
        self._lines = self._bytes = 0
        self._bar, self._own = Reading({}), 0
        self._table: Table | None = None
        self._sampled = self._passed = self._seen = self._seen_bytes = self._first = 0
        self.total = 0

    @property
    def full(self) -> bool:
        """Whether enough lines were read."""
        return self._lines >= MOST_LINES or self._bytes >= MOST_BYTES

    @property
    def follows(self) -> bool:
        """Whether the next line is wanted as well: a table's header came."""
        return self._table is not None

    @property
    def lines(self) -> tuple[int, int]:
        """How many lines of metrics were read, and about how many there are."""
        left = self._seen * self._passed / max(1, self._seen_bytes)
        return self._lines, max(self._lines, round(self._first + left))

    @property
    def sampled(self) -> bool:
        """Whether some lines were skipped."""
        return self._sampled > 0

    def pass_by(
        self, text: bytes, start: int, end: int, number: int, order: int
    ) -> None:
        """A part of a text after enough lines, of which some are read.

        It begins with line ``number``, at byte ``order`` of the source.
        """
        self._first = self._first or self._lines
        self._passed += end - start
        self._sampled += 1
        if self._sampled % (1 << (self._sampled // SAMPLES).bit_length()):
            return
        window = text[start : min(end, start + SAMPLED_OF)]
        self._seen_bytes += len(window)
        taken, at = 0, 0
        for line in window.split(b"\n")[:-1]:
            part = line[: line.find(b"\r") if b"\r" in line else len(line)]
            if self.follows or any(map(part.__contains__, self.markers)):
                self._seen += 1
                if taken < SAMPLE:
                    taken += len(part)
                    self.take(part, number, order + at)
            number += 1
            at += len(line) + 1

    def forget(self, order: int) -> None:
        """Drop what was sampled from this byte on, which is now read line by line."""
        for series in self._series.values():
            while series.places and series.places[-1][1] >= order:
                series.drop_last()
        self._series = {key: one for key, one in self._series.items() if len(one)}

    def close(self) -> None:
        """Finish; if lines were skipped, thin the rest evenly too."""
        if not self.sampled:
            return
        for key, series in self._series.items():
            one = series.evenly()
            if one.counted:
                one.steps, one.by_line = [line for line, _ in one.places], True
            self._series[key] = one

    def take(self, line: bytes, number: int, order: int) -> None:
        """Take a line, its number from 1, and its byte offset."""
        self._lines += 1
        self._bytes += len(line)
        process = _process(line)
        reading = self._row(line) or read(line)
        if self._is_of_another_bar(reading, process):
            return
        if reading.step is not None and (reading.total or self.total) >= self.total:
            self.total = reading.total or self.total
            self._step[process] = reading.step
        if process in self._step and not self.trained:
            self.trained = any(map(_of_a_step, reading.values))
        for name, value in reading.values.items():
            series = self._series.get((process, name))
            if series is None:
                if len(self._series) >= MOST_NAMES:
                    continue
                series = self._series[process, name] = Series(name)
            series.loose |= reading.loose
            step = reading.step
            if step is None:
                last = series.steps[-1] if series.steps else 0
                series.counted = process not in self._step
                step = max(self._step.get(process, 0), last + 1)
            series.add(step, value, (number, order))

    def _row(self, line: bytes) -> Reading | None:
        """The numbers of a table's row, if one is open; else a header may open one."""
        if self._table and (row := self._table.row(line)):
            return row
        self._table = Table.of(line)
        return Reading({}) if self._table else None

    def _is_of_another_bar(self, reading: Reading, process: bytes) -> bool:
        """Whether it is a bar, but not the one that advances with each step.

        The Trainer's evaluation bar looks like its training bar; a step's metrics are
        printed below the latter.
        """
        if "s/it" in reading.values and reading.step is not None:
            self._bar = reading
            return bool(self._own and reading.total) and reading.total != self._own
        made = any(role(name) in TRAINING for name in reading.values)
        if made and reading.step is None and self._bar.total and self._bar.step:
            if self._own != self._bar.total:
                self.total, self._step[process] = self._bar.total, self._bar.step
            self._own = self._bar.total
        return False

    @property
    def last_step(self) -> int | None:
        """The last step reported, by whichever process."""
        return max(self._step.values(), default=None)

    @property
    def works(self) -> bool:
        """Whether the log reported the metrics of several training steps."""
        return self.begun > 0

    @property
    def begun(self) -> int:
        """The byte where the second of several steps is reported; 0 if none is."""
        second = [
            one.places[1][1]
            for one in self._series.values()
            if len(one) > 2 and role(one.name) in TRAINING
        ]
        return min(second, default=0)

    @property
    def latest(self) -> int:
        """The byte where the last of several steps is reported; -1 if none is."""
        last = [
            one.places[-1][1]
            for one in self._series.values()
            if len(one) > 2 and role(one.name) in TRAINING
        ]
        return max(last, default=-1)

    @property
    def pace_s(self) -> float | None:
        """Median seconds of the last steps; None if no metric tells."""
        for one in self.series():
            last = one.finite().values[-20:]
            if last and role(one.name) == "step time" and not is_clock(one):
                pace = statistics.median(last)
                return pace if math.isfinite(pace) else None
        return None

    @property
    def finite_from(self) -> int:
        """The byte from which training goes on with finite numbers; -1 for none."""
        return self.went_on_from(GOES_ON)

    def went_on_from(self, steps: int) -> int:
        """The byte where the last ``steps`` training steps begin; -1 without any.

        The earliest over all processes and metrics; -1 also if a value is not finite.
        """
        first = []
        for one in self.current():
            if len(one) > 2 and role(one.name) in TRAINING:
                if not all(map(math.isfinite, one.values[-steps:])):
                    return -1
                first.append(one.places[-min(steps, len(one))][1])
        return min(first, default=-1)

    def current(self) -> list[Series]:
        """All series except those that a process started later has taken over."""
        begun: dict[str, int] = {}
        for one in self._series.values():
            if len(one) > 2:
                begun[one.name] = max(begun.get(one.name, 0), one.places[0][1])
        return [
            one for one in self.series() if one.places[-1][1] >= begun.get(one.name, 0)
        ]

    def shown(self) -> list[Series]:
        """Those of several steps that are judged, each name once, the longest first."""
        found: dict[str, Series] = {}
        for one in self.series():
            if len(one) > 2 and role(one.name) != "other":
                found.setdefault(one.name, one)
        return list(found.values())[:MOST_SHOWN]

    def series(self) -> list[Series]:
        """All series, the longest first."""
        return sorted(self._series.values(), key=len, reverse=True)


def is_clock(series: Series) -> bool:
    """Whether what is called a time tells how long the run takes so far.

    It only grows, each time by about as much as the first steps took.
    """
    values = series.values
    if role(series.name) not in {"step time", "part of the step"} or len(values) < 3:
        return False
    passed = [late - early for early, late in itertools.pairwise(values)]
    return min(passed) >= 0 and statistics.median(passed) > 0.2 * abs(values[0])


def _of_a_step(name: str) -> bool:
    """Whether a metric is one that a training step yields, not a setting of one."""
    return role(name) in TRAINING and _SETTING.search(name.lower()) is None


def _process(line: bytes) -> bytes:
    found = _PROCESS.search(line)
    return found[0] if found else b""
