"""What the numbers of a run say is wrong, each with step, value and what was usual.

A judgement needs a series long enough to know what is usual, a change that is large
against its spread, and one that lasts to the end of the log: what recovered is none.
"""

from __future__ import annotations

from collections.abc import Sequence

from pytest_gkd.diagnosis.metrics import learning, numerics, resources
from pytest_gkd.diagnosis.metrics.capacity import Capacity
from pytest_gkd.diagnosis.metrics.judging import NumberFinding, Run
from pytest_gkd.diagnosis.metrics.roles import role
from pytest_gkd.diagnosis.metrics.series import Series

JUDGES = (*learning.JUDGES, *numerics.JUDGES, *resources.JUDGES)


def find(
    every: Sequence[Series], total: int = 0, capacity: Capacity | None = None
) -> list[NumberFinding]:
    """What these series show, the first in time first.

    One of each cause is certain; of what is not, one of each cause that nothing
    certain tells of. ``total`` is the number of steps that the run is to make.
    """
    run = Run(every, total, capacity or Capacity())
    seen = [*resources.parts(run)] + [
        one
        for series in every
        for roles, judge in JUDGES
        if role(series.name) in roles
        for one in judge(series, run)
    ]
    first: dict[str, NumberFinding] = {}
    for one in sorted(seen, key=lambda one: (not one.certain, one.line, one.metric)):
        first.setdefault(one.cause, one)
    return sorted(first.values(), key=lambda one: (one.line, one.metric))
