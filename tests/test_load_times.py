"""What is said of an engine's loading."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import fresh_python
import psutil
import pytest

from pytest_gkd.processes import procfs
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
    weights = MODEL / "model.safetensors"
    monkeypatch.setattr(load_times, "largest_file", lambda model: weights)
    monkeypatch.setattr(load_times, "disk_speed", lambda file: speed["is"])
    monkeypatch.setattr(load_times, "file_system", lambda path: "")
    return speed


@pytest.mark.parametrize(
    ("found", "speed", "says", "says_not"),
    [
        (
            slow(),
            2.0,
            "15.0 GB came from the disk, at 0.50 GB/s; the disk gives 2.00",
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
        (slow(disk_bytes=0), 2.0, "waiting for the disk 30.0", "came from"),
        (slow(unpack_s=40.0), 2.0, "making tensors of 15.0 GB 40.0", "came from"),
        (slow(move_s=40.0), 2.0, "parameters 40.0", "came from"),
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


@pytest.mark.parametrize(
    ("kind", "says", "says_not"),
    [
        ("ext4", "To read ahead: safetensors_load_strategy='prefetch' in", "runai"),
        # There vLLM reads ahead by itself.
        ("nfs4", "To read ahead: load_format='runai_streamer' (pip", "prefetch"),
        ("fuse.s3fs", "='prefetch' or load_format='runai_streamer' (pip", "/dev/s"),
    ],
)
def test_what_would_help_depends_on_the_file_system(
    kind: str,
    says: str,
    says_not: str,
    monkeypatch: pytest.MonkeyPatch,
    disk: dict[str, float | None],
) -> None:
    monkeypatch.setattr(load_times, "file_system", lambda path: kind)
    # The kernel may not count what comes over a network.
    found = slow(disk_bytes=15 * GB if kind == "ext4" else 0)
    told = load_times.advice(found, MODEL, prefetches=True)
    assert f"15.0 GB came from the disk ({kind}), at 0.50 GB/s" in told
    assert says in told
    assert says_not not in told


def test_unpacking_bin_files_is_told_from_reading_them(tmp_path: Path) -> None:
    found = slow(read_s=1.0, unpack_s=30.0)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(1000))
    told = load_times.advice(found, tmp_path, prefetches=True)
    assert told.endswith("Files saved as .safetensors are mapped, not unpacked.")
    (tmp_path / "model.safetensors").write_bytes(bytes(2000))
    told = load_times.advice(found, tmp_path, prefetches=True)
    assert told.endswith("packing and quantising 2.0.")


def test_a_thread_in_uninterruptible_sleep_waits_for_a_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read, really = list[int | str](), procfs.own_words
    states = {"D": [b"D", b"1"], "R": [b"R", b"1"], "ended": None}
    now: list[str] = []

    def words(thread: int | str) -> list[bytes] | None:
        read.append(thread)
        seen = really(thread)
        assert seen is not None
        return states[now.pop(0)] if now else seen

    monkeypatch.setattr(procfs, "own_words", words)
    clock = iter((10.0, 10.5, 11.5, 13.0))
    monkeypatch.setattr(time, "perf_counter", clock.__next__)
    waits = load_times.DiskWaits()
    over = threading.Event()
    other = threading.Thread(target=over.wait)
    other.start()
    try:
        for seen in (["R"], ["ended", "D"], ["R", "R"]):
            now[:] = seen
            waits.look()
    finally:
        over.set()
        other.join()
    assert waits.seconds == 1.0
    assert f"self/task/{other.native_id}" in read


def test_a_file_system_is_that_of_the_nearest_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "models/m"
    inner.mkdir(parents=True)
    mounts = {"/": "ext4", inner.parent: "lustre", inner: "nfs", tmp_path / "mod": "9p"}
    parts = [SimpleNamespace(mountpoint=str(at), fstype=k) for at, k in mounts.items()]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: parts)
    assert load_times.file_system(inner) == "nfs"
    assert load_times.file_system(inner / "file") == "nfs"
    assert load_times.file_system(inner.parent) == "lustre"
    assert load_times.file_system(tmp_path) == "ext4"


@pytest.mark.parametrize(
    ("wall", "computed", "queued", "waited"),
    [
        (10.0, 2.0, 1.0, 7.0),
        (10.0, 9.0, 3.0, 0.0),
        (10.0, 35.0, 0.0, 0.0),  # threads that compute at the same time
    ],
)
def test_waiting_is_what_neither_computes_nor_lacks_a_processor(
    wall: float,
    computed: float,
    queued: float,
    waited: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = iter([(100.0, 50.0, 5.0), (100.0 + wall, 50.0 + computed, 5.0 + queued)])
    monkeypatch.setattr(load_times, "clocks", now.__next__)
    assert load_times.Stopwatch().lap() == (wall, waited)


def test_a_thread_that_sleeps_waits_and_one_that_computes_does_not() -> None:
    watch = load_times.Stopwatch()
    time.sleep(0.3)
    slept, waited = watch.lap()
    assert waited > slept / 2
    until = time.process_time() + 0.3
    while time.process_time() < until:
        pass
    computed, waited = watch.lap()
    assert waited < computed / 2


@pytest.mark.parametrize("found", [slow(read_s=0.5, move_s=0), slow(bytes=0)])
def test_nothing_is_said_of_a_fast_loading_or_one_without_files(
    found: LoadTimes, disk: dict[str, float | None]
) -> None:
    assert load_times.advice(found, MODEL, prefetches=True) == ""


def test_a_disk_is_asked_past_the_page_cache(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(load_times.CHUNK * 3))
    speed = load_times.disk_speed(tmp_path / "model.safetensors")
    assert speed is None or speed > 1e6  # a tmpfs of old kernels has no such reads


def test_asking_the_disk_ends_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(load_times.CHUNK * 8))
    read: list[int] = []

    def slowly(descriptor: int, at: int) -> int:
        read.append(at)
        time.sleep(load_times.SAMPLE_S)
        return load_times.CHUNK

    monkeypatch.setattr(load_times, "read_block", slowly)
    monkeypatch.setattr(load_times, "SAMPLE_S", 0.1)
    assert load_times.disk_speed(file)
    assert len(read) == load_times.READERS


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
@pytest.mark.parametrize("ranks", [1, 2])
def test_reading_a_mapped_file_is_no_part_of_copying_it(
    ranks: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    loading: Callable[..., Loading],
) -> None:
    import torch
    from vllm import distributed

    size = lambda: ranks  # noqa: E731
    monkeypatch.setattr(distributed, "get_tensor_model_parallel_world_size", size)
    (tmp_path / "weights").write_bytes(bytes(64 * MB))
    mapped = torch.from_file(str(tmp_path / "weights"), size=64 * MB, dtype=torch.uint8)

    def resident() -> int:
        return int(psutil.Process().memory_info().shared)

    measured = loading(("weight", mapped))
    before = resident()
    measured.whole("model")
    # One of several ranks reads no more than what it copies.
    assert [resident() - before > 60 * MB for _ in measured.each()] == [ranks == 1]
    assert load_times.last().bytes == 64 * MB


@pytest.mark.needs("torch", "vllm")
@pytest.mark.parametrize(("ranks", "read_s"), [(1, 7.0), (2, 27.0)])
def test_each_part_of_loading_has_its_seconds(
    ranks: int,
    read_s: float,
    monkeypatch: pytest.MonkeyPatch,
    loading: Callable[..., Loading],
) -> None:
    import torch
    from vllm import distributed

    size = lambda: ranks  # noqa: E731
    monkeypatch.setattr(distributed, "get_tensor_model_parallel_world_size", size)
    measured = loading(("weight", torch.zeros(MB, dtype=torch.uint8)))
    measured.whole("model")
    # The time, what was computed, what waited for a processor: at the start, when the
    # tensor is there, when it is copied.
    clocks = iter([(0.0, 0.0, 0.0), (10.0, 3.0, 0.0), (40.0, 13.0, 0.0)])
    monkeypatch.setattr(load_times, "clocks", clocks.__next__)
    list(measured.each())
    found = load_times.last()
    assert (found.read_s, found.unpack_s) == (read_s, 3.0)
    assert found.read_s + found.unpack_s + found.move_s == 40.0


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
    names = ("build", "read", "unpack", "move", "finish")
    parts = [vllm[f"load_{name}_s"] for name in names]
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
    monkeypatch.setattr(load_times.DiskWaits, "seconds", 2.0, raising=False)
    monkeypatch.setattr(load_times.DiskWaits, "__init__", lambda self: None)
    monkeypatch.setattr(load_times.DiskWaits, "look", lambda self: None)
    monkeypatch.setattr(load_times, "touch", touched.append)
    monkeypatch.setattr(load_times, "disk_bytes", iter((MB, 6 * MB)).__next__)
    trainer = Trainer(student, dtype="float32")
    weights = [*trainer.model.parameters(), *trainer.model.buffers()]
    size = sum(one.nbytes for one in weights)
    assert trainer.load_facts() == {
        "trainer_load_s": 3.0,
        "trainer_read_s": 2.0,
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
    assert 0 <= facts["trainer_read_s"] <= facts["trainer_load_s"]
    assert facts.keys() >= {"trainer_move_s", "trainer_load_from_disk_gb"}
