"""Resource use of a process tree, and whether an idle one may have reason to idle."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from pytest_gkd.processes import procfs
from pytest_gkd.processes import tree as processes

# System calls from which a thread wakes by itself: nanosleep and clock_nanosleep, on
# x86-64 and arm64 (the kernel's syscall_64.tbl and asm-generic/unistd.h).
SLEEPING = {"x86_64": {"35", "230"}, "aarch64": {"101", "115"}}

_TICKS, _PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Usage:
    """What a tree has used up to ``at`` (seconds of ``time.monotonic()``).

    ``cpu_s`` is user and system time; ``io_bytes`` is what read(2) and write(2) moved,
    whatever is behind the descriptor, plus what was read from disk; both are totals
    over ``pids``. ``stopped`` are those stopped by a signal. ``network_bytes`` is the
    traffic of the machine's interfaces, excluding loopback.
    """

    at: float
    cpu_s: float
    io_bytes: int
    network_bytes: int
    pids: frozenset[int]
    stopped: frozenset[int]


class ProcessUse(NamedTuple):
    """What one process has used so far: CPU time in seconds, including children it has
    waited for, bytes as in ``Usage`` (None: not permitted to read), and memory."""

    cpu_s: float
    io_bytes: int | None
    rss_bytes: int
    state: str


def of_process(pid: int) -> ProcessUse | None:
    """What a process has used, from proc(5); None if it is gone.

    Not psutil: a job may have hundreds, and each is read every second.
    """
    found = procfs.own_words(pid)
    if found is None:
        return None
    ticks = sum(map(int, found[11:15]))
    return ProcessUse(
        ticks / _TICKS, _io_bytes(pid), int(found[21]) * _PAGE, found[0].decode()
    )


def _io_bytes(pid: int) -> int | None:
    try:
        text = Path(f"/proc/{pid}/io").read_bytes()
    except OSError:
        return None
    told = dict(line.split(b": ") for line in text.splitlines())
    # read_bytes also covers page faults on mapped files.
    return sum(int(told[name]) for name in (b"rchar", b"wchar", b"read_bytes"))


def read(pid: int, at: float) -> Usage:
    """The usage of ``pid`` and its descendants, except those that have ended."""
    cpu_s, io_bytes = 0.0, 0
    pids, stopped = set(), set()
    for process in _tree(pid):
        used = of_process(process.pid)
        if used is None or used.state in procfs.DEAD:
            continue
        pids.add(process.pid)
        cpu_s += used.cpu_s
        io_bytes += used.io_bytes or 0
        if used.state == procfs.STOPPED:
            stopped.add(process.pid)
    return Usage(
        at, cpu_s, io_bytes, network_bytes(), frozenset(pids), frozenset(stopped)
    )


def main_thread(pid: int) -> tuple[str, int]:
    """The status of a process's main thread, and its number of context switches.

    Unlike CPU time, which is counted in ticks, the latter shows every wakeup. Raises
    psutil.NoSuchProcess.
    """
    process = psutil.Process(pid)
    with process.oneshot():
        return process.status(), sum(process.num_ctx_switches())


def may_be_waiting(pid: int) -> str:
    """Why an idle tree may still be fine; empty if nothing suggests so.

    Its main thread sleeps for a set time, a process is in uninterruptible sleep, or a
    connection is open to a process outside the stage, which may be working for it.
    """
    call = _system_call(pid)
    if call is None:
        return "which system call it is in cannot be read here"
    if call in SLEEPING.get(os.uname().machine, set()):
        return "it sleeps for a set time"
    ours: set[tuple[object, object]] = set()
    theirs: set[tuple[object, object]] = set()
    for process in _tree(pid):
        try:
            if process.status() == psutil.STATUS_DISK_SLEEP:
                return f"process {process.pid} waits inside the kernel"
            connections = process.net_connections(kind="tcp")
        except psutil.NoSuchProcess:
            continue
        except psutil.AccessDenied:
            return f"the connections of process {process.pid} cannot be read here"
        for one in connections:
            if one.status == psutil.CONN_ESTABLISHED:
                ours.add((_end(one.laddr), _end(one.raddr)))
                theirs.add((_end(one.raddr), _end(one.laddr)))
    outside = sorted(str(local_peer[1]) for local_peer in ours - theirs)
    return (
        f"it is connected to a process outside the stage, at {outside[0]}"
        if outside
        else ""
    )


def _tree(pid: int) -> list[psutil.Process]:
    try:
        return [psutil.Process(pid), *processes.descendants(pid)]
    except psutil.NoSuchProcess:
        return []


def _system_call(pid: int) -> str | None:
    """The number of the system call that the main thread is blocked in."""
    try:
        return Path(f"/proc/{pid}/syscall").read_text().split()[0]
    except OSError:
        return None


def _end(address: Any) -> tuple[str, int]:
    """One end of a connection; an IPv4-mapped IPv6 address as IPv4."""
    host: str = address[0]
    return host.removeprefix("::ffff:"), int(address[1])


def network_bytes() -> int:
    """Bytes through the machine's network interfaces, excluding loopback."""
    counters = psutil.net_io_counters(pernic=True)
    return sum(
        one.bytes_recv + one.bytes_sent
        for name, one in counters.items()
        if name != "lo"
    )


def own_addresses() -> list[str]:
    """The IP addresses of the machine's interfaces, excluding loopback."""
    return sorted(
        one.address.partition("%")[0]
        for name, some in psutil.net_if_addrs().items()
        for one in some
        if one.family in (socket.AF_INET, socket.AF_INET6)
        and not one.address.startswith("127.")
        and one.address != "::1"
    )
