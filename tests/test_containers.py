"""What containers take away: a run goes on with less, and says so in one line."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from pytest_gkd.processes import host_capabilities

HANG = """
import ctypes, subprocess, sys
import pytest

@pytest.mark.gkd_stage("hang", lane="probe", timeout=1)
def test_hang(gkd):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                     start_new_session=True)
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)
"""
PYTEST = (
    f"{sys.executable} -m pytest -p no:cacheprovider --gkd-stages=hang test_hang.py"
)
STUCK = "FAILED test_hang.py::test_hang - not finished within 1 s"
NOTES = "gkd: "

# seccomp(2) and prctl(2): the numbers of system calls are those of x86-64.
CALLS = {"ptrace": 101, "prctl": 157, "pidfd_send_signal": 424, "pidfd_open": 434}
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, FILTER = 22, 38, 2
REFUSED = 0x00050000 | 1  # SECCOMP_RET_ERRNO, EPERM
ALLOWED = 0x7FFF0000

root_only = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None,
    reason="mounts and PID namespaces are root's",
)
x86_only = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the numbers of system calls are x86-64's"
)


def refuse(*names: str) -> None:
    """From here on these system calls fail with EPERM, as under Docker's profile."""
    steps = [(0x20, 0, 0, 0)]  # load the number of the call
    for name in names:
        steps += [(0x15, 0, 1, CALLS[name]), (0x06, 0, 0, REFUSED)]
    steps.append((0x06, 0, 0, ALLOWED))
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    held = ctypes.create_string_buffer(code)
    program = struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(held))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(PR_SET_SECCOMP, FILTER, program, 0, 0) == 0


class Box:
    """A directory with a stage that hangs, and how pytest ran it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "test_hang.py").write_text(HANG)
        self.temporary = path / "t"
        self.temporary.mkdir()
        self.code = 0
        self.out = ""

    def run(self, script: str, before: Callable[[], None] | None = None) -> None:
        done = subprocess.run(
            ["sh", "-c", script],
            cwd=self.path,
            env={**os.environ, "TMPDIR": str(self.temporary)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
            preexec_fn=before,
        )
        self.code, self.out = done.returncode, done.stdout

    def mounted(self, *lines: str) -> None:
        """Run it where only it sees what ``lines`` mount."""
        script = "\n".join(["set -e", *lines, f"exec {PYTEST}"])
        (self.path / "mounted.sh").write_text(script)
        self.run("exec unshare --mount sh mounted.sh")

    def notes(self) -> list[str]:
        """The lines that say what there is less of."""
        usual = ("layout ", "report in ")
        lines = [line for line in self.out.splitlines() if line.startswith(NOTES)]
        return [n for n in lines if not n.removeprefix(NOTES).startswith(usual)]

    def ended_the_hang(self) -> bool:
        return (
            self.code == pytest.ExitCode.TESTS_FAILED
            and STUCK in self.out
            and "test_hang.py:11" in self.out
            and "Traceback" not in self.out
            and not list(self.temporary.glob("gkd-*"))
        )


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path)


@x86_only
def test_without_ptrace_and_pidfds_a_line_says_what_is_not_had(box: Box) -> None:
    box.run(f"exec {PYTEST}", partial(refuse, "ptrace", "pidfd_open"))
    assert box.ended_the_hang(), box.out
    (note,) = box.notes()
    assert note.startswith("gkd: ptrace is not allowed here (in Docker, --cap-add=")


@x86_only
def test_without_prctl_a_line_says_what_may_be_left(box: Box) -> None:
    box.run(f"exec {PYTEST}", partial(refuse, "prctl"))
    assert box.ended_the_hang(), box.out
    (note,) = box.notes()
    assert note.startswith("gkd: orphans cannot be adopted (prctl is refused)")


@root_only
def test_as_the_first_process_of_a_container_it_leaves_nothing(box: Box) -> None:
    box.run(f"exec unshare --pid --fork --mount-proc {PYTEST}")
    assert box.ended_the_hang(), box.out
    assert box.notes() == []


@root_only
def test_under_a_first_process_that_reaps_nothing_no_zombie_is_left(box: Box) -> None:
    counts = (
        "import os, subprocess, sys\n"
        "code = subprocess.run(sys.argv[1:]).returncode\n"
        "print('left:', [p for p in os.listdir('/proc') if p.isdigit()])\n"
        "sys.exit(code)"
    )
    (box.path / "first.py").write_text(counts)
    box.run(
        f"exec unshare --pid --fork --mount-proc {sys.executable} first.py {PYTEST}"
    )
    assert box.ended_the_hang(), box.out
    assert box.out.endswith("left: ['1']\n")


@root_only
def test_a_home_that_is_read_only_costs_a_line_and_small_shared_memory_none(
    box: Box,
) -> None:
    (box.path / "home").mkdir()
    box.mounted(
        "mount -t tmpfs -o size=64m shm /dev/shm",
        f"mount -t tmpfs -o ro home {box.path}/home",
        "unset XDG_CACHE_HOME XDG_STATE_HOME",
        f"export HOME={box.path}/home",
    )
    assert box.ended_the_hang(), box.out
    (note,) = box.notes()
    assert "the tiny models are rebuilt on every run" in note


@root_only
def test_a_working_directory_that_is_read_only_is_a_usage_error(box: Box) -> None:
    box.mounted(
        f"mount --bind {box.path} {box.path}",
        f"mount -o remount,ro,bind {box.path}",
        f"mount -t tmpfs t {box.temporary}",
        f"cd {box.path}",
    )
    assert box.code == pytest.ExitCode.USAGE_ERROR
    assert "cannot write the report to" in box.out
    assert "Traceback" not in box.out


@root_only
def test_a_temporary_directory_that_is_full_is_a_usage_error(box: Box) -> None:
    box.mounted(f"mount -t tmpfs -o size=64k t {box.temporary}")
    assert box.code == pytest.ExitCode.USAGE_ERROR
    assert f"{box.temporary} has 0.1 MB left. Name one: TMPDIR=DIR" in box.out
    assert "Traceback" not in box.out


def test_neither_ps_nor_a_home_is_needed(box: Box) -> None:
    box.run(f"unset HOME XDG_STATE_HOME; PATH=/nowhere exec {PYTEST}")
    assert box.ended_the_hang(), box.out


def test_a_missing_py_spy_costs_a_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    (line,) = host_capabilities.lacking(makes_models=False)
    assert line.startswith("py-spy is not installed: ")
