"""A stage of ``gkd gpu-report``: it sleeps while a GPU computes, and is not stuck."""

from __future__ import annotations

import math
import os
import threading

import pytest

from pytest_gkd.clock import monotonic
from pytest_gkd.stage_api import StageContext

# A stage with this budget and no progress in its processes was ended after 41 s
# (processes/stall.py); while a GPU is computing for it, it must not be.
BUDGET_S = 100
WAIT_S = 75.0
LEAST_S = 60.0
CYCLES = 1 << 30


@pytest.mark.gkd_stage("busy_gpu", timeout=BUDGET_S)
def test_busy_gpu(gkd: StageContext) -> None:
    import torch

    gkd.step("timing a kernel")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(CYCLES)  # the first call also loads the module
    begin.record()
    torch.cuda._sleep(CYCLES)
    end.record()
    end.synchronize()
    kernel_s = begin.elapsed_time(end) / 1e3

    # Without blocking=True the wait would use a whole core (CUDA runtime API,
    # cudaEventBlockingSync), and the process would not be idle.
    done = torch.cuda.Event(blocking=True)
    for _ in range(math.ceil(WAIT_S / kernel_s)):
        torch.cuda._sleep(CYCLES)
    done.record()
    gkd.step("waiting for the GPU")
    started = monotonic()
    read, write = os.pipe()

    def wait() -> None:
        done.synchronize()
        os.write(write, b".")

    # In a thread, so that the main thread does not wake however CUDA waits.
    threading.Thread(target=wait, daemon=True).start()
    os.read(read, 1)
    waited_s = monotonic() - started
    gkd.fact("waited_s", round(waited_s, 1))
    assert waited_s > LEAST_S, (
        f"the kernels took {waited_s:.1f} s; {LEAST_S:g} s are needed to tell"
    )
    gkd.fact("summary", f"slept {waited_s:.0f} s while the GPU computed")
