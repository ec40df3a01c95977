"""Holds report.json against its published schema."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from jsonschema import Draft202012Validator

SCHEMA: dict[str, Any] = json.loads(
    resources.files("pytest_gkd.report").joinpath("report.schema.json").read_text()
)
CHECKED = Draft202012Validator(
    SCHEMA, format_checker=Draft202012Validator.FORMAT_CHECKER
)


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
