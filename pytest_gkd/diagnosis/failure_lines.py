"""Whether a line of a log's last part says that the program failed and stopped."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Container

from pytest_gkd.diagnosis import log_end, log_phases, prefixes, work_signs
from pytest_gkd.diagnosis.patterns import Match, Pattern
from pytest_gkd.diagnosis.scan import plain

_LINE = Pattern(rb"[^\r\n]+")
_NOISE = Pattern(
    rb"destroy_process_group|resource_tracker|shutting down"
    rb"|[Ss]hutdown|SIGTERM|atexit|leaked"
)
# A part of a run that may stop while the run goes on; of some there may be only one.
_ONE_OF_MANY = (
    rb"\b(?:(?P<kind>env|environment|sandbox|container|tool|agent|shard)"
    rb"|episode|trial|rollout|sample|request|trajectory|row|item|example)s?"
    rb"[ #_=-]{1,2}(?P<number>\d+)\b"
)
_PART_OF_MANY = Pattern(rb"(?i)" + _ONE_OF_MANY)
_PART_STOPS = Pattern(rb"(?i)\bERROR\b\W*" + _ONE_OF_MANY)
# An error as the very last line, which says that the program stops.
_STOPS = Pattern(
    rb"^.{0,60}\bERROR\b.{0,250}\b(?:stopping|aborting|giving up|exiting)\W*$"
)
# What Python prints before an exception that it cannot raise, as a destructor's.
IGNORED = b"Exception ignored in"
# An attempt that was the last, told in the last lines.
_GAVE_UP = Pattern(
    rb"(?i)^.*(?:\b(?:fail\w*|errors?|refused|timed out)\b.{0,200}|\bERROR:? \W*)"
    rb"\b(?:no (?:more|further) (?:retries|attempts|tries)|giving up|gave up)\b.*",
    unless=rb"(?i)\bskip|\bignor|\bcontinu|\bgo(?:es|ing) on\b",
)
_BEGINS = Pattern(rb"(?i)\b(?:attempting|retrying|rescheduling|resuming|restarting)\b")
# An actor that tells of what it had run for the model.
_RAN = Pattern(
    rb"(?i)pid=\d+[^)]{0,60}\).{0,60}?\b(?:container|sandbox|docker|podman|apptainer"
    rb"|test|snippet|trial)\b.{0,200}\bexit"
)
# A program that was run for one answer of the model.
_RAN_FOR = Pattern(
    rb"(?i)\b(?:test|program|script|snippet|code)s? (?:of|for) "
    rb"(?:answer|sample|completion|candidate|submission|solution)[ #]{1,2}\d+\b.{0,40}"
    + log_phases.EXIT
)
_STATUS_OF = Pattern(
    rb"\bprocess \d{1,9} " + log_phases.EXIT + rb"(?P<status>-?\d{1,3})\b"
)
# As docker compose tells it.
_ENDS = Pattern(rb"^(?P<who>[A-Za-z][\w.-]*-\d+) exited with code ")


def _says_it_failed(last: list[bytes]) -> bool:
    """Whether one of the last lines says so of the run, and none later begins anew."""
    late = itertools.takewhile(lambda one: not _BEGINS.search(one), reversed(last))
    return any(map(log_end.RUN_FAILED.search, late))


def _steps_are_left(tail: bytes) -> bool:
    """Whether the log is one of an end, and the last step that counts itself is not."""
    return work_signs.counts_further(tail) and log_end.over(tail)


def failed(
    tail: bytes,
    since: int = 0,
    waiting: Container[int] = (),
    ends: Container[int] = (),
) -> bool:
    """Whether a line from ``since`` on says that the program failed, and it stopped.

    Lines that begin at an offset in ``waiting`` do not count: the program waits after
    these; it has ended at one in ``ends``, whatever steps follow, as out of a buffer.
    Nor does what is told of a part that was started anew, if a step follows, or
    of what an actor ran for the model.
    """
    done = work_signs.steps(tail)
    last = max(
        work_signs.last_step(tail), work_signs.rows(tail, 1), work_signs.items(tail, 1)
    )
    stop = log_end.interrupted(tail)
    for line in _LINE.finditer(tail, max(0, since)):
        at = line.start()
        if 0 <= stop <= at:
            return False
        if at in waiting:
            continue
        said = plain(line[0][:400])
        if b"Traceback" in said:
            said = prefixes.bare(said)
        if log_phases.FAILED.search(said[:300]):
            whole = line[0][:400]
            if _RAN.search(whole) and tail[line.end() :].strip():
                continue
            if _RAN_FOR.search(said) or (
                _is_known_end(tail, at) and _ran_programs(tail)
            ):
                continue
            anew = log_end.STARTED_ANEW.search(said[:300]) and log_end.PART.search(
                said[:300]
            )
            if at < last and (
                anew or _of_another(whole, work_signs.line_at(tail, last))
            ):
                continue
            if IGNORED in work_signs.line_at(tail, at - 1):
                continue
            around = tail[max(0, at - 600) : line.end()]
            over = at not in ends and any(step > at for step in done[-2:-1])
            over = over or work_signs.went_on(tail, at)
            if _NOISE.search(around) is None and not over:
                return True
    after = work_signs.last_lines(tail[max(0, last) :].partition(b"\n")[2])
    return (
        any(_stops(one, tail) for one in after[-1:])
        or any(_gave_up(one, tail) for one in after[-3:])
        or _says_it_failed(after)
        or (_steps_are_left(tail) and any(map(log_end.NAMED.search, after)))
    )


def _of_another(line: bytes, step: bytes) -> bool:
    """Whether a line is of a process, or tells its end, that is of another kind.

    Than that which makes the step, as ``reward-1`` is of another than ``trainer-1``.
    """
    ended = _ENDS.search(line)
    own = ended[b"who"] if ended else prefixes.split(line)[0]
    others = prefixes.split(step)[0]
    kinds = [one.translate(None, work_signs.NO_LETTERS) for one in (own, others)]
    return all(kinds) and kinds[0] != kinds[1]


def _stops(line: bytes, tail: bytes) -> bool:
    return bool(_STOPS.search(line)) and not _is_one(_PART_STOPS.search(line), tail)


def _gave_up(line: bytes, tail: bytes) -> bool:
    return bool(_GAVE_UP.search(line)) and not _is_one(_PART_OF_MANY.search(line), tail)


def _is_one(part: Match | None, tail: bytes) -> bool:
    """Whether it is a part of which there are others, such as ``env 7`` of a run."""
    if part is None or part[b"kind"] is None:
        return part is not None
    return any(
        one[b"kind"] == part[b"kind"] and one[b"number"] != part[b"number"]
        for one in _PART_OF_MANY.finditer(tail)
    )


def _is_known_end(tail: bytes, at: int) -> bool:
    """Whether a process's status is told as one before, or a step follows it."""
    end = tail.find(b"\n", at)
    told = _STATUS_OF.search(tail, at, end if end >= 0 else len(tail))
    if told is None:
        return False
    forms = [
        tail[tail.rfind(b"\n", 0, one.start()) + 1 : one.end()]
        for one in _STATUS_OF.finditer(tail, 0, told.end())
    ]
    *known, own = (form.translate(None, work_signs.NO_LETTERS) for form in forms)
    return own in known or work_signs.last_step(tail) > at


@functools.lru_cache(maxsize=64)
def _ran_programs(tail: bytes) -> bool:
    """Whether programs came and went that were run for others, some of them failing.

    Not processes that end together: something else is said between their ends.
    """
    ends = [
        (found.start(), found[b"status"] == b"0")
        for found in itertools.islice(_STATUS_OF.finditer(tail), work_signs.MOST_ROWS)
    ]
    apart = all(
        tail.count(b"\n", a, b) > 1 for (a, _), (b, _) in itertools.pairwise(ends)
    )
    kept = [well for _, well in ends]
    between = kept[kept.index(True) : -1] if True in kept else []
    turned = sum(early and not late for early, late in itertools.pairwise(between))
    return apart and turned >= work_signs.SEVERAL - 1


def complains(line: bytes) -> bool:
    """Whether a logger wrote the line as an error."""
    return log_end.COMPLAINS.search(line) is not None


def shuts_down(tail: bytes, at: int) -> bool:
    """Whether the lines around this offset are those of a shutdown."""
    return _NOISE.search(tail[max(0, at - 600) : at + 400]) is not None
