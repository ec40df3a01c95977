"""Which system call a thread is blocked in, and on which file.

proc(5), /proc/PID/task/TID/syscall: the number of the call and its arguments; readable
only by those who may trace the process. A path among them is in /proc/PID/mem.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

# Linux, arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h:
# calls whose first argument is a file descriptor, then others that block.
_OF_A_FILE = {
    "x86_64": {
        0: "read",
        1: "write",
        16: "ioctl",
        17: "pread",
        18: "pwrite",
        19: "readv",
        20: "writev",
        40: "sendfile",
        42: "connect",
        43: "accept",
        44: "sendto",
        45: "recvfrom",
        46: "sendmsg",
        47: "recvmsg",
        72: "fcntl",
        73: "flock",
        74: "fsync",
        75: "fdatasync",
        77: "ftruncate",
        232: "epoll_wait",
        281: "epoll_wait",
        288: "accept",
    },
    "aarch64": {
        22: "epoll_wait",
        25: "fcntl",
        29: "ioctl",
        32: "flock",
        46: "ftruncate",
        63: "read",
        64: "write",
        65: "readv",
        66: "writev",
        67: "pread",
        68: "pwrite",
        71: "sendfile",
        82: "fsync",
        83: "fdatasync",
        202: "accept",
        203: "connect",
        206: "sendto",
        207: "recvfrom",
        211: "sendmsg",
        212: "recvmsg",
        242: "accept",
    },
}
_OTHER = {
    "x86_64": {
        7: "poll",
        23: "select",
        35: "nanosleep",
        61: "wait4",
        202: "futex",
        230: "clock_nanosleep",
        247: "waitid",
        270: "select",
        271: "poll",
    },
    "aarch64": {
        72: "select",
        73: "poll",
        95: "waitid",
        98: "futex",
        101: "nanosleep",
        115: "clock_nanosleep",
        260: "wait4",
    },
}
# Calls that take a path, with the number of that argument; with 1 a directory's
# descriptor is before it.
_OF_A_PATH = {
    "x86_64": {
        2: ("open", 0),
        82: ("rename", 0),
        83: ("mkdir", 0),
        87: ("unlink", 0),
        257: ("open", 1),
        258: ("mkdir", 1),
        262: ("stat", 1),
        263: ("unlink", 1),
        264: ("rename", 1),
        316: ("rename", 1),
        332: ("stat", 1),
    },
    "aarch64": {
        34: ("mkdir", 1),
        35: ("unlink", 1),
        38: ("rename", 1),
        56: ("open", 1),
        79: ("stat", 1),
        276: ("rename", 1),
        291: ("stat", 1),
    },
}
_WRITES = (
    "write",
    "pwrite",
    "writev",
    "fsync",
    "fdatasync",
    "ftruncate",
    "mkdir",
    "rename",
    "unlink",
)
_OPEN_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_LONGEST_PATH = 4096
_LEAST_NEGATIVE = 1 << 31  # AT_FDCWD, of 32 or 64 bits


class Call(NamedTuple):
    """A call that has not returned: ``write`` to descriptor 1, ``pipe:[4711]``.

    ``target`` is the file of the descriptor ``fd``, or the path that the call takes,
    and empty for a call of neither kind; ``fd`` is -1 without one. ``writes`` says
    whether it changes a file or a folder.
    """

    name: str
    fd: int = -1
    target: str = ""
    writes: bool = False

    def __str__(self) -> str:
        return f"{self.name}()" + (f" on {self.target}" if self.target else "")


def of(pid: int, thread: int = 0) -> Call | None:
    """The call that a thread (the main one by default) is in.

    None if it is running, cannot be inspected, or is in a call not listed here.
    """
    place = Path(f"/proc/{pid}")
    try:
        words = (place / f"task/{thread or pid}/syscall").read_text().split()
        number = int(words[0])
    except (OSError, ValueError, IndexError):
        return None
    machine = platform.machine()
    if name := _OF_A_FILE.get(machine, {}).get(number):
        fd = int(words[1], 16)
        return Call(name, fd, _target(place / f"fd/{fd}"), name in _WRITES)
    if number in (of_path := _OF_A_PATH.get(machine, {})):
        name, at = of_path[number]
        values = [int(word, 16) for word in words[1:]]
        writes = name in _WRITES or (name == "open" and values[at + 1] & _OPEN_WRITES)
        base = values[0] if at else None
        return Call(name, -1, _path(place, values[at], base), bool(writes))
    name = _OTHER.get(machine, {}).get(number, "")
    return Call(name) if name else None


def pipes_in_use(calls: Iterable[Call]) -> set[str]:
    """The pipes and sockets in which somebody is writing, as ``target`` names them."""
    return {
        call.target
        for call in calls
        if call.name.startswith("write")
        and call.target.startswith(("pipe:", "socket:"))
    }


def readers(target: str, pids: Iterable[int]) -> list[int]:
    """Those of ``pids`` that have this pipe open to read it, as far as we may see.

    None of a socket: who has it open has this end of it, not the other.
    """
    return [
        pid
        for pid in pids
        if target.startswith("pipe:")
        and any(
            _target(link) == target and _reads(link)
            for link in _links(Path(f"/proc/{pid}/fd"))
        )
    ]


def _reads(link: Path) -> bool:
    """Whether a descriptor was opened to read: its link's own bits tell (proc(5))."""
    try:
        return bool(link.lstat().st_mode & 0o400)
    except OSError:
        return False


def _path(place: Path, address: int, base: int | None) -> str:
    """A path that a call was given, from its process's memory; empty if unreadable."""
    try:
        with (place / "mem").open("rb", buffering=0) as memory:
            memory.seek(address)
            path = os.fsdecode(memory.read(_LONGEST_PATH).partition(b"\0")[0])
    except (OSError, ValueError, OverflowError):
        return ""
    inside = base is not None and base < _LEAST_NEGATIVE
    return str(Path(_target(place / (f"fd/{base}" if inside else "cwd")), path))


def _links(place: Path) -> list[Path]:
    try:
        return list(place.iterdir())
    except OSError:
        return []


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""
