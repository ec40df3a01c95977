"""Which lines of a log repeat what a tool, or a program run for a model, printed."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator

from pytest_gkd.diagnosis import log_phases
from pytest_gkd.diagnosis.patterns import Pattern

_LONGEST = 100  # lines

# The name of a tool before what it printed.
_NAMED = Pattern(
    rb"(?i)^.{0,60}?\[(?:[\w-]*sandbox[\w-]*|tool|interpreter)"
    rb"(?:[ :/#-]{1,2}[\w.-]+)?\] ",
    unless=rb"(?i)server|manager|registry|client|pool",
)
# A margin before each line of a quotation; a table's rows and those in rich's frames
# have one behind as well.
_MARGINS = (b"| ", "│ ".encode())
_BEHIND = (b"|", "│".encode())
# An exception group has such a margin, and a line of these in it or above it
# (traceback.py of CPython).
_OF_GROUP = (b"+ ", b"+-", "\u256d".encode())
_FENCE = b"```"
_PIPS, _PIPS_END = b" lines of output]", b"[end of output]"
_PROMPT = b"$ "


def of_tool(line: bytes) -> bool:
    """Whether a tool that the model called printed the line, by the tool's name."""
    return b"] " in line[:100] and _NAMED.search(line[:200]) is not None


def is_quoted(text: bytes, at: int) -> bool:
    """Whether the line that holds a byte is one of a quotation."""
    spans = _quotations(text)
    before = bisect.bisect_right(spans, (at, len(text))) - 1
    return before >= 0 and at < spans[before][1]


def unquoted(text: bytes) -> Iterator[bytes]:
    """The lines of a text that are none of a quotation."""
    place = 0
    for start, end in [*_quotations(text), (len(text), len(text))]:
        yield from text[place:start].splitlines()
        place = end


@functools.lru_cache(maxsize=64)
def _quotations(text: bytes) -> list[tuple[int, int]]:
    """Where quotations begin and end: whole lines, in order.

    They stand behind a margin, in a fence of Markdown, in what pip repeats of a build,
    or are indented and hold a shell's prompt.
    """
    spans: list[tuple[int, int]] = []
    margin = fence = pips = indented = -1
    group = prompt = False
    place = 0
    for line in (*text.splitlines(keepends=True), b""):
        words = line.strip()
        if words.startswith(_MARGINS) and not words.endswith(_BEHIND):
            margin = place if margin < 0 and not group else margin
        else:
            spans += [(margin, place)] if margin >= 0 else []
            margin, group = -1, words.startswith(_OF_GROUP)
        if line.startswith((b"  ", b"\t")) or (line and not words):
            indented = place if indented < 0 else indented
            prompt = prompt or words.startswith(_PROMPT)
        else:
            spans += [(indented, place)] if prompt else []
            indented, prompt = -1, False
        if words.startswith(_FENCE):
            closes = fence >= 0 and words == _FENCE
            spans += [(fence, place)] if closes else []
            fence = -1 if closes else place
        if words.endswith(_PIPS):
            pips = place
        elif words == _PIPS_END and pips >= 0:
            spans += [(pips, place)]
            pips = -1
        place += len(line)
    return [one for one in _merged(spans) if _holds_no_run(text, *one)]


def _holds_no_run(text: bytes, start: int, end: int) -> bool:
    """Whether it is a short part of a log, without steps of a training."""
    whole = text[start:end]
    most = 2 * len(whole) > len(text) and log_phases.STEP.search(text[:start]) is None
    steps = log_phases.STEP.search(whole) is not None
    return not (most or steps) and whole.count(b"\n") <= _LONGEST


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    whole: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if whole and start <= whole[-1][1]:
            whole[-1] = (whole[-1][0], max(end, whole[-1][1]))
        else:
            whole.append((start, end))
    return whole
