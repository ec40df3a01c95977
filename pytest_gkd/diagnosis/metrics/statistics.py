"""Robust statistics of a series: what is usual, what rises, when it changed."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

# This many median absolute deviations are a normal distribution's standard deviation
# (Hampel, The Influence Curve and its Role in Robust Estimation, JASA 69, 1974).
NORMAL = 1.4826
# 90 of 100 cases lie within this many standard deviations.
NORMAL_90 = 1.645
# Slopes are taken between at most this many points; their pairs grow quadratically.
MOST_POINTS = 120

median = statistics.median


def deviation(values: Sequence[float]) -> float:
    """The median absolute deviation, scaled to a standard deviation."""
    middle = median(values)
    return NORMAL * median([abs(value - middle) for value in values])


def slope(steps: Sequence[float], values: Sequence[float]) -> float:
    """Change per step: the median of the slopes between all pairs of points.

    Theil, Indagationes Mathematicae 12, 1950; Sen, JASA 63, 1968.
    """
    slopes = _slopes(steps, values)
    return float(median(slopes)) if slopes else 0.0


def slope_interval(
    steps: Sequence[float], values: Sequence[float]
) -> tuple[float, float]:
    """The slopes between which the true one lies in 90 of 100 cases.

    Sen, JASA 63, 1968, by the normal approximation of Gilbert, Statistical Methods for
    Environmental Pollution Monitoring, 1987, 16.4.2.
    """
    slopes = sorted(_slopes(steps, values))
    if not slopes:
        return 0.0, 0.0
    n = len(thinned(values))
    half = NORMAL_90 * math.sqrt(n * (n - 1) * (2 * n + 5) / 18) / 2
    low, high = len(slopes) / 2 - half, len(slopes) / 2 + half
    return slopes[max(0, math.floor(low))], slopes[min(len(slopes) - 1, round(high))]


def _slopes(steps: Sequence[float], values: Sequence[float]) -> list[float]:
    points = thinned(list(zip(steps, values, strict=True)))
    return [
        (after - before) / (late - early)
        for (early, before), (late, after) in itertools.combinations(points, 2)
        if late != early
    ]


def trend(values: Sequence[float]) -> float:
    """How significantly the values rise (above 0) or fall, in standard deviations.

    Mann, Econometrica 13, 1945; Kendall, Rank Correlation Methods, 1975 (no ties).
    """
    values = thinned(values)
    n = len(values)
    if n < 3:
        return 0.0
    score = sum(
        (late > early) - (late < early)
        for early, late in itertools.combinations(values, 2)
    )
    return float(score / math.sqrt(n * (n - 1) * (2 * n + 5) / 18))


def change(values: Sequence[float]) -> tuple[int, float]:
    """Where the level changes, and the probability that it does not.

    The largest of the cumulative sums of ranks (Pettitt, A Non-Parametric Approach to
    the Change-Point Problem, Applied Statistics 28, 1979). The place is the first of
    the new level. His approximation is wide of few values; that all on one side exceed
    all on the other has at each place a probability of 2 in so many ways to choose.
    """
    n = len(values)
    if n < 4:
        return 0, 1.0
    order = sorted(values)
    first = {value: at for at, value in reversed(list(enumerate(order)))}
    last = {value: at for at, value in enumerate(order)}
    ranks = [(first[value] + last[value]) / 2 + 1 for value in values]
    sums = [2 * r - at * (n + 1) for at, r in enumerate(itertools.accumulate(ranks), 1)]
    place = max(range(n - 1), key=lambda at: abs(sums[at]))
    largest = abs(sums[place])
    chance = 2 * math.exp(-6 * largest**2 / (n**3 + n**2))
    before, after = values[: place + 1], values[place + 1 :]
    if max(before) < min(after) or min(before) > max(after):
        chance = min(chance, 2 * (n - 1) / math.comb(n, place + 1))
    return place + 1, min(1.0, chance)


def thinned(values: Sequence[float] | list) -> list:  # type: ignore[type-arg]
    """At most MOST_POINTS of them, evenly spaced."""
    stride = -(-len(values) // MOST_POINTS) or 1
    return list(values[::stride])
