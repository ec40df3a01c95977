"""A record as lines of text: results, the failure block, the live line, the header."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from pytest_gkd.diagnosis.diagnose import Diagnosis
    from pytest_gkd.diagnosis.evidence import EvidenceLine
    from pytest_gkd.diagnosis.log_report import LogReport, Progress

WIDTH = 80
LABEL = 7  # "  saw  ", "  fix  "
EVIDENCE_LINES = 4
# How many of the possible causes of a hang are shown.
SUSPECTS = 3
LOG_LINE = 160
BLOCKS = "▁▂▃▄▅▆▇█"
ADVICE = 12 * WIDTH  # half a command is useless
NOTES = 6
# An engine whose start took at least this long is worth a line.
SLOW_START_S = 30.0
SLOW_IMPORTS_S = 30.0
# The phases of a run in words.
_PHASE = {
    "config": "reading of the configuration",
    "data": "preparation of the data",
    "ray-init": "start of Ray",
    "actor-init": "start of the workers",
    "rollout-init": "start of the rollout engine",
    "teacher-init": "start of the teacher",
    "weight-sync": "weight sync",
    "generation": "generation",
    "teacher": "teacher's forward pass",
    "training-step": "training step",
    "checkpoint": "checkpoint",
}
# Notes on deliberate choices; in the report for whoever looks for them.
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
    """``0.04 s``, ``3.1 s``, ``120 s``: with as many digits as are worth reading."""
    if value is None:
        return "-"
    if value < 0.095:
        return f"{value:.2f} s"
    return f"{value:.1f} s" if value < 100 else f"{value:.0f} s"


def budget(value: float) -> str:
    """A budget as the user wrote it: ``60 s``, ``2.5 s``."""
    return f"{value:g} s"


def headline(record: StageRecord) -> str:
    """One self-contained line: what happened, then the cause."""
    cause = f" [{record.diagnosis.cause}]" if record.diagnosis else " [unknown]"
    return sanitize.line(f"{record.message or ending(record)}{cause}")


def ending(record: StageRecord) -> str:
    """How a stage ended that left no message of its own."""
    if record.outcome == TIMEOUT:
        return f"not finished within {_limit(record)}{doing(record)}"
    return "failed"


def doing(record: StageRecord) -> str:
    """`` while loading weights``; empty for a stage that reported no step."""
    return f" while {record.step}" if record.step else ""


def _limit(record: StageRecord) -> str:
    """The budget, and the time that the stage was given on top of it."""
    extra_s = record.extra_s.items()
    more = [f"{seconds(s)} for {what}" for what, s in extra_s if s >= 1]
    return " and ".join([budget(record.budget_s), *more])


def slow_imports(record: StageRecord) -> str:
    """What to say about this stage's slow imports; empty if they were not slow."""
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
    """How a stage ended that was proved to be stuck."""
    return f"stuck{doing(record)}"


def result_line(record: StageRecord) -> str:
    """The line for a stage when it ends."""
    outcome = record.outcome or SKIPPED
    time = f"{seconds(record.duration_s):>7} of {budget(record.budget_s):<6}"
    if outcome == BLOCKED:
        time = " " * len(time)
    line = f"{record.name:<14} {outcome:<8}{time} {remark(record)}".rstrip()
    return _cut(line, 160)


def shrunk(record: StageRecord) -> str:
    """On which shrunk copies of the user's models it ran; empty for the models."""
    return str(record.facts.get("shrunk", ""))


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def remark(record: StageRecord) -> str:
    """What there is to say about how a stage ended, in one line."""
    return sanitize.line(_remark(record))


def _remark(record: StageRecord) -> str:
    if record.outcome == PASSED:
        said = record.message or str(record.facts.get("summary", ""))
        parts = (said, shrunk(record), slow_imports(record), _large_files(record))
        return "; ".join(part for part in parts if part)
    if record.outcome == BLOCKED:
        return f"blocked by {', '.join(record.blocked_by)}"
    if record.outcome == SKIPPED:
        return record.message
    return headline(record)


def failure_block(
    record: StageRecord, report: str, told: Mapping[tuple[str, ...], str] | None = None
) -> list[str]:
    """What failed, the evidence, why, what to do, and where to find the rest.

    ``told`` maps advice to the stage under which it has already been shown: nobody
    needs to read it twice.
    """
    what = "was ended" if record.outcome == TIMEOUT else "failed"
    after = f"after {seconds(record.duration_s)} (budget {budget(record.budget_s)})"
    head = sanitize.line(f"stage {record.name} {what} {after}{doing(record)}")
    lines = wrapped("", head, "  ")
    found = record.diagnosis
    lines += _labelled("cause", headline(record))
    if found:
        new = [line for line in found.evidence if _says_more(line, record)]
        before = (told or {}).get(found.advice, "")
        for label, group in _grouped(
            found, new[:EVIDENCE_LINES], record.also[:EVIDENCE_LINES], before
        ):
            for number, text in enumerate(group):
                again = label == "fix" and number > 0
                limit = ADVICE if label == "fix" else 3 * WIDTH
                lines += _labelled("" if again else label, text, limit)
    else:
        for line in record.telling[: 2 * EVIDENCE_LINES]:
            lines += _labelled("saw", _place(line))
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
    if shrunk(record):
        lines += _labelled("note", f"it ran {shrunk(record)}")
    if record.injected:
        lines += _labelled("note", f"this fault was injected: {record.injected}")
    lines += _labelled("more", f"report: {report}")
    if found:
        # A command must stay on one line to be copied.
        lines.append(f"{' ' * (LABEL + 2)}{found.explain}")
    return lines


def log_text(report: LogReport) -> str:
    """What ``gkd diagnose`` says about logs: what, evidence, why, what to do."""
    lines = [f"{name}: left out" for name in report.unreadable]
    lines += [f"{', '.join(names)}: read as one log" for names in report.joined]
    lines += report.partial
    if report.verdict == "failed":
        lines += _log_causes(report)
    elif report.verdict == "interrupted":
        lines += wrapped("interrupted: ", _ended_from_outside(report), "  ")
    elif report.verdict == "running":
        lines += wrapped("running: ", _at_work(report), "  ")
    elif report.verdict == "healthy":
        lines.append("healthy: the run reached its end, and nothing failed")
    elif report.verdict == "hung":
        lines.append(f"hung: stopped during {_during(report.phase)}")
        lines += wrapped("  waits ", "for " + report.waits_for)
        lines += _silence(report)
        lines += [f"  last  {_place(report.last, LOG_LINE)}"] if report.last else []
        if next_one := report.expected:
            often = f"usually ({next_one.times} of {next_one.of} times)"
            lines.append(f"  next  {often}: {next_one.shown[:LOG_LINE]}")
        lines += _log_causes(report)
    else:
        lines.append("unknown: no known cause in this log; the most telling lines:")
        lines += [f"  {_place(line, LOG_LINE)}" for line in report.telling]
        lines += wrapped("  like  ", _guesses(report.nearest))
    lines += _suspects(report)
    if report.verdict not in {"failed", "unknown"}:
        lines += _numbers_noted(report)
        lines += wrapped("  start ", _engine_start(report))
    for name, read, every in report.sampled:
        text = f"metrics from {read:,} of about {every:,} lines, evenly spaced: {name}"
        lines += wrapped("  read  ", text)
    lines += [
        f"  survived  {cause}: {_place(line, LOG_LINE)}"
        for cause, line in report.survived
    ]
    return "\n".join(lines)


def _log_causes(report: LogReport) -> Iterator[str]:
    """What brought it about and what else it may be, where something is known."""
    if report.causes:
        root, *others = report.causes
        yield from _log_cause(root)
        if others:
            yield "  or    " + ", ".join(one.cause for one in others)
        yield f"  phase {report.phase}"
        yield f"  more  {root.explain}"


def _guesses(causes: Sequence[str]) -> str:
    """What an unknown failure resembles; empty if nothing."""
    if not causes:
        return ""
    return (
        f"{', '.join(causes)}: guesses, by its words alone; `gkd explain CAUSE` tells "
        "how each shows itself"
    )


def _suspects(report: LogReport) -> Iterator[str]:
    """The last sign of life, and the likeliest causes with what distinguishes each."""
    if report.suspicion is None:
        yield from wrapped("  ranks ", report.fell_silent)
        return
    yield from wrapped("  sign  ", report.suspicion.last_sign)
    yield from wrapped("  ranks ", report.suspicion.missing)
    shown = SUSPECTS if report.verdict == "hung" else 1
    for number, one in enumerate(report.suspicion.suspects[:shown], 1):
        yield from wrapped(
            f"  {'' if number > 1 else 'check':<6}",
            f"{number}. {one.cause}: {one.observation} ({one.where})",
        )
        if one.command:
            # A command must stay on one line to be copied.
            yield f"           {one.command}"


def _numbers_noted(report: LogReport) -> Iterator[str]:
    """What the metrics show that may be intended; none of it is a failure."""
    notes = [one for _, one in report.notes[:NOTES]]
    for number, one in enumerate(notes):
        first = f"  {'' if number else 'note':<6}"
        yield from wrapped(first, f"{sanitize.line(one.text)} [{one.cause}]")


def _engine_start(report: LogReport) -> str:
    """Where a slow start of vLLM went; empty if it was not slow."""
    told = report.engine_start
    if told is None or told.seconds < SLOW_START_S:
        return ""
    inner = {
        "reading weights": told.weights_s,
        "torch.compile": told.compile_s,
        "of it Dynamo": told.dynamo_s,
        "CUDA graphs": told.graphs_s,
    }
    parts = [f"{name} {took:.0f} s" for name, took in inner.items() if took is not None]
    text = f"vLLM needed {told.seconds:.0f} s for its model and its start"
    text += f": {', '.join(parts)}" if parts else ""
    if told.compile_s is not None and not told.keeps_compiled:
        text += (
            "; vLLM's cache of compiled graphs is off (as VLLM_DISABLE_COMPILE_CACHE=1 "
            "has it), so every start compiles again"
        )
    return text


def _at_work(report: LogReport) -> str:
    told = report.progress
    if told is None:
        return (
            "the server is ready when the log ends, and nothing failed; without "
            "requests it logs nothing"
        )
    since = "for many times that" if told.pace_s else "for long"
    since = f"since {told.until}" if told.until else since
    return (
        f"at work when the log ends{_far(told)}, and nothing failed; if nothing was "
        f"added {since} it is stuck in {_during(report.phase)}"
    )


def _far(told: Progress) -> str:
    """How far a run had come and at what pace, in parentheses."""
    parts = []
    if told.step is not None:
        parts.append(f"step {told.step}" + (f" of {told.total}" if told.total else ""))
    if told.pace_s:
        parts.append(f"{told.pace_s:.4g} s a step")
    return f" ({', '.join(parts)})" if parts else ""


def _during(phase: str) -> str:
    """A phase in words."""
    known = _PHASE.get(phase)
    return f"the {known}" if known else "an unknown phase"


def _ended_from_outside(report: LogReport) -> str:
    told = report.progress
    when = f" at {told.until}" if told and told.until else ""
    stood = (
        "the times do not tell whether it stood still before that"
        if report.suspicion
        else "it was at work until then"
    )
    return (
        f"ended from outside by {report.ended_by}{when}{_far(told) if told else ''} "
        f"during {_during(report.phase)}; nothing failed, and {stood}"
    )


def _silence(report: LogReport) -> Iterator[str]:
    """The line since which nothing has moved, for how long, and what is usual there."""
    told = report.silence
    if told is None:
        return
    since = f"{told.since}, " if told.since else ""
    for_s = "" if told.seconds is None else f": {seconds(told.seconds)} until now"
    ended = f"; ended by {report.ended_by}" if report.ended_by else ""
    text = f"{since}{told.file}:{told.line}{for_s}{ended}; usual there: up to "
    yield from wrapped("  since ", f"{text}{seconds(told.usual_s)}")


def plot(report: LogReport) -> str:
    """The metrics over time, each with its minimum, maximum and last value."""
    lines = []
    for one in report.series:
        finite = [value for value in one.values if math.isfinite(value)]
        low, high = min(finite, default=0.0), max(finite, default=0.0)
        name = sanitize.line(one.name)[:40]
        last = f"{one.values[-1]:.4g} at step {one.steps[-1]}"
        blocks = _blocks(one.values, low, high)
        extent = f"{low:.4g} to {high:.4g}" if finite else "never a number"
        lines.append(f"  {blocks}  {name}  {extent}, {last}")
    return "\n".join(lines) or "  no metrics of several steps were found"


def _blocks(values: Sequence[float], low: float, high: float) -> str:
    """Values as a line of blocks, 30 characters at most; ? means not finite."""
    stride = -(-len(values) // 30) or 1
    half = high / 2 - low / 2  # the full range may overflow a float
    return "".join(
        BLOCKS[round((value / 2 - low / 2) / half * (len(BLOCKS) - 1)) if half else 0]
        if math.isfinite(value)
        else "?"
        for value in values[::stride]
    )


def _log_cause(found: Diagnosis) -> Iterator[str]:
    guess = "" if found.confidence == "certain" else f" ({found.confidence})"
    head = f"{found.title}{guess}"
    yield f"{head:<{WIDTH - len(found.cause) - 3}} [{found.cause}]"
    for label, group in _grouped(found, found.evidence, length=LOG_LINE):
        for number, text in enumerate(group):
            first = f"  {'' if number else label:<6}"
            # A command must stay on one line to be copied.
            yield from [first + text] if label == "fix" else wrapped(first, text)


def _grouped(
    found: Diagnosis,
    evidence: Iterable[EvidenceLine],
    besides: Sequence[str] = (),
    as_for: str = "",
    length: int | None = None,
) -> Iterator[tuple[str, list[str]]]:
    """A diagnosis as labels with their texts, in display order.

    ``besides`` are further findings; ``as_for`` names the stage under which the advice
    was already shown; each line of evidence is cut to ``length`` characters.
    """
    yield "saw", [_place(line, length) for line in evidence]
    followed = dict.fromkeys(cause for cause, _ in found.consequences)
    yield "then", [", ".join(followed)] if followed else []
    yield "why", [] if as_for else [found.why]
    yield "also", list(besides)
    numbered = [f"{number}. {text}" for number, text in enumerate(found.advice, 1)]
    yield "fix", [f"as for {as_for}"] if as_for else numbered
    yield "also", [", ".join(found.also)] if found.also else []


def _place(line: EvidenceLine, length: int | None = None) -> str:
    number = "" if line.line is None else f":{line.line}"
    return f"{line.source}{number}  {line.text[:length]}"


def _says_more(line: EvidenceLine, record: StageRecord) -> bool:
    """Whether a line of evidence adds anything to the headline."""
    text = line.text.removeprefix("E ").strip()
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
    return wrapped(f"  {label:<{LABEL}}", _cut(sanitize.line(text), limit))


def wrapped(first: str, text: str, rest: str | None = None) -> list[str]:
    """The text in lines of 80 columns, after ``first``, then ``rest`` or spaces."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=" " * len(first) if rest is None else rest,
        # A word split in two may be a path, or start the next line with ::.
        break_long_words=False,
        break_on_hyphens=False,
    )


def live_line(open_stages: Iterable[StageRecord], now: float, width: int) -> str:
    """The running stages, with time against budget and step, in one line."""
    line = " | ".join(
        f"{one.name} {now - one.started:.0f}/{one.budget_s:g} s "
        f"{sanitize.line(one.step)}".rstrip()
        for one in open_stages
        if one.started is not None
    )
    return line if len(line) < width else line[: max(0, width - 2)] + "~"


def header(record: RunRecord, lanes: int, notes: Iterable[str]) -> list[str]:
    """What is about to run, on which device, with the choices made for the user."""
    settings = record.settings
    model = f"student {settings['student'] or 'tiny (made here)'}"
    layout = f"layout {settings['layout']} ({settings['layout_why']})"
    device = "cpu" if not settings["gpus"] else f"{settings['gpus']} GPU(s)"
    device += f" ({settings['gpus_why']})" if settings["gpus_why"] else ""
    lines = [f"gkd: {layout}, device {device}, {lanes} lane(s), {model}"]
    if job := settings["job"]:
        taken = ", ".join(job["taken"]) or "nothing"
        lines.append(
            f"gkd: job of {job['framework']} {job['release']} ({job['release_by']}) in "
            f"{job['script']}, which decides: {taken}"
        )
    if settings["shrink_why"]:
        lines.append(f"gkd: {settings['shrink_why']}")
    if record.injected:
        lines.append(_injected(record.injected))
    lines += [f"gkd: {note}" for note in notes]
    return [sanitize.line(line) for line in lines]


def summary(record: RunRecord, report: str) -> list[str]:
    """The closing lines: what had to be cleaned up, and where the report is, if any."""
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
            lines += wrapped("", sanitize.line(f"gkd: note: {note['text']}"), "     ")
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
    """A stage's notes, as far as they have the shape StageContext.fact asks for."""
    found = facts.get("notes")
    notes = found if isinstance(found, list) else []
    return [n for n in notes if isinstance(n, dict) and {"id", "text"} <= n.keys()]


def _injected(injected: Mapping[str, str]) -> str:
    return f"gkd: INJECTED FAULT {injected['fault']}: {injected['how']}"


def github_annotations(record: RunRecord) -> list[str]:
    """GitHub Actions workflow commands, one per failed or timed-out stage."""
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
