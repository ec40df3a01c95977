"""Reads one log: its hits, and how it begins and ends.

A source is a file or a stream: plain, gzip, bzip2, xz, zstd or UTF-16. Its size does
not matter: it is read once, block by block. A file that is still being written is read
up to its size when it was opened.
"""

from __future__ import annotations

import bz2
import codecs
import functools
import itertools
import lzma
import os
import shutil
import stat
import subprocess
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from pytest_gkd.diagnosis import exceptions, parts
from pytest_gkd.diagnosis.catalogue import Catalogue
from pytest_gkd.diagnosis.metrics.series import Collector
from pytest_gkd.diagnosis.patterns import Pattern
from pytest_gkd.diagnosis.scan import Hit, Scanner, blanked, index
from pytest_gkd.language import marked

BLOCK = 1 << 20
# How much of the beginning and of the end is kept.
EDGE = 1 << 20

# No log compresses this well, and decompressing less than this takes no time.
BOMB_BYTES, BOMB_RATIO = 1 << 28, 200
# Limit for a stream, whose end nobody knows.
STREAM_BYTES = 64 << 30
# How long to wait for a writer to open a pipe.
WRITER_S = 10.0

# How much of a file is read for its first and last times, and for its encoding.
PEEK = 1 << 16
# This many zero bytes are no text.
HOLE = 64
_HOLES = Pattern(rb"\x00{%d,}" % HOLE)
# How programs, tables, archives, databases and arrays begin.
_NO_LOGS = (b"\x7fELF", b"PAR1", b"PK\x03\x04", b"SQLite format 3\0", b"\x93NUMPY")

UTF16 = (b"\xff\xfe", b"\xfe\xff")
ZSTD = b"\x28\xb5\x2f\xfd"


@dataclass(frozen=True)
class Packing:
    """A compression format: magic number, reader here, and shell command."""

    name: str
    mark: bytes
    reader: Callable[[], Any]
    command: str


# What the system says of files, as it is told of logs.
REFUSALS = (
    *(marked("no such file or directory"), marked("permission denied")),
    *(marked("is a directory"), marked("not a directory")),
    *(marked("stale file handle"), marked("input/output error")),
)
KINDS = (
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)
PACKINGS = (
    Packing("gzip", b"\x1f\x8b", lambda: zlib.decompressobj(wbits=31), "gzip -dc"),
    Packing("bzip2", b"BZh", bz2.BZ2Decompressor, "bzip2 -dc"),
    Packing(
        "xz",
        b"\xfd7zXZ\x00",
        lambda: lzma.LZMADecompressor(memlimit=BOMB_BYTES),
        "xz -dc",
    ),
)


class LogError(Exception):
    """A file that cannot be read as a log; the text says which and why."""


@dataclass
class Log:
    """What was kept of one source: its hits, its first and its last bytes.

    Both are without colours. ``written_s`` is when a file was last modified, in seconds
    since the epoch. ``partial`` says why not all of it was read. ``number`` is its
    index among all. ``parts`` are the names of the files that hold it, each with the
    number of lines before it; ``unreadable`` says which of them could not be read.
    """

    name: str
    hits: list[Hit] = field(default_factory=list)
    head: bytes = b""
    tail: bytes = b""
    tail_at: int = 0
    lines: int = 0
    written_s: float | None = None
    partial: str = ""
    number: int = 0
    parts: list[tuple[int, str]] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    metrics: Collector = field(default_factory=Collector)
    raised: exceptions.Collector = field(default_factory=exceptions.Collector)

    @functools.cached_property
    def chains(self) -> list[exceptions.Chain]:
        """The exceptions in the first and the last parts that contain tracebacks."""
        return self.raised.chains()

    @functools.cached_property
    def near(self) -> exceptions.Near:
        """Finds the exceptions to which a line belongs."""
        return exceptions.Near(self.chains)

    @functools.cached_property
    def edges(self) -> bytes:
        """The first and last bytes, without overlap; only valid once all is read."""
        return self.head[: self.tail_at] + self.tail

    @property
    def steps_from(self) -> int:
        """Where in ``tail`` training steps begin; 0 if before it or never."""
        return max(0, self.metrics.begun - self.tail_at)

    def place(self, line: int) -> tuple[str, int]:
        """The file that holds a line of the log, and the line's number there."""
        first, name = max(
            (p for p in self.parts if p[0] < line), default=(0, self.name)
        )
        return name, line - first

    def place_at(self, at: int) -> tuple[str, int | None]:
        """The file and number of the line that holds a byte, None if it is not kept."""
        head = len(self.edges) - len(self.tail)
        if head <= at < self.tail_at:
            return self.name, None
        at -= self.tail_at - head if at >= self.tail_at else 0
        return self.place(self.line_at(at, self.edges))

    def line_at(self, at: int, text: bytes) -> int:
        """The number of the line that holds a byte of ``edges``, passed as ``text``."""
        if at < len(text) - len(self.tail):
            return 1 + text.count(b"\n", 0, at)
        return self.lines + 1 - text.count(b"\n", at)

    @property
    def last_step_at(self) -> int:
        """Where in ``edges`` the last step's metrics are; -1 if they are not."""
        at = self.metrics.latest
        return (
            -1
            if at < self.tail_at
            else at - self.tail_at + len(self.head[: self.tail_at])
        )


def opened(path: Path) -> IO[bytes]:
    """A file or a pipe, such as a shell's ``<(command)``, open for reading.

    Raises LogError for anything else, and for a pipe that nobody writes to.
    """
    mode = path.stat().st_mode
    for is_kind, kind in KINDS:
        if is_kind(mode):
            raise LogError(f"{path}: is {kind}, not a log; name a file")
    if not stat.S_ISFIFO(mode):
        return path.open("rb")
    found: list[IO[bytes]] = []
    opens = threading.Thread(target=lambda: found.append(path.open("rb")), daemon=True)
    opens.start()  # this blocks until somebody opens the other end
    opens.join(WRITER_S)
    if not found:
        raise LogError(f"{path}: is a pipe that nobody opened to write: {WRITER_S:g} s")
    return found[0]


def read(
    stream: IO[bytes],
    name: str,
    number: int,
    catalogue: Catalogue,
    progress: Callable[[int], None] | None = None,
    *,
    earlier: Sequence[Path] = (),
    edge: int = EDGE,
) -> Log:
    """Read a whole source in constant memory; ``number`` is its index among all.

    Of a file its present contents, of a stream at most ``STREAM_BYTES``, and before it
    the ``earlier`` parts of the log, oldest first. ``progress`` is called with the
    number of bytes read; ``edge`` bytes are kept of the beginning and of the end.
    Raises LogError if the source is empty or not text.
    """
    metrics = Collector()
    scanner = Scanner(index(catalogue), name, number, metrics)
    size = _size(stream)
    source = _Source(stream, STREAM_BYTES if size is None else size)
    log = Log(name, metrics=metrics, number=number)
    done = 0
    blocks = _text_blocks(source, name)
    for block in itertools.chain(_earlier(log, earlier, name), blocks):
        scanner.feed(block)
        log.raised.feed(block)
        log.head += block[: edge - len(log.head)]
        log.tail = (log.tail + block)[-edge:] if len(block) < edge else block[-edge:]
        done += len(block)
        if progress is not None:
            progress(done)
    if not done:
        raise LogError(f"{name}: is empty")
    scanner.finish(log.tail)
    metrics.close()
    hits = parts.hold(scanner.hits, log.chains) if scanner.hits else []
    log.lines, log.tail_at = scanner.lines, done - len(log.tail)
    log.hits = [_placed(hit, log) for hit in hits] if earlier else hits
    log.head, log.tail = blanked(log.head), blanked(log.tail)
    if size is not None:
        status = os.fstat(stream.fileno())
        log.written_s = status.st_mtime
        if status.st_size > size:
            log.partial = (
                f"{name}: grew while it was being read; only what was there at the "
                f"start was judged, {size} bytes"
            )
    elif not source.left:
        log.partial = (
            f"{name}: has more than {STREAM_BYTES >> 20} MiB, and only that much was "
            "read; if it is a file, name it"
        )
    return log


def _earlier(log: Log, paths: Sequence[Path], last: str) -> Iterator[bytes]:
    """The text of a log's parts, each in whole lines; records where each begins."""
    lines = 0
    for path in paths:
        log.parts.append((lines, str(path)))
        end = b"\n"
        try:
            with opened(path) as stream:
                source = _Source(stream, _size(stream) or STREAM_BYTES)
                for block in _text_blocks(source, str(path)):
                    lines += block.count(b"\n")
                    end = block[-1:] or end
                    yield block
        except LogError as error:
            log.unreadable.append(str(error))
        except OSError as error:
            log.unreadable.append(f"{path}: {(error.strerror or str(error)).lower()}")
        if end != b"\n":
            lines += 1
            yield b"\n"
    if paths:
        log.parts.append((lines, last))


def _placed(hit: Hit, log: Log) -> Hit:
    """The hit with the name of the part that holds it, and its line there."""
    name, line = log.place(hit.line or 0)
    return replace(hit, source=name, line=line)


def beginning(path: Path) -> bytes:
    """The start of a file's text, decompressed; empty if there is none."""
    try:
        with opened(path) as stream:
            source = _Source(stream, BLOCK)
            return _first(_text_blocks(source, str(path)))[:PEEK]
    except (LogError, OSError):
        return b""  # reading it will report that


def blocks(stream: IO[bytes], name: str) -> Iterator[bytes]:
    """The text of a file as it is now, decompressed, and as UTF-8.

    Raises LogError for what is not text, or unpacks to far too much.
    """
    size = _size(stream)
    source = _Source(stream, STREAM_BYTES if size is None else size)
    return _text_blocks(source, name)


def _first(blocks: Iterator[bytes]) -> bytes:
    return next(filter(None, blocks), b"")


def ending(path: Path) -> bytes:
    """The end of a file's text; empty if it is compressed or in UTF-16."""
    try:
        with opened(path) as stream:
            start = stream.read(PEEK)
            packed = start.startswith((*(one.mark for one in PACKINGS), ZSTD))
            if packed or _utf16(start):
                return b""
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - PEEK))
            return stream.read(PEEK)
    except (LogError, OSError):
        return b""


def _size(stream: IO[bytes]) -> int | None:
    """The size of a file in bytes; None if it has none, like a pipe.

    Nor have the kernel's own files, which report 0 but are not empty.
    """
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return None  # not an OS file, such as bytes in memory
    return (status.st_size or None) if stat.S_ISREG(status.st_mode) else None


class _Source:
    """The bytes of a file or a stream up to a limit: ``taken`` and ``left``."""

    def __init__(self, stream: IO[bytes], limit_bytes: int) -> None:
        self.stream = stream
        self.left = limit_bytes
        self.taken = 0
        self._ahead = b""

    def read(self) -> bytes:
        """The next block, shorter than BLOCK only at the end."""
        if block := self._ahead:
            self._ahead = b""
            return block
        parts = []
        size = min(BLOCK, self.left)
        while size and (part := self.stream.read(size)):
            parts.append(part)
            size -= len(part)
            self.left -= len(part)
            self.taken += len(part)
        return b"".join(parts)  # of one part no copy

    def peek(self) -> bytes:
        """The next block, which ``read`` returns again."""
        self._ahead = self.read()
        return self._ahead


def _text_blocks(source: _Source, name: str) -> Iterator[bytes]:
    """The bytes of the log, decompressed, and as UTF-8 if it was UTF-16."""
    mark = source.peek()[:8]
    packing = next((one for one in PACKINGS if mark.startswith(one.mark)), None)
    blocks: Iterator[bytes] = iter(source.read, b"")
    if packing is not None:
        unpacked = _unpack(packing, source, name)
        blocks = _no_bomb(unpacked, source, name, packing.command)
    elif mark.startswith(ZSTD):
        blocks = _no_bomb(_unzstd(source, name), source, name, "zstd -dc")
    start = next(blocks, b"")
    while start[:HOLE] == bytes(HOLE):  # truncated while its writer kept its offset
        start = start.lstrip(b"\0") or next(blocks, b"")
    if encoding := _utf16(start):
        decoder = codecs.getincrementaldecoder(encoding)("replace")
        for block in itertools.chain([start], blocks):
            yield decoder.decode(block).encode()
    else:
        _refuse_binary(start, name)
        yield from itertools.chain([start], blocks)


def _utf16(start: bytes) -> str:
    """The encoding if every other byte is 0, as in UTF-16 with or without a BOM."""
    even, odd = start[:PEEK:2].count(0), start[1:PEEK:2].count(0)
    half = min(len(start), PEEK) // 2
    if start.startswith(UTF16):
        half = min(len(start), 64) // 2
        return "utf-16" if start[:64].count(0) > half // 2 else ""
    if half < 8 or max(even, odd) < 0.6 * half or min(even, odd) > 0.05 * half:
        return ""
    return "utf-16-le" if odd > even else "utf-16-be"


def _refuse_binary(start: bytes, name: str) -> None:
    begin = start.partition(bytes(HOLE))[0]
    sample = (_HOLES.without(start) if b"\n" in begin else start)[:8192]
    control = sum(byte < 9 or 13 < byte < 27 for byte in sample)
    if start.startswith(_NO_LOGS) or control > len(sample) * 0.3:
        raise LogError(f"{name}: contains binary data, not the text of a log")


def _no_bomb(
    blocks: Iterator[bytes], source: _Source, name: str, command: str
) -> Iterator[bytes]:
    given = 0
    for block in blocks:
        given += len(block)
        if given > BOMB_BYTES and given > BOMB_RATIO * source.taken:
            raise LogError(
                f"{name}: unpacks to more than {BOMB_RATIO} times its size, which no "
                f"log does; look into it with: {command} {name} | head"
            )
        yield block


def _unpack(packing: Packing, source: _Source, name: str) -> Iterator[bytes]:
    """The content, member by member; a truncated end is tolerated."""
    reader = packing.reader()
    data = source.read()
    while True:
        try:
            block = reader.decompress(data, BLOCK)
        except (zlib.error, lzma.LZMAError, OSError) as error:
            raise LogError(f"{name}: damaged {packing.name} data: {error}") from error
        if block:
            yield block
        data = getattr(reader, "unconsumed_tail", b"")  # others buffer theirs
        if reader.eof:
            data = reader.unused_data or source.read()
            if not data.startswith(packing.mark):
                return
            reader = packing.reader()
        elif not data and len(block) < BLOCK:
            data = source.read()
            if not data:
                return


def _unzstd(source: _Source, name: str) -> Iterator[bytes]:
    tool = shutil.which("zstd")
    if tool is None:
        raise LogError(
            f"{name}: is zstd data, and zstd is not installed; install it, or unpack "
            f"the file where it is: zstd -d {name}"
        )
    process = subprocess.Popen([tool, "-dcq"], stdin=-1, stdout=-1)
    assert process.stdin is not None
    assert process.stdout is not None
    failures: list[BaseException] = []

    def feed(pipe: IO[bytes]) -> None:
        try:
            with pipe:
                for block in iter(source.read, b""):
                    pipe.write(block)
        except BrokenPipeError:
            pass  # the reader has seen enough
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=feed, args=(process.stdin,), daemon=True)
    thread.start()
    try:
        yield from iter(functools.partial(process.stdout.read, BLOCK), b"")
    finally:
        process.stdout.close()
        process.kill()
        process.wait()
    thread.join()
    if failures:
        raise failures[0]
