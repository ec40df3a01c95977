"""Starts ``gkd watch`` as people do: with pipes, or at a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path

GKD = (sys.executable, "-m", "pytest_gkd")
LIMIT_S = 60.0


def watch(
    place: Path, *words: str, options: Sequence[str] = ()
) -> subprocess.CompletedProcess[bytes]:
    """Watch a command to its end, with pipes."""
    command = [*GKD, "watch", "--dir", str(place / "watch"), *options, "--", *words]
    return subprocess.run(
        command, check=False, capture_output=True, timeout=LIMIT_S, cwd=place
    )


def begin(
    place: Path, *words: str, options: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    """Begin to watch a command, with pipes."""
    command = [*GKD, "watch", "--dir", str(place / "watch"), *options, "--", *words]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=place,
        start_new_session=True,
        preexec_fn=hears,
    )


def hears() -> None:
    """Let this process hear what nohup, or a script's background, has it ignore."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


def python(text: str) -> tuple[str, ...]:
    """A command that runs a program."""
    return sys.executable, "-c", text


def until(holds: object, what: str) -> None:
    """Wait until a function is true; AssertionError where it never is."""
    assert callable(holds)
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def log(place: Path) -> bytes:
    """The output that was kept."""
    (found,) = (place / "watch").glob("*/output.log")
    return found.read_bytes()


class AtTerminal:
    """A command that runs at a terminal of its own, with a session of its own."""

    def __init__(self, place: Path, *command: str, rows: int = 24) -> None:
        self.pid, self.master = pty.fork()
        if not self.pid:
            hears()
            os.chdir(place)
            environ = {**os.environ, "TERM": "xterm"}
            os.execvpe(command[0], [*command], environ)  # noqa: S606
        self.resize(rows, 100)
        self.seen = b""
        self.status: int | None = None

    def resize(self, rows: int, columns: int) -> None:
        packed = struct.pack("HHHH", rows, columns, 0, 0)
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, packed)

    def read(self) -> bool:
        """Read on; False at the end."""
        if not select.select([self.master], [], [], 0.1)[0]:
            return True
        with contextlib.suppress(OSError):
            if part := os.read(self.master, 65536):
                self.seen += part
                return True
        return False

    def expect(self, pattern: bytes) -> re.Match[bytes]:
        """Read until the pattern has come since the last time."""
        deadline = time.monotonic() + LIMIT_S
        while (found := re.search(pattern, self.seen)) is None:
            assert time.monotonic() < deadline, (pattern, self.seen)
            assert self.read(), (pattern, self.seen)
        self.seen = self.seen[found.end() :]
        return found

    def type(self, text: bytes) -> None:
        os.write(self.master, text)

    def end(self) -> int:
        """Read to the end; the exit status."""
        while self.read():
            pass
        _, status = os.waitpid(self.pid, 0)
        os.close(self.master)
        return os.waitstatus_to_exitcode(status)
