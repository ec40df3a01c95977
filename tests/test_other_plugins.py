"""Stages beside other plugins, and beside pytest's own switches."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from test_plugin import Run

THREE = """
import pytest

@pytest.mark.gkd_stage("works", lane="a", timeout=30)
def test_works():
    pass

@pytest.mark.gkd_stage("full", lane="b", timeout=30)
def test_full():
    raise OSError(28, "No space left on device")

@pytest.mark.gkd_stage("last", lane="b", needs=["works"], timeout=30)
def test_last():
    pass
"""
STAGES = "--gkd-stages=works,full,last"
VERDICTS = {"works": "passed", "full": "failed", "last": "passed"}


def three(directory: Path, *args: str) -> Run:
    (directory / "test_probe.py").write_text(THREE)
    return Run(directory, STAGES, *args, "test_probe.py")


def test_coverage_is_measured_in_the_workers(tmp_path: Path) -> None:
    run = three(tmp_path, "--cov=.", "--cov-report=term")
    assert run.outcomes() == VERDICTS
    assert run.shows("test_probe.py *100%")
    assert run.code == pytest.ExitCode.TESTS_FAILED


@pytest.mark.needs("datasets")
def test_coverage_of_a_real_stage(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --cov=.\n")
    run = Run(tmp_path, "--gkd-stages=data")
    assert run.outcomes() == {"data": "passed"}
    assert run.code == 0


def test_warnings_that_are_errors_find_none_of_ours(tmp_path: Path) -> None:
    (tmp_path / "test_probe.py").write_text(THREE)
    args = ("-W", "error", "--strict-markers", "--strict-config", "test_probe.py")
    run = Run(tmp_path, "--gkd-stages=works,last", *args)
    assert run.outcomes() == {"works": "passed", "last": "passed"}
    assert run.code == 0
    assert "ResourceWarning" not in run.text


# What pytest-rerunfailures does, and pytest-forked in the same hook: the test is run
# by them, and the first report is none of the three that pytest knows.
RUNS_AGAIN = """
import pytest
from _pytest.runner import runtestprotocol

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    for attempt in range(2):
        for report in runtestprotocol(item, nextitem=nextitem, log=False):
            if report.failed and attempt == 0:
                report.outcome = "rerun"
            item.ihook.pytest_runtest_logreport(report=report)
    return True
"""


def test_a_stage_is_judged_once_whoever_runs_tests_again(tmp_path: Path) -> None:
    (tmp_path / "again.py").write_text(RUNS_AGAIN)
    run = three(tmp_path, "-p", "again", "--junitxml=j.xml")
    assert run.outcomes() == VERDICTS
    assert run.stage("full")["diagnosis"]["cause"] == "env.disk-full"
    assert run.shows("*1 failed, 2 passed in *")
    cases = {case.get("name"): case for case in ET.parse(tmp_path / "j.xml").iter()}
    failure = cases["test_full"].find("failure")
    assert failure is not None
    assert "stage full failed" in str(failure.text)


@pytest.mark.parametrize("workers", [(), ("-n0",)])
def test_x_names_the_stages_that_were_not_reached(
    tmp_path: Path, workers: tuple[str, ...]
) -> None:
    (tmp_path / "test_probe.py").write_text("""
import pytest

@pytest.mark.gkd_stage("first")
def test_first(): assert False

@pytest.mark.gkd_stage("second")
def test_second(): pass

@pytest.mark.gkd_stage("third")
def test_third(): pass
""")
    names = "--gkd-stages=first,second,third"
    run = Run(tmp_path, names, "-x", "-q", *workers, "test_probe.py")
    assert run.shows("gkd: not reached: second, third")
    assert run.stage("third")["message"] == "not reached"


@pytest.mark.parametrize("workers", [(), ("-n0",)])
def test_a_stage_that_was_deselected_is_known_all_the_same(
    tmp_path: Path, workers: tuple[str, ...]
) -> None:
    run = three(tmp_path, "--deselect=test_probe.py::test_works", *workers)
    assert run.outcomes() == {"full": "failed", "last": "passed"}
    told = "gkd: not run, as an option or a plugin deselected it: works"
    assert run.text.count(told) == 1


@pytest.mark.parametrize("workers", [(), ("-n0",)])
def test_a_run_of_which_nothing_is_left_says_so(
    tmp_path: Path, workers: tuple[str, ...]
) -> None:
    """As pytest-testmon does, for which a stage is done when no file has changed."""
    hook = "def pytest_collection_modifyitems(items): items.clear()"
    (tmp_path / "conftest.py").write_text(hook)
    run = three(tmp_path, *workers)
    assert run.shows("gkd: not run, as an option or a plugin deselected it: works, *")
    assert run.outcomes() == {}


def test_what_k_leaves_out_is_not_spoken_of(tmp_path: Path) -> None:
    run = three(tmp_path, "-k", "last")
    assert run.outcomes() == {"last": "passed"}
    assert "deselected it" not in run.text


@pytest.mark.parametrize("again", ["--lf", "--ff", "--nf", "--sw"])
def test_the_next_run_may_start_with_what_failed(tmp_path: Path, again: str) -> None:
    more = THREE.replace('"works"', '"other"').replace('"full"', '"thin"')
    (tmp_path / "test_more.py").write_text(more.replace('"last"', '"late"'))
    cache = ("-p", "cacheprovider", STAGES + ",other", "test_more.py")
    three(tmp_path, *cache)
    run = three(tmp_path, again, *cache)
    assert run.outcomes()["full"] == "failed"
    assert "there is no" not in run.text


@pytest.mark.parametrize(
    "plugin", ["terminal", "timeout", "xdist", "junitxml", "logging", "faulthandler"]
)
def test_stages_do_without_a_plugin_that_is_switched_off(
    tmp_path: Path, plugin: str
) -> None:
    run = three(tmp_path, "-p", f"no:{plugin}")
    assert run.outcomes() == VERDICTS
    assert run.code == pytest.ExitCode.TESTS_FAILED


@pytest.mark.parametrize(
    "args",
    [
        ("-n", "auto"),
        ("--dist=loadfile",),
        ("--dist=each", "--tx=2*popen"),
        ("-p", "xdist.looponfail"),
    ],
)
def test_how_others_spread_tests_leaves_the_lanes_alone(
    tmp_path: Path, args: tuple[str, ...]
) -> None:
    assert three(tmp_path, *args).outcomes() == VERDICTS


def test_a_name_that_no_stage_has_is_an_error_in_one_process_too(
    tmp_path: Path,
) -> None:
    (tmp_path / "test_probe.py").write_text(THREE)
    run = Run(tmp_path, "--gkd-stages=works,lst", "-n0", "test_probe.py")
    assert run.code == pytest.ExitCode.USAGE_ERROR
    assert "there is no stage 'lst'; did you mean 'last'?" in run.text
