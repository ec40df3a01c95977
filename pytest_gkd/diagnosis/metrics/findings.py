"""What the numbers of a run say is wrong, each with step, value and what was usual.

A judgement needs a series long enough to know what is usual, a change that is large
against its spread, and one that lasts to the end of the log: what recovered is none.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pytest_gkd.diagnosis.metrics import statistics as robust
from pytest_gkd.diagnosis.metrics.roles import role
from pytest_gkd.diagnosis.metrics.series import Series

# So many steps tell what is usual.
ENOUGH = 8
# Beyond so many deviations a level is another one; of 10,000 steps none by chance.
FAR = 6.0
# Standard deviations from which a trend is one.
SURE = 3.0
# Of so many windows the median is taken: of all, its time would grow with the square.
LEVELS = 200


@dataclass(frozen=True)
class NumberFinding:
    """A cause that a metric proves: since which step, where, and in which words.

    ``value`` is what the metric was at that step, ``where`` what to call it.
    """

    cause: str
    metric: str
    step: int
    value: float
    line: int
    order: int
    where: str
    text: str


_Judge = Callable[[Series], Iterator[NumberFinding]]
_JUDGES: list[tuple[frozenset[str], _Judge]] = []


def _of(*roles: str) -> Callable[[_Judge], _Judge]:
    def register(judge: _Judge) -> _Judge:
        _JUDGES.append((frozenset(roles), judge))
        return judge

    return register


def find(every: list[Series]) -> list[NumberFinding]:
    """What is wrong with these series, the first in time first; one of each cause."""
    found = list(_parts(every)) + [
        one
        for series in every
        for roles, judge in _JUDGES
        if role(series.name) in roles and _judged_by(judge, series, every)
        for one in judge(series)
    ]
    first: dict[str, NumberFinding] = {}
    for one in sorted(found, key=lambda one: (one.line, one.metric)):
        first.setdefault(one.cause, one)
    return list(first.values())


# One of several rewards, as TRL and ms-swift name them.
_DISTILS = re.compile(r"distill|\bopd_|teacher")
_ONE_REWARD = re.compile(r"^(?:train/)?rewards/.+/mean$")


def _judged_by(judge: _Judge, series: Series, every: list[Series]) -> bool:
    """Whether the judgement holds for a run with these series.

    A format is soon always right, and a penalty may grow while the sum of rewards
    rises. Rewards less the mean of their group are 0 on average, and distillation needs
    none (THUDM/slime 624b824, slime/ray/rollout.py _post_process_rewards and
    slime/rollout/on_policy_distillation.py). The loss of a run with rewards follows
    the KL term, from 0 upwards (huggingface/trl f2cd577, docs/source/grpo_trainer.md,
    Computing the loss).
    """
    if judge in (_constant, _falls) and role(series.name) == "reward":
        names = [one.name for one in every]
        if _ONE_REWARD.search(series.name):
            return not {"reward", "train/reward"} & {*names}
        if any("raw_reward" in name for name in names):
            return "raw_reward" in series.name and not any(map(_DISTILS.search, names))
        return judge is _falls or not any(map(_DISTILS.search, names))
    if judge in (_memory, _slower):
        return not _longer_responses(series, every)
    if judge is _diverges and role(series.name) == "loss":
        with_rewards = any(role(one.name) == "reward" for one in every)
        finite = series.finite().values[-_window(series) :]
        return not with_rewards or (bool(finite) and robust.median(finite) > 0.5)
    return True


def _longer_responses(series: Series, every: list[Series]) -> bool:
    """Whether the responses grow as much, which take their time and their memory."""
    first, last = _ends(series)
    for one in every:
        before, after = _ends(one)
        if role(one.name) != "response length" or not (first and before):
            continue
        grown = robust.trend(one.finite().values) > SURE
        if grown and (after or 0) / before >= (last or 0) / first:
            return True
    return False


# What else may take a part of a step that is far larger than its share is usually.
_LARGE = re.compile(
    r"gen|rollout|train|update_actor|update_policy|optim|teacher", re.IGNORECASE
)


def _parts(every: list[Series]) -> Iterator[NumberFinding]:
    """A part of the step that takes nearly all of it, or ever more."""
    steps = [
        one for one in every if role(one.name) == "step time" and one.name != "s/it"
    ]
    whole = max(steps, key=len, default=None)
    if whole is None or len(whole) < ENOUGH or not _positive(whole):
        return
    window = _window(whole)
    first, last = (
        robust.median(whole.values[:window]),
        robust.median(whole.values[-window:]),
    )
    for part in every:
        if role(part.name) != "part of the step" or len(part) != len(whole):
            continue
        if len(part.finite()) != len(part) or "/agent_loop/" in part.name:
            continue  # which is of one answer, below gen
        early = robust.median(part.values[:window])
        late = robust.median(part.values[-window:])
        usual = robust.median(part.values) / robust.median(whole.values)
        if usual > (0.85 if _LARGE.search(part.name) else 0.5):
            text = f"takes {usual:.0%} of a step, {late:.4g} s"
            yield _found(part, 0, "train.slow", text)
        elif (
            late > 1.5 * early
            and not _longer_responses(part, every)
            and late > 0.25 * last
            and late - early > 0.5 * (last - first) > 0.1 * first
            and robust.trend(part.values) > 1.5 * SURE
        ):
            at = _since(part, functools.partial(operator.lt, 1.25 * early))
            text = f"grows from {early:.4g} s to {late:.4g} s a step"
            yield _found(part, min(at, len(part) - 1), "train.slow", text)


def _positive(series: Series) -> bool:
    return all(value > 0 and math.isfinite(value) for value in series.values)


def _window(series: Series) -> int:
    return max(3, len(series) // 8)


def _found(series: Series, at: int, cause: str, text: str) -> NumberFinding:
    where = f"{'logged value' if series.counted else 'step'} {series.steps[at]}"
    return NumberFinding(
        cause,
        series.name,
        series.steps[at],
        series.values[at],
        *series.places[at],
        where,
        f"{series.name}: {text} ({where})",
    )


def _since(series: Series, holds: Callable[[float], bool]) -> int:
    """From which place on all values hold, or nearly all; len(series) where none."""
    at = len(series)
    misses = 0
    for place in range(len(series) - 1, -1, -1):
        if holds(series.values[place]):
            at = place
        else:
            misses += 1
            if misses > (len(series) - place) * 0.2:
                break
    return at


@_of("loss", "policy loss", "gradient norm", "entropy", "KL", "reward")
def _not_finite(series: Series) -> Iterator[NumberFinding]:
    at = _since(series, lambda value: not math.isfinite(value))
    if len(series) - at >= min(3, len(series)):
        before = series.finite()
        usual = (
            f"{robust.median(before.values):.4g} before"
            if len(before)
            else "no number before"
        )
        yield _found(
            series, at, "train.nan", f"is {series.values[at]} from here on; {usual}"
        )


@_of("gradient norm")
def _no_gradient(series: Series) -> Iterator[NumberFinding]:
    at = _since(series, lambda value: abs(value) < 1e-9)
    if len(series) - at >= 5:
        yield _found(series, at, "train.no-grad", "is 0 from here on")


@_of("loss", "gradient norm")
def _diverges(series: Series) -> Iterator[NumberFinding]:
    series = series.finite()
    window = _window(series)
    if len(series) < ENOUGH or min(series.values) < 0:
        return
    values = series.values
    levels = _levels(values, window)
    end = len(values) - window
    lowest = min(
        (at for at in levels if at <= end - window // 2), key=levels.__getitem__
    )
    best, last = levels[lowest], levels[end]
    usual = values[lowest : lowest + window]
    spread = max(robust.deviation(usual), 0.02 * best)
    at = min(_since(series, lambda value: value > best + FAR * spread), len(series) - 1)
    lasts = len(series) - at > window  # as after a jump that was the end of it
    rises = robust.trend(values[lowest:]) > SURE
    factor = 1.5 if role(series.name) == "loss" else 10.0
    if last > factor * best and last > best + FAR * spread and (rises or lasts):
        yield _found(
            series, at, "train.diverged", f"rises from {best:.4g} to {last:.4g}"
        )


@_of("entropy")
def _entropy(series: Series) -> Iterator[NumberFinding]:
    first, last = _ends(series)
    if first is None or last is None or first <= 0:
        return
    if last < 0.3 * first and robust.trend(series.finite().values) < -SURE:
        at = _since(series, lambda value: value < 0.3 * first)
        yield _found(
            series, at, "train.diverged", f"collapses from {first:.4g} to {last:.4g}"
        )
    elif (
        last > 2 * first
        and last > first + 1
        and robust.trend(series.finite().values) > SURE
    ):
        at = _since(series, lambda value: value > 2 * first)
        yield _found(
            series, at, "train.diverged", f"runs away from {first:.4g} to {last:.4g}"
        )


def _ends(series: Series) -> tuple[float | None, float | None]:
    """The usual value in the first and in the last part; None for a short series."""
    values = series.finite().values
    if len(values) < ENOUGH:
        return None, None
    window = max(3, len(values) // 8)
    return robust.median(values[:window]), robust.median(values[-window:])


@_of("disagreement")
def _drifts(series: Series) -> Iterator[NumberFinding]:
    first, last = _ends(series)
    if first is None or last is None:
        return
    values = series.finite().values
    first = robust.median(values[:3])  # it may begin to drift at once
    if last > 3 * first and last > 0.02 and robust.trend(values) > SURE:
        at = _since(series, lambda value: value > 3 * first)
        text = f"the rollout drifts from the trainer, {first:.4g} to {last:.4g}"
        yield _found(series, at, "sync.not-applied", text)


@_of("agreement")
def _disagrees(series: Series) -> Iterator[NumberFinding]:
    first, last = _ends(series)
    if first is None or last is None:
        return
    if last < 0.9 and (
        last < first - 0.05 and robust.trend(series.finite().values) < -SURE
    ):
        at = _since(series, lambda value: value < first - 0.05)
        text = f"the rollout drifts from the trainer, {first:.4g} to {last:.4g}"
        yield _found(series, at, "sync.not-applied", text)


@_of("memory")
def _memory(series: Series) -> Iterator[NumberFinding]:
    series = series.finite()
    half = len(series) // 2
    if len(series) < 2 * ENOUGH:
        return
    early, late = series.values[:half], series.values[half:]
    growth = robust.slope(series.steps[half:], late)
    before = robust.slope(series.steps[:half], early)
    rises = robust.trend(late) > SURE and robust.trend(early) > 0
    grown = growth * (series.steps[-1] - series.steps[half])
    if rises and growth > 0.4 * before and grown > 0.03 * robust.median(early):
        each, start, end = map(_bytes, (growth, early[0], late[-1]))
        text = f"grows by {each} a step, from {start} to {end}"
        yield _found(series, half, "train.memory-leak", text)


def _levels(values: Sequence[float], window: int) -> dict[int, float]:
    """The usual value in windows by their places: the last, and some LEVELS before."""
    end = len(values) - window
    places = [*range(0, end, max(1, end // LEVELS)), end]
    return {at: robust.median(values[at : at + window]) for at in places}


def _bytes(size: float) -> str:
    """A size; the log may tell it in gigabytes and not say so."""
    return f"{size / 1e9:.3g} GB" if size >= 1e6 else f"{size:.4g}"


@_of("step time")
def _slower(series: Series) -> Iterator[NumberFinding]:
    series = series.finite()
    if series.name == "s/it":
        series = series.since(_settled(series))
    if len(series) < ENOUGH:
        return
    place, chance = robust.change(series.values)
    before, after = series.values[:place], series.values[place:]
    if chance > 0.01 or len(before) < 3 or len(after) < 3:
        return
    usual, now = robust.median(before), robust.median(after[-_window(series) :])
    sudden = now > 1.5 * usual and now > usual + FAR * robust.deviation(before)
    if not sudden:
        usual = robust.median(series.values[: _window(series)])
        place = _window(series)
    creeps = now > 2 * usual and robust.trend(series.values) > 2 * SURE
    if sudden or creeps:
        yield _found(
            series, place, "train.slow", f"from {usual:.4g} s to {now:.4g} s a step"
        )


def _settled(series: Series) -> int:
    """From where a bar tells the pace of the steps.

    After a start from a checkpoint its first one counts as hundreds, and tqdm's moving
    average (std.py, EMA) needs some 30 to forget that.
    """
    if not series.steps or series.steps[0] == 1:
        return 0
    rises = itertools.pairwise(series.values[:40])
    return sum(1 for _ in itertools.takewhile(lambda two: two[0] < two[1], rises))


@_of("validation loss")
def _overfits(series: Series) -> Iterator[NumberFinding]:
    series = series.finite()
    if len(series) < 5:
        return
    values = series.values
    lowest = min(range(len(values)), key=values.__getitem__)
    best, last = values[lowest], values[-1]
    if last > 1.2 * best and robust.trend(values[lowest:]) > 2:
        at = min(lowest + 1, len(values) - 1)
        text = f"rises from {best:.4g} to {last:.4g} while the training goes on"
        yield _found(series, at, "train.diverged", text)


@_of("learning rate")
def _no_learning_rate(series: Series) -> Iterator[NumberFinding]:
    at = _since(series, lambda value: value == 0)
    if len(series) - at >= max(5, len(series) // 10):
        yield _found(series, at, "train.no-grad", "is 0 from here on")


@_of("loss scale")
def _loss_scale(series: Series) -> Iterator[NumberFinding]:
    first, last = _ends(series)
    if first is None or last is None:
        return
    if last <= 1 and first >= 64:
        at = _since(series, lambda value: value < first)
        text = f"falls from {first:.4g} to {last:.4g}: gradients overflow"
        yield _found(series, at, "train.nan", text)


@_of("waiting requests")
def _queue(series: Series) -> Iterator[NumberFinding]:
    first, last = _ends(series)
    if first is None or last is None:
        return
    values = series.finite().values
    late = robust.trend(values[len(values) // 2 :])
    if last > max(10, 3 * first) and late > 2 * SURE:
        at = _since(series, lambda value: value > max(10, 3 * first))
        text = f"the queue grows to {last:.0f} requests"
        yield _found(series, at, "vllm.kv-cache", text)


@_of("reward", "accuracy")
def _falls(series: Series) -> Iterator[NumberFinding]:
    series = series.finite()
    window = _window(series)
    if len(series) < 2 * ENOUGH:
        return
    values = series.values
    levels = _levels(values, window)
    highest = max(levels, key=levels.__getitem__)
    best, last = levels[highest], levels[len(values) - window]
    spread = robust.deviation(values[highest : highest + window])
    if (
        last < best - max(0.2 * abs(best), 3 * spread)
        and len(values) - highest >= ENOUGH
        and robust.trend(values[highest:]) < -SURE
    ):
        fall = best - last
        at = _since(series, lambda value: value < best - max(3 * spread, fall / 5))
        at = min(at, len(series) - 1)
        text = f"falls from {best:.4g} to {last:.4g}"
        yield _found(series, at, "train.diverged", text)


@_of("reward")
def _constant(series: Series) -> Iterator[NumberFinding]:
    at = _since(series, lambda value: value == series.values[-1])
    learned = robust.trend(series.values[:at]) > SURE
    if learned and series.values[-1] == max(series.values):
        return  # all is solved
    if len(series) - at >= max(10, len(series) // 3):
        text = f"is {series.values[-1]:.4g} in every step from here on"
        yield _found(series, at, "train.diverged", text)


@_of("response length", "truncated")
def _lengths(series: Series) -> Iterator[NumberFinding]:
    first, last = _ends(series)
    if first is None or last is None:
        return
    values = series.finite().values
    if role(series.name) == "truncated":
        if min(first, last, robust.median(values)) >= 0.9:
            text = f"{last:.0%} of the responses never end"
            yield _found(series, 0, "tokenizer.eos-token", text)
        elif last >= 0.5 and last > first + 0.2 and robust.trend(values) > SURE:
            at = _since(series, lambda value: value > first + 0.2)
            yield _found(
                series,
                at,
                "train.diverged",
                f"from {first:.3g} to {last:.3g} of the responses",
            )
    elif last < 0.25 * first and robust.trend(values) < -SURE:
        at = _since(series, lambda value: value < 0.25 * first)
        yield _found(
            series, at, "train.diverged", f"collapses from {first:.4g} to {last:.4g}"
        )


@_of("imbalance")
def _experts(series: Series) -> Iterator[NumberFinding]:
    first, last = _ends(series)
    if first is None or last is None:
        return
    if last > 2 * first and robust.trend(series.finite().values) > SURE:
        at = _since(series, lambda value: value > 2 * first)
        yield _found(series, at, "train.moe", f"rises from {first:.4g} to {last:.4g}")
