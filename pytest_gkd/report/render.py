"""A record as lines of text: results, the failure block, the live line, the header."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pytest_gkd import sanitize
from pytest_gkd.report.record import (
    BLOCKED,
    FAILED,
    PASSED,
    SKIPPED,
    TIMEOUT,
    RunRecord,
    StageRecord,
)

WIDTH = 80
LABEL = 7  # "  saw  ", "  fix  "
EVIDENCE_LINES = 4
ADVICE = 12 * WIDTH  # half a command is none
NOTES = 6
SLOW_IMPORTS_S = 30.0
# Notes on what is so by choice; in the report for whoever looks for it.
REPORT_ONLY = ("package.optional-missing",)

# A stage that the run did not get to, by -x or an interrupt.
NOT_REACHED = "not reached"

MARKUP: dict[str, dict[str, bool]] = {
    PASSED: {"green": True},
    FAILED: {"red": True},
    TIMEOUT: {"red": True},
    BLOCKED: {"yellow": True},
    SKIPPED: {"yellow": True},
}


def seconds(value: float | None) -> str:
    """``0.42 s``, ``3.1 s``, ``120 s``: as exact as it is worth reading."""
    if value is None:
        return "-"
    if value < 0.095:
        return f"{value:.2f} s"
    return f"{value:.1f} s" if value < 100 else f"{value:.0f} s"


def budget(value: float) -> str:
    """A budget as the user wrote it: ``60 s``, ``2.5 s``."""
    return f"{value:g} s"


def headline(record: StageRecord) -> str:
    """One line that stands alone: what is true, then the cause."""
    cause = f" [{record.diagnosis['cause']}]" if record.diagnosis else " [unknown]"
    return sanitize.line(f"{record.message or ending(record)}{cause}")


def ending(record: StageRecord) -> str:
    """How a stage ended that said nothing itself."""
    if record.outcome == TIMEOUT:
        return f"not finished within {_limit(record)}{doing(record)}"
    return "failed"


def doing(record: StageRecord) -> str:
    """`` while loading weights``; empty for a stage that said nothing."""
    return f" while {record.step}" if record.step else ""


def _limit(record: StageRecord) -> str:
    """The budget, and what the stage was given on top of it."""
    extra_s = record.extra_s.items()
    more = [f"{seconds(s)} for {what}" for what, s in extra_s if s >= 1]
    return " and ".join([budget(record.budget_s), *more])


def slow_imports(record: StageRecord) -> str:
    """What to say of imports that took long, for this stage; empty if they did not."""
    imports_s = record.extra_s.get("imports", 0.0)
    if imports_s < min(SLOW_IMPORTS_S, record.budget_s / 2):
        return ""
    what = "slow file system or cold cache, or a busy machine"
    return f"imports took {imports_s:.0f} s: {what}"


def _large_files(record: StageRecord) -> str:
    more_s = record.extra_s.get("data", 0.0)
    if more_s < 1 or (record.duration_s or 0.0) <= record.budget_s:
        return ""
    return f"{more_s:.0f} s on top of its budget for large train files"


def early_ending(record: StageRecord) -> str:
    """How a stage ended that was proven to be stuck."""
    return f"stuck{doing(record)}"


def result_line(record: StageRecord) -> str:
    """One line a stage, as it ends."""
    outcome = record.outcome or SKIPPED
    time = f"{seconds(record.duration_s):>7} of {budget(record.budget_s):<6}"
    if outcome == BLOCKED:
        time = " " * len(time)
    line = f"{record.name:<14} {outcome:<8}{time} {remark(record)}".rstrip()
    return line if len(line) <= 160 else line[:157] + "..."


def remark(record: StageRecord) -> str:
    """What there is to say of how a stage ended, in a line."""
    return sanitize.line(_remark(record))


def _remark(record: StageRecord) -> str:
    if record.outcome == PASSED:
        said = record.message or str(record.facts.get("summary", ""))
        parts = (said, slow_imports(record), _large_files(record))
        return "; ".join(part for part in parts if part)
    if record.outcome == BLOCKED:
        return f"blocked by {', '.join(record.blocked_by)}"
    if record.outcome == SKIPPED:
        return record.message
    return headline(record)


def failure_block(
    record: StageRecord, report: str, told: Mapping[tuple[str, ...], str] | None = None
) -> list[str]:
    """What failed, what shows it, why, what to do, where the rest is.

    ``told`` names the stage under which a piece of advice stands already: nobody
    needs to read it twice.
    """
    what = "was ended" if record.outcome == TIMEOUT else "failed"
    lines = _wrapped(
        f"stage {record.name} {what} after {seconds(record.duration_s)} (budget "
        f"{budget(record.budget_s)}){doing(record)}",
        then="  ",
    )
    found = record.diagnosis
    lines += _labelled("cause", headline(record))
    if found:
        before = (told or {}).get(tuple(found["advice"]))
        new = [line for line in found["evidence"] if _says_more(line, record)]
        lines += _evidence(new, EVIDENCE_LINES)
        if found.get("why") and not before:
            lines += _labelled("why", found["why"])
        for text in record.also[:EVIDENCE_LINES]:
            lines += _labelled("also", text)
        if before:
            lines += _labelled("fix", f"as for {before}")
        for number, advice in enumerate(() if before else found["advice"], 1):
            label = "fix" if number == 1 else ""
            lines += _labelled(label, f"{number}. {advice}", ADVICE)
        if found.get("also"):
            lines += _labelled("also", ", ".join(found["also"]))
    else:
        lines += _evidence(record.telling, 2 * EVIDENCE_LINES)
        lines += _labelled("why", "no cause in the catalogue matches what was seen")
    state = "; ".join(part for part in (record.state, slow_imports(record)) if part)
    if state:
        lines += _labelled("state", state)
    for text in record.stuck[:EVIDENCE_LINES]:
        lines += _labelled("stuck", text)
    if record.stacks:
        lines += _labelled("stacks", _files(record.stacks))
    if record.cleaned:
        lines += _labelled("ended", _ended(record.cleaned))
    if record.injected:
        lines += _labelled("note", f"this fault was injected: {record.injected}")
    lines += _labelled("more", f"report: {report}")
    if found:
        # A command must stay on one line to be copied.
        lines.append(f"{' ' * (LABEL + 2)}{found['explain']}")
    return lines


def _evidence(found: list[dict[str, Any]], limit: int) -> list[str]:
    lines = []
    for line in found[:limit]:
        number = "" if line["line"] is None else f":{line['line']}"
        lines += _labelled("saw", f"{line['source']}{number}  {line['text']}")
    return lines


def _says_more(line: dict[str, Any], record: StageRecord) -> bool:
    """Whether a line of evidence is more than the headline in other clothes."""
    text = line["text"].removeprefix("E ").strip()
    if not record.message:
        return True
    return text not in record.message and record.message not in text


def _ended(processes: Sequence[str]) -> str:
    if len(processes) == 1:
        return f"1 process it had started: {processes[0]}"
    return f"{len(processes)} processes it had started"


def _files(paths: Sequence[str]) -> str:
    shown = ", ".join(paths[:2])
    return shown if len(paths) <= 2 else f"{shown} and {len(paths) - 2} more"


def _labelled(label: str, text: str, limit: int = 3 * WIDTH) -> list[str]:
    one_line = sanitize.line(text)
    if len(one_line) > limit:
        one_line = one_line[: limit - 3] + "..."
    return _wrapped(one_line, f"  {label:<{LABEL}}", " " * (LABEL + 2))


def _wrapped(text: str, first: str = "", then: str = "") -> list[str]:
    return textwrap.wrap(
        sanitize.line(text),
        WIDTH,
        initial_indent=first,
        subsequent_indent=then,
        # A word that is cut in two may be a path, or begin the next line with ::.
        break_long_words=False,
        break_on_hyphens=False,
    )


def live_line(open_stages: Iterable[StageRecord], now: float, width: int) -> str:
    """The stages that run now, with time against budget and step, in one line."""
    parts = []
    for record in open_stages:
        if record.started is None:
            continue
        spent = f"{now - record.started:.0f}/{record.budget_s:g} s"
        parts.append(f"{record.name} {spent} {sanitize.line(record.step)}".rstrip())
    line = " | ".join(parts)
    return line if len(line) < width else line[: max(0, width - 2)] + "~"


def header(record: RunRecord, lanes: int, notes: Iterable[str]) -> list[str]:
    """What is about to run, and on what, with the choices made for the user."""
    settings = record.settings
    model = f"student {settings['student'] or 'tiny (made here)'}"
    layout = f"layout {settings['layout']} ({settings['layout_why']})"
    device = "cpu" if not settings["gpus"] else f"{settings['gpus']} GPU(s)"
    device += f" ({settings['gpus_why']})" if settings["gpus_why"] else ""
    lines = [f"gkd: {layout}, device {device}, {lanes} lane(s), {model}"]
    if record.injected:
        lines.append(_injected(record.injected))
    lines += [f"gkd: {note}" for note in notes]
    return [sanitize.line(line) for line in lines]


def summary(record: RunRecord, report: str) -> list[str]:
    """The closing lines: what had to be cleaned, where the report is (if anywhere)."""
    lines = [
        f"gkd: {stage.name} was {stage.message}"
        for stage in record.stages
        if stage.message.startswith("interrupted ")
    ]
    missed = [stage.name for stage in record.stages if stage.message == NOT_REACHED]
    if missed:
        lines.append(f"gkd: {NOT_REACHED}: {', '.join(missed)}")
    for stage in record.stages:
        notes = [n for n in _notes(stage.facts) if n["id"] not in REPORT_ONLY]
        for note in notes[:NOTES]:
            lines += _wrapped(f"gkd: note: {note['text']}", then="     ")
    if record.cleaned:
        lines.append(
            f"gkd: {len(record.cleaned)} process(es) were left running and were ended: "
            f"{'; '.join(record.cleaned[:3])}"
        )
    lines += [f"gkd: {note}" for note in record.notes]
    if record.injected:
        lines.append(_injected(record.injected))
    if report:
        lines.append(f"gkd: report in {report}")
    return [sanitize.text(line) for line in lines]


def _notes(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a stage noted, where it has the shape that StageContext.fact asks for."""
    found = facts.get("notes")
    notes = found if isinstance(found, list) else []
    return [n for n in notes if isinstance(n, dict) and {"id", "text"} <= n.keys()]


def _injected(injected: Mapping[str, str]) -> str:
    return f"gkd: INJECTED FAULT {injected['fault']}: {injected['how']}"


def github_annotations(record: RunRecord) -> list[str]:
    """GitHub Actions' workflow commands, one an unsuccessful stage."""
    return [
        f"::error title=gkd {_property(stage.name)}::{_escaped(headline(stage))}"
        for stage in record.stages
        if stage.outcome in (FAILED, TIMEOUT)
    ]


def _escaped(text: Any) -> str:
    # https://docs.github.com/actions/reference/workflow-commands-for-github-actions
    return str(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _escaped(text).replace(":", "%3A").replace(",", "%2C")
