"""Follows a log that is written to, rotated, truncated, deleted, and back again."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from pytest_gkd.watch.arguments import WatchError

# Of what is there already so much is read: the end tells where the job is.
FIRST = 1 << 20
BLOCK = 1 << 20


class Tail:
    """One log file; ``read`` gives what is new, ``notes`` what happened to the file."""

    def __init__(self, path: Path) -> None:
        """Open it. Raises WatchError where it cannot be followed."""
        self.path = path
        self.notes: list[str] = []
        self._descriptor = -1
        self._at = 0
        self._is_gone = False
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            raise WatchError(
                f"watch: {path}: there is no such file; for a job that has not begun "
                "to write: touch it first"
            ) from None
        except OSError as error:
            raise WatchError(
                f"watch: {path}: {(error.strerror or '').lower()}"
            ) from None
        if not stat.S_ISREG(mode):
            what = "a directory" if stat.S_ISDIR(mode) else "no regular file"
            raise WatchError(f"watch: {path}: is {what}; name a log file")
        try:
            self._open()
        except OSError as error:
            raise WatchError(
                f"watch: {path}: {(error.strerror or '').lower()}"
            ) from None
        self._at = max(0, os.fstat(self._descriptor).st_size - FIRST)
        # What was truncated while its writer kept its place begins with zeros.
        start = os.pread(self._descriptor, 8192, self._at).strip(b"\0")
        control = sum(byte < 9 or 13 < byte < 27 for byte in start)
        if control > 0.3 * len(start):
            raise WatchError(
                f"watch: {path}: contains binary data, not the text of a log"
            )

    def _open(self) -> None:
        self.close()
        self._descriptor = os.open(
            self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        )
        self._at = 0

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    @property
    def written_at(self) -> float:
        """When it was written to last, in seconds since the epoch."""
        with contextlib.suppress(OSError):
            return os.fstat(self._descriptor).st_mtime
        return 0.0

    def read(self) -> bytes:
        """What was written since the last call, at most a megabyte of it."""
        here = os.fstat(self._descriptor)
        if here.st_size < self._at:
            self.notes.append(
                f"{self.path}: was truncated from {self._at} to {here.st_size} bytes; "
                "following it from its new beginning"
            )
            self._at = 0
        skipped = here.st_size - self._at - BLOCK
        if skipped > 0:  # the end of what came at once tells where the job is
            self._at += skipped
        try:
            data = os.pread(self._descriptor, BLOCK, self._at)
        except OSError as error:  # a network's file system, say
            self._note_once(f"cannot be read now ({(error.strerror or '').lower()})")
            return b""
        self._at += len(data)
        if not data:
            self._look_for_another(here)
        return data

    def _look_for_another(self, here: os.stat_result) -> None:
        try:
            named = self.path.stat()
        except FileNotFoundError:
            self._note_once("was deleted or moved; waiting for a new one of its name")
            return
        except OSError:
            return
        if (named.st_dev, named.st_ino) != (here.st_dev, here.st_ino):
            with contextlib.suppress(OSError):
                self._open()
                told = "is back" if self._is_gone else "was replaced by a new file"
                self.notes.append(f"{self.path}: {told}; following that one")
                self._is_gone = False

    def _note_once(self, what: str) -> None:
        if not self._is_gone:
            self._is_gone = True
            self.notes.append(f"{self.path}: {what}")

    def taken_notes(self) -> list[str]:
        """What happened since the last call."""
        notes, self.notes = self.notes, []
        return notes
