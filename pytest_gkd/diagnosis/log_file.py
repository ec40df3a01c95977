"""Reads one log: its hits, and how it begins and ends.

A source is a file or a stream: plain, gzip, bzip2, xz, zstd or UTF-16. Its size does
not matter: grep finds the lines that hold a known text, and only those are looked at. A
file that is still written to is read as far as it was when it was opened.
"""

from __future__ import annotations

import bz2
import codecs
import contextlib
import functools
import itertools
import lzma
import os
import shutil
import stat
import subprocess
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from pytest_gkd.diagnosis.catalogue import Catalogue
from pytest_gkd.diagnosis.scan import Hit, Scanner, blanked, index, time_of

BLOCK = 1 << 20
# How much of the beginning and of the end is kept.
EDGE = 1 << 20
# Up to this size looking for every text here is quicker than starting grep.
SMALL = 1 << 19
FIRST_PART = 1 << 21
LARGEST_PART = 1 << 27

# No log is packed as tightly as this, and none that is smaller takes long.
BOMB_BYTES, BOMB_RATIO = 1 << 28, 200
# Of a stream, whose end nobody knows.
STREAM_BYTES = 64 << 30
# How long a pipe may have nobody who writes into it.
WRITER_S = 10.0

UTF16 = (b"\xff\xfe", b"\xfe\xff")
ZSTD = b"\x28\xb5\x2f\xfd"


@dataclass(frozen=True)
class Packing:
    """A packed format: how it begins, what reads it here, what reads it in a shell."""

    name: str
    mark: bytes
    reader: Callable[[], Any]
    command: str


KINDS = (
    (stat.S_ISDIR, "a directory"),
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

    Both are without colours. ``written_s`` is when a file was last written to, in
    seconds since the epoch. ``partial`` says why not all of it was read.
    """

    name: str
    hits: list[Hit] = field(default_factory=list)
    head: bytes = b""
    tail: bytes = b""
    tail_at: int = 0
    lines: int = 0
    written_s: float | None = None
    partial: str = ""

    @property
    def edges(self) -> bytes:
        """The first and the last bytes, each byte once."""
        return self.head[: self.tail_at] + self.tail


def opened(path: Path) -> IO[bytes]:
    """A file or a pipe, such as a shell's ``<(command)``, open for reading.

    Raises LogError for what is neither, and for a pipe that nobody writes into.
    """
    mode = path.stat().st_mode
    for is_kind, kind in KINDS:
        if is_kind(mode):
            raise LogError(f"{path}: is {kind}, not a log; name a file")
    if not stat.S_ISFIFO(mode):
        return path.open("rb")
    found: list[IO[bytes]] = []
    opens = threading.Thread(target=lambda: found.append(path.open("rb")), daemon=True)
    opens.start()  # which waits until somebody opens the other end
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
) -> Log:
    """Read a whole source in constant memory; ``number`` is its place among all.

    Of a file what it holds now, of a stream at most ``STREAM_BYTES``. ``progress`` is
    told how many bytes are done. Raises LogError when the source is empty or no text.
    """
    scanner = Scanner(index(catalogue), name, number)
    size = _size(stream)
    source = _Source(stream, STREAM_BYTES if size is None else size)
    log = _read(source, size, scanner, progress)

    def first_line() -> int:
        lines = log.lines or _lines(stream.fileno(), log.tail_at)
        return lines - (log.tail.count(b"\n") if log.lines else 0) + 1

    scanner.look_back(log.tail, log.tail_at, first_line)
    log.head, log.tail = blanked(log.head), blanked(log.tail)
    if size is not None:
        status = os.fstat(stream.fileno())
        log.written_s = status.st_mtime
        if status.st_size > size:
            log.partial = (
                f"{name}: grew while it was read; what it held at the start was "
                f"judged, {size} bytes"
            )
    elif not source.left:
        log.partial = (
            f"{name}: has more than {STREAM_BYTES >> 20} MiB, and only these were "
            "read; of a file, name it"
        )
    return log


def _size(stream: IO[bytes]) -> int | None:
    """The size of a file in bytes; None of what has none, as a pipe.

    Nor have the kernel's own files, which say 0 and are no shorter for it.
    """
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return None  # no file of the system's, such as bytes in memory
    return (status.st_size or None) if stat.S_ISREG(status.st_mode) else None


class _Source:
    """The bytes of a file or a stream up to a limit, of which some are ``left``."""

    def __init__(self, stream: IO[bytes], limit_bytes: int) -> None:
        self.stream = stream
        self.left = limit_bytes

    def read(self, size: int) -> bytes:
        """The next block of that size, shorter at the end only."""
        parts = []
        size = min(size, self.left)
        while size and (part := self.stream.read(size)):
            parts.append(part)
            size -= len(part)
            self.left -= len(part)
        return b"".join(parts)


def _read(
    source: _Source,
    size: int | None,
    scanner: Scanner,
    progress: Callable[[int], None] | None,
) -> Log:
    name = scanner.source
    if size is not None and _is_large_and_plain(source.stream.fileno(), size, name):
        return _read_file(source.stream.fileno(), size, scanner, progress)
    blocks = _counted(_text_blocks(source, name), progress)
    log = Log(name)
    start = b""
    for block in blocks:
        start += block
        if len(start) > SMALL:
            break
    if not start:
        raise LogError(f"{name}: is empty")
    _keep(log, start)
    if len(start) <= SMALL:
        scanner.feed(start)
    else:
        _scan_stream(_kept(log, start, blocks), scanner)
    log.hits = scanner.hits
    return log


def _lines(file: int, end: int) -> int:
    """How many lines the file has up to a byte."""
    places = range(0, end, BLOCK)
    return sum(os.pread(file, min(BLOCK, end - at), at).count(b"\n") for at in places)


def _kept(log: Log, start: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    yield start
    for block in rest:
        _keep(log, block)
        yield block


def _is_large_and_plain(file: int, size: int, name: str) -> bool:
    """Whether grep is to read it from the start, again and again where that pays."""
    if size <= SMALL or not _grep():
        return False
    start = os.pread(file, 8192, 0)
    packed = (ZSTD, *(packing.mark for packing in PACKINGS))
    if start.startswith(packed) or _is_utf16(start):
        return False
    _refuse_binary(start, name)
    return True


def _read_file(
    file: int, size: int, scanner: Scanner, progress: Callable[[int], None] | None
) -> Log:
    tail_at = max(0, size - EDGE)
    # grep starts anew when a text was seen often enough, without that text: a line
    # that comes in every step costs nothing after its first times.
    patience = 2000
    running = True
    while running:
        running = False
        line, offset = scanner.place
        texts = len(scanner.texts)
        blocks = _counted(_file_blocks(file, offset, size), progress, offset)
        with _grepping(scanner.texts, blocks) as found:
            for seen, (row, column, text) in enumerate(found):
                if seen > patience and len(scanner.texts) < texts:
                    scanner.place = (line + row, offset + column)
                    patience *= 2
                    running = True
                    break
                scanner.feed_line(text, line + row, offset + column)
    for at, hit in enumerate(scanner.hits):
        if hit.time_s is None:
            low = max(0, hit.order - 4000)
            before = os.pread(file, hit.order - low, low)
            scanner.hits[at] = replace(hit, time_s=time_of(before, len(before)))
    head = os.pread(file, EDGE, 0)
    tail = os.pread(file, size - tail_at, tail_at)
    return Log(scanner.source, scanner.hits, head, tail, tail_at, lines=0)


def _file_blocks(file: int, at: int, end: int) -> Iterator[bytes]:
    while at < end and (block := os.pread(file, min(BLOCK, end - at), at)):
        at += len(block)
        yield block


@contextlib.contextmanager
def _grepping(
    texts: list[bytes], blocks: Iterable[bytes]
) -> Iterator[Iterator[tuple[int, int, bytes]]]:
    """Lines of the blocks that hold one of the texts.

    Each comes with its line number and its offset, both counted from 0.
    """
    with tempfile.TemporaryFile() as words:  # no name that could be left behind
        words.write(b"\n".join(texts) + b"\n")
        words.flush()
        command = [*_grep(), "-f", f"/dev/fd/{words.fileno()}"]
        with _fed(command, blocks, words.fileno()) as output:
            yield _split(output)


def _split(output: IO[bytes]) -> Iterator[tuple[int, int, bytes]]:
    for line in output:
        row, column, text = line.split(b":", 2)
        yield int(row) - 1, int(column), text


@functools.cache
def _grep() -> tuple[str, ...]:
    """The command of a grep that tells line numbers and offsets, or nothing."""
    tool = shutil.which("grep")
    if tool is None:
        return ()
    command = (tool, "-a", "-n", "-b", "-F")
    done = subprocess.run(
        [*command, "-e", "b"], input=b"a\nb\n", capture_output=True, check=False
    )
    return command if done.stdout == b"2:2:b\n" else ()


def _keep(log: Log, block: bytes) -> None:
    if len(log.head) < EDGE:
        log.head += block[: EDGE - len(log.head)]
    total = log.tail_at + len(log.tail) + len(block)
    log.tail = (log.tail + block)[-EDGE:]
    log.tail_at = total - len(log.tail)
    log.lines += block.count(b"\n")


def _counted(
    blocks: Iterator[bytes], progress: Callable[[int], None] | None, done: int = 0
) -> Iterator[bytes]:
    for block in blocks:
        done += len(block)
        if progress is not None:
            progress(done)
        yield block


def _text_blocks(stream: _Source, name: str) -> Iterator[bytes]:
    """The bytes of the log, decompressed, as UTF-8 where it was UTF-16."""
    first = stream.read(BLOCK)
    packing = next((one for one in PACKINGS if first.startswith(one.mark)), None)
    if packing is not None:
        source = _Packed(first, stream)
        unpacked = _unpack(packing, source, name)
        blocks = _no_bomb(unpacked, source, name, packing.command)
    elif first.startswith(ZSTD):
        source = _Packed(first, stream)
        blocks = _no_bomb(_unzstd(source, name), source, name, "zstd -dc")
    else:
        blocks = _plain(first, stream)
    start = next(blocks, b"")
    if _is_utf16(start):
        decoder = codecs.getincrementaldecoder("utf-16")("replace")
        for block in itertools.chain([start], blocks):
            yield decoder.decode(block).encode()
        return
    _refuse_binary(start, name)
    yield start
    yield from blocks


def _is_utf16(start: bytes) -> bool:
    """Whether the text has the mark of UTF-16, and every other byte of it is 0."""
    half = min(len(start), 64) // 2
    return start.startswith(UTF16) and start[:64].count(0) > half // 2


def _refuse_binary(start: bytes, name: str) -> None:
    sample = start[:8192]
    control = sum(byte < 9 or 13 < byte < 27 for byte in sample)
    if sample.startswith((b"\x7fELF", b"PAR1", b"PK\x03\x04")) or (
        control > len(sample) * 0.3
    ):
        raise LogError(f"{name}: holds binary data, not the text of a log")


def _plain(first: bytes, stream: _Source | IO[bytes]) -> Iterator[bytes]:
    block = first
    while block:
        yield block
        block = stream.read(BLOCK)


class _Packed:
    """A packed source from its start, though its first block was read before."""

    def __init__(self, first: bytes, rest: _Source) -> None:
        self.taken = 0
        self._first = first
        self._rest = rest

    def read(self) -> bytes:
        """The next block, empty at the end."""
        block, self._first = self._first or self._rest.read(BLOCK), b""
        self.taken += len(block)
        return block


def _no_bomb(
    blocks: Iterator[bytes], source: _Packed, name: str, command: str
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


def _unpack(packing: Packing, source: _Packed, name: str) -> Iterator[bytes]:
    """The content, member by member; what is cut off at the end is left out."""
    reader = packing.reader()
    data = source.read()
    while True:
        try:
            block = reader.decompress(data, BLOCK)
        except (zlib.error, lzma.LZMAError, OSError) as error:
            raise LogError(f"{name}: damaged {packing.name} data: {error}") from error
        if block:
            yield block
        data = getattr(reader, "unconsumed_tail", b"")  # others keep theirs inside
        if reader.eof:
            data = reader.unused_data or source.read()
            if not data.startswith(packing.mark):
                return
            reader = packing.reader()
        elif not data and len(block) < BLOCK:
            data = source.read()
            if not data:
                return


def _unzstd(source: _Packed, name: str) -> Iterator[bytes]:
    tool = shutil.which("zstd")
    if tool is None:
        raise LogError(
            f"{name}: is zstd data, and there is no zstd to read it with; install it, "
            f"or unpack the file where there is one: zstd -d {name}"
        )
    with _fed([tool, "-dcq"], iter(source.read, b"")) as output:
        yield from _plain(output.read(BLOCK), output)


@contextlib.contextmanager
def _fed(
    command: list[str], blocks: Iterable[bytes], *files: int
) -> Iterator[IO[bytes]]:
    """The output of a filter that is fed the blocks by a thread, and has the ``files``.

    An error of the feeding thread is raised at the end. Who leaves before the output
    has ended ends the filter.
    """
    failures: list[BaseException] = []
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"LC_ALL": "C"},
        pass_fds=files,
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def feed(pipe: IO[bytes]) -> None:
        try:
            with pipe:
                for block in blocks:
                    pipe.write(block)
        except BrokenPipeError:
            pass  # the reader has seen enough
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=feed, args=(process.stdin,), daemon=True)
    thread.start()
    try:
        yield process.stdout
    finally:
        process.stdout.close()
        process.kill()
        process.wait()
    thread.join()
    if failures:
        raise failures[0]


def _scan_stream(blocks: Iterator[bytes], scanner: Scanner) -> None:
    """Look through a pipe or decompressed data, part by part, each by a new grep."""
    whole = _whole_lines(blocks)
    if not _grep():
        for block in whole:
            scanner.feed(block)
        return
    size = FIRST_PART
    while (first := next(whole, None)) is not None:
        part = _Part(first, whole, size)
        line, offset = scanner.place
        with _grepping(scanner.texts, part) as found:
            for row, column, text in found:
                scanner.feed_line(text, line + row, offset + column)
        scanner.place = (line + part.lines, offset + part.bytes)
        size = min(size * 4, LARGEST_PART)


class _Part:
    """Blocks up to a size in bytes, counted as they are taken."""

    def __init__(self, first: bytes, rest: Iterator[bytes], size: int) -> None:
        self.lines = 0
        self.bytes = 0
        self._first = first
        self._rest = rest
        self._size = size

    def __iter__(self) -> Iterator[bytes]:
        block: bytes | None = self._first
        while block is not None:
            self.lines += block.count(b"\n")
            self.bytes += len(block)
            yield block
            if self.bytes >= self._size:
                return
            block = next(self._rest, None)


def _whole_lines(blocks: Iterator[bytes]) -> Iterator[bytes]:
    rest = b""
    for block in blocks:
        cut = block.rfind(b"\n") + 1
        if not cut and len(rest) < 16 * BLOCK:
            rest += block
            continue
        yield rest + block[:cut]
        rest = block[cut:]
    if rest:
        yield rest
