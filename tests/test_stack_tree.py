"""One tree of all stacks: who is in which frame, who is not, and where they part."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import live_jobs
import pytest

from pytest_gkd.diagnosis.stack_dump import MAIN, Frame, Thread
from pytest_gkd.processes import host_capabilities
from pytest_gkd.watch import rank_sets, stack_tree
from pytest_gkd.watch.samples import ProcessSample, Role

TRACES = pytest.mark.skipif(not host_capabilities.may_trace(), reason="needs ptrace")


def _frames(*places: str) -> tuple[Frame, ...]:
    made = []
    for place in places:
        function, file, line = place.split()
        made.append(Frame(file, int(line), function))
    return tuple(made)


def _thread(*places: str, name: str = MAIN) -> Thread:
    return Thread(name, 1, _frames(*places))


def _rank(rank: int, *threads: Thread, size: int = 8) -> ProcessSample:
    role = Role("rank", f"rank {rank}", rank, rank, size)
    return ProcessSample(100 + rank, 1, 1, role, "python train.py", threads=threads)


LATE = "all_reduce torch/distributed/distributed_c10d.py 3"
FIT = ("main train.py 9", "fit trainer.py 5")


def _eight(*odd: int) -> list[ProcessSample]:
    saves = _thread(*FIT, "save_checkpoint ckpt.py 7", "write io.py 1")
    steps = _thread(*FIT, "step trainer.py 6", LATE)
    return [_rank(n, saves if n in odd else steps) for n in range(8)]


def test_sets_are_compressed_and_the_one_that_leaves_is_marked() -> None:
    text = stack_tree.build(_eight(7)).text()
    assert text.splitlines() == [
        "rank, MainThread: 8 processes",
        "  0-7/8 main (train.py:9)",
        "        fit (trainer.py:5)",
        "    0-6/8 step (trainer.py:6)",
        "          all_reduce (torch/distributed/distributed_c10d.py:3)",
        "  * 7/8 save_checkpoint (ckpt.py:7)  <- leaves the others here",
        "        write (io.py:1)",
    ]


@pytest.mark.parametrize(
    ("odd", "marked"), [((7,), 1), ((3, 5), 1), ((0, 1, 2), 0), ((0, 1, 2, 3), 0)]
)
def test_only_few_are_marked_and_never_half(odd: tuple[int, ...], marked: int) -> None:
    assert stack_tree.build(_eight(*odd)).text().count("<- leave") == marked


def test_ranks_of_other_nodes_count_for_the_size() -> None:
    here = [replace(one, role=replace(one.role, world_size=16)) for one in _eight(7)]
    assert "0-6/16 step" in stack_tree.build(here).text()


def test_who_stands_above_the_others_is_told() -> None:
    above = _rank(0, _thread(*FIT))
    text = stack_tree.build([above, *_eight()[1:]]).text()
    assert "0/8 stand here" in text
    assert "1-7/8 step" in text


def test_recursion_in_the_job_is_cut_between_its_ends() -> None:
    deep = [f"f{n} m.py {n + 1}" for n in range(5000)]
    tree = stack_tree.build([_rank(n, _thread(*deep, LATE)) for n in range(8)])
    text = json.dumps(tree.to_json())
    assert "f0 (m.py:1)" in text
    assert "4801 more frames" in text
    assert "f4999 (m.py:5000)" in text
    assert "all_reduce" in tree.text()


def test_a_long_trunk_is_folded_and_lines_fit_the_width() -> None:
    deep = [f"layer_{n} {'x' * 70}/model.py {n}" for n in range(1, 41)]
    text = stack_tree.build([_rank(0, _thread(*deep, LATE))]).text(80)
    assert "… 38 frames" in text
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "layer_40" in text
    assert "all_reduce" in text


def test_a_library_function_is_one_frame_whatever_its_line() -> None:
    ranks = [
        _rank(n, _thread("fit train.py 1", f"wait threading.py {n}")) for n in (3, 4)
    ]
    assert stack_tree.build(ranks).text().count("wait") == 1


def test_native_frames_of_some_only_part_nobody() -> None:
    native = Frame("libtorch_cpu.so", 0, "c10d::Work::wait")
    plain = _thread(*FIT, LATE)
    deeper = Thread(MAIN, 1, (*plain.frames, native))
    text = stack_tree.build([_rank(0, plain), _rank(1, deeper)]).text()
    assert "stand here" not in text
    assert "c10d::Work" not in text
    assert "c10d::Work" in stack_tree.build([_rank(0, deeper), _rank(1, deeper)]).text()


def test_idle_helpers_and_the_interpreters_own_frames_are_folded_away() -> None:
    begin = ("_bootstrap threading.py 1", "run threading.py 2")
    idle = _thread(*begin, "_worker concurrent/futures/thread.py 81", name="pool-0_1")
    waits = _thread(*begin, "Event.wait threading.py 3", name="Thread-4")
    busy = _thread(*begin, "load data.py 4", "get queue.py 5", name="loader-3")
    tree = stack_tree.build([_rank(0, _thread(*FIT), idle, waits, busy)])
    assert tree.idle == 2
    text = tree.text()
    assert "(2 idle helper threads not shown)" in text
    assert "rank, thread loader-N: rank 0 (pid 100)" in text
    assert "_bootstrap" not in text
    assert "load (data.py:4)" in text


def test_a_process_without_stacks_is_told_with_the_reason() -> None:
    blind = replace(_rank(3), problem="py-spy did not answer in time\nstate: sleeping")
    text = stack_tree.build([blind]).text()
    assert text == "rank 3 (pid 103): no stacks: py-spy did not answer in time"


def test_the_tree_can_be_drawn_as_a_flame_graph() -> None:
    told = json.loads(json.dumps(stack_tree.build(_eight(7)).to_json()))
    (group,) = told["groups"]
    (main,) = group["tree"]["children"]
    (fit,) = main["children"]
    assert (fit["name"], fit["value"]) == ("fit (trainer.py:5)", 8)
    assert [(c["value"], c["odd"]) for c in fit["children"]] == [(7, False), (1, True)]
    assert len(group["members"]) == 8


def test_sets_of_ranks() -> None:
    assert rank_sets.name(_eight()[:7]) == "ranks 0-6"
    assert rank_sets.name(_eight()[7:]) == "rank 7"


def test_the_nodes_of_ranks_and_processes_are_told() -> None:
    both = [replace(o, node="node-b") if o.role.rank in (6, 7) else o for o in _eight()]
    assert rank_sets.name(both) == "ranks 0-7 (6-7 on node-b)"
    assert rank_sets.name(both[7:]) == "rank 7 (on node-b)"
    title = stack_tree.build(both).text().splitlines()[0]
    assert title == "rank, MainThread: 8 processes (6-7 on node-b)"
    role = Role("ray-actor", "ray::Rollout")
    actors = [replace(both[n], role=role, pid=(n << 22) + 9) for n in (0, 7)]
    text = stack_tree.build(actors).text()
    assert text.startswith("ray::Rollout, MainThread: 2 processes (1 on node-b)")
    assert rank_sets.name(actors).endswith("ray::Rollout (pid 9 on node-b)")
    told = stack_tree.build(actors).to_json()["groups"][0]["members"]
    assert [(one["pid"], one["node"]) for one in told] == [(9, ""), (9, "node-b")]


@pytest.mark.needs("torch")
@TRACES
def test_of_four_real_ranks_the_one_that_is_elsewhere_is_marked(tmp_path: Path) -> None:
    with live_jobs.ranks(tmp_path, 4, odd=2) as found:
        text = stack_tree.build(found).text()
    assert "0-1,3/4 train (train.py:15)" in text
    assert "* 2/4 train (train.py:12)  <- leaves the others here" in text
    assert "all_reduce (torch/distributed/distributed_c10d.py:" in text
    assert "save_checkpoint (train.py:8)" in text
    assert "c10d::Work::wait (libtorch_cpu.so)" in text
    assert "pthread_cond" not in text
