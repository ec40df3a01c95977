"""What `gkd diagnose` is given may be anything: packed, endless, or no file at all."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_gkd.diagnosis import catalogue, log_file, logs
from pytest_gkd.diagnosis.log_report import LogReport
from pytest_gkd.report import render

CATALOGUE = catalogue.load()
OOM = b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB. GPU 0\n"
FILLER = b"INFO step is fine, all ranks are well, nothing to be seen here\n" * 20_000
PACKERS = {"gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress}

packers = pytest.mark.parametrize("pack", PACKERS.values(), ids=PACKERS)


def causes(data: bytes) -> list[str]:
    log = log_file.read(io.BytesIO(data), "x.log", 0, CATALOGUE)
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
    monkeypatch.setattr(log_file, "BOMB_BYTES", 16 << 20)
    with pytest.raises(log_file.LogError, match=r"x\.log: unpacks to more than 200 "):
        causes(pack(b"a" * (128 << 20)))


@packers
def test_damaged_data_is_named(pack: Callable[[bytes], bytes]) -> None:
    data = bytearray(pack(OOM + os.urandom(3000).hex().encode()))
    data[40:400] = bytes(360)
    with pytest.raises(
        log_file.LogError, match=r"x\.log: damaged (gzip|bzip2|xz) data"
    ):
        causes(bytes(data))


def test_a_pipe_without_a_writer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_file, "WRITER_S", 0.2)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(
        log_file.LogError, match="is a pipe that nobody opened to write"
    ):
        logs.examine([pipe], CATALOGUE)


def test_a_pipe_with_a_writer_is_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(OOM))
    writer.start()
    found = logs.examine([pipe], CATALOGUE)
    writer.join()
    assert found.causes[0].cause == "cuda.oom"


def test_what_is_no_file_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        monkeypatch.chdir(tmp_path)  # an address may have 107 bytes
        listener.bind("s")
        for path, kind in (("s", "socket"), ("/dev/zero", "device")):
            with pytest.raises(log_file.LogError, match=f"is a {kind}, not a log"):
                logs.examine([Path(path)], CATALOGUE)


@pytest.mark.parametrize("start", [OOM, OOM + FILLER, OOM + FILLER * 10])
def test_a_file_is_read_as_far_as_it_was_when_it_was_opened(
    tmp_path: Path, start: bytes
) -> None:
    path, over = tmp_path / "train.log", threading.Event()
    path.write_bytes(start)

    def write() -> None:
        with path.open("ab") as log:
            for _ in range(1000):
                if not over.wait(0.01):  # at 100 MB/s
                    log.write(FILLER)

    writer = threading.Thread(target=write)
    report: list[LogReport] = []
    reader = threading.Thread(
        target=lambda: report.append(logs.examine([path], CATALOGUE)), daemon=True
    )
    writer.start()
    while path.stat().st_size < len(start) + len(FILLER):
        time.sleep(0.01)
    size = path.stat().st_size
    reader.start()
    reader.join(120)
    over.set()
    writer.join()
    assert report
    assert [one.cause for one in report[0].causes] == ["cuda.oom"]
    (said,) = report[0].partial
    judged = re.fullmatch(
        r".*train\.log: grew while it was being read; .*, (\d+) bytes", said
    )
    assert judged is not None
    assert size <= int(judged[1]) < path.stat().st_size
    assert said in render.log_text(report[0])


def test_a_stream_without_an_end_is_read_up_to_a_limit_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log_file, "STREAM_BYTES", 64 << 20)
    with subprocess.Popen(["yes", OOM.decode().strip()], stdout=-1) as endless:
        assert endless.stdout is not None
        report = logs.examine([endless.stdout], CATALOGUE)
        endless.stdout.close()
    assert [one.cause for one in report.causes] == ["cuda.oom"]
    assert report.partial == (
        "standard input: has more than 64 MiB, and only that much was read; if it is a "
        "file, name it",
    )


def test_a_stream_that_is_interrupted_says_what_to_name_instead() -> None:
    # What a shell starts in the background ignores SIGINT, and so do its children.
    heeds = "import os, signal, sys; signal.signal(2, signal.SIG_DFL)"
    code = f"{heeds}; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    gkd = [sys.executable, "-c", code, "-m", "pytest_gkd", "diagnose", "-"]
    with subprocess.Popen(gkd, stdin=-1, stderr=-1, text=True) as done:
        assert done.stdin is not None
        assert done.stderr is not None
        done.stdin.write("x" * (4 << 20))  # it reads, when all of it is written
        done.stdin.flush()
        done.send_signal(signal.SIGINT)
        assert "gkd: interrupted, without a verdict: a pipe" in done.stderr.read()
        assert done.wait() == 2


def test_broken_utf16_is_read() -> None:
    text = b"\xff\xfe" + OOM.decode().encode("utf-16-le")
    assert causes(text + b"\x00\xd8\x41") == ["cuda.oom"]


def test_a_flood_of_nul_bytes_hides_nothing() -> None:
    assert causes(FILLER + bytes(4 << 20) + b"\n" + OOM) == ["cuda.oom"]
