"""What a run's metrics show to be wrong, each with step, value and the usual value.

A judgement needs a series long enough to establish what is usual, a change that is
large against its spread, and one that lasts to the end of the log: what recovered is no
finding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from pytest_gkd.diagnosis.metrics import impossible, learning, numerics, resources
from pytest_gkd.diagnosis.metrics.capacity import Capacity
from pytest_gkd.diagnosis.metrics.judging import NumberFinding, Run, is_clock
from pytest_gkd.diagnosis.metrics.roles import role
from pytest_gkd.diagnosis.metrics.series import Series

# What each brings about.
_FOLLOWS = {"train.diverged": "vllm.wrong-output", "train.no-grad": "train.nan"}

JUDGES = (*impossible.JUDGES, *learning.JUDGES, *numerics.JUDGES, *resources.JUDGES)


def find(
    every: Sequence[Series], total: int = 0, capacity: Capacity | None = None
) -> list[NumberFinding]:
    """What these series show, earliest first.

    One finding per cause if it is certain; of the others, one per cause that no certain
    finding names. ``total`` is the planned number of steps.
    """
    every = [one for one in every if not is_clock(one)]
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
    return sorted(_roots(first), key=lambda one: (one.line, one.metric))


def _roots(found: dict[str, NumberFinding]) -> Iterator[NumberFinding]:
    """The findings; what follows from another is a note.

    Where noise hides it, the place of a change is not known to the step.
    """
    for one in found.values():
        root = found.get(_FOLLOWS.get(one.cause, ""))
        since = root.step - root.step // 4 if root and root.certain else math.inf
        yield replace(one, certain=one.certain and one.step < since)
