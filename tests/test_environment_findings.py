"""The most fundamental finding ends the environment stage; the others are named."""

from __future__ import annotations

from pytest_gkd.stage_api import Note, StageFault
from pytest_gkd.workload.environment.findings import (
    FaultsAndNotes,
    most_fundamental,
)

FULL = StageFault("env.disk-full", "the disk is full.", {"free_bytes": 0})
PROOF = (("pip", 3, "a wants b<2"),)
CONFLICT = StageFault("env.package-conflict", "a and b disagree.", evidence=PROOF)
UNKNOWN = StageFault(None, "import x did not return.")


def test_nothing_found_is_no_error() -> None:
    assert most_fundamental([]) is None


def test_a_full_disk_is_told_before_a_conflict_that_was_found_first() -> None:
    fault = most_fundamental([CONFLICT, FULL])
    assert fault is not None
    assert (fault.cause, fault.message) == ("env.disk-full", "the disk is full.")
    assert fault.facts == {"free_bytes": 0}


def test_the_others_stand_beside_it_with_their_evidence() -> None:
    fault = most_fundamental([UNKNOWN, CONFLICT, FULL])
    assert fault is not None
    assert fault.also == (CONFLICT, UNKNOWN)
    assert fault.evidence == PROOF
    assert str(fault).splitlines() == [
        "the disk is full.",
        "Also found (2):",
        "[env.package-conflict] a and b disagree.",
        "[unknown] import x did not return.",
    ]


def test_an_unknown_cause_alone_has_none() -> None:
    fault = most_fundamental([UNKNOWN])
    assert fault is not None
    assert fault.cause is None


def test_a_package_that_two_checks_find_missing_is_told_once() -> None:
    found = FaultsAndNotes()
    found.add(
        [
            StageFault("env.package-missing", "import ray failed", {"package": "ray"}),
            StageFault("env.package-missing", "no ray", {"package": "ray[default]>=2"}),
        ]
    )
    assert [fault.message for fault in found.faults] == ["import ray failed"]


def test_a_note_is_kept_once() -> None:
    found = FaultsAndNotes()
    found.add([Note("a", "text"), Note("a", "text")])
    assert len(found.notes) == 1
