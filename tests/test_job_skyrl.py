"""``gkd check`` on SkyRL: values, keys, what it refuses, and programs of one's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_gkd.job import debug_config, fitting
from pytest_gkd.job.check import Checked, check
from pytest_gkd.job.findings import CheckError, Finding

MAIN = "skyrl.train.entrypoints.main_base"
OPD = "examples.train.on_policy_distillation.main_on_policy_distill"
ASYNC = "examples.train.fully_async.main_fully_async"
START = """\
uv run --isolated --extra fsdp -m PROGRAM \\
  data.train_data="['/data/a.parquet']" \\
  trainer.policy.model.path=Qwen/Qwen3-0.6B \\
  trainer.placement.policy_num_gpus_per_node=4 \\
  trainer.placement.ref_num_gpus_per_node=4 \\
  trainer.placement.critic_num_gpus_per_node=4 \\
  generator.inference_engine.num_engines=4 \\
  trainer.train_batch_size=64 \\
  trainer.policy_mini_batch_size=16 \\
  trainer.critic_mini_batch_size=16 \\
  trainer.micro_train_batch_size_per_gpu=2 \\
  generator.n_samples_per_prompt=4 "$@"
"""
TEACHER = (
    "trainer.ref.model.path=Qwen/Qwen3-4B trainer.algorithm.use_kl_in_reward=true "
    "trainer.algorithm.use_kl_loss=false trainer.algorithm.advantage_estimator=no_op"
)
MEGATRON = "trainer.strategy=megatron"
TENSOR = "megatron_config.tensor_model_parallel_size"
E = "generator.inference_engine"
A = "trainer.algorithm"
C = f"{A}.off_policy_correction"
STEPS = "generator.step_wise_trajectories=true"
LORA = "trainer.policy.model.lora.rank=8"
OFFLOAD = f"{E}.offload_kv_for_weight_sync=true"
P = "trainer.placement"
SPLIT = f"{P}.colocate_all=false"
FULLY = (
    f"{SPLIT} trainer.fully_async.enabled=true trainer.train_batch_size=16 "
    f"trainer.fully_async.num_parallel_generation_workers=32 "
    f"{A}.policy_loss_type=rollout_is"
)
CRITIC = "trainer.critic.model.path=C"
BOMB = ",".join(
    f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}]"
    for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


def checked(path: Path, more: str = "", program: str = MAIN) -> Checked:
    path.write_text(START.replace("PROGRAM", program))
    return check(path, more.split())


def faults(found: Checked) -> list[Finding]:
    """Without those that the overrides of these tests are themselves."""
    return [
        f
        for f in found.findings
        if f.level != "note" and not f.message.endswith(", which takes effect")
    ]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "run.sh"


def test_a_start_that_is_right_has_no_fault(script: Path) -> None:
    found = checked(script)
    assert found.framework == "skyrl"
    assert not faults(found)
    values = {name: value.value for name, value in found.values.items()}
    assert values["train_files"] == ["/data/a.parquet"]
    assert (values["trainer_gpus"], values["rollout_gpus"]) == (4, 4)
    assert (values["total_gpus"], values["placement"]) == (4, "colocated")
    assert (values["fsdp_version"], values["use_dynamic_bsz"]) == (2, False)
    assert found.values["temperature"].source == "default"
    assert found.values["student"].line == 3
    assert "teacher" not in values
    assert values["teacher_gpus"] == 0


def test_a_reference_of_another_model_is_the_teacher(script: Path) -> None:
    found = checked(script, TEACHER, OPD)
    assert not faults(found)
    assert found.values["teacher"].value == "Qwen/Qwen3-4B"
    assert found.values["teacher"].expression == TEACHER.split()[0]
    assert found.values["teacher_gpus"].value == 4
    found = checked(script, f"{TEACHER} trainer.ref.model.path=$T", OPD)
    assert found.values["teacher_gpus"].value == 4


def test_gpus_that_are_not_shared_add_up(script: Path) -> None:
    more = f"{TEACHER} {SPLIT} {P}.policy_num_nodes=2 {E}.tensor_parallel_size=2"
    more += f" {P}.ref_num_gpus_per_node=2 {P}.colocate_policy_ref=false {CRITIC}"
    found = checked(script, more, OPD)
    assert found.values["total_gpus"].value == 8 + 8 + 2 + 4
    assert found.values["placement"].value == "split"
    more = f"{SPLIT} {E}.external_proxy_url=U {E}.run_engines_locally=false"
    assert checked(script, more).values["total_gpus"].value == 4


def test_megatron_has_sizes_of_its_own(script: Path) -> None:
    sizes = f"trainer.policy.{TENSOR}=2 trainer.ref.{TENSOR}=4"
    found = checked(script, f"{MEGATRON} {sizes}")
    assert not faults(found)
    values = {name: value.value for name, value in found.values.items()}
    assert values["train_tensor_parallel_size"] == 2
    assert not {"fsdp_version", "offload_param"} & values.keys()
    found = checked(
        script, "trainer.strategy=fsdp2 trainer.max_tokens_per_microbatch=9"
    )
    assert found.values["trainer_strategy"].value == "fsdp"
    assert found.values["max_tokens_per_gpu"].value == 9


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("trainer.max_ckpts_to_keep=0", "above 0, or below it"),
        ("trainer.max_training_steps=0", "must be above 0"),
        ("generator.n_samples_per_prompt=0", "must be at least 1"),
        ("trainer.policy.sequence_parallel_size=3", "4 GPUs of the policy cannot"),
        (f"{MEGATRON} trainer.ref.{TENSOR}=3", "4 GPUs of the ref cannot be divided"),
        (
            "trainer.policy_mini_batch_size=48",
            "is not a multiple of trainer.policy_mini",
        ),
        (f"{CRITIC} trainer.critic_mini_batch_size=48", "multiple of trainer.critic"),
        (
            "trainer.policy_mini_batch_size=1 generator.n_samples_per_prompt=1",
            "not one",
        ),
        ("trainer.micro_train_batch_size_per_gpu=3", "the 16 samples of a mini-batch"),
        (f"{P}.policy_num_nodes=3 trainer.policy_mini_batch_size=32", "no multiple of"),
        (
            "trainer.train_batch_size=4 trainer.policy_mini_batch_size=4 "
            f"generator.n_samples_per_prompt=1 {P}.ref_num_gpus_per_node=3",
            "least common multiple",
        ),
        (f"{MEGATRON} {CRITIC}", "a critic is not trained"),
        (f"{MEGATRON} {E}.weight_sync_backend=gloo", "it is nccl or delta"),
        (
            f"{MEGATRON} trainer.policy.megatron_config.context_parallel_size=2 "
            "trainer.remove_microbatch_padding=false",
            "needs trainer.remove_microbatch_padding=true",
        ),
        (
            f"{MEGATRON} trainer.ref.sequence_parallel_size=2",
            "must be 1 under Megatron",
        ),
        (
            f"{MEGATRON} trainer.policy.megatron_config.moe_enable_routing_replay=true",
            "enable_return_routed_experts=true",
        ),
        ("trainer.strategy=megatronn", "did you mean 'megatron'"),
        ("trainer.fused_lm_head_logprob=true", "needs trainer.strategy=megatron"),
        ("trainer.logprobs_chunk_size=null", "needs trainer.strategy=megatron"),
        ("trainer.logprobs_chunk_size=0", "an integer above 0"),
        (f"{A}.advantage_estimator=gpro", "did you mean 'grpo'"),
        (f"{A}.advantage_estimator=no_op", f"{OPD} registers it"),
        (f"{A}.policy_loss_type=ppo", "known values are regular, dual_clip"),
        (f"{A}.advantage_estimator=gae", "needs trainer.critic.model.path"),
        (f"{A}.use_kl_in_reward=true", "one must be false"),
        (f"{A}.loss_reduction=mean", "known values are token_mean"),
        (f"{A}.loss_reduction=seq_mean_token_sum_norm", "needs trainer.algorithm.max"),
        (f"{C}.tis_ratio_type=t", "it must be token, sequence or"),
        (f"{C}.sequence_mask_metric=m", "it must be product, geo"),
        (
            f"{C}.tis_ratio_type=token {A}.policy_loss_type=kl_cov",
            "cannot be used with trainer.algorithm.off_policy_correction",
        ),
        ("generator.merge_stepwise_output=true", "needs generator.step_wise"),
        (
            f"{STEPS} {A}.advantage_estimator=reinforce++",
            "cannot be used with advantage_estimator",
        ),
        (
            f"{STEPS} {A}.loss_reduction=token_mean_legacy",
            "cannot be used with loss_reduction",
        ),
        (
            f"{STEPS} generator.batched=true",
            "cannot be used with generator.batched",
        ),
        (
            f"{STEPS} generator.use_conversation_multi_turn=false",
            "needs generator.use_conversation_multi_turn",
        ),
        ("generator.max_input_length=1024", "must be trainer.max_prompt_length = 512"),
        ("generator.max_input_length=9 generator.max_turns=2", "must be at least"),
        ("generator.sampling_params.logprobs=5", "it must be null, 0 or 1"),
        (
            "generator.batched=true generator.chat_template_kwargs.enable=true",
            "cannot be used with generator.batched",
        ),
        (
            "data.dataloader.persistent_workers=true data.dataloader.num_workers=0",
            "needs data.dataloader.num_workers above 0",
        ),
        (f"{E}.expert_parallel_size=2", "must be data * tensor parallel size"),
        (f"{E}.distributed_executor_backend=uni", "it must be mp or ray"),
        (
            f"{E}.distributed_executor_backend=mp {E}.num_engines=1 "
            f"{E}.tensor_parallel_size=8 {P}.policy_num_nodes=2 {P}.ref_num_nodes=2",
            "keeps an engine on one node",
        ),
        (f"{E}.enable_pd=true", "must be above 0 and below"),
        (f"{E}.external_proxy_url=U", "needs trainer.placement.colocate_all=false"),
        (f"{E}.run_engines_locally=false", "external_proxy_url or"),
        (OFFLOAD, "needs trainer.placement.colocate"),
        (
            f"{OFFLOAD} {SPLIT} {LORA} trainer.policy.model.path=P",
            "cannot be used with LoRA",
        ),
        (
            f"{OFFLOAD} {SPLIT} {E}.weight_sync_backend=delta",
            "cannot be used with weight_sync_backend=delta",
        ),
        (f"{LORA} {E}.backend=sglang", "LoRA needs vllm"),
        (
            f"{LORA} {E}.weight_sync_backend=delta",
            "delta cannot be used with LoRA",
        ),
        (f"{E}.num_engines=2", "the policy has 4 GPUs and the engines 2"),
        (f"{P}.ref_num_gpus_per_node=2", "the policy has 4 GPUs and the ref 2"),
        (
            f"{SPLIT} {P}.ref_num_gpus_per_node=2",
            "or trainer.placement.colocate_policy",
        ),
        ("trainer.policy.model.path=", "its default is lost"),
    ],
)
def test_what_skyrl_refuses_is_told(more: str, said: str, script: Path) -> None:
    found = [f.level for f in faults(checked(script, more)) if said in f.message]
    assert found == ["error"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("trainer.fully_async.enabled=false", "enabled must be true"),
        ("trainer.train_batch_size=64", "must be trainer.policy_mini_batch_size"),
        (f"{A}.dynamic_sampling.type=filter", "dynamic_sampling.type must be null"),
        ("generator.batched=true", "generator.batched must be false"),
        (f"{P}.colocate_all=true", "colocate_all must be false"),
        ("trainer.fully_async.num_parallel_generation_workers=81", "must be 16"),
        (f"{A}.policy_loss_type=gspo", "use rollout_is or dppo"),
        (f"{A}.policy_loss_type=cispo", "use rollout_is or dppo"),
    ],
)
def test_the_fully_asynchronous_trainer_has_rules_of_its_own(
    more: str, said: str, script: Path
) -> None:
    assert not faults(checked(script, FULLY, ASYNC))
    found = faults(checked(script, f"{FULLY} {more}", ASYNC))
    assert [f.level for f in found if said in f.message] == ["error"]


def test_cispo_on_the_rollouts_own_probabilities_may_be_fully_async(
    script: Path,
) -> None:
    more = f"{A}.policy_loss_type=cispo {A}.cispo.cispo_anchor=rollout"
    assert not faults(checked(script, f"{FULLY} {more}", ASYNC))


@pytest.mark.parametrize(
    ("program", "more", "said"),
    [
        (MAIN, f"trainer.ref.model.path=T {A}.use_kl_loss=false", "and never loaded"),
        (
            OPD,
            f"{TEACHER} trainer.update_ref_every_epoch=true",
            "in the teacher's place",
        ),
        (
            OPD,
            f"{TEACHER} {A}.use_kl_in_reward=false {A}.use_kl_loss=true",
            "takes the teacher in by it alone",
        ),
        (OPD, f"{TEACHER} trainer.ref.model.path=Qwen/Qwen3-0.6B", "from itself"),
        (
            MAIN,
            f"{CRITIC} trainer.critic.optimizer_config.weight_decay=0",
            "not its default of 5e-06",
        ),
        (
            MAIN,
            "generator.eval_sampling_params.top_p=0.7 "
            "generator.sampling_params.max_generate_length=4096",
            "and not the 4096 of training",
        ),
        (MAIN, f"{E}.engine_init_kwargs.max_model_len=1000", "are longer than"),
    ],
)
def test_what_is_doubtful_is_a_warning(
    program: str, more: str, said: str, script: Path
) -> None:
    found = faults(checked(script, more, program))
    assert [f.level for f in found if said in f.message] == ["warning"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("+trainer.x=1", "SkyRL refuses a +"),
        ("data.val_data=[a", "is not read by YAML"),
        (f"{E}.async_engine=false", "no key generator.inference_engine.async_engine"),
        (f"{E}.remote_urls=[a]", "remote_urls any more"),
        ("generator.gpu_memory_utilization=0.5", "read as generator.inference_engine"),
        ("trainer.epoch=2", "did you mean 'epochs'"),
        ("trainer.epochs=two", "expects int"),
        ("trainer.epochs=[2]", "expects int"),
        ("trainer.epochs.of=2", "trainer.epochs is a section"),
        (f"{E}.delta_weight_sync.publish_num_workers=2", "refuses a configuration wit"),
        (f"{A}.overlong_buffer_len=1", "has no key trainer.algorithm.overlong"),
        ("trainer.run_name=${a.b}", "cannot be resolved: there is no key a.b"),
        ("--dry", "has no key --dry"),
    ],
)
def test_keys_and_values_that_do_not_fit_are_told(
    more: str, said: str, script: Path
) -> None:
    found = faults(checked(script, more))
    assert [f.level for f in found if said in f.message] == ["error"]


def test_keys_that_fit_are_not_told(script: Path) -> None:
    more = f"{E}.async_engine=true trainer.use_sample_packing=false trainer.tags=[a] "
    more += f"{E}.engine_init_kwargs.any=1 trainer.resume_mode=null"
    more += f" {E}.vllm_v1_disable_multiproc=true"
    found = checked(script, more)
    assert not faults(found)
    assert found.values["sequence_packing"].value is False


def test_a_key_that_nothing_reads_is_told(script: Path) -> None:
    (fault,) = faults(checked(script, f"{E}.vllm_v1_disable_multiproc=false"))
    assert (fault.level, fault.message.rpartition(", ")[2]) == (
        "warning",
        "and nothing reads it",
    )


def test_a_section_of_which_a_part_is_given_has_its_classes_defaults(
    script: Path,
) -> None:
    script.write_text(
        f"python -m {MAIN} trainer.policy.model.lora.rank=8 {P}.colocate_all=true\n"
    )
    (fault,) = faults(check(script))
    assert fault.key == "trainer.policy.model.path"
    script.write_text(f"python -m {MAIN} {P}.colocate_all=true\n")
    assert check(script).values["student"].value == "Qwen/Qwen2.5-1.5B-Instruct"


def test_classes_of_its_examples_are_known(script: Path) -> None:
    dapo = "examples.train.algorithms.dapo.main_dapo"
    more = f"{A}.overlong_buffer_len=1"
    assert not faults(checked(script, more, dapo))
    (fault,) = faults(checked(script, f"{A}.overlong_bufer_len=1", dapo))
    assert "did you mean 'overlong_buffer_len'" in fault.message


def test_main_base_may_start_another_module(script: Path) -> None:
    arctic = "integrations.arctic_rl.entrypoint"
    more = f"trainer.override_entrypoint={arctic} trainer.arctic_rl.x=1"
    (fault,) = faults(checked(script, more))
    assert fault.key == "trainer.arctic_rl.x"


def test_a_program_of_ones_own_may_have_keys_of_its_own(script: Path) -> None:
    more = f"--mine 3 trainer.mine=3 {A}.advantage_estimator=mine"
    (fault,) = faults(checked(script, more, "mine.main_opd"))
    assert (fault.level, fault.key) == ("warning", "trainer.mine")


def test_the_older_package_is_read_as_far_as_it_goes(script: Path) -> None:
    found = checked(
        script, "generator.weight_sync=1", "skyrl_train.entrypoints.main_base"
    )
    assert not faults(found)
    assert any("skyrl-train is SkyRL up to" in f.message for f in found.findings)
    assert found.values["train_batch_size"].value == 64


def test_what_is_not_certain_is_undetermined(script: Path) -> None:
    text = START.replace("PROGRAM", MAIN).replace('"$@"', f"{P}.colocate_all=$(f)")
    script.write_text(f"{text.rstrip()} {E}.num_engines=$(g) trainer.epochs=$(h)\n")
    found = check(script)
    assert not faults(found)
    assert found.values["rollout_gpus"].source == "undetermined"
    assert found.values["placement"].source == "undetermined"


def test_a_file_with_its_keys_is_a_job(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("trainer:\n  policy:\n    model: {path: P}\n  epochz: 1\n")
    found = check(path, ["trainer.train_batch_size=8"], framework="skyrl")
    assert found.values["student"].line == 3
    assert {f.key for f in faults(found)} >= {"trainer.epochz"}


def test_a_program_of_any_name_without_its_keys_is_none(script: Path) -> None:
    script.write_text("python main_mine.py trainer.epochs=1\n")
    with pytest.raises(CheckError, match="no command was found"):
        check(script)


def test_each_nodes_part_of_a_role_has_to_have_a_place(script: Path) -> None:
    script.write_text(START.replace("PROGRAM", MAIN))
    more = f"{SPLIT} {P}.policy_num_gpus_per_node=8 {P}.ref_num_gpus_per_node=8"
    on = fitting.machine("nodes=4,gpus=4")
    found = check(script, more.split(), machine=on)
    (fault,) = [f for f in faults(found) if f.cause == "ray.no-resources"]
    assert "the policy needs 8 GPUs on one node" in fault.message
    engines = "generator.inference_engine.num_engines=8"
    shared = [f"{P}.{r}_num_gpus_per_node=8" for r in ("policy", "ref")]
    assert not faults(check(script, [*shared, engines], machine=on))


def test_another_tokenizer_is_told(script: Path, tmp_path: Path) -> None:
    for name, tokens in (("s", {"a": 0, "b": 1}), ("t", {"a": 1, "b": 0})):
        (tmp_path / name).mkdir()
        text = json.dumps({"model": {"vocab": tokens}})
        (tmp_path / name / "tokenizer.json").write_text(text)
        (tmp_path / name / "config.json").write_text("{}")
    more = f"{TEACHER} trainer.policy.model.path={tmp_path}/s"
    (fault,) = faults(
        checked(script, f"{more} trainer.ref.model.path={tmp_path}/t", OPD)
    )
    assert fault.cause == "tokenizer.vocab-mismatch"


@pytest.mark.parametrize("release", ["0.3.0", "0.3.0+main.a9564572"])
def test_every_recorded_release_judges(release: str, script: Path) -> None:
    script.write_text(START.replace("PROGRAM", MAIN))
    found = check(script, framework=f"skyrl=={release}")
    assert not faults(found)
    assert found.release == release


def test_no_tag_of_a_word_is_obeyed(script: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    text = START.replace("PROGRAM", MAIN).replace('"$@"', "")
    word = f"'trainer.tags=!!python/object/apply:os.system [touch {canary}]'"
    script.write_text(f"{text.rstrip()} {word}\n")
    assert not faults(check(script))
    assert not canary.exists()


@pytest.mark.parametrize("value", ["[" * 300, "{a: &a [x, x]," + BOMB + "}", "a: b: c"])
def test_a_word_that_yaml_cannot_be_asked_to_read_is_told(
    value: str, script: Path
) -> None:
    text = START.replace("PROGRAM", MAIN).replace('"$@"', f"'trainer.tags={value}'")
    script.write_text(text)
    (fault,) = faults(check(script))
    assert "is not read by YAML" in fault.message


def test_its_smallest_run_has_no_fault(script: Path) -> None:
    script.write_text(START.replace("PROGRAM", ASYNC).replace('"$@"', f'{FULLY} "$@"'))
    small = debug_config.smallest(
        lambda overrides=(), added=(): check(script, overrides, added=added)
    )
    changes = [change.text for change in small.changes]
    assert "trainer.fully_async.num_parallel_generation_workers=1" in changes
    assert "trainer.max_training_steps=1" in changes
    assert not small.left
    assert small.reaches
