"""The values of a ROLL job, by the names of gkd check."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pytest_gkd.job import looking
from pytest_gkd.job.frameworks.roll.job import (
    PPO,
    TRAINERS,
    Look,
    all_gpus,
    backward,
    nodes,
    samples,
)

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def _train(key: str) -> Callable[[Look], Any]:
    return lambda look: look(f"{look.trainer}.{key}")


def _megatron(name: str) -> Callable[[Look], Any]:
    def found(look: Look) -> Any:
        is_own = look.strategy(look.trainer).startswith("megatron")
        return look.whole_part(look.trainer, name) if is_own else None

    return found


def _fsdp(name: str, default: Any) -> Callable[[Look], Any]:
    def found(look: Look) -> Any:
        is_own = look.strategy(look.trainer).startswith("fsdp2")
        return look.part(look.trainer, name, default) if is_own else None

    return found


def _engine(vllm: str, sglang: str = "", default: Any = None) -> Callable[[Look], Any]:
    """A value of the engine's configuration; the default is ROLL's for vLLM."""

    def found(look: Look) -> Any:
        engine = _rollout_engine(look)
        names = {"vllm": (vllm, default), "sglang": (sglang, None)}
        name, other = names.get(str(engine), ("", None))
        return look.part(look.rollout, name, other) if name else None

    return found


def _rollout_engine(look: Look) -> str | None:
    return look.strategy(look.rollout) or None if look.rollout else None


def _engine_name(look: Look) -> Any:
    """The same, as a value of the job."""
    return _of_rollout("strategy_args.strategy_name")(look)


def _of_rollout(key: str) -> Callable[[Look], Any]:
    return lambda look: look(f"{look.rollout}.{key}") if look.rollout else None


def _dtype(worker: Callable[[Look], str]) -> Callable[[Look], Any]:
    def found(look: Look) -> Any:
        own = worker(look)
        said = look(f"{own}.model_args.dtype") if own else None
        return DTYPES.get(str(said), said)

    return found


def _ppo(value: Callable[[Look], Any], *roots: str) -> Callable[[Look], Any]:
    return lambda look: value(look) if look.root in (roots or PPO) else None


def _teacher(look: Look) -> Any:
    found = [look.path(worker) for worker in look.teachers()]
    return found if len(found) > 1 else next(iter(found), None)


def _only(values: Iterator[Any]) -> Any:
    """The value that all teachers share."""
    found = list(values)
    return found[0] if found and all(one == found[0] for one in found) else None


def _teacher_split(look: Look) -> Any:
    some = [w for w in look.teachers() if look.strategy(w).startswith("megatron")]
    return _only(look.whole_part(w, "tensor_model_parallel_size") for w in some)


def _kl_coef(look: Look) -> Any:
    if not look.is_ppo:
        return None
    found = (look(f"{worker}.opd_kl_coef") for worker in look.teachers())
    return _only(1.0 if one is None else one for one in found)


def _prompt_column(look: Look) -> Any:
    own = {"SFTConfig": "prompt_key", "DistillConfig": "question_key"}.get(look.root)
    if own:
        return None if "_vl_" in look.program else look(own)
    data = f"{look.trainer}.data_args"
    return look(f"{data}.messages") or look(f"{data}.prompt")


def _response(look: Look) -> Any:
    """RLVR overwrites it; an agent's is that of one turn."""
    if look.root == "RLVRConfig":
        return look.longest() - look.whole("prompt_length")
    for owner in (look.rollout, "train_env_manager"):
        key = f"{owner}.generating_args"
        if owner and look.config.is_section(key):
            return look(f"{key}.max_new_tokens")
    return None


def _batch(look: Look) -> int | None:
    if look.is_ppo:
        return look.whole("rollout_batch_size")
    if look.root not in TRAINERS:
        return None
    return backward(look) * look.replicas(look.trainer)


def _load_format(look: Look) -> Any:
    """distributed/strategy/vllm_strategy.py: an adapter needs the base's weights."""
    engine, has_lora = _rollout_engine(look), look.is_ppo and look.has_lora()
    if engine != "vllm":
        return look.part(look.rollout, "load_format") if engine else None
    return "auto" if has_lora else look.part(look.rollout, "load_format", "dummy")


def _tensor(look: Look) -> Any:
    engine = _rollout_engine(look)
    if engine is None:
        return None
    usual = look.per_worker(look.rollout) if engine == "sglang" else 1
    return look.whole_part(look.rollout, "tensor_parallel_size", usual)


def _pipeline(look: Look) -> Any:
    if _rollout_engine(look) is None:
        return None
    return look.whole_part(look.rollout, "pipeline_parallel_size")


def _trainer_strategy(look: Look) -> str | None:
    name = str(look(f"{look.trainer}.strategy_args.strategy_name", ""))
    return {"megatron_train": "megatron", "fsdp2_train": "fsdp"}.get(name)


def _fsdp_version(look: Look) -> int | None:
    return 2 if look.strategy(look.trainer).startswith("fsdp2") else None


def _context(look: Look) -> Any:
    if _fsdp_version(look):
        return look.size(f"{look.trainer}.model_args.ulysses_size")
    return _megatron("context_parallel_size")(look)


def _recompute(look: Look) -> bool:
    if _fsdp_version(look):
        return not look.is_on(
            f"{look.trainer}.model_args.disable_gradient_checkpointing"
        )
    return look.part(look.trainer, "recompute_granularity") is not None


def _max_tokens(look: Look) -> Any:
    start = look.trainer
    if not look.quietly(f"{start}.use_dynamic_batching_in_train"):
        return None
    return look.whole(f"{start}.max_tokens_per_microbatch_in_train")


def _lora_rank(look: Look) -> int:
    return look.whole(f"{look.trainer}.model_args.lora_rank") if look.has_lora() else 0


def _placement(look: Look) -> str | None:
    if not look.rollout:
        return None
    ours, theirs = set(look.gpus(look.trainer)), set(look.gpus(look.rollout))
    return "colocated" if ours & theirs else "split"


def _advantage(look: Look) -> Any:
    return "reinforce" if look.is_pure else look("adv_estimator")


def _count(worker: Callable[[Look], str]) -> Callable[[Look], Any]:
    return lambda look: len(look.gpus(worker(look))) if worker(look) else None


def _teacher_gpus(look: Look) -> int | None:
    some = look.teachers()
    return len({n for worker in some for n in look.gpus(worker)}) if some else None


DERIVED: looking.Derived[Look] = {
    "student": (
        lambda look: look.path(look.trainer),
        "model_name_or_path, or pretrain",
    ),
    "teacher": (_teacher, "model_name_or_path of each teacher"),
    "train_files": (_train("data_args.file_name"), "data_args.file_name"),
    "prompt_column": (_prompt_column, "data_args.messages, or prompt"),
    "max_prompt_length": (
        _ppo(lambda look: look.whole("prompt_length"), "RLVRConfig"),
        "prompt_length",
    ),
    # rlvr_pipeline.py, preprocess_dataset; rlvr_vlm_pipeline.py, process_new_prompt
    "truncation": (
        lambda look: "drop" if look.root == "RLVRConfig" else None,
        "its only way in RLVR",
    ),
    "max_response_length": (_response, "sequence_length - prompt_length"),
    "max_length": (Look.longest, "response_length + prompt_length"),
    "max_model_len": (_engine("max_model_len", "context_length"), "strategy_config"),
    "train_batch_size": (_batch, "samples of an update on a rank * ranks"),
    "per_device_train_batch_size": (
        _train("training_args.per_device_train_batch_size"),
        "training_args",
    ),
    "gradient_accumulation_steps": (
        _train("training_args.gradient_accumulation_steps"),
        "training_args",
    ),
    "samples_per_prompt": (samples, "num_return_sequences_in_group, or group_size"),
    "use_dynamic_bsz": (_train("use_dynamic_batching_in_train"), "of the trainer"),
    "sequence_packing": (_train("use_sequence_packing"), "of the trainer"),
    "max_tokens_per_gpu": (_max_tokens, "max_tokens_per_microbatch_in_train"),
    "loss": (_ppo(lambda look: look("kd_objective"), "DistillConfig"), "kd_objective"),
    "loss_topk": (
        _ppo(lambda look: look("logits_topk"), "DistillConfig"),
        "logits_topk",
    ),
    "loss_policy_gradient": (
        lambda look: True if look.is_ppo and look.teachers() else None,
        "the teacher's KL is the reward",
    ),
    "opd_kl_coef": (_kl_coef, "1.0 without opd_kl_coef"),
    "advantage_estimator": (_ppo(_advantage), "adv_estimator, reinforce in pure OPD"),
    "temperature": (_of_rollout("generating_args.temperature"), "generating_args"),
    "learning_rate": (_train("training_args.learning_rate"), "training_args"),
    "lora_rank": (_lora_rank, "0 without lora_target"),
    "trainer_strategy": (_trainer_strategy, "strategy_name"),
    "train_dtype": (_dtype(lambda look: look.trainer), "model_args.dtype"),
    "fsdp_version": (_fsdp_version, "2 with fsdp2_train"),
    "fsdp_size": (_fsdp("fsdp_size", 1), "strategy_config"),
    "offload_policy": (_fsdp("offload_policy", False), "strategy_config"),
    "train_tensor_parallel_size": (
        _megatron("tensor_model_parallel_size"),
        "strategy_config",
    ),
    "train_pipeline_parallel_size": (
        _megatron("pipeline_model_parallel_size"),
        "strategy_config",
    ),
    "train_expert_parallel_size": (
        _megatron("expert_model_parallel_size"),
        "strategy_config",
    ),
    "context_parallel_size": (_context, "context_parallel_size, or ulysses_size"),
    "recompute": (_recompute, "recompute_granularity, or gradient checkpointing"),
    "rollout_engine": (_engine_name, "strategy_name"),
    "dtype": (_dtype(lambda look: look.rollout), "model_args.dtype"),
    "load_format": (_load_format, "dummy without load_format, auto with a LoRA"),
    "gpu_memory_utilization": (
        _engine("gpu_memory_utilization", "mem_fraction_static"),
        "strategy_config",
    ),
    "tensor_parallel_size": (_tensor, "strategy_config, or num_gpus_per_worker"),
    "pipeline_parallel_size": (_pipeline, "strategy_config"),
    "max_num_seqs": (
        _engine("max_num_seqs", "max_running_requests"),
        "strategy_config",
    ),
    "max_num_batched_tokens": (
        _engine("max_num_batched_tokens", default=8192),
        "strategy_config",
    ),
    "enforce_eager": (
        _engine("enforce_eager", "disable_cuda_graph", default=False),
        "strategy_config",
    ),
    "sync_bucket_megabytes": (
        _ppo(lambda look: look("model_update_buffer_size_mb")),
        "model_update_buffer_size_mb",
    ),
    "teacher_tensor_parallel_size": (_teacher_split, "tensor_model_parallel_size"),
    "nodes": (nodes, "the highest of device_mapping / num_gpus_per_node"),
    "gpus_per_node": (lambda look: look("num_gpus_per_node"), "num_gpus_per_node"),
    "trainer_gpus": (_count(lambda look: look.trainer), "device_mapping"),
    "rollout_gpus": (_count(lambda look: look.rollout), "device_mapping"),
    "teacher_gpus": (_teacher_gpus, "device_mapping"),
    "total_gpus": (all_gpus, "the highest of device_mapping + 1"),
    "placement": (_placement, "device_mapping of trainer and rollout"),
}
