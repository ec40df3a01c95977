"""Which processes are of a job: what is below it, and who here serves it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from watch_helpers import until

from pytest_gkd.processes import procfs
from pytest_gkd.watch import scope
from pytest_gkd.watch.scope import Scope

SERVER = """
import socket, time
listening = socket.create_server(("127.0.0.1", 0))
open("port", "w").write(str(listening.getsockname()[1]))
kept = listening.accept()
open("accepted", "w").close()
time.sleep(100)
"""
CLIENT = """
import pathlib, socket, subprocess, sys, time
kept = socket.create_connection(("127.0.0.1", int(pathlib.Path("port").read_text())))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
open("child", "w").write(str(child.pid))
child.wait()
"""


@pytest.mark.parametrize(
    ("name", "counts"), [("serve_teacher.py", True), ("x.py", False)]
)
def test_a_teachers_server_is_of_the_job_that_is_connected_to_it(
    tmp_path: Path, name: str, counts: bool
) -> None:
    (tmp_path / name).write_text(SERVER)
    server = subprocess.Popen([sys.executable, name], cwd=tmp_path)
    job = None
    try:
        port = tmp_path / "port"
        until(lambda: port.exists() and port.read_text(), "no server")
        job = subprocess.Popen([sys.executable, "-c", CLIENT], cwd=tmp_path)
        child = tmp_path / "child"
        until(lambda: child.exists() and child.read_text(), "no child")
        until((tmp_path / "accepted").exists, "no connection")
        pid = job.pid
        found = Scope(lambda _: [pid]).find(time.monotonic(), closely=True)
        expected = {pid, int(child.read_text())} | ({server.pid} if counts else set())
        assert set(found) == expected
    finally:
        for one in filter(None, (job, server)):
            for pid in procfs.below([one.pid], procfs.table()):
                subprocess.run(["kill", "-9", str(pid)], check=False)
            one.wait()


def test_who_comes_goes_and_only_then_becomes_the_jobs_is_seen_at_once() -> None:
    reads, sleeps = ("sh", "-c", "read x; sleep 100 & wait"), ("sleep", "100")
    with subprocess.Popen(reads, stdin=subprocess.PIPE) as job:
        other = subprocess.Popen(sleeps)
        try:
            seeds, now = [job.pid], time.monotonic()
            job_scope = Scope(lambda _: seeds)
            assert set(job_scope.find(now)) == {job.pid}
            assert job.stdin is not None
            job.stdin.write(b"go\n")
            job.stdin.flush()
            until(lambda: len(job_scope.find(now)) == 2, "its child is not seen")
            seeds.append(other.pid)
            assert other.pid in job_scope.find(now)
            other.kill()
            until(lambda: other.pid not in job_scope.find(now), "its end is not seen")
        finally:
            for pid in procfs.below([job.pid, other.pid], procfs.table()):
                subprocess.run(["kill", "-9", str(pid)], check=False)
            other.wait()


def test_what_is_not_the_jobs_is_not_read_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with subprocess.Popen(["sleep", "100"]) as job:
        job_scope, now = Scope(lambda _: [job.pid]), time.monotonic()
        job_scope.find(now)
        read: list[int] = []
        stat = procfs.stat

        def noted(pid: int) -> procfs.Stat | None:
            read.append(pid)
            return stat(pid)

        monkeypatch.setattr(procfs, "stat", noted)
        job_scope.find(now + 1)
        assert job.pid in read
        assert os.getpid() not in read
        job_scope.find(now + 11)
        assert os.getpid() in read
        job.kill()


def test_of_rays_logs_those_are_followed_that_tell_a_person_something(
    tmp_path: Path,
) -> None:
    logs = tmp_path / "session_2026-11-26_01/logs"
    (logs / "events").mkdir(parents=True)
    names = ["worker-ab-01000000-7.out", "raylet.err", "raylet.out", "gcs_server.err"]
    names += ["python-core-driver-01000000_7.log", "events/event_GCS.log"]
    text = (
        "import sys, time; files = [open(name, 'w') for name in sys.argv[1:]]; "
        "open('ready', 'w').close(); time.sleep(100)"
    )
    job = subprocess.Popen([sys.executable, "-c", text, *names], cwd=logs)
    try:
        until((logs / "ready").exists, "not ready")
        found = [path.name for path in scope.written_logs([job.pid])]
        assert sorted(set(found) & {Path(name).name for name in names}) == [
            "gcs_server.err",
            "raylet.err",
            "worker-ab-01000000-7.out",
        ]
    finally:
        job.kill()
        job.wait()


def test_a_jobs_logs_are_those_that_it_writes(tmp_path: Path) -> None:
    (tmp_path / "read.log").write_text("x")
    text = (
        "import time; a = open('read.log'); b = open('own.log', 'w'); "
        "c = open('data.bin', 'w'); open('ready', 'w').close(); time.sleep(100)"
    )
    with (tmp_path / "out").open("w") as out:
        job = subprocess.Popen(
            [sys.executable, "-c", text], cwd=tmp_path, stdout=out, stderr=out
        )
    try:
        until((tmp_path / "ready").exists, "not ready")
        found = {path.name for path in scope.written_logs([job.pid])}
        assert found == {"out", "own.log"}
    finally:
        job.kill()
        job.wait()


@pytest.mark.parametrize(
    ("job", "printed", "counts"),
    [
        ("02000000", "", True),
        ("01000000", ":job_id:02000000\n", False),
        ("ffffffff", "a hook's warning\n:job_id:02000000\n:actor_name:A\n", True),
        ("ffffffff", ":job_id:01000000\n", False),
        ("ffffffff", "", False),
    ],
)
def test_a_worker_of_ray_is_of_the_job_that_it_was_given(
    tmp_path: Path, job: str, printed: str, counts: bool
) -> None:
    """Ray starts workers before there is a job, and names their logs without one."""
    log = tmp_path / f"worker-{'ab' * 28}-{job}-7.out"
    log.write_text(printed)
    title = f"exec -a ray::Rollout sleep 100 3>>{log}"
    with subprocess.Popen(["bash", "-c", title]) as worker:
        try:
            until(
                lambda: procfs.full_command(worker.pid).startswith("ray::"), "no title"
            )
            assert scope.works_for(worker.pid, {"02000000"}) is counts
        finally:
            worker.kill()
