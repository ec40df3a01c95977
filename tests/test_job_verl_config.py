"""verl's configuration: Hydra's composition of its files, and of the user's YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pytest_gkd.job import check, hydra_compose, releases
from pytest_gkd.job.check import Checked
from pytest_gkd.job.findings import CheckError
from pytest_gkd.job.frameworks.verl import reader as verl

RELEASE = "verl==0.9.1"
SEARCH = "hydra:\n  searchpath: [pkg://verl.trainer.config]\n"
MINE = f"""\
{SEARCH}
defaults:
  - ppo_trainer
  - _self_
data:
  train_batch_size: 2048
  gen_batch_size: ${{data.train_batch_size}}
actor_rollout_ref:
  rollout:
    name: vllm
    max_model_len: ${{data.train_batch_size}}
  actor:
    use_dynamic_bsz: true
    optim:
      lr: 1e-5
"""


def told(found: Checked, *levels: str) -> list[str]:
    wanted = levels or ("error", "warning")
    return [f.message for f in found.findings if f.level in wanted]


def written(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "mine.yaml"


@pytest.mark.parametrize("number", ["0.8.0", "0.9.0", "0.9.1"])
@pytest.mark.parametrize("engine", verl.ENGINES)
def test_the_files_make_the_tree_that_hydra_made_of_them(
    number: str, engine: str
) -> None:
    """verl keeps what Hydra prints of its configuration, for each model engine."""
    release = releases.release("verl", number)
    configs = release.schema["configs"]
    composer = hydra_compose.Composer(
        lambda path: hydra_compose.recorded(configs[path]) if path in configs else None,
        {("model_engine", "model_engine"): engine},
    )
    settings = composer.composed("ppo_trainer").settings.values()
    tree = {one.key: one.value for one in settings if one.key != "model_engine"}
    assert tree == verl.schema(release, engine)
    assert composer.missing == []


def test_a_file_of_the_users_comes_with_its_lines(tmp_path: Path) -> None:
    path = written(tmp_path, mine=MINE)
    found = check.check(path, ("data.max_prompt_length=64",), RELEASE)
    assert told(found) == []
    expected: dict[str, tuple[Any, str, int]] = {
        "train_batch_size": (2048, str(path), 8),
        "rollout_engine": ("vllm", str(path), 12),
        "max_model_len": (2048, str(path), 13),
        "learning_rate": (1e-5, str(path), 17),
        "max_prompt_length": (64, "the command line", 0),
        "max_response_length": (512, "", 0),
    }
    values = {n: (v.value, v.file, v.line) for n, v in found.values.items()}
    assert {name: values[name] for name in expected} == expected


def test_a_script_names_its_configuration(tmp_path: Path) -> None:
    written(tmp_path / "conf", mine=MINE)
    script = tmp_path / "run.sh"
    script.write_text(
        f"python3 -m verl.trainer.main_ppo --config-path={tmp_path}/conf "
        "--config-name=mine data.train_batch_size=1024 data.gen_batch_size=1\n"
    )
    found = check.check(script, (), RELEASE)
    assert told(found) == []
    batch = found.values["train_batch_size"]
    assert (batch.value, batch.line) == (1024, 1)
    assert found.values["rollout_engine"].file.endswith("conf/mine.yaml")


def test_a_configuration_that_is_not_there_is_told(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    start = "python3 -m verl.trainer.main_ppo --config-path=conf --config-name=mine"
    script.write_text(f"{start} trainer.nnodes=2\n")
    found = check.check(script, (), RELEASE)
    assert told(found, "note") == ["the configuration conf/mine.yaml does not exist"]
    assert found.values["nodes"].value == 2
    assert found.values["train_batch_size"].source == "undetermined"


def test_groups_beside_it_count_before_verls_own(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        mine=f"{SEARCH}defaults:\n  - ppo_trainer\n"
        "  - override model_engine: megatron\n"
        "  - override rollout@actor_rollout_ref.rollout: big\n"
        "  - optional nothing: here\n  - nothing@trainer: null\n"
        "  - extra@trainer.more: [one, two]\n  - _self_\n"
        "actor_rollout_ref: {hybrid_engine: true}\n",
        rollout__big="defaults:\n  - rollout\nn: 7\nname: sglang\n",
        extra__one="x: 1\n",
        extra__two="# @package _global_\ntrainer: {nnodes: 4}\n",
    )
    found = check.check(path, (), RELEASE)
    values = {name: value.value for name, value in found.values.items()}
    assert (values["samples_per_prompt"], values["rollout_engine"]) == (7, "sglang")
    assert values["trainer_strategy"] == "megatron"
    # What the list itself says of the package counts before the file's header.
    assert values["nodes"] == 1
    assert told(found) == []


def test_the_command_line_chooses_before_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, mine=MINE)
    found = check.check(path, ("model_engine=megatron",), RELEASE)
    assert found.values["trainer_strategy"].value == "megatron"


def test_of_two_files_that_choose_the_outer_one_counts(tmp_path: Path) -> None:
    text = MINE.replace("ppo_trainer", "ppo_megatron_trainer").replace(
        "  - _self_", "  - override model_engine: veomni\n  - _self_"
    )
    path = written(tmp_path, mine=text)
    strategy = check.check(path, (), RELEASE).values["trainer_strategy"]
    assert strategy.value == "veomni"
    found = check.check(path, ("model_engine=torchtitan",), RELEASE)
    assert found.values["trainer_strategy"].value == "torchtitan"


def test_a_group_that_is_nowhere_is_told(tmp_path: Path) -> None:
    text = MINE.replace("  - _self_", "  - rollout@a.b: nothing\n  - _self_")
    found = check.check(written(tmp_path, mine=text), (), RELEASE)
    (message,) = told(found, "error", "warning")
    assert message.startswith("mine is to take rollout/nothing.yaml, which is not")


def test_a_group_that_the_command_line_chooses_is_looked_for(
    tmp_path: Path,
) -> None:
    found = check.check(written(tmp_path, mine=MINE), ("critic=nothing",), RELEASE)
    assert "ppo_trainer is to take critic/nothing.yaml" in told(found)[0]
    found = check.check(tmp_path / "mine.yaml", ("critic=megatron_critic",), RELEASE)
    assert told(found) == []


def test_the_searchpath_names_more_folders(tmp_path: Path) -> None:
    text = MINE.replace("trainer.config]", f"trainer.config, file://{tmp_path}/more]")
    text = text.replace("  - _self_", "  - rollout@a.b: nothing\n  - _self_")
    path = written(tmp_path, mine=text, more__rollout__nothing="x: 1\n")
    assert told(check.check(path, (), RELEASE)) == []


def test_a_configuration_that_hydra_does_not_find_verls_own_with(
    tmp_path: Path,
) -> None:
    path = written(tmp_path, mine=MINE.replace(SEARCH, ""))
    (message,) = told(check.check(path, (), RELEASE))
    assert "ppo_trainer.yaml is not next to it" in message
    assert "hydra.searchpath=[pkg://verl.trainer.config]" in message


def test_keys_of_a_file_are_new_ones_or_misspelt_ones(tmp_path: Path) -> None:
    text = MINE + "  hybrid_enginee: true\n  own: {key: 1}\n"
    path = written(tmp_path, mine=text)
    (message,) = told(check.check(path, ("actor_rollout_ref.own.key=2",), RELEASE))
    assert "Did you mean actor_rollout_ref.hybrid_engine?" in message


def test_rules_judge_what_a_file_says(tmp_path: Path) -> None:
    text = MINE.replace("train_batch_size: 2048", "train_batch_size: 6O")
    (message,) = told(check.check(written(tmp_path, mine=text), (), RELEASE))
    assert message == "data.train_batch_size is 6O, and verl expects an integer"


def test_files_that_name_each_other_end(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        mine="defaults: [other]\nactor_rollout_ref: {x: 1}\n",
        other="defaults: [mine]\n",
    )
    with pytest.raises(
        CheckError, match="name more files, or deeper, than are followed"
    ):
        check.check(path, (), RELEASE)


def test_verls_old_recipe_says_which_release_runs_it(tmp_path: Path) -> None:
    written(
        tmp_path / "config",
        on_policy_distill_trainer="data: {train_batch_size: 8}\n"
        "actor_rollout_ref: {rollout: {name: vllm, n: 1}}\n",
    )
    script = tmp_path / "run.sh"
    script.write_text("ray job submit -- python3 -m main_gkd data.train_batch_size=4\n")
    found = check.check(script, (), "verl==0.9.1")
    (message,) = told(found)
    assert "in verl up to 0.7.1; from 0.8 on main_ppo distils" in message
    assert found.values["train_batch_size"].value == 4
    script.write_text("python3 -m main_gkd data.train_batch_sise=4\n")
    messages = told(check.check(script, (), "verl==0.9.1"))
    assert any("did you mean 'data.train_batch_size'" in one for one in messages)


@pytest.mark.parametrize(
    "text",
    [
        "actor_rollout_ref: {rollout: {name: vllm}}\ntrainer: {nnodes: 1}\n",
        "defaults: [ppo_trainer, _self_]\ntrainer: {n_gpus_per_node: 4}\n",
    ],
)
def test_a_file_with_a_trainer_is_verls_alone(tmp_path: Path, text: str) -> None:
    """Such as what Hydra wrote into the directory of an earlier run."""
    path = tmp_path / "config.yaml"
    path.write_text(text)
    assert check.check(path).framework == "verl"
