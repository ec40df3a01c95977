"""What a running stage may say and ask (pytest_gkd.stage_api)."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_gkd.options import Settings
from pytest_gkd.stage_api import StageContext, StageFault
from pytest_gkd.stage_events import Event, Fact, Step


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def context(tmp_path: Path, events: list[Event]) -> StageContext:
    made = StageContext(
        Settings(), tmp_path / "run", tmp_path / "report", emit=events.append
    )
    made.begin("data", 60)
    return made


def test_a_step_is_sent_with_its_stage(
    context: StageContext, events: list[Event]
) -> None:
    context.step("reading")
    assert events == [Step("data", "reading")]
    assert context.doing == "reading"


@pytest.mark.parametrize(
    ("budget_s", "least_s", "most_s"), [(3, 1, 1.1), (60, 6, 6.1), (600, 60, 60.1)]
)
def test_time_to_tell_is_kept_and_grows_with_the_budget(
    context: StageContext, budget_s: float, least_s: float, most_s: float
) -> None:
    context.begin("data", budget_s)
    work_s = context.working_s()
    assert least_s <= context.remaining_s() + 0.05 - work_s <= most_s
    assert work_s < context.working_s(0.5) < budget_s


def test_of_what_little_is_left_half_is_kept(context: StageContext) -> None:
    context.begin("data", 0.1)
    assert context.working_s() == context.remaining_s() / 2 == 0.5


def test_notes_add_up(context: StageContext, events: list[Event]) -> None:
    context.note("tokenizer.pad", "no pad token")
    context.note("tokenizer.template", "no template")
    found = [note["text"] for note in context.facts["notes"]]
    assert found == ["no pad token", "no template"]
    assert facts_of(events[-1:]).keys() == {"notes"}


def test_a_fact_is_sent_and_kept(context: StageContext, events: list[Event]) -> None:
    context.fact("rows", 3)
    assert events == [Fact("data", "rows", 3)]
    assert context.facts == {"rows": 3}


def test_a_stage_starts_without_the_last_ones_facts_and_step(
    context: StageContext,
) -> None:
    context.step("reading")
    context.fact("rows", 3)
    context.begin("nccl", 60)
    assert (context.stage, context.facts, context.doing) == ("nccl", {}, "")


def test_a_stage_that_nobody_listens_to_may_speak(tmp_path: Path) -> None:
    alone = StageContext(Settings(), tmp_path, tmp_path)
    alone.step("reading")
    alone.fact("rows", 3)
    assert alone.facts == {"rows": 3}


def test_what_is_left_of_the_budget_shrinks_from_the_budget(
    context: StageContext,
) -> None:
    before = context.remaining_s()
    assert 1.0 <= before <= 60.0
    while time.monotonic() == time.monotonic():  # until the clock has ticked
        pass
    assert context.remaining_s() < before


def test_a_budget_that_is_over_leaves_a_second(context: StageContext) -> None:
    context.begin("data", -5)
    assert context.remaining_s() == 1.0


def test_without_a_budget_the_default_is_left(context: StageContext) -> None:
    context.begin("data", None)
    assert context.remaining_s() == 60.0
    assert context.remaining_s(7.0) == 7.0


def test_each_stage_has_its_own_output_directory(
    context: StageContext, tmp_path: Path
) -> None:
    assert context.output_dir == tmp_path / "report/output/data"
    assert context.output_dir.is_dir()
    context.begin("nccl", 60)
    assert context.output_dir == tmp_path / "report/output/nccl"


def test_output_of_no_stage_has_a_directory_too(tmp_path: Path) -> None:
    alone = StageContext(Settings(), tmp_path, tmp_path)
    assert alone.output_dir == tmp_path / "output/session"


# -- limits ------------------------------------------------------------------------


def facts_of(events: list[Event]) -> dict[str, Any]:
    return {e.name: e.value for e in events if isinstance(e, Fact)}


def test_a_long_step_is_cut_and_says_so(
    context: StageContext, events: list[Event]
) -> None:
    context.step("x" * 600)
    assert events == [Step("data", "x" * 500 + "...")]


def test_a_fact_that_is_too_large_gives_its_size(
    context: StageContext, events: list[Event]
) -> None:
    context.fact("small", "x" * 1000)
    context.fact("large", [0] * 100_000)
    text = "left out: 300000 bytes; a fact may have 65536"
    assert facts_of(events) == {"small": "x" * 1000, "large": text}
    assert len(context.facts["large"]) == 100_000


@pytest.mark.parametrize("depth", [101, 600, 100_000])
def test_a_fact_that_is_nested_too_deep_is_replaced(
    context: StageContext, events: list[Event], depth: int
) -> None:
    for name, levels in (("shallow", 100), ("deep", depth)):
        value: Any = 1
        for level in range(levels):
            value = {"x": value} if level % 2 else [value]
        context.fact(name, value)
    assert isinstance(facts_of(events)["shallow"], dict)
    assert facts_of(events)["deep"] == (
        "left out: nested too deep; a fact may have 100 levels"
    )


def test_of_a_flood_the_last_values_come_at_the_end(
    context: StageContext, events: list[Event]
) -> None:
    for number in range(100_000):
        context.fact("loss", number)
    assert len(events) < 30_000
    last = facts_of(events)["loss"]
    assert facts_of(events)["facts_limit"] == "those after 'loss' came at the end"
    context.release()
    assert last < facts_of(events)["loss"] == 99_999


def test_of_too_many_facts_the_rest_is_counted(
    context: StageContext, events: list[Event]
) -> None:
    for number in range(60):
        context.fact(f"text{number}", "x" * 60_000)
    context.release()
    found = facts_of(events)
    left = 60 - (len(found) - 1)
    assert found["facts_limit"] == f"{left} facts were left out"
    assert 0 < left < 30


def test_the_next_stage_may_say_as_much_again(
    context: StageContext, events: list[Event]
) -> None:
    for number in range(60):
        context.fact(f"text{number}", "x" * 60_000)
    context.begin("next", 60)
    context.fact("a", 1)
    assert events[-1] == Fact("next", "a", 1)
    count = len(events)
    context.release()
    assert len(events) == count


# -- faults ------------------------------------------------------------------------

OTHER = StageFault(None, "nothing answers\nat all", evidence=(("a.log", None, "no"),))
WHOLE = StageFault("env.no-gpu", "no GPU", {"n": 0}, (("smi", 2, "none"),), (OTHER,))


@pytest.mark.parametrize(
    "carried",
    [
        pytest.param(copy.deepcopy, id="to an actor, by pickle"),
        pytest.param(
            lambda one: StageFault.from_json(json.loads(json.dumps(one.to_json()))),
            id="to the controller",
        ),
    ],
)
def test_a_fault_reaches_another_process_whole(
    carried: Callable[[StageFault], StageFault],
) -> None:
    def parts(one: StageFault) -> tuple[Any, ...]:
        also = [parts(other) for other in one.also]
        return one.cause, one.message, one.facts, one.evidence, also, str(one)

    assert parts(carried(WHOLE)) == parts(WHOLE)
    assert str(WHOLE).endswith("Also found (1):\n[unknown] nothing answers\nat all")
