"""A cgroup for each worker, which nothing the worker starts can leave by forking.

cgroup v2 (the kernel's Documentation/admin-guide/cgroup-v2.rst): a frozen group neither
runs nor forks, but can still be killed with SIGKILL (cgroup.freeze, Linux 5.2). No
controller is enabled, so no limit changes. Where we may not create groups below that of
the pytest process, process trees are walked instead.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from pytest_gkd.clock import monotonic
from pytest_gkd.processes import procfs

PREFIX = "pytest-gkd-"
FREEZE_LIMIT_S = 1.0
REMOVE_LIMIT_S = 1.0


@functools.cache
def memory_events() -> Path | None:
    """The file with the memory events of the group that this process started in."""
    place = base()
    if place is not None and (place / "memory.events").exists():
        return place / "memory.events"
    return first_version("memory", "memory.oom_control")


def first_version(controller: str, file: str) -> Path | None:
    """A file of this process's cgroup v1 group; None without one.

    Version 1 has a hierarchy for each controller, or for a few of them together.
    """
    own = rf"\d+:(?:\S+,)?{controller}(?:,[^:]+)?"
    found = _group(own, rf"cgroup \S+ \S*\b{controller}\b")
    if found is None:
        return None
    place, root, group = found
    # In a container the path may be the host's; what is mounted is then our own group.
    below = group.relative_to(root) if group.is_relative_to(root) else ""
    here = place / below / file
    return here if here.exists() else None


@functools.cache
def base() -> Path | None:
    """The directory of the group this process started in; None without cgroup v2."""
    return _own()


def _own() -> Path | None:
    found = _group("0:", "cgroup2 ")
    if found is None:
        return None
    place, root, group = found
    if not group.is_relative_to(root):
        return None  # it is above what this container can see
    return place / group.relative_to(root)


def _group(hierarchy: str, mounted: str) -> tuple[Path, Path, Path] | None:
    """A hierarchy's mount point, the group that is mounted there, and our own group.

    ``hierarchy`` matches the start of its line in /proc/self/cgroup (cgroups(7)),
    ``mounted`` identifies it in /proc/self/mountinfo (proc(5)); both are patterns.
    """
    try:
        own = Path("/proc/self/cgroup").read_text("utf-8", "replace")
        mounts = Path("/proc/self/mountinfo").read_text("utf-8", "replace")
    except OSError:
        return None
    group = re.search(rf"^{hierarchy}:(/.*)$", own, re.MULTILINE)
    mount = re.search(
        rf"^\S+ \S+ \S+ (\S+) (\S+) .*? - {mounted}", mounts, re.MULTILINE
    )
    if group is None or mount is None:
        return None
    root, place = map(procfs.unescaped, mount.groups())
    return Path(place), Path(root), Path(group[1])


def of(run_id: str, pid: int) -> Path | None:
    """The group that a worker of the run with this id created, if it could."""
    place = base()
    group = place and place / f"{PREFIX}{run_id}-{pid}"
    return group if group and group.is_dir() else None


def of_run(place: str, run_id: str) -> list[Path]:
    """All groups of a run whose pytest process was in the group ``place``."""
    return sorted(Path(place).glob(f"{PREFIX}{run_id}-*")) if place and run_id else []


def join(run_id: str) -> bool:
    """Move this process, and so all it starts, into its own group, if permitted."""
    place = base()
    if place is None:
        return False
    group = place / f"{PREFIX}{run_id}-{os.getpid()}"
    try:
        group.mkdir()
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError:  # read-only, or not delegated to this user
        with contextlib.suppress(OSError):
            group.rmdir()
        return False
    return True


def members(group: Path) -> list[int]:
    """The pids in a group; empty if it is gone."""
    try:
        return [int(line) for line in (group / "cgroup.procs").read_text().split()]
    except OSError:
        return []


@contextlib.contextmanager
def frozen(group: Path | None) -> Iterator[None]:
    """Freeze a group; one that does not freeze within a second is walked as it is.

    So is one that contains this process, directly or in a group below: it would freeze
    itself, and nobody would thaw it.
    """
    own = _own()
    if group is None or (own and own.is_relative_to(group)):
        yield
        return
    deadline = monotonic() + FREEZE_LIMIT_S
    with contextlib.suppress(OSError):  # gone, or a kernel before 5.2
        (group / "cgroup.freeze").write_text("1")
        events = group / "cgroup.events"
        while "frozen 0" in events.read_text() and monotonic() < deadline:
            time.sleep(0.001)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            (group / "cgroup.freeze").write_text("0")


def remove(group: Path) -> None:
    """Remove a group that no longer has processes; one that is in use stays."""
    deadline = monotonic() + REMOVE_LIMIT_S
    while group.is_dir() and monotonic() < deadline:
        try:
            group.rmdir()
        except OSError:  # the killed processes are not gone yet
            time.sleep(0.005)
