"""Which system call a thread is blocked in, and on which file.

proc(5), /proc/PID/task/TID/syscall: the number of the call and its arguments; readable
only by those who may trace the process.
"""

from __future__ import annotations

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
        232: "epoll_wait",
        281: "epoll_wait",
        288: "accept",
    },
    "aarch64": {
        22: "epoll_wait",
        25: "fcntl",
        29: "ioctl",
        32: "flock",
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
        257: "open",
        2: "open",
    },
    "aarch64": {
        56: "open",
        72: "select",
        73: "poll",
        95: "waitid",
        98: "futex",
        101: "nanosleep",
        115: "clock_nanosleep",
        260: "wait4",
    },
}


class Call(NamedTuple):
    """A call that has not returned: ``write`` to descriptor 1, ``pipe:[4711]``.

    ``fd`` is -1 and ``target`` empty for a call that takes no descriptor.
    """

    name: str
    fd: int = -1
    target: str = ""

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
        return Call(name, fd, _target(place / f"fd/{fd}"))
    name = _OTHER.get(machine, {}).get(number, "")
    return Call(name) if name else None


def holders(target: str, pids: Iterable[int]) -> list[int]:
    """Those of ``pids`` that have this pipe or socket open, as far as we may see."""
    return [
        pid
        for pid in pids
        if any(_target(link) == target for link in _links(Path(f"/proc/{pid}/fd")))
    ]


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
