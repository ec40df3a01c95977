"""How far the student's next-token distribution is from the teacher's.

Two divergences, both in nats and averaged over response tokens. Everything stays in log
space, and the arithmetic is float32 or wider whatever the models run in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def generalized_jsd(
    student_logits: Tensor,
    teacher_logits: Tensor,
    mask: Tensor,
    *,
    beta: float,
    temperature: float = 1.0,
) -> Tensor:
    """The generalized Jensen-Shannon divergence of GKD, a scalar >= 0.

    With ``M = beta * P_T + (1 - beta) * P_S`` it is ``beta * KL(P_T || M) +
    (1 - beta) * KL(P_S || M)``: equations (1) and (2) of arXiv 2306.13649. That is 0
    at both ends, where the name stands for the limits of the rescaled divergence, as
    in TRL: ``beta`` 0 is the forward ``KL(P_T || P_S)``, 1 the reverse
    ``KL(P_S || P_T)``. Student and teacher logits (or log-probabilities) are [batch,
    tokens, vocab], divided by ``temperature``; ``mask`` is bool [batch, tokens].
    Tokens that either side gives no probability (-inf) are allowed. Raises ValueError
    for shapes that cannot be.
    """
    import torch
    from torch.nn.functional import log_softmax

    if student_logits.shape != teacher_logits.shape:
        raise ValueError(
            f"student logits are {tuple(student_logits.shape)} and teacher logits "
            f"{tuple(teacher_logits.shape)}; expected the same shape"
        )
    _check(student_logits, mask)
    student = log_softmax(_rows(student_logits, mask) / temperature, -1)
    teacher = log_softmax(_rows(teacher_logits, mask) / temperature, -1)
    if beta == 0.0:
        return _kl(teacher, student).mean()
    if beta == 1.0:
        return _kl(student, teacher).mean()
    # logaddexp(-inf, -inf) is -inf with a NaN gradient; where both are -inf neither
    # divergence has a term, so any finite number will do.
    neither = torch.isneginf(student) & torch.isneginf(teacher)
    weight = torch.tensor(beta, dtype=student.dtype, device=student.device)
    mixture = torch.logaddexp(
        teacher.masked_fill(neither, 0.0) + torch.log(weight),
        student.masked_fill(neither, 0.0) + torch.log1p(-weight),
    )
    return (beta * _kl(teacher, mixture) + (1.0 - beta) * _kl(student, mixture)).mean()


def topk_forward_kl(
    student_logits: Tensor,
    teacher_topk_logprobs: Tensor,
    teacher_topk_ids: Tensor,
    mask: Tensor,
    *,
    temperature: float = 1.0,
) -> Tensor:
    """Forward KL over the teacher's top-k tokens, the sparse form of verl's GKD.

    ``sum_k p_k * (log p_k - log q_k)``, a scalar. Student logits are [batch, tokens,
    vocab] and divided by ``temperature``; the teacher's log-probabilities (of the full
    softmax, at that same temperature) and ids are [batch, tokens, k]; ``mask`` is bool
    [batch, tokens]. All other tokens count as one more, of probability
    ``1 - sum_k p_k``, which keeps the value >= 0. Equals the full forward KL when k is
    the vocabulary. Raises ValueError for ids or shapes that cannot be.
    """
    import torch
    from torch.nn.functional import log_softmax

    _check(student_logits, mask)
    given = [tuple(t.shape) for t in (teacher_topk_logprobs, teacher_topk_ids)]
    expected = (*student_logits.shape[:2], given[1][-1])
    if given != [expected, expected]:
        raise ValueError(
            f"the teacher's top-k log-probabilities and ids are {given[0]} and "
            f"{given[1]}; expected [batch, tokens, k], here {expected}, of both"
        )
    student = log_softmax(_rows(student_logits, mask) / temperature, -1)
    teacher = _rows(teacher_topk_logprobs, mask).to(student.dtype)
    ids = teacher_topk_ids[mask]
    vocab, top = student.shape[-1], ids.shape[-1]
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= vocab:
        raise ValueError(
            f"the teacher's top-{top} ids must be from 0 to {vocab - 1}, the student's "
            f"vocabulary; they reach {lowest} to {highest}"
        )
    value = _kl(teacher, student.gather(-1, ids))
    if top < vocab:
        rest = (1.0 - teacher.exp().sum(-1)).clamp_min(0.0)
        # Summing the rest is accurate where 1 - sum(q) would cancel to nothing.
        student_rest = student.scatter(-1, ids, float("-inf")).logsumexp(-1)
        value = value + _kl(torch.log(rest)[:, None], student_rest[:, None])
    return value.mean()


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """``sum p * (log p - log q)`` over the last axis, where ``0 * log 0`` is 0."""
    import torch

    # Filled before the arithmetic, not after: a term that is discarded after (-inf) -
    # (-inf) still propagates NaN into the gradient.
    nothing = torch.isneginf(log_p)
    log_p = log_p.masked_fill(nothing, 0.0)
    return (log_p.exp() * (log_p - log_q.masked_fill(nothing, 0.0))).sum(-1)


def _rows(logits: Tensor, mask: Tensor) -> Tensor:
    """The masked tokens as [n, vocab], in float32 or a wider dtype of theirs."""
    import torch

    return logits[mask].to(torch.promote_types(logits.dtype, torch.float32))


def _check(logits: Tensor, mask: Tensor) -> None:
    import torch

    if logits.dim() != 3:
        raise ValueError(
            f"logits are {tuple(logits.shape)}; expected [batch, tokens, vocab]"
        )
    if mask.dtype != torch.bool or mask.shape != logits.shape[:2]:
        raise ValueError(
            f"the mask is {mask.dtype} {tuple(mask.shape)}; expected torch.bool "
            f"{tuple(logits.shape[:2])}, as the logits' batch and tokens"
        )
