"""gkd watch --pid and --log: a job that runs already is followed, and never touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from watch_helpers import GKD, LIMIT_S, python, until

from pytest_gkd.watch.log_tail import Tail


def attach(place: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*GKD, "watch", "--no-status", "--dir", str(place / "watch"), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        cwd=place,
    )


def begun(place: Path, text: str) -> subprocess.Popen[bytes]:
    """A job that writes to train.log."""
    with (place / "train.log").open("wb") as file:
        return subprocess.Popen(python(text), stdout=file, stderr=file, cwd=place)


STANDS = """
import time
for step in range(4):
    print({'loss': 1.0, 'step': step}, flush=True)
def save_checkpoint():
    time.sleep(1000)
save_checkpoint()
"""


@pytest.mark.parametrize("by", ["pid", "log"])
def test_a_standstill_is_told_and_the_job_left_alone(tmp_path: Path, by: str) -> None:
    job = begun(tmp_path, STANDS)
    try:
        until(lambda: (tmp_path / "train.log").stat().st_size > 50, "no output")
        whom = str(job.pid) if by == "pid" else "train.log"
        watching = attach(
            tmp_path, f"--{by}={whom}", "--look-after=3", "--stuck-after=3"
        )
        assert watching.stdout is not None
        said = ""
        for line in watching.stdout:
            said += line
            if "  all   " in line:
                break
        assert "following " in said
        assert "stuck for " in said
        assert " in checkpoint" in said
        assert f"(pid {job.pid}) is in save_checkpoint" in said
        assert job.poll() is None
        watching.send_signal(signal.SIGINT)
        assert watching.wait(LIMIT_S) == 130
        assert job.poll() is None
    finally:
        job.kill()
        job.wait()


@pytest.mark.parametrize(
    ("last", "status", "told"),
    [
        ("import no_such_module", 91, "no_such_module"),
        ("print('Training finished successfully', flush=True)", 0, "finished"),
        ("", 92, "nothing tells how"),
    ],
    ids=["failed", "finished", "unknown"],
)
def test_how_a_job_ended_is_read_from_its_log(
    tmp_path: Path, last: str, status: int, told: str
) -> None:
    text = (
        "import pathlib, time\nprint('begun', flush=True)\n"
        "while not pathlib.Path('go').exists(): time.sleep(0.05)\n"
    )
    job = begun(tmp_path, text + last)
    watching = attach(tmp_path, f"--pid={job.pid}")
    assert watching.stdout is not None
    said = watching.stdout.readline()
    (tmp_path / "go").touch()
    job.wait()
    said += watching.stdout.read()
    assert watching.wait(LIMIT_S) == status
    assert told in said


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--pid=4194305"], "--pid 4194305: there is no such process"),
        (["--log", "no.log"], "no.log: there is no such file; for a job that has not"),
        (["--log", "."], ".: is a directory; name a log file"),
        (["--log", sys.executable], "contains binary data, not the text of a log"),
        (
            ["--on-stuck=end", "--pid=1"],
            "only a command that gkd watch started is ever",
        ),
        (["--on-stuck=kill"], "'kill' is not report, end or command:LINE"),
        (["--look-after=soon"], "'soon' is not a time above 0, such as 90, 5m or 1h"),
        (["--notify=http://x.org/"], "only https"),
        (["--pid=1", "--", "true"], "a command and --pid or --log; give the one or"),
        (["--"], "no command after --"),
        (["--rules=no.toml", "--", "true"], "no.toml: cannot be read: No such file"),
        ([], "nothing to watch; give a command (gkd watch -- python train.py)"),
    ],
)
def test_what_cannot_be_watched_is_refused_in_words(
    tmp_path: Path, options: list[str], told: str
) -> None:
    done = attach(tmp_path, *options)
    said = done.communicate(timeout=LIMIT_S)[0]
    assert done.returncode == 2
    assert told in " ".join(said.split())
    assert not (tmp_path / "watch").exists()


def test_the_users_own_exit_is_no_end_of_the_job(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    until(lambda: _state(ended.pid) == "Z", "it has not ended")
    done = attach(tmp_path, f"--pid={ended.pid}")
    assert "(it has ended)" in done.communicate(timeout=LIMIT_S)[0]
    ended.wait()


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


# -- a log file ----------------------------------------------------------------------


def test_of_many_logs_the_first_are_named(tmp_path: Path) -> None:
    text = (
        "import time; files = [open(f'{n}.log', 'w') for n in range(8)]; "
        "open('ready', 'w').close(); time.sleep(100)"
    )
    job = subprocess.Popen(python(text), cwd=tmp_path)
    try:
        until((tmp_path / "ready").exists, "not ready")
        watching = attach(tmp_path, f"--pid={job.pid}")
        assert watching.stdout is not None
        said = []
        for line in watching.stdout:
            said.append(line)
            if " more" in line:
                break
        watching.send_signal(signal.SIGINT)
        watching.communicate(timeout=LIMIT_S)
        named = [one for one in said if "following" in one]
        assert len(named) == 6
        assert named[-1].strip().endswith("following 3 more")
    finally:
        job.kill()
        job.wait()


def test_a_log_is_followed_as_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"one\n")
    tail = Tail(path)
    assert tail.read() == b"one\n"
    assert tail.read() == b""
    with path.open("ab") as file:
        file.write(b"two\n")
    assert tail.read() == b"two\n"
    assert tail.taken_notes() == []


def test_a_log_that_is_truncated_is_followed_from_its_new_beginning(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"a long line of the first run\n")
    tail = Tail(path)
    tail.read()
    path.write_bytes(b"new\n")
    assert tail.read() == b"new\n"
    assert "was truncated from 29 to 4 bytes" in tail.taken_notes()[0]


def test_a_rotated_log_is_read_to_its_end_and_the_new_one_from_its_beginning(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"one\n")
    tail = Tail(path)
    tail.read()
    with path.open("ab") as file:
        path.rename(tmp_path / "a.log.1")
        path.write_bytes(b"three\n")
        file.write(b"two\n")
    got = b"".join(tail.read() for _ in range(4))
    assert got == b"two\nthree\n"
    assert "was replaced by a new file" in tail.taken_notes()[0]


def test_a_log_that_is_deleted_is_told_once_and_followed_when_it_is_back(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"one\n")
    tail = Tail(path)
    tail.read()
    path.unlink()
    assert [tail.read() for _ in range(3)] == [b"", b"", b""]
    (told,) = tail.taken_notes()
    assert "was deleted or moved; waiting for a new one of its name" in told
    path.write_bytes(b"two\n")
    assert b"".join(tail.read() for _ in range(3)) == b"two\n"
    assert "is back" in tail.taken_notes()[0]


def test_of_a_huge_log_the_end_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    with path.open("wb") as file:
        file.truncate(1 << 32)
        file.seek(0, os.SEEK_END)
        file.write(b"\nlast line\n")
    data = Tail(path).read()
    assert data.endswith(b"\nlast line\n")
    assert len(data) <= 1 << 20
