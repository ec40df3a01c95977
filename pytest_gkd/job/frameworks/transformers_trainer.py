"""What a trainer based on transformers' holds, with accelerate or DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pytest_gkd.job.findings import CheckError
from pytest_gkd.job.fitting import number
from pytest_gkd.job.frameworks import deepspeed
from pytest_gkd.job.loss_memory import LOSSES
from pytest_gkd.job.models import WIDTHS, Model
from pytest_gkd.job.training_memory import Trainer

Values = Mapping[str, Any]
# transformers' optimizer names, and how they go through the weights.
STEPS = {"adamw_torch": "foreach", "adamw_torch_fused": "fused"}


class Setup(NamedTuple):
    """What differs between the frameworks' trainers.

    ``dtype`` is what the models are loaded in, None for each model's own; ``compute``
    that of mixed precision, None without. ``row`` and ``answer`` are the tokens of a
    row, and those whose logits are computed. ``loss`` is a name in loss_memory's table,
    without "low-". ``offload`` is when weights and states are in host memory,
    ``bucket`` DeepSpeed's reduce_bucket_size.
    """

    sharding: str
    dtype: str | None
    compute: str | None
    row: int
    answer: int
    loss: str
    offload: tuple[str, str]
    bucket: Any
    recompute: bool
    lora_rank: int = 0
    adapters: str = ""


def sharding(values: Values) -> str:
    """The sharding by the memory plan's names; DeepSpeed's default stage if not
    given.
    """
    if values["sharding"] != "deepspeed":
        return str(values["sharding"])
    stage = values.get("zero_stage")
    return deepspeed.sharding(values.get("default_stage") if stage is None else stage)


def made(values: Values, student: Model, teacher: Model | None, of: Setup) -> Trainer:
    """The trainer from a job's values and facts.

    Raises CheckError for anything uncertain or unknown.
    """
    gpus, rows = number(values, "trainer_gpus", "per_device_train_batch_size")
    steps = number(values, "gradient_accumulation_steps")[0]
    loaded = of.dtype or student.stored_dtype
    if loaded not in WIDTHS:
        raise CheckError(f"the models' dtype is {loaded[:40]}")
    is_zero = of.sharding.startswith("zero")
    if of.compute is None and is_zero:
        raise CheckError("DeepSpeed in float32 is not known yet")
    # With mixed precision FSDP's weights are made float32 (accelerate, fsdp_utils.py).
    is_as_loaded = of.compute is None or of.sharding == "ddp"
    # Mixed precision returns logits in float32, whatever the weights' dtype.
    is_low = is_zero or (of.compute is None and WIDTHS[loaded] == 2)
    low, compute = f"low-{of.loss}", of.compute or loaded
    # DeepSpeed converts the teacher to 16 bits; otherwise it stays as loaded.
    as_loaded = of.dtype or (teacher or student).stored_dtype
    buckets, live = deepspeed.buffers(
        student,
        of.sharding,
        of.bucket,
        values.get("live"),
        overlaps=values.get("overlap") is True,
        offloads=of.offload[1] == "always",
    )
    return Trainer(
        student,
        gpus=gpus,
        sharding=of.sharding,
        apart=("embedding", "head"),
        weights=loaded if is_as_loaded else "float32",
        compute=compute,
        step=STEPS[values["optim"]],
        offload_weights=of.offload[0],
        offload_states=of.offload[1],
        recompute=of.recompute,
        tokens=rows * of.row,
        micro_batches=steps,
        answers=rows * of.answer,
        row=of.row,
        keeps=not is_zero,
        reduce=compute,
        loss=low if is_low and low in LOSSES else of.loss,
        lora_rank=of.lora_rank,
        adapters=of.adapters,
        buckets=buckets,
        live=live,
        teacher=teacher,
        teacher_dtype=as_loaded if teacher and not is_zero else compute,
        teacher_is_sharded=of.sharding == "zero3",
    )
