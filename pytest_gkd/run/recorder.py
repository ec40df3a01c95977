"""Records events of stages in the record that all reports are generated from."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from pytest_gkd import stage_events as events
from pytest_gkd.processes import oom
from pytest_gkd.report.record import RunRecord, StageRecord
from pytest_gkd.stage_plan import PlannedStage


class Recorder:
    """Keeps the ``record`` of a run; ``lock`` is held while it is changed or read.

    ``plan`` is what the workers agree on, ``problem`` why there can be none.
    ``changed`` is called after each change. ``kills_before`` holds, by stage, the
    kernel's count of out-of-memory kills when it began; under "", when the run began.
    """

    def __init__(self, record: RunRecord) -> None:
        self.record = record
        self.lock = threading.RLock()
        self.changed: Callable[[], None] = lambda: None
        self.plan: tuple[PlannedStage, ...] = ()
        self.problem: str | None = None
        self.kills_before: dict[str, oom.Count] = {}
        self._survivors: set[str] = set()

    def on_event(self, event: events.Event) -> None:
        """Take in one event of a worker; the lock is held."""
        if isinstance(event, events.Collected):
            self._collected(event)
            return
        if not isinstance(event, events.StageEvent):
            return
        record = self.record.stage(event.stage)
        if record is None:
            return
        match event:
            case events.Left():
                self.note_left(record, event.processes, event.memory)
            case events.Broken():
                record.broken = event.text
            case events.Forked():
                self.note(
                    f"{record.name}: a process that it forked returned from the "
                    "stage's code instead of calling os._exit(), and was ended there"
                )
            case _ if record.outcome is not None:
                return
            case events.Start():
                record.started = event.t
                self.kills_before[record.name] = oom.Count.now()
            case events.Step():
                record.step = event.text
            case events.Triggered():
                record.triggered = record.triggered or event.at
                record.injected = (self.record.injected or {}).get("fault", "")
            case events.Raised():
                record.raised = record.raised or event.text
                _ended(record, event.t)
            case events.Finish():
                record.ended_with = event.outcome
                _ended(record, event.t)
            case events.Fact():
                record.facts[event.name] = event.value
            case events.Extra():
                extend(record, event.what, event.s)
        self.changed()

    def _collected(self, event: events.Collected) -> None:
        if event.error:
            self.problem = event.error
        if self.plan or event.error:
            return
        self.plan = event.plan
        self.record.stages = [
            StageRecord(s.name, s.nodeid, s.lane, s.budget_s) for s in self.plan
        ]
        if event.deselected:
            self.record.notes.append(
                "not run, as an option or a plugin deselected it: "
                f"{', '.join(event.deselected)}"
            )
        self.changed()

    def note(self, text: str) -> None:
        """Report once, in the report and at the end, what went wrong with the run."""
        with self.lock:
            if self.record.problem(text):
                self.changed()

    def note_left(
        self, record: StageRecord, processes: Iterable[str], memory: Iterable[str]
    ) -> None:
        """Record what a stage left behind and what has been ended and removed."""
        self.record.cleaned += processes
        record.cleaned += processes
        if memory:
            self.record.notes.append(
                f"{record.name} left shared memory, which was removed: "
                f"{'; '.join(memory)}"
            )

    def note_survivors(self, lines: Iterable[str]) -> None:
        for line in lines:
            pid = line.partition(" ")[0]
            who = pid if pid.isdigit() else line  # its state may differ at each look
            if who not in self._survivors:
                self._survivors.add(who)
                self.record.notes.append(f"could not end: {line}")
                self.changed()


def _ended(record: StageRecord, at: float) -> None:
    if record.duration_s is None:
        record.duration_s = at - (record.started or at)


def extend(record: StageRecord, what: str, seconds: float) -> None:
    """Record the time that a stage has been given on top of its budget."""
    record.extra_s[what] = seconds
    record.facts["extra_s"] = {what: round(s, 1) for what, s in record.extra_s.items()}
