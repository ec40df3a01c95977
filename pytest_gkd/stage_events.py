"""Events from the workers to the controller, one dataclass each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pytest_gkd.stage_plan import PlannedStage


@dataclass
class Event:
    """Said at ``t`` (clock.monotonic()) by ``worker`` (pytest-xdist's name for it).

    A ``t`` that is no time does not lose the event: the reader gives it one.
    """

    t: Any = field(default=0.0, kw_only=True)
    worker: str = field(default="", kw_only=True)

    @property
    def kind(self) -> str:
        """What it is called where it is written down."""
        return type(self).__name__.lower()


@dataclass
class Hello(Event):
    """A worker process is there: its pid and when it started (0: not known)."""

    pid: int
    start: int = 0


@dataclass
class Collected(Event):
    """What will run; ``deselected`` are stages that an option or a plugin left out."""

    plan: tuple[PlannedStage, ...] = ()
    error: str | None = None
    deselected: tuple[str, ...] = ()


@dataclass
class Bye(Event):
    """A worker has said all that it has to say."""


@dataclass
class StageEvent(Event):
    """Of one stage; empty for what comes before the first."""

    stage: str


@dataclass
class Waiting(StageEvent):
    needs: tuple[str, ...]


@dataclass
class Start(StageEvent):
    """``captured`` are the worker's descriptors that its output is captured in."""

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
    """So many seconds on top of the budget, in all, for ``what``."""

    what: str
    s: float


@dataclass
class Triggered(StageEvent):
    """An injected fault took effect ``at`` (seconds of clock.monotonic())."""

    at: float


@dataclass
class Raised(StageEvent):
    """It has raised something, of which nobody has made a traceback yet."""

    text: str


@dataclass
class Finish(StageEvent):
    outcome: str
    duration_s: float


@dataclass
class Closed(StageEvent):
    """Its fixtures are torn down, too."""


@dataclass
class Left(StageEvent):
    """What it left behind, which was ended and removed."""

    processes: tuple[str, ...]
    memory: tuple[str, ...]


@dataclass
class Forked(StageEvent):
    """A process that it forked came back from its code, and was ended."""


@dataclass
class Broken(StageEvent):
    """The worker cannot go on after it, and why."""

    text: str


@dataclass
class Verdict(StageEvent):
    """Of the controller, to workers whose stages wait for this one."""

    outcome: str


_ALL = (*Event.__subclasses__(), *StageEvent.__subclasses__())
KINDS = {one.__name__.lower(): one for one in _ALL if one is not StageEvent}
# Of these only the newest counts: a stage may say a million of them.
STATES = (Step,)


@dataclass
class StageResult:
    """What a worker says of a stage with pytest's report, and no event.

    ``fault`` is what the stage found itself, ``error`` the text of its exception,
    ``ended`` are processes that were ended with it, ``unsaid`` is why events of it
    could not be written.
    """

    stage: str
    outcome: str
    duration_s: float
    blocked_by: tuple[str, ...] = ()
    error: str = ""
    fault: dict[str, Any] | None = None
    ended: tuple[str, ...] = ()
    unsaid: str = ""
