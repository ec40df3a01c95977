"""Parses the times in a log, in the forms in which programs write them.

A time is in seconds from the start of an unnamed year of 365 days, or of a day if no
line has a date. Whether 3/4/2026 is in March or April is decided only by a day beyond
the 12th, anywhere in the text; until then such a date is ignored.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import re
import time
from collections.abc import Iterator
from typing import NamedTuple

from pytest_gkd.diagnosis.patterns import Pattern

DAY_S = 86_400.0
YEAR_S = 365 * DAY_S
# How much of a text's end determines the pace of its lines, in bytes.
LOOKED_AT = 1 << 18
# How many bytes before a line may hold its time.
CONTEXT = 4000
_MONTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_NAMES = b"Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split()
_NAME = b"|".join(_NAMES)
_CLOCK = (
    rb"(?P<hour>\d{1,2}):(?P<minute>\d\d):(?P<second>\d\d(?:[.,]\d{1,9})?)"
    rb"(?: ?(?P<half>[AaPp])\.?[Mm]\b\.?)?(?P<zone>Z\b|[+-]\d\d:?\d\d\b)?"
)
# 2026-11-21 10:00:00,123 | 11-21 10:00:00 (vLLM) | E1121 10:00:00.123456, E918 (glog)
# | 11/21/2026 10:00:00 AM, which may be 21/11/2026 | 21 Nov 2026 10:00:00
# | Nov 21 10:00:00, Nov 21, 2026, 10:00:00 | 10:00:00 at the start of a line
_PARTS = (
    rb"(?:"
    rb"(?:\d{4}[-/])?(?P<month>\d\d)[-/](?P<day>\d\d)[ T]"
    rb"|[EWIF](?P<glog>\d{3,4}) "
    rb"|\b(?P<one>\d{1,2})[/.](?P<other>\d{1,2})[/.](?:\d{4}|\d\d),?[ T]"
    rb"|\b(?P<nday>\d{1,2})[ -](?P<name>" + _NAME + rb")[a-z]{0,6}[ -]\d{4},?[ :T]"
    rb"|\b(?P<nmonth>" + _NAME + rb")[a-z]{0,6} {1,2}(?P<dayn>\d{1,2}),?(?: \d{4},?)? "
    rb"|^ *(?:\([^)\r\n]{1,80}\) *|\[[\w:]{1,20}\]:? *|[A-Z]{4,8}:? +)?[\[(]?(?P<bare>)"
    rb")" + _CLOCK
)
_STAMP = Pattern(rb"(?m)" + _PARTS)
# Parses a match, which is short, ten times as fast.
_READ = re.compile(_PARTS)


class Stamp(NamedTuple):
    """A time in a text: its start and end, the time, and whether it has a date.

    ``zone_s`` is its zone's offset from UTC, None if the line does not say.
    """

    at: int
    end: int
    seconds: float
    dated: bool
    zone_s: float | None


class Clock:
    """The times of a text from a byte on, in the order of its lines."""

    def __init__(self, text: bytes, start: int = 0) -> None:
        self._text = text
        found = [*_found(text, max(0, start), len(text))]
        day_first = _day_first(found)
        stamps = [stamp for one in found if (stamp := _stamp(*one, day_first))]
        self.dated = any(one.dated for one in stamps)
        self.stamps = [*_in_a_row(one for one in stamps if one.dated == self.dated)]
        self._places = [one.at for one in self.stamps]

    @property
    def seconds(self) -> list[float]:
        """All times."""
        return [one.seconds for one in self.stamps]

    @property
    def zone_s(self) -> float | None:
        """The zone's offset from UTC, None if no line gives it."""
        return self.stamps[-1].zone_s if self.stamps else None

    def written(self, place: int) -> str:
        """The time of the line at a byte as written, with its date, to a second.

        Or that of the nearest earlier line with one; empty if there is none.
        """
        number = self._number(place)
        if number < 0:
            return ""
        one = self.stamps[number]
        text = self._text[one.at : one.end].decode("latin-1")
        text = re.sub(r"(:\d\d)[.,]\d+", r"\1", text).strip()
        glog = re.fullmatch(r"[EWIF](\d{1,2})(\d\d) (.*)", text)
        return f"{glog[1]:0>2}-{glog[2]} {glog[3]}" if glog else text

    def at(self, place: int) -> float | None:
        """The time of the line at a byte, or of a near earlier line."""
        number = self._number(place)
        near = number >= 0 and self._places[number] >= place - CONTEXT
        return self.stamps[number].seconds if near else None

    def _number(self, place: int) -> int:
        """Index of the stamp of the line at a byte, else of the last before; or -1."""
        end = self._text.find(b"\n", place)
        end = min(len(self._text) if end < 0 else end, place + 200)
        number = bisect.bisect_left(self._places, place)
        own = number < len(self._places) and self._places[number] < end
        return number if own else number - 1


@functools.lru_cache(maxsize=64)
def of(text: bytes) -> Clock:
    """The clock of a text's end; cached, since it is needed often."""
    return Clock(text, len(text) - LOOKED_AT)


def stamps(text: bytes) -> Iterator[tuple[int, float]]:
    """The byte offset of every time written in a text, and the time.

    Those with a date; if there are none, those without.
    """
    dated = False
    for one in _found(text, 0, len(text)):
        if (stamp := _stamp(*one, None)) and stamp.dated:
            dated = True
            yield stamp.at, stamp.seconds
    if not dated:
        yield from ((one.at, one.seconds) for one in Clock(text).stamps)


def time_of(block: bytes, start: int) -> float | None:
    """The time of the line at ``start``, or of a near earlier line.

    For a block of a log whose other lines are unknown: only times with a date.
    """
    end = block.find(b"\n", start)
    end = min(len(block) if end < 0 else end, start + 200)
    for found in _found(block, start, end):
        if (stamp := _stamp(*found, None)) and stamp.dated:
            return stamp.seconds
    before = [*_found(block, max(0, start - CONTEXT), start)]
    for found in reversed(before):
        if (stamp := _stamp(*found, None)) and stamp.dated:
            return stamp.seconds
    return None


def day_of_year(month: int, day: int) -> int:
    """The day's number in a year without a 29th of February."""
    return sum(_MONTHS[: month - 1]) + day


def clock(when: time.struct_time) -> float:
    """A moment in the units of ``Hit.time_s``."""
    days = day_of_year(when.tm_mon, when.tm_mday)
    return days * DAY_S + when.tm_hour * 3600 + when.tm_min * 60 + when.tm_sec


def zone(written: str) -> float:
    """Offset from UTC in seconds of ``Z``, ``+02:00``, ``-0530`` or ``+01``."""
    if written in "Zz":
        return 0.0
    digits = written[1:].replace(":", "").ljust(4, "0")
    ahead = int(digits[:2]) * 3600.0 + int(digits[2:4]) * 60.0
    return -ahead if written[0] == "-" else ahead


def _found(text: bytes, start: int, end: int) -> Iterator[tuple[int, re.Match[bytes]]]:
    """The byte offset of each match, and its parsed groups."""
    if text.count(b":", start, end) < 2:
        return  # like most lines
    for found in _STAMP.finditer(text, start, end):
        if parts := _READ.match(found[0]):
            yield found.start(), parts


def _day_first(found: list[tuple[int, re.Match[bytes]]]) -> bool | None:
    """Whether 3/4/2026 is the third of April here; None if no line decides."""
    pairs = [(int(one["one"]), int(one["other"])) for _, one in found if one["one"]]
    if any(one > 12 for one, _ in pairs):
        return True
    return False if any(other > 12 for _, other in pairs) else None


def _stamp(at: int, parts: re.Match[bytes], day_first: bool | None) -> Stamp | None:
    """The stamp of a match; None if it is not a time of day."""
    hour, minute = int(parts["hour"]), int(parts["minute"])
    second = float(parts["second"].replace(b",", b"."))
    if parts["half"]:
        hour = hour % 12 + 12 * (parts["half"] in b"Pp")
    elif parts["bare"] is not None and len(parts["hour"]) == 1:
        return None  # a progress bar's duration
    if hour > 23 or minute > 59 or second >= 61:
        return None
    date = _date(parts, day_first)
    days = day_of_year(*date) if date else 0
    ahead = zone(parts["zone"].decode()) if parts["zone"] else None
    seconds = days * DAY_S + hour * 3600 + minute * 60 + second
    begins = at + parts.start("hour") * (parts["bare"] is not None)
    return Stamp(begins, at + parts.end(), seconds, bool(date), ahead)


def _date(parts: re.Match[bytes], day_first: bool | None) -> tuple[int, int] | None:
    """Month and day."""
    if parts["month"]:
        month, day = int(parts["month"]), int(parts["day"])
        return (day, month) if month > 12 else (month, day)
    if parts["glog"]:
        return int(parts["glog"][:-2]), int(parts["glog"][-2:])
    if parts["one"]:
        one, other = int(parts["one"]), int(parts["other"])
        if day_first is None and max(one, other) <= 12:
            return None
        return (other, one) if day_first or one > 12 else (one, other)
    name, number = parts["name"] or parts["nmonth"], parts["nday"] or parts["dayn"]
    return (_NAMES.index(name) + 1, int(number)) if name else None


def _in_a_row(stamps: Iterator[Stamp]) -> Iterator[Stamp]:
    """The times in sequence, unwrapped over midnight and year's end.

    All are converted to the zone of the first that names one.
    """
    first: float | None = None
    added = last = 0.0
    for one in stamps:
        first = one.zone_s if first is None else first
        shift = (first or 0.0) - one.zone_s if one.zone_s is not None else 0.0
        seconds = one.seconds + shift + added
        span, jump = (YEAR_S, 300 * DAY_S) if one.dated else (DAY_S, DAY_S / 2)
        if last - seconds > jump:
            added += span
            seconds += span
        last = seconds
        yield one._replace(seconds=seconds, zone_s=first)


def gaps(times: list[float]) -> list[float]:
    """Seconds from each time to the next, unless that is earlier."""
    return [late - early for early, late in itertools.pairwise(times) if late >= early]
