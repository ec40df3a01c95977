"""Whose the other end of a connection is, on this node and on others."""

from __future__ import annotations

import socket

import psutil
import pytest

from pytest_gkd.watch import job_links, process_facts
from pytest_gkd.watch.process_facts import Connection
from pytest_gkd.watch.samples import ProcessSample, Role
from pytest_gkd.watch.waits import Peer

A, B = "node-a", "node-b"
LISTEN, OPEN = psutil.CONN_LISTEN, psutil.CONN_ESTABLISHED
CLIENT = Connection("10.0.0.1", 40_000, "10.0.0.2", 8000, OPEN, 3)
LISTENER = Connection("::", 8000, "", 0, LISTEN, 4)
ACCEPTED = Connection("10.0.0.2", 8000, "10.0.0.1", 40_000, OPEN, 5)


def _process(pid: int, node: str, *connections: Connection) -> ProcessSample:
    role = Role("process", f"process {pid}")
    return ProcessSample(pid, 1, 1, role, "", node=node, connections=connections)


def _peers(*processes: ProcessSample) -> list[Peer]:
    """Those of the first process."""
    return job_links.peers(processes).get(processes[0].pid, [])


def test_a_server_on_another_node_is_known_by_the_connection() -> None:
    client = _process(1, A, CLIENT)
    server, other = _process(2, B, LISTENER, ACCEPTED), _process(3, B)
    assert _peers(client, server, other) == [Peer("10.0.0.2:8000", 2, True, 3)]
    assert _peers(server, client) == []  # who has called it is not waited for


def test_a_server_that_has_not_accepted_it_is_known_by_what_it_listens_on() -> None:
    """Its node has the address, by any connection of the job's processes there."""
    client = _process(1, A, CLIENT)
    to_ray = Connection("10.0.0.2", 41_000, "10.0.0.1", 6379, OPEN, 3)
    server, worker = _process(2, B, LISTENER), _process(3, B, to_ray)
    assert _peers(client, server, worker) == [Peer("10.0.0.2:8000", 2, True, 3)]
    # Nothing tells whose the address is.
    assert _peers(client, server) == [Peer("10.0.0.2:8000", None, True, 3)]


def test_what_listens_on_the_same_port_elsewhere_is_not_meant() -> None:
    client = _process(1, A, CLIENT)
    assert _peers(client, _process(2, A, LISTENER)) == [
        Peer("10.0.0.2:8000", None, True, 3)
    ]
    # Each node has a bridge of this address, as by Docker.
    bridge = Connection("10.0.0.2", 41_000, "10.0.0.9", 6379, OPEN, 3)
    both = [_process(2, A, LISTENER, bridge), _process(3, B, LISTENER, bridge)]
    assert _peers(client, *both) == [Peer("10.0.0.2:8000", None, True, 3)]


def test_addresses_that_two_nodes_have_are_told_apart_by_both_ends() -> None:
    """172.17.0.2 serves 172.17.0.1 on either node."""

    def pair(node: str, pid: int, port: int) -> tuple[ProcessSample, ProcessSample]:
        ends = ("172.17.0.1", port), ("172.17.0.2", 8000)
        client = Connection(*ends[0], *ends[1], OPEN, 3)
        served = Connection(*ends[1], *ends[0], OPEN, 3)
        return _process(pid, node, client), _process(pid + 1, node, LISTENER, served)

    found = job_links.peers([*pair(A, 1, 40_001), *pair(B, 5, 40_002)])
    assert found == {
        1: [Peer("172.17.0.2:8000", 2, False, 3)],
        5: [Peer("172.17.0.2:8000", 6, False, 3)],
    }


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.1.1", "::1"])
def test_a_loopback_is_another_one_on_each_node(host: str) -> None:
    client = _process(1, A, Connection("127.0.0.1", 40_000, host, 8000, OPEN, 3))
    served = Connection(host, 8000, "127.0.0.1", 40_000, OPEN, 3)
    elsewhere = _process(2, B, LISTENER, served)
    assert _peers(client, elsewhere) == [Peer(f"{host}:8000", None, False, 3)]
    here = _process(3, A, LISTENER)
    assert _peers(client, elsewhere, here) == [Peer(f"{host}:8000", 3, False, 3)]


def test_a_socket_that_takes_both_families_has_plain_addresses() -> None:
    """As those of gRPC, vLLM and asyncio do."""
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    address = ("", 0)
    with socket.create_server(
        address, family=socket.AF_INET6, dualstack_ipv6=True
    ) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = server.accept()
            with accepted:
                found = process_facts.connections(psutil.Process().pid)
                ends = {one.fd: one for one in found}
                there = ends[accepted.fileno()]
                assert (there.host, there.port) == client.getpeername()
                assert (there.peer_host, there.peer_port) == client.getsockname()
