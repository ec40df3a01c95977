"""The process tree of a run: adopt it, list it, stop all of it, name how it ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Collection, Iterable

import psutil

PR_SET_CHILD_SUBREAPER = 36
PR_SET_PDEATHSIG = 1

# multiprocessing's helper unlinks the shared memory that killed processes leave. It
# ends by itself once they are gone, so it gets a moment to do so.
TRACKER = "multiprocessing.resource_tracker"
TRACKER_GRACE_S = 1.0
ORPHAN_GRACE_S = 0.5


def become_subreaper() -> bool:
    """Make orphaned descendants children of this process, so that none is lost.

    Even a daemon that forked twice and wiped its environment then stays in the tree.
    False where the kernel has no such call (not Linux).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    prctl = getattr(libc, "prctl", None)
    return prctl is not None and prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it goes.

    It goes with the parent's *thread* that did so (prctl(2), PR_SET_PDEATHSIG); what
    this process has started lives on, which is why a guardian is the better way.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    prctl = getattr(libc, "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def descendants(pid: int) -> list[psutil.Process]:
    """Every process below ``pid``; empty when it is gone."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def children(pid: int) -> list[psutil.Process]:
    """The processes directly below ``pid``."""
    try:
        return psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return []


def is_dead(pid: int) -> bool:
    """Gone, or a zombie."""
    try:
        return not alive(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return True


def describe(process: psutil.Process) -> str:
    """``pid command`` in one line of at most 100 characters."""
    try:
        command = " ".join(process.cmdline()) or process.name()
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        command = "(gone)"
    return f"{process.pid} {' '.join(command.split())}"[:100]


def is_tracker(process: psutil.Process) -> bool:
    """Whether this is multiprocessing's resource tracker."""
    try:
        return any(TRACKER in part for part in process.cmdline())
    except psutil.Error:
        return False


def alive(process: psutil.Process) -> bool:
    """Running, whatever its state; a zombie is not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def stop(
    pid: int, *, itself: bool, spare: Collection[int] = (), limit_s: float = 10.0
) -> tuple[list[str], list[str]]:
    """Kill everything below ``pid`` (and ``pid`` too where ``itself``).

    All are stopped first, ``pid`` too unless it is this process, and looked for again
    until no new one turns up, so that a process that forks cannot outrun the walk.
    Processes whose pid is in ``spare`` are left alone. Returns a line for each
    descendant that was ended and for each that survived ``limit_s`` seconds.
    """
    root = _process(pid)
    if root is None:
        return [], []
    if pid != os.getpid():
        _signal(root, signal.SIGSTOP)
    deadline = time.monotonic() + limit_s
    ended: list[str] = []
    trackers: dict[int, psutil.Process] = {}
    killed: dict[int, psutil.Process] = {}
    while time.monotonic() < deadline:
        frozen = _freeze(pid, {*spare, *killed, *trackers}, trackers)
        if not frozen:
            break
        ended += [describe(process) for process in frozen.values()]
        for process in frozen.values():
            _signal(process, signal.SIGKILL)
        killed |= frozen
        # One that was amid a fork when it was stopped shows its child only now.
        _await_end(frozen.values(), deadline)
    orphans = [p.pid for p in descendants(pid) if p.pid not in spare]
    if itself:
        _signal(root, signal.SIGKILL)
    _await_end(trackers.values(), time.monotonic() + TRACKER_GRACE_S)
    for process in trackers.values():
        _signal(process, signal.SIGKILL)
    left = _await_end([*killed.values(), *trackers.values()], deadline)
    if itself:
        left += _await_end([root], deadline, mine=False)
    if itself or pid == os.getpid():
        _reap_orphans([*orphans, *killed])
    return ended, [f"{describe(p)} ({_state(p)})" for p in left]


def _freeze(
    pid: int, known: Collection[int], trackers: dict[int, psutil.Process]
) -> dict[int, psutil.Process]:
    """Stop everything below ``pid`` that is not known; trackers are set aside."""
    frozen: dict[int, psutil.Process] = {}
    while True:
        seen = {*frozen, *known, *trackers}
        new = [p for p in descendants(pid) if p.pid not in seen and alive(p)]
        if not new:
            return frozen
        for process in new:
            if is_tracker(process):
                trackers[process.pid] = process
            else:
                frozen[process.pid] = process
                _signal(process, signal.SIGSTOP)


def _await_end(
    processes: Iterable[psutil.Process], deadline: float, *, mine: bool = True
) -> list[psutil.Process]:
    left = list(processes)
    while True:
        for process in left if mine else ():
            reap(process.pid)
        left = [process for process in left if alive(process)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.005)


def _reap_orphans(pids: list[int]) -> None:
    """Reap zombies whose parents were just killed.

    They become children of this process only when a parent's last thread is gone.
    """
    deadline = time.monotonic() + ORPHAN_GRACE_S
    while pids and time.monotonic() < deadline:
        for pid in pids:
            reap(pid)
        pids = [pid for pid in pids if psutil.pid_exists(pid)]
        time.sleep(0.002)


def reap(pid: int) -> None:
    """Collect a dead child that was re-parented to us; others are not ours to reap."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def _signal(process: psutil.Process, number: int) -> None:
    # psutil compares the start time first: a reused pid is never hit. One that ended
    # meanwhile is what we want.
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def _state(process: psutil.Process) -> str:
    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return "gone"


def exit_name(returncode: int | None) -> str:
    """``signal SIGKILL`` for -9, ``exit code 1`` for 1, for people to read."""
    if returncode is None:
        return "ended without a status"
    if returncode < 0:
        try:
            return f"signal {signal.Signals(-returncode).name}"
        except ValueError:
            return f"signal {-returncode}"
    return f"exit code {returncode}"
