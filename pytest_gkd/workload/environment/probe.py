"""Runs, watches and ends a child that imports packages or starts Ray."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from pytest_gkd import files
from pytest_gkd.clock import monotonic
from pytest_gkd.processes import procfs, tree
from pytest_gkd.stage_api import Evidence
from pytest_gkd.workload import exit_reasons

TAIL_LINES = 6
# Ray's processes exit by themselves shortly after ray.shutdown() has returned.
GRACE_S = 2.0
# Its last line: the outermost frame is the code given to ``python -c``.
OUTERMOST = b'File "<string>", line 1 in <module>\n'


@dataclass(frozen=True)
class Outcome:
    """How the child ended.

    ``events`` are what it reported; ``exit_code`` is negative for a signal and None if
    we killed it because its time was up, after ``wall_s`` in which it used ``cpu_s`` of
    CPU time. ``tail`` holds the last lines it printed, ``left`` the names of its
    processes that outlived it by ``GRACE_S``. ``machine_busy`` is the share of the
    machine's CPU time (0 to 1) used in that period, by anyone. ``waits`` is set for a
    child that we killed while it did nothing but wait.
    """

    events: tuple[dict[str, Any], ...]
    exit_code: int | None
    wall_s: float
    cpu_s: float = 0.0
    tail: Evidence = ()
    left: tuple[str, ...] = ()
    machine_busy: float = 0.0
    waits: bool = False

    @property
    def doing(self) -> str:
        """The step that began and has neither finished nor failed; empty if there is
        none."""
        begun = ""
        for event in self.events:
            if {"begin", "done", "failed"} & event.keys():
                begun = event.get("begin", "")
        return begun

    @property
    def phase(self) -> str:
        """A name for the step it is in, or ended in."""
        return self.doing or ("ending Python" if self.events else "starting Python")

    @property
    def importing_s(self) -> float:
        """How long its imports have taken so far, in seconds."""
        return max((event.get("importing", 0.0) for event in self.events), default=0.0)

    @property
    def complete(self) -> bool:
        """Whether it reported its end, which an exit status of 0 does not prove."""
        return any("end" in event for event in self.events)

    def found(self, key: str) -> Any:
        """What an event reported under ``key``, or None."""
        return next((event[key] for event in self.events if key in event), None)


@dataclass
class Probe:
    """One child in its own session, with its events and output in files.

    ``task`` is a function of ``children``, called with the file descriptor for events
    and ``arguments``. The child gets this process's module search path.
    """

    task: str
    arguments: Sequence[Any]
    directory: Path
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def __post_init__(self) -> None:
        self.events_path = self.directory / f"{self.task}.jsonl"
        self.output_path = self.directory / f"{self.task}.txt"
        code = (
            "import json, sys; path, descriptor, arguments = json.loads(sys.argv[1]); "
            "sys.path[:] = path; from pytest_gkd.workload.environment import children; "
            f"children.{self.task}(descriptor, *arguments)"
        )
        self._began = monotonic()
        self._machine = psutil.cpu_times()
        with (
            self.events_path.open("wb") as events,
            self.output_path.open("wb") as output,
        ):
            arguments = [sys.path, events.fileno(), list(self.arguments)]
            self.process = subprocess.Popen(
                # -P: not even its first imports may come from the working directory.
                [sys.executable, "-P", "-c", code, json.dumps(arguments)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(self.environ),
                pass_fds=(events.fileno(),),
                start_new_session=True,
            )
        self._leader = tree.leader(self.process.pid)

    def so_far(self) -> Outcome:
        """Its reports so far; how it ends is not yet known."""
        return Outcome(files.read_json_lines(self.events_path), None, 0.0)

    def running(self) -> bool:
        """Whether the child itself is still alive."""
        return self.process.poll() is None

    def family(self) -> list[psutil.Process]:
        """Every live process of the child's session, wherever it moved."""
        members = []
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError):
                if os.getsid(process.pid) == self.process.pid and tree.alive(process):
                    members.append(process)
        return members

    def finish(self, stacks_s: float = 1.0) -> Outcome:
        """Collect the outcome; a child still running is made to dump its stacks, which
        takes milliseconds (longer on a busy machine, at most ``stacks_s`` seconds), and
        then killed with its whole session."""
        code: int | None = self.process.poll()
        used, waits = 0.0, False
        if code is None:
            used, waits = self._used_cpu_s(), exit_reasons.only_wait(self.family)
            self._ask_for_stacks(stacks_s)
        wall_s = monotonic() - self._began
        busy = busy_share(self._machine, psutil.cpu_times())
        if code is not None:
            psutil.wait_procs(self.family(), timeout=GRACE_S)
        there = tuple(self.kill())
        left = there if code is not None else ()
        events, tail = self.so_far().events, self._tail()
        return Outcome(events, code, wall_s, used, tail, left, busy, waits)

    def _used_cpu_s(self) -> float:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = psutil.Process(self.process.pid).cpu_times()
            return float(times.user + times.system)
        return 0.0

    def _ask_for_stacks(self, limit_s: float) -> None:
        """SIGUSR1 kills a process that has no handler yet, so check first."""
        if not procfs.catches(self.process.pid, signal.SIGUSR1):
            return
        os.kill(self.process.pid, signal.SIGUSR1)
        deadline = monotonic() + limit_s
        while monotonic() < deadline:
            if self.output_path.read_bytes().endswith(OUTERMOST):
                return
            time.sleep(0.01)

    def kill(self) -> list[str]:
        """Kill the child and its session; returns the names of what was still alive."""
        names = []
        for member in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                names.append(member.name())
        tree.stop_session(self._leader, limit_s=5)
        # Nobody can kill a process in uninterruptible sleep.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=1)
        return names

    def _tail(self) -> Evidence:
        lines = self.output_path.read_text(errors="replace").splitlines()
        source = str(self.output_path)
        return tuple((source, number, line) for number, line in relevant_lines(lines))


def busy_share(before: Any, after: Any) -> float:
    """The share of CPU time in use between two ``psutil.cpu_times()``."""
    spent = [late - early for early, late in zip(before, after, strict=True)]
    total = sum(spent)
    by_name = dict(zip(before._fields, spent, strict=True))
    idle = by_name["idle"] + by_name.get("iowait", 0.0)
    return 1 - idle / total if total > 0 else 0.0


def relevant_lines(lines: Sequence[str]) -> list[tuple[int, str]]:
    """The lines of a child's output that matter, with their numbers from 1.

    For a faulthandler stack dump these are its innermost frames, which come first,
    without the import system's own; otherwise the last lines.
    """
    numbered = [
        (number, line)
        for number, line in enumerate(lines, 1)
        if line.strip() and "<frozen importlib" not in line
    ]
    heads = [
        n
        for n, (_, line) in enumerate(numbered)
        if line.startswith(("Current thread", "Fatal Python error"))
    ]
    # The error line precedes its stack; of several stacks the last counts.
    start = heads[-1] if heads else max(0, len(numbered) - TAIL_LINES)
    if len(heads) > 1 and numbered[heads[-2]][1].startswith("Fatal"):
        start = heads[-2]
    return numbered[start : start + TAIL_LINES]
