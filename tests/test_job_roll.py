"""``gkd check`` on ROLL: values, keys that nothing reads, and what it refuses."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import yaml

from pytest_gkd.job import debug_config, releases
from pytest_gkd.job.check import Checked, check
from pytest_gkd.job.findings import CheckError, Finding
from pytest_gkd.job.frameworks.roll import devices

ON_POLICY = "start_onpolicy_distill_pipeline"
RLVR = "start_rlvr_pipeline"
COMMON = """\
hydra: {run: {dir: .}, output_subdir: null}
num_gpus_per_node: 8
system_envs: {USE_MODELSCOPE: '1'}
rollout_batch_size: 16
prompt_length: 2048
response_length: 2048
num_return_sequences_in_group: 4
adv_estimator: reinforce
pretrain: Qwen/Qwen3-0.6B
rewards:
  math_rule: {worker_cls: a.B, tag_included: [math], world_size: 8}
"""
TRAIN = """
  training_args: {learning_rate: 1.0e-6, per_device_train_batch_size: 2,
    gradient_accumulation_steps: 4}
  data_args: {template: qwen3, messages: messages, file_name: [train.jsonl],
    domain_interleave_probs: {math_rule: 1.0}}
  strategy_args:
    strategy_name: megatron_train
    strategy_config: {tensor_model_parallel_size: 1, recompute_granularity: full}
  device_mapping: list(range(0,8))
"""
INFER = """
  generating_args: {max_new_tokens: '${response_length}', temperature: 0.9,
    num_return_sequences: '${num_return_sequences_in_group}'}
  strategy_args:
    strategy_name: vllm
    strategy_config: {gpu_memory_utilization: 0.7, tensor_parallel_size: 2,
      max_model_len: 8000}
  device_mapping: list(range(0,8))
"""
HELD = """
  strategy_args:
    strategy_name: megatron_infer
    strategy_config: {tensor_model_parallel_size: 2}
  device_mapping: list(range(0,8))
"""
MODEL = "\n  model_args: {model_name_or_path: "
PURE = (
    COMMON
    + f"student_train:{MODEL}'${{pretrain}}'}}"
    + TRAIN
    + f"student_infer:{MODEL}'${{pretrain}}'}}"
    + INFER
    + f"teacher:{MODEL}Qwen/Qwen3-8B}}"
    + HELD
)
PLAIN = f"{COMMON}actor_train:{TRAIN}actor_infer:{INFER}reference:{HELD}"
DISTILL = f"""\
num_gpus_per_node: 8
student_pretrain: Qwen/Qwen3-0.6B
teacher_pretrain: Qwen/Qwen3-8B
logits_topk: 64
kd_objective: reverse_kl
sequence_length: 2048
question_key: question
student:{TRAIN.replace("messages: messages, ", "")}
teacher:{HELD}
"""
SFT = f"""\
num_gpus_per_node: 8
sequence_length: 2048
pretrain: Qwen/Qwen3-0.6B
sft_train:{TRAIN.replace("messages: messages, ", "")}
"""
ENVIRONMENTS = """
train_env_manager: {num_env_groups: 4, group_size: 4, tags: [Lake],
  num_groups_partition: [4]}
val_env_manager: {num_env_groups: 8, group_size: 1, tags: [Lake],
  num_groups_partition: [8]}
val_batch_size: 8
custom_envs: {Lake: {env_type: frozen_lake}}
"""
AGENTIC = (
    PLAIN.replace("num_return_sequences_in_group: 4\n", "")
    .replace("'${num_return_sequences_in_group}'", "1")
    .partition("rewards:")[0]
    + f"actor_train:{TRAIN}actor_infer:{INFER}reference:{HELD}{ENVIRONMENTS}"
).replace("'${num_return_sequences_in_group}'", "1")
JOBS = {
    ON_POLICY: PURE,
    RLVR: PLAIN,
    "start_distill_pipeline": DISTILL,
    "start_agentic_pipeline": AGENTIC,
}
FSDP = "actor_train.strategy_args.strategy_name=fsdp2_train"
FSDP_CONFIG = "actor_train.strategy_args.strategy_config"
EPOCHS = "student.training_args.num_train_epochs=1"


def faults(found: Checked) -> list[Finding]:
    return [f for f in found.findings if f.level != "note"]


def script_of(folder: Path, program: str, text: str, more: str = "") -> Path:
    """The example's layout: a script beside its YAML, below examples/."""
    place = folder / "examples/mine"
    place.mkdir(parents=True, exist_ok=True)
    (place / "job.yaml").write_text(text)
    script = place / "run.sh"
    script.write_text(
        "#!/bin/bash\nset +x\nCONFIG_PATH=$(basename $(dirname $0))\n"
        f"python examples/{program}.py --config_path $CONFIG_PATH --config_name job"
        f" {more}\n"
    )
    return script


def told(folder: Path, program: str, *added: str) -> list[Finding]:
    base = (EPOCHS,) if program == "start_distill_pipeline" else ()
    return faults(
        check(script_of(folder, program, JOBS[program]), added=(*base, *added))
    )


@pytest.mark.parametrize("program", JOBS)
def test_a_job_that_is_right_has_no_fault(program: str, tmp_path: Path) -> None:
    assert not told(tmp_path, program)


def test_what_a_job_of_on_policy_distillation_is(tmp_path: Path) -> None:
    found = check(script_of(tmp_path, ON_POLICY, PURE))
    values = {name: value.value for name, value in found.values.items()}
    assert found.framework == "roll"
    assert (values["student"], values["teacher"]) == (
        "Qwen/Qwen3-0.6B",
        "Qwen/Qwen3-8B",
    )
    assert (values["max_response_length"], values["max_length"]) == (2048, 4096)
    assert (values["samples_per_prompt"], values["train_batch_size"]) == (4, 16)
    assert (values["tensor_parallel_size"], values["load_format"]) == (2, "dummy")
    assert (values["trainer_gpus"], values["rollout_gpus"]) == (8, 8)
    assert (values["teacher_gpus"], values["total_gpus"]) == (8, 8)
    assert (values["placement"], values["opd_kl_coef"]) == ("colocated", 1.0)
    assert (values["advantage_estimator"], values["nodes"]) == ("reinforce", 1)
    # What chooses the key is no origin of the value.
    assert found.values["load_format"].source == "default"
    teacher = found.values["teacher"]
    assert teacher.file.endswith("examples/mine/job.yaml")
    assert PURE.splitlines()[teacher.line - 1].strip().endswith("Qwen3-8B}")
    assert found.no_memory_plan.startswith("of ROLL only RLVR and agents under fsdp2")


@pytest.mark.parametrize("release", releases.recorded("roll"))
def test_every_recorded_release_judges(release: str, tmp_path: Path) -> None:
    found = check(script_of(tmp_path, ON_POLICY, PURE), framework=f"roll=={release}")
    assert (found.release, faults(found)) == (release, [])


def test_a_file_alone_is_read_by_its_sections(tmp_path: Path) -> None:
    for program, text in JOBS.items():
        path = tmp_path / f"{program}.yaml"
        path.write_text(text)
        found = check(path)
        assert found.framework == "roll"
        assert not faults(found), program
        has_teacher = found.values.get("teacher") is not None
        assert has_teacher == (text in (PURE, DISTILL))
        assert ("samples_per_prompt" in found.values) == (text is not DISTILL)


def test_several_teachers_are_named_each(tmp_path: Path) -> None:
    one = f"{MODEL}Qwen/Qwen3-8B}}{HELD}".replace("\n", "\n  ")
    two = one.replace("8B", "14B").replace("range(0,8)", "range(8,16)")
    text = PURE.partition("teacher:")[0] + f"teacher:\n  a:{one}\n  b:{two}"
    found = check(script_of(tmp_path, ON_POLICY, text))
    assert not faults(found)
    values = {name: value.value for name, value in found.values.items()}
    assert values["teacher"] == ["Qwen/Qwen3-8B", "Qwen/Qwen3-14B"]
    assert (values["teacher_gpus"], values["total_gpus"]) == (16, 16)
    wrong = text.replace("device_mapping: list(range(8,16))", "device_maping: '[8]'")
    (fault,) = faults(check(script_of(tmp_path, ON_POLICY, wrong)))[:1]
    assert "teacher.b.device_maping; did you mean 'device_mapping'" in fault.message


# -- keys and types ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "added", "said"),
    [
        (RLVR, "rollout_batchsize=8", "did you mean 'rollout_batch_size'"),
        (RLVR, "actor_train.model_args.flash_attn=fa2", "attn_implementation took"),
        (RLVR, "rewards.math_rule.tag_include=[a]", "did you mean 'tag_included'"),
        (RLVR, "use_topr_loss=true", "nothing reads it"),
        (RLVR, "teacher.device_mapping='[0]'", "teacher counts for nothing"),
        (RLVR, "student_train.world_size=1", "student_train counts for nothing"),
        (ON_POLICY, "actor_train.world_size=1", "student_train takes its place"),
        (ON_POLICY, "reference.world_size=1", "teacher takes its place"),
        (
            ON_POLICY,
            "teacher.sequence_packing_args.algorithm=load_balance",
            "teacher.use_sequence_packing is not given",
        ),
        (
            RLVR,
            "actor_train.max_tokens_per_microbatch_in_train=9000",
            "use_dynamic_batching_in_train is not given",
        ),
        (RLVR, "actor_train.training_args.max_steps=9", "ROLL sets it by max_steps"),
    ],
)
def test_keys_that_count_for_nothing_are_warnings(
    program: str, added: str, said: str, tmp_path: Path
) -> None:
    found = [f for f in told(tmp_path, program, added) if said in f.message]
    assert {(f.level, f.cause) for f in found} == {("warning", "config.unknown-option")}


def test_what_fsdp_does_not_read_is_told(tmp_path: Path) -> None:
    start = "actor_train.strategy_args.strategy_"
    found = told(
        tmp_path,
        RLVR,
        f"{start}name=fsdp2_train",
        f"{start}config={{fsdp_sizes:8}}",
        "actor_train.use_sequence_packing=true",
    )
    texts = [f.message for f in found if f.level == "warning"]
    assert any("did you mean 'fsdp_size'" in text for text in texts)
    assert any("counts for nothing under FSDP2" in text for text in texts)


@pytest.mark.parametrize(
    ("added", "said"),
    [
        ("num_return_sequences_in_group=4.0", "expects int"),
        ("adv_estimator=grppo", "expects Literal"),
        ("output_dir=null", "expects str"),
        ("validation=null", "expects WorkerConfig"),
        ("rewards.math_rule.world_size=many", "rewards.math_rule.world_size"),
        ("actor_train.data_args.file_name=[1]", "actor_train.data_args.file_name"),
    ],
)
def test_dacite_converts_nothing(added: str, said: str, tmp_path: Path) -> None:
    found = [f for f in told(tmp_path, RLVR, added) if said in f.message]
    assert {f.level for f in found} == {"error"}


def test_the_start_of_on_policy_distillation_checks_no_types(tmp_path: Path) -> None:
    assert not told(tmp_path, ON_POLICY, "seed=null", "save_steps=1.0")
    assert told(tmp_path, RLVR, "seed=null")
    assert not told(tmp_path, RLVR, "init_kl_coef=0", "value_clip=1")


def test_the_file_of_on_policy_distillation_alone_is_read_so(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"{PURE}seed: null\n")
    assert not faults(check(path))
    small = debug_config.smallest(lambda more=(), added=(): check(path, added=added))
    tree = yaml.safe_load(small.inheriting())
    assert tree["student_train"]["training_args"]["per_device_train_batch_size"] == 1
    assert "actor_train" not in tree


def test_another_tokenizer_is_told(tmp_path: Path) -> None:
    for name, tokens in (("student", {"a": 0, "b": 1}), ("teacher", {"a": 1, "b": 0})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        text = json.dumps({"model": {"vocab": tokens}})
        (tmp_path / name / "tokenizer.json").write_text(text)
    found = told(
        tmp_path,
        ON_POLICY,
        f"pretrain={tmp_path}/student",
        f"teacher.model_args.model_name_or_path={tmp_path}/teacher",
    )
    assert {f.cause for f in found} == {"tokenizer.vocab-mismatch"}


def test_keys_that_others_refer_to_are_no_dead_keys(tmp_path: Path) -> None:
    text = PLAIN.replace(
        "rollout_batch_size: 16", "mine: 16\nrollout_batch_size: ${mine}"
    )
    found = check(script_of(tmp_path, RLVR, text))
    assert not faults(found)
    assert found.values["train_batch_size"].value == 16
    (fault,) = faults(check(script_of(tmp_path, RLVR, f"{PLAIN}mine: 16\n")))
    assert "has no key mine" in fault.message


def test_what_defaults_name_is_composed(tmp_path: Path) -> None:
    script = script_of(
        tmp_path,
        RLVR,
        PLAIN.replace("rollout_batch_size: 16\n", "")
        + "defaults:\n  - ../config/sizes@_here_\n  - ../config/empty@_here_\n",
    )
    folder = tmp_path / "examples/config"
    folder.mkdir()
    (folder / "empty.yaml").write_text("# nothing\n\n")
    (folder / "sizes.yaml").write_text("rollout_batch_size: 32\nof_others: 1\n")
    found = check(script)
    assert not faults(found)
    size = found.values["train_batch_size"]
    assert (size.value, Path(size.file).name) == (32, "sizes.yaml")
    (folder / "sizes.yaml").unlink()
    assert any("is not there" in f.message for f in faults(check(script)))


# -- starts ------------------------------------------------------------------------


def test_a_start_takes_its_two_options_alone(tmp_path: Path) -> None:
    script = script_of(tmp_path, RLVR, PLAIN, '"$@"')
    assert not faults(check(script))
    (fault,) = faults(check(script, ["rollout_batch_size=8"]))
    assert "keys are read of the YAML file only" in fault.message
    (fault,) = faults(check(script_of(tmp_path, RLVR, PLAIN, "--seed 1")))
    assert "has no option --seed" in fault.message


def test_a_configuration_that_is_not_there_is_told(tmp_path: Path) -> None:
    script = script_of(tmp_path, RLVR, PLAIN)
    (tmp_path / "examples/mine/job.yaml").unlink()
    (fault,) = faults(check(script))
    assert fault.level == "error"
    assert "examples/mine/job.yaml is not there" in fault.message
    script.write_text(f"python examples/{RLVR}.py --config_path mine\n")
    (fault,) = faults(check(script))
    assert "needs --config_name" in fault.message
    script.write_text(f"python examples/{RLVR}.py --config_path $D --config_name job\n")
    found = check(script)
    assert found.values["student"].alternatives == ["give it with --set D=VALUE"]
    assert "is not there" in faults(check(script, given={"D": "mine"}))[0].message


def test_hydra_refuses_an_absolute_folder(tmp_path: Path) -> None:
    script = script_of(tmp_path, RLVR, PLAIN)
    text = script.read_text().replace("$CONFIG_PATH", str(script.parent))
    script.write_text(text)
    (fault,) = faults(check(script))
    assert "Hydra wants a path that is relative" in fault.message


@pytest.mark.parametrize(
    "wrong",
    [
        "actor_train.strategy_args.strategy_name=[a]",
        "actor_train.strategy_args=[a]",
        "actor_train.device_mapping={a:1}",
        "actor_infer.strategy_args.strategy_config=[1]",
        "actor_infer.strategy_args.strategy_config.tensor_parallel_size=0",
        "train_env_manager.tags=[[a]]",
        "train_env_manager.num_groups_partition=[x]",
        "custom_envs=[1]",
        "rollout_batch_size=many",
        "num_gpus_per_node=0",
        "rewards=[1]",
        "system_envs=[1]",
        "teacher=5",
        "pretrain=[a]",
        "response_length=-5",
    ],
)
def test_values_of_other_kinds_end_no_check(wrong: str, tmp_path: Path) -> None:
    for program in (ON_POLICY, "start_agentic_pipeline", "start_distill_pipeline"):
        script = script_of(tmp_path, program, JOBS[program])
        found = check(script, added=[wrong])
        assert found.values
        assert json.dumps(found.to_json())


def test_a_program_of_ones_own_is_known_by_its_options(tmp_path: Path) -> None:
    script = script_of(tmp_path, "my_train", PLAIN)
    found = check(script)
    assert found.framework == "roll"
    assert not faults(found)
    script.write_text("python my_train.py --config_name job\n")
    with pytest.raises(CheckError):
        check(script)


def test_rollout_pipelines_need_no_trainer(tmp_path: Path) -> None:
    text = PLAIN.partition("actor_train:")[0] + f"actor_infer:{INFER}"
    text = text.replace("max_model_len: 8000", "load_format: auto")
    program = "start_rlvr_rollout_pipeline"
    assert not faults(check(script_of(tmp_path, program, text)))
    dummy = text.replace("load_format: auto", "load_format: dummy")
    (fault,) = faults(check(script_of(tmp_path, program, dummy)))
    assert "must not be dummy" in fault.message


# -- GPUs --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("list(range(0, 4))", [0, 1, 2, 3]),
        ("list(range(8))", [*range(8)]),
        ("list(range(0,8,2))", [0, 2, 4, 6]),
        ("[6, 7]", [6, 7]),
        ("list([0,1])", [0, 1]),
        (" list(range(0,2))+list(range(14,16)) ", [0, 1, 14, 15]),
    ],
)
def test_gpus_are_read_of_lists_and_ranges(text: str, expected: list[int]) -> None:
    assert devices.numbers(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('touch CANARY')",
        "[open('CANARY', 'w')]",
        "list(map(int, '01'))",
        "[x for x in range(8)]",
        "list(range(N))",
        "list(range(10**9))",
        "list(range(0, 1000000))",
        "list(range(0, 8, 0))",
        "[0] * 8",
        "8",
        "(" * 500 + ")" * 500,
        "[" + "9" * 5000 + "]",
        "'0'",
        "[1.5]",
        "list(range(4)) + 4",
    ],
)
def test_no_expression_of_the_users_is_evaluated(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = PLAIN.replace("list(range(0,8))", json.dumps(text), 1)
    found = check(script_of(tmp_path, RLVR, job))
    assert not (tmp_path / "CANARY").exists()
    gpus = found.values["trainer_gpus"]
    assert (gpus.source, gpus.value) == ("undetermined", None)
    texts = [f.message for f in found.findings]
    assert any("actor_train.device_mapping" in one for one in texts)


@pytest.mark.parametrize(
    ("program", "added", "said"),
    [
        (RLVR, ["actor_train.device_mapping=[0,1]"], "ROLL gives it to eval"),
        (RLVR, ["actor_train.device_mapping='list(range(0,8'"], "is no Python"),
        (RLVR, ["actor_infer.device_mapping='[0,1,2]'"], "divided by tensor_parallel"),
        (RLVR, ["actor_infer.device_mapping='[-1,0]'"], "has a GPU below 0"),
        (RLVR, ["actor_train.device_mapping=null"], "ROLL needs it: it is trained"),
        (RLVR, ["reference.device_mapping=null"], "init_kl_coef = 0.2"),
        (RLVR, ["adv_estimator=gae"], "adv_estimator=gae trains it"),
        (RLVR, ["reference.device_mapping='[0,1,2]'"], "divided by TP * PP * CP = 2"),
        (
            RLVR,
            ["actor_infer.strategy_args.strategy_name=hf_infer"],
            "run by vllm or sglang",
        ),
        (
            RLVR,
            ["actor_train.strategy_args.strategy_name=megatron_infer"],
            "what is trained needs",
        ),
        (
            RLVR,
            ["reference.strategy_args.strategy_name=megatron"],
            "or 'megatron_infer'",
        ),
        (
            RLVR,
            ["actor_train.strategy_args.strategy_config.tensor_model_paralel_size=2"],
            "did you mean 'tensor_model_parallel_size'",
        ),
        (
            RLVR,
            ["actor_infer.strategy_args.strategy_config.mem_fraction_static=0.8"],
            "vllm has no mem_fraction_static, but gpu_memory_utilization",
        ),
        (
            RLVR,
            ["actor_infer.strategy_args.strategy_name=sglang"],
            "sglang has no gpu_memory_utilization, but mem_fraction_static",
        ),
        (
            RLVR,
            ["actor_infer.strategy_args.strategy_name=sglang"],
            "mem_fraction_static has to be given",
        ),
        (
            RLVR,
            [
                "actor_infer.strategy_args.strategy_name=sglang",
                "actor_infer.num_gpus_per_worker=4",
            ],
            "must be a multiple of actor_infer.num_gpus_per_worker = 4",
        ),
        (RLVR, ["actor_train.router_replay.mode=R2"], "R2 is not implemented"),
        (RLVR, ["actor_train.data_args.prompt=p"], "exclude each other"),
        (
            RLVR,
            ["actor_train.use_dynamic_batching_in_train=true"],
            "max_tokens_per_microbatch_in_train has to be given",
        ),
        (
            RLVR,
            [
                "actor_train.use_sequence_packing=true",
                "actor_train.sequence_packing_args.algorithm=load_balance",
            ],
            "max_packed_sequence_length_train has to be given",
        ),
        (
            RLVR,
            [
                "actor_train.use_sequence_packing=true",
                "actor_train.sequence_packing_args.algorithm=load_balanced",
            ],
            "did you mean 'load_balance'",
        ),
        (RLVR, ["response_length=null"], "response_length or sequence_length"),
        (RLVR, ["val_prompt_length=8"], "go together"),
        (RLVR, ["sequence_length=2000"], "leaves no token for a response"),
        (RLVR, ["rollout_batch_size=12"], "divided by the 8 data-parallel ranks"),
        (RLVR, ["num_return_sequences_in_group=3"], "a rank has rollout_batch_size"),
        (RLVR, ["max_steps=0"], "must be above 0"),
        (RLVR, ["profiler_timeline=true", "profiler_memory=true"], "exclude each"),
        (
            RLVR,
            ["async_generation_ratio=1", "generate_opt_level=0"],
            "needs generate_opt_level = 1",
        ),
        (RLVR, ["async_generation_ratio=0.5"], "must be 0, or at least 1"),
        (RLVR, ["use_opd=true"], "needs the section teacher"),
        (
            RLVR,
            ["use_opd=true", "teacher.device_mapping='list(range(0,8))'"],
            "refuses a reference",
        ),
        (ON_POLICY, ["use_opd=true"], "is not for pure on-policy distillation"),
        (ON_POLICY, ["~student_infer"], "needs the section student_infer"),
        (RLVR, ["~actor_infer.generating_args"], "generating_args has to be given"),
        (RLVR, ["validation.world_size=1"], "where validation is"),
        (
            RLVR,
            ["actor_train.data_args.domain_interleave_probs={math_rul:1.0}"],
            "did you mean 'math_rule'",
        ),
        (RLVR, ["tag_to_template={math:qwen_3}"], "did you mean 'qwen3'"),
        (RLVR, ["global_template=qwen"], "ROLL has no such template"),
        ("start_distill_pipeline", ["logits_transfer_backend=nccl"], "known are ipc"),
        (
            "start_distill_pipeline",
            ["student.data_args.file_name=train.jsonl"],
            "has to be a list of files",
        ),
        (
            "start_distill_pipeline",
            ["student.training_args.num_train_epochs=1.5"],
            "has to be a whole number",
        ),
        (
            "start_agentic_pipeline",
            ["train_env_manager.tags=[Lak]"],
            "did you mean 'Lake'",
        ),
        (
            "start_agentic_pipeline",
            ["train_env_manager.num_groups_partition=[3]"],
            "sum up to 3",
        ),
        (
            "start_agentic_pipeline",
            ["train_env_manager.group_size=3"],
            "must be a multiple of train_env_manager.group_size = 3",
        ),
        ("start_agentic_pipeline", ["val_batch_size=4"], "of the 8 environments"),
        (
            "start_agentic_pipeline",
            ["reference.device_mapping='[0,1]'"],
            "must be the same as actor_train.device_mapping",
        ),
        (
            "start_agentic_pipeline",
            ["async_generation_ratio=1"],
            "needs actor_infer on GPUs of its own",
        ),
        (
            "start_agentic_pipeline",
            ["actor_infer.device_mapping='list(range(0,16))'"],
            "that needs async_generation_ratio above 0",
        ),
        ("start_dpo_pipeline", ["actor_train.use_sequence_packing=true"], "for DPO"),
        (
            "start_distill_pipeline",
            ["student.data_args.file_name=null"],
            "student.data_args.file_name has to be given",
        ),
        (
            RLVR,
            ["~actor_train.data_args.domain_interleave_probs"],
            "the share of each domain",
        ),
        (
            "start_agentic_pipeline",
            ["actor_train.device_mapping='[0]'", "actor_infer.device_mapping='[0,1]'"],
            "has one engine; two are needed",
        ),
        (
            "start_agentic_pipeline",
            ["actor_infer.device_mapping='list(range(0,4))'"],
            "the rollout and reward have as many",
        ),
        (RLVR, [FSDP, f"{FSDP_CONFIG}={{ep_size:3}}"], "must divide the 8 GPUs"),
        (
            RLVR,
            [FSDP, f"{FSDP_CONFIG}={{}}", "actor_train.model_args.ulysses_size=2"],
            "must be at least ulysses_size = 2",
        ),
        (RLVR, ["pretrain=${nope}"], "there is no key nope"),
    ],
)
def test_what_roll_refuses_is_told(
    program: str, added: list[str], said: str, tmp_path: Path
) -> None:
    text = JOBS.get(program, PLAIN)
    base = [EPOCHS] if text is DISTILL else []
    script = script_of(tmp_path, program, text)
    found = faults(check(script, added=[*base, *added]))
    assert {f.level for f in found if said in f.message} == {"error"}, found


@pytest.mark.parametrize(
    ("program", "added", "said"),
    [
        (ON_POLICY, ["gamma=1.0"], "sets it to 0"),
        (ON_POLICY, ["use_kl_loss=true"], "sets it to False"),
        (
            ON_POLICY,
            ["student_infer.model_args.model_name_or_path=null"],
            "Qwen/Qwen3-8B is written over by pretrain = Qwen/Qwen3-0.6B",
        ),
        (
            ON_POLICY,
            ["teacher.model_args.model_name_or_path=Qwen/Qwen3-0.6B"],
            "distilled from itself",
        ),
        (RLVR, ["num_nodes=2"], "so 1 nodes of 8"),
        (RLVR, ["reference.device_mapping='[0,0]'"], "has GPU 0 more than once"),
        (RLVR, ["async_generation_ratio=1"], "they run at the same time"),
        (
            RLVR,
            ["actor_infer.strategy_args.strategy_config.max_model_len=4000"],
            "sequences have up to 4096 tokens",
        ),
        (
            RLVR,
            [
                "actor_train.use_dynamic_batching_in_train=true",
                "actor_train.max_tokens_per_microbatch_in_train=4000",
            ],
            "ends at the first one that is longer",
        ),
        (
            RLVR,
            ["actor_infer.generating_args.max_new_tokens=100"],
            "written over with 2048",
        ),
        (
            RLVR,
            ["actor_infer.generating_args.num_return_sequences=8"],
            "written over with 4",
        ),
        (
            "start_distill_pipeline",
            ["teacher.device_mapping='list(range(0,6))'"],
            "one must be a multiple",
        ),
        (
            "start_distill_pipeline",
            ["student.model_args.model_name_or_path=/other"],
            "written over by student_pretrain",
        ),
        (RLVR, ["pretrain=/models/none"], "/models/none is not there"),
    ],
)
def test_what_is_done_otherwise_is_a_warning(
    program: str, added: list[str], said: str, tmp_path: Path
) -> None:
    found = told(tmp_path, program, *added)
    assert {f.level for f in found if said in f.message} == {"warning"}, found


def test_variables_of_workers_must_be_texts(tmp_path: Path) -> None:
    found = told(tmp_path, RLVR, "actor_train.system_envs={NCCL_DEBUG:1}")
    assert any("NCCL_DEBUG" in f.message for f in found)


def test_a_lora_needs_no_reference(tmp_path: Path) -> None:
    added = ["~reference", "actor_train.model_args.lora_target=q"]
    script = script_of(tmp_path, RLVR, PLAIN)
    found = check(script, added=added)
    assert not faults(found)
    assert found.values["lora_rank"].value == 8
    assert found.values["load_format"].value == "auto"


# -- the smallest run --------------------------------------------------------------


@pytest.mark.parametrize("program", [*JOBS, "start_sft_pipeline"])
def test_the_smallest_run_is_a_file_that_takes_the_jobs_own(
    program: str, tmp_path: Path
) -> None:
    text = JOBS.get(program, SFT).replace("per_device_train_batch_size: 2", "seed: 1")
    script = script_of(tmp_path, program, text)
    found = debug_config.smallest(
        lambda more=(), added=(): check(script, more, added=added)
    )
    errors = {text for text in found.left if text.startswith("error")}
    assert {"num_train_epochs" in one for one in errors} <= {True}
    assert found.kept.get("train_tensor_parallel_size") == 1
    told = debug_config.text(found)
    assert "--config_name" in told
    assert "add these to the command" not in told
    _, _, printed = told.partition("as --config_name:\n")
    assert yaml.safe_load(printed) == yaml.safe_load(found.inheriting())
    beside = script.parent / "small.yaml"
    beside.write_text(found.inheriting())
    script.write_text(script.read_text().replace("_name job", "_name small"))
    again = check(script)
    levels = {f.level for f in faults(again) if "num_train_epochs" not in f.message}
    assert not levels
    values = {name: value.value for name, value in again.values.items()}
    assert values["per_device_train_batch_size"] == 1
    assert values.get("enforce_eager", True) is True
    if program in (RLVR, ON_POLICY):
        assert (values["train_batch_size"], values["max_response_length"]) == (8, 64)
    if program == "start_agentic_pipeline":
        assert values["train_batch_size"] == 8


def test_a_name_that_is_hostile_is_escaped(tmp_path: Path) -> None:
    path = tmp_path / "a\x1b[31m.yaml"
    path.write_text(PLAIN)
    small = debug_config.smallest(lambda more=(), added=(): check(path, added=added))
    assert "\x1b" not in debug_config.text(small)
    assert yaml.safe_load(small.inheriting())["defaults"][0] == path.stem


def test_groups_of_environments_stay_whole(tmp_path: Path) -> None:
    text = AGENTIC.replace("group_size: 4", "group_size: 16")
    script = script_of(tmp_path, "start_agentic_pipeline", text)
    found = debug_config.smallest(lambda more=(), added=(): check(script, added=added))
    tree = yaml.safe_load(found.inheriting())
    assert tree["rollout_batch_size"] == 8 * 16
    assert tree["defaults"] == ["job", "_self_"]


def test_every_row_makes_some_job_smaller(tmp_path: Path) -> None:
    jobs = [
        *[script_of(tmp_path / name, name, text) for name, text in JOBS.items()],
        script_of(tmp_path / "sft", "start_sft_pipeline", SFT),
    ]
    for text in (PLAIN, PURE):
        engine = text.replace("strategy_name: vllm", "strategy_name: sglang")
        jobs.append(script_of(tmp_path / f"{len(jobs)}", program_of(text), engine))
    used = set()
    for script in jobs:
        found = debug_config.smallest(
            lambda more=(), added=(), script=script: check(script, added=added)
        )
        used |= {change.text.partition("=")[0] for change in found.changes}
    rows = tomllib.loads(debug_config.TABLE.read_text())["roll"]
    assert {row["set"].partition("=")[0] for row in rows} == used


def program_of(text: str) -> str:
    return ON_POLICY if text is PURE else RLVR


# -- conditions of rules that only one side of pinned ---------------------------------

PACKING = "actor_train.sequence_packing_args"
OF_INFER = "actor_infer.strategy_args.strategy_config"
SGLANG = "actor_infer.strategy_args.strategy_name=sglang"


def others(folder: Path, program: str, added: list[str]) -> list[Finding]:
    more = {"start_dpo_pipeline": PLAIN, "start_sft_pipeline": SFT}
    text = (JOBS | more)[program]
    base = [EPOCHS] if text is DISTILL else []
    return faults(check(script_of(folder, program, text), added=[*base, *added]))


@pytest.mark.parametrize(
    ("program", "added", "said"),
    [
        # Nothing but vLLM divides by TP * PP.
        (
            RLVR,
            [
                SGLANG,
                "actor_infer.num_gpus_per_worker=3",
                f"{OF_INFER}.mem_fraction_static=0.8",
            ],
            "cannot be divided by num_gpus_per_worker = 3",
        ),
        (
            RLVR,
            [
                FSDP,
                f"{FSDP_CONFIG}.fsdp_size=4",
                "actor_train.model_args.ulysses_size=3",
            ],
            "cannot be divided by ulysses_size = 3",
        ),
        (
            RLVR,
            [
                "reference.use_sequence_packing=true",
                "reference.sequence_packing_args.algorithm=load_balance",
            ],
            "max_packed_sequence_length_forward has to be given",
        ),
        (RLVR, ["val_sequence_length=8"], "go together"),
        ("start_dpo_pipeline", ["~reference"], "and ROLL needs it: it is read"),
        # Another pipeline's key.
        (
            "start_dpo_pipeline",
            ["~reference", "+init_kl_coef=0.2"],
            "and ROLL needs it: it is read",
        ),
        ("start_agentic_pipeline", ["max_steps=-2"], "must be above 0"),
        (RLVR, ["max_steps=-1"], "must be above 0"),
    ],
)
def test_what_roll_refuses_in_other_cases_is_told(
    program: str, added: list[str], said: str, tmp_path: Path
) -> None:
    found = others(tmp_path, program, added)
    assert {f.level for f in found if said in f.message} == {"error"}, found


def test_a_worker_without_a_strategy_is_told_once(tmp_path: Path) -> None:
    found = others(tmp_path, RLVR, ["~reference.strategy_args"])
    about = [(f.level, f.message) for f in found if "strategy" in f.message]
    (one,) = about
    assert one[0] == "error"
    assert one[1].startswith("reference.strategy_args is not given, and ROLL needs it")


@pytest.mark.parametrize("program", ["start_dpo_pipeline", ON_POLICY])
def test_only_rollouts_with_rewards_train_a_critic(
    program: str, tmp_path: Path
) -> None:
    found = others(tmp_path, program, ["adv_estimator=gae"])
    assert not [f for f in found if "critic" in f.message], found
    rewarded = others(tmp_path, RLVR, ["adv_estimator=gae"])
    assert [f.key for f in rewarded if "trains it" in f.message] == [
        "critic.device_mapping"
    ]


@pytest.mark.parametrize(
    ("program", "added", "said"),
    [
        # As many parts as there are.
        (
            RLVR,
            [
                FSDP,
                f"{FSDP_CONFIG}.fsdp_size=2",
                "actor_train.model_args.ulysses_size=2",
            ],
            "must be at least ulysses_size",
        ),
        (
            RLVR,
            [FSDP, f"{FSDP_CONFIG}.ep_size=2", f"{FSDP_CONFIG}.efsdp_size=4"],
            "must divide",
        ),
        # A worker without GPUs is told as that alone.
        (
            RLVR,
            [FSDP, f"{FSDP_CONFIG}.ep_size=3", "actor_train.device_mapping=null"],
            "must divide",
        ),
        (
            RLVR,
            [SGLANG, f"{OF_INFER}.mem_fraction_static=0.8"],
            "has to be given for sglang",
        ),
        # Without a strategy nothing is replayed.
        (RLVR, ["rewards.math_rule.router_replay.mode=R2"], "R2 is not implemented"),
        # What is not trained has no tokens of a training step.
        (
            RLVR,
            ["reference.use_dynamic_batching_in_train=true"],
            "max_tokens_per_microbatch_in_train",
        ),
        (
            RLVR,
            [
                "actor_train.use_sequence_packing=true",
                f"{PACKING}.algorithm=load_balance",
                f"{PACKING}.max_packed_sequence_length_train=8192",
                f"{PACKING}.max_packed_sequence_length_forward=8192",
            ],
            "has to be given",
        ),
        (RLVR, ["val_prompt_length=8", "val_sequence_length=16"], "go together"),
        (
            RLVR,
            [
                "reference.use_sequence_packing=true",
                "reference.sequence_packing_args.algorithm=load_balance",
            ],
            "max_packed_sequence_length_train",
        ),
        # Neither a distillation nor SFT has a reference, whatever coefficient is left.
        ("start_distill_pipeline", ["++init_kl_coef=0.2"], "reference.device_mapping"),
        ("start_sft_pipeline", ["++init_kl_coef=0.2"], "reference.device_mapping"),
        # With a teacher there is none, either.
        (ON_POLICY, ["init_kl_coef=0.2", "~reference"], "reference.device_mapping"),
        # A batch that the ranks cannot share is told as that alone.
        (RLVR, ["rollout_batch_size=9"], "a rank has rollout_batch_size"),
        ("start_agentic_pipeline", ["max_steps=-1"], "must be above 0"),
    ],
)
def test_what_roll_takes_in_other_cases_is_not_told(
    program: str, added: list[str], said: str, tmp_path: Path
) -> None:
    found = others(tmp_path, program, added)
    assert not [f for f in found if said in f.message]
