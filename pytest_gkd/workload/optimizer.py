"""How do gradients change the weights, and how many of them did change?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_gkd.workload import digest

if TYPE_CHECKING:
    from torch import Tensor


class Optimizer:
    """AdamW without weight decay: a parameter moves by its gradient or not at all.

    float16 parameters are updated through a float32 copy, as mixed precision does:
    AdamW's epsilon of 1e-8 is 0 in float16, and 0 / 0 follows wherever a gradient
    is 0.
    """

    def __init__(self, model: Any, learning_rate: float) -> None:
        """Optimise the parameters of ``model`` that want a gradient, if any."""
        import torch

        self.parameters: list[Tensor] = [
            p for p in model.parameters() if p.requires_grad
        ]
        self.masters = [
            p.detach().float() if p.dtype == torch.float16 else p
            for p in self.parameters
        ]
        self._adamw = None
        if self.masters:
            # Not foreach: that needs the size of the model once more.
            self._adamw = torch.optim.AdamW(
                self.masters, lr=learning_rate, weight_decay=0.0, foreach=False
            )

    def step(self) -> int:
        """Apply the gradients once; how many parameters have other bits than before."""
        import torch

        if self._adamw is None:
            return 0
        copies = [
            (parameter, master)
            for parameter, master in zip(self.parameters, self.masters, strict=True)
            if master is not parameter
        ]
        for parameter, master in copies:
            grad = parameter.grad
            master.grad = None if grad is None else grad.float()
        before = [digest.fingerprint(parameter) for parameter in self.parameters]
        self._adamw.step()
        with torch.no_grad():
            for parameter, master in copies:
                parameter.copy_(master)
                master.grad = None
        after = [digest.fingerprint(parameter) for parameter in self.parameters]
        return sum(old != new for old, new in zip(before, after, strict=True))
