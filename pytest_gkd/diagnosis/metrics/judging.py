"""What all judgements of metrics share: the run, levels, places and findings."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

from pytest_gkd.diagnosis.metrics import statistics as robust
from pytest_gkd.diagnosis.metrics.capacity import Capacity
from pytest_gkd.diagnosis.metrics.roles import role
from pytest_gkd.diagnosis.metrics.series import Series

# This many steps establish what is usual.
ENOUGH = 6
# So many values at the end are a level where what is sound is known beforehand.
LASTS = 4
# Deviations beyond which a level has changed; in 10,000 steps none by chance.
FAR = 6.0
# Standard deviations from which a trend is significant.
SURE = 3.0
# Windows whose median is taken: with all of them, time would grow quadratically.
LEVELS = 200
# A level to be compared by ratio must exceed this.
LEAST = 1e-3


@dataclass(frozen=True)
class NumberFinding:
    """What a metric shows: since which step, where, and in which words.

    ``value`` is the metric at that step, ``where`` what to call that step. A
    ``certain`` finding proves that the run is broken; any other is worth a look, and an
    engineer may find it to be as intended.
    """

    cause: str
    metric: str
    step: int
    value: float
    line: int
    order: int
    where: str
    text: str
    certain: bool = True


@dataclass(frozen=True)
class Run:
    """All series of a run, which put each other into context.

    ``total`` is the planned number of steps, 0 if unknown.
    """

    every: Sequence[Series]
    total: int = 0
    capacity: Capacity = field(default_factory=Capacity)

    @cached_property
    def improves(self) -> bool | None:
        """Whether it learns: its rewards rise, or its loss falls if it has none.

        None if it prints neither for long enough.
        """
        rewards = [one for one in self.every if role(one.name) in _GOOD]
        rewards = [one for one in rewards if self.counts(one)]
        for series, sign in ((rewards, 1), (self.of("loss"), -1)):
            finite = [one.finite().values for one in series]
            if known := [values for values in finite if len(values) >= ENOUGH]:
                return any(sign * robust.trend(values) > SURE for values in known)
        return None

    @cached_property
    def only_imitates(self) -> bool:
        """Whether it learns from texts or a teacher, not by rewards or preferences."""
        return not any(
            role(one.name) in _OF_POLICIES or _SHAPED.search(one.name.lower())
            for one in self.every
        )

    @cached_property
    def may_act(self) -> bool:
        """Whether some metric is what policies have, though not they alone."""
        return any(
            role(one.name) in _ALSO_OF_POLICIES or _RETURN.search(one.name.lower())
            for one in self.every
        )

    @cached_property
    def distils(self) -> bool:
        """Whether a metric of it is that of a teacher."""
        return any(_DISTILS.search(one.name) for one in self.every)

    @cached_property
    def rate(self) -> float | None:
        """The median learning rate; None if it prints none."""
        rates = [one.finite().values for one in self.of("learning rate")]
        return min(map(robust.median, filter(None, rates)), default=None)

    @cached_property
    def gradients(self) -> list[list[float]]:
        """The norms of its gradients over time, of each series."""
        norms = [one.finite().values for one in self.of("gradient norm")]
        return [values for values in norms if len(values) >= ENOUGH]

    @cached_property
    def returns(self) -> list[float]:
        """All rewards and returns."""
        known = [*self.of("reward"), *self.of("return")]
        return [value for one in known for value in one.finite().values]

    @cached_property
    def explained(self) -> float | None:
        """The share of the returns' variance that the critic explains in the end."""
        known = filter(None, map(ends, self.of("explained variance")))
        return min((last for _, last in known), default=None)

    @cached_property
    def moves(self) -> bool:
        """Whether the policy changes, as its answers show."""
        shown = (one for what in _SHOWS for one in self.of(what))
        return any(
            len(values) >= ENOUGH and abs(robust.trend(values)) > SURE
            for values in (one.finite().values for one in shown)
        )

    @cached_property
    def exact(self) -> bool:
        """Whether some number has more than four decimals."""
        return any(
            round(value, 4) != value
            for one in self.every
            if role(one.name) != "learning rate"
            for value in one.finite().values[-3:]
        )

    def counts(self, series: Series, *, constant: bool = False) -> bool:
        """Whether this reward is the one that the run is to maximize.

        A format reward is soon always right, and a penalty may grow while the sum of
        rewards rises. Rewards minus their group's mean are 0 on average, and
        distillation needs none, so a ``constant`` one means nothing there (THUDM/slime
        624b824, slime/ray/rollout.py _post_process_rewards and
        slime/rollout/on_policy_distillation.py).
        """
        names = [one.name for one in self.every]
        if "reward" in names and series.name != "reward":
            return False
        if _ONE_REWARD.search(series.name):
            return not {"reward", "train/reward"} & {*names}
        if any("raw_reward" in name for name in names):
            return "raw_reward" in series.name and not self.distils
        return not (constant and self.distils)

    def solved(self, step: int) -> bool:
        """Whether the reward rose to its maximum by this step and nearly stays there.

        Then all answers of a group are equally good, and no gradient is left.
        """
        for one in filter(self.counts, self.of("reward")):
            values = one.finite().values
            at = sum(1 for known in one.finite().steps if known < step)
            after = values[at:]
            full = after.count(max(values, default=0.0))
            if 2 * full > len(after) and robust.trend(values[:at]) > SURE:
                return True
        return False

    def of(self, of_role: str) -> list[Series]:
        """The series of this role."""
        return [one for one in self.every if role(one.name) == of_role]

    def grown(self, of_role: str) -> float | None:
        """The largest ratio of final to first level in this role's series; or None."""
        found = [ends(one) for one in self.every if role(one.name) == of_role]
        return max(
            (last / first for first, last in filter(None, found) if first > 0),
            default=None,
        )

    def longer_responses(self, series: Series, power: int = 1) -> bool:
        """Whether responses, to this power, grow as much, which explains it.

        Memory grows with the length, the time of attention with its square.
        """
        levels = ends(series)
        if levels is None or levels[0] <= 0:
            return False
        for one in self.every:
            lengths = ends(one) if role(one.name) == "response length" else None
            if lengths is None or lengths[0] <= 0:
                continue
            grown = robust.trend(one.finite().values) > SURE
            if grown and (lengths[1] / lengths[0]) ** power >= levels[1] / levels[0]:
                return True
        return False

    def shorter_responses(self, ratio: float) -> bool:
        """Whether responses shrink to about this share, and a throughput with them."""
        known = filter(None, map(ends, self.of("response length")))
        return any(last < 1.5 * ratio * first for first, last in known)


_GOOD = {"reward", "accuracy"}
# What shows that a policy changes.
_SHOWS = ("entropy", "reward", "response length")
_OF_POLICIES = {"reward", "policy loss", "value loss", "disagreement", "agreement"}
_ALSO_OF_POLICIES = {"accuracy", "KL", "entropy", "return"}
_RETURN = re.compile(r"(?:^|[/_])(?:returns?|rew)(?:[/_](?:mean|avg))?$")
_SHAPED = re.compile(
    r"(?:^|/)(?:rewards?|logps|critic|policy|actor|ppo\w*)/|advantage|clip_?(?:frac|ratio)"
)
_DISTILS = re.compile(r"distill|\bopd_|teacher")
# One of several rewards, as TRL and ms-swift name them.
_ONE_REWARD = re.compile(r"^(?:train/)?rewards/.+/mean$")

Judge = Callable[[Series, Run], Iterator[NumberFinding]]
JudgeOfEnds = Callable[[Series, Run, float, float], Iterator[NumberFinding]]


class Judges(list[tuple[frozenset[str], Judge]]):
    """The registered judges and the roles whose series each judges."""

    def of(self, *roles: str) -> Callable[[Judge], Judge]:
        """Register a judge for each series of these roles."""

        def register(judge: Judge) -> Judge:
            self.append((frozenset(roles), judge))
            return judge

        return register

    def of_ends(self, *roles: str) -> Callable[[JudgeOfEnds], JudgeOfEnds]:
        """Register a judge of a series by the median values of its first and last part.

        It gets finite numbers only, and no series that has too few of them.
        """

        def register(judge: JudgeOfEnds) -> JudgeOfEnds:
            def of_series(series: Series, run: Run) -> Iterator[NumberFinding]:
                if (levels := ends(series)) is not None:
                    yield from judge(series.finite(), run, *levels)

            self.append((frozenset(roles), of_series))
            return judge

        return register


def ends(series: Series) -> tuple[float, float] | None:
    """The median of the first and of the last part; None for a short series."""
    values = series.finite().values
    if len(values) < ENOUGH:
        return None
    part = max(3, len(values) // 8)
    return robust.median(values[:part]), robust.median(values[-part:])


def window(series: Series) -> int:
    """How many values make up a level of this series."""
    return max(3, len(series) // 8)


def levels(values: Sequence[float], width: int) -> dict[int, float]:
    """Window medians by start index: the last window, and about LEVELS before it."""
    end = len(values) - width
    places = [*range(0, end, max(1, end // LEVELS)), end]
    return {at: robust.median(values[at : at + width]) for at in places}


def since(series: Series, holds: Callable[[float], bool]) -> int:
    """The index from which all values hold, or nearly all; len(series) if none do."""
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


def above(limit: float) -> Callable[[float], bool]:
    """A predicate for ``since``: whether a value is greater."""
    return partial(operator.lt, limit)


def below(limit: float) -> Callable[[float], bool]:
    """A predicate for ``since``: whether a value is less."""
    return partial(operator.gt, limit)


def found(
    series: Series, at: int, cause: str, text: str, *, certain: bool = True
) -> NumberFinding:
    """The finding on a series from index ``at`` on, at most its last."""
    at = min(at, len(series) - 1)
    certain = certain and not series.loose
    where = f"{series.unit} {series.steps[at]}"
    return NumberFinding(
        cause,
        series.name,
        series.steps[at],
        series.values[at],
        *series.places[at],
        where,
        f"{series.name}: {text} ({where})",
        certain,
    )
