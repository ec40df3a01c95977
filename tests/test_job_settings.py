"""``--gkd-config``: the stages work on what the user's own job says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_option_origins import PROBE, run

SCRIPT = """\
#!/usr/bin/env bash
python3 -m verl.trainer.main_ppo \\
  data.train_files=train.jsonl \\
  data.max_prompt_length=${LENGTH:-256} \\
  actor_rollout_ref.model.path=$STUDENT \\
  actor_rollout_ref.actor.optim.lr=2e-6 actor_rollout_ref.rollout.name=vllm \\
  actor_rollout_ref.actor.use_dynamic_bsz=True \\
  actor_rollout_ref.rollout.tensor_model_parallel_size=4 \\
  "$@"
"""
SIZES = (
    "actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.rollout.name=vllm"
)
SETTINGS = ("student", "max_prompt_length", "learning_rate", "train_files", "origins")


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A project with a script of verl's and a stage that tells its settings."""
    probe = PROBE.replace(
        '("student", "teacher", "train_files", "origins")', str(SETTINGS)
    )
    (tmp_path / "probe.py").write_text(probe)
    (tmp_path / "run.sh").write_text(SCRIPT)
    (tmp_path / "train.jsonl").write_text('{"prompt": "x"}\n')
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


def stages(place: Path) -> dict[str, dict[str, Any]]:
    report = json.loads((place / ".gkd/last/report.json").read_text())
    return {stage["name"]: stage for stage in report["stages"]}


def probe(place: Path, *options: str) -> dict[str, Any]:
    done = run(place, "--gkd-stages=probe", "probe.py", "--gkd-config=run.sh", *options)
    assert done.returncode == 0, done.stdout
    facts: dict[str, Any] = stages(place)["probe"]["facts"]
    return facts


def test_the_job_decides_and_its_line_is_the_origin(job: Path) -> None:
    found = probe(job, "--gkd-set=STUDENT=some/model")
    assert found["student"] == "some/model"
    assert (found["max_prompt_length"], found["learning_rate"]) == (256, 2e-6)
    assert found["train_files"] == ["train.jsonl"]
    assert found["origins"]["max_prompt_length"] == f"line 4 of {job / 'run.sh'}"


def test_the_command_line_wins_and_the_ini_does_not(job: Path) -> None:
    ini = "[pytest]\ngkd_max_prompt_length = 99\ngkd_learning_rate = 1\n"
    (job / "pytest.ini").write_text(ini)
    found = probe(job, "--gkd-max-prompt-length=77")
    assert (found["max_prompt_length"], found["learning_rate"]) == (77, 2e-6)
    assert found["student"] is None  # undetermined


def test_an_ini_that_names_the_job_corrects_it(job: Path) -> None:
    ini = "[pytest]\ngkd_config = run.sh\ngkd_learning_rate = 1\n"
    (job / "pytest.ini").write_text(ini)
    done = run(job, "--gkd-stages=probe", "probe.py")
    assert done.returncode == 0, done.stdout
    facts = stages(job)["probe"]["facts"]
    assert (facts["max_prompt_length"], facts["learning_rate"]) == (256, 1)


def test_arguments_and_a_release_reach_the_job(job: Path) -> None:
    more = ("--gkd-config=data.max_prompt_length=5", "--gkd-framework=verl==0.9.0")
    done = run(job, "--gkd-stages=config", "--gkd-config=run.sh", *more)
    assert done.returncode == 0, done.stdout
    facts = stages(job)["config"]["facts"]
    assert facts["job"]["values"]["max_prompt_length"]["value"] == 5
    assert "verl 0.9.0, 3 settings taken" in facts["summary"]
    assert "gkd: job of verl 0.9.0 (--framework) in" in done.stdout
    assert "tensor_parallel_size is 4, and this machine shows" in done.stdout


def test_all_faults_of_a_job_fail_its_stage(job: Path) -> None:
    more = ("--gkd-config=trainer.nnode=1", "--gkd-config=data.train_file=x")
    done = run(job, "--gkd-stages=config", "--gkd-config=run.sh", *more)
    assert done.returncode == 1
    stage = stages(job)["config"]
    told = json.dumps(stage)
    assert '"config.unknown-option"' in told
    assert "no key trainer.nnode;" in told
    assert "no key data.train_file;" in told


def test_a_command_is_a_job_too(job: Path) -> None:
    command = (
        f"srun -N 2 python -m verl.trainer.main_ppo data.max_prompt_length=9 {SIZES}"
    )
    done = run(job, "--gkd-stages=config", f"--gkd-config={command}")
    assert done.returncode == 0, done.stdout
    values = stages(job)["config"]["facts"]["job"]["values"]
    assert values["max_prompt_length"]["value"] == 9


def test_of_ms_swifts_data_only_files_are_taken(job: Path) -> None:
    text = "swift rlhf --rlhf_type gkd --model some/model --dataset {}\n"
    (job / "run.sh").write_text(text.format("train.jsonl#500"))
    found = probe(job)
    assert (found["student"], found["train_files"]) == ("some/model", ["train.jsonl"])
    (job / "run.sh").write_text(text.format("train.jsonl some/dataset#500"))
    assert probe(job)["train_files"] == []


def test_a_job_in_our_own_names(job: Path) -> None:
    text = 'student = "some/model"\nmax_prompt_length = 99\nloss_topk = 8\n'
    (job / "jobs").mkdir()
    (job / "jobs/job.toml").write_text(f'{text}train_files = "train.jsonl"\n')
    (job / "jobs/train.jsonl").write_text('{"prompt": "x"}\n')
    done = run(
        job, "--gkd-stages=probe,config", "probe.py", "--gkd-config=jobs/job.toml"
    )
    assert done.returncode == 0, done.stdout
    found = stages(job)["probe"]["facts"]
    assert (found["student"], found["max_prompt_length"]) == ("some/model", 99)
    # A file that lies beside the configuration is meant.
    assert found["train_files"] == [str(job / "jobs/train.jsonl")]
    assert "4 settings taken" in stages(job)["config"]["facts"]["summary"]
    (job / "jobs/job.toml").write_text(f"{text}max_lenght = 1\n")
    done = run(job, "--gkd-stages=config", "--gkd-config=jobs/job.toml")
    assert done.returncode == 1
    assert "no value max_lenght" in json.dumps(stages(job)["config"])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--gkd-stages=config"], "name it with --gkd-config=FILE"),
        (["--gkd-stages", "--gkd-config=no.sh"], "--gkd-config: no.sh does not exist"),
        (["--gkd-stages", "--gkd-config=run.sh", "--gkd-set=A"], "expected NAME=VALUE"),
        (
            ["--gkd-stages", "--gkd-config=pytest.ini"],
            "pytest.ini: no command was found",
        ),
    ],
)
def test_what_is_no_job_is_refused_at_once(
    job: Path, options: list[str], says: str
) -> None:
    done = run(job, *options)
    assert done.returncode == 4
    assert says in done.stdout
