"""Who a launcher says failed first: torchrun's summary a rank, Ray's error an actor.

torch/distributed/elastic/multiprocessing/errors/__init__.py prints the summary: the
others, which it has ended itself, come before. ray/exceptions.py has the error
(ActorDiedError), whose last lines say why the actor is dead.
"""

from __future__ import annotations

from typing import NamedTuple

from pytest_gkd.diagnosis import log_end, log_phases
from pytest_gkd.diagnosis.patterns import Pattern

FIRST = b"Root Cause (first observed failure)"
# A line may begin with the name of whose it is.
_FIRST = Pattern(
    rb"Root Cause \(first observed failure\):\s*\n(?:[^\n]*\n){0,4}?"
    rb"[^\n]*\brank +: (?P<rank>\d{1,7}) \(local_rank: [^\n]*\n"
    rb"[^\n]*\bexitcode +: (?P<code>-?\d{1,7}) \(pid: (?P<pid>\d{1,10})\)"
)
# A class within a function is called after that, too: ``of.<locals>.WorkerDict``.
_ACTOR = Pattern(
    rb"\bActorDiedError: [^\n]*\n"
    rb"[^\n]*\bclass_name: (?:[\w.<>]{0,200}\.)?(?P<name>\w{1,100})\s*\n"
    rb"[^\n]*\bactor_id: \w+\s*\n[^\n]*\bpid: (?P<pid>\d{1,10})\s*\n"
    rb"(?:[^\n]*\n){0,3}?[^\n]*\bThe actor is dead because its worker process has "
    rb"died\. Worker exit type: (?:SYSTEM_ERROR|USER_ERROR|NODE_OUT_OF_MEMORY)\b"
)


class Failed(NamedTuple):
    """The rank, its pid on its own machine, and its exit code: -N where signal N ended
    it."""

    rank: int
    pid: int
    exit_code: int


def first_failed(text: bytes) -> Failed | None:
    """That of the last summary in a text; None without one."""
    found = [*_FIRST.finditer(text)][-1:]
    keys = (b"rank", b"pid", b"code")
    return next((Failed(*(int(one[key]) for key in keys)) for one in found), None)


class DeadActor(NamedTuple):
    """Its class, and the pid of its process on its own machine."""

    name: str
    pid: int


def dead_actor(text: bytes) -> DeadActor | None:
    """The actor whose process has died by the last exception of a text.

    None without one. A death before another exception, or before a training step, did
    not end the run.
    """
    for one in [*_ACTOR.finditer(text)][-1:]:
        went_on = log_phases.STEP.last(text) > one.start()
        if not went_on and log_end.RAISED.search(text, one.end()) is None:
            return DeadActor(one[b"name"].decode(), int(one[b"pid"]))
    return None
