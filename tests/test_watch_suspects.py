"""What is suspected of a standstill is worded by what its stacks show."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_gkd.diagnosis.exceptions import Frame
from pytest_gkd.diagnosis.stack_dump import MAIN, Thread
from pytest_gkd.diagnosis.suspects import Suspect
from pytest_gkd.watch import stuck_report, suspect_signs
from pytest_gkd.watch.samples import (
    STUCK,
    JobSample,
    ProcessSample,
    Progress,
    Role,
    Verdict,
)

BARRIER = Frame("torch/distributed/distributed_c10d.py", 4905, "barrier")
SAVE = Frame("torch/serialization.py", 970, "save")


def look(*frames: Frame, state: str = "S", **more: tuple[str, ...]) -> JobSample:
    thread = Thread(MAIN, 1, (Frame("train.py", 3, "fit"), *frames))
    one = ProcessSample(
        2**22 + 1, 1, 1, Role("rank", "rank 0", 0), "train", state, threads=(thread,)
    )
    return JobSample(10.0, 10.0, 1, 0.0, (one,), **more)  # type: ignore[arg-type]


IN_BARRIER = "ranks stand in barrier (torch/distributed/distributed_c10d.py)"
IN_FILE = "ranks stand in a function of torch/distributed/distributed_c10d.py"
HELD = "a rank stands below save (torch/serialization.py) in state D"
BOTH = "one stands in save (torch/serialization.py), one in barrier (a/b.py)"
IMPORTS = "it stands below _find_and_load (<frozen importlib._bootstrap>)"


@pytest.mark.parametrize(
    ("observation", "sample", "standing"),
    [
        (IN_BARRIER, look(BARRIER), "seen"),
        (IN_BARRIER, look(SAVE), "ruled out"),
        (IN_FILE, look(BARRIER), "seen"),
        (HELD, look(SAVE, state="D"), "seen"),
        (HELD, look(SAVE), "ruled out"),
        (BOTH, look(SAVE), "possible"),
        ("the file system has no space left", look(SAVE), "possible"),
        (IN_BARRIER, look(SAVE, remote=("10.0.0.5:1",)), "possible"),
        (IN_BARRIER, look(SAVE, unseen=("no ptrace",)), "possible"),
        (IMPORTS, look(SAVE), "ruled out"),
    ],
)
def test_an_observation_is_held_against_the_stacks(
    observation: str, sample: JobSample, standing: str
) -> None:
    suspect = Suspect("env.disk-full", observation, "here", "df", "df(1)")
    assert suspect_signs.standing(suspect, sample) == standing


def test_what_is_not_seen_is_not_worded_as_seen(tmp_path: Path) -> None:
    def told(*frames: Frame) -> list[str]:
        report = stuck_report.make(
            tmp_path / "stuck",
            Verdict(STUCK, 60.0),
            look(*frames),
            Progress(phase="checkpoint"),
            b"Saving checkpoint",
            None,
        )
        lines = report.text().splitlines()
        return [line.split(".    ")[1] for line in lines if ".    " in line]

    standing = told(BARRIER)
    assert standing[0].startswith("ranks stand in barrier")
    assert standing[1].startswith("perhaps the file system")
    # Where nobody stands in a barrier or in state D, neither is said.
    assert [line[:23] for line in told()] == ["perhaps the file system"]
