"""What a running stage may say and ask: the ``gkd`` fixture."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_gkd.settings import Settings

Emit = Callable[[dict[str, Any]], None]


@dataclass
class StageContext:
    """The running stage's settings, directories and voice.

    One object per worker process; ``stage`` changes as stages start. ``run_dir`` is
    private to the run, short (UNIX sockets fit), and removed at its end;
    ``report_dir`` stays. ``step`` and ``fact`` may be called from any fixture.
    """

    settings: Settings
    run_dir: Path
    report_dir: Path
    stage: str = ""
    emit: Emit | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    doing: str = ""
    _deadline: float | None = None

    def begin(self, stage: str, budget_s: float | None) -> None:
        """A stage starts: forget the last one's facts, set its deadline (seconds)."""
        self.stage = stage
        self.facts = {}
        self.doing = ""
        self._deadline = None if budget_s is None else time.monotonic() + budget_s

    def step(self, text: str) -> None:
        """Say what the stage does now: shown live, and named when it hangs there."""
        self.doing = text
        self._send({"event": "step", "stage": self.stage, "text": text})

    def fact(self, name: str, value: Any) -> None:
        """Record one finding; ``value`` must be JSON, with its unit in ``name``.

        ``summary``, a text, stands on the stage's line in the terminal; ``notes``, a
        list of ``{"id": ..., "text": ...}``, is shown at the end.
        """
        self.facts[name] = value
        self._send({"event": "fact", "stage": self.stage, "name": name, "value": value})

    def struck(self, at: float | None = None) -> None:
        """Say that an injected fault took effect (see --gkd-inject).

        ``at`` is in seconds of ``time.monotonic()``; None is now.
        """
        at = time.monotonic() if at is None else at
        self._send({"event": "struck", "stage": self.stage, "at": at})

    def remaining_s(self, default: float = 60.0) -> float:
        """Seconds left of the stage's budget, at least 1; ``default`` without one."""
        if self._deadline is None:
            return default
        return max(1.0, self._deadline - time.monotonic())

    @property
    def output_dir(self) -> Path:
        """Kept with the report: put the output of processes that you start here."""
        path = self.report_dir / "output" / (self.stage or "session")
        path.mkdir(parents=True, exist_ok=True)
        return path

    def _send(self, event: dict[str, Any]) -> None:
        if self.emit is not None:
            self.emit(event)
