"""What is suspected of a standstill is worded by what its stacks show."""

from __future__ import annotations

from pathlib import Path

from pytest_gkd.diagnosis.stack_dump import MAIN, Frame, Thread
from pytest_gkd.watch import stuck_report
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


def test_what_is_not_seen_is_not_worded_as_seen(tmp_path: Path) -> None:
    def told(sample: JobSample) -> list[str]:
        report = stuck_report.make(
            tmp_path / "stuck",
            Verdict(STUCK, 60.0),
            sample,
            Progress(phase="checkpoint"),
            b"Saving checkpoint",
            None,
            natively=lambda seen, _: seen,
        )
        lines = report.text().splitlines()
        return [line.split(".    ")[1] for line in lines if ".    " in line]

    first, second = told(look(BARRIER))
    assert first.startswith("ranks stand in barrier")
    assert second.startswith("perhaps the file system")
    assert told(look(SAVE, state="D"))[0].startswith("a rank stands below save")
    assert told(look(SAVE))[0].startswith("perhaps a rank stands below save")
    # Where nobody stands in a barrier or saves, neither is said.
    assert [line[:23] for line in told(look())] == ["perhaps the file system"]
    # Of other machines nothing is known.
    far = told(look(remote=("10.0.0.5:29500",)))
    assert far[0].startswith("perhaps ranks stand in barrier")
