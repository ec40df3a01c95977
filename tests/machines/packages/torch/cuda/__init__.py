"""CUDA's devices on a recorded machine, in torch's words for an old driver."""

import functools
import os
import warnings
from pathlib import Path
from typing import Any

OLDEST_DRIVER = 525  # that runs CUDA 12.9, by minor version compatibility


@functools.cache
def _devices() -> int:
    lines = Path(os.environ["RECORDED_MACHINE"]).read_text().splitlines()
    told = [line.split() for line in lines]
    driver = next((words[1] for words in told if words[0] == "driver"), "")
    if not driver:
        return 0
    if int(driver.partition(".")[0]) < OLDEST_DRIVER:
        warnings.warn(
            "CUDA initialization: The NVIDIA driver on your system is too old (found "
            "version 11040). Please update your GPU driver",
            stacklevel=2,
        )
        return 0
    counts = [int(words[1]) for words in told if words[0] == "cuda"]
    return counts[0] if counts else sum(words[0] == "gpu" for words in told)


def is_available() -> bool:
    return device_count() > 0


def device_count() -> int:
    return _devices()


def __getattr__(name: str) -> Any:
    # These two make no CUDA context; what else there is would take memory of the GPU.
    raise AttributeError(f"torch.cuda.{name} touches the GPU")
