"""The most fundamental finding ends the environment stage; the others are named."""

from __future__ import annotations

from pytest_gkd.stage_api import StageFault
from pytest_gkd.workload.environment.findings import Finding, Findings, Note, to_error

FULL = Finding("env.disk-full", "the disk is full.", {"free_bytes": 0})
CONFLICT = Finding("env.package-conflict", "a and b disagree.", {"package": "a"})
UNKNOWN = Finding(None, "import x did not return.")


def test_nothing_found_is_no_error() -> None:
    assert to_error([]) is None


def test_a_full_disk_is_told_before_a_conflict_that_was_found_first() -> None:
    error = to_error([CONFLICT, FULL])
    assert isinstance(error, StageFault)
    assert error.cause == "env.disk-full"
    assert error.message.startswith("the disk is full.")


def test_the_others_are_named_in_the_message_and_in_the_facts() -> None:
    error = to_error([CONFLICT, FULL])
    assert isinstance(error, StageFault)
    assert "[env.package-conflict] a and b disagree." in error.message
    assert error.facts["also"] == [
        {"cause": "env.package-conflict", "message": "a and b disagree."}
    ]


def test_a_known_cause_goes_before_an_unknown_one() -> None:
    error = to_error([UNKNOWN, CONFLICT])
    assert isinstance(error, StageFault)
    assert error.cause == "env.package-conflict"


def test_an_unknown_cause_alone_is_a_plain_error() -> None:
    error = to_error([UNKNOWN])
    assert isinstance(error, RuntimeError)
    assert not isinstance(error, StageFault)


def test_a_package_that_two_checks_find_missing_is_told_once() -> None:
    found = Findings()
    found.add(
        [
            Finding("env.package-missing", "import ray failed", {"package": "ray"}),
            Finding("env.package-missing", "no ray", {"package": "ray[default]>=2"}),
        ]
    )
    assert [fault.message for fault in found.faults] == ["import ray failed"]


def test_a_note_is_kept_once() -> None:
    found = Findings()
    found.add([Note("a", "text"), Note("a", "text")])
    assert len(found.notes) == 1
