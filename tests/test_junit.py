"""What CI keeps of a run: facts, diagnosis, output and stacks in the JUnit file."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
from test_plugin import Run

PROBES = """
import os, subprocess, sys, time
import pytest

@pytest.mark.gkd_stage("measures", timeout=60)
def test_measures(gkd, record_property):
    record_property("mine", "kept")
    gkd.fact("latency_ms", 12.5)
    gkd.fact("sizes", list(range(9_000)))

@pytest.mark.gkd_stage("fails", timeout=60)
def test_fails(gkd):
    gkd.fact("rows", 3)
    (gkd.output_dir / "rank0.log").write_text("rank 0 said this\\\\x1b[31m\\\\0")
    print("x" * 1_000_000)
    print("the last words")
    raise OSError(28, "No space left on device")

@pytest.mark.gkd_stage("dies", timeout=60)
def test_dies(gkd):
    gkd.fact("rows", 4)
    os.write(1, b"then it died")
    time.sleep(2)  # the controller has opened what it prints to
    os.abort()

@pytest.mark.gkd_stage("hangs", timeout=1)
def test_hangs(gkd):
    gkd.step("waiting for nobody")
    time.sleep(600)

@pytest.fixture
def falls_over():
    yield
    raise OSError("teardown fell over")

@pytest.mark.gkd_stage("closes", timeout=60)
def test_closes(gkd, falls_over):
    gkd.fact("rows", 5)

@pytest.mark.gkd_stage("needy", needs=["fails"])
def test_needy(): pass
"""


@pytest.fixture(scope="module", params=["-n2", "-n0"])
def cases(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, ET.Element]:
    """The test cases of a JUnit file, by the name of their stage."""
    directory = tmp_path_factory.mktemp("junit")
    names = ["measures", "fails", "hangs", "closes", "needy"]
    if request.param != "-n0":  # in one process nothing outlives it
        names.append("dies")
    (directory / "test_probe.py").write_text(PROBES)
    stages = f"--gkd-stages={','.join(names)}"
    Run(directory, stages, "test_probe.py", request.param, "--junitxml=j.xml")
    found = list(ET.parse(directory / "j.xml").iter("testcase"))
    by_name = {str(case.get("name")).removeprefix("test_"): case for case in found}
    assert len(found) == len(by_name) == len(names)
    return by_name


def properties(case: ET.Element) -> dict[str, str]:
    pairs = [(p.get("name", ""), p.get("value", "")) for p in case.iter("property")]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def output(case: ET.Element) -> str:
    return "".join(element.text or "" for element in case.iter("system-out"))


def test_facts_are_properties_also_of_a_stage_that_passed(
    cases: dict[str, ET.Element],
) -> None:
    found = properties(cases["measures"])
    assert found["gkd_latency_ms"] == "12.5"
    assert found["gkd_outcome"] == "passed"
    assert found["mine"] == "kept"
    assert 990 < len(found["gkd_sizes"]) <= 1000  # cut between two words


def test_a_failed_stage_has_its_cause_and_the_end_of_its_output(
    cases: dict[str, ET.Element],
) -> None:
    found = properties(cases["fails"])
    assert found["gkd_cause"] == "env.disk-full"
    assert found["gkd_rows"] == "3"
    assert found["gkd_report"] == ".gkd/last/report.json"
    text = output(cases["fails"])
    assert "the last words" in text
    assert "rank 0 said this" in text
    assert len(text) < 70_000


def test_a_stage_whose_process_died_has_its_facts_and_its_output(
    cases: dict[str, ET.Element],
) -> None:
    if "dies" not in cases:
        pytest.skip("in one process nothing outlives it")
    assert properties(cases["dies"])["gkd_rows"] == "4"
    assert "then it died" in output(cases["dies"])
    assert "test_dies" in output(cases["dies"])


def test_a_stage_that_hung_says_in_what(cases: dict[str, ET.Element]) -> None:
    found = properties(cases["hangs"])
    assert found["gkd_outcome"] == "timeout"
    assert found["gkd_step"] == "waiting for nobody"


def test_a_teardown_that_fails_changes_the_outcome_and_keeps_the_facts(
    cases: dict[str, ET.Element],
) -> None:
    found = properties(cases["closes"])
    assert found["gkd_outcome"] == "failed"
    assert found["gkd_rows"] == "5"


def test_a_blocked_stage_names_its_need(cases: dict[str, ET.Element]) -> None:
    assert properties(cases["needy"])["gkd_blocked_by"] == "fails"
