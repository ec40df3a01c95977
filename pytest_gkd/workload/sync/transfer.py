"""Moves weights from the trainer to the engine, over a transport that fits both.

Both may be in another process: their methods are those of ``WeightSource`` and
``Engine``, whether they are these or proxies for them.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pytest_gkd.processes import gpus
from pytest_gkd.workload.deadline import both, within
from pytest_gkd.workload.sync.broadcast import Info, nbytes


@dataclass(frozen=True)
class Transfer(abc.ABC):
    """One way for weights to move. ``why`` tells people the reason for the choice; a
    push may take ``budget_s()`` seconds."""

    engine: Any
    source: Any
    budget_s: Callable[[], float]
    why: str
    transport: str

    @abc.abstractmethod
    def push(self, infos: list[Info]) -> int:
        """Move the trainer's weights into the engine; returns the bytes moved.

        Raises StageFault ``sync.stuck`` if it does not return.
        """


@dataclass(frozen=True)
class InProcess(Transfer):
    """An in-place load, for an engine in the trainer's process."""

    why: str = "trainer and engine share a process"
    transport: str = "in-process"

    def push(self, infos: list[Info]) -> int:
        self.engine.load(self.source.tensors(infos))
        return sum(map(nbytes, infos))


@dataclass(frozen=True)
class SharedMemory(Transfer):
    """The engine opens the trainer's memory on the GPU they share."""

    transport: str = "cuda-ipc"

    def push(self, infos: list[Info]) -> int:
        handles = self.source.share(infos)
        within(
            self.budget_s(),
            lambda: self.engine.take_shared(infos, handles),
            "the load from the trainer's GPU memory",
            "sync.stuck",
        )
        self.source.unshare()
        return sum(map(nbytes, infos))


@dataclass(frozen=True)
class Broadcast(Transfer):
    """From the trainer to every rank of the engine, in a separate group."""

    world_size: int

    def push(self, infos: list[Info]) -> int:
        budget_s = self.budget_s()
        rendezvous = self.source.open_rendezvous(
            self.transport, self.world_size, operation_budget_s(budget_s)
        )
        sent, _ = both(
            (
                f"the trainer's broadcast by {self.transport}",
                lambda: self.source.send(rendezvous, infos),
            ),
            (
                "the engine's load of what is sent",
                lambda: self.engine.receive(infos, rendezvous),
            ),
            budget_s,
            "sync.stuck",
        )
        return int(sent)


def operation_budget_s(budget_s: float) -> float:
    """Seconds for one operation of a broadcast that may take ``budget_s`` in total.

    gloo names the side that does not answer, but was measured to take up to 2.6 times
    its timeout; that should still come before our own deadline, which names neither.
    """
    return max(2.0, min(30.0, budget_s / 3.0))


def choose(
    engine: Any, source: Any, budget_s: Callable[[], float], *, opens_memory: bool
) -> Transfer:
    """The transfer between two processes, each push of which may take ``budget_s()``.

    NCCL takes one rank per GPU. If all are on one GPU, ``opens_memory`` says that the
    engine may try to open the trainer's memory; another GPU's cannot always be opened.
    """
    trainer: str = source.identity()
    ranks: list[str] = [rank["uuid"] for rank in engine.identities()]
    transport = "gloo"
    if trainer == "cpu":
        why = "weights are in host memory"
    elif {trainer} == set(ranks):
        why = "trainer and engine share a GPU, which NCCL refuses"
        if opens_memory:
            problem = source.cannot_share(engine)
            if not problem:
                return SharedMemory(engine, source, budget_s, why)
            why += f"; through host memory, as CUDA IPC does not work here: {problem}"
    # MIG instances have UUIDs of their own; to NCCL they are one GPU (issue 1716).
    elif len(set(gpus.physical([trainer, *ranks]))) <= len(ranks):
        why = "some of the processes share a GPU, which NCCL refuses"
    else:
        transport, why = "nccl", f"trainer and engine are on {1 + len(ranks)} GPUs"
    world_size = 1 + len(ranks)
    return Broadcast(engine, source, budget_s, why, transport, world_size)
