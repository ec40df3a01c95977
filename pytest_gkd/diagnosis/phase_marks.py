"""What a program's own marks (``pytest_gkd.phase``) say: which phase, since when.

They are the program's own statement, and override any other sign of a phase.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from pytest_gkd.diagnosis import log_phases
from pytest_gkd.diagnosis.patterns import Pattern
from pytest_gkd.marks import BEGIN, END, LATE, SIGN

_LINE = Pattern(re.escape(SIGN).encode() + rb"(?P<told>\{[^\r\n]+\})")
LONGEST = 4096  # limit of an atomic write (PIPE_BUF)
DEEPEST = 100
MOST = 10_000  # open phases: a malicious text may have more


@dataclass(frozen=True)
class Mark:
    """One line: a phase begins, ends or is late.

    ``at`` is the time that the program gives (seconds since 1970), ``place`` the byte
    offset in the text; ``who`` identifies process and thread.
    """

    name: str
    event: str
    who: tuple[Any, ...]
    at: float = 0.0
    place: int = 0
    error: str = ""
    timeout_s: float | None = None
    rank: int | None = None
    pid: int = 0

    @property
    def is_open(self) -> bool:
        """Whether it is not one that has ended."""
        return self.event != END

    @property
    def phase(self) -> str:
        """One of ``log_phases.PHASES``, or empty for a name that implies none."""
        plain = self.name.strip().lower().replace("_", "-").replace(" ", "-")
        if plain in log_phases.PHASES:
            return "" if plain == "unknown" else plain
        return log_phases.of_line(self.name.encode("utf-8", "replace"))


@dataclass
class Marks:
    """The phases that are open, as a log is read."""

    open: dict[tuple[Any, ...], list[Mark]] = field(default_factory=dict)
    failed: Mark | None = None

    def feed(self, text: bytes) -> list[Mark]:
        """Take more of the log, whole lines; returns the marks in it."""
        found = marks(text)
        for mark in found:
            if mark.event == BEGIN:
                self._begin(mark)
            elif mark.event == END and mark.who in self.open:
                self._close(mark)
        return found

    def _begin(self, mark: Mark) -> None:
        if mark.who not in self.open and mark.rank is not None:
            # A rank that was restarted: its previous process is gone.
            for who, stack in list(self.open.items()):
                if stack[-1].rank == mark.rank and stack[-1].pid != mark.pid:
                    del self.open[who]
        stack = self.open.setdefault(mark.who, [])
        if len(self.open) <= MOST and len(stack) < DEEPEST:
            stack.append(mark)
        if not stack:
            del self.open[mark.who]
        self.failed = None

    def _close(self, end: Mark) -> None:
        # asyncio's tasks share a thread, so the last begun need not end first.
        stack = self.open[end.who]
        at = next(
            (i for i in reversed(range(len(stack))) if stack[i].name == end.name), None
        )
        if at is not None:
            del stack[at]
        if not stack:
            del self.open[end.who]
        if end.error and self.failed is None:
            self.failed = end  # the innermost ends first

    @property
    def innermost(self) -> Mark | None:
        """The phase that most processes are in; without any, the one that failed."""
        inner = [stack[-1] for stack in self.open.values()]
        if not inner:
            return self.failed
        names = Counter(mark.name for mark in inner)
        most = max(names.values())
        return max(
            (mark for mark in inner if names[mark.name] == most),
            key=lambda mark: mark.place,
        )


def marks(text: bytes) -> list[Mark]:
    """All marks of a text, in order; malformed ones are skipped."""
    found = []
    for line in _LINE.finditer(text):
        told = line[b"told"][:LONGEST]
        try:
            # Text that another process or line has appended does not count.
            one, _ = json.JSONDecoder().raw_decode(told.decode("utf-8", "replace"))
            mark = _mark(one, line.start())
        except (ValueError, TypeError, RecursionError):
            continue
        if mark is not None:
            found.append(mark)
    return found


def _mark(told: Any, place: int) -> Mark | None:
    name, event = told.get("phase"), told.get("event")
    if not isinstance(name, str) or not name or event not in (BEGIN, END, LATE):
        return None
    pid, rank = told.get("pid"), told.get("rank")
    limit, error = told.get("timeout_s"), told.get("error")
    return Mark(
        name[:100],
        event,
        (str(pid), str(rank), str(told.get("thread"))),
        float(told.get("t") or 0.0),
        place,
        error if isinstance(error, str) else "",
        float(limit) if isinstance(limit, (int, float)) else None,
        rank if isinstance(rank, int) else None,
        pid if isinstance(pid, int) else 0,
    )


def at_end(text: bytes) -> Mark | None:
    """The marked phase that a log ends in, or that an exception ended last."""
    if SIGN.encode() not in text:
        return None
    whole = Marks()
    whole.feed(text)
    return whole.innermost
