"""The report is written on, whatever goes wrong with one writing of it."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from pytest_gkd.report.live import Teller
from pytest_gkd.report.record import RunRecord, StageRecord
from pytest_gkd.run.report_directory import MARKER, restore


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize("levels", [600, 100_000])
def test_a_record_that_cannot_be_written_is_told_and_written_once_it_can(
    tmp_path: Path, levels: int
) -> None:
    told: list[str] = []
    record = RunRecord("2026-01-01T00:00:00+00:00", {}, {})
    stage = StageRecord("data", "stages/test_data.py::test_data", "host", 20.0)
    record.stages.append(stage)
    path = tmp_path / "report.json"
    teller = Teller(
        record, path, threading.RLock(), told.append, lambda _: None, lambda _: None
    )
    stage.facts["deep"] = nested(levels)
    teller.write()
    assert len(told) == 1
    assert told[0].startswith("the report could not be written: RecursionError: ")
    assert not path.exists()
    del stage.facts["deep"]
    teller.start()
    try:
        for _ in range(600):
            if path.exists():
                break
            teller.join(0.1)
    finally:
        teller.stop()
    assert json.loads(path.read_text())["stages"][0]["name"] == "data"
    assert len(told) == 1


def test_without_a_thread_changes_are_written_at_once_and_none_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "pytest_gkd.report.live.REST", 0
    )  # however slow this machine is
    record = RunRecord("2026-01-01T00:00:00+00:00", {}, {})
    path = tmp_path / "report.json"
    teller = Teller(
        record, path, threading.RLock(), print, lambda directory: None, lambda _: None
    )
    before = threading.active_count()
    for text in ("first", "second", "third"):
        record.notes.append(text)
        teller.changed()
        assert threading.active_count() == before
        assert json.loads(path.read_text())["notes"][-1] == text


def test_without_a_thread_a_flood_of_changes_is_not_written_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pytest_gkd.report.live.REST", 1e9)
    written: list[Path] = []
    record = RunRecord("2026-01-01T00:00:00+00:00", {}, {})
    path = tmp_path / "report.json"
    teller = Teller(
        record, path, threading.RLock(), print, written.append, lambda _: None
    )
    for _ in range(100):
        teller.changed()
    assert len(written) < 100


def test_a_directory_that_a_stage_removes_meanwhile_is_made_anew_with_its_marker(
    tmp_path: Path,
) -> None:
    path = tmp_path / "last/report.json"
    told: list[str] = []
    gone = tmp_path / "gone"

    def prepare(directory: Path) -> None:
        restore(directory)
        if not gone.exists():
            directory.rename(gone)

    record = RunRecord("2026-01-01T00:00:00+00:00", {}, {})
    Teller(
        record, path, threading.RLock(), told.append, prepare, lambda _: None
    ).write()
    assert told == []
    assert sorted(file.name for file in path.parent.iterdir()) == [MARKER, path.name]
