"""Whether a server of another machine can be reached: real ones, no byte sent."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from pytest_gkd.diagnosis.stack_dump import MAIN, Frame, Thread
from pytest_gkd.watch import far_peers
from pytest_gkd.watch.samples import ProcessSample, Role

# Both are of the loopback, and differ, as two machines' do.
HERE, FAR = "127.0.0.1", "127.0.0.2"


@pytest.fixture
def server() -> Iterator[socket.socket]:
    """Has a place for one connection that nobody has accepted."""
    listener = socket.create_server((FAR, 0), backlog=0)
    yield listener
    listener.close()


def asking(function: str = "urlopen") -> ProcessSample:
    """This process, as if it waited for an answer."""
    file = "urllib/request.py" if function == "urlopen" else "train.py"
    frame = Frame(file, 9, function)
    thread = Thread(MAIN, os.getpid(), (Frame("train.py", 4, "ask"), frame))
    role = Role("process", "train.py")
    return ProcessSample(os.getpid(), 1, 1, role, "python", threads=(thread,))


def test_a_server_that_is_busy_is_no_hole_and_gets_no_byte() -> None:
    with (
        socket.create_server((FAR, 0)) as busy,
        socket.create_connection(busy.getsockname(), source_address=(HERE, 0)),
    ):
        assert far_peers.unanswered([asking()]) == ()
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
    with socket.create_connection((host, port), source_address=(HERE, 0)):
        # The one place is taken: the kernel answers no other connection.
        (told,) = far_peers.unanswered([asking()])
        assert f"train.py (pid {os.getpid()}) waits for {host}:{port}" in told
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
        socket.create_connection(server.getsockname(), source_address=(HERE, 0)),
        socket.create_connection(other.getsockname(), source_address=(HERE, 0)),
    ):
        assert far_peers.unanswered([asking()]) == ()


def test_who_waits_for_no_answer_is_not_asked_about(server: socket.socket) -> None:
    with socket.create_connection(server.getsockname(), source_address=(HERE, 0)):
        assert far_peers.unanswered([asking("compute")]) == ()
