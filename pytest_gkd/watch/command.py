"""The user's command under watch: started behind a relay, signalled, waited for."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pty
import signal
import subprocess
import sys
import termios
from dataclasses import asdict
from pathlib import Path

from pytest_gkd import marks
from pytest_gkd.watch import exits, relay, terminal
from pytest_gkd.watch.arguments import WatchError
from pytest_gkd.watch.relay import RelaySetup, Shared, Sign
from pytest_gkd.watch.terminal import Terminal

LOG_NAME = "output.log"


class Command:
    """A running command.

    ``shared`` has its output and its state, ``events`` a descriptor that can be read
    when something happened. ``log_problem`` is why the output is not kept.
    """

    def __init__(
        self, words: list[str], directory: Path, user: Terminal | None
    ) -> None:
        """Start it. Raises WatchError where no process can be started."""
        self.words, self.user = words, user
        self.shared = Shared.begin()
        self.log_problem = ""
        self.log: Path | None = directory / LOG_NAME
        self.master = -1
        self.is_placed = False  # the status has a place at the bottom of the screen
        log = self._open_log()
        slave = -1
        opened = [log]
        if user is not None:
            self.master, slave = pty.openpty()
            os.set_blocking(self.master, False)
            opened.append(slave)
            if (kept := user.attributes()) is not None:
                termios.tcsetattr(slave, termios.TCSANOW, kept)
        streams, job, show_on = self._ends(slave, opened)
        self.events, told = os.pipe()
        alive, self._alive = os.pipe()
        opened += [told, alive]
        os.set_blocking(told, False)
        os.set_blocking(self.events, False)
        plan = RelaySetup(
            command=words,
            shared=self.shared.descriptor,
            streams=streams,
            job=job,
            slave=slave,
            terminal=user.descriptor if user else -1,
            log=log,
            told=told,
            alive=alive,
            show_on=show_on,
            placed=bool(user) and terminal.is_terminal(1),
        )
        self.is_placed, self._show_on = plan.placed, show_on
        self.resize(spare=0)
        try:
            self._process = self._begin(plan, directory)
        except OSError as error:
            raise WatchError(f"watch: no process can be started: {error}") from None
        finally:
            for one in {*opened, *(end for end in job if end > 2)} - {-1}:
                os.close(one)
            for source, _ in streams:
                if source != self.master:
                    os.close(source)

    def _open_log(self) -> int:
        assert self.log is not None
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            return os.open(self.log, flags | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            self.log_problem = f"{self.log}: {error.strerror}; the output is not kept"
            self.log = None
            return -1

    def _ends(
        self, slave: int, opened: list[int]
    ) -> tuple[list[tuple[int, int]], list[int], int]:
        """What is passed on to where, the job's three descriptors, and who is shown
        the watcher's texts."""
        del opened
        has = {one: slave >= 0 and terminal.is_terminal(one) for one in (0, 1, 2)}
        job = [slave if has[0] else 0, -1, -1]
        streams: list[tuple[int, int]] = []
        if has[1] or has[2]:
            streams.append((self.master, 1 if has[1] else 2))
        elif slave >= 0:
            streams.append((self.master, 1))  # the echo of what is typed
        for number in (1, 2):
            if has[number]:
                job[number] = slave
            elif number == 2 and not has[1] and _same(1, 2):
                job[2] = job[1]
            else:
                source, job[number] = _pipe()
                streams.append((source, number))
        show_on = 1 if has[1] else 2
        if show_on not in {target for _, target in streams}:
            show_on = 1
        return streams, job, show_on

    def _begin(self, plan: RelaySetup, directory: Path) -> subprocess.Popen[bytes]:
        text = os.memfd_create("gkd-plan")
        os.write(text, json.dumps(asdict(plan)).encode("utf-8", "surrogateescape"))
        os.lseek(text, 0, os.SEEK_SET)
        ends = (end for pair in plan.streams for end in pair)
        ours = {plan.shared, plan.slave, plan.log, plan.told, plan.alive, text}
        for one in {*ours, *plan.job, *ends}:
            if one > 2:
                os.set_inheritable(one, True)
        try:
            # Descriptors that the user gave the command are passed on, too.
            return subprocess.Popen(
                [sys.executable, "-ISB", relay.__file__, str(text)],
                close_fds=False,
                start_new_session=True,
                env={**os.environ, marks.WATCHED: str(directory.absolute())},
            )
        finally:
            os.close(text)
            for one in {self.shared.descriptor, self.master} - {-1}:
                os.set_inheritable(one, False)

    # -- its state ---------------------------------------------------------------

    @property
    def relay_pid(self) -> int:
        return self._process.pid

    @property
    def pid(self) -> int:
        """The command's own process; 0 before it is started."""
        return self.shared[Sign.PID]

    @property
    def has_ended(self) -> bool:
        """Whether it has ended and all that it had said is passed on."""
        return bool(self.shared[Sign.DRAINED]) or self._process.poll() is not None

    @property
    def is_relayed(self) -> bool:
        """Whether the relay still passes output on."""
        return not self.shared[Sign.OVER] and self._process.poll() is None

    @property
    def stopped_by(self) -> int:
        """The signal that stopped it; 0 while it runs."""
        return self.shared[Sign.STOPPED_BY]

    def returncode(self) -> int | None:
        """As subprocess gives it, -N for signal N; None where nobody knows."""
        status = self.shared[Sign.STATUS]
        return os.waitstatus_to_exitcode(status - 1) if status else None

    def exit_status(self) -> int:
        """As a shell tells it."""
        code = self.returncode()
        if code is None:  # the relay is gone, and the job's end is not known
            return exits.UNKNOWN
        return code if code >= 0 else exits.SIGNAL - code

    def not_started(self) -> tuple[int, str] | None:
        """The exit status and what to say where the command could not be run."""
        number = self.shared[Sign.EXEC_ERRNO]
        if not number:
            return None
        name = self.words[0]
        if number == errno.ENOENT:
            where = "" if "/" in name else " on PATH"
            return exits.NOT_FOUND, f"{name}: there is no such command{where}"
        if number == errno.ENOEXEC:
            return (
                exits.NOT_EXECUTABLE,
                f"{name}: is no program: it has no #! line; name what runs it, such "
                f"as: gkd watch -- bash {name}",
            )
        if Path(name).is_dir():  # as a shell says it
            number = errno.EISDIR
        return exits.NOT_EXECUTABLE, f"{name}: {os.strerror(number).lower()}"

    # -- what is done to it ------------------------------------------------------

    def heard(self) -> None:
        """Take the events that were told."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.events, 4096):
                pass

    def write(self, data: bytes) -> None:
        """Write where the watcher's texts go; who does not read misses them."""
        with contextlib.suppress(OSError):
            os.write(self._show_on, data)

    def send(self, number: int, *, group: bool = False) -> None:
        """Pass a signal on to the command, or to its whole process group."""
        pid = self.pid
        if not pid or self.shared[Sign.STATUS]:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            (os.killpg if group else os.kill)(pid, number)

    def type(self, data: bytes) -> bytes:
        """What was typed, for the command; the rest that it has no room for yet."""
        try:
            return data[os.write(self.master, data) :]
        except BlockingIOError:
            return data
        except OSError:
            return b""  # nobody reads any more

    def resize(self, spare: int) -> None:
        """Give the command's terminal the user's size but for ``spare`` rows."""
        if self.user is not None:
            rows, columns = self.user.size()
            terminal.set_size(self.master, max(1, rows - spare), columns)

    def show(self, text: bytes) -> None:
        """Have the relay write a text to the terminal, between two parts of output."""
        self.shared.show(text)
        with contextlib.suppress(OSError):  # it is gone: ``is_relayed``
            os.write(self._alive, b"t")

    def leave(self) -> None:
        """The watcher ends in order; the relay need not put anything right."""
        with contextlib.suppress(OSError):
            os.write(self._alive, b"q")


def _pipe() -> tuple[int, int]:
    source, target = os.pipe()
    with contextlib.suppress(OSError):  # more than this user may have
        import fcntl

        fcntl.fcntl(source, fcntl.F_SETPIPE_SZ, relay.PIPE_BYTES)
    return source, target


def _same(one: int, other: int) -> bool:
    """Whether two descriptors lead to the same open file, as after 2>&1."""
    try:
        here, there = os.fstat(one), os.fstat(other)
    except OSError:
        return False
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


SIGNALS = [one for one in relay.PASSED if signal.getsignal(one) is not signal.SIG_IGN]
