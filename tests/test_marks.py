"""``with phase(...)``: what it writes, what it costs, and that it changes nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pytest_gkd import marks, phase
from pytest_gkd.diagnosis import phase_marks
from pytest_gkd.watch.progress import Follower

ON = {"GKD_MARKS": "1", "PYTEST_GKD_WATCH": "", "RANK": "3"}


def _run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | ON | environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def _marks(text: str) -> list[dict[str, Any]]:
    lines = [line for line in text.splitlines() if line.startswith(marks.SIGN)]
    return [json.loads(line.removeprefix(marks.SIGN)) for line in lines]


def _events(text: str) -> list[tuple[str, str]]:
    return [(one["phase"], one["event"]) for one in _marks(text)]


def test_a_phase_is_one_line_when_it_begins_and_one_when_it_ends() -> None:
    done = _run(
        "from pytest_gkd import phase\n"
        "with phase('weight-sync', timeout_s=600):\n"
        "    print('pushed')\n"
    )
    begin, end = _marks(done.stderr)
    assert (begin["phase"], begin["event"]) == ("weight-sync", "begin")
    assert (begin["timeout_s"], begin["rank"]) == (600, 3)
    assert (end["event"], end["pid"]) == ("end", begin["pid"])
    assert end["t"] >= begin["t"]
    assert done.stdout == "pushed\n"


def test_nothing_is_written_where_nobody_asks() -> None:
    done = _run(
        "from pytest_gkd import phase\n"
        "import threading\n"
        "with phase('weight-sync', timeout_s=0.01): pass\n"
        "print(threading.active_count())\n",
        GKD_MARKS="0",
    )
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_the_package_and_the_mark_import_nothing_heavy() -> None:
    done = _run(
        "import sys\n"
        "before = set(sys.modules)\n"
        "import pytest_gkd\n"
        "assert 'pytest_gkd.marks' not in sys.modules\n"
        "from pytest_gkd import phase\n"
        "with phase('x'): pass\n"
        "print(*{n.partition('.')[0] for n in set(sys.modules) - before})\n"
    )
    others = set(done.stdout.split()) - sys.stdlib_module_names
    assert others == {"pytest_gkd"}


def test_an_exception_passes_through_and_ends_its_phases() -> None:
    done = _run(
        "from pytest_gkd import phase\n"
        "with phase('training-step'):\n"
        "    with phase('teacher'):\n"
        "        raise ValueError('own')\n"
    )
    assert done.returncode == 1
    assert "ValueError: own" in done.stderr
    _, inner, *ends = _marks(done.stderr)
    assert inner["in"] == ["training-step"]
    assert [(e["phase"], e["error"]) for e in ends] == [
        ("teacher", "ValueError"),
        ("training-step", "ValueError"),
    ]


def test_functions_are_marked_on_every_call() -> None:
    done = _run(
        "import asyncio\n"
        "from pytest_gkd import phase\n"
        "@phase('generation')\n"
        "def plain(n): 'doc'; return n + 1\n"
        "@phase('teacher')\n"
        "async def asked(n): await asyncio.sleep(0); return n\n"
        "@phase('data')\n"
        "def rows():\n"
        "    got = yield 1\n"
        "    return got\n"
        "@phase('weight-sync')\n"
        "async def buckets():\n"
        "    yield 1\n"
        "async def main():\n"
        "    assert await asked(2) == 2\n"
        "    assert [b async for b in buckets()] == [1]\n"
        "assert plain(1) == 2 and plain(2) == 3\n"
        "assert (plain.__name__, plain.__doc__) == ('plain', 'doc')\n"
        "asyncio.run(main())\n"
        "steps = rows(); next(steps)\n"
        "try: steps.send(7)\n"
        "except StopIteration as end: assert end.value == 7\n"
    )
    assert done.returncode == 0, done.stderr
    names = ["generation", "generation", "teacher", "weight-sync", "data"]
    assert _events(done.stderr) == [(n, e) for n in names for e in ("begin", "end")]


def test_threads_and_tasks_nest_each_for_itself() -> None:
    done = _run(
        "import asyncio, threading\n"
        "from pytest_gkd import phase\n"
        "async def one(name):\n"
        "    with phase(name):\n"
        "        await asyncio.sleep(0.05)\n"
        "        with phase(name + '-in'): await asyncio.sleep(0.05)\n"
        "async def main(): await asyncio.gather(one('a'), one('b'))\n"
        "def other():\n"
        "    with phase('t'): pass\n"
        "with phase('outer'):\n"
        "    thread = threading.Thread(target=other, name='loader')\n"
        "    thread.start(); thread.join()\n"
        "asyncio.run(main())\n"
    )
    told = _marks(done.stderr)
    nested = {one["phase"]: one.get("in") for one in told if one["event"] == "begin"}
    assert nested["a-in"] == ["a"]
    assert nested["b-in"] == ["b"]
    assert nested["t"] is None
    assert {o["thread"] for o in told if o["phase"] == "t"} == {"loader"}
    whole = phase_marks.Marks()
    whole.feed(done.stderr.encode())
    assert not whole.open


def test_a_late_phase_shows_its_stacks_and_those_of_its_children_and_goes_on() -> None:
    done = _run(
        "import subprocess, sys, time\n"
        "from pytest_gkd import phase\n"
        "def pushes_weights(): time.sleep(8)\n"
        "with phase('weight-sync', timeout_s=0.3): pushes_weights()\n"
        "print('went on')\n"
    )
    assert done.stdout == "went on\n"
    kinds = [event for _, event in _events(done.stderr)]
    assert kinds == ["begin", "late", "end"]
    assert "in pushes_weights\n" in done.stderr  # faulthandler's
    assert "gkd: " in done.stderr  # the helper's, of the whole job
    assert done.stderr.count("pushes_weights") > 1


def test_a_phase_that_ends_in_time_is_not_late() -> None:
    done = _run(
        "import time\n"
        "from pytest_gkd import phase\n"
        "for _ in range(20):\n"
        "    with phase('a', timeout_s=0.5), phase('b', timeout_s=30): pass\n"
        "time.sleep(1)\n"
    )
    assert "late" not in {event for _, event in _events(done.stderr)}


def test_a_fork_marks_for_itself() -> None:
    done = _run(
        "import os, time\n"
        "from pytest_gkd import phase\n"
        "with phase('a', timeout_s=60):\n"
        "    if os.fork() == 0:\n"
        "        with phase('child', timeout_s=0.2): time.sleep(1)\n"
        "        os._exit(0)\n"
        "    os.wait()\n"
    )
    assert ("child", "late") in _events(done.stderr)


def test_a_closed_standard_error_harms_nobody() -> None:
    done = _run(
        "import os\n"
        "from pytest_gkd import phase\n"
        "os.close(2)\n"
        "with phase('data'): print('on')\n"
    )
    assert done.stdout == "on\n"


@pytest.mark.parametrize(
    ("arguments", "kind", "says"),
    [
        ((), TypeError, "name"),
        (("",), ValueError, "1 to 100 characters"),
        (("x" * 101,), ValueError, "1 to 100 characters"),
        ((7,), TypeError, "a string"),
        ((print,), TypeError, "@phase('generation')"),
        (("a", 0), ValueError, "timeout_s=0"),
        (("a", "5"), ValueError, "timeout_s='5'"),
        (("a", float("nan")), ValueError, "timeout_s=nan"),
    ],
)
def test_bad_arguments_are_named(
    arguments: Any, kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=re.escape(says)):
        phase(*arguments)


# -- what reads them ---------------------------------------------------------------


def _line(name: str, event: str, pid: int = 7, **more: Any) -> str:
    told = {"phase": name, "event": event, "t": 1.0, "pid": pid, **more}
    return f"{marks.SIGN}{json.dumps(told)}\n"


def _diagnosed(text: str, tmp_path: Path) -> dict[str, Any]:
    log = tmp_path / "train.log"
    log.write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "pytest_gkd", "diagnose", "--format=json", log],
        capture_output=True,
        check=False,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


STEPS = "".join(
    f"step:{n} - actor/loss:0.{n} - timing_s/step:2.0\n" for n in range(1, 9)
)


def test_a_marked_phase_beats_what_a_log_says_otherwise(tmp_path: Path) -> None:
    marked = STEPS + _line("weight_sync", "begin") + "Loading checkpoint shards: 10%\n"
    assert _diagnosed(marked, tmp_path)["phase"] == "weight-sync"
    ended = marked + _line("weight_sync", "end")
    assert _diagnosed(ended, tmp_path)["phase"] != "weight-sync"


def test_the_phase_that_an_exception_ended_is_that_of_the_failure(
    tmp_path: Path,
) -> None:
    text = (
        STEPS
        + _line("teacher", "begin")
        + _line("teacher", "end", error="ConnectionError")
        + 'Traceback (most recent call last):\n  File "a.py", line 3, in compute_loss\n'
        "ConnectionError: refused\n"
    )
    assert _diagnosed(text, tmp_path)["phase"] == "teacher"


def test_behind_the_prefix_of_an_actor_it_is_read_too() -> None:
    text = f"\x1b[36m(WorkerDict pid=9)\x1b[0m {_line('generation', 'begin').rstrip()}"
    mark = phase_marks.at_end(f"{text} [repeated 3x across cluster]\n".encode())
    assert mark is not None
    assert (mark.phase, mark.is_open) == ("generation", True)


def test_the_phase_of_most_processes_counts() -> None:
    text = "".join(_line("training-step", "begin", pid) for pid in (1, 2, 3))
    text += _line("my evaluation", "begin", 4)
    mark = phase_marks.at_end(text.encode())
    assert mark is not None
    assert mark.name == "training-step"


def test_a_rank_that_was_started_again_is_not_in_its_old_phase() -> None:
    text = _line("weight-sync", "begin", 7, rank=0)
    text += _line("weight-sync", "begin", 8, rank=1)
    text += _line("data", "begin", 17, rank=0) + _line("data", "begin", 18, rank=1)
    whole = phase_marks.Marks()
    whole.feed(text.encode())
    assert whole.innermost is not None
    assert whole.innermost.name == "data"
    assert len(whole.open) == 2


def test_marks_without_end_take_no_memory_without_end() -> None:
    whole = phase_marks.Marks()
    for _ in range(30):
        whole.feed((_line("data", "begin") * 100).encode())
    assert sum(map(len, whole.open.values())) == phase_marks.DEEPEST
    whole.feed((_line("data", "end") * 200).encode())
    assert not whole.open


@pytest.mark.parametrize(
    "line",
    [
        'GKD-PHASE {"phase": 3, "event": "begin"}',
        'GKD-PHASE {"phase": "a", "event": "boom"}',
        'GKD-PHASE {"phase": "a", "event": "begin", "t": "x"}',
        'GKD-PHASE {"phase": "a"',
        "GKD-PHASE {" + "[" * 900,
        'GKD-PHASE {"phase": "a", "event": "end"}',
        'GKD-PHASE ["a"]',
    ],
)
def test_lines_that_somebody_else_made_are_passed_over(line: str) -> None:
    assert phase_marks.at_end(f"{line}\n".encode()) is None


def test_the_watcher_follows_marks_across_parts_of_output() -> None:
    follower = Follower()
    text = (STEPS + _line("teacher", "begin", timeout_s=5)).encode()
    follower.feed(text[:-20], 1.0)
    assert follower.feed(text[-20:], 2.0).phase == "teacher"
    assert follower.feed(b"Loading checkpoint shards:  50%\n", 3.0).phase == "teacher"
    follower.feed(_line("teacher", "late").encode(), 8.0)
    assert follower.late is not None
    assert follower.late.name == "teacher"
    ends = _line("teacher", "end") + _line("checkpoint", "begin")
    assert follower.feed(ends.encode(), 9.0).phase == "checkpoint"
