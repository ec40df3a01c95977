"""Environment variables are judged by who reads them."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_gkd.stage_api import Note, StageFault
from pytest_gkd.variable_table import KNOWN, VARIABLES
from pytest_gkd.workload.environment.variable_names import (
    read_interfaces,
    read_real_names,
    read_vllm_source,
)
from pytest_gkd.workload.environment.variables import (
    judge_variables,
    vllm_choices,
    vllm_names,
)

VLLM_SOURCE = """
environment_variables = {
    "VLLM_HOST_IP": lambda: os.getenv("VLLM_HOST_IP", ""),
    "VLLM_WORKER_MULTIPROC_METHOD": env_with_choices(
        "VLLM_WORKER_MULTIPROC_METHOD", "fork", ["spawn", "fork"]
    ),
    "VLLM_PRECISION": env_with_choices(
        "VLLM_PRECISION",
        "highest",
        ["highest", "high"],
        case_sensitive=False,
    ),
}
"""


def judge(environ: dict[str, str], **options: Any) -> list[StageFault | Note]:
    settings: dict[str, Any] = {"gpus": 0, "interfaces": ("eth0", "lo"), **options}
    return judge_variables(environ, **settings)


def kind(items: list[StageFault | Note]) -> str | None:
    (item,) = items
    return item.cause if isinstance(item, StageFault) else item.id


def text(items: list[StageFault | Note]) -> str:
    (item,) = items
    return item.message if isinstance(item, StageFault) else item.text


def test_an_ordinary_environment_is_not_mentioned() -> None:
    ordinary = {"PATH": "/usr/bin", "NCCL_DEBUG": "warn", "RAY_DEDUP_LOGS": "0"}
    assert judge(ordinary, vllm_source=VLLM_SOURCE) == []


def test_nccl_timeout_is_said_to_be_read_by_nobody() -> None:
    said = text(judge({"NCCL_TIMEOUT": "600"}))
    assert "read by neither NCCL nor torch" in said


def test_an_old_name_is_told_with_the_new_one() -> None:
    said = text(judge({"NCCL_BLOCKING_WAIT": "1"}))
    assert "TORCH_NCCL_BLOCKING_WAIT" in said


def test_a_setting_that_is_harmless_is_not_mentioned() -> None:
    assert judge({"NCCL_P2P_DISABLE": "0"}) == []
    assert kind(judge({"NCCL_P2P_DISABLE": "1"})) == "variable.setting"


def test_a_value_that_stops_torch_from_importing_is_a_fault() -> None:
    (fault,) = judge({"TORCH_DISTRIBUTED_DEBUG": "verbose"})
    assert isinstance(fault, StageFault)
    assert fault.cause == "env.variable-invalid"
    assert "OFF, INFO or DETAIL" in fault.message
    assert fault.facts == {"variable": "TORCH_DISTRIBUTED_DEBUG", "value": "verbose"}


def test_a_value_that_stops_only_nccl_is_a_note_without_gpus() -> None:
    environ = {"TORCH_NCCL_BLOCKING_WAIT": "maybe"}
    assert kind(judge(environ, gpus=0)) == "variable.value"
    assert kind(judge(environ, gpus=2)) == "env.variable-invalid"


@pytest.mark.parametrize(("value", "good"), [("22", True), ("600", False), ("", False)])
def test_the_infiniband_timeout_is_an_exponent(value: str, good: bool) -> None:
    assert (judge({"NCCL_IB_TIMEOUT": value}) == []) is good


def test_a_kubernetes_service_address_in_vllm_port_is_a_fault() -> None:
    environ = {"VLLM_PORT": "tcp://10.0.0.1:8000"}
    assert kind(judge(environ)) == "env.variable-invalid"


def test_a_vllm_name_that_the_installed_release_lacks_is_told_with_near_ones() -> None:
    said = text(judge({"VLLM_HOST_PI": "1"}, vllm_source=VLLM_SOURCE))
    assert "near names: VLLM_HOST_IP" in said


def test_a_vllm_variable_that_is_gone_is_told_with_its_successor() -> None:
    environ = {"VLLM_ATTENTION_BACKEND": "FLASH_ATTN"}
    assert "attention_backend" in text(judge(environ, vllm_source=VLLM_SOURCE))
    older = VLLM_SOURCE + '"VLLM_ATTENTION_BACKEND"'
    assert judge(environ, vllm_source=older) == []


def test_values_that_vllm_limits_are_read_from_its_source() -> None:
    assert vllm_choices(VLLM_SOURCE)["VLLM_PRECISION"] == (("highest", "high"), False)
    environ = {"VLLM_PRECISION": "HIGH"}
    assert judge(environ, vllm_source=VLLM_SOURCE) == []
    environ = {"VLLM_PRECISION": "low"}
    assert kind(judge(environ, vllm_source=VLLM_SOURCE)) == "variable.value"


def test_a_start_method_that_vllm_refuses_is_a_fault() -> None:
    environ = {"VLLM_WORKER_MULTIPROC_METHOD": "thread"}
    assert kind(judge(environ, vllm_source=VLLM_SOURCE)) == "env.variable-invalid"


def test_a_slip_in_a_ray_name_is_told_when_the_package_lacks_it() -> None:
    real = frozenset({"RAY_memory_usage_threshold"})
    environ = {"RAY_memory_usage_treshold": "0.9"}
    said = text(judge(environ, real_names=lambda prefix: real))
    assert "near names: RAY_memory_usage_threshold" in said


def test_a_name_that_the_package_holds_is_right_however_near_another() -> None:
    real = frozenset({"NCCL_IB_HCA", "NCCL_IB_HCAS"})
    environ = {"NCCL_IB_HCAS": "mlx5"}
    assert judge(environ, real_names=lambda prefix: real) == []


def test_nothing_is_said_of_a_name_when_the_package_cannot_be_read() -> None:
    assert judge({"NCCL_DEBUGG": "INFO"}) == []


def test_installed_packages_are_looked_into_only_for_unknown_names() -> None:
    asked: list[str] = []

    def real_names(prefix: str) -> frozenset[str]:
        asked.append(prefix)
        return frozenset()

    judge(dict.fromkeys(KNOWN, "1"), real_names=real_names)
    assert asked == []


@pytest.mark.parametrize(
    ("value", "good"),
    [
        ("eth", True),
        ("eth0:5000", True),
        ("=eth", False),
        ("=eth0", True),
        ("^lo", True),
        ("^eth,lo", False),
        ("ib", False),
    ],
)
def test_nccl_takes_interfaces_by_prefix(value: str, good: bool) -> None:
    assert (judge({"NCCL_SOCKET_IFNAME": value}, gpus=8) == []) is good


def test_a_gloo_interface_that_does_not_exist_is_a_fault() -> None:
    (fault,) = judge({"GLOO_SOCKET_IFNAME": "eth1"})
    assert isinstance(fault, StageFault)
    assert fault.cause == "comm.interface"
    assert "it has eth0, lo" in fault.message


def test_an_nccl_interface_that_does_not_exist_is_a_note_without_gpus() -> None:
    assert kind(judge({"NCCL_SOCKET_IFNAME": "ib0"})) == "variable.value"


def test_a_ray_address_is_noted() -> None:
    assert kind(judge({"RAY_ADDRESS": "10.0.0.1:6379"})) == "ray.address"


def test_a_long_ray_directory_is_noted() -> None:
    assert kind(judge({"RAY_TMPDIR": "/scratch/" + "x" * 60})) == "ray.long-path"


def test_ranks_in_the_shell_are_one_note() -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "8", "MASTER_PORT": "29500"}
    assert "RANK=0, WORLD_SIZE=8, MASTER_PORT=29500" in text(judge(environ))


def test_each_variable_has_one_row_and_something_to_say() -> None:
    names = [row.name for row in VARIABLES]
    assert len(names) == len(set(names))
    for row in VARIABLES:
        assert row.always or row.when or row.valid, row.name
        assert bool(row.valid) == bool(row.expected), row.name


def test_the_loopback_interface_is_found() -> None:
    assert "lo" in read_interfaces()


@pytest.mark.needs("vllm")
def test_names_in_the_table_are_spelled_as_the_installed_packages_have_them() -> None:
    """Every VLLM_ name said to be current is in the installed vllm/envs.py."""
    source, _ = read_vllm_source()
    assert source is not None, "vLLM, of the lock, is not installed"
    current = {row.name for row in VARIABLES if row.name.startswith("VLLM_")}
    assert current <= vllm_names(source)


@pytest.mark.needs("ray", "torch")
@pytest.mark.parametrize("prefix", ["RAY_", "TORCH_NCCL_"])
def test_known_names_are_in_the_files_of_the_installed_package(prefix: str) -> None:
    real = read_real_names(prefix)
    assert real, f"no installed package has {prefix} names"
    # Two that nobody reads, and one that only the sources of torch hold.
    absent = {
        "RAY_num_prestart_python_workers",
        "TORCH_NCCL_AVOID_RECORD_STREAMS",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    }
    known = {name for name in KNOWN if name.startswith(prefix)} - absent
    assert known - real == set()


@pytest.mark.parametrize("value", ["", "0", "0,1", "-1", "none", "GPU-4a-b,MIG-1/2/3"])
def test_visible_devices_that_cuda_reads_are_not_mentioned(value: str) -> None:
    assert judge({"CUDA_VISIBLE_DEVICES": value}) == []


@pytest.mark.parametrize("value", ["gpu0", "all", "0 1", "cuda:0"])
def test_visible_devices_that_cuda_does_not_read_are_a_note(value: str) -> None:
    assert kind(judge({"CUDA_VISIBLE_DEVICES": value})) == "variable.value"
