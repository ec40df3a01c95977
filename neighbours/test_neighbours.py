"""Stages beside the plugins that other projects have: ``make neighbours``.

Each is run with its switch thrown, from the wheel, on the oldest pytest that is
supported and on the newest. The environments are made in ``.neighbours/``, without
torch: the stages are made up.
"""

from __future__ import annotations

import os
import subprocess
import venv
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.test_plugin import Run

ROOT = Path(__file__).parent.parent
PLUGINS = ROOT / "requirements/neighbours.txt"
STAGES = """
import ctypes, time
import pytest

@pytest.mark.gkd_stage("works", lane="a", timeout=30)
def test_works(gkd):
    gkd.step("working")
    gkd.fact("summary", "fine")

@pytest.mark.gkd_stage("full", lane="b", timeout=30)
def test_full():
    raise OSError(28, "No space left on device")

@pytest.mark.gkd_stage("stuck", lane="b", timeout=2)
def test_stuck():
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)

@pytest.mark.gkd_stage("last", lane="b", needs=["works"], timeout=30)
def test_last():
    pass
"""
# What pytest calls each plugin, and the arguments that make it do its work.
NEIGHBOURS = {
    "none": ("-W", "error", "--strict-markers", "--strict-config"),
    "allure": ("-p", "allure_pytest", "--alluredir=allure"),
    "anyio": ("-p", "anyio"),
    "asyncio": ("-p", "asyncio", "--asyncio-mode=auto"),
    "benchmark": ("-p", "benchmark"),
    "check": ("-p", "check"),
    "clarity": ("-p", "clarity", "-vv"),
    "cov": ("-p", "pytest_cov", "--cov=.", "--cov-report=term"),
    "env": ("-p", "env"),
    "fail-slow": ("-p", "fail-slow", "--fail-slow=100s"),
    "flaky": ("-p", "flaky", "--force-flaky", "--max-runs=2"),
    "forked": ("-p", "pytest_forked", "--forked"),
    "freezer": ("-p", "freezer"),
    "html": ("-p", "metadata", "-p", "html", "--html=page.html"),
    "hypothesis": ("-p", "hypothesispytest"),
    "instafail": ("-p", "instafail", "--instafail"),
    "isolate": ("-p", "pytest_isolate", "--isolate"),
    "json-report": ("-p", "metadata", "-p", "pytest_jsonreport", "--json-report"),
    "memray": ("-p", "memray", "--memray"),
    "mock": ("-p", "pytest_mock"),
    "order": ("-p", "pytest_order"),
    "pretty": ("-p", "pretty"),
    "random-order": ("-p", "random_order", "--random-order"),
    "randomly": ("-p", "randomly"),
    "repeat": ("-p", "pytest_repeat", "--count=1"),
    "reportlog": ("-p", "pytest_reportlog", "--report-log=log.jsonl"),
    "rerunfailures": ("-p", "rerunfailures", "--reruns=2"),
    "retry": ("-p", "pytest-retry", "--retries=2"),
    "rich": ("-p", "rich", "--rich"),
    "socket": ("-p", "socket", "--disable-socket", "--allow-unix-socket"),
    "split": ("-p", "pytest-split", "--splits=1", "--group=1"),
    "sugar": ("-p", "sugar", "--force-sugar"),
    "testmon": ("-p", "cacheprovider", "-p", "pytest-testmon", "--testmon"),
}


@pytest.fixture(scope="session", params=["pytest==8.4.*", "pytest"])
def python(request: pytest.FixtureRequest) -> str:
    """The Python of an environment with this pytest, the wheel and the neighbours."""
    home = ROOT / ".neighbours" / request.param.strip("=.*")
    executable = home / "bin/python"
    if not executable.exists():
        venv.create(home, with_pip=True)
    install = [str(executable), "-m", "pip", "install", "-q"]
    subprocess.run([*install, request.param, "-r", str(PLUGINS), str(ROOT)], check=True)
    again = ("--force-reinstall", "--no-deps", str(ROOT))
    subprocess.run([*install, *again], check=True)
    return str(executable)


@pytest.fixture
def environment() -> dict[str, str]:
    """This process's, without what would lead to another pytest or this clone."""
    return {
        k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "PYTHON"))
    }


@pytest.mark.parametrize("neighbour", NEIGHBOURS)
def test_stages_are_judged_beside(
    neighbour: str, python: str, environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "test_probe.py").write_text(STAGES)
    run = Run(
        tmp_path,
        *("-p", "gkd", "-p", "xdist", "-p", "timeout", *NEIGHBOURS[neighbour]),
        *("--gkd-stages=works,full,stuck,last", "--junitxml=j.xml", "test_probe.py"),
        python=python,
        env=environment | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    judged(run, tmp_path)
    if neighbour == "cov":
        assert run.shows("test_probe.py *%")
    if neighbour == "html":
        assert "stage full failed" in (tmp_path / "page.html").read_text()


def test_stages_are_judged_beside_all_that_are_installed(
    python: str, environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "test_probe.py").write_text(STAGES)
    names = "--gkd-stages=works,full,stuck,last"
    run = Run(
        *(tmp_path, names, "--cov=.", "--reruns=1", "--junitxml=j.xml"),
        "test_probe.py",
        python=python,
        env=environment,
    )
    judged(run, tmp_path)


def judged(run: Run, directory: Path) -> None:
    assert run.report, run.text
    assert run.outcomes() == {
        "works": "passed",
        "full": "failed",
        "stuck": "timeout",
        "last": "passed",
    }, run.text
    assert run.code == pytest.ExitCode.TESTS_FAILED, run.text
    assert run.stage("full")["diagnosis"]["cause"] == "env.disk-full"
    assert "stage full failed after" in run.text
    assert "stage stuck was ended" in run.text
    cases = {case.get("name"): case for case in ET.parse(directory / "j.xml").iter()}
    for name in ("full", "stuck"):
        failure = cases[f"test_{name}"].find("failure")
        assert failure is not None
        assert f"stage {name} " in str(failure.text)
