"""Tells a slow stage from a stuck one, by two looks at its process tree."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from pytest_gkd.clock import monotonic
from pytest_gkd.processes import gpus, resource_use, stacks
from pytest_gkd.processes.resource_use import Usage
from pytest_gkd.processes.stacks import Prepare, Stack

# A process tree whose threads only send heartbeats stays below these. An idle Ray (GCS,
# raylet, two agents) used 0.9 % of a core and 20 kB/s here; one CPU tick is 0.01 s.
IDLE_CPU = 0.02
IDLE_IO_BYTES_PER_S = 64 * 1024
IDLE_NETWORK_BYTES_PER_S = 8 * 1024
BUSY_CPU = 0.5

# A stage without any progress is ended early after this share of its budget, but never
# sooner than the lower limit (seconds) nor later than the upper one.
QUIET_SHARE = 0.2
QUIET_S = 20.0
QUIET_MOST_S = 60.0
LOOK_S = 1.0

WAITING = (psutil.STATUS_SLEEPING, psutil.STATUS_STOPPED)
COLLECTIVE = re.compile(r"distributed_c10d\.py|pynccl\w*\.py")


@dataclass(frozen=True)
class Look:
    """One look at a tree: its resource use so far, and each process's stacks."""

    usage: Usage
    stacks: tuple[Stack, ...]


# Looks at a tree now; its stacks go to a subdirectory of that name, if any is given.
Take = Callable[[str], Look]


@dataclass(frozen=True)
class Progress:
    """What two looks at one tree, ``window_s`` seconds apart, show.

    ``verdict`` is ``stuck`` (nothing moved), ``busy`` (it computes, but in the same
    place) or ``alive``. ``moved`` is a process's innermost frames then and now.
    """

    verdict: str
    window_s: float
    cpu_s: float
    io_bytes: int
    network_bytes: int
    processes: int
    stopped_pids: tuple[int, ...]
    moved: tuple[str, str] | None
    new_pids: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """As written to report.json."""
        shown = {"window_s": round(self.window_s, 1), "cpu_s": round(self.cpu_s, 2)}
        return {**asdict(self), **shown}

    def text(self) -> str:
        """The verdict and its evidence in words."""
        whose = "its process" if self.processes == 1 else f"{self.processes} processes"
        spent = f"{whose} used {self.cpu_s:.2f} s of CPU in {self.window_s:.1f} s"
        if self.verdict == "alive":
            parts = [spent]
            if self.io_bytes > IDLE_IO_BYTES_PER_S * self.window_s:
                parts.append(f"read and wrote {self.io_bytes / 1e6:.1f} MB")
            if self.moved:
                parts.append(f"went from {self.moved[0]} to {self.moved[1]}")
            if self.new_pids:
                parts.append(f"started {len(self.new_pids)} more")
            return f"slow, not stuck; still making progress: {', '.join(parts)}"
        held = ""
        if self.stopped_pids:
            pids = ", ".join(map(str, self.stopped_pids))
            held = f"; process {pids} is stopped by a signal (SIGSTOP)"
        word = "stuck" if self.verdict == "stuck" else "busy"
        return f"{word}: {spent} and was in the same place before and after{held}"


def look(pid: int, armed: Path, out: Path, prepare: Prepare) -> Look:
    """Look at the tree of ``pid`` now; see ``stacks.collect`` for the rest."""
    # Usage first: dumping stacks makes the processes run.
    usage = resource_use.read(pid, monotonic())
    return Look(usage, tuple(stacks.collect(pid, armed, out, prepare=prepare)))


def compare(first: Look, second: Look) -> Progress:
    """What happened between two looks."""
    was, now = first.usage, second.usage
    window_s = max(now.at - was.at, 1e-3)
    cpu_s = max(0.0, now.cpu_s - was.cpu_s)
    io_bytes = max(0, now.io_bytes - was.io_bytes)
    network_bytes = max(0, now.network_bytes - was.network_bytes)
    moved = _moved(first.stacks, second.stacks)
    new_pids = tuple(sorted(now.pids - was.pids))
    verdict = "alive"
    if moved is None and not new_pids and now.pids == was.pids:
        if cpu_s >= BUSY_CPU * window_s:
            verdict = "busy"
        elif (
            cpu_s <= IDLE_CPU * window_s
            and io_bytes <= IDLE_IO_BYTES_PER_S * window_s
            and network_bytes <= IDLE_NETWORK_BYTES_PER_S * window_s
        ):
            verdict = "stuck"
    return Progress(
        verdict,
        window_s,
        cpu_s,
        io_bytes,
        network_bytes,
        len(now.pids),
        tuple(sorted(now.stopped)),
        moved,
        new_pids,
    )


def _moved(
    first: tuple[Stack, ...], second: tuple[Stack, ...]
) -> tuple[str, str] | None:
    before = {stack.pid: stack for stack in first}
    for stack in second:
        old = before.get(stack.pid)
        if old is not None and _frames(old.text) != _frames(stack.text):
            was = stacks.innermost(old.text, stack.pid)
            now = stacks.innermost(stack.text, stack.pid)
            if was != now:
                return was, now
    return None


def _frames(text: str) -> list[str]:
    """The frames of either kind of dump, without what differs between dumps."""
    frames = re.findall(r"^ {2,}(?!Current)\S.*$", text, re.MULTILINE)
    return [frame.strip() for frame in frames] or text.splitlines()


class QuietWatch:
    """Cheaply watches one running stage for a standstill, and proves it.

    The main thread of the stage's process is checked every second. Only once it has not
    woken for half of ``window_s`` does ``take`` look at the whole tree, and again at
    the end of the window. Any wakeup in between restarts the wait.
    """

    def __init__(self, pid: int, budget_s: float, take: Take) -> None:
        self.window_s = max(QUIET_S, min(QUIET_MOST_S, QUIET_SHARE * budget_s))
        self._pid = pid
        self._take = take
        self._next = 0.0
        self._seen: object = None
        self._since = 0.0
        self._first: Look | None = None
        self.doubt = ""

    def is_due(self, now: float) -> bool:
        """Whether it is time to look again."""
        return now >= self._next

    def look(self, now: float, said: float) -> tuple[Progress, Look] | None:
        """Proof that the stage is stuck, with the second look; None without proof.

        ``said`` is when the stage last reported anything. ``doubt`` then says why an
        idle stage was not called stuck.
        """
        if not self.is_due(now):
            return None
        self._next = now + LOOK_S
        try:
            return self._look(now, said)
        except psutil.NoSuchProcess:
            return None  # it has ended

    def _look(self, now: float, said: float) -> tuple[Progress, Look] | None:
        status, switches = resource_use.main_thread(self._pid)
        if (status, switches, said) != self._seen or status not in WAITING:
            self._start_anew(now, (status, switches, said))
            return None
        quiet_s = now - self._since
        if self._first is None:
            if quiet_s >= self.window_s / 2:
                self._first = self._take("earlier")
                # Looking at it wakes it.
                self._seen = (*resource_use.main_thread(self._pid), said)
            return None
        if quiet_s < self.window_s:
            return None
        return self._prove(now)

    def _prove(self, now: float) -> tuple[Progress, Look] | None:
        assert self._first is not None
        self.doubt = resource_use.may_be_waiting(self._pid)
        # A rank that waits for the others keeps its GPU busy: NCCL's kernel spins.
        if not self.doubt and not _in_a_collective(self._first.stacks):
            self.doubt = gpus.at_work(self._first.usage.pids)
        if not self.doubt:
            second = self._take("")
            progress = compare(self._first, second)
            if progress.verdict == "stuck":
                return progress, second
        self._start_anew(now, None)
        return None

    def _start_anew(self, now: float, seen: object) -> None:
        self._seen, self._since, self._first = seen, now, None


def _in_a_collective(found: tuple[Stack, ...]) -> bool:
    """Whether a process is calling NCCL, by the files of torch and vLLM that do."""
    return any(COLLECTIVE.search(stack.text) for stack in found)
