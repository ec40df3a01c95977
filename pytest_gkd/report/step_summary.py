"""Renders a run for the summary page of its GitHub Actions job.

GITHUB_STEP_SUMMARY names a Markdown file that the runner shows, up to 1 MiB per step
(docs.github.com, workflow commands, "Step isolation and limits").
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from pytest_gkd import sanitize
from pytest_gkd.diagnosis import translated
from pytest_gkd.language import tr, tr_filled
from pytest_gkd.report import render
from pytest_gkd.report.record import FAILED, SKIPPED, TIMEOUT, RunRecord, StageRecord

VARIABLE = "GITHUB_STEP_SUMMARY"
LIMIT_BYTES = 1 << 20
CUT = "\n\n*The rest did not fit; it is in the report.*\n"
_MARKUP = re.compile(r"[^\w\s,.;/%'\"-]|_|(?<=www)\.")


def append(record: RunRecord, report: str, path: Path) -> str:
    """Add the run to the step's page; returns why that failed, else empty."""
    text = markdown(record, report).encode()
    try:
        # A pipe without a reader is an error, not something to wait for.
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK)
        try:
            room = LIMIT_BYTES - os.fstat(file).st_size
            if len(text) > room:
                whole = text[: max(0, room - len(CUT))].rpartition(b"\n")[0]
                text = whole + CUT.encode() if whole else b""
            os.write(file, text)
        finally:
            os.close(file)
    except OSError as error:
        where = sanitize.line(str(path))
        return f"{VARIABLE}: cannot write to {where}: {error.strerror}"
    return ""


def markdown(record: RunRecord, report: str) -> str:
    """A table of the stages, then what is known about each that failed."""
    failed = [stage for stage in record.stages if stage.outcome in (FAILED, TIMEOUT)]
    count = tr("{number} of {all} stages failed") if failed else tr("no stage failed")
    told = count.format(number=len(failed), all=len(record.stages))
    heads = (tr("stage"), tr("outcome"), tr("time"), tr("budget"))
    lines = ["", f"### gkd: {told}", ""]
    if record.injected:
        fault = tr("this fault was injected: {fault}").format_map(record.injected)
        lines += [literal(fault), ""]
    lines += [f"| {' | '.join(heads)} | |", "|---|---|--:|--:|---|"]
    lines += map(_row, record.stages)
    for stage in failed:
        lines += _failure(stage)
    lines += ["", *(f"- {literal(tr_filled(note))}" for note in record.notes)]
    lines += ["", tr("Report: ") + literal(report), ""]
    return "\n".join(lines)


def _row(stage: StageRecord) -> str:
    cells = (
        stage.name,
        tr(stage.outcome or SKIPPED),
        render.seconds(stage.duration_s),
        render.budget(stage.budget_s),
        render.remark(stage)[:300],
    )
    return f"| {' | '.join(map(literal, cells))} |"


def _failure(stage: StageRecord) -> Iterator[str]:
    yield from ("", f"#### {literal(stage.name)}: {literal(render.headline(stage))}")
    yield ""
    found = stage.diagnosis
    evidence = found.evidence if found else stage.telling
    for line in evidence[: render.EVIDENCE_LINES]:
        saw = tr("saw in {source}: {text}")
        yield "- " + saw.format(source=literal(line.source), text=literal(line.text))
    yield ""
    if found is not None:
        found = translated.diagnosis(found)
        yield from (literal(found.why), "")
        numbered = enumerate(found.advice, 1)
        yield from (f"{number}. {literal(text)}" for number, text in numbered)
        yield from ("", f"<code>{literal(found.explain)}</code>")


def literal(text: str) -> str:
    """One line that Markdown and HTML show verbatim: no link, mention or markup."""
    return _MARKUP.sub(lambda char: f"&#{ord(char[0])};", sanitize.line(text))
