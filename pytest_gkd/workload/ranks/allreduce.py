"""Checks that an all-reduce is correct, and measures how fast it is.

What every rank computes with: inputs whose sums are known exactly, the comparison, and
the timing. Bus bandwidth is defined as in nccl-tests (doc/PERFORMANCE.md): a ring
all-reduce moves 2(n-1)/n times the buffer over each rank's link, so the figure can be
compared with the link's speed whatever the number of ranks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

KIB = 1 << 10
MIB = 1 << 20
# On CPUs no link is measured, and more than these would only show the memory's speed.
BANDWIDTH_BYTES = (4 * KIB, 64 * KIB, MIB, 16 * MIB)
# NVLink is not saturated below these.
NCCL_BYTES = (*BANDWIDTH_BYTES, 64 * MIB, 256 * MIB, 1024 * MIB)

# One element, an odd count, and a larger buffer.
CHECKED_COUNTS = (1, 1023, 256 * KIB)

# bfloat16 holds every integer up to 256. At most this many ranks add a one everywhere,
# and each rank's own mark is at most MARK_LIMIT, so that no partial sum in any order
# leaves that range.
COUNTED_RANKS = 128
MARK_LIMIT = 64

WARM_UP = 2
# Time limit per size, unless three runs take longer. On CPUs the ranks share the cores
# with the engine that starts beside them.
TIMED_S = {"cuda": 0.4, "cpu": 0.1}


@dataclass(frozen=True)
class Operation:
    """One collective that every rank runs: its kind, dtype and number of elements."""

    kind: str
    dtype: str
    count: int

    @property
    def name(self) -> str:
        """Its name in reports: ``all_reduce float32[1023]``."""
        return f"{self.kind} {self.dtype}[{self.count}]"


def checked_operations(backend: str) -> tuple[Operation, ...]:
    """The collectives whose results are compared, in the order in which they run."""
    dtypes = ["float32", "bfloat16", "int64"]
    if backend == "nccl":
        dtypes.append("float16")
    reduces = [Operation("all_reduce", d, n) for d in dtypes for n in CHECKED_COUNTS]
    return (
        *reduces,
        Operation("broadcast", "float32", CHECKED_COUNTS[1]),
        Operation("all_gather", "float32", CHECKED_COUNTS[1]),
    )


def sizes(backend: str, world_size: int, free_bytes: int = 0) -> tuple[int, ...]:
    """The buffers, in bytes, whose all-reduce is timed.

    A single rank has no bus; on GPUs no buffer takes more than an eighth of
    ``free_bytes``, the smallest amount free on any of the ranks' GPUs.
    """
    if world_size < 2:
        return BANDWIDTH_BYTES[:1]
    if backend != "nccl":
        return BANDWIDTH_BYTES
    return tuple(one for one in NCCL_BYTES if one <= max(MIB, free_bytes // 8))


def size_name(size_bytes: int) -> str:
    """``64 KiB`` for 65536."""
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if size_bytes >= unit and size_bytes % unit == 0:
            return f"{size_bytes // unit} {name}"
    return f"{size_bytes} B"


def contribution(
    rank: int, world_size: int, count: int, dtype: torch.dtype, device: Any
) -> Tensor:
    """What ``rank`` adds to a sum: a one everywhere, and a mark at its own places.

    Shape [count]. Ranks take turns: element i also carries the mark of rank i modulo
    the world size, so a rank whose contribution is lost or doubled is noticed.
    """
    import torch

    everywhere = 1 if rank < COUNTED_RANKS else 0
    values = torch.full((count,), everywhere, dtype=dtype, device=device)
    values[rank::world_size] += mark(rank)
    return values


def mark(rank: int) -> int:
    """The number that ``rank`` adds at its own places, 1 to ``MARK_LIMIT``."""
    return rank % MARK_LIMIT + 1


def expected_sum(world_size: int, dtype: torch.dtype, device: Any) -> Tensor:
    """The sum of all ranks' contributions, exact in every dtype.

    Shape [world size]: one period, which the elements of any buffer repeat.
    """
    import torch

    marks = [mark(rank) for rank in range(world_size)]
    ones = min(world_size, COUNTED_RANKS)
    return torch.tensor(marks, dtype=torch.int64, device=device).add(ones).to(dtype)


def first_difference(got: Tensor, period: Tensor) -> tuple[int, float, float] | None:
    """Index, value and expected value of the first wrong element, or None.

    ``got`` [count] should repeat ``period``; the last repetition may be partial. A NaN
    is always wrong.
    """
    length = len(period)
    whole = len(got) // length * length
    # Row by row, so that no second buffer of expected values has to be filled.
    for start, part, expected in (
        (0, got[:whole].view(-1, length), period),
        (whole, got[whole:], period[: len(got) - whole]),
    ):
        wrong = (part != expected).flatten()
        if bool(wrong.any()):
            index = start + int(wrong.nonzero()[0])
            return index, float(got[index]), float(period[index % length])
    return None


def iterations(seconds: float, device: str) -> int:
    """How often to time an all-reduce of that duration: 3 to 20 times.

    ``device`` is the type of the buffers' device, ``cuda`` or ``cpu``.
    """
    return max(3, min(20, int(TIMED_S[device] / seconds)))


def time_all_reduce(buffer: Tensor, group: Any) -> float:
    """Seconds per all-reduce of ``buffer`` on this rank, the median of several.

    From the last warm-up rank 0 decides how many to time, and tells the others: ranks
    that share few cores are slow, and the stage's budget is limited. On a GPU, time is
    measured by events on the stream, so it covers the transfer and not the call.
    """
    import torch
    import torch.distributed as dist

    for _ in range(WARM_UP):
        started = time.perf_counter()
        dist.all_reduce(buffer, group=group)
        synchronize(buffer)
    count = iterations(time.perf_counter() - started, buffer.device.type)
    times = torch.tensor([count], dtype=torch.int64, device=buffer.device)
    dist.broadcast(times, 0, group=group)
    if buffer.device.type == "cuda":
        pairs = []
        for _ in range(int(times)):
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            dist.all_reduce(buffer, group=group)
            end.record()
            pairs.append((start, end))
        synchronize(buffer)
        return float(statistics.median(s.elapsed_time(e) / 1e3 for s, e in pairs))
    seconds = []
    for _ in range(int(times)):
        started = time.perf_counter()
        dist.all_reduce(buffer, group=group)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def synchronize(buffer: Tensor) -> None:
    """Wait for all work on the GPU that holds ``buffer``, if one does."""
    import torch

    if buffer.device.type == "cuda":
        torch.cuda.synchronize(buffer.device)


def bus_bandwidth_gb_s(size_bytes: int, seconds: float, world_size: int) -> float:
    """2(n-1)/n * bytes / time, in 1e9 bytes per second; 0 for a single rank."""
    return 2 * (world_size - 1) / world_size * size_bytes / seconds / 1e9


def slowest(medians_s: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """The slowest rank's seconds, per size in bytes.

    A collective is over when its last rank is, and that is what a job waits for.
    """
    return {size: max(one[size] for one in medians_s) for size in medians_s[0]}


def bandwidths(seconds: Mapping[int, float], world_size: int) -> dict[str, float]:
    """Bus bandwidth in GB/s by size name, to three digits; {} for one rank."""
    if world_size < 2:
        return {}
    found = {
        size: bus_bandwidth_gb_s(size, seconds[size], world_size)
        for size in sorted(seconds)
    }
    return {size_name(size): float(f"{gb_s:.3g}") for size, gb_s in found.items()}


def too_slow(
    table: Mapping[str, float],
    floor_gb_s: float,
    where: str,
    origin: str = "--gkd-min-bus-bandwidth",
) -> str:
    """Why the best of ``table`` (GB/s by size) misses the floor; empty if it does not.

    ``where`` names ranks and backend, ``origin`` says who set the floor. A floor of 0
    demands nothing; a single rank, which has no bus, misses any other.
    """
    if floor_gb_s <= 0:
        return ""
    if not table:
        return (
            f"one rank has no bus to measure ({where}), and {origin} "
            f"asks for {floor_gb_s:g} GB/s; expected 2 ranks or more"
        )
    best = max(table, key=lambda size: table[size])
    if table[best] >= floor_gb_s:
        return ""
    return (
        f"bus bandwidth reached {table[best]:g} GB/s at most (at {best}, {where}); "
        f"expected {floor_gb_s:g} GB/s or more, from {origin}"
    )
