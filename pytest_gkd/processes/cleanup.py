"""Ends and removes what the run's manifest proves to be its own, and nothing else."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

from pytest_gkd.processes import cgroup, kill, procfs
from pytest_gkd.processes.kill import Found
from pytest_gkd.processes.manifest import (
    FolderLine,
    Manifest,
    ProcessLine,
    RunLine,
    SegmentLine,
    boot,
    pid_namespace,
)
from pytest_gkd.processes.procfs import RUN_ID, Identity, Stat

END_LIMIT_S = 10.0

ALIVE = "alive"
ELSEWHERE = "elsewhere"
DEAD = "dead"


class Ended(NamedTuple):
    """The result of ending processes; ``held`` is the shared memory they held."""

    ended: list[Found]
    left: list[tuple[Found, str]]
    held: set[Identity]


def state(run: RunLine) -> tuple[str, str]:
    """Whether the run's pytest process is alive, dead, or cannot be judged from here.

    The second value is the reason, for people.
    """
    if run.host != os.uname().nodename and run.boot != boot():
        return ELSEWHERE, f"it was made on {run.host}; run gkd clean there"
    if run.boot != boot():
        return DEAD, "the machine has been rebooted since"
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
    """Finds the run's live processes: those in the manifest, those in its workers'
    cgroups, those with its id in their environment, and all their descendants.

    A process counts as listed only if both its pid and its start time match.
    """

    def __init__(
        self, run: RunLine, processes: Iterable[ProcessLine], spare: Collection[int]
    ) -> None:
        self._run_id = run.run_id
        # A run from before the last boot has no processes; its pids are reused by now.
        self._known = run.boot == boot()
        self.groups = cgroup.of_run(run.groups, run.run_id) if self._known else []
        self._seeds = {(p.pid, p.start): p for p in processes}
        self._spare = {*spare, *procfs.above(os.getpid()), run.pid}
        self._looked: dict[tuple[int, int], bool] = {}

    def now(self) -> dict[int, Stat]:
        """The run's processes right now; each is a root of all later searches."""
        if not self._known:
            return {}
        table = procfs.table()
        seeds = [
            s.pid
            for s in table.values()
            if (s.pid, s.start) in self._seeds or self._carries_id(s)
        ]
        # Orphans in the workers' cgroups are no longer below any of these.
        seeds += [n for group in self.groups for n in cgroup.members(group)]
        pids = procfs.below(seeds, table) - self._spare
        found = {pid: table[pid] for pid in pids if pid in table}
        for s in found.values():
            key = (s.pid, s.start)
            if key not in self._seeds:
                # Whatever it starts and leaves behind belongs to the run, too.
                above = next((p for p in self._seeds.values() if p.pid == s.ppid), None)
                stage = above.stage if above else ""
                self._seeds[key] = ProcessLine(
                    s.pid, s.start, procfs.command(s.pid), stage, 0
                )
        return found

    def _carries_id(self, s: Stat) -> bool:
        key = (s.pid, s.start)
        if key not in self._looked or not self._looked[key]:
            # Right after fork it has its parent's environment; exec may replace it.
            self._looked[key] = procfs.carries(s.pid, RUN_ID, self._run_id)
        return self._looked[key]

    def describe(self, s: Stat) -> Found:
        line = self._seeds[(s.pid, s.start)]
        # A process may set its title once it is up; the listed command may be older.
        command = procfs.command(s.pid) or line.command
        return Found(s.pid, s.start, command, line.stage)


def end(search: Search, limit_s: float = END_LIMIT_S) -> Ended:
    """End every process that the search finds, until it finds no new ones."""
    held: set[Identity] = set()

    def look(s: Stat) -> None:
        held.update(procfs.held(s.pid, writing=True) or ())

    killed = kill.everything(search, limit_s=limit_s, before=look)
    for group in search.groups:
        cgroup.remove(group)
    return Ended(killed.ended, killed.left, held)


# -- shared memory ---------------------------------------------------------------


class Holders:
    """A snapshot of which processes map or have open which in-memory files."""

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
        """Why this segment must stay; empty if it may be removed, None if it is gone.

        Processes in ``but`` do not count: they are about to be ended.
        """
        if "/" in segment.name:
            return None  # not a file in that directory
        try:
            here = (procfs.SHM / segment.name).lstat()
        except OSError:
            return None
        if (here.st_dev, here.st_ino) != segment.identity:
            return None  # the name now belongs to another file
        users = [p for p in self._by.get(segment.identity, ()) if p not in but]
        if users:
            command = procfs.full_command(users[0])
            return f"process {users[0]} ({procfs.shown(command, 40)}) is using it"
        if here.st_uid != os.geteuid():
            return f"it belongs to another user (uid {here.st_uid})"
        if self._hidden and here.st_mode & 0o077:
            return (
                "other users may have it open, and their processes cannot be inspected "
                f"({self._hidden} of them)"
            )
        return ""


def remove_segment(segment: SegmentLine) -> str:
    """Unlink a segment; the reason why that failed, else empty."""
    try:
        (procfs.SHM / segment.name).unlink()
    except FileNotFoundError:
        pass
    except OSError as error:
        return str(error.strerror)
    return ""


def segment_size(segment: SegmentLine) -> int:
    """Bytes of memory in use by the segment (not its nominal size)."""
    try:
        return (procfs.SHM / segment.name).lstat().st_blocks * 512
    except OSError:
        return 0


def remove_segments(segments: Iterable[SegmentLine]) -> tuple[list[str], list[str]]:
    """Remove the unused ones; one line for each that was removed or was kept."""
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


def unused(segments: Collection[SegmentLine]) -> list[str]:
    """One line for each that exists, belongs to this user and is not in use."""
    holders = Holders() if segments else None
    return [
        f"{procfs.SHM / segment.name} ({megabytes(segment_size(segment))})"
        for segment in segments
        if holders and holders.refusal(segment) == ""
    ]


def newcomers(
    created: Manifest, held: Collection[Identity], stage: str = ""
) -> list[SegmentLine]:
    """Segments that appeared during the run and are in ``held``, but not listed yet."""
    known = {s.identity for s in created.segments} | created.before
    return [
        SegmentLine(name, *identity, stage, 0)
        for name, identity in procfs.segments().items()
        if identity in held and identity not in known
    ]


# -- files -----------------------------------------------------------------------


def is_same(folder: FolderLine) -> bool:
    """Whether the directory exists and is the one that was recorded."""
    try:
        here = Path(folder.path).lstat()
    except OSError:
        return False
    return (here.st_dev, here.st_ino) == (folder.dev, folder.ino)


def remove_folder(folder: FolderLine) -> str | None:
    """Remove a directory outside the run's own; the reason why not, None if gone."""
    if not is_same(folder):
        return None
    return remove_tree(Path(folder.path), Identity(folder.dev, folder.ino))


def remove_tree(path: Path, identity: Identity | None = None, tries: int = 3) -> str:
    """Remove a directory and all below it; the reason why not, empty on success.

    With ``identity``, only that very directory. No link is followed, and nothing is
    removed while something is mounted in it. It retries, as a process that was just
    killed may still have been writing.
    """
    reason = ""
    for _ in range(tries):
        try:
            # O_PATH opens directories without read permission, too.
            flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(path, flags)
        except OSError:  # it is gone, or the name is no longer a directory
            return ""
        try:
            reason = _empty(fd, identity)
            if not reason:
                path.rmdir()
                return ""
        except (OSError, RecursionError) as error:
            reason = f"{getattr(error, 'filename', '') or path}: "
            reason += getattr(error, "strerror", None) or "nested too deep"
            _make_writable(fd)
            time.sleep(0.05)
        finally:
            os.close(fd)
    return reason if os.path.lexists(path) else ""


def _empty(fd: int, identity: Identity | None) -> str:
    """Empty an open directory; the reason why nothing was removed, else empty."""
    here = os.fstat(fd)
    if identity is not None and (here.st_dev, here.st_ino) != identity:
        return "it has been replaced by another directory"
    place = Path(f"/proc/self/fd/{fd}")
    mounts = procfs.mounted_below(place)
    if mounts:
        return f"{mounts[0]} is mounted in it"
    for path in list(place.iterdir()):
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path.name, dir_fd=fd)
        else:
            path.unlink()
    return ""


def _make_writable(fd: int) -> None:
    with contextlib.suppress(OSError):
        Path(f"/proc/self/fd/{fd}").chmod(0o700)
        for _, names, _, here in os.fwalk(".", dir_fd=fd):
            for name in names:
                if stat.S_ISDIR(
                    os.stat(name, dir_fd=here, follow_symlinks=False).st_mode
                ):
                    os.chmod(name, 0o700, dir_fd=here)


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
