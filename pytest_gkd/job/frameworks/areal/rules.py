"""AReaL's own rules on a configuration, each with the source that it is from.

Read at 4aef98d8 (1.0.4 and the main branch of May 2026); paths are below areal/.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pytest_gkd.job import looking
from pytest_gkd.job.frameworks.areal import backends
from pytest_gkd.job.frameworks.areal.backends import ENGINES, TRAINERS, Backend
from pytest_gkd.job.looking import Fault, NotCertainError
from pytest_gkd.job.omegaconf import Config
from pytest_gkd.options import near

ROLES = ("actor", "critic", "ref", "teacher", "rollout")
MODELS = ROLES[:4]
COLOCATION = "colocation"
SCHEDULERS = ("local", "ray", "slurm")
ATTENTION = (
    *("eager", "sdpa", "flash_attention_2", "flash_attention_3"),
    "flex_attention",
)


class Look(looking.Look):
    """The certain values; ``root`` is the root class, ``launcher`` what starts the job.

    The latter is "script" for a program itself, "spmd" for AReaL's older launchers, and
    empty if only a file is given.
    """

    def __init__(self, config: Config, root: str = "", launcher: str = "") -> None:
        super().__init__(config)
        self.root, self.launcher = root, launcher

    def backend(self, role: str) -> Backend:
        """A role's backend. Raises NotCertainError for what _backends reports.

        The older launchers start the rollout's servers by their allocation_mode
        (infra/launcher/local.py, ray.py, slurm.py).
        """
        if role == "rollout" and self.launcher == "spmd":
            parts = backends.allocation(str(self("allocation_mode"))) or []
            engines = [part for part in parts if part.kind in ENGINES]
            if len(engines) != 1:
                raise NotCertainError(frozenset({"allocation_mode"}))
            return engines[0]
        found = backends.read(str(self(f"{role}.backend")))
        if found is None:
            raise NotCertainError(frozenset({f"{role}.backend"}))
        return found

    def has(self, role: str) -> bool:
        """Whether the job has the role (trainer/rl_trainer.py, PPOTrainer)."""
        if not self.config.is_section(role):
            return False
        return role != "ref" or self.number("actor.kl_ctl", 0) > 0

    def roles(self) -> list[str]:
        """The job's roles."""
        return [role for role in ROLES if self.has(role)]

    def target(self, role: str) -> str:
        """The role whose GPUs it shares, empty for one with GPUs of its own."""
        start = f"{role}.scheduling_strategy"
        is_shared = self(f"{start}.type") == COLOCATION
        return str(self(f"{start}.target")) if is_shared else ""

    def shares(self) -> bool:
        """Whether actor and rollout share GPUs (_is_actor_rollout_colocated)."""
        if not self.has("rollout"):
            return False
        return self.target("actor") == "rollout" or self.target("rollout") == "actor"


# -- values ------------------------------------------------------------------------


# The datasets that get_custom_dataset makes, by a part of their path, with their kinds;
# all drop rows longer than max_length (areal/dataset/__init__.py).
DATA = {
    **dict.fromkeys(("gsm8k", "clevr_count_70k", "geometry3k"), ("sft", "rl")),
    "virl39k": ("rl",),
    "hh-rlhf": ("rw", "dpo"),
    "torl_data": ("rl",),
}


def truncation(look: Look) -> str | None:
    """What happens to rows that are too long, None for the user's own datasets."""
    path, kind = str(look("train_dataset.path")), look("train_dataset.type")
    for name, kinds in DATA.items():
        if name in (path.lower() if name == "virl39k" else path) and kind in kinds:
            return "keep" if look("train_dataset.max_length") is None else "drop"
    return None


def of(role: str, name: str) -> Callable[[Look], Any]:
    """A part of a role's backend, None without the role."""

    def found(look: Look) -> Any:
        return getattr(look.backend(role), name) if look.has(role) else None

    return found


def fsdp_version(look: Look) -> int | None:
    """Only the newer value is used (engine/fsdp_engine.py)."""
    return 2 if look.backend("actor").kind == "fsdp" else None


def lora_rank(look: Look) -> int:
    """The rank of a LoRA, 0 without one."""
    return look.whole("actor.lora_rank") if look.is_on("actor.use_lora") else 0


def is_dynamic(look: Look) -> bool:
    """Whether batches are counted in tokens rather than samples."""
    return look("actor.mb_spec.max_tokens_per_mb") is not None


def mini_batch(look: Look) -> int | None:
    """Prompts per update (trainer/ppo/actor.py): the batch divided by its parts."""
    if not look.has("rollout"):
        return None
    batch = look.whole("train_dataset.batch_size")
    return max(1, batch // look.size("actor.ppo_n_minibatches"))


def teacher_gpus(look: Look) -> int:
    """The teacher's GPUs, its own or shared."""
    return look.backend("teacher").gpus if look.has("teacher") else 0


def total_gpus(look: Look) -> int:
    """The GPUs of all roles that have their own."""
    alone = [role for role in look.roles() if not look.target(role)]
    return sum(look.backend(role).gpus for role in alone)


def placement(look: Look) -> str | None:
    """Whether the rollout shares the actor's GPUs."""
    if not look.has("rollout"):
        return None
    return "colocated" if look.shares() else "split"


# -- rules -------------------------------------------------------------------------


def _backends(look: Look) -> Iterator[Fault]:
    """api/alloc_mode.py, ModelAllocation; trainer/rl_trainer.py, PPOTrainer."""
    for role in look.roles():
        key = f"{role}.backend"
        text = look(key)
        if not isinstance(text, str):
            continue  # reported as missing
        found = backends.read(text)
        known = ENGINES if role == "rollout" else TRAINERS
        if "+" in text:
            yield key, f"{key}={text}: one backend, and none of several with a +"
        elif found is None or found.kind not in known:
            kind = text.partition(":")[0]
            line = (
                f"{key}={text} is not a backend; expected for example {known[0]}:d4t2, "
            )
            yield key, f"{line}of {', '.join(known)}{near(kind, known)}"
        else:
            for fault in backends.faults(found):
                yield key, f"{key}={text}: {fault}"


def _offload(look: Look) -> Iterator[Fault]:
    """trainer/rl_trainer.py, PPOTrainer._validate_cfg."""
    models = [role for role in MODELS if look.has(role)]
    wanted = [f"{role}.offload" for role in models if look.is_on(f"{role}.offload")]
    if look.shares():
        wanted.append("rollout.scheduling_strategy")
        if look("actor.weight_update_mode") != "disk":
            key = "actor.weight_update_mode"
            yield key, f"{key} must be disk where actor and rollout share GPUs"
    if wanted and not look.is_on("enable_offload"):
        yield "enable_offload", f"{wanted[0]} needs enable_offload=true"


def _engine(look: Look) -> Iterator[Fault]:
    """trainer/rl_trainer.py, PPOTrainer._validate_cfg."""
    if not look.has("rollout"):
        return
    engine, trainer = look.backend("rollout").kind, look.backend("actor").kind
    routed = "rollout.return_routed_experts"
    if engine == "vllm" and look.is_on(routed):
        yield routed, f"{routed}=true works with SGLang only"
    if trainer == "megatron" and look.is_on("actor.use_lora") and engine == "sglang":
        yield "actor.use_lora", "actor.use_lora under Megatron needs a rollout by vLLM"


def _update(look: Look) -> Iterator[Fault]:
    """trainer/rl_trainer.py, PPOTrainer.__init__."""
    key = "actor.weight_update_mode"
    if look.has("rollout") and look(key) not in ("disk", "xccl"):
        yield key, f"{key}={look(key)}: it must be disk or xccl"


def _norms(look: Look) -> Iterator[Fault]:
    """api/cli_args.py, NormConfig.__post_init__."""
    for role in MODELS:
        for section in (f"{role}.reward_norm", f"{role}.adv_norm"):
            if not look.config.is_section(section):
                continue
            levels = [f"{section}.{name}_level" for name in ("mean", "std")]
            for key in levels:
                if look(key) not in ("batch", "group", None):
                    yield key, f"{key}={look(key)}: it must be batch, group or null"
            size = f"{section}.group_size"
            if "group" in [look(key) for key in levels] and look.whole(size) < 1:
                yield size, f"{size} = {look(size)} must be at least 1"


def _rejection(look: Look) -> Iterator[Fault]:
    """api/cli_args.py, RejectionSamplingConfig.__post_init__."""
    section = "actor.rejection_sampling"
    if not look.config.is_section(section):
        return
    choices = {
        "level": ("token", "sequence"),
        "action": ("mask", "clamp"),
        "metric": ("ratio", "kl_k1", "kl_k2", "kl_k3"),
        "agg": ("sum", "mean", "max"),
    }
    for name, known in choices.items():
        key = f"{section}.{name}"
        if look(key) not in known:
            yield key, f"{key}={look(key)}: known values are {', '.join(known)}"
    key, metric = f"{section}.upper", look(f"{section}.metric")
    upper = look.number(key)
    lower = look(f"{section}.lower")
    if lower is not None:
        lower = look.number(f"{section}.lower")
    least = {"ratio": 1.0, "kl_k2": 0.0, "kl_k3": 0.0}.get(str(metric))
    if least is not None and upper <= least:
        yield key, f"{key} = {upper} must be above {least} for metric={metric}"
    if lower is not None and (lower > upper or (metric == "ratio" and lower <= 0)):
        line = f"{section}.lower = {lower} must be above 0 and at most {key} = {upper}"
        yield f"{section}.lower", line
    if look(f"{section}.action") == "clamp" and metric != "ratio":
        key = f"{section}.action"
        yield key, f"{key}=clamp works with metric=ratio only"


def _sapo(look: Look) -> Iterator[Fault]:
    """api/cli_args.py, PPOActorConfig.__post_init__."""
    if not look.is_on("actor.use_sapo_loss"):
        return
    for key in ("actor.sapo_tau_pos", "actor.sapo_tau_neg"):
        if look.number(key) <= 0:
            yield key, f"{key} = {look(key)} must be above 0"
    if look.is_on("actor.use_decoupled_loss"):
        key = "actor.use_decoupled_loss"
        yield key, f"actor.use_sapo_loss=true needs {key}=false"


def _models(look: Look) -> Iterator[Fault]:
    """api/cli_args.py, TrainEngineConfig, MicroBatchSpec and FSDPEngineConfig."""
    for role in MODELS:
        if not look.config.is_section(role):
            continue
        key = f"{role}.mb_spec.packing_algorithm"
        if look(key) not in ("ffd", "kk"):
            yield key, f"{key}={look(key)}: it must be ffd or kk"
        key = f"{role}.attn_impl"
        if look(key) not in ATTENTION and "/" not in str(look(key)):
            line = f"{key}={look(key)}: known values are {', '.join(ATTENTION)}"
            yield key, f"{line} and names of kernels on the Hub (org/repo)"
        key = f"{role}.fsdp.memory_efficient_load"
        if look.is_on(key) and look.is_on(f"{role}.init_from_scratch"):
            yield key, f"{key}=true cannot be used with {role}.init_from_scratch=true"
        key = f"{role}.fsdp.optim_step_prefetch_layers"
        if look.number(key, 0) < 0:
            yield key, f"{key} = {look(key)} must be at least 0"


def _specs(look: Look) -> Iterator[Fault]:
    """api/cli_args.py, TrainEngineConfig and InferenceEngineConfig."""
    for role in ROLES:
        key = f"{role}.scheduling_spec"
        setting = look.config.settings.get(key)
        several = setting.value if setting else None
        if isinstance(several, list) and len(several) not in (1, 2):
            yield key, f"{key} has {len(several)} entries: it has 1 or 2"


def _kinds(look: Look) -> Iterator[Fault]:
    """api/cli_args.py, BaseExperimentConfig, RWConfig and DPOConfig."""
    key = "total_train_epochs"
    if type(look(key)) is int and look(key) <= 0:
        yield key, f"{key} = {look(key)} must be above 0"
    key = "actor.is_critic"
    if look.root == "RWConfig" and not look.is_on(key):
        yield key, f"{key} must be true for a reward model"
    if look.root == "DPOConfig" and look.is_on(key):
        yield key, f"{key} must be false for DPO"


def _online(look: Look) -> Iterator[Fault]:
    """trainer/rl_trainer.py, PPOTrainer.__init__."""
    if not look.has("rollout") or look("rollout.agent.mode") != "online":
        return
    if look.config.is_section("valid_dataset"):
        yield (
            "valid_dataset",
            "valid_dataset cannot be used with rollout.agent.mode=online",
        )
    steps, epochs = look("total_train_steps"), look.whole("total_train_epochs")
    if steps is None or look.whole("total_train_steps") < epochs:
        line = f"total_train_steps = {steps} must be at least total_train_epochs = "
        yield "total_train_steps", f"{line}{epochs} with rollout.agent.mode=online"


def _scheduler(look: Look) -> Iterator[Fault]:
    """trainer/rl_trainer.py, _init_scheduler; infra/scheduler/slurm.py."""
    key = "scheduler.type"
    kind = look(key)
    if look.launcher == "script" and kind not in SCHEDULERS:
        line = f"{key}={kind}: a program that is started itself needs {key}=local, ray"
        yield key, f"{line} or slurm{near(str(kind), SCHEDULERS)}"
    each = look.size("cluster.n_gpus_per_node")
    if kind == "slurm" and look.launcher != "spmd":
        for role in look.roles():
            gpus = look.backend(role).gpus
            if not look.target(role) and gpus % each:
                line = f"{role}.backend has {gpus} GPUs, and Slurm gives whole nodes of"
                yield f"{role}.backend", f"{line} cluster.n_gpus_per_node = {each}"


def _shards(look: Look) -> Iterator[Fault]:
    """utils/dataloader.py, create_dataloader: the older launchers' ranks each read a
    part.
    """
    if look.launcher != "spmd":
        return
    ranks = look.backend("actor").data
    for key in ("train_dataset.batch_size", "valid_dataset.batch_size"):
        batch = look(key)
        if type(batch) is int and batch % ranks:
            yield key, f"{key} = {batch} cannot be divided by the actor's {ranks} ranks"


def _cluster(look: Look) -> Iterator[Fault]:
    """GPUs of all roles compared with those that the cluster is said to have.

    A local scheduler finds its GPUs itself (infra/scheduler/local.py).
    """
    if look("scheduler.type") == "local":
        return
    nodes, each = look.size("cluster.n_nodes"), look.size("cluster.n_gpus_per_node")
    total = total_gpus(look)
    if total > nodes * each:
        line = f"the roles have {total} GPUs, and the cluster {nodes} * {each}"
        yield "cluster.n_gpus_per_node", f"{line} = {nodes * each}"


def _targets(look: Look) -> Iterator[Fault]:
    """A role that shares GPUs must name one of the job's roles that has its own."""
    for role in look.roles():
        target = look.target(role)
        if target and (not look.has(target) or look.target(target)):
            key = f"{role}.scheduling_strategy.target"
            yield key, f"{key}={target} is not a role of this job with GPUs of its own"


def _ref(look: Look) -> Iterator[Fault]:
    """trainer/rl_trainer.py, PPOTrainer.__init__."""
    key = "actor.kl_ctl"
    if (
        look.has("rollout")
        and look.number(key) > 0
        and not look.config.is_section("ref")
    ):
        yield key, f"{key} = {look(key)} has no effect: there is no ref"


def _teacher(look: Look) -> Iterator[Fault]:
    """trainer/ppo/actor.py, grpo_loss_fn: what the teacher's log-probabilities do."""
    if not look.has("teacher"):
        return
    key = "teacher.distill_loss_weight"
    if look(key) == 0:
        yield key, f"{key} = 0: the teacher is run and has no effect"
    if look("teacher.path") == look("actor.path"):
        yield (
            "teacher.path",
            "teacher.path is the student: it would be distilled from itself",
        )


def _filtered(look: Look) -> Iterator[Fault]:
    """api/cli_args.py, PPOActorConfig.__post_init__."""
    section = "actor.rejection_sampling"
    has_some = look.config.is_section(section)
    if has_some and not look.is_on("actor.use_decoupled_loss"):
        key = "actor.use_decoupled_loss"
        yield key, f"{section} has no effect without {key}=true"


def _groups(look: Look) -> Iterator[Fault]:
    """api/cli_args.py, NormConfig: a group is the samples of one prompt."""
    section = "actor.reward_norm"
    if not look.config.is_section(section) or not look.has("rollout"):
        return
    levels = [look(f"{section}.{name}_level") for name in ("mean", "std")]
    size, samples = look(f"{section}.group_size"), look("gconfig.n_samples")
    if "group" in levels and size != samples:
        key = f"{section}.group_size"
        line = f"{key} = {size}, and a prompt has gconfig.n_samples = {samples} samples"
        yield key, line


def _lengths(look: Look) -> Iterator[Fault]:
    """What is requested must fit into the engine."""
    if not look.has("rollout"):
        return
    is_vllm = look.backend("rollout").kind == "vllm"
    key = "vllm.max_model_len" if is_vllm else "sglang.context_length"
    response = look.whole("gconfig.max_new_tokens")
    prompt, most = look("train_dataset.max_length"), look(key)
    if type(most) is int and type(prompt) is int and prompt + response > most:
        line = f"prompts of {prompt} and responses of {response} tokens are longer than"
        yield key, f"{line} {key} = {most}"


def _launched(look: Look) -> Iterator[Fault]:
    """api/alloc_mode.py, _AllocationMode; infra/launcher/local.py, local_main."""
    key = "allocation_mode"
    if look.launcher != "spmd":
        return
    said = str(look(key) or "")
    parts = backends.allocation(said) if said else None
    kinds = [part.kind in ENGINES for part in parts or ()]
    if parts is None:
        example = "expected for example sglang:d4t2+fsdp:d8, each part with its backend"
        yield key, f"{key}={said} is none, and the older launchers need it; {example}"
    elif len(parts) > 2 or len(set(kinds)) < len(kinds):
        line = f"{key}={said}: the older launchers take one engine and one trainer"
        yield key, line
    elif False in kinds and look.has("actor"):
        started, own = parts[kinds.index(False)].gpus, look.backend("actor").gpus
        if started != own:
            line = f"{key}={said} starts {started} processes of the trainer, and "
            yield key, f"{line}actor.backend={look('actor.backend')} needs {own}"


def _served(look: Look) -> Iterator[Fault]:
    """trainer/rl_trainer.py: weights are sent to rollout.backend's engine."""
    if look.launcher != "spmd" or not look.has("rollout"):
        return
    own = backends.read(str(look("rollout.backend")))
    if own is not None and own != look.backend("rollout"):
        line = f"rollout.backend={look('rollout.backend')} is not what the launcher"
        yield "rollout.backend", f"{line} starts: {look('allocation_mode')}"


def _allocation(look: Look) -> Iterator[Fault]:
    """cli_args.py, BaseExperimentConfig: deprecated, read in infra/launcher/ alone."""
    key = "allocation_mode"
    if look.launcher == "script" and (said := look(key)):
        line = f"{key}={said} counts only for AReaL's older launchers; what is started"
        yield key, f"{line} here reads the backend of each role, as rollout.backend"


Rule = Callable[[Look], Iterator[Fault]]
REFUSED: tuple[Rule, ...] = (
    _backends,
    _offload,
    _engine,
    _update,
    _norms,
    _rejection,
    _sapo,
    _models,
    _specs,
    _kinds,
    _online,
    _scheduler,
    _shards,
    _launched,
)
DOUBTFUL: tuple[Rule, ...] = (
    _served,
    _cluster,
    _targets,
    _ref,
    _teacher,
    _filtered,
    _groups,
    _lengths,
    _allocation,
)
