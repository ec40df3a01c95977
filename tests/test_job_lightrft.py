"""``gkd check`` on LightRFT: values, what it refuses, and copies of its programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_gkd.job.check import Checked, check
from pytest_gkd.job.findings import CheckError, Finding

START = """\
torchrun --nnodes 1 --nproc-per-node 8 examples/gsm8k_geo3k/train_colocate.py \\
  --pretrain Qwen/Qwen3-8B --prompt_data a/b --engine_tp_size 2 --bf16 --fsdp \\
  --micro_train_batch_size 4 --train_batch_size 64 --rollout_batch_size 32 \\
  --advantage_estimator group_norm --n_samples_per_prompt 4 "$@"
"""


def checked(path: Path, more: str = "", start: str = START) -> Checked:
    path.write_text(start)
    return check(path, more.split())


def faults(found: Checked) -> list[Finding]:
    return [f for f in found.findings if f.level != "note"]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "run.sh"


def test_a_start_that_is_right_has_no_fault(script: Path) -> None:
    found = checked(script)
    assert found.framework == "lightrft"
    assert not faults(found)
    values = {name: value.value for name, value in found.values.items()}
    assert (values["trainer_gpus"], values["rollout_gpus"]) == (8, 8)
    assert (values["total_gpus"], values["placement"]) == (8, "colocated")
    assert (values["max_model_len"], values["dtype"]) == (2048, "bfloat16")
    assert (values["trainer_strategy"], values["zero_stage"]) == ("fsdp", None)


def test_sglang_takes_lengths_from_the_model(script: Path) -> None:
    found = checked(script, "--engine_type sglang")
    assert found.values["max_model_len"].value is None


@pytest.mark.parametrize(
    ("more", "level", "said"),
    [
        ("--engine_type sgl", "error", "known values are vllm and sglang"),
        ("--advantage_estimator reinforce++", "error", "accepted but not implemented"),
        ("--advantage_estimator gae --use_kl_loss", "warning", "NameError"),
        (
            "--train_batch_size 48",
            "error",
            "not a multiple of --micro_train_batch_size 4",
        ),
        ("--sp_size 3", "error", "--sp_size 3 does not divide 8"),
        ("--engine_tp_size 3", "error", "--engine_tp_size 3 does not divide 8"),
        ("--rollout_batch_size 4", "error", "no prompt for each"),
        ("--rollout_batch_size 36", "warning", "the rest is not rolled out"),
        ("--initial_model_shard_size 3", "error", "does not divide 8"),
        ("--n_samples_per_prompt 1", "error", "above 1"),
        ("--pretrain=", "error", "no model to train"),
        ("--prompt_data=", "error", "there are no prompts"),
        ("--input_template Q:", "warning", "has no {}"),
        ("--critic_pretrain C", "warning", "there is no critic"),
        ("--use_kl_loss", "warning", "recommends k2 or k3"),
        ("--remote_rm_url /not/here", "warning", "not on this machine"),
        ("--engine_tp 2", "error", "no option --engine_tpp"),
    ],
)
def test_what_is_wrong_is_told(more: str, level: str, said: str, script: Path) -> None:
    more = more.replace("--engine_tp 2", "--engine_tpp 2")
    found = [f.level for f in faults(checked(script, more)) if said in f.message]
    assert found == [level]


def test_a_copy_may_have_options_of_its_own(script: Path) -> None:
    start = START.replace("examples/gsm8k_geo3k/", "mine/")
    (fault,) = faults(checked(script, "--of_mine 3", start))
    assert (fault.level, fault.key) == ("warning", "--of_mine")
    (fault,) = faults(checked(script, "--of_mine 3"))
    assert fault.level == "error"


def test_a_reward_models_training_has_no_rollout(script: Path) -> None:
    script.write_text(
        "torchrun --nproc-per-node 8 examples/grm_training/train_grm_vl.py "
        "--pretrain P --train_data D --train_batch_size 8 --micro_train_batch_size 4\n"
    )
    found = check(script)
    assert found.values["train_files"].value == "D"
    assert "rollout_gpus" not in found.values
    (fault,) = faults(found)
    assert (fault.key, fault.level) == ("train_batch_size", "error")


def test_a_program_of_that_name_without_its_options_is_none(script: Path) -> None:
    script.write_text("torchrun train_colocate.py --lr 1\n")
    with pytest.raises(CheckError, match="no command was found"):
        check(script)
