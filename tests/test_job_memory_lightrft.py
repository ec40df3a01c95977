"""The memory plan of LightRFT's rollouts on text: parts counted by hand, reasons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checked_job import Checked
from test_estimate import HALF_B

START = (
    "torchrun --nproc-per-node 4 examples/gsm8k_geo3k/train_colocate.py "
    "--pretrain {s} --prompt_data a/b --bf16 --flash_attn --text_only "
    "--micro_train_batch_size 1 --train_batch_size 64 --rollout_batch_size 32 "
    "--advantage_estimator group_norm --n_samples_per_prompt 4 "
    "--prompt_max_len 1000 --generate_max_len 500 --micro_rollout_batch_size 2"
)
UPDATE = "forward and backward"


@pytest.fixture
def checked(tmp_path: Path, capsys: Any) -> Checked:
    return Checked(tmp_path, capsys, "lightrft")


def rows(checked: Checked, command: str) -> dict[tuple[str, str], dict[str, int]]:
    found = checked(command)
    assert found["memory"], found["no_memory_plan"]
    return {(row["role"], row["phase"]): row["bytes"] for row in found["memory"]}


def test_fsdp_trains_float32_beside_a_sleeping_engine(checked: Checked) -> None:
    elements, _ = checked.elements()
    found = rows(checked, f"{START} --fsdp")
    update = found["trainer+rollout", UPDATE]
    assert update["weights float32"] == elements
    assert update["optimizer states float32"] == 2 * elements
    assert update["logits and loss"] == 1500 * HALF_B.vocab * 10
    assert "KV cache bfloat16" not in update
    assert update["CUDA context"] == 1 << 29  # one process has them all
    reference = found["reference", "forward"]
    assert reference["reference's weights bfloat16"] == elements // 2
    assert reference["reference's logits"] == 2 * 1500 * HALF_B.vocab * 4
    assert "reference's weights bfloat16" not in update


@pytest.mark.parametrize(("rows_at_once", "each"), [(2, 7), (4, 6), (8, 6)])
def test_the_loss_goes_row_by_row(
    checked: Checked, rows_at_once: int, each: int
) -> None:
    more = f"--fsdp --micro_train_batch_size {rows_at_once}"
    update = rows(checked, f"{START} {more}")["trainer+rollout", UPDATE]
    assert update["logits and loss"] == rows_at_once * 1500 * HALF_B.vocab * each


def test_where_the_states_go(checked: Checked) -> None:
    states = "optimizer states float32"
    for more, in_rollout, in_update in (
        ("--fsdp", True, True),
        ("--fsdp --adam_offload", False, True),
        ("--fsdp --fsdp_cpu_offload", False, False),
        ("--zero_stage 2 --adam_offload", False, False),
    ):
        found = rows(checked, f"{START} {more}")
        assert (states in found["trainer+rollout", "rollout"]) == in_rollout
        assert (states in found["trainer+rollout", UPDATE]) == in_update


def test_deepspeed_keeps_the_reference_on_the_gpu(checked: Checked) -> None:
    elements, _ = checked.elements()
    for stage, parts in ((2, 1), (3, 4)):
        found = rows(checked, f"{START} --zero_stage {stage}")
        update = found["trainer+rollout", UPDATE]
        assert update["weights bfloat16"] == 2 * elements // parts
        assert update["reference's weights bfloat16"] == 2 * elements // parts
        assert update["DeepSpeed's buckets"] == 2 * 500_000_000


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("--load_in_4bit", "bitsandbytes"),
        ("--fsdp --use_mp_opt", "FSDPadaptOptimizer"),
        ("--fused_linear_logprob", "fused"),
        ("--sp_size 2", "--sp_size 2"),
        ("--reward_pretrain R", "reward models"),
        ("--advantage_estimator gae", "critic"),
        ("--lora_rank 8", "LoRA"),
        ("--zero_stage 0", "stage 0"),
        ("--micro_train_batch_size $N", "micro_batch_size is not certain"),
    ],
)
def test_what_is_not_known_has_no_plan(checked: Checked, more: str, said: str) -> None:
    found = checked(f"{START} {more}")
    assert found["memory"] == []
    assert said in found["no_memory_plan"]


def test_images_are_not_planned(checked: Checked) -> None:
    found = checked(START.replace("--text_only ", ""))
    assert found["memory"] == []
    assert "--text_only" in found["no_memory_plan"]


def test_the_advice_makes_it_fit(checked: Checked) -> None:
    command = f"{START.replace('{s}', '{t}')} --fsdp --disable_engine_sleep"
    bad = checked(command, "60GiB")
    told = [one["message"] for one in bad["findings"] if one["cause"] == "cuda.oom"]
    advice = told[0].split("With ")[1].removesuffix(" all fits")
    options = [part.split(" (now")[0] for part in advice.split(" and ")]
    assert all(option.startswith("--") for option in options)
    good = checked(f"{command} {' '.join(options)}", "60GiB")
    assert {row["verdict"] for row in good["memory"]} <= {"fits", "tight"}
