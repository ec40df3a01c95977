"""A file of the user's that is imported in the place of an installed package."""

from __future__ import annotations

import site
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from test_plugin import Run

from pytest_gkd.diagnosis import shadowed_imports
from pytest_gkd.stage_api import Note, StageFault
from pytest_gkd.workload.environment.probe_judge import judge_shadows

LIBRARY = sysconfig.get_path("stdlib")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site-packages of its own, with datasets and vllm in it."""
    place = tmp_path / "site-packages"
    for name in ("datasets", "vllm"):
        (place / name).mkdir(parents=True)
        (place / name / "__init__.py").write_text("real = True\n")
    where = dict.fromkeys(("purelib", "platlib"), str(place))
    monkeypatch.setattr(sysconfig, "get_path", {**sysconfig.get_paths(), **where}.get)
    monkeypatch.setattr(site, "getsitepackages", list)
    return place


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "job").mkdir()
    return tmp_path / "job"


def found(*path: Path | str) -> dict[str, Path]:
    return {
        s.name: s.file for s in shadowed_imports.find([str(entry) for entry in path])
    }


def imported(name: str, *path: Path) -> str:
    """What Python itself makes of it."""
    code = (
        f"import sys; sys.path[:] = {[str(entry) for entry in path]!r} + sys.path; "
        f"import {name}; print({name}.__file__)"
    )
    command = [sys.executable, "-P", "-S", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_module_before_the_package_hides_it(packages: Path, mine: Path) -> None:
    (mine / "datasets.py").write_text("")
    assert found(mine, LIBRARY, packages) == {"datasets": mine / "datasets.py"}
    assert imported("datasets", mine, packages) == str(mine / "datasets.py")


def test_a_directory_without_init_hides_nothing(packages: Path, mine: Path) -> None:
    (mine / "datasets").mkdir()
    (mine / "datasets" / "train.jsonl").write_text("{}")
    assert found(mine, LIBRARY, packages) == {}
    assert imported("datasets", mine, packages).startswith(str(packages))


def test_what_stands_behind_the_package_hides_nothing(
    packages: Path, mine: Path
) -> None:
    (mine / "datasets.py").write_text("")
    assert found(LIBRARY, packages, mine) == {}


def test_what_is_not_installed_is_not_hidden(packages: Path, mine: Path) -> None:
    (mine / "deepspeed.py").write_text("")
    (mine / "utils.py").write_text("")
    assert found(mine, LIBRARY, packages) == {}


def test_a_module_of_pythons_own_is_hidden_by_what_stands_before_it(
    packages: Path, mine: Path
) -> None:
    (mine / "colorsys.py").write_text("")
    (mine / "test").mkdir()
    (mine / "test" / "__init__.py").write_text("")  # as many a project has
    assert found(mine, LIBRARY, packages) == {"colorsys": mine / "colorsys.py"}
    assert imported("colorsys", mine) == str(mine / "colorsys.py")
    assert found(LIBRARY, mine, packages) == {}


def test_a_checkout_that_works_is_a_note_and_a_lone_file_a_fault(
    packages: Path, mine: Path
) -> None:
    (mine / "vllm").mkdir()
    (mine / "vllm" / "__init__.py").write_text("")
    (mine / "datasets.py").write_text("")
    (mine / "colorsys.py").write_text("")
    hidden = shadowed_imports.find([str(mine), LIBRARY, str(packages)])
    kinds = {s.name: type(j) for s, j in zip(
        hidden, judge_shadows(hidden), strict=True
    )}  # fmt: skip
    assert kinds == {"datasets": StageFault, "vllm": Note, "colorsys": Note}


STAGES = """
import pytest

@pytest.mark.gkd_stage("loads", timeout=60)
def test_loads():
    from datasets import load_dataset

@pytest.mark.gkd_stage("computes", timeout=60)
def test_computes():
    import numpy
    numpy.zeros(3)

@pytest.mark.gkd_stage("other", timeout=60)
def test_other():
    import not_there_at_all
"""


@pytest.mark.parametrize("workers", ["-n1", "-n0"])
def test_a_stage_that_meets_one_says_so(tmp_path: Path, workers: str) -> None:
    pytest.importorskip("numpy")
    pytest.importorskip("datasets")
    (tmp_path / "test_probe.py").write_text(STAGES)
    (tmp_path / "datasets.py").write_text("rows = []\n")
    (tmp_path / "numpy.py").write_text("")
    names = "--gkd-stages=loads,computes,other"
    run = Run(tmp_path, names, "test_probe.py", workers)
    for name, file in (("loads", "datasets.py"), ("computes", "numpy.py")):
        diagnosis = run.stage(name)["diagnosis"]
        assert diagnosis["cause"] == "env.module-shadowed"
        assert f"{tmp_path / file} hides" in str(diagnosis["evidence"])
    assert run.stage("other")["diagnosis"]["cause"] == "env.package-missing"
    assert run.code == pytest.ExitCode.TESTS_FAILED


@pytest.mark.parametrize("name", ["inspect", "json", "socket", "types", "selectors"])
def test_the_run_does_not_trip_over_a_module_in_its_directory(
    tmp_path: Path, name: str
) -> None:
    """By the script ``pytest``, for which the directory is not on ``sys.path``."""
    (tmp_path / "test_probe.py").write_text(
        "import pytest\n\n@pytest.mark.gkd_stage('one')\ndef test_one(): pass"
    )
    (tmp_path / f"{name}.py").write_text("raise RuntimeError('the wrong one')\n")
    script = Path(sys.executable).with_name("pytest")
    names = ["--gkd-stages=one", "--import-mode=importlib", "-pno:cacheprovider"]
    done = subprocess.run(
        [script, *names, "test_probe.py"], cwd=tmp_path, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == pytest.ExitCode.OK, done.stdout + done.stderr
