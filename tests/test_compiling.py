"""A start that compiles kernels says so, as long as it does."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pytest_gkd.workload.engine import compiling

PATIENCE_S = 60.0


class Gkd:
    """What a stage is told, and waiting for it."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.facts: dict[str, Any] = {}
        self.notes: dict[str, str] = {}
        self.fact = self.facts.__setitem__
        self.note = self.notes.__setitem__
        self._more = threading.Condition()

    def step(self, text: str) -> None:
        with self._more:
            self.steps.append(text)
            self._more.notify_all()

    def wait(self, count: int) -> None:
        with self._more:
            assert self._more.wait_for(lambda: len(self.steps) >= count, PATIENCE_S)


@pytest.fixture
def gkd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stage whose caches are empty directories."""
    monkeypatch.setattr(compiling, "EVERY_S", 0.02)
    monkeypatch.setattr(compiling, "SLOW_S", 0.0)
    for name in ("FLASHINFER_WORKSPACE_BASE", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    return Gkd()


def keep(file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    return file


def compile_something(gkd: Gkd, tmp_path: Path) -> None:
    """Run what is called ptxas until it has been told."""
    sleep = shutil.which("sleep")
    assert sleep is not None
    compiler = Path(shutil.copy(sleep, tmp_path / "ptxas"))
    with subprocess.Popen([compiler, "600"]) as child:
        try:
            gkd.wait(2)
        finally:
            child.kill()
    gkd.wait(3)


def test_a_compiler_below_is_told_while_it_runs(tmp_path: Path, gkd: Gkd) -> None:
    started = time.monotonic()
    with compiling.told(gkd, "starting the engine", on_gpu=True):  # type: ignore[arg-type]
        compile_something(gkd, tmp_path)
    assert gkd.steps == [
        "starting the engine",
        "starting the engine: compiling kernels (ptxas)",
        "starting the engine",
    ]
    assert 0 <= gkd.facts["compile_s"] <= time.monotonic() - started + 0.05


def test_seconds_of_compiling_are_those_between_looks(
    monkeypatch: pytest.MonkeyPatch, gkd: Gkd
) -> None:
    times = iter([0.0, 1.0, 2.5, 4.0, 5.0])
    monkeypatch.setattr(compiling, "monotonic", times.__next__)
    looks = iter([["nvcc"], ["cicc", "nvcc"], [], ["ninja"]])
    monkeypatch.setattr(compiling, "compilers", looks.__next__)
    watch = compiling.CompilerWatch(gkd, "x")  # type: ignore[arg-type]
    for _ in range(4):
        watch.look()
    assert watch.seconds == 1.0 + 1.5 + 1.0
    assert watch.names == {"nvcc", "cicc", "ninja"}


def test_what_was_compiled_is_told_with_the_place_that_keeps_it(
    tmp_path: Path, gkd: Gkd
) -> None:
    keep(tmp_path / "TRITON_CACHE_DIR/old/kernel.cubin")
    ops = tmp_path / "FLASHINFER_WORKSPACE_BASE/.cache/flashinfer/0.6/90a/cached_ops"
    with compiling.told(gkd, "starting the engine", on_gpu=True):  # type: ignore[arg-type]
        compile_something(gkd, tmp_path)
        keep(ops / "sampling/sampling.so")
        keep(tmp_path / "TRITON_CACHE_DIR/new/kernel.cubin")
    told = gkd.notes["vllm.compiled"]
    assert "went into compilers (ptxas)" in told
    place = tmp_path / "FLASHINFER_WORKSPACE_BASE/.cache/flashinfer"
    assert f"1 of FlashInfer's in {place} (FLASHINFER_WORKSPACE_BASE moves" in told
    assert f"1 of Triton's in {tmp_path / 'TRITON_CACHE_DIR'} (TRITON" in told
    assert "TorchInductor" not in told
    assert "VLLM_USE_FLASHINFER_SAMPLER=0" in told


def test_advice_on_flashinfer_is_for_whom_it_compiled(tmp_path: Path, gkd: Gkd) -> None:
    with compiling.told(gkd, "starting the engine", on_gpu=True):  # type: ignore[arg-type]
        compile_something(gkd, tmp_path)
        keep(tmp_path / "inductor/ab/cab.py")
    told = gkd.notes["vllm.compiled"]
    assert f"1 of TorchInductor's in {tmp_path / 'inductor'} (" in told
    assert "SAMPLER" not in told
    assert "jit-cache" not in told


def test_a_start_that_compiles_nothing_has_no_note(
    monkeypatch: pytest.MonkeyPatch, gkd: Gkd
) -> None:
    monkeypatch.setattr(compiling, "SLOW_S", 5.0)
    with compiling.told(gkd, "starting the engine", on_gpu=True):  # type: ignore[arg-type]
        pass
    assert gkd.facts == {"compile_s": 0.0}
    assert not gkd.notes


def test_a_cache_that_cannot_be_read_and_a_user_without_a_home_end_no_start(
    monkeypatch: pytest.MonkeyPatch, gkd: Gkd
) -> None:
    def nobody(*_: Any) -> Any:
        raise RuntimeError("Could not determine home directory.")

    def stale(*_: Any) -> Any:
        raise OSError(116, "Stale file handle")

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(Path, "home", nobody)
    monkeypatch.setattr(Path, "glob", stale)
    with compiling.told(gkd, "starting the engine", on_gpu=True):  # type: ignore[arg-type]
        pass
    assert "compile_s" in gkd.facts


def test_tritons_cache_is_where_triton_says(monkeypatch: pytest.MonkeyPatch) -> None:
    knobs = pytest.importorskip("triton.knobs")
    for given in ({}, {"TRITON_HOME": "/t"}, {"TRITON_CACHE_DIR": "/c"}):
        for name in ("TRITON_HOME", "TRITON_CACHE_DIR"):
            monkeypatch.delenv(name, raising=False)
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        (mine,) = (c for c in compiling.caches(os.environ) if c.owner == "Triton")
        assert str(mine.path) == knobs.cache_knobs().dir


@pytest.mark.needs("torch")
def test_inductors_cache_is_where_torch_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.runtime import cache_dir_utils

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    (mine,) = (c for c in compiling.caches({}) if c.owner == "TorchInductor")
    assert str(mine.path) == cache_dir_utils.default_cache_dir()


def test_what_goes_wrong_goes_through(gkd: Gkd) -> None:
    for on_gpu in (True, False):
        with (
            pytest.raises(ValueError, match="no engine"),
            compiling.told(gkd, "x", on_gpu=on_gpu),  # type: ignore[arg-type]
        ):
            raise ValueError("no engine")
    assert not any(t.name == "gkd-compiling" for t in threading.enumerate())
    assert not gkd.facts
