"""Where processes stand, taken from real processes that stand there."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from waiting import until

from pytest_gkd.processes import stacks, tree

PYTHON = sys.executable  # some tests hide it
LIMIT_S = 20.0  # of a collection; the machine that runs these tests may be busy

ARMED = """
from pathlib import Path
from pytest_gkd.processes import stacks
stacks.arm(Path(sys.argv[1]))
"""
SLEEPS = """
def waits_for_ever():
    print(os.getpid(), flush=True)
    time.sleep(60)

waits_for_ever()
"""
HOLDS_THE_GIL = """
import ctypes
libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)

def locks_twice():
    signal.alarm(60)
    print(os.getpid(), flush=True)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)

locks_twice()
"""
HAS_A_CHILD = """
def awaits_its_child():
    code = "import os, time\\n" + {code!r}
    subprocess.run([sys.executable, "-c", code])

awaits_its_child()
"""
MOVES = """
def first_place():
    print(os.getpid(), flush=True)
    sys.stdin.readline()

def second_place():
    print("moved", flush=True)
    sys.stdin.readline()

first_place()
second_place()
"""
DIES = """
def kills_itself():
    os.kill(os.getpid(), signal.{name})

kills_itself()
"""
HANGS = [
    pytest.param(SLEEPS, "waits_for_ever", id="sleeps"),
    pytest.param(HOLDS_THE_GIL, "locks_twice", id="holds-the-gil"),
]

Child = subprocess.Popen[str]
Start = Callable[..., Child]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts programs; returns when they have said where they are."""
    started: list[Child] = []

    def begin(*parts: str) -> Child:
        code = "\n".join(["import os, signal, subprocess, sys, time", *parts])
        child = subprocess.Popen(
            [PYTHON, "-c", textwrap.dedent(code), str(tmp_path / "armed")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        started.append(child)
        assert child.stdout is not None
        child.stdout.readline()
        return child

    yield begin
    for child in started:
        if child.poll() is not None:
            continue
        for below in psutil.Process(child.pid).children(recursive=True):
            below.kill()
        child.kill()
        child.wait()
    for child in started:
        child.communicate()


def collect(child: Child, tmp_path: Path) -> list[stacks.Stack]:
    armed, out = tmp_path / "armed", tmp_path / "out"
    return stacks.collect(child.pid, armed, out, limit_s=LIMIT_S)


def await_status(child: Child, status: str) -> None:
    until(lambda: psutil.Process(child.pid).status() == status)


# -- with py-spy -------------------------------------------------------------------


@pytest.mark.parametrize(("program", "function"), HANGS)
def test_the_function_that_a_process_stands_in_is_named(
    program: str, function: str, start: Start, tmp_path: Path
) -> None:
    (stack,) = collect(start(program), tmp_path)
    assert f"{function} (<string>:" in stack.text
    assert function in stack.where()


def test_the_stack_is_kept_in_a_file_with_its_command(
    start: Start, tmp_path: Path
) -> None:
    child = start(SLEEPS)
    (stack,) = collect(child, tmp_path)
    assert stack.path == tmp_path / f"out/{child.pid}.txt"
    kept = stack.path.read_text()
    assert kept.startswith(f"{child.pid} {Path(PYTHON).name} -c ")
    assert "waits_for_ever" in kept


def test_children_are_asked_too(start: Start, tmp_path: Path) -> None:
    child = start(HAS_A_CHILD.format(code=SLEEPS))
    first, second = collect(child, tmp_path)
    assert first.pid == child.pid
    assert "awaits_its_child" in first.text
    assert "waits_for_ever" in second.text


def test_a_stopped_process_shows_its_stack_and_stays_stopped(
    start: Start, tmp_path: Path
) -> None:
    child = start(SLEEPS)
    child.send_signal(signal.SIGSTOP)
    await_status(child, psutil.STATUS_STOPPED)
    (stack,) = collect(child, tmp_path)
    assert "waits_for_ever" in stack.text
    assert psutil.Process(child.pid).status() == psutil.STATUS_STOPPED


def test_a_process_that_is_not_python_tells_its_state(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            (stack,) = stacks.collect(
                child.pid, tmp_path, tmp_path / "out", limit_s=LIMIT_S
            )
        finally:
            child.kill()
    assert "state: sleeping" in stack.text
    assert re.search(r"waits in kernel function: \w+", stack.text)


@pytest.mark.skipif(
    os.getuid() != 0 or not shutil.which("setpriv"), reason="needs root and setpriv"
)
def test_a_process_that_may_not_be_looked_into_is_not_called_gone() -> None:
    """py-spy says of it: "Check that the process is running"."""
    other = ["setpriv", "--reuid=65534", "--clear-groups", "sleep", "60"]
    program = (
        "import psutil, sys\nfrom pytest_gkd.processes import py_spy\n"
        "print(py_spy.note(psutil.Process(int(sys.argv[1])), 'Error: is it running?'))"
    )
    look = ["setpriv", "--bounding-set=-sys_ptrace", sys.executable, "-c", program]
    with subprocess.Popen(other) as job:
        try:
            until(lambda: psutil.Process(job.pid).uids().effective == 65534)
            told = subprocess.run(
                [*look, str(job.pid)], check=True, capture_output=True, text=True
            )
        finally:
            job.kill()
    assert told.stdout.startswith("ptrace is not allowed on it: another user's")
    assert "state: sleeping" in told.stdout


def test_a_process_that_is_gone_has_no_stack(tmp_path: Path) -> None:
    child = subprocess.Popen([PYTHON, "-c", ""])
    child.wait()
    assert stacks.collect(child.pid, tmp_path, tmp_path) == []


# -- without -----------------------------------------------------------------------


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where py-spy is looked for; it is not there."""
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setattr(sys, "executable", str(directory / "python"))
    monkeypatch.setenv("PATH", str(directory))
    return directory


def refuse(tools: Path) -> None:
    """A py-spy that may not look, as in a container without the right to."""
    program = tools / "py-spy"
    program.write_text("#!/bin/sh\necho 'Permission Denied: no ptrace here'\nexit 1\n")
    program.chmod(0o700)


@pytest.mark.parametrize(("program", "function"), HANGS)
def test_an_armed_process_writes_its_stack_where_py_spy_is_missing(
    program: str, function: str, start: Start, tools: Path, tmp_path: Path
) -> None:
    child = start(ARMED, program)
    await_status(child, psutil.STATUS_SLEEPING)
    (stack,) = collect(child, tmp_path)
    assert f"in {function}" in stack.text
    assert f": {function} (<string>:" in stack.where()


def test_an_armed_process_writes_its_stack_where_py_spy_is_refused(
    start: Start, tools: Path, tmp_path: Path
) -> None:
    refuse(tools)
    (stack,) = collect(start(ARMED, SLEEPS), tmp_path)
    assert "in waits_for_ever" in stack.text


def test_a_second_sample_shows_where_the_process_stands_by_then(
    start: Start, tools: Path, tmp_path: Path
) -> None:
    child = start(ARMED, MOVES)
    (first,) = collect(child, tmp_path)
    assert child.stdin is not None
    assert child.stdout is not None
    print("move", file=child.stdin, flush=True)
    child.stdout.readline()
    (second,) = collect(child, tmp_path)
    assert "in first_place" in first.text
    assert "in second_place" in second.text
    assert "in first_place" not in second.text


def test_a_process_that_is_not_armed_is_not_signalled(
    start: Start, tools: Path, tmp_path: Path
) -> None:
    child = start(SLEEPS)
    await_status(child, psutil.STATUS_SLEEPING)
    (stack,) = collect(child, tmp_path)
    assert stack.text.startswith(
        "py-spy is not installed (pip install py-spy)\nstate: sleeping"
    )
    assert child.poll() is None


def test_a_process_that_took_its_handler_away_is_not_signalled(
    start: Start, tools: Path, tmp_path: Path
) -> None:
    child = start(ARMED, "signal.signal(signal.SIGUSR1, signal.SIG_DFL)", SLEEPS)
    collect(child, tmp_path)
    assert child.poll() is None


def test_why_there_are_no_stacks_is_said(
    start: Start, tools: Path, tmp_path: Path
) -> None:
    refuse(tools)
    (stack,) = collect(start(SLEEPS), tmp_path)
    assert stack.text.startswith("Permission Denied: no ptrace here")
    assert "Permission Denied" in stack.where()


def test_a_stopped_process_that_cannot_be_asked_is_noted_as_stopped(
    start: Start, tools: Path, tmp_path: Path
) -> None:
    child = start(SLEEPS)
    child.send_signal(signal.SIGSTOP)
    await_status(child, psutil.STATUS_STOPPED)
    (stack,) = collect(child, tmp_path)
    assert "state: stopped" in stack.text


# -- crashes -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT", "SIGFPE"])
def test_a_crash_leaves_its_stack(name: str, start: Start, tmp_path: Path) -> None:
    child = start(ARMED, DIES.format(name=name))
    assert child.wait() == -signal.Signals[name]
    (stack,) = stacks.of_crash(child.pid, tmp_path / "armed", tmp_path / "out")
    assert "in kills_itself" in stack.text
    assert stack.where().startswith(f"{child.pid} (the stage's own process): kills_")
    assert "kills_itself" in (tmp_path / f"out/{child.pid}.txt").read_text()


def test_a_process_that_was_killed_leaves_none(start: Start, tmp_path: Path) -> None:
    child = start(ARMED, DIES.format(name="SIGKILL"))
    child.wait()
    assert stacks.of_crash(child.pid, tmp_path / "armed", tmp_path / "out") == []


def test_a_process_that_was_not_armed_leaves_none(tmp_path: Path) -> None:
    assert stacks.of_crash(1, tmp_path / "armed", tmp_path / "out") == []


# -- reading dumps -----------------------------------------------------------------

OF_PY_SPY = """\
Process 12: python -m pytest
Python v3.11.7 (/usr/bin/python3.11)

Thread 13 (idle): "Thread-1 (loop)"
    wait (threading.py:331)
    run (helper.py:4)
Thread 12 (idle): "MainThread"
    recv (engine.py:90)
    generate (engine.py:40)
    test_vllm (stages/test_vllm.py:12)
    pytest_pyfunc_call (_pytest/python.py:166)
    RunOnce.pytest_runtest_protocol (pytest_gkd/run/other_plugins.py:109)
"""
OF_FAULTHANDLER = """\
Thread 0x01 (most recent call first):
  File "/lib/threading.py", line 331 in wait
  File "/helper.py", line 4 in run

Current thread 0x02 (most recent call first):
  File "/engine.py", line 90 in recv
  File "/engine.py", line 40 in generate
  File "/test_vllm.py", line 12 in test_vllm
"""


def test_the_main_threads_two_innermost_frames_are_shown_of_py_spys_dump() -> None:
    shown = stacks.innermost(OF_PY_SPY, 12)
    assert shown == "recv (engine.py:90) < generate (engine.py:40)"


def test_what_runs_a_stage_is_not_shown_below_it() -> None:
    alone = OF_PY_SPY.replace(
        "recv (engine.py:90)\n    generate (engine.py:40)\n    ", ""
    )
    assert stacks.innermost(alone, 12) == "test_vllm (stages/test_vllm.py:12)"


def test_a_main_thread_that_has_another_name_is_known_by_its_number() -> None:
    renamed = OF_PY_SPY.replace("MainThread", "worker")
    assert stacks.innermost(renamed, 12).startswith("recv ")


def test_the_main_threads_two_innermost_frames_are_shown_of_faulthandlers_dump() -> (
    None
):
    shown = stacks.innermost(OF_FAULTHANDLER, 12)
    assert shown == "recv (/engine.py:90) < generate (/engine.py:40)"


def test_pytests_own_frames_are_passed_over() -> None:
    dump = (
        'Thread 12 (active): "MainThread"\n'
        "    readline (_pytest/capture.py:3)\n"
        "    mine (test_mine.py:9)\n"
        "    _multicall (pluggy/_callers.py:121)\n"
        "    <module> (<string>:1)\n"
    )
    assert stacks.innermost(dump, 12) == "mine (test_mine.py:9)"


def test_pytests_own_frames_are_shown_where_there_are_no_others() -> None:
    dump = 'Thread 12 (active): "MainThread"\n    wait (_pytest/main.py:3)\n'
    assert stacks.innermost(dump, 12) == "wait (_pytest/main.py:3)"


def test_without_frames_the_last_lines_are_shown() -> None:
    text = "py-spy is not installed\nstate: sleeping\n"
    assert stacks.innermost(text, 12) == "py-spy is not installed; state: sleeping"


COMES_AND_GOES = """
print(os.getpid(), flush=True)
until = time.monotonic() + 30
while time.monotonic() < until:
    for child in [subprocess.Popen(["true"]) for _ in range(4)]:
        child.wait()
"""


def test_children_that_come_and_go_do_not_stop_a_collection(
    start: Start, tmp_path: Path
) -> None:
    child = start(COMES_AND_GOES)
    for _ in range(15):
        found = stacks.collect(child.pid, tmp_path, tmp_path / "out", limit_s=0.3)
        assert found[0].pid == child.pid


def test_an_armed_process_writes_its_stack_where_py_spy_hangs(
    start: Start, tools: Path, tmp_path: Path
) -> None:
    program = tools / "py-spy"
    program.write_text("#!/bin/sh\nexec /bin/sleep 30\n")
    program.chmod(0o700)
    child = start(ARMED, SLEEPS)
    armed, out = tmp_path / "armed", tmp_path / "out"
    (stack,) = stacks.collect(child.pid, armed, out, limit_s=1)
    assert "in waits_for_ever" in stack.text


def test_of_a_crowd_only_the_first_are_asked(tmp_path: Path) -> None:
    crowd = (
        "import os, signal, sys\n"
        f"for _ in range({stacks.LIMIT + 5}):\n"
        "    if os.fork() == 0:\n"
        "        signal.pause()\n"
        "print(flush=True)\n"
        "signal.pause()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", crowd], stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        try:
            found = stacks.collect(parent.pid, tmp_path / "armed", tmp_path / "out")
        finally:
            tree.stop(parent.pid, itself=True)
    assert len(found) == stacks.LIMIT
    assert found[0].pid == parent.pid
    told = (tmp_path / "out/more.txt").read_text()
    assert told.startswith("6 more processes")
