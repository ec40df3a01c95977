"""The records of NCCL's flight recorder that the ranks on one machine leave or give.

torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp (DumpPipe): a byte in a rank's pipe
asks for its record, which is written to a file. Nothing is signalled or ended. This
also runs on a job's other nodes (see ``node_agent``). TorchComms has no pipe, and may
have written its files at any time; torch's debug server gives its records.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from pytest_gkd.clock import monotonic
from pytest_gkd.diagnosis import flight_records
from pytest_gkd.processes import procfs

PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
DUMPS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
TORCHCOMMS_DUMP = "TORCHCOMM_FR_DUMP_TEMP_FILE"
SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
# Where they are written without any: below the cache directory by torch 2.9 to 2.15
# and by TorchComms, and below /tmp by torch 2.3 to 2.8.
DEFAULTS = ("torch/comm_lib_trace_rank_", "/tmp/nccl_trace_rank_")  # noqa: S108
MOST_BYTES = 64 << 20
PIPE_S = 12.0  # torch looks at its pipe once a second, and py-spy has held the rank


class Recorder(NamedTuple):
    """A rank's flight recorder: whether it was asked for its record, and the record as
    JSON with the file that holds it, both empty where there is none."""

    asked: bool = False
    path: str = ""
    record: str = ""


def ask(ranks: Mapping[int, int]) -> dict[int, Recorder]:
    """The recorders of those processes that use NCCL, by pid.

    ``ranks`` are the processes' ranks by pid. Takes PIPE_S seconds at most.
    """
    began = time.time()
    until = monotonic() + PIPE_S
    places: dict[int, list[Path]] = {}
    since: dict[int, float] = {}
    found: dict[int, Recorder] = {}
    for pid, rank in ranks.items():
        if uses_nccl(pid):
            environ = procfs.environ(pid)
            stem = environ.get(PIPE)
            pipe = path_of(pid, f"{stem}{rank}.pipe") if stem else None
            told = [environ[name] for name in DUMPS if environ.get(name)]
            stems = told or default_stems(environ)
            places[pid] = [path_of(pid, f"{one}{rank}") for one in stems]
            asked = pipe is not None and write_to(pipe)
            found[pid] = Recorder(asked)
            # Without being asked a rank has written at a timeout, which counts; what
            # was there before it began is another run's.
            since[pid] = began - 1 if asked else _began(pid)
    while True:
        for pid, paths in places.items():
            if not found[pid].record and (read := _newest(paths, since[pid])):
                found[pid] = Recorder(found[pid].asked, *read)
        waits = any(one.asked and not one.record for one in found.values())
        if not waits or monotonic() > until:
            return found
        time.sleep(0.2)


def uses_nccl(pid: int) -> bool:
    """Whether a process has NCCL loaded and a GPU open."""
    maps = _maps(pid)
    # torch's CUDA build has it loaded on machines without a GPU as well.
    return "libnccl" in maps and "/dev/nvidia" in maps


def uses_torchcomms(pid: int) -> bool:
    """Whether a process has one of TorchComms' backends loaded, on a GPU or not."""
    return "/torchcomms/_comms_" in _maps(pid)


def _maps(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text("utf-8", "replace")
    except OSError:
        return ""


def path_of(pid: int, name: str) -> Path:
    """A process's path as it is seen from here: its own root and directory."""
    if not name.startswith("/"):
        return Path(f"/proc/{pid}/cwd") / name
    root = Path(f"/proc/{pid}/root")
    mounts = [procfs.link(one, "ns/mnt") for one in (pid, os.getpid())]
    try:
        is_ours = mounts[0] == mounts[1] and root.samefile("/")
    except OSError:
        is_ours = True  # it may not be seen, and is as a rule the same
    return Path(name) if is_ours else root / name.lstrip("/")


def write_to(pipe: Path) -> bool:
    """A byte to a pipe that somebody reads, which asks torch for its record."""
    try:
        fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return False  # there is none, or nobody reads it
    try:
        return stat.S_ISFIFO(os.fstat(fd).st_mode) and os.write(fd, b"1") == 1
    except OSError:
        return False
    finally:
        os.close(fd)


def _began(pid: int) -> float:
    """When a process began, in seconds since 1970; now if it has ended."""
    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return time.time()


def default_stems(environ: Mapping[str, str]) -> list[str]:
    """The names, but for the rank, of the files where no variable tells them."""
    home = Path(environ.get("HOME", "/tmp"), ".cache")  # noqa: S108 - as torch does
    caches = dict.fromkeys((Path(environ.get("XDG_CACHE_HOME") or home), home))
    return [*(str(cache / DEFAULTS[0]) for cache in caches), DEFAULTS[1]]


def _newest(paths: Sequence[Path], since: float) -> tuple[str, str] | None:
    """The newest file with a record, and the record as JSON."""
    found: list[tuple[float, str, str]] = []
    for path in paths:
        try:
            # Not Path.open: what is a pipe must not hold this.
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
            with os.fdopen(fd, "rb") as file:
                about = os.fstat(fd)
                is_file = stat.S_ISREG(about.st_mode) and about.st_size <= MOST_BYTES
                if is_file and about.st_mtime >= since:
                    record = flight_records.read(file.read(MOST_BYTES))
                    if not flight_records.is_torchcomms(record):
                        text = flight_records.shortened(record)
                        found.append((about.st_mtime, str(path), text))
        except (OSError, flight_records.RecordError):
            continue  # it is not there, or not whole yet
    return max(found)[1:] if found else None
