"""The verdict as a file that others read while a job is watched, and after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_gkd import sanitize
from pytest_gkd.clock import monotonic
from pytest_gkd.files import json_object, make_way, write_json
from pytest_gkd.watch.samples import Progress, Verdict
from pytest_gkd.watch.stuck_report import Report

NAME = "verdict.json"


def write(
    directory: Path,
    verdict: Verdict,
    progress: Progress,
    began: float,
    *,
    log: Path | None,
    report: Report | None,
    phases_s: Mapping[str, float],
    ended_for: str,
    exit_status: int | None,
    causes: Sequence[Mapping[str, Any]],
    telling: Sequence[str],
) -> str:
    """Write it to ``directory``; returns why it cannot be written, else nothing.

    ``began`` is when the watch began (``clock.monotonic()``), ``report`` the last one
    made, ``phases_s`` the longest time in each phase that is over, ``ended_for`` the
    option for which the command was ended, ``exit_status`` that of the watch, None
    while it goes on, ``causes`` what ``gkd diagnose`` says of a command that died, and
    ``telling`` the most telling lines if it knows no cause.
    """
    if report is not None and report.verdict.word == verdict.word:
        verdict = report.verdict  # which knows who, too
    told = {
        "schema": 1,
        "verdict": verdict.word,
        "confidence": verdict.confidence,
        "since_s": round(verdict.since_s, 1),
        "phase": verdict.phase or progress.phase,
        "who": verdict.who,
        "why": list(verdict.why),
        "watched_s": round(monotonic() - began, 1),
        "step": progress.step,
        "first_step_s": round(progress.trained_at - began, 1)
        if progress.trained
        else None,
        "phases_s": {name: round(spent, 1) for name, spent in phases_s.items()},
        "last_line": progress.last_line,
        "log": str(log or ""),
        "report": str(report.directory or "") if report else "",
        "standstill": report.to_json() if report else None,
        "causes": list(causes),
        "telling": list(telling),
        "ended_for": ended_for,
        "exit_status": exit_status,
    }
    try:
        make_way(directory / NAME)
        write_json(directory / NAME, sanitize.data(told))
    except OSError as error:
        return f"{directory / NAME}: {error.strerror}; the verdict is not kept"
    return ""


def read(directory: Path) -> dict[str, Any]:
    """The verdict kept there; empty before there is one."""
    try:
        return json_object((directory / NAME).read_bytes())
    except OSError:
        return {}
