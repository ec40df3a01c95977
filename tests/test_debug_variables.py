"""``gkd env --debug``: each variable is one that the installed release reads."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_gkd import variable_table
from pytest_gkd.job import debug_variables, environment
from pytest_gkd.job.debug_variables import read_name

ALL = {
    "torch": "2.15.0",
    "nvidia-nccl-cu13": "2.30.7",
    "vllm": "0.33.0",
    "ray": "2.60.0",
    "transformers": "5.19.0",
}


@pytest.fixture
def has(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    found = dict(ALL)
    monkeypatch.setattr(environment, "installed", lambda name: found.get(name, ""))
    return found


def _names(advice: debug_variables.Advice) -> list[str]:
    return [one.name for one in (*advice.cheap, *advice.costly)]


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest_gkd", "env", "--debug", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_name_of_the_table_was_found_in_some_release_of_its_library() -> None:
    for row in debug_variables.TABLE["variable"]:
        if row["library"] == "python":
            continue
        for name in row["names"]:
            libraries = {one.library for one in environment.readers(name)}
            assert row["library"] in libraries, name


def test_python_reads_what_is_said_of_it(tmp_path: Path) -> None:
    crash = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    done = subprocess.run(
        [sys.executable, "-c", crash],
        env={"PYTHONFAULTHANDLER": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Fatal Python error: Segmentation fault" in done.stderr


@pytest.mark.parametrize(
    ("release", "name"),
    [
        ("2.7.1", "TORCH_NCCL_TRACE_BUFFER_SIZE"),
        ("2.13.0", "TORCH_FR_BUFFER_SIZE"),
        ("2.16.0", "TORCH_FR_BUFFER_SIZE"),
    ],
)
def test_of_several_names_the_one_that_a_release_reads_is_taken(
    has: dict[str, str], release: str, name: str
) -> None:
    has["torch"] = release
    names = _names(debug_variables.advice())
    assert name in names
    assert len({"TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE"} & {*names}) == 1


def test_a_dump_on_timeout_has_another_name_since_2_15(has: dict[str, str]) -> None:
    assert "TORCH_FR_DUMP_ON_TIMEOUT" in _names(debug_variables.advice())
    has["torch"] = "2.13.0"
    assert "TORCH_NCCL_DUMP_ON_TIMEOUT" in _names(debug_variables.advice())


def test_of_torchcomms_is_told_only_where_it_is_installed(has: dict[str, str]) -> None:
    name = "TORCHCOMM_FR_BUFFER_SIZE"
    advice = debug_variables.advice()
    assert name not in _names(advice)
    assert "torchcomms" not in " ".join(advice.left_out)
    has["torchcomms"] = "0.4.0"
    assert name in _names(debug_variables.advice())


def test_what_a_library_has_dropped_is_not_advised() -> None:
    library = environment.recorded()["vllm"]
    newest = library["releases"][-1]
    name, (first, last, *_) = next(
        (name, entry) for name, entry in library["names"].items() if entry[1] != newest
    )
    assert read_name([name], "vllm", last) == name
    assert read_name([name], "vllm", newest) == ""
    assert read_name([name], "vllm", first) == name


def test_what_is_not_installed_is_left_out_and_said(has: dict[str, str]) -> None:
    del has["nvidia-nccl-cu13"], has["ray"]
    has["vllm"] = "0.6.0"
    advice = debug_variables.advice()
    assert not [name for name in _names(advice) if "NCCL" in name or "RAY" in name]
    assert "VLLM_LOGGING_LEVEL" not in _names(advice)
    told = " ".join(advice.left_out)
    assert "NCCL is not installed here" in told
    assert "ray is not installed here" in told
    assert "vllm 0.6.0 is older than the oldest release" in told


def test_nothing_that_is_advised_is_one_that_misleads(has: dict[str, str]) -> None:
    advice = debug_variables.advice()
    against = {said.partition("=")[0]: why for said, why in advice.not_advised}
    assert {"NCCL_TIMEOUT", "NCCL_IB_DISABLE", "NCCL_BACKEND"} <= against.keys()
    assert "no cure" in against["NCCL_IB_DISABLE"]
    assert all(against.values())
    rows = {row.name: row for row in variable_table.VARIABLES}
    for one in (*advice.cheap, *advice.costly):
        remarks = (
            rows[one.name].remarks(one.value, gpus=True) if one.name in rows else []
        )
        kinds = {remark.kind for remark in remarks if one in advice.cheap}
        assert not kinds & {"value", "misread"}, one
        assert one.cost


def test_the_lines_can_be_pasted_into_a_shell(
    has: dict[str, str], tmp_path: Path
) -> None:
    text = debug_variables.advice().text()
    done = subprocess.run(
        ["bash", "-euc", f"{text}\nenv"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    assert f"NCCL_DEBUG_FILE={tmp_path}/gkd-debug/nccl.%h.%p.log" in done.stdout
    assert "PYTHONFAULTHANDLER=1" in done.stdout
    assert "CUDA_LAUNCH_BLOCKING=1" not in done.stdout
    exported = re.findall(r"(?m)^export (\w+)=", text)
    assert len(exported) == len(set(exported)) == len(debug_variables.advice().cheap)


def test_the_command_prints_both_forms() -> None:
    told = json.loads(_run("--format=json").stdout)
    assert told["schema"] == 1
    names = [one["name"] for one in told["set"]]
    assert "PYTHONFAULTHANDLER" in names
    done = _run()
    assert done.returncode == 0
    assert "export PYTHONFAULTHANDLER=1" in done.stdout
    assert "# Not advised:" in done.stdout
    assert max(map(len, done.stdout.splitlines())) < 200
