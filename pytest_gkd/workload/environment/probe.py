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
# Ray's processes end by themselves shortly after ray.shutdown() has returned.
GRACE_S = 2.0
# Its last line: the outermost frame is the code given to ``python -c``.
OUTERMOST = b'File "<string>", line 1 in <module>\n'


@dataclass(frozen=True)
class Outcome:
    """How the child ended.

    ``events`` are what it reported, ``exit_code`` is negative for a signal and None
    when we ended it because its time was up, after ``wall_s`` with ``cpu_s`` of
    processor time used by it. ``tail`` are the last lines it printed, ``left`` the
    names of its processes that outlived it by ``GRACE_S``. ``machine_busy`` is the
    share of all processor time (0 to 1) that was in use meanwhile, by anyone.
    ``waits`` is set for a child that we ended while it did nothing but wait.
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
        """What was begun and neither done nor failed; empty when nothing was."""
        begun = ""
        for event in self.events:
            if {"begin", "done", "failed"} & event.keys():
                begun = event.get("begin", "")
        return begun

    @property
    def phase(self) -> str:
        """What to call the moment that it is in, or ended in."""
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
    """One child in a session of its own, its events and its output in files.

    ``task`` is a function of ``children``, called with the file descriptor for
    events and ``arguments``. The child has this process's module search path.
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
                # -P: not even its first imports come from the working directory.
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
        """What it has reported; how it ends is not known yet."""
        return Outcome(files.read_json_lines(self.events_path), None, 0.0)

    def running(self) -> bool:
        """Whether the child itself is still there."""
        return self.process.poll() is None

    def family(self) -> list[psutil.Process]:
        """Every process of the child's session that is alive, wherever it moved."""
        members = []
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError):
                if os.getsid(process.pid) == self.process.pid and tree.alive(process):
                    members.append(process)
        return members

    def finish(self, stacks_s: float = 1.0) -> Outcome:
        """Gather the outcome; a child that still runs is made to print its stacks,
        which takes some milliseconds (on a busy machine more, at most ``stacks_s``
        seconds), and then ended with all its session."""
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
        """SIGUSR1 ends a process that has no handler yet, so look first."""
        if not procfs.catches(self.process.pid, signal.SIGUSR1):
            return
        os.kill(self.process.pid, signal.SIGUSR1)
        deadline = monotonic() + limit_s
        while monotonic() < deadline:
            if self.output_path.read_bytes().endswith(OUTERMOST):
                return
            time.sleep(0.01)

    def kill(self) -> list[str]:
        """End the child and its session; the names of what was still there."""
        names = []
        for member in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                names.append(member.name())
        tree.stop_session(self._leader, limit_s=5)
        # A process that waits inside the kernel cannot be ended by anyone.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=1)
        return names

    def _tail(self) -> Evidence:
        lines = self.output_path.read_text(errors="replace").splitlines()
        source = str(self.output_path)
        return tuple((source, number, line) for number, line in relevant_lines(lines))


def busy_share(before: Any, after: Any) -> float:
    """The share of processor time in use between two ``psutil.cpu_times()``."""
    spent = [late - early for early, late in zip(before, after, strict=True)]
    total = sum(spent)
    by_name = dict(zip(before._fields, spent, strict=True))
    idle = by_name["idle"] + by_name.get("iowait", 0.0)
    return 1 - idle / total if total > 0 else 0.0


def relevant_lines(lines: Sequence[str]) -> list[tuple[int, str]]:
    """The lines of a child's output that matter, with their numbers from 1.

    Of a stack that faulthandler printed these are its innermost frames, which come
    first, without the import system's own; otherwise the last lines.
    """
    numbered = [
        (number, line)
        for number, line in enumerate(lines, 1)
        if line.strip() and "<frozen importlib" not in line
    ]
    starts = ("Current thread", "Fatal Python error")
    heads = [n for n, (_, line) in enumerate(numbered) if line.startswith(starts)]
    # The error's line goes before its stack; of several stacks the last counts.
    start = heads[-1] if heads else max(0, len(numbered) - TAIL_LINES)
    if len(heads) > 1 and numbered[heads[-2]][1].startswith("Fatal"):
        start = heads[-2]
    return numbered[start : start + TAIL_LINES]
