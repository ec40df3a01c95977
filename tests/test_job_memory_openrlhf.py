"""The memory plan of OpenRLHF's rollouts: parts counted by hand, reasons, advice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checked_job import Checked
from test_estimate import HALF_B

from pytest_gkd.job import models

ROWS = "--train.batch_size 64 --rollout.batch_size 64 --data.max_len 2048"
START = (
    "python3 -m openrlhf.cli.train_ppo_ray --actor.num_gpus_per_node 4 "
    "--ref.num_gpus_per_node 4 --critic.num_gpus_per_node 4 --vllm.num_engines 4 "
    "--actor.model_name_or_path {s} --reward.remote_url http://1.2.3.4:5/r "
    f"--data.prompt_dataset a/b {ROWS}"
)
GROUP = "--algo.advantage.estimator group_norm --rollout.n_samples_per_prompt 4"
ALL = "--train.colocate_all --vllm.enable_sleep --vllm.gpu_memory_utilization 0.5"
UPDATE = "forward and backward"


@pytest.fixture
def checked(tmp_path: Path, capsys: Any) -> Checked:
    return Checked(tmp_path, capsys, "openrlhf==0.11.2")


def rows(checked: Checked, command: str) -> dict[tuple[str, str], dict[str, int]]:
    found = checked(command)
    assert found["memory"], found["no_memory_plan"]
    return {(row["role"], row["phase"]): row["bytes"] for row in found["memory"]}


@pytest.mark.parametrize(
    ("stage", "weights", "gradients"), [(1, 1, 1), (2, 1, 4), (3, 4, 4)]
)
def test_zero_divides_by_its_stage(
    checked: Checked, stage: int, weights: int, gradients: int
) -> None:
    elements, _ = checked.elements()
    found = rows(checked, f"{START} {GROUP} --ds.zero_stage {stage}")
    update = found["trainer", UPDATE]
    assert update["weights bfloat16"] == 2 * elements // weights
    assert update["optimizer states float32"] == 2 * elements
    assert update["master copies float32"] == elements
    assert update["gradients bfloat16"] == 2 * elements // gradients
    # "auto" is DeepSpeed's own default: it is no transformers trainer.
    assert update["DeepSpeed's buckets"] == 2 * 500_000_000
    # One row of 2048 tokens: logits in float32, their gradient, and that in 16 bits.
    assert update["logits and loss"] == 2048 * HALF_B.vocab * 10
    # Measured (docs/memory-policies.md): another micro-batch's gradients, no buckets in
    # the step, and a flat copy of the gradients beside that in float32.
    step = found["trainer", "optimizer step"]
    assert update.get("a micro-batch's gradients bfloat16", 0) == (
        2 * elements // 4 if stage < 3 else 0
    )
    assert ("DeepSpeed's buckets" in step) == (stage == 3)
    assert step["gradients' copies"] == 6 * elements // 4
    assert update.get("a gather's buffer", 0) == (2 * 50_000_000 if stage == 3 else 0)
    reference = found["reference", "forward"]
    assert reference["reference's weights bfloat16"] == 2 * elements // weights
    assert reference["reference's logits"] == 2048 * HALF_B.vocab * 6
    assert "weights bfloat16" not in reference  # on GPUs of its own


def test_colocated_models_are_counted_together(checked: Checked) -> None:
    elements, _ = checked.elements()
    found = rows(checked, f"{START} {GROUP} {ALL}")
    for phase in ("rollout", UPDATE, "log-probabilities"):
        parts = found["trainer+rollout", phase]
        assert parts["weights bfloat16"] == 2 * elements
        assert parts["optimizer states float32"] == 2 * elements
        assert parts["reference's weights bfloat16"] == 2 * elements
    assert found["trainer+rollout", "rollout"]["KV cache bfloat16"] > 10 << 30
    assert "KV cache bfloat16" not in found["trainer+rollout", UPDATE]
    # Trainer, engine and reference have a context each.
    assert found["reference", "forward"]["CUDA context"] == 3 << 29
    alone = rows(checked, f"{START} {GROUP} {ALL} --algo.kl.init_coef 0")
    assert not [name for _, phase in alone if phase == "reference" for name in phase]
    assert alone["trainer+rollout", UPDATE]["CUDA context"] == 2 << 29


def test_sleep_and_offload_of_the_trainer(checked: Checked) -> None:
    elements, _ = checked.elements()
    states = "optimizer states float32"
    for more, rollout, update in (
        ("", True, True),
        ("--ds.enable_sleep", False, True),
        ("--ds.adam_offload", False, False),
    ):
        found = rows(checked, f"{START} {GROUP} {ALL} {more}")
        for phase, is_there in (("rollout", rollout), (UPDATE, update)):
            parts = found["trainer+rollout", phase]
            assert (states in parts) == is_there
            assert ("master copies float32" in parts) == is_there
            assert parts["weights bfloat16"] == 2 * elements


@pytest.mark.parametrize(("sleeps", "both"), [("", True), ("--ds.enable_sleep", False)])
def test_a_critic_trains_with_the_student_or_before_it(
    checked: Checked, sleeps: str, both: bool
) -> None:
    elements, _ = checked.elements()
    small = models.read(checked.student)
    own = elements - small.head + small.width  # a value head for the output matrix
    found = rows(checked, f"{START} {ALL} --algo.advantage.estimator gae {sleeps}")
    critic = found["critic", UPDATE]
    assert critic["critic's weights bfloat16"] == 2 * own
    assert critic["critic's master copies float32"] == own
    assert "critic's logits and loss" not in critic
    together = found["trainer+rollout", UPDATE]
    assert ("critic's activations bfloat16" in together) == both
    assert ("critic's master copies float32" in together) == both
    assert together["critic's weights bfloat16"] == 2 * own


def test_a_reward_model_has_no_logits(checked: Checked) -> None:
    local = START.replace("--reward.remote_url http://1.2.3.4:5/r", "")
    local += " --reward.model_name_or_path {t} --reward.num_gpus_per_node 4"
    found = rows(checked, f"{local} {GROUP} {ALL}")
    large = models.read(checked.teacher)
    own = large.elements - large.head + large.width
    reward = found["reward", "forward"]
    assert reward["reward's weights bfloat16"] == 2 * own
    assert "reward's logits" not in reward
    offloaded = rows(checked, f"{local} {GROUP} --ref.offload --ds.zero_stage 3")
    reference = offloaded["reference", "forward"]
    assert "reference's weights bfloat16" not in reference
    assert reference["reference's gathered weights"] == 2 * checked.elements()[0]


def test_dynamic_batches_and_rings(checked: Checked) -> None:
    dynamic = "--train.dynamic_batch_enable --train.max_tokens_per_gpu"
    for more, tokens in (
        (f"{dynamic} 8192", 8192),
        (f"{dynamic} 1000", 2048),
        ("--ds.ring_attn_size 2 --ds.packing_samples", 1024),
        (f"{dynamic} 4096 --ds.ring_attn_size 2", 4096),
        ("--train.micro_batch_size 4", 8192),
    ):
        found = rows(checked, f"{START} {GROUP} {more}")
        assert found["trainer", UPDATE]["logits and loss"] == tokens * HALF_B.vocab * 10
    # What is scored may be more than what is trained.
    wide = rows(checked, f"{START} {GROUP} --rollout.micro_batch_size 4")
    asked = wide["trainer", "log-probabilities"]
    assert asked["student's logits"] == 4 * 2048 * HALF_B.vocab * 6


def test_the_engine_starts_with_its_share(checked: Checked) -> None:
    found = checked(f"{START.replace('{s}', '{t}')} {GROUP}", "30GiB")
    (start,) = [row for row in found["memory"] if row["phase"] == "engine start"]
    assert start["available"] == int(0.95 * (30 << 30))
    whole = models.read(checked.teacher).loaded_bytes("bfloat16")
    assert start["bytes"]["engine's weights bfloat16"] == whole


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("--ds.load_in_4bit", "bitsandbytes"),
        ("--ds.use_liger_kernel", "Liger"),
        ("--train.enable_ema", "moving average"),
        ("--actor.entropy_coef 0.1", "entropy"),
        ("--actor.optim muon", "muon"),
        ("--ds.tensor_parallel_size 2", "--ds.tensor_parallel_size 2"),
        ("--ds.zpg 8", "--ds.zpg 8"),
        ("--ds.attn_implementation eager", "flash attention"),
        ("--ds.lora.rank 8", "LoRA"),
        ("--ds.zero_stage 0", "stage 0"),
        ("--ds.zero_stage $STAGE", "stage"),
        ("--train.micro_batch_size $ROWS", "micro_batch_size is not certain"),
        ("--ds.load_in_4bit $FOUR", "(--ds.load_in_4bit)"),
    ],
)
def test_what_is_not_known_has_no_plan(checked: Checked, more: str, said: str) -> None:
    found = checked(f"{START} {GROUP} {more}")
    assert found["memory"] == []
    assert said in found["no_memory_plan"]


def test_the_advice_makes_it_fit(checked: Checked) -> None:
    command = f"{START.replace('{s}', '{t}')} {GROUP} --ds.zero_stage 1"
    bad = checked(command, "60GiB")
    told = [one["message"] for one in bad["findings"] if one["cause"] == "cuda.oom"]
    advice = told[0].split("With ")[1].removesuffix(" all fits")
    options = [part.split(" (now")[0] for part in advice.split(" and ")]
    assert all(option.startswith("--") for option in options)
    good = checked(f"{command} {' '.join(options)}", "60GiB")
    assert {row["verdict"] for row in good["memory"]} <= {"fits", "tight"}


def test_an_older_release_has_other_names(tmp_path: Path, capsys: Any) -> None:
    checked = Checked(tmp_path, capsys, "openrlhf==0.8.11")
    command = (
        "python3 -m openrlhf.cli.train_ppo_ray --actor_num_gpus_per_node 4 "
        "--ref_num_gpus_per_node 4 --vllm_num_engines 4 --pretrain {s} --bf16 "
        "--remote_rm_url http://1.2.3.4:5/r --prompt_data a/b "
        "--advantage_estimator group_norm --n_samples_per_prompt 4 "
        "--rollout_batch_size 64 --train_batch_size 64 --max_len 2048"
    )
    update = rows(checked, command)["trainer", UPDATE]
    assert update["logits and loss"] % (HALF_B.vocab * 10) == 0
    assert checked(command.replace(" --bf16", ""))["memory"] == []


SFT = (
    "deepspeed --num_gpus 4 --module openrlhf.cli.train_sft --data.dataset a/b "
    "--model.model_name_or_path {s} --data.max_len 2048 --train.batch_size 64 "
    "--train.micro_batch_size 2"
)


def test_sft_is_trained_as_an_actor_is(checked: Checked) -> None:
    elements, _ = checked.elements()
    found = rows(checked, f"{SFT} --ds.zero_stage 2 --ds.packing_samples")
    assert {role for role, _ in found} == {"trainer"}
    update = found["trainer", UPDATE]
    assert update["weights bfloat16"] == 2 * elements
    assert update["master copies float32"] == elements
    assert update["gradients bfloat16"] == 2 * elements // 4
    # Two rows of 2048 tokens: logits in float32, their gradient, and that in 16 bits.
    assert update["logits and loss"] == 2 * 2048 * HALF_B.vocab * 10
    actor = rows(
        checked,
        f"{START} {GROUP} --ds.zero_stage 2 --train.micro_batch_size 2",
    )
    assert update == actor["trainer", UPDATE]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("--ds.use_liger_kernel", "what Liger's kernels keep is not known"),
        ("--optim muon", "the state of the optimizer muon is not known"),
        ("--ds.zero_stage 0", "DeepSpeed's stage 0 is not known yet"),
    ],
)
def test_sft_without_a_plan_says_why(checked: Checked, more: str, says: str) -> None:
    found = checked(f"{SFT} {more}")
    assert not found["memory"]
    assert found["no_memory_plan"].startswith(says)


def test_another_program_without_a_plan_is_named(checked: Checked) -> None:
    found = checked(SFT.replace("train_sft", "train_dpo"))
    expected = "the memory of OpenRLHF's train_dpo is not known yet"
    assert found["no_memory_plan"] == expected


def test_the_smallest_change_of_sft_is_an_option_of_its_own(checked: Checked) -> None:
    found = checked(f"{SFT} --ds.zero_stage 1", "9GiB")
    told = [one["message"] for one in found["findings"] if one["cause"] == "cuda.oom"]
    assert told
    assert all("With --" in text for text in told), told
