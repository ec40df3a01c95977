"""make and the gate touch nothing that is not their own, and say what they lack."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
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
    before, _, _ = done.stdout.partition("asking PyTorch's own index")
    assert "No matching distribution found for torch==" in before
    assert "PIP_FIND_LINKS=DIR make stages" in done.stdout
    assert not (clone / ".venv/.ready").exists()


def test_a_python_that_is_not_there_is_left_out_loudly(
    clone: Path, tmp_path: Path
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "dirname"):
        (tools / name).symlink_to(str(shutil.which(name)))
    done = run(clone, ".ci/light", PATH=str(tools), HOME=str(tmp_path))
    assert done.returncode == 0
    assert "LEFT OUT: there is no Python 3.12" in done.stdout
    assert "LEFT OUT: there is no Python 3.13" in done.stdout


FLAKY = """
from pathlib import Path

def test_passes(): pass

def test_fails_once():
    tried = Path("tried")
    assert tried.exists() or tried.touch()
    assert not Path("beside").exists()

def test_fails_where_it_was_told_to():
    assert not Path("fail").exists()
"""
# What the gate calls, with nothing behind it; `make stages` leaves a process behind.
STAND_INS = """
clean check site layouts:
test:
	! grep -q beside .ci/light || until test -e beside; do sleep 0.05; done
	$(TRY) .venv/bin/pytest
matrix:
	$(TRY) .venv/bin/pytest matrix
stages:
	test ! -e leave || setsid -f sleep 300 >/dev/null 2>&1
"""


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A clone whose make does nothing and whose tests are a handful."""
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    for name in ("light", "shells"):
        (tmp_path / ".ci" / name).write_text("#!/bin/sh\n")
    (tmp_path / "Makefile").write_text(STAND_INS)
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = tests\n")
    for folder, text in (("tests", FLAKY), ("matrix", "def test_fault(): pass")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"test_{folder}.py").write_text(text)
    stand_in = tmp_path / ".venv/bin/pytest"
    stand_in.parent.mkdir(parents=True)
    # The stages, which come with an option of the plugin's, are not what is tried.
    stand_in.write_text(
        f'#!/bin/sh\ncase "$*" in *--gkd-stages*) ;; '
        f'*) exec {sys.executable} -m pytest "$@" ;; esac\n'
    )
    stand_in.chmod(0o755)
    return tmp_path


def test_the_gate_tells_of_a_test_that_failed_once_and_goes_on(gate: Path) -> None:
    done = run(gate, ".ci/run")
    assert done.returncode == 0, done.stdout
    told = done.stdout.rpartition("FAILED ONCE, PASSED ALONE:\n")[2]
    assert told == "PASSED tests/test_tests.py::test_fails_once (.venv/bin/pytest)\n"


def test_the_gate_stops_at_a_test_that_fails_again(gate: Path) -> None:
    (gate / "fail").touch()
    done = run(gate, ".ci/run")
    assert done.returncode == 2
    assert "make stages" not in done.stdout
    assert "PASSED ALONE" not in done.stdout


def test_the_gate_stops_at_tests_that_cannot_be_read(gate: Path) -> None:
    (gate / "tests/test_broken.py").write_text("import no_such_module")
    (gate / "tried").touch()
    assert run(gate, ".ci/run").returncode != 0


# As the tests on another Python: at work until well after the others have failed.
BESIDE = """#!/bin/sh
exec .ci/tests sh -c 'touch beside; until test -e tried; do sleep 0.05; done
sleep 2; rm beside'
"""


def test_what_failed_is_tried_again_when_nothing_else_is_tested(gate: Path) -> None:
    (gate / ".ci/light").write_text(BESIDE)
    done = run(gate, ".ci/run")
    assert done.returncode == 0, done.stdout
    assert "PASSED tests/test_tests.py::test_fails_once" in done.stdout


def test_the_gate_shows_what_ran_beside_it_and_fails_where_that_does(
    gate: Path,
) -> None:
    (gate / ".ci/light").write_text("#!/bin/sh\necho 'no good on 3.13'; exit 3\n")
    done = run(gate, ".ci/run")
    assert done.returncode == 1
    assert "no good on 3.13\n" in done.stdout
    assert "make stages" not in done.stdout


def test_a_gate_that_stops_early_ends_what_runs_beside_it(gate: Path) -> None:
    (gate / ".ci/light").write_text("#!/bin/sh\necho $$ >beside; sleep 300\n")
    (gate / "fail").touch()
    assert run(gate, ".ci/run").returncode == 2
    assert not psutil.pid_exists(int((gate / "beside").read_text()))


def test_the_gate_finds_what_it_left_running_itself(gate: Path) -> None:
    others = subprocess.Popen(["sleep", "300"])  # as another run's may be
    (gate / "leave").touch()
    done = run(gate, ".ci/run")
    others.kill()
    others.wait()
    left = done.stdout.partition("left running:\n")[2].split()
    assert done.returncode == 1
    assert left[1:] == ["sleep", "300"]
    assert int(left[0]) != others.pid
    os.kill(int(left[0]), signal.SIGKILL)
