"""The memory plan of SkyRL under FSDP: parts counted by hand, reasons, and advice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checked_job import Checked
from test_estimate import HALF_B

from pytest_gkd.job import loss_memory, models

START = (
    "python -m skyrl.train.entrypoints.main_base data.train_data=\"['/a.parquet']\" "
    "trainer.policy.model.path={s} trainer.placement.policy_num_gpus_per_node=4 "
    "trainer.placement.ref_num_gpus_per_node=4 "
    "trainer.placement.critic_num_gpus_per_node=4 "
    "generator.inference_engine.num_engines=4 trainer.train_batch_size=64 "
    "trainer.policy_mini_batch_size=16 trainer.critic_mini_batch_size=16 "
    "trainer.max_prompt_length=1000 trainer.micro_train_batch_size_per_gpu=2 "
    "generator.n_samples_per_prompt=4 "
    "generator.sampling_params.max_generate_length=500"
)
ALONE = "trainer.algorithm.use_kl_loss=false"
SPLIT = "trainer.placement.colocate_all=false"
UPDATE = "forward and backward"


@pytest.fixture
def checked(tmp_path: Path, capsys: Any) -> Checked:
    return Checked(tmp_path, capsys, "skyrl==0.3.0")


def rows(checked: Checked, command: str) -> dict[tuple[str, str], dict[str, int]]:
    found = checked(command)
    assert found["memory"], found["no_memory_plan"]
    return {(row["role"], row["phase"]): row["bytes"] for row in found["memory"]}


def test_fsdp_divides_float32_and_leaves_while_others_work(checked: Checked) -> None:
    elements, _ = checked.elements()
    found = rows(checked, START)
    update = found["trainer+rollout", UPDATE]
    assert update["weights float32"] == elements
    assert update["optimizer states float32"] == 2 * elements
    # Two rows of 1500 tokens in 16 bits, with the entropy of a chunk in float32.
    assert update["logits and loss"] == HALF_B.vocab * (2 * 3000 + 12 * 1024)
    assert "KV cache bfloat16" not in update
    for role, phase in (("trainer+rollout", "rollout"), ("reference", "forward")):
        assert not [n for n in found[role, phase] if n.startswith(("weights", "opt"))]
    reference = found["reference", "forward"]
    assert reference["reference's weights bfloat16"] == 2 * elements // 4
    assert reference["reference's logits"] == 1500 * HALF_B.vocab * 2
    assert "reference's weights bfloat16" not in update
    assert update["CUDA context"] == 3 << 29
    step = found["trainer+rollout", "optimizer step"]
    assert step["optimizer's temporaries float32"] == elements


def test_entropies_go_through_chunks_of_1024(checked: Checked) -> None:
    short = "trainer.max_prompt_length=500 trainer.micro_train_batch_size_per_gpu=1"
    update = rows(checked, f"{START} {ALONE} {short}")["trainer+rollout", UPDATE]
    # 1000 tokens: logits in 16 bits with three of them in float32.
    assert update["logits and loss"] == 1000 * HALF_B.vocab * (2 + 12)


@pytest.mark.parametrize(
    ("more", "leaves", "states_leave"),
    [
        ("", True, True),
        ("trainer.policy.optimizer_config.offload_after_step=false", True, False),
        (f"{SPLIT} trainer.placement.colocate_policy_ref=true", True, True),
        (f"{SPLIT} trainer.placement.colocate_policy_ref=false", None, None),
        ("trainer.policy.fsdp_config.cpu_offload=true", True, True),
    ],
)
def test_what_leaves_by_placement(
    checked: Checked, more: str, leaves: bool | None, states_leave: bool | None
) -> None:
    found = rows(checked, f"{START} {more}")
    parts = found["reference", "forward"]
    if leaves is None:  # GPUs of its own
        assert not [name for name in parts if name.startswith("weights")]
        assert parts["CUDA context"] == 1 << 29
        return
    assert ("weights float32" not in parts) == leaves
    assert ("optimizer states float32" not in parts) == states_leave
    update = next(parts for key, parts in found.items() if key[1] == UPDATE)
    assert ("weights float32" in update) == ("cpu_offload" not in more)


def test_a_teacher_is_another_reference(checked: Checked) -> None:
    _, teacher = checked.elements()
    found = rows(checked, f"{START} trainer.ref.model.path={{t}} trainer.bf16=false")
    reference = found["reference", "forward"]
    assert reference["reference's weights float32"] == teacher
    assert "teacher" not in {role for role, _ in found}


def test_a_critic_has_its_turn(checked: Checked) -> None:
    elements, _ = checked.elements()
    small = models.read(checked.student)
    own = elements - small.head + small.width
    found = rows(checked, f"{START} trainer.critic.model.path={{s}}")
    critic = found["critic", UPDATE]
    assert critic["critic's weights float32"] == own
    assert critic["critic's optimizer states float32"] == 2 * own
    assert "weights float32" not in critic
    assert not [n for n in found["trainer+rollout", UPDATE] if n.startswith("critic")]


def test_tokens_turns_and_ranks(checked: Checked) -> None:
    budget = "trainer.max_tokens_per_microbatch"
    turns = "generator.max_turns=3 generator.max_input_length=4000"
    sp = "trainer.policy.sequence_parallel_size=2 trainer.ref.sequence_parallel_size=2"
    for more, tokens in (
        (f"{budget}=8192", 8192),
        (f"{budget}=100", 1500),
        (turns, 4500),
        (sp, 750),
    ):
        found = rows(checked, f"{START} {more}")
        asked = found["trainer+rollout", "log-probabilities"]
        assert asked["student's logits"] == tokens * HALF_B.vocab * 2
    assert loss_memory.needed("skyrl", 16384, 100, 2)[0] == 16384 * 100 * 4
    elements, _ = checked.elements()
    shards = "trainer.policy.fsdp_config.fsdp_size=2"
    update = rows(checked, f"{START} {shards}")["trainer+rollout", UPDATE]
    assert update["weights float32"] == 2 * elements


def test_engines_elsewhere_are_not_planned(checked: Checked) -> None:
    away = (
        f"{SPLIT} generator.inference_engine.run_engines_locally=false "
        "generator.inference_engine.external_server_urls=\"['http://h:1']\""
    )
    assert ("rollout", "rollout") not in rows(checked, f"{START} {away}")
    split = rows(checked, f"{START} {SPLIT}")
    assert split["rollout", "rollout"]["KV cache bfloat16"] > 20 << 30


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("trainer.strategy=megatron", "Megatron"),
        ("trainer.policy.inference_only_init=true", "not trained"),
        ("trainer.algorithm.use_entropy_loss=true", "entropy"),
        ("trainer.flash_attn=false", "flash attention"),
        ("trainer.policy.fsdp_config.reshard_after_forward=false", "gathered"),
        ("trainer.logprobs_chunk_size=64", "logprobs_chunk_size"),
        ("trainer.policy.fsdp_config.cpu_offload=$AWAY", "AWAY is not certain"),
        ("trainer.micro_train_batch_size_per_gpu=$ROWS", "micro_batch_size is not"),
        (
            "trainer.policy.model.lora.rank=8 trainer.gradient_checkpointing=false",
            "LoRA",
        ),
        ("trainer.policy.fsdp_config.mixed_precision.param_dtype=fp16", "mixed_prec"),
    ],
)
def test_what_is_not_known_has_no_plan(checked: Checked, more: str, said: str) -> None:
    found = checked(f"{START} {more}")
    assert found["memory"] == []
    assert said in found["no_memory_plan"]


def test_the_advice_makes_it_fit(checked: Checked) -> None:
    command = START.replace("{s}", "{t}")
    bad = checked(command, "28GiB")
    told = [one["message"] for one in bad["findings"] if one["cause"] == "cuda.oom"]
    advice = told[0].split("With ")[1].removesuffix(" all fits")
    options = [part.split(" (now")[0] for part in advice.split(" and ")]
    assert all(option.startswith(("trainer.", "generator.")) for option in options)
    good = checked(f"{command} {' '.join(options)}", "28GiB")
    assert {row["verdict"] for row in good["memory"]} <= {"fits", "tight"}


SFT = (
    "python -m skyrl.train.main_sft strategy=fsdp model.path={s} max_length=512 "
    "placement.num_gpus_per_node=4 batch_size=16 micro_train_batch_size_per_gpu=2"
)


def test_sft_is_trained_as_a_policy_is(checked: Checked) -> None:
    elements, _ = checked.elements()
    found = rows(checked, SFT)
    assert {role for role, _ in found} == {"trainer"}
    update = found["trainer", UPDATE]
    assert update["weights float32"] == elements
    assert update["optimizer states float32"] == 2 * elements
    # Two rows of 512 tokens in 16 bits, with the entropy of a chunk in float32.
    assert update["logits and loss"] == HALF_B.vocab * (2 * 1024 + 12 * 1024)
    # Two micro-batches: the first one's gradients are there.
    assert update["gradients float32"] == elements
    assert (
        "gradients float32"
        not in rows(checked, f"{SFT} batch_size=8")["trainer", UPDATE]
    )
    # Only FSDP's own offload: nothing else has these GPUs.
    assert found["trainer", "load"]["weights float32"] == elements
    away = rows(checked, f"{SFT} fsdp_config.cpu_offload=true")
    assert "weights float32" not in away["trainer", UPDATE]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("strategy=megatron", "the memory of SkyRL under Megatron is not known yet"),
        ("max_length=null", "nothing bounds the rows (max_length)"),
        ("fsdp_config.reshard_after_forward=false", "FSDP that keeps what it has"),
    ],
)
def test_sft_without_a_plan_says_why(checked: Checked, more: str, says: str) -> None:
    found = checked(f"{SFT} {more}")
    assert not found["memory"]
    assert found["no_memory_plan"].startswith(says)
