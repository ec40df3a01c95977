"""A record as lines of text: results, the failure block, the live line, the header."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytest_gkd import sanitize
from pytest_gkd.columns import WIDTH, cells, cropped, cut, padded, wrapped
from pytest_gkd.diagnosis import translated
from pytest_gkd.language import marked, tr, tr_filled
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

LABEL = 7  # "  saw  ", "  fix  "
EVIDENCE_LINES = 4
# How many of the possible causes of a hang are shown.
SUSPECTS = 3
LOG_LINE = 160
BLOCKS = "▁▂▃▄▅▆▇█"
ADVICE = 12 * WIDTH  # half a command is useless, and half a reason little better
NOTES = 6
# An engine whose start took at least this long is worth a line.
SLOW_START_S = 30.0
SLOW_IMPORTS_S = 30.0
# The phases of a run in words.
_PHASE = {
    "config": marked("the reading of the configuration"),
    "data": marked("the preparation of the data"),
    "ray-init": marked("the start of Ray"),
    "actor-init": marked("the start of the workers"),
    "rollout-init": marked("the start of the rollout engine"),
    "teacher-init": marked("the start of the teacher"),
    "weight-sync": marked("the weight sync"),
    "generation": marked("the generation"),
    "teacher": marked("the teacher's forward pass"),
    "training-step": marked("the training step"),
    "checkpoint": marked("the checkpoint"),
}
# How sure a diagnosis is; translated when it is shown.
_CONFIDENCES = (marked("likely"), marked("guess"))
# Notes on deliberate choices; in the report for whoever looks for them.
REPORT_ONLY = ("package.optional-missing",)

# A stage that the run did not get to, by -x or an interrupt.
NOT_REACHED = marked("not reached")

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


def headline(record: StageRecord, limit: int | None = None) -> str:
    """One self-contained line: what happened, then the cause.

    A longer one than ``limit`` characters loses the end of what happened.
    """
    cause = f" [{record.diagnosis.cause}]" if record.diagnosis else " [unknown]"
    said = record.message or ending(record)
    for made in (ending, early_ending):
        if said == made(record):
            said = made(record, tr)
    if record.diagnosis:
        said = translated.title(record.diagnosis.cause, said)
    said = sanitize.line(tr_filled(said))
    return f"{said if limit is None else cut(said, limit - len(cause))}{cause}"


def ending(record: StageRecord, tr: Callable[[str], str] = marked) -> str:
    """How a stage ended that left no message of its own, in English unless told."""
    if record.outcome == TIMEOUT:
        told = tr("not finished within {limit}").format(limit=_limit(record))
        return told + doing(record, tr)
    return tr("failed")


def doing(record: StageRecord, tr: Callable[[str], str] = marked) -> str:
    """`` while loading weights``; empty for a stage that reported no step."""
    step = record.step if tr is marked else tr_filled(record.step)
    return tr(" while {step}").format(step=step) if step else ""


def further(found: str) -> str:
    """A further finding, which may begin with its cause in brackets."""
    cause, bracket, said = found.partition("] ")
    if found.startswith("[") and bracket:
        return f"{cause}{bracket}{tr_filled(said)}"
    return tr_filled(found)


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
    return tr(
        "imports took {seconds} s: slow file system or cold cache, or a busy machine"
    ).format(seconds=f"{imports_s:.0f}")


def _large_files(record: StageRecord) -> str:
    more_s = record.extra_s.get("data", 0.0)
    if more_s < 1 or (record.duration_s or 0.0) <= record.budget_s:
        return ""
    return tr("{seconds} s on top of its budget for large train files").format(
        seconds=f"{more_s:.0f}"
    )


def early_ending(record: StageRecord, tr: Callable[[str], str] = marked) -> str:
    """How a stage ended that was proved to be stuck, in English unless told."""
    return tr("stuck") + doing(record, tr)


def result_line(record: StageRecord) -> str:
    """The line for a stage when it ends."""
    outcome = record.outcome or SKIPPED
    took, given = f"{seconds(record.duration_s):>7}", f"{budget(record.budget_s):<6}"
    time = tr("{time} of {budget}").format(time=took, budget=given)
    if outcome == BLOCKED:
        time = " " * cells(time)
    line = f"{record.name:<14} {padded(tr(outcome), 8)}{time} {remark(record)}".rstrip()
    return cut(line, 160)


def shrunk(record: StageRecord) -> str:
    """On which shrunk copies of the user's models it ran; empty for the models."""
    return tr_filled(str(record.facts.get("shrunk", "")))


def remark(record: StageRecord) -> str:
    """What there is to say about how a stage ended, in one line."""
    return sanitize.line(_remark(record))


def _remark(record: StageRecord) -> str:
    if record.outcome == PASSED:
        said = tr_filled(record.message or str(record.facts.get("summary", "")))
        parts = (said, shrunk(record), slow_imports(record), _large_files(record))
        return "; ".join(part for part in parts if part)
    if record.outcome == BLOCKED:
        return tr("blocked by {stages}").format(stages=", ".join(record.blocked_by))
    if record.outcome == SKIPPED:
        return tr_filled(tr(record.message))
    return headline(record)


def failure_block(
    record: StageRecord, report: str, told: Mapping[tuple[str, ...], str] | None = None
) -> list[str]:
    """What failed, the evidence, why, what to do, and where to find the rest.

    ``told`` maps advice to the stage under which it has already been shown: nobody
    needs to read it twice.
    """
    head = (
        tr("stage {name} was ended after {time} (budget {budget})")
        if record.outcome == TIMEOUT
        else tr("stage {name} failed after {time} (budget {budget})")
    ).format(
        name=record.name,
        time=seconds(record.duration_s),
        budget=budget(record.budget_s),
    )
    lines = wrapped("", sanitize.line(head + doing(record, tr)), "  ")
    found = record.diagnosis
    lines += _labelled(tr("cause"), headline(record, 3 * WIDTH))
    if found:
        new = [line for line in found.evidence if _says_more(line, record)]
        before = (told or {}).get(found.advice, "")
        for label, group in _grouped(
            found,
            new[:EVIDENCE_LINES],
            [further(one) for one in record.also[:EVIDENCE_LINES]],
            before,
        ):
            for number, text in enumerate(group):
                again = label == "fix" and number > 0
                limit = ADVICE if label in ("fix", "why") else 3 * WIDTH
                lines += _labelled("" if again else tr(label), text, limit)
    else:
        for line in record.telling[: 2 * EVIDENCE_LINES]:
            lines += _labelled(tr("saw"), _place(line))
        why = tr("no cause in the catalogue matches what was seen")
        lines += _labelled(tr("why"), why)
    word, colon, used = tr_filled(record.state).partition(tr(": "))
    parts = (tr(word) + colon + used, slow_imports(record))
    state = "; ".join(part for part in parts if part)
    if state:
        lines += _labelled(tr("state"), state)
    for text in record.stuck[:EVIDENCE_LINES]:
        lines += _labelled(tr("stuck"), tr_filled(text))
    if record.stacks:
        lines += _labelled(tr("stacks"), _files(record.stacks))
    if record.cleaned:
        lines += _labelled(tr("ended"), _ended(record.cleaned))
    if shrunk(record):
        lines += _labelled(
            tr("note"), tr("it ran {shrunk}").format(shrunk=shrunk(record))
        )
    if record.injected:
        lines += _labelled(
            tr("note"),
            tr("this fault was injected: {fault}").format(fault=record.injected),
        )
    lines += _labelled(tr("more"), tr("report: {file}").format(file=report))
    if found:
        # A command must stay on one line to be copied.
        lines.append(f"{' ' * (LABEL + 2)}{found.explain}")
    return lines


def log_text(report: LogReport) -> str:
    """What ``gkd diagnose`` says about logs: what, evidence, why, what to do."""
    lines = [tr("{file}: left out").format(file=name) for name in report.unreadable]
    lines += [
        tr("{files}: read as one log").format(files=", ".join(names))
        for names in report.joined
    ]
    lines += map(tr_filled, report.partial)
    if report.verdict == "failed":
        lines += _log_causes(report)
    else:
        lines += wrapped("", log_verdict(report), "  ")
    if report.verdict == "hung":
        if report.waits_for:
            waits_for = tr("for {what}").format(what=tr(report.waits_for))
            lines += wrapped(_label(tr("waits")), waits_for)
        lines += _silence(report)
        if report.last:
            lines.append(_label(tr("last")) + _place(report.last, LOG_LINE))
        if next_one := report.expected:
            often = tr("usually ({times} of {of} times): ").format(
                times=next_one.times, of=next_one.of
            )
            lines.append(_label(tr("next")) + often + next_one.shown[:LOG_LINE])
        lines += _log_causes(report)
    elif report.verdict == "unknown":
        lines += [f"  {text}" for text in _told(report.telling, LOG_LINE)]
    lines += wrapped(_label(tr("like")), _guesses(report.nearest))
    lines += _suspects(report)
    if report.verdict not in {"failed", "unknown"}:
        lines += _numbers_noted(report)
        lines += wrapped(_label(tr("start")), _engine_start(report))
    for name, read, every in report.sampled:
        text = tr("metrics from {read} of about {all} lines, evenly spaced: {file}")
        told = text.format(read=f"{read:,}", all=f"{every:,}", file=name)
        lines += wrapped(_label(tr("read")), told)
    lines += [
        f"  {tr('survived')}  {cause}: {_place(line, LOG_LINE)}"
        for cause, line in report.survived
    ]
    return "\n".join(lines)


def log_verdict(report: LogReport) -> str:
    """The verdict in one sentence; of a failure the causes tell it."""
    if report.verdict == "interrupted":
        return tr("interrupted: ") + _ended_from_outside(report)
    if report.verdict == "running":
        return tr("running: ") + _at_work(report)
    if report.verdict == "healthy":
        return tr("healthy: the run reached its end, and nothing failed")
    if report.verdict == "hung":
        return tr("hung: stopped during {phase}").format(phase=_during(report.phase))
    return tr("unknown: no known cause in this log; the most telling lines:")


def _told(lines: Iterable[EvidenceLine], length: int | None) -> Iterator[str]:
    """Each line with its file, or, without a number, as part of the one before it."""
    source = ""
    for line in lines:
        below = line.line is None and line.source == source
        yield f"  {_cut(line.text, length)}" if below else _place(line, length)
        source = line.source


def _label(text: str) -> str:
    return padded(f"  {text} ", LABEL + 1)


def _log_causes(report: LogReport) -> Iterator[str]:
    """What brought it about and what else it may be, where something is known."""
    if report.causes:
        root, *others = report.causes
        yield from _log_cause(root)
        if others:
            yield _label(tr("or")) + ", ".join(one.cause for one in others)
        yield _label(tr("phase")) + report.phase
        yield _label(tr("more")) + root.explain


def _guesses(causes: Sequence[str]) -> str:
    """What an unknown failure resembles; empty if nothing."""
    if not causes:
        return ""
    return tr(
        "{causes}: guesses; `gkd explain CAUSE` tells how each shows itself"
    ).format(causes=", ".join(causes))


def _suspects(report: LogReport) -> Iterator[str]:
    """The last sign of life, and the likeliest causes with what distinguishes each."""
    if report.suspicion is None:
        yield from wrapped(_label(tr("ranks")), tr_filled(report.fell_silent))
        return
    last_sign = translated.last_sign(report.phase, report.suspicion)
    yield from wrapped(_label(tr("sign")), last_sign)
    yield from wrapped(_label(tr("ranks")), tr_filled(report.suspicion.missing))
    shown = SUSPECTS if report.verdict == "hung" else 1
    for number, one in enumerate(report.suspicion.suspects[:shown], 1):
        yield from wrapped(
            _label("" if number > 1 else tr("check")),
            f"{number}. {one.cause}{tr(': ')}{tr(one.observation)}"
            + tr(" ({condition})").format(condition=tr(one.where)),
        )
        if one.command:
            # A command must stay on one line to be copied.
            yield f"           {one.command}"


def _numbers_noted(report: LogReport) -> Iterator[str]:
    """What the metrics show that may be intended; none of it is a failure."""
    notes = [one for _, one in report.notes[:NOTES]]
    for number, one in enumerate(notes):
        first = _label("" if number else tr("note"))
        yield from wrapped(first, f"{sanitize.line(tr_filled(one.text))} [{one.cause}]")


def _engine_start(report: LogReport) -> str:
    """Where a slow start of vLLM went; empty if it was not slow."""
    told = report.engine_start
    if told is None or told.seconds < SLOW_START_S:
        return ""
    inner = {
        tr("reading weights"): told.weights_s,
        "torch.compile": told.compile_s,
        tr("of it Dynamo"): told.dynamo_s,
        "CUDA graphs": told.graphs_s,
    }
    parts = [f"{name} {took:.0f} s" for name, took in inner.items() if took is not None]
    text = tr("vLLM needed {seconds} s for its model and its start").format(
        seconds=f"{told.seconds:.0f}"
    )
    text += f": {', '.join(parts)}" if parts else ""
    if told.compile_s is not None and not told.keeps_compiled:
        text += tr(
            "; vLLM's cache of compiled graphs is off (as VLLM_DISABLE_COMPILE_CACHE=1 "
            "has it), so every start compiles again"
        )
    return text


def _at_work(report: LogReport) -> str:
    told = report.progress
    if told is None:
        return tr(
            "the server is ready when the log ends, and nothing failed; without "
            "requests it logs nothing"
        )
    if told.total and told.step == told.total and report.phase == "checkpoint":
        return tr(
            "every step is done when the log ends{how_far}, and nothing failed; if the "
            "job has not ended it is in what follows, such as a last checkpoint"
        ).format(how_far=_far(told))
    since = tr("for many times that") if told.pace_s else tr("for long")
    since = tr("since {time}").format(time=told.until) if told.until else since
    return tr(
        "at work when the log ends{how_far}, and nothing failed; if nothing was added "
        "{since} it is stuck in {phase}"
    ).format(how_far=_far(told), since=since, phase=_during(report.phase))


def _far(told: Progress) -> str:
    """How far a run had come and at what pace, in parentheses."""
    parts = []
    if told.step is not None:
        step = tr("step {step} of {total}") if told.total else tr("step {step}")
        parts.append(step.format(step=told.step, total=told.total))
    if told.pace_s:
        parts.append(tr("{seconds} s a step").format(seconds=f"{told.pace_s:.4g}"))
    return f" ({', '.join(parts)})" if parts else ""


def _during(phase: str) -> str:
    """A phase in words."""
    known = _PHASE.get(phase)
    return tr(known) if known else tr("an unknown phase")


def _ended_from_outside(report: LogReport) -> str:
    told = report.progress
    when = tr(" at {time}").format(time=told.until) if told and told.until else ""
    stood = (
        tr("the times do not tell whether it stood still before that")
        if report.suspicion
        else tr("it was at work until then")
    )
    return tr(
        "ended from outside by {signal}{when} during {phase}; nothing failed, and "
        "{stood}"
    ).format(
        signal=report.ended_by,
        when=when + (_far(told) if told else ""),
        phase=_during(report.phase),
        stood=stood,
    )


def _silence(report: LogReport) -> Iterator[str]:
    """The line since which nothing has moved, for how long, and what is usual there."""
    told = report.silence
    if told is None:
        return
    since = f"{told.since}, " if told.since else ""
    text = f"{since}{told.file}:{told.line}"
    if told.seconds is not None:
        text += tr(": {time} until now").format(time=seconds(told.seconds))
    if report.ended_by:
        text += tr("; ended by {signal}").format(signal=report.ended_by)
    usual = tr("; usual there: up to {time}").format(time=seconds(told.usual_s))
    yield from wrapped(_label(tr("since")), text + usual)


def plot(report: LogReport) -> str:
    """The metrics over time, each with its minimum, maximum and last value."""
    lines = []
    for one in report.series:
        finite = [value for value in one.values if math.isfinite(value)]
        low, high = min(finite, default=0.0), max(finite, default=0.0)
        name = sanitize.line(one.name)[:40]
        last = tr("{value} at step {step}").format(
            value=f"{one.values[-1]:.4g}", step=one.steps[-1]
        )
        blocks = _blocks(one.values, low, high)
        extent = tr("{low} to {high}") if finite else tr("never a number")
        extent = extent.format(low=f"{low:.4g}", high=f"{high:.4g}")
        lines.append(f"  {blocks}  {name}  {extent}{tr(', ')}{last}")
    return "\n".join(lines) or tr("  no metrics of several steps were found")


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
    guess = "" if found.confidence == "certain" else f" ({tr(found.confidence)})"
    head = f"{translated.title(found.cause, found.title)}{guess}"
    yield f"{padded(head, WIDTH - len(found.cause) - 3)} [{found.cause}]"
    for label, group in _grouped(found, found.evidence, length=LOG_LINE):
        for number, text in enumerate(group):
            first = _label("" if number else tr(label))
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
    found = translated.diagnosis(found)
    yield marked("saw"), [text.strip() for text in _told(evidence, length)]
    followed = dict.fromkeys(cause for cause, _ in found.consequences)
    yield marked("then"), [", ".join(followed)] if followed else []
    yield marked("why"), [] if as_for else [found.why]
    yield marked("also"), list(besides)
    numbered = [f"{number}. {text}" for number, text in enumerate(found.advice, 1)]
    again = tr("as for {stage}").format(stage=as_for)
    yield marked("fix"), [again] if as_for else numbered
    yield marked("also"), [", ".join(found.also)] if found.also else []


def _place(line: EvidenceLine, length: int | None = None) -> str:
    number = "" if line.line is None else f":{line.line}"
    return f"{line.source}{number}  {_cut(line.text, length)}"


def _cut(text: str, length: int | None) -> str:
    return text if length is None else cut(text, length)


def _says_more(line: EvidenceLine, record: StageRecord) -> bool:
    """Whether a line of evidence adds anything to the headline."""
    text = line.text.removeprefix("E ").strip()
    if not record.message:
        return True
    return text not in record.message and record.message not in text


def _ended(processes: Sequence[str]) -> str:
    if len(processes) == 1:
        return tr("1 process it had started: {process}").format(process=processes[0])
    return tr("{number} processes it had started").format(number=len(processes))


def _files(paths: Sequence[str]) -> str:
    shown = ", ".join(paths[:2])
    if len(paths) <= 2:
        return shown
    return tr("{files} and {number} more").format(files=shown, number=len(paths) - 2)


def _labelled(label: str, text: str, limit: int = 3 * WIDTH) -> list[str]:
    return wrapped(f"  {padded(label, LABEL)}", cut(sanitize.line(text), limit))


def live_line(open_stages: Iterable[StageRecord], now: float, width: int) -> str:
    """The running stages, with time against budget and step, in one line of fewer than
    ``width`` columns."""
    line = " | ".join(
        f"{one.name} {now - one.started:.0f}/{one.budget_s:g} s "
        f"{sanitize.line(tr_filled(one.step))}".rstrip()
        for one in open_stages
        if one.started is not None
    )
    return cropped(line, width - 1)


def header(record: RunRecord, lanes: int, notes: Iterable[str]) -> list[str]:
    """What is about to run, on which device, with the choices made for the user."""
    settings = record.settings
    device = "cpu" if not settings["gpus"] else f"{settings['gpus']} GPU(s)"
    device += f" ({tr_filled(settings['gpus_why'])})" if settings["gpus_why"] else ""
    told = tr(
        "gkd: layout {layout} ({why}), device {device}, {lanes} lane(s), "
        "student {student}"
    )
    lines = [
        told.format(
            layout=settings["layout"],
            why=tr_filled(settings["layout_why"]),
            device=device,
            lanes=lanes,
            student=settings["student"] or tr("tiny (made here)"),
        )
    ]
    if job := settings["job"]:
        taken = ", ".join(job["taken"]) or tr("nothing")
        told = tr(
            "gkd: job of {framework} {release} ({release_by}) in {script}, which "
            "decides: {taken}"
        )
        lines.append(told.format_map({**job, "taken": taken}))
    if settings["shrink_why"]:
        lines.append(f"gkd: {tr_filled(settings['shrink_why'])}")
    if record.injected:
        lines.append(_injected(record.injected))
    lines += [f"gkd: {tr_filled(note)}" for note in notes]
    return [sanitize.line(line) for line in lines]


def summary(record: RunRecord, report: str) -> list[str]:
    """The closing lines: what had to be cleaned up, and where the report is, if any."""
    lines = [
        tr("gkd: {stage} was {interrupted}").format(
            stage=stage.name, interrupted=stage.message
        )
        for stage in record.stages
        if stage.message.startswith("interrupted ")
    ]
    missed = [stage.name for stage in record.stages if stage.message == NOT_REACHED]
    if missed:
        lines.append(f"gkd: {tr(NOT_REACHED)}: {', '.join(missed)}")
    for stage in record.stages:
        notes = [n for n in _notes(stage.facts) if n["id"] not in REPORT_ONLY]
        for note in notes[:NOTES]:
            told = tr("gkd: note: {note}").format(note=tr_filled(str(note["text"])))
            lines += wrapped("", sanitize.line(told), "     ")
    if record.cleaned:
        lines.append(
            tr(
                "gkd: {number} process(es) were left running and were ended: {which}"
            ).format(number=len(record.cleaned), which="; ".join(record.cleaned[:3]))
        )
    lines += [f"gkd: {tr_filled(note)}" for note in record.notes]
    if record.injected:
        lines.append(_injected(record.injected))
    if report:
        lines.append(tr("gkd: report in {file}").format(file=report))
    return [sanitize.text(line) for line in lines]


def _notes(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A stage's notes, as far as they have the shape StageContext.fact asks for."""
    found = facts.get("notes")
    notes = found if isinstance(found, list) else []
    return [n for n in notes if isinstance(n, dict) and {"id", "text"} <= n.keys()]


def _injected(injected: Mapping[str, str]) -> str:
    fault, how = injected["fault"], injected["how"]
    return tr("gkd: INJECTED FAULT {fault}: {how}").format(fault=fault, how=tr(how))


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
