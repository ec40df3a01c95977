"""Text that nobody vouches for is searched in linear time, with the lock released."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import hostile
import pytest

import pytest_gkd
from pytest_gkd.diagnosis import catalogue, proofreading, scan
from pytest_gkd.diagnosis.catalogue import Rule
from pytest_gkd.diagnosis.diagnose import diagnose
from pytest_gkd.diagnosis.evidence import StageEvidence, TextSource
from pytest_gkd.diagnosis.patterns import Pattern, PatternError

CATALOGUE = catalogue.load()
# What runs over logs, outputs and stacks; diagnose.py uses re on the catalogue's words.
READERS = (
    "diagnosis/scan",
    "diagnosis/log_phases",
    "diagnosis/failure_lines",
    "diagnosis/log_end",
    "diagnosis/logs",
    "diagnosis/log_file",
    "diagnosis/work_signs",
    "processes/stacks",
    "run/findings",
)
# Of a few milliseconds each; a backtracking search needs minutes for some.
CPU_S = 20.0


@pytest.mark.parametrize("rule", CATALOGUE.values(), ids=lambda rule: rule.id)
def test_no_rule_is_slow_on_hostile_lines(rule: Rule) -> None:
    started = time.process_time()
    for signature in rule.signatures:
        for line in hostile.lines(signature.example, signature.text):
            signature.facts_in(line[: scan.WINDOW + scan.BEFORE])
    assert time.process_time() - started < CPU_S


def test_a_pattern_of_the_users_own_is_not_slow_either(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text(
        'id = "my.cause"\ntitle = "x"\ntier = "cause"\nwhy = "y"\n[[signature]]\n'
        "text = ['site: ']\npattern = 'site: (?:(?:\\w+)*,?)*;'\nexample = 'site: a;'\n"
    )
    assert proofreading.proofread(catalogue.read_rule(own), "own") == []
    (signature,) = catalogue.read_rule(own).signatures
    started = time.process_time()
    for line in hostile.lines(signature.example, signature.text):
        signature.facts_in(line)
    assert time.process_time() - started < CPU_S


@pytest.mark.parametrize("name", READERS)
def test_a_reader_of_logs_searches_with_nothing_else(name: str) -> None:
    source = (Path(pytest_gkd.__file__).parent / f"{name}.py").read_text()
    assert "\nimport re\n" not in source


def test_a_stage_that_prints_hostile_lines_is_diagnosed() -> None:
    rule = CATALOGUE["train.batch-size"]
    printed = b"\n".join(
        line
        for signature in rule.signatures
        for line in hostile.lines(signature.example, signature.text)
    )
    text = TextSource("out", printed.decode())
    started = time.process_time()
    assert diagnose(StageEvidence("data", "failed", texts=(text,)), CATALOGUE)
    assert time.process_time() - started < CPU_S


def test_other_threads_run_while_a_long_text_is_searched() -> None:
    slow = Pattern(rb"(?:a?){300}[ab]{0,300}c")
    # Of a second or so: at random, so that no state of the search comes again.
    text = bytes(random.Random(1).choices(b"ab", k=1 << 17))
    over = threading.Event()
    turns = 0

    def count() -> None:
        nonlocal turns
        while not over.wait(0.001):
            turns += 1

    counter = threading.Thread(target=count)
    counter.start()
    before = turns
    assert slow.search(text) is None
    during = turns - before
    over.set()
    counter.join()
    # Hundreds where it may run; with the lock held two, at the search's two ends.
    assert during >= 20


def test_a_find_with_unless_in_its_words_does_not_count_but_the_next_may() -> None:
    pattern = Pattern(rb"in (\w+)", unless=rb" (?:wrapper|inner)$")
    found = pattern.search(b"in wrapper, in inner, in load_weights")
    assert found is not None
    assert found[1] == b"load_weights"
    assert pattern.search(b"in wrapper, in inner") is None


def test_bytes_that_are_not_utf8_are_searched() -> None:
    found = Pattern(rb"Error: .{1,9} lost").search(b"\xff\xfe Error: \xc3( lost")
    assert found is not None


def test_look_around_is_refused_with_the_reason() -> None:
    with pytest.raises(PatternError, match=r"invalid perl operator: \(\?!"):
        Pattern(rb"a(?!b)")
