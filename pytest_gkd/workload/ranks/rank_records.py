"""What is known about each rank, from its marks, log, process and exit."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from pytest_gkd import files
from pytest_gkd.workload.ranks.rank_plan import (
    ENTERED,
    FINISHED,
    JOINED,
    RAISED,
    RankPlan,
)

TAIL_LINES = 40


@dataclass(frozen=True)
class RankRecord:
    """What is known about one rank when its run is judged.

    ``code`` is the exit code, negative for a signal, None while it ran; ``ended_at``
    and the marks' ``t`` are on one monotonic clock (seconds). ``status`` is psutil's
    process status, empty if it had ended.
    """

    rank: int
    pid: int | None = None
    code: int | None = None
    ended_at: float | None = None
    status: str = ""
    marks: tuple[Mapping[str, Any], ...] = ()
    log: Path = Path()
    log_tail: tuple[tuple[int, str], ...] = ()

    @property
    def is_stopped(self) -> bool:
        """Whether a signal had stopped it."""
        return self.status == psutil.STATUS_STOPPED

    @property
    def joined(self) -> bool:
        """Whether it was ready for collectives."""
        return any(mark["what"] == JOINED for mark in self.marks)

    @property
    def found(self) -> Mapping[str, Any] | None:
        """Its findings, if it ran to completion."""
        return self._last(FINISHED)

    @property
    def raised(self) -> Mapping[str, Any] | None:
        """Where and with which text it failed, if it could report that."""
        return self._last(RAISED)

    @property
    def entered(self) -> int:
        """How many operations it has entered."""
        return sum(mark["what"] == ENTERED for mark in self.marks)

    @property
    def operation(self) -> str:
        """The operation it entered last, or how far it got before any."""
        last = self._last(ENTERED)
        if last is not None:
            return str(last["op"])
        if self.pid is None:
            return "nothing: it was never started"
        return "the rendezvous"

    def _last(self, what: str) -> Mapping[str, Any] | None:
        return next((m for m in reversed(self.marks) if m["what"] == what), None)


@dataclass(frozen=True)
class RankRun:
    """One run of all ranks, completed or aborted.

    ``fork_error`` is set if a rank could not be started, ``launcher_error`` if the
    launcher ended early or was not ready in time; ``host_lost`` then is the pid of the
    host, if that is what ended while ranks ran. ``waited_s`` counts from the request.
    ``import_stuck`` says that the launcher's import of torch did nothing but wait.
    """

    plan: RankPlan
    records: tuple[RankRecord, ...]
    started_at: float
    waited_s: float
    import_s: float | None = None
    fork_error: str = ""
    launcher_error: str = ""
    host_lost: int | None = None
    import_stuck: bool = False


@dataclass
class Watched:
    """What the host has reported so far through the pipe ``events``."""

    plan: RankPlan
    events: int
    pids: dict[int, int] = field(default_factory=dict)
    codes: dict[int, int] = field(default_factory=dict)
    ends: dict[int, float] = field(default_factory=dict)
    host_pid: int | None = None
    import_s: float | None = None
    fork_error: str = ""
    forked: bool = False
    closed: bool = False
    rest: bytes = b""

    def read(self) -> None:
        chunk = os.read(self.events, 1 << 16)
        self.closed = not chunk
        *lines, self.rest = (self.rest + chunk).split(b"\n")
        for line in lines:
            self._take(json.loads(line))

    def _take(self, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        if kind == "ready":
            self.host_pid, self.import_s = event["pid"], event["import_s"]
        elif kind == "started":
            self.pids[event["rank"]] = event["pid"]
        elif kind == "ended":
            self.codes[event["rank"]] = event["code"]
            self.ends[event["rank"]] = event["ended_at"]
        elif kind == "forked":
            self.forked = True
        elif kind == "fork-failed":
            self.fork_error = f"rank {event['rank']}: {event['error']}"

    def progress(self) -> str:
        if self.host_pid is None:
            return "importing torch in the launcher"
        marks = files.read_json_lines(self.plan.file("marks", 0))
        if not marks:
            return f"starting {self.plan.world_size} ranks"
        return f"rank 0: {marks[-1].get('op', marks[-1]['what'])}"

    def records(self) -> tuple[RankRecord, ...]:
        return tuple(map(self._record, range(self.plan.world_size)))

    def _record(self, rank: int) -> RankRecord:
        pid, code = self.pids.get(rank), self.codes.get(rank)
        log = self.plan.file("log", rank)
        return RankRecord(
            rank,
            pid,
            code,
            self.ends.get(rank),
            _status(pid) if pid is not None and code is None else "",
            files.read_json_lines(self.plan.file("marks", rank)),
            log,
            read_tail(log),
        )


def read_tail(path: Path) -> tuple[tuple[int, str], ...]:
    """The last lines of a log, with their numbers from 1; none if there is no file."""
    text = path.read_text("utf-8", "replace") if path.exists() else ""
    return tuple(enumerate(text.splitlines(), 1))[-TAIL_LINES:]


def _status(pid: int) -> str:
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return ""
