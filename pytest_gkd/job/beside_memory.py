"""What a job's further models (reference, reward model, critic) take, in bytes."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from pytest_gkd.job import training_memory as training
from pytest_gkd.job.engine_memory import Parts
from pytest_gkd.job.models import WIDTHS, Layer, Model
from pytest_gkd.job.training_memory import Trainer


@dataclass(frozen=True)
class Beside:
    """A further model: what it holds when ``idle``, ``meanwhile`` the trainer updates,
    and in each of its ``phases``; ``between`` rollout and update if that differs from
    idle. ``shares`` says whether it is on the trainer's GPUs; there it has
    ``processes`` beside the trainer's, 0 if it is in these.
    """

    role: str
    idle: Parts
    phases: tuple[tuple[str, Parts], ...]
    shares: bool
    meanwhile: Parts
    processes: int = 1
    between: Parts | None = None

    @property
    def awaits(self) -> Parts:
        """What it holds between rollout and update."""
        return self.idle if self.between is None else self.between


@dataclass(frozen=True)
class Scorer:
    """A model that is not trained but scores tokens.

    ``tokens`` are those of a micro-batch on a rank; ``ranks`` divide the weights, 1 if
    each has them whole, in addition to ``tensor`` parallelism. ``logits`` are bytes per
    token and vocabulary entry, 0 for a model with one value per token. ``offload`` is
    when the weights are in host memory: "never", "between" its phases, "always".
    ``live`` is what ZeRO-3 keeps gathered, or autocast has copies of, in elements; FSDP
    gathers two layers and what is in none, or all if it ``unshards`` them before the
    first is computed. ``row`` is as a trainer's.
    """

    role: str
    model: Model
    tokens: int
    ranks: int = 1
    tensor: int = 1
    dtype: str = "bfloat16"
    compute: str = "bfloat16"
    logits: float = 0
    offload: str = "never"
    live: int = 0
    unshards: bool = False
    row: int = 0


def valued(model: Model) -> Model:
    """The model with one value per token in place of the output matrix."""
    end = Layer(0, 2 * model.width, model.width, 0)
    elements = model.elements - model.head + model.width
    return dataclasses.replace(
        model, elements=elements, head=model.width, vocab=1, end=end
    )


def scored(of: Scorer, *, shares: bool, processes: int = 1) -> Beside:
    """A scorer's memory; no layer's activations are kept."""
    model, width = of.model, WIDTHS[of.compute]
    size = math.ceil(model.loaded_bytes(of.dtype) / (of.ranks * of.tensor))
    own = {f"{of.role}'s weights {of.dtype}": size}
    logits = math.ceil(of.tokens * model.vocab * of.logits / of.tensor)
    inner = training.forward_bytes(
        model, of.tokens, of.compute, tensor=of.tensor, row=of.row
    )
    at_work = {
        f"{of.role}'s logits": logits,
        f"{of.role}'s activations": max(inner - logits, 0),
    }
    name = f"{of.role}'s gathered weights"
    if of.ranks > 1 or of.offload == "always" or of.live or of.unshards:
        layers = [layer.elements for layer in model.layers]
        whole = 2 * max(layers) + model.elements - sum(layers)
        whole = min(of.live, model.elements) or whole
        at_work[name] = math.ceil(whole * width / of.tensor)
    if of.unshards:
        every = math.ceil(model.elements * width / of.tensor)
        first = {name: every, f"{of.role}'s activations": inner}
        at_work = max(at_work, first, key=lambda parts: sum(parts.values()))
    idle = own if of.offload == "never" else {}
    if of.offload != "always":
        at_work |= own
    return Beside(of.role, idle, (("forward", at_work),), shares, idle, processes)


def trained(role: str, trainer: Trainer, *, shares: bool, at_once: bool) -> Beside:
    """A model that is also trained; ``at_once`` with the student, or before it."""

    def of_it(parts: Parts) -> Parts:
        return {f"{role}'s {name}": size for name, size in parts.items()}

    idle = of_it(training.resident(trainer, "idle"))
    worst = max(training.updates(trainer), key=lambda parts: sum(parts.values()))
    step = training.total(
        training.resident(trainer, "step"), training.stepping(trainer)
    )
    phases = ("forward and backward", of_it(worst)), ("optimizer step", of_it(step))
    fullest = max((parts for _, parts in phases), key=lambda parts: sum(parts.values()))
    return Beside(role, idle, phases, shares, fullest if at_once else idle)


def asked(
    trainer: Trainer, tokens: int, logits: float, *, unshards: bool = False
) -> Parts:
    """The trainer while the student scores ``tokens``, as a scorer does."""
    of = Scorer(
        *("student", trainer.model, tokens),
        tensor=trainer.tensor,
        compute=trainer.compute,
        logits=logits,
        unshards=unshards,
        row=trainer.row,
    )
    parts = dict(scored(of, shares=True).phases)
    at_work = {n: size for n, size in parts["forward"].items() if "weights" not in n}
    gathered = training.gathered(trainer) | training.copied(trainer, trainer.model)
    if unshards:
        name = f"gathered weights {trainer.compute}"
        gathered = {name: parts["forward"]["student's gathered weights"]}
    there = dataclasses.replace(trainer, fetches=False)
    resident = training.resident(there, "sync")
    return training.total(resident, gathered, at_work)
