"""gkd watch -- COMMAND: output, input, signals and status pass through unchanged."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import termios
import tty
from pathlib import Path
from typing import Any

import psutil
import pytest
from watch_helpers import GKD, AtTerminal, begin, log, python, until, watch

SHELL = ("bash", "--norc", "--noprofile", "-i")
BOTH = """
import os, sys
for number in range(300):
    os.write(1, b"out %d\\xff\\x00\\r\\n" % number)
    os.write(2, b"err %d" % number)
"""


def test_both_streams_pass_through_byte_by_byte_and_are_kept(tmp_path: Path) -> None:
    done = watch(tmp_path, *python(BOTH), options=["--no-status"])
    out = b"".join(b"out %d\xff\x00\r\n" % number for number in range(300))
    err = b"".join(b"err %d" % number for number in range(300))
    assert (done.returncode, done.stdout, done.stderr) == (0, out, err)
    kept = log(tmp_path)
    assert sorted(kept) == sorted(out + err)
    (directory,) = (tmp_path / "watch").iterdir()
    assert oct((directory / "output.log").stat().st_mode)[-3:] == "600"


def test_the_order_of_both_streams_is_kept_where_they_are_one_file(
    tmp_path: Path,
) -> None:
    with (tmp_path / "both").open("wb") as file:
        subprocess.run(
            [*GKD, "watch", "--no-status", "--dir", "watch", "--", *python(BOTH)],
            check=True,
            stdout=file,
            stderr=file,
            cwd=tmp_path,
        )
    expected = b"".join(
        b"out %d\xff\x00\r\nerr %d" % (number, number) for number in range(300)
    )
    assert (tmp_path / "both").read_bytes() == expected


def test_a_slow_reader_gets_every_byte(tmp_path: Path) -> None:
    text = "import os\nfor n in range(64): os.write(1, bytes([n]) * 65536)"
    running = begin(tmp_path, *python(text), options=["--no-status"])
    assert running.stdout is not None
    got = b""
    while part := running.stdout.read(50_000):
        got += part
        os.sched_yield()
    assert running.wait() == 0
    assert got == b"".join(bytes([n]) * 65536 for n in range(64))


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("raise SystemExit(7)", 7),
        ("import os; os.kill(os.getpid(), 9)", 137),
        ("import os; os.kill(os.getpid(), 15)", 143),
    ],
)
def test_the_exit_status_passes_through(tmp_path: Path, text: str, status: int) -> None:
    assert watch(tmp_path, *python(text)).returncode == status


def test_a_failed_command_is_told_with_its_cause(tmp_path: Path) -> None:
    text = "import no_such_module"
    done = watch(tmp_path, *python(text))
    said = done.stderr.decode()
    assert "gkd: dead: exit code 1 after" in said
    assert re.search(r"gkd: +cause .*no_such_module.*\[env\.", said)
    assert "gkd diagnose " in said


def test_what_a_command_took_is_its_own_time(tmp_path: Path) -> None:
    """Its log is asked for the cause before its end is told, which takes seconds."""
    text = """
import time
from pytest_gkd.watch import arguments, started, stuck_report
asked = arguments.Asked(("false",), status=False)
watched = started.CommandWatch(asked)
def slow(*asked):
    print(time.monotonic() - watched.watch.began)
    time.sleep(3)
    return {"causes": [], "verdict": "no cause", "phase": ""}
stuck_report.diagnosed = slow
watched.run()
"""
    done = subprocess.run(
        python(text), check=False, capture_output=True, text=True, cwd=tmp_path
    )
    told = re.search(r"exit code 1 after ([\d.]+) s\n", done.stderr)
    assert told, done.stderr
    assert float(told[1]) < float(done.stdout) + 1


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        ("no-such-command", 127, "no-such-command: there is no such command on PATH"),
        ("./no-such-file", 127, "./no-such-file: there is no such command"),
        ("./plain", 126, "./plain: permission denied"),
        (".", 126, ".: is a directory"),
        ("", 2, "no command after --"),
        ("./script", 126, "./script: is no program: it has no #! line; "),
    ],
)
def test_a_command_that_cannot_be_run_is_refused_in_words(
    tmp_path: Path, command: str, status: int, said: str
) -> None:
    (tmp_path / "plain").write_text("x")
    (tmp_path / "script").write_text("echo x\n")
    (tmp_path / "script").chmod(0o755)
    done = watch(tmp_path, command)
    assert done.returncode == status
    assert said in done.stderr.decode()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT"])
def test_signals_pass_on(tmp_path: Path, name: str) -> None:
    text = (
        "import signal, sys, time\n"
        "def told(number, _):\n"
        "    print('got', signal.Signals(number).name, flush=True); sys.exit(5)\n"
        f"signal.signal(signal.{name}, told)\n"
        "print('ready', flush=True)\n"
        # Not signal.pause(): a signal just before it would be waited for in vain.
        "while True: time.sleep(0.05)\n"
    )
    running = begin(tmp_path, *python(text))
    assert running.stdout is not None
    assert running.stdout.readline() == b"ready\n"
    running.send_signal(getattr(signal, name))
    assert running.stdout.read() == f"got {name}\n".encode()
    assert running.wait() == 5


def test_the_job_goes_on_when_the_watcher_is_killed(tmp_path: Path) -> None:
    text = (
        "import pathlib, time\n"
        "print('ready', flush=True)\n"
        "while not pathlib.Path('go').exists(): time.sleep(0.05)\n"
        "for n in range(100): print('x' * 10_000, flush=True)\n"
        "pathlib.Path('done').touch()\n"
    )
    running = begin(tmp_path, *python(text))
    assert running.stdout is not None
    assert running.stdout.readline() == b"ready\n"
    running.kill()
    running.wait()
    (tmp_path / "go").touch()
    assert running.stdout.read() == (b"x" * 10_000 + b"\n") * 100
    until((tmp_path / "done").exists, "the job did not end")
    assert log(tmp_path).count(b"x") == 1_000_000


def test_a_reader_that_goes_is_noticed_by_the_job_as_without_a_watcher(
    tmp_path: Path,
) -> None:
    text = "import os\nwhile True: os.write(1, b'x' * 4096)"
    running = begin(tmp_path, *python(text))
    assert running.stdout is not None
    running.stdout.read(10)
    running.stdout.close()
    assert running.wait() == 1  # Python's own BrokenPipeError


def test_what_a_command_leaves_behind_is_told_and_left_alone(tmp_path: Path) -> None:
    text = (
        "import subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '60'], start_new_session=True, stdin=-3,\n"
        "                         stdout=-3, stderr=-3)\n"
        "print(child.pid)\n"
    )
    done = watch(tmp_path, *python(text))
    child = psutil.Process(int(done.stdout))
    try:
        assert done.returncode == 0
        assert f"left running: {child.pid}; to go on" in done.stderr.decode()
        assert f"gkd watch --pid {child.pid}" in done.stderr.decode()
        assert child.is_running()
    finally:
        child.kill()


STEPS = """
import subprocess, time
print("Loading checkpoint shards: 100%", flush=True)
time.sleep(1.5)
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
for step in range(1, 200):
    print({"loss": 1 / step, "step": step}, flush=True)
    print("child", child.pid, flush=True)
    time.sleep(0.2)
"""


def kept(place: Path) -> dict[str, Any]:
    (file,) = (place / "watch").glob("*/verdict.json")
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_until_step_ends_the_command_and_all_it_started_after_its_first_step(
    tmp_path: Path,
) -> None:
    done = watch(tmp_path, *python(STEPS), options=["--until-step"])
    assert (done.returncode, b"training step is done" in done.stderr) == (0, True)
    assert done.stdout.count(b"loss") < 20
    (child, *_) = re.findall(rb"child (\d+)", done.stdout)
    assert not psutil.pid_exists(int(child))
    told = kept(tmp_path)
    assert (told["verdict"], told["exit_status"]) == ("finished", 0)
    assert told["ended_for"] == "--until-step"
    assert told["first_step_s"] is not None
    assert "actor-init" in told["phases_s"]


def test_a_command_that_ends_before_its_first_step_keeps_its_status(
    tmp_path: Path,
) -> None:
    done = watch(tmp_path, *python("print('hi'); exit(3)"), options=["--until-step"])
    assert done.returncode == 3
    told = kept(tmp_path)
    assert (told["verdict"], told["first_step_s"]) == ("dead", None)
    assert told["ended_for"] == ""


def test_within_reports_and_ends_a_command_without_a_step(tmp_path: Path) -> None:
    text = "import time\nwhile True: print('tick', flush=True); time.sleep(0.1)"
    done = watch(tmp_path, *python(text), options=["--within=2"])
    assert done.returncode == 93
    assert b"no training step within 2" in done.stderr
    told = kept(tmp_path)
    assert (told["verdict"], told["ended_for"]) == ("slow", "--within")
    assert told["standstill"]["why"][0].startswith("no training step within 2")
    assert (Path(told["report"]) / "tree.txt").exists()


@pytest.mark.parametrize("option", ["--until-step", "--within=9", "--on-stuck=end"])
def test_what_was_not_started_here_is_never_ended(tmp_path: Path, option: str) -> None:
    command = [*GKD, "watch", option, "--pid", str(os.getpid())]
    done = subprocess.run(command, capture_output=True, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert f"{option.partition('=')[0]}" in done.stderr.decode()


def test_a_full_disk_is_told_once_and_harms_nothing(tmp_path: Path) -> None:
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)],
        check=False,
        capture_output=True,
    )
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        text = "import os\nfor n in range(90): os.write(1, b'x' * 4096)"
        done = subprocess.run(
            [
                *GKD,
                "watch",
                "--no-status",
                "--dir",
                str(place / "w"),
                "--",
                *python(text),
            ],
            check=False,
            capture_output=True,
            cwd=tmp_path,
        )
        assert done.returncode == 0
        assert done.stdout == b"x" * 4096 * 90
        said = done.stderr.decode()
        assert said.count("no space left on device; the job goes on") == 1
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_place_that_cannot_be_written_is_told_and_harms_nothing(
    tmp_path: Path,
) -> None:
    (tmp_path / "watch").write_text("a file")
    done = watch(tmp_path, "echo", "x")
    assert (done.returncode, done.stdout) == (0, b"x\n")
    assert "the output is not kept" in done.stderr.decode()


# -- at a terminal -------------------------------------------------------------------


def at_terminal(place: Path, text: str, *options: str) -> AtTerminal:
    words = [*GKD, "watch", "--dir", str(place / "watch"), *options, "--"]
    return AtTerminal(place, *words, *python(text))


def test_a_terminal_stays_a_terminal(tmp_path: Path) -> None:
    text = (
        "import os, sys\n"
        "print([os.isatty(n) for n in (0, 1, 2)], os.get_terminal_size())\n"
        "print('name', input('who? '))\n"
        "print('end', sys.stdin.read())\n"
    )
    job = at_terminal(tmp_path, text, "--no-status")
    job.expect(rb"\[True, True, True\] .*columns=100, lines=24")
    job.expect(rb"who\? ")
    job.type(b"Ada\r")
    job.expect(rb"name Ada")
    job.type(b"more\r\x04")
    job.expect(rb"end more")
    assert job.end() == 0


def test_output_at_a_terminal_is_that_of_the_command_alone(tmp_path: Path) -> None:
    text = "import os\nfor n in range(50): os.write(1, b'\\r%d%%' % n)\nprint('done')"
    alone = AtTerminal(tmp_path, *python(text))
    assert alone.end() == 0
    job = at_terminal(tmp_path, text, "--no-status")
    assert job.end() == 0
    assert job.seen == alone.seen


def test_control_c_reaches_the_job_which_may_handle_it(tmp_path: Path) -> None:
    text = (
        "import time\n"
        "try:\n"
        "    print('ready', flush=True); time.sleep(100)\n"
        "except KeyboardInterrupt:\n"
        "    print('handled'); raise SystemExit(3)\n"
    )
    job = at_terminal(tmp_path, text)
    job.expect(b"ready")
    job.type(b"\x03")
    job.expect(b"handled")
    assert job.end() == 3
    assert b"dead" not in job.seen


def test_a_new_size_reaches_the_job(tmp_path: Path) -> None:
    text = (
        "import os, select, signal, sys\n"
        "signal.signal(signal.SIGWINCH, lambda *_: print(os.get_terminal_size()))\n"
        "print('ready', flush=True)\n"
        # A signal just before a read that waits for ever would be heard after it.
        "while not select.select([sys.stdin], [], [], 0.1)[0]: pass\n"
    )
    job = at_terminal(tmp_path, text, "--no-status")
    job.expect(b"ready")
    job.resize(30, 90)
    job.expect(rb"columns=90, lines=30")
    job.resize(40, 70)
    job.expect(rb"columns=70, lines=40")
    job.type(b"\r")
    assert job.end() == 0


def test_control_z_stops_both_and_fg_goes_on(tmp_path: Path) -> None:
    text = "import time\nprint('begun', flush=True)\ninput('more? ')\nprint('over')"
    (tmp_path / "job.py").write_text(text)
    shell = AtTerminal(tmp_path, "env", "PS1=[prompt] ", *SHELL)
    shell.expect(rb"\[prompt\] ")
    line = " ".join([*GKD, "watch", "--dir watch", "--", sys.executable, "job.py"])
    shell.type(line.encode() + b"\r")
    shell.expect(rb"more\? ")
    shell.type(b"\x1a")
    shell.expect(rb"Stopped")
    shell.expect(rb"\[prompt\] ")
    # The terminal is the shell's again, with its echo and line ends.
    shell.type(b"echo it is $((40 + 2))\r")
    shell.expect(rb"it is 42\r\n")
    shell.type(b"fg\r")
    shell.expect(rb"job\.py")
    shell.type(b"\r")
    shell.expect(rb"over")
    shell.expect(rb"\[prompt\] ")
    shell.type(b"exit\r")
    assert shell.end() == 0


def test_the_status_has_the_last_row_which_is_given_back(tmp_path: Path) -> None:
    # It runs until the status is seen: on a busy machine a watcher needs seconds.
    text = (
        "import itertools, select, sys\n"
        "for n in itertools.count():\n"
        "    print({'loss': 1 / (n + 1), 'step': n}, flush=True)\n"
        "    if n > 3 and select.select([sys.stdin], [], [], 0.7)[0]: break\n"
    )
    job = at_terminal(tmp_path, text)
    job.expect(rb"\x1b\[1;23r\x1b\[24;1H\x1b\[2K.* at work .*step \d")
    job.type(b"\r")
    assert job.end() == 0
    assert b"\x1b[r" in job.seen
    kept = log(tmp_path)
    assert b"\x1b[" not in kept
    assert b"'step': 4" in kept


def test_the_terminal_is_put_right_when_the_watcher_is_killed(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        "import os, time\nwhile not os.path.exists('enough'): time.sleep(0.1)\n"
    )
    # A shell would put it right itself, after a signal.
    (tmp_path / "starter.py").write_text(
        "import subprocess, sys\nsubprocess.call(sys.argv[1:])\ninput()\nprint('over')"
    )
    watch = (*GKD, "watch", "--dir=watch", "--", sys.executable, "job.py")
    starter = AtTerminal(tmp_path, sys.executable, "starter.py", *watch)
    before = termios.tcgetattr(starter.master)
    starter.expect(rb"\x1b\[1;23r")  # the status has its place
    assert termios.tcgetattr(starter.master) != before
    (watcher,) = psutil.Process(starter.pid).children()
    watcher.kill()
    starter.expect(rb"\x1b\[r")
    assert termios.tcgetattr(starter.master) == before
    starter.type(b"\r")
    starter.expect(b"over")
    (tmp_path / "enough").touch()
    assert starter.end() == 0


def test_a_terminal_that_another_program_has_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        "import os, time\nprint('ready', flush=True)\n"
        "while not os.path.exists('enough'): time.sleep(0.1)\n"
    )
    (tmp_path / "starter.py").write_text(
        "import subprocess, sys\nsubprocess.call(sys.argv[1:], process_group=0)\n"
    )
    watch = (*GKD, "watch", "--dir=watch", "--", sys.executable, "job.py")
    starter = AtTerminal(tmp_path, sys.executable, "starter.py", *watch)
    starter.expect(b"ready")
    (watcher,) = psutil.Process(starter.pid).children()
    tty.setraw(starter.master)  # as an editor does that is in front
    made = termios.tcgetattr(starter.master)
    watcher.kill()
    starter.expect(rb"\x1b\[r")  # the relay has noticed
    assert termios.tcgetattr(starter.master) == made
    (tmp_path / "enough").touch()
    assert starter.end() == 0


def test_a_shell_that_has_its_terminal_back_is_left_alone(tmp_path: Path) -> None:
    text = "import time\nprint('ready', flush=True)\ntime.sleep(6)\nprint('last words')"
    (tmp_path / "job.py").write_text(text)
    shell = AtTerminal(tmp_path, "env", "PS1=[prompt] ", *SHELL)
    shell.expect(rb"\[prompt\] ")
    line = " ".join([*GKD, "watch", "--dir watch", "--", sys.executable, "job.py"])
    shell.type(line.encode() + b"\r")
    shell.expect(rb"\x1b\[1;23r")
    (watcher,) = psutil.Process(shell.pid).children()
    watcher.kill()
    shell.expect(rb"Killed")
    shell.expect(rb"\[prompt\] ")
    shell.expect(rb"last words")
    shell.type(b"echo it is $((40 + 2))\r")
    shell.expect(rb"\$\(\(40 \+ 2\)\)\r?\n.*it is 42\r\n")  # echoed, and not raw
    shell.type(b"exit\r")
    with contextlib.suppress(ChildProcessError):
        assert shell.end() == 0
