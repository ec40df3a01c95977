"""Two looks at a tree: what tells a stage that is stuck from one that is slow."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_gkd.files import make_way
from pytest_gkd.processes import gpus, resource_use, stall, tree
from pytest_gkd.processes.resource_use import Usage
from pytest_gkd.processes.stacks import Stack
from pytest_gkd.processes.stall import Look, Progress, QuietWatch

USAGE = Usage(100.0, 5.0, 1000, 1000, frozenset({7, 8}), frozenset())


def stack(pid: int, *frames: str) -> Stack:
    body = "".join(f"    {frame}\n" for frame in frames)
    text = f'Thread {pid} (idle): "MainThread"\n{body}'
    return Stack(pid, "python", Path("x"), text)


def looks(
    frames: tuple[str, ...] = ("wait (job.py:3)",), **changes: object
) -> tuple[Look, Look]:
    """Two looks ten seconds apart; the second with ``frames`` and ``changes``."""
    first = Look(USAGE, (stack(7, "wait (job.py:3)"),))
    usage = dataclasses.replace(USAGE, at=110.0, **changes)  # type: ignore[arg-type]
    return first, Look(usage, (stack(7, *frames),))


def test_a_tree_in_which_nothing_moved_is_stuck() -> None:
    progress = stall.compare(*looks())
    assert progress.verdict == "stuck"
    assert progress.window_s == 10.0
    assert "0.00 s of CPU in 10.0 s" in progress.text()


@pytest.mark.parametrize(
    "changes",
    [
        {"cpu_s": 5.5},
        {"io_bytes": 10_000_000},
        {"network_bytes": 1_000_000},
        {"pids": frozenset({7, 8, 9})},
        {"pids": frozenset({7})},
    ],
)
def test_whatever_was_used_speaks_against_stuck(changes: dict[str, Any]) -> None:
    assert stall.compare(*looks(**changes)).verdict == "alive"


def test_a_changed_stack_speaks_against_stuck() -> None:
    progress = stall.compare(*looks(("load (job.py:9)", "main (job.py:1)")))
    assert progress.verdict == "alive"
    assert progress.moved is not None
    assert "wait (job.py:3)" in progress.text()
    assert "load (job.py:9)" in progress.text()


def test_what_was_read_is_told() -> None:
    text = stall.compare(*looks(io_bytes=12_001_000)).text()
    assert "read and wrote 12.0 MB" in text


def test_heartbeats_do_not_speak_against_stuck() -> None:
    beats = looks(cpu_s=5.1, io_bytes=201_000, network_bytes=21_000)
    assert stall.compare(*beats).verdict == "stuck"


def test_a_tree_that_computes_in_one_place_is_busy() -> None:
    assert stall.compare(*looks(cpu_s=14.9)).verdict == "busy"


def test_a_stopped_process_is_named() -> None:
    progress = stall.compare(*looks(stopped=frozenset({8})))
    assert progress.verdict == "stuck"
    assert "process 8 is stopped by a signal" in progress.text()


def test_the_report_has_the_numbers() -> None:
    found = stall.compare(*looks(cpu_s=5.5)).to_json()
    assert (found["verdict"], found["cpu_s"], found["processes"]) == ("alive", 0.5, 2)


# -- a stage that stands still, in real processes ------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proof within two seconds instead of twenty."""
    monkeypatch.setattr(stall, "QUIET_S", 2.0)
    monkeypatch.setattr(stall, "LOOK_S", 0.2)


def taken_of(pid: int, place: Path) -> stall.Take:
    return lambda below: stall.look(pid, place / "armed", place / below, make_way)


@pytest.fixture
def watch(
    tmp_path: Path, quick: None
) -> Iterator[Callable[[str, float], tuple[Progress | None, QuietWatch]]]:
    started: list[subprocess.Popen[bytes]] = []

    def look(code: str, for_s: float) -> tuple[Progress | None, QuietWatch]:
        child = subprocess.Popen([sys.executable, "-c", code])
        started.append(child)
        quiet = QuietWatch(child.pid, 5.0, taken_of(child.pid, tmp_path))
        until = time.monotonic() + for_s
        while time.monotonic() < until:
            found = quiet.look(time.monotonic(), 0.0)
            if found is not None:
                return found[0], quiet
            time.sleep(0.02)
        return None, quiet

    yield look
    for child in started:
        tree.stop(child.pid, itself=True)
        child.wait()


Watch = Callable[[str, float], tuple[Progress | None, QuietWatch]]


def test_a_process_that_waits_for_ever_is_proven_stuck(watch: Watch) -> None:
    progress, _ = watch("import threading; threading.Event().wait()", 60)
    assert progress is not None
    assert progress.verdict == "stuck"


def test_a_process_that_polls_is_not(watch: Watch) -> None:
    progress, quiet = watch(
        "import threading\nwhile True: threading.Event().wait(0.5)", 4
    )
    assert progress is None
    assert quiet.doubt == ""


def test_a_process_whose_child_works_is_not(watch: Watch) -> None:
    progress, _ = watch(
        "import os, sys\nif os.fork() == 0:\n    while True: pass\nos.wait()",
        6,
    )
    assert progress is None


def test_a_process_that_sleeps_for_a_set_time_is_not(watch: Watch) -> None:
    progress, quiet = watch("import time; time.sleep(60)", 4)
    assert progress is None
    assert quiet.doubt == "it sleeps for a set time"


def test_a_word_of_the_stage_starts_the_wait_anew(tmp_path: Path, quick: None) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    try:
        quiet = QuietWatch(child.pid, 5.0, taken_of(child.pid, tmp_path))
        until = time.monotonic() + 4
        while time.monotonic() < until:
            said = float(int(time.monotonic()))  # another word each second
            assert quiet.look(time.monotonic(), said) is None
            time.sleep(0.02)
    finally:
        tree.stop(child.pid, itself=True)
        child.wait()


@pytest.mark.parametrize(
    ("budget_s", "window_s"), [(30, 20.0), (120, 24.0), (300, 60), (600, 60)]
)
def test_the_longer_the_budget_the_longer_the_proof(
    tmp_path: Path, budget_s: float, window_s: float
) -> None:
    take = taken_of(1, tmp_path)
    assert QuietWatch(1, budget_s, take).window_s == window_s


@pytest.mark.parametrize(
    ("frame", "is_stuck"),
    [
        ("all_reduce (torch/distributed/distributed_c10d.py:3000)", True),
        ("broadcast (vllm/distributed/device_communicators/pynccl.py:300)", True),
        ("forward (model.py:3)", False),
    ],
)
def test_a_busy_gpu_is_no_proof_of_work_in_a_collective(
    monkeypatch: pytest.MonkeyPatch, frame: str, is_stuck: bool
) -> None:
    """NCCL's kernel keeps a GPU busy while it waits for a rank that never comes."""
    busy = "GPU 0 is at work (100 %)"
    monkeypatch.setattr(gpus, "at_work", lambda _: busy)
    monkeypatch.setattr(resource_use, "may_be_waiting", lambda _: "")
    first, second = (
        dataclasses.replace(one, stacks=(stack(7, frame),)) for one in looks()
    )
    monkeypatch.setattr(resource_use, "main_thread", lambda _: ("sleeping", 0))
    quiet = QuietWatch(7, 30.0, {"earlier": first, "": second}.__getitem__)
    found = [quiet.look(now, 0.0) for now in (1.0, 12.0, 22.0)]
    assert [one is not None for one in found] == [False, False, is_stuck]
    assert quiet.doubt == ("" if is_stuck else busy)
