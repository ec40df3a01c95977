"""The end of process trees, with real processes in a program of their own.

Each scenario is a program that adopts what its children lose, as the controller does,
starts a tree and stops it. pytest itself must not become the reaper of its tests.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from pytest_gkd.processes import procfs, stacks, tree
from pytest_gkd.watch.sampling import Sampler
from pytest_gkd.watch.scope import Scope

# What every scenario starts with. A child says its pid when it is where it should be,
# and ends by itself after a minute should the test lose it.
PROLOGUE = """
import json, os, signal, subprocess, sys, textwrap, time
import psutil
from pytest_gkd.processes import prctl, procfs, tree

assert prctl.become_subreaper()
ME = os.getpid()
SLEEP = "print(os.getpid(), flush=True); time.sleep(60)"
QUIET = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}

def start(body, **options):
    body = "import os, signal, subprocess, sys, time\\n" + textwrap.dedent(body)
    options.setdefault("stdout", subprocess.PIPE)
    return subprocess.Popen([sys.executable, "-c", body], text=True, **options)

def pid(child):
    return int(child.stdout.readline())

def show(**found):
    left = tree.descendants(ME)
    print(json.dumps({**found, "left": [(p.pid, p.status()) for p in left]}))
"""


# Root without CAP_KILL stands to another user's process as anybody does to sudo's.
MAY_NOT_KILL = ("setpriv", "--bounding-set", "-kill", "--inh-caps", "-kill")
root_only = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None,
    reason="only root can start another user's process, and mount",
)


def scenario(body: str, *args: str, before: tuple[str, ...] = ()) -> dict[str, Any]:
    """What a scenario shows; ``left`` are its processes, also dead ones not reaped."""
    done = subprocess.run(
        [*before, sys.executable, "-c", PROLOGUE + textwrap.dedent(body), *args],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_child_in_a_session_of_its_own_is_ended_with_its_parent() -> None:
    found = scenario(
        """
        worker = start('''
            command = [sys.executable, "-c", "import time; time.sleep(60)"]
            child = subprocess.Popen(command, start_new_session=True)
            print(child.pid, flush=True)
            time.sleep(60)
        ''')
        child = pid(worker)
        ended, survived = tree.stop(worker.pid, itself=True)
        worker.wait()
        show(ended=ended, survived=survived, child=child)
        """
    )
    assert len(found["ended"]) == 1
    assert found["ended"][0].startswith(f"{found['child']} ")
    assert found["survived"] == found["left"] == []


def test_a_daemon_that_forked_twice_and_wiped_its_environment_is_found() -> None:
    found = scenario(
        """
        worker = start('''
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    code = "import os, time; print(os.getpid(), flush=True);"
                    code += "time.sleep(60)"
                    os.execve(sys.executable, ["daemon", "-c", code], {})
                os._exit(0)
            os.wait()
            time.sleep(60)
        ''')
        daemon = pid(worker)
        parent = psutil.Process(daemon).ppid()
        ended, survived = tree.stop(ME, itself=False)
        show(ended=len(ended), survived=survived, adopted=parent == ME)
        """
    )
    assert found["adopted"]
    assert found["ended"] == 2
    assert found["survived"] == found["left"] == []


def test_a_child_that_ignores_sigterm_is_ended() -> None:
    found = scenario(
        """
        child = start("signal.signal(signal.SIGTERM, signal.SIG_IGN)\\n" + SLEEP)
        pid(child)
        tree.stop(child.pid, itself=True)
        show(status=child.wait())
        """
    )
    assert found["status"] == -signal.SIGKILL
    assert found["left"] == []


def test_a_child_that_is_stopped_is_ended() -> None:
    found = scenario(
        """
        child = start(SLEEP)
        os.kill(pid(child), signal.SIGSTOP)
        ended, survived = tree.stop(ME, itself=False)
        show(ended=len(ended), survived=survived)
        """
    )
    assert found == {"ended": 1, "survived": [], "left": []}


def test_processes_that_keep_forking_do_not_outrun_the_end() -> None:
    # Each process starts the next and stays, 200 deep. The first is stopped as soon
    # as it is known, in the midst of it.
    found = scenario(
        """
        storm = start('''
            print(os.getpid(), flush=True)
            for generation in range(200):
                if os.fork():
                    break
            time.sleep(60)
        ''')
        pid(storm)
        ended, survived = tree.stop(ME, itself=False)
        show(ended=len(ended), survived=survived)
        """
    )
    assert found["ended"] >= 1
    assert found["survived"] == found["left"] == []


def test_fifty_children_are_ended_and_named() -> None:
    found = scenario(
        """
        parent = start('''
            for number in range(50):
                if os.fork() == 0:
                    time.sleep(60)
                    os._exit(0)
            print(os.getpid(), flush=True)
            time.sleep(60)
        ''')
        pid(parent)
        ended, survived = tree.stop(parent.pid, itself=True)
        parent.wait()
        show(ended=len(set(ended)), survived=survived)
        """
    )
    assert found == {"ended": 50, "survived": [], "left": []}


def test_what_is_spared_lives_on() -> None:
    found = scenario(
        """
        spared, other = start(SLEEP), start(SLEEP)
        pid(spared), pid(other)
        ended, _ = tree.stop(ME, itself=False, spare={spared.pid})
        status = psutil.Process(spared.pid).status()
        lives = spared.poll() is None
        spared.kill()
        spared.wait()
        show(ended=len(ended), status=status, lives=lives)
        """
    )
    assert found == {"ended": 1, "status": "sleeping", "lives": True, "left": []}


def test_the_root_lives_on_when_only_what_is_below_is_to_end() -> None:
    found = scenario(
        """
        worker = start('''
            child = subprocess.Popen([sys.executable, "-c", "import time;"
                                      "time.sleep(60)"])
            print(child.pid, flush=True)
            time.sleep(60)
        ''')
        child = pid(worker)
        tree.stop(worker.pid, itself=False)
        below = tree.alive(psutil.Process(child)) if psutil.pid_exists(child) else 0
        lives = tree.alive(psutil.Process(worker.pid))
        tree.stop(worker.pid, itself=True)
        worker.wait()
        show(below=bool(below), lives=lives)
        """
    )
    assert found == {"below": False, "lives": True, "left": []}


def test_shared_memory_of_a_killed_process_is_unlinked_by_its_tracker() -> None:
    found = scenario(
        """
        worker = start('''
            from multiprocessing import shared_memory
            block = shared_memory.SharedMemory(create=True, size=64)
            print(block.name, flush=True)
            time.sleep(60)
        ''')
        name = worker.stdout.readline().strip()
        trackers, until = [], time.monotonic() + 60
        while not trackers and time.monotonic() < until:  # it has a name once it runs
            trackers = [p for p in tree.descendants(ME) if procfs.is_tracker(p.pid)]
        ended, survived = tree.stop(ME, itself=False)
        show(name=name, trackers=len(trackers), ended=len(ended), survived=survived)
        """
    )
    assert found["trackers"] == 1
    assert found["ended"] == 1  # the tracker ended by itself
    assert not Path("/dev/shm", found["name"]).exists()
    assert found["survived"] == found["left"] == []


def test_a_dead_child_is_reaped() -> None:
    found = scenario(
        """
        child = start(SLEEP)
        pid(child)
        tree.stop(ME, itself=False)
        show()
        """
    )
    assert found["left"] == []


def test_reaping_what_is_not_a_child_does_nothing() -> None:
    tree.reap(os.getppid())


def test_nothing_is_stopped_below_a_process_that_is_gone(gone: int) -> None:
    assert tree.stop(gone, itself=True) == ([], [])
    assert tree.descendants(gone) == []


@pytest.fixture
def gone() -> int:
    """The pid of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


# -- telling processes -------------------------------------------------------------


@pytest.fixture
def sleeper() -> Any:
    """A process with a command line of several lines and many characters."""
    code = "import time\n\nprint(1, flush=True)\ntime.sleep(60)  # " + "long " * 50
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    yield child
    child.kill()
    child.wait()
    child.stdout.close()


def test_a_process_is_described_on_one_line(sleeper: subprocess.Popen[str]) -> None:
    line = tree.describe(psutil.Process(sleeper.pid))
    number, _, command = line.partition(" ")
    assert number == str(sleeper.pid)
    assert command.startswith(f"{Path(sys.executable).name} -c import time print(1")
    assert len(command) == procfs.COMMAND_LENGTH


@pytest.fixture
def far_away(tmp_path: Path) -> Path:
    """A Python whose path is longer than the command that is shown."""
    place = tmp_path / ("long-name-of-an-environment-" * 4) / "bin"
    place.mkdir(parents=True)
    (place / "python3").symlink_to(sys.executable)
    return place / "python3"


SLEEPS = "import sys, time; print(1, flush=True); time.sleep(60)"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["-u", "{script}", "--rank=3"], ["python3 -u ", "train.py --rank=3"]),
        (["-m", "own_train", "--local_rank", "1"], ["python3 -m own_train --local_r"]),
        (
            ["-m", "own_train", "x" * 200, "--local_rank=1"],
            ["-m own", "--local_rank=1"],
        ),
    ],
)
def test_a_long_path_of_python_hides_nothing_that_tells_processes_apart(
    far_away: Path, tmp_path: Path, arguments: list[str], shown: list[str]
) -> None:
    (tmp_path / "a" / "checkout" / "of" / "a" / "job").mkdir(parents=True)
    script = tmp_path / "a" / "checkout" / "of" / "a" / "job" / "train.py"
    for one in (script, tmp_path / "own_train.py"):
        one.write_text(SLEEPS)
    child = subprocess.Popen(
        [far_away, *(one.format(script=script) for one in arguments)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    child.stdout.readline()
    described = tree.describe(psutil.Process(child.pid))
    (stack,) = stacks.collect(child.pid, tmp_path, tmp_path / "out", limit_s=30)
    (heading, *_) = stack.path.read_text().splitlines()
    sampler = Sampler(Scope(lambda _: [child.pid]), lambda: (0, 0.0))
    (seen,) = sampler.look(tmp_path / "look").processes
    ended, _ = tree.stop(child.pid, itself=True)
    child.wait()
    child.stdout.close()
    where = replace(stack, is_root=False).where()
    for line in (described, heading, where, f"{seen.pid} {seen.command}", *ended):
        assert line.startswith(f"{child.pid} python3 ")
        assert all(part in line for part in shown), line
        assert "long-name" not in line


@pytest.mark.parametrize(
    ("command", "length", "shown"),
    [
        ("/usr/bin/python train.py", 100, "python train.py"),
        ("./train.sh /data/a/b/c", 100, "train.sh /data/a/b/c"),
        ("torchrun --nproc 2 train.py", 100, "torchrun --nproc 2 train.py"),
        ("ray::Actor.load(a/b)", 100, "ray::Actor.load(a/b)"),
        ("nginx: worker /a", 100, "nginx: worker /a"),
        ("VLLM::Worker_TP1", 100, "VLLM::Worker_TP1"),
        ("python /one/two/three/four.py x", 24, "python …/three/four.py x"),
        ("python --model=/one/two/three/four", 24, "python --model=…/three/…"),
        (
            "vllm serve https://a.b/c/d/e/f " + "x" * 30,
            40,
            "vllm serve https://a.b/c/d/e/f xxxxxxxx…",
        ),
        ("p " + "x" * 50 + " --rank=3", 30, "p " + "x" * 17 + " … --rank=3"),
        ("p --rank=3 " + "x" * 50, 30, "p --rank=3 " + "x" * 18 + "…"),
        (
            "p " + "x" * 50 + " trainer.node_rank=1 --local-rank 7",
            60,
            "p " + "x" * 21 + " … trainer.node_rank=1 --local-rank 7",
        ),
        ("p\x1b[31m a", 100, "p a"),
        ("", 100, ""),
        ("/", 100, "/"),
    ],
)
def test_what_a_long_command_is_cut_to(command: str, length: int, shown: str) -> None:
    assert procfs.shown(command, length) == shown
    assert procfs.shown(shown, length) == shown
    assert len(shown) <= length


def test_a_process_that_is_just_being_started_is_described_by_what_it_runs() -> None:
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    for _ in range(20):
        # Returns while the kernel still loads the program: vfork(2).
        pid = os.posix_spawn(sys.executable, command, os.environ)
        described = tree.describe(psutil.Process(pid))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert described.endswith("time.sleep(60)")


def test_a_process_that_is_gone_is_described_as_gone(
    sleeper: subprocess.Popen[str],
) -> None:
    found = psutil.Process(sleeper.pid)
    sleeper.kill()
    sleeper.wait()
    assert tree.describe(found) == f"{sleeper.pid} (gone)"
    assert not tree.alive(found)
    assert not procfs.is_tracker(sleeper.pid)


def test_a_zombie_is_not_alive(sleeper: subprocess.Popen[str]) -> None:
    found = psutil.Process(sleeper.pid)
    assert tree.alive(found)
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)  # dead, not collected
    assert found.status() == psutil.STATUS_ZOMBIE
    assert not tree.alive(found)


@pytest.mark.parametrize(
    ("status", "name"),
    [
        (None, "ended without a status"),
        (0, "exit code 0"),
        (1, "exit code 1"),
        (-9, "signal SIGKILL"),
        (-11, "signal SIGSEGV"),
        (-77, "signal 77"),
    ],
)
def test_a_status_has_a_name(status: int | None, name: str) -> None:
    assert tree.exit_name(status) == name


# -- what may not be signalled, or seen --------------------------------------------


@root_only
def test_what_may_not_be_signalled_is_named_at_once_and_the_rest_is_ended() -> None:
    found = scenario(
        """
        stranger = subprocess.Popen(["sleep", "600"], user=65534, **QUIET)
        below = start('''
            child = subprocess.Popen([sys.executable, "-c", "import time;"
                                      "time.sleep(60)"])
            print(child.pid, flush=True)
            time.sleep(60)
        ''')
        pid(below)
        began = tree.monotonic()
        ended, survived = tree.stop(ME, itself=False, limit_s=600)
        show(stranger=stranger.pid, ended=len(ended), survived=survived)
        """,
        before=MAY_NOT_KILL,
    )
    os.kill(found["stranger"], signal.SIGKILL)
    line = f"{found['stranger']} sleep 600 (it belongs to another user, uid 65534)"
    assert found["survived"] == [line]
    assert found["ended"] == 2


@root_only
def test_processes_that_hide_do_not_hide_the_others() -> None:
    found = scenario(
        """
        child = start(SLEEP)
        pid(child)
        ended, survived = tree.stop(ME, itself=False)
        show(ended=len(ended), survived=survived)
        """,
        before=(
            *("unshare", "--mount", "sh", "-c"),
            'mount -t proc -o hidepid=1,gid=1 proc /proc && exec "$@"',
            *("sh", "setpriv", "--bounding-set", "-sys_ptrace"),
        ),
    )
    assert found == {"ended": 1, "survived": [], "left": []}


# A daemon in the session of ``engine`` whose parents are gone: this process adopts it.
ENGINE = """
        daemon = "os.fork() and os._exit(0); " + SLEEP
        engine = start(f'''
            subprocess.run([sys.executable, "-c", "import os, time; {daemon}"])
            time.sleep(60)
        ''', start_new_session=True)
        theirs = pid(engine)
"""


def test_what_is_below_what_is_spared_lives_on_by_group_and_by_adoption() -> None:
    found = scenario(
        ENGINE
        + """
        from pytest_gkd.processes import cgroup
        os.environ["PYTEST_GKD_RUN"] = "spares"
        grouped = cgroup.join("spares")
        child = start('''
            below = subprocess.Popen([sys.executable, "-c", "import time;"
                                      "time.sleep(60)"])
            print(below.pid, flush=True)
            time.sleep(60)
        ''')
        other = start(SLEEP)
        below, _ = pid(child), pid(other)
        spared = {engine.pid, child.pid}
        ended, _ = tree.stop(ME, itself=False, spare=spared)
        kept = {engine.pid, child.pid, theirs, below}
        lives = len([n for n in kept if not tree.is_dead(n)])
        tree.stop(ME, itself=False)
        if grouped:
            (cgroup.base() / "cgroup.procs").write_text(str(ME))
            cgroup.remove(cgroup.of("spares", ME))
        show(ended=len(ended), lives=lives)
        """
    )
    assert found == {"ended": 1, "lives": 4, "left": []}


def test_another_process_that_has_the_pid_by_now_is_not_touched() -> None:
    child = subprocess.Popen(["sleep", "600"])
    try:
        here = procfs.stat(child.pid)
        assert here is not None
        assert not tree.is_dead(child.pid, here.start)
        assert tree.is_dead(child.pid, here.start + 1)
        tree.send(child.pid, here.start + 1, signal.SIGSTOP)
        assert os.waitpid(child.pid, os.WUNTRACED | os.WNOHANG) == (0, 0)
        tree.send(child.pid, here.start, signal.SIGSTOP)
        assert os.WIFSTOPPED(os.waitpid(child.pid, os.WUNTRACED)[1])
        tree.send(child.pid, here.start + 1, signal.SIGCONT)
        assert os.waitpid(child.pid, os.WCONTINUED | os.WNOHANG) == (0, 0)
        tree.send(child.pid, here.start, signal.SIGCONT)
        assert os.WIFCONTINUED(os.waitpid(child.pid, os.WCONTINUED)[1])
    finally:
        child.kill()
        child.wait()


def test_a_session_of_another_that_got_the_leaders_pid_is_left_alone() -> None:
    """As after a leader that was waited for, once its session is empty."""
    theirs = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
    )
    try:
        leader = tree.leader(theirs.pid)
        assert tree.stop_session(leader._replace(start=leader.start - 1)) == []
        assert theirs.poll() is None
        assert tree.stop_session(leader) == []
        assert theirs.wait(30) == -signal.SIGKILL
    finally:
        theirs.kill()
        theirs.wait()
