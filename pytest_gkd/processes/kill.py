"""Stops, then kills, all processes that a search finds, until no new ones appear.

Standard library only: the guardian runs this without site-packages.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import NamedTuple, Protocol

from pytest_gkd.clock import monotonic
from pytest_gkd.processes import cgroup, procfs
from pytest_gkd.processes.procfs import DEAD, Stat

# multiprocessing's resource tracker unlinks the shared memory that killed processes
# leave behind. It exits by itself once they are gone, so it gets a moment to do so.
TRACKER_GRACE_S = 1.0
# Stopping what keeps forking may take this many limits: cut short, it lives on.
STORM_LIMITS = 4
# Consecutive walks that must find no new pid.
QUIET_WALKS = 3


class Found(NamedTuple):
    """A process that was found. ``stage`` is empty if it is not known."""

    pid: int
    start: int
    command: str
    stage: str = ""

    def __str__(self) -> str:
        return f"{self.pid} {self.command or '(gone)'}"


class Search(Protocol):
    """Finds what is to be killed, repeatedly.

    The cgroups in ``groups`` are frozen meanwhile. Zombies may be found, too: a chain
    of processes that each fork and exit may never be seen alive, but leaves zombies.
    """

    groups: list[Path]

    def now(self) -> dict[int, Stat]:
        """The processes that exist right now, by pid."""

    def describe(self, s: Stat) -> Found:
        """What to call one of them in a report."""


class Killed(NamedTuple):
    """What was ended, what was ``left`` and why, and every pid that was ``seen``.

    ``is_over`` is False if new processes kept appearing until the limit.
    """

    ended: list[Found]
    left: list[tuple[Found, str]]
    seen: set[int]
    is_over: bool


def everything(
    search: Search,
    *,
    root: Stat | None = None,
    limit_s: float = 10.0,
    before: Callable[[Stat], None] = lambda _: None,
) -> Killed:
    """Kill what ``search`` finds, and ``root`` after it, within ``limit_s`` seconds.

    Stopping them all may take longer. ``before`` is called with each process once it is
    stopped, before it is killed. Processes are signalled by pid and start time. Those
    of other users cannot be signalled and are reported as left.
    """
    deadline = monotonic() + limit_s
    stopped_by = monotonic() + STORM_LIMITS * limit_s
    hunt = _Hunt(search)
    with contextlib.ExitStack() as frozen:
        for group in search.groups:
            frozen.enter_context(cgroup.frozen(group))
        while monotonic() < deadline and not hunt.is_over:
            stopped = hunt.stop_new(stopped_by)
            for s in stopped:
                before(s)
            hunt.signal(stopped, signal.SIGKILL)
            # A child of one that was stopped while forking shows up only now.
            _await_end(stopped, deadline)
    last = [root] if root is not None else []
    for s in last:
        before(s)
    hunt.signal(last, signal.SIGKILL)
    hunt.signal(hunt.trackers, signal.SIGCONT)
    _await_end(hunt.trackers, monotonic() + TRACKER_GRACE_S)
    hunt.signal(hunt.trackers, signal.SIGKILL)
    _await_end(hunt.signalled(last), deadline)
    return hunt.result(last)


class _Hunt:
    """What a search has found so far, by pid and start time, and what became of it."""

    def __init__(self, search: Search) -> None:
        self._search = search
        self._quiet = 0
        self._names: dict[Stat, Found] = {}
        self._refused: dict[Stat, str] = {}
        self.seen: set[int] = set()
        self.found: dict[tuple[int, int], Stat] = {}
        self.trackers: list[Stat] = []

    @property
    def is_over(self) -> bool:
        return self._quiet >= QUIET_WALKS

    def _new(self) -> list[Stat]:
        now = self._search.now()
        self._quiet = 0 if now.keys() - self.seen else self._quiet + 1
        self.seen |= now.keys()
        new = [
            s
            for s in now.values()
            if s.state not in DEAD and (s.pid, s.start) not in self.found
        ]
        self.found |= {(s.pid, s.start): s for s in new}
        return new

    def stop_new(self, deadline: float) -> list[Stat]:
        """Stop new processes until none appear; resource trackers run on for now."""
        stopped: list[Stat] = []
        while monotonic() < deadline and (new := self._new()):
            trackers = [s for s in new if procfs.is_tracker(s.pid)]
            self.trackers += trackers
            stopped += self.signal(
                [s for s in new if s not in trackers], signal.SIGSTOP
            )
        self._names |= {s: self._search.describe(s) for s in stopped}
        return stopped

    def signal(self, processes: Iterable[Stat], number: int) -> list[Stat]:
        """Signal each; returns those that got it: not gone, and ours to signal."""
        reached = []
        for s in processes:
            try:
                if procfs.send(s.pid, s.start, number):
                    reached.append(s)
            except PermissionError:
                whose = f"another user, uid {procfs.user(s.pid)}"
                self._refused[s] = f"it belongs to {whose}"
        return reached

    def signalled(self, last: list[Stat]) -> list[Stat]:
        """All but those that we may not signal, which may live forever."""
        return [s for s in [*self.found.values(), *last] if s not in self._refused]

    def result(self, last: list[Stat]) -> Killed:
        """What has become of all of them so far."""
        name = self._search.describe
        left = []
        for s in [*self.found.values(), *last]:
            here = procfs.stat(s.pid)
            if here is not None and here.start == s.start and here.state not in DEAD:
                why = f"still alive, state {here.state}"
                if here.state == "D":
                    why += ": it waits inside the kernel"
                left.append((name(s), self._refused.get(s, why)))
        if not self.is_over:
            why = "its parent starts others faster than they can be ended"
            left += [(name(s), why) for s in self._new()]
        kept = {found.pid for found, _ in left}
        ended = [found for found in self._names.values() if found.pid not in kept]
        return Killed(ended, left, self.seen, self.is_over)


def _await_end(processes: Collection[Stat], deadline: float) -> None:
    while any(procfs.is_alive(s.pid, s.start) for s in processes):
        if monotonic() > deadline:
            return
        time.sleep(0.005)


class Below:
    """Finds the descendants of a process, if it is alive, and its cgroup's members.

    Processes in ``spare``, or for which ``own`` returns true, are skipped, along with
    everything they own (see ``procfs.owned``). Process groups with no other members are
    stopped as a whole, including what they are just forking.
    """

    def __init__(
        self,
        pid: int | None,
        group: Path | None = None,
        spare: Collection[int] = (),
        own: Callable[[Stat], bool] | None = None,
    ) -> None:
        self.groups = [] if group is None else [group]
        self._roots = set() if pid is None else {pid}
        self._spared = {(s.pid, s.start) for n in spare if (s := procfs.stat(n))}
        self._own = own

    def now(self) -> dict[int, Stat]:
        """Oldest first, including zombies."""
        everything = procfs.table(dead=True)
        spared = self.spared(everything)
        table = {n: s for n, s in everything.items() if n not in spared}
        pids = procfs.below(self._roots & table.keys(), table)
        for group in self.groups:
            pids |= set(cgroup.members(group)) & table.keys()
        pids -= {*self._roots, os.getpid()}
        self._stop_groups(pids, everything)
        oldest_first = sorted(pids, key=lambda pid: (table[pid].start, pid))
        return {pid: table[pid] for pid in oldest_first}

    def describe(self, s: Stat) -> Found:
        return Found(s.pid, s.start, procfs.command(s.pid))

    def spared(self, table: dict[int, Stat]) -> set[int]:
        """The spared pids, with all that any walk so far found to be theirs."""
        known = {s.pid for s in table.values() if (s.pid, s.start) in self._spared}
        if self._own is not None:
            known |= {s.pid for s in table.values() if self._own(s)}
        if not known:
            return known
        # A dead worker may be listed, too, but what it left behind is not spared.
        living = {n: s for n, s in table.items() if s.state not in DEAD}
        spared = known | procfs.owned(known, living)
        self._spared |= {(n, table[n].start) for n in spared}
        return spared

    def _stop_groups(self, pids: set[int], table: dict[int, Stat]) -> None:
        """Stop groups with no other members; 0 means one of another PID namespace."""
        stopped = pids | (self._roots - {os.getpid()})
        others = {s.group for n, s in table.items() if n not in stopped}
        for group in {table[n].group for n in pids} - others - {0}:
            # Gone, or another user's; each process is also signalled by itself.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGSTOP)


class Session(Below):
    """Finds a session's processes, even if its leader is gone, and all below them.

    The kernel reuses the leader's pid only once the session is empty; from then on
    nothing is found, even if the new process starts a session.
    """

    def __init__(self, leader: Stat) -> None:
        super().__init__(None)
        self._leader = leader

    def now(self) -> dict[int, Stat]:
        table = procfs.table(dead=True)
        pid, start = self._leader.pid, self._leader.start
        if pid in table and table[pid].start != start:
            return {}
        members = [s.pid for s in table.values() if s.session == pid]
        pids = procfs.below(members, table) - procfs.above(os.getpid())
        return {pid: table[pid] for pid in pids}
