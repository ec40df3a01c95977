"""Starts the command and passes its output on; a small process of its own.

It needs nothing but the standard library, so that it stays small and simple: should the
watcher die, of whatever, this goes on, and the job notices nothing. It is the job's
parent, leads the session of the job's terminal, and adopts what the job leaves behind.
It ends when nobody can write to the job's output any more.

What the watcher has to know stands in memory that both share (see ``Shared``).
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import errno
import fcntl
import json
import mmap
import os
import select
import signal
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

BLOCK = 1 << 16
PIPE_BYTES = 1 << 20
RING = 1 << 20
TEXT = 1 << 12
# A full disk is asked again after this time.
AGAIN_S = 10.0
# So long after the command has ended its last output may come.
DRAIN_S = 0.05
# A line of the watcher's waits so long for the job to end its own.
LINE_WAIT_S = 2.0
# The first byte of the watcher's texts: lines of their own, or what has a place on the
# screen and leaves the cursor where it was.
LINES, PLACED = b"L", b"P"
_PR_SET_CHILD_SUBREAPER = 36
PASSED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGQUIT,
    signal.SIGTSTP,
    signal.SIGCONT,
    signal.SIGWINCH,
)


class Sign(enum.IntEnum):
    """The numbers in shared memory. Times are CLOCK_MONOTONIC in nanoseconds.

    All are the relay's, but ``TAKEN``, ``TEXT_TURN`` and ``TEXT_BYTES``, which are the
    watcher's.
    ``STATUS`` is waitpid(2)'s, plus one; 0 while the command runs.
    """

    TOTAL = 0
    OUTPUT_AT = 1
    BLOCKED_SINCE = 2
    LOG_BYTES = 3
    LOG_ERRNO = 4
    PID = 5
    STATUS = 6
    STOPPED_BY = 7
    EXEC_ERRNO = 8
    DRAINED = 9
    OVER = 10
    OUT_ERRNO = 11
    TEXT_TURN = 12  # one more with each text
    TEXT_BYTES = 13
    TEXT_SHOWN = 14  # the turn that was written last
    TAKEN = 15  # whether the watcher may have changed the user's terminal


class Shared:
    """Numbers, the last RING bytes of output, and a text of the watcher's to show."""

    SIZE = 4096 + TEXT + RING

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, self.SIZE)

    @classmethod
    def begin(cls) -> Shared:
        """New memory. Raises OSError."""
        descriptor = os.memfd_create("gkd-watch")
        os.ftruncate(descriptor, cls.SIZE)
        return cls(descriptor)

    def __getitem__(self, sign: Sign) -> int:
        number: int = struct.unpack_from("q", self._memory, 8 * sign)[0]
        return number

    def __setitem__(self, sign: Sign, number: int) -> None:
        struct.pack_into("q", self._memory, 8 * sign, number)

    def put(self, data: bytes) -> None:
        """Add output."""
        total = self[Sign.TOTAL]
        data, total_after = data[-RING:], total + len(data)
        at = (total_after - len(data)) % RING
        first = data[: RING - at]
        start = 4096 + TEXT
        self._memory[start + at : start + at + len(first)] = first
        rest = data[len(first) :]
        self._memory[start : start + len(rest)] = rest
        self[Sign.TOTAL] = total_after
        self[Sign.OUTPUT_AT] = time.monotonic_ns()

    def since(self, seen: int) -> tuple[bytes, int]:
        """The output after the first ``seen`` bytes, and all bytes so far.

        What is no longer there is left out: the writer waits for nobody.
        """
        total = self[Sign.TOTAL]
        begin = max(seen, total - RING // 2)
        start = 4096 + TEXT
        data = self._memory[start : start + RING]
        after = self[Sign.TOTAL]
        begin = max(begin, after - RING)  # the rest was overwritten meanwhile
        if begin >= total:
            return b"", total
        low, high = begin % RING, total % RING
        if low < high:
            return data[low:high], total
        return data[low:] + data[:high], total

    def show(self, text: bytes) -> None:
        """Put a text there, which is then to be announced (``RelaySetup.alive``)."""
        text = text[:TEXT]
        self[Sign.TEXT_BYTES] = 0
        self._memory[4096 : 4096 + len(text)] = text
        self[Sign.TEXT_BYTES] = len(text)
        self[Sign.TEXT_TURN] += 1

    def text(self) -> bytes:
        """The text that is to be shown."""
        return self._memory[4096 : 4096 + self[Sign.TEXT_BYTES]]


@dataclass(frozen=True)
class RelaySetup:
    """What the relay gets, as JSON in memory: descriptors are numbers.

    ``streams`` are pairs of where output comes from and where it goes. ``slave`` is the
    job's terminal and ``terminal`` the user's, -1 without. ``told`` is where the
    watcher hears that something happened, ``alive`` where each text is announced, and
    what ends when the watcher does.
    """

    command: list[str]
    shared: int
    streams: list[tuple[int, int]]
    job: list[int]  # the job's standard input, output and error
    slave: int
    terminal: int
    log: int
    told: int
    alive: int
    show_on: int  # where the watcher's texts go, -1 for nowhere
    placed: bool  # these texts may have a place on the screen


class Relay:
    """The relay's work; see the module's text."""

    def __init__(self, plan: RelaySetup) -> None:
        self.plan = plan
        self.shared = Shared(plan.shared)
        self._lock = threading.Lock()  # of memory and log
        self._shown = threading.Lock()  # of where texts are shown
        self._asked = threading.Event()  # to show a text
        self._full_screen = False
        self._log_again = 0.0
        self._missing = 0
        self._tail = b"\n"  # the last bytes written where texts are shown
        self._tail_at = 0.0
        self._pumps: list[threading.Thread] = []

    def run(self) -> None:
        """Start the command, pass everything on, wait for its end and its output's."""
        kept = attributes(self.plan.slave)  # as the user's terminal was, at the start
        for one in self._ours():
            os.set_inheritable(one, False)
        pid = self._start()
        for one in {*self.plan.job, self.plan.slave} & self._ours():
            os.close(one)
        self.shared[Sign.PID] = pid
        self._tell()
        self._pumps = [
            threading.Thread(target=self._pump, args=pair, daemon=True)
            for pair in self.plan.streams
        ]
        for pump in self._pumps:
            pump.start()
        if self.plan.show_on >= 0:
            threading.Thread(target=self._show, daemon=True).start()
        mourner = threading.Thread(target=self._mourn, args=(kept,), daemon=True)
        mourner.start()
        self._wait(pid)
        for pump in self._pumps:
            pump.join()
        self.shared[Sign.OVER] = 1
        self._tell()
        mourner.join()  # what the job left behind is ours until the watcher has looked

    def _ours(self) -> set[int]:
        """All descriptors but the three that every program has."""
        plan = self.plan
        single = (plan.shared, plan.slave, plan.terminal, plan.log)
        ends = (end for pair in plan.streams for end in pair)
        every = {*single, plan.told, plan.alive, plan.show_on, *plan.job, *ends}
        return {one for one in every if one > 2}

    # -- the command -------------------------------------------------------------

    def _start(self) -> int:
        before = {one: signal.getsignal(one) for one in PASSED}
        for one in PASSED:
            signal.signal(one, signal.SIG_IGN)
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        signal.signal(signal.SIGTTIN, signal.SIG_IGN)
        _adopt_orphans()
        if self.plan.slave >= 0:
            fcntl.ioctl(self.plan.slave, termios.TIOCSCTTY, 0)
        # No other thread is there yet.
        pid = os.fork()
        if pid:
            return pid
        try:
            os.setpgid(0, 0)
            if self.plan.slave >= 0:
                os.tcsetpgrp(self.plan.slave, os.getpid())
            ends = [os.dup(one) for one in self.plan.job]
            for number, end in enumerate(ends):
                os.dup2(end, number)  # all else of ours is closed by the call of exec
            for one in PASSED:
                ignored = before[one] is signal.SIG_IGN
                signal.signal(one, signal.SIG_IGN if ignored else signal.SIG_DFL)
            for one in (signal.SIGTTOU, signal.SIGTTIN, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(one, signal.SIG_DFL)
            os.execvp(self.plan.command[0], self.plan.command)  # noqa: S606
        except OSError as error:
            self.shared[Sign.EXEC_ERRNO] = error.errno or errno.ENOENT
        finally:
            os._exit(127)

    def _wait(self, pid: int) -> None:
        """Until the command has ended; what it left behind is reaped meanwhile."""
        while not self.shared[Sign.STATUS]:
            found, status = os.waitpid(-1, os.WUNTRACED | os.WCONTINUED)
            if found != pid:
                continue
            if os.WIFSTOPPED(status):
                self.shared[Sign.STOPPED_BY] = os.WSTOPSIG(status)
            elif os.WIFCONTINUED(status):
                self.shared[Sign.STOPPED_BY] = 0
            else:
                self.shared[Sign.STATUS] = status + 1
            self._tell()
        ready = select.poll()
        for source, _ in self.plan.streams:
            ready.register(source, select.POLLIN)
        # A pump reads on meanwhile; who waits for it waits for what is there already.
        while any(one.is_alive() for one in self._pumps):
            before = self.shared[Sign.TOTAL], self.shared[Sign.BLOCKED_SINCE]
            time.sleep(DRAIN_S)
            if before == (self.shared[Sign.TOTAL], 0) and not any(
                what & select.POLLIN for _, what in ready.poll(0)
            ):
                break
        self.shared[Sign.DRAINED] = 1
        self._tell()
        threading.Thread(target=_reap, daemon=True).start()

    def _tell(self) -> None:
        with contextlib.suppress(OSError):  # the watcher is gone, or has enough to read
            os.write(self.plan.told, b".")

    # -- its output --------------------------------------------------------------

    def _pump(self, source: int, target: int) -> None:
        ready = select.poll()
        ready.register(source, select.POLLIN)
        shows = target == self.plan.show_on
        while True:
            try:
                ready.poll()
                data = os.read(source, BLOCK)
            except BlockingIOError:
                continue
            except OSError:  # EIO: nobody has the terminal open any more
                data = b""
            if not data:
                return
            with self._lock:
                self.shared.put(data)
                self._keep(data)
            if shows:
                with self._shown:
                    failed = self._out(target, data)
                    self._follow(data)
            else:
                failed = self._out(target, data)
            if failed == errno.EPIPE:
                os.close(source)  # the job is to notice it as without a watcher
                return

    def _keep(self, data: bytes) -> None:
        """Into the log; a full disk does not stop the job, and is asked again."""
        if self.plan.log < 0:
            return
        now = time.monotonic()
        if now < self._log_again:
            self._missing += len(data)
            return
        try:
            if self._missing:
                note = f"\n[gkd watch: {self._missing} bytes are missing here]\n"
                _write(self.plan.log, note.encode())
                self._missing = 0
            _write(self.plan.log, data)
            self.shared[Sign.LOG_BYTES] += len(data)
        except OSError as error:
            self.shared[Sign.LOG_ERRNO] = error.errno or errno.EIO
            self._missing += len(data)
            self._log_again = now + AGAIN_S

    def _out(self, target: int, data: bytes) -> int:
        """Pass it on, however long the reader takes; the error's number, or 0."""
        left = memoryview(data)
        while left:
            try:
                # The first try says whether the reader is slow.
                self.shared[Sign.BLOCKED_SINCE] = time.monotonic_ns()
                left = left[os.write(target, left) :]
            except BlockingIOError:
                wait = select.poll()
                wait.register(target, select.POLLOUT)
                wait.poll()
            except OSError as error:
                self.shared[Sign.OUT_ERRNO] = error.errno or errno.EIO
                return error.errno or errno.EIO
            finally:
                self.shared[Sign.BLOCKED_SINCE] = 0
        return 0

    # -- the watcher's texts -----------------------------------------------------

    def _follow(self, data: bytes) -> None:
        """What the screen is like after this output."""
        seen = self._tail[-16:] + data
        self._tail, self._tail_at = seen[-64:], time.monotonic()
        on, off = (seen.rfind(b"\x1b[?1049" + end) for end in (b"h", b"l"))
        if on != off:
            self._full_screen = on > off

    def _show(self) -> None:
        """Write each text where no sequence and no line of the job's is cut by it."""
        while not self.shared[Sign.OVER]:
            turn = self.shared[Sign.TEXT_TURN]
            if turn == self.shared[Sign.TEXT_SHOWN]:
                self._asked.wait()
                self._asked.clear()
                continue
            with self._shown:
                waited = time.monotonic() - self._tail_at > LINE_WAIT_S
                text = self.shared.text()
                if text[:1] == LINES:
                    fits = self._tail.endswith(b"\n") or waited
                    begin = b"" if self._tail.endswith(b"\n") else b"\n"
                else:
                    fits, begin = is_whole(self._tail) or waited, b""
                    fits = fits and not self._full_screen
                if fits:
                    self._out(self.plan.show_on, begin + text[1:])
                    if text[:1] == LINES:
                        self._tail = b"\n"
                    self.shared[Sign.TEXT_SHOWN] = turn
            time.sleep(0.02)

    # -- the watcher's end -------------------------------------------------------

    def _mourn(self, kept: list[Any] | None) -> None:
        """Give the terminal back as it was, if the watcher died without doing it."""
        said = b"x"
        while said:
            try:
                said = os.read(self.plan.alive, 1)
            except OSError:
                said = b""
            if said == b"q":  # it has done so itself
                return
            self._asked.set()
        now = attributes(self.plan.terminal) if self.shared[Sign.TAKEN] else None
        # With both, a shell has taken it back, whose line editor has modes of its own.
        if kept and now and not (now[1] & termios.OPOST and now[3] & termios.ISIG):
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self.plan.terminal, termios.TCSANOW, kept)
        if self.plan.show_on >= 0 and self.plan.placed:
            with self._shown:
                self._out(self.plan.show_on, b"\x1b7\x1b[r\x1b8\x1b[J")


def attributes(descriptor: int) -> list[Any] | None:
    """As termios gives them; None where there is no terminal."""
    if descriptor < 0:
        return None
    try:
        return termios.tcgetattr(descriptor)
    except termios.error:
        return None


def is_whole(tail: bytes) -> bool:
    """Whether output that ends so is not in the middle of a character or a sequence."""
    at = tail.rfind(b"\x1b")
    if at >= 0:
        rest = tail[at + 1 :]
        if not rest:
            return False
        if rest[:1] == b"[":  # CSI: parameters, then one final byte (ECMA-48)
            return any(0x40 <= byte <= 0x7E for byte in rest[1:])
        if rest[:1] in b"]PX^_":  # a string, to BEL or ST
            return b"\x07" in rest
        return not all(0x20 <= byte <= 0x2F for byte in rest)
    for back, byte in enumerate(reversed(tail[-4:]), 1):
        if byte >= 0xC0:
            need = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return back >= need
        if byte < 0x80:
            return True
    return True


def _write(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def _adopt_orphans() -> None:
    prctl: Callable[..., int] | None = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _reap() -> None:
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def main(descriptor: int) -> None:
    """Run the relay with the plan in a memory file."""
    with os.fdopen(descriptor, "rb") as file:
        plan = RelaySetup(**json.loads(file.read()))
    Relay(plan).run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
