"""How long a log has been silent, and how long is unusual for it."""

from __future__ import annotations

import itertools
import re
import time
from dataclasses import dataclass
from datetime import datetime

from pytest_gkd.diagnosis import clocks, log_end, log_phases, work_signs
from pytest_gkd.diagnosis.clocks import DAY_S, YEAR_S, clock, day_of_year
from pytest_gkd.diagnosis.log_file import Log

# Shorter pauses are not silence.
LEAST_S = 10.0
# This many pauses in a phase establish what is usual in it.
ENOUGH = 3
# Twenty steps may last so long, or four steps.
LONG_S = 7200.0
# A time without a date this little before the last line is from another clock.
WATCHES_S = 300.0

_NOW = re.compile(
    r"(?:(?:[0-9]{4}-)?(?P<month>0[1-9]|1[0-2])-(?P<day>0[1-9]|[12][0-9]|3[01])[T ])?"
    r"(?P<hour>[01][0-9]|2[0-3]):(?P<minute>[0-5][0-9])(?::(?P<second>[0-5][0-9])"
    r"(?:[.,][0-9]+)?)? ?(?P<zone>[Zz]|[+-][0-9]{2}(?::?[0-9]{2})?)?"
)


class NowError(ValueError):
    """An invalid time; the text says how to write one."""


@dataclass(frozen=True)
class Silence:
    """Where a log falls silent, for how long, and what is usual there.

    ``since`` is the time of that line as written, empty if unknown; ``line`` counts
    from 1. ``seconds`` is None if nothing says how long ago that is.
    """

    since: str
    file: str
    line: int
    seconds: float | None
    usual_s: float


def seconds(tail: bytes, written_s: float | None, now: str = "") -> float | None:
    """Seconds since the last line of a log; None if unknown.

    ``now`` is a time on the log's own clock (``2026-11-21 10:41``, ``10:41:07``), or in
    any zone that it names if the log's lines name theirs; if they have no times, the
    last one's is the file's modification time (``written_s``, seconds since the epoch).
    Without ``now`` a file counts only if its last line's time agrees with that: a
    copy's modification time says nothing. Raises NowError.
    """
    told = clocks.of(tail)
    end, dated = told.at(len(tail)), told.dated
    if now:
        if end is None and written_s is not None:
            end, dated = clock(time.localtime(written_s)), True
        moment = _moment(now, end or 0.0, told.zone_s, dated=dated)
        return None if end is None else moment - end
    if end is None or written_s is None:
        return None
    span = YEAR_S if dated else DAY_S
    zones = (time.localtime, time.gmtime)
    apart = [abs(clock(at(written_s)) - end) % span for at in zones]
    if all(min(one, span - one) > 120 for one in apart):
        return None
    return max(0.0, time.time() - written_s)


def refuse(now: str) -> None:
    """Raise NowError for an invalid time, even if no log's end matters."""
    _moment(now, 0.0, None, dated=True)


def _moment(text: str, end: float, zone_s: float | None, *, dated: bool) -> float:
    """The time in units of ``Hit.time_s``; without a date it is after the end."""
    text = text.strip()
    found = _NOW.fullmatch(text) or _NOW.fullmatch(_as_usual(text))
    if found is None:
        raise NowError(
            f"--now={text}: is not a valid time; write it as the log does or as ISO "
            "8601, such as 10:41, '2026-11-21 10:41:07' or 2026-11-21T10:41:07Z"
        )
    of_day = int(found["hour"]) * 3600 + int(found["minute"]) * 60.0
    of_day += int(found["second"] or 0)
    if found["zone"] and zone_s is not None:
        of_day += zone_s - clocks.zone(found["zone"])
    with_day = bool(found["month"]) and dated
    if with_day:
        moment = day_of_year(int(found["month"]), int(found["day"])) * DAY_S + of_day
        moment += YEAR_S * (moment < end - 300 * DAY_S)
    else:
        moment = end - end % DAY_S + of_day % DAY_S
    exact = 1.0 if found["second"] else 60.0
    if moment < end < moment + (exact if with_day else WATCHES_S):
        return end  # within the second or minute that is named
    return moment if with_day or moment >= end else moment + DAY_S


def _as_usual(text: str) -> str:
    """Normalize any other form of ISO 8601, such as 20261121T104107Z."""
    if not re.match(r"[0-9]{4}-?(?:W?[0-9]{2}-?[0-9]|[0-9]{2}-?[0-9]{2})[T ]", text):
        return text
    try:
        return datetime.fromisoformat(text).isoformat()
    except ValueError:
        return text


def usual_s(tail: bytes, since: int = 0) -> float:
    """How long this log may be silent while all is well.

    Twenty of its last steps, or twice its longest silence so far: in the phase in which
    it ends if that had enough of them, else in any. For a run that makes steps,
    ``since`` is the byte where these began: a start has longer ones.
    """
    stamps = [one for one in clocks.of(tail).stamps if one.at >= since]
    gaps = [
        (late.seconds - one.seconds, one.at)
        for one, late in itertools.pairwise(stamps)
        if 0 <= late.seconds - one.seconds < DAY_S
    ]
    marks = log_phases.Marks(tail, len(tail) - clocks.LOOKED_AT)
    phase = marks.at(len(tail))
    here = [gap for gap, at in gaps if phase and marks.at(at) == phase]
    longest = max(here if len(here) >= ENOUGH else [gap for gap, _ in gaps], default=0)
    pace = work_signs.pace_s(tail) if len(work_signs.steps(tail)) > 2 else None
    pace = pace or 0.0
    return max(LEAST_S, 2 * longest, min(20 * pace, max(LONG_S, 4 * pace)))


def of_log(log: Log, now: str = "") -> Silence:
    """Where a hung log falls silent: after its last work, or its last line."""
    tail, told = log.tail, clocks.of(log.tail)
    place = work_signs.last_work(tail) if log_end.stuck(tail) else len(tail)
    after = tail.count(b"\n", place) - tail.endswith(b"\n")
    silent, begin, end = seconds(tail, log.written_s, now), told.at(place), None
    if begin is not None and (end := told.at(len(tail))) is not None:
        silent = (silent or 0.0) + end - begin if silent or end > begin else silent
    return Silence(
        told.written(place),
        log.name,
        min(log.lines, log.lines - after),
        silent,
        usual_s(tail, log.steps_from),
    )
