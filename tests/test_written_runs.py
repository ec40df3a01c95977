"""The logs written by hand are all labelled, and what is told of them stays right."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from pytest_gkd.diagnosis import catalogue, log_phases, logs

RUNS = Path(__file__).with_name("written_runs")
LABELS = tomllib.loads((RUNS / "labels.toml").read_text("utf-8"))["run"]
CATALOGUE = catalogue.load()


def wanted(label: dict[str, object]) -> list[str]:
    also = label.get("also", [])
    assert isinstance(also, list)
    return [str(label.get("cause", "")), *also]


COMPETING = [one for one in LABELS if one.get("competing") and one["cause"]]


def test_every_log_has_a_label_and_every_label_a_log() -> None:
    assert sorted(path.stem for path in RUNS.glob("*/*.log")) == sorted(
        one["name"] for one in LABELS
    )


def test_every_label_is_of_this_project() -> None:
    for one in LABELS:
        assert {*wanted(one)} <= {*CATALOGUE, ""}, one["name"]
        phases = {one.get("phase", "unknown"), *one.get("also_phase", ())}
        assert phases <= {*log_phases.PHASES}, one["name"]
        assert one["what"], one["name"]


@pytest.mark.parametrize("label", COMPETING, ids=lambda one: one["name"])
def test_of_two_failures_the_first_is_told(label: dict[str, object]) -> None:
    log = RUNS / "development" / f"{label['name']}.log"
    assert logs.examine([log], CATALOGUE).causes[0].cause in wanted(label)


NAMED = [
    pytest.param(
        one,
        id=one["name"],
        marks=[pytest.mark.xfail(strict=True)] if "mistaken_for" in one else [],
    )
    for one in LABELS
    if one["outcome"] == "failed"
    and (RUNS / "development" / f"{one['name']}.log").exists()
]


@pytest.mark.parametrize("label", NAMED)
def test_a_cause_that_is_named_is_right(label: dict[str, object]) -> None:
    log = RUNS / "development" / f"{label['name']}.log"
    named = [one.cause for one in logs.examine([log], CATALOGUE).causes][:1]
    assert {*named} <= {*wanted(label)} - {""}
