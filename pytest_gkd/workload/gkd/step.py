"""Checks that a training step really trained, and did not only look like it."""

from __future__ import annotations

import math
from collections.abc import Sequence as Listing
from dataclasses import asdict, dataclass

from pytest_gkd.stage_api import StageFault
from pytest_gkd.workload.sync.push import some

# Below this loss (nats per token) only float32 rounding is left of it: a model that
# taught itself was measured at 1.5e-6, with gradients of pure noise.
NOTHING_TO_LEARN = 1e-5
# Below this loss (nats per token) an AdamW step, which moves each weight by the
# learning rate however small its gradient, overshoots: a tiny Gemma 3 went from 2e-5 to
# 1.8e-4.
CLOSE = 1e-3
# In half precision an update of 1e-5 is lost to rounding in most weights until several
# have accumulated in their float32 copies. SmolLM2-135M (bfloat16, learning rate 1e-5)
# had the losses 0.632, 0.637, 0.617, 0.602, 0.540 and, in the twelfth step, 0.316;
# without copies 0.565. So this many steps are allowed until it has fallen by a tenth.
HALF_PRECISION = ("bfloat16", "float16")
MOST_STEPS = 12
FALLEN = 0.9


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step did, in numbers; nothing is judged here.

    ``loss`` is in nats per response token, before the update; ``grad_norm`` is the
    Euclidean norm over all gradients. ``parameters`` counts tensors, ``frozen`` those
    that require no gradient, ``parameters_with_grad`` those with a finite gradient that
    is not all zero, ``parameters_moved`` those whose bits the update changed;
    ``unmoved`` names those that it did not change although it should have, given their
    gradient and their dtype's spacing. ``zero_grads`` names trainable parameters of
    modules that took part in the forward pass and got no gradient or only zeros;
    ``unused`` counts parameters without gradient whose module took no part (a vision
    tower, an idle expert). ``nonfinite_parameters`` held NaN or Inf before the step,
    ``nonfinite_teacher`` counts such values in the teacher's signal. If a gradient is
    not finite the update is skipped, so that no more is corrupted. ``allocated_bytes``
    is what the trainer's process held after the step (see
    ``memory_use.allocated_bytes``).
    """

    loss: float
    grad_norm: float
    tokens: int
    learning_rate: float
    parameters: int
    frozen: int
    parameters_with_grad: int
    parameters_moved: int
    unmoved: list[str]
    unused: int
    nonfinite_grads: list[str]
    zero_grads: list[str]
    nonfinite_parameters: list[str]
    nonfinite_teacher: int
    allocated_bytes: int | None = None


def needs_another(reports: Listing[StepReport], dtype: str) -> bool:
    """Whether rounding in ``dtype`` may be why the loss has hardly fallen so far."""
    if dtype not in HALF_PRECISION or len(reports) >= MOST_STEPS:
        return False
    return reports[-1].loss > FALLEN * reports[0].loss


def judge_steps(reports: Listing[StepReport]) -> None:
    """Raise StageFault unless the steps in ``reports``, on one batch, really trained.

    - ``train.nan``: a loss, gradient, weight or teacher value is not finite.
    - ``train.no-grad``: gradients are missing or zero, or parameters did not move.
    - ``train.diverged``: the loss of the repeated batch did not fall, nor stay below
      ``CLOSE``, where it need not fall.
    """
    first, last = reports[0], reports[-1]
    for number, report in enumerate(reports, 1):
        _judge_finite(report, number)
    if first.loss <= NOTHING_TO_LEARN:
        raise StageFault(
            "train.no-grad",
            f"the loss is {first.loss:.3g} before the first update: teacher and "
            "student give the same distribution; expected something to learn",
            facts={"report": asdict(first), "teacher_equals_student": True},
        )
    for number, report in enumerate(reports, 1):
        _judge_gradients(report, number)
    if not last.loss < max(first.loss, CLOSE):
        raise StageFault(
            "train.diverged",
            f"the loss of one repeated batch went from {first.loss:.6g} to "
            f"{last.loss:.6g} at learning rate {first.learning_rate:g}; expected it to "
            "fall",
            facts={
                "loss_first": first.loss,
                "loss_last": last.loss,
                "learning_rate": first.learning_rate,
                "grad_norm": first.grad_norm,
            },
        )


def _judge_finite(report: StepReport, number: int) -> None:
    origins = []
    if report.nonfinite_teacher:
        origins.append(f"{report.nonfinite_teacher} values of the teacher are NaN")
    if names := report.nonfinite_parameters:
        origins.append(
            f"{len(names)} of {report.parameters} parameters held NaN or Inf before "
            f"the step ({some(names)})"
        )
    if names := report.nonfinite_grads:
        origins.append(
            f"{len(names)} of {report.parameters} gradients are not finite "
            f"({some(names)})"
        )
    if origins or not math.isfinite(report.loss):
        raise StageFault(
            "train.nan",
            "; ".join([f"the loss is {report.loss:.6g}", *origins])
            + f" in step {number}; expected finite numbers",
            facts={
                "report": asdict(report),
                "nonfinite_teacher": report.nonfinite_teacher,
            },
        )


def _judge_gradients(report: StepReport, number: int) -> None:
    trainable = report.parameters - report.frozen
    problem = ""
    if not trainable:
        problem = f"all {report.parameters} parameters are frozen (requires_grad False)"
    elif not report.parameters_with_grad:
        problem = f"0 of {trainable} trainable parameters got a gradient"
    elif report.zero_grads:
        problem = (
            f"{len(report.zero_grads)} of {trainable} trainable parameters got no "
            f"gradient or only zeros ({some(report.zero_grads)})"
        )
    elif report.parameters_moved and report.unmoved:
        problem = (
            f"{len(report.unmoved)} of {report.parameters_with_grad} parameters with a "
            f"gradient did not move ({some(report.unmoved)})"
        )
    elif not report.parameters_moved:
        problem = (
            f"0 of {trainable} trainable parameters moved at learning rate "
            f"{report.learning_rate:g} with gradient norm {report.grad_norm:.3g}"
        )
    if problem:
        raise StageFault(
            "train.no-grad",
            f"{problem} in step {number}; expected a step that changes the weights",
            facts={
                "report": asdict(report),
                "has_gradients": bool(trainable and not report.zero_grads)
                and report.parameters_with_grad > 0,
                "learning_rate_is_zero": report.learning_rate == 0.0,
            },
        )
