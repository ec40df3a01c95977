"""Whether a server of another machine can be reached: real ones, no byte sent."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pytest_gkd.diagnosis.stack_dump import MAIN, Frame, Thread
from pytest_gkd.watch import far_peers, process_facts
from pytest_gkd.watch.samples import ProcessSample, Role

# Both are of the loopback, and differ, as two machines' do.
HERE, FAR = "127.0.0.1", "127.0.0.2"


@pytest.fixture
def server() -> Iterator[socket.socket]:
    """Has a place for one connection that nobody has accepted."""
    listener = socket.create_server((FAR, 0), backlog=0)
    yield listener
    listener.close()


@pytest.fixture(autouse=True)
def two_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_facts, "is_loopback", lambda host: host == HERE)


@contextlib.contextmanager
def connected(*servers: socket.socket) -> Iterator[int]:
    """The pid of a process that is connected to these, and does nothing."""
    program = f"""
import socket, time
made = [socket.create_connection(tuple(a), source_address=({HERE!r}, 0))
        for a in {[one.getsockname() for one in servers]}]
print(flush=True)
time.sleep(100)
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as client:
        try:
            assert client.stdout is not None
            assert client.stdout.readline() == b"\n"
            yield client.pid
        finally:
            client.kill()


def asking(pid: int, function: str = "urlopen") -> ProcessSample:
    """A process as if it waited for an answer."""
    file = "urllib/request.py" if function == "urlopen" else "train.py"
    frame = Frame(file, 9, function)
    thread = Thread(MAIN, pid, (Frame("train.py", 4, "ask"), frame))
    role = Role("process", "train.py")
    return ProcessSample(pid, 1, 1, role, "python", threads=(thread,))


def test_a_server_that_is_busy_is_no_hole_and_gets_no_byte() -> None:
    with (
        socket.create_server((FAR, 0)) as busy,
        connected(busy) as pid,
    ):
        assert far_peers.unanswered([asking(pid)]) == ()
        busy.settimeout(5)
        first, probe = busy.accept()[0], busy.accept()[0]
        probe.settimeout(5)
        assert probe.recv(1) == b""  # it was closed, and nothing was sent
        first.close()
        probe.close()


def test_who_gets_no_answer_to_a_connection_is_told(
    server: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(far_peers, "CONNECT_S", 0.5)
    host, port = server.getsockname()
    with connected(server) as pid:
        # The one place is taken: the kernel answers no other connection.
        (told,) = far_peers.unanswered([asking(pid)])
        assert f"train.py (pid {pid}) waits for {host}:{port}" in told
        assert far_peers.unanswered([]) == ()


def test_a_refusal_is_an_answer(server: socket.socket) -> None:
    address = "{}:{}".format(*server.getsockname())
    server.close()
    assert far_peers.why_lost(address) == ""


def test_one_that_answers_is_enough(
    server: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(far_peers, "CONNECT_S", 0.5)
    with (
        socket.create_server((FAR, 0)) as other,
        connected(server, other) as pid,
    ):
        assert far_peers.unanswered([asking(pid)]) == ()


def test_who_waits_for_no_answer_is_not_asked_about(server: socket.socket) -> None:
    with connected(server) as pid:
        assert far_peers.unanswered([asking(pid, "compute")]) == ()
