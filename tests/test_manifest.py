"""The list of what a run creates: written as it goes, read when the run is dead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import fresh_python
import pytest

from pytest_gkd.processes import manifest, procfs
from pytest_gkd.processes.manifest import (
    FolderLine,
    ManifestFile,
    ProcessLine,
    SegmentLine,
)
from pytest_gkd.processes.manifest_writer import ManifestWriter
from pytest_gkd.processes.procfs import Identity

SLEEPER = "print(flush=True); import time; time.sleep(60)"


def the_list(path: Path) -> manifest.Manifest:
    return manifest.read(path.read_bytes())


@pytest.fixture
def manifest_file(tmp_path: Path) -> ManifestFile:
    return ManifestFile(tmp_path / manifest.LIST)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SLEEPER],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # as a worker is started
    )
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


def writer(
    manifest_file: ManifestFile,
    run_dir: Path,
    before: set[int],
    workers: dict[int, str],
    **options: Any,
) -> ManifestWriter:
    options = {"itself": False, **options}
    return ManifestWriter(
        manifest_file, run_dir, before, lambda: workers, print, **options
    )


def test_the_list_reads_back_as_it_was_written(manifest_file: ManifestFile) -> None:
    run = manifest.this_run("a mark", "/report.json", "now")
    process = ProcessLine(1, 2, "python", "vllm", 3)
    segment = SegmentLine("psm_1", 4, 5, "vllm", 3)
    folder = FolderLine("/tmp/ray", 6, 7, "", 0)
    manifest_file.add(run)
    manifest_file.before({"old": Identity(8, 9)})
    manifest_file.add(process)
    manifest_file.add(segment)
    manifest_file.add(folder)
    assert the_list(manifest_file.path) == manifest.Manifest(
        run, [process], [segment], [folder], {Identity(8, 9)}
    )


def test_a_line_that_was_cut_off_costs_only_itself(manifest_file: ManifestFile) -> None:
    first, last = (ProcessLine(n, 1, "sleep", "", 0) for n in (1, 3))
    manifest_file.add(first)
    with manifest_file.path.open("a") as file:
        file.write('\n{"kind": "process", "pid": 2, "st')
    manifest_file.add(last)
    assert the_list(manifest_file.path).processes == [first, last]


def test_a_line_of_a_later_version_is_passed_over(manifest_file: ManifestFile) -> None:
    manifest_file.path.write_text(
        '{"kind": "process", "new": 1}\n[1]\n{"kind": "x"}\n{"kind": ["run"]}\n{}\n'
        '{"kind": "before", "segments": [1]}\n{"kind": "before"}\n{"kind": "fold'
    )
    assert the_list(manifest_file.path) == manifest.Manifest(None, [], [], [], set())


def test_a_full_disk_costs_the_line_and_not_the_run() -> None:
    manifest_file = ManifestFile(Path("/dev/full"))
    manifest_file.add(ProcessLine(1, 1, "", "", 0))
    assert manifest_file.problem == "/dev/full: No space left on device"


def test_a_new_process_is_listed_with_its_stage_and_its_start_time(
    manifest_file: ManifestFile, tmp_path: Path, child: subprocess.Popen[str]
) -> None:
    writer(manifest_file, tmp_path, set(), {os.getpid(): "vllm"}, itself=True).scan()
    (line,) = [p for p in the_list(manifest_file.path).processes if p.pid == child.pid]
    here = procfs.stat(child.pid)
    assert here is not None
    assert (line.start, line.stage, line.worker) == (here.start, "vllm", os.getpid())
    assert "time.sleep(60)" in line.command


def test_a_process_is_listed_once(
    manifest_file: ManifestFile, tmp_path: Path, child: subprocess.Popen[str]
) -> None:
    follows = writer(manifest_file, tmp_path, set(), {})
    follows.scan()
    follows.scan()
    assert [p.pid for p in the_list(manifest_file.path).processes].count(child.pid) == 1


def test_what_was_there_before_the_run_is_not_listed(
    manifest_file: ManifestFile, tmp_path: Path, child: subprocess.Popen[str]
) -> None:
    writer(manifest_file, tmp_path, {child.pid}, {}).scan()
    assert child.pid not in {p.pid for p in the_list(manifest_file.path).processes}


def test_what_a_worker_starts_is_listed_under_that_worker(
    manifest_file: ManifestFile, tmp_path: Path
) -> None:
    code = f"""
    import subprocess, sys
    child = subprocess.Popen([sys.executable, "-c", {SLEEPER!r}])
    print(child.pid, flush=True)
    sys.stdin.read()
    child.kill()
    """
    worker = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert worker.stdout is not None
    below = int(next(line for line in worker.stdout if line.strip()))
    writer(manifest_file, tmp_path, set(), {worker.pid: "nccl"}).scan()
    worker.communicate("")
    listed = {p.pid: p for p in the_list(manifest_file.path).processes}
    assert (listed[below].stage, listed[below].worker) == ("nccl", worker.pid)


@pytest.mark.skipif(not procfs.shares_memory(), reason="/dev/shm is no tmpfs")
def test_shared_memory_is_listed_when_a_process_of_the_run_holds_it(
    manifest_file: ManifestFile, tmp_path: Path
) -> None:
    old = shared_memory.SharedMemory(create=True, size=8)
    follows = writer(manifest_file, tmp_path, set(), {os.getpid(): "vllm"}, itself=True)
    new = shared_memory.SharedMemory(create=True, size=8)
    stranger = procfs.SHM / f"gkd-test-{os.getpid()}"
    stranger.write_bytes(b"nobody has it open")
    try:
        here = (procfs.SHM / new.name).stat()
        follows.scan()
    finally:
        stranger.unlink()
        for memory in (old, new):
            memory.close()
            memory.unlink()
    found = the_list(manifest_file.path)
    ours = [s for s in found.segments if s.worker == os.getpid()]
    assert ours == [
        SegmentLine(new.name, here.st_dev, here.st_ino, "vllm", os.getpid())
    ]


@pytest.mark.skipif(not procfs.shares_memory(), reason="/dev/shm is no tmpfs")
def test_memory_of_unknown_processes_is_told_where_all_of_them_are_seen(
    manifest_file: ManifestFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    follows = writer(manifest_file, tmp_path, set(), {})
    theirs = procfs.SHM / f"gkd-test-{os.getpid()}-theirs"
    theirs.touch()
    monkeypatch.setattr(manifest, "pid_namespace", lambda: "pid:[4026531836]")
    try:
        seen = [s.name for s in follows.unclaimed()]
        monkeypatch.setattr(manifest, "pid_namespace", lambda: "pid:[4026532000]")
        unseen = follows.unclaimed()
    finally:
        theirs.unlink()
    assert theirs.name in seen
    assert unseen == []


@pytest.mark.skipif(not procfs.shares_memory(), reason="/dev/shm is no tmpfs")
@pytest.mark.parametrize("reads", ["open", "mmap"])
def test_what_a_process_of_the_run_only_reads_is_not_listed(
    manifest_file: ManifestFile, tmp_path: Path, reads: str
) -> None:
    follows = writer(manifest_file, tmp_path, set(), {})
    theirs = procfs.SHM / f"gkd-test-{os.getpid()}-{reads}"
    theirs.write_bytes(b"a train file that was put there during the run")
    code = f"import mmap; file = open({str(theirs)!r}, 'rb')\n"
    if reads == "mmap":
        code += "held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)\n"
    reader = subprocess.Popen(
        [sys.executable, "-c", code + SLEEPER], stdout=subprocess.PIPE
    )
    try:
        assert reader.stdout is not None
        reader.stdout.readline()
        follows.scan()
    finally:
        theirs.unlink()
        reader.kill()
        reader.communicate()
    names = [s.name for s in the_list(manifest_file.path).segments]
    assert theirs.name not in names


def ray_node(argument: str) -> subprocess.Popen[bytes]:
    """A process that was told of a directory as Ray's are; it knows its own pid."""
    code = (
        "import datetime, os, pathlib, sys\n"
        "now = datetime.datetime.today().strftime('%Y-%m-%d_%H-%M-%S_%f')\n"
        "name = f'session_{now}_{os.getpid()}'\n"
        "place = sys.argv[1].replace('NAME', name)\n"
        "pathlib.Path(place.partition('=')[2]).mkdir(parents=True, exist_ok=True)\n"
        "os.execv(sys.executable, [sys.executable, '-c', "
        f"{SLEEPER!r}, place])"
    )
    node = subprocess.Popen(
        [sys.executable, "-c", code, argument],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert node.stdout is not None
    node.stdout.readline()
    return node


def listed_folders(
    manifest_file: ManifestFile, run_dir: Path, *arguments: str
) -> list[FolderLine]:
    follows = writer(manifest_file, run_dir, set(), {})
    nodes = [ray_node(argument) for argument in arguments]
    follows.scan()
    for node in nodes:
        node.kill()
        node.communicate()
    return the_list(manifest_file.path).folders


def test_a_session_of_ray_outside_the_runs_own_is_listed(
    manifest_file: ManifestFile, tmp_path: Path
) -> None:
    run_dir = tmp_path / "gkd-1"
    within, without = run_dir / "ray/NAME", tmp_path / "ray/NAME"
    places = (f"--session-dir={within}", f"--session-dir={without}")
    (line,) = listed_folders(manifest_file, run_dir, *places)
    (session,) = (tmp_path / "ray").iterdir()
    assert (line.path, line.ino) == (str(session), session.stat().st_ino)


def test_the_directory_that_a_run_made_for_ray_is_listed(
    manifest_file: ManifestFile, tmp_path: Path
) -> None:
    place = manifest.ray_folder(tmp_path)
    try:
        (line,) = listed_folders(manifest_file, tmp_path, f"--temp-dir={place}")
    finally:
        place.rmdir()
    assert line.path == str(place)


@pytest.mark.parametrize(
    "name",
    [
        "--temp-dir={}/session_store",
        "--session-dir={}/session_store",
        "--temp-dir={}/gkd-ray-results",
        "--session-dir={}/session_2001-01-01_00-00-00_000000_{}",
        "--session-dir={}/session_2999-01-01_00-00-00_000000_1",
    ],
)
def test_a_directory_that_ray_was_given_and_did_not_make_is_not_listed(
    manifest_file: ManifestFile, tmp_path: Path, name: str
) -> None:
    """Such as the user's own store, or the session of a Ray that was there before."""
    argument = name.format(tmp_path / "theirs", os.getpid())
    assert listed_folders(manifest_file, tmp_path / "gkd-1", argument) == []


ADOPTS = '''
import json, os, subprocess, sys
from pathlib import Path
from pytest_gkd.processes import prctl, procfs
from pytest_gkd.processes.manifest import ManifestFile
from pytest_gkd.processes.manifest_writer import ManifestWriter

prctl.become_subreaper()
reader, writer = os.pipe()
code = f"""
import os, sys
if os.fork():
    sys.stdin.readline()
    os._exit(0)
print(os.getpid(), flush=True)
os.read({reader}, 1)
"""
parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True, pass_fds=[reader],
                          start_new_session=True)
orphan = int(parent.stdout.readline())
base = Path(sys.argv[1])
file = ManifestFile(base / "l")
follows = ManifestWriter(file, base, set(), dict, print, itself=False)
follows.scan()
parent.stdin.close()
parent.wait()
os.write(writer, b"x")
while (state := procfs.stat(orphan).state) != "Z":
    pass
follows.scan()
print(json.dumps(procfs.stat(orphan) is None))
'''


def test_a_dead_orphan_is_reaped_while_the_run_goes_on(tmp_path: Path) -> None:
    done = fresh_python.run("-c", ADOPTS, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) is True


def test_a_walk_that_fails_is_told_and_the_next_one_is_made(
    manifest_file: ManifestFile, tmp_path: Path, child: subprocess.Popen[str]
) -> None:
    told: list[str] = []
    walks: list[int] = []
    over = threading.Event()

    def workers() -> dict[int, str]:
        walks.append(1)
        if len(walks) == 1:
            raise RuntimeError("the first walk")
        if len(walks) == 3:
            over.set()
        return {child.pid: "vllm"}

    follows = ManifestWriter(
        manifest_file, tmp_path, set(), workers, told.append, itself=False
    )
    follows.start()
    try:
        assert over.wait(60)
    finally:
        follows.stop()
    assert child.pid in [line.pid for line in the_list(manifest_file.path).processes]
    assert told == [
        "not everything that the run created could be recorded: RuntimeError: the "
        "first walk"
    ]


def test_the_start_time_tells_a_process_from_another_with_its_pid() -> None:
    here = procfs.stat(os.getpid())
    assert here is not None
    assert procfs.is_alive(here.pid, here.start)
    assert not procfs.is_alive(here.pid, here.start + 1)


def test_a_signal_for_a_pid_that_another_process_has_now_is_not_sent(
    child: subprocess.Popen[str],
) -> None:
    here = procfs.stat(child.pid)
    assert here is not None
    assert not procfs.send(child.pid, here.start + 1, 9)
    assert child.poll() is None


def test_a_directory_is_trusted_only_when_nobody_else_could_write_it(
    tmp_path: Path,
) -> None:
    mine, open_to_all, link = (tmp_path / name for name in ("a", "b", "c"))
    mine.mkdir(mode=0o700)
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    link.symlink_to(mine)
    assert [manifest.is_trusted(p) for p in (mine, open_to_all, link)] == [
        True,
        False,
        False,
    ]


def test_a_home_that_cannot_be_written_does_not_matter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/no/such/place")
    assert manifest.note(tmp_path) is None
    assert list(manifest.find([tmp_path])) == []
