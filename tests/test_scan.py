"""What is found in a text does not depend on how it comes, in how many parts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import pytest
from ahocorasick_rs import BytesAhoCorasick

from pytest_gkd.diagnosis import catalogue, scan

SIGNATURES = scan.index(catalogue.load())
LOGS = sorted(Path(__file__).with_name("logs").glob("*/*.log"))
OOM = b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB. GPU 0"
BAR = b"Loading shards:  50%|#####     | 3/6 [00:03<00:03,  1.2s/it]\r"


def hits(parts: Iterator[bytes]) -> list[scan.Hit]:
    scanner = scan.Scanner(SIGNATURES, "x.log")
    for part in parts:
        scanner.feed(part)
    scanner.finish()
    return scanner.hits


def parts(text: bytes, largest: int) -> Iterator[bytes]:
    chance = random.Random(largest)
    at = 0
    while at < len(text):
        size = chance.randint(1, largest)
        yield text[at : at + size]
        at += size


@pytest.mark.parametrize("largest", [300, 5_000, 200_000])
def test_lines_that_are_cut_anywhere_say_the_same(largest: int) -> None:
    text = b"".join(path.read_bytes() for path in LOGS[::12])
    whole = hits(iter([text]))
    assert len(whole) > 50
    assert hits(parts(text, largest)) == whole


def test_another_automaton_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"".join(path.read_bytes() for path in LOGS[::12])
    whole = hits(iter([text]))
    monkeypatch.setattr(scan, "REBUILD_BYTES", 10_000)
    assert hits(parts(text, 5_000)) == whole


def test_only_a_text_of_several_blocks_needs_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stage's failure is judged where no process or thread may be left to start."""

    class Refuses(ThreadPoolExecutor):
        def submit(self, *_: object, **__: object) -> NoReturn:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(scan, "ThreadPoolExecutor", Refuses)
    assert {hit.line for hit in hits(iter([b"one\n" + OOM]))} == {2}
    with pytest.raises(RuntimeError):
        hits(iter([b"one\n", OOM]))


@pytest.mark.parametrize("filler", [b"x", BAR], ids=["one-line", "bar"])
@pytest.mark.parametrize("before", [*range(0, 2 * len(OOM), 11), -3500, -5000])
def test_nothing_is_lost_or_told_twice_in_a_text_without_line_ends(
    filler: bytes, before: int
) -> None:
    long = filler * (3 * scan.LONG // len(filler))
    text = long + b"\r" + OOM + b"\r" + OOM + b"\r" + long
    cut = text.index(OOM) + len(OOM) - before
    pieces = [text[at : at + 1000] for at in range(cut, len(text), 1000)]
    whole = hits(iter([text]))
    assert len(whole) == 4
    assert by_place(hits(iter([text[:cut], *pieces]))) == by_place(whole)


def by_place(found: list[scan.Hit]) -> list[scan.Hit]:
    return sorted(found, key=lambda hit: (hit.order, hit.signature.text))


def test_of_two_causes_in_one_line_the_catalogues_first_is_told_first() -> None:
    signatures = {
        words.encode(): [(words, catalogue.Signature(text=(words,)), "cause")]
        for words in ("lost the rank", "cannot go on")
    }
    scanner = scan.Scanner(signatures, "x.log")
    scanner.feed(b"cannot go on\ncannot go on: lost the rank")
    scanner.finish()
    told = [(hit.line, hit.cause) for hit in scanner.hits]
    assert told == [(1, "cannot go on"), (2, "lost the rank"), (2, "cannot go on")]


def test_a_line_takes_its_time_from_one_before_it_in_an_earlier_part() -> None:
    dated = b"2026-11-21 10:00:09,000 INFO start\n"
    whole = hits(iter([dated + OOM]))
    assert {hit.time_s is None for hit in whole} == {False}
    assert hits(iter([dated, OOM])) == whole


def test_the_causes_of_a_line_keep_the_catalogues_order_behind_a_long_bar() -> None:
    last = b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. "
    last += b"GPU 0 has a total capacity of 79.11 GiB of which 1.00 GiB is free.\n"
    told = [
        [(hit.signature, hit.facts) for hit in hits(iter([before + last]))]
        for before in (b"", BAR * (2 * scan.LONG // len(BAR)))
    ]
    assert len(told[0]) > 1
    assert told[1] == told[0]


def test_the_line_of_each_find_is_told_from_the_start_and_from_the_end() -> None:
    lines = [
        b"%d %s" % (number, OOM if number % 50 < 2 else b"x" * (number % 90))
        for number in range(1, 40_001)
    ]
    text = b"\n".join(lines)
    scanner = scan.Scanner(SIGNATURES, "x.log")
    for part in parts(text, 70_000):
        scanner.feed(part)
    scanner.finish(text[-500_000:])
    found = {hit.line or 0: hit.text for hit in scanner.hits}
    assert min(found) < 100 < 39_000 < max(found)
    assert all(text.startswith(f"{line} ") for line, text in found.items())


def test_a_large_log_is_searched_with_one_automaton_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alive, most = 0, 0

    class Counted:
        def __init__(self, texts: Any, **how: Any) -> None:
            nonlocal alive, most
            self.real = BytesAhoCorasick(texts, **how)
            alive += 1
            most = max(most, alive)

        def find_matches_as_indexes(self, *args: Any, **how: Any) -> Any:
            return self.real.find_matches_as_indexes(*args, **how)

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    monkeypatch.setattr(scan, "REBUILD_BYTES", 1 << 10)
    scanner = scan.Scanner(SIGNATURES, "a.log")
    monkeypatch.setattr(scan, "BytesAhoCorasick", Counted)
    for _ in range(200):
        scanner.feed(b"a line of work\n" * 70)
    scanner.finish()
    assert (most, scanner.lines) == (1, 14_000)
