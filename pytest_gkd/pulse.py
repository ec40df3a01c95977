"""What a pytest process and its guardian see of each other: memory that both write.

A process that is stopped, or whose thread hangs, cannot say so. That a number of its
own no longer moves says it.
"""

from __future__ import annotations

import contextlib
import enum
import os
import struct

_NUMBER = struct.Struct("d")


class Sign(enum.IntEnum):
    """The numbers, each with one writer. Times are ``clock.monotonic()``.

    The pytest process writes ``BEAT``, one more at each tick of its watchdog, and
    ``DUE``, when the first of its budgets has to be over; infinite while it holds
    none. Its guardian writes ``GUARD_BEAT``; ``WAITED_S``, for how long the pytest
    process was stopped at its user's terminal; ``RESUMED``, how often it was made to go
    on; and ``GAVE_UP_S``, for how long it stood still before its workers were ended.
    """

    BEAT = 0
    DUE = 1
    GUARD_BEAT = 2
    WAITED_S = 3
    RESUMED = 4
    GAVE_UP_S = 5


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
        text = os.pread(self.descriptor, _NUMBER.size, sign * _NUMBER.size)
        number: float = _NUMBER.unpack(text)[0]
        return number

    def __setitem__(self, sign: Sign, number: float) -> None:
        os.pwrite(self.descriptor, _NUMBER.pack(number), sign * _NUMBER.size)

    def close(self) -> None:
        """Nothing is read or written any more."""
        with contextlib.suppress(OSError):  # somebody has closed all there were
            os.close(self.descriptor)
