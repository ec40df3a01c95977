"""What a pytest process and its guardian see of each other: memory that both write.

A process that is stopped, or whose thread hangs, cannot say so. That a number of its
own no longer moves says it.
"""

from __future__ import annotations

import contextlib
import enum
import os
import struct
from pathlib import Path

from pytest_gkd.processes.procfs import Descriptor

# Taken hold of before any stage replaces it, for the while of its test or for good.
_pread = os.pread

GOODBYE = b"g"  # of the pytest process, by a pipe
# How often a guardian looks.
LOOK_S = 0.5
_NUMBER = struct.Struct("d")


class Sign(enum.IntEnum):
    """The numbers, each with one writer. Times are ``clock.monotonic()``.

    The pytest process writes ``BEAT``, one more at each tick of its watchdog;
    ``DUE``, when the first of its budgets has to be over, infinite while it holds
    none; and ``STOOD_S``, for how long it has stood still together with its guardian.
    That writes ``GUARD_BEAT``, one more at each look; ``WAITED_S``, for how long the
    pytest process was stopped at its user's terminal; ``RESUMED``, how often it was
    made to go on; and ``GAVE_UP_S``, for how long it stood still before its workers
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
    """The numbers by their signs, in an open file that has no name."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    @classmethod
    def begin(cls) -> Pulse:
        """New memory; nothing is due. Raises OSError."""
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
        """What another process of this user's opens it by, while this one is open."""
        return Path(f"/proc/{os.getpid()}/fd/{self.descriptor}")

    def close(self) -> None:
        with contextlib.suppress(OSError):  # somebody has closed all there were
            os.close(self.descriptor)


class Standstill:
    """For how long the run has stood still as a whole, for a worker to know.

    ``path`` leads to the run's pulse, None where it has none. Raises OSError.
    """

    def __init__(self, path: Path | None) -> None:
        number = None if path is None else os.open(path, os.O_RDONLY)
        self._open = None if number is None else Descriptor.of(number)
        self._last_s = 0.0

    def seconds(self) -> float:
        """Since the run began; no more is heard once a stage has closed it."""
        if self._open is not None and self._open.is_open():
            self._last_s = Pulse(self._open.number)[Sign.STOOD_S]
        return self._last_s
