"""How long an engine takes to load its weights: building, reading, moving, finishing.

vLLM itself gives one figure for everything. safetensors maps a file, so its pages are
read only when a parameter copies them: here the pages of each tensor are touched as it
comes out of its file.
"""

from __future__ import annotations

import functools
import mmap
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

GB = 1e9
# Loading that takes at least this long is worth a note.
SLOW_S = 5.0
# The disk is read bypassing the page cache, by as many readers as `gkd warm` has.
READERS = 4
SAMPLE_BYTES = 64 << 20
CHUNK = 4 << 20
# From this share of the disk's speed on, the disk is the bottleneck.
AT_THE_LIMIT = 0.7


@dataclass
class LoadTimes:
    """How one process loaded an engine's weights.

    Seconds: ``build_s`` for making the model, ``read_s`` for reading and unpacking its
    files, ``move_s`` for copying into the parameters (onto the GPU where there is
    one), ``finish_s`` for what follows (transposing, quantising, packing; all of it
    with a loader that reads in a way of its own). ``bytes``
    are those of the tensors; ``disk_bytes`` came from a disk, as the kernel counts it,
    and not from the page cache (0 where the kernel does not tell). Of several ranks
    each copies a part of each tensor alone: there, reading what is mapped counts as
    moving (``reads_apart`` is false).
    """

    build_s: float = 0.0
    read_s: float = 0.0
    move_s: float = 0.0
    finish_s: float = 0.0
    bytes: int = 0
    disk_bytes: int = 0
    reads_apart: bool = True
    started: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        return self.build_s + self.read_s + self.move_s + self.finish_s

    def facts(self) -> dict[str, float]:
        """For the report: seconds and GB."""
        return {
            "load_build_s": round(self.build_s, 2),
            "load_read_s": round(self.read_s, 2),
            "load_move_s": round(self.move_s, 2),
            "load_finish_s": round(self.finish_s, 2),
            "load_gb": round(self.bytes / GB, 3),
            "load_from_disk_gb": round(self.disk_bytes / GB, 3),
        }


_last = LoadTimes()


def last() -> LoadTimes:
    """Those of the engine that this process loaded last."""
    return _last


def measure() -> None:
    """From now on, measure vLLM's loading in this process and its forks."""
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    if not hasattr(BaseModelLoader, "gkd_measured"):
        BaseModelLoader.gkd_measured = True
        BaseModelLoader.load_model = _whole(BaseModelLoader.load_model)
        weights = DefaultModelLoader.get_all_weights
        DefaultModelLoader.get_all_weights = _each(weights)


def _whole(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def measured(*args: Any, **kwargs: Any) -> Any:
        global _last
        disk = disk_bytes()
        _last = found = LoadTimes()
        model = load(*args, **kwargs)
        found.finish_s = time.perf_counter() - found.started - found.seconds
        found.disk_bytes = disk_bytes() - disk
        return model

    return measured


def _each(weights: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(weights)
    def measured(*args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        from vllm.distributed import get_tensor_model_parallel_world_size

        found, before = _last, time.perf_counter()
        found.build_s = before - found.started
        found.reads_apart = get_tensor_model_parallel_world_size() == 1
        for name, tensor in weights(*args, **kwargs):
            if found.reads_apart and tensor.device.type == "cpu":
                touch(tensor)
            found.bytes += tensor.nbytes
            read = time.perf_counter()
            found.read_s += read - before
            yield name, tensor
            before = time.perf_counter()
            found.move_s += before - read

    return measured


def touch(tensor: Any) -> None:
    """Read the pages of a tensor that may be mapped."""
    import torch

    if tensor.is_contiguous():
        tensor.view(-1).view(torch.uint8)[:: mmap.PAGESIZE].sum()


def disk_bytes() -> int:
    """What this process has read from disks, 0 where the kernel does not tell."""
    try:
        return int(psutil.Process().io_counters().read_bytes)
    except (OSError, psutil.Error):  # a sandbox without /proc/PID/io
        return 0


def advice(found: LoadTimes, model: Path, *, prefetches: bool) -> str:
    """What took the time of a slow loading, and what would help; empty for a fast one.

    ``prefetches`` says whether this vLLM's ``safetensors_load_strategy`` has it.
    """
    if found.seconds < SLOW_S or not found.bytes:
        return ""
    told = (
        f"Loading the model took {found.seconds:.1f} s: building it "
        f"{found.build_s:.1f}, reading {found.bytes / GB:.1f} GB {found.read_s:.1f}, "
        f"copying into its parameters {found.move_s:.1f}, packing and quantising "
        f"{found.finish_s:.1f}."
    )
    read_s = found.read_s + (0.0 if found.reads_apart else found.move_s)
    if found.disk_bytes < found.bytes / 2 or read_s < found.seconds / 2:
        return told
    speed = found.disk_bytes / read_s
    told += (
        f" {found.disk_bytes / GB:.1f} GB came from the disk, at {speed / GB:.2f} GB/s"
    )
    disk = disk_speed(model)
    if disk is None:
        told += "."
    elif speed > AT_THE_LIMIT * disk:
        return (
            f"{told}, which is what the disk gives ({disk / GB:.2f} GB/s to {READERS} "
            "readers): a copy on a local disk or in /dev/shm loads faster."
        )
    else:
        told += f"; the disk gives {disk / GB:.2f} GB/s to {READERS} readers."
    ahead = "safetensors_load_strategy='prefetch' in vLLM's arguments, or " * prefetches
    return f"{told} To read ahead: {ahead}`gkd warm {model}` before the start."


def disk_speed(model: Path) -> float | None:
    """Bytes per second that the largest weight file's disk gives to several readers.

    Read past the page cache (O_DIRECT); None where the file system has no such reads.
    """
    files = [path for path in model.glob("*.safetensors") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size, default=None)
    if largest is None:
        return None
    chunks = range(0, min(SAMPLE_BYTES, largest.stat().st_size) - CHUNK + 1, CHUNK)
    try:
        descriptor = os.open(largest, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return None
    try:
        started = time.perf_counter()
        with ThreadPoolExecutor(READERS) as pool:
            read = sum(pool.map(lambda at: _read(descriptor, at), chunks))
        return read / (time.perf_counter() - started) if read else None
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _read(descriptor: int, at: int) -> int:
    with mmap.mmap(-1, CHUNK) as buffer:  # page-aligned, as O_DIRECT needs it
        return os.preadv(descriptor, [buffer], at)
