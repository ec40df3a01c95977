"""The memory plan of verl's Megatron engine: parts counted by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checked_job import Checked
from test_estimate import HALF_B

LAYERS = "actor_rollout_ref.actor.megatron.override_transformer_config"
MEGATRON = "actor_rollout_ref.actor.megatron"
VERL = (
    "python3 -m verl.trainer.main_ppo model_engine=megatron "
    "algorithm.adv_estimator=grpo actor_rollout_ref.model.path={s} "
    "data.train_batch_size=32 data.max_prompt_length=1024 "
    "data.max_response_length=3072 actor_rollout_ref.rollout.n=4 "
    "actor_rollout_ref.actor.ppo_mini_batch_size=32 "
    "actor_rollout_ref.actor.use_dynamic_bsz=True "
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192 "
    "actor_rollout_ref.rollout.name=vllm "
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1 "
    f"{MEGATRON}.tensor_model_parallel_size=2 trainer.nnodes=1 "
    "trainer.n_gpus_per_node=4"
)
TEACHER = (
    "distillation.enabled=True distillation.nnodes=1 distillation.n_gpus_per_node=4 "
    "distillation.teacher_models.teacher_model.model_path={t} "
    "distillation.teacher_models.teacher_model.inference.tensor_model_parallel_size=4 "
    "distillation.distillation_loss.loss_mode=forward_kl_topk"
)
FULL = " ".join(
    f"{LAYERS}.recompute_{part}"
    for part in ("granularity=full", "method=uniform", "num_layers=1")
)
TOKENS = 8192
VOCAB = HALF_B.vocab // 2


@pytest.fixture
def verl(tmp_path: Path, capsys: Any) -> Checked:
    return Checked(tmp_path, capsys, "verl==0.9.1")


def test_verl_divides_by_megatrons_distributed_optimizer(verl: Checked) -> None:
    half = verl.elements()[0] // 2
    found = verl.parts(f"{VERL} {FULL}")
    assert found["weights bfloat16"] == 2 * half
    # Megatron-Bridge leaves Megatron's grad_reduce_in_fp32 as it is: False.
    assert found["gradients bfloat16"] == 2 * half
    # Four GPUs in two tensor ranks: two replicas share the states.
    assert found["optimizer states"] == pytest.approx(8 * half / 2, rel=1e-6)
    assert found["master copies"] == pytest.approx(4 * half / 2, rel=1e-6)
    assert found["logits and loss"] == TOKENS * VOCAB * 8
    # Inputs of 24 layers, of the last norm and of the head, divided by sequence.
    assert found["activations bfloat16"] == 26 * TOKENS * 896 * 2 // 2


@pytest.mark.parametrize(
    ("release", "more"),
    [
        ("verl==0.9.1", f"+{MEGATRON}.override_ddp_config.grad_reduce_in_fp32=True"),
        ("verl==0.9.1", f"{MEGATRON}.vanilla_mbridge=True"),
        ("verl==0.8.0", ""),  # where mbridge is the default
    ],
)
def test_gradients_are_float32_where_it_is_said(
    tmp_path: Path, capsys: Any, release: str, more: str
) -> None:
    checked = Checked(tmp_path, capsys, release)
    half = checked.elements()[0] // 2
    assert checked.parts(f"{VERL} {more}")["gradients float32"] == 4 * half


@pytest.mark.parametrize(
    ("more", "each"),
    [
        ("", 8),
        ("actor_rollout_ref.actor.entropy_coeff=0.01", 12),
        (TEACHER, 16),
        (f"{TEACHER} actor_rollout_ref.actor.calculate_entropy=True", 24),
    ],
)
def test_what_verls_loss_holds(verl: Checked, more: str, each: int) -> None:
    found = verl.parts(f"{VERL} {FULL} {more}")
    assert found["logits and loss"] == TOKENS * VOCAB * each


def test_old_log_probabilities_are_taken_with_their_entropy(verl: Checked) -> None:
    found = verl.parts(VERL, "log-probabilities")
    assert found["logits and loss"] == TOKENS * VOCAB * 12
    # Neither gradients nor states are brought back for them.
    away = f"{MEGATRON}.param_offload=True {MEGATRON}.optimizer_offload=True"
    found = verl.parts(f"{VERL} {away}", "log-probabilities")
    assert found["weights bfloat16"] == verl.elements()[0]
    assert not [name for name in found if name.startswith(("grad", "opt", "master"))]
    phases = verl(f"{VERL} algorithm.rollout_correction.bypass_mode=True")["memory"]
    assert "log-probabilities" not in {row["phase"] for row in phases}


def test_a_reference_model_is_weights_beside_the_actor(verl: Checked) -> None:
    elements = verl.elements()[0]
    key = "reference's weights bfloat16"
    command = f"{VERL} actor_rollout_ref.actor.use_kl_loss=True"
    for phase in ("rollout", "forward and backward", "weight sync", "forward"):
        assert verl.parts(command, phase)[key] == elements  # halved, of two bytes
    # Asked for no entropy: float32 logits beside those in bfloat16.
    found = verl.parts(command, "forward")
    assert found["reference's logits and loss"] == TOKENS * VOCAB * 6
    assert found["optimizer states"] > 0  # the actor is idle, and here
    away = f"{command} {MEGATRON}.param_offload=True {MEGATRON}.optimizer_offload=True"
    found = verl.parts(away, "forward")
    assert found[key] == elements  # the reference follows the actor's param_offload
    assert "weights bfloat16" not in found
    assert key not in verl.parts(away, "rollout")


def test_verls_offload_moves_gradients_with_parameters(verl: Checked) -> None:
    elements = verl.elements()[0]
    own = ("weights bf", "gradients", "master", "optimizer")

    def of(phase: str, more: str) -> dict[str, int]:
        found = verl.parts(f"{VERL} {more}", phase)
        return {n: size for n, size in found.items() if n.startswith(own)}

    params, states = (
        f"{MEGATRON}.param_offload=True",
        f"{MEGATRON}.optimizer_offload=True",
    )
    assert of("rollout", f"{params} {states}") == {}
    assert of("rollout", params).keys() == {"master copies", "optimizer states"}
    assert of("rollout", states).keys() == {"weights bfloat16", "gradients bfloat16"}
    # A weight sync brings the weights back alone.
    assert of("weight sync", f"{params} {states}") == {"weights bfloat16": elements}
    # In an update all of it is there.
    assert of("forward and backward", f"{params} {states}") == of(
        "forward and backward", ""
    )


def test_gates_without_their_kernel_keep_more(verl: Checked) -> None:
    name, fused = "activations bfloat16", f"+{LAYERS}.bias_activation_fusion=True"
    # Qwen2's bridge does not ask for it; two more results of the inner width.
    more = verl.parts(VERL)[name] - verl.parts(f"{VERL} {fused}")[name]
    assert more == 24 * 2 * 4864 * 2 * TOKENS // 2


def test_states_in_other_dtypes(verl: Checked) -> None:
    half = verl.elements()[0] // 2
    aware = "actor_rollout_ref.actor.optim.use_precision_aware_optimizer=True"
    optim = "actor_rollout_ref.actor.optim"
    on_host = (
        f"+{optim}.override_optimizer_config.optimizer_cpu_offload=True "
        f"+{optim}.override_optimizer_config.optimizer_offload_fraction=0.75"
    )
    for more, moments, master in (
        (aware, 8, 2),
        (f"{aware} {optim}.exp_avg_dtype=bf16 {optim}.exp_avg_sq_dtype=bf16", 4, 2),
        # Neither has store_param_remainders, the copies are whole.
        (f"{MEGATRON}.dtype=float16", 8, 4),
        (
            f"{aware} +{optim}.override_optimizer_config.store_param_remainders=False",
            8,
            4,
        ),
        (f"{aware} {on_host}", 2, 1),
    ):
        found = verl.parts(f"{VERL} {more}", "optimizer step")
        states = [found.get(n, 0) for n in ("optimizer states", "master copies")]
        assert states == pytest.approx(
            [moments * half / 2, master * half / 2], rel=1e-5
        )


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("actor_rollout_ref.model.use_fused_kernels=True", "memory of fused kernels"),
        (
            "actor_rollout_ref.actor.use_kl_loss=True "
            "actor_rollout_ref.ref.megatron.tensor_model_parallel_size=4",
            "the reference model's tensor_model_parallel_size is not the actor's",
        ),
        ("algorithm.adv_estimator=gae", "memory of a critic is not known"),
        (f"{MEGATRON}.use_megatron_fsdp=True", "memory of Megatron's FSDP"),
        ("actor_rollout_ref.actor.optim.optimizer=muon", "memory of that optimizer"),
        (
            f"{LAYERS}.recompute_granularity=$KIND",
            "recompute_granularity is not certain",
        ),
        (f"{MEGATRON}.tensor_model_parallel_size=3", "no multiple of 3"),
        (f"+{LAYERS}.pipeline_model_parallel_layout=E", "lays out stages"),
    ],
)
def test_what_is_not_known_of_verls_megatron_has_no_plan(
    verl: Checked, more: str, said: str
) -> None:
    found = verl(f"{VERL} {more}")
    assert found["memory"] == []
    assert said in found["no_memory_plan"]


def test_the_advice_is_in_verls_own_keys_and_fits(verl: Checked) -> None:
    rows = verl(VERL)["memory"]
    need = max(row["total"] for row in rows if row["phase"] == "forward and backward")
    room = f"{need - (1 << 30)}B"
    share = "actor_rollout_ref.rollout.gpu_memory_utilization=0.3"
    bad = verl(f"{VERL} {share}", room)
    told = [one["message"] for one in bad["findings"] if one["cause"] == "cuda.oom"]
    advice = told[0].split("With ")[1].removesuffix(" all fits")
    change = " ".join(one.split(" (now")[0] for one in advice.split(" and "))
    assert change == FULL
    good = verl(f"{VERL} {share} {change}", room)
    assert {row["verdict"] for row in good["memory"]} <= {"fits", "tight"}
