"""Who failed first among ranks of torchrun that end at once: its summary names one."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from watch_helpers import watch

from pytest_gkd.diagnosis import launcher_summary
from pytest_gkd.diagnosis.launcher_summary import DeadActor, Failed

SUMMARY = b"""Failures:
[1]:
  time      : 2026-11-26_10:38:22
  host      : node1
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 16863)  (SIGTERM)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 16863
-------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-26_10:38:22
  host      : node1
  rank      : 9 (local_rank: 1)
  exitcode  : -9 (pid: 16864)  (SIGKILL)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 16864
=======================================================
"""
TRAINER = DeadActor("TrainerWorker", 20337)
STEP = b"step:4 - actor/kl_loss:15.6 - timing_s/step:0.25\n"
DEAD = b"""ray.exceptions.ActorDiedError: The actor died unexpectedly.
\tclass_name: TrainerWorker
\tactor_id: 6ee5f417c16e8e7fa451f63401000000
\tpid: 20337
\tname: trainer
\tnamespace: gkd
\tip: 192.0.2.2
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR
"""
# Rank 1 dies, and torchrun ends the others within a tenth of a second.
RANKS = """
import os, signal, time
print({"loss": 1.0, "step": 1}, flush=True)
time.sleep(3)
if os.environ["RANK"] == "1":
    print("rank 1 is", os.getpid(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(100)
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (SUMMARY, Failed(9, 16864, -9)),
        (re.sub(rb"(?m)^", b"0: ", SUMMARY), Failed(9, 16864, -9)),  # srun --label
        (
            SUMMARY + SUMMARY.replace(b"rank      : 9", b"rank      : 3"),
            Failed(3, 16864, -9),
        ),
        (
            SUMMARY.partition(b"error_file: <N/A>\n  traceback : Signal 9")[0],
            Failed(9, 16864, -9),
        ),
        (SUMMARY.partition(b"exitcode  : -9")[0], None),
        (SUMMARY.partition(b"Root")[0], None),
        (SUMMARY.replace(b": 9 (", b": " + b"9" * 90 + b" ("), None),
        (b"Root Cause (first observed failure):\n" * 9999, None),
        (b"", None),
    ],
)
def test_the_rank_that_a_summary_names(text: bytes, found: Failed | None) -> None:
    assert launcher_summary.first_failed(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (DEAD, TRAINER),
        (DEAD.replace(b"Trainer", b"made_for.<locals>.Trainer"), TRAINER),  # as verl's
        (re.sub(rb"(?m)^", b"(TaskRunner pid=7) ", DEAD), TRAINER),
        (re.sub(rb"\tname.*\n\tnamespace.*\n", b"", DEAD), TRAINER),
        (DEAD + b"(raylet) a warning: the node is low on memory\n", TRAINER),
        # It was caught, and something else ended the run.
        (DEAD + b"going on\nValueError: bad config\n", None),
        (DEAD + b"AssertionError\n", None),
        (DEAD + b"ray.exceptions.RayTaskError(ValueError): ray::A.run()\n", None),
        (DEAD.replace(b"SYSTEM_ERROR", b"INTENDED_USER_EXIT"), None),
        # It was begun again, and another one has died since.
        (
            DEAD + STEP + DEAD.replace(b"20337", b"4711"),
            DeadActor("TrainerWorker", 4711),
        ),
        (DEAD + STEP, None),
        # Killed by Ray, because the driver ended.
        (DEAD.replace(b"its worker process has died", b"its owner has died"), None),
        (DEAD.partition(b"The actor is")[0], None),
        (re.sub(rb"\tpid.*\n", b"", DEAD), None),  # it never ran
        (b"class_name: A\n\tactor_id: 1\n" * 9999, None),
    ],
)
def test_the_actor_that_ray_saw_die(text: bytes, found: DeadActor | None) -> None:
    assert launcher_summary.dead_actor(text) == found


def test_an_actor_that_ends_the_job_at_once_is_named(tmp_path: Path) -> None:
    (tmp_path / "error.txt").write_bytes(DEAD)
    job = "import sys; sys.exit(open('error.txt').read())"
    done = watch(tmp_path, sys.executable, "-c", job)
    assert b"by Ray's last error ray::TrainerWorker (pid 20337) has died" in done.stderr


@pytest.mark.needs("torch")
def test_a_rank_of_torchrun_that_is_killed_is_named(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(RANKS)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    done = watch(tmp_path, *torchrun, "--nproc-per-node=3", "ranks.py")
    assert done.returncode == 1
    pid = re.search(rb"rank 1 is (\d+)", done.stdout)
    assert pid, done.stdout
    (file,) = tmp_path.glob("watch/*/verdict.json")
    told = json.loads(file.read_text())
    assert (told["verdict"], told["who"]) == ("dead", f"rank 1 (pid {int(pid[1])})")
    # By the samples, where it is the only one that had ended, or by torchrun.
    ways = ("was the first of its processes to end", "fail first, exit code -9")
    assert told["why"][1].endswith(ways)
