"""When an engine's greedy tokens agree with a reference."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_gkd.workload.engine.greedy import compare


def rows(*values: list[float], dtype: str = "float32") -> Any:
    import torch

    return torch.tensor(values, dtype=getattr(torch, dtype))


def test_the_argmax_agrees_exactly() -> None:
    check = compare(rows([0, 3, 1], [5, 0, 0]), [1, 0])
    assert check.agree
    assert (check.positions, check.max_logprob_gap) == (2, 0.0)
    assert check.disagreements == ()


def test_another_token_disagrees_and_both_are_named() -> None:
    check = compare(rows([0, 3, 1], [5, 0, 0], [0, 0, 2]), [1, 2, 0])
    assert not check.agree
    assert check.disagreements == (1, 2)
    assert (check.expected, check.found) == (0, 2)
    assert check.max_logprob_gap == pytest.approx(5.0)


def test_a_near_tie_agrees_within_the_tolerance_of_the_dtype_only() -> None:
    close = [1.0, 1.0625, 0.0]
    assert not compare(rows(close), [0]).agree
    half = compare(rows(close, dtype="bfloat16"), [0])
    assert half.agree
    assert half.max_logprob_gap == pytest.approx(0.0625)


def test_large_bfloat16_logits_tie_within_two_of_their_own_steps() -> None:
    # bfloat16 has nothing between 32 and 32.25.
    assert compare(rows([32.0, 32.25, 0], dtype="bfloat16"), [0]).agree
    assert not compare(rows([32.0, 33.0, 0], dtype="bfloat16"), [0]).agree


def test_logits_made_float32_at_the_end_keep_the_tolerance_of_the_models_dtype() -> (
    None
):
    import torch

    close = [1.0, 1.0625, 0.0]
    assert compare(rows(close), [0], model_dtype=torch.bfloat16).agree
    assert compare(rows([32.0, 32.25, 0]), [0], model_dtype=torch.bfloat16).agree
    half = rows(close, dtype="bfloat16")
    assert compare(half, [0], model_dtype=torch.float32).agree


def test_nan_logits_agree_with_nothing() -> None:
    check = compare(rows([float("nan"), 0, 0], [0, 1, 0]), [0, 1])
    assert check.disagreements == (0,)


def test_the_engines_own_logprobs_are_compared_too() -> None:
    logits = rows([0.0, 1.0], [1.0, 0.0])
    own = float(logits.log_softmax(-1)[0, 1])
    check = compare(logits, [1, 0], [own, own - 0.25])
    assert check.agree
    assert check.max_logprob_difference == pytest.approx(0.25)
    assert compare(logits, [1, 0]).max_logprob_difference is None


def test_lengths_that_differ_are_named() -> None:
    with pytest.raises(ValueError, match="3 tokens and the reference 2 logits"):
        compare(rows([0, 1], [1, 0]), [0, 0, 0])
    with pytest.raises(ValueError, match="1 logprobs"):
        compare(rows([0, 1], [1, 0]), [0, 0], [0.0])
