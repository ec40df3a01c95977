"""What OpenRLHF itself refuses, and what it does differently from what is written.

If no other source is named, a rule for rollouts is main's or train's, and one for a
program without a rollout its main's (openrlhf/cli/train_ppo_ray.py and train_*.py
0.8.11 to 0.11.2).
"""

from __future__ import annotations

from collections.abc import Iterator

from pytest_gkd.job.arguments import MISSING
from pytest_gkd.job.findings import Finding
from pytest_gkd.job.frameworks import ray_start, recorded_options
from pytest_gkd.job.frameworks.openrlhf.options import COMMON, ROLLOUT, Known, absent
from pytest_gkd.job.frameworks.recorded_options import CONFLICT, Rule, UnsureError
from pytest_gkd.job.overrides import Given


def gpu_keys(role: str) -> tuple[str, ...]:
    """The options that determine a role's number of GPUs, its own first."""
    engines = ("vllm_num_engines", "vllm_tensor_parallel_size")
    shares = ("colocate_all_models", "colocate_actor_ref", "async_train")
    critic = ("advantage_estimator", "colocate_critic_reward")
    rewards = ("remote_rm_url", "agent_func_path")
    roles = {
        "actor": (),
        "rollout": engines,
        "ref": ("init_kl_coef",),
        "critic": critic[:1],
        "reward": rewards,
        "total": ("init_kl_coef", *engines, *shares, *critic, *rewards),
    }
    owners = ("actor", "ref", "critic", "reward") if role == "total" else (role,)
    own = (f"{o}_num_{part}" for o in owners for part in ("nodes", "gpus_per_node"))
    return (*own, *roles[role]) if role != "rollout" else roles[role]


def gpus(v: Known, role: str) -> int:
    """The GPUs of actor, rollout, ref, critic, reward or total. Raises UnsureError."""
    if role == "rollout":
        return int((v["vllm_num_engines"] or 0) * v["vllm_tensor_parallel_size"])
    if role == "total":
        return _total(v)
    is_absent = (
        (role == "ref" and v["init_kl_coef"] <= 0)
        or (role == "critic" and not has_critic(v))
        or (role == "reward" and has_function(v))
    )
    each = v[f"{role}_num_nodes"], v[f"{role}_num_gpus_per_node"]
    return 0 if is_absent else int(each[0] * each[1])


def _total(v: Known) -> int:
    """All GPUs requested from Ray, as train creates its placement groups."""
    shares_all = bool(v["colocate_all_models"])
    total = gpus(v, "actor")
    if not (shares_all and not v["async_train"]):
        total += gpus(v, "rollout")
    if not (shares_all or v["colocate_actor_ref"]):
        total += gpus(v, "ref")
    critic, reward = gpus(v, "critic"), gpus(v, "reward")
    if critic and v["colocate_critic_reward"]:
        total += critic
    elif not shares_all:
        total += critic + reward
    return total


def has_critic(v: Known) -> bool:
    """Whether there is a critic."""
    return bool(v["advantage_estimator"] == "gae")


def has_function(v: Known) -> bool:
    """Whether rewards come from remote_rm_url or an agent, not a reward model."""
    return v.is_set("remote_rm_url") or v.is_set("agent_func_path")


def _has_images(v: Known) -> bool:
    return bool(v.has("max_images_per_prompt") and v["max_images_per_prompt"] > 0)


def _packs(v: Known) -> bool:
    return bool(
        v["packing_samples"] or v["ring_attn_size"] > 1 or v["use_dynamic_batch"]
    )


def _shares_engines(v: Known) -> bool:
    return bool(v["colocate_all_models"] and not v["async_train"])


def _samples(v: Known) -> int:
    return int(v["rollout_batch_size"] * v["n_samples_per_prompt"])


def _ranks(v: Known, role: str) -> int:
    """The data parallel ranks of a role; duplicate_actors process the same samples."""
    each = int(v["ring_attn_size"] * v["ds_tensor_parallel_size"])
    return gpus(v, role) // each


def _longest_answer(v: Known) -> int:
    if not v.has("max_new_tokens"):
        return int(v["generate_max_len"])
    return int(v["max_new_tokens"] or v["max_len"])


def _is_half(v: Known) -> bool:
    """Whether the trainer does not compute in bfloat16."""
    if v.has("param_dtype"):
        return bool(v["param_dtype"] != "bf16")
    return not v["bf16"]


PPO: tuple[Rule[Known], ...] = (
    *ROLLOUT,
    # Without one, its actors load None (0.8.11) or nothing (0.9.10 to 0.11.2).
    Rule(
        "reward_pretrain",
        lambda v: not has_function(v) and not v.is_set("reward_pretrain"),
        "nothing provides rewards: {--remote_rm_url} (an address, or a .py file with "
        "reward_func), {--agent_func_path} or {--reward_pretrain}",
        MISSING,
    ),
    Rule(
        "reward_pretrain",
        lambda v: has_function(v) and v.is_set("reward_pretrain"),
        "{--reward_pretrain} has no effect: the rewards are those of "
        "{--remote_rm_url} or {--agent_func_path}",
        level="warning",
    ),
    # An AssertionError since 0.11.0; before, all advantages were 0.
    Rule(
        "n_samples_per_prompt advantage_estimator",
        lambda v: (
            v["advantage_estimator"] == "dr_grpo" and v["n_samples_per_prompt"] < 2
        ),
        "{--advantage_estimator} dr_grpo with one sample for a prompt: all advantages "
        "are 0",
    ),
    Rule(
        "max_images_per_prompt advantage_estimator",
        lambda v: _has_images(v) and has_critic(v),
        "images ({--max_images_per_prompt}) go with no critic: another "
        "{--advantage_estimator} than gae is required",
    ),
    Rule(
        "max_images_per_prompt packing_samples",
        lambda v: _has_images(v) and v["packing_samples"],
        "images ({--max_images_per_prompt}) go with no {--packing_samples}",
    ),
    Rule(
        "attn_implementation",
        lambda v: _packs(v) and "flash_attention" not in v["attn_implementation"],
        "{--attn_implementation} {attn_implementation} is replaced by "
        "flash_attention_2, as samples are packed",
        level="warning",
    ),
    # samples_generator.py has no other way to generate (experience_maker.py 0.8.11).
    Rule(
        "vllm_num_engines",
        lambda v: not v["vllm_num_engines"],
        "there is no engine to generate with: {--vllm_num_engines}",
        MISSING,
    ),
    Rule(
        "vllm_enable_sleep",
        lambda v: v["vllm_enable_sleep"] and not v["colocate_all_models"],
        "{--vllm_enable_sleep} has no effect without {--colocate_all_models}",
        level="warning",
    ),
    Rule(
        "async_train vllm_enable_sleep",
        lambda v: (
            v["async_train"] and v["vllm_enable_sleep"] and v["colocate_all_models"]
        ),
        "{--vllm_enable_sleep} is refused with {--async_train}",
    ),
    # PPOTrainerAsync.__init__ (openrlhf/trainer/ppo_trainer_async.py)
    Rule(
        "async_queue_size",
        lambda v: (
            v.has("async_queue_size") and v["async_train"] and v["async_queue_size"] < 1
        ),
        "{--async_queue_size} is {async_queue_size}, and must be at least 1",
    ),
    Rule(
        "partial_rollout",
        lambda v: (
            v.has("partial_rollout") and v["partial_rollout"] and not v["async_train"]
        ),
        "{--partial_rollout} requires {--async_train}",
    ),
    Rule(
        "eval_dataset",
        lambda v: v.is_set("eval_dataset") and not has_function(v),
        "{--eval_dataset} requires {--remote_rm_url} or {--agent_func_path}",
        MISSING,
    ),
    Rule(
        "vllm_generate_batch_size rollout_batch_size",
        lambda v: (
            v.is_at_least("0.11.0")
            and (v["vllm_generate_batch_size"] or 0) > v["rollout_batch_size"]
            and not v["async_train"]
        ),
        "{--vllm_generate_batch_size} {vllm_generate_batch_size} above "
        "{--rollout_batch_size} {rollout_batch_size} requires {--async_train}",
    ),
    Rule(
        "dynamic_filtering_reward_range",
        lambda v: (
            v["dynamic_filtering"]
            and not v["dynamic_filtering_reward_range"][0]
            < v["dynamic_filtering_reward_range"][1]
        ),
        "{--dynamic_filtering_reward_range} takes the lower bound first",
    ),
    Rule(
        "dynamic_filtering",
        lambda v: v["dynamic_filtering"] and not has_function(v),
        "{--dynamic_filtering} requires {--remote_rm_url} or {--agent_func_path}",
        MISSING,
    ),
    Rule(
        "dynamic_filtering n_samples_per_prompt",
        lambda v: v["dynamic_filtering"] and v["n_samples_per_prompt"] < 2,
        "{--dynamic_filtering} requires {--n_samples_per_prompt} above 1",
    ),
    Rule(
        "rollout_batch_size n_samples_per_prompt micro_rollout_batch_size",
        lambda v: _samples(v) // v["micro_rollout_batch_size"] < _ranks(v, "actor"),
        "a rollout has {rollout_batch_size} * {n_samples_per_prompt} samples, too few "
        "batches of {--micro_rollout_batch_size} {micro_rollout_batch_size} for the "
        "actor's {actor_num_nodes} * {actor_num_gpus_per_node} GPUs",
    ),
    Rule(
        "colocate_all_models colocate_actor_ref ref_num_nodes ref_num_gpus_per_node",
        lambda v: (
            (v["colocate_all_models"] or v["colocate_actor_ref"])
            and v["init_kl_coef"] > 0
            and (
                v["actor_num_nodes"] != v["ref_num_nodes"]
                or v["actor_num_gpus_per_node"] != v["ref_num_gpus_per_node"]
            )
        ),
        "the actor has {actor_num_nodes} * {actor_num_gpus_per_node} GPUs and the "
        "reference model {ref_num_nodes} * {ref_num_gpus_per_node}: to share them, "
        "{--ref_num_nodes} and {--ref_num_gpus_per_node} must be the actor's",
    ),
    Rule(
        "colocate_all_models actor_num_gpus_per_node vllm_num_engines "
        "vllm_tensor_parallel_size",
        lambda v: (
            _shares_engines(v)
            and v["vllm_num_engines"]
            and gpus(v, "actor") != gpus(v, "rollout")
        ),
        "the actor has {actor_num_nodes} * {actor_num_gpus_per_node} GPUs and vLLM "
        "{vllm_num_engines} engines * {vllm_tensor_parallel_size}: with "
        "{--colocate_all_models} the two must be equal",
    ),
    Rule(
        "colocate_critic_reward critic_num_nodes critic_num_gpus_per_node "
        "reward_num_nodes reward_num_gpus_per_node",
        lambda v: (
            has_critic(v)
            and v["colocate_critic_reward"]
            and (
                v["critic_num_nodes"] != v["reward_num_nodes"]
                or v["critic_num_gpus_per_node"] != v["reward_num_gpus_per_node"]
            )
        ),
        "the critic has {critic_num_nodes} * {critic_num_gpus_per_node} GPUs and the "
        "reward model {reward_num_nodes} * {reward_num_gpus_per_node}: with "
        "{--colocate_critic_reward} the two must be equal",
    ),
    # _batch_size_ok below is DeepSpeed's; setup_dynamic_batch
    # (openrlhf/trainer/ppo_utils/replay_buffer.py) cuts samples into whole batches.
    Rule(
        "rollout_batch_size n_samples_per_prompt train_batch_size",
        lambda v: v["use_dynamic_batch"] and _samples(v) < v["train_batch_size"],
        "nothing is trained: a rollout has {rollout_batch_size} * "
        "{n_samples_per_prompt} samples, too few for {--train_batch_size} "
        "{train_batch_size} with {--use_dynamic_batch}",
    ),
    Rule(
        "rollout_batch_size n_samples_per_prompt train_batch_size",
        lambda v: (
            v["use_dynamic_batch"]
            and _samples(v) > v["train_batch_size"]
            and _samples(v) % v["train_batch_size"]
        ),
        "a rollout has {rollout_batch_size} * {n_samples_per_prompt} samples, which "
        "{--train_batch_size} {train_batch_size} does not divide: with "
        "{--use_dynamic_batch} the rest is dropped",
        level="warning",
    ),
    Rule(
        "train_batch_size use_dynamic_batch",
        lambda v: v["use_dynamic_batch"] and v["train_batch_size"] < _ranks(v, "actor"),
        "{--train_batch_size} {train_batch_size} has no sample for each data parallel "
        "rank of the actor",
    ),
    # apply_overlong_penalty (openrlhf/trainer/ppo_utils/length_penalty.py;
    # compute_advantages_and_returns in experience_maker.py 0.8.11)
    Rule(
        "overlong_buffer_len",
        lambda v: (
            v["overlong_buffer_len"] is not None
            and v["overlong_buffer_len"] > _longest_answer(v)
        ),
        "{--overlong_buffer_len} {overlong_buffer_len} is more than an answer may have",
    ),
    # apply_stop_properly_penalty (length_penalty.py)
    Rule(
        "stop_properly_penalty_coef",
        lambda v: (
            v.has("stop_properly_penalty_coef")
            and (v["stop_properly_penalty_coef"] or 0) > 1
        ),
        "{--stop_properly_penalty_coef} {stop_properly_penalty_coef} is above 1",
    ),
    # PolicyLoss.__init__ (openrlhf/models/loss.py), as the next two
    Rule(
        "dual_clip",
        lambda v: v["dual_clip"] is not None and v["dual_clip"] <= 1,
        "{--dual_clip} is {dual_clip}, and must be above 1",
    ),
    Rule(
        "is_correction_mode is_correction_level is_correction_gating",
        lambda v: (
            v.has("is_correction_mode")
            and v["is_correction_mode"] == "clip"
            and (
                v["is_correction_level"] == "seq"
                or v["is_correction_gating"] != "ratio"
            )
        ),
        "{--is_correction_mode} clip requires "
        "{--is_correction_level} token and "
        "{--is_correction_gating} ratio",
    ),
    Rule(
        "is_correction_gating vllm_is_truncated_threshold",
        lambda v: (
            v.has("is_correction_gating")
            and v["is_correction_gating"] != "ratio"
            and v["is_correction_level"] != "off"
            and len(v["vllm_is_truncated_threshold"]) == 2
            and v["vllm_is_truncated_threshold"][0] > 0
        ),
        "a divergence has an upper bound only: one number for "
        "{--vllm_is_truncated_threshold}",
    ),
    Rule(
        "vllm_is_truncated_threshold",
        lambda v: v.is_at_least("0.11.2") and len(v["vllm_is_truncated_threshold"]) > 2,
        "{--vllm_is_truncated_threshold} takes one number or two",
    ),
    # _load_agent_executor (openrlhf/trainer/ray/vllm_engine.py; LLMRayActorAsync in
    # vllm_engine_async.py 0.8.11)
    Rule(
        "agent_func_path",
        lambda v: (
            v.is_set("agent_func_path") and not v["agent_func_path"].endswith(".py")
        ),
        "{--agent_func_path} {agent_func_path} is not a Python file",
    ),
)
# DeepspeedStrategy.__init__ (openrlhf/utils/deepspeed/deepspeed.py) and Actor.__init__
# (openrlhf/models/actor.py)
MODEL: tuple[Rule[Known], ...] = (
    Rule(
        "ds_tensor_parallel_size",
        lambda v: v["ds_tensor_parallel_size"] > 1 and _is_half(v),
        "{--ds_tensor_parallel_size} {ds_tensor_parallel_size} requires bfloat16",
    ),
    Rule(
        "load_in_4bit",
        lambda v: v["load_in_4bit"] and _is_half(v),
        "{--load_in_4bit} requires bfloat16",
    ),
)
OFFLINE: tuple[Rule[Known], ...] = (
    *COMMON,
    *MODEL,
    # blending_datasets splits the name (openrlhf/datasets/utils.py).
    Rule(
        "dataset",
        lambda v: not v.is_set("dataset"),
        "there is no data set: {--dataset} is empty or not given",
        MISSING,
    ),
    # For train_kd, which loads it as an Actor.
    Rule(
        "teacher_model",
        lambda v: v.has("teacher_model") and not v.is_set("teacher_model"),
        "there is no teacher: {--teacher_model} is empty or not given",
        MISSING,
    ),
    Rule(
        "multiturn",
        lambda v: (
            v.has("multiturn") and v["multiturn"] and not v["apply_chat_template"]
        ),
        "{--multiturn} requires {--apply_chat_template}",
        MISSING,
    ),
    Rule(
        "ring_attn_size",
        lambda v: (
            v.has("ring_attn_size")
            and v["ring_attn_size"] > 1
            and not v["packing_samples"]
        ),
        "{--ring_attn_size} {ring_attn_size} requires {--packing_samples}",
        MISSING,
    ),
    Rule(
        "attn_implementation",
        lambda v: (
            v.has("packing_samples")
            and v["packing_samples"]
            and "flash_attention" not in v["attn_implementation"]
        ),
        "{--attn_implementation} {attn_implementation} is replaced by "
        "flash_attention_2, as samples are packed",
        level="warning",
    ),
)


def judged(v: Known) -> Iterator[Finding]:
    """All that is wrong with a start of train_ppo_ray, as far as it is certain."""
    checks = (_batches, _outside, _ray, absent)
    return recorded_options.judged(v, (*PPO, *MODEL), checks)


def offline(v: Known, processes: Given) -> Iterator[Finding]:
    """The same for a program without a rollout, started as ``processes``."""
    yield from recorded_options.judged(v, OFFLINE, (absent,))
    if type(processes.value) is int:
        world = processes.value
        checks = (lambda v: _divided(v, world, "the trainer"),)
        yield from recorded_options.judged(v, (), checks)


def _batches(v: Known) -> Iterator[Finding]:
    """Batches that do not divide among a model's ranks, and too few batches for them.

    async_run_method_batch (openrlhf/trainer/ray/launcher.py) raises for fewer batches
    than data parallel ranks.
    """
    for role, name in (
        ("actor", "the actor"),
        ("critic", "the critic"),
        ("ref", "the reference model"),
        ("reward", "the reward model"),
    ):
        try:
            count = gpus(v, role)
            # Trained models then take one sample at a time.
            if count and not (v["use_dynamic_batch"] and role in ("actor", "critic")):
                yield from _divided(v, count, name, f"{role}_num_gpus_per_node")
            if role != "actor" and count and not v["use_dynamic_batch"]:
                batches = -(-_samples(v) // v["micro_rollout_batch_size"])
                if batches < _ranks(v, role):
                    text = (
                        f"a rollout has {batches} batches of "
                        f"{v.option('micro_rollout_batch_size')}, too few for the "
                        f"{count} GPUs of {name}"
                    )
                    key = f"{role}_num_gpus_per_node"
                    yield v.fault(CONFLICT, "error", text, key)
        except UnsureError:
            continue


def _divided(
    v: Known, count: int, name: str, key: str = "train_batch_size"
) -> Iterator[Finding]:
    """get_ds_train_config and get_ds_eval_config, as DeepSpeed checks them.

    DeepSpeed requires train_batch_size == micro-batch * accumulation * world size
    (deepspeed/runtime/config.py, _batch_assertion); with tensor parallelism its world
    size differs.
    """
    ring = v["ring_attn_size"] if v.has("ring_attn_size") else 1
    if v["ds_tensor_parallel_size"] > 1:
        return
    whole, micro = v["train_batch_size"], v["micro_train_batch_size"]
    if whole * ring % (micro * count):
        more = f" * {v.option('ring_attn_size')} {ring}" if ring > 1 else ""
        text = (
            f"{v.option('train_batch_size')} {whole}{more} is not a multiple of "
            f"{v.option('micro_train_batch_size')} {micro} * {count} GPUs of {name}: "
            "DeepSpeed refuses it"
        )
        keys = ("train_batch_size", "micro_train_batch_size", key)
        yield v.fault(CONFLICT, "error", text, *keys)


def _outside(v: Known) -> Iterator[Finding]:
    """Models on more GPUs than the actor has, whose GPUs they are to share.

    RayActorGroup takes a bundle of the actor's placement group for each rank
    (openrlhf/trainer/ray/launcher.py, _initiate_actors).
    """
    if not v["colocate_all_models"]:
        return
    is_apart = v["colocate_critic_reward"] and has_critic(v)
    for role, name in (("critic", "the critic"), ("reward", "the reward model")):
        if not is_apart and gpus(v, role) > gpus(v, "actor"):
            text = (
                f"{name} has {gpus(v, role)} GPUs and the actor {gpus(v, 'actor')}: "
                f"with {v.option('colocate_all_models')} it can have no others"
            )
            yield v.fault(CONFLICT, "error", text, f"{role}_num_gpus_per_node")


def _ray(v: Known) -> Iterator[Finding]:
    """More GPUs than Ray has."""
    if all(v[f"{role}_num_nodes"] == 1 for role in ("actor", "ref", "critic")):
        yield from ray_start.too_few(v.launch.beside, _total(v))
