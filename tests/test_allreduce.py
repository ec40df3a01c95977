"""The arithmetic of the all-reduce stage: exact sums, bus bandwidth, its floor."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from test_plugin import Run

from pytest_gkd.workload.ranks import allreduce
from pytest_gkd.workload.ranks.allreduce import KIB, MIB

if TYPE_CHECKING:
    from torch import Tensor

WORLD_SIZES = (1, 2, 3, 8, 130, 300)


def _sum(world_size: int, count: int, dtype: str, lost: int | None = None) -> Tensor:
    import torch

    kind = getattr(torch, dtype)
    total = torch.zeros(count, dtype=kind)
    for rank in range(world_size):
        if rank != lost:
            total += allreduce.contribution(rank, world_size, count, kind, "cpu")
    return total


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int64"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_expected_sum_is_exact_in_every_dtype(world_size: int, dtype: str) -> None:
    import torch

    kind = getattr(torch, dtype)
    expected = allreduce.expected_sum(world_size, kind, "cpu")
    got = _sum(world_size, 2 * world_size + 1, dtype)
    assert allreduce.first_difference(got, expected) is None
    exact = allreduce.expected_sum(world_size, torch.int64, "cpu")
    assert [int(x) for x in expected] == exact.tolist()


@pytest.mark.parametrize("lost", [0, 2, 129, 299])
def test_a_lost_contribution_shows_whichever_rank_it_is_of(lost: int) -> None:
    import torch

    expected = allreduce.expected_sum(300, torch.float32, "cpu")
    got = _sum(300, 600, "float32", lost)
    assert allreduce.first_difference(got, expected) is not None


def test_a_nan_is_a_difference() -> None:
    import torch

    nan = torch.tensor([1.0, float("nan")])
    found = allreduce.first_difference(nan, nan)
    assert found is not None
    assert found[0] == 1


@pytest.mark.parametrize("index", [0, 2, 5, 6], ids=lambda at: f"index {at}")
def test_the_first_wrong_element_is_named_with_both_values(index: int) -> None:
    import torch

    # Two whole periods and one element more.
    got = torch.tensor([1, 2, 3, 1, 2, 3, 1])
    right = float(got[index])
    got[index:] = 9
    found = allreduce.first_difference(got, torch.tensor([1, 2, 3]))
    assert found == (index, 9.0, right)


def test_a_buffer_shorter_than_a_period_is_compared() -> None:
    import torch

    period = torch.tensor([1, 2, 3])
    assert allreduce.first_difference(torch.tensor([1, 2]), period) is None
    assert allreduce.first_difference(torch.tensor([1, 9]), period) == (1, 9.0, 2.0)


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    # 1e9 bytes in a second: 2(n-1)/n is 1 for two ranks and 1.75 for eight.
    assert allreduce.bus_bandwidth_gb_s(10**9, 1.0, 2) == pytest.approx(1.0)
    assert allreduce.bus_bandwidth_gb_s(10**9, 1.0, 8) == pytest.approx(1.75)


def test_the_slowest_rank_counts() -> None:
    worst = allreduce.slowest([{4: 1.0, 8: 5.0}, {4: 2.0, 8: 3.0}])
    assert worst == {4: 2.0, 8: 5.0}


def test_bandwidths_are_listed_by_size() -> None:
    table = allreduce.bandwidths({MIB: 1.0, 4 * KIB: 1.0}, 2)
    assert list(table) == ["4 KiB", "1 MiB"]
    assert table["1 MiB"] == 0.00105


def test_one_rank_has_no_bus_bandwidth() -> None:
    assert allreduce.bandwidths({MIB: 1.0}, 1) == {}


def test_the_best_size_is_held_against_the_floor() -> None:
    table = {"4 KiB": 0.1, "1 MiB": 9.0}
    assert allreduce.too_slow(table, 9.0, "2 ranks, gloo") == ""
    text = allreduce.too_slow(table, 10.0, "2 ranks, gloo")
    assert "9 GB/s" in text
    assert "10 GB/s" in text
    assert "--gkd-min-bus-bandwidth" in text


@pytest.mark.needs("torch")
def test_a_floor_that_is_missed_is_told_in_its_own_words(tmp_path: Path) -> None:
    run = Run(tmp_path, "--gkd-stages=nccl", "--gkd-min-bus-bandwidth=1e6")
    stage = run.stage("nccl")
    assert stage["outcome"] == "failed"
    assert "Failed: bus bandwidth reached " in stage["message"]
    assert stage["diagnosis"] is None
    assert stage["facts"]["bus_bandwidth_gb_s"]


def test_a_floor_without_a_bus_to_measure_is_missed() -> None:
    assert "2 ranks or more" in allreduce.too_slow({}, 1.0, "1 rank, nccl")


def test_no_floor_asks_for_nothing() -> None:
    assert allreduce.too_slow({}, 0.0, "1 rank, nccl") == ""


def test_a_quick_all_reduce_is_timed_more_often_than_a_slow_one() -> None:
    seconds = (1e-4, 0.02, 0.05, 0.1, 30.0)
    times = {d: [allreduce.iterations(s, d) for s in seconds] for d in ("cuda", "cpu")}
    assert times == {"cuda": [20, 20, 8, 4, 3], "cpu": [20, 5, 3, 3, 3]}


def test_float16_is_checked_only_where_gpus_are() -> None:
    def dtypes(backend: str) -> set[str]:
        return {op.dtype for op in allreduce.checked_operations(backend)}

    assert dtypes("nccl") - dtypes("gloo") == {"float16"}


def test_buffers_fit_into_what_a_gpu_has_free() -> None:
    mib = allreduce.MIB
    assert allreduce.sizes("gloo", 2) == allreduce.BANDWIDTH_BYTES
    assert allreduce.sizes("nccl", 8, 80 << 30) == allreduce.NCCL_BYTES
    assert max(allreduce.sizes("nccl", 2, 2 << 30)) == 256 * mib
    assert max(allreduce.sizes("nccl", 2, 0)) == mib
    assert len(allreduce.sizes("nccl", 1, 80 << 30)) == 1


def test_a_ranks_own_gpu_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    waited: list[object] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *on: waited.extend(on))
    for name in ("cuda:3", "cpu"):
        allreduce.synchronize(SimpleNamespace(device=torch.device(name)))
    assert waited == [torch.device("cuda:3")]
