"""What a stage that did not pass has left, and the lines that prove a cause."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pytest_gkd.stage_api import StageFault


@dataclass(frozen=True)
class TextSource:
    """A text of a run, such as ``rank1.log`` or ``stacks/rank0.txt``."""

    name: str
    text: str


@dataclass(frozen=True)
class StageEvidence:
    """What is known about a stage that did not pass.

    ``outcome`` is ``failed``, ``timeout`` or ``crashed``. ``fault`` is what the stage
    found itself, if anything. ``texts`` are the failure text, the captured output of
    all processes, the ranks' logs and the stacks; a source with ``stack`` in its name
    counts as stacks. The first ``traceback_lines`` of the text ``output`` are the
    stage's own traceback. ``exit_signal`` is a name such as ``SIGKILL``. ``alive`` says
    that a stage whose time ran out still made progress.
    """

    stage: str
    outcome: str
    fault: StageFault | None = None
    message: str = ""
    texts: tuple[TextSource, ...] = ()
    traceback_lines: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)
    exit_signal: str | None = None
    doing: str = ""
    alive: bool = False


class EvidenceLine(NamedTuple):
    """A line that proves the cause, with its source and number if it has one."""

    source: str
    line: int | None
    text: str
