"""Which processes make up a job, wherever on this machine they run.

Those below the command, what they left behind, and those that they talk to: the Ray
cluster that runs the job's actors, and a server on this machine, such as the teacher's.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from pytest_gkd.processes import procfs
from pytest_gkd.processes.procfs import Stat
from pytest_gkd.watch import process_facts

# How often the open files and connections of all processes are looked through.
PEERS_EVERY_S = 30.0
# Processes that are not the job's are read so often: a large host has thousands, mostly
# the kernel's.
OTHERS_EVERY_S = 10.0
MOST_ROUNDS = 3
# A cluster's processes name its session; workers and drivers write to its logs.
_SESSION = re.compile(r"(/\S+?/session_[\w.-]+)/")
_DRIVER = re.compile(r"/python-core-driver-([0-9a-f]{8})[0-9a-f]*_\d+\.log$")
_WORKER = re.compile(r"/worker-[0-9a-f]+-([0-9a-f]{8})-\d+\.(?:out|err)$")
# Of a worker that was started before there was a job; what it prints first tells which
# one it then got (ray/_private/ray_constants.py, LOG_PREFIX_JOB_ID).
_NO_JOB = "ffffffff"
_GIVEN = re.compile(rb"(?m)^:job_id:([0-9a-f]{8})$")
_MOST_BEFORE = 1 << 14
_GCS, _RAYLET = "gcs_server", "raylet"
# Of a session's logs, what a program prints and what Ray itself complains of; the rest
# are events and debug logs of its parts.
_TELLING = re.compile(
    r"(?:worker-\S+\.(?:out|err)|job-driver-\S+\.log"
    r"|(?:raylet|gcs_server|monitor)\.err)$"
)


@dataclass
class Scope:
    """Finds a job's processes again and again.

    ``seeds`` gives those that it begins with; ``spare`` are left out, with what is
    below them. ``sessions`` are the directories of the Ray sessions that it uses,
    ``jobs`` Ray's ids of what it runs there, ``raylet`` the pid of this machine's
    raylet where the cluster has other machines, 0 where it has none; ``remote`` the
    addresses of other machines that the job is connected to, ``unseen`` what may not be
    looked into, in words.
    """

    seeds: Callable[[dict[int, Stat]], Iterable[int]]
    spare: frozenset[int] = frozenset()
    sessions: set[str] = field(default_factory=set)
    jobs: set[str] = field(default_factory=set)
    raylet: int = 0
    remote: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    _peers: dict[int, int] = field(default_factory=dict)  # pid to start
    _peers_at: float = float("-inf")
    _others: dict[int, Stat] = field(default_factory=dict)
    _others_at: float = float("-inf")

    def find(self, now: float, *, closely: bool = False) -> dict[int, Stat]:
        """The job's processes now, by pid."""
        if closely or now >= self._others_at + OTHERS_EVERY_S:
            self._others_at, self._others = now, {}
        table = procfs.table(known=self._others)
        mine = self._owned(self.seeds(table), table)
        asks = mine and (closely or now >= self._peers_at + PEERS_EVERY_S)
        served = self._served_by(table)
        # One leads to others: a client of Ray to its server, that to the actors.
        for _ in range(MOST_ROUNDS if asks else 0):
            self._peers_at, known = now, len(self._peers)
            self._look_around(mine, served, table)
            if len(self._peers) == known:
                break
            served = self._served_by(table)
        ours = mine | served
        self._others = {pid: one for pid, one in table.items() if pid not in ours}
        return {pid: table[pid] for pid in ours}

    def _served_by(self, table: dict[int, Stat]) -> set[int]:
        """The peers that are known and alive, with what is theirs."""
        known = self._peers.items()
        live = [pid for pid, at in known if pid in table and table[pid].start == at]
        return self._owned(live, table) if live else set()

    def _owned(self, seeds: Iterable[int], table: dict[int, Stat]) -> set[int]:
        """The seeds with what is theirs, but not this process and what it starts."""
        seeds, me = set(seeds), os.getpid()
        found = procfs.owned(seeds, table) - self.spare
        own = procfs.below({me}, _without(table, self.spare))
        below = procfs.below(seeds, table)
        return found - (own if me in below else own - below)

    def _look_around(
        self, mine: set[int], served: set[int], table: dict[int, Stat]
    ) -> None:
        ours: set[tuple[str, int]] = set()
        remote: set[str] = set()
        reaching: set[int] = set()  # who is connected to other machines
        for one in (every := _connections()):
            if one.status != psutil.CONN_ESTABLISHED or one.pid is None:
                continue
            host, port = process_facts.plain(one.raddr[0]), int(one.raddr[1])
            is_here = _is_here(host, process_facts.plain(one.laddr[0]))
            if not is_here:
                reaching.add(one.pid)
            if one.pid in mine and is_here:
                ours.add((host, port))
            elif one.pid in mine:
                remote.add(f"{host}:{port}")
        for pid in mine | served:
            for path in open_files(pid):
                if session := _SESSION.match(path):
                    self.sessions.add(session[1])
                if job := _driven(path) or _worked_for(path):
                    self.jobs.add(job)
        self.remote = tuple(sorted(remote))
        if self.sessions and not self.raylet:
            self.raylet = self._find_raylet(reaching, table)
        self.unseen = _hidden(mine)
        ports = {port for _, port in ours}
        serving = {
            one.pid
            for one in every
            if one.status == psutil.CONN_LISTEN and int(one.laddr[1]) in ports
        }
        if serving or self.sessions:
            for pid in table.keys() - mine - served:
                if self._is_peer(pid, serving):
                    self._peers.setdefault(pid, table[pid].start)

    def _find_raylet(self, reaching: set[int], table: dict[int, Stat]) -> int:
        """This machine's raylet, if it or its GCS is connected to other machines."""
        parts = (_GCS, _RAYLET)
        if any(self._is_part(pid, parts) for pid in reaching):
            return next((pid for pid in table if self._is_part(pid, (_RAYLET,))), 0)
        return 0

    def _is_part(self, pid: int, parts: tuple[str, ...]) -> bool:
        """Whether a process is one of these parts of Ray in a session of the job."""
        program, _, rest = procfs.full_command(pid).partition(" ")
        is_ours = any(f"{one}/" in f"{rest}/" for one in self.sessions)
        return is_ours and program.rpartition("/")[2] in parts

    def _is_peer(self, pid: int, serving: set[int]) -> bool:
        """Whether another process serves this job, or is a worker of it in Ray."""
        if procfs.user(pid) not in (os.getuid(), None) and os.getuid():
            return False
        command = procfs.full_command(pid)
        if any(f"{one}/" in f"{command}/" for one in self.sessions):
            # Of the cluster, which other jobs may use, too: not what is below it.
            return False
        if command.startswith("ray::"):
            return works_for(pid, self.jobs)
        return pid in serving and _serves(command)


def works_for(pid: int, jobs: Collection[str]) -> bool:
    """Whether a process is a worker of one of these jobs in Ray."""
    if not procfs.full_command(pid).startswith("ray::"):
        return False
    return any(_worked_for(path) in jobs for path in open_files(pid))


def drives(pid: int, jobs: Collection[str]) -> bool:
    """Whether a process is the driver of one of these jobs in Ray."""
    if "python" not in procfs.full_command(pid):
        return False
    return any(_driven(path) in jobs for path in open_files(pid))


def _driven(path: str) -> str:
    """Ray's id of the job whose driver writes this log; empty for another file."""
    found = _DRIVER.search(path)
    return found[1] if found else ""


def _worked_for(path: str) -> str:
    """Ray's id of the job whose worker writes this log; empty for another file."""
    found = _WORKER.search(path)
    if found is None or found[1] != _NO_JOB:
        return found[1] if found else ""
    try:
        with Path(path).open("rb") as file:
            given = _GIVEN.search(file.read(_MOST_BEFORE))
    except OSError:
        return ""
    return given[1].decode() if given else ""


def _connections() -> list[Any]:
    """All TCP connections of the processes that may be looked into, in one walk."""
    try:
        return psutil.net_connections(kind="tcp")
    except (psutil.Error, OSError):
        return []


def _hidden(mine: set[int]) -> tuple[str, ...]:
    """Which of a job's processes are another user's, in words."""
    own = os.getuid()
    hidden = sorted(pid for pid in mine if own and procfs.user(pid) not in (own, None))
    if not hidden:
        return ()
    pids = ", ".join(map(str, hidden[:5]))
    return (f"processes of another user may not be looked into: {pids}",)


def _serves(command: str) -> bool:
    """Whether it is a server of models; not, say, a tracker of experiments."""
    return bool(re.search(r"vllm|sglang|trl|teacher|launch_server|serve", command))


def _without(table: dict[int, Stat], spare: frozenset[int]) -> dict[int, Stat]:
    """The table in which what is below the spared does not count as below us."""
    return {pid: s for pid, s in table.items() if pid not in spare}


def open_files(pid: int) -> list[str]:
    """The paths of the regular files that a process has open."""
    found = []
    with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                path = os.readlink(entry.path)  # noqa: PTH115
                if path.startswith("/") and not path.startswith(("/dev/", "/proc/")):
                    found.append(path)
    return found


def written_logs(pids: Iterable[int]) -> list[Path]:
    """The log files that processes write to: by name, or as their output or error.

    Of Ray's own only those that tell a person something.
    """
    found: dict[Path, None] = {}
    for pid in pids:
        for number in (1, 2):
            path = procfs.link(pid, f"fd/{number}")
            if path.startswith("/") and Path(path).is_file():
                found[Path(path)] = None
        for path in open_files(pid):
            if path.endswith((".log", ".out", ".err")) and _writes(pid, path):
                found[Path(path)] = None
    return [
        path
        for path in found
        if not _SESSION.match(f"{path}") or _TELLING.match(path.name)
    ]


def _writes(pid: int, path: str) -> bool:
    with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                # The link's own bits tell how the file was opened (proc(5)).
                writes = entry.stat(follow_symlinks=False).st_mode & 0o200
                if writes and os.readlink(entry.path) == path:  # noqa: PTH115
                    return True
    return False


def _is_here(host: str, own: str) -> bool:
    return host == own or process_facts.is_loopback(host)
