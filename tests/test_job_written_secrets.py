"""Secrets in a job's files are told with their place, and never said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_gkd.__main__ import main
from pytest_gkd.job import check

BATCH = "actor_rollout_ref.actor.use_dynamic_bsz=True"
START = f"python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=vllm {BATCH}"
# Put together here, so that no scanner takes this file for one that holds any.
HEX = "0123456789abcdef" * 2 + "01234567"
HUB = "hf_" + "aB3dE5fG7hJ9kL1mN3pQ5rS7"
HANDED = f'{{"env_vars": {{"HF_TOKEN": "{HUB}"}}}}'
CLOUD = "AKIA" + "2E4G6J8L0N2Q4S6U"


@pytest.mark.parametrize(
    ("script", "line", "kind"),
    [
        (f"export WANDB_API_KEY={HEX}\nSTART", 1, "WANDB_API_KEY"),
        (f"\nHF_TOKEN={HUB} START", 2, "Hugging Face"),
        (f"START +trainer.wandb_api_key={HEX}", 1, "trainer.wandb_api_key"),
        (f'export X_API_KEY="${{X_API_KEY:-{HEX}}}"\nSTART', 1, "X_API_KEY"),
        (f"wandb login {HEX}\nSTART", 1, "W&B"),
        (f"# export HF_TOKEN={HUB}\nSTART", 1, "Hugging Face"),
        (f"aws configure set aws_access_key_id {CLOUD}\nSTART", 1, "AWS"),
        ("curl https://me:pa55w0rd@host/x\nSTART", 1, "password in an address"),
        (f"ray job submit --runtime-env-json '{HANDED}' -- START", 1, "Hugging Face"),
    ],
)
def test_a_secret_is_told_with_place_and_kind(
    tmp_path: Path, script: str, line: int, kind: str
) -> None:
    path = tmp_path / "run.sh"
    path.write_text(script.replace("START", START))
    found = check.check(path)
    (one,) = [one for one in found.findings if one.cause == "config.secret-in-file"]
    assert (one.level, one.file, one.line) == ("warning", str(path), line)
    assert kind in one.message
    everything = check.text(found) + json.dumps(found.to_json())
    for secret in (HEX, HUB, CLOUD, "pa55w0rd"):
        assert secret not in everything


@pytest.mark.parametrize(
    "words",
    [
        "export WANDB_API_KEY=your_wandb_api_key",
        "export HF_TOKEN=hf_xxxxxxxxxxxxxxxxxxxxxxxxxx",
        "export HF_TOKEN=$TOKEN OPENAI_API_KEY=EMPTY",
        'export WANDB_API_KEY="${WANDB_API_KEY:?}"',
        f"git checkout {HEX}",
        "vllm serve m --api-key token-abc123",
        "export HF_TOKEN=<your token> || true",
        "PAD_TOKEN=abcdefgh12345678abcdefgh",
        'export E2B_API_KEY="${E2B_API_KEY:-e2b_0000000000000000000000000000}"',
        "export KEY_FILE=/root/.ssh/id_rsa1234567890",
    ],
)
def test_what_stands_in_a_secrets_place_is_none(tmp_path: Path, words: str) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"{words}\n{START}\n")
    found = check.check(path).findings
    assert not [one for one in found if one.cause == "config.secret-in-file"]


@pytest.mark.parametrize("key", ["trainer.nnodes", "data.train_batch_size", "no.key"])
def test_a_key_in_place_of_a_number_is_not_said(tmp_path: Path, key: str) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"{START} {key}={HEX} +{HEX}=1 {key}={HEX}\n")
    found = check.check(path)
    everything = check.text(found) + json.dumps(found.to_json())
    assert HEX[:20] not in everything
    assert "***" in everything


def test_a_commit_is_said(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    snapshot = f"/cache/models--m/snapshots/{HEX}"
    path.write_text(f"{START} actor_rollout_ref.model.path={snapshot}\n")
    assert check.check(path).values["student"].value == snapshot


def test_a_secret_of_a_configuration_file_is_told(tmp_path: Path) -> None:
    """Also where a script names the file."""
    path = tmp_path / "job.yaml"
    path.write_text(
        f"model_name_or_path: m\nhub_token: {HUB}\nmax_completion_length: 8\n"
    )
    script = tmp_path / "run.sh"
    script.write_text(f"trl grpo --config {path}\n")
    for job, framework in ((path, "trl"), (script, "")):
        found = check.check(job, framework=framework)
        told = [one for one in found.findings if one.cause == "config.secret-in-file"]
        assert [(one.file, one.line) for one in told] == [(str(path), 2)]
        assert HUB not in json.dumps(found.to_json())


def test_a_sourced_file_is_the_place_for_them_and_not_repeated(tmp_path: Path) -> None:
    (tmp_path / "own.env").write_text(f"export WANDB_API_KEY={HEX}\n")
    path = tmp_path / "run.sh"
    path.write_text(f"source {tmp_path}/own.env\n{START} x.y=[$WANDB_API_KEY]\n")
    found = check.check(path)
    assert not [one for one in found.findings if one.cause == "config.secret-in-file"]
    assert HEX not in check.text(found) + json.dumps(found.to_json())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), f"{HEX} --now\n"),  # none of a framework: what was found is told
        ((), f"{HUB}\n"),
        ((), f"#!/usr/bin/python {HEX}\n"),
        ((), f"export WANDB_API_KEY=abc-{HEX[:20]}\nabc-{HEX[:20]} --now\n"),
        ((f"--set={HEX}",), START),
        ((f"--framework={HEX}",), START),
        ((f"--framework=verl=={HEX}",), START),
        ((f"--machine={HEX}=1",), START),
    ],
)
def test_what_is_said_of_a_job_that_cannot_be_read_has_none(
    arguments: tuple[str, ...],
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "run.sh"
    path.write_text(text)
    assert main(["check", str(path), *arguments]) == 2
    said = "".join(capsys.readouterr())
    assert "***" in said
    assert HEX[:20] not in said
    assert HUB not in said


def test_of_a_commit_an_error_says_which(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"#!/usr/bin/python commit {HEX}\n")
    assert main(["check", str(path)]) == 2
    assert HEX in "".join(capsys.readouterr())


def test_only_the_words_before_it_make_it_a_commit(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    words = "a" * 150
    path.write_text(f"{START} revision.{words}.nnodes={HEX} trainer.sharding={HEX}\n")
    found = check.check(path)
    assert HEX not in check.text(found)
