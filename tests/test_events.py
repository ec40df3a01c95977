"""What survives a killed process (pytest_gkd.run.events)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fresh_python
import pytest

from pytest_gkd import stage_plan
from pytest_gkd.run.events import (
    EventPaths,
    EventReader,
    EventWriter,
    MemoryFile,
    verdict_on,
)
from pytest_gkd.stage_events import (
    Bye,
    Collected,
    Event,
    Fact,
    Hello,
    Left,
    Start,
    Step,
    Verdict,
)
from pytest_gkd.stage_plan import StageItem

# A disk that is full, without filling one: no file of this process may grow past 100
# bytes.
WRITES_EVENTS_ON_A_FULL_DISK = """
import pathlib, resource, sys
from pytest_gkd.run.events import EventPaths, EventWriter
from pytest_gkd.stage_events import Fact
writer = EventWriter(EventPaths(pathlib.Path(sys.argv[1])))
writer.write(Fact("", "n", 1))
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
try:
    writer.write(Fact("", "n", "2" * 1000))
except OSError as error:
    print(error, file=sys.stderr)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
writer.write(Fact("", "n", 3))
"""

DIES_WHILE_IT_WRITES = """
import os, pathlib, signal, sys
from pytest_gkd.run.events import EventPaths, EventWriter
from pytest_gkd.stage_events import Fact
writer = EventWriter(EventPaths(pathlib.Path(sys.argv[1])))
for number in range(100):
    writer.write(Fact("", "n", number))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def reader() -> Iterator[EventReader]:
    made = EventReader()
    yield made
    made.close()


@pytest.fixture
def writer(reader: EventReader) -> EventWriter:
    return EventWriter(reader.add("gw0"))


def n(number: Any, **more: Any) -> Event:
    """An event that holds a number."""
    return Fact("", "n", number, **more)


def number_of(event: Event) -> int:
    if isinstance(event, Step):
        return int(event.text.strip("x"))
    assert isinstance(event, Fact)
    return int(event.value)


def numbers(reader: EventReader, limit_bytes: int | None = None) -> list[int]:
    return [number_of(event) for event in reader.read(limit_bytes)]


def test_events_are_read_in_their_order_with_their_worker(
    reader: EventReader, writer: EventWriter
) -> None:
    said = [
        Hello(7, 8),
        Collected(stage_plan.build([StageItem("a::b", "b", needs=())], None, ())),
        Start("b", 9.0, captured=(1, 2)),
        Left("b", ("7 sleep",), ()),
        Bye(),
    ]
    for event in said:
        writer.write(event)
    heard = list(reader.read())
    assert [event.worker for event in heard] == ["gw0"] * 5
    assert [replace(event, t=0.0, worker="") for event in heard] == said


def test_what_is_no_event_is_not_read(reader: EventReader) -> None:
    with reader.add("gw0").events.open("a") as file:
        file.write(
            '{"event": "helo", "pid": 1}\n{"event": "hello"}\n{"pid": 1}\n'
            '{"event": "hello", "pid": 1, "more": 2}\n{"event": [], "pid": 1}\n'
            '{"event": "hello", "pid": "1; rm"}\n'
            '{"event": "start", "stage": ["x"], "budget_s": 1}\n'
            '{"event": "start", "stage": "x", "budget_s": "abc"}\n'
        )
    assert list(reader.read()) == []
    assert reader.unreadable == 8


def test_an_event_is_read_once(reader: EventReader, writer: EventWriter) -> None:
    writer.write(n(1))
    assert numbers(reader) == [1]
    assert list(reader.read()) == []
    writer.write(n(2))
    assert numbers(reader) == [2]


def test_of_a_state_only_the_newest_is_read(
    reader: EventReader, writer: EventWriter
) -> None:
    for number in range(1000):
        writer.write(Step("", f"{number}{'x' * (1000 - number)}"))
    assert numbers(reader) == [999]
    assert list(reader.read()) == []


def test_what_was_written_before_a_state_is_read_before_it(
    reader: EventReader, writer: EventWriter
) -> None:
    writer.write(n(1))
    found = []
    for _ in range(2):
        for event in reader.read():
            found.append(number_of(event))
            if number_of(event) == 1:  # while it is handled, the worker goes on
                writer.write(n(2))
                writer.write(Step("", "3"))
    assert found == [1, 2, 3]


@pytest.mark.parametrize("said", [-1e9, 1e9, 0, "noon", None, float("nan")])
def test_a_time_is_held_to_when_the_event_can_have_been_written(said: Any) -> None:
    now = 100.0
    reader = EventReader(lambda: now)
    writer = EventWriter(reader.add("gw0"))
    now = 110.0
    writer.write(n(1, t=105.0))
    assert [event.t for event in reader.read()] == [105.0]
    now = 120.0
    writer.write(n(2, t=said))
    (event,) = reader.read()
    assert 110.0 <= event.t <= 120.0


def test_an_event_whose_handling_was_interrupted_comes_again(
    reader: EventReader, writer: EventWriter
) -> None:
    for number in range(3):
        writer.write(n(number))
    handled = []

    def handle() -> None:
        for event in reader.read():
            if number_of(event) == 1:
                raise KeyboardInterrupt
            handled.append(number_of(event))

    with pytest.raises(KeyboardInterrupt):
        handle()
    assert handled == [0]
    assert numbers(reader) == [1, 2]
    assert list(reader.read()) == []


def test_a_half_written_line_waits_for_its_end(reader: EventReader) -> None:
    with reader.add("gw0").events.open("ab", buffering=0) as file:
        line = b'{"event": "fact", "stage": "", "name": "n", "value": '
        file.write(line + b"1}\n" + line)
        assert numbers(reader) == [1]
        file.write(b"2")
        assert list(reader.read()) == []
        file.write(b"}\n")
        assert numbers(reader) == [2]


def test_every_worker_is_read_also_one_that_comes_later(reader: EventReader) -> None:
    EventWriter(reader.add("gw1")).write(Bye())
    assert [event.worker for event in reader.read()] == ["gw1"]
    EventWriter(reader.add("gw0")).write(Bye())
    EventWriter(reader.add("gw1")).write(Bye())
    assert [event.worker for event in reader.read()] == ["gw1", "gw0"]


def test_two_writers_of_one_file_do_not_mix_their_lines(reader: EventReader) -> None:
    one, other = (EventWriter(reader.add("gw0")) for _ in range(2))
    for number in range(50):
        one.write(n(number))
        other.write(n(-number))
    assert len(list(reader.read())) == 100


def test_a_value_that_json_does_not_know_becomes_its_text(
    reader: EventReader, writer: EventWriter, tmp_path: Path
) -> None:
    writer.write(n(tmp_path))
    (event,) = reader.read()
    assert isinstance(event, Fact)
    assert event.value == str(tmp_path)


def test_text_of_any_kind_arrives_on_one_line(
    reader: EventReader, writer: EventWriter
) -> None:
    text = "two\nlines, \u2028 a separator, \ud800 half a pair, \U0001f600"
    writer.write(n(text))
    (event,) = reader.read()
    assert isinstance(event, Fact)
    assert event.value == text


def test_what_a_process_wrote_before_it_was_killed_is_there(
    reader: EventReader,
) -> None:
    path = str(reader.add("gw0").events)
    subprocess.run([sys.executable, "-c", DIES_WHILE_IT_WRITES, path], check=False)
    assert numbers(reader) == list(range(100))


# -- verdicts ----------------------------------------------------------------------


@pytest.fixture
def verdicts() -> Iterator[Path]:
    file = MemoryFile("verdicts")
    yield file.path
    file.close()


def test_a_stage_is_open_until_its_verdict_is_written(verdicts: Path) -> None:
    assert verdict_on(verdicts, "vllm") is None
    EventWriter(EventPaths(verdicts)).write(Verdict("vllm", "passed"))
    assert verdict_on(verdicts, "data") is None
    assert verdict_on(verdicts, "vllm") == "passed"


def test_half_a_verdict_is_none(verdicts: Path) -> None:
    verdicts.write_text('{"event": "verdict", "stage": "vllm", "outc')
    assert verdict_on(verdicts, "vllm") is None
    with verdicts.open("a") as file:
        file.write('ome": "passed"}\n')
    assert verdict_on(verdicts, "vllm") == "passed"


# -- what a stage may do to them -----------------------------------------------------


def test_lines_that_are_no_events_are_counted_and_passed_over(
    reader: EventReader,
) -> None:
    with reader.add("gw0").events.open("a") as file:
        line = '{"event": "fact", "stage": "", "name": "n", "value": '
        file.write(f'{line}1}}\n{line}\n[1]\n\n\x00\x01\n"text"\n{line}2}}\n')
    assert numbers(reader) == [1, 2]
    assert reader.unreadable == 4
    assert list(reader.read()) == []
    assert reader.unreadable == 4


@pytest.mark.parametrize("event", [n(1), Step("", "1")])
def test_a_writer_whose_number_is_another_files_by_now_opens_its_own(
    reader: EventReader, tmp_path: Path, event: Event
) -> None:
    paths = reader.add("gw0")
    assert paths.states is not None
    others = numbers_of(paths.events) | numbers_of(paths.states)
    writer = EventWriter(paths)
    mine = (numbers_of(paths.events) | numbers_of(paths.states)) - others
    for number in mine:
        with (tmp_path / str(number)).open("wb") as file:
            os.dup2(file.fileno(), number)
    writer.write(event)
    assert [os.fstat(number).st_size for number in mine] == [0, 0]
    assert numbers(reader) == [1]
    for number in mine:
        os.close(number)
    writer.close()


def test_nothing_is_written_to_a_file_that_got_the_path_of_one_that_was_closed(
    tmp_path: Path,
) -> None:
    memory = MemoryFile("probe")
    others = numbers_of(memory.path)
    writer = EventWriter(EventPaths(memory.path))
    (mine,) = numbers_of(memory.path) - others
    os.close(mine)
    memory.close()
    with (tmp_path / "theirs").open("wb") as file:
        theirs = int(memory.path.name)
        if file.fileno() != theirs:
            os.dup2(file.fileno(), theirs)
        with pytest.raises(OSError, match="Stale file handle"):
            writer.write(n(1))
        if file.fileno() != theirs:
            os.close(theirs)
    assert (tmp_path / "theirs").read_bytes() == b""


def numbers_of(path: Path) -> set[int]:
    """The descriptors of this process by which a file is open."""
    entries = list(Path("/proc/self/fd").iterdir())
    return {int(e.name) for e in entries if e.exists() and e.samefile(path)}


def test_nobody_can_cut_what_was_said(reader: EventReader, writer: EventWriter) -> None:
    writer.write(n(1))
    with pytest.raises(PermissionError):
        os.truncate(reader.add("gw0").events, 0)
    assert numbers(reader) == [1]


def test_after_its_end_nothing_is_read_again_and_nothing_is_held(
    reader: EventReader,
) -> None:
    writer = EventWriter(reader.add("gw0"))
    before = open_files()
    writer.write(n(1))
    writer.write(Step("", "2"))
    assert numbers(reader) == [1, 2]
    writer.write(n(3))
    reader.close()
    assert list(reader.read()) == []
    writer.close()
    writer.close()
    assert open_files() == before - 4


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_line_that_was_cut_off_spoils_no_other(reader: EventReader) -> None:
    path = str(reader.add("gw0").events)
    done = fresh_python.run("-c", WRITES_EVENTS_ON_A_FULL_DISK, path)
    assert path in done.stderr
    assert numbers(reader) == [1, 3]
    assert reader.unreadable == 1


def test_a_file_in_memory_is_open_to_other_processes() -> None:
    file = MemoryFile("probe")
    writer = EventWriter(EventPaths(file.path))
    writer.write(Verdict("data", "passed"))
    code = f"print(open({str(file.path)!r}).read())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    told = json.loads(done.stdout)
    assert told == {"event": "verdict", "t": 0.0, "stage": "data", "outcome": "passed"}
    writer.close()
    file.close()
