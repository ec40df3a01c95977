"""What the kernel tells of one process that is looked at closely.

Nothing but ``processes`` and psutil is imported: this also runs on a job's other nodes
(see ``node_agent``).
"""

from __future__ import annotations

import os
from typing import NamedTuple

import psutil

from pytest_gkd.processes import kernel_calls, procfs

_READS = {"x86_64": "0", "aarch64": "63"}  # read(2)'s number


class Facts(NamedTuple):
    """See ``samples.ProcessSample``, whose fields have the same names."""

    wchan: str = ""
    reads_terminal: bool = False
    receives: bool = False
    woken: int = 0


class Connection(NamedTuple):
    """A TCP socket of a process: both ends, a peer of port 0 where it has none,
    psutil's word for its state, and its descriptor. Hosts are as ``plain`` has them."""

    host: str
    port: int
    peer_host: str
    peer_port: int
    state: str
    fd: int


def connections(pid: int) -> tuple[Connection, ...]:
    """The TCP sockets of a process; none where that may not be seen."""
    try:
        found = psutil.Process(pid).net_connections("tcp")
    except (psutil.Error, OSError):
        return ()
    ends = ((one, *one.laddr, *(one.raddr or ("", 0))) for one in found)
    return tuple(
        Connection(plain(host), port, plain(peer), peer_port, one.status, one.fd)
        for one, host, port, peer, peer_port in ends
    )


def plain(host: str) -> str:
    """An address of IPv4 as such, also at a socket that takes IPv6 as well."""
    return host.removeprefix("::ffff:")


def is_loopback(host: str) -> bool:
    """Whether an address is the machine's own, whichever that is."""
    return host.startswith("127.") or host == "::1"


def of(pid: int) -> Facts:
    """What is known of a process now; what may not be read is as if it were not so."""
    return Facts(_wchan(pid), _reads_terminal(pid), _receives(pid), _woken(pid))


def tracer(pid: int) -> int:
    """Who debugs a process; 0 for nobody, and for py-spy."""
    found = procfs.status_word(pid, "TracerPid")
    number = int(found) if found.isdecimal() else 0
    program = procfs.full_command(number).partition(" ")[0] if number else ""
    return 0 if program.rpartition("/")[2] == "py-spy" else number


def _wchan(pid: int) -> str:
    try:
        return (procfs.PROC / str(pid) / "wchan").read_text("utf-8", "replace").strip()
    except OSError:
        return ""


def _receives(pid: int) -> bool:
    call = kernel_calls.of(pid)
    return (
        call is not None
        and call.name in ("read", "recvfrom", "recvmsg")
        and call.target.startswith("socket:")
    )


def _woken(pid: int) -> int:
    found = procfs.status_word(pid, "voluntary_ctxt_switches")
    return int(found) if found.isdecimal() else 0


def _reads_terminal(pid: int) -> bool:
    """Whether a process's main thread waits for what is typed at a terminal."""
    try:
        words = (procfs.PROC / str(pid) / "syscall").read_text().split()
    except OSError:
        return False
    if len(words) < 2 or words[0] != _READS.get(os.uname().machine):
        return False
    return procfs.link(pid, f"fd/{int(words[1], 16)}").startswith("/dev/pts/")
