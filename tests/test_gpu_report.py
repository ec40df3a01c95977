"""gkd gpu-report: its plans for recorded machines, and real runs on this one's CPU."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fresh_python
import gpu_files
import pytest
import recorded
from recorded import PutsOn, Recorded, needs_compiler
from waiting import until

from pytest_gkd import language
from pytest_gkd.gpu_report import gpu_runs, result_files, result_page
from pytest_gkd.gpu_report.gpu_runs import PlannedRuns, Run
from pytest_gkd.processes import gpus

HEAD = {**gpu_files.everything(), "gpus": [{"name": "no GPU", "count": 0}]}
PASSES = ("colocated", "split", "split on one gpu", "ray")
EXCLUSIVE_PAIR = Recorded(
    "535.129.03",
    tuple(
        recorded.gpu(n, "NVIDIA A100-SXM4-80GB", recorded.A100, mode=3)
        for n in range(2)
    ),
)


# -- the plan ----------------------------------------------------------------------


def plan(
    usable: gpus.Usable, *, has_ray: bool = True, may_mount: bool = True
) -> PlannedRuns:
    return gpu_runs.plan(usable, has_ray=has_ray, may_mount=may_mount)


def layouts(made: PlannedRuns) -> list[str]:
    passes = [run.name.rpartition(",")[0] for run in made.runs if run.cold_or_warm]
    assert [run.cold_or_warm for run in made.runs if run.cold_or_warm] == [
        "cold",
        "warm",
    ] * (len(passes) // 2)
    return list(dict.fromkeys(passes))


@needs_compiler
@pytest.mark.parametrize(
    ("recording", "expected"),
    [
        (recorded.ONE_H100, ["colocated", "split", "ray"]),
        (recorded.ONE_T4, ["colocated", "split", "ray"]),
        (
            recorded.EIGHT_H100,
            ["colocated", "split", "ray", "split on one gpu"],
        ),
        (recorded.EXCLUSIVE, ["colocated"]),
        (EXCLUSIVE_PAIR, ["colocated", "split"]),
        (recorded.MIG, ["colocated", "split", "ray"]),
        (recorded.MIG_R570, ["colocated", "split", "ray"]),
    ],
)
def test_each_layout_that_fits_is_run_cold_and_warm(
    on: PutsOn, recording: Recorded, expected: list[str]
) -> None:
    assert layouts(plan(on(recording))) == expected


@needs_compiler
def test_everything_else_that_needs_a_gpu_is_run_or_said_to_be_left_out(
    on: PutsOn,
) -> None:
    eight = plan(on(recorded.EIGHT_H100))
    assert eight.left_out == {}
    assert {run.fault for run in eight.runs} >= {
        *("environment:shm-of-a-container", "environment:no-compiler-for-triton"),
        *("environment:visible-devices-hide-all", "nccl:one-gpu", "nccl:rank-late"),
        *("vllm:no-gpu-memory-for-cache", "vllm:gpu-memory-taken"),
    }
    one = plan(on(recorded.ONE_H100), may_mount=False, has_ray=False)
    assert one.left_out == {
        "ray, cold": "Ray is not installed",
        "ray, warm": "Ray is not installed",
        "fault environment:shm-of-a-container": "needs the right to mount",
        "fault nccl:one-gpu": "needs 2 GPUs",
        "fault nccl:rank-late": "needs 2 GPUs",
    }
    assert "busy gpu" in plan(on(recorded.MIG)).left_out
    alone = plan(on(recorded.EXCLUSIVE)).left_out
    assert alone["fault vllm:gpu-memory-taken"] == alone["split, cold"]
    pair = plan(on(EXCLUSIVE_PAIR))
    assert set(pair.left_out) == {
        *("ray, cold", "ray, warm", "split on one gpu, cold", "split on one gpu, warm"),
        *("fault nccl:one-gpu", "fault vllm:gpu-memory-taken"),
    }
    assert set(pair.left_out.values()) == {gpu_runs.ONE_PROCESS}


@needs_compiler
def test_what_is_asked_for_is_run_and_the_rest_is_said_to_be_left_out(
    on: PutsOn,
) -> None:
    made = plan(on(recorded.ONE_H100))
    part = gpu_runs.narrowed(made, ["split", "fault vllm"])
    assert [run.name for run in part.runs] == [
        *("split, cold", "split, warm"),
        *("fault vllm:no-gpu-memory-for-cache", "fault vllm:gpu-memory-taken"),
    ]
    assert part.left_out["colocated, cold"] == gpu_runs.NOT_ASKED_FOR
    assert part.left_out["fault nccl:one-gpu"] == "needs 2 GPUs"
    assert result_files.scrubbed({"not_run": part.left_out})["not_run"] == part.left_out
    assert gpu_runs.narrowed(made, []) is made
    with pytest.raises(gpu_runs.NotHereError, match=r"'spilt'.* colocated, split, ray"):
        gpu_runs.narrowed(made, ["spilt"])


@needs_compiler
def test_every_name_and_reason_has_a_place_in_the_file(on: PutsOn) -> None:
    for recording in (recorded.EIGHT_H100, recorded.EXCLUSIVE, recorded.MIG):
        made = plan(on(recording), has_ray=False, may_mount=False)
        told = {
            "runs": [{"name": run.name, "fault": run.fault} for run in made.runs],
            "not_run": dict(made.left_out),
        }
        kept = result_files.scrubbed(told)
        assert [run["name"] for run in kept["runs"]] == [run.name for run in made.runs]
        assert kept["not_run"] == told["not_run"]


@needs_compiler
def test_the_first_gpu_that_the_user_chose_is_the_one_gpu(
    on: PutsOn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    made = plan(on(recorded.EIGHT_H100))
    visible = {run.visible for run in made.runs if run.name.startswith("split on")}
    assert visible == {"3"}
    assert {run.visible for run in made.runs} == {None, "3"}


@needs_compiler
def test_memory_that_the_driver_does_not_tell_is_not_given_back(
    on: PutsOn,
) -> None:
    usable = on(
        Recorded("580.95.05", (recorded.gpu(0, "GB10", "12 1", total=0, free=0),))
    )
    used = gpu_runs.used_mib()
    run = {"used_before_mib": used, "used_after_mib": used}
    assert result_page.given_back(run) is None
    assert gpu_runs.describe(usable)["gpus"][0]["memory_mib"] is None


def test_of_a_package_that_is_there_twice_the_one_that_is_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in ("1.0", "2.1"):
        info = tmp_path / version / f"torch-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Name: torch\nVersion: {version}\n")
        monkeypatch.syspath_prepend(str(tmp_path / version))
    assert gpu_runs.installed_versions()["torch"] == "2.1"


@needs_compiler
def test_a_machine_is_described_by_kinds_of_gpus(on: PutsOn) -> None:
    lines = ("cuda 13000", "p2p 0 1 0 0")
    described = gpu_runs.describe(
        on(
            Recorded(
                "580.95.05",
                (
                    *recorded.EIGHT_H100.gpus[:2],
                    recorded.gpu(2, "NVIDIA A100-SXM4-80GB", recorded.A100, mig=1),
                ),
                (*lines, "mig 2 MIG-11111111-aaaa", "mig 2 MIG-22222222-aaaa"),
            )
        )
    )
    kept = result_files.scrubbed(described)
    assert [(kind["name"], kind["count"]) for kind in kept["gpus"]] == [
        ("NVIDIA H100 80GB HBM3", 2),
        ("NVIDIA A100-SXM4-80GB", 1),
    ]
    assert [kind["mig_instances"] for kind in kept["gpus"]] == [None, 2]
    assert [kind["capability"] for kind in kept["gpus"]] == ["9.0", "8.0"]
    assert (kept["driver"], kept["cuda"]) == ("580.95.05", "13.0")
    assert kept["links"] == {"NVLink": 1, "unknown": 2}
    assert kept["versions"]["python"] == platform.python_version()
    assert "GPU-" not in json.dumps(kept)


def test_cold_runs_share_their_kernels_with_the_warm_run_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/the/users")
    cold, warm = gpu_runs.passes("split", "split")
    (other, _) = gpu_runs.passes("ray", "ray")
    made = [gpu_runs.environment(run, tmp_path) for run in (cold, warm, other)]
    for name in gpu_runs.CACHES:
        assert made[0][name] == made[1][name] != made[2][name]
        assert Path(made[0][name]).is_relative_to(tmp_path)
        assert Path(made[0][name]).is_dir()


@pytest.mark.parametrize("packaged", [True, False])
def test_ready_made_kernels_are_those_of_their_package_or_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packaged: bool
) -> None:
    monkeypatch.delenv("FLASHINFER_CUBIN_DIR", raising=False)
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", "/the/users")
    if packaged:
        (tmp_path / "flashinfer_cubin.py").touch()
        monkeypatch.syspath_prepend(str(tmp_path))
    given = gpu_runs.environment(Run("one"), tmp_path).get("FLASHINFER_CUBIN_DIR")
    assert given == (None if packaged else "/the/users/.cache/flashinfer/cubins")


# -- nccl-tests ----------------------------------------------------------------------

TABLE = """
# nThread 1 nGpus 2 minBytes 4096 maxBytes 65536 step: 4(factor) warmup iters: 1
#  Rank  0 Group  0 Pid   4711 on     node17 device  0 [0000:18:00] NVIDIA H100
#                                        out-of-place                  in-place
#      size  count  type redop  root  time algbw busbw #wrong  time algbw busbw #wrong
#       (B) (elements)               (us) (GB/s) (GB/s)        (us) (GB/s) (GB/s)
       4096   1024 float   sum    -1  10.1  0.41  0.61      0   9.9  0.42  0.63      0
      65536  16384 float   sum    -1  12.0  5.46  8.19    N/A  11.8  5.55  8.33    N/A
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 4.4
"""


def test_the_table_of_nccl_tests_is_read() -> None:
    assert gpu_runs.bandwidths(TABLE) == {"4096": 0.61, "65536": 8.19}
    assert gpu_runs.bandwidths("") == {}


def test_nccl_tests_are_run_where_they_are_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    said: list[str] = []
    assert gpu_runs.nccl_tests(2, said.append) == {}
    assert said == []
    program = tmp_path / "all_reduce_perf"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\ncat <<E\n{TABLE}E\n')
    program.chmod(0o755)
    assert gpu_runs.nccl_tests(1, said.append) == {}
    assert gpu_runs.nccl_tests(2, said.append) == {"4096": 0.61, "65536": 8.19}
    assert said == [str(program)]
    assert "-g 2" in (tmp_path / "asked").read_text()
    program.write_text(program.read_text() + "exit 3\n")
    assert gpu_runs.nccl_tests(2, said.append) == {}
    assert said[-1] == "    left out: it ended with 3"


# -- the file ------------------------------------------------------------------------


def test_no_file_that_is_there_is_written_over(tmp_path: Path) -> None:
    name = f"{result_files.file_name(HEAD)}.json"
    (tmp_path / name).write_text("mine")
    first, second = (gpu_runs.Report(tmp_path, HEAD) for _ in range(2))
    paths = [first.write(), second.write(), first.write()]
    assert [path.name for path in paths] == [
        name.replace(".json", "-2.json"),
        name.replace(".json", "-3.json"),
        name.replace(".json", "-2.json"),
    ]
    assert (tmp_path / name).read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        [name, paths[0].name, paths[1].name]
    )


def test_a_place_that_cannot_be_written_is_told_before_anything_runs(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(gpu_runs.NotHereError, match="--output=DIR"):
        gpu_runs.Report(tmp_path / "file", HEAD)


# -- the command -----------------------------------------------------------------------


def command(
    place: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    return fresh_python.run(
        "-m", "pytest_gkd", "gpu-report", cwd=place, environ=environment
    )


def test_without_a_driver_it_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    if gpus.read().driver:
        pytest.skip("there is a driver here")
    done = command(tmp_path, {})
    assert done.returncode == 2
    assert done.stderr == (
        "gkd: gpu-report: no GPU can be used: no NVIDIA driver answers. In a "
        "container, start it with the GPUs (docker run --gpus all). Without a GPU: "
        "pytest --gkd-stages\n"
    )
    assert list(tmp_path.iterdir()) == []


@needs_compiler
@pytest.mark.parametrize(
    ("visible", "why"),
    [
        (None, "so 8 GPU(s) stay unused"),
        ("", "CUDA_VISIBLE_DEVICES= hides all 8 GPU(s)"),
    ],
)
def test_gpus_that_cannot_be_used_are_told(
    tmp_path: Path, visible: str | None, why: str
) -> None:
    if visible is None and not gpus.without_cuda():
        pytest.skip("torch and vLLM are built for CUDA here")
    place = tmp_path / "work"
    place.mkdir()
    driver = recorded.environment(recorded.EIGHT_H100, tmp_path / "driver")
    if visible is not None:
        driver["CUDA_VISIBLE_DEVICES"] = visible
    done = command(place, driver)
    assert done.returncode == 2, done.stdout
    assert "gkd: gpu-report: no GPU can be used: " in done.stderr
    assert why in done.stderr
    assert list(place.iterdir()) == []


@needs_compiler
def test_mig_without_an_instance_is_told(on: PutsOn) -> None:
    bare = Recorded("535.129.03", (recorded.gpu(0, "A100", recorded.A100, mig=1),))
    with pytest.raises(gpu_runs.NotHereError, match="MIG is on, and no GPU has an"):
        gpu_runs.check(on(bare))


# -- real runs, on this machine's CPU --------------------------------------------------


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "t"
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    return place


def on_cpu(
    tmp_path: Path, runs: tuple[Run, ...], left_out: Mapping[str, str] | None = None
) -> tuple[bool, result_files.Result, list[str]]:
    said: list[str] = []
    report = gpu_runs.Report(tmp_path / "out", HEAD)
    good = gpu_runs.fill(report, PlannedRuns(runs, left_out or {}), 1, said.append)
    (result,) = result_files.load(tmp_path / "out")
    return good, result, said


def test_a_report_holds_what_its_runs_found(tmp_path: Path, temporary: Path) -> None:
    pytest.importorskip("datasets", reason="the data stage runs")
    data = tmp_path / "train.jsonl"
    data.write_text('{"prompt": "What is salt?"}\n' * 4)
    missing = Run(
        "fault data:missing-file",
        ("data",),
        ("--gkd-inject=data:missing-file",),
        fault="data:missing-file",
    )
    good, result, said = on_cpu(
        tmp_path, (Run("colocated, cold", ("data",), cold_or_warm="cold"), missing)
    )
    assert good, said
    assert result.data["complete"] is True
    first, second = result.runs
    assert (first["name"], first["pass"], first["layout"]) == (
        "colocated, cold",
        "cold",
        "colocated",
    )
    (stage,) = first["stages"]
    assert (stage["name"], stage["outcome"]) == ("data", "passed")
    assert stage["duration_s"] > 0
    assert second["stages"][0]["cause"] == "data.file-missing"
    assert (second["exit"], second["fault"]) == (1, "data:missing-file")
    text = json.dumps(result.data)
    for private in (platform.node(), str(tmp_path), str(Path.home()), sys.prefix):
        assert private not in text
    assert not re.search(r"[/@\\]", text)
    # Of a run on a CPU nothing on the page comes true.
    assert {check.cell([result]) for check in result_page.checks()} == {
        result_page.NOT_RUN
    }
    assert list(temporary.iterdir()) == []


def test_what_did_not_end_as_it_should_is_told_and_its_report_kept(
    tmp_path: Path, temporary: Path
) -> None:
    wrong = Run("fault data:bad-row", ("data",), fault="data:bad-row")
    good, result, said = on_cpu(tmp_path, (wrong,))
    assert not good
    assert result.data["complete"] is True
    (kept,) = temporary.iterdir()
    assert sorted(path.name for path in kept.iterdir()) == ["run0"]
    assert (kept / "run0/report/report.json").exists()
    assert any("NOT as expected" in line for line in said)
    assert any(str(kept) in line for line in said)


def test_what_it_prints_is_chinese_for_those_who_ask_and_what_it_keeps_is_not(
    tmp_path: Path, temporary: Path
) -> None:
    language.use("zh")
    wrong = Run("fault data:bad-row", ("data",), fault="data:bad-row")
    why = {"split on one gpu, cold": gpu_runs.ONE_PROCESS}
    _, result, said = on_cpu(tmp_path, (wrong,), why)
    assert result.data["not_run"] == why
    told = "\n".join(said)
    assert "gkd: 不运行：split on one gpu, cold（每块 GPU 同时只接受一个进程）" in told
    assert re.search(
        r"按各阶段的预算，最多 \d 分钟；在这种 GPU 上要多久还不清楚；", told
    )
    # Whether it then passes depends on what is installed here.
    assert re.search(r"    不符合预期：.*，没有用到 GPU；\d+ s", told)
    assert f"gkd: 结果在 {tmp_path}/out/{result.name}" in told
    with pytest.raises(gpu_runs.NotHereError) as error:
        gpu_runs.narrowed(PlannedRuns((wrong,)), ["spilt"])
    assert "没有以 'spilt' 开头的" in language.tr_filled(str(error.value))


def test_nothing_beside_the_file_of_a_stage_changes_its_run(
    tmp_path: Path, temporary: Path
) -> None:
    place = tmp_path / "project/site-packages"
    place.mkdir(parents=True)
    (tmp_path / "project/pytest.ini").write_text("[pytest]\naddopts = -k no_test\n")
    (place / "probe_stage.py").write_text(QUICK)
    probe = str(place / "probe_stage.py")
    good, _, said = on_cpu(tmp_path, (Run("busy gpu", ("busy_gpu",), files=(probe,)),))
    assert good, said


QUICK = """
import pytest

@pytest.mark.gkd_stage("busy_gpu")
def test_busy_gpu(gkd):
    pass
"""
PROGRAM = """
import sys
from pathlib import Path
from pytest_gkd.gpu_report import gpu_runs
sys.path.insert(0, {tests!r})
from test_gpu_report import HEAD
report = gpu_runs.Report(Path("out"), HEAD)
runs = (
    gpu_runs.Run("colocated, cold", ("data",)),
    gpu_runs.Run("busy gpu", ("busy_gpu",), files=({probe!r},)),
    gpu_runs.Run("colocated, warm", ("data",)),
)
try:
    gpu_runs.fill(report, gpu_runs.PlannedRuns(runs), 1, print)
except KeyboardInterrupt:
    sys.exit(130)
"""
PROBE = """
import os, time
from pathlib import Path
import pytest

@pytest.mark.gkd_stage("busy_gpu")
def test_busy_gpu(gkd):
    Path({begun!r}).write_text(str(os.getpid()))
    while True:
        time.sleep(0.1)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_what_was_found_by_then(
    tmp_path: Path, number: signal.Signals
) -> None:
    pytest.importorskip("datasets", reason="the data stage runs")
    begun = tmp_path / "begun"
    probe = tmp_path / "test_probe.py"
    probe.write_text(PROBE.format(begun=str(begun)))
    program = PROGRAM.format(tests=str(Path(__file__).parent), probe=str(probe))
    (tmp_path / "t").mkdir()
    child = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path / "t")},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        until(
            lambda: child.poll() is not None or (begun.exists() and begun.read_text())
        )
        assert child.poll() is None
        child.send_signal(number)
        said, _ = child.communicate(timeout=120)
    finally:
        child.kill()
    assert child.returncode == 130, said
    (result,) = result_files.load(tmp_path / "out")
    assert result.data["complete"] is False
    assert [run["name"] for run in result.runs] == ["colocated, cold", "busy gpu"]
    assert [run["exit"] for run in result.runs] == [0, 2]
    assert f"gkd: results in out/{result.name}" in said
    assert not Path("/proc", begun.read_text()).exists()


def test_the_time_that_it_takes_is_that_of_the_same_kind_of_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_files, "directory", lambda: tmp_path)
    made = PlannedRuns((Run("loss full"), Run("busy gpu")))
    known: dict[str, Any] = gpu_files.everything()
    before = list(gpu_runs.announced(made, known))
    assert "how long it takes on this GPU is not known yet" in before[-1]
    gpu_files.write(tmp_path)
    (told,) = [s for s in gpu_runs.announced(made, known) if "minutes" in s]
    assert told.startswith("gkd: about 2 minutes, as in h100.json; at most")
    known["gpus"][0]["name"] = "Tesla T4"
    assert list(gpu_runs.announced(made, known))[-1] == before[-1]
