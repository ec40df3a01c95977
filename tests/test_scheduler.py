"""Which worker runs which stage, with workers that are only pretended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pytest_gkd.run.scheduler import LaneScheduling
from pytest_gkd.stage_plan import PlannedStage


class Node:
    """A worker as a scheduler sees it: it takes test numbers until it is shut down."""

    def __init__(self) -> None:
        self.handed: list[int] = []
        self.shutting_down = False

    def send_runtest_some(self, indices: Sequence[int]) -> None:
        assert not self.shutting_down
        self.handed += indices

    def shutdown(self) -> None:
        self.shutting_down = True


# Two lanes, in an order that is not that of the collection, and a test that is none.
TESTS = ["t::b1", "t::a2", "t::plain", "t::a1", "t::b2"]
PLAN = tuple(
    PlannedStage(f"t::{name}", name, lane=name[0], needs=(), budget_s=9)
    for name in ("a1", "a2", "b1", "b2")
)


class Session:
    """What pytest-xdist's session does with a scheduler."""

    def __init__(self, workers: int, tests: Sequence[str] = TESTS) -> None:
        self.tests = list(tests)
        self.scheduler = LaneScheduling(workers, lambda: PLAN)
        self.nodes = [self.join() for _ in range(workers)]

    def join(self) -> Node:
        node: Any = Node()
        self.scheduler.add_node(node)
        self.scheduler.add_node_collection(node, self.tests)
        if self.scheduler.collection_is_completed:
            self.scheduler.schedule()
        made: Node = node
        return made

    def finish(self, node: Any, *names: str) -> None:
        for name in names:
            self.scheduler.mark_test_complete(node, self.tests.index(f"t::{name}"))

    def lose(self, node: Any) -> str | None:
        return self.scheduler.remove_node(node)

    def lane(self, node: Node) -> list[str]:
        return [self.tests[index].removeprefix("t::") for index in node.handed]


STAGES_ONLY = [test for test in TESTS if test != "t::plain"]


def test_nothing_is_handed_out_before_every_worker_has_collected() -> None:
    scheduler = LaneScheduling(2, lambda: PLAN)
    node: Any = Node()
    scheduler.add_node(node)
    scheduler.add_node_collection(node, TESTS)
    assert not scheduler.collection_is_completed
    assert not scheduler.tests_finished


def test_each_worker_gets_its_whole_lane_in_order() -> None:
    session = Session(2, STAGES_ONLY)
    lanes = [session.lane(node) for node in session.nodes]
    assert lanes == [["a1", "a2"], ["b1", "b2"]]


def test_a_worker_is_told_at_once_that_nothing_follows() -> None:
    assert all(node.shutting_down for node in Session(2).nodes)


def test_one_worker_gets_every_lane() -> None:
    session = Session(1, STAGES_ONLY)
    assert session.lane(session.nodes[0]) == ["a1", "a2", "b1", "b2"]


def test_a_worker_without_a_lane_is_sent_home() -> None:
    session = Session(3, STAGES_ONLY)
    assert session.lane(session.nodes[2]) == []
    assert session.nodes[2].shutting_down


def test_a_stage_that_was_planned_but_not_collected_is_left_out() -> None:
    session = Session(2, ["t::a1", "t::b2"])
    assert [session.lane(node) for node in session.nodes] == [["a1"], ["b2"]]


def test_plain_tests_run_on_a_worker_of_their_own() -> None:
    session = Session(3)
    assert session.lane(session.nodes[2]) == ["plain"]


def test_plain_tests_are_spread_over_the_free_workers() -> None:
    tests = [*STAGES_ONLY, *(f"t::p{number}" for number in range(5))]
    session = Session(4, tests)
    assert session.lane(session.nodes[2]) == ["p0", "p2", "p4"]
    assert session.lane(session.nodes[3]) == ["p1", "p3"]


def test_plain_tests_follow_the_last_lane_when_no_worker_is_free() -> None:
    session = Session(2)
    assert session.lane(session.nodes[1]) == ["b1", "b2", "plain"]


def test_plain_tests_alone_are_run_too() -> None:
    session = Session(2, ["t::p0", "t::p1"])
    assert [session.lane(node) for node in session.nodes] == [["p0"], ["p1"]]


def test_the_tests_are_finished_when_all_were_marked() -> None:
    session = Session(2, STAGES_ONLY)
    first, second = session.nodes
    session.finish(first, "a1", "a2")
    session.finish(second, "b1")
    assert session.scheduler.has_pending
    assert not session.scheduler.tests_finished
    session.finish(second, "b2")
    assert not session.scheduler.has_pending
    assert session.scheduler.tests_finished


def test_an_empty_collection_is_finished_at_once() -> None:
    session = Session(2, [])
    assert session.scheduler.tests_finished
    assert all(node.shutting_down for node in session.nodes)


def test_a_lost_worker_returns_what_it_ran_and_its_replacement_the_rest() -> None:
    session = Session(2, STAGES_ONLY)
    second = session.nodes[1]
    assert session.lose(second) == "t::b1"
    assert session.scheduler.has_pending
    replacement = session.join()
    assert session.lane(replacement) == ["b2"]
    assert replacement.shutting_down


def test_a_replacement_takes_nothing_from_the_other_lane() -> None:
    session = Session(2, STAGES_ONLY)
    session.lose(session.nodes[1])
    session.join()
    assert session.lane(session.nodes[0]) == ["a1", "a2"]


def test_a_worker_lost_on_its_last_stage_leaves_nothing() -> None:
    session = Session(2, STAGES_ONLY)
    second = session.nodes[1]
    session.finish(second, "b1")
    assert session.lose(second) == "t::b2"
    replacement = session.join()
    assert session.lane(replacement) == []
    session.finish(session.nodes[0], "a1", "a2")
    assert session.scheduler.tests_finished


def test_a_worker_lost_after_its_lane_was_running_nothing() -> None:
    session = Session(2, STAGES_ONLY)
    second = session.nodes[1]
    session.finish(second, "b1", "b2")
    assert session.lose(second) is None
    assert session.scheduler.nodes == [session.nodes[0]]


def test_a_lane_survives_the_loss_of_two_workers() -> None:
    session = Session(1, STAGES_ONLY)
    assert session.lose(session.nodes[0]) == "t::a1"
    second = session.join()
    session.finish(second, "a2")
    assert session.lose(second) == "t::b1"
    assert session.lane(session.join()) == ["b2"]


def test_both_lost_lanes_go_to_the_replacements() -> None:
    session = Session(2, STAGES_ONLY)
    for node in session.nodes:
        session.lose(node)
    lanes = [session.lane(session.join()) for _ in range(2)]
    assert sorted(lanes) == [["a2"], ["b2"]]


def test_a_worker_lost_before_it_collected_is_replaced_like_any_other() -> None:
    session = Session(0, STAGES_ONLY)
    session.scheduler = LaneScheduling(2, lambda: PLAN)
    lost: Any = Node()
    session.scheduler.add_node(lost)
    assert session.lose(lost) is None
    first, second = session.join(), session.join()
    assert session.lane(first) == ["a1", "a2"]
    assert session.lane(second) == ["b1", "b2"]


def test_a_stage_is_neither_run_twice_nor_taken_away() -> None:
    session = Session(1)
    with pytest.raises(NotImplementedError, match="twice"):
        session.scheduler.mark_test_pending("t::a1")
    node: Any = session.nodes[0]
    with pytest.raises(NotImplementedError, match="divided"):
        session.scheduler.remove_pending_tests_from_node(node, [0])
