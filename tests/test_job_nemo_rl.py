"""``gkd check`` on configurations and launch scripts of NeMo-RL."""

from __future__ import annotations

import ast
import re
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
# The release's own configuration stands in for the file that is not next to it.
GONE = re.compile(r"defaults: \S+ does not exist")


def checked(path: Path, text: str, *overrides: str, release: str = RELEASE) -> Checked:
    path.write_text(text)
    return check.check(path, overrides, release)


def told(found: Checked) -> list[tuple[str, str]]:
    """Levels and keys, but for the base that does not exist."""
    some = [f for f in found.findings if not GONE.match(f.message)]
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
    assert any("nowhere.yaml does not exist (looked for" in text for text in messages)


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
    with pytest.raises(CheckError, match=r"found duplicate key cluster \(line 7\)"):
        checked(config, BASE + "cluster: {num_nodes: 2}\n")


def test_a_merged_mapping_gives_way_to_the_keys_own(config: Path) -> None:
    text = "a: &a {b: {c: 1, d: 2}, e: 3}\ncluster:\n  <<: *a\n  b: {c: 4}\n"
    found = checked(config, text, "+cluster.num_nodes=${cluster.b.d}")
    (error,) = [f for f in found.findings if f.key == "cluster.num_nodes"]
    assert "there is no key cluster.b.d" in error.message


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("policy.train_global_batch_size='${mul:${.train_micro_batch_size}, 8}'", 8),
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
        ("--confg=x", "error", "is not an override"),
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


MEGATRON = "policy.dtensor_cfg.enabled=false policy.megatron_cfg.enabled=true"
PACKED = (
    "policy.dynamic_batching.enabled=false policy.sequence_packing.enabled=true "
    "policy.sequence_packing.train_mb_tokens=4096"
)
LORA = "++policy.dtensor_cfg.lora_cfg.enabled"
TRITON = "++policy.dtensor_cfg.lora_cfg.use_triton"
GRPO = """\
defaults: grpo_math_1B.yaml
policy: {model_name: student}
cluster: {gpus_per_node: 8, num_nodes: 1}
"""
ASYNC = (
    "grpo.async_grpo.enabled=true "
    "loss_fn.use_importance_sampling_correction=true "
    f"{VLLM}.async_engine=true"
)
TAUGHT = """\
defaults: grpo_math_1B.yaml
policy:
  model_name: student
  dtensor_cfg: {enabled: false}
  megatron_cfg: {enabled: true}
  generation: {vllm_cfg: {async_engine: true}}
cluster: {gpus_per_node: 8, num_nodes: 4}
on_policy_distillation:
  enabled: true
  teacher_model_by_agent_name: {one: T, other: T, last: U}
  non_colocated_teachers:
    enabled: true
    default_teacher_cfg: {tensor_model_parallel_size: 4}
    teacher_overrides: {last: {num_nodes: 2, context_parallel_size: 2}}
"""
APART_KEY = "on_policy_distillation.non_colocated_teachers.enabled"
DPO = "defaults: dpo.yaml\npolicy: {model_name: student}\n"
REWARD = "data.default.env_name=reward_model ++env.reward_model.resources"


@pytest.mark.parametrize(
    ("base", "overrides", "key", "says"),
    [
        (
            BASE,
            "policy.megatron_cfg.enabled=true",
            "policy.megatron_cfg.enabled",
            "are both true",
        ),
        (
            BASE,
            "teacher.dtensor_cfg.enabled=false",
            "teacher.dtensor_cfg.enabled",
            "neither teacher.dtensor_cfg.enabled nor",
        ),
        (
            BASE,
            "cluster.gpus_per_node=6",
            "policy.dtensor_cfg.tensor_parallel_size",
            "the 6 GPUs of the trainer cannot be divided by policy's",
        ),
        (
            BASE,
            f"{MEGATRON} cluster.gpus_per_node=12 "
            "policy.megatron_cfg.tensor_model_parallel_size=4",
            "policy.megatron_cfg.tensor_model_parallel_size",
            "the 12 GPUs of the trainer cannot be divided by policy's",
        ),
        (
            BASE,
            "policy.train_global_batch_size=1",
            "policy.train_global_batch_size",
            "cannot be divided by the 2 data-parallel ranks",
        ),
        (
            BASE,
            "policy.train_global_batch_size=96",
            "policy.train_global_batch_size",
            "= 128 samples, which is not a multiple of",
        ),
        (
            GRPO,
            "policy.train_global_batch_size=1024",
            "policy.train_global_batch_size",
            "= 512 samples, which is not a multiple of",
        ),
        (
            DPO,
            "cluster.gpus_per_node=6 policy.train_global_batch_size=1",
            "policy.train_global_batch_size",
            "cannot be divided by the 6 data-parallel ranks",
        ),
        (
            BASE,
            "policy.sequence_packing.enabled=true",
            "policy.sequence_packing.enabled",
            "policy.dynamic_batching.enabled are both true",
        ),
        (
            BASE,
            MEGATRON,
            "policy.dynamic_batching.enabled",
            "needs pipeline parallel size 1; it is 2",
        ),
        (
            BASE,
            PACKED,
            "policy.sequence_packing.enabled",
            "and a context parallel size of 2 cannot be combined under DTensor",
        ),
        (
            BASE,
            f"{PACKED} policy.dtensor_cfg.context_parallel_size=1 "
            "policy.dtensor_cfg.sequence_parallel=true",
            "policy.sequence_packing.enabled",
            "cannot be combined in a distillation",
        ),
        (
            BASE,
            "policy.dtensor_cfg.sequence_parallel=true",
            "policy.dtensor_cfg.sequence_parallel",
            "and a context parallel size of 2 cannot be combined",
        ),
        (
            BASE,
            f"{MEGATRON} {PACKED} policy.make_sequence_length_divisible_by=6",
            "policy.make_sequence_length_divisible_by",
            "= 6 must be a multiple of 4",
        ),
        (
            BASE,
            f"{MEGATRON} {PACKED} policy.make_sequence_length_divisible_by=12 "
            "policy.megatron_cfg.sequence_parallel=true",
            "policy.make_sequence_length_divisible_by",
            "= 12 must be a multiple of 8",
        ),
        (
            GRPO,
            f"{LORA}=true policy.dtensor_cfg._v2=false",
            "policy.dtensor_cfg.lora_cfg.enabled",
            "LoRA needs policy.dtensor_cfg._v2=true",
        ),
        (
            GRPO,
            f"{LORA}=true {TRITON}=true policy.dtensor_cfg.tensor_parallel_size=2",
            "policy.dtensor_cfg.lora_cfg.use_triton",
            "must be false with a tensor parallel size above 1; it is 2",
        ),
        (
            GRPO,
            "policy.dtensor_cfg.cpu_offload=true cluster.gpus_per_node=1",
            "policy.dtensor_cfg.cpu_offload",
            "does not work on a single GPU",
        ),
        (BASE, "policy.precision=bf16", "policy.precision", "known values are float32"),
        (
            BASE,
            f"{APART} {RESOURCES}.gpus_per_node=8",
            f"{RESOURCES}.gpus_per_node",
            "leave some of the 8 GPUs to the trainer; it is 8",
        ),
        (
            GRPO,
            f"{APART} {RESOURCES}.gpus_per_node=6 {REWARD}.num_nodes=1 "
            "++env.reward_model.resources.gpus_per_node=2",
            f"{RESOURCES}.gpus_per_node",
            "leave some of the 8 GPUs to the trainer; it is 6",
        ),
        (
            BASE,
            APART,
            f"{RESOURCES}.gpus_per_node",
            "must be at least 1 and leave some of the 8 GPUs",
        ),
        (
            BASE,
            f"{APART} {RESOURCES}.gpus_per_node=4 {RESOURCES}.num_nodes=2",
            f"{RESOURCES}.num_nodes",
            "must be 1 or null; it is 2",
        ),
        # A pool of 12 GPUs on two nodes of 8.
        (
            BASE,
            f"{APART} cluster.num_nodes=2 {RESOURCES}.gpus_per_node=4 "
            f"{RESOURCES}.num_nodes=1",
            f"{RESOURCES}.gpus_per_node",
            "must be that of the cluster, 8; it is 4",
        ),
        (
            BASE,
            f"{APART} cluster.num_nodes=2 {RESOURCES}.gpus_per_node=8 "
            f"{RESOURCES}.num_nodes=2",
            f"{RESOURCES}.num_nodes",
            "leave some of the 2 nodes to the trainer; it is 2",
        ),
        (
            GRPO,
            f"{APART} cluster.num_nodes=3 {RESOURCES}.gpus_per_node=8 "
            f"{RESOURCES}.num_nodes=2 {REWARD}.num_nodes=1 "
            "++env.reward_model.resources.gpus_per_node=8",
            f"{RESOURCES}.num_nodes",
            "leave some of the 2 nodes to the trainer; it is 2",
        ),
        (
            BASE,
            f"{APART} cluster.num_nodes=2 {RESOURCES}.gpus_per_node=8",
            f"{RESOURCES}.num_nodes",
            "must be at least 1 and leave some of the 2 nodes",
        ),
        # A teacher that two agents have is there once.
        (
            TAUGHT,
            "cluster.num_nodes=3",
            APART_KEY,
            "the teachers take all 3 nodes: none is left to the policy",
        ),
        (
            TAUGHT,
            "on_policy_distillation.deduplicate_shared_teacher_checkpoints=false",
            APART_KEY,
            "the teachers take all 4 nodes",
        ),
        (
            TAUGHT,
            "cluster.gpus_per_node=4",
            APART_KEY,
            "the teacher last needs 8 GPUs per node; the cluster has 4",
        ),
        (
            TAUGHT,
            "+on_policy_distillation.non_colocated_teachers.teacher_overrides.last."
            "gpus_per_node=6",
            APART_KEY,
            "the 12 GPUs of the teacher last cannot be divided by its tensor * pipeline"
            " * context parallel size = 8",
        ),
        (
            TAUGHT,
            "policy.dtensor_cfg.enabled=true policy.megatron_cfg.enabled=false",
            "policy.dtensor_cfg.enabled",
            "teachers with nodes need Megatron",
        ),
        (
            BASE,
            f"{VLLM}.tensor_parallel_size=3",
            f"{VLLM}.tensor_parallel_size",
            "the 8 GPUs of the rollout cannot be divided by vLLM's",
        ),
        (
            BASE,
            f"{VLLM}.pipeline_parallel_size=2",
            f"{VLLM}.pipeline_parallel_size",
            "needs policy.generation.vllm_cfg.async_engine=true",
        ),
        (
            BASE,
            f"{VLLM}.tensor_parallel_size=2 {VLLM}.expert_parallel_size=3",
            f"{VLLM}.expert_parallel_size",
            "= 3 must be a multiple of",
        ),
        (
            BASE,
            f"{VLLM}.expert_parallel_size=2 {VLLM}.async_engine=true",
            f"{VLLM}.expert_parallel_size",
            "needs policy.generation.vllm_cfg.async_engine=false",
        ),
        (BASE, "policy.generation.top_p=0", "policy.generation.top_p", "above 0"),
        (BASE, "policy.generation.top_p=1.1", "policy.generation.top_p", "at most 1"),
        (BASE, "policy.generation.top_k=0", "policy.generation.top_k", "at least 1"),
        (BASE, "loss_fn.kl_type=jsd", "loss_fn.kl_type", "known values are forward"),
        (
            BASE,
            "loss_fn.mixed_kl_weight=1.5",
            "loss_fn.mixed_kl_weight",
            "must be between 0 and 1",
        ),
        (
            BASE,
            "policy.generation=null",
            "policy.generation",
            "a distillation needs policy.generation",
        ),
        (
            BASE,
            f"policy.generation.backend=megatron {APART}",
            "policy.generation.backend",
            "=megatron needs policy.generation.colocated.enabled=true",
        ),
        (BASE, "data.validation=null", "data.validation", "nothing to validate on"),
        (
            BASE,
            "data.validation=null distillation.val_period=0 "
            "distillation.val_at_start=true",
            "data.validation",
            "nothing to validate on",
        ),
        (
            GRPO,
            "grpo.batch_multiplier=2",
            "grpo.batch_multiplier",
            "needs grpo.use_dynamic_sampling=true",
        ),
        (
            GRPO,
            f"{ASYNC} loss_fn.use_importance_sampling_correction=false",
            "loss_fn.use_importance_sampling_correction",
            "grpo.async_grpo.enabled needs",
        ),
        (
            GRPO,
            f"{ASYNC} {VLLM}.async_engine=false",
            f"{VLLM}.async_engine",
            "grpo.async_grpo.enabled needs",
        ),
        (
            GRPO,
            "loss_fn.force_on_policy_ratio=true policy.train_global_batch_size=256",
            "policy.train_global_batch_size",
            "num_prompts_per_step * num_generations_per_prompt = 512; it is 256",
        ),
        (
            BASE,
            "policy.train_global_batch_size=0",
            "policy.train_global_batch_size",
            "= 0 must be at least 1",
        ),
        (
            BASE,
            f"{VLLM}.tensor_parallel_size=0",
            f"{VLLM}.tensor_parallel_size",
            "= 0 must be at least 1",
        ),
    ],
)
def test_its_own_rules(
    base: str, overrides: str, key: str, says: str, config: Path
) -> None:
    found = checked(config, base, *overrides.split()).findings
    told = [(one.level, one.key) for one in found if says in one.message]
    assert told == [("error", key)], found


@pytest.mark.parametrize(
    ("base", "overrides"),
    [
        (BASE, "policy.train_global_batch_size=128"),
        (BASE, "policy.train_global_batch_size=2"),
        (BASE, "policy.generation.top_p=1 policy.generation.top_k=1"),
        (BASE, "policy.generation.top_p=0.01 policy.generation.top_k=-1"),
        (BASE, "loss_fn.mixed_kl_weight=0"),
        (BASE, "loss_fn.mixed_kl_weight=1"),
        (BASE, f"{VLLM}.tensor_parallel_size=2 {VLLM}.expert_parallel_size=4"),
        (
            BASE,
            f"{VLLM}.tensor_parallel_size=2 {VLLM}.expert_parallel_size=2 "
            f"{VLLM}.pipeline_parallel_size=4 {VLLM}.async_engine=true",
        ),
        (BASE, f"{PACKED} policy.dtensor_cfg.context_parallel_size=1"),
        (
            BASE,
            f"{MEGATRON} {PACKED} policy.make_sequence_length_divisible_by=4",
        ),
        (
            BASE,
            f"{MEGATRON} {PACKED} policy.make_sequence_length_divisible_by=1 "
            "policy.megatron_cfg.context_parallel_size=1",
        ),
        (BASE, f"{MEGATRON} policy.megatron_cfg.pipeline_model_parallel_size=1"),
        (
            BASE,
            "policy.dtensor_cfg.sequence_parallel=true "
            "policy.dtensor_cfg.context_parallel_size=1",
        ),
        (BASE, "data.validation=null distillation.val_period=0"),
        (BASE, "data.validation=null +data.train.split_validation_size=0.1"),
        (GRPO, f"{LORA}=true {TRITON}=true"),
        (
            GRPO,
            f"{LORA}=true {TRITON}=false policy.dtensor_cfg.tensor_parallel_size=2",
        ),
        (
            GRPO,
            "policy.dtensor_cfg.sequence_parallel=true "
            "policy.dtensor_cfg.tensor_parallel_size=2",
        ),
        (
            BASE,
            "policy.dtensor_cfg.sequence_parallel=true "
            "policy.dtensor_cfg.tensor_parallel_size=1",
        ),
        (
            GRPO,
            "policy.dtensor_cfg.cpu_offload=true policy.dtensor_cfg._v2=false "
            "cluster.gpus_per_node=1",
        ),
        (GRPO, f"{MEGATRON} policy.precision=bf16"),
        (GRPO, "policy.dtensor_cfg.cpu_offload=true cluster.gpus_per_node=2"),
        (GRPO, f"{APART} {RESOURCES}.gpus_per_node=7"),
        (GRPO, f"{APART} {RESOURCES}.gpus_per_node=4 {RESOURCES}.num_nodes=1"),
        (
            GRPO,
            f"{APART} cluster.num_nodes=2 {RESOURCES}.gpus_per_node=8 "
            f"{RESOURCES}.num_nodes=1",
        ),
        (
            GRPO,
            f"{APART} cluster.num_nodes=2 {RESOURCES}.gpus_per_node=7 "
            f"{REWARD}.num_nodes=1 ++env.reward_model.resources.gpus_per_node=8",
        ),
        (GRPO, "grpo.use_dynamic_sampling=true grpo.batch_multiplier=2"),
        (GRPO, ASYNC),
        (GRPO, "loss_fn.force_on_policy_ratio=true"),
        # From a tensor parallel size of 4 on, only force_on_policy_ratio allows it.
        (GRPO, "policy.logprob_batch_size=2 policy.dtensor_cfg.tensor_parallel_size=2"),
        (
            GRPO,
            "policy.logprob_batch_size=2 policy.dtensor_cfg.tensor_parallel_size=4 "
            "loss_fn.force_on_policy_ratio=true",
        ),
        # Megatron reads nothing of DTensor's section.
        (GRPO, f"{MEGATRON} {LORA}=true policy.dtensor_cfg._v2=false"),
        (
            GRPO,
            f"{MEGATRON} policy.dtensor_cfg.cpu_offload=true cluster.gpus_per_node=1",
        ),
        (
            BASE,
            f"{MEGATRON} {PACKED} policy.make_sequence_length_divisible_by=4 "
            "policy.dtensor_cfg.sequence_parallel=true",
        ),
        # Only a distillation refuses the two together.
        (GRPO, f"{PACKED} policy.dtensor_cfg.sequence_parallel=true"),
        (BASE, f"{VLLM}.tensor_parallel_size=2 {VLLM}.async_engine=true"),
        (BASE, f"{VLLM}.max_model_len=4096"),
        (BASE, f"policy.generation.backend=megatron {VLLM}.pipeline_parallel_size=2"),
        (BASE, "data.validation=null data.train.dataset_name=OpenMathInstruct-2"),
        (TAUGHT, ""),
        # Preferences are pairs: a batch of 4 has 8 sequences.
        (DPO, "cluster.gpus_per_node=8 policy.train_global_batch_size=4"),
    ],
)
def test_what_is_at_a_bound_is_no_fault(
    base: str, overrides: str, config: Path
) -> None:
    assert told(checked(config, base, *overrides.split())) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("policy.generation.colocated.resources.gpus_per_node", "x"),
        ("policy.generation.colocated.resources.num_nodes", "[1]"),
        ("policy.megatron_cfg.context_parallel_size", "0"),
        ("on_policy_distillation.teacher_model_by_agent_name", "[T]"),
        ("on_policy_distillation.teacher_model_by_agent_name.last", "[U]"),
        (
            "on_policy_distillation.non_colocated_teachers.default_teacher_cfg."
            "num_nodes",
            "null",
        ),
        (
            "on_policy_distillation.non_colocated_teachers.teacher_overrides.last",
            "5",
        ),
    ],
)
def test_no_rule_ends_at_a_value_of_another_kind(
    key: str, value: str, config: Path
) -> None:
    found = checked(config, TAUGHT, APART, f"++{key}={value}")
    assert "the teachers take all" not in str(found.findings)


@pytest.mark.parametrize(
    ("overrides", "key", "says"),
    [
        (
            f"{VLLM}.max_model_len=4097",
            f"{VLLM}.max_model_len",
            "vLLM may generate up to",
        ),
        (
            "teacher.max_total_sequence_length=4095",
            "teacher.max_total_sequence_length",
            "the teacher takes 4095 tokens",
        ),
        (f"+{VLLM}.load_format=auto", f"{VLLM}.load_format", "is overwritten"),
        ("policy.model_name=/nowhere/model", "policy.model_name", "does not exist, on"),
        (
            "teacher.logprob_batch_size=2",
            "teacher.logprob_batch_size",
            "must be the same with tensor parallel size 4",
        ),
    ],
)
def test_what_is_probably_not_meant(
    overrides: str, key: str, says: str, config: Path
) -> None:
    (found,) = [
        one
        for one in checked(config, BASE, *overrides.split()).findings
        if not GONE.match(one.message)
    ]
    assert (found.level, found.key) == ("warning", key)
    assert says in found.message


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


# -- conditions of rules that only one side of pinned ---------------------------------

SEVERAL = """\
defaults: xtoken_off_policy_distillation.yaml
policy: {model_name: student}
teachers: [{model_name: T}, {model_name: U}, {model_name: T}]
"""
MAIN = "nemo-rl==0.7.0+main.7ea279ab"


def test_a_variable_that_is_set_to_nothing_is_not_set(tmp_path: Path) -> None:
    start = f"{START} teacher.logprob_batch_size=2\n"
    empty = f"export NRL_IGNORE_TP_ACCURACY_CHECK=\n{start}"
    found = told(checked(tmp_path / "run.sh", empty))
    assert found == [("error", "teacher.logprob_batch_size")]


def test_several_teachers_have_rules_of_their_own(config: Path) -> None:
    more = ("++loss_fn.kl_type=none", "++loss_fn.mixed_kl_weight=2")
    found = checked(config, SEVERAL, *more, "data.validation=null", release=MAIN)
    wanted = (
        *("known values are forward", "must be between 0 and 1"),
        *("a distillation needs", "data.validation is"),
    )
    texts = [f.message for f in found.findings]
    assert not [text for text in texts if any(one in text for one in wanted)]
    values = found.values
    assert values["teacher"].value == ["T", "U"]
    assert values["teacher_gpus"].value == values["trainer_gpus"].value
    one = SEVERAL.replace("{model_name: U}", "5")
    assert checked(config, one, release=MAIN).values["teacher"].value == "T"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (f"{APART_KEY}=false", 32),
        ("on_policy_distillation.enabled=false", 32),
        ("", 16),  # of four nodes two are the last one's, one the first two's
    ],
)
def test_teachers_take_nodes_of_their_own_where_both_are_on(
    config: Path, override: str, expected: int
) -> None:
    found = checked(config, TAUGHT, *override.split())
    assert found.values["trainer_gpus"].value == (8 if expected == 16 else expected)


def test_sizes_of_a_teacher_that_are_none_are_not_certain(config: Path) -> None:
    key = "on_policy_distillation.non_colocated_teachers.teacher_overrides.last"
    found = checked(config, TAUGHT, f"++{key}.num_nodes=0")
    assert found.values["trainer_gpus"].source == "undetermined"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("", "dummy"),
        ("++policy.generation.vllm_kwargs.speculative_config.method=mtp", "dummy"),
        ("++policy.generation.vllm_kwargs.speculative_config.method=eagle", "auto"),
        ("++policy.generation.refit_transport=vllm_zmq_sparse", "auto"),
        ("++policy.generation.refit_transport=nccl", "dummy"),
    ],
)
def test_weights_are_loaded_where_they_are_needed(
    config: Path, override: str, expected: str
) -> None:
    found = checked(config, BASE, *override.split())
    assert found.values["load_format"].value == expected


def test_data_sets_of_a_job_that_trains_on_several(config: Path) -> None:
    sets = (
        "[{dataset_name: A, processor: math_hf_data_processor}, "
        "{data_path: b.jsonl, dataset_name: B}, 5]"
    )
    default = "data.default.processor=math_hf_data_processor"
    found = checked(config, BASE, f"data.train={sets}", default)
    assert found.values["train_files"].value == ["A", "b.jsonl"]
    assert found.values["truncation"].value == "mask"
    other = sets.replace("math_hf", "nemo_gym")
    found = checked(config, BASE, f"data.train={other}", default)
    assert "truncation" not in found.values


@pytest.mark.parametrize(
    ("base", "override"),
    [
        (BASE, "policy.generation.top_p=x"),
        (BASE, "policy.generation.top_k=x"),
        (BASE, "loss_fn.mixed_kl_weight=x"),
        (BASE, "cluster.gpus_per_node=0"),
        (DPO, "cluster.gpus_per_node=0"),
    ],
)
def test_values_of_another_kind_are_no_faults_of_these_rules(
    base: str, override: str, config: Path
) -> None:
    """The release without types, which would refuse them first."""
    found = checked(config, base, override, release="nemo-rl==0.6.0")
    assert not [f for f in found.findings if "must be between" in f.message]
    assert not [f for f in found.findings if "at most 1" in f.message]


@pytest.mark.parametrize(
    ("base", "overrides"),
    [
        (BASE, f"+{VLLM}.load_format=dummy"),
        (BASE, "data.validation=null data.train=[{dataset_name:A}]"),
        (
            GRPO,
            "grpo.async_grpo.enabled=true policy.generation.backend=sglang "
            "loss_fn.use_importance_sampling_correction=true",
        ),
    ],
)
def test_what_only_some_engines_or_data_need(
    base: str, overrides: str, config: Path
) -> None:
    found = told(checked(config, base, *overrides.split()))
    wanted = (f"{VLLM}.load_format", f"{VLLM}.async_engine", "data.validation")
    assert not [key for _, key in found if key in wanted]


@pytest.mark.parametrize(
    ("sizes", "variable", "is_told"),
    [
        ((10, 10), "", False),
        ((10, 11), "", True),
        ((10, 11), "NRL_SKIP_DISTILLATION_TOKENIZER_CHECK=1 ", False),
    ],
)
def test_vocabularies_are_compared_unless_it_is_said(
    tmp_path: Path, sizes: tuple[int, int], variable: str, is_told: bool
) -> None:
    words = []
    for name, size in zip(("policy", "teacher"), sizes, strict=True):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(f'{{"vocab_size": {size}}}')
        words.append(f"{name}.model_name={tmp_path}/{name}")
    text = f"{variable}{START} {' '.join(words)}\n"
    found = checked(tmp_path / "run.sh", text)
    assert any("entries by their" in f.message for f in found.findings) is is_told


def test_gpus_of_each_role(config: Path) -> None:
    names = ("trainer_gpus", "rollout_gpus", "teacher_gpus")

    def of(base: str, *overrides: str) -> list[Any]:
        values = checked(config, base, *overrides).values
        return [values[name].value if name in values else None for name in names]

    assert of(TAUGHT) == [8, 8, 24]  # two nodes of the last teacher, one of the first's
    assert of(GRPO) == [8, 8, None]
    each = "++env.reward_model.resources.gpus_per_node=2"
    reward = f"{REWARD}.num_nodes=1 {each}".split()
    assert of(GRPO, *reward) == [6, 6, None]
    # With several nodes it has its own, whole.
    assert of(GRPO, *reward, "cluster.num_nodes=2") == [8, 8, None]
    apart = (APART, f"{RESOURCES}.gpus_per_node=2", f"{RESOURCES}.num_nodes=null")
    assert of(GRPO, *apart) == [6, 2, None]
    assert of(GRPO, *apart, *reward) == [4, 2, None]
    none = (APART, f"{RESOURCES}.gpus_per_node=8", f"{RESOURCES}.num_nodes=null")
    assert checked(config, GRPO, *none).values["trainer_gpus"].source == "undetermined"
    found = checked(config, BASE, "data.train=[{split:a}]").values["train_files"]
    assert found.value == [None]


DTENSOR, MCORE = "policy.dtensor_cfg", "policy.megatron_cfg"


@pytest.mark.parametrize(
    ("overrides", "placement", "rank"),
    [
        ("", "colocated", 0),
        (f"{APART} {RESOURCES}.gpus_per_node=2", "split", 0),
        (f"++{DTENSOR}.lora_cfg.enabled=true ++{DTENSOR}.lora_cfg.dim=8", "", 8),
        (f"++{DTENSOR}.lora_cfg.enabled=false ++{DTENSOR}.lora_cfg.dim=8", "", 0),
        (f"++{MCORE}.peft.enabled=true ++{MCORE}.peft.dim=16", "", 0),
        (
            f"{MEGATRON} ++{MCORE}.peft.enabled=true ++{MCORE}.peft.dim=16",
            *("", 16),
        ),
    ],
)
def test_where_the_rollout_is_and_the_rank_of_a_lora(
    config: Path, overrides: str, placement: str, rank: int
) -> None:
    values = checked(config, BASE, *overrides.split()).values
    assert values["placement"].value == (placement or "colocated")
    assert values["lora_rank"].value == rank


def test_a_job_without_a_rollout_has_no_placement(config: Path) -> None:
    found = checked(config, BASE.replace("distillation_math", "sft"))
    assert "placement" not in found.values
