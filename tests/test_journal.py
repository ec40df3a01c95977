"""Files that survive a killed process (pytest_gkd.journal)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pytest_gkd.journal import (
    EventReader,
    EventWriter,
    VerdictReader,
    memory_file,
    write_json,
)

# A disk that is full, without filling one: no file of this process may grow past 100
# bytes.
WRITES_ON_A_FULL_DISK = """
import pathlib, resource, sys
from pytest_gkd.journal import write_json
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
write_json(pathlib.Path(sys.argv[1]), {"new": "x" * 1000})
"""

WRITES_EVENTS_ON_A_FULL_DISK = """
import pathlib, resource, sys
from pytest_gkd.journal import EventWriter
writer = EventWriter(pathlib.Path(sys.argv[1]))
writer.write({"n": 1})
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
try:
    writer.write({"n": "2" * 1000})
except OSError as error:
    print(error, file=sys.stderr)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
writer.write({"n": 3})
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


@pytest.mark.parametrize("said", [-1e9, 1e9, 0, "noon", None, float("nan")])
def test_a_time_is_held_to_when_the_event_can_have_been_written(
    tmp_path: Path, said: Any
) -> None:
    now = 100.0
    reader = EventReader(tmp_path, lambda: now)
    writer = EventWriter(tmp_path / "gw0.jsonl")
    now = 110.0
    writer.write({"t": 105.0})
    assert [event["t"] for event in reader.read()] == [105.0]
    now = 120.0
    writer.write({"t": said})
    (event,) = reader.read()
    assert 110.0 <= event["t"] <= 120.0


def test_an_event_whose_handling_was_interrupted_comes_again(tmp_path: Path) -> None:
    writer, reader = EventWriter(tmp_path / "gw0.jsonl"), EventReader(tmp_path)
    for number in range(3):
        writer.write({"n": number})
    handled = []

    def handle() -> None:
        for event in reader.read():
            if event["n"] == 1:
                raise KeyboardInterrupt
            handled.append(event["n"])

    with pytest.raises(KeyboardInterrupt):
        handle()
    assert handled == [0]
    assert [event["n"] for event in reader.read()] == [1, 2]
    assert list(reader.read()) == []


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


# -- what a stage may do to them -----------------------------------------------------


def test_lines_that_are_no_events_are_counted_and_passed_over(tmp_path: Path) -> None:
    path, reader = tmp_path / "gw0.jsonl", EventReader(tmp_path)
    path.write_text('{"n": 1}\n{"n": \n[1]\n\n\x00\x01\n"text"\n{"n": 2}\n')
    assert [event["n"] for event in reader.read()] == [1, 2]
    assert reader.unreadable == 4
    assert list(reader.read()) == []
    assert reader.unreadable == 4


def test_clearing_the_directory_loses_no_event(tmp_path: Path) -> None:
    directory = tmp_path / "events"
    writer, reader = EventWriter(directory / "gw0.jsonl"), EventReader(directory)
    writer.write({"n": 1})
    assert [event["n"] for event in reader.read()] == [1]
    writer.write({"n": 2})
    shutil.rmtree(directory)
    writer.write({"n": 3})
    writer.write({"n": 4})
    assert [event["n"] for event in reader.read()] == [2, 3, 4]
    writer.write({"n": 5})
    assert [event["n"] for event in reader.read()] == [5]


def test_a_writer_whose_number_is_another_files_by_now_opens_its_own(
    tmp_path: Path,
) -> None:
    path = tmp_path / "gw0.jsonl"
    writer = EventWriter(path)
    entries = Path("/proc/self/fd").iterdir()
    number = next(int(e.name) for e in entries if e.readlink() == path)
    os.close(number)
    theirs = os.open(tmp_path / "theirs", os.O_RDWR | os.O_CREAT)
    assert theirs == number
    writer.write({"n": 1})
    assert os.fstat(theirs).st_size == 0
    assert [event["n"] for event in EventReader(tmp_path).read()] == [1]
    os.close(theirs)


def test_a_line_that_a_full_disk_cut_off_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "gw0.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", WRITES_EVENTS_ON_A_FULL_DISK, str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert str(path) in done.stderr
    reader = EventReader(tmp_path)
    assert [event["n"] for event in reader.read()] == [1, 3]
    assert reader.unreadable == 1


def test_a_file_in_memory_is_open_to_other_processes() -> None:
    path = memory_file("probe")
    EventWriter(path).write({"stage": "data", "outcome": "passed"})
    code = f"print(open({str(path)!r}).read())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert json.loads(done.stdout) == {"stage": "data", "outcome": "passed"}
