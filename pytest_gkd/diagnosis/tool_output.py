"""Which lines of a log repeat what a tool, or a program run for a model, printed."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_gkd.diagnosis.patterns import Pattern

# The name of a tool before what it printed.
_NAMED = Pattern(
    rb"(?i)^.{0,60}?\[(?:[\w-]*sandbox[\w-]*|tool|interpreter)"
    rb"(?:[ :/#-]{1,2}[\w.-]+)?\] ",
    unless=rb"(?i)server|manager|registry|client|pool",
)
# A margin before each line of a quotation; a table's rows and those in rich's frames
# have one behind as well.
_MARGIN = Pattern(
    rb"^[ \t]{0,12}(?:\||\xe2\x94\x82) .*", unless=rb"(?:\||\xe2\x94\x82)[ \t]*$"
)
# An exception group has such a margin, and a line of these in it or above it
# (traceback.py of CPython).
_GROUP = Pattern(rb"^[ \t]*\+[ -]")
_LONGEST = 200


def of_tool(line: bytes) -> bool:
    """Whether a tool that the model called printed the line, by the tool's name."""
    return b"] " in line[:100] and _NAMED.search(line[:200]) is not None


def is_quoted(text: bytes, at: int) -> bool:
    """Whether the line that holds a byte stands behind the margin of a quotation."""
    for lines in range(_LONGEST):
        start = text.rfind(b"\n", 0, max(0, at)) + 1
        line = text[start : start + 400].partition(b"\n")[0]
        if _MARGIN.search(line) is None:
            return lines > 0 and _GROUP.search(line) is None
        at = start - 1
    return True


def unquoted(text: bytes) -> Iterator[bytes]:
    """The lines of a text that do not stand behind such a margin."""
    group = False
    for line in text.splitlines():
        if _MARGIN.search(line[:400]) is None:
            group = _GROUP.search(line[:400]) is not None
            yield line
        elif group:
            yield line
