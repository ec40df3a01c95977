"""What a run's metrics show to be wrong, each with step, value and the usual value.

A judgement needs a series long enough to establish what is usual, a change that is
large against its spread, and one that lasts to the end of the log: what recovered is no
finding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pytest_gkd.diagnosis.metrics import impossible, learning, numerics, resources
from pytest_gkd.diagnosis.metrics.capacity import Capacity
from pytest_gkd.diagnosis.metrics.judging import NumberFinding, Run
from pytest_gkd.diagnosis.metrics.roles import role
from pytest_gkd.diagnosis.metrics.series import Series

JUDGES = (*impossible.JUDGES, *learning.JUDGES, *numerics.JUDGES, *resources.JUDGES)


def find(
    every: Sequence[Series], total: int = 0, capacity: Capacity | None = None
) -> list[NumberFinding]:
    """What these series show, earliest first.

    One finding per cause if it is certain; of the others, one per cause that no certain
    finding names. ``total`` is the planned number of steps.
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
    return sorted(_roots(first), key=lambda one: (one.line, one.metric))


def _roots(found: dict[str, NumberFinding]) -> Iterator[NumberFinding]:
    """The findings; what follows from an engine's wrong answers is a note."""
    engine = found.get("vllm.wrong-output")
    for one in found.values():
        follows = engine is not None and engine.certain and one.step >= engine.step
        learns = one.cause == "train.diverged"
        yield replace(one, certain=False) if follows and learns else one
