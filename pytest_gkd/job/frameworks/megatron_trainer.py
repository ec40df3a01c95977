"""Makes a memory plan's trainer from Megatron's own settings, for any framework."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from pytest_gkd.job.findings import CheckError
from pytest_gkd.job.fitting import MOST_OF_ANYTHING
from pytest_gkd.job.megatron_memory import MODULES, Megatron
from pytest_gkd.job.models import Model

Values = Mapping[str, Any]
# Bytes per element by Megatron's dtype names (training/arguments.py).
BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
# Megatron's own keys for what divides the model and what its optimizer keeps.
SIZES = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size"),
    *("context_parallel_size", "expert_model_parallel_size"),
    *("expert_tensor_parallel_size", "num_layers_per_virtual_pipeline_stage"),
    *("num_virtual_stages_per_pipeline_rank", "recompute_num_layers"),
    *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    "make_vocab_size_divisible_by",
)
KEYS = (
    *SIZES,
    *("sequence_parallel", "recompute_granularity", "recompute_method"),
    *("recompute_modules", "moe_layer_recompute", "grad_reduce_in_bf16", "fp16"),
    *("use_precision_aware_optimizer", "main_params_dtype", "exp_avg_dtype"),
    *("exp_avg_sq_dtype", "optimizer_offload_fraction", "hidden_dropout"),
)
# Settings whose effect on the memory is unknown, with the values that have none.
UNKNOWN: dict[str, tuple[str, tuple[Any, ...]]] = {
    "fp8": ("the memory of training in fp8", ()),
    "fp4": ("the memory of training in fp4", ()),
    "transformer_impl": ("the memory of those layers", ("transformer_engine",)),
    "mtp_num_layers": ("the memory of layers that predict several tokens", (0,)),
    "pipeline_model_parallel_layout": ("how a layout of one's own lays out stages", ()),
    "account_for_embedding_in_pipeline_split": ("how that divides layers", (False,)),
    "account_for_loss_in_pipeline_split": ("how that divides layers", (False,)),
    "optimizer": ("the state of that optimizer", ("adam",)),
    "use_stateless_adam": ("the state of that optimizer", (False,)),
    "fine_grained_activation_offloading": ("what offloading leaves", (False,)),
    "cpu_offloading": ("what offloading leaves", (False,)),
    "use_megatron_fsdp": ("the memory of Megatron's FSDP", (False,)),
    "use_torch_fsdp2": ("the memory of Megatron's FSDP", (False,)),
    "lora_rank": ("what LoRA's layers keep in Megatron", (0,)),
}


def settings(find: Callable[[str], Any]) -> dict[str, Any]:
    """Megatron's settings by its own keys, None if ``find`` finds none.

    Raises CheckError if one is an invalid size, or has an unknown effect on the memory.
    """
    for key, (text, harmless) in UNKNOWN.items():
        value = find(key)
        if value is not None and value not in harmless:
            raise CheckError(f"{text} is not known ({key})")
    found = {key: find(key) for key in KEYS}
    for key in SIZES:
        value = found[key]
        if value is not None and (
            type(value) is not int or not 0 <= value < MOST_OF_ANYTHING
        ):
            raise CheckError(f"{key} is {str(value)[:40]}")
    return found


def trainer(said: Values, values: Values, model: Model, **more: Any) -> Megatron:
    """The trainer from Megatron's ``said`` settings and the ``values`` of ``gkd check``
    that a plan may change; ``more`` are fields that the framework determines itself.

    Raises CheckError if something is not certain.
    """
    sizes = {key: said[key] or 1 for key in SIZES}
    for key, name in (
        ("tensor_model_parallel_size", "train_tensor_parallel_size"),
        ("context_parallel_size", "context_parallel_size"),
    ):
        sizes[key] = values.get(name) or sizes[key]
    gpus = values.get("trainer_gpus")
    tensor = sizes["tensor_model_parallel_size"]
    stages = sizes["pipeline_model_parallel_size"]
    ranks = tensor * stages * sizes["context_parallel_size"]
    if type(gpus) is not int or gpus < ranks or gpus % ranks:
        raise CheckError(f"{gpus} GPUs of the trainer are no multiple of {ranks}")
    chunks = said["num_virtual_stages_per_pipeline_rank"] or 1
    if said["num_layers_per_virtual_pipeline_stage"]:
        each = sizes["num_layers_per_virtual_pipeline_stage"] * stages
        chunks = max(len(model.layers) // each, 1)
    fraction = said["optimizer_offload_fraction"]
    fraction = 1.0 if fraction is None else fraction
    if not isinstance(fraction, int | float) or not 0 <= fraction <= 1:
        raise CheckError(f"optimizer_offload_fraction is {str(fraction)[:40]}")
    return Megatron(
        model,
        gpus=gpus,
        tensor=tensor,
        pipeline=stages,
        context=sizes["context_parallel_size"],
        expert=sizes["expert_model_parallel_size"],
        expert_tensor=said["expert_tensor_parallel_size"] or 0,
        chunks=chunks,
        first=said["decoder_first_pipeline_num_layers"] or 0,
        last=said["decoder_last_pipeline_num_layers"] or 0,
        sequence_parallel=bool(said["sequence_parallel"]),
        compute="float16" if said["fp16"] else "bfloat16",
        gradients="bfloat16" if said["grad_reduce_in_bf16"] else "float32",
        on_host=fraction if values.get("offload_optimizer") else 0,
        padded=sizes["make_vocab_size_divisible_by"] * tensor,
        has_dropout=bool(said["hidden_dropout"]),
        **_optimizer(said, values),
        **_recomputed(said, values),
        **more,
    )


def _optimizer(said: Values, values: Values) -> dict[str, Any]:
    """Bytes of master copies and moments per element; of float32 copies of bfloat16
    weights it keeps only the lower half, unless they are in host memory
    (optimizer/optimizer_config.py, store_param_remainders).
    """
    if not said["use_precision_aware_optimizer"]:
        return {}
    names = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    widths = [BYTES.get(str(said[name] or "fp32")) for name in names]
    if None in widths:
        raise CheckError("the dtypes of the precision-aware optimizer are not known")
    master, *moments = (width or 0 for width in widths)
    keeps_half = said.get("store_param_remainders") is not False
    if keeps_half and not said["fp16"] and not values.get("offload_optimizer"):
        master = min(master, 2)
    return {"master": master, "moments": sum(moments)}


def _recomputed(said: Values, values: Values) -> dict[str, Any]:
    kind, layers = said["recompute_granularity"], said["recompute_num_layers"]
    if kind == "full" or values.get("recompute"):
        is_block = kind == "full" and said["recompute_method"] == "block"
        own = (layers or 1) if kind == "full" else 1
        return {"recompute": "full", "layers": own, "is_block": is_block}
    modules = said["recompute_modules"]
    modules = ["core_attn"] if modules is None else modules
    if said["moe_layer_recompute"]:
        modules, kind = [*modules, "moe"], "selective"
    if not isinstance(modules, list) or set(modules) - set(MODULES):
        what = " ".join(map(str, modules if isinstance(modules, list) else [modules]))
        raise CheckError(f"what recomputation of {what[:60]} leaves is not known")
    return {"recompute": kind or "", "modules": tuple(modules)}


def micro_batches(rows: float, length: int | None, tokens: int, stages: int) -> int:
    """Micro-batches of a step with ``rows``; without a bound on their length, as many
    as the pipeline keeps at once.
    """
    return max(stages if length is None else math.ceil(rows * length / tokens), 1)
