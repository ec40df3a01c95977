"""The parts of a job of ms-swift's Megatron, for its memory plan.

Rules are those of ms-swift 4.5.3 and 4.6.0 with mcore-bridge 1.6; files are named below
swift/megatron/.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from pytest_gkd.job import megatron_memory
from pytest_gkd.job.beside_memory import Beside
from pytest_gkd.job.findings import CheckError
from pytest_gkd.job.fitting import MOST_OF_ANYTHING, Recipe, number
from pytest_gkd.job.frameworks import megatron_trainer
from pytest_gkd.job.frameworks.ms_swift import plan
from pytest_gkd.job.frameworks.ms_swift.job import Start
from pytest_gkd.job.frameworks.reading import names
from pytest_gkd.job.megatron_memory import Megatron
from pytest_gkd.job.memory import Job
from pytest_gkd.job.models import WIDTHS, Model
from pytest_gkd.job.releases import Release
from pytest_gkd.job.training_memory import total

Values = Mapping[str, Any]
# How ms-swift spells what a plan may change, besides the names of its values.
KEYS = {
    "offload_param": ("offload_model",),
    "offload_optimizer": ("offload_optimizer",),
    "recompute": (
        *("recompute_granularity=full", "recompute_method=uniform"),
        "recompute_num_layers=1",
    ),
}
# Settings whose name in ms-swift is not that of Megatron's argument.
RENAMED = {
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
    "fp8": "fp8_format",
    "fp4": "fp4_format",
}
# Settings whose effect on the memory is unknown, with the values that have none.
UNKNOWN: dict[str, tuple[str, tuple[Any, ...]]] = {
    "tuner_type": ("what LoRA's layers keep in Megatron", ("full",)),
    "bridge_backend": ("what Megatron-Bridge asks of the model", ("mcore-bridge",)),
    "megatron_extra_kwargs": ("what is given beside the options", ()),
    "adapters": ("the adapters that are loaded", ([],)),
    "mcore_adapter": ("the adapters that are loaded", ()),
    "attention_backend": (
        "the memory of that attention",
        *(("flash", "flash_2", "flash_3", "flash_4", "fused", "auto"),),
    ),
    "padding_free": ("how padded rows are laid out", (True,)),
    "task_type": ("the memory of another task", ("causal_lm",)),
    "cross_entropy_fusion_impl": ("the memory of that loss", ("native",)),
    "sequence_packing_scheduler": ("how long scheduled rows are", ()),
    "freeze_parameters": ("how much is frozen", ([],)),
    "freeze_parameters_regex": ("how much is frozen", ()),
    "freeze_parameters_ratio": ("how much is frozen", (0, 0.0)),
    "freeze_llm": ("how much is frozen", (False,)),
    "enable_channel_loss": ("the memory of that loss", (False,)),
    "sft_alpha": ("the memory of two losses at once", (0, 0.0)),
    "top_entropy_quantile": ("the memory of entropies", (1, 1.0)),
    "log_entropy": ("the memory of entropies", (False,)),
    "multi_turn_scheduler": ("how long rows of several turns are", ()),
    "router_replay_mode": ("what a router's replay keeps", ("disabled",)),
    "vllm_engine_kwargs": ("what vLLM is given beside its options", ()),
    "vllm_quantization": ("the memory of quantised weights", ()),
}
FACTS = (
    *("rlhf_type", "model", "teacher_model", "teacher_model_server", "torch_dtype"),
    *("max_length", "max_completion_length", "response_length", "max_new_tokens"),
    *("packing", "packing_length", "truncation_strategy", "loss_type", "loss_scale"),
    *("fp16", "bf16", "lmbda", "beta", "temperature", "global_batch_size"),
    *("steps_per_generation", "generation_batch_size", "offload_teacher_model"),
    *("use_distributed_optimizer", "bias_activation_fusion", "main_grads_dtype"),
    *("gradient_accumulation_fusion", "accumulate_allreduce_grads_in_fp32"),
    *("optimizer_cpu_offload", "language_model_only", "vllm_enforce_eager"),
    *("sleep_level", "vllm_max_num_seqs"),
)
# Bytes of a loss per token and vocabulary entry on a rank: for the logits of all
# tokens, for those of answers, and for a chunk of 512 of these; measured on the
# functions themselves (trainers/vocab_parallel_utils.py, gkd_utils.py and
# ../rlhf_trainers/gkd_loss.py, and Megatron's cross entropy) by what they allocate on a
# CPU, starting from 16-bit logits: tests/test_job_memory_ms_swift_megatron.py.
SFT, TOPK = (6, 0, 0), (8, 4, 0)
GRPO = {True: (6, 0, 0), False: (8, 0, 0)}  # at a temperature of 1, and at others
# By beta, and with a teacher whose vocabulary is smaller than the student's.
GKD = {0: (4, 18, 10), 1: (4, 24, 6), 0.5: (4, 38, 6)}
GKD_PADDED = {0: (4, 24, 4), 1: (4, 26, 4), 0.5: (4, 44, 4)}
# What a chunk takes in addition if the vocabulary is divided, and its minimum then.
DIVIDED, CHUNK = 4, 512
# In a forward pass for log-probabilities, with an unwrapped model.
SCORED = 6
# SWIFT_UPDATE_WEIGHTS_BUCKET_SIZE in bytes (trainers/rollout_mixin.py).
BUCKET = 512 << 20


def recipe(start: Start, release: Release) -> Recipe:
    """How its plan is made, with ms-swift's keys."""
    keys = {name: (key,) for name, key in names("ms-swift-megatron").items()} | KEYS
    if start.mode.value == "colocate":
        keys["free_cache_engine"] = ("sleep_level=1",)
    else:  # they are a server's
        for name in ("gpu_memory_utilization", "tensor_parallel_size"):
            keys.pop(name)
    try:
        facts = _facts(start, release)
    except CheckError as error:
        facts = {"doubt": str(error)}
    servers = tuple(plan.served_of(server) for server in start.servers)
    return Recipe(_job, keys, facts, servers=servers)


def _facts(start: Start, release: Release) -> dict[str, Any]:
    """What the plan needs besides the values of ``gkd check``.

    Raises CheckError if something is not certain, or its memory is not known.
    """
    if not release.is_at_least("4.5.3"):
        raise CheckError("the memory of its Megatron is known of 4.5.3 and later")
    if start.ray:
        raise CheckError("what Ray puts on the same GPUs is not known yet")
    kind = start.algorithm.value
    if kind not in ("gkd", "grpo", "sft", "pt"):
        raise CheckError(f"the memory of {kind} in Megatron is not known yet")
    for key, (text, harmless) in UNKNOWN.items():
        value = plan.certain(start, key)
        if value is not None and value not in harmless:
            raise CheckError(f"{text} is not known ({key})")
    found = {key: plan.certain(start, key) for key in FACTS}
    found["kind"] = kind = "sft" if kind == "pt" else kind
    found["mode"] = "none" if kind == "sft" else start.mode.value
    if kind == "gkd" and found["mode"] == "transformers":
        found["lmbda"] = 0  # trainers/gkd_trainer.py, _determine_data_source
    if kind == "gkd" and found["lmbda"] == 0:
        found["mode"] = "none"
    if found["mode"] not in ("none", "colocate", "server"):
        raise CheckError("what generates cannot be determined (use_vllm, vllm_mode)")
    inside = kind != "sft" and found["teacher_model"] is not None

    def of_megatron(key: str) -> Any:
        if key == "lora_rank":  # it has a default, which matters to LoRA alone
            return None
        value = plan.certain(start, RENAMED.get(key, key))
        is_none = key == "recompute_granularity" and value == "none"
        return None if is_none else value

    said = megatron_trainer.settings(of_megatron)
    stages = said["num_virtual_stages_per_pipeline_rank"] or 1
    if stages > 1 and (inside or kind == "grpo"):
        raise CheckError("virtual pipeline stages are refused there")
    found["recompute"] = said["recompute_granularity"] == "full"
    found |= {"megatron": said, "teacher_inside": inside, "teacher_gpus": 0}
    return found | plan.lengths(found)


def _job(
    values: Values, student: Model, teacher: Model | None, room: int | None
) -> Job:
    """The parts of a job, with rows at full length."""
    if values.get("doubt"):
        raise CheckError(values["doubt"])
    compute = plan.compute(values, student)
    if compute is None:
        raise CheckError("the memory of training in float32 is not known")
    if student.is_multimodal and not values["language_model_only"]:
        raise CheckError("how much of a multimodal model is frozen is not known")
    said, rows = values["megatron"], number(values, "micro_batch_size")[0]
    gpus, batch = number(values, "trainer_gpus", "global_batch_size")
    context = values.get("context_parallel_size") or 1
    width = values.get("train_tensor_parallel_size") or 1
    shards = width * (said["pipeline_model_parallel_size"] or 1) * context
    if gpus % shards or batch % (rows * (gpus // shards)):
        raise CheckError(f"{batch} rows are no multiple of micro-batches' on all GPUs")
    count = batch // (rows * (gpus // shards))
    tokens = rows * values["row"]
    made = megatron_trainer.trainer(
        said | _precision(values, compute),
        # In megatron_trainer the name means states that are always in host memory.
        {**values, "offload_optimizer": values["optimizer_cpu_offload"]},
        student,
        tokens=tokens,
        micro_batches=count,
        loss=_loss(values, student, teacher, math.ceil(tokens / context)),
        is_distributed=values["use_distributed_optimizer"] is not False,
        away=frozenset(_away(values)),
        copies=2,  # gathered from the tensor ranks, and concatenated
        fuses=values["gradient_accumulation_fusion"] is not False,
        fuses_gates=values["bias_activation_fusion"] is not False,
    )
    steps = _steps(values, batch)
    if teacher and values["kind"] == "gkd" and not values.get("loss_topk"):
        # Of all micro-batches until the next generation, at once
        # (trainers/gkd_trainer.py, _compute_teacher_logits_local).
        entries = math.ceil(teacher.vocab / made.tensor) * made.local * count * steps
        made = replace(made, teacher_logits=entries * WIDTHS[compute])
    is_grpo = values["kind"] == "grpo"
    scored = replace(made, loss=SCORED)
    largest = math.ceil(student.largest * WIDTHS[compute])
    is_shared = values["mode"] == "colocate"
    each = steps * batch // gpus
    return Job(
        made,
        plan.engine(values, student, gpus, each) if is_shared else None,
        processes=1,
        memory=room,
        bucket=largest if is_shared else BUCKET,
        scores=megatron_memory.scoring(scored, tokens) if is_grpo else {},
        others=tuple(_others(values, made, teacher)),
    )


def _away(values: Values) -> list[str]:
    """trainers/rollout_mixin.py, offload_context: gradients leave with the weights."""
    weights = ["weights", "gradients"] if values.get("offload_param") else []
    return weights + (["states"] if values.get("offload_optimizer") else [])


def _precision(values: Values, compute: str) -> dict[str, Any]:
    """Gradients are float32 beside bfloat16 unless main_grads_dtype says otherwise
    (arguments/megatron_args.py, _map_dtype); the vocabulary is padded to the tensor
    ranks alone (mcore_bridge/model/gpt_model.py)."""
    is_half = compute == "float16"
    wide = values["main_grads_dtype"] in (None, "fp32") and not is_half
    wide = wide or bool(values["accumulate_allreduce_grads_in_fp32"])
    return {
        "fp16": is_half,
        "grad_reduce_in_bf16": not wide,
        "make_vocab_size_divisible_by": 1,
    }


def _loss(values: Values, student: Model, teacher: Model | None, local: int) -> float:
    """Bytes for each of a rank's ``local`` tokens and entries of the vocabulary."""
    if values["kind"] == "sft":
        return SFT[0]
    if values["kind"] == "grpo":
        return GRPO[values["temperature"] == 1][0]
    whole, answers, chunk = TOPK
    more = 1.0
    if not values.get("loss_topk"):
        beta, theirs = values.get("loss_beta"), (teacher or student).vocab
        if values["teacher_model_server"] is not None:
            raise CheckError("a teacher's server gives no more than gkd_logits_topk")
        if not isinstance(beta, int | float) or not 0 <= beta <= 1:
            raise CheckError(f"beta is {str(beta)[:40]}")
        table = GKD_PADDED if theirs < student.vocab else GKD
        whole, answers, chunk = table[beta if beta in (0, 1) else 0.5]
        chunk += DIVIDED * ((values.get("train_tensor_parallel_size") or 1) > 1)
        more = max(theirs / student.vocab, 1)
    asked: float = values["answer"] / values["row"]
    return whole + more * (answers * asked + chunk * min(CHUNK / local, asked))


def _steps(values: Values, batch: int) -> int:
    """Updates per generation (arguments/megatron_args.py,
    resolve_generation_batch_size).
    """
    own, whole = values["steps_per_generation"], values["generation_batch_size"]
    if own is None and type(whole) is int:
        own = whole // batch
    found = 1 if own is None or values["kind"] == "sft" else own
    if type(found) is not int or not 0 < found < MOST_OF_ANYTHING:
        raise CheckError(f"steps_per_generation is {str(found)[:40]}")
    return found


def _others(values: Values, made: Megatron, teacher: Model | None) -> Iterator[Beside]:
    """GRPO's reference model, which is loaded whatever beta is (trainers/rlhf_mixin.py,
    prepare_model), and a teacher in the trainer's processes. offload_model offloads the
    reference model during rollouts, offload_teacher_model the teacher outside its
    forward passes.
    """
    if values["kind"] == "grpo":
        own = _beside("reference", made, made.model, SCORED)
        idle = {} if "weights" in made.away else own.idle
        yield replace(own, idle=idle)
    if teacher is not None:
        each = SCORED if values["kind"] == "grpo" else WIDTHS[made.compute]
        own = _beside("teacher", made, teacher, each)
        is_away = values["offload_teacher_model"]
        yield replace(own, idle={}, meanwhile={}, between={}) if is_away else own


def _beside(role: str, made: Megatron, model: Model, each: int) -> Beside:
    """A model sharded like the student, weights alone; its logits take ``each`` bytes,
    or are all that is kept of it. All of the trainer is on the GPU, too.
    """
    own = replace(made, model=model, loss=each, teacher_logits=0)
    most = max(sum(megatron_memory.elements(own, at)) for at in range(made.pipeline))
    weights = {f"{role}'s weights {made.compute}": WIDTHS[made.compute] * most}
    asked = megatron_memory.scoring(own, made.tokens)
    logits = asked["logits and loss"]
    if role == "teacher":
        logits = max(logits, made.teacher_logits)
    back = {
        name: size - megatron_memory.resident(made, 0, "idle")[name]
        for name, size in megatron_memory.resident(made, 0, "update").items()
    }
    at_work = {
        f"{role}'s logits": logits,
        f"{role}'s activations": asked["activations"],
    }
    phase = (("forward", total(weights, at_work, back)),)
    return Beside(role, weights, phase, True, weights, 0, weights)
