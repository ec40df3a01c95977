"""Checks that an all-reduce is right, and measures how fast it is.

What every rank computes with: inputs whose sums are known exactly, the comparison, and
the timing. Bus bandwidth is that of nccl-tests (doc/PERFORMANCE.md): a ring all-reduce
moves 2(n-1)/n times the buffer over each rank's link, so a number that uses it can be
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
BANDWIDTH_BYTES = (4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB)
# NVLink is not full below these.
NCCL_BYTES = (*BANDWIDTH_BYTES, 256 * MIB, 1024 * MIB)

# One element, a count that no power of two divides, and a buffer of some size.
CHECKED_COUNTS = (1, 1023, 256 * KIB)

# The widest integer up to which bfloat16 holds every integer is 256. At most this many
# ranks add a one everywhere, and the rank's own share is at most MARK_LIMIT, so that
# no partial sum in any order leaves that range.
COUNTED_RANKS = 128
MARK_LIMIT = 64

WARM_UP = 2
# What one size may take to time, unless three times take longer. On CPUs the ranks
# share the cores with the engine that starts beside them, and no link is measured.
TIMED_S = {"cuda": 0.4, "cpu": 0.1}


@dataclass(frozen=True)
class Operation:
    """One collective that every rank runs: its kind, dtype and number of elements."""

    kind: str
    dtype: str
    count: int

    @property
    def name(self) -> str:
        """As reports name it: ``all_reduce float32[1023]``."""
        return f"{self.kind} {self.dtype}[{self.count}]"


def checked_operations(backend: str) -> tuple[Operation, ...]:
    """The collectives whose results are compared, in the order they are run."""
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

    One rank has no bus; on GPUs none takes more than an eighth of ``free_bytes``, the
    least that a GPU of the ranks has free.
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
    """What ``rank`` puts into a sum: a one everywhere, and a mark in its own places.

    Shape [count]. Places go round the ranks: element i also carries the mark of rank
    i modulo the world size, so a rank whose share is lost or doubled shows.
    """
    import torch

    everywhere = 1 if rank < COUNTED_RANKS else 0
    values = torch.full((count,), everywhere, dtype=dtype, device=device)
    values[rank::world_size] += mark(rank)
    return values


def mark(rank: int) -> int:
    """The number that ``rank`` adds in its own places, 1 to ``MARK_LIMIT``."""
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

    ``got`` [count] should repeat ``period``, the last time perhaps in part. A NaN is
    wrong, whatever is expected.
    """
    length = len(period)
    whole = len(got) // length * length
    # In rows, so that no second buffer of expected values has to be written.
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
    """How often an all-reduce that takes so long is timed: 3 to 20 times.

    ``device`` is the type of the buffers' device, ``cuda`` or ``cpu``.
    """
    return max(3, min(20, int(TIMED_S[device] / seconds)))


def time_all_reduce(buffer: Tensor, group: Any) -> float:
    """Seconds of one all-reduce of ``buffer`` on this rank, the median of several.

    The last warm-up tells rank 0 how many to time, and rank 0 tells the others: ranks
    that share few cores are slow, and the stage's budget is bounded. On a GPU the time
    is taken by events on the stream, so it holds the transfer and not the call.
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
    """Of every rank's seconds per size in bytes, the slowest rank's.

    A collective is over when its last rank is, and that is what a job waits for.
    """
    return {size: max(one[size] for one in medians_s) for size in medians_s[0]}


def bandwidths(seconds: Mapping[int, float], world_size: int) -> dict[str, float]:
    """Bus bandwidth in GB/s by the size's name, to three figures; {} for one rank."""
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

    ``where`` names ranks and backend, ``origin`` who set the floor. A floor of 0 asks
    for nothing; one that a single rank cannot meet, for want of a bus, is missed.
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
