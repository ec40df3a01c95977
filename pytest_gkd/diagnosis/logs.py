"""What happened in the run that these logs come from; several files are its ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from pytest_gkd.diagnosis import (
    clocks,
    engine_start,
    exceptions,
    first_error,
    frames,
    log_end,
    log_phases,
    log_sources,
    phase_marks,
    recovery,
    silence,
    stack_dump,
    standing,
    work_signs,
)
from pytest_gkd.diagnosis.catalogue import (
    Catalogue,
    Rule,
    Signature,
    explain_command,
)
from pytest_gkd.diagnosis.diagnose import (
    MAX_EVIDENCE,
    Diagnosis,
    advice,
    evidence_lines,
    headline,
    telling_lines,
    words_shown,
)
from pytest_gkd.diagnosis.evidence import EvidenceLine, TextSource
from pytest_gkd.diagnosis.first_error import FirstError
from pytest_gkd.diagnosis.log_file import Log, LogError, opened, read
from pytest_gkd.diagnosis.log_report import LogReport, Progress
from pytest_gkd.diagnosis.metrics import findings
from pytest_gkd.diagnosis.metrics.capacity import capacity
from pytest_gkd.diagnosis.metrics.judging import NumberFinding
from pytest_gkd.diagnosis.nearest import nearest, words_of
from pytest_gkd.diagnosis.patterns import Pattern
from pytest_gkd.diagnosis.root_cause import Candidate, choose
from pytest_gkd.diagnosis.scan import Hit, shown
from pytest_gkd.diagnosis.suspects import suspects
from pytest_gkd.diagnosis.usual_next import usual_next

MAX_CAUSES = 3
MAX_PROCESSES = 64
MOST_OTHERS = 2
BEFORE = 500  # bytes
# Causes that occur in one phase only, whoever raised them and whatever was marked last.
_PHASE_OF_CAUSE = {"data.worker-died": "data", "ray.no-resources": "actor-init"}
_WITH_ACTORS = {"actor-init", "rollout-init", "teacher-init"}
# Not a progress bar's elapsed and remaining time.
_CLOCK = Pattern(
    rb"(?:^|[^<\d:])(?P<time>(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d)(?:[^<\d:]|$)"
)
_NUMBERS = Signature(say="{what}", confidence="likely", silent=True)

_DISTILS = Pattern(rb"recipe[./]gkd|gkd[./]megatron|OnPolicyDistillTrainer|actor_pool")
_ROLLS_OUT = Pattern(
    rb"rollout|(?i:vllm|sglang|kv cache)|completions?/|timing_s/gen|GRPO|PPO"
    rb"|\(WorkerDict pid="
)
_FRAMEWORKS = {
    "verl": Pattern(rb"\bverl\b|actor_rollout_ref|\(WorkerDict pid="),
    "trl": Pattern(rb"\btrl[/.]|GRPOTrainer|GKDTrainer|GRPOConfig|\btrl\b"),
    "lightrft": Pattern(rb"(?i)lightrft"),
    "deepspeed": Pattern(rb"(?i)deepspeed"),
    "ray": Pattern(rb"ray::|\(raylet|\bRay\b|ray\.exceptions|\(\w+ pid=\d+"),
    "vllm": Pattern(rb"(?i)vllm|EngineCore"),
    "sglang": Pattern(rb"(?i)sglang|#running-req: "),
}


def judge(logs: list[Log], catalogue: Catalogue, now: str = "") -> LogReport:
    """The verdict over the logs of one run; ``now`` as ``silence.seconds`` takes it."""
    if now:
        silence.refuse(now)
    seen = [*_of_numbers(logs, catalogue)]
    hits = _in_one_clock(logs, [*counted(logs), *_proofs(seen, catalogue)])
    report = _verdict(logs, hits, catalogue, now, processes := standing.of(logs))
    if report.verdict == "hung" and not any(one.silent for one in processes):
        processes = standing.of(logs, stands=True)
    if report.verdict == "healthy":
        processes = tuple(replace(one, silent=False) for one in processes)
    if report.suspicion and (told := standing.sentence(processes)):
        ranks = [one.rank for one in processes if one.silent and one.rank is not None]
        missing = report.suspicion.missing_ranks or tuple(ranks)
        suspicion = replace(report.suspicion, missing=told, missing_ranks=missing)
        report = replace(report, suspicion=suspicion)
    placed = [
        (name, replace(one, line=at))
        for log, one in seen
        for name, at in [log.place(one.line)]
    ]
    return replace(
        report,
        processes=processes[:MAX_PROCESSES],
        proofs=tuple(found for found in placed if found[1].certain),
        notes=tuple(found for found in placed if not found[1].certain),
    )


def _verdict(
    logs: list[Log],
    hits: list[Hit],
    catalogue: Catalogue,
    now: str,
    processes: tuple[standing.Process, ...],
) -> LogReport:
    text = b"\n".join(log.edges for log in logs)
    following = next_phase(text)
    marked = phase_marks.at_end(text)
    entered = marked.phase if marked and marked.is_open else ""
    failed_in = marked.phase if marked else ""
    phase = entered or _phase(logs, following)
    if phase == "unknown" and len(logs) > 1:
        phase = log_phases.last_phase(text)  # what several say together
    found = choose(hits, catalogue)
    strong = [one for one in found if not one.weak and one.confidence != "guess"]
    last = _last(logs)
    frameworks = frameworks_in(text)
    causes = _causes(strong, found, frameworks, catalogue) if strong else ()
    telling = [hit for one in strong for hit in one.hits if not hit.weak]
    by_number = {log.number: log for log in logs}
    waits = all(recovery.waits(hit, by_number[hit.source_index]) for hit in telling)
    waits = waits and not any(map(recovery.failed, logs))
    if strong:
        before = _phase_before(strong[0], logs) or phase
        phase = failed_in or _phase_of(strong[0], logs, before)
    if strong and not waits:
        seen_only = catalogue[strong[0].cause].seen_by_peer
        if seen_only and (first := first_error.behind(strong[0], found, logs)):
            phase = frames.phase_of(first.chain, phase) or phase
            return _unknown(logs, phase, last, found[:1], catalogue, first)
        if "*" not in catalogue[strong[0].cause].consequence_of:
            return LogReport("failed", phase, causes, last=last)
        own = [one for one in first_error.of(logs) if one.of_worker and one.is_first]
        if not own:
            return LogReport("failed", phase, causes, last=last)
        causes = (_brought_about(causes[0], own[0]), *causes[1:])
        alike = nearest(own[0].words(), catalogue, phase)
        alike = [one for one in alike if one not in {each.cause for each in causes}]
        return LogReport("failed", phase, causes, last=last, nearest=tuple(alike))
    survived = () if causes else tuple(_survived(logs))
    crashed = _of(logs, [one for one in processes if one.crashed])
    left = _of(logs, [one for one in processes if one.unfinished])
    silenced = _of(logs, [one for one in processes if one.silent])
    ended = any(log_end.finished(log.tail) >= 0 for log in logs)
    if ended and not left and not crashed:
        return LogReport("healthy", phase, last=last, survived=survived)
    failed = crashed if ended else [log for log in logs if recovery.failed(log)]
    if failed:
        ends = ((log, log.tail_at + len(log.tail)) for log in failed)
        raised = (
            _raised_in(log, at, last=phase) or _raised_last([log], phase)
            for log, at in ends
        )
        phase = failed_in or next(filter(None, raised), phase)
        return _unknown(failed if ended else logs, phase, last, found, catalogue)
    if ended or silenced:  # what the finished or working ones do is known
        logs = silenced or left
        text = b"\n".join(log.edges for log in logs)
        phase, last = entered or _phase(logs, following), _last(logs)
    by = next(filter(None, (log_end.ended_by(log.tail) for log in logs)), "")
    if by and not silenced and not any(map(_stood_still, logs)):
        progress = _progress(logs)
        timed = any(log_end.stood_s(log.tail) is not None for log in logs)
        doubt = None if timed else suspects(phase, text, frameworks, progress.facts)
        return LogReport(
            "interrupted",
            phase,
            last=last,
            progress=progress,
            ended_by=by,
            suspicion=doubt,
            survived=survived,
        )
    silent, done = _silent(logs, now), all(map(_all_steps_done, logs))
    stopped = any(_stopped(log) for log in logs) or (silent > 1 and not done)
    stopped = stopped or any(one.silent and one.trains for one in processes)
    stopped = stopped or any(hit.signature.waits for hit in telling)
    if not stopped and not left and any(log_end.over(log.tail) for log in logs):
        return LogReport("healthy", phase, last=last, survived=survived)
    if done:
        phase = entered or "checkpoint"  # what is usually left to do
    moves = bool(causes) or any(_moves(log) for log in logs) or 0 <= silent <= 1
    at_work = not stopped and moves and last is not None
    if at_work and all(log_end.at_rest(log.tail) for log in logs):
        return LogReport("running", phase, last=last, survived=survived)
    if not at_work and not stopped and phase == "unknown":
        return _unknown(logs, phase, last, found, catalogue)
    progress = _progress(logs)
    doubt = suspects(phase, text, frameworks, progress.facts)
    if causes := () if at_work else causes:
        doubt = replace(doubt, suspects=())  # it says itself what it waits for
    return LogReport(
        "running" if at_work else "hung",
        phase,
        causes,
        last=last,
        expected=usual_next(_farthest(logs).tail) if len(logs) == 1 else None,
        progress=progress,
        ended_by=by,
        silence=silence.of_log(_farthest(logs), now),
        waits_for="" if at_work or causes else log_phases.WAITS_FOR[phase],
        suspicion=doubt,
        survived=survived,
    )


def _of(logs: list[Log], processes: list[standing.Process]) -> list[Log]:
    """The logs of these processes, in the processes' order."""
    numbers = {one.number: None for one in processes}
    by_number = {log.number: log for log in logs}
    return [by_number[number] for number in numbers]


def _in_one_clock(logs: list[Log], hits: list[Hit]) -> list[Hit]:
    """The hits with their times converted to the first log's clock."""
    shifts_s = standing.shifts_s(logs)
    return [
        hit
        if hit.time_s is None
        else replace(hit, time_s=hit.time_s + shifts_s[hit.source_index])
        for hit in hits
    ]


def _progress(logs: list[Log]) -> Progress:
    """The progress of the log that got furthest."""
    log = _farthest(logs)
    times = [*_CLOCK.finditer(log.tail)]
    step, total = log.metrics.last_step, log.metrics.total
    if done := work_signs.steps_done(log.tail):
        step = total = done
    return Progress(
        step,
        total if total and total >= (step or 0) else None,
        log.metrics.pace_s or work_signs.pace_s(log.tail),
        clocks.of(log.tail).written(len(log.tail))
        or (times[-1][b"time"].decode() if times else ""),
    )


def _farthest(logs: list[Log]) -> Log:
    return max(logs, key=lambda one: one.metrics.last_step or 0)


def _moves(log: Log) -> bool:
    """Whether the program works, rests or has just made a step where its log ends."""
    rests = log_end.works(log.tail) or log_end.at_rest(log.tail)
    rests = rests or work_signs.ends_in_items(log.tail)
    made_steps = len(work_signs.steps(log.tail)) > 1 or log.metrics.works
    made_steps = made_steps or recovery.steps_from(log) >= 0
    last = log_phases.last_phase(log.edges, log.last_step_at)
    return rests or made_steps or last == "after-step"


def _all_steps_done(log: Log) -> bool:
    """Whether it ends with the last of its steps: a silent end, or what comes after."""
    return log_end.saves(log.tail) or work_signs.steps_done(log.tail) > 0


def _stopped(log: Log) -> bool:
    """Whether something proves that the program did not just go on."""
    if log_end.stuck(log.tail):
        return True
    return not log_end.at_rest(log.tail) and log_end.interrupted(log.tail) >= 0


def _stood_still(log: Log) -> bool:
    """Whether nothing moved when it was ended; or, as far as is known, ever did."""
    stop = log_end.interrupted(log.tail)
    before = log.tail[:stop] if stop >= 0 else log.tail
    if log_end.stuck(before) or stop < 0:
        return bool(log_end.stuck(before))
    stood_s = log_end.stood_s(log.tail)
    if stood_s is None:
        return not (len(work_signs.steps(before)) > 1 or log.metrics.works)
    return stood_s > silence.usual_s(before, log.steps_from)


def _silent(logs: list[Log], now: str) -> float:
    """The least silence, in multiples of what is usual in its log; -1 if unknown."""
    found = []
    for log, shift_s in zip(logs, standing.zones(logs), strict=True):
        if now and shift_s:
            continue  # its clock is not the one that ``now`` refers to
        seconds = silence.seconds(log.tail, log.written_s, now)
        if seconds is not None and not log_end.at_rest(log.tail):
            found.append(seconds / silence.usual_s(log.tail, log.steps_from))
    return min(found, default=-1.0)


def counted(logs: list[Log]) -> Iterator[Hit]:
    """The hits that the run did not survive, and those it survives silently."""
    run_over = all(log_end.finished(log.tail) >= 0 for log in logs)
    return (hit for log in logs for hit in recovery.counting(log, run_over=run_over))


def _unknown(
    logs: list[Log],
    phase: str,
    last: EvidenceLine | None,
    found: list[Candidate],
    catalogue: Catalogue,
    first: FirstError | None = None,
) -> LogReport:
    errors = first_error.of(logs)
    first = first or next(iter(errors), None)
    alike = nearest(telling_words(logs, first), catalogue, phase)
    guesses = [*dict.fromkeys([*_broad(found, first, catalogue), *alike])][:MAX_CAUSES]
    return LogReport(
        "unknown",
        phase,
        last=last,
        telling=_telling(logs, first, errors),
        nearest=tuple(guesses),
    )


def _broad(
    found: list[Candidate], first: FirstError | None, catalogue: Catalogue
) -> Iterator[str]:
    """The causes that broad rules guess, without what is a mere echo of an error."""
    for rule in (catalogue[one.cause] for one in found if not one.weak):
        echo = rule.seen_by_peer or "*" in rule.consequence_of
        if not (first and first.is_origin and echo):
            yield rule.id


def telling_words(logs: list[Log], first: FirstError | None) -> list[str]:
    """The words that tell an unknown failure: its first error's, else some lines'."""
    if first:
        return [*first.words()]
    return words_of(" ".join(one.text for one in _telling(logs, None)[:3]))


def _survived(logs: list[Log]) -> Iterator[tuple[str, EvidenceLine]]:
    """Each cause that a line shows, for a run in which no hit counts."""
    told = set[str]()
    for hit in (hit for log in logs for hit in log.hits if not hit.weak):
        if hit.cause not in told and hit.signature.confidence != "guess":
            told.add(hit.cause)
            yield hit.cause, EvidenceLine(hit.source, hit.line, hit.text)


def _of_numbers(
    logs: list[Log], catalogue: Catalogue
) -> Iterator[tuple[Log, NumberFinding]]:
    """What the metrics show, each with its log."""
    for log in logs:
        every, total = log.metrics.current(), log.metrics.total
        for one in findings.find(every, total, capacity(log.edges)):
            if one.cause in catalogue:
                yield log, one


def _proofs(
    seen: Iterable[tuple[Log, NumberFinding]], catalogue: Catalogue
) -> Iterator[Hit]:
    """The certain findings as hits, ranked after a crash or an error."""
    for log, one in seen:
        if one.certain:
            name, line = log.place(one.line)
            tier = catalogue[one.cause].tier
            yield Hit(
                cause=one.cause,
                signature=_NUMBERS,
                tier="symptom" if tier == "cause" else tier,
                source=name,
                line=line,
                text=f"{one.where}: {one.metric} is {one.value:.4g}",
                facts={"what": one.text},
                source_index=log.number,
                order=one.order,
            )


def frameworks_in(text: bytes) -> set[str]:
    """The frameworks that wrote a log."""
    return {name for name, mark in _FRAMEWORKS.items() if mark.search(text)}


def next_phase(text: bytes) -> str:
    """What a job like this does after a completed step, and first of all.

    verl's GKD recipe, which prints what verl prints, pushes weights first. Without a
    framework's own markers, a trainer with rollouts generates, others train on.
    """
    if _DISTILS.search(text):
        return "weight-sync"
    if phase := log_phases.after_step(text):
        return phase
    return "generation" if _ROLLS_OUT.search(text) else "training-step"


def _phase(logs: list[Log], after_step: str) -> str:
    """The phase of the log that got furthest."""
    found = {_last_phase(log) or after_step for log in logs} - {"unknown"}
    return max(found, key=log_phases.PHASES.index, default="unknown")


def _last_phase(log: Log) -> str:
    """The phase in which a log ends; empty for what its job does after a step."""
    phase = log_phases.last_phase(log.edges, log.last_step_at)
    told = log_phases.spoken_after(log.edges, log.last_step_at)
    if told:
        phase = told.phase
    if stacked := _stacked(log, phase):
        return stacked
    if phase == "after-step" or (told and told.over):
        if expected := usual_next(log.tail):
            is_step = log_phases.STEP.search(expected.text)
            follows = "" if is_step else log_phases.of_line(expected.text)
        else:
            follows = ""
        phase = follows or log_phases.following(phase, log.edges)
    return phase if phase in log_phases.PHASES else ""


def _stacked(log: Log, last: str) -> str:
    """The phase of the stack that is shown after the last sign of life, if any."""
    since = max(0, work_signs.last_work(log.tail))
    first = log_phases.STACKS.search(log.tail, since)
    if first is None:
        return ""
    title = log.tail.rfind(b"\n", 0, first.start()) + 1
    threads = stack_dump.threads(log.tail[title:].decode("utf-8", "replace"))
    stack = [one.frames for one in threads[:1]]
    shown = (exceptions.Raised("", 0, frames=[*stack[0]]),) if stack else ()
    return frames.phase_of(shown, last)


def _phase_before(root: Candidate, logs: list[Log]) -> str:
    """The phase marked last before the root showed; empty if it made steps since.

    What follows a root without a step is its consequence, such as a timer's end.
    """
    log = next(log for log in logs if log.number == root.best.source_index)
    place = root.best.order - log.tail_at + len(log.edges) - len(log.tail)
    since = max(log.last_step_at, log_phases.STEP.last(log.edges))
    if root.best.order < log.tail_at or since > place:
        return ""
    before = log.edges[:place]
    told = log_phases.spoken_after(before, log.last_step_at)
    phase = told.phase if told else log_phases.last_phase(before, log.last_step_at)
    return phase if phase in log_phases.PHASES and phase != "unknown" else ""


def _phase_of(root: Candidate, logs: list[Log], last: str) -> str:
    """The phase in which the root's traceback was raised, else the ``last`` one marked.

    What was printed last tells more than verl's one ``init_model``, which creates both.
    Some causes occur in one phase only.
    """
    if root.cause in _PHASE_OF_CAUSE and last not in _WITH_ACTORS:
        return _PHASE_OF_CAUSE[root.cause]
    for phase in _raised_at(root, logs, last):
        if phase and (phase, last) != ("actor-init", "rollout-init"):
            return phase
    return log_phases.caused_in(root.cause, last)


def _raised_at(root: Candidate, logs: list[Log], last: str) -> Iterator[str]:
    """The phases that the exceptions of the root tell, and then others of its logs."""
    if root.cause == "vllm.engine-died":
        yield _raised_last(logs, last)  # who asked it knows more
    by_number = {log.number: log for log in logs}
    for hit in root.hits:
        yield _raised_in(by_number[hit.source_index], hit.order, hit.process, last)
    own = {hit.source_index for hit in root.hits}
    yield _raised_last([by_number[number] for number in own], last)


def _raised_last(logs: list[Log], last: str) -> str:
    """The phase of the last exception that tells one and was not outlived."""
    for log in logs:
        until = recovery.outlived_until(log)
        for chain in reversed(log.chains):
            if chain[-1].at >= until and (phase := frames.phase_of(chain, last)):
                return phase
    return ""


def _raised_in(log: Log, at: int, process: str = "", last: str = "") -> str:
    chain = log.near.around(at, process)
    # What a program says of its error may stand just before the traceback.
    chain = chain or log.near.around(at + BEFORE, process)
    before_steps = {"unknown", "checkpoint", *log_phases.STARTS}
    if last in before_steps and frames.converts(chain):
        return "checkpoint"
    return frames.phase_of(chain, last) or log_phases.of_unreadable(log.tail, last)


def _last(logs: list[Log]) -> EvidenceLine | None:
    for log in logs:
        lines = work_signs.last_lines(log.tail, 1)
        if lines:
            name, line = log.place(log.lines)
            return EvidenceLine(name, line or None, shown(lines[-1]))
    return None


def _brought_about(root: Diagnosis, first: FirstError) -> Diagnosis:
    """A mere consequence, shown with the error that brought it about."""
    told = [*first.lines()][: MAX_EVIDENCE - 1]
    rest = [line for line in root.evidence if line[:2] != told[0][:2]]
    sure = "likely" if root.confidence == "certain" else root.confidence
    lines = (*told, *rest)[:MAX_EVIDENCE]
    return replace(root, confidence=sure, evidence=lines)


def _telling(
    logs: list[Log], first: FirstError | None, errors: Iterable[FirstError] = ()
) -> tuple[EvidenceLine, ...]:
    """The lines of the first error and what others say, else the last lines."""
    if first:
        others = [one for one in errors if one.says != first.says and one.is_first]
        told = (next(one.lines()) for one in others[:MOST_OTHERS])
        return (*first.lines(), *told)
    ends = {log.name: (log, log.tail[-200_000:]) for log in logs}
    sources = (
        TextSource(name, end.decode("utf-8", "replace"))
        for name, (_, end) in ends.items()
    )
    found = list[EvidenceLine]()
    for name, number, text in telling_lines(sources):
        log, end = ends[name]
        before = log.lines - end.count(b"\n")
        found.append(EvidenceLine(*log.place(before + (number or 0)), text))
    return tuple(found)


def _causes(
    strong: list[Candidate],
    found: list[Candidate],
    frameworks: set[str],
    catalogue: Catalogue,
) -> tuple[Diagnosis, ...]:
    root = strong[0]
    guesses = [one for one in found if not one.weak and one.confidence == "guess"]
    also = [one for one in (*strong[1:], *guesses) if not one.explained]
    also = sorted(also, key=lambda one: one.rank > root.rank)[: MAX_CAUSES - 1]
    consequences = [
        (one.cause, EvidenceLine(one.best.source, one.best.line, ""))
        for one in found
        if one is not root and one not in also
    ]
    return tuple(
        _told(
            one,
            catalogue[one.cause],
            frameworks,
            confidence=one.confidence if one is root else "guess",
            consequences=tuple(consequences) if one is root else (),
        )
        for one in (root, *also)
    )


def _told(one: Candidate, rule: Rule, frameworks: set[str], **more: Any) -> Diagnosis:
    title, evidence = headline(rule, one.best), tuple(evidence_lines(one.hits))
    facts, seen = one.best.facts, words_shown(title, evidence)
    return Diagnosis(
        cause=rule.id,
        title=title,
        why=rule.why,
        evidence=evidence,
        advice=advice(rule, frameworks, facts, seen, of_stage=False),
        explain=explain_command(rule),
        **more,
    )


def examine(
    paths: Iterable[Path | IO[bytes]],
    catalogue: Catalogue,
    progress: Callable[[int], None] | None = None,
    now: str = "",
) -> LogReport:
    """Read all sources and judge them together, as of ``now`` in their own clock.

    Files that are parts of one log are read as one, and for a directory the log files
    in it. A file that cannot be read is named in ``unreadable`` without affecting the
    others. Raises LogError if none can be read, NowError if ``now`` is not a time.
    """
    sources = log_sources.find(paths)
    logs: list[Log] = []
    unreadable = sources.unreadable
    for number, source in enumerate(sources.logs):
        last = source.last
        name = str(last) if isinstance(last, Path) else "standard input"
        try:
            with (
                opened(last) if isinstance(last, Path) else nullcontext(last) as stream
            ):
                log = read(
                    stream,
                    name,
                    number,
                    catalogue,
                    progress,
                    earlier=source.earlier,
                    edge=log_sources.edge(len(sources.logs)),
                )
            logs.append(log)
        except LogError as error:
            unreadable.append(str(error))
        except OSError as error:
            unreadable.append(f"{name}: {(error.strerror or str(error)).lower()}")
    if not logs:
        raise LogError("\n".join(unreadable))
    report = judge(logs, catalogue, now)
    series = max((log.metrics.shown() for log in logs), key=len)
    return replace(
        report,
        unreadable=(*unreadable, *(text for log in logs for text in log.unreadable)),
        partial=(*sources.notes, *(log.partial for log in logs if log.partial)),
        joined=tuple(tuple(n for _, n in log.parts) for log in logs if log.parts),
        series=tuple(series),
        engine_start=engine_start.of(log.edges for log in logs),
        sampled=tuple(
            (log.name, *log.metrics.lines) for log in logs if log.metrics.sampled
        ),
    )
