"""Which stages run, where, in which order, for how long (pytest_gkd.stage_plan)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from pytest_gkd import stage_plan, typed_json
from pytest_gkd.options import SettingsError, read_budgets
from pytest_gkd.stage_plan import PlannedStage, StageItem
from pytest_gkd.stage_specs import BY_NAME, STAGES

BUILT_IN = tuple(StageItem(f"stages/{stage.name}", stage.name) for stage in STAGES)


def item(name: str, needs: Sequence[str] = (), lane: str = "host") -> StageItem:
    return StageItem(f"test_own.py::{name}", name, lane, tuple(needs))


def build_own(*items: StageItem) -> tuple[PlannedStage, ...]:
    return stage_plan.build(items, None, ())


def names(stages: Sequence[PlannedStage]) -> list[str]:
    return [stage.name for stage in stages]


def budget_s(
    name: str, selected: Sequence[str], *tables: dict[str, float], **marker: float
) -> float:
    """The budget that one built-in stage gets, the strongest table being the first."""
    items = [
        StageItem(one.nodeid, one.name, timeout_s=marker.get("timeout_s"))
        for one in BUILT_IN
    ]
    budgets = [
        budget
        for table in tables
        for budget in read_budgets((f"{k}={s}", "tox.ini") for k, s in table.items())
    ]
    planned = stage_plan.build(items, selected, budgets)
    return next(stage.budget_s for stage in planned if stage.name == name)


def stuck(lanes: Sequence[Sequence[PlannedStage]]) -> list[str]:
    """Stages that never start when each worker runs its own lane in order."""
    left = [list(lane) for lane in lanes]
    waiting = {stage.name for lane in lanes for stage in lane}
    moved = True
    while moved:
        moved = False
        for lane in left:
            while lane and not waiting & {*lane[0].needs, *lane[0].after}:
                waiting.discard(lane.pop(0).name)
                moved = True
    return sorted(waiting)


# -- order -------------------------------------------------------------------------


def test_the_plan_is_in_the_order_of_reports() -> None:
    planned = stage_plan.build(reversed(BUILT_IN), None, ())
    assert names(planned) == [stage.name for stage in STAGES]


def test_stages_of_the_users_own_follow_in_the_order_they_were_found() -> None:
    planned = stage_plan.build([item("b"), item("a"), *BUILT_IN], None, ())
    assert names(planned)[-2:] == ["b", "a"]


def test_a_stage_stands_after_its_needs() -> None:
    items = [item("last", ["middle"]), item("middle", ["first"]), item("first")]
    assert names(build_own(*items)) == ["first", "middle", "last"]


def test_needs_in_a_cycle_are_named() -> None:
    items = [item("egg", ["hen"]), item("hen", ["egg"]), item("free")]
    with pytest.raises(SettingsError, match="cycle") as caught:
        stage_plan.build(items, None, ())
    assert "egg (needs hen)" in str(caught.value)
    assert "hen (needs egg)" in str(caught.value)
    assert "free" not in str(caught.value)


def test_a_stage_that_needs_itself_is_a_cycle() -> None:
    with pytest.raises(SettingsError, match=r"cycle: alone \(needs alone\)"):
        build_own(item("alone", ["alone"]))


# -- selection and needs -----------------------------------------------------------


def test_only_selected_stages_are_planned() -> None:
    assert names(stage_plan.build(BUILT_IN, ["nccl", "data"], ())) == ["data", "nccl"]


def test_a_need_that_is_not_selected_is_dropped() -> None:
    (alone,) = stage_plan.build(BUILT_IN, ["weight_sync"], ())
    assert alone.needs == ()
    both = stage_plan.build(BUILT_IN, ["vllm", "weight_sync"], ())
    assert both[1].needs == ("vllm",)


def test_a_marker_overrules_the_stage_table() -> None:
    own = StageItem("t.py::t", "weight_sync", lane="mine", needs=(), timeout_s=7)
    (planned,) = stage_plan.build([own], None, ())
    assert planned == PlannedStage("t.py::t", "weight_sync", "mine", (), 7)


def test_a_silent_marker_of_the_users_own_gets_the_defaults() -> None:
    (planned,) = stage_plan.build([StageItem("t.py::t", "mine")], None, ())
    assert planned.lane == stage_plan.DEFAULT_LANE
    assert planned.needs == ()
    assert planned.budget_s == stage_plan.DEFAULT_BUDGET_S


def test_two_stages_of_one_name_are_both_named() -> None:
    twice = [StageItem("a.py::one", "same"), StageItem("b.py::two", "same")]
    with pytest.raises(SettingsError, match="'same'") as caught:
        stage_plan.build(twice, None, ())
    assert "a.py::one" in str(caught.value)
    assert "b.py::two" in str(caught.value)


def test_an_unknown_need_is_named_with_the_near_one() -> None:
    with pytest.raises(SettingsError) as caught:
        build_own(item("mine", ["vlm"]))
    text = str(caught.value)
    assert "test_own.py::mine" in text
    assert "'vlm'" in text
    assert "did you mean 'vllm'?" in text


def test_a_built_in_stage_may_be_needed_without_being_collected() -> None:
    (planned,) = build_own(item("mine", ["vllm"]))
    assert planned.needs == ()


# -- budgets -----------------------------------------------------------------------


def test_a_stage_has_its_own_budget_by_default() -> None:
    assert budget_s("nccl", ["nccl"]) == BY_NAME["nccl"].budget_s


def test_a_marker_beats_the_stage_table() -> None:
    assert budget_s("nccl", ["nccl"], timeout_s=5) == 5


def test_a_users_budget_beats_the_marker() -> None:
    assert budget_s("nccl", ["nccl"], {"nccl": 9}, timeout_s=5) == 9


def test_all_stands_for_a_stage_that_is_not_named() -> None:
    table = {"all": 30.0, "nccl": 9.0}
    assert budget_s("nccl", ["nccl"], table) == 9
    assert budget_s("data", ["data"], table) == 30


def test_a_stronger_tables_all_beats_a_weaker_tables_name() -> None:
    assert budget_s("nccl", ["nccl"], {"all": 30}, {"nccl": 9}) == 30


def test_a_weaker_table_speaks_where_the_stronger_is_silent() -> None:
    assert budget_s("nccl", ["nccl"], {"data": 3}, {"nccl": 9}) == 9


@pytest.mark.parametrize("name", ["weight_sync", "training_step"])
def test_a_stage_that_must_start_the_engine_gets_the_engines_time_too(
    name: str,
) -> None:
    engine_s = BY_NAME["vllm"].budget_s
    assert budget_s(name, [name]) == BY_NAME[name].budget_s + engine_s
    assert budget_s(name, [name, "vllm"]) == BY_NAME[name].budget_s


def test_the_jobs_own_command_gets_no_time_for_an_engine_of_ours() -> None:
    assert budget_s("launch", ["launch"]) == BY_NAME["launch"].budget_s
    assert budget_s("launch", ["launch"], {"launch": 90}) == 90


def test_a_need_that_is_not_shared_adds_no_time() -> None:
    without = budget_s("training_step", ["training_step", "vllm"])
    assert without == BY_NAME["training_step"].budget_s


def test_a_budget_of_the_users_is_taken_as_it_is() -> None:
    assert budget_s("weight_sync", ["weight_sync"], {"weight_sync": 9}) == 9
    assert budget_s("weight_sync", ["weight_sync"], timeout_s=9) == 9


# -- lanes -------------------------------------------------------------------------


def test_each_lane_has_a_worker_and_runs_quick_stages_first() -> None:
    host, rollout = stage_plan.lanes(stage_plan.build(BUILT_IN, None, ()), 2)
    assert names(host) == ["config", "data", "tokenizer", "environment", "nccl"]
    assert names(rollout) == ["vllm", "weight_sync", "training_step", "launch"]


def test_more_workers_than_lanes_change_nothing() -> None:
    planned = stage_plan.build(BUILT_IN, None, ())
    assert stage_plan.lanes(planned, 9) == stage_plan.lanes(planned, 2)


@pytest.mark.parametrize("workers", [0, 1])
def test_one_worker_runs_the_plan_as_it_is(workers: int) -> None:
    planned = stage_plan.build(BUILT_IN, None, ())
    assert stage_plan.lanes(planned, workers) == [list(planned)]


def test_fewer_workers_than_lanes_join_the_last_ones() -> None:
    items = [item(lane, lane=lane) for lane in "abcd"]
    lanes = stage_plan.lanes(build_own(*items), 2)
    assert [names(lane) for lane in lanes] == [["a"], ["b", "c", "d"]]


@pytest.mark.parametrize(
    ("selected", "after"),
    [
        (None, ("vllm",)),
        (["nccl", "training_step", "weight_sync"], ("weight_sync",)),
        (["nccl", "data"], ()),
    ],
)
def test_with_gpus_nccl_waits_until_the_engine_has_measured_their_memory(
    selected: list[str] | None, after: tuple[str, ...]
) -> None:
    for gpus, expected in ((0, ()), (2, after)):
        planned = stage_plan.build(BUILT_IN, selected, (), gpus=gpus)
        by_name = {stage.name: stage for stage in planned}
        assert by_name["nccl"].after == expected
        assert not any(s.after for s in planned if s.name != "nccl")
        for workers in (1, 2):
            assert stuck(stage_plan.lanes(planned, workers)) == []


@pytest.mark.parametrize("workers", [1, 2])
def test_where_a_gpu_is_for_one_process_nccl_comes_before_the_engine(
    workers: int,
) -> None:
    for selected in (None, ["nccl", "weight_sync", "training_step"]):
        planned = stage_plan.build(BUILT_IN, selected, (), gpus=1, exclusive=True)
        after = {stage.name: stage.after for stage in planned if stage.after}
        assert after == {"vllm" if selected is None else "weight_sync": ("nccl",)}
        assert stuck(stage_plan.lanes(planned, workers)) == []


def test_with_gpus_there_is_time_to_compile_and_to_load() -> None:
    def budgets(selected: list[str], gpus: int) -> list[float]:
        planned = stage_plan.build(BUILT_IN, selected, (), gpus=gpus)
        return [stage.budget_s for stage in planned]

    assert budgets(["data", "vllm"], 0) == [20, 120]
    assert budgets(["data", "vllm"], 1) == [20, 600]
    assert budgets(["weight_sync"], 1) == [780]  # it starts the engine itself


def test_a_plan_travels_as_json() -> None:
    planned = stage_plan.build(BUILT_IN, None, (), gpus=1)
    sent = [typed_json.dumps(stage) for stage in planned]
    assert tuple(typed_json.loads(PlannedStage, one) for one in sent) == planned


def test_no_stage_is_lost_or_run_twice() -> None:
    planned = stage_plan.build([*BUILT_IN, item("mine", lane="own")], None, ())
    for workers in range(5):
        run = [stage for lane in stage_plan.lanes(planned, workers) for stage in lane]
        assert sorted(names(run)) == sorted(names(planned))


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_no_selection_of_the_built_in_stages_waits_for_ever(workers: int) -> None:
    for size in range(1, len(STAGES) + 1):
        for selected in itertools.combinations(BY_NAME, size):
            planned = stage_plan.build(BUILT_IN, selected, ())
            assert stuck(stage_plan.lanes(planned, workers)) == [], selected


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_no_graph_of_needs_waits_for_ever(workers: int) -> None:
    choose = random.Random(workers)
    for _ in range(300):
        items = [
            item(
                f"s{number}",
                [f"s{need}" for need in range(number) if choose.random() < 0.3],
                lane=choose.choice("abcd"),
            )
            for number in range(8)
        ]
        choose.shuffle(items)
        assert stuck(stage_plan.lanes(build_own(*items), workers)) == [], items


def test_within_a_joined_lane_every_need_comes_first() -> None:
    items = [item("b", ["a"], "one"), item("c", ["b"], "two"), item("a", lane="two")]
    (lane,) = stage_plan.lanes(build_own(*items), 1)
    assert names(lane) == ["a", "b", "c"]


# -- -k ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("nccl", ("nccl",)),
        ("vllm or data", ("data", "vllm")),
        ("(weight_sync)", ("weight_sync",)),
        ("test_nccl", ()),
        ("database", ()),
        ("vllm_v1", ()),
        ("", ()),
        ("not data", ()),
        ("not (vllm or nccl)", ()),
        ("data and not nccl", ("data",)),
        ("nccl or vllm", ("vllm", "nccl")),
        ("nccl and absent", ()),
        ("nccl[2]", ("nccl",)),
    ],
)
def test_a_k_expression_mentions_the_stages_that_it_selects_by_their_whole_name(
    expression: str, expected: tuple[str, ...]
) -> None:
    assert stage_plan.mentioned(expression) == expected


def test_a_lanes_own_order_does_not_put_a_stage_before_its_need() -> None:
    items = [
        StageItem("a::nccl", "nccl", None, ("mine",)),
        StageItem("a::mine", "mine", "host"),
    ]
    lanes = stage_plan.lanes(stage_plan.build(items, None, ()), 2)
    assert [[stage.name for stage in lane] for lane in lanes] == [["mine", "nccl"]]
