"""Ends and removes what a run's list proves to be the run's, and nothing else."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

from pytest_gkd import procfs
from pytest_gkd.created import (
    MARK,
    Created,
    FolderLine,
    ProcessLine,
    RunLine,
    SegmentLine,
    boot,
    pid_namespace,
)
from pytest_gkd.procfs import Identity, Stat

# multiprocessing's helper unlinks the shared memory of processes that were killed, and
# ends by itself when they are gone. It gets a moment to do so.
TRACKER = "multiprocessing.resource_tracker"
TRACKER_GRACE_S = 1.0
END_LIMIT_S = 10.0

ALIVE = "alive"
ELSEWHERE = "elsewhere"
DEAD = "dead"


class Found(NamedTuple):
    """A living process of the run. ``stage`` is empty where it is not known."""

    pid: int
    start: int
    command: str
    stage: str

    def __str__(self) -> str:
        return f"{self.pid} {self.command}".rstrip()


class Ended(NamedTuple):
    """What came of ending processes; ``held`` is memory that they shared."""

    ended: list[Found]
    left: list[tuple[Found, str]]
    held: set[Identity]


def state(run: RunLine) -> tuple[str, str]:
    """Whether the run's pytest process is alive, dead, or beyond being judged here.

    The second is the reason, for people.
    """
    if run.host != os.uname().nodename and run.boot != boot():
        return ELSEWHERE, f"it was made on {run.host}; run gkd clean there"
    if run.boot != boot():
        return DEAD, "the machine was started anew since"
    if run.pid_namespace != pid_namespace():
        return ELSEWHERE, (
            "it was made in another container (PID namespace); run gkd clean there, or "
            "remove its directory once that container is gone"
        )
    if procfs.is_alive(run.pid, run.start):
        return ALIVE, f"its pytest process {run.pid} is running"
    return DEAD, f"its pytest process {run.pid} is gone"


# -- processes -------------------------------------------------------------------


class Search:
    """Finds the run's living processes: those on the list, those below them, and
    those that carry its mark in their environment.

    A process counts as listed only while pid and start time are the listed ones.
    """

    def __init__(
        self, run: RunLine, processes: Iterable[ProcessLine], spare: Collection[int]
    ) -> None:
        self._mark = run.mark
        # A run that was before the last boot has no process; its pids are others' now.
        self._known = run.boot == boot()
        self._seeds = {(p.pid, p.start): p for p in processes}
        self._spare = {*spare, *procfs.above(os.getpid()), run.pid}
        self._looked: dict[tuple[int, int], bool] = {}

    def now(self) -> dict[int, Stat]:
        """The run's processes at this moment; it looks below each from then on."""
        if not self._known:
            return {}
        table = procfs.table()
        seeds = [
            s.pid
            for s in table.values()
            if (s.pid, s.start) in self._seeds or self._is_marked(s)
        ]
        pids = procfs.below(seeds, table) - self._spare
        found = {pid: table[pid] for pid in pids if pid in table}
        for s in found.values():
            key = (s.pid, s.start)
            if key not in self._seeds:
                # Whatever it starts and leaves behind is the run's too.
                above = next((p for p in self._seeds.values() if p.pid == s.ppid), None)
                stage = above.stage if above else ""
                self._seeds[key] = ProcessLine(
                    s.pid, s.start, procfs.command(s.pid), stage, 0
                )
        return found

    def _is_marked(self, s: Stat) -> bool:
        key = (s.pid, s.start)
        if key not in self._looked or not self._looked[key]:
            # One that has just forked has its parent's; exec may bring another.
            self._looked[key] = procfs.carries(s.pid, MARK, self._mark)
        return self._looked[key]

    def describe(self, s: Stat) -> Found:
        line = self._seeds[(s.pid, s.start)]
        # A process names itself when it is up; what was listed may be older.
        command = procfs.command(s.pid) or line.command
        return Found(s.pid, s.start, command, line.stage)


def end(search: Search, limit_s: float = END_LIMIT_S) -> Ended:
    """End every process that the search finds, until it finds none.

    All are stopped first, so that one that forks cannot outrun the walk, then killed.
    """
    deadline = time.monotonic() + limit_s
    ended: dict[tuple[int, int], Found] = {}
    refused: dict[tuple[int, int], tuple[Found, str]] = {}
    trackers: dict[int, Stat] = {}
    held: set[Identity] = set()
    while time.monotonic() < deadline:
        frozen = _freeze(search, trackers, refused)
        if not frozen:
            break
        for s in frozen:
            ended.setdefault((s.pid, s.start), search.describe(s))
            held |= procfs.held(s.pid) or set()
        for s in frozen:
            procfs.send(s.pid, s.start, signal.SIGKILL)
        _wait(frozen, deadline)
    _wait(trackers.values(), time.monotonic() + TRACKER_GRACE_S)
    for s in trackers.values():
        procfs.send(s.pid, s.start, signal.SIGKILL)
    _wait(trackers.values(), deadline)
    left = [*refused.values()]
    for key, found in list(ended.items()):
        here = procfs.stat(found.pid)
        if here and here.start == found.start and here.state not in procfs.DEAD:
            why = f"it did not end (state {here.state}; D waits inside the kernel)"
            left.append((found, why))
            del ended[key]
    return Ended(list(ended.values()), left, held)


def _freeze(
    search: Search,
    trackers: dict[int, Stat],
    refused: dict[tuple[int, int], tuple[Found, str]],
) -> list[Stat]:
    frozen: dict[tuple[int, int], Stat] = {}
    while True:
        new = [
            s
            for s in search.now().values()
            if (s.pid, s.start) not in frozen
            and (s.pid, s.start) not in refused
            and s.pid not in trackers
        ]
        if not new:
            return list(frozen.values())
        for s in new:
            if TRACKER in procfs.full_command(s.pid):
                trackers[s.pid] = s
                continue
            try:
                procfs.send(s.pid, s.start, signal.SIGSTOP)
                frozen[(s.pid, s.start)] = s
            except PermissionError:
                owner = procfs.user(s.pid)
                why = f"it belongs to another user (uid {owner})"
                refused[(s.pid, s.start)] = (search.describe(s), why)


def _wait(processes: Iterable[Stat], deadline: float) -> None:
    left = list(processes)
    while True:
        left = [s for s in left if procfs.is_alive(s.pid, s.start)]
        if not left or time.monotonic() > deadline:
            return
        time.sleep(0.005)


# -- shared memory ---------------------------------------------------------------


class Holders:
    """Who maps or has open which files in memory, as it was when this was made."""

    def __init__(self) -> None:
        self._by: dict[Identity, list[int]] = {}
        self._hidden = 0
        for pid in procfs.pids():
            found = procfs.held(pid)
            if found is None:
                self._hidden += 1
            for identity in found or ():
                self._by.setdefault(identity, []).append(pid)

    def refusal(self, segment: SegmentLine, but: Collection[int] = ()) -> str | None:
        """Why this segment must stay; empty when it may go, None when it is gone.

        Processes in ``but`` do not count: they are about to end.
        """
        try:
            here = (procfs.SHM / segment.name).lstat()
        except OSError:
            return None
        if (here.st_dev, here.st_ino) != segment.identity:
            return None  # the name is another one's now
        users = [p for p in self._by.get(segment.identity, ()) if p not in but]
        if users:
            return f"process {users[0]} ({procfs.command(users[0])[:40]}) uses it"
        if here.st_uid != os.geteuid():
            return f"it belongs to another user (uid {here.st_uid})"
        if self._hidden and here.st_mode & 0o077:
            return (
                "other users may open it, and their processes cannot be looked into "
                f"({self._hidden} of them)"
            )
        return ""


def remove_segment(segment: SegmentLine) -> str:
    """Unlink one; the reason why it could not be, else nothing."""
    try:
        (procfs.SHM / segment.name).unlink()
    except FileNotFoundError:
        pass
    except OSError as error:
        return str(error.strerror)
    return ""


def segment_size(segment: SegmentLine) -> int:
    """Bytes of memory that it takes (not what it could hold)."""
    try:
        return (procfs.SHM / segment.name).lstat().st_blocks * 512
    except OSError:
        return 0


def remove_segments(segments: Iterable[SegmentLine]) -> tuple[list[str], list[str]]:
    """Remove those that nobody uses; a line for each that went, and that stays."""
    present = [s for s in segments if (procfs.SHM / s.name).exists()]
    if not present:
        return [], []
    holders = Holders()
    removed, kept = [], []
    for segment in present:
        why = holders.refusal(segment)
        if why is None:
            continue
        text = f"{procfs.SHM / segment.name} ({megabytes(segment_size(segment))})"
        why = why or remove_segment(segment)
        if why:
            kept.append(f"{text}: {why}")
        else:
            removed.append(text)
    return removed, kept


def newcomers(
    created: Created, held: Collection[Identity], stage: str = ""
) -> list[SegmentLine]:
    """Segments that came up during the run and that its processes held just now."""
    known = {s.identity for s in created.segments} | created.before
    return [
        SegmentLine(name, *identity, stage, 0)
        for name, identity in procfs.segments().items()
        if identity in held and identity not in known
    ]


# -- files -----------------------------------------------------------------------


def is_same(folder: FolderLine) -> bool:
    """Whether the directory is there and is the one that was noted down."""
    try:
        here = Path(folder.path).lstat()
    except OSError:
        return False
    return (here.st_dev, here.st_ino) == (folder.dev, folder.ino)


def remove_folder(folder: FolderLine) -> str | None:
    """Remove a directory outside the run's own; the reason why not, None when gone."""
    return remove_tree(Path(folder.path)) if is_same(folder) else None


def remove_tree(path: Path, tries: int = 3) -> str:
    """Remove a directory and all below it; the reason why not, empty when it went.

    More than one try: what was just killed may still have been writing.
    """
    reason = ""
    for _ in range(tries):
        if path.is_symlink() or not path.exists():
            return ""
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            reason = f"{error.filename or path}: {error.strerror}"
            _make_writable(path)
            time.sleep(0.05)
    shutil.rmtree(path, ignore_errors=True)
    return reason if path.exists() else ""


def _make_writable(path: Path) -> None:
    for directory, _, _ in os.walk(path):
        with contextlib.suppress(OSError):
            Path(directory).chmod(0o700)


def tree_size(path: Path) -> int:
    """Bytes on disk below a directory."""
    total = 0
    for directory, _, names in os.walk(path):
        for name in names:
            try:
                total += (Path(directory) / name).lstat().st_blocks * 512
            except OSError:
                continue
    return total


def megabytes(size: int) -> str:
    """``12.3 MB``."""
    return f"{size / 1e6:.1f} MB"
