"""A value's origin: who gave it, and where its relative paths lead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_plugin import RULE, Run

from pytest_gkd import fault_specs
from pytest_gkd.options import Settings
from pytest_gkd.stage_api import StageFault
from pytest_gkd.workload.layouts import layout
from pytest_gkd.workload.models import inputs

PROBE = """
import pytest

@pytest.mark.gkd_stage("probe", timeout=60)
def test_probe(gkd):
    for name in ("student", "teacher", "train_files", "origins"):
        gkd.fact(name, getattr(gkd.settings, name))
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A project with an ini file, a directory below to work in, and models beside."""
    place = tmp_path / "job"
    for folder in ("below", "checks", "models/student"):
        (place / folder).mkdir(parents=True)
    (place / "checks/probe.py").write_text(PROBE)
    (place / "rule.toml").write_text(RULE)
    (place / "train.jsonl").write_text('{"prompt": "x"}\n')
    (tmp_path / "elsewhere/student").mkdir(parents=True)
    return place


def ini(job: Path, *lines: str) -> None:
    text = "\n".join(["[pytest]", "gkd_stage_files = checks/probe.py", *lines])
    (job / "pytest.ini").write_text(text + "\n")


def run(place: Path, *args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *args]
    return subprocess.run(
        command,
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        env={**os.environ, **environ},
    )


def facts(report: Path) -> dict[str, Any]:
    (stage,) = json.loads((report / "report.json").read_text())["stages"]
    found: dict[str, Any] = stage["facts"]
    return found


def test_paths_in_the_ini_are_relative_to_it_wherever_pytest_is_started(
    job: Path,
) -> None:
    ini(
        job,
        "gkd_report = out",
        "gkd_rules = rule.toml",
        "gkd_train_files = train.jsonl",
        "gkd_student = models/student",
        "gkd_teacher = some/hub-id",
    )
    done = run(job / "below", "--gkd-stages=probe")
    assert done.returncode == 0, done.stdout
    found = facts(job / "out")
    assert found["train_files"] == [str(job / "train.jsonl")]
    assert found["student"] == str(job / "models/student")
    assert found["teacher"] == "some/hub-id"
    assert found["origins"]["student"] == f"gkd_student in {job / 'pytest.ini'}"


def test_paths_on_the_command_line_are_relative_to_the_working_directory(
    job: Path,
) -> None:
    ini(job)
    names = ("--gkd-train-files=../train.jsonl", "--gkd-student=../models/student")
    done = run(job / "below", "--gkd-stages=probe", *names, "--gkd-report=out")
    assert done.returncode == 0, done.stdout
    found = facts(job / "below/out")
    assert found["train_files"] == ["../train.jsonl"]
    assert found["student"] == "../models/student"
    assert found["origins"]["student"] == "--gkd-student"


@pytest.mark.parametrize("given", ["ini", "-o", "addopts", "PYTEST_ADDOPTS", "flag"])
def test_an_error_names_who_gave_the_value(job: Path, given: str) -> None:
    ini(
        job,
        "gkd_beta = 2" if given == "ini" else "",
        "addopts = --gkd-beta=2" if given == "addopts" else "",
    )
    args = {"-o": ["-o", "gkd_beta=2"], "flag": ["--gkd-beta=2"]}.get(given, [])
    environ = {"PYTEST_ADDOPTS": "--gkd-beta=2"} if given == "PYTEST_ADDOPTS" else {}
    done = run(job, "--gkd-stages=probe", *args, **environ)
    says = {
        "ini": "gkd_beta in pytest.ini",
        "-o": "-o gkd_beta",
        "addopts": "--gkd-beta in addopts of pytest.ini",
        "PYTEST_ADDOPTS": "--gkd-beta in PYTEST_ADDOPTS",
        "flag": "--gkd-beta",
    }[given]
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"ERROR: {says}: 2 is not a number between 0 and 1" in done.stdout


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("gkd_report = .", "gkd_report in pytest.ini: cannot write the report"),
        ("gkd_rules = absent.toml", "gkd_rules in pytest.ini: "),
        ("gkd_stage_files = absent.py", "gkd_stage_files in pytest.ini: file or dir"),
        ("gkd_timeout = prob=5", "gkd_timeout in pytest.ini: there is no stage 'prob'"),
        ("gkd_inject = no:such", "gkd_inject in pytest.ini: "),
        (
            "gkd_inject = weight_sync:dropped-update",
            "gkd_inject in pytest.ini: 'weight_sync:dropped-update' targets stage "
            "weight_sync, which is not selected (data, nccl)",
        ),
        ("gkd_world_size = 4096", "gkd_world_size in pytest.ini: 4096 ranks"),
        ("gkd_stages = prob", "gkd_stages in pytest.ini: there is no stage 'prob'"),
    ],
)
def test_an_error_of_the_ini_is_not_blamed_on_the_command_line(
    job: Path, line: str, says: str
) -> None:
    (job / "pytest.ini").write_text(f"[pytest]\n{line}\n")
    asked = () if "gkd_stages" in line else ("--gkd-stages=data,nccl",)
    done = run(job, *asked)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"ERROR: {says}" in done.stdout


@pytest.mark.parametrize(
    ("stage", "line", "says"),
    [
        ("data", "gkd_train_files = trian.jsonl", "trian.jsonl does not exist"),
        ("tokenizer", "gkd_student = ./models/none", "models/none does not exist"),
    ],
)
def test_a_stage_that_complains_names_the_ini(
    job: Path, stage: str, line: str, says: str
) -> None:
    (job / "pytest.ini").write_text(f"[pytest]\n{line}\n")
    done = run(job, f"--gkd-stages={stage}")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    told = " ".join(done.stdout.split())  # the terminal breaks lines
    assert f"{line.split()[0]} in pytest.ini: " in told
    assert says in told


@pytest.mark.parametrize("given", ["addopts", "PYTEST_ADDOPTS", "beside another"])
def test_a_budget_is_blamed_on_who_gave_it(job: Path, given: str) -> None:
    """Each entry of a list by itself: pytest joins what came from several places."""
    bad = "--gkd-timeout=prob=5"
    ini(job, "" if given == "PYTEST_ADDOPTS" else f"addopts = {bad}")
    args = ["--gkd-timeout=all=90"] if given == "beside another" else []
    environ = {"PYTEST_ADDOPTS": bad} if given == "PYTEST_ADDOPTS" else {}
    done = run(job, "--gkd-stages=probe", *args, **environ)
    says = "PYTEST_ADDOPTS" if environ else "addopts of pytest.ini"
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"ERROR: --gkd-timeout in {says}: there is no stage 'prob'" in done.stdout


def test_layout_and_ranks_of_the_ini_are_told_as_such(job: Path) -> None:
    ini(job, "gkd_layout = split", "gkd_world_size = 3")
    done = run(job, "--gkd-stages=probe")
    assert done.returncode == 0, done.stdout
    assert "layout split (gkd_layout in pytest.ini)" in done.stdout


def test_a_fault_that_needs_a_setting_is_its_origin(job: Path) -> None:
    needs = [f for f in fault_specs.load().values() if "layout" in f.settings]
    fault = next(one for one in needs if one.stage != "any")
    ini(job, f"gkd_inject = {fault.name}")
    done = run(job, f"--gkd-stages={fault.stage},probe", "-k", "probe")
    layout = fault.settings["layout"]
    assert f"layout {layout} (gkd_inject in pytest.ini)" in done.stdout


def test_a_layout_that_cannot_be_names_who_chose_it() -> None:
    named = {"tensor_parallel_size": "gkd_tensor_parallel_size in tox.ini"}
    why = "gkd_layout in tox.ini"
    settings = Settings(tensor_parallel_size=2, layout_why=why, origins=named)
    with pytest.raises(StageFault) as caught:
        layout.check_layout(settings)
    assert "2 (gkd_tensor_parallel_size in tox.ini) with" in caught.value.message
    assert "layout colocated (gkd_layout in tox.ini)" in caught.value.message


def test_what_was_made_from_settings_keeps_their_origins(tmp_path: Path) -> None:
    named = {"student": "gkd_student in tox.ini"}
    settings = Settings(student="s", teacher="t", train_files=("f",), origins=named)
    job = inputs.resolve(settings, tmp_path)
    assert job.origin("student") == "gkd_student in tox.ini"
    assert job.origin("teacher") == "--gkd-teacher"


# -- an option with a space ------------------------------------------------------------


@pytest.mark.parametrize("given", ["args", "PYTEST_ADDOPTS"])
@pytest.mark.parametrize("asks", [(), ("--gkd-stages=probe",)])
def test_a_space_that_loses_the_ini_is_said(
    job: Path, given: str, asks: tuple[str, ...]
) -> None:
    ini(job, "gkd_stages = probe")
    option = f"--gkd-student {job.parent}/elsewhere/student"
    args = option.split() if given == "args" else []
    environ = {} if given == "args" else {"PYTEST_ADDOPTS": option}
    done = run(job, *asks, *args, **environ)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"write --gkd-student={job.parent}/elsewhere/student" in done.stdout
    assert f"it read none instead of {job}/pytest.ini" in done.stdout


def test_a_space_that_finds_the_ini_of_a_model_is_said(job: Path) -> None:
    ini(job)
    theirs = job.parent / "elsewhere/student/pytest.ini"
    theirs.write_text("[pytest]\n")
    done = run(job, "--gkd-stages=probe", "--gkd-student", str(theirs.parent))
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"it read {theirs} instead of {job}/pytest.ini" in done.stdout


@pytest.mark.parametrize(
    "args",
    [
        ("--gkd-student", "models/student"),
        ("--gkd-student={}/elsewhere/student",),
        ("-c", "pytest.ini", "--gkd-student", "{}/elsewhere/student"),
        ("--gkd-full-budget", "checks/probe.py"),
        ("--gkd-student", "some/hub-id", "checks/probe.py"),
    ],
)
def test_what_loses_no_ini_is_let_through(job: Path, args: tuple[str, ...]) -> None:
    ini(job)
    named = [arg.format(job.parent) for arg in args]
    done = run(job, "--gkd-stages=probe", *named)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["gkd_stages", "gkd_report", "gkd_student"])
def test_a_list_in_the_place_of_a_text_is_named(tmp_path: Path, name: str) -> None:
    """pytest hands lists of TOML on as they are ([tool.pytest.ini_options])."""
    (tmp_path / "test_probe.py").write_text("def test_a(): pass\n")
    table = f'[tool.pytest.ini_options]\n{name} = ["data", "nccl"]\n'
    (tmp_path / "pyproject.toml").write_text(table)
    args = () if name == "gkd_stages" else ("--gkd-stages=data",)
    done = Run(tmp_path, "test_probe.py", *args)
    assert done.code == pytest.ExitCode.USAGE_ERROR
    wanted = f"""ERROR: {name} in pyproject.toml: ['data', 'nccl'] is a list*"""
    assert done.shows(wanted.replace("[", "[[]", 1))
    assert "Traceback" not in done.text
