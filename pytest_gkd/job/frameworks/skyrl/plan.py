"""The parts of a SkyRL job under FSDP, RL or main_sft, for its memory plan.

Rules are those of 0.3.0 and the main branch at a9564572; files are named below
backends/skyrl_train/ unless stated otherwise. Policy, critic and reference model are
separate processes, whose models and states are in host memory while another of them, or
an engine, has the GPU (workers/worker_dispatch.py). SFT takes the policy's worker, with
the same log-probabilities and entropies (workers/worker.py, _forward_backward_micro).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pytest_gkd.job import beside_memory, looking
from pytest_gkd.job.beside_memory import Beside, Scorer
from pytest_gkd.job.engine_memory import MOST_SEQUENCES, Engine
from pytest_gkd.job.findings import CheckError
from pytest_gkd.job.fitting import Recipe, number, sampling_engine
from pytest_gkd.job.frameworks.reading import names
from pytest_gkd.job.frameworks.skyrl import rules, sft
from pytest_gkd.job.frameworks.skyrl.rules import Look
from pytest_gkd.job.memory import Job
from pytest_gkd.job.models import WIDTHS, Model
from pytest_gkd.job.training_memory import Trainer

Values = Mapping[str, Any]
# Bytes of logits per token and vocabulary entry in a forward pass without training.
ASKED = 2
MEGATRON = "the memory of SkyRL under Megatron is not known yet"
# The keys of these change together with others, since roles must share their GPUs.
BOUND = (
    *("nodes", "gpus_per_node", "tensor_parallel_size", "pipeline_parallel_size"),
    *("context_parallel_size", "expert_parallel_size"),
)


def recipe(look: Look) -> Recipe:
    """How its plan is made, with SkyRL's keys."""
    facts = looking.plan_facts(_facts, look)
    path = facts.pop("critic_path", None)
    keys = _keys("skyrl", "skyrl-fsdp")
    return Recipe(_job, keys, facts, {"critic": path} if path else {})


def sft_recipe(look: sft.Look) -> Recipe:
    """The same of main_sft."""
    facts = looking.plan_facts(_sft_facts, look)
    return Recipe(_sft_job, _keys("skyrl-sft", "skyrl-sft-fsdp"), facts)


def _keys(*tables: str) -> dict[str, tuple[str, ...]]:
    """The keys of what a plan may change."""
    every = [pair for table in tables for pair in names(table).items()]
    return {name: (key,) for name, key in every if name not in BOUND}


def _sft_facts(look: sft.Look) -> dict[str, Any]:
    if look.is_megatron():
        raise CheckError(MEGATRON)
    context = look.size("sequence_parallel_size", 1)
    return {"policy": _sharded(look, "fsdp_config", look.gpus(), context)}


def _facts(look: Look) -> dict[str, Any]:
    """What the plan needs besides the values of ``gkd check``."""
    if look.is_megatron():
        raise CheckError(MEGATRON)
    critic = look(rules.CRITIC)
    shares_all = look.is_on(f"{rules.PLACEMENT}.colocate_all")
    shares_ref = look.is_on(f"{rules.PLACEMENT}.colocate_policy_ref")
    roles = ["policy", *(["ref"] * look.uses_ref()), *(["critic"] * bool(critic))]
    for key, text in (
        ("policy.inference_only_init", "the memory of a policy that is not trained"),
        ("algorithm.use_entropy_loss", "what the entropy's gradient keeps"),
    ):
        if look.is_on(f"trainer.{key}"):
            raise CheckError(f"{text} is not known (trainer.{key})")
    if not look("trainer.flash_attn", True):
        raise CheckError("the memory without flash attention is not known")
    if look("trainer.logprobs_chunk_size", 1024) != 1024:
        raise CheckError("the memory of another logprobs_chunk_size is not known")
    found: dict[str, Any] = {"critic_path": critic}
    for role in roles:
        context = look.size(f"trainer.{role}.sequence_parallel_size", 1)
        start = f"trainer.{role}.fsdp_config"
        found[role] = _sharded(look, start, look.gpus(role), context)
    lora = "trainer.policy.model.lora.rank"
    if look.whole(lora, 0) and not look("trainer.gradient_checkpointing", True):
        raise CheckError("what LoRA's layers keep without recomputation is not known")
    step = "optimizer_config.offload_after_step"
    return found | {
        "shares_all": shares_all,
        "shares_ref": look.uses_ref() and (shares_all or shares_ref),
        "states_leave": look(f"trainer.policy.{step}", True),
        "critic_states_leave": look(f"trainer.critic.{step}", True),
        "prompt": _prompt(look),
        "forward_rows": look.size("trainer.micro_forward_batch_size_per_gpu"),
        "ref_dtype": "bfloat16" if look("trainer.bf16", True) else "float32",
        "is_here": look(f"{rules.ENGINE}.run_engines_locally", True),
        "gigabytes": look.number(
            f"{rules.ENGINE}.weight_transfer_threshold_cuda_ipc_GB", 1.0
        ),
    }


def _sharded(look: looking.Look, start: str, gpus: int, context: int) -> dict[str, Any]:
    """How a role's FSDP below the key ``start`` divides it."""
    if look(f"{start}.reshard_after_forward", True) is not True:
        text = "FSDP that keeps what it has gathered is not known yet"
        raise CheckError(f"{text} ({start}.reshard_after_forward)")
    if look(f"{start}.mixed_precision") is not None:
        raise CheckError(f"{start}.mixed_precision is not known yet")
    return {
        "gpus": gpus,
        "shards": look.whole(f"{start}.fsdp_size", -1),
        "context": context,
        "is_away": look.is_on(f"{start}.cpu_offload"),
    }


def _prompt(look: Look) -> int:
    """The longest prompt; with several turns, everything before the last answer."""
    prompt = look.size("trainer.max_prompt_length")
    if look.whole("generator.max_turns", 1) > 1:
        return max(prompt, look.size("generator.max_input_length"))
    return prompt


def _job(
    values: Values, student: Model, teacher: Model | None, room: int | None
) -> Job:
    """The parts of a job, at full lengths."""
    if values.get("doubt"):
        raise CheckError(values["doubt"])
    policy, shares_all = values["policy"], values["shares_all"]
    row = values["prompt"] + number(values, "max_response_length")[0]
    samples, mini = number(values, "samples_per_prompt", "ppo_mini_batch_size")
    replicas = max(policy["gpus"] // policy["context"], 1)
    if values.get("use_dynamic_bsz"):
        tokens = max(number(values, "max_tokens_per_gpu")[0], row)
        asked = tokens
    else:
        micro = number(values, "micro_batch_size")[0]
        tokens, asked = micro * row, values["forward_rows"] * row
    common: dict[str, Any] = {
        "recompute": values.get("recompute") is not False,
        "tokens": tokens,
        "micro_batches": 1 + (mini * samples * row / replicas > tokens),
    }
    leaves = shares_all or values["shares_ref"]
    trainer = _policy(
        *(values, student),
        leaves=(leaves, leaves and values["states_leave"]),
        **common,
    )
    bucket = student.largest * WIDTHS["bfloat16"]
    if shares_all:  # CUDA IPC collects modules up to this many bytes
        bucket = max(bucket, int(values["gigabytes"] * 1e9))
    return Job(
        trainer,
        _engine(values, student, row) if values["is_here"] else None,
        colocated=shares_all,
        memory=room,
        bucket=bucket,
        scores=beside_memory.asked(
            trainer, math.ceil(asked / policy["context"]), ASKED
        ),
        others=tuple(_others(values, student, teacher, asked, common)),
    )


def _sft_job(values: Values, student: Model, _: Model | None, room: int | None) -> Job:
    """The parts of SFT, at full lengths; the collator pads a micro-batch's rows."""
    if values.get("doubt"):
        raise CheckError(values["doubt"])
    if values.get("max_length") is None:
        raise CheckError("nothing bounds the rows (max_length)")
    row, micro, batch = number(
        values, "max_length", "micro_batch_size", "train_batch_size"
    )
    own = values["policy"]
    several = batch * own["context"] > micro * own["gpus"]
    trainer = _policy(values, student, tokens=micro * row, micro_batches=1 + several)
    return Job(trainer, memory=room)


def _policy(
    values: Values,
    student: Model,
    *,
    leaves: tuple[bool, bool] = (False, False),
    **sizes: Any,
) -> Trainer:
    """The student; ``leaves`` is whether SkyRL offloads its weights and its states."""
    own = values["policy"]
    is_away = bool(values.get("offload_param") or values.get("offload_optimizer"))
    return Trainer(
        student,
        gpus=own["gpus"],
        sharding="fsdp2",
        apart=("embedding",),
        shards=max(own["shards"], 0),
        context=own["context"],
        weights="float32",
        offload_weights=_when(is_away, leaves[0]),
        offload_states=_when(is_away, leaves[1]),
        loss="skyrl",
        lora_rank=values.get("lora_rank") or 0,
        **sizes,
    )


def _when(is_away: bool, leaves: bool) -> str:
    """When it is in host memory: with FSDP2's own offload, which disables SkyRL's, or
    with SkyRL's (distributed/fsdp_strategy.py, manual_offload).
    """
    return "always" if is_away else "between" if leaves else "never"


def _engine(values: Values, student: Model, row: int) -> Engine:
    """vLLM engines, which sleep while another role has their GPUs
    (inference_servers/utils.py).
    """
    return sampling_engine(
        values,
        student,
        row,
        share=0.8,
        sequences=values.get("max_num_seqs") or MOST_SEQUENCES,
        batched_tokens=values.get("max_num_batched_tokens") or 8192,
        sleeps=values["shares_all"],
        eager=bool(values.get("enforce_eager")),
    )


def _others(
    values: Values,
    student: Model,
    teacher: Model | None,
    tokens: int,
    common: dict[str, Any],
) -> list[Beside]:
    """The reference model, a teacher or not, and the critic (train/trainer.py,
    build_models)."""
    found, shares_all = [], values["shares_all"]
    if ref := values.get("ref"):
        scorer = Scorer(
            "reference",
            teacher or student,
            math.ceil(tokens / ref["context"]),
            _ranks(ref),
            dtype=values["ref_dtype"],
            logits=ASKED,
            offload=_when(ref["is_away"], values["shares_ref"]),
        )
        found.append(beside_memory.scored(scorer, shares=values["shares_ref"]))
    if own := values.get("critic"):
        critic = Trainer(
            beside_memory.valued(values["models"]["critic"]),
            gpus=own["gpus"],
            shards=max(own["shards"], 0),
            context=own["context"],
            offload_weights=_when(own["is_away"], shares_all),
            offload_states=_when(
                own["is_away"], shares_all and values["critic_states_leave"]
            ),
            sharding="fsdp2",
            apart=("embedding",),
            weights="float32",
            loss="fused",
            **common,
        )
        found.append(
            beside_memory.trained("critic", critic, shares=shares_all, at_once=False)
        )
    return found


def _ranks(role: Mapping[str, Any]) -> int:
    """Ranks that share one copy."""
    shards, gpus = role["shards"], role["gpus"]
    return int(shards if 0 < shards < gpus else gpus)
