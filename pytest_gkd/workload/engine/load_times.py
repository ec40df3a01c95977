"""How long an engine takes to load its weights, part by part.

vLLM itself gives one figure for everything. safetensors maps a file, so its pages are
read only when a parameter copies them: here the pages of each tensor are touched as it
comes out of its file. What the disk took is told from what the processor took by their
clocks, whatever the format: a process that waits for a disk computes nothing.
"""

from __future__ import annotations

import functools
import mmap
import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from pytest_gkd.processes import procfs

GB = 1e9
# Loading that takes at least this long is worth a note.
SLOW_S = 5.0
# The disk is read bypassing the page cache, by as many readers as `gkd warm` has, and
# for no longer than SAMPLE_S.
READERS = 4
SAMPLE_BYTES = 256 << 20
SAMPLE_S = 2.0
CHUNK = 4 << 20
# From this share of the disk's speed on, the disk is the bottleneck.
AT_THE_LIMIT = 0.7
# As /proc/mounts names them; all of FUSE counts (object stores, JuiceFS, sshfs).
NETWORKED = re.compile(r"nfs4?|lustre|ceph|cifs|smb3|gpfs|beegfs|9p|virtiofs|fuse.*")
# Where vLLM reads ahead by itself, given the memory (safetensors_weights_iterator in
# model_executor/model_loader/weight_utils.py, the same from 0.21 to 0.32).
READ_AHEAD_BY_VLLM = ("nfs", "nfs4", "lustre")


@dataclass
class LoadTimes:
    """How one process loaded an engine's weights.

    Seconds: ``build_s`` for making the model, ``read_s`` for waiting for the disk,
    ``unpack_s`` for making tensors of the files' bytes (from the page cache too),
    ``move_s`` for copying into the parameters (onto the GPU where there is one),
    ``finish_s`` for what follows (transposing, quantising, packing; all of it with a
    loader that reads in a way of its own). ``bytes`` are those of the tensors;
    ``disk_bytes`` came from a disk, as the kernel counts it, and not from the page
    cache (0 where the kernel does not tell, as of FUSE).
    """

    build_s: float = 0.0
    read_s: float = 0.0
    unpack_s: float = 0.0
    move_s: float = 0.0
    finish_s: float = 0.0
    bytes: int = 0
    disk_bytes: int = 0
    started: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        parts = (self.build_s, self.read_s, self.unpack_s, self.move_s, self.finish_s)
        return sum(parts)

    def facts(self) -> dict[str, float]:
        """For the report: seconds and GB."""
        return {
            "load_build_s": round(self.build_s, 2),
            "load_read_s": round(self.read_s, 2),
            "load_unpack_s": round(self.unpack_s, 2),
            "load_move_s": round(self.move_s, 2),
            "load_finish_s": round(self.finish_s, 2),
            "load_gb": round(self.bytes / GB, 3),
            "load_from_disk_gb": round(self.disk_bytes / GB, 3),
        }


_last = LoadTimes()


class Stopwatch:
    """Tells waiting for a disk from computing, in a thread that reads by itself."""

    def __init__(self) -> None:
        self._last = clocks()

    def lap(self) -> tuple[float, float]:
        """Seconds since the last lap, and how many of them were spent waiting.

        Those in which no thread of this process computed and this one did not lack a
        processor either: with threads that compute at the same time, the least that
        it can have been.
        """
        before, self._last = self._last, clocks()
        wall, *busy = (now - then for now, then in zip(self._last, before, strict=True))
        return wall, min(max(0.0, wall - sum(busy)), wall)


def clocks() -> tuple[float, float, float]:
    """Seconds: the time, what all threads computed, what this one lacked a processor.

    The last is 0 where the kernel does not tell (Documentation/scheduler/sched-stats).
    """
    # No pathlib or text layers: this is read twice for every tensor.
    try:
        here = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        try:
            queued = int(os.read(here, 100).split()[1]) / 1e9
        finally:
            os.close(here)
    except (OSError, IndexError):
        queued = 0.0
    return time.perf_counter(), time.process_time(), queued


class DiskWaits:
    """Seconds in which some thread of this process was seen waiting for a disk.

    For loading in several threads, whose clocks end with them: each look counts for the
    time since the last one if a thread is in the state D of proc(5), as when a page of
    a mapped file has to be read.
    """

    EVERY_S = 0.1

    def __init__(self) -> None:
        self.seconds = 0.0
        self._last = time.perf_counter()

    def look(self) -> None:
        before, self._last = self._last, time.perf_counter()
        for thread in Path("/proc/self/task").iterdir():
            words = procfs.own_words(f"self/task/{thread.name}")
            if words and words[0] == b"D":
                self.seconds += self._last - before
                return


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

        found, watch = _last, Stopwatch()
        found.build_s = time.perf_counter() - found.started
        # Of several ranks each copies a part of each tensor alone, and reads it then.
        alone = get_tensor_model_parallel_world_size() == 1
        for name, tensor in weights(*args, **kwargs):
            if alone and tensor.device.type == "cpu":
                touch(tensor)
            found.bytes += tensor.nbytes
            seconds, waited = watch.lap()
            found.read_s += waited
            found.unpack_s += seconds - waited
            yield name, tensor
            seconds, waited = watch.lap()
            # Alone, it can only have waited for the GPU.
            waited = 0.0 if alone else waited
            found.read_s += waited
            found.move_s += seconds - waited

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
        f"{found.build_s:.1f}, waiting for the disk {found.read_s:.1f}, making tensors "
        f"of {found.bytes / GB:.1f} GB {found.unpack_s:.1f}, copying into its "
        f"parameters {found.move_s:.1f}, packing and quantising {found.finish_s:.1f}."
    )
    largest = largest_file(model)
    mapped = largest is not None and largest.suffix == ".safetensors"
    if found.unpack_s > found.seconds / 2 and largest is not None and not mapped:
        return f"{told} Files saved as .safetensors are mapped, not unpacked."
    if found.read_s < found.seconds / 2:
        return told
    kind = file_system(largest or model)
    networked = NETWORKED.fullmatch(kind) is not None
    # What comes over a network the kernel may not count.
    size = found.disk_bytes or (found.bytes if networked else 0)
    if not size:
        return told
    speed = size / (found.read_s + found.unpack_s)
    on = f" ({kind})" if kind else ""
    told += f" {size / GB:.1f} GB came from the disk{on}, at {speed / GB:.2f} GB/s"
    disk = disk_speed(largest) if largest is not None else None
    if disk is None:
        told += "."
    elif speed > AT_THE_LIMIT * disk:
        return (
            f"{told}, which is what the disk gives ({disk / GB:.2f} GB/s to {READERS} "
            "readers): a copy on a local disk or in /dev/shm loads faster."
        )
    else:
        told += f"; the disk gives {disk / GB:.2f} GB/s to {READERS} readers."
    ways = []
    if prefetches and kind not in READ_AHEAD_BY_VLLM:
        ways.append("safetensors_load_strategy='prefetch'")
    if mapped and networked:
        # vllm/config/load.py and its extras, 0.21 to 0.32.
        ways.append("load_format='runai_streamer' (pip install 'vllm[runai]')")
    ahead = f"{' or '.join(ways)} in vLLM's arguments, or " if ways else ""
    return f"{told} To read ahead: {ahead}`gkd warm {model}` before the start."


def largest_file(model: Path) -> Path | None:
    files = [path for path in (model, *model.glob("*")) if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size, default=None)


def file_system(path: Path) -> str:
    """The type of the file system that holds ``path``; empty if that is not known."""
    here = path.resolve()
    mounted = psutil.disk_partitions(all=True)
    kinds = {Path(one.mountpoint): one.fstype for one in mounted}
    return next((kinds[at] for at in (here, *here.parents) if at in kinds), "")


def disk_speed(file: Path) -> float | None:
    """Bytes per second that the disk of ``file`` gives to several readers.

    Read past the page cache (O_DIRECT); None where the file system has no such reads.
    """
    chunks = range(0, min(SAMPLE_BYTES, file.stat().st_size) - CHUNK + 1, CHUNK)
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return None
    started = time.perf_counter()

    def read(at: int) -> int:
        in_time = time.perf_counter() - started < SAMPLE_S
        return read_block(descriptor, at) if in_time else 0

    try:
        with ThreadPoolExecutor(READERS) as pool:
            size = sum(pool.map(read, chunks))
        return size / (time.perf_counter() - started) if size else None
    except OSError:
        return None
    finally:
        os.close(descriptor)


def read_block(descriptor: int, at: int) -> int:
    with mmap.mmap(-1, CHUNK) as buffer:  # page-aligned, as O_DIRECT needs it
        return os.preadv(descriptor, [buffer], at)
