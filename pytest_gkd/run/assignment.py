"""What the processes of a run are given, ready-made, before pytest is configured."""

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

# A worker starts as python -c, which would take its very first imports from the working
# directory (docs.python.org, using/cmdline, PYTHONSAFEPATH).
SAFE_PATH = "PYTHONSAFEPATH"


@dataclass(frozen=True)
class Assignment:
    """What a ``worker`` process (pytest-xdist's name for it) works on, and with.

    ``manifest_path`` is the list of what the run has created. ``events`` are the files
    that it writes, ``verdicts`` and ``pulse`` those that it reads; without a
    guardian there is no pulse. ``safe_path`` is SAFE_PATH as the user has it.
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
    """What is there before pytest is configured: directories, and so many ``workers``
    to start (0: stages run in this process). ``notes`` are for the header, ``rules``
    files of users' own."""

    directory: RunDir
    report: ReportDir
    workers: int
    notes: tuple[str, ...]
    rules: tuple[Path, ...]


class Link(NamedTuple):
    """How the one who runs stages and the one who judges them speak to each other.

    ``verdict`` gives another stage's outcome, None while open; ``stood_still_s`` for
    how many seconds all of the run has stood still so far.
    """

    emit: Callable[[Event], None]
    verdict: Callable[[str], str | None]
    stood_still_s: Callable[[], float] = lambda: 0.0
