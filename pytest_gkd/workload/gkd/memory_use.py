"""Detects training steps that leak memory.

Resident memory cannot show it: on a CPU it rose and fell by 90 MB between steps of a
healthy 135M model, whose allocations were equal to 6 kB. So allocations are counted.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable
from collections.abc import Sequence as Listing
from typing import TYPE_CHECKING

from pytest_gkd.stage_api import StageFault

if TYPE_CHECKING:
    from pytest_gkd.workload.gkd.step import StepReport

# A step that kept nothing was measured to leave at most 10 kB behind (tiny and 135M
# models, CPU). One that kept its loss and the consumed graph, the smallest leak that
# matters, left 0.1 MB with the tiny model and 1.3 MB at 135M.
GROWTH_BYTES = 64 << 10
PROBE_BYTES, PROBES = 1 << 20, 5


class _Malloc(ctypes.Structure):
    """``struct mallinfo2`` (glibc 2.33, malloc.h); sizes in bytes."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def allocated_bytes(device: str) -> int | None:
    """Bytes that this process has allocated now: on ``device`` if it is a GPU.

    On a CPU it is what malloc has handed out. None if that is unknown: without glibc,
    or with another allocator preloaded.
    """
    import torch

    if torch.device(device).type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    return _in_use() if _sees_tensors() else None


def _in_use() -> int:
    """Bytes that malloc has handed out; 0 without glibc."""
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is None:
        return 0
    function.restype = _Malloc
    found = function()
    return int(found.uordblks) + int(found.hblkhd)


@functools.cache
def _sees_tensors() -> bool:
    """Whether torch allocates through the malloc whose statistics are read.

    Most of several probes decide, since another thread may free memory meanwhile.
    """
    import torch

    seen = 0
    for _ in range(PROBES):
        before = _in_use()
        probe = torch.empty(PROBE_BYTES, dtype=torch.uint8)
        seen += _in_use() - before >= PROBE_BYTES
        del probe
    return seen > PROBES // 2


def growths(reports: Listing[StepReport]) -> list[int]:
    """Bytes that each step but the first left behind; empty if they were not counted.

    The first creates the optimizer's state and other one-time allocations.
    """
    held = [report.allocated_bytes for report in reports]
    return [
        now - before
        for before, now in itertools.pairwise(held)
        if now is not None and before is not None
    ]


def grows(reports: Listing[StepReport]) -> bool:
    """Whether every step but the first, and at least two, left memory behind."""
    found = growths(reports)
    return len(found) > 1 and min(found) > GROWTH_BYTES


def steps_again(
    step: Callable[[], StepReport], least: int, most: int
) -> list[StepReport]:
    """``least`` steps, and more while memory grows with every one, up to ``most``.

    Another thread's occasional allocations do not grow with every step; a leak does.
    """
    reports: list[StepReport] = []
    while len(reports) < least or (len(reports) < most and grows(reports)):
        reports.append(step())
    return reports


def judge_memory(reports: Listing[StepReport], device: str) -> None:
    """Raise StageFault ``train.memory-leak`` if memory grows with every step.

    ``reports`` are of identical steps on one batch, with garbage collected after each.
    """
    if not grows(reports):
        return
    found = growths(reports)
    where = "GPU" if device.startswith("cuda") else "host"
    shown = ", ".join(f"{count / 1e6:.1f}" for count in found)
    raise StageFault(
        "train.memory-leak",
        f"allocated {where} memory grows with every training step on one batch: by "
        f"{shown} MB; expected it to be level after the first",
        facts={
            "growth_bytes": found,
            "allocated_bytes": [report.allocated_bytes for report in reports],
        },
    )
