"""The logs of real runs are all labelled, and half of them are held out."""

from __future__ import annotations

import tomllib
from pathlib import Path

import make_runs

from pytest_gkd.diagnosis import catalogue, log_phases

RUNS = Path(__file__).with_name("runs")
LABELS = tomllib.loads((RUNS / "labels.toml").read_text("utf-8"))["run"]
OUTCOMES = {"failed", "hung", "healthy", "survived", "running"}


def test_every_log_has_a_label_and_every_label_a_log() -> None:
    logs = sorted(str(path.relative_to(RUNS)) for path in RUNS.glob("*/*.log"))
    named = [f"{make_runs.folder_of(one['name'])}/{one['name']}.log" for one in LABELS]
    assert logs == sorted(named)
    assert 0.4 < sum(one.startswith("held_out/") for one in named) / len(named) < 0.6


def test_every_label_is_of_this_project() -> None:
    causes = set(catalogue.load())
    for one in LABELS:
        name, ended_ill = one["name"], one["outcome"] in {"failed", "hung"}
        assert one["outcome"] in OUTCOMES, name
        assert {one.get("cause", ""), *one.get("also", ())} <= {*causes, ""}, name
        assert not ended_ill or one["cause"] or one["what"], name
        assert ended_ill or "cause" not in one, name
        assert (one["outcome"] in {"healthy", "survived"}) != ("phase" in one), name
        phases = {one.get("phase", "unknown"), *one.get("also_phase", ())}
        assert phases <= {*log_phases.PHASES}, name
        assert "phase" in one or "also_phase" not in one, name
        assert one["framework"], name
        assert one["command"], name


def test_the_logs_are_small_and_tell_nothing_of_their_machine() -> None:
    texts = {path: path.read_bytes() for path in RUNS.glob("*/*.log")}
    assert sum(map(len, texts.values())) < 6_000_000
    for path, text in texts.items():
        assert len(text) <= make_runs.LIMIT, path
        assert b"/root/" not in text, path
