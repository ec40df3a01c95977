"""The parts of a TRL job, for its memory plan.

Rules are those of TRL 1.16.0 and accelerate 1.15.0 unless stated otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pytest_gkd.job.engine_memory import Engine
from pytest_gkd.job.findings import CheckError
from pytest_gkd.job.fitting import Recipe, number
from pytest_gkd.job.frameworks import transformers_trainer
from pytest_gkd.job.frameworks.accelerate import PARALLEL
from pytest_gkd.job.frameworks.deepspeed import BUCKET, LIVE
from pytest_gkd.job.frameworks.reading import names
from pytest_gkd.job.frameworks.transformers_trainer import STEPS, Setup
from pytest_gkd.job.frameworks.trl.rules import TrlJob, deepspeed
from pytest_gkd.job.generation_memory import Generation
from pytest_gkd.job.memory import Job
from pytest_gkd.job.models import WIDTHS, Model
from pytest_gkd.job.served_memory import Served
from pytest_gkd.job.training_memory import Trainer

Values = Mapping[str, Any]
# The option classes of the trainers whose memory is known, each before its base.
SFT = "SFTConfig"
TRAINERS = ("GKDConfig", "GOLDConfig", "DistillationConfig", "GRPOConfig", SFT)
# Of the scripts of SFT, those that load a model of another kind lack these options.
OF_SFT = "DatasetMixtureConfig"
ZERO = "zero_optimization"
# Must be certain, as its absence would be read as a default.
CERTAIN = (
    *("gradient_checkpointing", "use_vllm", "vllm_mode", "vllm_enable_sleep_mode"),
    *("vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "use_peft", "lora_r"),
    *("vllm_max_model_length", "max_completion_length", "attn_implementation"),
)
# A server's options by Engine's field names (scripts/vllm_serve.py; vLLM's own).
SERVED = {
    "tensor": "tensor_parallel_size",
    "pipeline": "pipeline_parallel_size",
    "share": "gpu_memory_utilization",
    "length": "max_model_len",
    "sequences": "max_num_seqs",
    "batched_tokens": "max_num_batched_tokens",
    "dtype": "dtype",
}
UNSERVED = ("quantization", "kv_cache_dtype", "config", "cpu_offload_gb")
# transformers' own names for what is passed to vLLM (TRL's vllm_generation.py).
BATCHED_TOKENS = 4096
# Options whose effect on the memory is unknown, by key.
UNKNOWN = {
    "use_liger_kernel": "what Liger's kernels keep",
    "load_in_4bit": "the memory of bitsandbytes' weights",
    "load_in_8bit": "the memory of bitsandbytes' weights",
    "activation_offloading": "what offloaded activations leave on the GPU",
    "use_uld_loss": "the memory of GOLD's loss between two tokenizers",
    "packing": "how long packed rows are",
    "teacher_model_server_url": "the memory of a teacher's server",
    "teacher_model_init_kwargs": "how the teacher is loaded with init kwargs",
    "model_init_kwargs": "how the student is loaded with init kwargs",
    "use_transformers_continuous_batching": "the cache of continuous batching",
    "use_transformers_paged": "the cache of continuous batching",
    "sync_ref_model": "the memory of a reference model",
    "fsdp": "FSDP by transformers' own options",
    "seq_kd": "the memory of the teacher's generation",
}


def recipe(job: TrlJob) -> Recipe:
    """How its plan is made, with the keys of TRL, accelerate and DeepSpeed."""
    tables = names("trl") | names("trl-memory")
    keys = {name: (key,) for name, key in tables.items()}
    file = deepspeed(job)
    prefix = f"{ZERO}." if file else ""
    if any(_is_deepspeed(job)):
        keys["zero_stage"] = (f"{prefix}stage" if file else "zero_stage",)
        for part in ("optimizer", "param"):
            name = f"offload_{part}.device" if file else f"offload_{part}_device"
            keys[f"offload_{part}"] = (f"{prefix}{name}=cpu",)
    if _is_fsdp(job):
        keys["offload_param"] = ("fsdp_offload_params",)
    try:
        facts = _facts(job)
    except CheckError as error:
        facts = {"doubt": str(error)}
    return Recipe(_job, keys, facts, servers=tuple(_servers(job)))


def _servers(job: TrlJob) -> Iterator[Served]:
    """The script's vLLM server, for rollouts or for a teacher."""
    server = job.server
    if server is None:
        return
    is_teacher = "teacher_model_server_url" in job.fields and bool(
        job.find("teacher_model_server_url").value
    )
    role = "teacher" if is_teacher else "rollout server"
    unsure = [name for name, word in server.said.items() if word.text.needs]
    first = server.words[0].text.value if server.words else None
    named = None if server.is_trl or str(first).startswith("-") else first
    sizes = {
        name: _number(server.value(option, None)) for name, option in SERVED.items()
    }
    doubts = [f"{name} is not certain" for name in unsure]
    doubts += [f"{name} is not known" for name in UNSERVED if name in server.said]
    yield Served(
        role,
        server.value("model", named),
        sizes | {"eager": "enforce_eager" in server.said},
        keys={name: f"--{option}" for name, option in SERVED.items()},
        doubt=next(iter(doubts), ""),
    )


def _number(value: Any) -> Any:
    try:
        return float(value) if isinstance(value, str) and "." in value else value
    except ValueError:
        return value


def _certain(job: TrlJob, key: str) -> Any:
    given = job.find(key)
    if given.needs:
        raise CheckError(f"{key} cannot be determined")
    return given.value


def _is_deepspeed(job: TrlJob) -> tuple[bool, bool]:
    """Whether accelerate's settings ask for DeepSpeed, and whether TRL's own do."""
    find = job.launcher.find
    by_launcher = find("distributed_type").value == "DEEPSPEED"
    by_launcher = by_launcher or find("use_deepspeed").value is True
    return by_launcher, isinstance(job.find("deepspeed").value, str)


def _is_fsdp(job: TrlJob) -> bool:
    find = job.launcher.find
    return find("distributed_type").value == "FSDP" or find("use_fsdp").value is True


def _facts(job: TrlJob) -> dict[str, Any]:
    """What the plan needs besides the values of ``gkd check``.

    Raises CheckError if something cannot be determined, or its memory is not known.
    """
    trainer = next((name for name in TRAINERS if name in job.classes), "")
    if trainer == SFT and OF_SFT not in job.classes:
        trainer = ""
    if job.unread or not job.is_upstream:
        raise CheckError("how a script of one's own loads its models is not known")
    if not trainer:
        what = ", ".join(sorted(job.classes)) or "this script"
        raise CheckError(f"the memory of a trainer with {what} is not known yet")
    unknown = dict(UNKNOWN)
    if trainer == SFT:  # packed rows are as long as the longest others
        del unknown["packing"]
        unknown["label_smoothing_factor"] = "the memory of label smoothing's logits"
    for key, text in unknown.items():
        if key in job.fields and _certain(job, key):
            raise CheckError(f"{text} is not known ({key})")
    if job.find("attn_implementation").value == "eager":
        raise CheckError("the memory of eager attention is not known")
    since = "1.9" if trainer in ("GKDConfig", "GOLDConfig") else "1.16"
    if not job.since(since):
        raise CheckError(f"the memory of {trainer} is known of TRL {since} and later")
    facts: dict[str, Any] = {"trainer": trainer, "launcher": job.launcher.name}
    for key in ("bf16", "fp16", "dtype"):
        facts[key] = _certain(job, key)
    # The launcher's counts without either (training_args.py, __post_init__).
    facts["launched"] = _settings(job)("mixed_precision", "no")
    if facts["launched"] == "fp8" and _compute(facts) is None:
        raise CheckError("the memory of training in fp8 is not known (mixed_precision)")
    # transformers' default with torch 2.8 and later (training_args.py, default_optim).
    is_said = job.find("optim").source == "user"
    facts["optim"] = _certain(job, "optim") if is_said else "adamw_torch_fused"
    if facts["optim"] not in STEPS:
        raise CheckError(f"the state of the optimizer {facts['optim']} is not known")
    if trainer == "GRPOConfig" and _certain(job, "beta"):
        raise CheckError("the memory of GRPO's reference model is not known yet")
    for key in ("max_length", "max_new_tokens", "lmbda", "steps_per_generation"):
        facts[key] = _certain(job, key) if key in job.fields else None
    for key in CERTAIN:
        if key in job.fields:
            _certain(job, key)
    facts["loss_beta"] = _certain(job, "beta") if "beta" in job.fields else None
    facts["teacher_inside"] = trainer not in ("GRPOConfig", SFT)
    return facts | _sharding(job)


def _settings(job: TrlJob) -> Callable[..., Any]:
    """The launcher's settings; raises CheckError for one that cannot be determined."""

    def find(key: str, default: Any = None) -> Any:
        given = job.launcher.find(key, default)
        if given.needs:
            raise CheckError(f"{key} cannot be determined")
        return given.value

    return find


def _sharding(job: TrlJob) -> dict[str, Any]:
    find = _settings(job)
    given = job.launcher.given
    names_file = find("config_file") or find("accelerate_config")
    if names_file and "distributed_type" not in given:
        raise CheckError("accelerate's configuration is not found")
    for name in ("tp", "cp", "sp", "dp_replicate"):
        if find(f"{PARALLEL}{name}_size", 1) != 1:
            raise CheckError(f"accelerate's {PARALLEL}{name}_size is not known yet")
    if find("distributed_type") == "MEGATRON_LM" or find("use_megatron_lm"):
        raise CheckError("accelerate's Megatron-LM is not known yet")
    if _is_fsdp(job):
        return _fsdp(job)
    by_launcher, by_option = _is_deepspeed(job)
    if not (by_launcher or by_option):
        return {"sharding": "ddp"}
    file = deepspeed(job)
    if not file and (by_option or find("deepspeed_config_file")):
        raise CheckError("DeepSpeed's configuration is not found")
    for key in ("zero_stage", "offload_param_device", "offload_optimizer_device"):
        find(key)
    unsure = [key for key, one in file.items() if one.needs]
    if unsure:
        raise CheckError(f"DeepSpeed's {unsure[0]} cannot be determined")
    if "data_types.grad_accum_dtype" in file:
        raise CheckError("DeepSpeed's data_types.grad_accum_dtype is not known yet")
    found: dict[str, Any] = {"sharding": "deepspeed", "buckets": BUCKET, "live": LIVE}
    for name, key in (
        ("buckets", "reduce_bucket_size"),
        ("live", "stage3_max_live_parameters"),
        ("overlap", "overlap_comm"),
    ):
        if f"{ZERO}.{key}" in file:
            found[name] = file[f"{ZERO}.{key}"].value
    # The default is stage 0 in a DeepSpeed file, and stage 2 in accelerate.
    found["default_stage"] = 0 if file else 2
    return found


def _fsdp(job: TrlJob) -> dict[str, Any]:
    """FSDP, provided that it shards everything, layer by layer."""
    find = _settings(job)
    is_second = str(find("fsdp_version", 1)) == "2"
    wraps = str(find("fsdp_auto_wrap_policy", "NO_WRAP"))
    if not wraps.startswith("TRANSFORMER"):
        raise CheckError(f"FSDP with fsdp_auto_wrap_policy {wraps} is not known yet")
    shards = find("fsdp_reshard_after_forward", default=True)
    strategy = find("fsdp_sharding_strategy", "FULL_SHARD")
    is_whole = shards in (True, "true", "True", "FULL_SHARD")
    if not is_whole or strategy not in ("FULL_SHARD", 1, "1"):
        raise CheckError("FSDP that does not divide all of it is not known yet")
    find("fsdp_offload_params")
    return {
        "sharding": "fsdp2" if is_second else "fsdp",
        "recomputes": find("fsdp_activation_checkpointing", default=False),
    }


def _job(
    values: Values, student: Model, teacher: Model | None, room: int | None
) -> Job:
    """The parts of a job, at full lengths."""
    if values.get("doubt"):
        raise CheckError(values["doubt"])
    gpus, rows = number(values, "trainer_gpus", "per_device_train_batch_size")
    steps = number(values, "gradient_accumulation_steps")[0]
    if gpus > 1 and values["launcher"] == "python":
        raise CheckError("nn.DataParallel, without a launcher, is not known")
    sharding = transformers_trainer.sharding(values)
    if teacher and sharding.startswith("fsdp"):
        # accelerator.prepare_model(evaluation_mode=True) wraps nothing, and moves
        # nothing to the GPU under FSDP (device_placement).
        raise CheckError(
            "under FSDP accelerate leaves TRL's teacher in host memory, where its "
            "forward pass ends on the GPU's inputs: nothing is planned for that"
        )
    length, response = _lengths(values)
    loaded = str(values.get("dtype"))
    setup = Setup(
        sharding,
        dtype=None if loaded in ("auto", "None") else loaded,
        compute=_compute(values),
        row=length,
        answer=response or length,
        loss=_loss(values),
        offload=_offload(values, sharding),
        bucket=values.get("buckets"),
        recompute=bool(values.get("recompute") or values.get("recomputes")),
        lora_rank=values.get("lora_rank") or 0,
    )
    trainer = transformers_trainer.made(values, student, teacher, setup)
    at_once = _at_once(values, rows, steps)
    if values.get("rollout_engine") == "vllm":
        return _with_vllm(values, trainer, length, at_once, room)
    # Both trainers' generation_kwargs: no cache with gradient checkpointing.
    is_old = values["trainer"] in ("GKDConfig", "GOLDConfig")
    cached = not (is_old and values.get("recompute"))
    generation = Generation(at_once, length, is_cached=cached)
    if values.get("lmbda") == 0 or values["trainer"] == SFT:
        return Job(trainer, memory=room)
    return Job(trainer, generation=generation, memory=room)


def _compute(values: Values) -> str | None:
    """The dtype of mixed precision: TRL's bf16 is on if fp16 is off
    (trl/trainer/base_config.py), and the launcher's if both are.
    """
    if values["fp16"]:
        return "float16"
    if values["bf16"] is not False:
        return "bfloat16"
    return {"bf16": "bfloat16", "fp16": "float16"}.get(values["launched"])


def _lengths(values: Values) -> tuple[int, int | None]:
    """The longest row of a batch, and the logits computed of it, None for all.

    GKD's collator cuts a prompt at max_length, and the rollout is appended
    (experimental/utils.py); the others bound both together.
    """
    whole = values.get("max_length")
    kind = values["trainer"]
    if kind == "GKDConfig":
        whole = 1024 if whole is None else number(values, "max_length")[0]
        if values.get("lmbda") != 0:
            whole += number(values, "max_response_length")[0]
        return whole, None
    if kind == SFT and whole is None:
        raise CheckError("nothing bounds the rows (max_length)")
    if kind in ("GOLDConfig", SFT) and whole is not None:
        return number(values, "max_length")[0], None
    response = number(values, "max_response_length")[0]
    most = values.get("max_model_len")
    if values.get("max_prompt_length") is not None:
        whole = number(values, "max_prompt_length")[0] + response
    whole = whole or most
    if type(whole) is not int:
        raise CheckError(
            "nothing bounds the prompts' length (vllm_max_model_length would, for "
            "both together)"
        )
    return whole, response


def _at_once(values: Values, rows: int, steps: int) -> int:
    """Rollouts that a process generates at once, according to each trainer's loop."""
    if values["trainer"] == "GKDConfig" or (
        values["trainer"] == "GOLDConfig" and values.get("rollout_engine") != "vllm"
    ):
        return rows
    if values["trainer"] == "GRPOConfig":
        return rows * (values.get("steps_per_generation") or steps)
    return rows * steps


def _offload(values: Values, sharding: str) -> tuple[str, str]:
    """When weights and states are in host memory."""
    weights = bool(values.get("offload_param"))
    states = bool(values.get("offload_optimizer"))
    if sharding.startswith("fsdp"):
        states = weights
    elif sharding != "zero3":
        weights = False
    return ("always" if weights else "never"), ("always" if states else "never")


def _loss(values: Values) -> str:
    """The loss by its name in loss_memory's table."""
    kind, beta = values["trainer"], values.get("loss_beta")
    if kind == "DistillationConfig":
        return "chunked"
    if kind in ("GRPOConfig", SFT):  # trainer/utils.py, add_fused_lm_head
        return "chunked-logprob"
    if not isinstance(beta, int | float) or not 0 <= beta <= 1:
        raise CheckError(f"beta is {str(beta)[:40]}")
    return f"jsd-{beta:.0f}" if beta in (0, 1) else "jsd"


def _with_vllm(
    values: Values, trainer: Trainer, length: int, at_once: int, room: int | None
) -> Job:
    """vLLM in the trainer's processes, or as a server on GPUs of its own
    (trl/generation/vllm_generation.py)."""
    if values.get("placement") == "split":
        # Its options are on the server's own command line.
        return Job(trainer, memory=room, bucket=0)
    width = values.get("tensor_parallel_size") or 1
    many = at_once * (1 if values["trainer"] == "GOLDConfig" else width)
    engine = Engine(
        trainer.model,
        gpus=trainer.gpus,
        tensor=width,
        share=values.get("gpu_memory_utilization") or 0.3,
        length=values.get("max_model_len") or length,
        sequences=many,
        batched_tokens=BATCHED_TOKENS,
        sleeps=bool(values.get("free_cache_engine")),
    )
    largest = trainer.model.largest * WIDTHS[trainer.compute]
    return Job(trainer, engine, processes=1, memory=room, bucket=math.ceil(largest))
