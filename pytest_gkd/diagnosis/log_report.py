"""What ``gkd diagnose`` reports about the logs of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pytest_gkd.diagnosis import standing
from pytest_gkd.diagnosis.diagnose import Diagnosis
from pytest_gkd.diagnosis.engine_start import EngineStart
from pytest_gkd.diagnosis.evidence import EvidenceLine
from pytest_gkd.diagnosis.metrics.judging import NumberFinding
from pytest_gkd.diagnosis.metrics.series import Series
from pytest_gkd.diagnosis.silence import Silence
from pytest_gkd.diagnosis.suspects import Suspicion
from pytest_gkd.diagnosis.usual_next import UsualNext

NO_SUSPICION = Suspicion(sign="", last_sign="")


@dataclass(frozen=True)
class Progress:
    """The last step in a log, the planned number of steps, and seconds per step.

    ``until`` is the time of its last line, as the log writes it.
    """

    step: int | None
    total: int | None
    pace_s: float | None
    until: str

    @property
    def facts(self) -> dict[str, int]:
        """The known ones among ``step`` and ``steps``, the total."""
        known = {"step": self.step, "steps": self.total}
        return {name: value for name, value in known.items() if value is not None}


@dataclass(frozen=True)
class LogReport:
    """The verdict over all files.

    ``verdict`` is ``failed``, ``hung``, ``healthy`` (it ended well), ``running`` (the
    log ends while the run works), ``interrupted`` (a healthy run was ended from
    outside, by ``ended_by``) or ``unknown``; ``phase`` is one of ``log_phases.PHASES``.
    ``silence`` is where a run that hangs, or one at work, fell silent, ``last`` the
    last sign of life, ``expected`` what usually follows it, ``progress`` how far the
    run had got. ``survived`` are causes after which the run went on, each with the
    first line that shows it. ``suspicion`` is what to look at if a run hangs, or if one
    at work should. ``telling`` are the lines to read if nothing is known, ``nearest``
    guesses: the causes that the first error or these lines resemble most. ``series``
    are the metrics that were judged, ``proofs`` what they show that proves a cause,
    ``notes`` what is worth a look and proves nothing, each with its file.
    ``processes`` are those of a run of
    several, the first to fall silent first. ``joined`` are the files that were read as
    one log, oldest first. ``sampled`` are files whose lines of metrics were not all
    read, with how many were, and about how many there are. ``engine_start`` is where a
    vLLM engine's start went.
    ``unreadable`` are the files that were left out, and ``partial`` names those of
    which only a part was read.
    """

    verdict: str
    phase: str
    causes: tuple[Diagnosis, ...] = ()
    last: EvidenceLine | None = None
    expected: UsualNext | None = None
    waits_for: str = ""
    ended_by: str = ""
    silence: Silence | None = None
    telling: tuple[EvidenceLine, ...] = ()
    progress: Progress | None = None
    survived: tuple[tuple[str, EvidenceLine], ...] = ()
    suspicion: Suspicion | None = None
    nearest: tuple[str, ...] = ()
    series: tuple[Series, ...] = ()
    processes: tuple[standing.Process, ...] = ()
    proofs: tuple[tuple[str, NumberFinding], ...] = ()
    notes: tuple[tuple[str, NumberFinding], ...] = ()
    joined: tuple[tuple[str, ...], ...] = ()
    sampled: tuple[tuple[str, int, int], ...] = ()
    engine_start: EngineStart | None = None
    unreadable: tuple[str, ...] = ()
    partial: tuple[str, ...] = ()

    @property
    def fell_silent(self) -> str:
        """Which process fell silent first; empty if none did."""
        return standing.sentence(self.processes)

    def to_json(self) -> dict[str, Any]:
        """The report as ``gkd diagnose --format json`` prints it."""
        return {
            "schema": 1,
            "verdict": self.verdict,
            "phase": self.phase,
            "waits_for": self.waits_for,
            "ended_by": self.ended_by,
            "silence": self.silence and vars(self.silence),
            "progress": self.progress and vars(self.progress),
            "last": self.last and _line_json(self.last),
            "expected": self.expected and self.expected.to_json(),
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
            **(self.suspicion or NO_SUSPICION).to_json(),
            "processes": [one.to_json() for one in self.processes],
            "survived": [
                {"cause": cause, **_line_json(line)} for cause, line in self.survived
            ],
            "telling": [_line_json(line) for line in self.telling],
            "nearest": list(self.nearest),
            "notes": [
                {
                    "cause": one.cause,
                    "metric": one.metric,
                    "step": one.step,
                    "file": name,
                    "line": one.line,
                    "text": one.text,
                }
                for name, one in self.notes
            ],
            "series": [one.to_json() for one in self.series],
            "joined": [list(names) for names in self.joined],
            "sampled": [
                {"file": name, "read": read, "of_about": every}
                for name, read, every in self.sampled
            ],
            "engine_start": self.engine_start and vars(self.engine_start),
            "unreadable": list(self.unreadable),
            "partial": list(self.partial),
        }


def _line_json(line: EvidenceLine) -> dict[str, Any]:
    return {"file": line.source, "line": line.line, "text": line.text}
