"""Real ranks, really broken: which cause is named, on which rank, and what is left."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from pytest_gkd.diagnosis import flight_records
from pytest_gkd.processes import tree
from pytest_gkd.stage_api import StageFault
from pytest_gkd.workload.ranks import group
from pytest_gkd.workload.ranks.allreduce import KIB, MIB
from pytest_gkd.workload.ranks.rank import Rank
from pytest_gkd.workload.ranks.rank_plan import RankFault, RankPlan
from pytest_gkd.workload.ranks.rank_records import RankRecord, RankRun
from pytest_gkd.workload.ranks.rank_verdict import RankError, judge

pytestmark = pytest.mark.needs("torch")

FIRST = "all_reduce float32[1]"
TIMEOUT_S = 1.5
BUDGET_S = 40.0


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[group.Launcher]:
    """One interpreter with torch, for all tests here."""
    with group.Launcher(tmp_path_factory.mktemp("launcher")) as launcher:
        yield launcher


def _run(
    launcher: group.Launcher,
    directory: Path,
    fault: RankFault | None,
    world_size: int = 2,
) -> RankRun:
    plan = RankPlan(
        world_size, "gloo", TIMEOUT_S, str(directory), (4 * KIB, MIB), fault
    )
    return launcher.run(plan, BUDGET_S)


def _fault(run: RankRun) -> StageFault:
    error = judge(run)
    assert isinstance(error, StageFault), error
    assert not [record.pid for record in run.records if _is_alive(record.pid)]
    return error


def _is_alive(pid: int | None) -> bool:
    return (
        pid is not None and psutil.pid_exists(pid) and tree.alive(psutil.Process(pid))
    )


def test_sound_ranks_find_every_value_right(
    launcher: group.Launcher, tmp_path: Path
) -> None:
    run = _run(launcher, tmp_path, None, 3)
    assert judge(run) is None
    for record in run.records:
        assert record.found is not None
        assert set(group.medians_s(record.found)) == {4 * KIB, MIB}


@pytest.mark.parametrize("at", ["", "timed"], ids=["checked", "timed"])
def test_a_killed_rank_is_named_with_its_signal(
    launcher: group.Launcher, tmp_path: Path, at: str
) -> None:
    fault = _fault(_run(launcher, tmp_path, RankFault(1, "kill", at), 3))
    assert fault.cause == "comm.peer-died"
    assert fault.message.startswith("rank 1 ")
    assert "SIGKILL" in fault.message
    assert "all_reduce" in fault.message


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (RankFault(0, "kill", "rendezvous"), "in the rendezvous"),
        (RankFault(0, "exit"), "exit code 3"),
    ],
)
def test_a_rank_that_leaves_early_is_named_with_its_place_or_exit_code(
    launcher: group.Launcher, tmp_path: Path, fault: RankFault, says: str
) -> None:
    found = _fault(_run(launcher, tmp_path, fault))
    assert found.cause == "comm.peer-died"
    assert found.message.startswith("rank 0 ")
    assert says in found.message


@pytest.mark.parametrize(
    ("left_s", "kept_s"), [(4, 1), (12, 3), (30, 3), (60, 6), (600, 60)]
)
def test_time_to_end_ranks_and_to_tell_grows_with_the_budget(
    left_s: float, kept_s: float, tmp_path: Path
) -> None:
    assert group.reserve_s(left_s) == kept_s
    timeout_s = group.operation_timeout_s(left_s)
    plan = RankPlan(2, "gloo", timeout_s, str(tmp_path))
    assert 1 <= plan.call_off_s <= max(1.0, kept_s)


@pytest.mark.parametrize("at", ["", "timed"], ids=["checked", "timed"])
def test_a_stopped_rank_is_named_with_the_operation_that_waits_for_it(
    launcher: group.Launcher, tmp_path: Path, at: str
) -> None:
    fault = _fault(_run(launcher, tmp_path, RankFault(1, "stop", at)))
    assert fault.cause == "comm.collective-timeout"
    assert fault.facts["late_ranks"] == [1]
    assert "stopped" in fault.message
    assert "all_reduce" in fault.facts["operation"]


def test_a_late_rank_is_named_and_its_stack_shown(
    launcher: group.Launcher, tmp_path: Path
) -> None:
    fault = _fault(_run(launcher, tmp_path, RankFault(0, "late")))
    assert fault.cause == "comm.collective-timeout"
    assert fault.facts["late_ranks"] == [0]
    assert any("threading.py" in text for _, _, text in fault.evidence)
    assert all(Path(path).exists() for path in fault.facts["flight_records"])
    assert len(fault.facts["flight_records"]) == 2


@pytest.mark.parametrize(
    ("kind", "called"),
    [("shape", "Float[2]"), ("op", "BROADCAST"), ("dtype", "Byte[1]")],
)
def test_a_rank_that_calls_something_else_is_named_with_what_it_called(
    launcher: group.Launcher, tmp_path: Path, kind: str, called: str
) -> None:
    fault = _fault(_run(launcher, tmp_path, RankFault(1, kind), 3))
    assert fault.cause == "comm.mismatch"
    assert fault.message.startswith("rank 1 called ")
    assert called in fault.message.partition(" while ")[0]


def test_an_abort_inside_gloo_counts_as_a_mismatch(
    launcher: group.Launcher, tmp_path: Path
) -> None:
    # The plain group's first check; torch's own comparison is off there.
    plain = f"all_reduce float32[{KIB}]"
    run = _run(launcher, tmp_path, RankFault(1, "shape", plain))
    assert -signal.SIGABRT in [record.code for record in run.records]
    fault = _fault(run)
    assert fault.cause == "comm.mismatch"
    assert plain in fault.message


def test_a_rank_that_was_never_started_is_missed_in_the_rendezvous(
    launcher: group.Launcher, tmp_path: Path
) -> None:
    fault = _fault(_run(launcher, tmp_path, RankFault(2, "missing"), 3))
    assert fault.cause == "comm.rendezvous"
    assert "2 of 3 ranks" in fault.message
    assert fault.facts["missing_ranks"] == [2]


def test_a_wrong_value_is_shown_with_rank_operation_and_index(
    launcher: group.Launcher, tmp_path: Path
) -> None:
    run = _run(launcher, tmp_path, RankFault(1, "garbage", "all_reduce bfloat16[1023]"))
    error = judge(run)
    assert isinstance(error, StageFault)
    assert error.cause == "comm.wrong-result"
    assert error.message.splitlines() == [
        "rank 1: all-reduce of bfloat16[1023] gave 4.0, expected 3.0 at index 0",
        "right on rank 0",
    ]


def test_a_rank_that_gives_something_wrong_is_found_by_all_gather(
    launcher: group.Launcher, tmp_path: Path
) -> None:
    error = _fault(_run(launcher, tmp_path, RankFault(2, "contribution"), 3))
    assert error.cause == "comm.wrong-result"
    assert error.message.startswith("rank 2's own part is wrong")


@pytest.mark.parametrize(
    ("kind", "cause", "says"),
    [
        ("world-size", "comm.world-size", "rank 0 with 2; rank 1 with 3"),
        ("address", "comm.rendezvous", "rank 1 at 192.0.2.1:"),
    ],
)
def test_ranks_that_do_not_agree_on_the_group_say_what_each_was_told(
    launcher: group.Launcher, tmp_path: Path, kind: str, cause: str, says: str
) -> None:
    error = _fault(_run(launcher, tmp_path, RankFault(1, kind, "rendezvous")))
    assert error.cause == cause
    assert says in error.message


def test_the_flight_recorders_show_who_is_behind(
    launcher: group.Launcher, tmp_path: Path
) -> None:
    fault = RankFault(1, "late", "timed")  # a barrier comes before checked collectives
    error = _fault(_run(launcher, tmp_path, fault, 3))
    found = error.facts["flight_recorder"]
    assert found["entered_by"] == [0, 2]
    assert list(found["behind"]) == ["1"]
    assert found["behind"]["1"] < found["sequence"]
    assert error.evidence[0][0] == "flight recorder"


def test_a_rank_that_left_no_record_is_named_as_such(
    launcher: group.Launcher, tmp_path: Path
) -> None:
    fault = RankFault(1, "stop", "all_reduce bfloat16")
    error = _fault(_run(launcher, tmp_path, fault, 3))
    assert error.facts["flight_recorder"]["without_record"] == [1]


def test_a_ranks_own_exception_is_told_rather_than_what_its_peers_saw(
    launcher: group.Launcher, tmp_path: Path
) -> None:
    error = judge(_run(launcher, tmp_path, RankFault(1, "raise")))
    assert isinstance(error, RankError)
    assert str(error).startswith(f"rank 1 failed in {FIRST}: MemoryError: ")


def test_ranks_end_with_the_process_that_started_them(
    launcher: group.Launcher, tmp_path: Path
) -> None:
    run = _run(launcher, tmp_path, RankFault(1, "kill-host"), 3)
    error = judge(run)
    assert isinstance(error, StageFault)
    assert "was ended from outside, and the ranks with it" in error.message
    assert not [record.pid for record in run.records if _is_alive(record.pid)]


def test_the_budget_holds_where_the_ranks_own_timeout_is_longer(
    launcher: group.Launcher, tmp_path: Path
) -> None:
    at = RankFault(1, "stop", "timed")
    plan = RankPlan(2, "gloo", 600.0, str(tmp_path), (4 * KIB,), at)
    fault = _fault(launcher.run(plan, 1.5))
    assert fault.cause == "comm.collective-timeout"
    assert fault.facts["late_ranks"] == [1]


def test_a_taken_port_is_named(launcher: group.Launcher, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        plan = RankPlan(2, "gloo", TIMEOUT_S, str(tmp_path))
        with pytest.raises(StageFault, match=str(port)) as caught:
            launcher.run(plan, BUDGET_S, port=port)
    assert caught.value.cause == "comm.port-in-use"


def test_more_ranks_than_gpus_are_refused() -> None:
    group.check_world_size(3, 0)
    group.check_world_size(2, 2)
    with pytest.raises(StageFault) as caught:
        group.check_world_size(3, 2)
    assert caught.value.cause == "comm.world-size"


def test_a_budget_that_ends_before_the_ranks_run_blames_no_rank(tmp_path: Path) -> None:
    with group.Launcher(tmp_path) as launcher:
        run = launcher.run(RankPlan(2, "gloo", TIMEOUT_S, str(tmp_path)), 0.0)
    error = judge(run)
    assert isinstance(error, RankError)
    assert "still importing torch" in str(error)


def test_closing_ends_a_launcher_that_is_still_importing(tmp_path: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    with group.Launcher(tmp_path):
        pass
    assert set(psutil.Process().children(recursive=True)) <= before


def test_a_launcher_that_ends_at_once_is_told_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A module of the user's that shadows torch, found in the launcher's own way.
    (tmp_path / "torch.py").write_text(
        "raise ImportError('libcudart.so.12 is not here')"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with group.Launcher(tmp_path) as launcher:
        run = launcher.run(RankPlan(2, "gloo", TIMEOUT_S, str(tmp_path)), BUDGET_S)
    error = judge(run)
    assert isinstance(error, RankError)
    assert "exit code 1" in str(error)
    assert "libcudart.so.12 is not here" in str(error)


# -- texts of what this machine may not have ---------------------------------------


def _failed(error: str, code: int = 1, log: str = "") -> RankRun:
    """Two ranks of which rank 1 failed in the first collective, with these words."""
    marks: list[dict[str, object]] = [
        {"what": "rendezvous", "t": 1.0},
        {"what": "joined", "t": 2.0},
        {"what": "entered", "t": 3.0, "op": FIRST},
    ]
    raised = [{"what": "failed", "t": 4.0, "at": FIRST, "error": error}]
    tail = tuple(enumerate(log.splitlines(), 1))
    return RankRun(
        RankPlan(2, "nccl", TIMEOUT_S, "nowhere"),
        (
            RankRecord(0, 10, None, None, "S", tuple(marks)),
            RankRecord(
                1,
                11,
                code,
                5.0,
                "",
                (*marks, *(raised if error else [])),
                Path("rank1.log"),
                tail,
            ),
        ),
        0.0,
        5.0,
    )


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (
            "DistBackendError: NCCL error, ncclInvalidUsage\nLast error:\nDuplicate "
            "GPU detected : rank 1 and rank 0 both on CUDA device 1000",
            "comm.duplicate-gpu",
        ),
        (
            "DistBackendError: NCCL error, ncclInvalidUsage\nLast error:\nMultiple "
            "Ranks are using the same GPU",
            "comm.duplicate-gpu",
        ),
        (
            "RuntimeError: [enforce fail at device.cc:84] ifa != nullptr. Unable to "
            "find address for: nosuch0",
            "comm.interface",
        ),
        (
            "DistNetworkError: The server socket has failed to listen on any local "
            "network address. port: 33505, useIpv6: false, code: -98, name: EADDRINUSE",
            "comm.port-in-use",
        ),
    ],
)
def test_a_text_that_names_its_cause_is_believed(error: str, cause: str) -> None:
    found = judge(_failed(error))
    assert isinstance(found, StageFault)
    assert found.cause == cause
    assert "rank 1" in found.message


def test_the_interface_that_is_not_there_is_named() -> None:
    found = judge(_failed("ifa != nullptr. Unable to find address for: nosuch0"))
    assert isinstance(found, StageFault)
    assert "'nosuch0'" in found.message


def test_a_watchdog_that_aborts_its_rank_is_a_timeout_and_no_death() -> None:
    line = (
        "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, "
        "OpType=ALLREDUCE) ran for 20000 milliseconds before timing out."
    )
    found = judge(_failed("", -signal.SIGABRT, line))
    assert isinstance(found, StageFault)
    assert found.cause == "comm.collective-timeout"


def test_ranks_that_still_got_on_at_the_end_of_the_budget_are_slow_not_stuck() -> None:
    sound = _failed("").records[0]
    pair = (sound, replace(sound, rank=1, pid=11))
    run = RankRun(RankPlan(2, "gloo", 2.0, "nowhere"), pair, 0.0, 4.0)
    assert isinstance(judge(run), RankError)
    assert FIRST in str(judge(run))
    stuck = judge(replace(run, waited_s=9.0))
    assert isinstance(stuck, StageFault)
    assert stuck.cause == "comm.collective-timeout"


def test_a_failed_fork_is_a_matter_of_the_world_size() -> None:
    run = RankRun(
        RankPlan(4, "gloo", TIMEOUT_S, "nowhere"),
        (),
        0.0,
        0.1,
        fork_error="rank 3: [Errno 11] Resource temporarily unavailable",
    )
    found = judge(run)
    assert isinstance(found, StageFault)
    assert found.cause == "comm.world-size"
    assert "rank 3" in found.message


# -- NCCL's recorder, which is not here --------------------------------------------


def test_what_gloo_checks_before_nccl_is_called_is_in_the_record_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch._C._distributed_c10d as c10d

    def recorded(*numbers: int) -> str:
        entries = [
            {
                "pg_id": 0,
                "collective_seq_id": number,
                "profiling_name": "all_reduce",
                "input_sizes": [[4]],
                "input_dtypes": ["Float"],
                "time_created_ns": number,
            }
            for number in numbers
        ]
        return json.dumps({"version": "2.10", "entries": entries})

    plan = RankPlan(2, "nccl", TIMEOUT_S, str(tmp_path))
    # Both have been through three all-reduces, and rank 0 waits before its fourth.
    for rank, checks in ((0, (1, 2, 3, 4)), (1, (1, 2, 3))):
        for kind, numbers in (("nccl", (1, 2, 3)), ("fr", checks)):
            text = recorded(*numbers)
            name = f"_dump_{kind}_trace_json"
            monkeypatch.setattr(c10d, name, lambda *_, t=text: t, raising=False)
        Rank(plan, rank).dump_flight_record()
    missing = flight_records.find_missing(plan.flight_records(), [])
    assert missing is not None
    assert (missing.group, missing.sequence) == ("fr:0", 4)
    assert (missing.entered_by, missing.behind) == ([0], {"1": 3})
    assert json.loads(plan.file("flight", 0).read_text())["version"] == "2.10"
