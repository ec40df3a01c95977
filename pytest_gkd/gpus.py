"""How many GPUs this process may use, asked of the driver, without torch."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator


@contextlib.contextmanager
def _nvml() -> Iterator[ctypes.CDLL | None]:
    """NVIDIA's management library, None without a driver that answers."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        yield None
        return
    if nvml.nvmlInit_v2() != 0:
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _devices(nvml: ctypes.CDLL) -> int:
    count = ctypes.c_uint(0)
    found = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0
    return int(count.value) if found else 0


def driver_count() -> int:
    """GPUs that NVIDIA's driver shows; 0 without the driver.

    NVML's ``nvmlDeviceGetCount_v2`` (NVML API reference) counts the devices that this
    container may open, which /proc/driver/nvidia does not.
    """
    with _nvml() as nvml:
        return 0 if nvml is None else _devices(nvml)


def visible(count: int, environment: str | None) -> int:
    """GPUs left of ``count`` by a CUDA_VISIBLE_DEVICES value, None when it is unset.

    CUDA stops reading at the first entry that names no device (CUDA programming
    guide, environment variables).
    """
    if environment is None:
        return count
    left = 0
    for entry in environment.split(","):
        name = entry.strip()
        index = name.isdigit() and int(name) < count
        if not index and not name.startswith(("GPU-", "MIG-")):
            break
        left += 1
    return min(left, count)


def usable() -> int:
    """GPUs that a process started now would see."""
    return visible(driver_count(), os.environ.get("CUDA_VISIBLE_DEVICES"))


class _Utilization(ctypes.Structure):
    """NVML's ``nvmlUtilization_t``: percent of the last sample period."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


def busiest_percent() -> int:
    """How busy the busiest GPU is, whoever uses it; 0 without NVIDIA's driver.

    NVML's ``nvmlDeviceGetUtilizationRates`` (NVML API reference): the share of the
    last sample period, a sixth of a second to a second, in which a kernel ran.
    """
    most = 0
    with _nvml() as nvml:
        for index in range(0 if nvml is None else _devices(nvml)):
            assert nvml is not None
            device, used = ctypes.c_void_p(), _Utilization()
            if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == 0:
                nvml.nvmlDeviceGetUtilizationRates(device, ctypes.byref(used))
                most = max(most, int(used.gpu))
    return most


def describe() -> list[str]:
    """The driver's version and each GPU's name and memory; empty without a driver.

    NVML's ``nvmlSystemGetDriverVersion``, ``nvmlDeviceGetName`` and
    ``nvmlDeviceGetMemoryInfo`` (NVML API reference; buffers of 80 and 96 bytes).
    """
    found = []
    with _nvml() as nvml:
        if nvml is None:
            return []
        text = ctypes.create_string_buffer(96)
        if nvml.nvmlSystemGetDriverVersion(text, 80) == 0:
            found.append(f"driver {text.value.decode('utf-8', 'replace')}")
        for index in range(_devices(nvml)):
            device, memory = ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()
            if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) != 0:
                continue
            nvml.nvmlDeviceGetName(device, text, 96)
            name = text.value.decode("utf-8", "replace")
            nvml.nvmlDeviceGetMemoryInfo(device, memory)
            total, free, _ = memory
            room = f"{free >> 20} of {total >> 20} MiB free"
            found.append(f"{index}: {name}, {room}")
    return found
