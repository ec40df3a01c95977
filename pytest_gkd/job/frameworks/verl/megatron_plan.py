"""Makes the trainer of verl's Megatron engine for a memory plan.

Rules are those of verl 0.8.0 to 0.9.1 (workers/engine/megatron/transformer_impl.py and
what it uses), with Megatron-Bridge 0.5.0 or mbridge 0.15.1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from pytest_gkd.job import megatron_memory
from pytest_gkd.job.beside_memory import Beside
from pytest_gkd.job.engine_memory import Parts
from pytest_gkd.job.findings import CheckError
from pytest_gkd.job.fitting import number
from pytest_gkd.job.frameworks import megatron_trainer
from pytest_gkd.job.megatron_memory import Megatron
from pytest_gkd.job.models import WIDTHS, Model
from pytest_gkd.job.overrides import Job as Settings

Values = Mapping[str, Any]
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
REFERENCE = "actor_rollout_ref.ref"
CRITIC, ADVANTAGES = "critic.enable", "algorithm.adv_estimator"
ENGINE = f"{ACTOR}.megatron"
LAYERS = f"{ENGINE}.override_transformer_config"
# Where Megatron's settings may be; the first given one counts.
SECTIONS = (
    *(LAYERS, ENGINE, f"{ACTOR}.optim.override_optimizer_config", f"{ACTOR}.optim"),
    f"{ENGINE}.override_ddp_config",
)
RECOMPUTE = tuple(
    f"{LAYERS}.recompute_{part}"
    for part in ("granularity=full", "method=uniform", "num_layers=1")
)
# Settings whose name in verl is not that of Megatron's argument.
RENAMED = {
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
}
# Bytes of the loss per token and vocabulary entry in an update, without and with the
# entropy, and in a forward pass with it: counted on a CPU for the functions that
# _lm_head_logits_processor calls, logits in float32 (utils/megatron/tensor_parallel.py,
# trainer/distillation/megatron/losses.py), less the product of softmax and logits,
# which its compiled kernel does not materialise.
LOSSES = {"logprob": (8, 12), "topk": (16, 24)}
# In a forward pass with the entropy, with it in chunks, and of a reference model, which
# computes none.
SCORED, IN_CHUNKS, REFERENCED = 12, 8, 6
# Models with one kernel for a gate and its activation (Megatron-Bridge's llama_bridge
# and others, mbridge's qwen3moe and others), by config.json's model_type.
FUSED = {
    False: {"llama", "deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss", "kimi_k2"},
    True: {"qwen2_moe", "qwen3_moe", "glm4_moe", "deepseek_v3"},
}
# Settings whose effect on the memory is unknown, with the values that have none: of the
# rollout and what is beside it, and of the trainer.
ROLLOUTS: dict[str, tuple[str, tuple[Any, ...]]] = {
    f"{ROLLOUT}.quantization": ("quantized rollouts", ()),
    f"{ROLLOUT}.engine_kwargs.vllm.quantization": ("quantized rollouts", ()),
    f"{ROLLOUT}.engine_kwargs.vllm.kv_cache_dtype": ("such a KV cache", ("auto",)),
    f"{ROLLOUT}.dtype": ("rollouts in that dtype", ("bfloat16", "float16")),
    f"{ROLLOUT}.data_parallel_size": ("data-parallel rollouts", (1,)),
    f"{ROLLOUT}.expert_parallel_size": ("experts divided in a rollout", (1,)),
    "reward.reward_model.enable": ("a reward model", (False,)),
}
UNKNOWN: dict[str, tuple[str, tuple[Any, ...]]] = {
    f"{ENGINE}.dtype": ("training in that dtype", ("bfloat16", "float16")),
    f"{ENGINE}.use_megatron_fsdp": ("Megatron's FSDP", (False,)),
    f"{ENGINE}.dynamic_context_parallel": ("dynamic context parallelism", (False,)),
    f"{ENGINE}.qat.enable": ("quantisation-aware training", (False,)),
    f"{ENGINE}.use_remove_padding": ("padded rows", (True,)),
    f"{LAYERS}.attention_backend": ("that attention", ("flash", "fused", "auto")),
    f"{ACTOR}.calculate_sum_pi_squared": ("the sum of squares", (False,)),
    f"{ACTOR}.optim.optimizer": ("that optimizer", ("adam",)),
    "actor_rollout_ref.model.use_fused_kernels": ("fused kernels", (False,)),
    "actor_rollout_ref.model.mtp.enable": ("layers that predict more", (False,)),
    "actor_rollout_ref.model.lora.rank": ("LoRA's layers in Megatron", (0,)),
    "actor_rollout_ref.model.lora_rank": ("LoRA's layers in Megatron", (0,)),
    **ROLLOUTS,
}
FACTS = {
    "entropy": f"{ACTOR}.calculate_entropy",
    "entropy_coeff": f"{ACTOR}.entropy_coeff",
    "in_chunks": f"{ENGINE}.entropy_from_logits_with_chunking",
    "chunk": f"{ENGINE}.entropy_from_logits_chunk_size",
    "bypasses": "algorithm.rollout_correction.bypass_mode",
    "scored_rows": f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
    "scored_tokens": f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
    "is_distributed": f"{ENGINE}.use_distributed_optimizer",
    "reduces_in_float32": f"{ENGINE}.override_ddp_config.grad_reduce_in_fp32",
    "main_gradients": f"{ACTOR}.optim.main_grads_dtype",
    "is_vanilla": f"{ENGINE}.vanilla_mbridge",
    "half": f"{ENGINE}.dtype",
    "fuses_gates": f"{LAYERS}.bias_activation_fusion",
    "fuses": f"{LAYERS}.gradient_accumulation_fusion",
    "on_host": f"{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload",
    "remainders": f"{ACTOR}.optim.override_optimizer_config.store_param_remainders",
    "kl_loss": f"{ACTOR}.use_kl_loss",
    "kl_reward": "algorithm.use_kl_in_reward",
    "reference_offload": f"{REFERENCE}.megatron.param_offload",
    "reference_dynamic": f"{REFERENCE}.log_prob_use_dynamic_bsz",
    "reference_rows": f"{REFERENCE}.log_prob_micro_batch_size_per_gpu",
    "reference_tokens": f"{REFERENCE}.log_prob_max_token_len_per_gpu",
}
DIVIDED = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size"),
    *("context_parallel_size", "expert_model_parallel_size"),
)


def facts(settings: Settings) -> dict[str, Any]:
    """What the plan needs besides the values of ``gkd check``, or the ``doubt``."""
    try:
        return _facts(settings)
    except CheckError as error:
        return {"doubt": str(error), "recompute": None}


def certain(settings: Settings, key: str) -> Any:
    """A value, None if the release has no such key. Raises CheckError if it cannot be
    determined.
    """
    given = settings.find(key)
    if given.needs and given.needs != {key}:
        raise CheckError(f"{key} is not certain")
    return given.value


def refuse(
    settings: Settings, unknown: Mapping[str, tuple[str, tuple[Any, ...]]]
) -> None:
    """Raises CheckError for a setting whose effect on the memory is unknown, and for a
    critic (trainer/ppo/utils.py, need_critic).
    """
    for key, (text, harmless) in unknown.items():
        value = certain(settings, key)
        if value is not None and value not in harmless:
            raise CheckError(f"the memory of {text} is not known ({key})")
    asked = certain(settings, CRITIC)
    if asked or (asked is None and certain(settings, ADVANTAGES) == "gae"):
        key = ADVANTAGES if asked is None else CRITIC
        raise CheckError(f"the memory of a critic is not known ({key})")


def _facts(settings: Settings) -> dict[str, Any]:
    refuse(settings, UNKNOWN)
    find = functools.partial(certain, settings)
    found = {name: find(key) for name, key in FACTS.items()}
    if found["kl_loss"] or found["kl_reward"]:
        for size in DIVIDED:
            if find(f"{REFERENCE}.megatron.{size}") != find(f"{ENGINE}.{size}"):
                raise CheckError(f"the reference model's {size} is not the actor's")

    def of_megatron(key: str) -> Any:
        name = RENAMED.get(key, key)
        values = (find(f"{section}.{name}") for section in SECTIONS)
        return next((value for value in values if value is not None), None)

    said = megatron_trainer.settings(of_megatron)
    found["recompute"] = said["recompute_granularity"] == "full"
    return found | {"megatron": said | _precision(found, said)}


def _precision(found: Values, said: Values) -> dict[str, Any]:
    """Settings of dtypes (utils/megatron/optimizer.py, init_megatron_optim_config;
    transformer_impl.py, _resolve_override_ddp_config).

    Gradients have the weights' width unless stated otherwise: that is the default of
    Megatron's DistributedDataParallelConfig, which Megatron-Bridge keeps and mbridge
    does not (core/util.py).
    """
    is_half = found["half"] == "float16"
    in_float32 = found["reduces_in_float32"]
    aware = bool(said["use_precision_aware_optimizer"]) or is_half
    if in_float32 is None:
        is_narrow = aware and found["main_gradients"] not in (None, "fp32", "float32")
        in_float32 = bool(found["is_vanilla"]) and not is_narrow
    return {
        "fp16": is_half,
        "grad_reduce_in_bf16": not in_float32,
        "hidden_dropout": said["hidden_dropout"] or 0,
        "use_precision_aware_optimizer": aware,
        # Neither bridge pads the vocabulary.
        "make_vocab_size_divisible_by": said["make_vocab_size_divisible_by"] or 1,
        "store_param_remainders": found["remainders"],
    }


def trainer(
    values: Values, model: Model, length: int, rows: float
) -> tuple[Megatron, Parts, tuple[Beside, ...]]:
    """The trainer, what scoring the student's own rows takes, and a reference model.

    If its parameters are offloaded, so are its gradients (utils/megatron_utils.py,
    offload_megatron_model_to_cpu); everything is on the GPU in an update.
    """
    if values.get("doubt"):
        raise CheckError(values["doubt"])
    said = values["megatron"]
    context = values.get("context_parallel_size") or 1
    stages = said["pipeline_model_parallel_size"] or 1
    tensor = values.get("train_tensor_parallel_size") or 1
    rows *= tensor * stages
    is_dynamic = bool(values.get("use_dynamic_bsz"))
    if is_dynamic:
        tokens = max(number(values, "max_tokens_per_gpu")[0] * context, length)
        tokens = min(tokens, math.ceil(rows) * length)
    else:
        tokens = number(values, "micro_batch_size")[0] * length
    is_topk = "topk" in str(values.get("loss")) and values.get("teacher_gpus")
    has_entropy = values["entropy"] or bool(values["entropy_coeff"])
    vanilla, fuses_gates = bool(values["is_vanilla"]), values["fuses_gates"]
    if fuses_gates is None:
        fuses_gates = model.kind in FUSED[vanilla]
    made = megatron_trainer.trainer(
        said,
        # In megatron_trainer the name means states that are always in host memory.
        {**values, "offload_optimizer": values["on_host"]},
        model,
        tokens=tokens,
        micro_batches=megatron_trainer.micro_batches(rows, length, tokens, stages),
        loss=LOSSES["topk" if is_topk else "logprob"][bool(has_entropy)],
        is_distributed=values["is_distributed"] is not False,
        away=frozenset(_away(values)),
        away_to_send=frozenset(_away(values)) - {"weights"},
        fuses_gates=bool(fuses_gates),
        # Megatron-Bridge uses the kernel if it is available.
        fuses=bool(not vanilla if values["fuses"] is None else values["fuses"]),
    )
    has_reference = values["kl_loss"] or values["kl_reward"]
    others = (_reference(values, made, length, context),) if has_reference else ()
    scores = {} if values["bypasses"] else _scores(values, made, length, context)
    return made, scores, others


def _away(values: Values) -> Iterator[str]:
    if values.get("offload_param"):
        yield from ("weights", "gradients")
    if values.get("offload_optimizer"):
        yield "states"


def _scores(values: Values, made: Megatron, length: int, context: int) -> Parts:
    """A forward pass with entropy (trainer/ppo/ray_trainer.py, _compute_old_log_prob),
    for which neither gradients nor states are loaded back (workers/engine/base.py).
    """
    if values.get("use_dynamic_bsz"):
        tokens = max((values["scored_tokens"] or 0) * context, length)
    else:
        tokens = (values["scored_rows"] or 1) * length
    each = SCORED
    if values["in_chunks"]:
        each = IN_CHUNKS + math.ceil(4 * min(1, (values["chunk"] or 1) / tokens))
    return megatron_memory.scoring(replace(made, loss=each), tokens, "sync")


def _reference(values: Values, made: Megatron, length: int, context: int) -> Beside:
    """The model that a KL penalty refers to, in the same processes: weights alone,
    without a wrapper (transformer_impl.py, forward_only).
    """
    if values["reference_dynamic"]:
        tokens = max((values["reference_tokens"] or 0) * context, length)
    else:
        tokens = (values["reference_rows"] or 1) * length
    stages = range(made.pipeline)
    most = max(sum(megatron_memory.elements(made, stage)) for stage in stages)
    own = {f"reference's weights {made.compute}": WIDTHS[made.compute] * most}
    asked = megatron_memory.scoring(replace(made, loss=REFERENCED), tokens)
    names = ("logits and loss", "activations")
    at_work = own | {f"reference's {name}": asked[name] for name in names}
    idle = {} if values["reference_offload"] else own
    return Beside("reference", idle, (("forward", at_work),), True, idle, 0)
