"""Who waits for whom: real processes that wait for each other, and made ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import live_jobs
import pytest

from pytest_gkd.diagnosis.stack_dump import MAIN, Frame, Thread
from pytest_gkd.processes import host_capabilities, kernel_calls, procfs
from pytest_gkd.processes.kernel_calls import Call
from pytest_gkd.watch import job_links, waits
from pytest_gkd.watch.samples import ProcessSample, Role
from pytest_gkd.watch.waits import Known, Peer, Picture, RayTask

TRACES = pytest.mark.skipif(not host_capabilities.may_trace(), reason="needs ptrace")


def _look(found: list[ProcessSample]) -> Picture:
    return waits.picture(found, job_links.known(found))


def _process(pid: int, role: Role, *places: str, **more: object) -> ProcessSample:
    frames = []
    for place in places:
        function, file, line = place.split()
        frames.append(Frame(file, int(line), function))
    threads = (Thread(MAIN, pid, tuple(frames)),) if frames else ()
    made = ProcessSample(pid, 1, 1, role, "python", threads=threads)
    return replace(made, **more)  # type: ignore[arg-type]


def _rank(rank: int, *places: str, size: int = 4, **more: object) -> ProcessSample:
    role = Role("rank", f"rank {rank}", rank, rank, size)
    return _process(100 + rank, role, *places, **more)


REDUCE = ("fit train.py 5", "all_reduce torch/distributed/distributed_c10d.py 3252")
GATHER = ("fit train.py 6", "all_gather torch/distributed/distributed_c10d.py 4192")
BUSY = ("fit train.py 7", "save_checkpoint ckpt.py 3")


# -- real processes ----------------------------------------------------------------


@pytest.mark.needs("torch")
@TRACES
def test_real_ranks_wait_for_the_one_that_saves(tmp_path: Path) -> None:
    with live_jobs.ranks(tmp_path, 4, odd=2) as found:
        seen = _look(found)
    (line,) = seen.lines
    assert line.startswith(
        "ranks 0-1,3 wait in all_reduce for rank 2, which is in save_checkpoint "
        "(train.py:8), clock_nanosleep()"
    )
    assert [one.role.rank for one in found if one.pid in seen.odd] == [2]
    assert not seen.deadlock


@TRACES
def test_two_real_threads_in_each_others_locks_are_a_deadlock(tmp_path: Path) -> None:
    with live_jobs.standing(live_jobs.LOCKS, tmp_path, 2) as found:
        seen = _look(found)
    assert seen.deadlock
    assert seen.lines[0].startswith("deadlock: 2 threads of ")
    assert "push_weights in push_weights (prog.py:11)" in seen.lines[0]
    assert "generate in generate (prog.py:16)" in seen.lines[0]


@pytest.mark.needs("torch")
@TRACES
def test_a_real_data_loader_waits_for_the_worker_that_is_at_work(
    tmp_path: Path,
) -> None:
    with live_jobs.standing(live_jobs.LOADER, tmp_path) as found:
        (line,) = _look(found).lines
    assert "waits for its data loader (<module>, prog.py:15)" in line
    assert "which is in Rows.reads_a_dead_disk (prog.py:14)" in line
    assert line.count("which is") == 1  # the idle worker is not waited for


@TRACES
def test_a_real_trainer_waits_for_its_teachers_answer(tmp_path: Path) -> None:
    with live_jobs.standing(live_jobs.TEACHER, tmp_path) as found:
        (line,) = _look(found).lines
    assert "waits for an HTTP answer (ask_teacher, prog.py:16)" in line
    assert "which is in teacher (prog.py:10)" in line


@TRACES
def test_a_real_writer_waits_for_who_does_not_read_the_pipe(tmp_path: Path) -> None:
    with live_jobs.standing(live_jobs.PIPE, tmp_path) as found:
        seen = _look(found)
    (line,) = seen.lines
    assert "waits in write() to a full pipe for process" in line
    assert seen.odd == (found[1].pid,)


@TRACES
def test_a_real_ray_driver_waits_for_an_actor_that_waits_for_another(
    tmp_path: Path,
) -> None:
    pytest.importorskip("ray")
    with live_jobs.standing(live_jobs.RAY, tmp_path) as found:
        seen = _look(found)
    assert "for ray::Trainer.fit" in seen.lines[0]
    trainer, rollout = seen.lines[1].split(" for ")
    assert "ray::Trainer.fit" in trainer
    assert "waits in ray.get (Trainer.fit, prog.py:" in trainer
    assert "ray::Rollout.generate" in rollout
    assert "which is in Rollout.generate (prog.py:" in rollout
    assert len(seen.odd) == 1


def test_a_full_pipe_is_seen_from_the_kernel(tmp_path: Path) -> None:
    writes = "import os; os.write(1, b'x' * (1 << 20))"
    with subprocess.Popen(
        [sys.executable, "-c", writes], stdout=subprocess.PIPE
    ) as child:
        try:
            for _ in range(400):
                call = kernel_calls.of(child.pid)
                if call and call.name == "write":
                    break
                time.sleep(0.05)
            assert call is not None
            assert (call.name, call.fd) == ("write", 1)
            assert call.target.startswith("pipe:[")
            # The child has it open as well, to write.
            both = [child.pid, os.getpid()]
            assert kernel_calls.readers(call.target, both) == [os.getpid()]
        finally:
            child.kill()


@pytest.mark.parametrize(("mode", "writes"), [("w", True), ("r", False)])
def test_the_path_of_a_call_is_read_from_its_process(
    tmp_path: Path, mode: str, writes: bool
) -> None:
    os.mkfifo(tmp_path / "model.pt")
    command = [sys.executable, "-c", f"open('model.pt', '{mode}')"]
    with subprocess.Popen(command, cwd=tmp_path) as child:
        try:
            for _ in range(400):
                call = kernel_calls.of(child.pid)
                if call and call.target == str(tmp_path / "model.pt"):
                    break
                time.sleep(0.05)
            assert call is not None
            assert (call.name, call.writes) == ("open", writes)
            assert str(call) == f"open() on {tmp_path}/model.pt"
        finally:
            child.kill()


def test_the_file_system_of_a_path_is_told_without_asking_it() -> None:
    assert procfs.mounted_at(os.getpid(), "/proc/1/nothing") == "/proc"
    assert procfs.mounted_at(os.getpid(), "/no such place") == "/"
    assert procfs.mounted_at(2**22 + 1, "/proc/x") == "/proc/x"


# -- made ones: what needs a GPU, several nodes or luck -----------------------------


def _lines(*processes: ProcessSample, **known: object) -> list[str]:
    return list(waits.picture(processes, Known(**known)).lines)  # type: ignore[arg-type]


def test_ranks_in_different_collectives_are_a_deadlock() -> None:
    ranks = [_rank(n, *(GATHER if n == 3 else REDUCE)) for n in range(4)]
    seen = waits.picture(ranks)
    assert seen.deadlock
    assert seen.lines[0].startswith("deadlock: they wait for each other")
    assert (
        "ranks 0-2 wait in all_reduce for rank 3, which waits in all_gather "
        "(fit, train.py:6)"
    ) in seen.lines


def test_a_rank_that_is_gone_is_told_by_its_absence() -> None:
    told = _lines(*(_rank(n, *REDUCE) for n in range(3)))
    assert told == [
        "ranks 0-2 wait in all_reduce for rank 3 of 4, which no process of this "
        "machine is"
    ]


def test_a_stopped_rank_is_waited_for_wherever_it_stands() -> None:
    ranks = [_rank(n, *REDUCE) for n in range(3)]
    told = _lines(*ranks, _rank(3, *REDUCE, state="T"))
    assert told == [
        "ranks 0-2 wait in all_reduce for rank 3, which is stopped (SIGSTOP or Ctrl-Z)"
    ]


def test_all_in_one_collective_from_one_place_blames_nobody() -> None:
    told = _lines(*(_rank(n, *REDUCE) for n in range(4)))
    assert told == [
        "ranks 0-3 wait in all_reduce for each other, from the same place: nobody is "
        "missing here"
    ]


def test_the_flight_records_number_the_collective_and_tell_who_is_behind() -> None:
    def record(number: int) -> dict[str, object]:
        entry = {
            "pg_id": 0,
            "process_group": ["0", "default_pg"],
            "collective_seq_id": number,
            "time_created_ns": number,
            "profiling_name": "nccl:all_reduce",
            "input_sizes": [],
            "input_dtypes": [],
        }
        return {"entries": [entry]}

    sync = ("fit train.py 5", "synchronize torch/cuda/__init__.py 9")
    ranks = [_rank(n, *sync) for n in range(4)]
    records = {("rank", n): record(1040 if n == 2 else 1041) for n in range(4)}
    (line,) = _lines(*ranks, records=records)
    assert line.startswith("ranks 0-1,3 wait in nccl:all_reduce #1041 for rank 2, ")
    busy = [*ranks[:2], _rank(2, *BUSY), ranks[3]]
    (line,) = _lines(*busy, records=records)
    assert "for rank 2, which is in save_checkpoint (ckpt.py:3)" in line


def test_a_call_of_the_kernel_is_named_with_its_file() -> None:
    ranks = [_rank(n, *REDUCE) for n in range(3)]
    calls = {(103, 103): Call("write", 5, "/mnt/ckpt/model.pt")}
    (line,) = _lines(*ranks, _rank(3, *BUSY), calls=calls)
    assert line.endswith(
        "rank 3, which is in save_checkpoint (ckpt.py:3), write() on /mnt/ckpt/model.pt"
    )


GET = "get ray/_private/worker.py 2896"


def _actor(pid: int, name: str, *places: str) -> ProcessSample:
    return _process(pid, Role("ray-actor", f"ray::{name}"), *places)


def test_actors_whose_calls_wait_for_each_other_are_a_deadlock() -> None:
    one = _actor(11, "Trainer.sync", "sync a.py 1", GET)
    two = _actor(12, "Rollout.push", "push a.py 2", GET)
    tasks = [
        RayTask("t1", "driver", "Trainer.sync", "RUNNING", 11, "a1"),
        RayTask("t2", "t1", "Rollout.push", "RUNNING", 12, "a2"),
        RayTask("t3", "t2", "Trainer.load", "SUBMITTED_TO_WORKER", 0, "a1"),
    ]
    seen = waits.picture([one, two], Known(tasks=tasks))
    assert seen.deadlock
    assert "wait for each other" in seen.lines[0]
    assert "ray::Trainer.sync" in seen.lines[0]
    assert "ray::Rollout.push" in seen.lines[0]


def test_actors_that_all_wait_while_ray_lacks_nothing_wait_for_each_other() -> None:
    one = _actor(11, "Trainer.sync", "sync a.py 1", GET)
    two = _actor(12, "Rollout.push", "push a.py 2", GET)
    driver = _process(9, Role("ray-driver", "Ray driver"), "main a.py 3", GET)
    seen = waits.picture([driver, one, two], Known(ray_wants=False))
    assert seen.deadlock
    assert "ray::Trainer.sync" in seen.lines[0]
    assert "Ray driver" not in seen.lines[0]
    for unknown in (True, None):
        seen = waits.picture([driver, one, two], Known(ray_wants=unknown))
        assert not seen.deadlock
        assert "it may lack resources" in seen.lines[-1]


def test_an_actor_that_calls_itself_waits_for_itself() -> None:
    one = _actor(11, "Trainer.fit", "fit a.py 1", GET)
    tasks = [
        RayTask("t1", "driver", "Trainer.fit", "RUNNING", 11, "a1"),
        RayTask("t2", "t1", "Trainer.save", "SUBMITTED_TO_WORKER", 0, "a1"),
    ]
    seen = waits.picture([one], Known(tasks=tasks))
    assert seen.deadlock
    assert "it waits for itself" in seen.lines[0]


def test_a_task_that_nobody_runs_is_told_with_rays_own_word() -> None:
    driver = _process(9, Role("ray-driver", "Ray driver"), "main a.py 1", GET)
    tasks = [RayTask("t1", "job", "Rollout.generate", "PENDING_NODE_ASSIGNMENT")]
    (line,) = _lines(driver, tasks=tasks)
    assert (
        "of the task Rollout.generate for Rollout.generate, which no process runs"
        in line
    )
    assert "(Ray says PENDING_NODE_ASSIGNMENT)" in line


def test_vllms_client_waits_for_its_engine_which_waits_for_its_workers() -> None:
    client = _process(
        5, Role("process", "serve.py"),
        "generate a.py 2", "SyncMPClient.get_output vllm/v1/engine/core_client.py 989",
    )  # fmt: skip
    engine = _process(
        6, Role("engine", "vLLM EngineCore"),
        "run_busy_loop vllm/v1/engine/core.py 1547",
        "dequeue vllm/distributed/device_communicators/shm_broadcast.py 961",
        ppid=5,
    )  # fmt: skip
    worker = _process(
        7, Role("engine-worker", "vLLM Worker_TP0"), "execute_model gpu_worker.py 4",
        ppid=6,
    )  # fmt: skip
    first, second = _lines(client, engine, worker)
    assert (
        "waits in get_output of vLLM's engine (generate, a.py:2) for vLLM Eng" in first
    )
    assert second.endswith(
        "vLLM Worker_TP0 (pid 7), which is in execute_model (gpu_worker.py:4)"
    )


def test_a_teacher_on_another_machine_is_named_by_its_address() -> None:
    asks = ("ask a.py 4", "urlopen urllib/request.py 216")
    trainer = _process(5, Role("process", "train.py"), *asks)
    (line,) = _lines(trainer, peers={5: [Peer("10.0.0.7:8000")]})
    assert line == (
        "train.py (pid 5) waits for an HTTP answer (ask, a.py:4): 10.0.0.7:8000, "
        "which is none of the job's processes here"
    )


def test_a_thread_at_work_may_free_a_lock() -> None:
    waits_for = (
        Frame("a.py", 3, "push"),
        Frame("libpython3.11.so", 0, "PyThread_acquire_lock_timed"),
    )
    held = [Thread(name, n, waits_for) for n, name in enumerate(("a", "b"), 8)]
    works = Thread(MAIN, 7, (Frame("a.py", 9, "load"),))
    one = replace(_process(7, Role()), threads=(works, *held))
    assert _lines(one) == []
    two = replace(one, threads=(replace(held[0], name=MAIN, number=7), held[1]))
    assert _lines(two)[0].startswith("deadlock: 2 threads")


def test_nobody_waits_where_nothing_tells_so() -> None:
    assert waits.picture([]) == Picture()
    assert waits.picture([_process(5, Role(), "main a.py 1")]) == Picture()
    json.dumps(waits.picture([_rank(0, *REDUCE)]).lines)
