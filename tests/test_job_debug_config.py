"""``gkd debug-config``: a job as its smallest meaningful run."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from pytest_gkd.job import check, debug_config, releases
from pytest_gkd.job.debug_config import DebugConfig
from pytest_gkd.job.frameworks.verl import reader as verl

SCRIPT = """\
python3 -m verl.trainer.main_ppo \\
  data.train_batch_size=1024 \\
  actor_rollout_ref.actor.use_dynamic_bsz=True \\
  actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.name=vllm \\
  actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\
  trainer.nnodes=${NODES:-2} trainer.n_gpus_per_node=6 "$@"
"""


def small(path: Path, text: str = SCRIPT, release: str = "verl==0.9.1") -> DebugConfig:
    script = path / "run.sh"
    script.write_text(text)
    return debug_config.smallest(
        lambda more=(), added=(): check.check(script, more, release, {}, added=added)
    )


def changes(found: DebugConfig) -> dict[str, str]:
    pairs = (change.text.split("=", 1) for change in found.changes)
    return dict(pairs)


def test_the_batch_is_the_least_that_the_ranks_can_share(tmp_path: Path) -> None:
    found = small(tmp_path)
    told = changes(found)
    # 12 ranks share 3 prompts of 4 samples.
    assert told["data.train_batch_size"] == "3"
    assert told["actor_rollout_ref.actor.ppo_mini_batch_size"] == "3"
    assert told["data.max_response_length"] == "64"
    assert found.kept["tensor_parallel_size"] == 2
    assert (found.reaches, found.left) == (True, [])


def test_the_small_job_breaks_no_rule(tmp_path: Path) -> None:
    found = small(tmp_path)
    more = [change.text for change in found.changes]
    for trainer in ("True", "False"):
        again = check.check(
            tmp_path / "run.sh", [*more, f"trainer.use_v1={trainer}"], "verl==0.9.1"
        )
        told = [finding for finding in again.findings if "twice" not in finding.message]
        assert not told
        assert again.values["train_batch_size"].value == 3


def test_every_key_is_one_of_every_release() -> None:
    rows = tomllib.loads(debug_config.TABLE.read_text())["verl"]
    for number in releases.recorded("verl"):
        known = verl.schema(releases.release("verl", number))
        assert known is not None
        assert {row["set"].partition("=")[0] for row in rows} <= set(known)


def test_what_is_not_certain_stays_and_is_told(tmp_path: Path) -> None:
    text = SCRIPT.replace("${NODES:-2}", "$NODES").replace(' "$@"', "")
    found = small(tmp_path, text)
    assert "data.train_batch_size" not in changes(found)
    (left,) = found.left
    assert "data.train_batch_size" in left
    assert "how many GPUs train cannot be determined" in left
    assert "add these to the command on line 1" in debug_config.text(found)


@pytest.mark.parametrize("form", ["text", "args", "json"])
def test_the_command_prints_it(form: str, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "pytest_gkd", "debug-config", str(script)]
    done = subprocess.run(
        [*command, f"--format={form}"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    if form == "text":
        assert "trainer.total_training_steps=1     " in done.stdout
        assert f"run: bash {script} $(gkd debug-config" in done.stdout
    elif form == "args":
        # Nothing for a shell to quote: it goes through $(...).
        assert "trainer.logger=console" in done.stdout.split()
        assert not set("'\"[]*?") & set(done.stdout)
    else:
        assert json.loads(done.stdout)["kept"]["placement"] == "colocated"


SLIME = """\
python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 6 --load L \\
  --rollout-num-gpus 2 --rollout-batch-size 128 --n-samples-per-prompt 4 \\
  --num-rollout 3 --hf-checkpoint Qwen/Qwen3-8B --global-batch-size 512
"""
JOBS = {
    "trl-grpo": "accelerate launch --num_processes 3 grpo.py --num_generations 8",
    "trl-gkd": "accelerate launch gkd.py --teacher_model_name_or_path T --lmbda 1",
    "ms-swift": "NPROC_PER_NODE=3 swift rlhf --rlhf_type grpo --model M --dataset D "
    "--num_generations 3",
    "ms-swift-megatron": "NPROC_PER_NODE=4 megatron rlhf --rlhf_type gkd --model M "
    "--teacher_model T --dataset D --tensor_model_parallel_size 2 --vllm_mode colocate",
    "slime": SLIME,
    "miles": SLIME,
    "nemo-rl-distillation": "uv run examples/run_distillation.py",
    "nemo-rl-grpo": "uv run examples/run_grpo.py cluster.gpus_per_node=8",
    "openrlhf": "python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path M "
    "--data.prompt_dataset D --reward.remote_url r.py --vllm.num_engines 2 "
    "--vllm.tensor_parallel_size 2 --actor.num_gpus_per_node 4 --ref.num_gpus_per_node "
    "6 --critic.num_gpus_per_node 3 --rollout.n_samples_per_prompt 2 "
    "--reward.overlong_buffer_len 512 --rollout.max_new_tokens 2048 "
    "--train.batch_size 96 --train.micro_batch_size 1",
    "openrlhf==0.8.11": "python3 -m openrlhf.cli.train_ppo_ray --pretrain M "
    "--prompt_data D --remote_rm_url r.py --vllm_num_engines 8 --bf16 "
    "--overlong_buffer_len 512",
    "openrlhf==0.9.10": "python3 -m openrlhf.cli.train_ppo_ray --pretrain M "
    "--prompt_data D --remote_rm_url r.py --vllm_num_engines 8",
    "skyrl": "python -m examples.train.fully_async.main_fully_async "
    "trainer.policy.model.path=M trainer.placement.colocate_all=false "
    "trainer.fully_async.enabled=true trainer.train_batch_size=256 "
    "trainer.algorithm.policy_loss_type=rollout_is",
    "skyrl-sft": "python -m skyrl.train.main_sft model.path=M num_epochs=3 "
    "batch_size=64 eval_interval=10 resume_from=latest logger=wandb "
    "ckpt_interval=5 hf_save_interval=5 eval_before_train=true "
    "eval_datasets=[a] eval_dataset_splits=[test]",
    "lightrft": "torchrun --nproc-per-node 8 examples/gsm8k_geo3k/train_colocate.py "
    "--pretrain M --prompt_data D --n_samples_per_prompt 5 --sp_size 2 "
    "--engine_tp_size 2 --rollout_batch_size 64",
    "prime-rl": "uv run rl --trainer.model.name M --orchestrator.model.name M "
    "--inference.vllm.model M --orchestrator.group_size 6 --max_steps 100 "
    "--orchestrator.token_batch_size 65536 --trainer.scheduler.type linear",
    "prime-rl-sft": "uv run sft --model.name M --data.name D --max_steps 9 "
    "--scheduler.type cosine --scheduler.warmup_steps 3 --deployment.num_train_gpus 4 "
    "--inference.vllm.model M --deployment.num_infer_gpus 2 --eval.source "
    """'[{"env": {"taskset": {"id": "x"}}}]'""",
    "prime-rl-trainer": "uv run trainer --model.name M --scheduler.type linear "
    "--max_steps 99",
    "prime-rl-orchestrator": "uv run orchestrator --group_size 3 --batch_size 12",
    "prime-rl-inference": "uv run inference --vllm.model M",
}


def of_framework(name: str, path: Path) -> tuple[DebugConfig, set[str]]:
    framework = next(n for n in check.FRAMEWORKS if name.startswith(n))
    (newest, *_) = reversed(releases.recorded(framework))
    release = name if "==" in name else f"{framework}=={newest}"
    before = check.check(command(name, path), [], release)
    errors = {f.message for f in before.findings if f.level == "error"}
    return small(path, JOBS[name], release), errors


def command(name: str, path: Path) -> Path:
    (path / "run.sh").write_text(JOBS[name])
    return path / "run.sh"


@pytest.mark.parametrize("name", JOBS)
def test_the_small_job_of_each_framework_breaks_no_rule(
    name: str, tmp_path: Path
) -> None:
    found, errors = of_framework(name, tmp_path)
    assert not errors
    assert not [text for text in found.left if "error" in text]
    assert found.changes


def test_every_row_makes_some_job_smaller(tmp_path: Path) -> None:
    used = set()
    for name in JOBS:
        found, _ = of_framework(name, tmp_path)
        used |= {(found.framework, option(c.text)) for c in found.changes}
    table = tomllib.loads(debug_config.TABLE.read_text())
    del table["verl"], table["areal"], table["roll"]  # tests of their own
    rows = {(n, r["set"]) for n, some in table.items() for r in some if "set" in r}
    assert {(n, option(text)) for n, text in rows} == used


def option(change: str) -> str:
    return re.split("[= ]", change)[0]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        # The least common multiple of 4, 6 and 3 GPUs is 12 samples, of 6 prompts.
        ("openrlhf", {"--rollout.batch_size": "6", "--train.batch_size": "12"}),
        ("openrlhf==0.8.11", {"--rollout_batch_size": "8", "--train_batch_size": "8"}),
        # Each of its 8 processes loads prompts of its own.
        ("lightrft", {"--rollout_batch_size": "8", "--train_batch_size": "40"}),
        ("prime-rl", {"--orchestrator.batch_size": "6"}),
        ("prime-rl-sft", {"--data.batch_size": "4"}),
    ],
)
def test_the_batch_is_the_least_that_the_framework_takes(
    name: str, sizes: dict[str, str], tmp_path: Path
) -> None:
    found, _ = of_framework(name, tmp_path)
    told = dict(re.split("[= ]", c.text) for c in found.changes if c.text[-1].isdigit())
    assert {key: told[key] for key in sizes} == sizes


def test_a_row_that_mends_is_only_there_where_it_does(tmp_path: Path) -> None:
    found, _ = of_framework("openrlhf", tmp_path)
    assert "--reward.overlong_buffer_len=64" in found.arguments()
    jobs = JOBS["openrlhf"].replace("--reward.overlong_buffer_len 512 ", "")
    again = small(tmp_path, jobs, "openrlhf==0.11.2")
    assert "overlong" not in again.arguments()
    assert "--no-inference" in of_framework("prime-rl-sft", tmp_path)[0].arguments()
    assert "--no-inference" not in of_framework("prime-rl", tmp_path)[0].arguments()


@pytest.mark.parametrize(
    ("job", "batch"),
    [
        (JOBS["trl-gkd"], "1"),
        (JOBS["trl-grpo"], "2"),
        ("swift rlhf --rlhf_type gkd --model M --teacher_model T --dataset D", "1"),
        (JOBS["ms-swift"], "2"),
    ],
)
def test_only_groups_of_samples_need_more_than_a_batch_of_one(
    tmp_path: Path, job: str, batch: str
) -> None:
    release = "trl==1.16.0" if job.startswith("accelerate") else ""
    changes = [one.text for one in small(tmp_path, job, release).changes]
    assert f"--per_device_train_batch_size={batch}" in changes
    assert ("--num_generations=2" in changes) == (batch == "2")
    assert len({one.partition("=")[0] for one in changes}) == len(changes)


def test_what_is_wrong_with_the_job_itself_stays(tmp_path: Path) -> None:
    job = f"{JOBS['prime-rl']} --deployment.type multi_node".replace(
        "--inference.vllm.model M", "--deployment.num_infer_nodes 2"
    )
    found = small(tmp_path, job, "prime-rl")
    assert any("needs an inference section" in text for text in found.left)
    assert "--no-inference" not in found.arguments()


def test_sections_that_the_job_has_not_are_not_made(tmp_path: Path) -> None:
    """prime-rl with somebody else's server has no inference section."""
    job = JOBS["prime-rl"].replace("--inference.vllm.model M ", "")
    (newest, *_) = reversed(releases.recorded("prime-rl"))
    found = small(tmp_path, job, f"prime-rl=={newest}")
    assert "inference" not in found.arguments()
    words = shlex.split(of_framework("prime-rl", tmp_path)[0].arguments())
    assert words[words.index("--inference.vllm.enforce_eager") + 1] == "true"


def test_samples_that_are_not_certain_leave_the_batch(tmp_path: Path) -> None:
    job = JOBS["openrlhf"].replace("prompt 2", "prompt $N")
    found = small(tmp_path, job, "openrlhf==0.11.2")
    assert "--rollout.batch_size" not in found.arguments()
    assert any("--rollout.batch_size" in text for text in found.left)


def test_a_script_that_these_would_lead_elsewhere_is_told(tmp_path: Path) -> None:
    other = f'case "$1" in\n"") {JOBS["lightrft"]} "$@" ;;\nesac\n'
    assert not small(tmp_path, other, "lightrft").reaches


def test_a_configuration_file_is_given_them_behind_it(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("defaults: grpo_math_1B.yaml\ngrpo: {num_prompts_per_step: 64}\n")
    found = debug_config.smallest(
        lambda more=(), added=(): check.check(job, more, "nemo-rl", {}, added=added)
    )
    assert "behind it" in debug_config.text(found)
    assert "grpo.num_prompts_per_step" in changes(found)
