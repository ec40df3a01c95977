"""What becomes of a prompt that is too long, by framework and release."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_gkd.job.check import check

GRPO = "trl grpo --model_name_or_path a --dataset_name b --output_dir c"
PPO = "python -m openrlhf.cli.train_ppo_ray"


@pytest.mark.parametrize(
    ("command", "release", "expected"),
    [
        (GRPO, "trl==0.29.1", "keep"),
        (GRPO, "trl==1.16.0", "keep"),
        (f"{PPO} --pretrain a", "openrlhf==0.8.11", "right"),
        (f"{PPO} --pretrain a --agent_func_path b.py", "openrlhf==0.8.11", None),
        (f"{PPO} --pretrain a", "openrlhf==0.9.10", "left"),
        (f"{PPO} --actor.model_name_or_path a", "openrlhf==0.11.2", "left"),
        ("python examples/gsm8k_geo3k/train_colocate.py --fsdp", "lightrft", "right"),
    ],
)
def test_a_prompt_that_is_too_long(
    command: str, release: str, expected: str | None
) -> None:
    found = check(command, framework=release).values.get("truncation")
    assert (found and found.value) == expected


@pytest.mark.parametrize(
    ("start", "expected"),
    [("start_rlvr_pipeline", "drop"), ("start_agentic_pipeline", None)],
)
def test_roll_drops_in_rlvr_alone(
    tmp_path: Path, start: str, expected: str | None
) -> None:
    (tmp_path / "job.yaml").write_text("prompt_length: 64\nresponse_length: 64\n")
    script = tmp_path / "run.sh"
    text = f"python examples/{start}.py --config_path {tmp_path} --config_name job"
    script.write_text(text)
    found = check(script, framework="roll").values.get("truncation")
    assert (found and found.value) == expected


@pytest.mark.parametrize(
    ("processor", "expected"),
    [("math_hf_data_processor", "mask"), ("nemo_gym_data_processor", None)],
)
def test_nemo_rl_masks_by_the_processor(
    tmp_path: Path, processor: str, expected: str | None
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "policy: {model_name: a}\ngrpo: {num_prompts_per_step: 1}\n"
        f"data: {{train: {{dataset_name: b}}, default: {{processor: {processor}}}}}\n"
    )
    found = check(path, framework="nemo-rl").values.get("truncation")
    assert (found and found.value) == expected
