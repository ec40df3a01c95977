"""The manifest: a list on disk of what a run has created, which outlives the run."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pytest_gkd.files import append_line, json_line, json_lines
from pytest_gkd.processes import cgroup, procfs
from pytest_gkd.processes.procfs import Identity

LIST = "created.jsonl"
RUN_PREFIX = "gkd-"


class RunLine(NamedTuple):
    """The run itself. ``boot``, ``pid_namespace`` and ``host`` say where its pids are
    valid; ``started`` is as in its report.json. ``groups`` is the directory of its
    workers' cgroups, empty if there are none."""

    pid: int
    start: int
    run_id: str
    boot: str
    pid_namespace: str
    host: str
    report: str
    started: str
    groups: str = ""


class ProcessLine(NamedTuple):
    """A process; ``worker`` is the pid of the worker it came from, 0 if unknown."""

    pid: int
    start: int
    command: str
    stage: str
    worker: int


class SegmentLine(NamedTuple):
    """A file in /dev/shm that appeared during the run, held by one of its processes."""

    name: str
    dev: int
    ino: int
    stage: str
    worker: int

    @property
    def identity(self) -> Identity:
        return Identity(self.dev, self.ino)


class FolderLine(NamedTuple):
    """A directory outside the run's own, created by a process of the run."""

    path: str
    dev: int
    ino: int
    stage: str
    worker: int


Line = RunLine | ProcessLine | SegmentLine | FolderLine
KINDS: dict[str, type[Line]] = {
    "run": RunLine,
    "process": ProcessLine,
    "segment": SegmentLine,
    "folder": FolderLine,
}


class Manifest(NamedTuple):
    """A manifest as read; ``before`` is what was in /dev/shm when the run began."""

    run: RunLine | None
    processes: list[ProcessLine]
    segments: list[SegmentLine]
    folders: list[FolderLine]
    before: set[Identity]


class ManifestFile:
    """Appends to the manifest, one line in a single write per entry.

    A full disk costs the line, not the run; ``problem`` then says so. Processes of this
    user can read it through ``handle``, even after its directory was cleared.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem = ""
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self.handle = Path(f"/proc/{os.getpid()}/fd/{self._fd}")

    def add(self, line: Line) -> None:
        """Append one line; the first one says which run this is."""
        kind = next(kind for kind, its in KINDS.items() if isinstance(line, its))
        self._write(kind, **line._asdict())

    def before(self, segments: dict[str, Identity]) -> None:
        """Record what was already in /dev/shm and so is not this run's."""
        self._write("before", segments=list(segments.values()))

    def close(self) -> None:
        os.close(self._fd)

    def _write(self, kind: str, **values: Any) -> None:
        try:
            append_line(self._fd, json_line({"kind": kind, **values}))
        except OSError as error:
            self.problem = f"{self.path}: {error.strerror}"


def read(data: bytes) -> Manifest:
    """Parse the manifest from its file's bytes, skipping incomplete lines."""
    found: dict[str, list[Any]] = {"before": [], **{kind: [] for kind in KINDS}}
    for entry in json_lines(data):
        with contextlib.suppress(TypeError, KeyError):
            kind = entry.pop("kind")
            if kind == "before":
                found[kind] += [Identity(*pair) for pair in entry["segments"]]
            else:
                found[kind].append(KINDS[kind](**entry))
    before, runs, processes, segments, folders = found.values()
    run = runs[-1] if runs else None
    return Manifest(run, processes, segments, folders, set(before))


def this_run(run_id: str, report: str, started: str) -> RunLine:
    """The line for a run that this process controls."""
    here = procfs.stat(os.getpid())
    return RunLine(
        os.getpid(),
        here.start if here else 0,
        run_id,
        boot(),
        pid_namespace(),
        os.uname().nodename,
        report,
        started,
        str(cgroup.base() or ""),
    )


def ray_folder(run_dir: Path) -> Path:
    """A run's directory for Ray if its own path is too long for Ray's sockets."""
    key = hashlib.sha256(os.fsencode(run_dir)).hexdigest()[:12]
    return Path("/tmp", f"gkd-ray-{key}")  # noqa: S108 - created private or not at all


def boot() -> str:
    """The id of the current boot (random(4)), empty if it is hidden."""
    try:
        return (procfs.PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def pid_namespace() -> str:
    """Which PID namespace this process is in (namespaces(7)), empty if hidden."""
    try:
        return str((procfs.PROC / "self/ns/pid").readlink())
    except OSError:
        return ""


# -- where manifests are found later ---------------------------------------------


def state_directory() -> Path | None:
    """Where runs are recorded whatever their temporary directory; None without a home.

    ``$XDG_STATE_HOME/pytest-gkd`` (XDG Base Directory Specification), mode 0700.
    """
    base = os.environ.get("XDG_STATE_HOME", "")
    try:
        home = Path(base) if base.startswith("/") else Path.home() / ".local/state"
    except RuntimeError:  # no HOME, and no passwd entry for the user
        return None
    return home / "pytest-gkd/runs"


def note(run_dir: Path) -> Path | None:
    """Leave a link to the run where ``gkd clean`` looks; None if that is impossible.

    It is only needed to find a run that had a different TMPDIR.
    """
    place = state_directory()
    if place is None:
        return None
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        link = place / f"{run_dir.name}-{os.getpid()}"
        link.symlink_to(run_dir)
    except OSError:
        return None
    return link


def find(temporary: list[Path]) -> Iterator[tuple[Path, Path | None]]:
    """The directories of this user's runs, each with the link that led to it.

    Callers check ``is_trusted`` first: the contents of another user's directory, or of
    one that others may write to, could be forged.
    """
    links: list[Path] = []
    if noted := state_directory():
        with contextlib.suppress(OSError):
            links = sorted(path for path in noted.iterdir() if path.is_symlink())
    seen: set[Path] = set()
    for link in links:
        target = link.readlink()
        seen.add(target)
        yield target, link
    for place in dict.fromkeys(temporary):
        for path in sorted(place.glob(f"{RUN_PREFIX}*/{LIST}")):
            if path.parent not in seen:
                seen.add(path.parent)
                yield path.parent, None


def is_trusted(run_dir: Path) -> bool:
    """Whether only this user can have written its contents."""
    try:
        here = run_dir.lstat()
    except OSError:
        return False
    return here.st_uid == os.geteuid() and here.st_mode & 0o170077 == 0o040000
