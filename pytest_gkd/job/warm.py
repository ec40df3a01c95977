"""Reads a model's files once, so that the next start finds them in the page cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from pytest_gkd import sanitize
from pytest_gkd.job.findings import CheckError
from pytest_gkd.language import tr_filled

CHUNK = 8 << 20
# Network file systems are faster with several readers; a disk is hardly slower.
READERS = 4
GB = 1e9


@dataclass
class Warmed:
    """What was read: files, bytes, seconds; ``available`` memory in bytes before."""

    model: str
    files: int
    bytes: int
    seconds: float
    available: int

    @property
    def stays(self) -> bool:
        """Whether the page cache has room for all of it."""
        return self.bytes < self.available

    def to_json(self) -> dict[str, Any]:
        """As ``gkd warm --format=json`` prints it."""
        return {"schema": 1, **asdict(self), "stays": self.stays}


def read(model: Path, told: Callable[[int, int], None]) -> Warmed:
    """Read all files of a model directory, or one file.

    ``told`` is called with the bytes read so far and the total, from several threads.
    Raises CheckError if there is nothing to read.
    """
    if not model.exists():
        raise CheckError(f"{model} does not exist; give a model's directory or a file")
    files = sorted(_files(model))
    if not files:
        raise CheckError(f"{model} holds no files")
    total = sum(size for _, size in files)
    available = psutil.virtual_memory().available
    done = [0] * len(files)
    started = time.monotonic()

    def one(number: int) -> None:
        buffer = bytearray(CHUNK)
        with files[number][0].open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                done[number] += count
                told(sum(done), total)

    try:
        with ThreadPoolExecutor(READERS) as pool:
            list(pool.map(one, range(len(files))))
    except OSError as error:
        raise CheckError(f"{error.filename}: {error.strerror}") from None
    seconds = time.monotonic() - started
    return Warmed(str(model), len(files), sum(done), seconds, available)


def _files(model: Path) -> Iterator[tuple[Path, int]]:
    """Regular files with their sizes; links to the hub's blobs are followed."""
    for path in [model] if model.is_file() else model.rglob("*"):
        if path.is_file():
            yield path, path.stat().st_size


def text(found: Warmed) -> str:
    """For people: how much was read in what time, and whether it stays cached."""
    speed = found.bytes / GB / max(found.seconds, 1e-9)
    told = (
        f"{found.model}: {found.files} file(s), {found.bytes / GB:.2f} GB read in "
        f"{found.seconds:.1f} s, {speed:.2f} GB/s"
    )
    if not found.stays:
        told += (
            f"; only {found.available / GB:.1f} GB of memory are free for it, so the "
            "first files are evicted while the last are read"
        )
    return sanitize.line(tr_filled(told))
