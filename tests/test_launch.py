"""``--gkd-launch``: the user's command as the last stage, watched to a first step."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import report_schema
from test_option_origins import run

from pytest_gkd.processes import shell_line

RANKS = """
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, mode = dist.get_rank(), sys.argv[1]
tensor = torch.ones(4)

def save_checkpoint():
    time.sleep(300)

if mode == "stand" and rank == 1:
    save_checkpoint()
if mode == "die" and rank == 1:
    raise ValueError("no column 'prompt' in the batch")
for step in range(1, 500):
    dist.all_reduce(tensor)
    if rank == 0:
        print({"loss": 1 / step, "step": step}, flush=True)
    time.sleep(0.2)
"""
TORCHRUN = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2"
# Says where it is, and then does as it is told.
PLAIN = """
import os, signal, sys, time
print("pid", os.getpid(), os.getcwd(), os.environ.get("TMPDIR"), flush=True)
print("set", sorted(n for n in os.environ if n.startswith("OMP_")))
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "metrics" in sys.argv:
    print({"loss": 0.5, "step": 1}, flush=True)
while "stay" in sys.argv:
    time.sleep(0.1)
    if "chat" in sys.argv:
        print("tick", flush=True)
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A project with a job of two ranks and a plain one."""
    (tmp_path / "ranks.py").write_text(RANKS)
    (tmp_path / "plain.py").write_text(PLAIN)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


def launch(
    place: Path, command: str, *options: str, budget_s: int = 100, **environ: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """The run, and what its report says of the stage."""
    wanted = ("--gkd-stages=launch", f"--gkd-timeout=launch={budget_s}")
    done = run(place, *wanted, f"--gkd-launch={command}", *options, **environ)
    report = json.loads((place / ".gkd/last/report.json").read_text())
    report_schema.check(report)
    (stage,) = report["stages"]
    return done, stage


def printed(place: Path) -> str:
    return (place / ".gkd/last/output/launch/job.log").read_text()


def plain(*words: str) -> str:
    return f"{sys.executable} plain.py {' '.join(words)}"


@pytest.mark.needs("torch")
def test_a_job_of_two_ranks_passes_with_its_first_step(job: Path) -> None:
    done, stage = launch(job, f"{TORCHRUN} ranks.py go", f"--junitxml={job}/j.xml")
    assert (done.returncode, stage["outcome"]) == (0, "passed"), done.stdout
    assert stage["facts"]["first_step_s"] > 0
    assert stage["facts"]["summary"].startswith("first step after ")
    assert "'loss': 1.0" in printed(job)
    assert "gkd_summary" in (job / "j.xml").read_text()
    here = (one.info["cmdline"] for one in psutil.process_iter(["cmdline"]))
    assert not any(str(job) in " ".join(words or ()) for words in here)


@pytest.mark.needs("torch")
def test_a_rank_that_stands_still_is_named_with_its_phase_and_stacks(job: Path) -> None:
    done, stage = launch(job, f"{TORCHRUN} ranks.py stand", budget_s=80)
    assert (done.returncode, stage["outcome"]) == (1, "failed"), done.stdout
    assert re.match(r"the job is stuck in checkpoint for \d+ s", stage["message"])
    assert "rank 0 waits in all_reduce for rank 1" in stage["message"]
    assert "save_checkpoint (ranks.py:8)" in stage["message"]
    (stacks,) = [one["text"] for one in stage["telling"] if one["source"] == "stacks"]
    assert "save_checkpoint" in (job / stacks / "tree.txt").read_text()
    assert stacks in done.stdout.replace("\n         ", "")
    page = (job / ".gkd/last/report.html").read_text("utf-8")
    (odd,) = re.findall(r'<div class="box odd"><strong>(.*?)</strong>', page)
    assert odd == "rank 1/2 waited for"


@pytest.mark.needs("torch")
def test_a_rank_that_dies_is_told_with_its_own_error(job: Path) -> None:
    done, stage = launch(job, f"{TORCHRUN} ranks.py die")
    assert (done.returncode, stage["outcome"]) == (1, "failed"), done.stdout
    assert stage["message"].startswith("the job died: exit code 1 after ")
    # No rule knows it, and that the other rank lost its peer is no cause.
    assert stage["diagnosis"] is None
    assert "ValueError: no column 'prompt' in the batch" in stage["telling"][0]["text"]


def test_a_job_that_ends_without_a_step_passes_and_says_so(job: Path) -> None:
    done, stage = launch(job, plain())
    assert (done.returncode, stage["outcome"]) == (0, "passed"), done.stdout
    assert stage["facts"]["first_step_s"] is None
    assert "no step seen" in stage["facts"]["summary"]
    assert "the command ended by itself with 0" in " ".join(done.stdout.split())


def test_the_job_has_the_directory_and_the_variables_of_the_shell(job: Path) -> None:
    (job / "below").mkdir()
    ini = f"[pytest]\ngkd_launch = {plain()}\ngkd_timeout = launch=60\n"
    (job / "pytest.ini").write_text(ini)
    done = run(job / "below", "-k", "launch", TMPDIR=str(job), OMP_PROC_BIND="true")
    assert done.returncode == 0, done.stdout
    (log,) = (job / "below/.gkd").glob("last/output/launch/job.log")
    assert f"{job} {job}\n" in log.read_text()
    assert "set ['OMP_PROC_BIND']" in log.read_text()


def test_a_job_that_ignores_sigterm_is_ended_all_the_same(job: Path) -> None:
    command = plain("deaf", "metrics", "stay")
    done, stage = launch(job, command, budget_s=20)
    assert (done.returncode, stage["outcome"]) == (0, "passed"), done.stdout
    assert "did not end of SIGTERM" in stage["facts"]["summary"]
    (pid,) = re.findall(r"pid (\d+)", printed(job))
    assert not psutil.pid_exists(int(pid))


def test_a_job_without_a_step_in_its_time_is_told_as_such(job: Path) -> None:
    done, stage = launch(job, plain("stay", "chat"), budget_s=60)
    assert (done.returncode, stage["outcome"]) == (1, "failed"), done.stdout
    assert stage["message"].startswith("no training step within "), stage["message"]
    assert stage["step"].startswith("watching the job (")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("no-such-program --x", "there is no command 'no-such-program' on PATH"),
        ("A=1 ./run.sh", "there is no file './run.sh' in "),
        ("./plain.py", "'./plain.py' is not executable; name what runs it"),
        ("python 'train", "the shell cannot read it: "),
        (" ", "no command"),
    ],
)
def test_a_command_that_cannot_run_is_refused_before_anything_runs(
    job: Path, command: str, said: str
) -> None:
    done = run(job, "--gkd-stages=launch", f"--gkd-launch={command}")
    assert done.returncode == 4, done.stdout
    assert f"--gkd-launch: {said}" in done.stdout


def test_a_command_is_found_where_there_is_no_bash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shell_line.words("train x") == ["/bin/sh", "-c", "train x"]
    assert shell_line.problem("train x.py", tmp_path) == ""
    assert shell_line.problem("exit 3", tmp_path) == ""
    assert "no command 'trian'" in shell_line.problem("trian x.py", tmp_path)


def test_nothing_of_a_command_is_run_to_check_it(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    for line in (
        f"x=$(touch {canary}) true",
        f"$(touch {canary})",
        f"`touch {canary}`",
    ):
        assert shell_line.problem(line, tmp_path) == ""
    assert not canary.exists()
    assert shell_line.problem("cd /tmp && exec $PROGRAM", tmp_path) == ""


def test_without_a_command_there_is_no_stage_and_it_is_said_how(job: Path) -> None:
    done = run(job, "--gkd-stages=launch")
    assert done.returncode == 4
    assert '--gkd-launch="COMMAND"' in done.stdout
    listed = run(job, "--gkd-stages", "--collect-only", "-q")
    assert "test_launch" not in listed.stdout
    given = run(job, "--gkd-stages", "--collect-only", "-q", "--gkd-launch=true")
    assert "stages/test_launch.py::test_launch" in given.stdout


def test_a_list_of_stages_that_lacks_it_is_told(job: Path) -> None:
    told = "--gkd-launch is given, but --gkd-stages does not name the stage launch"
    assert told in run(job, "--gkd-stages=data", "--gkd-launch=true").stdout
    assert told not in run(job, "--gkd-stages=launch", "--gkd-launch=true").stdout


def test_a_stage_that_failed_before_blocks_it(job: Path) -> None:
    command = f"touch {job / 'canary'}"
    options = ("--gkd-stages=data,launch", "--gkd-train-files=absent.jsonl")
    done = run(job, *options, f"--gkd-launch={command}")
    assert done.returncode == 1, done.stdout
    report = json.loads((job / ".gkd/last/report.json").read_text())
    stages = {one["name"]: one for one in report["stages"]}
    assert stages["launch"]["outcome"] == "blocked"
    assert stages["launch"]["blocked_by"] == ["data"]
    assert not (job / "canary").exists()
