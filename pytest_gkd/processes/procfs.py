"""What /proc says about processes: identity, parents, and shared memory.

Not psutil: the guardian runs this without site-packages, and starts in 25 ms; and a
walk over 116 processes, repeated every second, takes 0.7 ms (psutil: 7).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from pytest_gkd import sanitize
from pytest_gkd.clock import monotonic

PROC = Path("/proc")
SHM = Path("/dev/shm")  # noqa: S108 - where the system keeps it
COMMAND_LENGTH = 100
# All of a path but its last two parts; one that an option or a quote begins, too.
_DIRECTORIES = re.compile(r"""(?<![^\s='"])/(?:[^\s/]+/)+(?=[^\s/]+/[^\s/]+)""")
# What tells the processes of a job apart: --rank=3, --local_rank 3, node_rank=1.
_RANK = re.compile(r"(?<!\S)[\w.+-]{0,40}rank[= ]\d{1,6}(?!\S)", re.IGNORECASE)
MOST_RANKS = 3
EXEC_LIMIT_S = 0.1  # how long to wait for a process inside execve(2)
DEAD = ("Z", "X")
STOPPED = "T"  # by a signal; stopped by a debugger is "t"
# In the environment of everything a run starts; its value is the run's id. For what the
# pytest process itself starts, other than its workers, THEIRS is appended: that is not
# part of the run.
RUN_ID = "PYTEST_GKD_RUN"
THEIRS = "-pytest"
# Linux treats signal number 0 as an existence check.
PIDFD = hasattr(os, "pidfd_open") and hasattr(signal, "pidfd_send_signal")


class Stat(NamedTuple):
    """One process. ``start`` is in clock ticks since boot; with the pid it uniquely
    identifies a process within this boot. ``terminal`` is the number of its controlling
    terminal, 0 without one."""

    pid: int
    ppid: int
    state: str
    start: int
    group: int = 0
    session: int = 0
    terminal: int = 0


class Identity(NamedTuple):
    """Identifies a file: entries of the same name with different ones differ."""

    dev: int
    ino: int


# Saved before any stage can monkeypatch them, for one test or for good.
_fstat, _stat = os.fstat, os.stat


class Descriptor(NamedTuple):
    """One of this process's descriptors, and the file that it was opened for.

    A stage may close any descriptor; the next file that it opens reuses the number.
    """

    number: int
    file: Identity

    @classmethod
    def of(cls, number: int) -> Descriptor:
        """Raises OSError if it is not open."""
        here = _fstat(number)
        return cls(number, Identity(here.st_dev, here.st_ino))

    def is_open(self) -> bool:
        return self.is_same(self.number)

    def is_same(self, other: int | Path) -> bool:
        """Whether another descriptor, or a path, refers to the same file."""
        try:
            here = _stat(other)
        except OSError:
            return False
        return Identity(here.st_dev, here.st_ino) == self.file


def stat(pid: int) -> Stat | None:
    """None if there is no such process (proc(5), /proc/pid/stat)."""
    words = own_words(pid)
    if words is None:
        return None
    state, (ppid, group, session, terminal) = words[0].decode(), map(int, words[1:5])
    return Stat(pid, ppid, state, int(words[19]), group, session, terminal)


def own_words(pid: int | str) -> list[bytes] | None:
    """The fields of /proc/pid/stat from the state on; None if it is gone.

    A thread's too: ``self/task/123``.
    """
    # No pathlib or text layers: this is read for every process, every second.
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
    except OSError:
        return None
    try:
        text = os.read(fd, 4096)
    except OSError:
        return None
    finally:
        os.close(fd)
    # The name, in parentheses, may itself contain parentheses and spaces.
    return text[text.rindex(b")") + 1 :].split()


def is_alive(pid: int, start: int) -> bool:
    """Whether this process (not one reusing its pid) exists and is not a zombie."""
    found = stat(pid)
    return found is not None and found.start == start and found.state not in DEAD


def pids() -> set[int]:
    """Every visible process."""
    names = os.listdir(PROC)  # noqa: PTH208 - thousands of Paths, every second
    return {int(name) for name in names if name.isdigit()}


def table(
    *, dead: bool = False, known: Mapping[int, Stat] = MappingProxyType({})
) -> dict[int, Stat]:
    """Every visible process, by pid; zombies only with ``dead``.

    Of those that are there and ``known``, nothing is read anew.
    """
    # psutil's own walk stops at the first hidden process (proc(5), hidepid=1).
    found = (known.get(pid) or stat(pid) for pid in pids())
    return {s.pid: s for s in found if s and (dead or s.state not in DEAD)}


def below(seeds: Iterable[int], processes: dict[int, Stat]) -> set[int]:
    """``seeds`` and all their descendants."""
    children: dict[int, list[int]] = {}
    for process in processes.values():
        children.setdefault(process.ppid, []).append(process.pid)
    found: set[int] = set()
    todo = list(seeds)
    while todo:
        pid = todo.pop()
        if pid not in found:
            found.add(pid)
            todo += children.get(pid, ())
    return found


def owned(seeds: Iterable[int], processes: dict[int, Stat]) -> set[int]:
    """The live ``seeds``, all their descendants, and their orphans.

    An orphan is recognized by the session or process group that its ancestor leads; one
    that has left both belongs to nobody.
    """
    found = below({*seeds} & processes.keys(), processes)
    while (
        orphans := {s.pid for s in processes.values() if {s.group, s.session} & found}
        - found
    ):
        found |= below(orphans, processes)
    return found


def above(pid: int) -> set[int]:
    """``pid`` and its ancestors."""
    found: set[int] = set()
    while pid > 0 and pid not in found:
        found.add(pid)
        here = stat(pid)
        pid = here.ppid if here else 0
    return found


def full_command(pid: int) -> str:
    """Its command line, on one line; empty if it is gone."""
    place = PROC / str(pid)
    until = monotonic() + EXEC_LIMIT_S
    try:
        # Inside execve(2) it has a program but no arguments yet (fs/binfmt_elf.c), and
        # a parent that waits for the exec, as subprocess does, may already go on.
        while not (text := (place / "cmdline").read_bytes()) and _has_program(place):
            if monotonic() > until:
                break
            time.sleep(0.001)
        text = text or (place / "comm").read_bytes()
    except OSError:
        return ""
    return " ".join(text.replace(b"\0", b" ").decode("utf-8", "replace").split())


def _has_program(place: Path) -> bool:
    """Whether it is neither a zombie nor a kernel thread."""
    try:
        (place / "exe").readlink()
    except OSError:
        return False
    return True


def command(pid: int) -> str:
    """Its command line for display."""
    return shown(full_command(pid))


def shown(command_line: str, length: int = COMMAND_LENGTH) -> str:
    """A command line for display, in at most ``length`` characters.

    The program goes without its directory. Where the rest is too long, paths keep their
    last two parts, and what is then cut off still names the ranks that were in it.
    """
    program, blank, arguments = sanitize.line(command_line).partition(" ")
    if "::" not in program:  # a title of Ray's
        program = program.rpartition("/")[2] or program
    line = f"{program}{blank}{arguments}"
    if len(line) > length:
        line = _DIRECTORIES.sub("…/", line)
    if len(line) <= length:
        return line
    ranks = [*_RANK.finditer(line)][:MOST_RANKS]
    room = length - len(" ".join(["", *(one[0] for one in ranks)]))
    cut_off = [one[0] for one in ranks if one.end() > room - 2]
    if not cut_off:
        return f"{line[: length - 1].rstrip()}…"
    tail = " ".join(["…", *cut_off])
    return f"{line[: max(0, length - len(tail) - 1)].rstrip()} {tail}"[-length:]


def is_tracker(pid: int) -> bool:
    return "multiprocessing.resource_tracker" in full_command(pid)


def status_word(pid: int, field: str) -> str:
    """The first word of a field of /proc/pid/status; empty if it is gone."""
    try:
        text = (PROC / str(pid) / "status").read_text("utf-8", "replace")
    except OSError:
        return ""
    return "".join(text.partition(f"\n{field}:")[2].split(maxsplit=1)[:1])


def user(pid: int) -> int | None:
    """The real user id, None if it is gone."""
    found = status_word(pid, "Uid")
    return int(found) if found else None


def catches(pid: int, number: int) -> bool:
    """Whether it has a handler for a signal; without one, most signals would end it."""
    return _has(pid, "SigCgt", number - 1)


def may(capability: int) -> bool:
    """Whether this process has a capability in effect (capabilities(7))."""
    return _has(os.getpid(), "CapEff", capability)


def _has(pid: int, field: str, bit: int) -> bool:
    return bool(int(status_word(pid, field) or "0", 16) >> bit & 1)


def own_run_id() -> str:
    """The id of the run that this process belongs to; empty outside a run."""
    return os.environ.get(RUN_ID, "").removesuffix(THEIRS)


def carries(pid: int, variable: str, value: str) -> bool:
    """Whether it was started with this environment variable (see ``environ``)."""
    return environ(pid).get(variable) == value


def environ(pid: int) -> dict[str, str]:
    """The environment that a process was started with.

    Also empty if it cannot be read: another user's process, or one that overwrote it
    with its title, as vLLM's and Ray's processes do.
    """
    try:
        text = (PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    pairs = (one.decode("utf-8", "replace").partition("=") for one in text.split(b"\0"))
    return {name: value for name, sign, value in pairs if sign}


def link(pid: int, name: str) -> str:
    """The target of a link in /proc/pid, such as ``exe``; empty if it is unreadable."""
    try:
        return os.readlink(PROC / str(pid) / name)  # noqa: PTH115
    except OSError:
        return ""


def handle(pid: int) -> int | None:
    """A descriptor that pins a process (pidfd_open(2)); None if there is none."""
    # An old kernel or Python build, a container's seccomp filter, or it is gone.
    with contextlib.suppress(OSError):
        return os.pidfd_open(pid) if PIDFD else None
    return None


def send(pid: int, start: int, number: int) -> bool:
    """Signal exactly this process; False if it is gone or its pid was reused.

    Raises PermissionError for another user's process.
    """
    held = handle(pid)
    try:
        # The handle pins the process; its start time proves that it is the right one.
        if not is_alive(pid, start):
            return False
        if held is None:
            os.kill(pid, number)
        else:
            signal.pidfd_send_signal(held, number)
    except ProcessLookupError:
        return False
    finally:
        if held is not None:
            os.close(held)
    return True


def mounted_at(pid: int, path: str) -> str:
    """Where the file system of a path is mounted, as a process sees it; no file of it
    is touched, for it may not answer."""
    try:
        text = (PROC / str(pid) / "mountinfo").read_text("utf-8", "replace")
    except OSError:
        return path
    places = [unescaped(line.split()[4]) for line in text.splitlines()]
    above = [p for p in places if f"{path}/".startswith(f"{p.rstrip('/')}/")]
    return max(above, key=len, default=path)


def mounted_below(place: Path) -> list[str]:
    """The mount points below a directory, whose contents are not the directory's."""
    try:
        text = (PROC / "self/mounts").read_text("utf-8", "surrogateescape")
    except OSError:
        return []
    points = (unescaped(line.split(" ")[1]) for line in text.splitlines())
    return [point for point in points if point.startswith(f"{place.resolve()}/")]


def unescaped(path: str) -> str:
    """Decode a kernel-escaped path: spaces and the like are octal (fstab(5))."""
    return re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), path)


# -- shared memory ---------------------------------------------------------------


def shares_memory() -> bool:
    """Whether /dev/shm is a tmpfs mount, as it should be.

    Otherwise the numbers in a process's maps do not match those of its files.
    """
    try:
        lines = (PROC / "self/mounts").read_text("utf-8", "replace").splitlines()
    except OSError:
        return False
    place = str(SHM.resolve())
    mounted = [line.split()[2] for line in lines if line.split()[1] == place]
    return bool(mounted) and mounted[-1] == "tmpfs"


def segments() -> dict[str, Identity]:
    """The files in /dev/shm by name; empty if it cannot be read."""
    found: dict[str, Identity] = {}
    with contextlib.suppress(OSError), os.scandir(SHM) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # removed in the meantime
                here = entry.stat(follow_symlinks=False)
                if entry.is_file(follow_symlinks=False):
                    found[entry.name] = Identity(here.st_dev, here.st_ino)
    return found


def held(pid: int, *, writing: bool = False) -> set[Identity] | None:
    """The in-memory files that a process maps or has open, excluding those on disk.

    With ``writing``, only those it may write to. None if it may not be inspected.
    """
    place = PROC / str(pid)
    found: set[Identity] = set()
    try:
        for line in (place / "maps").read_bytes().splitlines():
            words = line.split(maxsplit=5)
            # 00:xx is a file system without a device, such as a tmpfs.
            if writing and not (b"w" in words[1] and b"s" in words[1]):
                continue
            if len(words) > 4 and words[3].startswith(b"00:") and words[4] != b"0":
                minor = int(words[3][3:], 16)
                found.add(Identity(os.makedev(0, minor), int(words[4])))
        found.update(_open_files(place / "fd", writing=writing))
    except PermissionError:
        return None
    except OSError:
        return set()  # it has ended
    return found


def _open_files(place: Path, *, writing: bool) -> Iterator[Identity]:
    with os.scandir(place) as entries:
        for entry in entries:
            try:
                # The link's own mode says how the file was opened (proc(5)).
                link = entry.stat(follow_symlinks=False)
                if writing and not link.st_mode & 0o200:
                    continue
                here = entry.stat()
            except OSError:
                continue
            if os.major(here.st_dev) == 0:
                yield Identity(here.st_dev, here.st_ino)
