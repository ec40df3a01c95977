"""What has no memory plan of verl under FSDP, and is told so in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checked_job import Checked

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
PPO = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo "
    f"{MODEL}.path={{s}} data.train_files=/a.parquet data.train_batch_size=64 "
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=2 trainer.n_gpus_per_node=8 "
    f"{ROLLOUT}.name=vllm"
)
SFT = (
    "torchrun --nproc_per_node=8 -m verl.trainer.sft_trainer model.path={s} "
    "data.train_files=/a.parquet data.train_batch_size=64"
)
FUSED_ADAM = (
    "optimizer=FusedAdam",
    "optimizer_impl=transformer_engine.pytorch.optimizers",
)
NO_ADAMW = "the memory of that optimizer is not known"
LESS = "the model's sizes may not be those of its files"


@pytest.fixture
def checked(tmp_path: Path, capsys: Any) -> Checked:
    return Checked(tmp_path, capsys, "verl==0.9.1")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("algorithm.adv_estimator=gae", "the memory of a critic"),
        ("critic.enable=True", "the memory of a critic"),
        (" ".join(f"{ACTOR}.optim.{one}" for one in FUSED_ADAM), NO_ADAMW),
        (f"{ACTOR}.optim.optimizer_impl=bitsandbytes.optim", NO_ADAMW),
        (f"+{ACTOR}.optim.override_optimizer_config.fused=True", NO_ADAMW),
        (f"{ROLLOUT}.quantization=fp8", "quantized rollouts"),
        (f"+{ROLLOUT}.engine_kwargs.vllm.quantization=fp8", "quantized rollouts"),
        (f"+{ROLLOUT}.engine_kwargs.vllm.kv_cache_dtype=fp8", "such a KV cache"),
        (f"{ROLLOUT}.dtype=float32", "rollouts in that dtype"),
        (f"{ROLLOUT}.expert_parallel_size=8", "experts divided in a rollout"),
        (f"+{ACTOR}.fsdp_config.mixed_precision.param_dtype=fp32", "that dtype"),
        (f"{ACTOR}.fsdp_config.reshard_after_forward=False", "keeps what it gathers"),
        (f"{ACTOR}.fsdp_config.qat.enable=True", "quantization-aware training"),
        (f"{ACTOR}.entropy_coeff=0.01", "the entropy's gradient"),
        (f"{MODEL}.use_liger=True", "Liger's kernels"),
        (f"{MODEL}.enable_activation_offload=True", "offloaded activations"),
        (f"+{MODEL}.override_config.num_hidden_layers=2", LESS),
        ("reward.reward_model.enable=True", "a reward model"),
        ("model_engine=veomni", "a trainer under veomni"),
        ("model_engine=automodel", "keys under automodel are not recorded"),
    ],
)
def test_main_ppo(checked: Checked, more: str, said: str) -> None:
    found = checked(f"{PPO} {more}")
    assert found["memory"] == []
    assert said in found["no_memory_plan"]


@pytest.mark.parametrize(
    "more",
    [
        "",
        # It is in host memory whatever its options (FSDPEngine._build_fsdp_module).
        f"{ACTOR}.use_kl_loss=True",
        "critic.enable=False algorithm.adv_estimator=gae",
        f"+{ACTOR}.fsdp_config.mixed_precision.param_dtype=bf16",
        f"+{MODEL}.override_config.attn_implementation=sdpa",
        f"{ACTOR}.calculate_entropy=True",
    ],
)
def test_main_ppo_has_a_plan(checked: Checked, more: str) -> None:
    found = checked(f"{PPO} {more}")
    assert found["memory"], found["no_memory_plan"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("", ""),
        (" ".join(f"optim.{one}" for one in FUSED_ADAM), NO_ADAMW),
        ("model.use_liger=True", "Liger's kernels"),
        ("+engine.mixed_precision.param_dtype=fp32", "that dtype"),
        ("+model.override_config.num_hidden_layers=2", LESS),
        ("engine=automodel optim=automodel", "verl's sft_trainer is not known yet"),
    ],
)
def test_sft(checked: Checked, more: str, said: str) -> None:
    found = checked(f"{SFT} {more}")
    assert bool(found["memory"]) == (not said)
    assert said in found["no_memory_plan"]
