"""The parts of an OpenRLHF job, with a rollout or of SFT, for its memory plan.

Rules are those of 0.8.11 to 0.11.2; its files are named below openrlhf/. Actor, critic,
reference and reward model are separate processes, each with DeepSpeed. SFT takes the
actor's forward pass and log-probabilities (trainer/sft_trainer.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pytest_gkd.job import beside_memory
from pytest_gkd.job.beside_memory import Beside, Scorer
from pytest_gkd.job.engine_memory import MOST_SEQUENCES, Engine
from pytest_gkd.job.findings import CheckError
from pytest_gkd.job.fitting import Recipe, number
from pytest_gkd.job.frameworks import deepspeed
from pytest_gkd.job.frameworks.openrlhf.options import Known
from pytest_gkd.job.frameworks.openrlhf.rules import has_critic, has_function
from pytest_gkd.job.frameworks.recorded_options import plan_facts, refuse_unknown
from pytest_gkd.job.memory import Job
from pytest_gkd.job.models import WIDTHS, Model
from pytest_gkd.job.training_memory import Trainer

Values = Mapping[str, Any]
# Bytes of logits per token and vocabulary entry in a forward pass without training: in
# 16 bits and in float32 (models/actor.py, forward).
ASKED = 6
# Options whose effect on the memory is unknown, by key.
UNKNOWN = {
    "load_in_4bit": "the memory of bitsandbytes' weights",
    "use_liger_kernel": "what Liger's kernels keep",
    "deepcompile": "what DeepCompile keeps",
    "enable_ema": "what the moving average's model leaves on the GPU",
    "entropy_loss_coef": "what the compiled entropy keeps",
    "aux_loss_coef": "what the router's loss keeps",
    "grad_accum_dtype": "the gradients' dtype in DeepSpeed",
}
# The keys of these change together with others, since roles must share their GPUs.
BOUND = ("nodes", "gpus_per_node", "tensor_parallel_size", "context_parallel_size")


def recipe(known: Known) -> Recipe:
    """How its plan is made, with the release's options."""
    keys, facts = plan_facts(known, "openrlhf", BOUND, _facts)
    return Recipe(_job, keys, facts, {} if "doubt" in facts else _models(known))


def offline(known: Known, program: str) -> Recipe:
    """The same of a program without a rollout."""

    def facts(known: Known) -> dict[str, Any]:
        if program != "train_sft":
            raise CheckError(f"the memory of OpenRLHF's {program} is not known yet")
        return _trainer_facts(known)

    keys, found = plan_facts(known, "openrlhf-offline", BOUND, facts)
    return Recipe(_offline_job, keys, found)


def _trainer_facts(known: Known) -> dict[str, Any]:
    """What is needed of any trainer. Raises CheckError if its memory is not known."""
    refuse_unknown(known, UNKNOWN)
    for name in ("actor.optim", "critic.optim", "optim"):
        if known.has(name) and known[name] != "adam":
            raise CheckError(f"the state of the optimizer {known[name]} is not known")
    for key in ("ds_tensor_parallel_size", "zpg"):
        if known.has(key) and known[key] != 1:
            text = f"the memory of {known.option(key)} {known[key]}"
            raise CheckError(f"{text} is not known")
    if "flash_attention" not in str(known["attn_implementation"]):
        # Without flash-attn the gradients of the logits differ, too.
        raise CheckError("the memory without flash attention is not known")
    if known["lora_rank"] and not known["gradient_checkpointing"]:
        raise CheckError("what LoRA's layers keep without recomputation is not known")
    return {"overlap_comm": known["overlap_comm"], "compute": _compute(known)}


def _facts(known: Known) -> dict[str, Any]:
    """What the plan needs besides the values of ``gkd check``."""
    found = _trainer_facts(known)
    shares_all = bool(known["colocate_all_models"])
    for key in ("init_kl_coef", "micro_rollout_batch_size", "colocate_critic_reward"):
        found[key] = known[key]
    offloads = known["ref_reward_offload"] if known.has("ref_reward_offload") else None
    return found | {
        "ref_offload": known["ref_offload"] if offloads is None else offloads,
        "reward_offload": known["reward.offload"] if offloads is None else offloads,
        "shares_all": shares_all,
        "shares_ref": shares_all or bool(known["colocate_actor_ref"]),
        "shares_engine": shares_all and not known["async_train"],
        "has_critic": has_critic(known),
        "has_reward": not has_function(known),
        "rollout_tokens": _rollout_tokens(known),
    }


def _compute(known: Known) -> str:
    if known.has("param_dtype"):
        return {"bf16": "bfloat16", "fp16": "float16"}[known["param_dtype"]]
    if not known["bf16"]:
        raise CheckError("the memory without --bf16 is not known")
    return "bfloat16"


def _rollout_tokens(known: Known) -> int | None:
    """The most tokens of a scored micro-batch, with dynamic batches."""
    if not known["use_dynamic_batch"]:
        return None
    keys = ("rollout_max_tokens_per_gpu", "train_max_tokens_per_gpu")
    found = [known[key] for key in keys if known.has(key)]
    return next((int(one) for one in found if one), None)


def _models(known: Known) -> dict[str, Any]:
    """Paths of further models (train_ppo_ray.py, main)."""
    found = {}
    reward = None if has_function(known) else str(known["reward_pretrain"] or "")
    if reward:
        found["reward"] = reward
    if has_critic(known):
        own = known["critic_pretrain"] or (reward or "").split(",")[0]
        found["critic"] = own or known["pretrain"]
    return found


def _job(
    values: Values, student: Model, teacher: Model | None, room: int | None
) -> Job:
    """The parts of a job, at full lengths, also with packing."""
    if values.get("doubt"):
        raise CheckError(values["doubt"])
    gpus, engines = number(values, "trainer_gpus", "rollout_gpus")
    row, batch, mini = number(
        values, "max_model_len", "train_batch_size", "ppo_mini_batch_size"
    )
    samples = number(values, "samples_per_prompt")[0]
    common = _common(values, student, gpus, row, mini)
    trainer = Trainer(student, gpus=gpus, loss="openrlhf", **common)
    scored = values["rollout_tokens"]
    if not scored:
        scored = (
            number(values, "micro_rollout_batch_size")[0] * row // common["context"]
        )
    at_once = math.ceil(batch * samples * (values["tensor_parallel_size"] or 1))
    engine = Engine(
        student,
        gpus=engines,
        tensor=values["tensor_parallel_size"] or 1,
        share=values.get("gpu_memory_utilization") or 0.95,
        length=row,
        sequences=min(math.ceil(at_once / engines), MOST_SEQUENCES),
        sleeps=bool(values.get("free_cache_engine") and values["shares_engine"]),
        eager=bool(values.get("enforce_eager")),
    )
    return Job(
        trainer,
        engine,
        colocated=values["shares_engine"],
        memory=room,
        bucket=student.largest * WIDTHS[common["compute"]],
        scores=beside_memory.asked(trainer, math.ceil(scored), ASKED),
        others=tuple(_others(values, student, math.ceil(scored), common)),
    )


def _offline_job(
    values: Values, student: Model, _: Model | None, room: int | None
) -> Job:
    """The parts of SFT, at full lengths, also with packing."""
    if values.get("doubt"):
        raise CheckError(values["doubt"])
    gpus, row, batch = number(values, "trainer_gpus", "max_length", "train_batch_size")
    common = _common(values, student, gpus, row, batch)
    return Job(Trainer(student, gpus=gpus, loss="openrlhf", **common), memory=room)


def _common(
    values: Values, student: Model, gpus: int, row: int, batch: int
) -> dict[str, Any]:
    """How actor and critic are trained, by Trainer's names: rows of ``row`` tokens,
    ``batch`` of them in a step.
    """
    micro, ring = number(values, "micro_batch_size", "context_parallel_size")
    sharding = deepspeed.sharding(values.get("zero_stage"))
    states = "always" if values.get("offload_optimizer") else "never"
    if states == "never" and values.get("trainer_sleeps"):
        states = (
            "between"  # utils/deepspeed/deepspeed_utils.py, offload_deepspeed_states
        )
    if values.get("use_dynamic_bsz"):
        budget = number(values, "max_tokens_per_gpu")[0] * ring
        tokens, steps = max(budget, row), 2
    else:
        tokens, steps = micro * row, max(batch * ring // (micro * gpus), 1)
    # What is "auto" in its DeepSpeed configuration is DeepSpeed's default
    # (deepspeed/runtime/config_utils.py, DeepSpeedConfigModel).
    buckets, live = deepspeed.buffers(
        student,
        sharding,
        overlaps=bool(values["overlap_comm"]),
        offloads=states == "always",
    )
    compute = values["compute"]
    return {
        "sharding": sharding,
        "weights": compute,
        "compute": compute,
        "context": ring,
        "step": "fused",
        "offload_states": states,
        "recompute": bool(values.get("recompute")),
        "tokens": tokens,
        "micro_batches": steps,
        "reduce": compute,
        "lora_rank": values.get("lora_rank") or 0,
        "buckets": buckets,
        "live": live,
    }


def _others(
    values: Values, student: Model, tokens: int, common: dict[str, Any]
) -> list[Beside]:
    """Reference, reward model and critic (trainer/ray/launcher.py, ppo_critic.py)."""
    found, models = [], values.get("models", {})
    apart = values["colocate_critic_reward"] and values["has_critic"]
    if apart and values["has_reward"]:
        raise CheckError("GPUs that a critic and a reward model share are not planned")
    is_sharded = common["sharding"] == "zero3"
    dtypes = {"dtype": common["compute"], "compute": common["compute"]}
    live = common["live"]

    def away(name: str) -> str:
        """Stages below 3 have no sharded inference, nor its offload."""
        return "always" if values[name] and is_sharded else "never"

    if values["init_kl_coef"] > 0:
        ranks = number(values, "reference_gpus")[0] if is_sharded else 1
        of = Scorer(
            *("reference", student, tokens, ranks),
            logits=ASKED,
            offload=away("ref_offload"),
            live=live,
            **dtypes,
        )
        found.append(beside_memory.scored(of, shares=values["shares_ref"]))
    if "reward" in models:
        model = beside_memory.valued(models["reward"])
        ranks = number(values, "reward_gpus")[0] if is_sharded else 1
        offload = away("reward_offload")
        of = Scorer(
            "reward", model, tokens, ranks, offload=offload, live=live, **dtypes
        )
        found.append(beside_memory.scored(of, shares=values["shares_all"]))
    if "critic" in models:
        model = beside_memory.valued(models["critic"])
        critic = Trainer(
            model, gpus=number(values, "critic_gpus")[0], loss="fused", **common
        )
        shares = values["shares_all"] and not apart
        at_once = not values.get("trainer_sleeps")
        found.append(
            beside_memory.trained("critic", critic, shares=shares, at_once=at_once)
        )
    return found
