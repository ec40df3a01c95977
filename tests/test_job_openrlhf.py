"""``gkd check`` on OpenRLHF: values, what it refuses, and names of two generations."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.version import Version

from pytest_gkd.job import releases
from pytest_gkd.job.check import Checked, check
from pytest_gkd.job.findings import CheckError, Finding

START = """\
ray start --head --num-gpus 8
ray job submit -- python3 -m openrlhf.cli.train_ppo_ray \\
  --actor.num_gpus_per_node 4 --ref.num_gpus_per_node 4 --vllm.num_engines 2 \\
  --vllm.tensor_parallel_size 2 --train.colocate_actor_ref \\
  --actor.model_name_or_path Qwen/Qwen3-8B --reward.remote_url http://1.2.3.4:5/r \\
  --data.prompt_dataset a/b --algo.advantage.estimator group_norm \\
  --rollout.n_samples_per_prompt 4 --rollout.batch_size 16 --train.batch_size 64 "$@"
"""
# As the releases up to 0.10.1 call the same.
CLASSIC = """\
python3 -m openrlhf.cli.train_ppo_ray --actor_num_gpus_per_node 4 \\
  --ref_num_gpus_per_node 4 --vllm_num_engines 2 --vllm_tensor_parallel_size 2 \\
  --colocate_actor_ref --pretrain Qwen/Qwen3-8B --remote_rm_url http://1.2.3.4:5/r \\
  --prompt_data a/b --advantage_estimator group_norm --n_samples_per_prompt 4 \\
  --rollout_batch_size 16 --train_batch_size 64 "$@"
"""
GAE = "--algo.advantage.estimator gae --critic.num_gpus_per_node 4"
MODEL = "--reward.remote_url= --reward.model_name_or_path R"
FOUR = "--reward.num_gpus_per_node 4"
HYBRID = "--train.colocate_all"
SFT = """\
read -r -d '' COMMAND <<EOF
openrlhf.cli.train_sft \\
  --model.model_name_or_path Qwen/Qwen3-8B --data.dataset a/b \\
  --train.batch_size 64 --adam.lr 5e-6
EOF
deepspeed --num_gpus 4 --module $COMMAND "$@"
"""


def checked(
    path: Path, more: str = "", start: str = START, framework: str = "openrlhf==0.11.2"
) -> Checked:
    path.write_text(start)
    return check(path, more.split(), framework)


def faults(found: Checked) -> list[Finding]:
    return [f for f in found.findings if f.level != "note"]


def told(found: Checked) -> dict[str, object]:
    return {name: value.value for name, value in found.values.items()}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "run.sh"


def test_a_start_that_is_right_has_no_fault(script: Path) -> None:
    found = checked(script)
    assert not faults(found)
    values = told(found)
    assert (values["trainer_gpus"], values["rollout_gpus"]) == (4, 4)
    assert (values["reference_gpus"], values["critic_gpus"]) == (4, 0)
    assert (values["total_gpus"], values["placement"]) == (8, "split")
    assert (values["train_batch_size"], values["ppo_mini_batch_size"]) == (16, 64)
    assert (values["rollout_engine"], values["max_model_len"]) == ("vllm", 2048)
    assert found.values["student"].source == "user"
    assert found.values["zero_stage"].source == "default"


@pytest.mark.parametrize(
    ("more", "total"),
    [
        ("", 8),
        ("--algo.kl.init_coef 0", 8),
        (f"{HYBRID} --vllm.enable_sleep", 4),
        (f"{HYBRID} --train.async_enable", 8),
        (GAE, 12),
        (f"{GAE} {MODEL} {FOUR}", 16),
        (f"{GAE} {MODEL} {FOUR} --train.colocate_critic_reward", 12),
        (f"{HYBRID} {GAE} {MODEL} {FOUR}", 4),
    ],
)
def test_roles_that_share_gpus_are_counted_once(
    more: str, total: int, script: Path
) -> None:
    assert told(checked(script, more))["total_gpus"] == total


@pytest.mark.parametrize(
    ("more", "level", "said"),
    [
        ("--actor.num 2", "error", "may mean"),
        ("--pretrain X", "error", "it is called --actor.model_name_or_path"),
        ("--actor.modle X", "error", "did you mean"),
        ("stray", "error", "does not belong to any option"),
        ("--algo.kl.estimator k4", "error", "knows k1, k2, k3"),
        ("--train.batch_size x", "error", "expects an integer"),
        ("--train.micro_batch_size 0", "error", "must be at least 1"),
        ("--actor.model_name_or_path=", "error", "no model to train"),
        ("--data.prompt_dataset=", "error", "there are no prompts"),
        ("--data.input_template Q:", "warning", "has no {}"),
        ("--reward.remote_url=", "error", "nothing provides rewards"),
        ("--reward.model_name_or_path R", "warning", "has no effect"),
        ("--critic.model_name_or_path C", "warning", "there is no critic"),
        ("--rollout.n_samples_per_prompt 1", "error", "above 1"),
        (
            "--rollout.n_samples_per_prompt 1 --algo.advantage.estimator dr_grpo",
            "error",
            "all advantages are 0",
        ),
        ("--algo.kl.use_loss", "warning", "recommends k2 or k3"),
        (f"{GAE} --data.max_images_per_prompt 1", "error", "go with no critic"),
        (
            "--ds.packing_samples --data.max_images_per_prompt 1",
            "error",
            "go with no --ds.packing_samples",
        ),
        (
            "--ds.packing_samples --ds.attn_implementation eager",
            "warning",
            "replaced by flash_attention_2",
        ),
        ("--vllm.num_engines 0", "error", "no engine to generate with"),
        ("--vllm.enable_sleep", "warning", "without --train.colocate_all"),
        (
            f"{HYBRID} --train.async_enable --vllm.enable_sleep",
            "error",
            "refused with --train.async_enable",
        ),
        (
            "--train.async_enable --train.async_queue_size 0",
            "error",
            "must be at least 1",
        ),
        ("--train.partial_rollout_enable", "error", "requires --train.async_enable"),
        (f"{MODEL} --eval.dataset E", "error", "--eval.dataset requires"),
        (
            "--rollout.vllm_generate_batch_size 32",
            "error",
            "requires --train.async_enable",
        ),
        (
            "--algo.dynamic_filtering_enable --algo.dynamic_filtering_range 1 0",
            "error",
            "lower bound first",
        ),
        (
            f"{MODEL} --algo.dynamic_filtering_enable",
            "error",
            "enable requires --reward.remote_url",
        ),
        (
            "--algo.advantage.estimator reinforce --rollout.n_samples_per_prompt 1 "
            "--algo.dynamic_filtering_enable",
            "error",
            "enable requires --rollout.n_samples_per_prompt above 1",
        ),
        ("--rollout.micro_batch_size 32", "error", "too few batches"),
        ("--ref.num_gpus_per_node 2", "error", "must be the actor's"),
        (f"{HYBRID} --vllm.num_engines 4", "error", "the two must be equal"),
        (
            f"{GAE} {MODEL} --train.colocate_critic_reward",
            "error",
            "the reward model 1 * 8",
        ),
        (
            "--train.dynamic_batch_enable --train.batch_size 128",
            "error",
            "nothing is trained",
        ),
        (
            "--train.dynamic_batch_enable --train.batch_size 48",
            "warning",
            "the rest is dropped",
        ),
        (
            "--train.dynamic_batch_enable --train.batch_size 2",
            "error",
            "no sample for each",
        ),
        ("--reward.overlong_buffer_len 4096", "error", "more than an answer"),
        ("--reward.stop_properly_penalty_coef 2", "error", "is above 1"),
        ("--actor.dual_clip 1", "error", "must be above 1"),
        (
            "--algo.advantage.is_correction_mode clip "
            "--algo.advantage.is_correction_level seq",
            "error",
            "clip requires",
        ),
        (
            "--algo.advantage.is_correction_gating tv "
            "--algo.advantage.is_correction_level seq",
            "error",
            "upper bound only",
        ),
        ("--algo.advantage.is_correction_threshold 1 2 3", "error", "one number or"),
        ("--train.agent_func_path a.b", "error", "is not a Python file"),
        (
            "--ds.tensor_parallel_size 2 --ds.param_dtype fp16",
            "error",
            "requires bfloat16",
        ),
        ("--ds.load_in_4bit --ds.param_dtype fp16", "error", "requires bfloat16"),
        ("--train.batch_size 62", "error", "* 4 GPUs of the actor: DeepSpeed"),
        (
            f"{GAE} --critic.num_gpus_per_node 3",
            "error",
            "* 3 GPUs of the critic: DeepSpeed",
        ),
        (
            "--train.dynamic_batch_enable --train.batch_size 62",
            "error",
            "GPUs of the reference model: DeepSpeed",
        ),
        (
            f"{MODEL} --reward.num_gpus_per_node 16 --rollout.micro_batch_size 8",
            "error",
            "too few for the 16 GPUs of the reward model",
        ),
        (f"{HYBRID} {MODEL}", "error", "it can have no others"),
        (GAE, "warning", "it waits"),
        ("--reward.remote_url /not/here", "warning", "not on this machine"),
    ],
)
def test_what_is_wrong_is_told(more: str, level: str, said: str, script: Path) -> None:
    found = [f.level for f in faults(checked(script, more)) if said in f.message]
    assert found == [level]


def test_a_fault_names_the_option_as_the_release_does(script: Path) -> None:
    found = checked(script, "--reward.stop_properly_penalty_coef 2")
    assert [f.key for f in faults(found)] == ["reward.stop_properly_penalty_coef"]
    more = "--stop_properly_penalty_coef 2"
    found = checked(script, more, CLASSIC, "openrlhf==0.9.10")
    assert [f.key for f in faults(found)] == ["stop_properly_penalty_coef"]


def test_the_names_of_the_options_choose_the_release(script: Path) -> None:
    found = checked(script, start=CLASSIC, framework="")
    assert (found.framework, found.release) == ("openrlhf", "0.9.10")
    assert "that has these options" in found.release_by
    assert not faults(found)
    newest = releases.recorded("openrlhf")[-1]
    assert checked(script, framework="").release == newest
    # One of them is a mistake, no other release.
    assert checked(script, "--pretrain X", framework="").release == newest


@pytest.mark.parametrize("release", releases.recorded("openrlhf"))
def test_every_recorded_release_reads_a_start(release: str, script: Path) -> None:
    start = START if Version(release) >= Version("0.10.2") else CLASSIC
    more = "" if start == START else "--prompt_max_len 1024"
    more = more if release == "0.8.11" else ""
    found = checked(script, more, start, f"openrlhf=={release}")
    assert not faults(found)
    values = told(found)
    assert (values["student"], values["total_gpus"]) == ("Qwen/Qwen3-8B", 8)
    assert values["max_model_len"] == 2048


def test_up_to_0_8_answers_have_a_length_and_dtypes_a_flag(script: Path) -> None:
    more = "--prompt_max_len 512 --bf16"
    values = told(checked(script, more, CLASSIC, "openrlhf==0.8.11"))
    assert (values["max_prompt_length"], values["max_response_length"]) == (512, 1024)
    assert (values["max_model_len"], values["train_dtype"]) == (1536, "bfloat16")
    found = checked(script, "", CLASSIC, "openrlhf==0.8.11")
    assert found.values["train_dtype"].source == "undetermined"


def test_a_program_without_a_rollout_is_read(script: Path) -> None:
    found = checked(script, start=SFT)
    assert not faults(found)
    values = told(found)
    assert (values["trainer_gpus"], values["train_batch_size"]) == (4, 64)
    assert (values["learning_rate"], values["student"]) == (5e-6, "Qwen/Qwen3-8B")
    assert "rollout_gpus" not in values


@pytest.mark.parametrize(
    ("more", "level", "said"),
    [
        ("--train.batch_size 62", "error", "* 4 GPUs of the trainer: DeepSpeed"),
        ("--data.multiturn", "error", "requires --data.apply_chat_template"),
        ("--ds.ring_attn_size 2", "error", "requires --ds.packing_samples"),
        (
            "--ds.packing_samples --ds.attn_implementation sdpa",
            "warning",
            "replaced by flash_attention_2",
        ),
        ("--data.dataset=", "error", "there is no data set"),
        ("--model.model_name_or_path=", "error", "no model to train"),
        ("--data.input_template Q:", "warning", "has no {}"),
        ("--ds.load_in_4bit --ds.param_dtype fp16", "error", "4bit requires bfloat16"),
        ("--ds.tensor_parallel_size 2 --ds.param_dtype fp16", "error", "bfloat16"),
    ],
)
def test_what_is_wrong_without_a_rollout_is_told(
    more: str, level: str, said: str, script: Path
) -> None:
    found = [f.level for f in faults(checked(script, more, SFT)) if said in f.message]
    assert found == [level]


def test_the_teacher_of_train_kd_is_told_and_demanded(script: Path) -> None:
    start = (
        "torchrun --nproc_per_node 4 -m openrlhf.cli.train_kd --pretrain S "
        '--dataset D --train_batch_size 64 --micro_train_batch_size 2 --bf16 "$@"'
    )
    found = checked(script, "--teacher_model T", start, "")
    assert (found.release, told(found)["teacher"]) == ("0.8.11", "T")
    assert not faults(found)
    (fault,) = faults(checked(script, "", start, ""))
    assert (fault.key, fault.level) == ("teacher_model", "error")
    (fault,) = faults(checked(script, "", start, "openrlhf==0.11.2"))
    assert "has no program train_kd" in fault.message


def test_another_program_of_openrlhfs_is_none(script: Path) -> None:
    script.write_text("python -m openrlhf.cli.serve_rm --reward_pretrain R\n")
    with pytest.raises(CheckError, match="no command was found"):
        check(script)
