"""How long a log has been silent, and how long is longer than is usual in it."""

from __future__ import annotations

import itertools
import re
import time

from pytest_gkd.diagnosis.log_end import pace_s, steps
from pytest_gkd.diagnosis.scan import clock, day_of_year, time_of, times

# So much of the end of a log tells how long it is silent at times.
LOOKED_AT = 200_000
# No silence is shorter than this.
LEAST_S = 10.0
DAY_S = 86_400.0

_NOW = re.compile(
    r"(?:(?:[0-9]{4}-)?(?P<month>0[1-9]|1[0-2])-(?P<day>0[1-9]|[12][0-9]|3[01])[T ])?"
    r"(?P<hour>[01][0-9]|2[0-3]):(?P<minute>[0-5][0-9])(?::(?P<second>[0-5][0-9]))?"
)


class NowError(ValueError):
    """A moment that is none; the text says how one is written."""


def seconds(tail: bytes, written_s: float | None, now: str = "") -> float | None:
    """Seconds since the last line of a log; None where nothing tells.

    ``now`` is a moment in the log's own clock (``2026-11-21 10:41``, ``10:41:07``);
    where its lines have no time, the last one's is when the file was written to
    (``written_s``, seconds since the epoch). Without ``now`` a file counts whose last
    line has that time: what a copy's own time is says nothing. Raises NowError.
    """
    end = time_of(tail, len(tail))
    if now:
        if end is None and written_s is not None:
            end = clock(time.localtime(written_s))
        moment = _moment(now, end or 0.0)
        return None if end is None else moment - end
    if end is None or written_s is None:
        return None
    zones = (time.localtime, time.gmtime)
    if all(abs(clock(at(written_s)) - end) > 120 for at in zones):
        return None
    return max(0.0, time.time() - written_s)


def refuse(now: str) -> None:
    """Raise NowError for what is no time, also where no log's end matters."""
    _moment(now, 0.0)


def _moment(text: str, end: float) -> float:
    """The moment as ``Hit.time_s`` counts; a time alone comes after the end."""
    found = _NOW.fullmatch(text.strip())
    if found is None:
        raise NowError(
            f"--now={text}: is not a valid time; write it as the log does, such as "
            "10:41 or '2026-11-21 10:41:07'"
        )
    of_day = int(found["hour"]) * 3600 + int(found["minute"]) * 60.0
    of_day += int(found["second"] or 0)
    if found["month"]:
        moment = day_of_year(int(found["month"]), int(found["day"])) * DAY_S + of_day
    else:
        moment = end - end % DAY_S + of_day
    if moment < end < moment + (1 if found["second"] else 60):
        return end  # within the second or the minute that is named
    return moment if found["month"] or moment >= end else moment + DAY_S


def usual_s(tail: bytes, since: int = 0) -> float:
    """How long this log may be silent while all is well.

    Twenty of its last steps, and twice its longest silence so far; of a run that makes
    steps, ``since`` the byte where these began: a start has longer ones.
    """
    stamps = list(times(tail[max(since, len(tail) - LOOKED_AT) :]))
    gaps = [late - early for early, late in itertools.pairwise(stamps)]
    longest = max((gap for gap in gaps if gap < DAY_S), default=0.0)
    pace = pace_s(tail) if len(steps(tail)) > 2 else None
    return max(LEAST_S, 2 * longest, 20 * (pace or 0.0))
