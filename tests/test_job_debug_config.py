"""``gkd debug-config``: a job as its smallest meaningful run."""

from __future__ import annotations

import json
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
    assert "how many GPUs train is not certain" in left
    assert "add these to the command in line 1" in debug_config.text(found)


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
}


def of_framework(name: str, path: Path) -> tuple[DebugConfig, set[str]]:
    framework = next(n for n in check.FRAMEWORKS if name.startswith(n))
    (newest, *_) = reversed(releases.recorded(framework))
    release = f"{framework}=={newest}"
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
    assert len(found.changes) > 5


def test_every_row_makes_some_job_smaller(tmp_path: Path) -> None:
    used = set()
    for name in JOBS:
        found, _ = of_framework(name, tmp_path)
        used |= {(found.framework, c.text.partition("=")[0]) for c in found.changes}
    table = tomllib.loads(debug_config.TABLE.read_text())
    del table["verl"]
    rows = {(n, r["set"]) for n, some in table.items() for r in some if "set" in r}
    assert {(n, text.partition("=")[0]) for n, text in rows} == used


def test_a_configuration_file_is_given_them_behind_it(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("defaults: grpo_math_1B.yaml\ngrpo: {num_prompts_per_step: 64}\n")
    found = debug_config.smallest(
        lambda more=(), added=(): check.check(job, more, "nemo-rl", {}, added=added)
    )
    assert "behind it" in debug_config.text(found)
    assert "grpo.num_prompts_per_step" in changes(found)
