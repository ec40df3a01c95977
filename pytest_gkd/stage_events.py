"""Events from the workers to the controller, one dataclass each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pytest_gkd.stage_plan import PlannedStage


@dataclass
class Event:
    """Sent at ``t`` (clock.monotonic()) by ``worker`` (pytest-xdist's name for it).

    An invalid ``t`` does not lose the event: the reader replaces it.
    """

    t: Any = field(default=0.0, kw_only=True)
    worker: str = field(default="", kw_only=True)

    @property
    def kind(self) -> str:
        """Its name in files."""
        return type(self).__name__.lower()


@dataclass
class Hello(Event):
    """A worker process is up: its pid and start time (0: not known)."""

    pid: int
    start: int = 0


@dataclass
class Collected(Event):
    """What will run; ``deselected`` are stages that an option or plugin deselected."""

    plan: tuple[PlannedStage, ...] = ()
    error: str | None = None
    deselected: tuple[str, ...] = ()


@dataclass
class Bye(Event):
    """A worker has nothing more to report."""


@dataclass
class StageEvent(Event):
    """An event of one stage; ``stage`` is empty before the first one."""

    stage: str


@dataclass
class Waiting(StageEvent):
    needs: tuple[str, ...]


@dataclass
class Start(StageEvent):
    """``captured`` are the worker's descriptors of the files capturing its output."""

    budget_s: float
    captured: tuple[int, ...] = ()


@dataclass
class Step(StageEvent):
    text: str


@dataclass
class Fact(StageEvent):
    name: str
    value: Any


@dataclass
class Extra(StageEvent):
    """``s`` seconds in total on top of the budget for ``what``."""

    what: str
    s: float


@dataclass
class Triggered(StageEvent):
    """An injected fault took effect ``at`` (seconds of clock.monotonic())."""

    at: float


@dataclass
class Raised(StageEvent):
    """It has raised an exception, whose traceback is not rendered yet."""

    text: str


@dataclass
class Finish(StageEvent):
    outcome: str
    duration_s: float


@dataclass
class Closed(StageEvent):
    """Its fixtures have been torn down, too."""


@dataclass
class Left(StageEvent):
    """What it left behind, which has been ended and removed."""

    processes: tuple[str, ...]
    memory: tuple[str, ...]


@dataclass
class Forked(StageEvent):
    """A process that it forked returned from its code, and was ended."""


@dataclass
class Broken(StageEvent):
    """The worker cannot go on after this stage, and why."""

    text: str


@dataclass
class Verdict(StageEvent):
    """From the controller, to workers whose stages wait for this one."""

    outcome: str


_ALL = (*Event.__subclasses__(), *StageEvent.__subclasses__())
KINDS = {one.__name__.lower(): one for one in _ALL if one is not StageEvent}
# Only the latest of these counts: a stage may send a million of them.
STATES = (Step,)


@dataclass
class StageResult:
    """What a worker sends about a stage with pytest's report, not as an event.

    ``fault`` is what the stage itself found, ``error`` the text of its exception,
    ``ended`` are processes that were ended with it, ``unsaid`` is why some of its
    events could not be written.
    """

    stage: str
    outcome: str
    duration_s: float
    blocked_by: tuple[str, ...] = ()
    error: str = ""
    fault: dict[str, Any] | None = None
    ended: tuple[str, ...] = ()
    unsaid: str = ""
