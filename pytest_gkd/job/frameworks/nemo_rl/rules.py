"""NeMo-RL's own rules on a configuration, each with the source that it is from.

Read in 0.6.0, 0.7.0 and the main branch at 7ea279ab, which agree on them; paths are
below nemo_rl/.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pytest_gkd.job import looking, model_files
from pytest_gkd.job.findings import Finding
from pytest_gkd.job.looking import Fault, NotCertainError
from pytest_gkd.job.omegaconf import Config

GENERATION = "policy.generation"
VLLM = f"{GENERATION}.vllm_cfg"
OPD = "on_policy_distillation"
PRECISIONS = ("float32", "bfloat16", "float16")
# The sizes by which a teacher with its own nodes is split.
SPLIT_BY = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
)
SKIP_TP_CHECK = "NRL_IGNORE_TP_ACCURACY_CHECK"
SKIP_TOKENIZER_CHECK = "NRL_SKIP_DISTILLATION_TOKENIZER_CHECK"


# These cut a message to four tokens and do not train on it (data/processors.py); None
# is math_hf_data_processor.
MASKING = frozenset(
    {None, "default", "math_data_processor", "math_hf_data_processor"}
    | {"vlm_hf_data_processor", "sft_processor"}
)


class Look(looking.Look):
    """The certain values of a configuration of NeMo-RL."""

    def backend(self, section: str) -> str:
        """Which of the two backends trains a section's model."""
        is_megatron = self.is_on(f"{section}.megatron_cfg.enabled")
        return "megatron" if is_megatron else "dtensor"

    def parallel(self, section: str) -> tuple[int, int, int]:
        """The sizes by which a section's model is split: tensor, pipeline, context."""
        if self.backend(section) == "megatron":
            start = f"{section}.megatron_cfg"
            names = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
            tensor, pipeline = (self.size(f"{start}.{name}") for name in names)
        else:
            start, pipeline = f"{section}.dtensor_cfg", 1
            tensor = self.size(f"{start}.tensor_parallel_size", 1)
        return tensor, pipeline, self.size(f"{start}.context_parallel_size", 1)

    def is_set(self, variable: str) -> bool:
        """Whether an environment variable is set, as far as the script says."""
        word = self.config.environment.get(variable)
        return word is not None and word.text.value != ""


class Gpus(NamedTuple):
    """Numbers of GPUs by role, None for a role that the job does not have."""

    trainer: int | None
    rollout: int | None
    teacher: int | None
    total: int


def gpus(look: Look) -> Gpus:
    """How a cluster is divided (algorithms/grpo.py and distillation.py, setup)."""
    nodes, each = look.whole("cluster.num_nodes"), look.whole("cluster.gpus_per_node")
    total = nodes * each
    if not look.config.has(GENERATION):
        return Gpus(total, None, None, total)
    apart = _teachers_apart(look)
    teacher = sum(n * g for _, n, g, _ in apart) if apart else None
    left = nodes - sum(n for _, n, _, _ in apart)
    reward_nodes, reward = _reward_model(look)
    if nodes > 1:
        left -= reward_nodes
        reward = 0
    if look.is_on(f"{GENERATION}.colocated.enabled"):
        trainer = rollout = left * (each - reward)
    else:
        start = f"{GENERATION}.colocated.resources"
        rollout = look.whole(f"{start}.gpus_per_node")
        if left == 1:
            trainer = each - rollout - reward
        else:
            rollout_nodes = look.whole(f"{start}.num_nodes")
            rollout, trainer = rollout * rollout_nodes, (left - rollout_nodes) * each
    if trainer <= 0:
        raise NotCertainError(frozenset({"the trainer is left without a GPU"}))
    if look.config.has("teacher.model_name") or look.config.has("teachers"):
        teacher = trainer
    return Gpus(trainer, rollout, teacher, total)


def _teachers_apart(look: Look) -> list[tuple[str, int, int, int]]:
    """Teachers with their own nodes: name, nodes, GPUs per node, their split.

    models/policy/teacher_worker_group.py, create_teacher_configs_from_opd_config.
    """
    start = f"{OPD}.non_colocated_teachers"
    if not (look.is_on(f"{OPD}.enabled") and look.is_on(f"{start}.enabled")):
        return []
    models = look.mapping(f"{OPD}.teacher_model_by_agent_name")
    is_shared = look(f"{OPD}.deduplicate_shared_teacher_checkpoints", True)
    defaults = {"num_nodes": 1, "gpus_per_node": 8, **dict.fromkeys(SPLIT_BY, 1)}
    defaults |= look.mapping(f"{start}.default_teacher_cfg")
    found, seen = [], set()
    for alias, model in models.items():
        if is_shared and str(model) in seen:
            continue
        seen.add(str(model))
        own = defaults | look.mapping(f"{start}.teacher_overrides.{alias}")
        sizes = [own[key] for key in ("num_nodes", "gpus_per_node", *SPLIT_BY)]
        if not all(type(size) is int and size > 0 for size in sizes):
            raise NotCertainError(frozenset({start}))
        nodes, each, *split = sizes
        found.append((alias, nodes, each, math.prod(split)))
    return found


def _reward_model(look: Look) -> tuple[int, int]:
    """Nodes and GPUs per node of a reward model that is an environment."""
    keys = ("data.train.env_name", "data.validation.env_name", "data.default.env_name")
    if "reward_model" not in [look(key) for key in keys]:
        return 0, 0
    start = "env.reward_model.resources"
    return look.whole(f"{start}.num_nodes"), look.whole(f"{start}.gpus_per_node")


# -- values ------------------------------------------------------------------------


def placement(look: Look) -> str | None:
    """Whether the rollout shares the trainer's GPUs."""
    if not look.config.has(f"{GENERATION}.colocated"):
        return None
    return "colocated" if look.is_on(f"{GENERATION}.colocated.enabled") else "split"


def lora_rank(look: Look) -> int:
    """The rank of a LoRA, 0 without one."""
    if look.backend("policy") == "megatron":
        start = "policy.megatron_cfg.peft"
    else:
        start = "policy.dtensor_cfg.lora_cfg"
    return look.whole(f"{start}.dim") if look.is_on(f"{start}.enabled") else 0


def teachers(look: Look) -> Any:
    """The teachers of a job with several, or of one in ``on_policy_distillation``."""
    several = look("teachers")
    if isinstance(several, list):
        models = [one.get("model_name") for one in several if isinstance(one, dict)]
    elif look.is_on(f"{OPD}.enabled"):
        models = list(look.mapping(f"{OPD}.teacher_model_by_agent_name").values())
    else:
        return None
    models = [one for at, one in enumerate(models) if one not in models[:at]]
    return models[0] if len(models) == 1 else models


def teacher_tensor_parallel(look: Look) -> int | None:
    """Over how many GPUs each matrix of the teacher is split."""
    if look.config.has("teacher.model_name"):
        return look.parallel("teacher")[0]
    if not _teachers_apart(look):
        return None
    start = f"{OPD}.non_colocated_teachers.default_teacher_cfg"
    return look.whole(f"{start}.tensor_model_parallel_size", 1)


def load_format(look: Look) -> str | None:
    """models/generation/__init__.py, configure_generation_config: always set."""
    if look(f"{GENERATION}.backend") not in ("vllm", "dynamo"):
        return None
    method = look(f"{GENERATION}.vllm_kwargs.speculative_config.method", "mtp")
    sparse = ("vllm_s3_sparse", "vllm_zmq_sparse")
    needs_weights = method not in ("mtp", "deepseek_mtp")
    is_sparse = look(f"{GENERATION}.refit_transport") in sparse
    return "auto" if needs_weights or is_sparse else "dummy"


def train_files(look: Look) -> list[Any] | None:
    """The datasets of a job that trains on several."""
    several = look("data.train")
    if not isinstance(several, list):
        return None
    found = [one for one in several if isinstance(one, dict)]
    return [one.get("data_path") or one.get("dataset_name") for one in found]


def truncation(look: Look) -> str | None:
    """What happens to a prompt that is too long, if all data is treated alike."""
    found = look("data.train")
    several = found if isinstance(found, list) else [found]
    own = look("data.default.processor")
    said = {o.get("processor") or own for o in several if isinstance(o, dict)}
    return "mask" if said and said <= MASKING else None


# -- rules -------------------------------------------------------------------------


def judged(config: Config, algorithm: str, *, is_script: bool) -> Iterator[Finding]:
    """What NeMo-RL refuses in a configuration whose values it has read.

    Only a script (``is_script``) determines the environment.
    """
    if not config.has("policy"):
        return
    by_environment = "error" if is_script else "warning"
    levels = ("error", REFUSED), (by_environment, UNLESS_SET), ("warning", DOUBTFUL)
    for level, rules in levels:
        with_it = [partial(_of, rule, algorithm) for rule in rules]
        yield from looking.broken(config, with_it, level, Look)


def _of(rule: Rule, algorithm: str, look: Look) -> Iterator[Fault]:
    return rule(look, algorithm)


def _models(look: Look) -> list[str]:
    return [s for s in ("policy", "teacher") if look.config.has(f"{s}.model_name")]


def _sizes(look: Look, _: str) -> Iterator[Fault]:
    """Sizes that these rules' sources divide by."""
    keys = [f"cluster.{name}" for name in ("num_nodes", "gpus_per_node")]
    keys.append("policy.train_global_batch_size")
    keys += [_parallel_key(look, one) for one in _models(look)]
    if look.config.has(VLLM):
        keys.append(f"{VLLM}.tensor_parallel_size")
    for key in keys:
        value = look(key)
        if type(value) is int and value < 1:
            yield key, f"{key} = {value} must be at least 1"


def _backend(look: Look, _: str) -> Iterator[Fault]:
    """models/policy/lm_policy.py, Policy.__init__."""
    for one in _models(look):
        keys = [f"{one}.{name}_cfg.enabled" for name in ("dtensor", "megatron")]
        on = [look.is_on(key) for key in keys]
        if all(on):
            yield keys[1], f"{keys[0]} and {keys[1]} are both true: one must be false"
        if not any(on):
            yield keys[0], f"neither {keys[0]} nor {keys[1]} is true: one must be"


def _world(look: Look, _: str) -> Iterator[Fault]:
    """models/policy/lm_policy.py, Policy.__init__."""
    for one in _models(look):
        tensor, pipeline, context = look.parallel(one)
        split, world = tensor * pipeline * context, gpus(look).trainer
        if world and world % split:
            yield (
                _parallel_key(look, one),
                (
                    f"the {world} GPUs of the trainer cannot be divided by {one}'s "
                    "tensor * "
                    f"pipeline * context parallel size = {tensor} * {pipeline} * "
                    f"{context}"
                ),
            )


def _parallel_key(look: Look, one: str) -> str:
    if look.backend(one) == "megatron":
        return f"{one}.megatron_cfg.tensor_model_parallel_size"
    return f"{one}.dtensor_cfg.tensor_parallel_size"


def _batches(look: Look, algorithm: str) -> Iterator[Fault]:
    """distributed/batched_data_dict.py, shard_by_batch_size, and its callers."""
    key = "policy.train_global_batch_size"
    batch = look.size(key)
    tensor, pipeline, context = look.parallel("policy")
    ranks = (gpus(look).trainer or 0) // (tensor * pipeline * context)
    if (gpus(look).trainer or 0) % (tensor * pipeline * context):
        return  # already reported
    # dpo.py and rm.py train on pairs: gbs is twice the batch.
    each = 2 if algorithm in ("dpo", "rm") else 1
    if ranks and batch * each % ranks:
        yield (
            key,
            f"{key} = {batch} cannot be divided by the {ranks} data-parallel ranks",
        )
    if algorithm not in ("distillation", "grpo"):
        return
    prompts = look.whole(f"{algorithm}.num_prompts_per_step")
    samples = prompts * look.whole(f"{algorithm}.num_generations_per_prompt", 1)
    if samples % batch:
        yield (
            key,
            (
                "a step has num_prompts_per_step * num_generations_per_prompt = "
                f"{samples} "
                f"samples, which is not a multiple of {key} = {batch}"
            ),
        )


def _micro_batch(look: Look, _: str) -> Iterator[Fault]:
    """models/policy/lm_policy.py: from TP 4 on results depend on the batch size."""
    if look.is_set(SKIP_TP_CHECK) or look.is_on("loss_fn.force_on_policy_ratio"):
        return
    for one in _models(look):
        key = f"{one}.logprob_batch_size"
        train, logprob = look(f"{one}.train_micro_batch_size"), look(key)
        tensor = look.parallel(one)[0]
        if look.config.has(key) and tensor >= 4 and train != logprob:
            yield (
                key,
                (
                    f"{key} = {logprob} and {one}.train_micro_batch_size = {train} "
                    "must be "
                    f"the same with tensor parallel size {tensor}, from 4 on; "
                    f"{SKIP_TP_CHECK}=1 in the environment allows it"
                ),
            )


def _packing(look: Look, algorithm: str) -> Iterator[Fault]:
    """models/policy/lm_policy.py; models/automodel/setup.py; distillation.py, setup."""
    for one in _models(look):
        packing = f"{one}.sequence_packing.enabled"
        dynamic = f"{one}.dynamic_batching.enabled"
        tensor, pipeline, context = look.parallel(one)
        is_dtensor = look.backend(one) == "dtensor"
        is_sequence = look.is_on(f"{one}.dtensor_cfg.sequence_parallel")
        if look.is_on(dynamic) and look.is_on(packing):
            yield packing, f"{packing} and {dynamic} are both true: one must be false"
        if look.is_on(dynamic) and pipeline > 1:
            yield dynamic, f"{dynamic} needs pipeline parallel size 1; it is {pipeline}"
        if is_dtensor and look.is_on(packing) and context > 1:
            yield (
                packing,
                f"{packing} and a context parallel size of {context} cannot be "
                "combined under DTensor",
            )
        if (
            is_dtensor
            and look.is_on(packing)
            and is_sequence
            and algorithm == "distillation"
        ):
            yield (
                packing,
                f"{packing} and {one}.dtensor_cfg.sequence_parallel cannot be "
                "combined in a distillation",
            )
        if is_dtensor and is_sequence and tensor > 1 and context > 1:
            key = f"{one}.dtensor_cfg.sequence_parallel"
            yield (
                key,
                f"{key} and a context parallel size of {context} cannot be combined",
            )


def _lora(look: Look, _: str) -> Iterator[Fault]:
    """models/policy/lm_policy.py; models/automodel/setup.py."""
    start = "policy.dtensor_cfg"
    if look.backend("policy") == "megatron" or not look.is_on(
        f"{start}.lora_cfg.enabled"
    ):
        return
    if not look.is_on(f"{start}._v2"):
        yield f"{start}.lora_cfg.enabled", f"LoRA needs {start}._v2=true"
    tensor = look.whole(f"{start}.tensor_parallel_size")
    if tensor > 1 and look.is_on(f"{start}.lora_cfg.use_triton"):
        key = f"{start}.lora_cfg.use_triton"
        yield (
            key,
            f"{key} must be false with a tensor parallel size above 1; it is {tensor}",
        )


def _offload(look: Look, _: str) -> Iterator[Fault]:
    """models/automodel/setup.py."""
    key = "policy.dtensor_cfg.cpu_offload"
    is_automodel = look.is_on("policy.dtensor_cfg._v2")
    if (
        look.backend("policy") == "dtensor"
        and is_automodel
        and look.is_on(key)
        and gpus(look).trainer == 1
    ):
        yield key, f"{key} does not work on a single GPU"


def _precision(look: Look, _: str) -> Iterator[Fault]:
    """models/automodel/setup.py, STRING_TO_DTYPE."""
    for one in _models(look):
        key = f"{one}.precision"
        value = look(key)
        if look.backend(one) == "dtensor" and value not in PRECISIONS:
            yield key, f"{key}={value}: known values are {', '.join(PRECISIONS)}"


def _resources(look: Look, _: str) -> Iterator[Fault]:
    """algorithms/grpo.py and distillation.py, setup: which role gets which nodes."""
    if not look.config.has(GENERATION) or look.is_on(f"{GENERATION}.colocated.enabled"):
        return
    nodes, each = look.whole("cluster.num_nodes"), look.whole("cluster.gpus_per_node")
    nodes -= sum(n for _, n, _, _ in _teachers_apart(look))
    reward_nodes, reward = _reward_model(look)
    start = f"{GENERATION}.colocated.resources"
    own_gpus, own_nodes = look(f"{start}.gpus_per_node"), look(f"{start}.num_nodes")
    if not {type(own_gpus), type(own_nodes)} <= {int, type(None)}:
        return
    apart = "the rollout has GPUs of its own (colocated.enabled is false)"
    if look.whole("cluster.num_nodes") > 1:
        nodes, reward = nodes - reward_nodes, 0
    if nodes == 1:
        if not own_gpus or own_gpus + reward >= each:
            yield (
                f"{start}.gpus_per_node",
                (
                    f"{apart}: {start}.gpus_per_node must be at least 1 and leave "
                    "some of "
                    f"the {each} GPUs to the trainer; it is {own_gpus}"
                ),
            )
        if own_nodes not in (None, 1):
            yield (
                f"{start}.num_nodes",
                f"{apart} on the one node: {start}.num_nodes must be 1 or null; it "
                f"is {own_nodes}",
            )
        return
    if own_gpus != each:
        yield (
            f"{start}.gpus_per_node",
            (
                f"{apart} on nodes of its own: {start}.gpus_per_node must be that "
                "of the "
                f"cluster, {each}; it is {own_gpus}"
            ),
        )
    if not own_nodes or own_nodes >= nodes:
        yield (
            f"{start}.num_nodes",
            (
                f"{apart}: {start}.num_nodes must be at least 1 and leave some of the "
                f"{nodes} nodes to the trainer; it is {own_nodes}"
            ),
        )


def _teacher_nodes(look: Look, _: str) -> Iterator[Fault]:
    """algorithms/grpo.py, setup; models/policy/teacher_worker_group.py."""
    each, nodes = look.whole("cluster.gpus_per_node"), look.whole("cluster.num_nodes")
    apart = _teachers_apart(look)
    key = f"{OPD}.non_colocated_teachers.enabled"
    if apart and sum(n for _, n, _, _ in apart) >= nodes:
        yield key, f"the teachers take all {nodes} nodes: none is left to the policy"
    if apart and look.backend("policy") == "dtensor":
        own_key = "policy.dtensor_cfg.enabled"
        yield own_key, f"{own_key} must be false: teachers with nodes need Megatron"
    for alias, own_nodes, own, split in apart:
        if own > each:
            yield (
                key,
                f"the teacher {alias} needs {own} GPUs per node; the cluster has "
                f"{each}",
            )
        elif own_nodes * own % split:
            yield (
                key,
                f"the {own_nodes * own} GPUs of the teacher {alias} cannot be "
                f"divided by its tensor * pipeline * context parallel size = {split}",
            )


def _vllm(look: Look, _: str) -> Iterator[Fault]:
    """models/generation/vllm/vllm_generation.py, VllmGeneration.__init__."""
    if look(f"{GENERATION}.backend") != "vllm":
        return
    keys = [f"{VLLM}.{name}_parallel_size" for name in ("tensor", "pipeline", "expert")]
    tensor, pipeline, expert = (look.size(key, 1) for key in keys)
    rollout, is_async = gpus(look).rollout, look.is_on(f"{VLLM}.async_engine")
    if rollout and rollout % (tensor * pipeline):
        yield (
            keys[0],
            (
                f"the {rollout} GPUs of the rollout cannot be divided by vLLM's "
                "tensor * "
                f"pipeline parallel size = {tensor} * {pipeline}"
            ),
        )
    if pipeline > 1 and not is_async:
        yield keys[1], f"{keys[1]} = {pipeline} needs {VLLM}.async_engine=true"
    if expert > 1 and expert % tensor:
        yield (
            keys[2],
            f"{keys[2]} = {expert} must be a multiple of {keys[0]} = {tensor}",
        )
    elif expert > 1 and expert != tensor and is_async:
        yield (
            keys[2],
            f"{keys[2]} = {expert} above {keys[0]} = {tensor} needs "
            f"{VLLM}.async_engine=false",
        )
    top_p, top_k = look(f"{GENERATION}.top_p", 1.0), look(f"{GENERATION}.top_k")
    if isinstance(top_p, int | float) and not 0 < top_p <= 1:
        yield (
            f"{GENERATION}.top_p",
            f"{GENERATION}.top_p = {top_p} must be above 0 and at most 1",
        )
    if isinstance(top_k, int) and top_k != -1 and top_k < 1:
        yield (
            f"{GENERATION}.top_k",
            f"{GENERATION}.top_k = {top_k} must be null, -1, or at least 1",
        )


def _loss(look: Look, algorithm: str) -> Iterator[Fault]:
    """algorithms/loss/loss_functions.py, DistillationLossFn."""
    if algorithm != "distillation" or look.config.has("teachers"):
        return
    kind, weight = (
        look("loss_fn.kl_type", "mixed"),
        look("loss_fn.mixed_kl_weight", 0.5),
    )
    if kind not in ("forward", "reverse", "mixed"):
        yield (
            "loss_fn.kl_type",
            f"loss_fn.kl_type={kind}: known values are forward, reverse and mixed",
        )
    if isinstance(weight, int | float) and not 0 <= weight <= 1:
        yield (
            "loss_fn.mixed_kl_weight",
            f"loss_fn.mixed_kl_weight = {weight} must be between 0 and 1",
        )


def _engine(look: Look, algorithm: str) -> Iterator[Fault]:
    """algorithms/distillation.py, setup: what it generates with."""
    if algorithm != "distillation" or look.config.has("teachers"):
        return
    backend, key = look(f"{GENERATION}.backend"), f"{GENERATION}.backend"
    if look(GENERATION) is None:
        yield GENERATION, f"a distillation needs {GENERATION}"
    elif backend == "megatron" and not look.is_on(f"{GENERATION}.colocated.enabled"):
        yield key, f"{key}=megatron needs {GENERATION}.colocated.enabled=true"


def _validation(look: Look, algorithm: str) -> Iterator[Fault]:
    """algorithms/distillation.py and grpo.py, setup; data/utils.py."""
    if algorithm not in ("distillation", "grpo") or look.config.has("teachers"):
        return
    keys = [f"{algorithm}.{name}" for name in ("val_at_start", "val_at_end")]
    is_wanted = look(f"{algorithm}.val_period", 0) or any(map(look.is_on, keys))
    train = look("data.train")
    if (
        not is_wanted
        or not isinstance(train, dict)
        or look("data.validation") is not None
    ):
        return
    if not train.get("split_validation_size") and train.get("dataset_name") in SPLIT:
        yield (
            "data.validation",
            (
                "there is nothing to validate on: give data.validation or "
                f"data.train.split_validation_size, or set {algorithm}.val_period=0"
            ),
        )


# Datasets that have a validation part only with split_validation_size (data/datasets/).
SPLIT = ("DeepScaler", "DAPOMath17K", "ResponseDataset")


def _grpo(look: Look, algorithm: str) -> Iterator[Fault]:
    """algorithms/grpo.py, setup and async_grpo_train."""
    if algorithm != "grpo":
        return
    if (
        not look.is_on("grpo.use_dynamic_sampling")
        and look("grpo.batch_multiplier", 1) != 1
    ):
        yield (
            "grpo.batch_multiplier",
            "grpo.batch_multiplier needs grpo.use_dynamic_sampling=true",
        )
    if look.is_on("grpo.async_grpo.enabled"):
        key = "loss_fn.use_importance_sampling_correction"
        if not look.is_on(key):
            yield key, f"grpo.async_grpo.enabled needs {key}=true"
        is_vllm = look(f"{GENERATION}.backend") == "vllm"
        if is_vllm and not look.is_on(f"{VLLM}.async_engine"):
            yield (
                f"{VLLM}.async_engine",
                f"grpo.async_grpo.enabled needs {VLLM}.async_engine=true",
            )
    if look.is_on("loss_fn.force_on_policy_ratio"):
        names = ("num_prompts_per_step", "num_generations_per_prompt")
        prompts, samples = (look.whole(f"grpo.{name}") for name in names)
        batch = look.whole("policy.train_global_batch_size")
        if prompts * samples != batch:
            yield (
                "policy.train_global_batch_size",
                (
                    "loss_fn.force_on_policy_ratio needs "
                    "policy.train_global_batch_size = "
                    "num_prompts_per_step * num_generations_per_prompt = "
                    f"{prompts * samples}"
                    f"; it is {batch}"
                ),
            )


def _padding(look: Look, _: str) -> Iterator[Fault]:
    """models/megatron/data.py, _get_pack_sequence_parameters_for_megatron."""
    for one in _models(look):
        key, start = f"{one}.make_sequence_length_divisible_by", f"{one}.megatron_cfg"
        if look.backend(one) != "megatron" or not look.is_on(
            f"{one}.sequence_packing.enabled"
        ):
            continue
        tensor, _pipeline, context = look.parallel(one)
        least = context * 2 if context > 1 else 1
        if tensor > 1 and look.is_on(f"{start}.sequence_parallel"):
            least *= tensor
        if look.whole(key) % least:
            yield (
                key,
                (
                    f"{key} = {look(key)} must be a multiple of {least}: twice the "
                    "context "
                    "parallel size, times the tensor parallel size with "
                    "sequence_parallel"
                ),
            )


def _vocabulary(look: Look, algorithm: str) -> Iterator[Fault]:
    """algorithms/distillation.py, check_vocab_equality; for models on this machine."""
    if algorithm != "distillation" or look.is_set(SKIP_TOKENIZER_CHECK):
        return
    models = [look(f"{one}.model_name") for one in ("policy", "teacher")]
    sizes = list(map(model_files.vocabulary, models))
    if None not in sizes and sizes[0] != sizes[1]:
        yield (
            "teacher.model_name",
            (
                f"the vocabularies of student and teacher have {sizes[0]} and "
                f"{sizes[1]} "
                "entries by their config.json; they must be the same"
            ),
        )


def _lengths(look: Look, _: str) -> Iterator[Fault]:
    """What is generated is trained on, and scored by the teacher, at full length."""
    key = "policy.max_total_sequence_length"
    longest, engine = look.whole(key), look(f"{VLLM}.max_model_len")
    if isinstance(engine, int) and engine > longest:
        yield (
            f"{VLLM}.max_model_len",
            (
                f"vLLM may generate up to {VLLM}.max_model_len = {engine} tokens, "
                "and the "
                f"trainer takes {key} = {longest}"
            ),
        )
    if look.config.has("teacher.model_name"):
        other = look.whole("teacher.max_total_sequence_length")
        if other < longest:
            yield (
                "teacher.max_total_sequence_length",
                (
                    f"the teacher takes {other} tokens, and the student's sequences "
                    "have up "
                    f"to {key} = {longest}"
                ),
            )


def _overwritten(look: Look, _: str) -> Iterator[Fault]:
    """models/generation/__init__.py, configure_generation_config."""
    key, used = f"{VLLM}.load_format", load_format(look)
    if used and look.config.has(key) and look(key) != used:
        yield key, f"{key}={look(key)} is overwritten: NeMo-RL sets it to {used}"


def _not_there(look: Look, _: str) -> Iterator[Fault]:
    for key in ("policy.model_name", "teacher.model_name", "data.train.data_path"):
        value = look(key)
        if (
            isinstance(value, str)
            and value.startswith("/")
            and not Path(value).exists()
        ):
            yield key, f"{key}: {value} does not exist, on this machine"


Rule = Callable[[Look, str], Iterator[Fault]]
REFUSED: tuple[Rule, ...] = (
    _sizes,
    _backend,
    _world,
    _batches,
    _packing,
    _padding,
    _lora,
    _offload,
    _precision,
    _resources,
    _teacher_nodes,
    _vllm,
    _loss,
    _engine,
    _validation,
    _grpo,
)
UNLESS_SET: tuple[Rule, ...] = (_micro_batch, _vocabulary)
DOUBTFUL: tuple[Rule, ...] = (_lengths, _overwritten, _not_there)
