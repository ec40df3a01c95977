"""SkyRL's own rules on a configuration, each with the source that it is from.

Read in 0.3.0 and the main branch at a9564572; paths are below skyrl/train/ unless they
name another folder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pytest_gkd.job import looking
from pytest_gkd.job.looking import Fault, NotCertainError
from pytest_gkd.job.omegaconf import Config
from pytest_gkd.options import near

PLACEMENT = "trainer.placement"
ENGINE = "generator.inference_engine"
ALGORITHM = "trainer.algorithm"
CORRECTION = f"{ALGORITHM}.off_policy_correction"
REF = "trainer.ref.model.path"
STUDENT = "trainer.policy.model.path"
CRITIC = "trainer.critic.model.path"
FULLY_ASYNC = "trainer.fully_async"
# Keys that are refused, except with a value that is what happens anyway
# (config/config.py, from_cli_overrides).
REMOVED: dict[str, tuple[Any, ...]] = {
    f"{ENGINE}.async_engine": (True, "true"),
    f"{ENGINE}.enable_http_endpoint": (),
    f"{ENGINE}.override_existing_update_group": (),
    f"{ENGINE}.remote_urls": (),
}
REDUCTIONS = (
    "token_mean",
    "token_mean_legacy",
    "sequence_mean",
    "seq_mean_token_sum_norm",
    "prompt_mean",
)
# PPO-like losses, which use the trainer's own old log-probabilities
# (backends/skyrl_train/utils/ppo_utils.py, LOSSES_WITH_OLD_LOGPROBS).
ON_OLD_LOGPROBS = (
    *("regular", "dual_clip", "gspo", "cispo", "clip_cov", "kl_cov", "sapo"),
    *("cross_entropy", "importance_sampling"),
)
DISTILLS = "main_on_policy_distill"


class Look(looking.Look):
    """The certain values of a configuration, and the program that is started."""

    def __init__(
        self, config: Config, program: str = "", schema: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(config)
        self.program, self.schema = program, schema or {}

    def gpus(self, role: str) -> int:
        """The GPUs of the policy, critic or ref, each."""
        start = f"{PLACEMENT}.{role}_num"
        return self.whole(f"{start}_nodes") * self.whole(f"{start}_gpus_per_node")

    def engine_gpus(self) -> int:
        """The GPUs of all engines."""
        sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
        each = math.prod(self.whole(f"{ENGINE}.{size}") for size in sizes)
        return self.whole(f"{ENGINE}.num_engines") * each

    def uses_ref(self) -> bool:
        """Whether there is a reference model (utils/utils.py, use_ref_model)."""
        keys = ("use_kl_loss", "use_kl_in_reward")
        return any(self.is_on(f"{ALGORITHM}.{key}") for key in keys)

    def is_megatron(self) -> bool:
        """Whether Megatron trains."""
        return bool(self("trainer.strategy") == "megatron")

    def replicas(self, role: str) -> int:
        """Data-parallel ranks of the policy, critic or ref.

        Raises NotCertainError if that is not an integer, which _world reports.
        """
        split, world = self.split(role), self.gpus(role)
        if world < split or (self.is_megatron() and world % split):
            raise NotCertainError(frozenset({f"{PLACEMENT}.{role}_num_gpus_per_node"}))
        return world // split

    def split(self, role: str) -> int:
        """How many GPUs one replica takes."""
        if not self.is_megatron() or role == "critic":
            return self.size(f"trainer.{role}.sequence_parallel_size")
        start = f"trainer.{role}.megatron_config"
        kinds = ("tensor_model", "pipeline_model", "context")
        return math.prod(self.size(f"{start}.{k}_parallel_size") for k in kinds)

    def apart(self) -> list[str]:
        """The roles with their own GPUs, if not all roles share them."""
        roles = ["policy"]
        shares = self.is_on(f"{PLACEMENT}.colocate_policy_ref")
        if self.uses_ref() and not shares:
            roles.append("ref")
        return roles + (["critic"] if self(CRITIC) else [])


# -- values ------------------------------------------------------------------------


def teacher(look: Look) -> Any:
    """The reference model if it differs from the student."""
    if not look.uses_ref():
        return None
    path = look(REF)
    return path if path != look(STUDENT) else None


def _has_teacher(look: Look) -> bool:
    """The same if the path itself is not certain."""
    setting = look.config.settings.get(REF)
    if setting is not None and setting.needs:
        return look.uses_ref()
    return teacher(look) is not None


def is_dynamic(look: Look) -> bool:
    """Whether batches are counted in tokens rather than samples."""
    return look.whole("trainer.max_tokens_per_microbatch") > 0


def tokens(look: Look) -> int | None:
    """The most tokens in a forward pass."""
    return look.whole("trainer.max_tokens_per_microbatch") if is_dynamic(look) else None


def fsdp_version(look: Look) -> int | None:
    """Only the newer value is used (config/config.py, TrainerConfig.strategy)."""
    return None if look.is_megatron() else 2


def placement(look: Look) -> str:
    """Whether the rollout shares the trainer's GPUs."""
    return "colocated" if look.is_on(f"{PLACEMENT}.colocate_all") else "split"


def teacher_gpus(look: Look) -> int:
    """The reference model's GPUs, 0 if it is not a teacher."""
    return look.gpus("ref") if _has_teacher(look) else 0


def total_gpus(look: Look) -> int:
    """trainer.py, build_models, and inference_servers/setup.py."""
    if look.is_on(f"{PLACEMENT}.colocate_all"):
        return look.gpus("policy")
    rollout = look.engine_gpus() if look.is_on(f"{ENGINE}.run_engines_locally") else 0
    return rollout + sum(look.gpus(role) for role in look.apart())


# -- rules -------------------------------------------------------------------------


def _sizes(look: Look) -> Iterator[Fault]:
    """utils/utils.py, validate_batch_sizes and validate_cfg."""
    keys = ["trainer.policy_mini_batch_size", "trainer.train_batch_size"]
    keys += [f"trainer.micro_{n}_batch_size_per_gpu" for n in ("train", "forward")]
    keys += [f"{PLACEMENT}.policy_num_{n}" for n in ("nodes", "gpus_per_node")]
    sizes = ("num_engines", "tensor_parallel_size")
    keys += [f"{ENGINE}.{size}" for size in sizes]
    keys += ["generator.n_samples_per_prompt"]
    for key in keys:
        value = look(key)
        if type(value) is int and value < 1:
            yield key, f"{key} = {value} must be at least 1"
    if look("trainer.max_ckpts_to_keep") == 0:
        key = "trainer.max_ckpts_to_keep"
        yield key, f"{key} = 0: it must be above 0, or below it to keep all"
    steps = look("trainer.max_training_steps")
    if type(steps) is int and steps <= 0:
        key = "trainer.max_training_steps"
        yield key, f"{key} = {steps} must be above 0"


def _world(look: Look) -> Iterator[Fault]:
    """utils/utils.py, validate_batch_sizes; under FSDP no replica would be left."""
    for role in ["policy", *(["ref"] if look.uses_ref() else [])]:
        split, world = look.split(role), look.gpus(role)
        if world % split:
            key = f"trainer.{role}.sequence_parallel_size"
            if look.is_megatron():
                key = f"trainer.{role}.megatron_config.tensor_model_parallel_size"
            text = f"the {world} GPUs of the {role} cannot be divided by the {split}"
            yield key, f"{text} that hold one replica of it"


def _batches(look: Look) -> Iterator[Fault]:
    """utils/utils.py, validate_batch_sizes."""
    roles = ["policy", *(["critic"] if look(CRITIC) else [])]
    whole = look.size("trainer.train_batch_size")
    samples = look.size("generator.n_samples_per_prompt")
    for role in roles:
        key = f"trainer.{role}_mini_batch_size"
        mini, replicas = look.size(key), look.replicas(role)
        if mini > whole or whole % mini:
            line = f"trainer.train_batch_size = {whole} is not a multiple of {key}"
            yield key, f"{line} = {mini}"
            continue
        rows = mini * samples // replicas
        if not rows:
            line = f"{key} * generator.n_samples_per_prompt = {mini} * {samples} is not"
            yield key, f"{line} one sample for each of {replicas} replicas"
            continue
        micro_key = "trainer.micro_train_batch_size_per_gpu"
        micro = look.size(micro_key)
        of = f"({mini} * {samples} // {replicas} replicas)"
        if rows % micro:
            line = f"the {rows} samples of a mini-batch {of} cannot be divided by"
            yield micro_key, f"{line} {micro_key} = {micro}"
        all_rows = whole * samples // replicas
        if all_rows % rows:
            line = f"the {all_rows} samples of a batch on each replica are no multiple"
            yield key, f"{line} of the {rows} of a mini-batch {of}"


def _whole_batch(look: Look) -> Iterator[Fault]:
    """utils/utils.py, validate_batch_sizes: the least common multiple of replicas."""
    key = "trainer.train_batch_size"
    rows = look.size(key) * look.size("generator.n_samples_per_prompt")
    roles = ["policy", *(["ref"] if look.uses_ref() else [])]
    several = math.lcm(*(look.replicas(role) for role in roles))
    if rows < several:
        line = f"{key} * generator.n_samples_per_prompt = {rows} is below {several}, "
        yield key, f"{line}the least common multiple of the replicas of its models"


def _megatron(look: Look) -> Iterator[Fault]:
    """utils/utils.py, validate_megatron_cfg."""
    if not look.is_megatron():
        return
    if look(CRITIC):
        yield CRITIC, "a critic is not trained under trainer.strategy=megatron"
    sync = look(f"{ENGINE}.weight_sync_backend")
    if sync not in ("nccl", "delta"):
        key = f"{ENGINE}.weight_sync_backend"
        yield key, f"{key}={sync}: under Megatron it is nccl or delta"
    for role in ("policy", "ref"):
        start = f"trainer.{role}.megatron_config"
        context = look.whole(f"{start}.context_parallel_size")
        if context > 1 and not look.is_on("trainer.remove_microbatch_padding"):
            key = f"{start}.context_parallel_size"
            yield key, f"{key} = {context} needs trainer.remove_microbatch_padding=true"
        key = f"trainer.{role}.sequence_parallel_size"
        if look(key) != 1:
            yield key, f"{key} = {look(key)}: it must be 1 under Megatron"
    replay = "trainer.policy.megatron_config.moe_enable_routing_replay"
    if look.is_on(replay) and not look.is_on(f"{ENGINE}.enable_return_routed_experts"):
        yield replay, f"{replay} needs {ENGINE}.enable_return_routed_experts=true"


def _only_megatron(look: Look) -> Iterator[Fault]:
    """config/config.py, TrainerConfig.__post_init__; entrypoints/main_base.py."""
    strategy = look("trainer.strategy")
    if strategy not in ("fsdp", "fsdp2", "megatron"):
        text = f"trainer.strategy={strategy}: SkyRL knows fsdp and megatron"
        yield "trainer.strategy", text + near(str(strategy), ("fsdp", "megatron"))
    if look.is_megatron():
        return
    fused, chunk = "trainer.fused_lm_head_logprob", "trainer.logprobs_chunk_size"
    if look.is_on(fused):
        yield fused, f"{fused}=true needs trainer.strategy=megatron"
    if look(chunk) is None:
        yield chunk, f"{chunk}=null needs trainer.strategy=megatron"


def _chunk(look: Look) -> Iterator[Fault]:
    """config/config.py, TrainerConfig.__post_init__."""
    key = "trainer.logprobs_chunk_size"
    value = look(key)
    if value is not None and (type(value) is not int or value <= 0):
        yield key, f"{key} = {value}: it must be an integer above 0, or null"


def _registered(look: Look) -> Iterator[Fault]:
    """utils/utils.py, validate_cfg; a user's own program may register others."""
    if not look.program:
        return
    for key, kind in (
        (f"{ALGORITHM}.advantage_estimator", "estimators"),
        (f"{ALGORITHM}.policy_loss_type", "losses"),
    ):
        known = [*look.schema[kind][""], *look.schema[kind].get(look.program, [])]
        value = look(key)
        if value not in known:
            owners = [n for n, more in look.schema[kind].items() if value in more]
            more = near(str(value), known)
            if owners:
                more = f"; {owners[0]} registers it, and is not what is started"
            yield key, f"{key}={value}: known values are {', '.join(known)}{more}"


def _algorithm(look: Look) -> Iterator[Fault]:
    """utils/utils.py, validate_cfg."""
    estimator = look(f"{ALGORITHM}.advantage_estimator")
    if estimator == "gae" and not look(CRITIC):
        yield CRITIC, f"{ALGORITHM}.advantage_estimator=gae needs {CRITIC}"
    if all(look.is_on(f"{ALGORITHM}.use_kl_{n}") for n in ("loss", "in_reward")):
        key = f"{ALGORITHM}.use_kl_in_reward"
        text = f"{key} and {ALGORITHM}.use_kl_loss are both true: one must be false"
        yield key, f"{text} (use_kl_loss is true by default)"
    key = f"{ALGORITHM}.loss_reduction"
    reduction = look(key)
    if reduction not in REDUCTIONS:
        yield key, f"{key}={reduction}: known values are {', '.join(REDUCTIONS)}"
    if (
        reduction == "seq_mean_token_sum_norm"
        and look(f"{ALGORITHM}.max_seq_len") is None
    ):
        yield key, f"{key}={reduction} needs {ALGORITHM}.max_seq_len"
    ratio, mask = (
        look(f"{CORRECTION}.tis_ratio_type"),
        f"{CORRECTION}.sequence_mask_metric",
    )
    if ratio and ratio not in ("token", "sequence"):
        key = f"{CORRECTION}.tis_ratio_type"
        yield key, f"{key}={ratio}: it must be token, sequence or null"
    if look(mask) and look(mask) not in ("product", "geometric"):
        yield mask, f"{mask}={look(mask)}: it must be product, geometric or null"
    loss = look(f"{ALGORITHM}.policy_loss_type")
    if (ratio or look(mask)) and loss in ("clip_cov", "kl_cov"):
        key = f"{ALGORITHM}.policy_loss_type"
        yield key, f"{key}={loss} cannot be used with {CORRECTION}"


def _stepwise(look: Look) -> Iterator[Fault]:
    """utils/utils.py, validate_cfg; generators/skyrl_gym_generator.py."""
    key = "generator.step_wise_trajectories"
    if not look.is_on(key):
        merged = "generator.merge_stepwise_output"
        if look.is_on(merged):
            yield merged, f"{merged}=true needs {key}=true"
        return
    estimator = look(f"{ALGORITHM}.advantage_estimator")
    if estimator in ("gae", "reinforce++"):
        yield key, f"{key}=true cannot be used with advantage_estimator={estimator}"
    if look(f"{ALGORITHM}.loss_reduction") == "token_mean_legacy":
        yield key, f"{key}=true cannot be used with loss_reduction=token_mean_legacy"
    if look.is_on("generator.batched"):
        yield key, f"{key}=true cannot be used with generator.batched=true"
    if not look.is_on("generator.use_conversation_multi_turn"):
        yield key, f"{key}=true needs generator.use_conversation_multi_turn=true"


def _generator(look: Look) -> Iterator[Fault]:
    """utils/utils.py, validate_generator_cfg; generators/skyrl_gym_generator.py."""
    key = "generator.max_input_length"
    longest, prompt = look(key), look("trainer.max_prompt_length")
    if type(longest) is int and type(prompt) is int:
        is_single = look("generator.max_turns") == 1
        if (is_single and longest != prompt) or longest < prompt:
            how = "must be" if is_single else "must be at least"
            line = f"{key} = {longest} {how} trainer.max_prompt_length = {prompt}"
            yield (
                key,
                f"{line}, with generator.max_turns = {look('generator.max_turns')}",
            )
    key = "generator.sampling_params.logprobs"
    if type(look(key)) is int and look(key) > 1:
        yield key, f"{key} = {look(key)}: it must be null, 0 or 1"
    key = "generator.chat_template_kwargs"
    has_some = look.config.is_section(key) or look(key)
    if has_some and look.is_on("generator.batched"):
        yield key, f"{key} cannot be used with generator.batched=true"
    workers = look("data.dataloader.num_workers")
    if look.is_on("data.dataloader.persistent_workers") and workers == 0:
        key = "data.dataloader.persistent_workers"
        yield key, f"{key}=true needs data.dataloader.num_workers above 0"


def _engine(look: Look) -> Iterator[Fault]:
    """utils/utils.py, validate_inference_engine_cfg."""
    expert = look.whole(f"{ENGINE}.expert_parallel_size")
    data = look.whole(f"{ENGINE}.data_parallel_size")
    tensor = look.whole(f"{ENGINE}.tensor_parallel_size")
    if expert > 1 and data * tensor != expert:
        key = f"{ENGINE}.expert_parallel_size"
        line = f"{key} = {expert} must be data * tensor parallel size"
        yield key, f"{line} = {data} * {tensor}"
    backend = look(f"{ENGINE}.distributed_executor_backend")
    if backend not in ("mp", "ray"):
        key = f"{ENGINE}.distributed_executor_backend"
        yield key, f"{key}={backend}: it must be mp or ray"
    is_colocated = look.is_on(f"{PLACEMENT}.colocate_all")
    each = look.whole(f"{PLACEMENT}.policy_num_gpus_per_node")
    wide = tensor * look.whole(f"{ENGINE}.pipeline_parallel_size")
    if is_colocated and wide > each and backend == "mp":
        key = f"{ENGINE}.distributed_executor_backend"
        line = f"{key}=mp keeps an engine on one node: tensor * pipeline parallel size"
        yield key, f"{line} = {wide}, and a node has {each} GPUs"
    if look.is_on(f"{ENGINE}.enable_pd"):
        key = f"{ENGINE}.num_prefill"
        prefill, engines = look.whole(key), look.whole(f"{ENGINE}.num_engines")
        if not 0 < prefill < engines:
            line = f"{key} = {prefill} must be above 0 and below {ENGINE}.num_engines"
            yield key, f"{line} = {engines}, with {ENGINE}.enable_pd=true"


def _servers(look: Look) -> Iterator[Fault]:
    """utils/utils.py, _validate_new_inference_cfg and validate_inference_engine_cfg."""
    keys = [f"{ENGINE}.external_{n}" for n in ("proxy_url", "server_urls")]
    given = [key for key in keys if look(key) is not None]
    is_colocated = look.is_on(f"{PLACEMENT}.colocate_all")
    if given and is_colocated:
        yield given[0], f"{given[0]} needs {PLACEMENT}.colocate_all=false"
    local = f"{ENGINE}.run_engines_locally"
    if not given and not look.is_on(local):
        yield local, f"{local}=false needs {keys[0]} or {keys[1]}"
    offload = f"{ENGINE}.offload_kv_for_weight_sync"
    if look.is_on(offload):
        if is_colocated:
            yield offload, f"{offload}=true needs {PLACEMENT}.colocate_all=false"
        if look.whole("trainer.policy.model.lora.rank"):
            yield offload, f"{offload}=true cannot be used with LoRA"
        if look(f"{ENGINE}.weight_sync_backend") == "delta":
            yield (
                offload,
                f"{offload}=true cannot be used with weight_sync_backend=delta",
            )


def _lora(look: Look) -> Iterator[Fault]:
    """utils/utils.py, validate_cfg."""
    if not look.whole("trainer.policy.model.lora.rank"):
        return
    if look(f"{ENGINE}.backend") != "vllm":
        key = f"{ENGINE}.backend"
        yield key, f"{key}={look(key)}: LoRA needs vllm"
    if look(f"{ENGINE}.weight_sync_backend") == "delta":
        key = f"{ENGINE}.weight_sync_backend"
        yield key, f"{key}=delta cannot be used with LoRA"


def _placed(look: Look) -> Iterator[Fault]:
    """utils/utils.py, validate_cfg, and trainer.py, build_models."""
    roles = [
        *(["ref"] if look.uses_ref() else []),
        *(["critic"] if look(CRITIC) else []),
    ]
    policy = look.gpus("policy")
    if look.is_on(f"{PLACEMENT}.colocate_all"):
        rollout = look.engine_gpus()
        if rollout != policy:
            line = f"the policy has {policy} GPUs and the engines {rollout}"
            yield (
                f"{ENGINE}.num_engines",
                f"{line}: with colocate_all they are the same",
            )
        for role in roles:
            if look.gpus(role) != policy:
                key = f"{PLACEMENT}.{role}_num_gpus_per_node"
                line = f"the policy has {policy} GPUs and the {role} {look.gpus(role)}"
                yield key, f"{line}: with colocate_all they are the same"
    elif "ref" in roles and look.is_on(f"{PLACEMENT}.colocate_policy_ref"):
        for size in ("nodes", "gpus_per_node"):
            key, own = (f"{PLACEMENT}.{r}_num_{size}" for r in ("ref", "policy"))
            if look(key) != look(own):
                line = f"{key} = {look(key)} must be {own} = {look(own)}"
                yield key, f"{line}, or {PLACEMENT}.colocate_policy_ref=false"


def _fully_async(look: Look) -> Iterator[Fault]:
    """fully_async_trainer.py, FullyAsyncRayPPOTrainer.__init__."""
    if "fully_async" not in look.program.rpartition(".")[2]:
        return
    if not look.is_on(f"{FULLY_ASYNC}.enabled"):
        key = f"{FULLY_ASYNC}.enabled"
        yield key, f"{key} must be true for {look.program}"
    whole, mini = "trainer.train_batch_size", "trainer.policy_mini_batch_size"
    if look(whole) != look(mini):
        yield (
            whole,
            f"{whole} = {look(whole)} must be {mini} = {look(mini)}, fully async",
        )
    if look(f"{ALGORITHM}.dynamic_sampling.type") is not None:
        key = f"{ALGORITHM}.dynamic_sampling.type"
        yield key, f"{key} must be null, fully async"
    for key in ("generator.batched", f"{PLACEMENT}.colocate_all"):
        if look.is_on(key):
            yield key, f"{key} must be false, fully async"
    key = f"{FULLY_ASYNC}.num_parallel_generation_workers"
    workers, batch = look.whole(key), look.whole(mini)
    most = batch * (look.whole(f"{FULLY_ASYNC}.max_staleness_steps") + 1)
    if not batch <= workers <= most:
        line = f"{key} = {workers} must be {batch} ({mini}) to {most}"
        yield key, f"{line} (that * (max_staleness_steps + 1))"
    loss = look(f"{ALGORITHM}.policy_loss_type")
    is_of_rollout = look(f"{ALGORITHM}.cispo.cispo_anchor") == "rollout"
    if loss in ON_OLD_LOGPROBS and not (loss == "cispo" and is_of_rollout):
        key = f"{ALGORITHM}.policy_loss_type"
        line = f"{key}={loss} needs log-probabilities of policies that are gone"
        yield key, f"{line}; use rollout_is or dppo, fully async"


def _student(look: Look) -> Iterator[Fault]:
    """config/config.py, build_nested_dataclass and PolicyConfig."""
    if not look(STUDENT):
        line = f"{STUDENT} is not given; its default is lost, as another key of"
        yield STUDENT, f"{line} trainer.policy.model is"


def _ref(look: Look) -> Iterator[Fault]:
    """trainer.py, build_models and train: when a teacher is loaded and used."""
    setting = look.config.settings.get(REF)
    if setting is None or (setting.value is None and not setting.needs):
        return
    if not look.uses_ref():
        line = f"{REF} is given, and never loaded: {ALGORITHM}.use_kl_loss and"
        yield REF, f"{line} use_kl_in_reward are both false"
    elif look.is_on("trainer.update_ref_every_epoch") and _has_teacher(look):
        key = "trainer.update_ref_every_epoch"
        yield key, f"{key}=true puts the student in the teacher's place ({REF})"


def _distills(look: Look) -> Iterator[Fault]:
    """examples/train/on_policy_distillation: the teacher is the reward's KL."""
    if DISTILLS not in look.program:
        return
    key = f"{ALGORITHM}.use_kl_in_reward"
    if not look.is_on(key):
        yield key, f"{key} is false: {DISTILLS} takes the teacher in by it alone"
    elif not _has_teacher(look):
        yield REF, f"{REF} is the student: it would be distilled from itself"


def _lost_defaults(look: Look) -> Iterator[Fault]:
    """config/config.py, build_nested_dataclass builds sections from what is given."""
    key, rate = "trainer.critic.optimizer_config", "trainer.critic.optimizer_config.lr"
    setting = look.config.settings.get(rate)
    is_made = setting is not None and not setting.word.file
    if look(CRITIC) and is_made and look(rate) != 5e-6:
        line = f"{rate} is {look(rate)}, and not its default of 5e-06: another key of"
        yield rate, f"{line} {key} is given"
    section, name = "generator.eval_sampling_params", "max_generate_length"
    setting = look.config.settings.get(f"{section}.{name}")
    own = look(f"generator.sampling_params.{name}")
    if setting is not None and not setting.word.file and setting.value != own:
        line = f"{section}.{name} is {setting.value}, and not the {own} of training"
        yield f"{section}.{name}", f"{line}: another key of {section} is given"


def _lengths(look: Look) -> Iterator[Fault]:
    """What is requested must fit into the engine."""
    key = f"{ENGINE}.engine_init_kwargs.max_model_len"
    most = look(key)
    if type(most) is not int or look("generator.max_turns") != 1:
        return
    prompt = look.whole("trainer.max_prompt_length")
    response = look.whole("generator.sampling_params.max_generate_length")
    if prompt + response > most:
        line = f"prompts of {prompt} and responses of {response} tokens are longer than"
        yield key, f"{line} {key} = {most}"


Rule = Callable[[Look], Iterator[Fault]]
REFUSED: tuple[Rule, ...] = (
    _sizes,
    _world,
    _batches,
    _whole_batch,
    _megatron,
    _only_megatron,
    _chunk,
    _registered,
    _algorithm,
    _stepwise,
    _generator,
    _engine,
    _servers,
    _lora,
    _placed,
    _fully_async,
    _student,
)
DOUBTFUL: tuple[Rule, ...] = (_ref, _distills, _lost_defaults, _lengths)
