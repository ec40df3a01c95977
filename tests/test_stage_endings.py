"""Stages that end as no test should: each costs itself only, and is told truly."""

from __future__ import annotations

import fnmatch
import json
import xml.etree.ElementTree as ET
from pathlib import Path

import fresh_python
import psutil
import pytest
from test_plugin import Run

ENDINGS = """
import ctypes, os, signal, sys, threading, time
import pytest

def stage(name, lane="endings"):
    return pytest.mark.gkd_stage(name, lane=lane, timeout=60)

@stage("exit_0")
def test_exit_0(): pytest.exit("done", returncode=0)

@stage("exit_x")
def test_exit_x(): pytest.exit("x")

@pytest.fixture
def exits_late():
    yield
    pytest.exit("late", returncode=0)

@stage("exit_late")
def test_exit_late(exits_late): pass

@stage("interrupt")
def test_interrupt(): raise KeyboardInterrupt

@stage("sigint")
def test_sigint():
    # A run in the background of a shell begins with it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(30)

@stage("sys_exit")
def test_sys_exit(): sys.exit(0)

@stage("generator_exit")
def test_generator_exit(): raise GeneratorExit

@stage("own_base")
def test_own_base():
    class Mine(BaseException): pass
    raise Mine("mine")

@stage("thread_exit")
@pytest.mark.filterwarnings("ignore")
def test_thread_exit():
    thread = threading.Thread(target=sys.exit)
    thread.start()
    thread.join()

@stage("os_exit")
def test_os_exit(): os._exit(0)

@stage("close_1_2")
def test_close_1_2():
    os.close(1)
    os.close(2)

@stage("close_all")
def test_close_all(): os.closerange(0, 1000)

@stage("close_stdout")
def test_close_stdout(): sys.stdout.close()

@stage("close_stderr")
def test_close_stderr():
    with sys.stderr:
        pass

@stage("close_and_work_on")
def test_close_and_work_on():
    os.closerange(3, 1000)
    files = [open(os.path.join(os.environ["KEPT"], str(n)), "w") for n in range(40)]
    time.sleep(4)

@stage("clears_environment")
def test_clears_environment(): os.environ.clear()

@pytest.fixture
def crashes_late():
    yield
    ctypes.string_at(0)

@stage("crash_late")
def test_crash_late(crashes_late): pass

@pytest.fixture
def skips_late():
    yield
    pytest.skip("too late")

@stage("skip_late")
def test_skip_late(skips_late): raise ValueError("not right")

@stage("memory")
def test_memory(): bytearray(1 << 60)

@stage("hook")
def test_hook(): pass

@stage("last")
def test_last(): pass

@stage("other", lane="other")
def test_other(): time.sleep(2)
"""

# A hook of somebody else's that fails in the worker while a stage runs.
CONFTEST = """
import os
import pytest

@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish(nodeid):
    if "test_hook" in nodeid and "PYTEST_XDIST_WORKER" in os.environ:
        raise OSError("a plugin fell over")
"""


@pytest.fixture(scope="module")
def endings_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("endings")


@pytest.fixture(scope="module")
def endings(endings_dir: Path) -> Run:
    (endings_dir / "test_probe.py").write_text(ENDINGS)
    (endings_dir / "conftest.py").write_text(CONFTEST)
    (endings_dir / "kept").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KEPT", str(endings_dir / "kept"))
        return Run(
            endings_dir, "--gkd-stages=all", "test_probe.py", "-k", "test_probe",
            "-n2", "--junitxml=j.xml", limit_s=240,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "outcome", "says"),
    [
        ("exit_0", "failed", "the stage called pytest.exit('done')"),
        ("exit_x", "failed", "the stage called pytest.exit('x')"),
        ("exit_late", "failed", "the stage called pytest.exit('late')"),
        ("interrupt", "failed", "KeyboardInterrupt in the stage"),
        ("sigint", "failed", "KeyboardInterrupt in the stage"),
        ("sys_exit", "failed", "SystemExit: 0"),
        ("generator_exit", "failed", "GeneratorExit"),
        ("own_base", "failed", "Mine: mine"),
        ("thread_exit", "passed", ""),
        ("os_exit", "failed", "the process that ran it died: exit code 0"),
        ("close_1_2", "passed", ""),
        ("close_all", "failed", "the stage closed file descriptors"),
        ("close_stdout", "failed", "the stage close_stdout closed sys.stdout of its"),
        ("close_stderr", "failed", "the stage close_stderr closed sys.stderr of its"),
        ("close_and_work_on", "failed", "closed its connection to pytest"),
        ("clears_environment", "passed", ""),
        ("crash_late", "failed", "it passed, then while it closed the process that"),
        ("skip_late", "failed", "ValueError: not right"),
        ("memory", "failed", "MemoryError"),
        ("hook", "failed", "OSError: a plugin fell over"),
        ("last", "passed", ""),
        ("other", "passed", ""),
    ],
)
def test_a_stage_that_ends_as_no_test_should_is_told_truly(
    endings: Run, name: str, outcome: str, says: str
) -> None:
    stage = endings.stage(name)
    assert stage["outcome"] == outcome
    assert says in stage["message"]


def test_the_run_ends_as_one_with_failures(endings: Run) -> None:
    assert endings.code == pytest.ExitCode.TESTS_FAILED
    assert "INTERNALERROR" not in endings.text
    assert not endings.report["interrupted"]


def test_an_allocation_that_was_refused_is_not_told_as_a_kill(endings: Run) -> None:
    found = endings.stage("memory")["diagnosis"]
    assert found["cause"] == "env.host-oom"
    assert found["why"].index("allocation was refused") < found["why"].index("SIGKILL")


def test_in_one_process_pytest_exit_ends_the_run_but_never_as_a_success(
    tmp_path: Path,
) -> None:
    (tmp_path / "test_probe.py").write_text(ENDINGS)
    run = Run(tmp_path, "--gkd-stages=exit_0,last", "test_probe.py", "-n0")
    assert run.code == pytest.ExitCode.INTERRUPTED
    assert run.outcomes() == {"exit_0": "skipped", "last": "skipped"}


def test_in_one_process_a_closed_stream_is_told_of_every_stage_that_it_costs(
    tmp_path: Path,
) -> None:
    (tmp_path / "test_probe.py").write_text(ENDINGS)
    run = Run(tmp_path, "--gkd-stages=close_stdout,last", "test_probe.py", "-n0")
    assert run.outcomes() == {"close_stdout": "failed", "last": "failed"}
    for name in ("close_stdout", "last"):
        said = run.stage(name)["message"]
        assert said.startswith(
            "the stage close_stdout closed sys.stdout of its process"
        )


def test_junit_has_every_stage_of_such_a_run(endings: Run, endings_dir: Path) -> None:
    cases = ET.parse(endings_dir / "j.xml").iter("testcase")
    failed = {
        case.get("name")
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    }
    assert failed == {
        f"test_{stage['name']}"
        for stage in endings.report["stages"]
        if stage["outcome"] == "failed"
    }


def test_a_number_that_was_closed_and_used_anew_is_not_written_to(
    endings: Run, endings_dir: Path
) -> None:
    files = list((endings_dir / "kept").iterdir())
    assert len(files) == 40
    assert all(file.read_bytes() == b"" for file in files)


# -- pytest's own process ------------------------------------------------------------


@pytest.mark.parametrize("workers", ["-n2", "-n0"])
def test_a_reporter_of_the_users_that_fails_is_named_and_nothing_goes_on(
    tmp_path: Path, workers: str
) -> None:
    (tmp_path / "test_probe.py").write_text("""
import subprocess, time
from pathlib import Path
import pytest

@pytest.mark.gkd_stage("works", lane="one", timeout=60)
def test_works():
    Path("pid").write_text(str(subprocess.Popen(["sleep", "600"]).pid))
    time.sleep(30)

@pytest.mark.gkd_stage("reported", lane="two", timeout=60)
def test_reported():
    while not Path("pid").exists():
        time.sleep(0.05)

@pytest.mark.gkd_stage("later", lane="two", timeout=60)
def test_later(): pass
""")
    (tmp_path / "conftest.py").write_text("""
import json, os

def pytest_runtest_logreport(report):
    if report.when == "call" and "PYTEST_XDIST_WORKER" not in os.environ:
        json.loads("no JSON")
""")
    names = "works,reported,later" if workers == "-n2" else "later"
    run = Run(tmp_path, f"--gkd-stages={names}", "test_probe.py", workers)
    assert run.code == pytest.ExitCode.INTERNAL_ERROR
    assert run.report["ended"]
    said = "conftest.py:6 (pytest_runtest_logreport) raised an error in pytest's own"
    assert run.report["notes"][0].startswith(said)
    assert run.shows(f"gkd: {said} *JSONDecodeError: Expecting value: *")
    assert run.shows("gkd: report in .gkd/last/report.html")
    if workers == "-n2":
        assert run.outcomes()["reported"] == "passed"
        works = run.stage("works")
        assert works["outcome"] == "skipped"
        assert works["message"].startswith("interrupted after")
        assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


# -- the run's own directory ---------------------------------------------------------

WIPED = """
import ctypes, json, os, resource, shutil, subprocess, tempfile, time
from pathlib import Path
import pytest

def stage(name, **options):
    options = {"lane": "own", "timeout": 3} | options
    return pytest.mark.gkd_stage(name, **options)

@stage("wipes")
def test_wipes(gkd):
    shutil.rmtree(gkd.run_dir, ignore_errors=True)  # others write into it
    gkd.step("wiped")

@stage("wipes_and_leaves")
def test_wipes_and_leaves(gkd):
    shutil.rmtree(gkd.run_dir, ignore_errors=True)
    memory = Path("/dev/shm", f"gkd-test-{os.getpid()}")
    with memory.open("wb") as file:
        memory.chmod(0o600)
        subprocess.Popen(["sleep", "600"], pass_fds=[file.fileno()])
    gkd.fact("memory", str(memory))

@stage("next")
def test_next():
    assert tempfile.mkdtemp()

@stage("crashes")
def test_crashes(): ctypes.string_at(0)

@stage("wipes_and_hangs")
def test_wipes_and_hangs(gkd):
    for number in range(3):
        gkd.fact(f"before_{number}", number)
        shutil.rmtree(gkd.run_dir, ignore_errors=True)
        gkd.run_dir.mkdir()
    gkd.step("wiped")
    time.sleep(100)

@stage("scribbles")
def test_scribbles(gkd):
    for entry in Path("/proc/self/fd").iterdir():
        if entry.exists() and "gkd-events" in str(entry.readlink()):
            os.write(int(entry.name), b'{"event": \\n[1]\\n')
            with pytest.raises(PermissionError):
                os.truncate(int(entry.name), 0)

@stage("fills", timeout=20)
def test_fills(gkd):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    gkd.step("nobody hears this")
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)

@stage("late")
def test_late(): time.sleep(0.5)

@stage("needy", lane="other", needs=["late"])
def test_needy(): pass
"""


@pytest.fixture(scope="module")
def wiped(tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory = tmp_path_factory.mktemp("wiped")
    (directory / "test_probe.py").write_text(WIPED)
    names = (
        "wipes,wipes_and_leaves,next,crashes,wipes_and_hangs,scribbles,fills,late,needy"
    )
    return Run(directory, f"--gkd-stages={names}", "test_probe.py", "-n2")


def test_what_a_stage_does_to_the_runs_directory_costs_no_other_stage(
    wiped: Run,
) -> None:
    assert wiped.code == pytest.ExitCode.TESTS_FAILED
    assert wiped.outcomes() == {
        "wipes": "passed",
        "wipes_and_leaves": "passed",
        "next": "passed",
        "crashes": "failed",
        "wipes_and_hangs": "timeout",
        "scribbles": "passed",
        "fills": "passed",
        "late": "passed",
        "needy": "passed",
    }


def test_nothing_that_was_said_is_lost_with_the_directory(wiped: Run) -> None:
    hung = wiped.stage("wipes_and_hangs")
    assert hung["facts"] == {f"before_{number}": number for number in range(3)}
    assert hung["step"] == "wiped"
    assert wiped.stage("late")["duration_s"] < 3


def test_where_a_later_stage_crashed_is_known_without_the_directory(wiped: Run) -> None:
    stage = wiped.stage("crashes")
    assert "signal SIGSEGV" in stage["message"]
    assert "test_crashes" in "\n".join(stage["stuck"])


def test_what_a_stage_leaves_goes_also_when_it_has_cleared_the_directory(
    wiped: Run,
) -> None:
    stage = wiped.stage("wipes_and_leaves")
    assert ["sleep" in line for line in stage["cleaned"]] == [True]
    assert not Path(stage["facts"]["memory"]).exists()


def test_what_was_lost_of_what_stages_said_is_told(wiped: Run) -> None:
    notes = "\n".join(wiped.report["notes"])
    assert "line(s) written by the workers could not be read" in notes
    assert "fills: events could not be written: [Errno 27] File too large" in notes


TWO_SESSIONS = """
import json, sys
from pathlib import Path
import pytest

def held():
    entries = [str(entry.readlink()) for entry in list(Path("/proc/self/fd").iterdir())
               if entry.is_symlink()]
    return sorted(entry for entry in entries if "memfd:gkd" in entry)

class Looks:
    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self):
        found.append(len(held()))

found = []
for number in range(2):
    pytest.main(["--gkd-stages=last", "test_probe.py", sys.argv[1]], [Looks()])
    found.append(len(held()))
print(json.dumps(found))
"""


@pytest.mark.parametrize("workers", ["-n1", "-n0"])
def test_a_session_that_is_over_holds_no_file(tmp_path: Path, workers: str) -> None:
    (tmp_path / "test_probe.py").write_text(ENDINGS)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "two.py").write_text(TWO_SESSIONS)
    done = fresh_python.run("two.py", workers, cwd=tmp_path, check=True)
    during, *others = json.loads(done.stdout.splitlines()[-1])
    assert during > 0
    assert others == [0, during, 0]


def test_a_guardian_that_was_started_anew_is_nothing_left_behind(
    tmp_path: Path,
) -> None:
    (tmp_path / "test_probe.py").write_text("""
import os, shutil, time
import psutil, pytest

def guardians():
    below = psutil.Process(os.getppid()).children()
    return [p for p in below if p.name() == "gkd-guardian"]

@pytest.mark.gkd_stage("kills", timeout=60)
def test_kills(gkd):
    shutil.rmtree(gkd.run_dir, ignore_errors=True)
    (first,) = guardians()
    first.kill()
    while not [p for p in guardians() if p != first]:
        time.sleep(0.05)
    time.sleep(2.5)  # the tracker has walked again
    assert len([p for p in guardians() if p != first]) == 1
    pid = os.fork()  # an orphan of this worker, which the run buries
    if pid:
        os._exit(0)
    time.sleep(600)

@pytest.mark.gkd_stage("after", timeout=60)
def test_after(gkd):
    time.sleep(3)
    assert len(guardians()) == 1
""")
    run = Run(tmp_path, "--gkd-stages=kills,after", "test_probe.py")
    assert run.outcomes() == {"kills": "failed", "after": "passed"}
    assert "GKD_GUARDIAN" not in str(run.report["cleaned"])


# -- xfail -------------------------------------------------------------------------

EXPECTED = """
import time
import pytest

@pytest.mark.xfail(reason="known")
@pytest.mark.gkd_stage("fails")
def test_fails(): raise AssertionError("as ever")

@pytest.mark.xfail(reason="known", run=False)
@pytest.mark.gkd_stage("not_run")
def test_not_run(): raise AssertionError("must not run")

@pytest.mark.gkd_stage("by_hand")
def test_by_hand(): pytest.xfail("by hand")

@pytest.mark.xfail(reason="known")
@pytest.mark.gkd_stage("passes")
def test_passes(): pass

@pytest.mark.gkd_stage("needy", needs=["fails"])
def test_needy(): raise AssertionError("must not run")
"""
UNEXPECTED = """
import time
import pytest

@pytest.mark.xfail(reason="known", strict=True)
@pytest.mark.gkd_stage("strict")
def test_strict(): pass

@pytest.mark.xfail(reason="known", raises=OSError)
@pytest.mark.gkd_stage("other_error")
def test_other_error(): raise ValueError("another one")

@pytest.mark.xfail(reason="known")
@pytest.mark.gkd_stage("slow", timeout=1)
def test_slow(): time.sleep(30)
"""


def junit_kinds(path: Path) -> dict[str, str]:
    """What JUnit says of each test: the tag, with its type where it has one."""
    return {
        str(case.get("name")).removeprefix("test_"): " ".join(
            f"{child.tag} {child.get('type') or ''}".strip()
            for child in case
            if child.tag in ("failure", "error", "skipped")
        )
        for case in ET.parse(path).iter("testcase")
    }


@pytest.mark.parametrize("workers", ["-n2", "-n0"])
def test_an_expected_failure_is_the_same_everywhere(
    tmp_path: Path, workers: str
) -> None:
    (tmp_path / "test_probe.py").write_text(EXPECTED)
    run = Run(
        tmp_path,
        "--gkd-stages=fails,not_run,by_hand,passes,needy",
        "test_probe.py",
        workers,
        "--junitxml=j",
    )
    assert run.code == pytest.ExitCode.OK
    assert run.outcomes() == {
        "fails": "skipped",
        "not_run": "skipped",
        "by_hand": "skipped",
        "passes": "passed",
        "needy": "blocked",
    }
    assert junit_kinds(tmp_path / "j") == {
        "fails": "skipped pytest.xfail",
        "not_run": "skipped pytest.xfail",
        "by_hand": "skipped pytest.xfail",
        "passes": "",
        "needy": "skipped pytest.skip",
    }
    assert run.shows("*= 1 skipped, 3 xfailed, 1 xpassed in *")
    assert run.shows("fails * skipped * was expected to fail (xfail): known")
    assert run.shows("passes * passed * though it was expected to fail (xfail): known")


@pytest.mark.parametrize("workers", ["-n2", "-n0"])
def test_what_xfail_does_not_cover_fails(tmp_path: Path, workers: str) -> None:
    (tmp_path / "test_probe.py").write_text(UNEXPECTED)
    run = Run(
        tmp_path,
        "--gkd-stages=strict,other_error,slow",
        "test_probe.py",
        workers,
        "--junitxml=j",
    )
    assert run.code == pytest.ExitCode.TESTS_FAILED
    assert run.outcomes() == {
        "strict": "failed",
        "other_error": "failed",
        "slow": "timeout",
    }
    assert run.stage("strict")["message"] == "[XPASS(strict)] known"
    assert set(junit_kinds(tmp_path / "j").values()) == {"failure"}
    assert run.shows("*= 3 failed in *")


# -- texts of what was raised ----------------------------------------------------------

TEXTS = """
import ctypes, os, time
import pytest

def hang_in_c():
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)

class Shown:
    def __init__(self, show):
        self.show = show
    def __repr__(self):
        return self.show() or "shown"

class ShownError(Exception):
    def __str__(self):
        hang_in_c()

def stage(name, timeout):
    return pytest.mark.gkd_stage(name, lane="one", timeout=timeout)

@pytest.fixture
def hangs():
    return Shown(hang_in_c)

@pytest.fixture
def crashes():
    return Shown(lambda: ctypes.string_at(0))

@pytest.fixture
def sleeps():
    return Shown(lambda: time.sleep(4))

@stage("hangs_in_repr", 600)
def test_hangs_in_repr(hangs):
    raise ValueError("the real failure")

@stage("hangs_in_str", 600)
def test_hangs_in_str():
    raise ShownError("the real failure")

@stage("crashes_in_repr", 600)
def test_crashes_in_repr(crashes):
    raise ValueError("the real failure")

@stage("sleeps_in_repr", 3)
def test_sleeps_in_repr(sleeps):
    raise ValueError("the real failure")

@stage("late", 3)
def test_late(hangs):
    time.sleep(60)

@stage("skips", 3)
def test_skips(hangs):
    pytest.skip("not here")

@stage("after", 600)
def test_after():
    pass
"""


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory = tmp_path_factory.mktemp("texts")
    (directory / "test_probe.py").write_text(TEXTS)
    return Run(directory, "--gkd-stages=all", "test_probe.py", "-k", "test_probe")


@pytest.mark.parametrize(
    ("name", "outcome", "message"),
    [
        (
            "hangs_in_repr",
            "failed",
            "ValueError: the real failure (test_probe.py:*); making its traceback took "
            "over 15 s (a slow __repr__?)",
        ),
        ("hangs_in_str", "failed", "ShownError: the real failure (test_probe.py:*"),
        (
            "crashes_in_repr",
            "failed",
            "ValueError: the real failure (test_probe.py:*); while its traceback was "
            "made the process that ran it died: signal SIGSEGV",
        ),
        ("sleeps_in_repr", "failed", "ValueError: the real failure"),
        ("late", "timeout", "*"),
        ("skips", "skipped", "not here"),
        ("after", "passed", ""),
    ],
)
def test_a_text_that_cannot_be_made_hides_no_failure(
    texts: Run, name: str, outcome: str, message: str
) -> None:
    stage = texts.stage(name)
    assert stage["outcome"] == outcome
    assert fnmatch.fnmatchcase(stage["message"], message.rstrip("*") + "*")
    assert (stage["duration_s"] or 0.0) < (60 if outcome == "timeout" else 3)


def test_where_a_text_hung_is_shown(texts: Run) -> None:
    stuck = "\n".join(texts.stage("hangs_in_repr")["stuck"])
    assert "Shown.__repr__" in stuck or "hang_in_c" in stuck
