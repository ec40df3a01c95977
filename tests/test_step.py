"""Which step reports count as training, and what the others are called."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pytest_gkd.diagnosis import catalogue
from pytest_gkd.diagnosis.diagnose import advice
from pytest_gkd.stage_api import StageFault
from pytest_gkd.workload.gkd.step import StepReport, judge_steps, needs_another

NAN = float("nan")
FIRST = StepReport(
    loss=2.0,
    grad_norm=1.5,
    tokens=64,
    learning_rate=1e-3,
    parameters=27,
    frozen=0,
    parameters_with_grad=27,
    parameters_moved=27,
    unmoved=[],
    unused=0,
    nonfinite_grads=[],
    zero_grads=[],
    nonfinite_parameters=[],
    nonfinite_teacher=0,
)
LAST = replace(FIRST, loss=1.5)
NO_GRADS = replace(FIRST, parameters_with_grad=0, parameters_moved=0, grad_norm=0.0)


def fault(first: StepReport, last: StepReport) -> StageFault:
    with pytest.raises(StageFault) as caught:
        judge_steps([first, last])
    json.dumps(caught.value.facts)
    return caught.value


def test_a_step_whose_loss_falls_passes() -> None:
    judge_steps([FIRST, LAST])


@pytest.mark.parametrize("loss", [2.0, 2.1])
def test_a_loss_that_does_not_fall_has_diverged(loss: float) -> None:
    found = fault(FIRST, replace(LAST, loss=loss))
    assert found.cause == "train.diverged"
    assert f"from 2 to {loss:g} at learning rate 0.001" in found.message


@pytest.mark.parametrize(
    ("losses", "dtype", "another"),
    [
        # SmolLM2-135M with float32 copies of its weights.
        ((0.632, 0.637, 0.617), "bfloat16", True),
        ((0.632, 0.637, 0.617, 0.602, 0.540), "bfloat16", False),
        ((0.632, 0.637, 0.617), "float32", False),
        ((0.632, 0.637, NAN), "float16", False),
        ((0.632, *(0.633,) * 10), "float16", True),
        ((0.632, *(0.633,) * 11), "float16", False),
    ],
)
def test_half_precision_has_more_steps_for_the_loss_to_fall(
    losses: tuple[float, ...], dtype: str, another: bool
) -> None:
    reports = [replace(FIRST, loss=loss) for loss in losses]
    assert needs_another(reports, dtype) is another


def test_a_loss_near_zero_may_move_but_not_away() -> None:
    near = replace(FIRST, loss=2e-5)
    judge_steps([near, replace(LAST, loss=1.8e-4)])
    assert fault(near, replace(LAST, loss=2e-3)).cause == "train.diverged"


def test_a_loss_that_is_not_finite_is_nan_and_not_divergence() -> None:
    assert fault(FIRST, replace(LAST, loss=NAN)).cause == "train.nan"
    assert fault(replace(FIRST, loss=float("inf")), LAST).cause == "train.nan"


def test_a_step_in_the_middle_is_judged_as_well() -> None:
    with pytest.raises(StageFault, match="in step 2") as caught:
        judge_steps([FIRST, replace(FIRST, loss=NAN), LAST])
    assert caught.value.cause == "train.nan"


def test_a_parameter_that_should_have_moved_is_named() -> None:
    found = fault(FIRST, replace(LAST, parameters_moved=26, unmoved=["w"]))
    assert found.cause == "train.no-grad"
    assert "1 of 27 parameters with a gradient did not move (w)" in found.message
    assert "in step 2" in found.message


def test_parameters_with_nonfinite_gradients_are_counted_and_named() -> None:
    found = fault(replace(FIRST, nonfinite_grads=["a", "b", "c", "d", "e"]), LAST)
    assert found.cause == "train.nan"
    assert "5 of 27 gradients are not finite (a, b, c and 2 more)" in found.message


def test_a_spoilt_weight_is_named_before_the_gradients_it_spoilt() -> None:
    found = fault(
        replace(FIRST, loss=NAN, nonfinite_grads=["a"], nonfinite_parameters=["w"]),
        LAST,
    )
    assert found.message.index("(w)") < found.message.index("(a)")


def test_a_spoilt_teacher_is_told_from_a_spoilt_student() -> None:
    found = fault(replace(FIRST, nonfinite_teacher=8), LAST)
    assert found.cause == "train.nan"
    assert "8 values of the teacher are NaN" in found.message


def test_missing_gradients_are_no_grad_and_not_divergence() -> None:
    found = fault(NO_GRADS, NO_GRADS)
    assert found.cause == "train.no-grad"
    assert "0 of 27 trainable parameters got a gradient" in found.message


def test_a_frozen_model_is_said_to_be_frozen() -> None:
    frozen = replace(NO_GRADS, frozen=27)
    assert "all 27 parameters are frozen" in fault(frozen, frozen).message


def test_some_parameters_without_gradient_are_counted_and_named() -> None:
    found = fault(replace(FIRST, zero_grads=["a", "b"], frozen=3), LAST)
    assert found.cause == "train.no-grad"
    assert "2 of 24 trainable parameters" in found.message
    assert "(a, b)" in found.message


def test_frozen_and_unused_parameters_alone_are_no_fault() -> None:
    partly = replace(FIRST, frozen=20, unused=3, parameters_with_grad=4)
    judge_steps([partly, replace(partly, loss=1.0, parameters_moved=4)])


def test_weights_that_do_not_move_are_no_grad() -> None:
    still = replace(FIRST, parameters_moved=0, learning_rate=0.0)
    found = fault(still, replace(still, loss=1.0))
    assert found.cause == "train.no-grad"
    assert "0 of 27 trainable parameters moved at learning rate 0" in found.message


def test_a_student_that_equals_its_teacher_has_nothing_to_learn() -> None:
    found = fault(replace(FIRST, loss=-1.5e-6), replace(FIRST, loss=2e-5))
    assert found.cause == "train.no-grad"
    assert "same distribution" in found.message
    advised = advice(catalogue.load()["train.no-grad"], (), found.facts)
    assert "--gkd-teacher=" in advised[0]
