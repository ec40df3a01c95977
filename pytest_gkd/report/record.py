"""What a run found: one record, which terminal, JUnit and report.json all render."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_gkd import sanitize
from pytest_gkd.clock import monotonic
from pytest_gkd.language import marked

if TYPE_CHECKING:
    from pytest_gkd.diagnosis.diagnose import Diagnosis
    from pytest_gkd.diagnosis.evidence import EvidenceLine

REPORT = "report.json"  # its name in the directory of a run's report
PAGE = "report.html"  # made of it
# It begins so, within PAGE_HEAD bytes: other tools write files of that name, too.
PAGE_SIGN = b'<meta name="generator" content="pytest-gkd">'
PAGE_HEAD = 500
DIRECTORY = ".gkd/last"  # that directory, unless --gkd-report names another
# Earlier reports, and those of runs that start while another one holds the directory.
RUNS = "runs"
HISTORY = "history.jsonl"  # what remains of all runs; beside RUNS
SCHEMA = 1
# How much of a stage's output is kept, from its end.
OUTPUT_BYTES = 4 * 1024 * 1024
# How many different problems with a run are reported, and how much of each.
PROBLEMS = 20
PROBLEM_LENGTH = 500

# Translated when they are shown.
PASSED = marked("passed")
FAILED = marked("failed")
TIMEOUT = marked("timeout")
BLOCKED = marked("blocked")
SKIPPED = marked("skipped")
OUTCOMES = (PASSED, FAILED, TIMEOUT, BLOCKED, SKIPPED)


@dataclass
class StageRecord:
    """One stage as it stands now. Seconds throughout; ``outcome`` None while open.

    ``step`` is what the stage was doing last. ``message`` says in one line what went
    wrong. ``telling`` holds the lines to read if there is no ``diagnosis``.
    ``also`` holds further findings, one line each. ``stuck`` says for each process
    where its stack was, ``state`` in one line whether it still made progress, and the
    evidence; ``progress`` has the numbers (see stall.Progress). ``injected`` names the
    fault that was deliberately injected.
    """

    name: str
    nodeid: str
    lane: str
    budget_s: float
    outcome: str | None = None
    duration_s: float | None = None
    step: str = ""
    message: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    diagnosis: Diagnosis | None = None
    telling: list[EvidenceLine] = field(default_factory=list)
    also: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    state: str = ""
    progress: dict[str, Any] | None = None
    stacks: list[str] = field(default_factory=list)
    output: list[str] = field(default_factory=list)
    blocked_by: list[str] = field(default_factory=list)
    cleaned: list[str] = field(default_factory=list)
    started: float | None = None  # time.monotonic(), which all processes share
    ended_with: str | None = None  # as its process said, before its report arrived
    raised: str = ""  # likewise, and before it was rendered as text
    broken: str = ""  # likewise: why its process cannot go on
    extra_s: dict[str, float] = field(default_factory=dict)  # on top of its budget
    triggered: float | None = None  # like started: an injected fault took effect
    verdict_after_s: float | None = None  # from then until the outcome was known
    injected: str = ""

    @property
    def ran(self) -> bool:
        """Whether it started; one that failed did, even if no event says so."""
        return self.started is not None or self.outcome in (FAILED, TIMEOUT)

    def to_json(self, began: float = 0.0) -> dict[str, Any]:
        """The stage's part of report.json; ``began`` is when the run did, like
        ``started``."""
        since = None if self.started is None else max(0.0, self.started - began)
        return {
            "name": self.name,
            "nodeid": self.nodeid,
            "lane": self.lane,
            "outcome": self.outcome or SKIPPED,
            "ran": self.ran,
            "started_s": _rounded(since),
            "duration_s": _rounded(self.duration_s),
            "budget_s": self.budget_s,
            "step": self.step,
            "message": self.message,
            "facts": self.facts,
            "diagnosis": self.diagnosis and self.diagnosis.to_json(),
            "telling": [line._asdict() for line in self.telling],
            "also": self.also,
            "stuck": self.stuck,
            "progress": self.progress,
            "stacks": self.stacks,
            "output": self.output,
            "blocked_by": self.blocked_by,
            "cleaned": self.cleaned,
            "injected": self.injected or None,
            "verdict_after_s": _rounded(self.verdict_after_s),
        }


@dataclass
class RunRecord:
    """A whole run. ``started`` is ISO 8601; ``ended`` stays None until it ended.

    ``memory`` are samples of the memory in use (see ``processes.memory_samples``),
    ``machine`` is what kind of machine it is, ``commit`` the one that git has checked
    out there. ``began`` is the start on the clock of the stages' ``started``.
    """

    started: str
    versions: dict[str, str]
    settings: dict[str, Any]
    stages: list[StageRecord] = field(default_factory=list)
    ended: str | None = None
    interrupted: str | None = None
    notes: list[str] = field(default_factory=list)
    cleaned: list[str] = field(default_factory=list)
    injected: dict[str, str] | None = None
    machine: dict[str, Any] = field(default_factory=dict)
    commit: str | None = None
    memory: list[dict[str, Any]] = field(default_factory=list)
    began: float = field(default_factory=monotonic)
    _problems: list[str] = field(default_factory=list)
    _others: int = 0
    _last: str = ""

    def problem(self, text: str) -> bool:
        """Note a problem with the run itself, once; returns whether it is new.

        There may be ever new ones: the first 20 are reported, 500 characters of each;
        of the rest, their number and the last one.
        """
        if len(text) > PROBLEM_LENGTH:
            text = f"{text[:PROBLEM_LENGTH]}..."
        if text in self._problems or text == self._last:
            return False
        if len(self._problems) < PROBLEMS:
            self._problems.append(text)
            self.notes.append(text)
            return True
        if self._others:
            self.notes.remove(self._rest())
        self._others, self._last = self._others + 1, text
        self.notes.append(self._rest())
        return True

    def _rest(self) -> str:
        return f"and {self._others} more problems, the last: {self._last}"

    def stage(self, name: str) -> StageRecord | None:
        """The record of a stage."""
        return next((stage for stage in self.stages if stage.name == name), None)

    def to_json(self) -> dict[str, Any]:
        """report.json, schema 1, with sanitized texts (see sanitize)."""
        found: dict[str, Any] = {
            "schema": SCHEMA,
            "started": self.started,
            "ended": self.ended,
            "interrupted": self.interrupted,
            "commit": self.commit,
            "machine": self.machine,
            "versions": self.versions,
            "settings": self.settings,
            "injected": self.injected,
            "notes": self.notes,
            "cleaned": self.cleaned,
            "memory": self.memory,
            "stages": [stage.to_json(self.began) for stage in self.stages],
        }
        return sanitize.data(found)  # type: ignore[no-any-return]


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
