"""Files of gkd gpu-report: what they may hold, and what page and header say of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fresh_python
import gpu_files
import pytest
import recorded
from gpu_files import H100

from pytest_gkd.diagnosis import catalogue
from pytest_gkd.gpu_report import result_files, result_page
from pytest_gkd.gpu_report.result_files import UNVERIFIED, Result, ResultError

ROOT = Path(__file__).parent.parent
CHECKS = {check.title: check for check in result_page.checks()}
Change = Callable[[dict[str, Any]], Any]


# -- what a file may hold ----------------------------------------------------------


def test_what_a_run_found_is_kept_and_nothing_beside_it() -> None:
    found = gpu_files.everything()
    assert result_files.scrubbed(found) == found


def test_no_name_path_pid_uuid_or_variable_gets_into_a_file() -> None:
    found = gpu_files.everything()
    found["host"] = "node17"
    found["gpus"][0]["uuid"] = "GPU-5aa6a5c8-d2b0"
    found["versions"]["secret-package"] = "1.0"
    found["versions"]["vllm"] = "/home/me/vllm"
    found["driver"] = "\x1b]0;owned\x07"
    found["links"]["node17"] = 1
    found["not_run"] = {"fault a:b": "see /home/me"}
    first = found["runs"][0]
    first |= {"name": "/home/me/run", "environ": {"USER": "me"}, "seconds": "1 s"}
    first["used_before_mib"] = [True, float("nan")]
    first["stages"][0] |= {
        "message": "pid 4711 on node17",
        "cause": "/home/me",
        "facts": {"transport": "node17:/x", "train_files": ["/home/me/train.jsonl"]},
    }
    first["stages"][4]["facts"]["bus_bandwidth_gb_s"] = {"node17": 1.0, "1 MiB": 2.0}
    kept = result_files.scrubbed(found)
    text = json.dumps(kept)
    for word in ("node17", "/", "4711", "GPU-", "secret", "owned", "USER", "NaN"):
        assert word not in text
    assert kept["runs"][0]["stages"][4]["facts"]["bus_bandwidth_gb_s"] == {"1 MiB": 2}
    assert kept["runs"][1] == gpu_files.everything()["runs"][1]


def test_what_was_scrubbed_can_be_read_again(tmp_path: Path) -> None:
    raw = gpu_files.everything()
    del raw["cuda"]
    raw["runs"][0]["stages"][0]["facts"]["driver"] = None
    path = tmp_path / "a.json"
    path.write_text(json.dumps(result_files.scrubbed(raw)))
    (result,) = result_files.load(tmp_path)
    assert result.data["cuda"] is None
    assert result_page.page([result])


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda f: f.update(host="node17"), "host"),
        (lambda f: f.pop("runs"), "runs (missing)"),
        (lambda f: f["runs"][0].pop("pass"), "runs[0].pass (missing)"),
        (lambda f: f["runs"][1].update(seconds="soon"), "runs[1].seconds"),
        (lambda f: f["gpus"][0].update(name="a/b"), "gpus[0].name"),
        (lambda f: f.update(links=[]), "links"),
        (lambda f: f.update(versions=None), "versions"),
        (lambda f: f["runs"][0].update(stages=None), "runs[0].stages"),
        (lambda f: f.update(schema=2), "schema 1"),
    ],
)
def test_a_file_that_the_command_would_not_write_is_refused(
    tmp_path: Path, change: Change, place: str
) -> None:
    path = gpu_files.write(tmp_path, change)
    with pytest.raises(ResultError) as raised:
        result_files.load(tmp_path)
    assert str(path) in str(raised.value)
    assert place in str(raised.value)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"schema": 1'])
def test_what_is_no_report_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ResultError, match=r"x\.json: "):
        result_files.load(tmp_path)


def test_the_name_of_a_file_says_what_it_is_of() -> None:
    name = result_files.file_name(gpu_files.everything())
    assert name == "nvidia-h100-80gb-hbm3-0.33.0-2.13.0+cu130"


def test_every_cause_has_a_place_in_a_file() -> None:
    causes = catalogue.load()
    assert [one for one in causes if not result_files.CAUSE.fullmatch(one)] == []


# -- the page ------------------------------------------------------------------------


def cell(title: str, change: Change | None = None) -> str:
    found = gpu_files.everything()
    if change:
        change(found)
    return CHECKS[title].cell([Result("h100.json", found)])


MACHINE = f"2 x {H100}, vLLM 0.33.0, torch 2.13.0+cu130"


@pytest.mark.parametrize("title", CHECKS)
def test_every_claim_rests_on_a_file(title: str) -> None:
    assert CHECKS[title].cell([]) == result_page.NOT_RUN
    assert cell(title) == MACHINE


def test_of_several_files_of_one_machine_the_last_counts(tmp_path: Path) -> None:
    title = "weight_sync and training_step: ray"
    good, bad, silent = (gpu_files.everything() for _ in range(3))
    for run in bad["runs"]:
        for stage in run["stages"]:
            stage["outcome"] = "failed"
    silent["runs"] = []
    for name, found in (
        ("h100.json", good),
        ("h100-2.json", bad),
        ("h100-10.json", good),
        ("h100-11.json", silent),
    ):
        (tmp_path / name).write_text(json.dumps(found))
    results = result_files.load(tmp_path)
    assert CHECKS[title].cell(results) == MACHINE
    assert CHECKS[title].cell(results[:2]) == f"FAILED on {MACHINE}"


def test_a_fault_that_needs_two_gpus_says_nothing_on_one() -> None:
    title = "fault environment:shm-of-a-container"

    def on_one(found: dict[str, Any]) -> None:
        for run in found["runs"]:
            run["gpus"] = 1

    assert cell(title, on_one) == result_page.NOT_RUN


@pytest.mark.parametrize("title", CHECKS)
def test_runs_on_a_cpu_show_nothing_of_a_gpu(title: str) -> None:
    def on_cpu(found: dict[str, Any]) -> None:
        for run in found["runs"]:
            run |= {"gpus": 0, "used_before_mib": [], "used_after_mib": []}

    assert cell(title, on_cpu) == result_page.NOT_RUN


def test_a_stage_that_failed_is_told_though_another_never_began() -> None:
    def fail(found: dict[str, Any]) -> None:
        for run in found["runs"]:
            for stage in run["stages"] if run["layout"] == "ray" else ():
                failed = stage["name"] == "weight_sync"
                stage["outcome"] = "failed" if failed else "blocked"

    title = "weight_sync and training_step: ray"
    assert cell(title, fail) == f"FAILED on {MACHINE}"


@pytest.mark.parametrize("title", CHECKS)
def test_what_failed_is_not_told_as_seen(title: str) -> None:
    def fail(found: dict[str, Any]) -> None:
        for run in found["runs"]:
            run["used_after_mib"] = [500, 4]
            for stage in run["stages"]:
                stage |= {"outcome": "failed", "cause": "cuda.oom"}
                stage["flight_recorder"] = False

    assert cell(title, fail) == f"FAILED on {MACHINE}"


@pytest.mark.parametrize(
    ("title", "change"),
    [
        (
            "nccl: backend NCCL, values and bus bandwidth",
            lambda f: f.update(runs=[gpu_files.whole("split", "cold", "cuda-ipc")]),
        ),
        (
            "weight_sync: split on one GPU (CUDA IPC)",
            lambda f: f.update(runs=[gpu_files.whole("split", "cold", "gloo")]),
        ),
        (
            "weight_sync: split on two or more GPUs (NCCL)",
            lambda f: f.update(runs=[gpu_files.whole("ray", "cold", "nccl")]),
        ),
        (
            "training_step in bfloat16, both losses",
            lambda f: f.update(runs=f["runs"][:6]),
        ),
        (
            "weight_sync: colocated (loading in place)",
            lambda f: (
                f["runs"][0].update(fault="vllm:gpu-memory-taken")
                or f.update(runs=f["runs"][:1])
            ),
        ),
    ],
)
def test_what_shows_something_else_does_not_count(title: str, change: Change) -> None:
    assert cell(title, change) == result_page.NOT_RUN


def test_one_failure_among_passes_is_told() -> None:
    def fail(found: dict[str, Any]) -> None:
        found["runs"][3]["stages"][3]["outcome"] = "timeout"

    title = next(title for title in CHECKS if title.startswith("vllm: "))
    assert cell(title, fail).startswith("FAILED on")


def test_the_page_tells_what_each_file_found() -> None:
    found = gpu_files.everything()
    found["not_run"] = {"fault nccl:one-gpu": "needs 2 GPUs"}
    page = result_page.page([Result("h100.json", found)])
    assert f"## {MACHINE}" in page
    assert (
        "| split, cold | as expected | 60 | 90 | 72.5 | 0.01 | 1000 | 300 | given back "
        "|" in page
    )
    assert "best bus bandwidth of nccl-tests' all_reduce_perf: 310.5 GB/s" in page
    assert "| fault nccl:one-gpu | not run: needs 2 GPUs |" in page


def test_the_files_here_can_be_read_and_the_readme_says_as_much() -> None:
    """docs/gpu-results.md is compared with what is made of them in test_pages."""
    results = result_files.load(ROOT / result_files.DIRECTORY)
    whole = any(any(result_files.whole_passes(one)) for one in results)
    readme = " ".join((ROOT / "README.md").read_text("utf-8").split())
    assert ("GPU paths have not been run yet" in readme) == (not results)
    partly = "Only part of the GPU paths has been run" in readme
    assert partly == (bool(results) and not whole)
    one_gpu = all(run["gpus"] < 2 for result in results for run in result.runs)
    assert ("nothing has been run on two GPUs" in readme) == (whole and one_gpu)


# -- the header ------------------------------------------------------------------------


def test_a_gpu_is_known_by_its_product(tmp_path: Path) -> None:
    gpu_files.write(tmp_path)
    assert result_files.unverified([H100, H100], tmp_path) == ()
    (line,) = result_files.unverified(["Tesla T4", H100], tmp_path)
    assert line.startswith(f"{UNVERIFIED} (Tesla T4)")


@pytest.mark.parametrize(
    "change",
    [
        lambda f: f.update(runs=[]),
        lambda f: [run["stages"].pop(3) for run in f["runs"]],
        lambda f: [run["stages"][0].update(outcome="failed") for run in f["runs"]],
        lambda f: [run.update(gpus=0) for run in f["runs"]],
    ],
)
def test_a_file_without_a_whole_pass_verifies_nothing(
    tmp_path: Path, change: Change
) -> None:
    def shortened(found: dict[str, Any]) -> None:
        found["runs"] = found["runs"][:6]
        change(found)

    gpu_files.write(tmp_path, shortened)
    assert result_files.unverified([H100], tmp_path)


def test_a_damaged_file_is_told_and_costs_no_run(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{")
    (line,) = result_files.unverified([H100], tmp_path)
    assert line.startswith(UNVERIFIED)
    assert "x.json" in line


CUDA_BUILDS = "from pytest_gkd.processes import gpus\ngpus.without_cuda = lambda: ''\n"


@recorded.needs_compiler
def test_the_header_tells_of_a_gpu_that_no_file_shows(tmp_path: Path) -> None:
    driver = recorded.environment(recorded.ONE_H100, tmp_path / "driver")
    (tmp_path / "cuda_builds.py").write_text(CUDA_BUILDS)
    (tmp_path / "train.jsonl").write_text('{"prompt": "What is salt?"}\n')
    asked = ["--gkd-stages=data", "--gkd-train-files=missing.jsonl"]
    done = fresh_python.run(
        "-m", "pytest", "-p", "cuda_builds", *asked, cwd=tmp_path, environ=driver
    )
    assert "device 1 GPU(s)" in done.stdout, done.stdout
    assert f"gkd: {UNVERIFIED} ({H100})" in done.stdout
    assert "data.file-missing" in done.stdout
