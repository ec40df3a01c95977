"""What is suspected of a standstill is worded by what its stacks show."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pytest_gkd.diagnosis.stack_dump import MAIN, Frame, Thread
from pytest_gkd.watch import stuck_report
from pytest_gkd.watch.samples import (
    STUCK,
    GpuSample,
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


SYNC = Frame("torch/cuda/__init__.py", 1162, "synchronize")
ACQUIRE = (
    Frame("train.py", 9, "save_checkpoint"),
    Frame("python3.12", 0, "PyThread_acquire_lock_timed"),
)


def suspected(phase: str, sample: JobSample, place: Path) -> list[str]:
    """The report's lines that wait or are numbered."""
    report = stuck_report.make(
        place / "stuck",
        Verdict(STUCK, 60.0),
        sample,
        Progress(phase=phase, step=15, step_at=1.0, step_s=1.0),
        b"step 15 loss 0.3333",
        None,
        natively=lambda seen, _: seen,
    )
    lines = (line.strip() for line in report.text().splitlines())
    return [line for line in lines if line.startswith("wait") or line[0].isdigit()]


def alone(*frames: Frame, problem: str = "", **more: object) -> JobSample:
    made = look(*frames)
    (one,) = made.processes
    one = replace(one, role=Role("process", "wjob.py"), problem=problem)
    if problem:
        one = replace(one, threads=(), wchan="futex_do_wait")
    return replace(made, processes=(one,), **more)  # type: ignore[arg-type]


def test_a_lone_process_is_told_nothing_of_ranks(tmp_path: Path) -> None:
    """As on an H200, where a job of one process waited for a kernel without end."""
    gpu = (GpuSample(0, 100, 1, 2),)
    wait, *others = suspected("training-step", alone(SYNC, gpus=gpu), tmp_path)
    assert wait.endswith("waits for the GPU (synchronize, called from fit, train.py:3)")
    # One line, and not as if the Xid had been seen.
    assert [one for one in others if "odd one" in one] == []
    assert others[0].startswith("1.    perhaps every rank stands in synchronize")
    assert len(others) == 1
    ranks = look(SYNC)
    assert "the odd one" in suspected("training-step", ranks, tmp_path)[1]


def test_a_lone_process_without_stacks_is_told_what_the_kernel_says(
    tmp_path: Path,
) -> None:
    sample = alone(problem="py-spy is not installed", unseen=("no Python stacks",))
    (wait,) = suspected("training-step", sample, tmp_path)
    assert wait.endswith("shows no stack, and waits in the kernel's futex_do_wait")


def test_who_waits_for_a_lock_as_it_saves_waits_for_no_disk(tmp_path: Path) -> None:
    (wait,) = suspected("checkpoint", alone(*ACQUIRE), tmp_path)
    assert wait.endswith(
        "waits for a lock in save_checkpoint (train.py:9), and has no other thread "
        "that could free it"
    )
    writes = alone(Frame("train.py", 9, "save_checkpoint"))
    assert "no space" in suspected("checkpoint", writes, tmp_path)[1]


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
    assert first.startswith("ranks stand in a collective such as barrier")
    assert second.startswith("perhaps the file system")
    assert told(look(SAVE, state="D"))[0].startswith("a rank stands below save")
    assert told(look(SAVE))[0].startswith("perhaps a rank stands below save")
    # Where nobody stands in a barrier or saves, neither is said.
    assert [line[:23] for line in told(look())] == ["perhaps the file system"]
    # Of other machines nothing is known.
    far = told(look(remote=("10.0.0.5:29500",)))
    assert far[0].startswith("perhaps ranks stand in a collective")
