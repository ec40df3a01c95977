"""The beginning, the end and every error region of a log, in constant memory."""

from __future__ import annotations

import functools
import os
import re
import stat
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from ahocorasick_rs import BytesAhoCorasick

from pytest_gkd.bundle.gathering import Missing, Part
from pytest_gkd.clock import monotonic
from pytest_gkd.diagnosis import log_file

# A file up to this size is taken whole.
WHOLE_BYTES = 256 << 10
# Shares of a log's bytes that its beginning and its end may have.
START, END = 0.15, 0.35
LINES_BEFORE, LINES_AFTER = 15, 40
MARGIN = 1 << 14  # bytes around an error in which its lines are looked for
LONGEST_REGION = 1 << 16
LONGEST_LINE = 4000
# What begins most error messages of Python, C++, NCCL, Ray, Slurm and the kernel.
_MARKERS = (
    *("Error", "ERROR", "error:", "Traceback (most recent", "FATAL", "CRITICAL"),
    *("Exception", "Fatal Python", "Current thread 0x", "Segmentation fault"),
    *("core dumped", "Killed", "ut of memory", "NCCL WARN", "Watchdog", "timed out"),
    *("SIGTERM", "SIGKILL", "SIGABRT", "SIGSEGV", "Xid", "panic:", "CANCELLED"),
)
_TOKEN_END = re.compile(rb"[\w.~+/=-]{0,300}$")


class RefusedError(OSError):
    """What is no regular file; the text says what it is."""


def opened(path: Path, *, follow: bool = True) -> IO[bytes]:
    """A regular file, open for reading without ever waiting for anybody.

    Raises RefusedError for anything else (without ``follow`` also for a link).
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    if not follow and path.is_symlink():
        raise RefusedError(f"is a link to {path.readlink()}, which is not followed")
    # Opening a device may do something (a tape rewinds), so it is looked at before.
    mode = path.stat(follow_symlinks=follow).st_mode
    if not stat.S_ISREG(mode):
        kinds = (
            (stat.S_ISFIFO, "a pipe"),
            (stat.S_ISSOCK, "a socket"),
            (stat.S_ISDIR, "a directory"),
        )
        kind = next((name for is_kind, name in kinds if is_kind(mode)), "a device")
        raise RefusedError(f"is {kind}; only files are read")
    fd = os.open(path, flags | (0 if follow else os.O_NOFOLLOW))
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise RefusedError("was replaced by something that is no file")
    return os.fdopen(fd, "rb")


@dataclass
class _Extract:
    """What is kept of a log as it is read; ``room`` is for regions, in bytes."""

    start_bytes: int
    end_bytes: int
    room: int
    start: bytes = b""
    end: bytes = b""
    lines: int = 0  # before the window
    first: list[str] = field(default_factory=list)
    first_bytes: int = 0
    last: deque[str] = field(default_factory=deque)
    last_bytes: int = 0
    dropped: int = 0

    def keep(self, region: str) -> None:
        """Keep an error region: the first ones and the last ones."""
        if not self.last and self.first_bytes + len(region) <= self.room // 2:
            self.first.append(region)
            self.first_bytes += len(region)
            return
        self.last.append(region)
        self.last_bytes += len(region)
        while self.last_bytes > self.room // 2 and len(self.last) > 1:
            self.last_bytes -= len(self.last.popleft())
            self.dropped += 1

    def regions(self) -> str:
        """All that were kept, one after the other."""
        gap = [f"\n--- {self.dropped} regions left out ---\n"] if self.dropped else []
        return "\n".join([*self.first, *gap, *self.last])


def extract(
    path: Path, folder: str, limit_bytes: int, limit_s: float, *, follow: bool = True
) -> Iterator[Part | Missing]:
    """What the bundle has of a file: all of a short one, else its parts.

    Reads for at most ``limit_s`` seconds, then only the end. ``folder`` is where the
    parts go in the bundle.
    """
    until = monotonic() + limit_s
    whole = min(WHOLE_BYTES, limit_bytes)
    try:
        with opened(path, follow=follow) as stream:
            size = os.fstat(stream.fileno()).st_size
            if not size:
                yield Missing(str(path), "is empty")
                return
            found = _Extract(
                max(whole, int(limit_bytes * START)),
                int(limit_bytes * END),
                int(limit_bytes * (1 - START - END)),
            )
            yield from fill(stream, str(path), found, until)
            grown = os.fstat(stream.fileno()).st_size - size
    except log_file.LogError as error:
        yield Missing(str(path), str(error).removeprefix(f"{path}: "))
        return
    except OSError as error:
        yield Missing(str(path), error.strerror or str(error))
        return
    if grown > 0:
        yield Missing(str(path), f"{grown} bytes were added while it was read")
    elif grown < 0:
        yield Missing(str(path), f"lost {-grown} bytes while it was read")
    if not found.end:
        yield Part(folder, _text(found.start))
        return
    yield Part(f"{folder}/start.txt", _text(_without_last_part(found.start)))
    yield Part(f"{folder}/end.txt", _text(_without_first_part(found.end)))
    if regions := found.regions():
        yield Part(f"{folder}/errors.txt", regions)


def fill(
    stream: IO[bytes], name: str, found: _Extract, until: float
) -> Iterator[Missing]:
    """Fill ``found``; yields why not all was read."""
    window = b""
    low = 0  # where in the window errors have not been looked for yet
    done = 0
    rest = b""
    blocks = log_file.blocks(stream, name)
    try:
        for block in blocks:
            taken = found.start_bytes - len(found.start)
            found.start += block[: max(0, taken)]
            rest = (rest + block[max(0, taken) :])[-found.end_bytes :]
            done += len(block)
            window += block
            high = len(window) - MARGIN
            if high > low:
                _look(window, low, high, found)
                cut = max(0, high - MARGIN)
                found.lines += window.count(b"\n", 0, cut)
                window, low = window[cut:], high - cut
            if monotonic() > until:
                yield Missing(name, f"errors were looked for in its first {done} bytes")
                rest = _last(stream, found.end_bytes) or rest
                break
    except log_file.LogError as error:
        if not done:
            raise
        yield Missing(name, f"read up to byte {done}: {error}")
    _look(window, low, len(window), found)
    found.end = rest


def _last(stream: IO[bytes], limit_bytes: int) -> bytes:
    """The end of a plain file."""
    stream.seek(0)
    start = stream.read(8)
    packed = (*(one.mark for one in log_file.PACKINGS), log_file.ZSTD)
    if start.startswith((*packed, *log_file.UTF16)):
        return b""
    size = os.fstat(stream.fileno()).st_size
    stream.seek(max(0, size - limit_bytes))
    return stream.read(limit_bytes)


@functools.cache
def _markers() -> BytesAhoCorasick:
    return BytesAhoCorasick([one.encode() for one in _MARKERS])


def _look(window: bytes, low: int, high: int, found: _Extract) -> None:
    """Keep the regions around the markers between two places."""
    counted, line = 0, found.lines + 1
    for begin, end in _places(window, low, high):
        line += window.count(b"\n", counted, begin)
        counted = begin
        text = window[begin:end]
        if begin and window[begin - 1 : begin] != b"\n":
            text = _without_first_part(text)
        text = _without_last_part(text)
        found.keep(f"--- from line {line} ---\n{_text(text)}\n")


def _places(window: bytes, low: int, high: int) -> Iterator[tuple[int, int]]:
    """The regions around the markers, which do not overlap."""
    begin = end = -1
    for _, at, _ in _markers().find_matches_as_indexes(window[low:high]):
        at += low
        if at < end:
            if at > end - MARGIN // 4 and end - begin < LONGEST_REGION:
                end = max(end, _after(window, at))
            continue
        if begin >= 0:
            yield begin, end
        begin, end = max(_before(window, at), end), _after(window, at)
    if begin >= 0:
        yield begin, end


def _before(window: bytes, at: int) -> int:
    floor = max(0, at - MARGIN)
    for _ in range(LINES_BEFORE + 1):
        at = window.rfind(b"\n", floor, at)
        if at < 0:
            return floor
    return at + 1


def _after(window: bytes, at: int) -> int:
    ceiling = min(len(window), at + MARGIN)
    for _ in range(LINES_AFTER + 1):
        at = window.find(b"\n", at, ceiling) + 1
        if not at:
            return ceiling
    return at


def _without_last_part(text: bytes) -> bytes:
    """Up to the last line's end: half a secret must not be left behind."""
    whole, newline, rest = text.rpartition(b"\n")
    return whole if newline and len(rest) < MARGIN else _TOKEN_END.sub(b"", text)


def _without_first_part(text: bytes) -> bytes:
    first, newline, rest = text.partition(b"\n")
    if newline and len(first) < MARGIN:
        return rest
    return re.sub(rb"^[\w.~+/=-]{0,300}", b"", text)


def _text(raw: bytes) -> str:
    lines = raw.split(b"\n")
    if any(len(line) > LONGEST_LINE for line in lines):
        lines = [_short(line) for line in lines]
    return b"\n".join(lines).decode("utf-8", "replace")


def _short(line: bytes) -> bytes:
    """A long line's beginning and end, cut where no token is."""
    if len(line) <= LONGEST_LINE:
        return line
    half = LONGEST_LINE // 2
    start, end = _TOKEN_END.sub(b"", line[:half]), line[-half:]
    end = re.sub(rb"^[\w.~+/=-]{0,300}", b"", end)
    left = len(line) - len(start) - len(end)
    return start + f" ...[{left} bytes left out]... ".encode() + end
