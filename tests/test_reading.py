"""What `gkd diagnose` is given may be anything: packed, endless, or no file at all."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_gkd import logs, reading, rules

CATALOGUE = rules.load()
OOM = b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB. GPU 0\n"
FILLER = b"INFO step is fine, all ranks are well, nothing to be seen here\n" * 20_000
PACKERS = {"gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress}

packers = pytest.mark.parametrize("pack", PACKERS.values(), ids=PACKERS)


def causes(data: bytes) -> list[str]:
    log = reading.read(io.BytesIO(data), "x.log", 0, CATALOGUE)
    return [one.cause for one in logs.judge([log], CATALOGUE).causes]


@packers
def test_a_packed_log_is_read(pack: Callable[[bytes], bytes]) -> None:
    assert causes(pack(OOM)) == ["cuda.oom"]
    assert causes(pack(FILLER) + pack(OOM)) == ["cuda.oom"]


@packers
def test_of_packed_data_that_is_cut_off_the_rest_is_read(
    pack: Callable[[bytes], bytes],
) -> None:
    noise = b"".join(os.urandom(30).hex().encode() + b"\n" for _ in range(50_000))
    whole = pack(OOM + noise)
    assert causes(whole[: len(whole) // 2]) == ["cuda.oom"]


@packers
def test_what_unpacks_to_far_more_than_a_log_is_refused(
    pack: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "BOMB_BYTES", 16 << 20)
    with pytest.raises(reading.LogError, match=r"x\.log: unpacks to more than 200 "):
        causes(pack(b"a" * (128 << 20)))


@packers
def test_damaged_data_is_named(pack: Callable[[bytes], bytes]) -> None:
    data = bytearray(pack(OOM + os.urandom(3000).hex().encode()))
    data[40:400] = bytes(360)
    with pytest.raises(reading.LogError, match=r"x\.log: damaged (gzip|bzip2|xz) data"):
        causes(bytes(data))


def test_a_pipe_without_a_writer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "WRITER_S", 0.2)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(reading.LogError, match="is a pipe that nobody opened to write"):
        logs.diagnose([pipe], CATALOGUE)


def test_a_pipe_with_a_writer_is_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(OOM))
    writer.start()
    found = logs.diagnose([pipe], CATALOGUE)
    writer.join()
    assert found.causes[0].cause == "cuda.oom"


def test_what_is_no_file_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        monkeypatch.chdir(tmp_path)  # an address may have 107 bytes
        listener.bind("s")
        for path, kind in (
            ("/", "directory"),
            ("s", "socket"),
            ("/dev/zero", "device"),
        ):
            with pytest.raises(reading.LogError, match=f"is a {kind}, not a log"):
                logs.diagnose([Path(path)], CATALOGUE)


def test_broken_utf16_is_read() -> None:
    text = b"\xff\xfe" + OOM.decode().encode("utf-16-le")
    assert causes(text + b"\x00\xd8\x41") == ["cuda.oom"]


def test_a_flood_of_nul_bytes_hides_nothing() -> None:
    assert causes(FILLER + bytes(4 << 20) + b"\n" + OOM) == ["cuda.oom"]
