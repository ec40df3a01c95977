"""What each GPU of a job must hold in each of its phases, in bytes.

Every part is counted by a function that names where its formula is from. A phase takes
the worst of its moments; moments are not added up, since what one needs is gone in the
next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pytest_gkd.job import engine_memory
from pytest_gkd.job import training_memory as training
from pytest_gkd.job.engine_memory import GIB, Engine, Parts
from pytest_gkd.job.generation_memory import Generation, generating
from pytest_gkd.job.training_memory import Trainer

# A process's CUDA context with the kernels that it loads: 0.3 to 0.6 GiB as a rule.
CONTEXT = "CUDA context"
CONTEXT_BYTES = GIB // 2
# Buffers of NCCL's communicators, and what the caching allocator cannot give again.
# Estimates: no GPU was there to measure them.
RESERVE = "NCCL and fragmentation"
RESERVE_BYTES = GIB
# A plan that leaves less than this part of the memory free is tight: the aim is to be
# wrong by no more.
TIGHT = 0.1


@dataclass(frozen=True)
class Job:
    """Who is there. ``memory`` is that of each GPU in bytes, None where unknown;
    ``bucket`` the bytes that weights are sent in; ``processes`` are those of a GPU that
    trainer and rollout share."""

    trainer: Trainer
    rollout: Engine | None = None
    teacher: Engine | None = None
    generation: Generation | None = None
    colocated: bool = True
    processes: int = 2
    memory: int | None = None
    bucket: int = 2 * GIB


@dataclass(frozen=True)
class Row:
    """A role in a phase on one GPU. ``verdict`` is "fits", "tight" or "does-not-fit",
    None where ``available`` is unknown."""

    role: str
    phase: str
    bytes: Parts
    total: int
    available: int | None
    verdict: str | None


def plan(job: Job) -> list[Row]:
    """Every role and phase of a job on the fullest of its GPUs."""
    trainer, rollout = job.trainer, job.rollout
    shared = job.colocated and rollout is not None
    role = "trainer+rollout" if shared else "trainer"
    idle = training.resident(trainer, "idle")
    beside = engine_memory.beside(rollout, job.memory) if shared and rollout else {}
    found = [
        _row(
            job,
            role,
            "load",
            training.total(training.resident(trainer, "load"), beside),
        )
    ]
    if rollout:
        parts = training.total(
            idle if shared else {}, engine_memory.serving(rollout, job.memory)
        )
        found += _shares(job, "rollout", rollout)
        found.append(_row(job, role if shared else "rollout", "rollout", parts))
    if job.generation:
        parts = training.total(idle, generating(trainer, job.generation))
        found.append(_row(job, role, "rollout", parts))
    if job.teacher:
        found += _shares(job, "teacher", job.teacher)
        parts = engine_memory.serving(job.teacher, job.memory)
        found.append(_row(job, "teacher", "teacher forward", parts))
    moments = [training.total(moment, beside) for moment in training.updates(trainer)]
    worst = max(moments, key=lambda parts: sum(parts.values()))
    found.append(_row(job, role, "forward and backward", worst))
    parts = training.total(
        training.resident(trainer, "step"), training.stepping(trainer), beside
    )
    found.append(_row(job, role, "optimizer step", parts))
    if rollout:
        sent = training.sending(trainer, job.bucket)
        if shared:
            woken = {
                "engine's weights " + rollout.dtype: engine_memory.weights(rollout)
            }
            sent = training.total(sent, woken if rollout.sleeps else beside)
        found.append(_row(job, role, "weight sync", sent))
    saved = training.total(
        training.resident(trainer, "save"), training.gathered_tensor(trainer), beside
    )
    found.append(_row(job, role, "checkpoint", saved))
    return found


def _row(job: Job, role: str, phase: str, parts: Parts) -> Row:
    processes = job.processes if role == "trainer+rollout" else 1
    parts = {name: size for name, size in parts.items() if size}
    parts |= {CONTEXT: processes * CONTEXT_BYTES, RESERVE: RESERVE_BYTES}
    return judged(role, phase, parts, job.memory)


def judged(role: str, phase: str, parts: Parts, available: int | None) -> Row:
    """The row with its sum and verdict."""
    total, verdict = sum(parts.values()), None
    if available is not None:
        roomy = total <= available * (1 - TIGHT)
        verdict = "fits" if roomy else "tight"
        verdict = verdict if total <= available else "does-not-fit"
    return Row(role, phase, parts, total, available, verdict)


def _shares(job: Job, role: str, engine: Engine) -> Iterator[Row]:
    """Whether the engine's share holds one sequence: without it vLLM does not start."""
    if job.memory is None:
        return
    cache = engine_memory.one_cache(engine)
    parts = {
        f"engine's weights {engine.dtype}": engine_memory.weights(engine),
        "engine's activations": engine_memory.working(engine),
        f"KV cache {engine.cache_dtype} of one sequence": cache,
    }
    yield judged(role, "engine start", parts, int(engine.share * job.memory))
