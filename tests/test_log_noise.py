"""The verdict on a log does not depend on how the log was captured."""

from __future__ import annotations

import gzip
import io
import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_gkd.diagnosis import catalogue, log_file, logs

CATALOGUE = catalogue.load()
LOGS = Path(__file__).with_name("logs")
# One log of each answer, so that every kind of evidence is woven into every noise.
SAMPLE = [sorted(folder.glob("*.log"))[0] for folder in sorted(LOGS.glob("*/"))][::3]
SAMPLE += [LOGS / "healthy" / name for name in ("offline1.log", "progress1.log")]
HEALTHY = b"".join(
    b"INFO 11-21 09:%02d:00 [loader.py:%d] shard %d of 300 is read, 0 errors\n"
    % (n // 5, n, n)
    for n in range(300)
)
BAR = b"Loading shards:  %d%%|##   | %d/100 [00:0%d<00:09, 1.2it/s]\r"
CHINESE = "警告 第 {} 批数据中有过长的样本 已跳过 训练不受影响。\n"


def lines(text: bytes) -> list[bytes]:
    return text.splitlines(keepends=True)


def windows_line_ends(text: bytes) -> bytes:
    return re.sub(rb"\r?\n", b"\r\n", text)


def colours(text: bytes) -> bytes:
    return b"".join(b"\x1b[33m" + line + b"\x1b[0m\n" for line in text.split(b"\n"))


def prefixed_by_ray(text: bytes) -> bytes:
    return b"".join(
        b"\x1b[36m(WorkerDict pid=4711, ip=10.0.0.3)\x1b[0m " + line
        for line in text.splitlines(keepends=True)
    )


def prefixed_by_torchrun(text: bytes) -> bytes:
    return b"".join(b"[default3]:" + line for line in lines(text))


def with_bars(text: bytes) -> bytes:
    bars = (BAR % (n % 100, n % 100, n % 10) for n in itertools.count(1))
    return b"".join(bar + line for bar, line in zip(bars, lines(text), strict=False))


def with_chinese(text: bytes) -> bytes:
    own = (CHINESE.format(n).encode() for n in itertools.count(1))
    return b"".join(other + line for other, line in zip(own, lines(text), strict=False))


def after_a_healthy_start(text: bytes) -> bytes:
    return HEALTHY + text


def cut_short(text: bytes) -> bytes:
    return text.rstrip(b"\r\n")


def with_nul_bytes(text: bytes) -> bytes:
    return b"".join(b"\x00" + line for line in lines(text))


def with_broken_utf8(text: bytes) -> bytes:
    return b"".join(b"\xff\xfe\xe4 \xc3( junk\n" + line for line in lines(text))


def packed(text: bytes) -> bytes:
    return gzip.compress(text)


def folded(text: bytes) -> bytes:
    """As Ray shows lines that several workers wrote."""
    return b"".join(
        re.sub(rb"(\r?\n)$", rb" [repeated 7x across cluster]\1", line)
        for line in lines(text)
    )


NOISES = [
    windows_line_ends,
    colours,
    prefixed_by_ray,
    prefixed_by_torchrun,
    with_bars,
    with_chinese,
    after_a_healthy_start,
    cut_short,
    with_nul_bytes,
    with_broken_utf8,
    packed,
    folded,
]


def told(*texts: bytes) -> tuple[str, str, str]:
    read = [
        log_file.read(io.BytesIO(text), f"rank{number}.log", number, CATALOGUE)
        for number, text in enumerate(texts)
    ]
    report = logs.judge(read, CATALOGUE)
    phase = report.phase if report.verdict == "hung" else ""
    cause = report.causes[0].cause if report.causes else ""
    return report.verdict, phase, cause


@pytest.fixture(scope="module")
def plain() -> dict[Path, tuple[bytes, tuple[str, str, str]]]:
    texts = {path: path.read_bytes() for path in SAMPLE}
    return {path: (text, told(text)) for path, text in texts.items()}


def beside_another_ranks_first_line(text: bytes) -> tuple[bytes, ...]:
    return b"rank 1 starts\n", text


def written_by_every_rank(text: bytes) -> tuple[bytes, ...]:
    return text, text


@pytest.mark.parametrize(
    "change",
    [*NOISES, beside_another_ranks_first_line, written_by_every_rank],
    ids=lambda change: change.__name__,
)
def test_noise_and_other_ranks_do_not_change_the_verdict(
    plain: dict[Path, tuple[bytes, tuple[str, str, str]]],
    change: Callable[[bytes], bytes | tuple[bytes, ...]],
) -> None:
    changed = {}
    for path, (text, before) in plain.items():
        made = change(text)
        after = told(*made) if isinstance(made, tuple) else told(made)
        if after != before:
            changed[f"{path.parent.name}/{path.name}"] = (before, after)
    assert changed == {}
