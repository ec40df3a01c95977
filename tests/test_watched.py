"""The quickest of the jobs that ``make watched`` holds ``gkd watch`` against."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "watched"))
QUICK = ("ranks-healthy", "http-teacher-killed", "ranks-step-lock")


@pytest.mark.needs("torch")
@pytest.mark.parametrize("name", QUICK)
def test_a_job_is_judged_by_what_is_done_to_it(name: str) -> None:
    jobs, judge = import_module("jobs"), import_module("judge")
    [case] = [case for case in jobs.cases() if case["name"] == name]
    assert judge.judge(case).problems == []


def test_every_case_can_be_read_and_has_a_name_of_its_own() -> None:
    cases = import_module("jobs").cases()
    phases = import_module("pytest_gkd.diagnosis.log_phases").PHASES
    assert len({case["name"] for case in cases}) == len(cases)
    for case in cases:
        assert {"how", "verdict", "command"} <= case.keys(), case["name"]
        sound = case["verdict"] == "finished"
        assert sound or case["where"] in phases, case["name"]
        assert sound or "names" in case, case["name"]
        for pattern in (*case.get("names", ()), *case.get("never", ())):
            re.compile(pattern)
