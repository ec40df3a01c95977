"""An unknown failure is told with the known causes that it resembles."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path

import pytest
import rule_precision

from pytest_gkd import diagnosis
from pytest_gkd.diagnosis import catalogue, log_file, log_phases, logs
from pytest_gkd.diagnosis.nearest import WORDS, nearest, words_of
from pytest_gkd.report import render

CATALOGUE = catalogue.load()
INDEX = Path(diagnosis.__file__).with_name(WORDS)


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("MoonError: the GPU has no memory left to allocate 3 GiB of CUDA", "cuda.oom"),
        ("the chat template of this tokenizer is not set", "tokenizer.chat-template"),
        ("weights of the rollout differ in name and shape", "sync.name-or-shape"),
    ],
)
def test_the_nearest_cause_shares_the_rarest_words(line: str, cause: str) -> None:
    assert cause in nearest(words_of(line), CATALOGUE)


def test_a_cause_that_occurs_in_the_phase_counts_more() -> None:
    said = words_of("the weight has another size")
    assert nearest(said, CATALOGUE, "weight-sync")[0] == "sync.name-or-shape"
    assert nearest(said, CATALOGUE, "checkpoint")[0] == "checkpoint.mismatch"


@pytest.mark.parametrize(
    "line", ["", "the moon is full", "\x1b]0;\x07" * 9, "a" * 10**6]
)
def test_what_resembles_nothing_has_none(line: str) -> None:
    assert nearest(words_of(line), CATALOGUE) == []


def test_guesses_are_told_as_guesses() -> None:
    error = b"MoonError: the GPU has no memory left to allocate 3 GiB of CUDA\n"
    text = b"Traceback (most recent call last):\n" + error
    log = log_file.read(io.BytesIO(text), "a", 0, CATALOGUE)
    report = logs.judge([log], CATALOGUE)
    assert (report.verdict, report.causes) == ("unknown", ())
    assert "cuda.oom" in report.nearest
    assert report.to_json()["nearest"] == list(report.nearest)
    assert ": guesses; `gkd explain CAUSE`" in " ".join(render.log_text(report).split())


def test_the_summary_of_a_launcher_tells_less_than_what_it_sums_up() -> None:
    text = (
        b"[rank1]: ValueError: no memory of CUDA on the GPU\n"
        b"torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n"
    )
    log = log_file.read(io.BytesIO(text), "a", 0, CATALOGUE)
    telling = logs.judge([log], CATALOGUE).telling
    assert not telling or "ChildFailed" not in telling[0].text


def test_the_words_are_those_of_the_development_logs() -> None:
    logs_of = Counter(
        cause for _, causes, _ in rule_precision.labelled() for cause in causes - {""}
    )
    known = json.loads(INDEX.read_text("utf-8"))
    phases = {
        cause: sum(n for word, n in words.items() if word[1:] in log_phases.PHASES)
        for cause, words in known.items()
    }
    assert phases == logs_of, "python tools/nearest_words.py " + str(INDEX)
