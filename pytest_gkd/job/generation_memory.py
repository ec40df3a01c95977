"""What rollouts by the trainer's own model (transformers' generate) take, in bytes."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_gkd.job.engine_memory import Parts
from pytest_gkd.job.models import WIDTHS
from pytest_gkd.job.training_memory import SHARDED, Trainer, copied


@dataclass(frozen=True)
class Generation:
    """Rollouts by the trainer's own model (transformers' ``generate``): ``sequences``
    at once, of ``length`` tokens, with a cache or without."""

    sequences: int
    length: int
    is_cached: bool = True


def generating(trainer: Trainer, generation: Generation) -> Parts:
    """Rollouts by the trainer's own weights, which are gathered first (TRL,
    models/utils.py, unwrap_model_for_generation).

    With a cache, its keys are in the rotary embeddings' dtype; without, each new token
    takes a forward pass of all tokens, and the logits of the last.
    """
    model, width = trainer.model, WIDTHS[trainer.compute]
    found = copied(trainer, model)
    if SHARDED[trainer.sharding][0] and trainer.ranks > 1:
        found = {f"gathered weights {trainer.compute}": model.elements * width}
    if generation.is_cached:
        one = model.cache_bytes(generation.length, trainer.compute)
        one = one * 3 // 2 if trainer.casts else one
        found[f"KV cache {trainer.compute}"] = one * generation.sequences
    else:
        layer = trainer.largest
        inner = 2 * (layer.inner + model.width) * width
        found["a layer's activations"] = (
            generation.sequences * generation.length * inner
        )
    # The last token's logits in float32, filtered and normalised.
    found["logits"] = generation.sequences * model.vocab * 12
    return found
