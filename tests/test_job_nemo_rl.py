"""``gkd check`` on configurations and launch scripts of NeMo-RL."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from pytest_gkd.job import check, pydantic_types
from pytest_gkd.job.check import Checked
from pytest_gkd.job.findings import CheckError

RELEASE = "nemo-rl==0.7.0"
BASE = """\
defaults: distillation_math.yaml
policy:
  model_name: student
  max_total_sequence_length: 4096
cluster:
  num_nodes: 1
"""
# The release's own configuration stands in for the file that is not beside it.
GONE = "defaults: distillation_math.yaml is not there"


def checked(path: Path, text: str, *overrides: str, release: str = RELEASE) -> Checked:
    path.write_text(text)
    return check.check(path, overrides, release)


def told(found: Checked) -> list[tuple[str, str]]:
    """Levels and keys, but for the base that is not there."""
    some = [f for f in found.findings if not f.message.startswith(GONE)]
    return [(finding.level, finding.key) for finding in some]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "job.yaml"


def test_values_come_with_the_lines_they_stand_in(config: Path) -> None:
    found = checked(config, BASE, "cluster.gpus_per_node=16")
    assert told(found) == []
    expected = {
        "student": ("student", "user", 3),
        "tokenizer": ("student", "user", 3),
        "max_model_len": (4096, "user", 4),
        "teacher": ("Qwen/Qwen3-4B", "default", 0),
        "learning_rate": (2e-5, "default", 0),
        "teacher_tensor_parallel_size": (4, "default", 0),
        "gpus_per_node": (16, "user", 0),
        "total_gpus": (16, "user", 0),
    }
    values = found.values
    read = {n: (values[n].value, values[n].source, values[n].line) for n in expected}
    assert read == expected


def test_files_inherit_by_their_own_place_and_the_last_one_counts(
    tmp_path: Path,
) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "base.yaml").write_text(
        BASE + "data: {_x: 1, train: {dataset_name: A}}\n"
    )
    (tmp_path / "deep" / "one.yaml").write_text(
        "defaults: ../base.yaml\ncluster: {num_nodes: 2}\npolicy: {optimizer: null}\n"
    )
    text = (
        "defaults: [deep/one.yaml]\n"
        "data:\n  _override_: true\n  train: {dataset_name: B}\n"
    )
    values = checked(tmp_path / "job.yaml", text).values
    assert (values["nodes"].value, values["nodes"].file) == (
        2,
        str(tmp_path / "deep" / "one.yaml"),
    )
    assert values["student"].line == 3
    assert values["train_files"].value == "B"
    assert "max_prompt_length" not in values  # was in the section that is replaced
    assert "learning_rate" not in values  # was in the optimizer, which is null


def test_a_circle_and_what_is_not_there_are_told(tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("defaults: [job.yaml, nowhere.yaml]\n")
    found = checked(tmp_path / "job.yaml", "defaults: other.yaml\npolicy: {}\n")
    messages = [finding.message for finding in found.findings]
    assert "job.yaml inherits from other.yaml, which inherits from it" in messages
    assert any("nowhere.yaml is not there (looked for" in text for text in messages)


def test_files_that_inherit_without_end_are_refused(tmp_path: Path) -> None:
    for number in range(12):
        name = f"f{number + 1}.yaml"
        (tmp_path / f"f{number}.yaml").write_text(f"defaults: [{name}, {name}]\n")
    with pytest.raises(CheckError, match="one of more than 50 files"):
        check.check(tmp_path / "f0.yaml", framework=RELEASE)


def test_yaml_is_read_as_omegaconf_reads_it(config: Path) -> None:
    """1e-6 is a number, and a key that stands twice is refused."""
    text = BASE.replace("cluster:", "  optimizer: {kwargs: {lr: 1e-6}}\ncluster:")
    assert checked(config, text).values["learning_rate"].value == 1e-6
    with pytest.raises(CheckError, match="line 7: found duplicate key cluster"):
        checked(config, BASE + "cluster: {num_nodes: 2}\n")


def test_a_merged_mapping_gives_way_to_the_keys_own(config: Path) -> None:
    text = "a: &a {b: {c: 1, d: 2}, e: 3}\ncluster:\n  <<: *a\n  b: {c: 4}\n"
    found = checked(config, text, "+cluster.num_nodes=${cluster.b.d}")
    (error,) = [f for f in found.findings if f.key == "cluster.num_nodes"]
    assert "there is no key cluster.b.d" in error.message


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("policy.train_global_batch_size=${mul:${.train_micro_batch_size}, 8}", 8),
        ("policy.train_global_batch_size=${max:3,4}", 4),
        ("policy.train_global_batch_size='${div:${cluster.num_nodes},1}'", 1.0),
    ],
)
def test_interpolations_are_computed(override: str, value: Any, config: Path) -> None:
    found = checked(config, BASE, override)
    assert found.values["ppo_mini_batch_size"].value == value


def test_what_the_environment_decides_is_not_certain(config: Path) -> None:
    found = checked(config, BASE, "policy.model_name=${oc.env:MODEL,x}/y")
    value = found.values["student"]
    assert (value.source, value.alternatives) == (
        "undetermined",
        ["give it with --set MODEL=VALUE"],
    )


@pytest.mark.parametrize(
    ("override", "level", "says"),
    [
        ("policy.model_nam=x", "error", "no key policy.model_nam; did you mean"),
        ("+policy.model_name=x", "error", "is there already"),
        ("~policy.nothing", "error", "there is no policy.nothing to remove"),
        ("policy.model_name=${policy.nothing}", "error", "there is no key policy.n"),
        ("policy.model_name=${nope:1}", "error", "there is no resolver nope"),
        ("++policy.tensor_parallel_size=2", "warning", "policy.dtensor_cfg.tensor_"),
        ("++distillation.topk_logit_k=2", "warning", "did you mean 'topk_logits_k'"),
        ("policy.precision=16", "error", "policy.precision: 16; NeMo-RL 0.7.0 expects"),
        ("policy.train_micro_batch_size=1.5", "error", "expects int"),
        ("~policy.precision", "error", "refuses a configuration without"),
        ("policy.model_name=???", "error", "it is still to be given"),
        ("--confg=x", "error", "is no override"),
    ],
)
def test_what_is_refused_or_read_by_nobody(
    override: str, level: str, says: str, config: Path
) -> None:
    findings = checked(config, BASE, override).findings
    assert [f.level for f in findings if says in f.message] == [level], findings


def test_a_release_without_pydantic_refuses_no_types(config: Path) -> None:
    found = checked(config, BASE, "loss_fn.kl_type=5", release="nemo-rl==0.6.0")
    assert ("error", "loss_fn.kl_type") in told(found)  # by its own rule only
    assert not any("expects" in finding.message for finding in found.findings)


VLLM = "policy.generation.vllm_cfg"
APART = "policy.generation.colocated.enabled=false"
RESOURCES = "policy.generation.colocated.resources"


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ("policy.megatron_cfg.enabled=true", "policy.megatron_cfg.enabled"),
        ("teacher.dtensor_cfg.enabled=false", "teacher.dtensor_cfg.enabled"),
        ("cluster.gpus_per_node=6", "policy.dtensor_cfg.tensor_parallel_size"),
        ("policy.train_global_batch_size=63", "policy.train_global_batch_size"),
        ("policy.train_global_batch_size=96", "policy.train_global_batch_size"),
        ("policy.sequence_packing.enabled=true", "policy.sequence_packing.enabled"),
        ("policy.precision=bf16", "policy.precision"),
        (f"{APART} {RESOURCES}.gpus_per_node=8", f"{RESOURCES}.gpus_per_node"),
        # A pool of 12 GPUs on two nodes of 8.
        (
            f"{APART} cluster.num_nodes=2 {RESOURCES}.gpus_per_node=4 "
            f"{RESOURCES}.num_nodes=1",
            f"{RESOURCES}.gpus_per_node",
        ),
        (
            f"{APART} cluster.num_nodes=2 {RESOURCES}.gpus_per_node=8 "
            f"{RESOURCES}.num_nodes=2",
            f"{RESOURCES}.num_nodes",
        ),
        (f"{VLLM}.tensor_parallel_size=3", f"{VLLM}.tensor_parallel_size"),
        (f"{VLLM}.pipeline_parallel_size=2", f"{VLLM}.pipeline_parallel_size"),
        (
            f"{VLLM}.tensor_parallel_size=2 {VLLM}.expert_parallel_size=3",
            f"{VLLM}.expert_parallel_size",
        ),
        ("policy.generation.top_p=0", "policy.generation.top_p"),
        ("loss_fn.kl_type=jsd", "loss_fn.kl_type"),
        ("loss_fn.mixed_kl_weight=1.5", "loss_fn.mixed_kl_weight"),
        ("data.validation=null", "data.validation"),
    ],
)
def test_its_own_rules(overrides: str, key: str, config: Path) -> None:
    assert ("error", key) in told(checked(config, BASE, *overrides.split()))


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (f"{VLLM}.max_model_len=8192", f"{VLLM}.max_model_len"),
        (
            "teacher.max_total_sequence_length=2048",
            "teacher.max_total_sequence_length",
        ),
        (f"+{VLLM}.load_format=auto", f"{VLLM}.load_format"),
        ("policy.model_name=/nowhere/model", "policy.model_name"),
        ("teacher.logprob_batch_size=2", "teacher.logprob_batch_size"),
    ],
)
def test_what_is_probably_not_meant(overrides: str, key: str, config: Path) -> None:
    found = told(checked(config, BASE, *overrides.split()))
    assert ("warning", key) in found
    assert "error" not in dict(found)


def test_vocabularies_of_models_that_lie_here_are_held_together(tmp_path: Path) -> None:
    for name, size in (("student", 10), ("teacher", 11)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(f'{{"vocab_size": {size}}}')
    overrides = [
        f"policy.model_name={tmp_path}/student",
        f"teacher.model_name={tmp_path}/teacher",
    ]
    found = checked(tmp_path / "job.yaml", BASE, *overrides)
    assert any("have 10 and 11 entries" in f.message for f in found.findings)


def test_gpus_of_a_rollout_on_nodes_of_its_own(config: Path) -> None:
    overrides = f"{APART} cluster.num_nodes=3 {RESOURCES}.gpus_per_node=8"
    found = checked(config, BASE, *overrides.split(), f"{RESOURCES}.num_nodes=1")
    names = ("trainer_gpus", "rollout_gpus", "teacher_gpus", "total_gpus", "placement")
    values = [found.values[name].value for name in names]
    assert values == [16, 8, 16, 24, "split"]


START = "uv run examples/run_distillation.py"


def test_a_script_takes_its_configuration_from_beside_it(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "mine.yaml").write_text(BASE)
    text = (
        f"{START} --config conf/mine.yaml policy.model_name=other cluster.num_nodes=2"
    )
    found = checked(tmp_path / "run.sh", text + "\n")
    assert told(found) == []
    student = found.values["student"]
    assert (student.value, student.line) == ("other", 1)
    assert found.values["total_gpus"].value == 16


@pytest.mark.parametrize(
    ("words", "key"),
    [("", ""), ("--config nowhere.yaml", "defaults")],
)
def test_without_a_configuration_the_programs_own_one_counts(
    words: str, key: str, tmp_path: Path
) -> None:
    found = checked(tmp_path / "run.sh", f"{START} {words} policy.model_name=m\n")
    assert told(found) == ([("error", key)] if key else [])
    assert found.values["loss_topk"].value == 64
    assert found.values["student"].value == "m"


def test_a_configuration_that_is_not_certain_tells_only_what_is_given(
    tmp_path: Path,
) -> None:
    found = checked(tmp_path / "run.sh", f"{START} --config $C policy.model_name=m\n")
    assert found.values["student"].value == "m"
    assert found.values["total_gpus"].source == "undetermined"
    assert [finding.level for finding in found.findings] == ["note"]


def test_a_script_that_allows_unequal_batches_is_taken_at_its_word(
    tmp_path: Path,
) -> None:
    start = f"{START} teacher.logprob_batch_size=2\n"
    key = "teacher.logprob_batch_size"
    assert told(checked(tmp_path / "run.sh", start)) == [("error", key)]
    allowed = f"export NRL_IGNORE_TP_ACCURACY_CHECK=1\n{start}"
    assert told(checked(tmp_path / "run.sh", allowed)) == []


@pytest.mark.parametrize(
    ("annotation", "value", "fits"),
    [
        ("int", "8", True),
        ("int", "1e3", False),
        ("int", 1.5, False),
        ("float", "1e-6", True),
        ("str", 16, False),
        ("bool", "yes", True),
        ("int | None", None, True),
        ("Literal[True]", "true", False),
        ("NotRequired[list[str] | None]", [1], False),
        ("Annotated[float, Field(gt=0)]", "x", False),
        ("dict[str, Any]", [], False),
        ("PositiveInt", 0, False),
    ],
)
def test_types_are_judged_as_pydantic_does(
    annotation: str, value: Any, fits: bool
) -> None:
    node = ast.parse(annotation, mode="eval").body
    assert pydantic_types.fits(node, value) is fits
