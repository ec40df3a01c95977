"""Budgets that nothing a stage does can switch off: real runs, each with an enemy."""

from __future__ import annotations

import os
import signal
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_plugin import Run
from test_tree import MAY_NOT_KILL, root_only

from pytest_gkd.processes import tree
from pytest_gkd.run.nodes import until_down

# C code that keeps the GIL and never ends.
HANG_IN_C = """
def hang_in_c():
    import ctypes
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)
"""

# As freezegun does it: every module's reference to a clock becomes the frozen one.
FREEZES = """
import sys, time
import pytest

def freeze(clock):
    real = {id(getattr(time, name)): name for name in ("monotonic", "time")}
    for module in list(sys.modules.values()):
        for name, value in list(vars(module).items()):
            if id(value) in real:
                setattr(module, name, clock)
"""


@pytest.mark.parametrize("reading", ["5.0", "time_ns() / 1e9"])
def test_a_clock_left_frozen_or_moved_ends_no_healthy_stage_and_holds_no_hang(
    tmp_path: Path, reading: str
) -> None:
    (tmp_path / "test_probe.py").write_text(
        FREEZES
        + HANG_IN_C
        + f"""
@pytest.mark.gkd_stage("freezes", lane="probe", timeout=20)
def test_freezes():
    from time import time_ns
    freeze(lambda: {reading})

@pytest.mark.gkd_stage("healthy", lane="probe", timeout=20)
def test_healthy(gkd):
    assert 10 < gkd.remaining_s() <= 20
    time.sleep(3)

@pytest.mark.gkd_stage("hangs", lane="probe", timeout=1)
def test_hangs():
    hang_in_c()
"""
    )
    run = Run(tmp_path, "--gkd-stages=freezes,healthy,hangs", "test_probe.py")
    assert run.outcomes() == {
        "freezes": "passed",
        "healthy": "passed",
        "hangs": "timeout",
    }
    assert 3 <= run.stage("healthy")["duration_s"] < 20
    assert run.stage("hangs")["duration_s"] < 60


# -- the gentle line ---------------------------------------------------------------


@pytest.mark.parametrize("workers", ["-n1", "-n0"])
def test_sources_that_cannot_be_read_do_not_keep_a_stage_from_its_gentle_end(
    tmp_path: Path, workers: str
) -> None:
    (tmp_path / "test_probe.py").write_text("""
import linecache, threading, time
from pathlib import Path
import pytest

def slow_disk(*args):
    time.sleep(20)

@pytest.fixture
def owner():
    yield
    Path("torn-down").touch()

@pytest.mark.gkd_stage("hangs", timeout=2)
def test_hangs(owner, monkeypatch):
    threading.Thread(target=time.sleep, args=[600], daemon=True).start()
    for name in ("checkcache", "getline", "getlines", "updatecache"):
        monkeypatch.setattr(linecache, name, slow_disk)
    time.sleep(600)
""")
    run = Run(tmp_path, "--gkd-stages=hangs", workers, "test_probe.py")
    assert run.outcomes() == {"hangs": "timeout"}
    assert (tmp_path / "torn-down").exists()
    assert run.stage("hangs")["duration_s"] < 20
    assert "Stack of" not in run.out


def test_extra_time_of_one_stage_does_not_put_off_the_gentle_end_of_the_next(
    tmp_path: Path,
) -> None:
    (tmp_path / "test_probe.py").write_text("""
import time
from pathlib import Path
import pytest

@pytest.fixture
def owner():
    yield
    Path("torn-down").touch()

@pytest.mark.gkd_stage("reads", lane="probe", timeout=20)
def test_reads(gkd):
    gkd.allow("data", 500)

@pytest.mark.gkd_stage("hangs", lane="probe", timeout=2)
def test_hangs(owner):
    time.sleep(600)
""")
    run = Run(tmp_path, "--gkd-stages=reads,hangs", "test_probe.py")
    assert run.outcomes() == {"reads": "passed", "hangs": "timeout"}
    assert (tmp_path / "torn-down").exists()


@pytest.mark.parametrize("workers", ["-n1", "-n0"])
def test_a_stage_that_was_in_time_may_take_its_fixtures_down(
    tmp_path: Path, workers: str
) -> None:
    (tmp_path / "test_probe.py").write_text("""
import time
import pytest

@pytest.fixture
def owner():
    yield
    time.sleep(3)

@pytest.mark.gkd_stage("in_time", timeout=2)
def test_in_time(owner):
    time.sleep(1)
""")
    run = Run(tmp_path, "--gkd-stages=in_time", workers, "test_probe.py")
    assert run.outcomes() == {"in_time": "passed"}
    assert run.code == pytest.ExitCode.OK, run.out


def test_a_limit_of_the_authors_own_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "test_probe.py").write_text("""
import time
import pytest

@pytest.mark.timeout(1)
@pytest.mark.gkd_stage("own", timeout=30)
def test_own():
    time.sleep(600)
""")
    run = Run(tmp_path, "--gkd-stages=own", "test_probe.py")
    assert run.outcomes() == {"own": "failed"}
    assert "Timeout (>1.0s) from pytest-timeout." in run.stage("own")["message"]


# -- what may not be signalled -----------------------------------------------------

REFUSES = """
import os, subprocess, sys, time
from pathlib import Path
import pytest

def stranger():
    child = subprocess.Popen(["sleep", "600"], user=65534)
    with Path("pids").open("a") as file:
        print(child.pid, file=file)
    return child
"""


@pytest.fixture
def strangers(tmp_path: Path) -> Iterator[Path]:
    """A directory whose runs' strangers are ended in the end."""
    yield tmp_path
    for pid in (tmp_path / "pids").read_text().split():
        os.kill(int(pid), signal.SIGKILL)


@root_only
def test_a_process_that_may_not_be_ended_costs_no_budget_and_no_report(
    strangers: Path,
) -> None:
    (strangers / "test_probe.py").write_text(
        REFUSES
        + HANG_IN_C
        + """
@pytest.mark.gkd_stage("leaves", lane="probe", timeout=30)
def test_leaves():
    stranger()

@pytest.mark.gkd_stage("hangs", lane="probe", timeout=1)
def test_hangs():
    stranger()
    hang_in_c()

@pytest.mark.gkd_stage("hangs_too", lane="probe", timeout=1)
def test_hangs_too():
    hang_in_c()
"""
    )
    run = Run(
        strangers,
        "--gkd-stages=leaves,hangs,hangs_too",
        "--junitxml=j.xml",
        "test_probe.py",
        before=MAY_NOT_KILL,
    )
    assert run.outcomes() == {
        "leaves": "passed",
        "hangs": "timeout",
        "hangs_too": "timeout",
    }
    assert run.code == pytest.ExitCode.TESTS_FAILED
    assert len(list(ET.parse(strangers / "j.xml").iter("testcase"))) == 3
    assert run.report["ended"]
    notes = " ".join(run.report["notes"])
    for pid in (strangers / "pids").read_text().split():
        assert f"{pid} sleep 600 (it belongs to another user, uid 65534)" in notes
    assert run.shows("gkd: could not end: *uid 65534*")


# -- what is said ------------------------------------------------------------------

FLOODS = """
import ctypes, os, sys, time
from pathlib import Path
import pytest

@pytest.mark.gkd_stage("endless", lane="flood", timeout=2)
def test_endless(gkd):
    while True:
        gkd.step("x" * 100)

@pytest.mark.gkd_stage("endless_facts", lane="flood", timeout=2)
def test_endless_facts(gkd):
    number = 0
    while True:
        number += 1
        gkd.fact(f"fact{number}", number)

@pytest.mark.gkd_stage("many", lane="flood", timeout=60)
def test_many(gkd):
    for number in range(20_000):
        gkd.step(f"step {number}")
    gkd.fact("list", list(range(3_000_000)))
    gkd.fact("last", "said")

@pytest.mark.gkd_stage("garbage", lane="flood", timeout=60)
def test_garbage(gkd):
    for entry in Path("/proc/self/fd").iterdir():
        if entry.exists() and "gkd-events" in str(entry.readlink()):
            os.write(int(entry.name), b'{"event": "fact", "st\\n[]\\n{}\\n\\n\\xff\\n')
    gkd.fact("notes", "no list")
    gkd.fact("last", "said")

@pytest.mark.gkd_stage("hangs", lane="other", timeout=3)
def test_hangs(gkd):
    for number in range(5000):
        gkd.step(f"step {number}")
    hang_in_c()
"""


@pytest.fixture(scope="module")
def floods(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("floods")
    (path / "test_probe.py").write_text(HANG_IN_C + FLOODS)
    names = "endless,endless_facts,many,garbage,hangs"
    return Run(path, f"--gkd-stages={names}", "test_probe.py", "-n2")


def test_a_flood_of_events_costs_no_budget(floods: Run) -> None:
    assert floods.outcomes() == {
        "endless": "timeout",
        "endless_facts": "timeout",
        "many": "passed",
        "garbage": "passed",
        "hangs": "timeout",
    }
    # On an idle machine 3.9 s; before, each event cost a whole report.
    for name in ("endless", "endless_facts", "hangs"):
        assert floods.stage(name)["duration_s"] < 30
    assert floods.code == pytest.ExitCode.TESTS_FAILED
    assert "INTERNALERROR" not in floods.text


def test_the_report_of_a_flood_is_whole(floods: Run) -> None:
    assert floods.stage("hangs")["step"] == "step 4999"
    assert floods.stage("many")["step"] == "step 19999"
    assert floods.stage("many")["facts"] == {
        "list": "left out: 25888890 bytes; a fact may have 65536",
        "last": "said",
    }
    assert "facts_limit" in floods.stage("endless_facts")["facts"]
    assert floods.stage("garbage")["facts"]["last"] == "said"
    notes = " ".join(floods.report["notes"])
    assert "4 line(s) written by the workers could not be read" in notes


# -- a disk that is full -----------------------------------------------------------


@root_only
def test_a_report_whose_disk_is_full_costs_no_budget_and_is_said(
    tmp_path: Path,
) -> None:
    (tmp_path / "test_probe.py").write_text(
        HANG_IN_C
        + """
import os
import pytest

@pytest.mark.gkd_stage("fills", lane="probe", timeout=30)
def test_fills(gkd):
    with open(gkd.output_dir / "full", "wb") as file:
        with pytest.raises(OSError):
            while True:
                os.write(file.fileno(), bytes(65536))

@pytest.mark.gkd_stage("hangs", lane="probe", timeout=1)
def test_hangs():
    print("the last words")
    hang_in_c()

@pytest.mark.gkd_stage("after", lane="probe", timeout=30)
def test_after(gkd):
    gkd.fact("said", "x" * 60_000)
"""
    )
    (tmp_path / "r").mkdir()
    run = Run(
        tmp_path,
        "--gkd-stages=fills,hangs,after",
        "--gkd-report=r",
        "--junitxml=j.xml",
        "test_probe.py",
        before=(
            *("unshare", "--mount", "sh", "-c"),
            'mount -t tmpfs -o size=256k full r && exec "$@"',
            "sh",
        ),
    )
    assert run.code == pytest.ExitCode.TESTS_FAILED, run.text
    assert run.shows("fills *passed*")
    assert run.shows("hangs *timeout*")
    assert run.shows("after *passed*")
    assert run.shows("gkd: the report could not be written: *No space left on device*")
    assert len(list(ET.parse(tmp_path / "j.xml").iter("testcase"))) == 3


# -- what does not die -------------------------------------------------------------

FREEZER = Path("/sys/fs/cgroup/freezer")


@pytest.fixture
def freezer(tmp_path: Path) -> Iterator[Path]:
    """A group of version 1: what is frozen in it takes no SIGKILL."""
    group = FREEZER / f"gkd-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no freezer: {error}")
    yield group
    (group / "freezer.state").write_text("THAWED")
    while (group / "cgroup.procs").read_text():
        time.sleep(0.05)
    group.rmdir()


def run_beside(place: Path, group: Path, name: str, code: str) -> Run:
    """A stage that freezes what it does not outlive, and one after it, which passes."""
    (place / "test_probe.py").write_text(f"""
import os, time
from pathlib import Path
import pytest

@pytest.mark.gkd_stage("{name}", lane="probe", timeout=3)
def test_{name}():
    group = Path("{group}")
    {code}
    (group / "freezer.state").write_text("FROZEN")
    time.sleep(600)

@pytest.mark.gkd_stage("after", lane="probe", timeout=30)
def test_after():
    pass
""")
    run = Run(
        place,
        f"--gkd-stages={name},after",
        "--junitxml=j.xml",
        "test_probe.py",
        # What is frozen would hold the pipe that a test reads to its end.
        before=("sh", "-c", 'exec "$@" >out.txt 2>&1', "sh"),
        limit_s=300,
    )
    assert run.outcomes() == {name: "timeout", "after": "passed"}
    assert run.code == pytest.ExitCode.TESTS_FAILED
    return run


@root_only
def test_a_worker_that_does_not_die_gets_its_verdict_and_the_run_goes_on(
    tmp_path: Path, freezer: Path
) -> None:
    joins = '(group / "cgroup.procs").write_text(str(os.getpid()))'
    run = run_beside(tmp_path, freezer, "frozen", joins)
    assert len(list(ET.parse(tmp_path / "j.xml").iter("testcase"))) == 2
    notes = " ".join(run.report["notes"])
    assert "the process of frozen, which survives SIGKILL" in notes
    assert run.report["cleaned"] == []


@root_only
def test_a_child_that_does_not_die_and_holds_a_dead_workers_pipe_stops_no_run(
    tmp_path: Path, freezer: Path
) -> None:
    forks = """child = os.fork()
    if not child:
        time.sleep(600)
    (group / "cgroup.procs").write_text(str(child))"""
    run = run_beside(tmp_path, freezer, "forks", forks)
    # Where it had its verdict already: ", then did not close within 15 s".
    assert run.stage("forks")["message"].startswith("not finished within 3 s")
    assert "could not end: " in " ".join(run.report["notes"])


def test_of_a_worker_that_was_given_up_nothing_more_is_heard() -> None:
    heard: list[str] = []
    notify = until_down(lambda eventname, **values: heard.append(eventname))
    for eventname in ("testreport", "errordown", "errordown", "testreport"):
        notify(eventname, node=None)
    assert heard == ["testreport", "errordown"]


# -- a watchdog that dies ----------------------------------------------------------

# What an interpreter or a plugin may do to any thread; no Exception, which is told and
# gone on after.
DIES = """
from pathlib import Path
from pytest_gkd.run.watchdog import Watchdog

judge, written = Watchdog.judge, Path("{stage}")

def dies(self, worker, now):
    runs = worker.stage == "{stage}" and worker.phase == "running"
    if runs and written.exists() and written.read_text():
        raise SystemExit("by another hand")
    judge(self, worker, now)

Watchdog.judge = dies
"""


@pytest.mark.parametrize("stage", ["first", "hangs"])
def test_a_run_whose_watchdog_died_ends_and_says_so(tmp_path: Path, stage: str) -> None:
    (tmp_path / "test_probe.py").write_text(
        HANG_IN_C
        + """
import os, subprocess, sys, time
from pathlib import Path
import pytest

def child(name):
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(name).write_text(f"{os.getpid()} {process.pid}")

@pytest.mark.gkd_stage("first", lane="one", timeout=600)
def test_first():
    child("first")
    time.sleep(5)

@pytest.mark.gkd_stage("other", lane="two", timeout=600)
def test_other():
    child("other")
    hang_in_c()

@pytest.mark.gkd_stage("hangs", lane="one", timeout=600)
def test_hangs():
    child("hangs")
    hang_in_c()
"""
    )
    (tmp_path / "conftest.py").write_text(DIES.format(stage=stage))
    run = Run(
        tmp_path,
        "--gkd-stages=first,other,hangs",
        "--junitxml=j.xml",
        "test_probe.py",
        "-n2",
    )
    assert run.code == pytest.ExitCode.INTERNAL_ERROR, run.text
    said = (
        "budgets can no longer be enforced, so the workers were ended: SystemExit: by "
        "another hand"
    )
    assert said in run.report["notes"]
    assert run.shows(f"*{said}*")
    assert run.report["ended"]
    assert "INTERNALERROR" not in run.text
    assert run.outcomes() == {
        "first": "failed" if stage == "first" else "passed",
        "other": "failed",
        "hangs": "skipped" if stage == "first" else "failed",
    }
    failed = {
        case.get("name"): case.find("failure") is not None
        for case in ET.parse(tmp_path / "j.xml").iter("testcase")
    }
    assert failed == {"test_first": False, f"test_{stage}": True, "test_other": True}
    for name in ("other", stage):
        for pid in (tmp_path / name).read_text().split():
            assert tree.is_dead(int(pid))


@pytest.mark.parametrize("workers", ["-n0", "-n2"])
def test_a_fact_nested_too_deep_costs_no_report(tmp_path: Path, workers: str) -> None:
    (tmp_path / "test_probe.py").write_text("""
import pytest

@pytest.mark.gkd_stage("deep", lane="probe", timeout=30)
def test_deep(gkd):
    value = 1
    for _ in range(600):
        value = [value]
    gkd.fact("x", value)
""")
    run = Run(tmp_path, "--gkd-stages=deep", "test_probe.py", workers)
    assert run.code == pytest.ExitCode.OK, run.text
    assert run.report["ended"]
    assert run.stage("deep")["facts"]["x"].startswith("left out: nested too deep")


# -- events that cannot be written -------------------------------------------------

CANNOT_WRITE = """
import errno, os
import pytest
from pytest_gkd.run.events import EventWriter

write = EventWriter.write

def full(self, event):
    if event.kind == "{kind}":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "events")
    write(self, event)

EventWriter.write = full
"""
TWO = """
import time
import pytest

@pytest.mark.gkd_stage("first", lane="probe", timeout=30)
def test_first(gkd):
    gkd.step("loading")

@pytest.mark.gkd_stage("second", lane="probe", timeout=30)
def test_second():
    pass
"""


@pytest.mark.parametrize("kind", ["hello", "collected"])
def test_a_worker_that_nobody_hears_of_runs_no_stage(tmp_path: Path, kind: str) -> None:
    (tmp_path / "test_probe.py").write_text(TWO)
    (tmp_path / "conftest.py").write_text(CANNOT_WRITE.format(kind=kind))
    run = Run(tmp_path, "--gkd-stages=first,second", "test_probe.py")
    assert run.code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    assert run.shows("*No space left on device*"), run.text
    assert "passed" not in run.outcomes().values()


def test_an_event_that_was_lost_is_noted_for_its_own_stage_only(tmp_path: Path) -> None:
    (tmp_path / "test_probe.py").write_text(TWO)
    (tmp_path / "conftest.py").write_text(CANNOT_WRITE.format(kind="step"))
    run = Run(tmp_path, "--gkd-stages=first,second", "test_probe.py")
    assert run.outcomes() == {"first": "passed", "second": "passed"}, run.text
    notes = [note for note in run.report["notes"] if "could not be written" in note]
    assert len(notes) == 1
    assert notes[0].startswith("first: events could not be written: ")


@pytest.mark.parametrize("workers", ["-n0", "-n2"])
def test_an_expected_failure_has_the_extra_time_of_its_stage(
    tmp_path: Path, workers: str
) -> None:
    (tmp_path / "test_probe.py").write_text("""
import time
import pytest

@pytest.mark.xfail(reason="known")
@pytest.mark.gkd_stage("slow", lane="probe", timeout=1)
def test_slow(gkd):
    gkd.allow("data", 300)
    time.sleep(1.5)
    assert False
""")
    run = Run(tmp_path, "--gkd-stages=slow", "test_probe.py", workers)
    assert run.outcomes() == {"slow": "skipped"}
    assert run.code == pytest.ExitCode.OK
    assert run.shows("*1 xfailed*")
