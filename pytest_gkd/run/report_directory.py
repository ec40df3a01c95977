"""The directory of a run's report: marked as ours, locked by one run, private.

A directory without our marker is somebody else's. No symbolic link is followed: each
component of the path is opened by itself, and what is moved or removed is named
relative to the directory that was opened (openat(2)).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import stat
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pytest_gkd.files import make_way, write_json
from pytest_gkd.processes import cleanup, procfs
from pytest_gkd.report.record import (
    DIRECTORY,
    HISTORY,
    PAGE,
    PAGE_HEAD,
    PAGE_SIGN,
    REPORT,
    RUNS,
)

MARKER = ".pytest-gkd-report"
SIGNATURE = "Made by pytest-gkd, which may move and remove the report in here.\n"
FOLDERS = ("stacks", "output")
PARTS = (
    *(f"{name}{end}" for name in (REPORT, PAGE) for end in ("", ".part")),
    *FOLDERS,
)
KEPT = 5

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_RUN_NAME = re.compile(r"\d{8}-\d{6}-\d+")
# Stacks of a worker not running a stage, and output from before the first one.
_NO_STAGE = {"stacks": re.compile(r"gw\d+"), "output": re.compile("session")}


class ReportRefusedError(Exception):
    """A directory that a report must not be written to; the text says why."""


class ReportDir:
    """Claims ``name`` below ``base`` (None: the default) and holds it until ``close``.

    An earlier report in it is moved to ``runs``, where the last five are kept. If
    another run holds the directory, this one gets its own in ``runs``, and ``notes``
    say so. ``path`` is absolute, as is ``history``, a file for what remains of all runs
    (see report.history). Raises ReportRefusedError for a directory that is not
    ours, and OSError if nothing can be written.
    """

    def __init__(self, base: Path, name: str | None = None) -> None:
        self.notes: list[str] = []
        wanted = Path(name or DIRECTORY)
        with contextlib.ExitStack() as opened:
            fd = _open(base, wanted, opened)
            above, aside = fd, RUNS
            if name is None:
                above, aside = _step(fd, "..", opened), f"../{RUNS}"
                _ignore_in_git(above)
            _refuse_unmarked(fd)
            lock = _hold(fd, opened)
            if lock is None:
                runs = _step(above, RUNS, opened)
                _prune(runs)
                fd, own = _fresh(runs, time.time_ns(), opened)
                lock = _hold(fd, opened)
                self.notes.append(
                    f"another run is writing its report to {wanted}; this one's goes "
                    f"to {os.path.normpath(wanted / aside / own)}"
                )
            elif _parts(fd):
                _refuse_strangers(fd, lock)
                runs = _step(above, RUNS, opened)
                _keep(fd, lock, runs, aside, opened)
                _prune(runs)
            assert lock is not None
            _sign(lock)
            _close_to_others(fd)
            self._marker = lock
            self.path = _true_path(fd)
            self.history = _true_path(above) / HISTORY
            self._fd = fd
            self._is_default = name is None
            self._one = threading.Lock()
            self._opened = opened.pop_all()

    def restore(self, path: Path) -> None:
        """Ensure that ``path``, this very directory, exists and is still this run's.

        If a stage has removed it, it is recreated and held. Raises OSError if something
        else is in its place by now: that is the user's, or another run's.
        """
        with self._one:
            restore(path)
            here, held = path.lstat(), os.fstat(self._fd)
            if (here.st_dev, here.st_ino) != (held.st_dev, held.st_ino):
                self._take(path)

    def _take(self, path: Path) -> None:
        with contextlib.ExitStack() as opened:
            fd = os.open(path, _DIRECTORY)
            opened.callback(os.close, fd)
            lock = _hold(fd, opened)
            if lock is None or _lexists(fd, REPORT):
                text = "another run's report is in its place"
                raise OSError(errno.EEXIST, text, str(path))
            if self._is_default:
                _ignore_in_git(_step(fd, "..", opened))
            self._fd, self._marker = fd, lock
            self._opened.push(opened.pop_all())

    def claim(self, stages: list[str]) -> None:
        """Record in the marker that these stages ran, if the report cannot say so.

        The marker already has its disk block, even if the disk is full. Raises OSError.
        """
        with self._one:
            begun_ns = os.fstat(self._marker).st_mtime_ns
            _sign(self._marker, stages)
            os.utime(self._marker, ns=(begun_ns, begun_ns))

    def close(self) -> None:
        """Make the whole report private to this user, and release the directory."""
        with self._opened:
            if not procfs.mounted_below(self.path):
                _make_private(self._fd, self._marker)


def restore(path: Path) -> None:
    """Recreate the directory of a run's report if a stage has removed it.

    Raises OSError if something else is in its place by now: that is the user's.
    """
    make_way(path)
    if not os.path.lexists(path):
        # Atomically: another thread of this run may look for the marker meanwhile.
        made = Path(tempfile.mkdtemp(prefix=f"{path.name}.", dir=path.parent))
        try:
            (made / MARKER).write_text(SIGNATURE)
            made.rename(path)
        except OSError as error:
            (made / MARKER).unlink(missing_ok=True)
            made.rmdir()
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise  # otherwise something else took its place meanwhile
    fd = os.open(path, _DIRECTORY)
    try:
        if not _bears_marker(fd):
            text = f"no report (a directory without {MARKER}) is in its place"
            raise OSError(errno.EEXIST, text, str(path))
    finally:
        os.close(fd)


# -- opening it ------------------------------------------------------------------------


def _open(base: Path, wanted: Path, opened: contextlib.ExitStack) -> int:
    """Open the directory, creating it if missing, from ``base`` without any links.

    The parents of an absolute path are the user's choice, links included; the last
    component must not be a link.
    """
    parts = list(wanted.parts)
    if wanted.is_absolute():
        wanted.parent.mkdir(parents=True, exist_ok=True)
        base, parts = wanted.parent, [wanted.name] if wanted.name else []
    fd = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    opened.callback(os.close, fd)
    for part in parts:
        fd = _step(fd, part, opened)
    return fd


def _step(fd: int, part: str, opened: contextlib.ExitStack) -> int:
    """Open a directory in another one, creating it (mode 0700) if missing."""
    made = False
    with contextlib.suppress(FileExistsError):
        os.mkdir(part, 0o700, dir_fd=fd)
        made = True
    try:
        found = _enter(fd, part, opened)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        place = _true_path(fd) / part
        if place.is_symlink():
            text = f"{place} is a symbolic link (to {place.readlink()})"
            raise ReportRefusedError(f"{text}, which is not followed") from None
        raise ReportRefusedError(f"{place} is not a directory") from None
    if made:
        os.fchmod(found, 0o700)  # whatever the umask
    return found


def _enter(fd: int, part: str, opened: contextlib.ExitStack) -> int:
    """Open an existing directory in another one. Raises OSError, also for a link."""
    found = os.open(part, _DIRECTORY, dir_fd=fd)
    opened.callback(os.close, found)
    return found


def _anchor(fd: int) -> Path:
    """A path to an open directory that stays valid even if it is renamed."""
    return Path(f"/proc/self/fd/{fd}")


def _true_path(fd: int) -> Path:
    return _anchor(fd).readlink()


def _ignore_in_git(fd: int) -> None:
    with contextlib.suppress(FileExistsError):  # even as a link, it is the user's
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        made = os.open(".gitignore", flags, 0o600, dir_fd=fd)
        try:
            os.write(made, b"*\n")
        except OSError:
            os.unlink(".gitignore", dir_fd=fd)  # an empty one ignores nothing
            raise
        finally:
            os.close(made)


# -- ownership -------------------------------------------------------------------------


def _names(fd: int) -> list[str]:
    return sorted(path.name for path in _anchor(fd).iterdir())


def _lexists(fd: int, name: str) -> bool:
    return os.path.lexists(_anchor(fd) / name)


def _parts(fd: int) -> list[str]:
    """The parts of a report that are there. A page is one if we have made it."""
    there = [part for part in PARTS if _lexists(fd, part)]
    return [part for part in there if not part.startswith(PAGE) or _is_page(fd, part)]


def _is_page(fd: int, name: str) -> bool:
    with contextlib.suppress(OSError):
        page = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=fd)
        with os.fdopen(page, "rb") as file:
            return PAGE_SIGN in file.read(PAGE_HEAD)
    return False


def _is_marked(fd: int) -> bool:
    """Whether it contains our marker; an empty one was just being written."""
    with contextlib.suppress(OSError):
        marker = os.open(MARKER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=fd)
        with os.fdopen(marker, "rb") as file:
            return SIGNATURE.encode().startswith(file.read(len(SIGNATURE)))
    return False


def _bears_marker(fd: int) -> bool:
    """The same without opening it: closing it would drop this run's lock (F_SETLK)."""
    with contextlib.suppress(FileNotFoundError):
        found = os.stat(MARKER, dir_fd=fd, follow_symlinks=False)
        return stat.S_ISREG(found.st_mode) and found.st_size >= len(SIGNATURE)
    return False


def _refuse_unmarked(fd: int) -> None:
    there = _names(fd)
    if there and not _is_marked(fd):
        more = ", ..." if len(there) > 3 else ""
        raise ReportRefusedError(
            f"{_true_path(fd)} is not a report's directory (it has no {MARKER}) and is "
            f"not empty: {', '.join(there[:3])}{more}"
        )


def _refuse_strangers(fd: int, marker: int) -> None:
    strangers = list(_strangers(fd, marker))
    if strangers:
        path = _true_path(fd)
        raise ReportRefusedError(
            f"{path / strangers[0]} is not part of the report in {path}, which would "
            "have to be moved out of the way: move it elsewhere, or remove it if an "
            "interrupted run left it"
        )


def _strangers(fd: int, marker: int) -> Iterator[str]:
    """Entries in the parts of a report that are not proven to come from its stages.

    A job may have written to ``output`` meanwhile; that is not ours to move.
    """
    report, ran = _read(fd), _ran(fd, marker)
    for part in _parts(fd):
        try:
            here = os.stat(part, dir_fd=fd, follow_symlinks=False)
        except FileNotFoundError:
            continue
        wanted = stat.S_ISDIR if part in FOLDERS else stat.S_ISREG
        unreadable = part == REPORT and not isinstance(report.get("stages"), list)
        if unreadable or not wanted(here.st_mode):
            yield part
        elif part in FOLDERS:
            with contextlib.ExitStack() as opened:
                for name in _names(_enter(fd, part, opened)):
                    if not _is_ours(ran, part, name):
                        yield f"{part}/{name}"


def _is_ours(ran: set[str] | None, folder: str, name: str) -> bool:
    """Whether ``folder/name`` belongs to a run whose stages ``ran`` (see ``_ran``)."""
    if ran is None:
        return False
    return name in ran or _NO_STAGE[folder].fullmatch(name) is not None


def _ran(fd: int, marker: int) -> set[str] | None:
    """The folders of stages that ran, according to the report and the marker.

    None, so that nothing counts as ours, if neither can be read.
    """
    report = _read(fd)
    names = [str(one.get("name")) for one in _stages(report) if one.get("ran") is True]
    claims = _claims(marker)
    if "stages" not in report and not claims:
        return None
    return {name.split("/")[0] for name in names + claims}


def _claims(marker: int) -> list[str]:
    """The stages that a held marker names; reopening it would lose the lock."""
    signature = SIGNATURE.encode()
    text = os.pread(marker, os.fstat(marker).st_size, 0)
    with contextlib.suppress(ValueError):
        found = json.loads(text.removeprefix(signature))
        if text.startswith(signature) and isinstance(found, list):
            return [str(name) for name in found]
    return []


def _read(fd: int) -> dict[str, Any]:
    """The report in a directory; empty if there is no readable one."""
    with contextlib.suppress(OSError, ValueError):
        file = os.open(REPORT, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=fd)
        with os.fdopen(file, "rb") as report:
            found = json.load(report)
        if isinstance(found, dict):
            return found
    return {}


def _stages(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for one in _list(report, "stages") if isinstance(one, dict)]


def _list(entries: dict[str, Any], name: str) -> list[Any]:
    found = entries.get(name)
    return found if isinstance(found, list) else []


def _hold(fd: int, opened: contextlib.ExitStack) -> int | None:
    """The marker, created if missing and locked; None while another run holds it.

    The lock ends with the process, however that ends, and is not inherited by its
    children (fcntl(2), F_SETLK). A file system without locks lets everybody in.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    marker = os.open(MARKER, flags, 0o600, dir_fd=fd)
    opened.callback(os.close, marker)
    try:
        fcntl.lockf(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return None
    return marker


def _sign(marker: int, ran: Sequence[str] = ()) -> None:
    """Rewrite the marker within its block: a full disk may not provide another."""
    claims = json.dumps(sorted(ran)) if ran else ""
    text = f"{SIGNATURE}{claims}".encode()
    os.pwrite(marker, text, 0)
    os.truncate(marker, len(text))
    os.fchmod(marker, 0o600)


# -- earlier reports -------------------------------------------------------------------


def _fresh(runs: int, begun_ns: int, opened: contextlib.ExitStack) -> tuple[int, str]:
    """A new directory in ``runs`` for a run that began at ``begun_ns``, and its name.

    ``begun_ns`` is nanoseconds since the epoch; the name is in UTC and sorts by time.
    """
    while True:
        moment = time.gmtime(begun_ns // 10**9)
        name = f"{time.strftime('%Y%m%d-%H%M%S', moment)}-{begun_ns % 10**9:09}"
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=runs)
            return _step(runs, name, opened), name
        begun_ns += 1


def _keep(
    fd: int, lock: int, runs: int, aside: str, opened: contextlib.ExitStack
) -> None:
    """Move the report in ``fd`` to a directory of its own in ``runs``, which is
    ``aside`` as seen from the report."""
    kept, name = _fresh(runs, os.stat(MARKER, dir_fd=fd).st_mtime_ns, opened)
    with contextlib.ExitStack() as held:
        marker = _hold(kept, held)
        assert marker is not None
        _sign(marker, _claims(lock))
        for part in _parts(fd):
            with contextlib.suppress(FileNotFoundError):
                os.rename(part, part, src_dir_fd=fd, dst_dir_fd=kept)
    report = _read(kept)
    if _follow(report, f"{aside}/{name}"):
        write_json(_true_path(kept) / REPORT, report)


def _follow(report: dict[str, Any], moved: str) -> bool:
    """Make the paths in a moved report point to its files; whether there were any."""
    changed = False
    for stage in _stages(report):
        for part in FOLDERS:
            paths = _list(stage, part)
            for at, path in enumerate(paths):
                below = f"/{part}/{stage.get('name')}/"
                place, found, rest = str(path).rpartition(below)
                if found:
                    paths[at] = os.path.normpath(f"{place}/{moved}") + found + rest
                    changed = True
    return changed


def _prune(runs: int) -> None:
    """Remove all but the last few, except those still in use or with other contents."""
    names = [name for name in _names(runs) if _RUN_NAME.fullmatch(name)]
    for name in names[:-KEPT]:
        # Whatever cannot be removed stays.
        with contextlib.suppress(OSError, ReportRefusedError):
            _remove(runs, name)


def _remove(runs: int, name: str) -> None:
    with contextlib.ExitStack() as opened:
        fd = _enter(runs, name, opened)
        parts = _parts(fd)
        more = set(_names(fd)) - {*parts, MARKER}
        if more or not _is_marked(fd):
            return
        marker = _hold(fd, opened)
        if marker is None or any(_strangers(fd, marker)):
            return
        for part in parts:
            if part in FOLDERS:
                cleanup.remove_tree(_anchor(fd) / part)
            else:
                os.unlink(part, dir_fd=fd)
        if _names(fd) == [MARKER]:
            os.unlink(MARKER, dir_fd=fd)
            os.rmdir(name, dir_fd=runs)


# -- permissions -----------------------------------------------------------------------


def _make_private(fd: int, marker: int) -> None:
    """Revoke others' access to what the stages' processes created in ``fd``.

    A file with another hard link is left alone: it may be the user's elsewhere. So is
    anything not proven to be ours.
    """
    ran = _ran(fd, marker)
    for folder in FOLDERS:
        if not _lexists(fd, folder):
            continue
        top = True
        for _, below, names, here in os.fwalk(folder, dir_fd=fd):
            if top:
                below[:] = [name for name in below if _is_ours(ran, folder, name)]
                names = [name for name in names if _is_ours(ran, folder, name)]
                top = False
            _close_to_others(here)
            for name in names:
                _take_from_others(here, name)


def _close_to_others(fd: int) -> None:
    with contextlib.suppress(PermissionError):  # it belongs to another user
        os.fchmod(fd, 0o700)


def _take_from_others(fd: int, name: str) -> None:
    with contextlib.suppress(OSError):  # removed meanwhile, or another user's
        file = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
        try:
            here = os.fstat(file)
            if stat.S_ISREG(here.st_mode) and here.st_nlink == 1:
                _anchor(file).chmod(0o600)
        finally:
            os.close(file)
