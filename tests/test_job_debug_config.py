"""``gkd debug-config``: a job as its smallest meaningful run."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from pytest_gkd.job import check, debug_config
from pytest_gkd.job.debug_config import DebugConfig
from pytest_gkd.job.frameworks import verl
from pytest_gkd.job.releases import recorded

SCRIPT = """\
python3 -m verl.trainer.main_ppo \\
  data.train_batch_size=1024 \\
  actor_rollout_ref.actor.use_dynamic_bsz=True \\
  actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.name=vllm \\
  actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\
  trainer.nnodes=${NODES:-2} trainer.n_gpus_per_node=6 "$@"
"""


def small(path: Path, text: str = SCRIPT) -> DebugConfig:
    script = path / "run.sh"
    script.write_text(text)
    return debug_config.smallest(
        lambda more: check.check(script, more, "verl==0.9.1", {})
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
    for release in recorded("verl"):
        known = verl.schema(release)
        assert known is not None
        assert {row["set"].partition("=")[0] for row in rows} <= set(known)


def test_what_is_not_certain_stays_and_is_told(tmp_path: Path) -> None:
    text = SCRIPT.replace("${NODES:-2}", "$NODES").replace(' "$@"', "")
    found = small(tmp_path, text)
    assert "data.train_batch_size" not in changes(found)
    assert "data.train_batch_size stays: the batch is not certain" in found.left
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
