"""The logs in which only numbers tell are all labelled, half of them held out."""

from __future__ import annotations

import gzip
import re
import tomllib
from pathlib import Path

import make_runs

from pytest_gkd.diagnosis import catalogue

RUNS = Path(__file__).with_name("metrics_runs")
LABELS = tomllib.loads((RUNS / "labels.toml").read_text("utf-8"))["run"]
SILENT = [one for one in LABELS if one["outcome"] == "silent"]
SOUND = [one for one in LABELS if one["outcome"] in {"healthy", "running"}]


def logs() -> dict[str, Path]:
    """Each log, by folder and name."""
    return {
        f"{path.parent.name}/{path.name.partition('.')[0]}": path
        for path in RUNS.glob("*/*.log*")
    }


def folder_and_name(name: str) -> str:
    """Where a run's log lies."""
    return f"{make_runs.folder_of(name)}/{name}"


def text_of(path: Path) -> str:
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()


def test_every_log_has_a_label_and_every_label_a_log() -> None:
    assert sorted(logs()) == sorted(folder_and_name(one["name"]) for one in LABELS)


def test_half_are_sound_and_half_of_each_kind_are_held_out() -> None:
    assert len(SILENT) + len(SOUND) == len(LABELS)
    for kind in (SILENT, SOUND):
        assert len(kind) >= 60
        held = [folder_and_name(one["name"]).startswith("held_out") for one in kind]
        assert 0.4 < sum(held) / len(held) < 0.6


def test_every_label_says_what_is_wrong_with_an_id_that_exists() -> None:
    causes = {*catalogue.load(), ""}
    for one in LABELS:
        assert {one["cause"], *one.get("also", ())} <= causes, one["name"]
        assert one["what"], one["name"]
        broken = one in SILENT
        assert ("first_step" in one) == ("metrics" in one) == broken, one["name"]
        assert broken or not one["cause"], one["name"]
        assert not broken or 1 <= one["first_step"] <= one["plan"]["steps"], one["name"]


def test_the_metrics_that_tell_are_in_their_log() -> None:
    found = logs()
    for one in SILENT:
        text = text_of(found[folder_and_name(one["name"])])
        for name in one["metrics"]:
            assert name in text, (one["name"], name)


def test_the_logs_are_small_and_tell_nothing_of_their_machine() -> None:
    assert sum(path.stat().st_size for path in logs().values()) <= 8_000_000
    for name, path in logs().items():
        text = text_of(path)
        for machine in ("/tmp/", "/root/", "/home/"):
            assert machine not in text, name
        assert re.search(r"(?<![\w/.-])/(?!v1/)[a-z]\w*/\w", text) is None, name
        assert "Traceback" not in text, name
