"""The process tree of a run: lists it, kills all of it, names how a process ended."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection

import psutil

from pytest_gkd.clock import monotonic
from pytest_gkd.processes import cgroup, kill, procfs
from pytest_gkd.processes.procfs import RUN_ID, THEIRS, Stat

ORPHAN_GRACE_S = 0.5


def descendants(pid: int) -> list[psutil.Process]:
    """Every descendant of ``pid``, oldest first; empty if it is gone."""
    return _below(pid, procfs.table(dead=True))


def children(pid: int) -> list[psutil.Process]:
    """The processes directly below ``pid``."""
    table = procfs.table(dead=True)
    return _below(pid, {s.pid: s for s in table.values() if s.ppid == pid})


def _below(pid: int, table: dict[int, procfs.Stat]) -> list[psutil.Process]:
    pids = procfs.below([pid], table) - {pid}
    found = []
    for number in sorted(pids, key=lambda number: (table[number].start, number)):
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(number))
    return found


def is_dead(pid: int, start: int | None = None) -> bool:
    """Whether it is gone, a zombie or another process by now (``start``: ``stop``)."""
    found = _this(pid, start)
    return found is None or found.state in procfs.DEAD


def describe(process: psutil.Process) -> str:
    """``pid command`` in one line."""
    return f"{process.pid} {procfs.command(process.pid) or '(gone)'}"


def is_plugins(s: procfs.Stat) -> bool:
    """Whether a plugin or a conftest.py in this process started it.

    A worker leads its own session and marks what it starts. A process that has left our
    session and wiped its environment is taken for a worker's orphan.
    """
    run_id = procfs.own_run_id()
    if s.ppid != os.getpid():
        return False
    if s.session == os.getsid(0):
        return not procfs.carries(s.pid, RUN_ID, run_id)
    return bool(run_id) and procfs.carries(s.pid, RUN_ID, run_id + THEIRS)


def is_child(s: procfs.Stat) -> bool:
    """Whether this process started it, including a worker not yet in its session."""
    is_here = s.ppid == os.getpid() and s.session == os.getsid(0)
    return is_here or is_plugins(s)


def of_run(spare: Collection[int]) -> list[psutil.Process]:
    """Live descendants of this process, except ``spare`` and those of plugins.

    What either of them owns is excluded, too (see ``stop``).
    """
    spared = kill.Below(None, None, spare, is_plugins).spared(procfs.table(dead=True))
    return [p for p in descendants(os.getpid()) if p.pid not in spared and alive(p)]


def alive(process: psutil.Process) -> bool:
    """Whether it exists and is not a zombie; one whose state is hidden counts."""
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
    before: Callable[[procfs.Stat], None] = lambda _: None,
    limit_s: float = 10.0,
) -> tuple[list[str], list[str]]:
    """Kill every descendant of ``pid`` (and ``pid`` itself with ``itself``).

    All are stopped first, ``pid`` too unless it is this process, and the search repeats
    until several walks find no new process, so that one that forks and exits cannot
    outrun it. A worker's cgroup, if it has one, is frozen meanwhile, and is searched
    even if ``pid`` itself is gone. ``pid`` counts as gone if another process has reused
    it, that is, one that did not start at ``start`` (see ``procfs.Stat``). Processes in
    ``spare`` are left alone, as are those for which ``own`` returns true (see
    ``is_plugins``), along with everything they own (see ``procfs.owned``). ``before``
    is called with each process about to be killed (see ``kill.everything``). Returns
    one line for each descendant that was ended, and one for each that survived
    ``limit_s`` seconds (stopping them all may take longer) or may not be signalled
    because it is another user's, such as one started by sudo.
    """
    group = cgroup.of(procfs.own_run_id(), pid)
    root = _this(pid, start)
    if root is None and group is None:
        return [], []
    if root is not None and pid != os.getpid():
        send(pid, root.start, signal.SIGSTOP)
    below = None if root is None else pid
    search = kill.Below(below, group, spare, own)
    last = root if itself else None
    killed = kill.everything(search, root=last, limit_s=limit_s, before=before)
    left = [f"{found} ({why})" for found, why in killed.left]
    if not killed.is_over and not left:
        left = [f"a child of {pid} that forks and exits faster than it can be ended"]
    if itself or pid == os.getpid():
        _reap_orphans(killed)
    if group is not None and itself:
        cgroup.remove(group)
    return [str(found) for found in killed.ended], left


def leader(child: int) -> Stat:
    """The leader of the session started by a child that has not been waited for yet.

    Where SIGCHLD is ignored it may already be gone; its start time then matches none.
    """
    return procfs.stat(child) or Stat(child, 0, "X", -1)


def stop_session(leader: Stat, limit_s: float = 10.0) -> list[str]:
    """Kill the session of ``leader``, which may be gone, and all descendants.

    Returns one line for each process that survived ``limit_s`` seconds.
    """
    killed = kill.everything(kill.Session(leader), limit_s=limit_s)
    _reap_orphans(killed, leader.pid)
    return [f"{found} ({why})" for found, why in killed.left]


def _reap_orphans(killed: kill.Killed, leader: int | None = None) -> None:
    """Reap zombies whose parents were just killed; not ``leader``, whose parent waits.

    They become children of this process only once their parent's last thread is gone.
    """
    deadline = monotonic() + ORPHAN_GRACE_S
    pids = killed.seen - {found.pid for found, _ in killed.left} - {leader}
    while pids and monotonic() < deadline:
        for pid in pids:
            reap(pid)
        pids = {pid for pid in pids if procfs.stat(pid) is not None}
        time.sleep(0.002)


def reap(pid: int) -> None:
    """Reap a dead child that was re-parented to us; others are not ours to reap."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def _this(pid: int, start: int | None) -> procfs.Stat | None:
    """The process ``pid``, if it exists and, with ``start``, began at that time."""
    here = procfs.stat(pid)
    return here if here and start in (None, here.start) else None


def send(pid: int, start: int | None, number: int) -> None:
    """Signal one process if that is permitted.

    Never one that has reused its pid (see ``stop`` for ``start``).
    """
    if found := _this(pid, start):
        with contextlib.suppress(PermissionError):
            procfs.send(pid, found.start, number)


def exit_name(returncode: int | None) -> str:
    """``signal SIGKILL`` for -9, ``exit code 1`` for 1, as shown to people."""
    if returncode is None:
        return "ended without a status"
    if returncode < 0:
        try:
            return f"signal {signal.Signals(-returncode).name}"
        except ValueError:
            return f"signal {-returncode}"
    return f"exit code {returncode}"
