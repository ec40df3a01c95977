"""Shared memory by which a pytest process and its guardian observe each other.

A process that is stopped, or whose thread hangs, cannot report that; a counter of its
own that no longer advances does.
"""

from __future__ import annotations

import contextlib
import enum
import os
import struct
from pathlib import Path

from pytest_gkd.processes.procfs import Descriptor

# Saved before any stage can monkeypatch it, for one test or for good.
_pread = os.pread

GOODBYE = b"g"  # from the pytest process, over a pipe
# Interval between a guardian's looks.
LOOK_S = 0.5
_NUMBER = struct.Struct("d")


class Sign(enum.IntEnum):
    """The numbers, each with one writer. Times are ``clock.monotonic()``.

    The pytest process writes ``BEAT``, incremented at each tick of its watchdog;
    ``DUE``, when its first budget runs out, infinite while it enforces none; and
    ``STOOD_S``, for how long it and its guardian have been suspended together. The
    guardian writes ``GUARD_BEAT``, incremented at each look; ``WAITED_S``, for how long
    the pytest process was stopped at its user's terminal; ``RESUMED``, how often it was
    sent SIGCONT; and ``GAVE_UP_S``, for how long it had stood still when its workers
    were ended.
    """

    BEAT = 0
    DUE = 1
    GUARD_BEAT = 2
    WAITED_S = 3
    RESUMED = 4
    GAVE_UP_S = 5
    STOOD_S = 6


class Pulse:
    """The numbers, indexed by their signs, in an open anonymous file."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    @classmethod
    def begin(cls) -> Pulse:
        """New memory with nothing due. Raises OSError."""
        made = cls(os.memfd_create("gkd-pulse"))
        for sign in Sign:
            made[sign] = 0.0
        made[Sign.DUE] = float("inf")
        return made

    def __getitem__(self, sign: Sign) -> float:
        text = _pread(self.descriptor, _NUMBER.size, sign * _NUMBER.size)
        number: float = _NUMBER.unpack(text)[0]
        return number

    def __setitem__(self, sign: Sign, number: float) -> None:
        os.pwrite(self.descriptor, _NUMBER.pack(number), sign * _NUMBER.size)

    @property
    def path(self) -> Path:
        """Where other processes of this user can open it, while it is open here."""
        return Path(f"/proc/{os.getpid()}/fd/{self.descriptor}")

    def close(self) -> None:
        with contextlib.suppress(OSError):  # somebody has closed all descriptors
            os.close(self.descriptor)


class Standstill:
    """Lets a worker read for how long the whole run was suspended.

    ``path`` leads to the run's pulse, None if it has none. Raises OSError.
    """

    def __init__(self, path: Path | None) -> None:
        number = None if path is None else os.open(path, os.O_RDONLY)
        self._open = None if number is None else Descriptor.of(number)
        self._last_s = 0.0

    def seconds(self) -> float:
        """Seconds since the run began; frozen once a stage has closed the file."""
        if self._open is not None and self._open.is_open():
            self._last_s = Pulse(self._open.number)[Sign.STOOD_S]
        return self._last_s
