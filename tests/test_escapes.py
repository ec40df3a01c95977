"""Processes that fork and exit faster than they can be counted: none outlives a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_plugin import Run
from waiting import until

from pytest_gkd.processes import cgroup

# Each lives for 10 ms and then forks the next; the last one's pid is in a file. It
# gives up after a minute, so that a test that fails leaves nothing forever.
HOPS = """
import os, time

def hop(path, wipe):
    if os.fork():
        return
    os.setsid()
    if wipe:
        os.environ.clear()
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with open(path + ".part", "w") as file:
            file.write(str(os.getpid()))
        os.rename(path + ".part", path)
        time.sleep(0.01)
        if os.fork():
            os._exit(0)
    os._exit(0)
"""
PROBES = """
import os, time
import pytest
import hops

@pytest.mark.gkd_stage("passes", timeout=60)
def test_passes():
    hops.hop(os.environ["HOPS"] + "/passes", True)
    time.sleep(0.5)

@pytest.mark.gkd_stage("hangs", timeout=2)
def test_hangs():
    hops.hop(os.environ["HOPS"] + "/hangs", True)
    time.sleep(600)

@pytest.mark.gkd_stage("dies", timeout=60)
def test_dies():
    hops.hop(os.environ["HOPS"] + "/dies", True)
    time.sleep(0.5)
    os.abort()

@pytest.mark.gkd_stage("last", timeout=60)
def test_last(): pass
"""


def writable() -> bool:
    """Whether this machine lets a run divide its control group."""
    pid = os.fork()
    if pid == 0:
        os._exit(not cgroup.join("probe"))
    joined = os.waitpid(pid, 0)[1] == 0
    for group in cgroup.of_run(str(cgroup.base() or ""), "probe"):
        cgroup.remove(group)
    return joined


@pytest.fixture(scope="module", params=["groups", "walks"])
def places(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Run, Path]:
    if request.param == "groups" and not writable():
        pytest.skip("no control group that can be divided")
    directory = tmp_path_factory.mktemp("escapes")
    (directory / "hops.py").write_text(HOPS)
    (directory / "pids").mkdir()
    if request.param == "walks":
        (directory / "conftest.py").write_text(
            "from pytest_gkd.processes import cgroup\ncgroup.base = lambda: None\n"
        )
    (directory / "test_probe.py").write_text(PROBES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOPS", str(directory / "pids"))
        names = "--gkd-stages=passes,hangs,dies,last"
        return Run(directory, names, "test_probe.py"), directory / "pids"


def test_none_of_them_lives_on(places: tuple[Run, Path]) -> None:
    run, pids = places
    for part in pids.glob("*.part"):
        part.unlink()  # it was ended amid a hop
    assert sorted(path.name for path in pids.iterdir()) == ["dies", "hangs", "passes"]
    told = "\n".join(run.report["notes"])
    before = {path.name: path.read_text() for path in pids.iterdir()}
    time.sleep(1)
    after = {path.name: path.read_text() for path in pids.iterdir()}
    alive = [name for name, pid in after.items() if pid != before[name]]
    for name in alive:  # what the code under test did not do
        _end(pids / name)
    assert not alive, told


def test_the_stages_have_their_own_verdicts(places: tuple[Run, Path]) -> None:
    run, _ = places
    assert run.outcomes() == {
        "passes": "passed",
        "hangs": "timeout",
        "dies": "failed",
        "last": "passed",
    }


# A worker that is in its group and dies before the run has heard of it.
UNHEARD = """
import os
from pathlib import Path
from pytest_gkd.processes import cgroup; from pytest_gkd.processes import procfs
from pytest_gkd.run.events import EventWriter

def dies(self, event):
    run_id = os.environ[procfs.RUN_ID]
    (group,) = cgroup.of_run(str(cgroup.base()), run_id)
    assert cgroup.members(group) == [os.getpid()]
    Path("run_id").write_text(run_id)
    raise OSError("nobody hears this")

if "PYTEST_XDIST_WORKER" in os.environ:
    EventWriter.write = dies
"""


@pytest.mark.parametrize("heard", [True, False])
def test_no_group_is_left_behind(tmp_path: Path, heard: bool) -> None:
    if not writable():
        pytest.skip("no control group that can be divided")
    (tmp_path / "test_probe.py").write_text("""
import os
from pathlib import Path
import pytest
from pytest_gkd.processes import procfs

@pytest.mark.gkd_stage("joins", timeout=60)
def test_joins():
    Path("run_id").write_text(os.environ[procfs.RUN_ID])
""")
    if not heard:
        (tmp_path / "conftest.py").write_text(UNHEARD)
    run = Run(tmp_path, "--gkd-stages=joins", "test_probe.py")
    assert (run.code == pytest.ExitCode.OK) == heard, run.text
    run_id = (tmp_path / "run_id").read_text()
    assert cgroup.of_run(str(cgroup.base()), run_id) == []


def test_a_guardian_ends_them_by_their_group(tmp_path: Path) -> None:
    if not writable():
        pytest.skip("no control group that can be divided")
    (tmp_path / "hops.py").write_text(HOPS)
    (tmp_path / "test_probe.py").write_text(PROBES)
    names = ["--gkd-stages=hangs", "--gkd-timeout=hangs=100"]
    run = subprocess.Popen(
        [sys.executable, "-m", "pytest", *names, "test_probe.py"],
        cwd=tmp_path,
        env={**os.environ, "HOPS": str(tmp_path)},
        stdout=subprocess.DEVNULL,
    )
    pids = tmp_path / "hangs"
    until(pids.exists)
    run.kill()
    run.wait()
    report = tmp_path / ".gkd/last/report.json"
    until(lambda: "its guardian ended" in report.read_text())
    last = pids.read_text()
    time.sleep(1)
    alive = pids.read_text() != last
    if alive:
        _end(pids)
    assert not alive


def _end(path: Path) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        pid = int(path.read_text())
        try:
            os.kill(pid, signal.SIGSTOP)
        except ProcessLookupError:
            continue
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)
        if int(path.read_text()) == pid:
            return
