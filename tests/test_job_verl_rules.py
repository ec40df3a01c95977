"""verl's own rules on batches, GPUs, lengths and the teacher."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_gkd.job import check
from pytest_gkd.job.findings import Finding

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
LOSS = "distillation.distillation_loss"
TEACHER = "distillation.teacher_models.teacher_model"
SOUND = {
    "data.train_batch_size": "64",
    "data.max_prompt_length": "512",
    "data.max_response_length": "1024",
    f"{ACTOR}.ppo_mini_batch_size": "16",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": "2",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": "2",
    f"{ROLLOUT}.name": "vllm",
    f"{ROLLOUT}.n": "2",
    f"{ROLLOUT}.tensor_model_parallel_size": "2",
    f"{ROLLOUT}.max_model_len": "1536",
    "trainer.nnodes": "1",
    "trainer.n_gpus_per_node": "8",
}
TAUGHT = {
    "distillation.enabled": "True",
    "distillation.nnodes": "1",
    "distillation.n_gpus_per_node": "4",
    f"{TEACHER}.model_path": "some/teacher",
    f"{TEACHER}.inference.tensor_model_parallel_size": "2",
    f"{TEACHER}.inference.max_model_len": "1537",
    f"{LOSS}.loss_mode": "forward_kl_topk",
    f"{LOSS}.topk": "64",
    f"{LOSS}.use_policy_gradient": "False",
}
# What is told as a warning; all else verl refuses.
DOUBTFUL = {
    "loss_mode=k7: verl 0.9.1 knows",
    "each step computes 16 sequences of padding beside 16 real ones",
    "short, silently",
    "loses its beginning (left)",
    "the teacher some/teacher is not used",
    "the sampled token only",
    "nothing reads trainer.resume_from",
}
OTHER = "+distillation.teacher_models.maths"
OTHERS = {key: value for key, value in TAUGHT.items() if TEACHER not in key}
OTHERS |= {f"{OTHER}.model_path": "a/b", f"{OTHER}.key": "maths"}
RESUMED = {"trainer.resume_mode": "resume_path"}
RESUME_FROM = "trainer.resume_from_path"
MEGATRON = {"model_engine": "megatron"}
DYNAMIC = {f"{ACTOR}.use_dynamic_bsz": "True"}
ULYSSES = f"{ACTOR}.ulysses_sequence_parallel_size"
PADDED = "actor_rollout_ref.model.use_remove_padding"


def judged(path: Path, release: str, given: dict[str, str]) -> list[Finding]:
    words = " ".join(f"{key}={value}" for key, value in given.items())
    script = path / "run.sh"
    script.write_text(f"python -m verl.trainer.main_ppo {words}\n")
    found = check.check(script, (), f"verl=={release}").findings
    return [finding for finding in found if finding.level != "note"]


@pytest.mark.parametrize("release", ["0.8.0", "0.9.0", "0.9.1"])
@pytest.mark.parametrize("more", [{}, TAUGHT])
def test_a_sound_job_is_let_through(
    release: str, more: dict[str, str], tmp_path: Path
) -> None:
    assert judged(tmp_path, release, SOUND | more) == []


@pytest.mark.parametrize(
    "changed",
    [
        {"data.train_batch_size": "16"},
        {f"{ACTOR}.ppo_mini_batch_size": "4"},
        {f"{ACTOR}.ulysses_sequence_parallel_size": "8"},
        {
            f"{ACTOR}.use_dynamic_bsz": "True",
            f"{ACTOR}.ppo_max_token_len_per_gpu": "768",
            f"{ACTOR}.ulysses_sequence_parallel_size": "2",
        },
        {f"{ROLLOUT}.gpu_memory_utilization": "1.0"},
        {f"{ROLLOUT}.expert_parallel_size": "2"},
        {f"{ROLLOUT}.tensor_model_parallel_size": "8"},
        {f"{ROLLOUT}.agent.num_workers": "128", "trainer.use_v1": "False"},
        {f"{ROLLOUT}.agent.num_workers": "7"},
        {f"{ROLLOUT}.agent.num_workers": "0", "trainer.use_v1": "False"},
        {ULYSSES: "0"},
        {f"{ACTOR}.ppo_mini_batch_size": "0"},
        {
            **MEGATRON,
            f"{ACTOR}.megatron.tensor_model_parallel_size": "4",
            "data.train_batch_size": "6",
            f"{ACTOR}.ppo_mini_batch_size": "6",
        },
        {**MEGATRON, f"{ACTOR}.ppo_micro_batch_size_per_gpu": "0"},
        {**MEGATRON, f"+{ULYSSES}": "2", PADDED: "False"},
        {
            **MEGATRON,
            **DYNAMIC,
            f"+{ULYSSES}": "1",
            f"{ACTOR}.ppo_max_token_len_per_gpu": "1024",
        },
        {
            **DYNAMIC,
            ULYSSES: "2",
            "data.train_batch_size": "6",
            f"{ACTOR}.ppo_mini_batch_size": "6",
        },
        {**DYNAMIC, f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": "null"},
        {f"{ACTOR}.ppo_max_token_len_per_gpu": "1024"},
        {PADDED: "False"},
        {f"{ROLLOUT}.name": "trtllm", f"{ROLLOUT}.pipeline_model_parallel_size": "2"},
        {f"{ROLLOUT}.name": "trtllm", f"{ROLLOUT}.expert_parallel_size": "4"},
        {f"{ROLLOUT}.tensor_model_parallel_size": "0"},
        OTHERS,
        {**OTHERS, "distillation.nnodes": "0"},
        {**TAUGHT, f"{TEACHER}.inference.tensor_model_parallel_size": "0"},
        {**TAUGHT, f"{LOSS}.loss_mode": "k3", f"{LOSS}.topk": "null"},
        {
            **TAUGHT,
            f"{TEACHER}.inference.name": "sglang",
            f"+{TEACHER}.inference.engine_kwargs.vllm.max_logprobs": "8",
        },
        {f"{TEACHER}.inference.max_model_len": "10"},
        {f"{LOSS}.loss_mode": "forward_kl_topk", f"{LOSS}.topk": "null"},
        {f"{LOSS}.loss_mode": "k1", f"{LOSS}.use_policy_gradient": "False"},
        {**TAUGHT, f"{TEACHER}.inference.tensor_model_parallel_size": "4"},
        {**TAUGHT, f"+{TEACHER}.inference.engine_kwargs.vllm.max_logprobs": "64"},
        {**TAUGHT, f"{LOSS}.loss_mode": "k1", f"{LOSS}.use_policy_gradient": "True"},
    ],
)
def test_what_is_at_a_bound_is_no_fault(
    changed: dict[str, str], tmp_path: Path
) -> None:
    assert judged(tmp_path, "0.9.1", SOUND | changed) == []


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (
            {f"{ACTOR}.ulysses_sequence_parallel_size": "3"},
            "the trainer has 8 GPUs, and each model copy takes 3",
        ),
        (
            {
                f"{ACTOR}.ulysses_sequence_parallel_size": "2",
                "actor_rollout_ref.model.use_remove_padding": "False",
            },
            "needs actor_rollout_ref.model.use_remove_padding=True",
        ),
        (
            {f"{ACTOR}.ppo_mini_batch_size": "2", f"{ROLLOUT}.n": "1"},
            "a mini batch of 2 prompts times 1 samples cannot be divided evenly",
        ),
        (
            {"data.train_batch_size": "8"},
            "not a multiple of ppo_mini_batch_size 16, and is less: verl refuses it",
        ),
        (
            {"data.train_batch_size": "8", f"{ACTOR}.use_dynamic_bsz": "True"},
            "each step computes 16 sequences of padding beside 16 real ones",
        ),
        (
            {"data.train_batch_size": "40", "trainer.use_v1": "False"},
            "ppo_mini_batch_size 16; verl finds that out after the first rollout",
        ),
        (
            {
                "data.train_batch_size": "4",
                f"{ACTOR}.ppo_mini_batch_size": "4",
                f"{ROLLOUT}.n": "2",
                f"{ROLLOUT}.agent.num_workers": "16",
                "trainer.use_v1": "False",
            },
            "train_batch_size 4 times 2 samples cannot be divided",
        ),
        (
            {
                "trainer.n_gpus_per_node": "6",
                f"{ACTOR}.ppo_mini_batch_size": "5",
                "data.train_batch_size": "5",
                f"{ROLLOUT}.n": "4",
            },
            "train_batch_size 5 times 4 samples is not a multiple of 6",
        ),
        ({ULYSSES: "16"}, "8 is not a multiple of 16"),
        (
            {**MEGATRON, f"{ACTOR}.megatron.tensor_model_parallel_size": "3"},
            "the trainer has 8 GPUs, and each model copy takes 3",
        ),
        (
            {"algorithm.use_kl_in_reward": "True"},
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu has no value",
        ),
        (
            {f"{ROLLOUT}.nnodes": "1", f"{ROLLOUT}.n_gpus_per_node": "3"},
            "3 GPUs of the rollout are not a multiple of the 2",
        ),
        ({**TAUGHT, "distillation.n_gpus_per_node": "0"}, "the teacher has no GPUs"),
        ({f"{ACTOR}.ppo_micro_batch_size": "4"}, "are mutually exclusive"),
        (
            {f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": "null"},
            "log_prob_micro_batch_size_per_gpu has no value",
        ),
        (
            {f"{ACTOR}.use_kl_loss": "True"},
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu has no value",
        ),
        ({f"{ROLLOUT}.mode": "sync"}, "mode=sync is gone"),
        ({f"{ROLLOUT}.gpu_memory_utilization": "40"}, "40 is not a fraction above 0"),
        ({f"{ROLLOUT}.gpu_memory_utilization": "O.4"}, "verl expects a number"),
        ({"data.train_batch_size": "6O"}, "is 6O, and verl expects an integer"),
        ({"data.max_prompt_length": "1024.5"}, "verl expects an integer"),
        ({f"{ACTOR}.use_kl_loss": "Ture"}, "is Ture, and verl expects true or false"),
        (
            {
                f"{ACTOR}.use_dynamic_bsz": "True",
                f"{ACTOR}.ppo_max_token_len_per_gpu": "1024",
            },
            "ppo_max_token_len_per_gpu 1024 is less than prompt 512 and response 1024",
        ),
        ({**TAUGHT, f"{LOSS}.loss_mode": "k7"}, "loss_mode=k7: verl 0.9.1 knows"),
        (
            {**TAUGHT, f"{TEACHER}.inference.name": "trtllm"},
            "for a loss of the top-k verl takes vllm and sglang",
        ),
        ({f"{ROLLOUT}.pipeline_model_parallel_size": "2"}, "verl's rollout has none"),
        ({f"{ROLLOUT}.expert_parallel_size": "4"}, "expert_parallel_size 4 must be"),
        (
            {f"{ROLLOUT}.tensor_model_parallel_size": "3"},
            "8 GPUs of the rollout are not a multiple of the 3",
        ),
        ({"data.truncation": "right"}, "loses its beginning (left)"),
        ({f"{ROLLOUT}.max_model_len": "512"}, "leaves no room for a response"),
        ({f"{ROLLOUT}.max_model_len": "1535"}, "short, silently"),
        (
            {**TAUGHT, "distillation.enabled": "False"},
            "the teacher some/teacher is not used",
        ),
        ({**TAUGHT, f"{TEACHER}.model_path": "null"}, "model_path has no value"),
        (RESUMED, "resume_from_path, which has no value"),
        ({**RESUMED, RESUME_FROM: "null"}, "resume_from_path, which has no value"),
        ({**RESUMED, RESUME_FROM: "20"}, "resume_from_path, which is 20, not a path"),
        ({**RESUMED, RESUME_FROM: "runs/step_20"}, "step_20 does not contain global_"),
        ({**RESUMED, RESUME_FROM: "global_step_20/"}, "reads '20/' as that number"),
        ({**RESUMED, RESUME_FROM: "global_step_20/actor"}, "reads '20/actor' as that"),
        ({RESUME_FROM: "runs/global_step_20"}, "nothing reads trainer.resume_from"),
        ({**TAUGHT, "distillation.nnodes": "0"}, "the teacher has no GPUs"),
        (
            {**TAUGHT, f"{TEACHER}.inference.tensor_model_parallel_size": "3"},
            "the teacher's pool of 4 GPUs is not a multiple of the 3",
        ),
        (
            {**TAUGHT, f"{TEACHER}.inference.max_model_len": "1536"},
            "the teacher's max_model_len 1536 is less than",
        ),
        ({**TAUGHT, f"{LOSS}.loss_mode": "k1"}, "verl refuses it"),
        ({**TAUGHT, f"{LOSS}.use_policy_gradient": "True"}, "the sampled token only"),
        ({**TAUGHT, f"{LOSS}.topk": "null"}, "topk has no value"),
        (
            {**TAUGHT, f"+{TEACHER}.inference.engine_kwargs.vllm.max_logprobs": "8"},
            "gives 8 log-probabilities a token (max_logprobs), and the loss takes 64",
        ),
        (
            {**TAUGHT, f"{OTHER}.model_path": "a/b", f"{OTHER}.key": "maths"},
            "verl drops teacher_model as soon as there are others (maths)",
        ),
    ],
)
def test_a_broken_rule_is_told(
    changed: dict[str, str], says: str, tmp_path: Path
) -> None:
    found = judged(tmp_path, "0.9.1", SOUND | changed)
    levels = [finding.level for finding in found if says in finding.message]
    assert levels == ["warning" if says in DOUBTFUL else "error"], found
    assert all(finding.line == 1 for finding in found)


@pytest.mark.parametrize("release", ["0.8.0", "0.9.0"])
def test_every_release_refuses_to_resume_from_nowhere(
    release: str, tmp_path: Path
) -> None:
    (found,) = judged(tmp_path, release, SOUND | RESUMED)
    assert found.cause == "config.missing-value"
    assert "resume ckpt must be str type" in found.message


@pytest.mark.parametrize(
    "given",
    [
        {f"{ROLLOUT}.top_p": "0.9", f"{ROLLOUT}.val_kwargs.temperature": "0.6"},
        {f"{ACTOR}.entropy_coeff": "0.001"},
        {"algorithm.rollout_correction.rollout_is_threshold": "0.5_4.0"},
    ],
)
def test_a_fraction_where_the_default_is_0_or_1_is_no_fault(
    given: dict[str, str], tmp_path: Path
) -> None:
    assert judged(tmp_path, "0.9.1", SOUND | given) == []


@pytest.mark.parametrize(
    ("given", "level", "says"),
    [
        ({f"{ROLLOUT}.name": "vlm"}, "warning", "did you mean 'vllm'?"),
        ({f"{ROLLOUT}.name": "mine"}, "warning", "registered by code of your own"),
        ({"algorithm.adv_estimator": "gropo"}, "warning", "did you mean 'grpo'"),
        ({f"{ACTOR}.policy_loss.loss_mode": "gpso"}, "warning", "did you mean 'gspo'"),
        ({f"{ROLLOUT}.checkpoint_engine.backend": "ncl"}, "warning", "mean 'nccl'"),
        ({**TAUGHT, f"{LOSS}.loss_mode": "forward_kl"}, "warning", "forward_kl_topk"),
        ({f"{ACTOR}.strategy": "fsdpp"}, "warning", "did you mean 'fsdp'"),
        ({f"{ACTOR}.strategy": "megatron"}, "error", "needs a model_engine=... of its"),
        ({f"{ACTOR}.loss_agg_mode": "token_mean"}, "error", "did you mean 'token-mean"),
        (
            {
                f"{ACTOR}.kl_loss_type": "full",
                f"{ACTOR}.use_kl_loss": "True",
                "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": "2",
            },
            "error",
            "kl_loss_type=full: verl 0.9.1 knows kl, k1",
        ),
        ({"trainer.logger": "[console,wandbb]"}, "error", "did you mean 'wandb'"),
        (
            {"algorithm.rollout_correction.rollout_rs": "'token_k1,seq_k1'"},
            "error",
            "rollout_rs=seq_k1: verl 0.9.1 knows token_k1",
        ),
        ({"trainer.resume_mode": "resume"}, "error", "did you mean 'resume_path'"),
        (
            {f"{ACTOR}.optim.lr_scheduler_type": "linear"},
            "error",
            "knows constant, cosine",
        ),
        ({"trainer.v1.trainer_mode": "async"}, "warning", "knows colocate_async"),
    ],
)
def test_a_name_that_verl_does_not_know_is_told(
    given: dict[str, str], level: str, says: str, tmp_path: Path
) -> None:
    words = {key: f'"{value}"' for key, value in given.items()}
    found = judged(tmp_path, "0.9.1", SOUND | words)
    assert [f.level for f in found if says in f.message] == [level], found


@pytest.mark.parametrize(
    "given",
    [
        {f"{ACTOR}.kl_loss_type": "full"},
        {f"{ACTOR}.loss_agg_mode": "token-sum"},
        {"trainer.logger": "[console,tracking,trackio]"},
        {"trainer.logger": "wandb"},
        {**RESUMED, RESUME_FROM: "runs/one/global_step_20"},
        {**RESUMED, RESUME_FROM: "'${trainer.default_local_dir}/global_step_20'"},
        {**RESUMED, RESUME_FROM: "$CHECKPOINT"},
        {"trainer.resume_mode": "disable"},
        {f"{ACTOR}.optim.lr_scheduler_type": "cosine"},
        {"data.truncation": "left"},
        {"data.truncation": "error", "data.filter_overlong_prompts": "True"},
        {"algorithm.kl_penalty": "k3+", "algorithm.use_kl_in_reward": "False"},
        {
            f"{ROLLOUT}.checkpoint_engine.backend": "mine",
            f"{ROLLOUT}.checkpoint_engine.custom_backend_module": "my.module",
        },
        {f"{ACTOR}.strategy": "fsdp2", "algorithm.adv_estimator": "rloo"},
        {"reward.reward_manager.name": "Mine", "reward.reward_manager.source": "x"},
    ],
)
def test_a_name_that_verl_knows_or_never_looks_at_is_no_fault(
    given: dict[str, str], tmp_path: Path
) -> None:
    assert judged(tmp_path, "0.9.1", SOUND | given) == []


@pytest.mark.parametrize(
    ("given", "side", "source"),
    [
        ({}, "left", "default"),
        ({"data.truncation": "right"}, "left", "default"),
        ({"data.filter_overlong_prompts": "True"}, "drop", "user"),
        ({"data.filter_overlong_prompts": "$DROP"}, None, "undetermined"),
    ],
)
def test_what_becomes_of_a_long_prompt_is_a_value(
    given: dict[str, str], side: str | None, source: str, tmp_path: Path
) -> None:
    words = " ".join(f"{key}={value}" for key, value in (SOUND | given).items())
    (tmp_path / "run.sh").write_text(f"python -m verl.trainer.main_ppo {words}\n")
    found = check.check(tmp_path / "run.sh", (), "verl==0.9.1")
    value = found.values["truncation"]
    assert (value.value, value.source) == (side, source)


def test_a_trainer_that_never_pads_finds_out_late(tmp_path: Path) -> None:
    """That of 0.8.0 has no trainer.use_v1."""
    found = judged(tmp_path, "0.8.0", SOUND | {"data.train_batch_size": "40"})
    assert "verl finds that out after the first rollout" in found[0].message


def test_each_release_has_its_own_names(tmp_path: Path) -> None:
    given = SOUND | {f"{ACTOR}.strategy": "fsdp_turbo"}
    assert [len(judged(tmp_path, r, given)) for r in ("0.9.0", "0.9.1")] == [1, 0]


def test_what_is_not_certain_breaks_no_rule(tmp_path: Path) -> None:
    for key in SOUND:
        assert judged(tmp_path, "0.9.1", SOUND | {key: "$UNKNOWN"}) == []


def test_an_engine_that_is_not_named_is_told(tmp_path: Path) -> None:
    given = {key: value for key, value in SOUND.items() if not key.endswith(".name")}
    (finding,) = judged(tmp_path, "0.9.1", given)
    assert "actor_rollout_ref.rollout.name must be given" in finding.message


def test_a_fault_on_all_ways_stays_an_error_whatever_its_numbers(
    tmp_path: Path,
) -> None:
    given = SOUND | {"trainer.n_gpus_per_node": "$N", "data.train_batch_size": "32"}
    given |= {f"{ACTOR}.ppo_mini_batch_size": "32", f"{ROLLOUT}.n": "1"}
    words = " ".join(f"{key}={value}" for key, value in given.items())
    script = tmp_path / "run.sh"
    script.write_text(
        'if [ "$BIG" ]; then N=48; else N=24; fi\n'
        f"python -m verl.trainer.main_ppo {words}\n"
    )
    found = check.check(script, (), "verl==0.9.1").findings
    mini = [one for one in found if "a mini batch of 32" in one.message]
    assert [one.level for one in mini] == ["error", "error"]


def test_a_fault_on_one_way_only_is_a_warning_with_its_branch(tmp_path: Path) -> None:
    given = SOUND | {f"{ROLLOUT}.tensor_model_parallel_size": "$TP"}
    words = " ".join(f"{key}={value}" for key, value in given.items())
    script = tmp_path / "run.sh"
    script.write_text(
        'if [ "$BIG" ]; then TP=3; else TP=2; fi\n'
        f"python -m verl.trainer.main_ppo {words}\n"
    )
    (finding,) = check.check(script, (), "verl==0.9.1").findings
    assert finding.level == "warning"
    assert "the 3 that one replica takes (if" in finding.message
