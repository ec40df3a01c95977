"""Where in a job a traceback was raised, told by the functions on the way."""

from __future__ import annotations

from pytest_gkd.diagnosis import log_phases
from pytest_gkd.diagnosis.patterns import Pattern

# How far around a line its traceback is looked for.
BEFORE, AFTER = 60_000, 20_000

# A frame as Python, rich's boxes and faulthandler print it.
_FRAME = Pattern(
    rb"(?:File \"(?P<file>[^\"\r\n]+)\", line \d+,? in|(?P<boxed>[\w./-]+\.py):\d+ in)"
    rb" (?P<function>[\w.<>]+)"
)
_START = Pattern(rb"Traceback \(most recent call last\)")
# What starts anew: after it frames belong to the exception that came of the first one.
_CHAINED = Pattern(
    rb"During handling of the above exception|was the direct cause of the following"
)
# An exception's own line: it ends the frames.
_RAISED = Pattern(
    rb"(?m)^[^\r\n]{0,200}?\b[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Fault)\b"
    rb"(?::|\s*$)"
)


def phase_of(text: bytes, at: int) -> str:
    """The phase that the traceback around a place of the text was raised in.

    Of chained exceptions the first counts, since the others came of it. Empty where
    there is no traceback, or none of its functions tells.
    """
    low = max(0, at - BEFORE)
    window = text[low : at + AFTER]
    starts = [match.start() for match in _START.finditer(window, 0, at - low + 1)]
    if not starts:
        return ""
    begin = starts[-1]
    while (
        len(starts) > 1 and _CHAINED.search(window, starts[-2], starts[-1]) is not None
    ):
        starts.pop()
        begin = starts[-1]
    raised = _RAISED.search(window, begin + 34)
    end = raised.start() if raised else None
    names = [
        match[b"function"].decode() for match in _FRAME.finditer(window, begin, end)
    ]
    phases = (
        log_phases.RAISED_IN.get(name.rpartition(".")[2]) for name in reversed(names)
    )
    return next(filter(None, phases), "")
