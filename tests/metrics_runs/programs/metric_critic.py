"""A critic: from the tokens of a prompt to the reward that its answer will have."""

from __future__ import annotations

import torch
from metric_models import VOCAB
from torch import Tensor, nn


class Critic:
    """Two linear layers over the counts of tokens, with an optimizer of its own."""

    def __init__(self, lr: float) -> None:
        self.net = nn.Sequential(nn.Linear(VOCAB, 48), nn.Tanh(), nn.Linear(48, 1))
        self.adam = torch.optim.Adam(self.net.parameters(), lr=lr)

    def step(
        self, prompts: Tensor, returns: Tensor, lr: float
    ) -> tuple[Tensor, dict[str, float]]:
        """Advantages [rows] by its values, then one update of it, and its numbers.

        ``prompts`` is [rows, tokens, VOCAB], ``returns`` is [rows].
        """
        values = self.net(prompts.sum(1))[:, 0]
        gain = (returns - values).detach()
        unexplained = gain.var() / (returns.var() + 1e-5)
        gain = (gain - gain.mean()) / (gain.std() + 1e-6)
        loss = 0.5 * ((values - returns) ** 2).mean()
        self.adam.zero_grad()
        loss.backward()
        total = nn.utils.clip_grad_norm_(self.net.parameters(), 1e9)
        self.adam.param_groups[0]["lr"] = lr
        self.adam.step()
        return gain, {
            "value/loss": loss.item(),
            "value/norm": total.item(),
            "value/lr": lr,
            "value/mean": values.mean().item(),
            "value/max": values.max().item(),
            "value/min": values.min().item(),
            "value/explained": 1 - unexplained.item(),
            "value/returns": returns.mean().item(),
        }
