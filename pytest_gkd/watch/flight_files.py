"""The records of NCCL's flight recorder that the ranks on one machine leave or give.

torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp (DumpPipe): a byte in a rank's pipe
asks for its record, which is written to a file. Nothing is signalled or ended. This
also runs on a job's other nodes (see ``node_agent``).
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pytest_gkd.clock import monotonic
from pytest_gkd.diagnosis import flight_records
from pytest_gkd.processes import procfs

PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
DUMPS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
# Where torch writes a record without either: 2.9 to 2.15, and 2.3 to 2.8.
DEFAULTS = (".cache/torch/comm_lib_trace_rank_", "/tmp/nccl_trace_rank_")  # noqa: S108
MOST_BYTES = 64 << 20
PIPE_S = 8.0  # torch looks at its pipe once a second


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
    found: dict[int, Recorder] = {}
    for pid, rank in ranks.items():
        if uses_nccl(pid):
            environ = procfs.environ(pid)
            stem = environ.get(PIPE)
            pipe = path_of(pid, f"{stem}{rank}.pipe") if stem else None
            places[pid] = _dump_files(pid, environ, rank)
            found[pid] = Recorder(pipe is not None and write_to(pipe))
    while True:
        for pid, paths in places.items():
            asked, _, record = found[pid]
            if not record and (read := _newest(paths)):
                path, at, text = read
                # Without being asked a rank has written at a timeout, which counts.
                if not asked or at >= began - 1:
                    found[pid] = Recorder(asked, str(path), text)
        waits = any(one.asked and not one.record for one in found.values())
        if not waits or monotonic() > until:
            return found
        time.sleep(0.2)


def uses_nccl(pid: int) -> bool:
    """Whether a process has NCCL loaded and a GPU open."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text("utf-8", "replace")
    except OSError:
        return False
    # torch's CUDA build has it loaded on machines without a GPU as well.
    return "libnccl" in maps and "/dev/nvidia" in maps


def path_of(pid: int, name: str) -> Path:
    """A process's path as it is seen from here: its own root and directory."""
    path = Path(name)
    base = Path(f"/proc/{pid}/root") if path.is_absolute() else Path(f"/proc/{pid}/cwd")
    seen = base / name.lstrip("/")
    return path if path.is_absolute() and path.exists() else seen


def write_to(pipe: Path) -> bool:
    """A byte to a pipe that somebody reads, which asks torch for its record."""
    try:
        if not stat.S_ISFIFO(pipe.stat().st_mode):
            return False
        fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False  # there is none, or nobody reads it
    try:
        return os.write(fd, b"1") == 1
    except OSError:
        return False
    finally:
        os.close(fd)


def _dump_files(pid: int, environ: Mapping[str, str], rank: int) -> list[Path]:
    home = environ.get("HOME", "/")
    told = [environ[name] for name in DUMPS if environ.get(name)]
    places = told or [str(Path(home) / DEFAULTS[0]), DEFAULTS[1]]
    return [path_of(pid, f"{place}{rank}") for place in places]


def _newest(paths: Sequence[Path]) -> tuple[Path, float, str] | None:
    for path in paths:
        try:
            about = path.stat()
            if not stat.S_ISREG(about.st_mode) or about.st_size > MOST_BYTES:
                continue
            record = flight_records.read(path.read_bytes())
            return path, about.st_mtime, flight_records.shortened(record)
        except (OSError, flight_records.RecordError):
            continue  # it is not there, or not whole yet
    return None
