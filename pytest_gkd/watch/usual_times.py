"""What a job usually takes, learnt from its earlier runs and kept in the cache."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytest_gkd.files import cache_directory, write_json
from pytest_gkd.watch.samples import Usual

RUNS = 5
FILES = 200
SCHEMA = 1
# What differs from run to run: times, ports, process ids, hashes, temporary names.
_VOLATILE = re.compile(
    r"\d{4,}|\b[0-9a-f]{8,}\b|(?<=/tmp/)[^/ ]+|\d{1,2}[:_-]\d{2}[:_-]\d{2}"
)


def key(command: Sequence[str], place: str) -> str:
    """The name of a job: its command without what is volatile, and its directory."""
    told = "\0".join([place, *(_VOLATILE.sub("#", word) for word in command)])
    return hashlib.sha256(told.encode("utf-8", "surrogateescape")).hexdigest()[:24]


def _directory() -> Path | None:
    place = cache_directory()
    return place / "watch" if place is not None else None


def load(name: str) -> Usual:
    """What earlier runs of a job took; nothing where none is known."""
    return _usual(_runs(name))


def _runs(name: str) -> list[dict[str, Any]]:
    place = _directory()
    if place is None:
        return []
    try:
        data = json.loads((place / f"{name}.json").read_text("utf-8"))
        runs = data["runs"] if data["schema"] == SCHEMA else []
        return [one for one in runs if isinstance(one, dict)]
    except (OSError, ValueError, KeyError, TypeError):
        return []  # none yet, or damaged: it is learnt anew


def _usual(runs: list[dict[str, Any]]) -> Usual:
    steps = [one["step_s"] for one in runs if _is_time(one.get("step_s"))]
    return Usual(
        len(runs),
        _medians(runs, "phases"),
        _medians(runs, "silences"),
        statistics.median(steps) if steps else None,
    )


def _medians(runs: list[dict[str, Any]], kind: str) -> dict[str, float]:
    told: dict[str, list[float]] = {}
    for one in runs:
        of_run = one.get(kind)
        for phase, seconds in of_run.items() if isinstance(of_run, dict) else ():
            if _is_time(seconds):
                told.setdefault(phase, []).append(seconds)
    return {phase: statistics.median(times) for phase, times in told.items()}


def _is_time(value: Any) -> bool:
    return isinstance(value, (int, float)) and 0 <= value < 1e8


def learn(
    name: str,
    phases: dict[str, float],
    silences: dict[str, float],
    step_s: float | None,
) -> None:
    """Remember a run; what cannot be written is not remembered."""
    place = _directory()
    if place is None:
        return
    run = {"phases": phases, "silences": silences, "step_s": step_s}
    with contextlib.suppress(OSError):
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        runs = [*_runs(name), run][-RUNS:]
        path = Path(os.path.realpath(place)) / f"{name}.json"
        write_json(path, {"schema": SCHEMA, "runs": runs})
        _forget_oldest(place)


def _forget_oldest(place: Path) -> None:
    every = sorted(place.glob("*.json"), key=lambda path: path.stat().st_mtime)
    for path in every[:-FILES]:
        path.unlink(missing_ok=True)
