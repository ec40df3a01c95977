"""Holds report.json against its published schema."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from jsonschema import Draft202012Validator

from pytest_gkd.report import compare

SCHEMA: dict[str, Any] = json.loads(
    resources.files("pytest_gkd.report").joinpath(compare.SCHEMA_FILE).read_text()
)
CHECKED = Draft202012Validator(
    SCHEMA, format_checker=Draft202012Validator.FORMAT_CHECKER
)

# A report of no stage.
EMPTY: dict[str, Any] = {
    "schema": 1,
    "started": "2026-11-26T01:39:57+00:00",
    "ended": None,
    "interrupted": None,
    "versions": {},
    "settings": {"layout": None, "layout_why": "", "origins": {}, "job": None},
    "injected": None,
    "notes": [],
    "cleaned": [],
    "stages": [],
}
# A stage that nothing is known of but what is given.
STAGE: dict[str, Any] = {
    **dict.fromkeys(("name", "nodeid", "lane", "step", "message"), ""),
    **{name: [] for name in ("telling", "also", "stuck", "stacks", "output")},
    **{name: [] for name in ("blocked_by", "cleaned")},
    **dict.fromkeys(("diagnosis", "progress", "injected")),
    **dict.fromkeys(("duration_s", "verdict_after_s")),
    "outcome": "skipped",
    "ran": False,
    "budget_s": 60,
    "facts": {},
}


def check(report: dict[str, Any]) -> None:
    """Raise if a report breaks the schema, or has a key that the schema lacks."""
    CHECKED.validate(report)
    stage, diagnosis = SCHEMA["$defs"]["stage"], SCHEMA["$defs"]["diagnosis"]
    pairs = [(report, SCHEMA)]
    for one in report["stages"]:
        pairs.append((one, stage))
        if one["diagnosis"]:
            pairs.append((one["diagnosis"], diagnosis))
    for found, schema in pairs:
        unknown = found.keys() - schema["properties"].keys()
        assert not unknown, f"report.schema.json lacks {sorted(unknown)}"
