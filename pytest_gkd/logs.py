"""What happened in the run that these logs come from? Several files are its ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pytest_gkd import phases
from pytest_gkd.match import (
    EvidenceLine,
    TextSource,
    advice,
    evidence_lines,
    headline,
    telling_lines,
)
from pytest_gkd.reading import Log, LogError, read
from pytest_gkd.root import Found, choose
from pytest_gkd.rules import Catalogue
from pytest_gkd.scan import Hit, shown

MAX_CAUSES = 3

_BAR = b"Training Progress:   0%"
_NOISE = re.compile(
    rb"Exception ignored in|destroy_process_group|resource_tracker|shutting down"
    rb"|[Ss]hutdown|SIGTERM|atexit|leaked"
)
_DISTILS = re.compile(
    rb"on_policy_distill|recipe\.gkd|gkd[./]|OnPolicyDistill|Teacher|actor_pool"
)
_ROLLS_OUT = re.compile(
    rb"rollout|(?i:vllm|sglang)|completions?/|timing_s/gen|GRPO|PPO"
)
_FRAMEWORKS = {
    "verl": re.compile(rb"\bverl\b|actor_rollout_ref|\(WorkerDict pid="),
    "trl": re.compile(rb"\btrl[/.]|GRPOTrainer|GKDTrainer|GRPOConfig|\btrl\b"),
    "lightrft": re.compile(rb"(?i)lightrft"),
    "deepspeed": re.compile(rb"(?i)deepspeed"),
    "ray": re.compile(rb"ray::|\(raylet|\bRay\b|ray\.exceptions|\(\w+ pid=\d+"),
    "vllm": re.compile(rb"(?i)vllm|EngineCore"),
}
_SPECIFIC = ("verl", "trl", "lightrft", "deepspeed")


@dataclass(frozen=True)
class CauseFound:
    """A cause in a log, with its proof, its advice and what followed from it."""

    cause: str
    confidence: str
    title: str
    why: str
    evidence: tuple[EvidenceLine, ...]
    advice: tuple[str, ...]
    consequences: tuple[tuple[str, EvidenceLine], ...] = ()


@dataclass(frozen=True)
class LogReport:
    """The verdict over all files.

    ``verdict`` is ``failed``, ``hung``, ``healthy`` or ``unknown``; ``phase`` one of
    ``phases.PHASES``. ``last`` is the last sign of life. ``telling`` are the lines to
    read when nothing is known. ``unreadable`` are the files that were left out.
    """

    verdict: str
    phase: str
    causes: tuple[CauseFound, ...] = ()
    last: EvidenceLine | None = None
    waits_for: str = ""
    telling: tuple[EvidenceLine, ...] = ()
    unreadable: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The report as ``gkd diagnose --format json`` prints it."""
        return {
            "schema": 1,
            "verdict": self.verdict,
            "phase": self.phase,
            "waits_for": self.waits_for,
            "last": _line_json(self.last) if self.last else None,
            "causes": [
                {
                    "cause": one.cause,
                    "confidence": one.confidence,
                    "title": one.title,
                    "why": one.why,
                    "evidence": [_line_json(line) for line in one.evidence],
                    "advice": list(one.advice),
                    "consequences": [
                        {"cause": cause, "file": line.source, "line": line.line}
                        for cause, line in one.consequences
                    ],
                }
                for one in self.causes
            ],
            "telling": [_line_json(line) for line in self.telling],
            "unreadable": list(self.unreadable),
        }


def _line_json(line: EvidenceLine) -> dict[str, Any]:
    return {"file": line.source, "line": line.line, "text": line.text}


def judge(logs: list[Log], catalogue: Catalogue) -> LogReport:
    """The verdict over the logs of one run."""
    text = b"\n".join(log.edges for log in logs)
    phase = _phase(logs, _next_phase(text))
    found = choose(_that_count(logs), catalogue)
    strong = [one for one in found if not one.weak and one.confidence != "guess"]
    if strong:
        frameworks = {name for name, mark in _FRAMEWORKS.items() if mark.search(text)}
        causes = _causes(strong, found, frameworks, catalogue)
        return LogReport("failed", phase, causes, last=_last(logs))
    if any(_finished(log) >= 0 for log in logs):
        return LogReport("healthy", phase, last=_last(logs))
    if _failed(logs):
        return LogReport("unknown", phase, last=_last(logs), telling=_telling(logs))
    ends = [line for log in logs for line in _end(log)]
    if any(phases.WORKING.search(e) or phases.ENDED.search(e) for e in ends):
        return LogReport("healthy", phase, last=_last(logs))
    if phase != "unknown":
        waits = phases.WAITS_FOR[phase]
        return LogReport("hung", phase, last=_last(logs), waits_for=waits)
    return LogReport("unknown", phase, last=_last(logs), telling=_telling(logs))


def _that_count(logs: list[Log]) -> Iterator[Hit]:
    """The hits that the run did not survive, and those it survives in silence."""
    over = {log.name: _finished(log) for log in logs}
    steps = {log.name: _later_steps(log) for log in logs}
    run_over = all(at >= 0 for at in over.values())
    for log in logs:
        for hit in log.hits:
            if hit.signature.silent:
                yield hit
            elif _works_now(log, hit.order) or (
                hit.tier != "cause" and _went_on(log, hit.order)
            ):
                continue
            elif over[log.name] >= 0 and hit.order >= over[log.name]:
                if hit.tier == "cause" and not _shutdown(log, hit):
                    yield hit
            elif not run_over and not any(
                at > hit.order + 2000 for at in steps[log.name][-2:-1]
            ):
                yield hit


def _works_now(log: Log, order: int) -> bool:
    """Whether the program still works at the end, well after this byte."""
    return order < log.tail_at + len(log.tail) - 2000 and any(
        phases.WORKING.search(line) for line in _end(log)
    )


def _went_on(log: Log, order: int) -> bool:
    """Whether the program shows that it works, well after this byte."""
    start = order - log.tail_at + 2000
    return start < len(log.tail) and (
        phases.WORKING.search(log.tail, max(0, start)) is not None
    )


def _finished(log: Log) -> int:
    """At which byte the log says that the run is over, or -1.

    Not when it starts something afterwards: what ended was another program.
    """
    found = -1
    for match in phases.FINISHED.finditer(log.tail):
        if not _quoted(log.tail, match.start()):
            found = match.start()
    if found < 0 or phases.starts_after(log.tail, found):
        return -1
    return log.tail_at + found


def _quoted(text: bytes, at: int) -> bool:
    """Whether the find is part of a configuration that is printed."""
    start = text.rfind(b"\n", 0, at) + 1
    return text[start:at].count(b"':") > 3


def _later_steps(log: Log) -> list[int]:
    return [log.tail_at + match.start() for match in phases.STEP.finditer(log.tail)]


def _shutdown(log: Log, hit: Hit) -> bool:
    at = hit.order - log.tail_at
    return _NOISE.search(log.tail[max(0, at - 600) : at + 400]) is not None


def _end(log: Log, count: int = 12) -> list[bytes]:
    lines = [line for line in re.split(rb"[\r\n]+", log.tail[-20000:]) if line.strip()]
    return lines[-count:]


def _failed(logs: list[Log]) -> bool:
    for log in logs:
        steps = _later_steps(log)
        for line in re.finditer(rb"[^\r\n]+", log.tail):
            if phases.FAILED.search(line.group()[:300]):
                at = log.tail_at + line.start()
                around = log.tail[max(0, line.start() - 600) : line.end()]
                went_on = any(step > at for step in steps[-2:-1]) or _went_on(log, at)
                if _NOISE.search(around) is None and not went_on:
                    return True
    return False


def _next_phase(text: bytes) -> str:
    """What a job like this does after a completed step, and first of all."""
    if _DISTILS.search(text):
        return "weight-sync"
    return "generation" if _ROLLS_OUT.search(text) else "training-step"


def _phase(logs: list[Log], after_step: str) -> str:
    """The phase of the log that came farthest."""
    found = []
    for log in logs:
        text = log.edges
        marker = phases.last_marker(text)
        bar = text.rfind(_BAR)
        if bar >= 0 and (marker is None or bar >= marker.at):
            marker = phases.Marker(bar, "bar")
        found.append(phases.phase_of(marker, after_step))
    return max(found, key=_far)


def _far(phase: str) -> int:
    return -1 if phase == "unknown" else phases.PHASES.index(phase)


def _last(logs: list[Log]) -> EvidenceLine | None:
    for log in logs:
        lines = _end(log, 1)
        if lines:
            return EvidenceLine(log.name, log.lines or None, shown(lines[-1]))
    return None


def _telling(logs: list[Log]) -> tuple[EvidenceLine, ...]:
    sources = []
    for log in logs:
        text = log.tail[-200_000:].decode("utf-8", "replace")
        sources.append(TextSource(log.name, text))
    lines = telling_lines(sources)
    # Only the end was looked at, so its line numbers are not those of the file.
    return tuple(EvidenceLine(line.source, None, line.text) for line in lines)


def _causes(
    strong: list[Found],
    found: list[Found],
    frameworks: set[str],
    catalogue: Catalogue,
) -> tuple[CauseFound, ...]:
    root = strong[0]
    also = [one for one in strong[1:] if one.rank <= root.rank and not one.explained]
    also = also[: MAX_CAUSES - 1]
    followed = [one for one in found if one is not root and one not in also]
    reports = []
    for one in (root, *also):
        rule = catalogue[one.cause]
        consequences = [
            (other.cause, EvidenceLine(other.best.source, other.best.line, ""))
            for other in (followed if one is root else [])
        ]
        reports.append(
            CauseFound(
                cause=rule.id,
                confidence=one.confidence if one is root else "guess",
                title=headline(rule, one.best),
                why=rule.why,
                evidence=tuple(evidence_lines(one.hits)),
                advice=advice(rule, frameworks, one.best.facts, of_stage=False),
                consequences=tuple(consequences),
            )
        )
    return tuple(reports)


def diagnose(
    paths: Iterable[Path | IO[bytes]],
    catalogue: Catalogue,
    progress: Callable[[int], None] | None = None,
) -> LogReport:
    """Read all sources and judge them together.

    A file that cannot be read is named in ``unreadable`` and does not lose the
    others. Raises LogError when none can be read.
    """
    logs: list[Log] = []
    unreadable: list[str] = []
    for number, source in enumerate(paths):
        name = str(source) if isinstance(source, Path) else "standard input"
        try:
            if isinstance(source, Path):
                with source.open("rb") as stream:
                    logs.append(read(stream, name, number, catalogue, progress))
            else:
                logs.append(read(source, name, number, catalogue, progress))
        except LogError as error:
            unreadable.append(str(error))
        except OSError as error:
            unreadable.append(f"{name}: {(error.strerror or str(error)).lower()}")
    if not logs:
        raise LogError("\n".join(unreadable))
    report = judge(logs, catalogue)
    return LogReport(**{**report.__dict__, "unreadable": tuple(unreadable)})
