"""Processes that were killed or stopped are called so, and by whom as far as known."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

from pytest_gkd.processes import oom
from pytest_gkd.workload import exit_reasons

DEAD_ACTOR = "The actor died unexpectedly.\n\tclass_name: Teacher\n\tpid: 3820\n"


def now() -> int:
    return exit_reasons.oom_kills()


def test_an_engine_that_a_signal_ended_is_named_with_the_signal() -> None:
    fault = exit_reasons.ended_fault({"EngineCore": -9}, "while it started", now())
    assert fault.cause == "vllm.engine-died"
    assert "EngineCore was ended by SIGKILL while it started" in fault.message
    assert fault.facts["ended_by"] == "SIGKILL"


def test_an_engine_killed_while_the_kernel_ran_out_of_memory_is_that() -> None:
    fault = exit_reasons.ended_fault({"EngineCore": -9}, "then", now() - 1)
    assert fault.cause == "env.host-oom"


def test_a_crash_is_not_blamed_on_memory() -> None:
    fault = exit_reasons.ended_fault({"EngineCore": -11, "Other": 1}, "then", now() - 1)
    assert fault.cause == "vllm.engine-died"
    assert "EngineCore was ended by SIGSEGV" in fault.message


def test_an_engine_that_ended_by_itself_has_told_why() -> None:
    fault = exit_reasons.ended_fault({"EngineCore": 1}, "then", now())
    assert "EngineCore ended then, with exit code 1; its own output says why" in (
        fault.message
    )


def test_processes_are_recorded_with_how_they_ended() -> None:
    spawn = multiprocessing.get_context("spawn")
    with exit_reasons.recorded() as found:
        ends = [spawn.Process(target=os._exit, args=(code,)) for code in (0, 3)]
        killed = spawn.Process(target=signal.pause, name="killed")
        for process in (*ends, killed):
            process.start()
        killed.kill()
    before = len(found)
    for process in (*ends, killed):
        process.join()
    assert exit_reasons.exit_codes(found) == {ends[1].name: 3, "killed": -9}
    assert before == 3


def test_a_dead_teacher_is_unreachable_and_another_actor_has_died() -> None:
    teacher = exit_reasons.actor_fault("teacher", "topk()", DEAD_ACTOR, now())
    assert teacher.cause == "teacher.unreachable"
    assert "teacher actor (process 3820) died before it had answered topk()" in (
        teacher.message
    )
    assert (
        exit_reasons.actor_fault("trainer", "x()", "", now()).cause == "ray.actor-died"
    )


def test_an_actor_that_rays_monitor_ended_is_not_called_dead_for_no_reason() -> None:
    text = f"{DEAD_ACTOR} Task was killed due to the node running low on memory."
    assert exit_reasons.actor_fault("teacher", "x()", text, now()).cause == (
        "ray.memory-monitor"
    )


def test_the_kernels_count_is_read_and_may_be_missing(tmp_path: Path) -> None:
    vmstat = tmp_path / "vmstat"
    assert oom.kills(vmstat) is None
    vmstat.write_text("pgfault 7\noom_kill 3\n")
    assert oom.kills(vmstat) == 3


def test_a_stopped_process_below_this_one_is_found() -> None:
    program = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    child = subprocess.Popen([sys.executable, "-c", program])
    try:
        _, status = os.waitpid(child.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        found = [one for one in exit_reasons.stopped() if one.pid == child.pid]
        assert "stopped by a signal" in str(found[0])
        assert exit_reasons.stopped_facts(found) == {"stopped_pid": child.pid}
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
