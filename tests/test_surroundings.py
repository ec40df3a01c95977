"""What a run meets around it: whoever starts it, other plugins, the user's conftest."""

from __future__ import annotations

import os
import pty
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import fresh_python
import pytest
from test_containers import root_only
from test_plugin import Run
from waiting import until

from pytest_gkd.processes import tree

PROBE = """
import ctypes, os, subprocess, sys, time
import pytest

def stage(name, lane="one", timeout=60):
    return pytest.mark.gkd_stage(name, lane=lane, timeout=timeout)

@stage("passes")
def test_passes(gkd): gkd.fact("n", 1)

@stage("fails")
def test_fails(): assert 0

@stage("dies")
def test_dies(): os.kill(os.getpid(), 9)

@stage("status")
def test_status():
    assert subprocess.run([sys.executable, "-c", "exit(3)"]).returncode == 3

@stage("waits_in_c", timeout=1)
def test_waits_in_c(): ctypes.PyDLL(None).sleep(30)

def leave():
    nul = subprocess.DEVNULL
    command = ["sleep", "601"]
    left = subprocess.Popen(command, stdout=nul, stderr=nul, start_new_session=True)
    with open("left", "w") as file:
        print(left.pid, file=file)

@stage("leaves")
def test_leaves(): leave()

@pytest.fixture(scope="module")
def left(): leave()

@stage("leaves_by_fixture")
def test_leaves_by_fixture(left): pass

@stage("place")
def test_place(): assert os.path.isabs(os.environ["TMPDIR"])

@stage("forks")
def test_forks():
    # What lives on when the stage ends is ended, and may not have spoken by then.
    if child := os.fork():
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)

@stage("forks_and_exits")
def test_forks_and_exits():
    child = os.fork()
    if not child:
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7

@stage("forks_and_fails")
def test_forks_and_fails():
    child = os.fork()
    assert child, "said by a fork"
    os.waitpid(child, 0)

@pytest.fixture
def subtests_of(request):
    return request.getfixturevalue("subtests")

@stage("parts")
def test_parts(subtests_of):
    for number in range(3):
        with subtests_of.test(number=number):
            assert number == 1

@stage("parts_pass")
def test_parts_pass(subtests_of):
    for number in range(3):
        with subtests_of.test(number=number):
            pass

@stage("parts_skip")
def test_parts_skip(subtests_of):
    with subtests_of.test():
        assert 1 == 2
    pytest.skip("the rest")

@stage("parts_raise")
def test_parts_raise(subtests_of):
    with subtests_of.test():
        assert 1 == 2
    raise ValueError("the stage's own")

@stage("sets_path")
def test_sets_path():
    os.environ["PYTHONPATH"] = os.environ["PYTHONPATH"] + ":/mine"

@stage("has_path")
def test_has_path():
    assert os.environ["PYTHONPATH"].split(":")[-1] == "/mine"
    assert sum("startup" in one for one in os.environ["PYTHONPATH"].split(":")) == 1
    del os.environ["PYTHONPATH"]

@stage("parts_hang", timeout=2)
def test_parts_hang(subtests_of):
    with subtests_of.test():
        pass
    time.sleep(60)

@stage("last")
def test_last(): pass
"""
HAS_SUBTESTS = int(pytest.__version__.split(".")[0]) >= 9


def run(directory: Path, stages: str, *args: str, **options: str | None) -> Run:
    (directory / "test_probe.py").write_text(PROBE)
    own = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
    environ = {k: v for k, v in {**own, **options}.items() if v is not None}
    return Run(directory, f"--gkd-stages={stages}", "test_probe.py", *args, env=environ)


def started_by(directory: Path, code: str, stages: str) -> Run:
    """A run that a Python process begins which has executed ``code`` just before."""
    (directory / "test_probe.py").write_text(PROBE)
    script = f"import os, signal, sys; {code}; os.execv(sys.executable, sys.argv[1:])"
    before = (sys.executable, "-c", script)
    return Run(directory, f"--gkd-stages={stages}", "test_probe.py", before=before)


# -- who starts it ---------------------------------------------------------------------


def test_an_ignored_sigchld_hides_no_exit_status(tmp_path: Path) -> None:
    ignored = "signal.signal(signal.SIGCHLD, signal.SIG_IGN)"
    done = started_by(tmp_path, ignored, "dies,status")
    assert done.stage("dies")["message"].startswith(
        "the process that ran it died: signal SIGKILL"
    )
    assert done.outcomes() == {"dies": "failed", "status": "passed"}
    assert done.shows("gkd: SIGCHLD was ignored*")


@pytest.mark.parametrize("mask", ["0777", "0200"])
def test_a_umask_that_takes_from_the_user_himself_is_named(
    tmp_path: Path, mask: str
) -> None:
    done = started_by(tmp_path, f"os.umask(0o{mask})", "passes")
    assert done.code == pytest.ExitCode.USAGE_ERROR
    assert done.shows(f"ERROR: the umask {mask} takes away your own access*")
    assert not (tmp_path / ".gkd").exists()


@root_only
def test_the_proc_of_another_namespace_is_named(tmp_path: Path) -> None:
    (tmp_path / "test_probe.py").write_text(PROBE)
    before = ("unshare", "--pid", "--fork")
    done = Run(tmp_path, "--gkd-stages=passes", "test_probe.py", before=before)
    assert done.code == pytest.ExitCode.USAGE_ERROR
    assert done.shows("ERROR: /proc is that of another PID namespace*")


@pytest.mark.parametrize("files", [16, 20, 24, 47])
def test_too_few_files_for_the_run_itself_are_named(tmp_path: Path, files: int) -> None:
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({files},)*2)"
    done = started_by(tmp_path, limit, "passes")
    assert done.code == pytest.ExitCode.USAGE_ERROR
    assert done.shows(f"ERROR: the limit of open files is {files}, *")


@pytest.mark.parametrize("limit_kib", [64, 16383])
def test_a_file_size_limit_that_is_too_small_for_the_run_is_named(
    tmp_path: Path, limit_kib: int
) -> None:
    limit = f"({limit_kib << 10},) * 2"
    code = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, {limit})"
    done = started_by(tmp_path, code, "passes")
    assert done.code == pytest.ExitCode.USAGE_ERROR
    assert done.shows(f"ERROR: the file size limit is {limit_kib} KiB, *")
    assert done.shows("*ulimit -f unlimited (gkd explain env.file-size-limit)*")


@root_only
@pytest.mark.parametrize("processes", [1, 3])
def test_where_no_process_can_be_started_a_line_says_why(
    tmp_path: Path, processes: int
) -> None:
    rights = "-all,+dac_override,+dac_read_search"
    before = (
        *("setpriv", "--reuid=64123", "--clear-groups", f"--inh-caps={rights}"),
        *(f"--ambient-caps={rights}", f"--bounding-set={rights}"),
        *("prlimit", f"--nproc={processes}"),
    )
    (tmp_path / "test_probe.py").write_text(PROBE)
    done = Run(tmp_path, "--gkd-stages=passes", "test_probe.py", before=before)
    assert done.code == pytest.ExitCode.USAGE_ERROR
    assert done.shows("ERROR: the stages' processes could not be started: *")
    assert "INTERNALERROR" not in done.text


def test_a_directory_whose_name_is_no_text_is_told_in_a_line(tmp_path: Path) -> None:
    place = Path(os.fsdecode(os.fsencode(tmp_path) + b"/x\xffy"))
    place.mkdir()
    (place / "test_probe.py").write_text(PROBE)
    args = "-m pytest -p no:cacheprovider --gkd-stages=passes test_probe.py"
    done = subprocess.run(
        [sys.executable, *shlex.split(args)], cwd=place, capture_output=True, timeout=60
    )
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert b"the stages' processes could not be started" in done.stderr
    assert b"INTERNALERROR" not in done.stdout + done.stderr


def test_a_temporary_directory_that_is_this_one_is_named_in_full(
    tmp_path: Path,
) -> None:
    done = run(tmp_path, "place", TMPDIR=".")
    assert done.outcomes() == {"place": "passed"}
    assert not list(tmp_path.glob("gkd-*"))


# -- what the user's conftest does -----------------------------------------------------

SERVER = """
import os, subprocess

def pytest_sessionstart():
    global server
    if "PYTEST_XDIST_WORKER" not in os.environ:
        server = subprocess.Popen(["sleep", "600"])

def pytest_unconfigure():
    if "PYTEST_XDIST_WORKER" not in os.environ:
        print("the server's end:", server.poll())
        server.kill()
        server.wait()
"""


def test_a_kernel_that_does_not_tell_the_umask_is_enough(tmp_path: Path) -> None:
    (tmp_path / "old_kernel.py").write_text(
        "import pathlib\n"
        "read = pathlib.Path.read_text\n"
        "def without(self, *args, **more):\n"
        "    text = read(self, *args, **more)\n"
        "    lines = text.splitlines(keepends=True)\n"
        "    return ''.join(one for one in lines if not one.startswith('Umask:'))\n"
        "pathlib.Path.read_text = without\n"
    )
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    done = run(tmp_path, "passes", "-p", "old_kernel", PYTHONPATH=path)
    assert done.code == 0, done.text


def test_what_a_conftest_has_started_is_not_ended(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(SERVER)
    done = run(tmp_path, "passes")
    assert "the server's end: None" in done.text
    assert not done.report["cleaned"]


LATE = """
import os, signal, subprocess, sys, time

def starts(command, **options):
    if "PYTEST_XDIST_WORKER" not in os.environ:
        nul = subprocess.DEVNULL  # the run's reader waits for the end of its pipes
        one = subprocess.Popen(command, stdout=nul, stderr=nul, **options)
        with open("started", "a") as file:
            print(one.pid, file=file)

def pytest_configure():
    starts(["sleep", "600"], start_new_session=True)

def pytest_runtest_logstart():
    starts(["sleep", "600"])
    starts(["sleep", "600"], start_new_session=True)

def pytest_sessionfinish():
    starts([sys.executable, "-c", "import time; time.sleep(600)"])
"""
KILLED = """
def pytest_runtest_logreport(report):
    if "PYTEST_XDIST_WORKER" not in os.environ and report.when == "call":
        time.sleep(2.5)  # the run's list is written once a second
        os.kill(os.getpid(), signal.SIGKILL)
"""


def ended(started: Path) -> list[int]:
    """Those of the processes that do not live any more; none does afterwards."""
    pids = [int(line) for line in started.read_text().split()]
    gone = [pid for pid in pids if tree.is_dead(pid)]
    for pid in {*pids} - {*gone}:
        os.kill(pid, signal.SIGKILL)
    return gone


def test_what_pytests_own_process_starts_late_lives_on_and_is_named(
    tmp_path: Path,
) -> None:
    (tmp_path / "conftest.py").write_text(LATE)
    done = run(tmp_path, "dies,leaves,last")
    assert not ended(tmp_path / "started")
    assert done.shows("gkd: left running, since a plugin or conftest.py in pytest's*")
    assert tree.is_dead(int((tmp_path / "left").read_text()))
    assert all("sleep 601" in line for line in done.report["cleaned"])


@pytest.mark.parametrize("args", [(), ("-n0",)])
def test_the_guardian_ends_nothing_that_a_conftest_has_started(
    tmp_path: Path, args: tuple[str, ...]
) -> None:
    late = LATE if not args else LATE.replace("_runtest_logstart", "_sessionstart")
    (tmp_path / "conftest.py").write_text(late + KILLED)
    done = run(tmp_path, "leaves_by_fixture,last", *args)
    assert done.code == -signal.SIGKILL
    left = int((tmp_path / "left").read_text())
    until(lambda: tree.is_dead(left))
    assert not ended(tmp_path / "started")


@pytest.mark.parametrize("args", [(), ("-n0",)])
def test_the_report_of_a_session_that_fails_as_it_begins_has_its_end(
    tmp_path: Path, args: tuple[str, ...]
) -> None:
    (tmp_path / "conftest.py").write_text(
        "import os\n"
        "def pytest_sessionstart():\n"
        "    assert 'PYTEST_XDIST_WORKER' in os.environ, 'no licence'\n"
    )
    done = run(tmp_path, "passes", *args)
    assert done.code == pytest.ExitCode.INTERNAL_ERROR
    assert done.report["ended"]
    assert any("no licence" in note for note in done.report["notes"])


def test_workers_that_die_as_they_start_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "import os\nif 'PYTEST_XDIST_WORKER' in os.environ: os._exit(7)\n"
    )
    done = run(tmp_path, "passes")
    assert done.code == pytest.ExitCode.TESTS_FAILED
    assert "3 processes in a row died" in done.text


def test_workers_that_have_other_tests_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "import os\ndef pytest_collection_modifyitems(items):\n"
        "    if os.environ.get('PYTEST_XDIST_WORKER') == 'gw1':\n"
        "        items[:] = items[:1]\n"
    )
    done = run(tmp_path, "passes,last,fails", "-n2")
    assert done.code == pytest.ExitCode.USAGE_ERROR
    assert "INTERNALERROR" not in done.text
    assert done.shows("*not every worker has collected test_probe.py::test_*")


# -- what a stage is made of -----------------------------------------------------------


def test_a_process_that_a_stage_forks_never_speaks_for_it(tmp_path: Path) -> None:
    names = ("forks", "forks_and_exits", "forks_and_fails", "last")
    done = run(tmp_path, ",".join(names))
    assert done.outcomes() == dict.fromkeys(names, "passed")
    assert done.code == pytest.ExitCode.OK
    assert "said by a fork" not in done.out
    assert [n.partition(":")[0] for n in done.report["notes"]] == list(names[:3])


def test_in_one_process_a_fork_never_goes_on_either(tmp_path: Path) -> None:
    done = run(tmp_path, "forks,last", "-n0")
    assert done.out.count("2 passed") == 1


def test_a_wait_in_c_that_the_interrupt_ends_is_no_success(tmp_path: Path) -> None:
    done = run(tmp_path, "waits_in_c,last")
    assert done.outcomes() == {"waits_in_c": "timeout", "last": "passed"}


def test_what_a_stage_sets_stays_set(tmp_path: Path) -> None:
    done = run(tmp_path, "sets_path,has_path,last")
    assert set(done.outcomes().values()) == {"passed"}


@pytest.mark.skipif(not HAS_SUBTESTS, reason="pytest 9 has subtests")
def test_subtests_that_failed_are_told_however_their_stage_ends(tmp_path: Path) -> None:
    done = run(tmp_path, "parts_skip,parts_raise,last")
    assert done.outcomes() == {
        "parts_skip": "failed",
        "parts_raise": "failed",
        "last": "passed",
    }
    told = "1 subtest(s) failed; the first: assert 1 == 2"
    assert done.stage("parts_skip")["message"] == told
    raised = f"{told}; then: ValueError: the stage's own"
    assert done.stage("parts_raise")["message"] == raised


@pytest.mark.skipif(not HAS_SUBTESTS, reason="pytest 9 has subtests")
@pytest.mark.parametrize("args", [(), ("-n0",)])
def test_a_stage_fails_with_its_subtests(tmp_path: Path, args: tuple[str, ...]) -> None:
    done = run(tmp_path, "parts,parts_pass,last", "--junitxml=j.xml", *args)
    assert done.code == pytest.ExitCode.TESTS_FAILED
    assert done.outcomes() == {
        "parts": "failed",
        "parts_pass": "passed",
        "last": "passed",
    }
    message = done.stage("parts")["message"]
    assert message == "2 subtest(s) failed; the first: assert 0 == 1"
    assert done.shows("*= 1 failed, 2 passed*")
    junit = (tmp_path / "j.xml").read_text()
    assert 'failures="1"' in junit


@pytest.mark.skipif(not HAS_SUBTESTS, reason="pytest 9 has subtests")
def test_a_subtest_that_is_over_ends_no_budget(tmp_path: Path) -> None:
    done = run(tmp_path, "parts_hang")
    assert done.stage("parts_hang")["outcome"] == "timeout"
    assert done.stage("parts_hang")["duration_s"] < 10


# -- options of pytest and its plugins -------------------------------------------------


@pytest.mark.parametrize("option", ["--setup-plan", "--setup-only"])
def test_what_runs_no_test_has_no_verdicts(tmp_path: Path, option: str) -> None:
    done = run(tmp_path, "passes", option)
    assert done.code == pytest.ExitCode.USAGE_ERROR
    assert done.shows(f"ERROR: {option} runs no test*")


def test_fixtures_are_shown_without_a_run(tmp_path: Path) -> None:
    done = run(tmp_path, "passes", "--fixtures-per-test")
    assert done.code == pytest.ExitCode.OK
    assert not (tmp_path / ".gkd").exists()


def test_a_stage_that_a_debugger_left_out_has_not_passed(tmp_path: Path) -> None:
    done = run(tmp_path, "fails", "--trace")
    assert done.code == pytest.ExitCode.USAGE_ERROR
    assert done.shows("ERROR: --trace needs a terminal*")


def test_a_debugger_has_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "test_probe.py").write_text(PROBE)
    args = "-m pytest -p no:cacheprovider --gkd-stages=fails --trace test_probe.py"
    leader, terminal = pty.openpty()
    with os.fdopen(leader, "wb") as keys, os.fdopen(terminal) as stdin:
        keys.write(b"continue\n")
        keys.flush()
        done = subprocess.run(
            [sys.executable, *shlex.split(args)],
            cwd=tmp_path,
            stdin=stdin,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert "gkd: one process (--trace)" in done.stdout
    assert "1 failed" in done.stdout


def test_plugins_that_are_named_by_hand_are_known(tmp_path: Path) -> None:
    named = ("-p", "pytest_gkd.plugin", "-p", "xdist.plugin", "-p", "pytest_timeout")
    done = run(tmp_path, "passes", *named, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert done.outcomes() == {"passes": "passed"}
    assert "switched off" not in done.text


def test_a_stage_needs_no_temporary_directory_of_pytests(tmp_path: Path) -> None:
    assert run(tmp_path, "passes", "-p", "no:tmpdir").code == pytest.ExitCode.OK


def test_signals_of_the_caller_are_as_they_were(tmp_path: Path) -> None:
    (tmp_path / "test_probe.py").write_text(PROBE)
    code = (
        "import pytest, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); "
        "pytest.main(sys.argv[1:]); print(signal.getsignal(signal.SIGCHLD))"
    )
    args = ("-p", "no:cacheprovider", "--gkd-stages=passes", "test_probe.py")
    done = fresh_python.run("-c", code, *args, cwd=tmp_path)
    assert "1 passed" in done.stdout
    assert done.stdout.splitlines()[-1] == str(signal.SIG_IGN)


PATCHES = """
import json, os, sys
import pytest

def stage(name, lane="one"):
    return pytest.mark.gkd_stage(name, lane=lane, timeout=60)

def broken(*args, **options):
    raise RuntimeError("replaced")

@stage("json")
def test_json(monkeypatch): monkeypatch.setattr(json, "dumps", broken)

@stage("write")
def test_write(monkeypatch):
    for name in ("write", "pwrite"):
        monkeypatch.setattr(os, name, broken)

@stage("stat")
def test_stat():
    os.stat = os.fstat = broken

@stage("exit")
def test_exit():
    os._exit = os.getpid = broken

@stage("fact")
def test_fact(gkd):
    gkd.fact("extra_s", 3)
    gkd.fact("notes", "none")
    gkd.fact("summary", [1])

@stage("other", lane="other")
def test_other(): pass

@stage("last")
def test_last(): pass
"""


def test_what_a_stage_has_replaced_costs_no_other_stage(tmp_path: Path) -> None:
    (tmp_path / "test_probe.py").write_text(PATCHES)
    done = Run(tmp_path, "--gkd-stages=all", "test_probe.py", "-k", "test_probe", "-n2")
    assert "INTERNALERROR" not in done.text
    assert done.code == pytest.ExitCode.TESTS_FAILED
    assert done.outcomes() == {
        "json": "passed",
        "write": "passed",
        "stat": "failed",  # pytest itself cannot go on
        "exit": "failed",
        "fact": "passed",
        "other": "passed",
        "last": "passed",
    }
    for name in ("stat", "exit"):
        assert "RuntimeError: replaced" in done.stage(name)["message"]
