"""Where in a job a traceback was raised, told by the functions on the way."""

from __future__ import annotations

from pathlib import PurePosixPath

from pytest_gkd.diagnosis import log_phases
from pytest_gkd.diagnosis.exceptions import Chain
from pytest_gkd.diagnosis.patterns import Pattern

_LIKE = (
    ("weight-sync", Pattern(rb"(?i)(?:sync|push|send|receive|broadcast)_\w*weight")),
    ("checkpoint", Pattern(rb"(?i)(?:save|load|write|restore)_\w*(?:checkpoint|ckpt)")),
    ("teacher", Pattern(rb"(?i)teacher")),
    (
        "generation",
        Pattern(rb"(?i)generate|rollout|sample_\w*(?:token|answer|completion)"),
    ),
    ("training-step", Pattern(rb"(?i)train_?(?:step|batch|epoch)|backward")),
)


def phase_of(chain: Chain) -> str:
    """The phase that chained exceptions were raised in, told by the innermost function.

    The first of them counts, since the others came of it. Empty where none of the
    functions tells.
    """
    for told in (log_phases.raised_in, _by_name):
        for one in chain:
            phase = ""
            for frame in one.frames:
                name = frame.function.rpartition(".")[2]
                phase = told(f"{PurePosixPath(frame.file).name}:{name}") or phase
            if phase:
                return phase
    return ""


def _by_name(function: str) -> str:
    """What the name of a function tells that is the user's own."""
    name = function.partition(":")[2].encode()
    return next((phase for phase, like in _LIKE if like.search(name)), "")
