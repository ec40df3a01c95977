"""The record of a run as report.json holds it; its keys: test_public_surface.py."""

from __future__ import annotations

import json

from pytest_gkd.report.record import (
    BLOCKED,
    FAILED,
    PASSED,
    SKIPPED,
    TIMEOUT,
    RunRecord,
    StageRecord,
)


def stage(name: str = "nccl") -> StageRecord:
    return StageRecord(name, f"stages/test_{name}.py::test_{name}", "host", 60.0)


def test_what_is_not_known_yet_is_null_and_what_was_not_found_is_empty() -> None:
    report = stage().to_json()
    assert report["duration_s"] is None
    assert report["diagnosis"] is None
    assert report["facts"] == {}
    assert report["stacks"] == report["blocked_by"] == []


def test_a_stage_that_never_ended_counts_as_skipped() -> None:
    assert stage().to_json()["outcome"] == SKIPPED


def test_the_outcomes_are_those_of_the_contract() -> None:
    outcomes = {PASSED, FAILED, TIMEOUT, BLOCKED, SKIPPED}
    assert outcomes == {"passed", "failed", "timeout", "blocked", "skipped"}


def test_durations_are_given_in_milliseconds_precision() -> None:
    record = stage()
    record.duration_s = 1.23456789
    assert record.to_json()["duration_s"] == 1.235


def test_a_report_is_plain_json() -> None:
    record = stage()
    record.facts["bus_bandwidth_gb_s"] = 1.5
    run = RunRecord("now", {}, {"train_files": ["a"]}, [record])
    assert json.loads(json.dumps(run.to_json())) == run.to_json()


def test_a_stages_record_is_found_by_its_name() -> None:
    run = RunRecord("now", {}, {}, [stage("data"), stage("nccl")])
    assert run.stage("nccl") is run.stages[1]
    assert run.stage("ncl") is None


def test_records_do_not_share_their_lists() -> None:
    one, other = stage(), stage()
    one.stacks.append("x")
    one.facts["y"] = 1
    assert other.stacks == []
    assert other.facts == {}


def test_ever_new_problems_do_not_fill_the_report() -> None:
    run = RunRecord("now", {}, {})
    assert run.problem("the disk is full")
    assert not run.problem("the disk is full")
    for number in range(1000):
        assert run.problem(f"{number} " + "x" * 100_000)
        assert not run.problem(f"{number} " + "x" * 100_000)
    run.notes.append("another hand's")
    assert run.problem("last")
    assert len(run.notes) == 22
    assert run.notes[:2] == ["the disk is full", "0 " + "x" * 498 + "..."]
    assert run.notes[-2:] == [
        "another hand's",
        "and 982 more problems, the last: last",
    ]
    assert sum(map(len, run.notes)) < 22 * 600
