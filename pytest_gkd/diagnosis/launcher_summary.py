"""Who a launcher says failed first: torchrun's summary a rank, Ray's error an actor.

torch/distributed/elastic/multiprocessing/errors/__init__.py prints the summary: the
others, which it has ended itself, come before. ray/exceptions.py has the error
(ActorDiedError); src/ray/gcs/actor/gcs_actor_manager.cc why the actor is dead, which is
its own process only if it was not killed by Ray or with its owner.
"""

from __future__ import annotations

from typing import NamedTuple

from pytest_gkd.diagnosis import log_phases
from pytest_gkd.diagnosis.patterns import Pattern

FIRST = b"Root Cause (first observed failure)"
# A line may begin with the name of whose it is.
_FIRST = Pattern(
    rb"Root Cause \(first observed failure\):\s*\n(?:[^\n]*\n){0,4}?"
    rb"[^\n]*\brank +: (?P<rank>\d{1,7}) \(local_rank: [^\n]*\n"
    rb"[^\n]*\bexitcode +: (?P<code>-?\d{1,7}) \(pid: (?P<pid>\d{1,10})\)"
)
_ACTOR = Pattern(
    rb"\bclass_name: (?P<name>[\w.]{1,100})\s*\n[^\n]*\bactor_id: \w+\s*\n"
    rb"[^\n]*\bpid: (?P<pid>\d{1,10})\s*\n(?:[^\n]*\n){0,3}?"
    rb"[^\n]*\bThe actor is dead because its worker process has died"
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


def first_dead_actor(text: bytes) -> DeadActor | None:
    """The first actor whose process has died, by a text, after its last training step.

    None without one: a death before that was survived.
    """
    found = _ACTOR.search(text, max(0, log_phases.STEP.last(text)))
    if found is None:
        return None
    return DeadActor(found[b"name"].decode(), int(found[b"pid"]))
