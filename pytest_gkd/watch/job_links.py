"""How the processes of a job hang together: kernel calls, pipes and connections."""

from __future__ import annotations

from collections.abc import Sequence

import psutil

from pytest_gkd.processes import kernel_calls
from pytest_gkd.processes.kernel_calls import Call
from pytest_gkd.watch import process_facts
from pytest_gkd.watch.process_facts import Connection
from pytest_gkd.watch.samples import ProcessSample
from pytest_gkd.watch.waits import Known, Peer


def known(processes: Sequence[ProcessSample]) -> Known:
    """All of it, of processes whose stacks were taken."""
    made = calls(processes)
    held = readers(made, processes)
    return Known(calls=made, readers=held, peers=peers(processes))


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


def readers(
    made: dict[tuple[int, int], Call], processes: Sequence[ProcessSample]
) -> dict[tuple[str, str], list[int]]:
    """Who reads the pipes that somebody writes to, by node and name."""
    here = [process.pid for process in processes if not process.node]
    written = kernel_calls.pipes_in_use(
        c for (pid, _), c in made.items() if pid in here
    )
    found = {("", target): kernel_calls.readers(target, here) for target in written}
    for process in processes:
        for target in process.pipes:
            found.setdefault((process.node, target), []).append(process.pid)
    return found


def peers(processes: Sequence[ProcessSample]) -> dict[int, list[Peer]]:
    """The other ends of the TCP connections that each process has.

    A server's own ends are left out: it does not wait for who has called it.
    """
    made = {
        one.pid: one.connections if one.node else process_facts.connections(one.pid)
        for one in processes
    }
    nodes = {one.pid: one.node for one in processes}
    listening: dict[tuple[str, int], int] = {}
    own: dict[tuple[_End, _End], int] = {}
    homes: dict[str, set[str]] = {}  # the nodes that have an address
    for pid, connections in made.items():
        node = nodes[pid]
        for one in connections:
            if one.state == psutil.CONN_LISTEN:
                listening.setdefault((node, one.port), pid)
            else:
                own[_ends(node, one)] = pid
            homes.setdefault(one.host, set()).add(node)
    found: dict[int, list[Peer]] = {}
    for pid, connections in made.items():
        node = nodes[pid]
        for one in connections:
            if not one.peer_host or (node, one.port) in listening:
                continue
            whose = own.get(_ends(node, one)[::-1])
            is_same = one.peer_host == one.host or process_facts.is_loopback(
                one.peer_host
            )
            at = {node} if is_same else homes.get(one.peer_host, set())
            if whose is None and len(at) == 1:  # it has not accepted the connection yet
                whose = listening.get((min(at), one.peer_port))
            is_here = is_same or nodes.get(whose or 0) == node
            address = f"{one.peer_host}:{one.peer_port}"
            peer = Peer(address, whose, not is_here, one.fd)
            found.setdefault(pid, []).append(peer)
    return found


_End = tuple[str, str, int]


def _ends(node: str, one: Connection) -> tuple[_End, _End]:
    return _end(node, one.host, one.port), _end(node, one.peer_host, one.peer_port)


def _end(node: str, host: str, port: int) -> _End:
    """One end of a connection; a loopback's is another one on each node."""
    return (node if process_facts.is_loopback(host) else "", host, port)
