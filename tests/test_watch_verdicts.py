"""What two looks at a job prove: looks go in and a verdict comes out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pytest_gkd.diagnosis.stack_dump import MAIN, Frame, Thread
from pytest_gkd.watch import verdicts
from pytest_gkd.watch.samples import (
    AT_WORK,
    HELD,
    SLOW,
    STUCK,
    JobSample,
    NodeSample,
    ProcessSample,
    Progress,
    Role,
    Usual,
    Verdict,
)

PLACE = "/usr/lib/python3.11/site-packages/"
ALL_REDUCE = Frame(PLACE + "torch/distributed/distributed_c10d.py", 2900, "all_reduce")
SYNCHRONIZE = Frame(PLACE + "torch/cuda/__init__.py", 1000, "synchronize")
OWN = Frame("train.py", 10, "train")
SAVE = Frame("train.py", 30, "save_checkpoint")
NOW, WINDOW_S = 1000.0, 60.0
NOTHING = Progress()


def process(number: int, *frames: Frame, **more: Any) -> ProcessSample:
    role = Role("rank", f"rank {number}", number, number, 4)
    threads = (Thread(MAIN, 100 + number, (OWN, *frames)),) if frames else ()
    one = ProcessSample(100 + number, 1, 1, role, "python train.py", threads=threads)
    return replace(one, **more)


def look(at: float, *processes: ProcessSample, **more: Any) -> JobSample:
    made = JobSample(at, at, 1000, NOW - 300, processes)
    return replace(made, **more)


def between(
    before: list[ProcessSample],
    after: list[ProcessSample],
    progress: Progress = NOTHING,
    **more: Any,
) -> Verdict:
    """The verdict over two looks, of which the second differs as told."""
    first, second = look(NOW - WINDOW_S, *before), look(NOW, *after, **more)
    return verdicts.compare(first, second, progress, Usual())


def used(one: ProcessSample, cores: float) -> ProcessSample:
    return replace(one, cpu_s=one.cpu_s + cores * WINDOW_S)


RANKS = [process(number, ALL_REDUCE) for number in range(3)]
ODD = process(3, SAVE)


def test_a_job_in_which_nothing_moves_is_stuck() -> None:
    found = between([ODD], [ODD])
    assert (found.word, found.confidence) == (STUCK, "certain")
    assert found.since_s == 300
    assert "every stack is as it was" in found.why[0]


@pytest.mark.parametrize(
    "changed",
    [
        {"output_bytes": 1000 + 7000},
        {"network_bytes": 10**9, "remote": ("10.0.0.5:8000",)},
        {"gpus_at_work": "GPU 0 is busy (99 %)"},
    ],
    ids=str,
)
def test_a_job_that_does_something_is_not_stuck(changed: dict[str, Any]) -> None:
    assert between([ODD], [ODD], **changed).word == AT_WORK


@pytest.mark.parametrize(
    "after",
    [
        used(ODD, 0.1),
        replace(ODD, io_bytes=10**8),
        process(3, Frame("train.py", 31, "save_checkpoint")),
    ],
    ids=["cpu", "disk", "stack"],
)
def test_a_process_that_moves_is_work(after: ProcessSample) -> None:
    assert between([*RANKS, ODD], [*RANKS, after]).word == AT_WORK


@pytest.mark.parametrize(
    ("call", "whom"), [(ALL_REDUCE, "peers"), (SYNCHRONIZE, "the GPU")], ids=str
)
def test_ranks_that_spin_for_their_peers_do_no_work(call: Frame, whom: str) -> None:
    ranks = [process(number, call) for number in range(3)]
    spun = [used(one, 1.0) for one in ranks]
    found = between([*ranks, ODD], [*spun, ODD], gpus_at_work="GPU 0 is busy (100 %)")
    assert found.word == STUCK
    assert f"180 s waiting for {whom}" in found.why[0]
    assert "GPU 0 is busy (100 %), as by work and by a kernel" in found.why[1]


def test_stacks_that_nobody_saw_are_not_said_to_be_as_they_were() -> None:
    blind = process(0)
    assert "and no stack is seen" in between([blind], [blind]).why[0]
    some = between([blind, ODD], [blind, ODD])
    assert "and every stack seen is as it was" in some.why[0]


def test_a_rank_that_works_while_the_others_spin_for_it_is_work() -> None:
    spun = [used(one, 1.0) for one in RANKS]
    assert between([*RANKS, ODD], [*spun, used(ODD, 1.0)]).word == AT_WORK


def test_a_gpu_that_spins_for_ranks_that_stand_apart_is_no_work() -> None:
    """The others are in backward, where no frame of Python's tells of a collective."""
    engine = Frame(PLACE + "torch/autograd/graph.py", 979, "_engine_run_backward")
    others = [process(number, engine) for number in range(3)]
    found = between(
        [*others, ODD], [*others, ODD], gpus_at_work="GPU 0 is busy (100 %)"
    )
    assert (found.word, found.confidence) == (STUCK, "likely")


def test_chatter_is_no_work() -> None:
    assert between([ODD], [ODD], output_bytes=1000 + 400).word == STUCK


def test_what_a_cluster_uses_to_stay_alive_is_no_work() -> None:
    raylet = replace(ODD, pid=1, role=Role("ray-system", "Ray's raylet"))
    assert between([ODD, raylet], [ODD, used(raylet, 0.5)]).word == STUCK


def test_who_waits_for_another_machine_may_wait_longer() -> None:
    asks = process(0, Frame(PLACE + "requests/sessions.py", 700, "Session.send"))
    asks = replace(asks, role=Role("process", "train.py"))
    found = between([asks], [asks], remote=("10.0.0.5:8000",))
    assert (found.word, found.confidence) == (SLOW, "likely")
    assert "10.0.0.5:8000" in found.why[0]
    late = between([asks], [asks], remote=("10.0.0.5:8000",), output_at=NOW - 700)
    assert (late.word, late.confidence) == (STUCK, "likely")


def test_ranks_that_all_wait_for_those_of_another_machine_may_wait_longer() -> None:
    found = between(RANKS, RANKS, remote=("10.0.0.5:29500",))
    assert (found.word, found.confidence) == (SLOW, "likely")


def test_a_tracker_of_experiments_does_not_excuse_a_job() -> None:
    assert between([*RANKS, ODD], [*RANKS, ODD], remote=("1.2.3.4:443",)).word == STUCK


def test_a_stopped_process_is_the_odd_one() -> None:
    stopped = replace(ODD, state="T")
    found = between([*RANKS, stopped], [*RANKS, stopped])
    assert (found.word, found.odd) == (STUCK, (103,))
    assert "kill -CONT 103" in found.why[0]


@pytest.mark.parametrize(
    "after",
    [
        replace(ODD, state="t", tracer=7),
        replace(ODD, state="T", tracer=7),
        process(3, Frame("/usr/lib/python3.11/pdb.py", 400, "interaction")),
        replace(ODD, reads_terminal=True),
    ],
    ids=["gdb", "gdb, stopped", "pdb", "input"],
)
def test_who_is_held_by_a_person_is_not_stuck(after: ProcessSample) -> None:
    assert between([*RANKS, after], [*RANKS, after]).word == HELD


def test_a_reader_that_does_not_read_holds_the_job() -> None:
    found = between([ODD], [ODD], blocked_s=50.0)
    assert (found.word, found.since_s) == (HELD, 50.0)


def test_a_livelock_is_busy_without_a_step() -> None:
    spins = process(3, Frame("train.py", 51, "loop"))
    turned = used(process(3, Frame("train.py", 52, "loop")), 1.0)
    progress = Progress("training-step", NOW - 400, 5, 20, NOW - 300, 2.0, (2.0, 2.0))
    found = between([spins], [turned], progress)
    assert (found.word, found.confidence, found.odd) == (SLOW, "likely", (103,))
    assert "busy, no step for 150 times its usual time" in found.why[0]
    assert "loop (train.py:52)" in found.why[0]


def test_a_slow_step_is_told_against_the_last_ones() -> None:
    progress = Progress("training-step", NOW - 100, 5, 20, NOW - 100, 10.0, (10.0,))
    found = verdicts.pace(progress, NOW, Usual())
    assert found is not None
    assert "no step for 100 s, 10 times the usual 10 s" in found.why[0]
    assert verdicts.pace(progress, NOW - 80, Usual()) is None


def test_a_slow_phase_is_told_against_earlier_runs() -> None:
    progress = Progress("rollout-init", NOW - 200)
    usual = Usual(2, {"rollout-init": 40.0})
    found = verdicts.pace(progress, NOW, usual)
    assert found is not None
    assert "3 min in rollout-init; in earlier runs 40 s" in found.why[0]
    assert verdicts.pace(progress, NOW, Usual()) is None


def test_the_clock_that_counts_sleep_tells_of_it() -> None:
    before = look(NOW)
    assert verdicts.slept_s(before, replace(before, at=NOW + 1, boot=NOW + 1)) == 0
    assert verdicts.slept_s(before, replace(before, at=NOW + 1, boot=NOW + 601)) == 600


# -- what is stuck although something of it moves ----------------------------------

STEPS = Progress(phase="generation", step=5, step_at=NOW - 60, step_s=1.0)
SPINS = Frame("train.py", 40, "sample_token")
CALLS = Frame("train.py", 35, "generate_sequences")


def spinning(line: int = 40, *, within: tuple[Frame, ...] = (CALLS,)) -> ProcessSample:
    return process(3, *within, Frame("train.py", line, "sample_token"))


def spun(
    before: ProcessSample, after: ProcessSample, progress: Progress = STEPS
) -> Verdict:
    return between([*RANKS, before], [*RANKS, used(after, 0.3)], progress)


def test_a_rank_that_spins_in_one_place_while_the_others_wait_is_stuck() -> None:
    found = spun(spinning(), spinning(41))
    assert (found.word, found.odd) == (STUCK, (103,))
    assert "60 times the usual" in found.why[0]
    assert found.why[-1] == "ranks 0-2 wait meanwhile"
    backward = Frame(PLACE + "torch/autograd/graph.py", 979, "_engine_run_backward")
    others = [process(number, backward) for number in range(3)]
    after = used(spinning(), 0.3)
    assert between([*others, spinning()], [*others, after], STEPS).word == STUCK
    helps = process(3, CALLS, SPINS, Frame("train.py", 50, "is_set"))
    assert spun(spinning(), helps).word == STUCK


@pytest.mark.parametrize(
    ("after", "progress"),
    [
        (spinning(within=(replace(CALLS, line=36),)), STEPS),
        (replace(spinning(), io_bytes=10**9), STEPS),
        (spinning(), replace(STEPS, step_at=NOW - 15)),
        (spinning(), replace(STEPS, step_s=5.0)),
        (spinning(), replace(STEPS, step_s=None)),
    ],
    ids=["goes on outside", "writes", "seconds", "few steps", "no step yet"],
)
def test_a_rank_that_the_others_wait_for_may_compute(
    after: ProcessSample, progress: Progress
) -> None:
    assert spun(spinning(), after, progress).word != STUCK


def test_a_rank_may_save_alone_for_as_long_as_that_takes() -> None:
    saves = process(3, Frame("train.py", 30, "save_checkpoint"))
    assert spun(saves, saves).word != STUCK


def test_who_waits_for_a_machine_that_cannot_be_reached_is_stuck() -> None:
    asks = process(0, Frame(PLACE + "requests/sessions.py", 700, "Session.send"))
    asks = replace(asks, role=Role("process", "train.py"))
    told: dict[str, Any] = {
        "remote": ("10.0.0.5:8000",),
        "unanswered": ("no way to 10.0.0.5:8000",),
    }
    first, second = look(NOW - 60, asks), look(NOW, asks, **told)
    once = verdicts.compare(first, second, NOTHING, Usual())
    assert once.word == SLOW
    twice = verdicts.compare(replace(first, **told), second, NOTHING, Usual())
    assert (twice.word, twice.confidence) == (STUCK, "likely")
    assert "no way to 10.0.0.5:8000" in twice.why


def test_what_has_no_place_in_ray_is_stuck_whatever_its_helpers_use() -> None:
    waits = process(0, Frame(PLACE + "ray/_private/worker.py", 7, "get"))
    waits = replace(waits, role=Role("ray-driver", "Ray driver"))
    other = replace(ODD, pid=9, role=Role("engine", "vLLM EngineCore"))
    before = look(NOW - 60, waits, other, unplaced=("actor TeacherWorker is PENDING",))
    after = replace(before, at=NOW, processes=(waits, used(other, 0.4)))
    found = verdicts.compare(before, after, NOTHING, Usual())
    assert (found.word, found.phase) == (STUCK, "teacher-init")
    placed = replace(after, unplaced=())
    assert verdicts.compare(before, placed, NOTHING, Usual()).word == AT_WORK
    moved = replace(after, processes=(waits, process(3, CALLS)))
    moved = replace(moved, processes=(waits, replace(moved.processes[1], pid=9)))
    assert verdicts.compare(before, moved, NOTHING, Usual()).word == AT_WORK


def test_what_a_job_says_instead_of_a_step_is_told_with_its_phase() -> None:
    again = "WARNING loop: teacher failed (attempt 7 of 9): refused \x1b[31m"
    progress = replace(
        STEPS, phase="training-step", last_line=again, said_at=NOW - 1, step_s=2.0
    )
    found = verdicts.pace(progress, NOW, Usual())
    assert found is not None
    assert (found.word, found.phase) == (SLOW, "teacher")
    assert found.why[1].startswith("it says: WARNING loop: teacher failed (attempt 7")
    assert "\x1b" not in found.why[1]
    # The step's own line is no news.
    silent = replace(progress, said_at=progress.step_at, last_line="step 5 loss=1")
    told = verdicts.pace(silent, NOW, Usual())
    assert told is not None
    assert (len(told.why), told.phase) == (1, "training-step")


FAR, NODE = 7 << 22, NodeSample("node-b")
HIDDEN = NodeSample("node-b", "no answer within 10 s")


def there(number: int, at: float, *frames: Frame, **more: Any) -> ProcessSample:
    """A rank on another node, which has answered at that time."""
    one = process(number, *frames)
    return replace(one, pid=FAR + one.pid, node="node-b", at=at, **more)


def between_nodes(
    before: tuple[NodeSample, ...], after: tuple[NodeSample, ...], **more: Any
) -> Verdict:
    """Nothing moves here; one rank is on the other node, where that is seen."""
    first = look(NOW - WINDOW_S, ODD, nodes=before)
    second = look(NOW, ODD, nodes=after, **more)
    if NODE in before:
        one = there(2, first.at, ALL_REDUCE)
        first = replace(first, processes=(*first.processes, one))
    if NODE in after:
        one = there(2, second.at, ALL_REDUCE)
        second = replace(second, processes=(*second.processes, one))
    return verdicts.compare(first, second, NOTHING, Usual())


def test_a_job_that_stands_still_on_all_its_nodes_is_stuck() -> None:
    found = between_nodes((NODE,), (NODE,))
    assert (found.word, found.confidence) == (STUCK, "certain")
    assert "2 processes on this machine and node-b" in found.why[0]


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        ((HIDDEN,), (HIDDEN,), "no answer within 10 s"),
        ((NODE,), (HIDDEN,), "no answer within 10 s"),
        ((HIDDEN,), (NODE,), "nor was it a look ago"),
        ((), (NODE,), "nor was it a look ago"),
    ],
)
def test_a_node_that_was_not_seen_twice_may_be_at_work(
    before: tuple[NodeSample, ...], after: tuple[NodeSample, ...], why: str
) -> None:
    found = between_nodes(before, after)
    assert (found.word, found.confidence) == (SLOW, "likely")
    assert f"node-b is not seen ({why})" in found.why[0]
    late = between_nodes(before, after, output_at=NOW - 700)
    assert (late.word, late.confidence) == (STUCK, "likely")
    assert f"node-b is not seen ({why})" in late.why[1]


def test_a_job_that_has_lost_a_node_is_stuck() -> None:
    gone = NodeSample("node-b", "health check failed", is_lost=True)
    lost = ("Ray has lost node-b",)
    first = look(NOW - WINDOW_S, ODD, nodes=(gone,), unanswered=lost)
    second = look(NOW, ODD, nodes=(gone,), unanswered=lost)
    found = verdicts.compare(first, second, NOTHING, Usual())
    assert (found.word, found.confidence) == (STUCK, "likely")
    assert lost[0] in found.why


def test_what_another_node_uses_is_counted_between_its_own_answers() -> None:
    first = look(NOW - 1, there(2, NOW - 4), nodes=(NODE,))
    same = look(NOW, there(2, NOW - 4), nodes=(NODE,))
    later = look(NOW, there(2, NOW - 1, cpu_s=1.5), nodes=(NODE,))
    assert verdicts.cpu_use(first, same) == {}
    assert verdicts.cpu_use(first, later) == {FAR + 102: 0.5}


def test_who_is_not_seen_has_not_ended() -> None:
    one, other = process(0), there(2, NOW)
    before = look(NOW - 1, one, other, nodes=(NODE,))
    assert verdicts.gone(before, look(NOW, one, nodes=(HIDDEN,))) == []
    assert verdicts.gone(before, look(NOW, one, nodes=(NODE,))) == [other]
