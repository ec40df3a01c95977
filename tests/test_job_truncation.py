"""What becomes of a prompt that is too long, by framework and release."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_gkd.job.check import check

GRPO = "trl grpo --model_name_or_path a --dataset_name b --output_dir c"
DISTIL = "{} --model_name_or_path a --teacher_model_name_or_path b --output_dir c"
PPO = "python -m openrlhf.cli.train_ppo_ray"


@pytest.mark.parametrize(
    ("command", "release", "expected"),
    [
        (GRPO, "trl==0.29.1", "keep"),
        (GRPO, "trl==1.16.0", "keep"),
        (DISTIL.format("trl distillation"), "trl==1.16.0", "keep"),
        (
            DISTIL.format("python examples/scripts/distillation.py"),
            "trl==1.9.0",
            "right",
        ),
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


DATA = "train_dataset: {{path: {}, type: {}, batch_size: 8{}}}\nactor: {{path: a}}\n"


@pytest.mark.parametrize(
    ("path", "kind", "more", "expected"),
    [
        ("openai/gsm8k", "rl", ", max_length: 1024", "drop"),
        ("openai/gsm8k", "sft", "", "keep"),
        ("openai/gsm8k", "rl", ", max_length: null", "keep"),
        ("openai/gsm8k", "rw", ", max_length: 1024", None),
        ("TIGER-Lab/ViRL39K", "rl", ", max_length: 1024", "drop"),
        ("Anthropic/hh-rlhf", "dpo", ", max_length: 1024", "drop"),
        ("Anthropic/hh-rlhf", "rl", ", max_length: 1024", None),
        ("mine", "rl", ", max_length: 1024", None),
    ],
)
def test_areals_own_data_sets_drop(
    tmp_path: Path, path: str, kind: str, more: str, expected: str | None
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(DATA.format(path, kind, more))
    found = check(file, framework="areal==1.0.4").values.get("truncation")
    assert (found and found.value) == expected


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("data = get_custom_dataset(dataset_config=config.train_dataset)", "drop"),
        ("data = areal.dataset.get_custom_dataset(config)", "drop"),
        ("get_custom_dataset = load(config.train_dataset.path)", None),
        ("def broken(:", None),
        ("", None),
    ],
)
def test_a_program_of_ones_own_must_ask_areal_for_its_data(
    tmp_path: Path, program: str, expected: str | None
) -> None:
    (tmp_path / "job.yaml").write_text(
        DATA.format("openai/gsm8k", "rl", ", max_length: 1024")
    )
    if program:
        (tmp_path / "mine.py").write_text(program)
    script = tmp_path / "run.sh"
    script.write_text(f"python {tmp_path}/mine.py --config {tmp_path}/job.yaml\n")
    found = check(script, framework="areal==1.0.4").values.get("truncation")
    assert (found and found.value) == expected


@pytest.mark.parametrize(("top", "expected"), [("rl", "right"), ("inference", None)])
def test_prime_rl_cuts_the_end(tmp_path: Path, top: str, expected: str | None) -> None:
    file = tmp_path / "job.toml"
    file.write_text('[trainer.model]\nname = "a"\n[orchestrator]\nseq_len = 64\n')
    if top != "rl":
        file.write_text('[vllm]\nmodel = "a"\n')
    found = check(f"uv run {top} @ {file}", framework="prime-rl").values
    assert (found.get("truncation") and found["truncation"].value) == expected
