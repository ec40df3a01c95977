"""The process tree of a run: adopt it, list it, stop all of it, name how it ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import psutil

from pytest_gkd import sanitize
from pytest_gkd.clock import monotonic
from pytest_gkd.processes import cgroup, procfs
from pytest_gkd.processes.procfs import (
    MARK,
    STORM_LIMITS,
    THEIRS,
    TRACKER,
    TRACKER_GRACE_S,
)

PR_SET_CHILD_SUBREAPER = 36
PR_SET_PDEATHSIG = 1

ORPHAN_GRACE_S = 0.5
STILL_WALKS = 3


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
    """Every process below ``pid``, the oldest first; empty when it is gone."""
    return _below(pid, _table())


def children(pid: int) -> list[psutil.Process]:
    """The processes directly below ``pid``."""
    table = _table()
    return _below(pid, {s.pid: s for s in table.values() if s.ppid == pid})


def _table() -> dict[int, procfs.Stat]:
    # psutil's own walk stops at the first process that hides (proc(5), hidepid=1).
    found = (procfs.stat(pid) for pid in procfs.pids())
    return {s.pid: s for s in found if s is not None}


def _below(pid: int, table: dict[int, procfs.Stat]) -> list[psutil.Process]:
    pids = procfs.below([pid], table) - {pid}
    oldest_first = sorted(pids, key=lambda number: (table[number].start, number))
    return [found for number in oldest_first if (found := _process(number))]


def is_dead(pid: int, start: int | None = None) -> bool:
    """Gone, or a zombie, or another process by now (see ``stop`` for ``start``)."""
    found = _this(pid, start)
    return found is None or not alive(found)


def describe(process: psutil.Process) -> str:
    """``pid command`` in one line of at most 100 characters."""
    try:
        command = " ".join(process.cmdline()) or process.name()
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        command = "(gone)"
    return f"{process.pid} {sanitize.line(command)}"[:100]


def is_tracker(process: psutil.Process) -> bool:
    """Whether this is multiprocessing's resource tracker."""
    try:
        return any(TRACKER in part for part in process.cmdline())
    except psutil.Error:
        return False


def is_plugins(s: procfs.Stat) -> bool:
    """Whether a plugin or a conftest.py has started it, in this process.

    A worker leads a session of its own, and marks what it starts. What has left this
    process's session and wiped its environment is taken for a worker's orphan.
    """
    mark = procfs.own_mark()
    if s.ppid != os.getpid():
        return False
    if s.session == os.getsid(0):
        return not procfs.carries(s.pid, MARK, mark)
    return bool(mark) and procfs.carries(s.pid, MARK, mark + THEIRS)


def is_child(s: procfs.Stat) -> bool:
    """Whether this process has started it; also a worker that has yet to begin."""
    is_here = s.ppid == os.getpid() and s.session == os.getsid(0)
    return is_here or is_plugins(s)


def of_run(spare: Collection[int]) -> list[psutil.Process]:
    """What lives below this process and is neither in ``spare`` nor the plugins'.

    Nor what is theirs (see ``stop``).
    """
    spared = _Walk(None, None, spare, is_plugins).spared(_table())
    return [p for p in descendants(os.getpid()) if p.pid not in spared and alive(p)]


def alive(process: psutil.Process) -> bool:
    """Running, whatever its state; a zombie is not. One that hides its state is."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def stop(
    pid: int,
    *,
    itself: bool,
    start: int | None = None,
    spare: Collection[int] = (),
    own: Callable[[procfs.Stat], bool] | None = None,
    limit_s: float = 10.0,
) -> tuple[list[str], list[str]]:
    """Kill everything below ``pid`` (and ``pid`` too where ``itself``).

    All are stopped first, ``pid`` too unless it is this process, and looked for again
    until no new one turns up in several walks, so that one that forks and exits cannot
    outrun them. A worker's control group, where it has one, is frozen meanwhile; it is
    looked into also when ``pid`` itself is gone, which it is too where another process
    has its pid by now: one that did not begin at ``start`` (see ``procfs.Stat``).
    Processes whose pid is in ``spare`` are left alone, with all that is theirs (see
    ``procfs.owned``); so are those for which ``own`` is true (see ``is_plugins``).
    Returns a line for each descendant that was ended and for each that survived
    ``limit_s`` seconds (to stop them all may take longer), or that may not be
    signalled: one of another user's, such as what sudo has started.
    """
    group = cgroup.of(procfs.own_mark(), pid)
    root = _this(pid, start)
    if root is None and group is None:
        return [], []
    if root is not None and pid != os.getpid():
        _signal(root, signal.SIGSTOP)
    deadline = monotonic() + limit_s
    stopped_by = monotonic() + STORM_LIMITS * limit_s
    ended: dict[int, str] = {}
    trackers: dict[int, psutil.Process] = {}
    killed: dict[int, psutil.Process] = {}
    refused: dict[int, psutil.Process] = {}
    walk = _Walk(None if root is None else pid, group, spare, own)
    with cgroup.frozen(group):
        while monotonic() < deadline and not walk.is_over:
            frozen = _freeze(walk, killed, trackers, refused, stopped_by)
            lines = {process.pid: describe(process) for process in frozen.values()}
            refused |= {
                number: process
                for number, process in frozen.items()
                if not _signal(process, signal.SIGKILL)
            }
            for number in frozen.keys() - refused:
                killed[number] = frozen[number]
                ended[number] = lines[number]
            # One that was amid a fork when it was stopped shows its child only now.
            _await_end(frozen.values(), deadline)
    orphans = [p.pid for p in walk.now() if p.pid not in refused]
    if root is not None and itself and not _signal(root, signal.SIGKILL):
        refused[pid] = root
    for process in trackers.values():
        _signal(process, signal.SIGCONT)
    _await_end(trackers.values(), monotonic() + TRACKER_GRACE_S)
    for process in trackers.values():
        _signal(process, signal.SIGKILL)
    left = _await_end([*killed.values(), *trackers.values()], deadline)
    if root is not None and itself and pid not in refused:
        left += _await_end([root], deadline, mine=False)
    if itself or pid == os.getpid():
        _reap_orphans([*orphans, *killed])
    if group is not None and itself:
        cgroup.remove(group)
    survived = [f"{describe(p)} ({_state(p)})" for p in left]
    for process in left:
        ended.pop(process.pid, None)
    if not walk.is_over and not left:
        survived.append(f"what forks and exits below {pid} faster than it can be ended")
    return [*ended.values()], survived + [
        f"{describe(p)} (it belongs to another user, uid {procfs.user(number)})"
        for number, p in refused.items()
        if alive(p)
    ]


class _Walk:
    """Looks below a process, if it lives, and into its control group, again and again.

    Over when several walks in a row have shown no pid that is new: a chain of processes
    that each fork and exit may never be seen alive, but leaves its dead. These tell the
    process group, all of which a signal stops at once, with what it forks just now.
    """

    def __init__(
        self,
        pid: int | None,
        group: Path | None,
        spare: Collection[int],
        own: Callable[[procfs.Stat], bool] | None,
    ) -> None:
        self._roots = set() if pid is None else {pid}
        self._group = group
        self._spared = {(s.pid, s.start) for n in spare if (s := procfs.stat(n))}
        self._own = own
        self._seen: set[int] = set()
        self._still = 0

    @property
    def is_over(self) -> bool:
        return self._still >= STILL_WALKS

    def now(self) -> list[psutil.Process]:
        everything = _table()
        spared = self.spared(everything)
        table = {n: s for n, s in everything.items() if n not in spared}
        found = [process for root in self._roots for process in _below(root, table)]
        pids = {process.pid for process in found}
        if self._group is not None:
            others = spared | self._roots | {os.getpid()}
            more = {*cgroup.members(self._group)} - pids - others
            found += [process for n in more if (process := _process(n))]
            pids |= more
        self._stop_groups(pids, everything)
        self._still = 0 if pids - self._seen else self._still + 1
        self._seen |= pids
        return found

    def spared(self, table: dict[int, procfs.Stat]) -> set[int]:
        """What is spared, and all of theirs that any walk has seen to be so."""
        known = {s.pid for s in table.values() if (s.pid, s.start) in self._spared}
        if self._own is not None:
            known |= {s.pid for s in table.values() if self._own(s)}
        if not known:
            return known
        # A dead worker may be named too, and what it left is not spared.
        living = {n: s for n, s in table.items() if s.state not in procfs.DEAD}
        spared = known | procfs.owned(known, living)
        self._spared |= {(n, table[n].start) for n in spared}
        return spared

    def _stop_groups(self, pids: set[int], table: dict[int, procfs.Stat]) -> None:
        """Those that nobody else is in; the process itself is stopped already."""
        stopped = pids | (self._roots - {os.getpid()})
        others = {s.group for n, s in table.items() if n not in stopped}
        for group in {table[n].group for n in pids & table.keys()} - others:
            # Gone, or another user's: each process is tried by itself too.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGSTOP)


def _freeze(
    walk: _Walk,
    known: Collection[int],
    trackers: dict[int, psutil.Process],
    refused: dict[int, psutil.Process],
    deadline: float,
) -> dict[int, psutil.Process]:
    """Stop everything that a walk finds and that is not known; trackers are set aside.

    So are those that may not be signalled.
    """
    frozen: dict[int, psutil.Process] = {}
    while monotonic() < deadline:
        seen = {*frozen, *known, *trackers, *refused}
        new = [p for p in walk.now() if p.pid not in seen and alive(p)]
        if not new:
            break
        for process in new:
            if is_tracker(process):
                trackers[process.pid] = process
            elif _signal(process, signal.SIGSTOP):
                frozen[process.pid] = process
            else:
                refused[process.pid] = process
    return frozen


def _await_end(
    processes: Iterable[psutil.Process], deadline: float, *, mine: bool = True
) -> list[psutil.Process]:
    left = list(processes)
    while True:
        for process in left if mine else ():
            reap(process.pid)
        left = [process for process in left if alive(process)]
        if not left or monotonic() > deadline:
            return left
        time.sleep(0.005)


def _reap_orphans(pids: list[int]) -> None:
    """Reap zombies whose parents were just killed.

    They become children of this process only when a parent's last thread is gone.
    """
    deadline = monotonic() + ORPHAN_GRACE_S
    while pids and monotonic() < deadline:
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


def _this(pid: int, start: int | None) -> psutil.Process | None:
    """The process that began at ``start``, if that is told and it is still there."""
    found = _process(pid)
    # Only now: what psutil took hold of may have been another one already.
    here = procfs.stat(pid)
    if start is not None and (here is None or here.start != start):
        return None
    return found


def _signal(process: psutil.Process, number: int) -> bool:
    """Signal it; False where that is not allowed."""
    # psutil compares the start time first: a reused pid is never hit. One that ended
    # meanwhile is what we want.
    with contextlib.suppress(psutil.NoSuchProcess):
        try:
            process.send_signal(number)
        except psutil.AccessDenied:
            return False
    return True


def _state(process: psutil.Process) -> str:
    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return "gone"
    except psutil.AccessDenied:
        return "its state cannot be read"


def pause(pid: int, start: int | None) -> None:
    """Stop one process by a signal, for the time being; where that is allowed.

    Not another one that has its pid by now (see ``stop`` for ``start``).
    """
    found = _this(pid, start)
    if found is not None:
        _signal(found, signal.SIGSTOP)


def resume(pid: int, start: int | None) -> None:
    """Let a process go on that ``pause`` has stopped."""
    found = _this(pid, start)
    if found is not None:
        _signal(found, signal.SIGCONT)


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
