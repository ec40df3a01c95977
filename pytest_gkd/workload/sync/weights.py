"""The names of a model's weights in its checkpoint, and how they are changed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def own_tensors(model: Any) -> dict[str, Tensor]:
    """Parameters and persistent buffers, each storage once, under the model's names.

    Detached, and writing to them changes the model. Of tensors that share their storage
    (a tied ``lm_head``) only the first is given.
    """
    seen: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        tensors[name] = tensor.detach()
    return tensors


def named_weights(model: Any) -> dict[str, Tensor]:
    """The model's tensors as its checkpoint names and shapes them, in a fixed order.

    transformers 5 renames and fuses some while loading (a mixture's experts), and this
    undoes it; earlier releases keep the checkpoint's names throughout.
    """
    tensors = own_tensors(model)
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return tensors
    return dict(revert_weight_conversion(model, tensors))


def perturb(model: Any, seed: int, scale: float) -> None:
    """Perturb every weight by noise of ``scale`` times its tensor's own magnitude.

    ``p * (1 + scale * a) + scale * rms(p) * b`` with ``a`` and ``b`` standard normal
    (rms 0.02 for a tensor of zeros). The same seed on the same device gives the same
    weights.
    """
    import torch

    for index, tensor in enumerate(own_tensors(model).values()):
        if not tensor.is_floating_point():
            continue
        generator = torch.Generator(tensor.device).manual_seed(seed * 1_000_003 + index)
        norm = torch.linalg.vector_norm(tensor, dtype=torch.float32)
        rms = float(norm) / math.sqrt(max(1, tensor.numel()))
        noise = torch.empty_like(tensor).normal_(generator=generator)
        tensor.mul_(noise.mul_(scale).add_(1.0))
        noise.normal_(generator=generator)
        tensor.add_(noise.mul_(scale * (rms or 0.02)))


def spoilt(tensor: Tensor) -> bool:
    """Whether a tensor holds NaN or Inf, told without a copy from its extremes."""
    import torch

    if not tensor.is_floating_point() or not tensor.numel():
        return False
    low, high = torch.aminmax(tensor.detach())
    return not (math.isfinite(float(low)) and math.isfinite(float(high)))
