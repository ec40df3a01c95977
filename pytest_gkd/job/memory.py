"""What each GPU of a job must hold in each of its phases, in bytes.

Every part is counted by a function that names where its formula is from. A phase takes
the worst of its moments; moments are not added up, since what one needs is gone in the
next.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from pytest_gkd.job import engine_memory, megatron_memory, training_memory
from pytest_gkd.job.beside_memory import Beside
from pytest_gkd.job.engine_memory import GIB, Engine, Parts
from pytest_gkd.job.generation_memory import Generation, generating
from pytest_gkd.job.megatron_memory import Megatron
from pytest_gkd.job.training_memory import Trainer, total
from pytest_gkd.language import marked

# A process's CUDA context with the kernels that it loads: typically 0.3 to 0.6 GiB; an
# H200's was 0.5, and 0.7 of a vLLM engine at work (docs/memory.md).
CONTEXT = "CUDA context"
CONTEXT_BYTES = GIB // 2
# Buffers of NCCL's communicators, and fragmentation in the caching allocator.
# Estimates; one GPU has no NCCL to measure.
RESERVE = "NCCL and fragmentation"
RESERVE_BYTES = GIB
# A plan that leaves less than this fraction of the memory free is tight: the plan aims
# to be off by no more.
TIGHT = 0.1


@dataclass(frozen=True)
class Job:
    """The roles of a job. ``memory`` is that of each GPU in bytes, None where unknown;
    ``bucket`` the bytes of a bucket of weights sent; ``processes`` are those on a GPU
    that trainer and rollout share. ``scores`` is what the trainer takes to compute the
    student's log-probabilities, ``others`` are further models. ``sends`` says that the
    trainer sends weights to engines that are planned apart.
    """

    trainer: Trainer | Megatron
    rollout: Engine | None = None
    teacher: Engine | None = None
    generation: Generation | None = None
    colocated: bool = True
    processes: int = 2
    memory: int | None = None
    bucket: int = 2 * GIB
    scores: Parts = field(default_factory=dict)
    others: tuple[Beside, ...] = ()
    sends: bool = False


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
    stages = (
        megatron_memory.phases(trainer, job.bucket)
        if isinstance(trainer, Megatron)
        else [training_memory.phases(trainer, job.bucket)]
    )
    shared = job.colocated and rollout is not None
    role = "trainer+rollout" if shared else "trainer"
    idle = _most(one.idle for one in stages)
    engine = engine_memory.beside(rollout, job.memory) if shared and rollout else {}
    near = [other for other in job.others if other.shares]
    waiting = total(*(other.idle for other in near))
    beside = total(engine, *(other.awaits for other in near))
    load = _most(one.load for one in stages)
    found = [_row(job, role, "load", total(load, beside))]
    if rollout:
        parts = engine_memory.serving(rollout, job.memory)
        found += shares(job.memory, "rollout", rollout)
        parts = total(idle if shared else {}, parts, waiting if shared else {})
        found.append(_row(job, role if shared else "rollout", "rollout", parts))
    if job.generation and isinstance(trainer, Trainer):
        parts = total(idle, generating(trainer, job.generation), waiting)
        found.append(_row(job, role, "rollout", parts))
    if job.teacher:
        found += shares(job.memory, "teacher", job.teacher)
        parts = engine_memory.serving(job.teacher, job.memory)
        found.append(_row(job, "teacher", "teacher forward", parts))
    if job.scores:
        found.append(_row(job, role, "log-probabilities", total(job.scores, beside)))
    for other in job.others:
        rest = [one.awaits for one in near if one is not other]
        around = total(idle, engine, *rest) if other.shares else {}
        for phase, parts in other.phases:
            found.append(_row(job, other.role, phase, total(parts, around)))
    beside_update = total(engine, *(other.meanwhile for other in near))
    update = _most(moment for one in stages for moment in one.updates)
    found.append(_row(job, role, "forward and backward", total(update, beside_update)))
    step = _most(one.step for one in stages)
    found.append(_row(job, role, "optimizer step", total(step, beside_update)))
    if rollout or job.sends:
        sent = _most(one.sync for one in stages)
        if shared and rollout:
            woken = {
                "engine's weights " + rollout.dtype: engine_memory.weights(rollout)
            }
            sent = total(sent, beside)
            if rollout.sleeps:  # its graphs are in ``beside``
                sent = total(sent, woken)
        found.append(_row(job, role, "weight sync", sent))
    save = _most(one.save for one in stages)
    found.append(_row(job, role, "checkpoint", total(save, beside)))
    return found


def _most(several: Iterable[Parts]) -> Parts:
    """The largest, of pipeline stages or of moments."""
    return max(several, key=lambda parts: sum(parts.values()))


def _row(job: Job, role: str, phase: str, parts: Parts) -> Row:
    near = {other.role: other.processes for other in job.others if other.shares}
    engine = job.colocated and job.rollout is not None
    is_here = role in {"trainer", "trainer+rollout", *near}
    processes = (job.processes if engine else 1) + sum(near.values()) if is_here else 1
    parts = {name: size for name, size in parts.items() if size}
    parts |= {CONTEXT: processes * CONTEXT_BYTES, RESERVE: RESERVE_BYTES}
    return judged(role, phase, parts, job.memory)


def judged(role: str, phase: str, parts: Parts, available: int | None) -> Row:
    """The row with its sum and verdict."""
    total, verdict = sum(parts.values()), None
    if available is not None:
        roomy = total <= available * (1 - TIGHT)
        verdict = marked("fits") if roomy else marked("tight")
        verdict = verdict if total <= available else marked("does-not-fit")
    return Row(role, phase, parts, total, available, verdict)


def shares(memory: int | None, role: str, engine: Engine) -> Iterator[Row]:
    """Whether the engine's share holds one sequence; if not, it does not start."""
    if memory is None:
        return
    cache = engine_memory.one_cache(engine)
    parts = {
        f"engine's weights {engine.dtype}": engine_memory.weights(engine),
        "engine's activations": engine_memory.working_in_share(engine),
        f"KV cache {engine.cache_dtype} of one sequence": cache,
    }
    yield judged(role, "engine start", parts, int(engine.share * memory))
