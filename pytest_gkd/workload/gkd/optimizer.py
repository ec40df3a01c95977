"""Updates the weights from their gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# AdamW's epsilon, torch's default: what it adds to the gradient's magnitude.
EPSILON = 1e-8
# Each element moves by about the learning rate in AdamW's first step, and by less
# later, where gradients contradict each other; some still by a hundredth of it at
# least.
LEAST_SHARE = 0.01


class Optimizer:
    """AdamW without weight decay: a parameter moves by its gradient or not at all.

    16-bit parameters are updated through a float32 copy, as in mixed precision:
    bfloat16 has no number between 1 and 1.0078, so small updates would round to nothing
    at every step, and AdamW's epsilon of 1e-8 is 0 in float16. If a GPU has no room for
    copies and their moments, 12 bytes per parameter, bfloat16 goes without, and
    ``note`` says so.
    """

    def __init__(self, model: Any, learning_rate: float) -> None:
        """Optimize the parameters of ``model`` that require a gradient, if any."""
        import torch

        self.parameters: list[Tensor] = [
            p for p in model.parameters() if p.requires_grad
        ]
        self.note = no_room(self.parameters)
        self.masters = [
            p.detach().float()
            if p.dtype == torch.float16 or (p.dtype == torch.bfloat16 and not self.note)
            else p
            for p in self.parameters
        ]
        # A group, because it may be empty. Not foreach: that needs the model's size in
        # memory once more.
        self.adamw = torch.optim.AdamW(
            [{"params": self.masters}],
            lr=learning_rate,
            weight_decay=0.0,
            eps=EPSILON,
            foreach=False,
        )

    def step(self) -> None:
        """Apply the gradients once."""
        import torch

        copies = [
            (parameter, master)
            for parameter, master in zip(self.parameters, self.masters, strict=True)
            if master is not parameter
        ]
        for parameter, master in copies:
            grad = parameter.grad
            master.grad = None if grad is None else grad.float()
        self.adamw.step()
        with torch.no_grad():
            for parameter, master in copies:
                parameter.copy_(master)
                master.grad = None


def no_room(parameters: list[Tensor]) -> str:
    """Why bfloat16 ``parameters`` get no float32 copies; empty if they do.

    Copy, two moments and, during a step, the gradient: 16 bytes per element.
    """
    import torch

    on_gpu = [p for p in parameters if p.dtype == torch.bfloat16 and p.is_cuda]
    if not on_gpu:
        return ""
    wanted = 16 * sum(p.numel() for p in on_gpu)
    free, _ = torch.cuda.mem_get_info(on_gpu[0].device)
    free += torch.cuda.memory_reserved(on_gpu[0].device)
    free -= torch.cuda.memory_allocated(on_gpu[0].device)
    if wanted <= free:
        return ""
    return (
        "the optimizer keeps no float32 copy of the weights, as real trainers do: it "
        f"would take {wanted >> 20} MiB and {free >> 20} MiB are free; updates smaller "
        "than bfloat16's spacing are lost, and the loss falls less"
    )


def must_move(parameter: Tensor, learning_rate: float) -> bool:
    """Whether AdamW's update of some element exceeds its dtype's spacing there.

    In 16 bits a correct update rounds to nothing where weights are large: bfloat16 has
    no number between 1 and 1.0078. Needs memory for two more of ``parameter``.
    """
    import torch

    if parameter.grad is None:
        return False
    size = parameter.grad.detach().abs().float()
    update = size.div_(size + EPSILON).mul_(LEAST_SHARE * learning_rate)
    types = torch.finfo(parameter.dtype)
    spacing = parameter.detach().abs().float().add_(types.smallest_normal)
    return bool((update > spacing.mul_(types.eps)).any())
