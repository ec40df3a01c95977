"""What of a job has no place in Ray, and whether anybody is at work for its program."""

from __future__ import annotations

import json

import pytest

from pytest_gkd.diagnosis.stack_dump import MAIN, Frame, Thread
from pytest_gkd.watch import ray_places
from pytest_gkd.watch.samples import NodeSample, ProcessSample, Role


def process(kind: str, pid: int, *threads: tuple[Frame, ...]) -> ProcessSample:
    found = tuple(
        Thread("" if number else MAIN, pid + number, frames)
        for number, frames in enumerate(threads)
    )
    return ProcessSample(pid, 1, 1, Role(kind, kind), "python", threads=found)


GET = (
    Frame("train.py", 56, "main"),
    Frame("ray/_private/worker.py", 3009, "get"),
)
IDLE = (Frame("ray/_private/worker.py", 1069, "Worker.main_loop"),)
MONITOR = (
    Frame("vllm/v1/engine/utils.py", 356, "CoreEngineProcManager.monitor"),
    Frame("multiprocessing/connection.py", 947, "wait"),
)
WORKS = (*IDLE, Frame("workers.py", 60, "Trainer.update_actor"))
SERVES = (Frame("workers.py", 70, "serve"), Frame("model.py", 5, "compute"))
DRIVER, ACTOR = process("ray-driver", 1, GET), process("ray-actor", 20, IDLE, MONITOR)


@pytest.mark.parametrize(
    ("processes", "nobody"),
    [
        ([DRIVER, ACTOR], True),
        ([DRIVER], True),
        ([ACTOR], False),
        ([DRIVER, ACTOR, process("ray-actor", 40, WORKS)], False),
        ([DRIVER, ACTOR, process("ray-actor", 40, IDLE, SERVES)], False),
        ([DRIVER, ACTOR, process("engine", 40, SERVES)], False),
        ([DRIVER, process("ray-actor", 40, GET), ACTOR], True),
    ],
    ids=["idle", "none", "no caller", "method", "thread", "engine", "waits, too"],
)
def test_who_waits_in_ray_while_nobody_is_at_work(
    processes: list[ProcessSample], nobody: bool
) -> None:
    assert ray_places.waits_for_no_actor(processes) is nobody


def test_ray_is_not_asked_where_somebody_is_at_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def asked(_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(ray_places, "of_job", asked)
    works = process("ray-actor", 40, WORKS)
    assert ray_places.unplaced([DRIVER, works]) == ()


@pytest.mark.parametrize(
    ("lacking", "phase"),
    [
        (["actor TeacherWorker is PENDING_CREATION"], "teacher-init"),
        (["actor RolloutWorker is PENDING_CREATION"], "rollout-init"),
        (["{'CPU': 4.0}: 1+ pending tasks/actors"], "ray-init"),
    ],
)
def test_whose_place_is_lacking_tells_the_phase(lacking: list[str], phase: str) -> None:
    assert ray_places.phase_of(lacking) == phase


def test_a_task_on_another_node_has_that_nodes_pid() -> None:
    """Two nodes may have one pid; what looks there for us is not the job's."""
    rows = [
        {"task_id": "1", "name": "A.f", "worker_pid": 9, "node_id": "here"},
        {"task_id": "2", "name": "B.f", "worker_pid": 9, "node_id": "there"},
        {"task_id": "3", "name": "C.f", "worker_pid": None, "node_id": None},
        {"task_id": "4", "name": "gkd_watch.answer", "worker_pid": 8},
    ]
    far = NodeSample("node-b", number=2, id="there")
    found = ray_places.tasks(json.dumps(rows), [far])
    assert [(one.name, one.pid) for one in found] == [
        ("A.f", 9),
        ("B.f", (2 << 22) + 9),
        ("C.f", 0),
    ]
