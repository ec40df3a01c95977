"""The faults that can be injected: data that fits the code and the catalogue."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import fault_page
import pytest

from pytest_gkd import fault_specs
from pytest_gkd.diagnosis import catalogue
from pytest_gkd.fault_specs import FaultSpec
from pytest_gkd.options import Settings
from pytest_gkd.stage_specs import BY_NAME, OF_EVERY_JOB

FAULTS = fault_specs.load()
CATALOGUE = catalogue.load()

GOOD = """
[[fault]]
name = "x"
how = "nothing is done"
outcome = "failed"
causes = ["data.empty"]
"""


@pytest.mark.parametrize("fault", FAULTS.values(), ids=list(FAULTS))
def test_a_fault_fits_what_there_is(fault: FaultSpec) -> None:
    assert fault.stage in BY_NAME
    assert set(fault.also_runs) <= set(BY_NAME)
    assert fault.outcome in ("passed", "failed", "timeout", "skipped")
    assert all(cause in CATALOGUE for cause in fault.causes)
    assert set(fault.settings) <= set(vars(Settings()))
    assert set(fault.needs) <= {"cpu", "gpu", "two-gpus", "mounts", "shared-gpu"}
    module = importlib.import_module(f"pytest_gkd.workload.inject.{fault.group}")
    does = getattr(module, fault.does)
    inspect.signature(does).bind(None, **fault.arguments)


def test_every_stage_can_be_broken() -> None:
    assert {fault.group for fault in FAULTS.values()} == {*OF_EVERY_JOB, "any"}
    assert len(FAULTS) >= 45


def test_a_name_that_is_nearly_right_is_answered_with_the_right_one() -> None:
    with pytest.raises(fault_specs.UnknownFaultError, match="Near: nccl:rank-killed"):
        fault_specs.find("nccl:rank-kiled")


def test_a_fault_of_any_stage_takes_the_stage() -> None:
    assert fault_specs.find("any:native-hang@vllm").stage == "vllm"
    with pytest.raises(fault_specs.UnknownFaultError, match="in stage nccl only"):
        fault_specs.find("nccl:rank-killed@vllm")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (GOOD + "budget = 3\n", "unknown keys budget"),
        (GOOD.replace('how = "nothing is done"\n', ""), "how missing"),
        (GOOD + GOOD, "is listed twice"),
    ],
)
def test_a_bad_entry_is_told_with_its_file_and_name(
    tmp_path: Path, text: str, told: str
) -> None:
    (tmp_path / "data.toml").write_text(text)
    with pytest.raises(ValueError, match=told) as caught:
        fault_specs.load(tmp_path)
    assert "data" in str(caught.value)
    assert "x" in str(caught.value)


def test_the_page_shows_what_was_measured() -> None:
    fault = FAULTS["nccl:rank-killed"]
    measured = {
        "machine": "a machine",
        "date": "a day",
        "faults": {fault.name: {"verdict_after_s": 0.23}},
    }
    text = fault_page.page([fault], measured)
    assert "on a machine, a day" in text
    assert text.splitlines()[-1].endswith("| 0.2 |")
    assert fault_page.page([fault], {}).splitlines()[-1].endswith("| not run |")
