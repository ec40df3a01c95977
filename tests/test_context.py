"""What a running stage may say and ask (pytest_gkd.context)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from pytest_gkd.context import StageContext
from pytest_gkd.settings import Settings


@pytest.fixture
def events() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def context(tmp_path: Path, events: list[dict[str, Any]]) -> StageContext:
    made = StageContext(
        Settings(), tmp_path / "run", tmp_path / "report", emit=events.append
    )
    made.begin("data", 60)
    return made


def test_a_step_is_sent_with_its_stage(
    context: StageContext, events: list[dict[str, Any]]
) -> None:
    context.step("reading")
    assert events == [{"event": "step", "stage": "data", "text": "reading"}]
    assert context.doing == "reading"


def test_a_fact_is_sent_and_kept(
    context: StageContext, events: list[dict[str, Any]]
) -> None:
    context.fact("rows", 3)
    assert events == [{"event": "fact", "stage": "data", "name": "rows", "value": 3}]
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
