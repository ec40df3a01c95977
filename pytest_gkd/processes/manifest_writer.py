"""Records, once a second, what the processes of a run have created."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Container, Iterable
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path

from pytest_gkd.clock import monotonic
from pytest_gkd.processes import manifest, procfs
from pytest_gkd.processes.manifest import (
    FolderLine,
    ManifestFile,
    ProcessLine,
    SegmentLine,
)
from pytest_gkd.processes.procfs import Identity, Stat
from pytest_gkd.processes.tree import is_plugins, reap

EVERY_S = 1.0
# After a walk it rests a hundred times as long: at most 1 % of a core, even with
# thousands of processes.
REST = 100
# Walks after which skipped pids are examined again, as pids are reused.
FORGET_AFTER = 30
# Linux's PROC_PID_INIT_INO (include/linux/proc_ns.h): the host's own PID namespace.
INITIAL_NAMESPACE = "pid:[4026531836]"
# How Ray's own processes are told which session they belong to.
RAY_FOLDER = re.compile(r"--(?:session[-_]dir|temp[-_]dir)=(\S+)")
# Ray names a session after the time and the process that started it (node.py).
RAY_SESSION = re.compile(r"session_(\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d)_\d+_(\d+)")


@dataclass(frozen=True)
class Member:
    """A process of the run: its start time, and where in the run it belongs."""

    start: int
    parent: int
    stage: str
    worker: int


@dataclass(eq=False, repr=False)
class ManifestWriter(threading.Thread):
    """Walks the tree below this process and appends what is new to the manifest.

    ``before`` holds the processes that are not the run's; they are skipped with all
    they start, as is whatever this process starts besides its workers. It may grow.
    ``workers`` returns each worker's current stage by pid. ``tell`` is given any error
    in a walk; the thread goes on. With ``itself`` this process runs stages.
    """

    manifest_file: ManifestFile
    run_dir: Path
    before: set[int]
    workers: Callable[[], dict[int, str]]
    tell: Callable[[str], None]
    _: KW_ONLY
    itself: bool

    def __post_init__(self) -> None:
        super().__init__(name="gkd-manifest", daemon=True)
        self._me = os.getpid()
        self._members: dict[int, Member] = {}
        self._passed = set(self.before)
        self._walks = 0
        self._shares = procfs.shares_memory()
        known = procfs.segments() if self._shares else {}
        if known:
            self.manifest_file.before(known)
        self._known: set[Identity] = set(known.values())
        self._folders: set[str] = set()
        self._begun = time.strftime("%Y-%m-%d_%H-%M-%S")  # local time, as Ray's
        self._seen: set[int] = set()
        self._next_look = 0.0
        self._one = threading.Lock()
        self._over = threading.Event()
        self.segments: list[SegmentLine] = []
        self.folders: list[FolderLine] = []

    def run(self) -> None:
        """The thread's loop."""
        while not self._over.is_set():
            begun = monotonic()
            self.scan()
            rest = REST * (monotonic() - begun)
            self._over.wait(max(EVERY_S, rest))

    @property
    def problem(self) -> str:
        """Why the manifest is incomplete; empty if everything could be written."""
        return self.manifest_file.problem

    def stop(self) -> None:
        """End the thread."""
        self._over.set()
        if self.is_alive():
            self.join()

    def note(self, worker: int) -> None:
        """Record a worker, by its pid, as soon as it has been started.

        The guardian may have to end it before the next walk.
        """
        here = procfs.stat(worker)
        if here is not None:
            command = procfs.command(worker)
            self.manifest_file.add(ProcessLine(worker, here.start, command, "", worker))

    def scan(self) -> None:
        """One walk: new processes, new shared memory, new directories of Ray."""
        try:
            self._scan()
        except Exception as error:
            what = "not everything that the run created could be recorded"
            self.tell(f"{what}: {type(error).__name__}: {error}")

    def _scan(self) -> None:
        with self._one:
            workers = self.workers()
            for pid in self._walk(workers):
                self._folders_of(pid)
            if self._shares:
                self._look_at_memory(workers)

    # -- processes -------------------------------------------------------------------

    def _walk(self, workers: dict[int, str]) -> list[int]:
        self._walks += 1
        if self._walks % FORGET_AFTER == 0:
            self._passed = set(self.before)
        present = procfs.pids()
        self._passed &= present
        for pid, member in list(self._members.items()):
            here = procfs.stat(pid) if pid in present else None
            if here is None or here.start != member.start:
                del self._members[pid]
            elif here.state == "Z" and here.ppid == self._me != member.parent:
                # It outlived its parent: nobody else waits for it, and if this is the
                # first process of a container, nobody else could.
                reap(pid)
        for pid in workers.keys() & self._members.keys():
            # It may have been seen before it was known to be a worker.
            self._members[pid] = replace(self._members[pid], worker=pid)
        fresh: list[int] = []
        unknown = {
            pid: here
            for pid in present
            - (self._passed - workers.keys())
            - self.before
            - set(self._members)
            - {self._me}
            if (here := procfs.stat(pid)) is not None
        }
        # A child may have a lower pid than its parent once pids have wrapped around.
        while True:
            found = [s for s in unknown.values() if self._belongs(s, workers)]
            if not found:
                break
            for s in found:
                del unknown[s.pid]
                fresh.append(s.pid)
                self._add(s, workers)
        self._passed |= set(unknown)
        return fresh

    def _belongs(self, s: Stat, workers: Container[int]) -> bool:
        if s.ppid in self._members or s.pid in workers:
            return True
        return s.ppid == self._me and (self.itself or not is_plugins(s))

    def _add(self, s: Stat, workers: dict[int, str]) -> None:
        above = self._members.get(s.ppid)
        lost = self._me if self.itself else 0
        worker = s.pid if s.pid in workers else above.worker if above else lost
        stage = workers.get(worker, "") if worker != s.pid else ""
        self._members[s.pid] = Member(s.start, s.ppid, stage, worker)
        self._seen.add(s.pid)
        if s.state not in procfs.DEAD:
            self.manifest_file.add(
                ProcessLine(s.pid, s.start, procfs.command(s.pid), stage, worker)
            )

    def _folders_of(self, pid: int) -> None:
        """Record Ray's directories outside the run's own, from its command lines."""
        for text in RAY_FOLDER.findall(procfs.full_command(pid)):
            path = Path(text)
            if text in self._folders or self.run_dir in path.parents:
                continue
            if path != manifest.ray_folder(self.run_dir) and not self._began(path.name):
                continue
            self._folders.add(text)
            try:
                here = path.lstat()
            except OSError:
                continue
            member = self._members[pid]
            line = FolderLine(
                text, here.st_dev, here.st_ino, member.stage, member.worker
            )
            self.folders.append(line)
            self.manifest_file.add(line)

    def _began(self, session: str) -> bool:
        """Whether a Ray session was started by a process of this run.

        A run may also join an existing one, which is not its own to remove.
        """
        found = RAY_SESSION.fullmatch(session)
        return bool(
            found
            and found[1] >= self._begun
            and int(found[2]) in (*self._seen, self._me)
        )

    # -- shared memory ---------------------------------------------------------------

    def _look_at_memory(self, workers: dict[int, str]) -> None:
        """Record each new file in /dev/shm that a process of the run holds.

        Reading what a process holds is the expensive part: it is done only while there
        are new files, and less often the longer it takes.
        """
        begun = monotonic()
        if begun < self._next_look:
            return
        holders = [self._me] if self.itself else []
        if self._note_memory([*holders, *self._members], workers):
            self._next_look = monotonic() + REST * (monotonic() - begun)

    def note_memory(self, s: Stat) -> None:
        """Record the new shared memory of a process that is about to be killed.

        Nothing else may know what it created since the last walk: its resource tracker,
        if it has one, may be killed before it is done.
        """
        with self._one:
            if self._shares:
                self._note_memory([s.pid], self.workers())

    def unclaimed(self) -> list[SegmentLine]:
        """New files in /dev/shm that no process of the run was seen to hold.

        None in a container: it may show the files of others, but not their processes.
        """
        sees_all = manifest.pid_namespace() == INITIAL_NAMESPACE
        found = procfs.segments().items() if self._shares and sees_all else ()
        return [
            SegmentLine(name, *identity, "", 0)
            for name, identity in found
            if identity not in self._known
        ]

    def _note_memory(self, pids: Iterable[int], workers: dict[int, str]) -> bool:
        """Record which new files these processes hold; whether there are new files."""
        new = {
            identity: name
            for name, identity in procfs.segments().items()
            if identity not in self._known
        }
        for pid in pids if new else ():
            member = self._members.get(pid)
            worker = member.worker if member else pid
            stage = workers.get(worker) or (member.stage if member else "")
            held = procfs.held(pid, writing=True) or set()
            for identity in (held & new.keys()) - self._known:
                line = SegmentLine(new[identity], *identity, stage, worker)
                self.segments.append(line)
                self.manifest_file.add(line)
                self._known.add(identity)
        return bool(new)
