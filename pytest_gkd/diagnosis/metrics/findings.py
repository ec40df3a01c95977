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
from pytest_gkd.diagnosis.metrics.judging import NumberFinding, Run, ends
from pytest_gkd.diagnosis.metrics.roles import is_listed, role
from pytest_gkd.diagnosis.metrics.series import Series, is_clock

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
    # What a name seems to say, by its words, proves nothing; a loss that is none does.
    # Nor does a part of the loss that rises while another falls, as the whole may.
    falling = {one.name for one in run.of("loss") if _falls(one)}
    for at, one in enumerate(seen):
        proves = (_is_nan(one) or is_listed(one.metric)) and not _in_part(one, falling)
        seen[at] = replace(one, certain=one.certain and proves)
    first: dict[str, NumberFinding] = {}
    for one in sorted(seen, key=lambda one: (not one.certain, one.line, one.metric)):
        first.setdefault(one.cause, one)
    return sorted(_roots(first), key=lambda one: (one.line, one.metric))


def _falls(series: Series) -> bool:
    levels = ends(series)
    return levels is not None and levels[1] < 0.9 * levels[0]


def _in_part(found: NumberFinding, falling: set[str]) -> bool:
    """Whether it is of a loss, and another one falls."""
    of_loss = found.cause == "train.diverged" and role(found.metric) == "loss"
    return of_loss and bool(falling - {found.metric})


def _is_nan(found: NumberFinding) -> bool:
    return found.cause == "train.nan" and not math.isfinite(found.value)


def _roots(found: dict[str, NumberFinding]) -> Iterator[NumberFinding]:
    """The findings; what follows from another is a note.

    Where noise hides it, the place of a change is not known to the step.
    """
    for one in found.values():
        root = found.get(_FOLLOWS.get(one.cause, ""))
        since = root.step - root.step // 4 if root and root.certain else math.inf
        yield replace(one, certain=one.certain and one.step < since)
