"""What is said of an engine's loading."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import fresh_python
import psutil
import pytest

from pytest_gkd.workload.engine import load_times
from pytest_gkd.workload.engine.load_times import LoadTimes

GB = 10**9
MB = 10**6
MODEL = Path("/models/m")


def slow(**changes: Any) -> LoadTimes:
    parts = {"build_s": 1.0, "read_s": 30.0, "move_s": 4.0, "finish_s": 2.0}
    return LoadTimes(**{**parts, "bytes": 15 * GB, "disk_bytes": 15 * GB, **changes})


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> dict[str, float | None]:
    """The speed of a disk that is not here."""
    speed: dict[str, float | None] = {"is": 2.0 * GB}
    monkeypatch.setattr(load_times, "disk_speed", lambda model: speed["is"])
    return speed


@pytest.mark.parametrize(
    ("found", "speed", "says", "says_not"),
    [
        (
            slow(),
            2.0,
            "15.0 GB came from the disk, at 0.50 GB/s; the disk gi",
            "/dev/s",
        ),
        (
            slow(),
            2.0,
            "To read ahead: safetensors_load_strategy='prefetch' in",
            "/dev/s",
        ),
        (slow(), 0.6, "which is what the disk gives (0.60 GB/s to 4 readers)", "ahead"),
        (slow(), None, "at 0.50 GB/s. To read ahead", "gives"),
        (slow(disk_bytes=0), 2.0, "reading 15.0 GB 30.0, copying into", "disk"),
        (slow(move_s=40.0), 2.0, "parameters 40.0", "disk"),
        (slow(read_s=0.1, move_s=34.0, reads_apart=False), 2.0, "0.44 GB/s", "/dev/s"),
    ],
)
def test_a_slow_loading_is_taken_apart(
    found: LoadTimes,
    speed: float | None,
    says: str,
    says_not: str,
    disk: dict[str, float | None],
) -> None:
    disk["is"] = speed and speed * GB
    told = load_times.advice(found, MODEL, prefetches=True)
    assert says in told
    assert says_not not in told


def test_an_older_vllm_is_not_told_to_prefetch(disk: dict[str, float | None]) -> None:
    told = load_times.advice(slow(), MODEL, prefetches=False)
    assert told.endswith("To read ahead: `gkd warm /models/m` before the start.")


@pytest.mark.parametrize("found", [slow(read_s=0.5, move_s=0), slow(bytes=0)])
def test_nothing_is_said_of_a_fast_loading_or_one_without_files(
    found: LoadTimes, disk: dict[str, float | None]
) -> None:
    assert load_times.advice(found, MODEL, prefetches=True) == ""


def test_a_disk_is_asked_past_the_page_cache(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(load_times.CHUNK * 3))
    speed = load_times.disk_speed(tmp_path)
    assert speed is None or speed > 1e6  # a tmpfs of old kernels has no such reads
    assert load_times.disk_speed(tmp_path / "nothing") is None


class Loading(NamedTuple):
    """vLLM's two functions, measured."""

    whole: Callable[..., Any]
    each: Callable[..., Any]


@pytest.fixture
def loading(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Loading]:
    """Measures stand-ins for vLLM's loaders, which yield ``weights``."""

    def made(*weights: Any) -> Loading:
        base = SimpleNamespace(load_model=lambda model: model)
        default = SimpleNamespace(get_all_weights=lambda: iter(weights))
        for module, loader in (("base", base), ("default", default)):
            name = f"vllm.model_executor.model_loader.{module}_loader"
            loaders = {f"{module.title()}ModelLoader": loader}
            monkeypatch.setitem(sys.modules, name, SimpleNamespace(**loaders))
        load_times.measure()
        return Loading(base.load_model, default.get_all_weights)

    return made


def test_what_the_kernel_does_not_tell_fails_no_engine(
    monkeypatch: pytest.MonkeyPatch, loading: Callable[..., Loading]
) -> None:
    def denied(process: psutil.Process) -> None:
        raise psutil.AccessDenied(process.pid)

    monkeypatch.setattr(psutil.Process, "io_counters", denied)
    loading().whole("model")
    assert load_times.last().disk_bytes == 0


@pytest.mark.needs("torch", "vllm")
def test_reading_a_mapped_file_is_no_part_of_copying_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loading: Callable[..., Loading]
) -> None:
    import torch
    from vllm import distributed

    monkeypatch.setattr(distributed, "get_tensor_model_parallel_world_size", lambda: 1)
    (tmp_path / "weights").write_bytes(bytes(64 * MB))
    mapped = torch.from_file(str(tmp_path / "weights"), size=64 * MB, dtype=torch.uint8)

    def resident() -> int:
        return int(psutil.Process().memory_info().shared)

    measured = loading(("weight", mapped))
    before = resident()
    measured.whole("model")
    assert [resident() - before > 60 * MB for _ in measured.each()] == [True]
    assert load_times.last().bytes == 64 * MB


def test_a_vllm_whose_loader_reads_in_a_way_of_its_own_has_a_total(
    loading: Callable[..., Loading],
) -> None:
    assert loading().whole("model") == "model"
    assert load_times.last().finish_s > 0


@pytest.mark.needs("torch", "vllm")
def test_an_engine_in_processes_of_its_own_tells_what_it_loaded(tmp_path: Path) -> None:
    stages = ("--gkd-stages=vllm", "--gkd-layout=split")
    done = fresh_python.run("-m", "pytest", *stages, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    report = json.loads((tmp_path / ".gkd/last/report.json").read_text())
    (vllm,) = (stage["facts"] for stage in report["stages"] if stage["name"] == "vllm")
    parts = [vllm[f"load_{name}_s"] for name in ("build", "read", "move", "finish")]
    assert 0 < sum(parts) < vllm["engine_start_s"]
    assert vllm["load_gb"] > 0


@pytest.mark.needs("torch", "transformers")
def test_a_trainers_loading_is_timed_apart_from_its_moving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from pytest_gkd.workload.gkd import forward
    from pytest_gkd.workload.gkd.trainer import Trainer
    from pytest_gkd.workload.models import tiny

    student = tiny.make(tmp_path).student
    times, touched = iter((10.0, 13.0, 13.5)), list[Any]()
    clock = SimpleNamespace(perf_counter=lambda: next(times))
    monkeypatch.setattr(forward, "time", clock)
    monkeypatch.setattr(load_times, "touch", touched.append)
    monkeypatch.setattr(load_times, "disk_bytes", iter((MB, 6 * MB)).__next__)
    trainer = Trainer(student, dtype="float32")
    weights = [*trainer.model.parameters(), *trainer.model.buffers()]
    size = sum(one.nbytes for one in weights)
    assert trainer.load_facts() == {
        "trainer_load_s": 3.0,
        "trainer_move_s": 0.5,
        "trainer_load_gb": round(size / GB, 3),
        "trainer_load_from_disk_gb": 0.005,
    }
    # What is mapped is read before the clock goes on to moving.
    assert len(touched) == len(weights)
    assert all(isinstance(one, torch.Tensor) for one in touched)


@pytest.mark.needs("torch", "vllm", "transformers")
@pytest.mark.parametrize("stage", ["weight_sync", "training_step"])
def test_the_stages_that_train_tell_how_the_trainer_was_loaded(
    tmp_path: Path, stage: str
) -> None:
    done = fresh_python.run("-m", "pytest", f"--gkd-stages={stage}", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    report = json.loads((tmp_path / ".gkd/last/report.json").read_text())
    (facts,) = (one["facts"] for one in report["stages"] if one["name"] == stage)
    assert facts["trainer_load_s"] > 0
    assert facts["trainer_load_gb"] > 0
    assert facts.keys() >= {"trainer_move_s", "trainer_load_from_disk_gb"}
