"""What a run consumes: time per step and its parts, memory, an engine's queue."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from pytest_gkd.diagnosis.metrics import statistics as robust
from pytest_gkd.diagnosis.metrics.judging import (
    ENOUGH,
    FAR,
    SURE,
    Judges,
    NumberFinding,
    Run,
    above,
    below,
    ends,
    found,
    levels,
    since,
    window,
)
from pytest_gkd.diagnosis.metrics.lines import names_unit
from pytest_gkd.diagnosis.metrics.roles import role
from pytest_gkd.diagnosis.metrics.series import Series

JUDGES = Judges()

# A step that takes this many times as long is beyond debate.
TWICE = 2.0
# A step that takes this many times as long as most is slow, if it is not one of the
# STARTS first; AGAIN of them are a habit.
SLOW = 3.0
STARTS = 3
AGAIN = 5
# Intervals that are tried for a schedule.
MOST_GAPS = 50
# Memory that grew by a smaller factor may still fit, if the capacity is unknown.
GROWN = 1.2
# A peak that is never reset rises with each record, of which the second half of a sound
# run has 0.7 on average and more than these in one of 5,000 (Poisson's distribution;
# Renyi, Theorie des elements saillants d'une suite d'observations, 1962).
RECORDS = 5
# Ordinary fluctuation, in bytes.
NO_LEAK = 16 * 2**20
# How far to look ahead if the planned number of steps is unknown: this many times the
# steps made so far.
AHEAD = 10
# If a log gives no unit, a number up to this is in GiB, or in MiB.
MOST_GIB, MOST_MIB = 4096.0, 1e5
GIB, MIB = 2.0**30, 2.0**20

# Parts that may take far more than their usual share of a step.
_LARGE = re.compile(
    r"gen|rollout|train|update_actor|update_policy|optim|teacher", re.IGNORECASE
)
_GENERATES = re.compile(r"gen(?:eration)?[ _]throughput")
_OF_HOST = re.compile(r"cpu|host|rss|ram", re.IGNORECASE)


def parts(run: Run) -> Iterator[NumberFinding]:
    """A part of the step that takes nearly all of it, or ever more."""
    every = run.every
    steps = [
        one for one in every if role(one.name) == "step time" and one.name != "s/it"
    ]
    whole = max(steps, key=len, default=None)
    if whole is None or len(whole) < ENOUGH or not all(v > 0 for v in whole.values):
        return
    ends_of_whole = ends(whole)
    if ends_of_whole is None or len(whole.finite()) != len(whole):
        return
    first, last = ends_of_whole
    least = min(levels(whole.values, window(whole)).values())
    for part in every:
        if role(part.name) != "part of the step" or len(part) != len(whole):
            continue
        if len(part.finite()) != len(part) or "/agent_loop/" in part.name:
            continue  # the time of one answer, below gen
        early, late = ends(part) or (0.0, 0.0)
        usual = robust.median(part.values) / robust.median(whole.values)
        if usual > (0.85 if _LARGE.search(part.name) else 0.5):
            # How work is divided is a choice: a large teacher, long answers.
            text = f"takes {usual:.0%} of a step, {late:.4g} s"
            yield found(part, 0, "train.slow", text, certain=False)
        elif (
            late > 1.5 * early
            and not run.longer_responses(part, 2)
            and late > 0.25 * last
            and late - early > 0.5 * (last - first) > 0.1 * first
            and robust.trend(part.values) > 1.5 * SURE
        ):
            text = f"grows from {early:.4g} s to {late:.4g} s a step"
            at = since(part, above(1.25 * early))
            certain = last > 1.4 * least  # the first steps may be slow
            yield found(part, at, "train.slow", text, certain=certain)


@JUDGES.of("step time", "part of the step")
def _slower(series: Series, run: Run) -> Iterator[NumberFinding]:
    """A step that takes longer; where no time of it is printed, its largest part."""
    if role(series.name) == "part of the step":
        others = [two[1] for one in run.of("part of the step") if (two := ends(one))]
        own = ends(series)
        if run.of("step time") or not own or own[1] < max(others):
            return
    if run.longer_responses(series, 2):
        return
    series = series.finite()
    if series.name == "s/it":
        if len(run.of("step time")) > 1:
            return  # that time is the steps' own
        series = series.since(_settled(series))
    if len(series) < ENOUGH:
        return
    place, chance = robust.change(series.values)
    before, after = series.values[:place], series.values[place:]
    if chance > 0.05 or len(before) < 3 or len(after) < 3:
        return
    if series.name == "s/it" and _recovers(after):
        return
    usual, now = robust.median(before), robust.median(after[-window(series) :])
    sudden = now > 1.5 * usual and now > usual + FAR * robust.deviation(before)
    if not sudden:  # after the first steps, which may be slow
        known = levels(series.values, window(series))
        place = min(known, key=known.__getitem__)
        usual = known[place]
    creeps = now > TWICE * usual and robust.trend(series.values[place:]) > 2 * SURE
    if usual > 0 and (sudden or creeps):
        text = f"from {usual:.4g} s to {now:.4g} s a step"
        # Responses may have grown where their length is not printed.
        least = TWICE if sudden or run.of("response length") else 1.5 * TWICE
        certain = now >= least * usual
        yield found(series, place, "train.slow", text, certain=certain)


@JUDGES.of("step time")
def _now_and_then(series: Series, run: Run) -> Iterator[NumberFinding]:
    """Steps that are slow again and again, but not at regular intervals.

    What a schedule does, such as a checkpoint, comes every so many steps. A batch that
    is drawn again until its groups differ takes as many times as long (DAPO, arXiv
    2503.14476, section 3.2).
    """
    series = series.finite()
    drawn_again = any("num_gen_batches" in one.name for one in run.every)
    if series.name == "s/it" or len(series) < 3 * ENOUGH or drawn_again:
        return
    values = series.values
    usual = robust.median(values)
    limit = max(SLOW * usual, usual + FAR * robust.deviation(values))
    slow = [at for at in range(STARTS, len(values)) if values[at] > limit]
    if len(slow) < AGAIN or slow[-1] < len(values) * 3 // 4:
        return
    if _scheduled([series.steps[at] for at in slow]) or _longer(series, slow, run):
        return
    since_then = values[slow[0] :]
    times = sum(since_then) / len(since_then) / usual
    if times > 1.25:
        most = robust.median([values[at] for at in slow])
        text = (
            f"{len(slow)} of {len(since_then)} steps take {most:.4g} s instead of "
            f"{usual:.4g} s, at irregular intervals; on average {times:.1f} times that"
        )
        certain = times >= TWICE
        yield found(series, slow[0], "train.slow", text, certain=certain)


def _scheduled(steps: Sequence[int]) -> bool:
    """Whether nearly all of these steps lie a multiple of an interval apart."""
    gaps = {late - early for early, late in itertools.pairwise(steps)} - {1}
    return any(
        max(Counter(step % gap for step in steps).values()) >= 0.8 * len(steps)
        for gap in sorted(gaps)[:MOST_GAPS]
    )


def _longer(series: Series, slow: Sequence[int], run: Run) -> bool:
    """Whether the responses of the slow steps are longer."""
    chosen = {series.steps[at] for at in slow}
    for one in (one.finite() for one in run.of("response length")):
        of = [
            v for step, v in zip(one.steps, one.values, strict=True) if step in chosen
        ]
        if of and robust.median(of) > 1.5 * robust.median(one.values):
            return True
    return False


@JUDGES.of("throughput")
def _fewer_tokens(series: Series, run: Run) -> Iterator[NumberFinding]:
    """A throughput that falls for good, by more than the time of a step rises.

    An engine's falls with its requests, a trainer's by some with shorter sequences.
    """
    series = series.finite()
    if len(series) < 2 * ENOUGH or series.name.startswith("Avg "):
        return
    values, width = series.values, window(series)
    known = levels(values, width)
    highest = max(known, key=known.__getitem__)
    best, last = known[highest], known[len(values) - width]
    slower = max(1.0, run.grown("step time") or 1.0)
    low = len(values) - since(series, below(best / TWICE))
    falls = robust.trend(values[highest:]) < -2 * SURE
    if (
        (falls or low >= max(2 * ENOUGH, width))
        and best > TWICE * slower * last
        and not run.shorter_responses(last / best)
    ):
        spread = robust.deviation(values[highest : highest + width])
        at = since(series, below(best - max(FAR * spread, 0.1 * best)))
        text = f"from {best:.4g} to {last:.4g}: slower steps, or less in a batch"
        certain = falls and best >= 2 * TWICE * slower * last
        yield found(series, at, "train.slow", text, certain=certain)


def _recovers(paces: Sequence[float]) -> bool:
    """Whether a bar's pace falls in most steps, as after each pause of a fast run.

    A pace is an average of the steps so far, or a moving one (tqdm, std.py): it falls
    in a step that takes less.
    """
    moves = [late - early for early, late in itertools.pairwise(paces)]
    return sum(one < 0 for one in moves) > 2 * sum(one > 0 for one in moves)


def _settled(series: Series) -> int:
    """The index from which a bar's pace is that of the steps.

    After a start from a checkpoint its first step counts as hundreds, and tqdm's moving
    average (std.py, EMA) needs some 30 to forget that.
    """
    if not series.steps or series.steps[0] == 1:
        return 0
    rises = itertools.pairwise(series.values[:40])
    return sum(1 for _ in itertools.takewhile(lambda two: two[0] < two[1], rises))


@JUDGES.of("throughput")
def _fewer_of_each(series: Series, run: Run) -> Iterator[NumberFinding]:
    """An engine that generates ever less for as many requests."""
    served = run.grown("running requests")
    levels_of = ends(series)
    if not _GENERATES.search(series.name) or served is None or levels_of is None:
        return
    first, last = levels_of
    if served > 0.8 and first > 2 * SLOW * last * max(1.0, served):
        series = series.finite()
        if robust.trend(series.values) < -2 * SURE:
            text = f"from {first:.4g} to {last:.4g} for as many requests"
            at = since(series, below(0.5 * first))
            yield found(series, at, "train.slow", text, certain=False)


@JUDGES.of_ends("draft acceptance")
def _few_accepted(
    series: Series, run: Run, first: float, last: float
) -> Iterator[NumberFinding]:
    """Drafts that fit the engine's model ever less; each token is checked in vain."""
    if last < 0.5 * first and robust.trend(series.values) < -2 * SURE:
        text = f"falls from {first:.4g} to {last:.4g}: the drafts do not fit any more"
        at = since(series, below(0.7 * first))
        yield found(series, at, "train.slow", text, certain=False)


@JUDGES.of_ends("free memory")
def _less_free(
    series: Series, run: Run, first: float, last: float
) -> Iterator[NumberFinding]:
    """Free memory that falls to the end; a host's page cache takes of it as well."""
    half = series.values[len(series) // 2 :]
    if last < 0.4 * first and robust.trend(half) < -2 * SURE:
        text = f"falls from {first:.4g} to {last:.4g}"
        at = since(series, below(0.7 * first))
        yield found(series, at, "train.memory-leak", text, certain=False)


@JUDGES.of("memory")
def _memory(series: Series, run: Run) -> Iterator[NumberFinding]:
    if run.longer_responses(series):
        return
    series = series.finite()
    half = len(series) // 2
    if len(series) < 2 * ENOUGH:
        return
    early, late = series.values[:half], series.values[half:]
    growth = robust.slope(series.steps[half:], late)
    before = robust.slope(series.steps[:half], early)
    rises = robust.trend(late) > SURE and robust.trend(early) > 0
    if not any(after < before for before, after in itertools.pairwise(series.values)):
        rises = rises and (len({*late}) > RECORDS or _in_equal_jumps(series.values))
    grown = growth * (series.steps[-1] - series.steps[half])
    unit = 1.0 if max(late) > MOST_MIB or names_unit(series.name) else GIB
    if unit > 1 and max(late) > MOST_GIB:
        unit = MIB
    least = max(0.03 * robust.median(early), NO_LEAK / unit)
    if not (rises and growth > 0.4 * before and grown > least):
        return
    first = min(early[0], robust.median(early[:ENOUGH]))  # a start may take more
    more, begun, ended = (_bytes(one * unit) for one in (growth, first, late[-1]))
    text = f"grows by {more} a step, from {begun} to {ended}"
    says, certain = _fits(series.since(half), run, unit, early[0])
    if series.counted:
        text, says = f"grows by {more} each time, from {begun} to {ended}", ""
    yield found(series, half, "train.memory-leak", text + says, certain=certain)


def _in_equal_jumps(values: Sequence[float]) -> bool:
    """Whether a peak rises again and again to the end, as much each time and as often.

    The records of a sound run become ever rarer.
    """
    jumps = [at for at in range(STARTS, len(values)) if values[at] > values[at - 1]]
    gaps = [late - early for early, late in itertools.pairwise([*jumps, len(values)])]
    sizes = [values[at] - values[at - 1] for at in jumps]
    return (
        len(jumps) >= 4
        and all(max(some) < 2 * min(some) for some in (sizes, gaps[:-1]))
        and gaps[-1] < 2 * min(gaps[:-1])
    )


def _fits(late: Series, run: Run, unit: float, first: float) -> tuple[str, bool]:
    """When memory that grows like this is full, and whether that is within the run.

    Extrapolates the Theil-Sen line; its slope's 90 % interval gives that of the step.
    """
    growth = robust.slope(late.steps, late.values)
    low, high = robust.slope_interval(late.steps, late.values)
    now = late.steps[-1]
    level = robust.median(
        [
            value + growth * (now - step)
            for step, value in zip(late.steps, late.values, strict=True)
        ]
    )
    capacity = run.capacity.host if _OF_HOST.search(late.name) else run.capacity.card
    if capacity is None:
        per = f"; {_bytes(1000 * growth * unit)} per 1,000 steps"
        return per, level >= GROWN * first
    left = capacity / unit - level
    at, soonest, latest = (
        round(now + max(0.0, left / one)) if one > 0 else None
        for one in (growth, high, low)
    )
    assert at is not None  # it grows
    until = run.total or AHEAD * now
    between = f"{soonest} to {latest}" if latest else f"{soonest} at the soonest"
    of = f"the {_bytes(capacity)} that there are"
    if at > until:
        return f"; at step {until} it still fits into {of}", False
    return f"; {of} are full at about step {at} ({between})", True


def _bytes(size: float) -> str:
    """A size in the most readable unit."""
    for unit, power in (("GiB", 30), ("MiB", 20)):
        if abs(size) >= 0.1 * 2**power:
            return f"{size / 2**power:.3g} {unit}"
    return f"{size / 2**10:.3g} KiB"


@JUDGES.of_ends("waiting requests")
def _queue(
    series: Series, run: Run, first: float, last: float
) -> Iterator[NumberFinding]:
    many = max(10, 3 * first)
    if last > many and robust.trend(series.values[len(series) // 2 :]) > 2 * SURE:
        served = run.grown("running requests")
        certain = (served is not None and served < 0.7) or any(
            _GENERATES.search(one.name) and two[0] > SLOW * two[1]
            for one in run.of("throughput")
            if (two := ends(one)) is not None
        )
        why = (
            "while fewer and fewer are served"
            if certain
            else "more come in than are served"
        )
        text = f"the queue grows to {last:.0f} requests, {why}"
        at = since(series, above(many))
        yield found(series, at, "vllm.kv-cache", text, certain=certain)
