"""``gkd clean``: removes what dead runs left, proven to be theirs, and nothing else."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from typing import Any

import pytest

from pytest_gkd import __main__
from pytest_gkd.processes import manifest, procfs, stale_runs
from pytest_gkd.processes.manifest import (
    ManifestFile,
    ProcessLine,
    RunLine,
    SegmentLine,
)

DEAD_PID = 2**22 + 1  # above the highest that Linux gives
SLEEPER = "print(flush=True); import time; time.sleep(60)"
needs_shm = pytest.mark.skipif(
    not procfs.shares_memory(), reason="/dev/shm is no tmpfs"
)


class Place:
    """A temporary directory with made runs in it; gkd clean sees no others."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def run(self, name: str = "gkd-1", **changes: Any) -> tuple[Path, ManifestFile]:
        run_dir = self.path / name
        run_dir.mkdir(mode=0o700)
        line = manifest.this_run("no process has this id", "", "")
        values = {**line._asdict(), "pid": DEAD_PID, **changes}
        manifest_file = ManifestFile(run_dir / manifest.LIST)
        manifest_file.add(RunLine(**values))
        return run_dir, manifest_file


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Place:
    # Other runs of the machine that runs these tests are none of their business.
    monkeypatch.setattr(stale_runs, "COMMON", ())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return Place(tmp_path)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def memory() -> Iterator[shared_memory.SharedMemory]:
    found = shared_memory.SharedMemory(create=True, size=8)
    yield found
    found.close()
    if (procfs.SHM / found.name).exists():
        found.unlink()
    else:
        resource_tracker.unregister(f"/{found.name}", "shared_memory")


def line_of(pid: int, stage: str = "vllm", later: int = 0) -> ProcessLine:
    here = procfs.stat(pid)
    assert here is not None
    return ProcessLine(pid, here.start + later, procfs.command(pid), stage, 0)


def segment_of(memory: shared_memory.SharedMemory, other: int = 0) -> SegmentLine:
    here = (procfs.SHM / memory.name).stat()
    return SegmentLine(memory.name, here.st_dev, here.st_ino + other, "vllm", 0)


def gkd_clean(*arguments: str) -> int:
    return __main__.main(["clean", *arguments])


def test_nothing_to_do_is_said_so(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gkd_clean() == 0
    assert capsys.readouterr().out == "nothing is left of dead runs\n"


def test_a_dry_run_says_what_it_would_do_and_does_nothing(
    place: Place,
    sleeper: subprocess.Popen[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_dir, manifest_file = place.run()
    manifest_file.add(line_of(sleeper.pid))
    assert gkd_clean() == 1
    assert sleeper.poll() is None
    assert run_dir.exists()
    out = capsys.readouterr().out
    assert f"would end     process {sleeper.pid} " in out
    assert ", stage vllm\n" in out
    assert f"would remove  directory {run_dir} (" in out
    assert out.endswith("nothing was changed; run gkd clean --yes to do it\n")


def test_with_yes_process_and_directory_go_and_nothing_is_left_to_do(
    place: Place, sleeper: subprocess.Popen[str]
) -> None:
    run_dir, manifest_file = place.run()
    manifest_file.add(line_of(sleeper.pid))
    assert gkd_clean("--yes") == 0
    assert sleeper.wait() == -signal.SIGKILL
    assert not run_dir.exists()
    assert gkd_clean() == 0


def test_a_run_whose_pytest_process_lives_is_left_alone(
    place: Place,
    sleeper: subprocess.Popen[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    me = line_of(os.getpid())
    run_dir, manifest_file = place.run(pid=me.pid, start=me.start)
    manifest_file.add(line_of(sleeper.pid))
    assert gkd_clean("--yes") == 0
    assert sleeper.poll() is None
    assert run_dir.exists()
    said = f"{run_dir}: left alone: its pytest process {me.pid} is running"
    assert said in capsys.readouterr().out


def test_the_pid_of_the_pytest_process_may_be_another_ones_by_now(place: Place) -> None:
    me = line_of(os.getpid(), later=1)
    run_dir, _ = place.run(pid=me.pid, start=me.start)
    assert gkd_clean("--yes") == 0
    assert not run_dir.exists()


def test_a_process_with_a_listed_pid_and_another_start_time_lives_on(
    place: Place, sleeper: subprocess.Popen[str]
) -> None:
    _, manifest_file = place.run()
    manifest_file.add(line_of(sleeper.pid, later=-1))
    assert gkd_clean("--yes") == 0
    assert sleeper.poll() is None


def test_what_a_listed_process_has_started_goes_with_it(place: Place) -> None:
    code = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEPER!r}])"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    parent.stdout.readline()
    _, manifest_file = place.run()
    manifest_file.add(line_of(parent.pid))
    assert gkd_clean("--yes") == 0
    # Both held the pipe's other end.
    assert parent.stdout.read() == ""
    assert parent.wait() == -signal.SIGKILL


def test_a_process_that_carries_the_runs_mark_is_its_own(place: Place) -> None:
    place.run(run_id="7c4f")
    marked = subprocess.Popen(
        [sys.executable, "-c", SLEEPER],
        stdout=subprocess.PIPE,
        env={**os.environ, procfs.RUN_ID: "7c4f"},
    )
    assert marked.stdout is not None
    marked.stdout.readline()
    assert gkd_clean("--yes") == 0
    marked.communicate()
    assert marked.returncode == -signal.SIGKILL


def test_ports_that_would_become_free_are_named(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        holder = subprocess.Popen(
            [sys.executable, "-c", SLEEPER],
            stdout=subprocess.PIPE,
            pass_fds=[server.fileno()],
        )
        assert holder.stdout is not None
        holder.stdout.readline()
    _, manifest_file = place.run()
    manifest_file.add(line_of(holder.pid))
    assert gkd_clean("--format=json") == 1
    holder.kill()
    holder.communicate()
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["things"][0]["ports"] == [port]


@needs_shm
@pytest.mark.parametrize("other", [0, 1], ids=["it", "another inode of its name"])
def test_shared_memory_that_nobody_uses_is_removed_if_it_is_what_was_listed(
    place: Place, memory: shared_memory.SharedMemory, other: int
) -> None:
    memory.close()
    _, manifest_file = place.run()
    manifest_file.add(segment_of(memory, other=other))
    assert gkd_clean("--yes") == 0
    assert (procfs.SHM / memory.name).exists() == bool(other)


@needs_shm
def test_shared_memory_that_somebody_maps_stays_and_is_named(
    place: Place,
    memory: shared_memory.SharedMemory,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, manifest_file = place.run()
    manifest_file.add(segment_of(memory))
    assert gkd_clean("--yes") == 1
    assert (procfs.SHM / memory.name).exists()
    out = capsys.readouterr().out
    assert f"left alone    shared memory /dev/shm/{memory.name}" in out
    assert f": process {os.getpid()} (" in out


@needs_shm
def test_memory_that_only_the_runs_own_processes_use_goes_after_them(
    place: Place, memory: shared_memory.SharedMemory
) -> None:
    with (procfs.SHM / memory.name).open() as file:
        holder = subprocess.Popen(
            [sys.executable, "-c", SLEEPER],
            stdout=subprocess.PIPE,
            pass_fds=[file.fileno()],
        )
    assert holder.stdout is not None
    holder.stdout.readline()
    memory.close()
    _, manifest_file = place.run()
    manifest_file.add(line_of(holder.pid))
    manifest_file.add(segment_of(memory))
    assert gkd_clean("--yes") == 0
    holder.communicate()
    assert not (procfs.SHM / memory.name).exists()


@pytest.mark.parametrize(
    ("changes", "mode", "reason"),
    [
        ({"pid_namespace": "pid:[1]"}, 0o700, "another container"),
        ({"boot": "another", "host": "another"}, 0o700, "it was made on another"),
        ({}, 0o770, "nothing is left of dead runs"),  # it is not believed to be one
    ],
)
def test_a_run_from_elsewhere_or_that_others_may_write_to_is_left_alone(
    place: Place,
    sleeper: subprocess.Popen[str],
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    mode: int,
    reason: str,
) -> None:
    run_dir, manifest_file = place.run(**changes)
    run_dir.chmod(mode)
    manifest_file.add(line_of(sleeper.pid))
    assert gkd_clean("--yes") == 0
    assert sleeper.poll() is None
    assert run_dir.exists()
    assert reason in capsys.readouterr().out


def test_of_a_run_before_the_last_boot_only_the_directory_goes(
    place: Place, sleeper: subprocess.Popen[str]
) -> None:
    run_dir, manifest_file = place.run(boot="an earlier one")
    manifest_file.add(line_of(sleeper.pid))
    assert gkd_clean("--yes") == 0
    assert sleeper.poll() is None
    assert not run_dir.exists()


def test_a_copy_of_a_runs_directory_is_not_a_run(place: Place) -> None:
    path, _ = place.run()
    copy = path.with_name("evidence")
    path.rename(copy)
    links = manifest.state_directory()
    assert links is not None
    links.mkdir(parents=True)
    (links / "x").symlink_to(copy)
    assert gkd_clean("--yes") == 0
    assert copy.exists()


def test_a_run_with_another_tmpdir_is_found_by_its_link(
    place: Place, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run_dir, _ = Place(tmp_path_factory.mktemp("elsewhere")).run()
    link = manifest.note(run_dir)
    assert link is not None
    assert gkd_clean("--yes") == 0
    assert not run_dir.exists()
    assert not link.is_symlink()


def test_the_json_says_it_all(
    place: Place,
    sleeper: subprocess.Popen[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_dir, manifest_file = place.run()
    line = line_of(sleeper.pid)
    manifest_file.add(line)
    gkd_clean("--format=json")
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["dry_run"]) == (1, True)
    (run,) = found["runs"]
    assert (run["run_dir"], run["state"]) == (str(run_dir), "dead")
    assert run["things"][0] == {
        "kind": "process",
        "name": f"{line.pid} {line.command}",
        "action": "would end",
        "why": None,
        "pid": line.pid,
        "start": line.start,
        "stage": "vllm",
        "ports": [],
    }


def test_an_option_that_is_not_known_is_a_usage_error(place: Place) -> None:
    with pytest.raises(SystemExit) as raised:
        gkd_clean("--all")
    assert raised.value.code == 2
