"""An unknown failure is told with the known causes that it resembles."""

from __future__ import annotations

import io

import pytest

from pytest_gkd.diagnosis import catalogue, log_file, logs
from pytest_gkd.diagnosis.nearest import nearest
from pytest_gkd.report import render

CATALOGUE = catalogue.load()


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("MoonError: the GPU has no memory left to allocate 3 GiB of CUDA", "cuda.oom"),
        ("the chat template of this tokenizer is not set", "tokenizer.chat-template"),
        ("weights of the rollout differ in name and shape", "sync.name-or-shape"),
    ],
)
def test_the_nearest_cause_shares_the_rarest_words(line: str, cause: str) -> None:
    assert cause in nearest([line], CATALOGUE)


def test_a_cause_that_occurs_in_the_phase_counts_more() -> None:
    line = ["TypeError: argument 'target' (position 2) must be Tensor, not NoneType"]
    assert not nearest(line, CATALOGUE)[0].startswith("teacher.")
    assert nearest(line, CATALOGUE, "teacher")[0].startswith("teacher.")


@pytest.mark.parametrize(
    "line", ["", "the moon is full", "\x1b]0;\x07" * 9, "a" * 10**6]
)
def test_what_resembles_nothing_has_none(line: str) -> None:
    assert nearest([line], CATALOGUE) == []


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
