"""What is wrong with a job, and why one cannot be read."""

from __future__ import annotations

from typing import NamedTuple


class CheckError(ValueError):
    """A file that cannot be read as a job; the message is a sentence with its name."""


class Finding(NamedTuple):
    """A cause of the catalogue, with ``level`` error or warning; a note has none."""

    cause: str
    level: str
    message: str
    file: str
    line: int
    key: str


def note(text: str, file: str, line: int) -> Finding:
    """What the reader should know but is not a fault."""
    return Finding("", "note", text, file, line, "")
