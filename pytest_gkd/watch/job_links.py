"""How the processes of a job hang together: kernel calls, pipes and connections."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import psutil

from pytest_gkd.processes import kernel_calls
from pytest_gkd.processes.kernel_calls import Call
from pytest_gkd.watch.samples import ProcessSample
from pytest_gkd.watch.waits import Known, Peer


def known(processes: Sequence[ProcessSample]) -> Known:
    """All of it, of processes whose stacks were taken."""
    made = calls(processes)
    held = holders(made, processes)
    return Known(calls=made, holders=held, peers=peers(processes))


def calls(processes: Sequence[ProcessSample]) -> dict[tuple[int, int], Call]:
    """The kernel call of each main thread and of each thread with a stack."""
    found: dict[tuple[int, int], Call] = {}
    for process in processes:
        found |= {(process.pid, number): call for number, call in process.calls}
        if main := dict(process.calls).get(process.local_pid):
            found[process.pid, process.pid] = main
        if process.node:
            continue
        for number in {process.pid, *(t.number for t in process.threads)} - {0}:
            if call := kernel_calls.of(process.pid, number):
                found[process.pid, number] = call
    return found


def holders(
    made: dict[tuple[int, int], Call], processes: Sequence[ProcessSample]
) -> dict[str, list[int]]:
    """Who has the pipes and sockets open that somebody writes to."""
    targets = {
        call.target
        for call in made.values()
        if call.name.startswith("write") and call.target.startswith(("pipe:", "socket"))
    }
    pids = [process.pid for process in processes]
    return {target: kernel_calls.holders(target, pids) for target in targets}


def peers(processes: Sequence[ProcessSample]) -> dict[int, list[Peer]]:
    """The other ends of the TCP connections that each process has.

    A server's own ends are left out: it does not wait for who has called it.
    """
    made: dict[int, list[Any]] = {}
    listening: dict[int, int] = {}
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            made[process.pid] = psutil.Process(process.pid).net_connections("tcp")
            for one in made[process.pid]:
                if one.status == psutil.CONN_LISTEN:
                    listening.setdefault(one.laddr.port, process.pid)
    own = {
        (one.laddr.ip, one.laddr.port): pid
        for pid, connections in made.items()
        for one in connections
        if one.status != psutil.CONN_LISTEN
    }
    found: dict[int, list[Peer]] = {}
    for pid, connections in made.items():
        ports = {one.laddr.port for one in connections if one.status == "LISTEN"}
        for one in connections:
            if not one.raddr or one.laddr.port in ports:
                continue
            at = (one.raddr.ip, one.raddr.port)
            is_here = at in own or one.raddr.ip == one.laddr.ip
            whose = own.get(at, listening.get(one.raddr.port) if is_here else None)
            peer = Peer(f"{at[0]}:{at[1]}", whose, not is_here, one.fd)
            found.setdefault(pid, []).append(peer)
    return found
