"""The user's terminal: whether there is one, its size, and its input unprocessed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import termios
from dataclasses import dataclass, field
from typing import Any

from pytest_gkd.watch import relay

# Fewer rows hold no status line.
LEAST_ROWS = 6


@dataclass
class Terminal:
    """The terminal behind the standard descriptors; ``descriptor`` is one of them."""

    descriptor: int
    reads: bool = False
    _kept: list[Any] | None = field(default=None, repr=False)

    @classmethod
    def find(cls) -> Terminal | None:
        """The user's terminal; None where no standard descriptor is one."""
        ends = [one for one in (0, 1, 2) if is_terminal(one)]
        return cls(ends[0], 0 in ends) if ends else None

    def in_front(self) -> bool:
        """Whether what is typed is for this process's group."""
        try:
            return os.tcgetpgrp(self.descriptor) == os.getpgrp()
        except OSError:
            return False

    def attributes(self) -> list[Any] | None:
        """As termios gives them; None where the terminal is gone."""
        return relay.attributes(self.descriptor)

    @property
    def is_ours(self) -> bool:
        """Whether it was taken over."""
        return self._kept is not None

    def take_over(self, *, output: bool) -> None:
        """From now on every key comes as it is, also Ctrl-C.

        With ``output`` what is written is not changed either: it has been through the
        job's own terminal.
        """
        kept = self.attributes()
        if kept is None or self._kept is not None:
            return
        made = [*kept]
        if output:
            made[1] &= ~termios.OPOST
        if self.reads:
            self._make_raw(kept, made)
        with contextlib.suppress(termios.error):
            termios.tcsetattr(self.descriptor, termios.TCSANOW, made)
            self._kept = kept

    @staticmethod
    def _make_raw(kept: list[Any], made: list[Any]) -> None:
        made[0] &= ~(
            termios.BRKINT | termios.ICRNL | termios.INPCK | termios.ISTRIP
        ) & ~(termios.IXON | termios.INLCR | termios.IGNCR)
        made[3] &= ~(termios.ECHO | termios.ICANON | termios.IEXTEN | termios.ISIG)
        made[6] = [*kept[6]]
        made[6][termios.VMIN], made[6][termios.VTIME] = 1, 0

    def give_back(self) -> None:
        """As it was before ``take_over``."""
        if self._kept is not None:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self.descriptor, termios.TCSANOW, self._kept)
            self._kept = None

    def size(self) -> tuple[int, int]:
        """Its rows and columns; (24, 80) where it does not tell."""
        try:
            packed = fcntl.ioctl(self.descriptor, termios.TIOCGWINSZ, bytes(8))
        except OSError:
            return 24, 80
        rows, columns, _, _ = struct.unpack("HHHH", packed)
        return (rows, columns) if rows and columns else (24, 80)


def is_terminal(descriptor: int) -> bool:
    """Whether a descriptor is open and a terminal."""
    try:
        return os.isatty(descriptor)
    except OSError:
        return False


def set_size(descriptor: int, rows: int, columns: int) -> None:
    """Tell a terminal's programs its size; they get SIGWINCH where it has changed."""
    packed = struct.pack("HHHH", rows, columns, 0, 0)
    with contextlib.suppress(OSError):
        fcntl.ioctl(descriptor, termios.TIOCSWINSZ, packed)
