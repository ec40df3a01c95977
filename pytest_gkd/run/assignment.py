"""What the processes of a run are handed before pytest is configured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pytest_gkd.run.events import EventPaths
from pytest_gkd.run.report_directory import ReportDir
from pytest_gkd.run.run_directory import RunDir
from pytest_gkd.run.selection import Request
from pytest_gkd.stage_events import Event

# A worker starts as python -c, whose very first imports would otherwise come from the
# working directory (docs.python.org, using/cmdline, PYTHONSAFEPATH).
SAFE_PATH = "PYTHONSAFEPATH"


@dataclass(frozen=True)
class Assignment:
    """What a worker process gets; ``worker`` is pytest-xdist's name for it.

    ``manifest_path`` is the list of what the run has created. ``events`` are the files
    that it writes, ``verdicts`` and ``pulse`` those that it reads; without a guardian
    there is no pulse. ``safe_path`` is the user's own value of SAFE_PATH.
    """

    worker: str
    request: Request
    run_dir: Path
    report_dir: Path
    manifest_path: Path
    events: EventPaths
    verdicts: Path
    pulse: Path | None
    safe_path: str | None


@dataclass(frozen=True)
class Preparation:
    """What exists before pytest is configured: directories, and the number of
    ``workers`` to start (0: stages run in this process). ``notes`` are for the header,
    ``rules`` are the user's own rule files, ``gpus`` the product names of those in
    use."""

    directory: RunDir
    report: ReportDir
    workers: int
    notes: tuple[str, ...]
    rules: tuple[Path, ...]
    gpus: tuple[str, ...] = ()


class Link(NamedTuple):
    """How whoever runs stages communicates with whoever judges them.

    ``verdict`` returns another stage's outcome, None while open; ``stood_still_s`` for
    how many seconds the whole run has been suspended so far.
    """

    emit: Callable[[Event], None]
    verdict: Callable[[str], str | None]
    stood_still_s: Callable[[], float] = lambda: 0.0
