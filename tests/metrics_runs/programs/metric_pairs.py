"""Direct preference optimization: pairs of a better and a worse answer."""

from __future__ import annotations

import torch
from metric_models import END, Model
from torch import Tensor
from torch.nn.functional import logsigmoid


def _logps(model: Model, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The log-probability of each text [rows], and the mean of its logits."""
    logits, aims = model(ids[:, :-1]), ids[:, 1:]
    counts = (aims == END).cumsum(1) <= 1
    logps = logits.log_softmax(-1).gather(2, aims[..., None])[..., 0]
    return (logps * counts).sum(1), logits.mean().detach()


def pairs_loss(
    model: Model, reference: Model, better: Tensor, worse: Tensor, beta: float
) -> tuple[Tensor, dict[str, float]]:
    """DPO's loss, and what TRL's DPOTrainer logs of it."""
    (chosen, chosen_logits), (rejected, rejected_logits) = (
        _logps(model, ids) for ids in (better, worse)
    )
    with torch.no_grad():
        before = [_logps(reference, ids)[0] for ids in (better, worse)]
    good, bad = beta * (chosen - before[0]), beta * (rejected - before[1])
    return -logsigmoid(good - bad).mean(), {
        "pairs/chosen": good.mean().item(),
        "pairs/rejected": bad.mean().item(),
        "pairs/accuracy": (good > bad).float().mean().item(),
        "pairs/margin": (good - bad).mean().item(),
        "pairs/logps_chosen": chosen.mean().item(),
        "pairs/logps_rejected": rejected.mean().item(),
        "pairs/logits_chosen": chosen_logits.item(),
        "pairs/logits_rejected": rejected_logits.item(),
    }
