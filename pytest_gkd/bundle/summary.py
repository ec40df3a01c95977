"""The bundle's summary: Markdown to paste into an issue, and the lists beside it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pytest_gkd.bundle.gathering import Missing
from pytest_gkd.bundle.redaction import Redaction
from pytest_gkd.diagnosis import translated
from pytest_gkd.language import marked, tr, tr_filled
from pytest_gkd.report.step_summary import literal

# GitHub refuses a comment of more than 65,536 characters.
LIMIT = 60_000
LINES = 40  # of the system's facts
VERDICTS = (marked("failed"), marked("hung"), marked("healthy"), marked("running"))


def markdown(files: Mapping[str, str], missing: Sequence[Missing]) -> str:
    """A summary of what is in the bundle's files, which are redacted already."""
    lines = ["### gkd bundle", ""]
    lines += _verdict(_json(files.get("diagnosis.json", "")))
    lines += _stages(_json(files.get("report/report.json", "")))
    if system := files.get("system.txt", ""):
        facts = system.splitlines()[:LINES]
        if gpu := files.get("gpu.txt", "").partition("$ ")[0]:
            facts += [f"gpu         {one}" for one in gpu.splitlines()]
        lines += _folded(tr("Machine and versions"), facts)
    if tried := files.get("tried.txt"):
        lines += _folded(tr("Earlier runs of the stages"), tried.splitlines()[:LINES])
    if missing:
        told = [tr_filled(f"{one.what}: {one.why}") for one in missing]
        lines += _folded(tr("Could not be had"), told)
    held = [f"{len(text):>9,}  {name}" for name, text in files.items()]
    lines += _folded(tr("Files of the bundle, in characters"), held)
    text = "\n".join(lines)
    if len(text) > LIMIT:
        rest = tr("The rest is in the bundle.")
        text = text[:LIMIT].rpartition("\n")[0] + f"\n\n*{rest}*"
    return text + "\n"


def _json(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}  # cut short, or none
    return found if isinstance(found, dict) else {}


def _verdict(found: dict[str, Any]) -> Iterator[str]:
    if not found:
        return
    verdict, phase = literal(tr(str(found.get("verdict")))), _text(found, "phase")
    known = phase not in ("", "unknown")
    said = tr("Logs: {verdict}, in {phase}") if known else tr("Logs: {verdict}")
    yield f"**{said.format(verdict=verdict, phase=phase)}**"
    for one in _dicts(found.get("causes"))[:3]:
        title = translated.title(str(one.get("cause")), str(one.get("title") or ""))
        yield from ("", f"- {literal(title[:120])} ({_text(one, 'cause')})")
        for line in _dicts(one.get("evidence"))[:3]:
            place = f"{_text(line, 'file')}:{_text(line, 'line')}"
            yield f"  - {place}: {_text(line, 'text', 300)}"
    if not found.get("causes"):
        for line in _dicts(found.get("telling"))[:5]:
            place = f"{_text(line, 'file')}:{_text(line, 'line')}"
            yield f"- {place}: {_text(line, 'text', 300)}"
    yield ""


def _stages(found: dict[str, Any]) -> Iterator[str]:
    stages = _dicts(found.get("stages"))
    if not stages:
        return
    started = tr("Stages, run at {started}").format(started=_text(found, "started"))
    yield f"**{started}**"
    if isinstance(injected := found.get("injected"), dict):
        fault = tr("this fault was injected: {fault}")
        yield from ("", fault.format(fault=_text(injected, "fault")))
    heads = (tr("stage"), tr("outcome"), tr("time"))
    yield from ("", f"| {' | '.join(heads)} | |", "|---|---|--:|---|")
    for one in stages:
        known = one.get("diagnosis")
        cause = _text(known, "cause") if isinstance(known, dict) else ""
        message = literal(tr_filled(str(one.get("message") or ""))[:300])
        said = f"{message} {cause}".strip()
        took = one.get("duration_s")
        took = f"{took:.1f} s" if isinstance(took, (int, float)) else ""
        outcome = literal(tr(str(one.get("outcome") or "")))
        yield f"| {_text(one, 'name')} | {outcome} | {took} | {said} |"
    yield ""


def _dicts(value: Any) -> list[dict[str, Any]]:
    found = value if isinstance(value, list) else []
    return [one for one in found if isinstance(one, dict)]


def _text(found: dict[str, Any], key: str, most: int = 120) -> str:
    value = found.get(key)
    return "" if value is None else literal(str(value)[:most])


def _folded(title: str, lines: Sequence[str]) -> Iterator[str]:
    yield f"<details><summary>{title}</summary>"
    yield ""
    # HTML, in which no text of a log can end the block as it could a fence.
    yield from ("<pre>", *map(literal, lines), "</pre>")
    yield from ("</details>", "")


def missing_text(missing: Sequence[Missing]) -> str:
    """The bundle's own list of what could not be had."""
    return "".join(f"{one.what}: {one.why}\n" for one in missing) or "nothing\n"


def redacted_text(found: Sequence[Redaction]) -> str:
    """Where something was redacted, and what gave it away; never the secret."""
    if not found:
        return "nothing\n"
    whys = Counter(one.why for one in found)
    head = [f"{number:>7}  {why}" for why, number in whys.most_common()]
    lines = [f"{one.file}:{one.line}: {one.why}" for one in found]
    return "\n".join([*head, "", *lines, ""])
