"""Decides a stage's outcome: from its report, or from the loss of its worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pytest_gkd.report import render
from pytest_gkd.report.record import BLOCKED, FAILED, PASSED, TIMEOUT, StageRecord
from pytest_gkd.run.watchdog import Overrun
from pytest_gkd.stage_api import StageFault
from pytest_gkd.stage_events import StageResult


@dataclass(frozen=True)
class Loss:
    """How a worker running a stage was lost: by an ``overrun``, or how it ``died``.

    ``by_guardian`` says that the guardian ended it because pytest made no progress.
    """

    overrun: Overrun | None = None
    died: str = ""
    by_guardian: bool = False


@dataclass(frozen=True)
class Outcome:
    """What goes into a stage's record; see StageRecord.

    ``closing``: it had its verdict, but did not close afterwards. ``crashed``: its
    process ended without anybody ending it.
    """

    outcome: str
    message: str
    duration_s: float
    changes: Mapping[str, Any] = field(default_factory=dict)
    closing: bool = False
    crashed: bool = False

    def write(self, record: StageRecord) -> None:
        """Write it into the stage's record."""
        record.outcome, record.message = self.outcome, self.message
        record.duration_s = self.duration_s
        for name, value in self.changes.items():
            setattr(record, name, value)


def found(result: StageResult) -> StageFault | None:
    """The fault that the stage itself found, if any."""
    return None if result.fault is None else StageFault.from_json(result.fault)


def of_report(
    record: StageRecord,
    result: StageResult,
    *,
    failed: bool = False,
    skipped: str = "",
    xfail: str | None = None,
) -> Outcome:
    """The outcome of a stage whose worker reports it.

    ``failed`` is pytest's verdict; ``skipped`` and ``xfail`` are its reasons, if any.
    """
    duration_s = record.duration_s
    if duration_s is None:
        duration_s = result.duration_s
    timed = replace(record, duration_s=duration_s)
    outcome, message = _by_its_budget(timed, result.outcome), skipped or record.message
    changes: dict[str, Any] = {"blocked_by": list(result.blocked_by)}
    if xfail is not None:
        how = "passed, though it was" if result.outcome == PASSED else "was"
        message = f"{how} expected to fail (xfail): {xfail}"
    elif outcome == BLOCKED:
        message = f"blocked by {', '.join(result.blocked_by)}"
    if failed:
        message = render.ending(replace(record, outcome=outcome))
    if failed and outcome == TIMEOUT:
        changes["cleaned"] = list(result.ended)
    elif failed:
        fault = found(result)
        message, *_ = result.error.strip().splitlines() or [message]
        also = fault.also if fault else ()
        changes["also"] = [one.with_cause().partition("\n")[0] for one in also]
    return Outcome(outcome, message, duration_s, changes)


def _by_its_budget(record: StageRecord, said: str) -> str:
    """What the stage's process said, checked against the budget: its clock may err."""
    if said not in (FAILED, TIMEOUT) or record.duration_s is None:
        return said
    late_s = record.duration_s - _in_time_s(record)
    if abs(late_s) < 1:
        return said
    return TIMEOUT if late_s > 0 else FAILED


def _in_time_s(record: StageRecord) -> float:
    return record.budget_s + sum(record.extra_s.values())


def of_loss(record: StageRecord, loss: Loss, now: float) -> Outcome:
    """The outcome of a stage whose worker was lost; ``now`` as clock.monotonic()."""
    overrun = loss.overrun
    # If it already had a verdict, what did not end is what the stage left open.
    closing = record.outcome is not None or record.ended_with == PASSED
    raised = bool(record.raised) and not closing
    message = _closing_message(record, loss) if closing else loss.died
    if raised:
        message = _raised_message(record.raised, loss)
    duration_s = record.duration_s
    if duration_s is None or not raised:
        duration_s = now - (record.started or now)
    if overrun is None:
        outcome = TIMEOUT if loss.by_guardian else FAILED
        crashed = not loss.by_guardian or closing
        return Outcome(outcome, message, duration_s, closing=closing, crashed=crashed)
    is_late = not raised or duration_s >= _in_time_s(record)
    outcome = TIMEOUT if is_late else FAILED
    changes: dict[str, Any] = {"cleaned": list(overrun.ended)}
    state = record.state
    if overrun.progress is not None:
        changes["progress"] = overrun.progress.to_json()
        state = overrun.progress.text()
    if overrun.early:
        message = render.early_ending(record)
        state += "; pass --gkd-full-budget to use the whole budget"
    changes["state"] = state
    message = message or render.ending(replace(record, outcome=outcome))
    return Outcome(outcome, message, duration_s, changes, closing, crashed=closing)


def _closing_message(record: StageRecord, loss: Loss) -> str:
    """The message for a stage that had its verdict when its process ended."""
    failed = record.outcome in (FAILED, TIMEOUT)
    verdict = record.message if failed and record.message else "it passed"
    if loss.overrun is None:
        return f"{verdict}, then while it closed {loss.died}"
    limit = render.budget(loss.overrun.limit_s)
    return f"{verdict}, then did not close within {limit}"


def _raised_message(raised: str, loss: Loss) -> str:
    """The message for a stage whose process ended before it could report its error."""
    if loss.overrun is None:
        return f"{raised}; while its traceback was made {loss.died}"
    limit = render.budget(loss.overrun.limit_s)
    return f"{raised}; making its traceback took over {limit} (a slow __repr__?)"
