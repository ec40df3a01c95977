"""Finds held locks that the job's own load of these files will wait for.

The data stage loads into a cache of its own, where nothing gets in its way. The job
uses the user's cache, where ``datasets`` waits for a lock indefinitely and silently.
Standard library, psutil and /proc only.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from pytest_gkd import hub_cache
from pytest_gkd.clock import monotonic
from pytest_gkd.processes import procfs
from pytest_gkd.stage_api import StageFault

# Another job that is preparing the same files holds it too, and releases it.
WAIT_S = 3.0
LOCKS = Path("/proc/locks")


def cache_root(environ: Mapping[str, str]) -> Path:
    """Where ``datasets`` keeps prepared files (datasets 5.2, config.py)."""
    if environ.get("HF_DATASETS_CACHE"):
        return Path(environ["HF_DATASETS_CACHE"]).expanduser()
    return hub_cache.home(environ) / "datasets"


def check(prepared_in: Iterable[Path], loaded_in: Path, root: Path) -> None:
    """Check that the directories used in ``loaded_in`` are not locked in ``root``.

    Raises StageFault ``data.cache``, naming the lock and its holder, if it has not been
    released after ``WAIT_S``.
    """
    deadline = monotonic() + WAIT_S
    for directory in prepared_in:
        for lock in lock_files(directory, loaded_in, root):
            while is_held(lock):
                if monotonic() >= deadline:
                    raise _held(lock)
                time.sleep(0.1)


def lock_files(directory: Path, loaded_in: Path, root: Path) -> Iterator[Path]:
    """The locks that a load in ``root`` takes, in order.

    The path of the prepared files within a cache depends on the data alone, so the path
    in ``loaded_in`` gives the one in ``root`` (datasets 5.2, builder.py, __init__ and
    download_and_prepare).
    """
    prepared = root / directory.relative_to(loaded_in)
    yield root / (prepared.as_posix().replace("/", "_") + ".lock")
    yield prepared.with_name(prepared.name + "_builder.lock")


def is_held(lock: Path) -> bool:
    """Whether another process holds the lock; False if there is no such file."""
    try:
        descriptor = os.open(lock, os.O_RDWR)
    except OSError:
        return False  # not there yet, too long a name, or not ours: no wait
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def holder(lock: Path) -> tuple[int, int, str] | None:
    """The holder: its pid, and the number and text of its line in /proc/locks.

    None for a process in another container or on another machine: not listed here.
    """
    status = lock.stat()
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    for number, line in enumerate(LOCKS.read_text().splitlines(), 1):
        words = line.split()
        if "->" not in words and words[5] == f"{device}:{status.st_ino}":
            return int(words[4]), number, line
    return None


def _held(lock: Path) -> StageFault:
    found = holder(lock)
    facts: dict[str, Any] = {"path": str(lock)}
    who = "a process of another container or machine"
    if found is not None:
        facts["pid"] = found[0]
        who = f"process {found[0]}{_described(found[0])}"
    return StageFault(
        "data.cache",
        f"{who} holds the lock of these files in the datasets cache, for which the "
        f"job's own load would wait forever: {lock}",
        facts=facts,
        evidence=() if found is None else ((str(LOCKS), found[1], found[2]),),
    )


def _described(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        command = procfs.shown(" ".join(process.cmdline()), 60)
        return f" ({process.status()}: {command or process.name()})"
    except psutil.Error:
        return ""
