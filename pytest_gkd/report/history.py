"""The last runs that reported to a directory, one line each."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_gkd import sanitize
from pytest_gkd.clock import monotonic
from pytest_gkd.files import append_line, json_line, json_lines, write_whole
from pytest_gkd.report.record import HISTORY, PASSED, RUNS

SCHEMA = 1
# Every line begins with its first key; a file that begins otherwise is not ours.
OURS = "pytest-gkd"
SIGN = f'{{"{OURS}":'.encode()
MOST_RUNS = 200
MOST_BYTES = 256 << 10
# Another run holds it for milliseconds.
LOCK_LIMIT_S = 2.0
LOCK_EVERY_S = 0.01
BANDWIDTH = "bus_bandwidth_gb_s"
SIZES, KEY_CHARS = 32, 40
MOST_LIKE = 40
# Runs are alike that have these settings, and the same machine, in common.
_SETTINGS = ("layout", "gpus", "world_size", "student")


def entry(report: Mapping[str, Any]) -> dict[str, Any]:
    """What the history keeps of a report.json."""
    stages = {}
    for stage in report["stages"]:
        kept = {"outcome": stage["outcome"], "duration_s": stage["duration_s"]}
        if bandwidth := _numbers((stage.get("facts") or {}).get(BANDWIDTH)):
            kept[BANDWIDTH] = bandwidth
        stages[stage["name"]] = kept
    keys = ("started", "ended", "commit", "interrupted", "injected", "versions")
    return {
        OURS: SCHEMA,
        **{key: report.get(key) for key in keys},
        "like": _kind(report),
        "stages": stages,
    }


def _numbers(table: Any) -> dict[str, float]:
    """Those in a table; a stage of the user's may have put anything there."""
    found = table.items() if isinstance(table, dict) else ()
    numbers = [(key, value) for key, value in found if isinstance(value, (int, float))]
    return {str(key)[:KEY_CHARS]: value for key, value in numbers[:SIZES]}


def _kind(report: Mapping[str, Any]) -> dict[str, Any]:
    settings = report.get("settings") or {}
    told = {name: settings.get(name) for name in _SETTINGS}
    return told | {"machine": report.get("machine") or {}}


# -- the file --------------------------------------------------------------------------


def append(path: Path, told: Mapping[str, Any]) -> None:
    """Add a run to the history at ``path``, in a directory that exists.

    The oldest runs go where it would hold more than 200, or 256 KiB. Raises OSError if
    it cannot be written, if what is there is not ours, or if its lock is not free.
    """
    with _held(path) as file:
        old = _tail(file)
        if old.strip() and not old.lstrip().startswith(SIGN):
            raise _not_ours(path)
        line = json_line(dict(told))
        lines = [one for one in old.splitlines() if one.strip()]
        size = len(old) + len(line) + 1
        if len(lines) < MOST_RUNS and size <= MOST_BYTES:
            append_line(file, line)
            return
        kept = [*lines, line.strip()][-MOST_RUNS:]
        while len(kept) > 1 and sum(map(len, kept)) + 2 * len(kept) > MOST_BYTES:
            del kept[0]
        _refuse_strangers_part(path.with_name(f"{path.name}.part"))
        text = b"\n".join([*kept, b""]).decode("utf-8", "replace")
        write_whole(path, text)


@contextlib.contextmanager
def _held(path: Path) -> Iterator[int]:
    """The file, created if missing, opened for this run alone."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    until = monotonic() + LOCK_LIMIT_S
    while True:
        try:
            file = os.open(path, flags | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise _not_ours(path) from None
            raise
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise _not_ours(path)
            # Another run may have put a shorter one in its place meanwhile.
            if lock(file) and _is_at(file, path):
                yield file
                return
        finally:
            os.close(file)
        if monotonic() > until:
            text = f"another process has held it for {LOCK_LIMIT_S:g} s"
            raise OSError(errno.EAGAIN, text, str(path))
        time.sleep(LOCK_EVERY_S)


def lock(file: int) -> bool:
    """Whether it is ours now; a file system without locks lets everybody in."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR)
    return True


def _is_at(file: int, path: Path) -> bool:
    try:
        there = path.lstat()
    except FileNotFoundError:
        return False
    here = os.fstat(file)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def _tail(file: int) -> bytes:
    """All of it, or its whole lines within the limit if somebody made it longer."""
    size = os.fstat(file).st_size
    if size <= MOST_BYTES:
        return os.pread(file, size, 0)
    head = os.pread(file, len(SIGN) + 1, 0)
    if not head.lstrip().startswith(SIGN):
        return head
    return os.pread(file, MOST_BYTES, size - MOST_BYTES).partition(b"\n")[2]


def _refuse_strangers_part(part: Path) -> None:
    """Raise OSError if a file of the name that is written to first is not ours."""
    with contextlib.suppress(FileNotFoundError):
        about = part.lstat()
        if not stat.S_ISREG(about.st_mode):
            raise _not_ours(part)
        with part.open("rb") as file:
            begins = file.read(len(SIGN))
        if begins and begins != SIGN:
            raise _not_ours(part)


def _not_ours(path: Path) -> OSError:
    text = "it was not made by pytest-gkd and is left as it is"
    return OSError(errno.EEXIST, text, str(path))


def of_report(path: Path) -> list[dict[str, Any]]:
    """The history that a report belongs to, the earliest run first; empty without one.

    Its texts are as they stand there: ``like`` sanitizes those that are used.
    ``path`` is the report's directory, or its report.json.
    """
    folder = (path if path.is_dir() else path.parent).resolve()
    if folder.parent.name == RUNS:
        folder = folder.parent.parent
    for one in (folder / HISTORY, folder.parent / HISTORY):
        with contextlib.suppress(OSError):
            file = os.open(one, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                found = _tail(file)
            finally:
                os.close(file)
            if found.lstrip().startswith(SIGN):
                return [one for one in json_lines(found) if _fits(one)]
    return []


def _fits(line: Mapping[str, Any]) -> bool:
    stages = line.get("stages")
    return (
        line.get(OURS) == SCHEMA
        and isinstance(line.get("started"), str)
        and isinstance(stages, dict)
        and all(isinstance(one, dict) for one in stages.values())
    )


# -- earlier runs ----------------------------------------------------------------------


def like(
    report: Mapping[str, Any], history: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """The earlier runs of the same kind and without an injected fault.

    The latest comes first; there are at most MOST_LIKE.
    """
    kind, began = _kind(report), str(report.get("started"))
    found: list[Mapping[str, Any]] = [
        run
        for run in history
        if run.get("like") == kind
        and not run.get("injected")
        and run["started"] < began
    ]
    found.sort(key=lambda run: str(run["started"]), reverse=True)
    return [sanitize.data(run) for run in found[:MOST_LIKE]]


def passed(
    name: str, runs: Sequence[Mapping[str, Any]], most: int
) -> list[Mapping[str, Any]]:
    """A stage in the latest ``most`` runs in which it passed."""
    stages = (run["stages"].get(name) or {} for run in runs)
    return [stage for stage in stages if stage.get("outcome") == PASSED][:most]
