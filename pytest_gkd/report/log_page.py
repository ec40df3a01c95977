"""Renders what logs say as one HTML page: verdict, causes, metrics over time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from pytest_gkd import sanitize
from pytest_gkd.diagnosis.log_report import LogReport
from pytest_gkd.diagnosis.metrics.judging import NumberFinding
from pytest_gkd.diagnosis.metrics.series import Series
from pytest_gkd.language import tr, tr_filled
from pytest_gkd.report import render, templates
from pytest_gkd.report.page_texts import cut, diagnosis

TEMPLATE = "log.html.jinja"
MOST_METRICS = 60
POINTS = 400  # of one curve; between two of them the lowest and the highest stay
WIDTH, HEIGHT = 1000, 100  # of the drawing's own coordinates
MARGIN = 6
MARKS = {"failed": "failed", "hung": "failed", "healthy": "passed"}


def html(report: LogReport, names: Sequence[str]) -> str:
    """The page of logs with these names."""
    told = render.log_text(report)
    proofs = [one for _, one in report.proofs]
    noted = [one for _, one in report.notes]
    causes = [diagnosis(one.to_json()) for one in report.causes]
    # What went wrong first, then what is worth a look, then the rest as it came.
    wrong = {one.metric for one in (*proofs, *noted)}
    every = sorted(report.series, key=lambda one: one.name not in wrong)
    page = {
        "verdict": cut(causes[0]["headline"] if causes else render.log_verdict(report)),
        "mark": MARKS.get(report.verdict, ""),
        "when": cut(
            tr("{verdict}; phase {phase}; {files}").format(
                verdict=tr(report.verdict), phase=report.phase, files=", ".join(names)
            )
        ),
        "first": next(iter(causes[0]["advice"]), "") if causes else "",
        "causes": causes,
        "text": "\n".join(cut(line) for line in told.splitlines()),
        "metrics": [_metric(one, proofs, noted) for one in every[:MOST_METRICS]],
        "more": max(0, len(every) - MOST_METRICS),
    }
    return templates.load(TEMPLATE).render(page=sanitize.data(page))


def _metric(
    one: Series, proofs: Sequence[NumberFinding], noted: Sequence[NumberFinding]
) -> dict[str, Any]:
    finite = [value for value in one.values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    broken = [step for step, value in _points(one) if not math.isfinite(value)]
    wrong = [(f, True) for f in proofs if f.metric == one.name]
    wrong += [(f, False) for f in noted if f.metric == one.name]
    unit = tr(one.unit)
    told = tr("{low} to {high}") if finite else tr("never a number")
    told = told.format(low=f"{low:.4g}", high=f"{high:.4g}")
    told += tr(", last {value} at {unit} {number}").format(
        value=f"{one.values[-1]:.4g}", unit=unit, number=one.steps[-1]
    )
    if broken:
        told += tr(", not a number from {unit} {number} on ({times} times)").format(
            unit=unit, number=broken[0], times=len(broken)
        )
    return {
        "name": cut(one.name, 120),
        "curves": list(curves(one, low, high)),
        "marks": [
            {"x": _x(one, finding.step), "sure": sure} for finding, sure in wrong
        ],
        "told": told,
        "begin": f"{unit} {one.steps[0]}",
        "end": f"{one.steps[-1]}",
        "wrong": [
            {
                "text": cut(f"{f.where}{tr(': ')}{tr_filled(f.text)}"),
                "cause": f.cause,
                "sure": sure,
            }
            for f, sure in wrong
        ],
    }


def _points(one: Series) -> Iterator[tuple[int, float]]:
    return zip(one.steps, one.values, strict=True)


def _x(one: Series, step: int) -> float:
    first, last = one.steps[0], one.steps[-1]
    part = (step - first) / (last - first) if last > first else 0.5
    return round(WIDTH * min(1.0, max(0.0, part)), 1)


def curves(one: Series, low: float, high: float) -> Iterator[str]:
    """The points of each stretch without a gap; what is not finite is one."""
    half = high / 2 - low / 2  # the full range may overflow a float
    room = HEIGHT - 2 * MARGIN
    stretch: list[tuple[float, float]] = []
    for step, value in [*_points(one), (0, math.nan)]:
        if math.isfinite(value):
            part = (value / 2 - low / 2) / half if half else 0.5
            y = round(HEIGHT - MARGIN - room * part, 1)
            stretch.append((_x(one, step), y))
        elif stretch:
            if len(stretch) == 1:  # a line of no length would not be drawn
                stretch.append((stretch[0][0] + 2, stretch[0][1]))
            yield " ".join(f"{x:g},{y:g}" for x, y in _thinned(stretch))
            stretch = []


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most POINTS: of each part the lowest and the highest, in their order."""
    if len(points) <= POINTS:
        return points
    width = -(-2 * len(points) // POINTS)
    found = []
    for at in range(0, len(points), width):
        part = points[at : at + width]
        ends = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
        found += sorted(ends)
    return found
