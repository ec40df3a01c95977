"""The parts of a verl job, for its memory plan."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from pytest_gkd.job.beside_memory import Beside
from pytest_gkd.job.engine_memory import Engine, Parts
from pytest_gkd.job.findings import CheckError
from pytest_gkd.job.fitting import Recipe, number
from pytest_gkd.job.frameworks.reading import names
from pytest_gkd.job.frameworks.verl import megatron_plan
from pytest_gkd.job.frameworks.verl.rules import TEACHERS
from pytest_gkd.job.megatron_memory import Megatron
from pytest_gkd.job.memory import Job
from pytest_gkd.job.models import Model
from pytest_gkd.job.overrides import Job as Settings
from pytest_gkd.job.sources import files
from pytest_gkd.job.training_memory import Trainer

# The dtype of the trainer's weights, by verl's names.
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
FSDP = ("fsdp", "fsdp2")
TEMPERATURE = "actor_rollout_ref.rollout.temperature"
# Settings of FSDP whose effect on the memory is unknown, with the values that have
# none, by the keys of the SFT programs.
UNKNOWN: dict[str, tuple[str, tuple[Any, ...]]] = {
    "engine.mixed_precision.param_dtype": ("computing in that dtype", ("bf16", "fp16")),
    "engine.mixed_precision.reduce_dtype": ("reducing in that dtype", ("fp32",)),
    "engine.reshard_after_forward": ("FSDP that keeps what it gathers", (True,)),
    "engine.qat.enable": ("quantization-aware training", (False,)),
    "optim.optimizer": ("that optimizer", ("AdamW",)),
    "optim.optimizer_impl": ("that optimizer", ("torch.optim",)),
    "optim.override_optimizer_config": ("that optimizer", ({},)),
    "model.use_liger": ("Liger's kernels", (False,)),
    "model.mtp.enable": ("layers that predict more", (False,)),
    "model.enable_activation_offload": ("offloaded activations", (False,)),
    "model.tiled_mlp.enabled": ("a tiled MLP", (False,)),
}
# The same of main_ppo alone.
ACTOR = megatron_plan.ACTOR
PLACES = {
    "engine": f"{ACTOR}.fsdp_config",
    "optim": f"{ACTOR}.optim",
    "model": "actor_rollout_ref.model",
}
OF_PPO: dict[str, tuple[str, tuple[Any, ...]]] = {
    f"{ACTOR}.entropy_coeff": ("the entropy's gradient", (0,)),
    f"{ACTOR}.calculate_sum_pi_squared": ("the sum of squares", (False,)),
    f"{ACTOR}.qat.enable": ("quantization-aware training", (False,)),
    **megatron_plan.ROLLOUTS,
}
# Overrides of config.json that change no size.
HARMLESS_OVERRIDES = (
    "attn_implementation",
    "attention_dropout",
    "rope",
    "max_position",
)
Values = Mapping[str, Any]


def recipe(settings: Settings) -> Recipe:
    """How its plan is made, with verl's keys for what can be changed."""
    own = names("verl") | names("verl-memory")
    strategy = settings.find(f"{ACTOR}.strategy").value
    is_megatron = strategy == "megatron"
    if is_megatron:
        own |= names("verl-megatron")
    keys = {}
    for name, key in own.items():
        keys[name] = tuple(_of_teachers(key, settings)) if "*" in key else (key,)
    if not is_megatron:
        facts = {"temperature": settings.find(TEMPERATURE).value}
        if strategy in FSDP:
            facts |= doubt(settings, PLACES, OF_PPO)
        return Recipe(job, keys, facts)
    keys["recompute"] = megatron_plan.RECOMPUTE
    return Recipe(job, keys, megatron_plan.facts(settings))


def doubt(
    settings: Settings,
    places: Mapping[str, str],
    more: Mapping[str, tuple[str, tuple[Any, ...]]],
) -> dict[str, str]:
    """Why FSDP's memory is not known, if it is not: UNKNOWN's sections are at
    ``places``, and ``more`` is the program's own.
    """
    own: dict[str, tuple[str, tuple[Any, ...]]] = {}
    for key, why in UNKNOWN.items():
        section, _, rest = key.partition(".")
        name = f"{places.get(section, section)}.{rest}"
        own |= dict.fromkeys([name, *settings.given(f"{name}.*")], why)
    start = f"{places.get('model', 'model')}.override_config."
    for key in settings.given(f"{start}*"):
        if not key.removeprefix(start).startswith(HARMLESS_OVERRIDES):
            return {"doubt": f"the model's sizes may not be those of its files: {key}"}
    try:
        megatron_plan.refuse(settings, own | dict(more))
    except CheckError as error:
        return {"doubt": str(error)}
    return {}


def _of_teachers(key: str, settings: Settings) -> Iterator[str]:
    """The key for each teacher, with the + that Hydra requires for one not in its tree.

    verl drops teacher_model if there are others (_resolve_teacher_models).
    """
    first = "teacher_model"
    given = {one.split(".")[2] for one in settings.given(f"{TEACHERS}.*.*")}
    for name in sorted(given - {first} or {first}):
        yield f"{'' if name == first else '++'}{key.replace('*', name)}"


def job(values: Values, student: Model, teacher: Model | None, room: int | None) -> Job:
    """The parts of a verl job, from the values of ``gkd check`` and the ``release``.

    Full lengths are assumed: the plan is for the longest batch. Raises CheckError if a
    value that it needs cannot be determined.
    """
    prompt, response = number(values, "max_prompt_length", "max_response_length")
    nodes, each = number(values, "nodes", "gpus_per_node")
    length, gpus = prompt + response, nodes * each
    strategy = values.get("trainer_strategy")
    if strategy not in ("fsdp", "fsdp2", "megatron"):
        raise CheckError(f"the memory of a trainer under {strategy} is not known yet")
    context = values.get("context_parallel_size") or 1
    samples = values.get("samples_per_prompt") or 1
    batch = values.get("train_batch_size") or 1
    rows = (values.get("ppo_mini_batch_size") or batch) * samples * context / gpus
    trainer: Trainer | Megatron
    scores: Parts = {}
    others: tuple[Beside, ...] = ()
    if strategy == "megatron":
        trainer, scores, others = megatron_plan.trainer(values, student, length, rows)
    else:
        trainer = _fsdp(values, student, length, rows, gpus)
    wide = values.get("tensor_parallel_size") or 1
    engines = max((values.get("rollout_gpus") or gpus) // wide, 1)
    at_once = math.ceil(batch * samples / engines)
    rollout = Engine(
        student,
        gpus=values.get("rollout_gpus") or gpus,
        tensor=wide,
        share=values.get("gpu_memory_utilization") or 0.5,
        length=values.get("max_model_len") or length,
        sequences=min(values.get("max_num_seqs") or at_once, at_once),
        batched_tokens=values.get("max_num_batched_tokens") or 8192,
        sleeps=bool(values.get("free_cache_engine")),
        eager=bool(values.get("enforce_eager")),
    )
    judge = None
    if teacher is not None:
        judge = Engine(
            teacher,
            gpus=values.get("teacher_gpus") or 1,
            tensor=values.get("teacher_tensor_parallel_size") or 1,
            share=values.get("teacher_gpu_memory_utilization") or 0.5,
            length=values.get("teacher_max_model_len") or length + 1,
            batched_tokens=values.get("teacher_max_num_batched_tokens") or 8192,
            scores=True,
            eager=bool(values.get("teacher_enforce_eager")),
            release=files.version("vllm") or "",
        )
    bucket = (values.get("sync_bucket_megabytes") or 2048) << 20
    colocated = values.get("placement") != "split"
    return Job(
        trainer,
        rollout,
        judge,
        colocated=colocated,
        memory=room,
        bucket=bucket,
        scores=scores,
        others=others,
    )


def sft_job(values: Values, student: Model, _: Model | None, room: int | None) -> Job:
    """The same of verl's SFT programs, which have a trainer alone."""
    length, gpus, batch = number(
        values, "max_length", "trainer_gpus", "train_batch_size"
    )
    rows = batch * (values.get("context_parallel_size") or 1) / gpus
    own = {**values, "temperature": 1}
    return Job(_fsdp(own, student, length, rows, gpus, is_sft=True), memory=room)


def _fsdp(
    values: Values,
    student: Model,
    length: int,
    rows: float,
    gpus: int,
    *,
    is_sft: bool = False,
) -> Trainer:
    context = values.get("context_parallel_size") or 1
    if values.get("use_dynamic_bsz"):
        budget = number(values, "max_tokens_per_gpu")[0] * context
        tokens = max(budget, length)
        several = rows * length > tokens
    else:
        micro = number(values, "micro_batch_size")[0]
        tokens, several = micro * length, rows > micro
    is_fsdp2 = values.get("trainer_strategy") == "fsdp2"
    always = bool(is_fsdp2 and values.get("offload_policy"))

    def when(name: str) -> str:
        return "always" if always else "between" if values.get(name) else "never"

    uses_topk = "topk" in str(values.get("loss")) and values.get("loss_topk")
    is_trained_by = "logprob" if values.get("loss_policy_gradient") else "topk"
    is_distilled = uses_topk and values.get("teacher_gpus") and not is_sft
    loss = is_trained_by if is_distilled else "logprob"
    loss += "-once" * (not _copies_logits(values))
    shards = values.get("fsdp_size") or 0
    # workers/engine/fsdp, _gradient_sync_context: not in 0.8.0, always in 0.9.0
    defers = values.get("defers_sync")
    if defers is None:
        defers = values.get("release") not in (None, "0.8.0")
    return Trainer(
        student,
        gpus=gpus,
        sharding="fsdp2" if is_fsdp2 else "fsdp",
        apart=("embedding", "head"),
        shards=max(shards, 0),
        context=context,
        weights=DTYPES.get(str(values.get("weights_dtype")), "float32"),
        offload_weights=when("offload_param"),
        offload_states=when("offload_optimizer"),
        recompute=values.get("recompute") is not False,
        tokens=tokens,
        micro_batches=1 + several,
        keeps=bool(defers),
        loss="fused" if values.get("fused_kernels") else loss,
        lora_rank=values.get("lora_rank") or 0,
    )


def _copies_logits(values: Values) -> bool:
    """Whether logits are divided by the temperature into a copy: 0.8.0 divides them in
    place, 0.9.1 leaves them alone at 1 (workers/engine/fsdp/transformer_impl.py,
    prepare_model_outputs).
    """
    release = values.get("release")
    is_one = values.get("temperature") == 1
    return release != "0.8.0" and not (release == "0.9.1" and is_one)
