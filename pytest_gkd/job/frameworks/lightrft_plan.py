"""The parts of a LightRFT job with text rollouts, for its memory plan.

Rules are those of its main branch at 49e62cb6; files are named below lightrft/.
Trainer, engine and reference model are in the same process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pytest_gkd.job import beside_memory
from pytest_gkd.job.beside_memory import Scorer
from pytest_gkd.job.engine_memory import MOST_SEQUENCES, Engine
from pytest_gkd.job.findings import CheckError
from pytest_gkd.job.fitting import Recipe, number
from pytest_gkd.job.frameworks import deepspeed
from pytest_gkd.job.frameworks.openrlhf.options import Known
from pytest_gkd.job.frameworks.recorded_options import plan_facts, refuse_unknown
from pytest_gkd.job.memory import Job
from pytest_gkd.job.models import WIDTHS, Model
from pytest_gkd.job.training_memory import Trainer

Values = Mapping[str, Any]
# Bytes of logits per token and vocabulary entry in a forward pass without training.
ASKED = 4
# Options whose effect on the memory is unknown, by key.
UNKNOWN = {
    "load_in_4bit": "the memory of bitsandbytes' weights",
    "fused_linear_logprob": "what the fused log-probabilities keep",
    "high_entropy_token_ratio": "what the entropy keeps",
    "use_mp_opt": "the state of FSDPadaptOptimizer",
    "enable_ema": "what the moving average's model leaves on the GPU",
    "aux_loss_coef": "what the router's loss keeps",
    "grad_accum_dtype": "the gradients' dtype in DeepSpeed",
    "pretrain_data": "the memory of two losses at once",
    "freeze_prefix": "how much is frozen",
}
# These change together with others.
BOUND = ("context_parallel_size", "tensor_parallel_size")


def recipe(known: Known) -> Recipe:
    """How its plan is made, with LightRFT's options."""
    keys, facts = plan_facts(known, "lightrft", BOUND, _facts)
    if "deepspeed" in facts:
        keys.pop("offload_param" if facts["deepspeed"] else "zero_stage", None)
    return Recipe(_job, keys, facts)


def _facts(known: Known) -> dict[str, Any]:
    """What the plan needs besides the values of ``gkd check``."""
    if not known.has("text_only") or not known["text_only"]:
        raise CheckError("the memory of a model of images is not known (--text_only)")
    refuse_unknown(known, UNKNOWN)
    for key in ("sp_size", "zpg"):
        if known[key] != 1:
            raise CheckError(f"the memory of --{key} {known[key]} is not known")
    if known["advantage_estimator"] == "gae":
        raise CheckError("the memory of LightRFT's critic is not known yet")
    if known.is_set("reward_pretrain"):
        raise CheckError("how the program loads its reward models is not known")
    if not known["bf16"] or not known["flash_attn"]:
        text = "without --bf16 and --flash_attn"
        raise CheckError(f"the memory {text} is not known")
    if known["lora_rank"]:
        raise CheckError("the dtypes of LoRA in LightRFT are not known yet")
    keys = ("init_kl_coef", "micro_rollout_batch_size", "overlap_comm", "engine_type")
    found = {key: known[key] for key in keys}
    is_fsdp = bool(known["fsdp"])
    shards = known["initial_model_shard_size"] if is_fsdp else None
    return found | {
        "deepspeed": not is_fsdp,
        "ref_shards": shards,
        "sleeps": bool(known["enable_engine_sleep"]),
    }


def _job(
    values: Values, student: Model, teacher: Model | None, room: int | None
) -> Job:
    """The parts of a job, at full lengths, also with packing."""
    if values.get("doubt"):
        raise CheckError(values["doubt"])
    gpus, micro = number(values, "trainer_gpus", "micro_batch_size")
    prompt, answer = number(values, "max_prompt_length", "max_response_length")
    mini, batch = number(values, "ppo_mini_batch_size", "train_batch_size")
    samples = number(values, "samples_per_prompt")[0]
    row, compute = prompt + answer, "bfloat16"
    is_deepspeed = values["deepspeed"]
    sharding = "fsdp2"
    if is_deepspeed:
        sharding = deepspeed.sharding(values.get("zero_stage"))
    # strategy/fsdp/fsdpv2.py: float32 for the optimizer, whose states may be offloaded
    # while others work; fsdp_cpu_offload keeps everything in host memory.
    weights = compute if is_deepspeed else "float32"
    states = "never"
    if values.get("offload_optimizer"):
        states = "always" if is_deepspeed else "between"
    away = bool(values.get("offload_param")) and not is_deepspeed
    buckets, live = deepspeed.buffers(
        student,
        sharding,
        overlaps=bool(values["overlap_comm"]),
        offloads=states == "always",
    )
    trainer = Trainer(
        student,
        gpus=gpus,
        sharding=sharding,
        apart=("head",),
        weights=weights,
        compute=compute,
        step="fused",
        offload_weights="always" if away else "never",
        offload_states="always" if away else states,
        recompute=bool(values.get("recompute")),
        tokens=micro * row,
        micro_batches=max(mini // (micro * gpus), 1),
        reduce=compute if is_deepspeed else "float32",
        loss=f"lightrft-{1 if micro == 1 else 2 if micro < 4 else 4}",
        buckets=buckets,
        live=live,
    )
    wide = values.get("tensor_parallel_size") or 1
    engine = Engine(
        student,
        gpus=gpus,
        tensor=wide,
        share=values.get("gpu_memory_utilization") or 0.5,
        length=values.get("max_model_len") or student.positions or row,
        sequences=min(MOST_SEQUENCES, math.ceil(batch * samples * wide / gpus)),
        sleeps=values["sleeps"],
        kind=values["engine_type"],
    )
    asked = number(values, "micro_rollout_batch_size")[0] * row
    reference = []
    if values["init_kl_coef"]:
        # In 16 bits; with FSDP in host memory between its turns (train_colocate.py).
        shards = values["ref_shards"] or gpus
        is_whole = is_deepspeed and sharding != "zero3"
        scorer = Scorer(
            *("reference", student, asked, 1 if is_whole else shards),
            logits=ASKED,
            offload="never" if is_deepspeed else "between",
            live=live,
        )
        reference = [beside_memory.scored(scorer, shares=True, processes=0)]
    return Job(
        trainer,
        engine,
        processes=1,
        memory=room,
        bucket=student.largest * WIDTHS[compute],
        scores=beside_memory.asked(trainer, asked, ASKED),
        others=tuple(reference),
    )
