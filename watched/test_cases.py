"""Real jobs, healthy and broken, under ``gkd watch``: ``make watched``.

Each case of cases.toml is held against its label. What was told, and how long after the
standstill, goes to ``.gkd/watched/``; keep_verdicts.py takes it from there.
"""

from __future__ import annotations

import json
from dataclasses import asdict

import jobs
import judge
import pytest

RESULTS = jobs.HERE.parent / ".gkd/watched"
KEPT = ("job", "where", "how")


@pytest.mark.parametrize("case", jobs.cases(), ids=lambda case: case["name"])
def test_case(case: jobs.Case) -> None:
    reason = jobs.lacks(case)
    found = judge.Judged() if reason else judge.judge(case)
    told = {k: case[k] for k in KEPT if k in case} | {"expected": jobs.words(case)}
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{case['name']}.json").write_text(
        json.dumps({**told, **asdict(found), "skipped": reason}, indent=1) + "\n"
    )
    if reason:
        pytest.skip(reason)
    assert not found.problems, "\n".join(found.problems)
