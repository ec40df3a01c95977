"""A log as it is printed: its clock, its Ray prefix, its bars, and how it ends.

``named`` gives a record the names of a framework.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from metric_loops import Plan, Record
from tqdm import tqdm  # type: ignore[import-untyped]

CYAN, OFF = "\x1b[36m", "\x1b[0m"


@dataclass
class Style:
    """How one log looks: ``every`` steps a line, ``end`` is done, cut or midline."""

    every: int = 1
    end: str = "done"
    ray: bool = False
    colours: bool = False
    numpy: bool = False
    noise: float = 0.05
    old: bool = False
    first: str = ""
    utc: str = "2026-11-20 08:00:00"


class Page:
    """The text of a log as it grows, with the clock of the run."""

    def __init__(self, plan: Plan, style: Style, records: list[Record]) -> None:
        self.plan, self.style, self.records = plan, style, records
        self.random = random.Random(plan.seed)
        self.now = datetime.fromisoformat(style.utc)
        self.began, self.parts = self.now, list[str]()
        self.pid = 4000 + plan.seed % 9000 * 7
        self.stamp = "%Y-%m-%d %H:%M:%S"
        self.actor = "TaskRunner"
        if style.first:
            self.say(style.first)

    def say(self, text: str = "", end: str = "\n") -> None:
        """A line, behind the name of its Ray actor where the style has it."""
        if self.style.ray:
            on, off = (CYAN, OFF) if self.style.colours else ("", "")
            head = f"{on}({self.actor} pid={self.pid}){off} "
            text = "\n".join(head + line for line in text.split("\n"))
        self.parts.append(text + end)

    def time(self, stamp: str = "") -> str:
        """The clock; ``%f`` is milliseconds here, as in Python's logging."""
        text = (stamp or self.stamp).replace(
            "%f", f"{self.now.microsecond // 1000:03d}"
        )
        return self.now.strftime(text)

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return (self.now - self.began).total_seconds()

    def bar(self, at: int, desc: str = "", total: int = 0, **more: Any) -> str:
        """tqdm's own meter."""
        made: str = tqdm.format_meter(
            at, total or self.plan.steps, self.elapsed, prefix=desc, ncols=90, **more
        )
        return made

    def steps(self) -> Iterator[Record]:
        """Every step that is logged, means over those between; the clock goes on."""
        window: list[Record] = []
        last = 0.0
        for record in self.records:
            self.now += timedelta(seconds=record["time/step"])
            if record["step"] <= last:
                window = []
                self.now += timedelta(seconds=190)
            last = record["step"]
            window.append(record)
            if record["step"] % self.style.every == 0:
                yield _mean(window)
                window = []

    def text(self) -> str:
        """All of it; a log that was cut ends in its last lines, or within one."""
        made = "".join(self.parts)
        if self.style.end == "midline":
            made = made[: len(made.rstrip()) - self.random.randrange(8, 60)]
        return made


def _mean(window: list[Record]) -> Record:
    """The last record with means of what a logger averages; seconds are summed up."""
    made = dict(window[-1])
    for name in made:
        if name in ("loss", "kl", "entropy") or name.startswith(
            ("reward/", "length/m")
        ):
            values = [one[name] for one in window if name in one]
            made[name] = sum(values) / len(values)
    made["time/all"] = sum(one["time/step"] for one in window) / len(window)
    for name in ("val/loss", "val/acc"):
        found = [one[name] for one in window if name in one]
        if found:
            made[name] = found[-1]
    return made


def named(record: Record, names: str) -> dict[str, float]:
    """``theirs=ours`` pairs, of those that the record has."""
    pairs = (one.split("=") for one in names.split())
    return {theirs: record[ours] for theirs, ours in pairs if ours in record}


def submitted(page: Page) -> None:
    """What `ray job submit` says at the end of a job."""
    if page.style.end == "done":
        page.parts.append("\n" + "-" * 42 + "\n")
        page.parts.append(
            "Job 'raysubmit_6kTzSp2QvCgWx1LB' succeeded\n" + "-" * 42 + "\n"
        )
