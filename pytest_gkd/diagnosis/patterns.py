"""Searches untrusted text with RE2, in linear time.

A backtracking search takes seconds to hours on a line that suits its pattern badly, and
``re`` blocks all other threads meanwhile. RE2's time grows linearly with the text, and
it does not hold the GIL. The price: patterns without lookaround and backreferences, for
which ``unless`` substitutes here (syntax: https://github.com/google/re2/wiki/Syntax).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, Protocol

import re2

# RE2's own limit is 8 MiB, with which searching the ends of a log takes half as long
# again.
MEMORY = 64 << 20


class PatternError(ValueError):
    """A pattern that RE2 rejects; the text says why."""


class Match(Protocol):
    """A match in a text, with its groups by number and name."""

    def __getitem__(self, group: int | bytes, /) -> Any: ...
    def start(self, group: int = 0, /) -> int: ...
    def end(self, group: int = 0, /) -> int: ...
    def span(self, group: int = 0, /) -> tuple[int, int]: ...
    def groups(self) -> tuple[bytes | None, ...]: ...
    def groupdict(self) -> dict[bytes, bytes | None]: ...


class Pattern:
    """A regular expression over bytes, which need not be UTF-8.

    A match does not count if ``unless`` matches within it. Raises PatternError.
    """

    def __init__(self, pattern: bytes, unless: bytes = b"") -> None:
        self._pattern = _compiled(pattern)
        self._unless = _compiled(unless) if unless else None

    @property
    def groups(self) -> list[str]:
        """The names of its groups."""
        return [name.decode() for name in self._pattern.groupindex]

    def finditer(
        self, text: bytes, start: int = 0, end: int | None = None
    ) -> Iterator[Match]:
        """Every match between two offsets of the text; ``^`` is the text's start."""
        found: Iterator[Match] = self._pattern.finditer(text, start or None, end)
        unless = self._unless
        if unless is None:
            return found
        return (match for match in found if unless.search(match[0]) is None)

    def search(
        self, text: bytes, start: int = 0, end: int | None = None
    ) -> Match | None:
        """The first match between two offsets of the text."""
        return next(self.finditer(text, start, end), None)

    def last(self, text: bytes) -> int:
        """Where the last match begins, or -1."""
        return max((match.start() for match in self.finditer(text)), default=-1)

    def without(self, text: bytes, fill: bytes = b"") -> bytes:
        """The text without its matches, with ``fill`` for each of their bytes."""
        kept = []
        at = 0
        for match in self.finditer(text):
            begin, end = match.span()
            kept += [text[at:begin], fill * (end - begin)]
            at = end
        return b"".join([*kept, text[at:]]) if at else text


def _compiled(pattern: bytes) -> Any:
    options = re2.Options()
    options.encoding = re2.Options.Encoding.LATIN1  # one byte is one character
    options.log_errors = False
    options.max_mem = MEMORY
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        raise PatternError(error.args[0].decode("utf-8", "replace")) from error


@functools.cache
def pattern_of(pattern: str, unless: str = "") -> Pattern:
    """The compiled pattern; compiled on first use, since most are never needed."""
    return Pattern(pattern.encode(), unless.encode())
