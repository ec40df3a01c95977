"""What a stage leaves behind is gone before the next one starts, and is named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from test_plugin import Run

from pytest_gkd.processes import manifest, procfs
from pytest_gkd.processes.manifest_writer import INITIAL_NAMESPACE
from pytest_gkd.run.stage_cleanup import may_outlive_it

# Each stage looks at what the one before it has left.
STAGES = """
import os, signal, subprocess, sys, tempfile
from pathlib import Path
import pytest

SLEEPER = [sys.executable, "-c", "print(flush=True); import time; time.sleep(600)"]
SHM = Path("/dev/shm")
left = {}

def start(**options):
    child = subprocess.Popen(SLEEPER, stdout=subprocess.PIPE, **options)
    child.stdout.readline()
    return child

def open_memory(path):
    return open(path, "wb", opener=lambda name, flags: os.open(name, flags, 0o600))

def is_running(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except FileNotFoundError:
        return False

def stage(name, **options):
    return pytest.mark.gkd_stage(name, lane="one", timeout=30, **options)

@stage("leaves")
def test_leaves(gkd):
    left["memory"] = SHM / f"gkd-test-{os.getpid()}"
    with open_memory(left["memory"]) as file:
        left["pid"] = start(start_new_session=True, pass_fds=[file.fileno()]).pid
    gkd.fact("left", left["pid"])

@stage("looks", needs=["leaves"])
def test_looks():
    assert not is_running(left["pid"])
    assert not left["memory"].exists()

@pytest.fixture(scope="session")
def server():
    child = start()
    yield child
    child.kill()
    child.communicate()

@stage("shares", needs=["looks"])
def test_shares(server):
    left["server"] = server.pid

@stage("uses", needs=["shares"])
def test_uses(server):
    assert is_running(left["server"])

@stage("fails", needs=["uses"])
def test_fails(gkd):
    left["pid"] = start().pid
    raise OSError("it fails")

@stage("after")
def test_after():
    assert not is_running(left["pid"])

@stage("dies")
def test_dies(gkd, pytestconfig):
    memory = SHM / f"gkd-test-{os.getpid()}"
    directory = tempfile.mkdtemp()
    Path(pytestconfig.rootpath, "dead").write_text(f"{memory} {directory}")
    with open_memory(memory) as file:
        while memory.name not in (gkd.run_dir / "created.jsonl").read_text():
            pass
        os.kill(os.getpid(), signal.SIGKILL)

@stage("finds")
def test_finds(pytestconfig):
    for path in Path(pytestconfig.rootpath, "dead").read_text().split():
        assert not Path(path).exists()
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    place = tmp_path_factory.mktemp("left")
    (place / "test_left.py").write_text(STAGES)
    names = "leaves,looks,shares,uses,fails,after,dies,finds"
    run = Run(place, f"--gkd-stages={names}", "test_left.py")
    return {**run.report, "out": run.out}


def stage(report: dict[str, Any], name: str) -> dict[str, Any]:
    return next(s for s in report["stages"] if s["name"] == name)


pytestmark = pytest.mark.skipif(
    not procfs.shares_memory(), reason="/dev/shm is no tmpfs"
)


def test_the_next_stage_finds_no_process_and_no_shared_memory(
    report: dict[str, Any],
) -> None:
    assert stage(report, "looks")["outcome"] == "passed", report["out"]


def test_what_was_left_is_named(report: dict[str, Any]) -> None:
    leaves = stage(report, "leaves")
    (line,) = leaves["cleaned"]
    assert line.startswith(f"{leaves['facts']['left']} ")
    assert line in report["cleaned"]
    (note,) = [n for n in report["notes"] if n.startswith("leaves left shared memory")]
    assert "/dev/shm/gkd-test-" in note


def test_what_a_fixture_of_the_session_owns_lives_on(report: dict[str, Any]) -> None:
    assert stage(report, "uses")["outcome"] == "passed", report["out"]
    assert stage(report, "shares")["cleaned"] == []


def test_what_a_failed_stage_leaves_is_ended_too(report: dict[str, Any]) -> None:
    assert stage(report, "fails")["outcome"] == "failed"
    assert len(stage(report, "fails")["cleaned"]) == 1
    assert stage(report, "after")["outcome"] == "passed", report["out"]


def test_of_a_worker_that_died_neither_memory_nor_temporary_files_are_left(
    report: dict[str, Any],
) -> None:
    assert stage(report, "dies")["outcome"] == "failed"
    assert stage(report, "finds")["outcome"] == "passed", report["out"]
    assert any(n.startswith("dies left shared memory") for n in report["notes"])


# A process of each stage puts new memory in the place of the last, 50 times a second:
# the run's list, which is written once a second, does not know the one of the end.
CHANGING = """
import ctypes, os, signal, subprocess, sys, time
import pytest

CHILD = '''
import os, sys, time
last, number = "", 0
while True:
    name = f"/dev/shm/gkd-test-{os.getpid()}-{number}"
    held = open(name, "wb", opener=lambda path, flags: os.open(path, flags, 0o600))
    last and os.unlink(last)
    last, number = name, number + 1
    number == 5 and print(flush=True)
    time.sleep(0.02)
'''

def begin(gkd):
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE)
    child.stdout.readline()
    gkd.fact("child", child.pid)

def stage(name, **options):
    return pytest.mark.gkd_stage(name, **{"lane": name, "timeout": 30, **options})

@stage("leaves")
def test_leaves(gkd): begin(gkd)

@stage("sleeps", timeout=4)
def test_sleeps(gkd):
    begin(gkd)
    time.sleep(100)

@stage("hangs", timeout=4)
def test_hangs(gkd):
    begin(gkd)
    ctypes.PyDLL(None).sleep(100)  # with the GIL held

@stage("killed")
def test_killed(gkd):
    # What the OOM killer does to an engine that has just made its memory.
    code = CHILD.replace("last and os.unlink(last)", "os.kill(os.getpid(), 9)")
    child = subprocess.Popen([sys.executable, "-c", code])
    child.wait()
    gkd.fact("child", child.pid)

@stage("dies")
def test_dies(gkd):
    begin(gkd)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def changing(tmp_path_factory: pytest.TempPathFactory) -> Run:
    place = tmp_path_factory.mktemp("changing")
    (place / "test_changing.py").write_text(CHANGING)
    return Run(
        place, "--gkd-stages=leaves,killed,sleeps,hangs,dies", "test_changing.py"
    )


@pytest.mark.parametrize("name", ["leaves", "sleeps", "hangs", "dies"])
def test_memory_goes_that_was_made_just_before_its_process_was_killed(
    changing: Run, name: str
) -> None:
    child = changing.stage(name)["facts"]["child"]
    assert list(procfs.SHM.glob(f"gkd-test-{child}-*")) == [], changing.text


@pytest.mark.skipif(
    manifest.pid_namespace() != INITIAL_NAMESPACE, reason="other processes are hidden"
)
def test_memory_that_nobody_can_be_proven_to_own_is_named_and_stays(
    changing: Run,
) -> None:
    child = changing.stage("killed")["facts"]["child"]
    (left,) = procfs.SHM.glob(f"gkd-test-{child}-*")
    left.unlink()
    (note,) = [n for n in changing.report["notes"] if str(left) in n]
    assert note.startswith("new in /dev/shm since this run began, used by no process")


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("conftest", True),  # the stages' own, in a clone
        ("pytest_gkd.stages.conftest", True),  # and in the wheel
        ("pytest_gkd.plugin", False),
        ("pytest_mock.plugin", False),
        ("_pytest.tmpdir", False),
    ],
)
def test_an_engine_that_the_stages_share_outlives_each_of_them(
    module: str, expected: bool
) -> None:
    fixture = SimpleNamespace(scope="session", func=SimpleNamespace(__module__=module))
    assert may_outlive_it([fixture]) is expected
