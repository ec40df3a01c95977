"""make and the gate touch nothing that is not their own, and say what they lack."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
if not (ROOT / "Makefile").exists():
    pytest.skip("this is no clone", allow_module_level=True)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml", ".ci", "requirements"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    return tmp_path


def run(clone: Path, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=clone,
        env=os.environ | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize("target", ["clean", "stages", "test"])
def test_an_environment_of_the_users_own_is_left_alone(
    clone: Path, target: str
) -> None:
    own = clone / ".venv/own"
    own.parent.mkdir()
    own.touch()
    done = run(clone, "make", target, f"PYTHON={sys.executable}")
    assert done.returncode != 0
    assert ".venv is there and was not made by make" in done.stdout
    assert list(own.parent.iterdir()) == [own]


def test_clean_removes_what_make_made_and_no_report(clone: Path) -> None:
    for name in (".venv/.made-by-make", ".gkd/last/report.json"):
        (clone / name).parent.mkdir(parents=True)
        (clone / name).touch()
    assert run(clone, "make", "clean").returncode == 0
    assert not (clone / ".venv").exists()
    assert (clone / ".gkd/last/report.json").exists()


@pytest.mark.parametrize("script", ["run", "light"])
@pytest.mark.parametrize("argument", ["--help", "tests"])
def test_the_gate_takes_no_argument_and_then_does_nothing(
    clone: Path, script: str, argument: str
) -> None:
    made = clone / ".venv/.made-by-make"
    made.parent.mkdir()
    made.touch()
    done = run(clone, f".ci/{script}", argument)
    assert done.returncode == 2
    assert f"usage: .ci/{script}" in done.stdout
    assert made.exists()


def test_without_torchs_wheel_pytorchs_own_index_is_asked_and_then_help_is_given(
    clone: Path,
) -> None:
    nowhere = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    done = run(clone, "make", "stages", f"PYTHON={sys.executable}", **nowhere)
    assert done.returncode != 0
    assert "asking PyTorch's own index" in done.stdout
    assert "PIP_FIND_LINKS=DIR make stages" in done.stdout
    assert not (clone / ".venv/.ready").exists()
