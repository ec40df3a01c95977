"""The plugin as its user meets it: real pytest, real workers, real hangs."""

from __future__ import annotations

import fnmatch
import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import psutil
import pytest
import report_schema

SLEEPER = "import time; time.sleep(600)"

# A hang that nothing inside the process can end: C code that waits forever and never
# gives the GIL back, with a child in a session of its own.
HANGS_IN_C = f"""
import ctypes, subprocess, sys
import pytest

@pytest.mark.gkd_stage("stuck", lane="probe", timeout=1.5)
def test_stuck(gkd):
    gkd.step("starting a child")
    sleeper = [sys.executable, "-c", {SLEEPER!r}]
    child = subprocess.Popen(sleeper, start_new_session=True)
    gkd.fact("child", child.pid)
    print("the last words")
    gkd.step("waiting in C")
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)

@pytest.mark.gkd_stage("after", lane="probe", timeout=20)
def test_after(gkd):
    gkd.fact("summary", "still here")

@pytest.mark.gkd_stage("needy", lane="other", needs=["stuck"], timeout=20)
def test_needy():
    raise AssertionError("must not run")
"""


class Run:
    """One pytest run in a process of its own, with its report."""

    def __init__(
        self,
        directory: Path,
        *args: str,
        limit_s: float = 300,
        python: str = sys.executable,
        env: dict[str, str] | None = None,
        before: tuple[str, ...] = (),
    ) -> None:
        # The run that tests this may itself be spread over workers.
        own = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
        done = subprocess.run(
            [*before, python, "-m", "pytest", "-p", "no:cacheprovider", *args],
            cwd=directory,
            env=env or own,
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr
        self.text = self.out + self.err
        path = directory / ".gkd/last/report.json"
        self.report: dict[str, Any] = {}
        if path.exists():
            self.report = json.loads(path.read_text())
            report_schema.check(self.report)

    def stage(self, name: str) -> dict[str, Any]:
        return next(s for s in self.report["stages"] if s["name"] == name)

    def outcomes(self) -> dict[str, str]:
        return {stage["name"]: stage["outcome"] for stage in self.report["stages"]}

    def shows(self, pattern: str) -> bool:
        """Whether a line matches, as fnmatch does."""
        lines = self.text.splitlines()
        return any(fnmatch.fnmatchcase(line, pattern) for line in lines)


@pytest.fixture(scope="module")
def hang_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hang")


@pytest.fixture(scope="module")
def hang(hang_dir: Path) -> Run:
    """A run that several tests look at."""
    (hang_dir / "test_probe.py").write_text(HANGS_IN_C)
    names = "--gkd-stages=stuck,after,needy"
    return Run(hang_dir, names, "--junitxml=j.xml", "test_probe.py", "-n2")


def test_a_hang_that_holds_the_gil_is_ended_on_its_budget(hang: Run) -> None:
    stage = hang.stage("stuck")
    assert stage["outcome"] == "timeout"
    assert stage["step"] == "waiting in C"
    assert hang.code == pytest.ExitCode.TESTS_FAILED


def test_the_child_of_a_hung_stage_is_ended_with_it(hang: Run) -> None:
    stage = hang.stage("stuck")
    assert any(SLEEPER in line for line in stage["cleaned"])
    assert not psutil.pid_exists(stage["facts"]["child"])


def test_the_stacks_of_a_hang_name_the_line_it_stands_in(
    hang: Run, hang_dir: Path
) -> None:
    paths = [hang_dir / path for path in hang.stage("stuck")["stacks"]]
    assert len(paths) == 2
    assert any("test_stuck" in path.read_text() for path in paths)
    assert any(
        "test_stuck (test_probe.py:" in line for line in hang.stage("stuck")["stuck"]
    )


def test_the_rest_of_the_lane_runs_after_a_hang(hang: Run) -> None:
    assert hang.stage("after")["outcome"] == "passed"
    assert hang.stage("after")["facts"]["summary"] == "still here"


def test_a_stage_whose_need_failed_is_blocked_by_name(hang: Run) -> None:
    assert hang.stage("needy")["outcome"] == "blocked"
    assert hang.stage("needy")["blocked_by"] == ["stuck"]
    assert hang.shows("needy *blocked by stuck*")


def test_what_a_hung_stage_printed_is_kept(hang: Run, hang_dir: Path) -> None:
    log = hang_dir / ".gkd/last/output/stuck/stage.log"
    assert "the last words" in log.read_text()


def test_junit_tells_the_same_story(hang: Run, hang_dir: Path) -> None:
    cases = {
        case.get("name"): case for case in ET.parse(hang_dir / "j.xml").iter("testcase")
    }
    failure = cases["test_stuck"].find("failure")
    assert failure is not None
    assert "not finished within 1.5 s while waiting in C" in str(failure.get("message"))
    assert "stage stuck was ended" in str(failure.text)
    assert float(str(cases["test_stuck"].get("time"))) >= 1.5
    assert cases["test_after"].find("failure") is None
    assert cases["test_needy"].find("skipped") is not None


def test_a_hang_in_python_ends_with_its_fixtures_torn_down(
    tmp_path: Path,
) -> None:
    (tmp_path / "test_probe.py").write_text("""
import pathlib, time
import pytest

@pytest.fixture
def resource():
    yield
    pathlib.Path("torn-down").touch()

@pytest.mark.gkd_stage("slow", timeout=1)
def test_slow(resource):
    while True:
        time.sleep(0.05)
""")
    run = Run(tmp_path, "--gkd-stages=slow", "test_probe.py")
    assert run.outcomes() == {"slow": "timeout"}
    assert (tmp_path / "torn-down").exists()


def test_a_worker_that_dies_fails_its_stage_and_the_lane_goes_on(
    tmp_path: Path,
) -> None:
    (tmp_path / "test_probe.py").write_text("""
import os, signal
import pytest

@pytest.mark.gkd_stage("dies", timeout=20)
def test_dies(gkd):
    gkd.step("about to die")
    os.kill(os.getpid(), signal.SIGSEGV)

@pytest.mark.gkd_stage("lives", timeout=20)
def test_lives():
    pass
""")
    run = Run(tmp_path, "--gkd-stages=dies,lives", "test_probe.py")
    assert run.outcomes() == {"dies": "failed", "lives": "passed"}
    assert "SIGSEGV" in run.stage("dies")["message"]
    assert any("test_dies" in line for line in run.stage("dies")["stuck"])


def test_a_worker_that_is_killed_is_noticed_though_a_fork_of_it_lives(
    tmp_path: Path,
) -> None:
    (tmp_path / "test_probe.py").write_text("""
import os, signal, time
import pytest

@pytest.mark.gkd_stage("killed", timeout=50)
def test_killed():
    if os.fork() == 0:
        time.sleep(40)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)

@pytest.mark.gkd_stage("lives", timeout=20)
def test_lives():
    pass
""")
    run = Run(tmp_path, "--gkd-stages=killed,lives", "test_probe.py")
    assert run.outcomes() == {"killed": "failed", "lives": "passed"}
    assert "SIGKILL" in run.stage("killed")["message"]
    assert run.stage("killed")["duration_s"] < 40


def test_an_assertion_of_the_users_is_shown_with_its_values(
    tmp_path: Path,
) -> None:
    (tmp_path / "test_probe.py").write_text("""
import pytest

@pytest.mark.gkd_stage("sums")
def test_sums():
    assert sum([1, 2]) == 4, "the sum is off"
""")
    run = Run(tmp_path, "--gkd-stages=sums", "test_probe.py")
    assert run.outcomes() == {"sums": "failed"}
    assert run.shows("FAILED *the sum is off*")


def test_v_shows_the_traceback_too(tmp_path: Path) -> None:
    (tmp_path / "test_probe.py").write_text("""
import pytest

@pytest.mark.gkd_stage("sums")
def test_sums():
    number = 3
    assert number == 4
""")
    short = Run(tmp_path, "--gkd-stages=sums", "test_probe.py")
    assert "number = 3" not in short.text
    long = Run(tmp_path, "--gkd-stages=sums", "-v", "test_probe.py")
    assert "number = 3" in long.text


def test_n0_runs_in_one_process_and_says_what_it_does_not_hold(
    tmp_path: Path,
) -> None:
    (tmp_path / "test_probe.py").write_text("""
import os
import pytest

@pytest.mark.gkd_stage("here")
def test_here(gkd):
    assert "PYTEST_XDIST_WORKER" not in os.environ
""")
    run = Run(tmp_path, "--gkd-stages=here", "-n0", "test_probe.py")
    assert run.outcomes() == {"here": "passed"}
    assert run.shows("*-n0*budgets are not enforced*")


LIGHT = """
import sys

def pytest_sessionfinish():
    readers = [name for name in ("catalogue", "scan", "log_phases", "diagnose")
               if f"pytest_gkd.diagnosis.{name}" in sys.modules]
    assert not readers, readers
"""


@pytest.mark.parametrize("fails", [False, True])
def test_only_a_failure_pays_for_the_readers_of_logs(
    tmp_path: Path, fails: bool
) -> None:
    (tmp_path / "conftest.py").write_text(LIGHT)
    (tmp_path / "test_own.py").write_text(f"""
import pytest

@pytest.mark.gkd_stage("own", lane="probe", timeout=20)
def test_own(): assert not {fails}
""")
    run = Run(tmp_path, "--gkd-stages=own", "test_own.py")
    assert ("AssertionError: ['catalogue'" in run.text) == fails, run.text


@pytest.mark.parametrize("workers", ["1", "3"])
def test_lanes_fit_the_users_own_n(tmp_path: Path, workers: str) -> None:
    (tmp_path / "test_probe.py").write_text("""
import pytest

@pytest.mark.gkd_stage("second", lane="a", needs=["first"])
def test_second(): pass

@pytest.mark.gkd_stage("first", lane="b")
def test_first(): pass
""")
    args = ("--gkd-stages=first,second", "-n", workers, "test_probe.py")
    run = Run(tmp_path, *args)
    assert run.outcomes() == {"first": "passed", "second": "passed"}


def test_x_stops_the_other_lanes_too(tmp_path: Path) -> None:
    (tmp_path / "test_probe.py").write_text("""
import time
import pytest

@pytest.mark.gkd_stage("fails", lane="a")
def test_fails(): assert False

@pytest.mark.gkd_stage("sleeps", lane="b")
def test_sleeps(): time.sleep(50)
""")
    args = ("--gkd-stages=fails,sleeps", "-x", "-n2", "test_probe.py")
    run = Run(tmp_path, *args)
    assert run.outcomes() == {"fails": "failed", "sleeps": "skipped"}
    assert run.code == pytest.ExitCode.TESTS_FAILED


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_everything_and_the_report_says_where(
    tmp_path: Path, number: signal.Signals, times: int
) -> None:
    (tmp_path / "test_probe.py").write_text(HANGS_IN_C)
    command = [sys.executable, "-m", "pytest", "--gkd-stages=stuck", "test_probe.py"]
    # What a shell starts in the background ignores SIGINT, and so do its children.
    heeds = "import os, signal, sys; signal.signal(2, signal.SIG_DFL)"
    pytest_run = subprocess.Popen(
        [
            *(sys.executable, "-c", f"{heeds}; os.execv(sys.executable, sys.argv[1:])"),
            *command,
            "--gkd-timeout=stuck=60",
            "--junitxml=j.xml",
        ],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    report = tmp_path / ".gkd/last/report.json"
    stage = _await_step(report, "waiting in C")
    for _ in range(times):
        pytest_run.send_signal(number)
        time.sleep(0.02)  # all of them before pytest is over
    output, _ = pytest_run.communicate(timeout=120)
    assert pytest_run.returncode == pytest.ExitCode.INTERRUPTED
    assert not psutil.pid_exists(stage["facts"]["child"])
    found = json.loads(report.read_text())
    assert found["interrupted"]
    assert "while waiting in C" in found["stages"][0]["message"]
    assert "stuck was interrupted after" in output
    assert "Traceback" not in output
    (case,) = ET.parse(tmp_path / "j.xml").iter("testcase")
    assert case.get("name") == "test_stuck"
    (skipped,) = case.iter("skipped")
    assert "interrupted after" in (skipped.get("message") or "")


def _await_step(report: Path, step: str) -> dict[str, Any]:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if report.exists():
            for stage in json.loads(report.read_text())["stages"]:
                if stage["step"] == step:
                    return dict(stage)
        time.sleep(0.05)
    raise AssertionError(f"{report} never showed the step {step!r}")


def test_stages_inside_a_stage_are_refused(tmp_path: Path) -> None:
    (tmp_path / "test_probe.py").write_text("""
import subprocess, sys
import pytest

@pytest.mark.gkd_stage("outer")
def test_outer():
    command = [sys.executable, "-m", "pytest", "--gkd-stages=data"]
    inner = subprocess.run(command, capture_output=True, text=True)
    assert inner.returncode == 4
    assert "inside the running stage 'outer'" in inner.stderr
""")
    assert Run(tmp_path, "--gkd-stages=outer", "test_probe.py").code == 0


def test_without_the_option_a_marked_test_is_an_ordinary_test(
    tmp_path: Path,
) -> None:
    (tmp_path / "test_probe.py").write_text("""
import pytest

@pytest.mark.gkd_stage("probe", timeout=5)
def test_probe(gkd):
    gkd.step("working")
    assert gkd.settings.device in ("cpu", "cuda")
""")
    run = Run(tmp_path)
    assert run.shows("*= 1 passed*")
    assert not (tmp_path / ".gkd").exists()


def test_other_tests_are_left_out_unless_k_asked_for_them(
    tmp_path: Path,
) -> None:
    (tmp_path / "test_probe.py").write_text("""
import pytest

@pytest.mark.gkd_stage("mine")
def test_mine(): pass

def test_other(): pass
""")
    run = Run(tmp_path, "--gkd-stages=mine", "test_probe.py")
    assert run.shows("*= 1 passed*")


def test_a_missing_data_file_is_named_with_its_advice(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "hello"}\n')
    run = Run(tmp_path, "--gkd-stages=data", "--gkd-train-files=trian.jsonl")
    stage = run.stage("data")
    assert stage["outcome"] == "failed"
    assert stage["diagnosis"]["cause"] == "data.file-missing"
    assert stage["diagnosis"]["advice"]
    assert "train.jsonl" in run.text
    assert run.code == pytest.ExitCode.TESTS_FAILED


def test_quiet_shows_no_progress(tmp_path: Path) -> None:
    (tmp_path / "test_probe.py").write_text("""
import time
import pytest

@pytest.mark.gkd_stage("slow")
def test_slow(gkd):
    gkd.step("working")
    time.sleep(1)
""")
    run = Run(tmp_path, "--gkd-stages=slow", "-q", "test_probe.py")
    assert "working" not in run.text
    assert run.code == 0


def test_ini_twins_set_budgets_files_and_stages(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\ngkd_stage_files = checks/probe.py\n"
        "gkd_timeout = probe=7\ngkd_report = out\n"
    )
    (tmp_path / "checks").mkdir()
    (tmp_path / "checks/probe.py").write_text(
        "import pytest\n\n@pytest.mark.gkd_stage('probe')\ndef test_probe(): pass\n"
    )
    Run(tmp_path, "--gkd-stages=probe")
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert [(s["name"], s["budget_s"]) for s in report["stages"]] == [("probe", 7.0)]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--gkd-stages=ncl"], "*no stage 'ncl'; did you mean 'nccl'?*"),
        (["--gkd-stages", "test_x.py"], "*--gkd-stages=all test_x.py*"),
        (["--gkd-stages=", "--gkd-layout=split"], "*no stage named*"),
        (["--gkd-stages=probe"], "*there is no stage 'probe'*gkd_stage_files*"),
        (["--gkd-stages=data", "--gkd-timeout=data=soon"], "*'soon'*above 0*"),
        (["--gkd-stages=data", "--gkd-timeout=data=0"], "*'0'*above 0*"),
        (["--gkd-stages=data", "--gkd-timeout=dta=9"], "*did you mean 'data'?*"),
        (["--gkd-stages=data", "--gkd-timeout=9"], "*'9' is not NAME=TIME*"),
        (
            ["--gkd-stages=nccl", "--gkd-world-size=4096"],
            "*--gkd-world-size: 4096 ranks, but *",
        ),
        (["--gkd-stages=nccl", "--gkd-world-size=0"], "*'0' is not a whole number*"),
        (["--gkd-stages=nccl", "--gkd-layout=spilt"], "*did you mean 'split'?*"),
        (["--gkd-stages=data", "--gkd-report=/proc/no"], "*cannot write the report*"),
        (["--gkd-stages=mine", "absent.py"], "*file or directory not found*absent.py*"),
        (
            ["--gkd-stages=data", "--gkd-beta=2"],
            "*--gkd-beta: 2 is not a number between 0 and 1*",
        ),
    ],
)
def test_a_value_that_cannot_be_used_is_a_usage_error_that_says_why(
    tmp_path: Path, args: list[str], says: str
) -> None:
    (tmp_path / "test_x.py").touch()
    run = Run(tmp_path, *args)
    assert run.code == pytest.ExitCode.USAGE_ERROR
    assert run.shows(f"ERROR: {says}")
    assert "Traceback" not in run.text


@pytest.mark.parametrize(
    ("marker", "says"),
    [
        ("()", "takes the stage's name"),
        ("('a', timeout=0)", "takes timeout as seconds above 0"),
        ("('a', needs='b')", "takes needs as a list"),
        ("('a', lan='b')", "does not know lan"),
        ("('a', needs=['b'])", "there is no such stage"),
        ("('../a')", "cannot be the name of the stage's directory"),
        ("('a/../../b')", "cannot be the name of the stage's directory"),
        ("('/tmp/a')", "cannot be the name of the stage's directory"),
        ("('.')", "cannot be the name of the stage's directory"),
        ("('')", "cannot be the name of the stage's directory"),
    ],
)
def test_a_marker_that_cannot_be_read_is_named(
    tmp_path: Path, marker: str, says: str
) -> None:
    (tmp_path / "test_probe.py").write_text(
        f"import pytest\n\n@pytest.mark.gkd_stage{marker}\ndef test_a(): pass\n"
    )
    run = Run(tmp_path, "--gkd-stages=a", "test_probe.py")
    assert run.code == pytest.ExitCode.USAGE_ERROR
    assert says in run.text


RULE = """
id = "mine.reward-down"
title = "the reward server is down"
tier = "cause"
why = "It was restarted. It comes back by itself."
confirm = "python -c 'print(1)'"
[[signature]]
text = ["reward server said 503"]
example = "RuntimeError: reward server said 503"
near_miss = ["reward server said 200"]
[[fix]]
do = "Wait a minute"
[[source]]
ref = "https://example.org/reward"
says = "what 503 means there"
"""


def test_a_rule_of_the_users_own_names_the_cause(tmp_path: Path) -> None:
    (tmp_path / "reward.toml").write_text(RULE)
    (tmp_path / "pytest.ini").write_text("[pytest]\ngkd_rules = reward.toml\n")
    (tmp_path / "test_probe.py").write_text("""
import pytest

@pytest.mark.gkd_stage("reward")
def test_reward():
    raise RuntimeError("reward server said 503")
""")
    run = Run(tmp_path, "--gkd-stages=reward", "test_probe.py")
    assert run.stage("reward")["diagnosis"]["cause"] == "mine.reward-down"
    assert run.shows("*fix *Wait a minute*")


def test_a_rule_that_cannot_be_read_ends_the_run_at_once(tmp_path: Path) -> None:
    (tmp_path / "reward.toml").write_text('id = "mine.x"\ncolour = "blue"\n')
    (tmp_path / "pytest.ini").write_text("[pytest]\ngkd_rules = reward.toml\n")
    run = Run(tmp_path, "--gkd-stages=data")
    assert run.code == pytest.ExitCode.USAGE_ERROR
    assert "reward.toml" in run.text


def test_collect_only_lists_the_stages_and_runs_none(tmp_path: Path) -> None:
    run = Run(tmp_path, "--gkd-stages", "--collect-only", "-q")
    for name in ("environment", "data", "vllm", "nccl", "training_step"):
        assert f"stages/test_{name}.py::test_{name}" in run.text
    assert not (tmp_path / ".gkd").exists()


def test_the_run_leaves_no_temporary_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "test_probe.py").write_text("""
import tempfile
import pytest

@pytest.mark.gkd_stage("leaves")
def test_leaves():
    tempfile.mkdtemp()
""")
    assert Run(tmp_path, "--gkd-stages=leaves", "test_probe.py").code == 0
    assert list(tmp_path.glob("gkd-*")) == []


def test_what_a_passed_stage_left_running_is_ended_and_named(tmp_path: Path) -> None:
    (tmp_path / "test_probe.py").write_text(f"""
import subprocess, sys
import pytest

@pytest.mark.gkd_stage("leaves")
def test_leaves(gkd):
    sleeper = [sys.executable, "-c", {SLEEPER!r}]
    child = subprocess.Popen(sleeper, start_new_session=True)
    gkd.fact("child", child.pid)
""")
    run = Run(tmp_path, "--gkd-stages=leaves", "test_probe.py")
    assert run.outcomes() == {"leaves": "passed"}
    child = run.stage("leaves")["facts"]["child"]
    assert not psutil.pid_exists(child)
    (line,) = run.report["cleaned"]
    assert line.startswith(f"{child} ")
    assert SLEEPER in line
    assert run.shows("gkd: 1 process(es) were left running and were ended*")


def test_what_the_fixtures_run_into_later_does_not_hide_the_failure(
    tmp_path: Path,
) -> None:
    (tmp_path / "test_probe.py").write_text("""
import pytest

@pytest.fixture
def resource():
    yield
    raise OSError("teardown fell over")

@pytest.mark.gkd_stage("full")
def test_full(resource):
    raise OSError(28, "No space left on device")
""")
    stage = Run(tmp_path, "--gkd-stages=full", "test_probe.py").stage("full")
    assert "No space left" in stage["message"]
    assert stage["also"] == ["teardown: OSError: teardown fell over"]


def test_what_a_stage_found_besides_is_told_and_no_line_in_brackets_is_taken_for_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "test_probe.py").write_text("""
import pytest
from pytest_gkd.stage_api import StageFault

@pytest.mark.gkd_stage("several")
def test_several():
    other = StageFault("env.no-gpu", "no GPU here\\nnor there")
    raise StageFault("env.disk-full", "the disk is full\\n[a]", also=[other])

@pytest.mark.gkd_stage("one")
def test_one():
    raise ValueError("not these:\\n[1, 2]")
""")
    run = Run(tmp_path, "--gkd-stages=several,one", "test_probe.py")
    assert run.stage("several")["also"] == ["[env.no-gpu] no GPU here"]
    assert run.stage("one")["also"] == []


@pytest.mark.parametrize("mode", ["a", "a+"])
def test_what_the_user_sends_the_output_to_is_not_cut(
    tmp_path: Path, mode: str
) -> None:
    """Under -s a flood goes there, not to a file of pytest's."""
    (tmp_path / "test_probe.py").write_text("""
import sys
import pytest

@pytest.mark.gkd_stage("floods")
def test_floods():
    for _ in range(5):
        sys.stderr.write("x" * 1_000_000)
""")
    log = tmp_path / "all.log"
    log.write_text("words of before")
    command = [sys.executable, "-m", "pytest", "-s", "--gkd-stages=floods"]
    with log.open(mode) as file:
        done = subprocess.run(
            [*command, "test_probe.py"], cwd=tmp_path, stdout=file, stderr=file
        )
    text = log.read_text()
    assert done.returncode == 0, text[-2000:]
    assert text.startswith("words of before")
    assert text.count("x") >= 5_000_000
