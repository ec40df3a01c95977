"""The API for stages: the ``gkd`` fixture, and how a stage itself names a cause."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_gkd.clock import monotonic
from pytest_gkd.options import Settings
from pytest_gkd.stage_events import Event, Extra, Fact, Step, Triggered

# The most seconds a stage may get on top of its budget: for slow imports, as from a
# slow disk or a cold cache, and for train files, by their size.
EXTRA_LIMIT_S = {"imports": 300.0, "data": 600.0}
# What a stage reserves of its budget for ending what does not return and for reporting
# why: on a slow machine, which has larger budgets, both take longer.
TELL_S = 1.0
TELL_SHARE = 0.1
STEP_LENGTH = 500
FACT_BYTES = 64 * 1024
# Far below Python's recursion limit (1000), which applies when a report is copied.
FACT_LEVELS = 100
FACTS_BYTES = 1024 * 1024

# The directory for output that belongs to no stage.
NO_STAGE = "session"

Emit = Callable[[Event], None]
# Lines of evidence: the source of each, its line number there if any, and its text.
Evidence = tuple[tuple[str, int | None, str], ...]


@dataclass(frozen=True)
class Note:
    """Something the user should know that does not stop the job by itself."""

    id: str
    text: str


UNKNOWN = "unknown"


class StageFault(Exception):  # noqa: N818 - a finding, not a bug of ours
    """A stage found the cause itself and names it.

    ``cause`` is an id in the catalogue (``data.file-missing``), None if the stage does
    not know it, or ``UNKNOWN`` if the stage knows that the catalogue does not.
    ``message`` is one sentence that names the value, where it came from, and what was
    expected; it does not repeat the advice, which is in the catalogue. ``facts`` are
    values that the advice may use, such as ``{"column": "prompt", "columns":
    ["text"]}``; they must be JSON. ``evidence`` is the lines that prove it, each
    ``(source, line number or None, text)``. ``also`` are less fundamental faults found
    along with it.
    """

    def __init__(
        self,
        cause: str | None,
        message: str,
        facts: Mapping[str, Any] | None = None,
        evidence: Evidence = (),
        also: Iterable[StageFault] = (),
    ) -> None:
        super().__init__(message)
        self.cause = cause
        self.message = message
        self.facts = dict(facts or {})
        self.evidence = evidence
        self.also = tuple(also)

    def __str__(self) -> str:
        others = "".join(f"\n{one.with_cause()}" for one in self.also)
        return self.message + (others and f"\nAlso found ({len(self.also)}):{others}")

    def __reduce__(self) -> tuple[type[StageFault], tuple[Any, ...]]:
        own = (self.cause, self.message, self.facts, self.evidence, self.also)
        return StageFault, own

    def with_cause(self) -> str:
        """Its cause and message, as shown under another fault's ``also``."""
        return f"[{self.cause or 'unknown'}] {self.message}"

    def to_json(self) -> dict[str, Any]:
        """JSON from which ``from_json`` rebuilds it in another process."""
        return {
            "cause": self.cause,
            "message": self.message,
            "facts": self.facts,
            "evidence": [list(line) for line in self.evidence],
            "also": [one.to_json() for one in self.also],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StageFault:
        """The inverse of ``to_json``."""
        evidence = tuple(
            (source, line, text) for source, line, text in data["evidence"]
        )
        also = map(cls.from_json, data["also"])
        return cls(data["cause"], data["message"], data["facts"], evidence, also)


@dataclass
class StageContext:
    """The running stage's settings, directories and reporting.

    One object per worker process; ``stage`` changes as stages start. ``run_dir`` is
    private to the run, short (UNIX sockets fit), and removed at its end; ``report_dir``
    is kept; ``restore`` ensures that it exists and is ours. ``step`` and ``fact`` may
    be called from any fixture.
    """

    settings: Settings
    run_dir: Path
    report_dir: Path
    stage: str = ""
    emit: Emit | None = None
    restore: Callable[[Path], None] | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    doing: str = ""
    extra_s: dict[str, float] = field(default_factory=dict)
    _deadline: float | None = None
    _reserve_s: float = TELL_S
    _said_bytes: int = 0
    _held: dict[str, Any] = field(default_factory=dict)
    _last: str = ""

    def begin(self, stage: str, budget_s: float | None) -> None:
        """Start a stage: clear the previous one's facts, set the deadline (seconds)."""
        self.stage = stage
        self.facts = {}
        self.doing = ""
        self.extra_s = {}
        self._said_bytes, self._held, self._last = 0, {}, ""
        self._deadline = None if budget_s is None else monotonic() + budget_s
        self._reserve_s = max(TELL_S, TELL_SHARE * (budget_s or 0.0))

    def step(self, text: str) -> None:
        """Report what the stage is doing, as in ``loading weights``.

        It is shown live, and after "while" if the stage fails there.

        Only the first 500 characters count, and only the latest step; call it as often
        as you like.
        """
        text = str(text)
        self.doing = text if len(text) <= STEP_LENGTH else f"{text[:STEP_LENGTH]}..."
        self._send(Step(self.stage, self.doing))

    def fact(self, name: str, value: Any) -> None:
        """Record one finding; ``value`` must be JSON, with its unit in ``name``.

        ``summary``, a text, is shown on the stage's line in the terminal; ``notes``, a
        list of ``{"id": ..., "text": ...}``, is shown at the end. A fact may have up to
        64 KiB (2**16 bytes) of JSON; in the report, a larger one is replaced by a text
        giving its size, and one with more than 100 levels of lists and dictionaries by
        a text saying so. After 1 MiB (2**20 bytes) per stage, counting every update of
        the same name, further facts are reported when the stage ends, up to another
        MiB; the fact ``facts_limit`` then says so.
        """
        self.facts[name] = value
        if _is_deeper(value, FACT_LEVELS):
            value = f"left out: nested too deep; a fact may have {FACT_LEVELS} levels"
        size = len(json.dumps(value, default=str))
        if size > FACT_BYTES:
            value = f"left out: {size} bytes; a fact may have {FACT_BYTES}"
        if self._said_bytes > FACTS_BYTES:
            if not self._held:
                self._say("facts_limit", f"those after {self._last!r} came at the end")
            self._held[name] = value
        else:
            self._last = name
            self._say(name, value)

    def release(self) -> None:
        """At the end of the stage, record the facts held back, up to the limit."""
        self._said_bytes = 0
        while self._held and self._said_bytes <= FACTS_BYTES:
            self._say(*self._held.popitem())
        if self._held:
            self._say("facts_limit", f"{len(self._held)} facts were left out")

    def _say(self, name: str, value: Any) -> None:
        event = Fact(self.stage, name, value)
        self._said_bytes += len(json.dumps(vars(event), default=str))
        self._send(event)

    def note(self, name: str, text: str) -> None:
        """Report what does not stop a job by itself; ``name`` is the note's id."""
        noted = self.facts.get("notes", [])
        self.fact("notes", [*noted, {"id": name, "text": text}])

    def allow(self, what: str, seconds: float) -> None:
        """Grant ``seconds`` in total for ``what`` on top of the budget.

        ``what`` is ``imports`` or ``data``; EXTRA_LIMIT_S has the limit for each.
        """
        seconds = min(seconds, EXTRA_LIMIT_S[what])
        more_s = seconds - self.extra_s.get(what, 0.0)
        if more_s <= 0:
            return
        self.extra_s[what] = seconds
        if self._deadline is not None:
            self._deadline += more_s
        self._send(Extra(self.stage, what, seconds))

    def extra(self) -> float:
        """Seconds granted on top of the stage's budget so far."""
        return sum(self.extra_s.values())

    def triggered(self, at: float | None = None) -> None:
        """Report that an injected fault took effect (see --gkd-inject).

        ``at`` is in seconds of ``time.monotonic()``; None means now.
        """
        self._send(Triggered(self.stage, monotonic() if at is None else at))

    def remaining_s(self, default: float = 60.0) -> float:
        """Seconds left in the stage's budget, at least 1; ``default`` without one."""
        if self._deadline is None:
            return default
        return max(1.0, self._deadline - monotonic())

    def working_s(self, share: float = 1.0) -> float:
        """Seconds left for work that must end before the stage does, so that it can
        still report why: ``remaining_s`` less a reserve.

        The reserve is ``share`` (0 to 1) of a tenth of the budget, taken as at least
        1 s; it is at most half of what is left.
        """
        left_s = self.remaining_s()
        return left_s - min(share * self._reserve_s, left_s / 2)

    @property
    def output_dir(self) -> Path:
        """Kept with the report: write the output of processes that you start here."""
        if self.restore is not None:
            self.restore(self.report_dir)  # a stage may have removed it
        path = self.report_dir / "output" / (self.stage or NO_STAGE)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def _send(self, event: Event) -> None:
        if self.emit is not None:
            self.emit(event)


def _is_deeper(value: Any, levels: int) -> bool:
    if isinstance(value, dict):
        parts: Iterable[Any] = value.values()
    elif isinstance(value, (list, tuple)):
        parts = value
    else:
        return False
    return not levels or any(_is_deeper(part, levels - 1) for part in parts)
