"""Runs whose pytest process is killed or interrupted: nothing of them may be left."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import resource
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fresh_python
import psutil
import pytest
from waiting import until

import pytest_gkd
from pytest_gkd.clock import monotonic
from pytest_gkd.processes import guardian_start, procfs
from pytest_gkd.processes.guardian import Watch
from pytest_gkd.processes.heartbeat import Pulse, Sign
from pytest_gkd.report.record import RunRecord
from pytest_gkd.run.guardian_watch import GuardianWatch
from pytest_gkd.run.recorder import Recorder
from pytest_gkd.run.run_directory import RunDir
from pytest_gkd.run.worker_watch import WorkerWatch

LIMIT_S = 120

# C code that keeps the GIL forever; a child in its own session that ignores SIGTERM;
# a daemon that forked twice and wiped its environment; shared memory.
HANGS = """
import ctypes, os, subprocess, sys
from multiprocessing import shared_memory
from pathlib import Path
import pytest

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);" \\
    "print(flush=True); time.sleep(600)"
DAEMON = '''
import os, sys
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
os.execve(sys.executable, [sys.executable, "-c", code], {})
'''

@pytest.mark.gkd_stage("stuck", lane="probe", timeout=100)
def test_stuck(gkd):
    child = subprocess.Popen([sys.executable, "-c", STUBBORN],
                             stdout=subprocess.PIPE, start_new_session=True)
    child.stdout.readline()
    daemon = subprocess.Popen([sys.executable, "-c", DAEMON], stdout=subprocess.PIPE)
    daemon_pid = int(daemon.stdout.readline())
    memory = shared_memory.SharedMemory(create=True, size=4096)
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    facts = f"{os.getpid()} {child.pid} {daemon_pid} {memory.name}"
    Path("ready.part").write_text(facts)
    Path("ready.part").rename("ready")
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)

@pytest.mark.gkd_stage("next", lane="probe", timeout=20)
def test_next(): pass
"""
# What nohup or a shell in the background starts ignores signals, and hands that on.
HEEDS = "import os, signal, sys; signal.signal(1, signal.SIG_DFL)"
COMMAND = [
    sys.executable,
    "-c",
    f"{HEEDS}; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])",
    "-m",
    "pytest",
    "-p",
    "no:cacheprovider",
    "--gkd-stages=stuck,next",
    "test_hangs.py",
]


class Hung:
    """A pytest run that hangs, in directories of its own."""

    def __init__(self) -> None:
        self.place = Path(tempfile.mkdtemp(prefix="gg"))
        self.temporary = self.place / "t"
        self.temporary.mkdir()
        (self.place / "test_hangs.py").write_text(HANGS)
        self.environ = {
            **os.environ,
            "TMPDIR": str(self.temporary),
            "XDG_STATE_HOME": str(self.place / "state"),
        }

    def start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            COMMAND,
            cwd=self.place,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.await_hang(process.pid)
        return process

    def await_hang(self, pid: int) -> None:
        until((self.place / "ready").exists)
        *pids, self.memory = (self.place / "ready").read_text().split()
        self.tree = psutil.Process(pid).children(recursive=True)
        assert {int(text) for text in pids} <= {p.pid for p in self.tree}
        (self.run_dir,) = self.temporary.glob("gkd-*")

    def guardian(self) -> psutil.Process:
        title = self.run_dir.name
        return next(p for p in self.tree if p.cmdline()[-1] == title)

    def living(self) -> list[psutil.Process]:
        return [p for p in self.tree if p.is_running() and p.status() != "zombie"]

    def await_end(self) -> None:
        until(lambda: not self.living())
        assert not self.run_dir.exists()
        assert not (procfs.SHM / self.memory).exists()
        assert list((self.place / "state/pytest-gkd/runs").iterdir()) == []

    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            (self.place / ".gkd/last/report.json").read_text()
        )
        return found


@pytest.fixture
def hung() -> Iterator[Hung]:
    run = Hung()
    yield run
    for process in getattr(run, "tree", ()):
        if process.is_running():
            process.kill()
    # What pytest's own directories are does not matter here.
    subprocess.run(["rm", "-rf", str(run.place)], check=True)


def test_a_killed_pytest_takes_everything_with_it_and_the_report_says_so(
    hung: Hung,
) -> None:
    process = hung.start()
    process.kill()
    process.communicate(timeout=LIMIT_S)
    hung.await_end()
    report = hung.report()
    assert report["interrupted"] == "killed"
    # pytest-xdist names its workers where setproctitle is installed.
    worker = ("test_hangs.py::test_stuck", "sys.stdin.readline()")
    assert any(name in line for line in report["cleaned"] for name in worker)
    assert f"the pytest process {process.pid} was killed" in report["notes"][0]


def test_a_guardian_that_is_killed_first_is_replaced(hung: Hung) -> None:
    process = hung.start()
    first = hung.guardian()
    first.kill()

    def second() -> list[psutil.Process]:
        below = psutil.Process(process.pid).children()
        return [
            p
            for p in below
            if p.pid != first.pid and hung.run_dir.name in p.cmdline()[-1:]
        ]

    until(second)
    hung.tree += second()
    process.kill()
    process.communicate(timeout=LIMIT_S)
    hung.await_end()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_amid_a_hang_ends_everything_with_a_report(
    hung: Hung, name: str
) -> None:
    process = hung.start()
    process.send_signal(signal.Signals[name])
    out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == pytest.ExitCode.INTERRUPTED, out
    hung.await_end()
    report = hung.report()
    assert report["interrupted"] == "interrupted"
    assert report["ended"]
    stages = {stage["name"]: stage for stage in report["stages"]}
    assert stages["stuck"]["message"].startswith("interrupted after ")


def test_a_terminal_that_is_closed_ends_everything_with_a_report(hung: Hung) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(hung.place)
        os.execve(COMMAND[0], COMMAND, hung.environ)  # noqa: S606
    os.set_blocking(terminal, False)
    hung.await_hang(pid)
    os.close(terminal)
    status = os.waitpid(pid, 0)[1]
    assert os.waitstatus_to_exitcode(status) == pytest.ExitCode.INTERRUPTED
    hung.await_end()
    assert hung.report()["ended"]


# -- each watches the other ------------------------------------------------------------

STUCK = """
import ctypes
from pathlib import Path
import pytest

@pytest.mark.gkd_stage("stuck", lane="probe", timeout=4)
def test_stuck(gkd):
    gkd.step("about to hang")
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)

@pytest.mark.gkd_stage("next", lane="probe", timeout=20)
def test_next(): pass
"""
REPORT = ".gkd/last/report.json"
# A thread of the user's that keeps the GIL of the pytest process.
BLOCKS = """
import ctypes, os, threading, time
from pathlib import Path
import pytest_gkd.processes.guardian_start

pytest_gkd.processes.guardian_start.STILL_LIMIT_S = 6

def block():
    report = Path(".gkd/last/report.json")
    while not report.exists() or "about to hang" not in report.read_text():
        time.sleep(0.01)
    ctypes.PyDLL(None).sleep(15)

def pytest_sessionstart(session):
    if not hasattr(session.config, "workerinput"):
        threading.Thread(target=block).start()
"""
STUCK_COMMAND = [*COMMAND[:-1], "test_stuck.py"]


def outcomes(place: Path) -> dict[str, str]:
    return {stage["name"]: stage["outcome"] for stage in report_of(place)["stages"]}


def report_of(place: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((place / REPORT).read_text())
    return found


def await_stuck(place: Path) -> None:
    """Until the controller knows that the stage runs, and since when."""
    report = place / REPORT
    until(lambda: report.exists() and "about to hang" in report.read_text())


def start_stuck(place: Path, stages: str = STUCK) -> subprocess.Popen[str]:
    (place / "test_stuck.py").write_text(stages)
    process = subprocess.Popen(
        STUCK_COMMAND,
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    await_stuck(place)
    return process


def test_a_pytest_stopped_without_a_terminal_goes_on_when_a_budget_is_over(
    tmp_path: Path,
) -> None:
    process = start_stuck(tmp_path)
    process.send_signal(signal.SIGSTOP)
    try:
        out, _ = process.communicate(timeout=2 * LIMIT_S)
    finally:
        process.kill()
    assert outcomes(tmp_path) == {"stuck": "timeout", "next": "passed"}, out
    assert "its guardian resumed it (SIGCONT)" in "".join(report_of(tmp_path)["notes"])


def test_a_pytest_stopped_at_a_terminal_is_left_stopped_and_its_deadlines_wait(
    tmp_path: Path,
) -> None:
    (tmp_path / "test_stuck.py").write_text(STUCK)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execve(STUCK_COMMAND[0], STUCK_COMMAND, os.environ)  # noqa: S606
    threading.Thread(target=read_all, args=[terminal], daemon=True).start()
    stopped_s = 8
    try:
        await_stuck(tmp_path)
        os.kill(pid, signal.SIGSTOP)
        until(lambda: state(pid) == procfs.STOPPED)
        over = time.monotonic() + stopped_s
        while time.monotonic() < over:
            assert state(pid) == procfs.STOPPED
            time.sleep(0.1)
        os.kill(pid, signal.SIGCONT)
        until(lambda: state(pid) == "Z")
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert outcomes(tmp_path) == {"stuck": "timeout", "next": "passed"}
    stuck = report_of(tmp_path)["stages"][0]
    assert stuck["duration_s"] >= 4 + stopped_s - 1
    notes = "".join(report_of(tmp_path)["notes"])
    assert "pytest was stopped at its terminal for " in notes
    assert "resumed it" not in notes


def state(pid: int) -> str:
    here = procfs.stat(pid)
    assert here is not None
    return here.state


def read_all(terminal: int) -> None:
    with contextlib.suppress(OSError):  # how a terminal says that nobody has it open
        while os.read(terminal, 4096):
            pass


def test_a_guardian_that_is_stopped_is_replaced_and_told(hung: Hung) -> None:
    process = hung.start()
    first = hung.guardian()
    first.suspend()

    def told() -> bool:
        notes = "".join(hung.report()["notes"])
        return "its guardian was stopped by a signal and was replaced" in notes

    until(told)
    hung.tree = psutil.Process(process.pid).children(recursive=True)
    assert hung.guardian() != first
    assert gone(first.pid)
    process.kill()
    process.communicate(timeout=LIMIT_S)
    hung.await_end()
    assert hung.report()["interrupted"] == "killed"


def test_the_workers_of_a_pytest_that_stands_still_are_ended_and_it_is_said(
    tmp_path: Path,
) -> None:
    (tmp_path / "conftest.py").write_text(BLOCKS)
    process = start_stuck(tmp_path)
    out, _ = process.communicate(timeout=2 * LIMIT_S)
    said = "s and no longer enforced any budget: its guardian ended"
    assert said in out
    assert outcomes(tmp_path) == {"stuck": "timeout", "next": "passed"}, out
    assert said in "".join(report_of(tmp_path)["notes"])
    (stuck, _) = report_of(tmp_path)["stages"]
    assert stuck["message"].startswith("pytest stood still for ")
    assert stuck["diagnosis"] is None


# The second guardian comes up once the report has a verdict of the stage that hangs.
SLOW_TO_START = """
import os, signal, time
from pathlib import Path
from pytest_gkd.processes.guardian_start import Guardian

start, places = Guardian._start, []

def start_late(guard):
    places.append(guard)
    report, until = Path(".gkd/last/report.json"), time.monotonic() + 30
    while len(places) > 1 and time.monotonic() < until:
        if '"outcome": "timeout"' in report.read_text():
            Path("judged").touch()
            break
        time.sleep(0.01)
    start(guard)
    if len(places) == 1:
        os.kill(guard.pid, signal.SIGKILL)

Guardian._start = start_late
"""


def test_a_guardian_that_is_slow_to_start_holds_up_no_budget(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(SLOW_TO_START)
    process = start_stuck(tmp_path)
    out, _ = process.communicate(timeout=2 * LIMIT_S)
    assert (tmp_path / "judged").exists()
    assert outcomes(tmp_path) == {"stuck": "timeout", "next": "passed"}, out
    assert "its guardian was killed and was replaced" in "".join(
        report_of(tmp_path)["notes"]
    )


def test_whom_its_guardian_ended_is_found_by_pid_and_start_and_under_the_lock() -> None:
    lock = threading.RLock()
    read_locked: list[bool] = []

    class Signs(dict[Sign, float]):
        def __getitem__(self, sign: Sign) -> float:
            read_locked.append(lock._is_owned())  # type: ignore[attr-defined]
            return super().__getitem__(sign)

    here = procfs.stat(os.getpid())
    assert here is not None
    workers = {
        "gw0": WorkerWatch("gw0", os.getpid(), start=here.start),
        "gw1": WorkerWatch("gw1", os.getpid(), start=here.start - 1),
    }
    signs = Signs({Sign.WAITED_S: 0.0, Sign.RESUMED: 0.0, Sign.GAVE_UP_S: 61.0})
    home: Any = types.SimpleNamespace(guardian=types.SimpleNamespace(pulse=signs))
    watchdog: Any = types.SimpleNamespace(lock=lock, workers=workers)
    recorder = Recorder(RunRecord("now", {}, {}))
    watch = GuardianWatch(home, watchdog, recorder, set())
    watch.hear()
    assert watch.ended == {"gw1"}
    assert any("its guardian ended the workers" in one for one in recorder.record.notes)
    assert all(read_locked)


WORKS = """
import time
import pytest

@pytest.mark.gkd_stage("stuck", lane="probe", timeout=8)
def test_works(gkd):
    gkd.step("about to hang")
    for _ in range(30):
        time.sleep(0.1)

@pytest.mark.gkd_stage("next", lane="probe", timeout=20)
def test_next(): pass
"""


def test_what_stands_still_with_its_whole_run_loses_nothing_of_its_budget(
    tmp_path: Path,
) -> None:
    """As where a container is paused, or a batch system suspends the job."""
    process = start_stuck(tmp_path, WORKS)
    pytest_itself = psutil.Process(process.pid)
    below = pytest_itself.children(recursive=True)
    guardians = [p for p in below if p.cmdline()[-1].startswith("gkd-")]
    every = [*guardians, pytest_itself, *(p for p in below if p not in guardians)]
    try:
        for one in every:
            one.suspend()
        time.sleep(12)
        for one in every:
            one.resume()
        out, _ = process.communicate(timeout=2 * LIMIT_S)
    finally:
        process.kill()
    assert outcomes(tmp_path) == {"stuck": "passed", "next": "passed"}, out
    report = report_of(tmp_path)
    assert "stood still for " in "".join(report["notes"])
    assert report["stages"][0]["facts"]["extra_s"]["stops"] > 10


# -- the guardian alone ----------------------------------------------------------------

HOLDS = """
import json, os, subprocess, sys, time
from pathlib import Path
from pytest_gkd.run.run_directory import RunDir

run = RunDir(Path.cwd())
run.hand_on_mark(of_run=True)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(json.dumps([str(run.path), run.guardian.pid, child.pid]), flush=True)
"""


def holder(
    tmp_path: Path, *rest: str, before: str = ""
) -> tuple[subprocess.Popen[str], list[Any]]:
    process = subprocess.Popen(
        [sys.executable, "-c", before + HOLDS + textwrap.dedent("\n".join(rest))],
        cwd=tmp_path,
        env={
            **os.environ,
            "TMPDIR": str(tmp_path),
            "XDG_STATE_HOME": str(tmp_path / "state"),
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=(tmp_path / "stderr").open("w"),
        text=True,
    )
    assert process.stdout is not None
    found: list[Any] = json.loads(process.stdout.readline())
    return process, found


def gone(pid: int) -> bool:
    here = procfs.stat(pid)
    return here is None or here.state in procfs.DEAD


def test_after_a_goodbye_the_guardian_goes_and_ends_nothing(tmp_path: Path) -> None:
    process, (path, guardian, child) = holder(
        tmp_path,
        "assert run.close() == ''",
        "print(os.path.exists(f'/proc/{run.guardian.pid}'), flush=True)",
        "sys.stdin.read()",
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "False\n"
    assert not Path(path).exists()
    assert gone(guardian)
    assert not gone(child)
    os.kill(child, signal.SIGKILL)
    process.communicate("", LIMIT_S)


def test_a_run_that_ends_with_processes_left_has_them_ended(tmp_path: Path) -> None:
    process, (_, guardian, child) = holder(tmp_path, "run.close(finished=False)")
    process.communicate(timeout=LIMIT_S)
    until(lambda: gone(guardian))
    assert gone(child)


def test_a_guardian_counts_only_the_time_that_it_sees() -> None:
    """Where it stood still itself, the pytest process may have stood with it."""
    gave_up: list[float] = []
    here, pulse = procfs.stat(os.getpid()), Pulse.begin()
    assert here is not None
    pulse[Sign.DUE] = 0.0
    watch = Watch(here.pid, here.start, pulse, gave_up.append, 60)
    now = monotonic()
    for seconds in (10_000, 20_000):
        watch.look(now + seconds)
    assert gave_up == []
    for look in range(130):
        watch.look(now + 30_000 + look / 2)
    assert 60 < gave_up[0] < 70
    pulse.close()


def test_a_process_that_closes_its_files_and_lives_on_keeps_its_run(
    tmp_path: Path,
) -> None:
    process, (path, guardian, child) = holder(
        tmp_path,
        "os.closerange(3, 100)",
        # More often than the guardian looks; it must have seen the pipe's end.
        "import psutil",
        f"deadline = time.monotonic() + {LIMIT_S}",
        "slow = psutil.Process(run.guardian.pid)",
        "while slow.num_ctx_switches().voluntary < 20 and time.monotonic() < deadline:",
        "    time.sleep(0.01)",
        "print('saw it', flush=True)",
        "sys.stdin.read()",
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "saw it\n"
    assert Path(path).exists()
    assert not gone(child)
    process.kill()
    process.communicate(timeout=LIMIT_S)
    until(lambda: gone(guardian))
    assert gone(child)


def test_a_guardian_that_stands_still_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)
    assert run.guardian is not None
    first = run.guardian.pid
    monkeypatch.setattr(
        guardian_start, "STILL_LIMIT_S", 0.01
    )  # it moves twice a second
    why = ""
    while not why:
        why = run.guardian.problem()
    assert why == "stood still"
    run.guardian.replace()
    assert gone(first)
    assert not gone(run.guardian.pid)
    run.close()


def test_a_report_says_of_a_pytest_that_stands_still_what_was_ended(
    tmp_path: Path,
) -> None:
    process, (_, guardian, child) = holder(
        tmp_path,
        "report = {'started': run.started, 'ended': None, 'notes': [], 'cleaned': []}",
        "Path('report.json').write_text(json.dumps(report))",
        "run.guardian.beat(time.monotonic())",
        "sys.stdin.read()",
        before="from pytest_gkd.processes import guardian_start; "
        "guardian_start.STILL_LIMIT_S = 1; "
        "from pytest_gkd import language; language.use('zh')",
    )
    until(lambda: gone(child))
    told = tmp_path / "report.json"
    until(lambda: json.loads(told.read_text())["cleaned"])
    report = json.loads(told.read_text())
    assert "interrupted" not in report
    assert len(report["notes"]) == 1
    assert report["notes"][0].startswith("pytest stood still for ")
    said = "gkd: pytest 停顿了 1 s，各项预算都已无法执行：它的守护进程结束了 1 个"
    until(lambda: said in (tmp_path / "stderr").read_text())
    assert process.poll() is None
    assert not gone(guardian)
    process.kill()
    process.communicate(timeout=LIMIT_S)
    until(lambda: gone(guardian))


def test_without_descriptors_to_spare_none_is_lost(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.guardian is not None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        before = set(Path("/proc/self/fd").iterdir())
        spare = os.dup(0)
        os.close(spare)
        resource.setrlimit(resource.RLIMIT_NOFILE, (spare + 1, hard))
        with pytest.raises(OSError, match="Too many open files"):
            run.guardian.replace()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        # The end of the pipe to the one that it has ended is closed.
        assert set(Path("/proc/self/fd").iterdir()) < before
        run.guardian.replace()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        run.close()


def test_the_guardians_command_line_does_not_name_pytest(tmp_path: Path) -> None:
    # pkill -f pytest is what people do to a run that hangs.
    run = RunDir(tmp_path)
    assert run.guardian is not None
    ours = psutil.Process(run.guardian.pid).cmdline()[1:]
    run.close()
    assert "pytest" not in " ".join(ours)


def test_what_the_guardian_imports_needs_no_site_packages() -> None:
    root = str(Path(pytest_gkd.__file__).parent.parent)
    code = (
        f"import sys; sys.path.insert(0, {root!r})"
        "; import pytest_gkd.processes.guardian; print(*sorted(sys.modules))"
    )
    done = fresh_python.run("-ISB", "-c", code, check=True)
    assert {"psutil", "pytest", "asyncio", "subprocess"}.isdisjoint(done.stdout.split())


UNGUARDED = """
import ctypes, os, sys
from pytest_gkd.processes import prctl
prctl.die_with_parent()
print(os.getpid(), flush=True)
libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
libc.pthread_mutex_lock(mutex)
libc.pthread_mutex_lock(mutex)
"""


def test_without_a_guardian_the_kernel_ends_a_worker_that_holds_the_gil() -> None:
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import subprocess as s, sys; s.run([sys.executable, '-c', sys.argv[1]])",
            UNGUARDED,
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    parent.kill()
    parent.communicate(timeout=LIMIT_S)
    until(lambda: gone(worker))
