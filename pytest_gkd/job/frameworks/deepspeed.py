"""What DeepSpeed holds besides the model: stages, buffers, gathered weights.

Defaults are those of DeepSpeed 0.19 (runtime/zero/config.py), in elements.
"""

from __future__ import annotations

from typing import Any

from pytest_gkd.job.findings import CheckError
from pytest_gkd.job.fitting import MOST_OF_ANYTHING
from pytest_gkd.job.models import Model

BUCKET, LIVE = 500_000_000, 1_000_000_000


def sharding(stage: Any) -> str:
    """A stage by the memory plan's names."""
    if type(stage) is not int or stage not in (1, 2, 3):
        raise CheckError(f"DeepSpeed's stage {str(stage)[:40]} is not known yet")
    return f"zero{stage}"


def buffers(
    model: Model,
    sharding: str,
    size: Any = BUCKET,
    live: Any = LIVE,
    *,
    overlaps: bool = False,
    offloads: bool = False,
) -> tuple[int, int]:
    """Elements of the gradient buffers, and of the weights that ZeRO-3 keeps gathered;
    0 without ZeRO. ``offloads`` says whether the optimizer's states are in host memory.

    ``size`` (reduce_bucket_size) "auto" is hidden_size squared (transformers,
    integrations/deepspeed.py). With overlapping communication there are two buffers;
    stage 3, whose default that is, has one (zero/stage_1_and_2.py, setup_buckets;
    stage3.py). With offload, stages 1 and 2 have a further one of the largest tensor's
    size.
    """
    if not sharding.startswith("zero"):
        return 0, 0
    size = model.width**2 if size == "auto" else size
    live = LIVE if live == "auto" else live
    for name, one in (("reduce_bucket_size", size), ("max_live_parameters", live)):
        if type(one) not in (int, float) or not 0 < one < MOST_OF_ANYTHING:
            raise CheckError(f"DeepSpeed's {name} is {str(one)[:40]}")
    if sharding == "zero3":
        return int(size), int(live)
    return int(size) * (1 + overlaps) + model.largest * offloads, 0
