"""Stacks as py-spy and faulthandler print them are read into threads and frames."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pytest_gkd.diagnosis import stack_dump
from pytest_gkd.diagnosis.stack_dump import Frame
from pytest_gkd.processes import host_capabilities

PROGRAM = """
import faulthandler, queue, signal, threading, time
faulthandler.register(signal.SIGUSR2)
waits = queue.Queue().get
threading.Thread(target=waits, name='loa"der (1)', daemon=True).start()
def sleeps():
    print(flush=True)
    time.sleep(60)
sleeps()
"""
OF_NATIVE = """\
Process 7: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 7 (idle): "MainThread"
    0x7fa568c49f16 (libc.so.6)
    pybind11::cpp_function<bool, std::ratio<(long)1, (long)10> > (libtorch_python.so)
    all_reduce (torch/distributed/distributed_c10d.py:3252)
    <module> (train.py:7)
    _run_code (<frozen runpy>:88)
"""


@pytest.fixture
def program(tmp_path: Path) -> object:
    place = tmp_path / "program.py"
    place.write_text(PROGRAM)
    with subprocess.Popen(
        [sys.executable, place], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(0.2)
        yield child
        child.kill()


def _last(thread: stack_dump.Thread) -> list[tuple[str, int]]:
    return [(frame.function, frame.line) for frame in thread.frames[-2:]]


@pytest.mark.skipif(not host_capabilities.may_trace(), reason="needs ptrace")
@pytest.mark.parametrize("native", [False, True])
def test_a_live_process_is_read_from_py_spy(
    program: subprocess.Popen[bytes], native: bool
) -> None:
    spy = host_capabilities.py_spy()
    assert spy is not None
    command = [spy, "dump", "--pid", str(program.pid), *["--native"] * native]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    main, other = stack_dump.threads(text, program.pid)
    assert main.is_main
    assert main.number == program.pid
    own = [(f.function, f.line) for f in main.frames if f.line]
    assert own[-2:] == [("<module>", 9), ("sleeps", 8)]
    assert other.name == 'loa"der (1)'
    assert "Queue.get" in [frame.function for frame in other.frames]
    assert native == any(not frame.line for frame in main.frames)


def test_a_live_process_is_read_from_faulthandler(
    program: subprocess.Popen[bytes],
) -> None:
    program.send_signal(signal.SIGUSR2)
    time.sleep(0.3)
    program.kill()
    assert program.stderr is not None
    text = program.stderr.read().decode()
    main, other = stack_dump.threads(text, program.pid)
    assert main.is_main
    assert _last(main) == [("<module>", 9), ("sleeps", 8)]
    assert not other.is_main
    assert other.frames[-1].function == "wait"


def test_native_frames_have_a_library_and_no_line() -> None:
    (main,) = stack_dump.threads(OF_NATIVE, 7)
    assert main.frames[0] == Frame("<frozen runpy>", 88, "_run_code")
    assert main.frames[-1] == Frame("libc.so.6", 0, "0x7fa568c49f16")
    assert main.frames[-2].file == "libtorch_python.so"
    assert main.state == "idle"


@pytest.mark.parametrize(
    "text", ["", "py-spy is not installed\nstate: sleeping", "Thread 7 (idle)\n"]
)
def test_without_frames_there_are_no_threads(text: str) -> None:
    assert stack_dump.threads(text, 7) == ()
