"""Files that survive a killed process (pytest_gkd.journal)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_gkd.journal import EventReader, EventWriter, VerdictReader, write_json

# A disk that is full, without filling one: no file of this process may grow past 100
# bytes.
WRITES_ON_A_FULL_DISK = """
import pathlib, resource, sys
from pytest_gkd.journal import write_json
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
write_json(pathlib.Path(sys.argv[1]), {"new": "x" * 1000})
"""

DIES_WHILE_IT_WRITES = """
import os, pathlib, signal, sys
from pytest_gkd.journal import EventWriter
writer = EventWriter(pathlib.Path(sys.argv[1]))
for number in range(100):
    writer.write({"number": number})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_events_are_read_in_their_order_with_their_worker(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "gw0.jsonl")
    writer.write({"event": "hello"})
    writer.write({"event": "bye"})
    assert list(EventReader(tmp_path).read()) == [
        {"event": "hello", "worker": "gw0"},
        {"event": "bye", "worker": "gw0"},
    ]


def test_an_event_is_read_once(tmp_path: Path) -> None:
    writer, reader = EventWriter(tmp_path / "gw0.jsonl"), EventReader(tmp_path)
    writer.write({"n": 1})
    assert [event["n"] for event in reader.read()] == [1]
    assert list(reader.read()) == []
    writer.write({"n": 2})
    assert [event["n"] for event in reader.read()] == [2]


def test_a_half_written_line_waits_for_its_end(tmp_path: Path) -> None:
    path, reader = tmp_path / "gw0.jsonl", EventReader(tmp_path)
    path.write_text('{"n": 1}\n{"n": ')
    assert [event["n"] for event in reader.read()] == [1]
    with path.open("a") as file:
        file.write("2")
    assert list(reader.read()) == []
    with path.open("a") as file:
        file.write("}\n")
    assert [event["n"] for event in reader.read()] == [2]


def test_every_workers_file_is_read_also_one_that_comes_later(tmp_path: Path) -> None:
    reader = EventReader(tmp_path)
    EventWriter(tmp_path / "gw1.jsonl").write({})
    assert [event["worker"] for event in reader.read()] == ["gw1"]
    EventWriter(tmp_path / "gw0.jsonl").write({})
    EventWriter(tmp_path / "gw1.jsonl").write({})
    assert [event["worker"] for event in reader.read()] == ["gw0", "gw1"]


def test_two_writers_of_one_file_do_not_mix_their_lines(tmp_path: Path) -> None:
    one, other = (EventWriter(tmp_path / "gw0.jsonl") for _ in range(2))
    for number in range(50):
        one.write({"n": number, "by": "one"})
        other.write({"n": number, "by": "other"})
    assert len(list(EventReader(tmp_path).read())) == 100


def test_a_directory_without_events_has_none(tmp_path: Path) -> None:
    assert list(EventReader(tmp_path / "absent").read()) == []


def test_a_value_that_json_does_not_know_becomes_its_text(tmp_path: Path) -> None:
    EventWriter(tmp_path / "gw0.jsonl").write({"path": tmp_path})
    (event,) = EventReader(tmp_path).read()
    assert event["path"] == str(tmp_path)


def test_text_of_any_kind_arrives_on_one_line(tmp_path: Path) -> None:
    text = "two\nlines, \u2028 a separator, \ud800 half a pair, \U0001f600"
    EventWriter(tmp_path / "gw0.jsonl").write({"text": text})
    (event,) = EventReader(tmp_path).read()
    assert event["text"] == text


def test_what_a_process_wrote_before_it_was_killed_is_there(tmp_path: Path) -> None:
    path = tmp_path / "gw0.jsonl"
    subprocess.run([sys.executable, "-c", DIES_WHILE_IT_WRITES, str(path)], check=False)
    numbers = [event["number"] for event in EventReader(tmp_path).read()]
    assert numbers == list(range(100))


# -- verdicts ----------------------------------------------------------------------


@pytest.fixture
def verdicts(tmp_path: Path) -> Path:
    path = tmp_path / "verdicts.jsonl"
    path.touch()
    return path


def test_a_stage_is_open_until_its_verdict_is_written(verdicts: Path) -> None:
    reader = VerdictReader(verdicts)
    assert reader.outcome("vllm") is None
    EventWriter(verdicts).write({"stage": "vllm", "outcome": "passed"})
    assert reader.outcome("vllm") == "passed"
    assert reader.outcome("data") is None


def test_a_verdict_is_remembered(verdicts: Path) -> None:
    EventWriter(verdicts).write({"stage": "vllm", "outcome": "failed"})
    reader = VerdictReader(verdicts)
    reader.outcome("data")
    assert reader.outcome("vllm") == "failed"


def test_half_a_verdict_is_none(verdicts: Path) -> None:
    verdicts.write_text('{"stage": "vllm", "outc')
    reader = VerdictReader(verdicts)
    assert reader.outcome("vllm") is None
    with verdicts.open("a") as file:
        file.write('ome": "passed"}\n')
    assert reader.outcome("vllm") == "passed"


# -- whole files -------------------------------------------------------------------


def test_a_file_is_written_with_its_directory(tmp_path: Path) -> None:
    path = tmp_path / "a/b/report.json"
    write_json(path, {"schema": 1})
    assert json.loads(path.read_text()) == {"schema": 1}


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_json(path, {"old": 1})
    write_json(path, {"new": 2})
    assert json.loads(path.read_text()) == {"new": 2}
    assert list(tmp_path.iterdir()) == [path]


def test_on_a_full_disk_the_old_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text('{"old": 1}')
    done = subprocess.run(
        [sys.executable, "-c", WRITES_ON_A_FULL_DISK, str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "File too large" in done.stderr
    assert json.loads(path.read_text()) == {"old": 1}


def test_data_that_is_no_json_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text('{"old": 1}')
    with pytest.raises(TypeError):
        write_json(path, {("a", "tuple"): "is no key"})
    assert json.loads(path.read_text()) == {"old": 1}


def test_a_number_that_json_has_not_is_written_as_json(tmp_path: Path) -> None:
    write_json(tmp_path / "r.json", {"loss": float("nan"), "all": [float("inf")]})

    def refuse(name: str) -> None:
        raise AssertionError(name)

    text = (tmp_path / "r.json").read_text()
    found = json.loads(text, parse_constant=refuse)
    assert found == {"loss": "nan", "all": ["inf"]}
