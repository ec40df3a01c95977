"""Unchanged files of the frameworks, against their values read by hand."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from upstream_files import job_file, jobs

from pytest_gkd.job import check, debug_config


@pytest.mark.parametrize("one", jobs())
def test_an_upstream_file_means_what_was_read_by_hand(
    one: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = job_file(one, tmp_path, monkeypatch)
    found = check.check(path, one.get("arguments", ()), one["framework"])
    uncertain = one.get("undetermined", [])
    told = {name: value.value for name, value in found.values.items()}
    assert {name: told.get(name) for name in one["values"]} == one["values"]
    sources = {name: found.values[name].source for name in uncertain}
    assert sources == dict.fromkeys(uncertain, "undetermined")
    if "faults" in one:
        faults = [f for f in found.findings if f.level != "note"]
        keys = [f"{f.level} {f.key.lstrip('-')}" for f in faults]
        assert keys == one["faults"], faults


@pytest.mark.parametrize("one", jobs())
def test_the_smallest_run_of_an_upstream_job_has_no_fault_of_its_own(
    one: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, given = job_file(one, tmp_path, monkeypatch), one.get("arguments", ())
    known = tomllib.loads(debug_config.TABLE.read_text())
    if one["framework"].partition("==")[0] not in known:
        pytest.skip("what makes a job of this framework small is not known")

    def judge(more: Sequence[str] = (), added: Sequence[str] = ()) -> check.Checked:
        return check.check(path, [*given, *more], one["framework"], added=added)

    before = judge()
    small = debug_config.smallest(judge)
    after = judge(added=[change.text for change in small.changes])
    told = {f.message for f in before.findings if f.level == "error"}
    assert not [
        f for f in after.findings if f.level == "error" and f.message not in told
    ]
    assert len(small.changes) > 4
    # What a failure may hang on stays as it is.
    was = {name: before.values[name].value for name in small.kept}
    assert was == small.kept
    gpus = (one.values.get("trainer_gpus") for one in (before, after))
    assert len({value and value.value for value in gpus}) == 1
