"""Where in a job a traceback was raised, told by the functions on the way."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from pytest_gkd.diagnosis import log_phases
from pytest_gkd.diagnosis.exceptions import Chain
from pytest_gkd.diagnosis.patterns import Pattern

_LIKE = (
    ("weight-sync", Pattern(rb"(?i)(?:sync|push|send|receive|broadcast)_\w*weight")),
    ("checkpoint", Pattern(rb"(?i)(?:save|load|write|restore)_\w*(?:checkpoint|ckpt)")),
    *(
        (
            phase,
            Pattern(
                rb"(?i)(?:build|load|init|create|make|set_?up|start|launch)_\w*(?:%b)"
                % what
            ),
        )
        for phase, what in (
            ("teacher-init", b"teacher"),
            ("rollout-init", b"rollout|engine|vllm|sglang"),
            ("actor-init", b"student|actor|policy|trainer"),
        )
    ),
    ("generation", Pattern(rb"(?i)reward|verifier")),
    ("teacher", Pattern(rb"(?i)teacher")),
    (
        "generation",
        Pattern(rb"(?i)generate|rollout|sample_\w*(?:token|answer|completion)"),
    ),
    ("training-step", Pattern(rb"(?i)train_?(?:step|batch|epoch)|backward")),
)


# The role of a Ray actor or process, by its class; the first that fits counts.
_ROLES = (
    ("teacher-init", "teacher", re.compile("teacher", re.IGNORECASE)),
    ("", "generation", re.compile("reward|verifier", re.IGNORECASE)),
    ("", "", re.compile("actor_?rollout", re.IGNORECASE)),  # verl's are both
    ("rollout-init", "generation", re.compile("rollout|generat", re.IGNORECASE)),
    ("actor-init", "", re.compile("trainer|student|policy|learner", re.IGNORECASE)),
)
_TASK = re.compile(r"ray::(\w+)\.(\w+)\(\)")
_INITS = re.compile(r"__init__$|(?:build|load|init|setup)(?:_|$)", re.IGNORECASE)
# What the trainer asks of its own model and of a teacher alike.
_LOG_PROBS = re.compile(r"log_?probs?", re.IGNORECASE)


def phase_of(chain: Chain, last: str = "") -> str:
    """The phase that chained exceptions were raised in, told by the innermost function.

    The first of them counts, since the others came of it. In the process of a role what
    its ``__init__`` raises is of that role's start. Of log-probabilities the phase that
    was marked ``last`` tells whose they are. Empty where none of the functions tells.
    """
    init, role = _role_of(chain)
    if init:
        return init
    for told in (log_phases.raised_in, _by_name):
        for one in chain:
            phase = ""
            for frame in one.frames:
                name = frame.function.rpartition(".")[2]
                own = told(f"{PurePosixPath(frame.file).name}:{name}")
                if own == "training-step" and _LOG_PROBS.search(name):
                    own = "teacher" if "teacher" in (role, last) else own
                phase = own or phase
            if phase:
                return phase
    return role or _by_file(chain)


def _role_of(chain: Chain) -> tuple[str, str]:
    """The role's start where that failed, and else the phase of the role's work."""
    for one in chain:
        task = _TASK.search(one.message)
        name = task[1] if task else one.process
        found = next((role for role in _ROLES if name and role[2].search(name)), None)
        if found is None:
            continue
        own = (each.function for each in one.frames if "/ray/" not in each.file)
        method = (task[2] if task else next(own, "")).rpartition(".")[2]
        phase = log_phases.raised_in(method) or _by_name(f":{method}")
        starts = _INITS.search(method) and phase in {"", *log_phases.STARTS}
        return (found[0], "") if starts else ("", found[1])
    return "", ""


def _by_file(chain: Chain) -> str:
    """What the files tell that are named after a teacher or a reward."""
    for one in chain:
        for frame in reversed(one.frames):
            name = PurePosixPath(frame.file).name.lower()
            if frame.function != "<module>" and ("teacher" in name or "reward" in name):
                return "teacher" if "teacher" in name else "generation"
    return ""


def _by_name(function: str) -> str:
    """What the name of a function tells that is the user's own."""
    name = function.partition(":")[2].encode()
    return next((phase for phase, like in _LIKE if like.search(name)), "")
