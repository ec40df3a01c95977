"""What real process trees use, and what an idle one may be waiting for."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
from waiting import until

from pytest_gkd.processes import resource_use, tree

READY = "print('ready', flush=True); "


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts Python code that says ``ready``; ends it with its children."""
    started: list[subprocess.Popen[str]] = []

    def begin(code: str) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
        )
        started.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        return child

    yield begin
    for child in started:
        tree.stop(child.pid, itself=True)
        child.communicate()


def test_the_cpu_time_of_a_child_counts(
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    child = start(
        "import os, signal\n"
        "if os.fork() == 0:\n"
        "    total = sum(range(10_000_000))\n"
        f"    {READY}\n"
        "signal.pause()"
    )
    usage = resource_use.read(child.pid, 0.0)
    assert len(usage.pids) == 2
    assert usage.cpu_s > 0.05


def test_what_is_written_counts(start: Callable[..., subprocess.Popen[str]]) -> None:
    idle = start(f"import signal; {READY}signal.pause()")
    writer = start(
        "import signal\n"
        "with open('/dev/null', 'wb', buffering=0) as file:\n"
        "    file.write(bytes(50_000_000))\n"
        f"{READY}signal.pause()"
    )
    difference = (
        resource_use.read(writer.pid, 0.0).io_bytes
        - resource_use.read(idle.pid, 0.0).io_bytes
    )
    assert difference > 40_000_000


def test_a_stopped_process_is_named(
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    child = start(f"import os, signal; {READY}os.kill(os.getpid(), signal.SIGSTOP)")
    until(lambda: resource_use.main_thread(child.pid)[0] == psutil.STATUS_STOPPED)
    assert resource_use.read(child.pid, 0.0).stopped == {child.pid}


def test_a_thread_that_polls_is_seen_to_wake(
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    child = start(f"import time\n{READY}\nwhile True: time.sleep(0.001)")
    _, before = resource_use.main_thread(child.pid)
    until(lambda: resource_use.main_thread(child.pid)[1] != before)


def test_a_thread_that_waits_is_not_seen_to_wake(
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    child = start(f"import signal; {READY}signal.pause()")
    until(lambda: resource_use.main_thread(child.pid)[0] == psutil.STATUS_SLEEPING)
    first = resource_use.main_thread(child.pid)
    for _ in range(20):
        assert resource_use.main_thread(child.pid) == first
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("module", "waits", "said"),
    [
        ("time", "time.sleep(60)", "it sleeps for a set time"),
        ("threading", "threading.Event().wait(60)", ""),
    ],
)
def test_a_sleep_ends_by_itself_and_nothing_speaks_for_who_waits_for_a_lock(
    start: Callable[..., subprocess.Popen[str]], module: str, waits: str, said: str
) -> None:
    child = start(f"import {module}; {READY}{waits}")
    until(lambda: resource_use.main_thread(child.pid)[0] == psutil.STATUS_SLEEPING)
    assert resource_use.may_be_waiting(child.pid) == said


def test_a_connection_to_somebody_outside_may_bring_an_answer(
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        child = start(
            "import socket\n"
            f"one = socket.create_connection(('127.0.0.1', {port}))\n"
            f"{READY}one.recv(1)"
        )
        theirs, _ = server.accept()
        with theirs:
            told = resource_use.may_be_waiting(child.pid)
    assert told.startswith("it is connected to a process outside the stage, at ")
    assert str(port) in told


def test_a_connection_within_the_tree_brings_nothing(
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    child = start(
        "import os, signal, socket\n"
        "server = socket.create_server(('::1', 0), family=socket.AF_INET6)\n"
        "if os.fork() == 0:\n"
        "    theirs, _ = server.accept()\n"
        "    signal.pause()\n"
        "one = socket.create_connection(server.getsockname()[:2])\n"
        f"{READY}one.recv(1)"
    )
    # The child accepts a moment after its parent is connected.
    until(lambda: resource_use.may_be_waiting(child.pid) == "")
