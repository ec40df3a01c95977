"""The distillation losses against hand-made cases, their limits and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from pytest_gkd.workload.gkd.loss import generalized_jsd, topk_forward_kl

BATCH, TOKENS, VOCAB = 2, 3, 11


def logits(seed: int, dtype: str = "float32") -> Any:
    import torch

    generator = torch.Generator().manual_seed(seed)
    made = 3 * torch.randn(BATCH, TOKENS, VOCAB, generator=generator)
    return made.to(getattr(torch, dtype))


def everywhere() -> Any:
    import torch

    return torch.ones(BATCH, TOKENS, dtype=torch.bool)


def of(*probabilities: float) -> Any:
    """One token's distribution as logits [1, 1, vocab]."""
    import torch

    return torch.tensor([[probabilities]]).log()


def one() -> Any:
    import torch

    return torch.tensor([[True]])


def kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a)


def top(teacher: Any, k: int, temperature: float = 1.0) -> tuple[Any, Any]:
    import torch

    found = torch.log_softmax(teacher / temperature, -1).topk(k, -1)
    return found.values, found.indices


def slopes(loss: Callable[[Any], Any]) -> tuple[list[float], list[float]]:
    """The loss's slope in five directions: from its gradient, and from its values."""
    import torch

    student = logits(4, "float64").requires_grad_()
    (gradient,) = torch.autograd.grad(loss(student), student)
    found, expected, step = [], [], 1e-5
    for seed in range(5):
        direction = logits(60 + seed, "float64")
        with torch.no_grad():
            rise = loss(student + step * direction) - loss(student - step * direction)
        found.append(float((gradient * direction).sum()))
        expected.append(float(rise) / (2 * step))
    return found, expected


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.75])
def test_jsd_is_the_sum_worked_out_by_hand(beta: float) -> None:
    student, teacher = [0.5, 0.3, 0.2], [0.1, 0.6, 0.3]
    mixture = [beta * t + (1 - beta) * s for t, s in zip(teacher, student, strict=True)]
    expected = beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)
    found = generalized_jsd(of(*student), of(*teacher), one(), beta=beta)
    assert float(found) == pytest.approx(expected, rel=1e-5)


def test_beta_0_is_forward_kl_and_beta_1_reverse_kl() -> None:
    student, teacher = [0.5, 0.3, 0.2], [0.1, 0.6, 0.3]
    pair = of(*student), of(*teacher), one()
    assert float(generalized_jsd(*pair, beta=0)) == pytest.approx(kl(teacher, student))
    assert float(generalized_jsd(*pair, beta=1)) == pytest.approx(kl(student, teacher))


def test_the_limits_are_those_of_the_rescaled_divergence() -> None:
    pair = logits(1, "float64"), logits(2, "float64"), everywhere()
    beta = 1e-6
    forward = generalized_jsd(*pair, beta=beta) / beta
    reverse = generalized_jsd(*pair, beta=1 - beta) / beta
    assert float(forward) == pytest.approx(
        float(generalized_jsd(*pair, beta=0)), rel=1e-3
    )
    assert float(reverse) == pytest.approx(
        float(generalized_jsd(*pair, beta=1)), rel=1e-3
    )


def test_beta_one_half_does_not_care_who_teaches() -> None:
    ab = generalized_jsd(logits(1), logits(2), everywhere(), beta=0.5)
    ba = generalized_jsd(logits(2), logits(1), everywhere(), beta=0.5)
    assert float(ab) == pytest.approx(float(ba), rel=1e-5)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_a_perfect_student_has_no_loss(beta: float) -> None:
    same = logits(3)
    found = generalized_jsd(same, same + 5.0, everywhere(), beta=beta)
    assert float(found) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("beta", [0.0, 0.2, 0.9, 1.0])
def test_jsd_is_never_negative_and_bounded_inside(seed: int, beta: float) -> None:
    found = float(
        generalized_jsd(logits(seed), logits(seed + 100), everywhere(), beta=beta)
    )
    assert found > 0.0
    if 0 < beta < 1:
        entropy = -beta * math.log(beta) - (1 - beta) * math.log(1 - beta)
        assert found <= entropy + 1e-6


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_jsd_has_the_gradient_of_its_value(torch: Any, beta: float) -> None:
    teacher = logits(5, "float64")
    mask = torch.tensor([[True, False, True], [True, True, False]])
    by_autograd, by_difference = slopes(
        lambda student: generalized_jsd(
            student, teacher, mask, beta=beta, temperature=1.5
        )
    )
    assert by_autograd == pytest.approx(by_difference, rel=1e-6)


def test_topk_has_the_gradient_of_its_value() -> None:
    values, ids = top(logits(5, "float64"), 4, 1.5)
    by_autograd, by_difference = slopes(
        lambda student: topk_forward_kl(
            student, values, ids, everywhere(), temperature=1.5
        )
    )
    assert by_autograd == pytest.approx(by_difference, rel=1e-6)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_topk_over_the_whole_vocabulary_is_forward_kl(
    torch: Any, temperature: float
) -> None:
    student, teacher = logits(6).requires_grad_(), logits(7)
    values, ids = top(teacher, VOCAB, temperature)
    sparse = topk_forward_kl(
        student, values, ids, everywhere(), temperature=temperature
    )
    full = generalized_jsd(
        student, teacher, everywhere(), beta=0, temperature=temperature
    )
    assert float(sparse.detach()) == pytest.approx(float(full.detach()), rel=1e-5)
    gradients = [torch.autograd.grad(loss, student)[0] for loss in (sparse, full)]
    assert torch.allclose(*gradients, atol=1e-6)


def test_topk_is_the_sum_worked_out_by_hand() -> None:
    student, teacher = [0.5, 0.3, 0.15, 0.05], [0.1, 0.6, 0.25, 0.05]
    values, ids = top(of(*teacher), 2)
    assert ids.tolist() == [[[1, 2]]]
    kept = kl([0.6, 0.25], [0.3, 0.15])
    tailed = topk_forward_kl(of(*student), values, ids, one())
    assert float(tailed) == pytest.approx(kept + kl([0.15], [0.55]), rel=1e-5)


@pytest.mark.parametrize("seed", range(8))
def test_topk_lies_between_zero_and_the_full_kl(seed: int) -> None:
    student, teacher = logits(seed), logits(seed + 50)
    full = float(generalized_jsd(student, teacher, everywhere(), beta=0))
    for k in (1, 3, 8):
        found = topk_forward_kl(student, *top(teacher, k), everywhere())
        assert -1e-6 <= float(found) <= full + 1e-5


def test_temperature_divides_both_sides() -> None:
    student, teacher = logits(8), logits(9)
    warm = generalized_jsd(student, teacher, everywhere(), beta=0.4, temperature=2.0)
    by_hand = generalized_jsd(student / 2, teacher / 2, everywhere(), beta=0.4)
    assert float(warm) == pytest.approx(float(by_hand), rel=1e-6)
    assert float(warm) != pytest.approx(
        float(generalized_jsd(student, teacher, everywhere(), beta=0.4)), rel=1e-3
    )


def test_tokens_outside_the_mask_count_for_nothing_whatever_they_hold(
    torch: Any,
) -> None:
    student, teacher, mask = logits(1), logits(2), everywhere()
    mask[1, 1:] = False
    student[1, 1:] = float("nan")
    student.requires_grad_()
    values, ids = top(teacher, 3)
    ids[1, 1:] = VOCAB + 7
    for loss in (
        generalized_jsd(student, teacher, mask, beta=0.5),
        topk_forward_kl(student, values, ids, mask),
    ):
        assert math.isfinite(float(loss.detach()))
        (gradient,) = torch.autograd.grad(loss, student)
        assert gradient[mask].abs().sum() > 0
        assert not gradient[~mask].any()


def test_the_mean_is_over_tokens_and_not_over_sequences() -> None:
    student, teacher, mask = logits(1), logits(2), everywhere()
    mask[1, 1:] = False
    each = [
        float(
            generalized_jsd(
                student[b : b + 1, t : t + 1],
                teacher[b : b + 1, t : t + 1],
                one(),
                beta=0.5,
            )
        )
        for b, t in mask.nonzero().tolist()
    ]
    found = float(generalized_jsd(student, teacher, mask, beta=0.5))
    assert found == pytest.approx(sum(each) / 4, rel=1e-5)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_bfloat16_logits_are_computed_in_float32(torch: Any, beta: float) -> None:
    student = logits(1, "bfloat16").requires_grad_()
    teacher = logits(2, "bfloat16")
    found = generalized_jsd(student, teacher, everywhere(), beta=beta)
    exact = generalized_jsd(student.float(), teacher.float(), everywhere(), beta=beta)
    assert found.dtype == torch.float32
    assert float(found.detach()) == float(exact.detach())
    found.backward()
    assert student.grad.isfinite().all()


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_tokens_of_zero_probability_leave_loss_and_gradient_finite(
    torch: Any, beta: float
) -> None:
    student, teacher = logits(1), logits(2)
    teacher[..., :4] = float("-inf")
    student.requires_grad_()
    values, ids = top(teacher, 9)
    assert values.isneginf().any()
    for loss in (
        generalized_jsd(student, teacher, everywhere(), beta=beta),
        topk_forward_kl(student, values, ids, everywhere()),
    ):
        (gradient,) = torch.autograd.grad(loss, student)
        assert math.isfinite(float(loss.detach()))
        assert gradient.isfinite().all()


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_tokens_that_neither_side_can_say_are_ignored(torch: Any, beta: float) -> None:
    student, teacher = logits(1), logits(2)
    without = generalized_jsd(
        student[..., 4:], teacher[..., 4:], everywhere(), beta=beta
    )
    student[..., :4] = teacher[..., :4] = float("-inf")
    student.requires_grad_()
    found = generalized_jsd(student, teacher, everywhere(), beta=beta)
    (gradient,) = torch.autograd.grad(found, student)
    assert float(found.detach()) == pytest.approx(float(without), rel=1e-5)
    assert gradient.isfinite().all()


def test_extreme_logits_stay_finite() -> None:
    student = (1e4 * logits(1)).requires_grad_()
    found = generalized_jsd(student, -1e4 * logits(2), everywhere(), beta=0.5)
    found.backward()
    assert math.isfinite(float(found.detach()))
    assert student.grad.isfinite().all()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            {"teacher_logits": lambda torch: torch.zeros(2, 3, 12)},
            r"teacher logits \(2, 3, 12\)",
        ),
        ({"mask": lambda torch: torch.ones(2, 3)}, "mask is torch.float32"),
        ({"mask": lambda torch: torch.ones(2, 4, dtype=torch.bool)}, r"\(2, 4\)"),
    ],
)
def test_values_that_cannot_be_are_named(
    torch: Any, change: dict[str, Any], named: str
) -> None:
    arguments = {
        "student_logits": logits(1),
        "teacher_logits": logits(2),
        "mask": everywhere(),
        "beta": 0.5,
    }
    made = {k: v(torch) if callable(v) else v for k, v in change.items()}
    with pytest.raises(ValueError, match=named):
        generalized_jsd(**{**arguments, **made})


def test_teacher_tokens_outside_the_students_vocabulary_are_named() -> None:
    values, ids = top(logits(2), 3)
    ids[0, 0, 0] = VOCAB
    with pytest.raises(ValueError, match=f"from 0 to {VOCAB - 1}.*to {VOCAB}"):
        topk_forward_kl(logits(1), values, ids, everywhere())


def test_a_top_k_of_another_shape_is_named() -> None:
    values, ids = top(logits(2), 3)
    with pytest.raises(ValueError, match=r"\(2, 2, 3\)"):
        topk_forward_kl(logits(1), values[:, :2], ids, everywhere())
    with pytest.raises(ValueError, match=r"\(2, 3, 3\) and \(2, 3, 2\)"):
        topk_forward_kl(logits(1), values, ids[..., :2], everywhere())
