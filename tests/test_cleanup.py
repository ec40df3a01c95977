"""Removing directories: only the one that was meant, through no link, past no mount."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import fresh_python
import pytest
from test_escapes import writable

from pytest_gkd.processes import cgroup, cleanup, procfs
from pytest_gkd.processes.manifest import (
    ProcessLine,
    RunLine,
    SegmentLine,
    boot,
    pid_namespace,
)
from pytest_gkd.processes.procfs import Identity, Stat
from pytest_gkd.workload.inject.data import without_rights_of_root

MOUNTS = """
import ctypes, sys
from pathlib import Path
libc = ctypes.CDLL(None, use_errno=True)
run, theirs = Path(sys.argv[1]), Path(sys.argv[2])
CLONE_NEWNS, MS_BIND, MS_REC, MS_PRIVATE = 0x20000, 0x1000, 0x4000, 0x40000
if libc.unshare(CLONE_NEWNS) or libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None):
    sys.exit(77)
if libc.mount(bytes(theirs), bytes(run / "a mount"), None, MS_BIND, None):
    sys.exit(77)
from pytest_gkd.processes import cleanup
print(cleanup.remove_tree(run))
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    place = tmp_path / "run"
    (place / "deep/deeper").mkdir(parents=True)
    (place / "deep/file").write_text("x")
    return place


def test_links_in_a_tree_are_removed_and_not_followed(
    tree: Path, tmp_path: Path
) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o755)
    (theirs / "file").write_text("mine")
    (tree / "link").symlink_to(theirs)
    (tree / "deep/link").symlink_to(theirs / "file")
    assert cleanup.remove_tree(tree) == ""
    assert not tree.exists()
    assert (theirs / "file").read_text() == "mine"


def test_a_link_in_place_of_a_tree_is_left_with_what_it_leads_to(
    tree: Path, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(tree)
    assert cleanup.remove_tree(tmp_path / "link") == ""
    assert (tree / "deep/file").exists()


def test_another_directory_of_the_same_name_is_left(tree: Path, tmp_path: Path) -> None:
    here = tree.stat()
    tree.rename(tmp_path / "away")
    tree.mkdir()
    (tree / "file").write_text("mine")
    told = cleanup.remove_tree(tree, Identity(here.st_dev, here.st_ino))
    assert told == "it has been replaced by another directory"
    assert (tree / "file").exists()


def test_what_may_not_be_written_to_goes_as_well(tree: Path) -> None:
    (tree / "deep").chmod(0)
    tree.chmod(0)
    with without_rights_of_root():
        assert cleanup.remove_tree(tree) == ""
    assert not tree.exists()


def test_nothing_is_removed_where_something_is_mounted(
    tree: Path, tmp_path: Path
) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "model.safetensors").write_text("dear")
    (tree / "a mount").mkdir()
    done = fresh_python.run("-c", MOUNTS, str(tree), str(theirs))
    if done.returncode == 77:
        pytest.skip("nothing can be mounted here")
    assert done.stdout == f"{tree}/a mount is mounted in it\n", done.stderr
    assert (theirs / "model.safetensors").read_text() == "dear"


def test_a_listed_name_that_leads_out_of_shared_memory_is_not_removed(
    tmp_path: Path,
) -> None:
    theirs = tmp_path / "file"
    theirs.write_text("mine")
    here = theirs.stat()
    name = os.path.relpath(theirs, "/dev/shm")
    line = SegmentLine(name, here.st_dev, here.st_ino, "data", 0)
    assert cleanup.remove_segments([line]) == ([], [])
    assert theirs.exists()


def created(groups: str = "") -> RunLine:
    here = os.uname().nodename
    return RunLine(0, 0, "swept", boot(), pid_namespace(), here, "", "", groups)


def test_a_caller_in_a_group_of_the_dead_run_does_not_freeze_itself() -> None:
    if not writable():
        pytest.skip("no control group that can be divided")
    place = str(cgroup.base())
    body = (
        "import subprocess, sys\n"
        "from pytest_gkd.processes import cgroup, cleanup\n"
        "from test_cleanup import created\n"
        "assert cgroup.join('swept')\n"
        "left = subprocess.Popen(['sleep', '60'])\n"
        "result = cleanup.end(cleanup.Search(created(sys.argv[1]), (), ()))\n"
        "print([one.pid for one in result.ended] == [left.pid], result.left)\n"
    )
    caller = subprocess.Popen(
        [sys.executable, "-c", body, place],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert caller.communicate(timeout=120)[0] == "True []\n"
    finally:
        caller.kill()
        for group in cgroup.of_run(place, "swept"):
            for pid in cgroup.members(group):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(OSError):
                (group / "cgroup.freeze").write_text("0")
            cgroup.remove(group)


class Restless(cleanup.Search):
    """Whatever looks finds one more."""

    def __init__(self) -> None:
        super().__init__(created(), (), ())
        self.begun: list[subprocess.Popen[bytes]] = []
        self.until = time.monotonic() + 20

    def now(self) -> dict[int, Stat]:
        assert time.monotonic() < self.until, "there was no end to it"
        self.begun.append(subprocess.Popen(["sleep", "60"]))
        self._seeds |= {
            (s.pid, s.start): ProcessLine(s.pid, s.start, "sleep", "", 0)
            for one in self.begun
            if (s := procfs.stat(one.pid))
        }
        return super().now()


def test_what_forks_for_ever_does_not_hold_up_the_end_and_is_told() -> None:
    search = Restless()
    try:
        assert cleanup.end(search, limit_s=0.5).left
    finally:
        for one in search.begun:
            one.kill()
            one.wait()
