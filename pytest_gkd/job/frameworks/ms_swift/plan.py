"""The parts of a job of ms-swift, for its memory plan.

Rules are those of ms-swift 4.6.0 unless stated otherwise; its files are named below
swift/. accelerate and DeepSpeed treat it as they treat TRL's trainers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pytest_gkd.job.engine_memory import Engine
from pytest_gkd.job.findings import CheckError
from pytest_gkd.job.fitting import MOST_OF_ANYTHING, Recipe, number
from pytest_gkd.job.frameworks import transformers_trainer
from pytest_gkd.job.frameworks.deepspeed import BUCKET, LIVE
from pytest_gkd.job.frameworks.ms_swift.job import (
    ZERO,
    Server,
    Start,
    zero_settings,
)
from pytest_gkd.job.frameworks.reading import names
from pytest_gkd.job.frameworks.transformers_trainer import STEPS, Setup
from pytest_gkd.job.generation_memory import Generation
from pytest_gkd.job.memory import Job
from pytest_gkd.job.models import WIDTHS, Model
from pytest_gkd.job.releases import Release
from pytest_gkd.job.served_memory import Served
from pytest_gkd.job.training_memory import Trainer

Values = Mapping[str, Any]
# reduce_bucket_size in ms-swift's own files, except for stage 3, which has "auto".
OWN_BUCKET = 200_000_000
AT_HOME = (None, "none")
# vLLM's own default (config/scheduler.py) if ms-swift gives none.
BATCHED_TOKENS = 8192
# A server's options by Engine's field names, without their prefix.
SERVED = {
    "tensor": "tensor_parallel_size",
    "pipeline": "pipeline_parallel_size",
    "share": "gpu_memory_utilization",
    "length": "max_model_len",
    "sequences": "max_num_seqs",
    "eager": "enforce_eager",
}
# Options whose effect on the memory is unknown, by key, with the values that have none.
UNKNOWN: dict[str, tuple[str, tuple[Any, ...]]] = {
    "use_liger_kernel": ("what Liger's kernels keep", (False,)),
    "quant_method": ("the memory of quantised weights", ()),
    "quant_bits": ("the memory of quantised weights", ()),
    "use_galore": ("the state of GaLore", (False,)),
    "optimizer": ("the state of an optimizer of ms-swift's own", ()),
    "lisa_activated_layers": ("what LISA trains", (0,)),
    "freeze_parameters": ("how much is frozen", ([],)),
    "freeze_parameters_regex": ("how much is frozen", ()),
    "freeze_parameters_ratio": ("how much is frozen", (0, 0.0)),
    "freeze_llm": ("how much is frozen", (False,)),
    "modules_to_save": ("what LoRA trains beside its matrices", ([],)),
    "target_modules": ("which layers LoRA is put beside", (["all-linear"],)),
    "target_regex": ("which layers LoRA is put beside", ()),
    "target_parameters": ("which layers LoRA is put beside", ()),
    "use_dora": ("the memory of DoRA", (False,)),
    "lora_dtype": ("what a dtype of LoRA's own changes", ()),
    "lora_bias": ("which biases LoRA trains", ("none",)),
    "adapters": ("the adapters that are loaded", ([],)),
    "ref_adapters": ("the adapters that are loaded", ([],)),
    "resume_from_checkpoint": ("the checkpoint that is loaded", ()),
    "tuner_backend": ("what that backend keeps", ("peft",)),
    "device_map": ("how device_map spreads the model", ()),
    "deepspeed_autotp_size": ("DeepSpeed's AutoTP", (1,)),
    "zero_hpz_partition_size": ("ZeRO++", (1,)),
    "sequence_parallel_size": ("sequence parallelism's memory", (1,)),
    "enable_dft_loss": ("the memory of that loss", (False,)),
    "enable_channel_loss": ("the memory of that loss", (False,)),
    "label_smoothing_factor": ("the memory of that loss", (0, 0.0)),
    "sft_alpha": ("the memory of two losses at once", (0, 0.0)),
    "top_entropy_quantile": ("the memory of entropies", (1, 1.0)),
    "log_entropy": ("the memory of entropies", (False,)),
    "teacher_adapters": ("the adapters of the teacher", ([],)),
    "teacher_deepspeed": ("a DeepSpeed of the teacher's own", ()),
    "offload_teacher_model": ("what an offloaded teacher leaves", (False,)),
    "reward_model": ("the memory of a reward model", ([],)),
    "chord_sft_dataset": ("how long CHORD's rows are", ([],)),
    "multi_turn_scheduler": ("how long rows of several turns are", ()),
    "async_generate": ("what is generated in between", (False,)),
    "vllm_engine_kwargs": ("what vLLM is given beside its options", ()),
    "vllm_enable_lora": ("vLLM's own LoRA", (False,)),
    "vllm_quantization": ("the memory of quantised weights", ()),
    "use_logits_to_keep": ("which logits are kept", (True,)),
}
# Must be certain, as its absence would be read as a default.
CERTAIN = (
    *("rlhf_type", "tuner_type", "lora_rank", "use_vllm", "vllm_mode", "sleep_level"),
    *("torch_dtype", "fp16", "bf16", "optim", "attn_impl", "gradient_checkpointing"),
    *("deepspeed", "fsdp", "teacher_model", "teacher_model_server", "beta", "lmbda"),
    *("model", "gkd_logits_topk", "packing", "packing_length", "truncation_strategy"),
    *("max_length", "max_completion_length", "response_length", "max_new_tokens"),
    *("steps_per_generation", "generation_batch_size", "vllm_max_num_seqs"),
    *("vllm_max_model_len", "vllm_enforce_eager", "vllm_pipeline_parallel_size"),
    *("vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "loss_scale"),
    *("offload_model", "offload_optimizer", "loss_type", "num_generations"),
)


def recipe(start: Start, release: Release) -> Recipe:
    """How its plan is made, with ms-swift's keys."""
    keys = {name: (key,) for name, key in names("ms-swift").items()}
    keys["gradient_accumulation_steps"] = ("gradient_accumulation_steps",)
    keys["recompute"] = ("gradient_checkpointing",)
    if start.mode.value == "colocate":
        keys["free_cache_engine"] = ("sleep_level=1",)
    else:  # they are a server's, which is not planned
        for name in ("gpu_memory_utilization", "tensor_parallel_size"):
            keys.pop(name)
    name = start.value("deepspeed")
    if name in ("zero1", "zero2"):
        keys["zero_stage"] = ("deepspeed=zero{}",)
    if name == "zero2":
        keys["offload_optimizer"] = ("deepspeed=zero2_offload",)
    try:
        facts = _facts(start, release)
    except CheckError as error:
        facts = {"doubt": str(error)}
    servers = tuple(served_of(server) for server in start.servers)
    return Recipe(_job, keys, facts, servers=servers)


def served_of(server: Server) -> Served:
    """A server of the script: swift deploy, swift rollout or vllm serve."""
    role = "teacher" if server.kind == "teacher" else "rollout server"
    options = {name: f"{server.prefix}{option}" for name, option in SERVED.items()}
    given = {name: server.job.find(option) for name, option in options.items()}
    model = server.job.find("model")
    every = {**{options[name]: one for name, one in given.items()}, "model": model}
    doubts = [f"{name} is not certain" for name, one in every.items() if one.needs]
    backend = server.job.find("infer_backend").value
    if server.name == "swift deploy" and backend != "vllm":
        doubts.append(f"infer_backend is {str(backend)[:40]}")
    return Served(
        role,
        model.value,
        {name: one.value for name, one in given.items()},
        keys={name: f"--{option}" for name, option in options.items()},
        doubt=next(iter(doubts), ""),
    )


def certain(start: Start, key: str) -> Any:
    """An option's value, None if there is none. Raises CheckError if it cannot be
    determined.
    """
    if start.job.given(""):
        raise CheckError("which options the command has cannot be determined")
    if not start.job.given(key) and not start.job.knows(key):
        return None  # belongs to another command, or has no default
    given = start.get(key)
    if given.needs:
        raise CheckError(f"{key} cannot be determined")
    return given.value


def _facts(start: Start, release: Release) -> dict[str, Any]:
    """What the plan needs besides the values of ``gkd check``.

    Raises CheckError if something cannot be determined, or its memory is not known.
    """
    if not release.is_at_least("4.5.2"):  # whose gkd_loss.py is the same
        raise CheckError("the memory of ms-swift is known of 4.5.2 and later")
    found = {key: certain(start, key) for key in CERTAIN}
    kind = start.algorithm.value
    if kind not in ("gkd", "grpo", "sft"):
        raise CheckError(f"the memory of ms-swift's {kind} is not known yet")
    for key, (text, harmless) in UNKNOWN.items():
        value = certain(start, key)
        if value is not None and value not in harmless:
            raise CheckError(f"{text} is not known ({key})")
    if found["attn_impl"] == "eager":
        raise CheckError("the memory of eager attention is not known")
    if found["tuner_type"] not in ("full", "lora"):
        raise CheckError(f"the memory of tuner_type {found['tuner_type']} is not known")
    is_lora = found["tuner_type"] == "lora"
    found["lora_rank"] = found["lora_rank"] if is_lora else 0
    if is_lora and not (found["gradient_checkpointing"] or found["fsdp"]):
        # LoRA's dropout keeps a copy of the input of each matrix.
        raise CheckError("what LoRA's layers keep without recomputation is not known")
    found["optim"] = found["optim"] or "adamw_torch_fused"
    if found["optim"] not in STEPS:
        raise CheckError(f"the state of the optimizer {found['optim']} is not known")
    gpus, processes = start.trainer().value, start.processes().value
    if gpus is not None and processes != gpus:
        raise CheckError("how a process spreads its model over GPUs is not known")
    found |= {"kind": kind, "recompute": bool(found["gradient_checkpointing"])}
    found["mode"] = "none" if kind == "sft" else start.mode.value
    found |= _teacher(found)
    return found | lengths(found) | _sharding(found)


def _teacher(said: Values) -> dict[str, Any]:
    """Where the teacher is. With LoRA it may be the student's own base, without a copy,
    as is the student itself without a teacher_model (arguments/rlhf_args.py,
    _check_teacher).
    """
    own, kind = said["teacher_model"], said["kind"]
    is_base = own == said["model"] and said["tuner_type"] == "lora"
    is_inside = own is not None and not is_base and kind != "sft"
    if kind == "grpo" and is_inside:
        raise CheckError("the memory of GRPO's teacher in the trainer is not known yet")
    if kind == "grpo" and said["tuner_type"] == "full" and said["beta"] != 0:
        raise CheckError("the memory of GRPO's reference model is not known yet")
    # A server's options are on its own command line.
    is_served = said["teacher_model_server"] is not None
    return {"teacher_inside": is_inside, "teacher_gpus": 0, "is_served": is_served}


def lengths(said: Values) -> dict[str, Any]:
    """The longest row of a batch, and the logits computed of it, at full length.

    A prompt is cut at max_length, or dropped, and the rollout is appended (GKD and GRPO
    encode both without a bound, rlhf_trainers/rollout_mixin.py, _template_context).
    Logits are those of the labels and one before (trainers/mixin.py,
    prepare_logits_to_keep).
    """
    kind, most = said["kind"], said["max_length"]
    if type(most) is not int or most < 1:
        raise CheckError("nothing but the model bounds the rows' length (max_length)")
    if kind == "sft":
        if said["loss_scale"] not in (None, "default", "last_round", "all"):
            raise CheckError("the memory of weighted losses is not known (loss_scale)")
        if said["loss_type"] is not None:
            raise CheckError("the memory of that loss is not known (loss_type)")
        most = said["packing_length"] or most if said["packing"] else most
        if type(most) is not int or not 0 < most < MOST_OF_ANYTHING:
            raise CheckError(f"packing_length is {str(most)[:40]}")
        return {"row": most, "answer": most}
    if said["packing"]:
        raise CheckError("how long packed rows are is not known (packing)")
    # rlhf_args.py, _init_max_completion_length
    response = said["response_length"] or said["max_new_tokens"]
    response = response or said["max_completion_length"]
    if type(response) is not int or not 0 < response < MOST_OF_ANYTHING:
        raise CheckError(f"max_completion_length is {str(response)[:40]}")
    if kind == "grpo":
        return {"row": most + response, "answer": response + 1}
    share = said["lmbda"]
    if not isinstance(share, int | float) or not 0 <= share <= 1:
        raise CheckError(f"lmbda is {str(share)[:40]}")
    if share < 1 and said["truncation_strategy"] not in (None, "delete"):
        # Rows of the dataset are also encoded without a bound.
        raise CheckError("only truncation_strategy delete bounds rows of the dataset")
    row = most + response * (share > 0)
    answer = response if share == 1 else max(most, response * (share > 0))
    return {"row": row, "answer": min(answer + 1, row)}


def _sharding(said: Values) -> dict[str, Any]:
    """DDP, FSDP2 as in ms-swift's own file, or DeepSpeed's stage and buffers."""
    if said["fsdp"]:
        if said["fsdp"] != "fsdp2" or said["deepspeed"]:
            raise CheckError("FSDP by a file of one's own is not known yet")
        if said["tuner_type"] == "lora":
            raise CheckError("LoRA's dtypes under FSDP are not known yet")
        if said["teacher_inside"]:
            raise CheckError("the memory of a teacher under FSDP is not known yet")
        if said["mode"] == "transformers":
            raise CheckError("rollouts by transformers under FSDP are not known yet")
        # config/fsdp2.json: activation_checkpointing
        found: dict[str, Any] = {"sharding": "fsdp2", "recompute": True}
    elif not said["deepspeed"]:
        return {"sharding": "ddp"}
    else:
        found = _deepspeed(said["deepspeed"])
    if said["offload_model"] or said["offload_optimizer"]:
        text = "what offload_model and offload_optimizer leave there is not known yet"
        raise CheckError(f"{found['sharding']}: {text}")
    return found


def _deepspeed(name: str) -> dict[str, Any]:
    """From one of ms-swift's own files, by its name, or from what is given."""
    found: dict[str, Any] = {"sharding": "deepspeed", "buckets": BUCKET, "live": LIVE}
    if name in ZERO:
        _, weights, states = ZERO[name]
        return found | {
            "buckets": "own",
            "zero_weights": weights,
            "zero_states": states,
        }
    keys = zero_settings(name)
    if keys is None:
        raise CheckError("DeepSpeed's configuration is not found")
    for key in ("data_types.grad_accum_dtype", "zero_optimization.cpu_offload"):
        if key in keys:
            raise CheckError(f"DeepSpeed's {key} is not known yet")
    own = {
        key.removeprefix("zero_optimization."): value
        for key, value in keys.items()
        if key.startswith("zero_optimization.")
    }
    return found | {
        "buckets": own.get("reduce_bucket_size", BUCKET),
        "live": own.get("stage3_max_live_parameters", LIVE),
        "overlap": own.get("overlap_comm"),
        "zero_weights": own.get("offload_param.device") not in AT_HOME,
        "zero_states": own.get("offload_optimizer.device") not in AT_HOME,
    }


def _job(
    values: Values, student: Model, teacher: Model | None, room: int | None
) -> Job:
    """The parts of a job, at full lengths."""
    if values.get("doubt"):
        raise CheckError(values["doubt"])
    gpus, rows = number(values, "trainer_gpus", "per_device_train_batch_size")
    steps = number(values, "gradient_accumulation_steps")[0]
    sharding = transformers_trainer.sharding(values)
    rank = values.get("lora_rank") or 0
    if values["tuner_type"] == "lora":
        rank = number(values, "lora_rank")[0]
    bucket = values.get("buckets")
    if bucket == "own":  # config/zero*.json
        bucket = "auto" if sharding == "zero3" else OWN_BUCKET
    setup = Setup(
        sharding,
        dtype=values["torch_dtype"],
        compute=compute(values, student),
        row=values["row"],
        answer=values["answer"],
        loss=_loss(values),
        offload=_offload(values, sharding),
        bucket=bucket,
        recompute=bool(values["recompute"]),
        lora_rank=rank,
        # PEFT converts 16-bit adapters to float32; DeepSpeed converts everything to 16
        # bits.
        adapters="float32" if rank and sharding == "ddp" else "",
    )
    trainer = transformers_trainer.made(values, student, teacher, setup)
    each = rows * _steps_at_once(values, rows, steps, gpus)
    if values["mode"] == "colocate":
        return _with_vllm(values, trainer, each, room)
    if values["mode"] == "transformers" and values.get("lmbda") != 0:
        # It generates in evaluation mode, with a cache
        # (infer_engine/transformers_engine.py).
        generation = Generation(each, values["row"])
        return Job(trainer, generation=generation, memory=room)
    return Job(trainer, memory=room, bucket=0)


def compute(values: Values, student: Model) -> str | None:
    """Mixed precision's dtype: by default that of the model
    (arguments/base_args/model_args.py, _init_mixed_precision)."""
    loaded = values["torch_dtype"] or student.stored_dtype
    fp16, bf16 = values["fp16"], values["bf16"]
    fp16 = loaded != "bfloat16" if fp16 is None else fp16
    bf16 = loaded == "bfloat16" if bf16 is None else bf16
    if fp16 and bf16:
        raise CheckError("fp16 and bf16 are both on")
    return "float16" if fp16 else "bfloat16" if bf16 else None


def _offload(values: Values, sharding: str) -> tuple[str, str]:
    """When weights and states are in host memory: always in DeepSpeed, or during
    rollouts (rlhf_trainers/gkd_trainer.py, offload_context).
    """
    if sharding == "ddp":
        away = (values["offload_model"], values["offload_optimizer"])
        return "between" if away[0] else "never", "between" if away[1] else "never"
    weights = values.get("zero_weights") and sharding == "zero3"
    # A change by the plan shows in the value, whatever the options say.
    states = values.get("zero_states") or values.get("offload_optimizer")
    return ("always" if weights else "never"), ("always" if states else "never")


def _loss(values: Values) -> str:
    """The loss by its name in loss_memory's table."""
    if values["kind"] == "sft":
        return "cross-entropy"
    if values["kind"] == "grpo":
        return "swift-logprob"
    if values.get("loss_topk"):
        return f"swift-{'served' if values['is_served'] else 'topk'}"
    if values["is_served"]:
        raise CheckError("a teacher's server gives no more than gkd_logits_topk")
    beta = values.get("loss_beta")
    if not isinstance(beta, int | float) or not 0 <= beta <= 1:
        raise CheckError(f"beta is {str(beta)[:40]}")
    return f"swift-jsd-{beta:.0f}" if beta in (0, 1) else "swift-jsd"


def _steps_at_once(values: Values, rows: int, steps: int, gpus: int) -> int:
    """Micro-batches whose rollouts each process generates at once
    (rlhf_trainers/args_mixin.py, _init_generation_batch_params).
    """
    own, whole = values["steps_per_generation"], values["generation_batch_size"]
    if own is None and type(whole) is int:
        own = max(whole // (rows * gpus), 1)
    found = steps if own is None else own
    if type(found) is not int or not 0 < found < MOST_OF_ANYTHING:
        raise CheckError(f"steps_per_generation is {str(found)[:40]}")
    return found


def _with_vllm(values: Values, trainer: Trainer, each: int, room: int | None) -> Job:
    """vLLM in the trainer's processes."""
    largest = trainer.model.largest * WIDTHS[trainer.compute]
    own = engine(values, trainer.model, trainer.gpus, each)
    return Job(trainer, own, processes=1, memory=room, bucket=math.ceil(largest))


def engine(values: Values, model: Model, gpus: int, each: int) -> Engine:
    """vLLM engines in the trainer's processes, each of which requests ``each`` rows
    (rlhf_trainers/rollout_mixin.py, _prepare_vllm_engine).
    """
    width = values.get("tensor_parallel_size") or 1
    if values.get("vllm_pipeline_parallel_size") not in (None, 1):
        raise CheckError("vLLM's pipeline parallelism is not known there")
    sequences = values["vllm_max_num_seqs"] or each * width
    if type(sequences) is not int or not 0 < sequences < MOST_OF_ANYTHING:
        raise CheckError(f"vllm_max_num_seqs is {str(sequences)[:40]}")
    sleeps = values.get("free_cache_engine")
    return Engine(
        model,
        gpus=gpus,
        tensor=width,
        share=values.get("gpu_memory_utilization") or 0.9,
        length=values.get("max_model_len") or values["row"],
        sequences=sequences,
        batched_tokens=BATCHED_TOKENS,
        sleeps=bool(values["sleep_level"] if sleeps is None else sleeps),
        eager=bool(values["vllm_enforce_eager"]),
    )
