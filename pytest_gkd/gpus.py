"""How many GPUs this process may use, asked of the driver, without torch."""

from __future__ import annotations

import ctypes
import os


def driver_count() -> int:
    """GPUs that NVIDIA's driver shows; 0 without the driver.

    NVML's ``nvmlDeviceGetCount_v2`` (NVML API reference) counts the devices that this
    container may open, which /proc/driver/nvidia does not.
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    if nvml.nvmlInit_v2() != 0:
        return 0
    count = ctypes.c_uint(0)
    found = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0
    nvml.nvmlShutdown()
    return int(count.value) if found else 0


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
