"""The parts of a prime-rl job, for its memory plan: rl's trainer, sft, the server.

Rules are those of the main branch at 559b4477; files that are not named otherwise are
below src/prime_rl/trainer/. The weights are float32 by default, computed in bfloat16
under FSDP2 (model.py, setup_fsdp), AdamW's state in host memory except in a step and
for a checkpoint (optim/state_offload.py), and the inputs of recomputed layers, too
(utils/act_offloading.py). A teacher is another server, of another job.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from pytest_gkd.job.findings import CheckError
from pytest_gkd.job.fitting import Recipe, number
from pytest_gkd.job.frameworks.reading import names
from pytest_gkd.job.memory import Job
from pytest_gkd.job.models import WIDTHS, Model
from pytest_gkd.job.overrides import Given
from pytest_gkd.job.served_memory import Served
from pytest_gkd.job.training_memory import Trainer

Values = Mapping[str, Any]
Find = Callable[[str], Given | None]
RL, SFT, SERVER = "RLConfig", "SFTConfig", "InferenceConfig"
# Sections of the model's configuration whose effect on the memory is unknown.
UNKNOWN = {
    "vlm": "a vision-language model's memory",
    "lora": "what prime-rl's LoRA layers keep",
    "quantization": "the memory of FP8 and MXFP8 training",
    "full_offload": "what an optimizer step within the backward pass leaves on the GPU",
    "debug.num_layers": "the memory of a model with fewer layers",
}
# A server's options by Engine's field names, and those whose effect is unknown.
SERVED = {
    "tensor": "tensor_parallel_size",
    "share": "gpu_memory_utilization",
    "length": "max_model_len",
    "sequences": "max_num_seqs",
    "batched_tokens": "max_num_batched_tokens",
    "dtype": "dtype",
    "eager": "enforce_eager",
}
UNSERVED = (
    *("quantization", "kv_cache_dtype", "cpu_offload_gb", "pipeline_parallel_size"),
    *("enable_lora", "speculative_config", "hf_overrides"),
)
HEAD = "fused_lm_head_token_chunk_size"


def recipe(find: Find, top: str) -> Recipe | None:
    """How the plan of a program is made, by the class of its configuration."""
    if top not in (RL, SFT, SERVER):
        return None
    below = "inference." * (top != SERVER)
    inference = find("inference") if below else Given("user", {})
    serves = inference is not None and (inference.value is not None or inference.needs)
    servers = (_served(find, below),) if serves else ()
    if top == SERVER:
        doubt = "prime-rl's inference trains nothing"
        return Recipe(_job, {}, {"doubt": doubt}, servers=servers)
    start = "trainer." if top == RL else ""
    try:
        facts = _facts(find, start)
    except CheckError as error:
        facts = {"doubt": str(error)}
    model = f"{start}model."
    table = names("prime-rl" if top == RL else "prime-rl-sft")
    keys = {
        name: (key,) for name, key in table.items() if not key.startswith("inference.")
    }
    away = f"{model}fsdp_cpu_offload=true", f"{model}optim_cpu_offload=false"
    return Recipe(_job, keys | {"offload_param": away}, facts, servers=servers)


def _certain(find: Find, key: str) -> Any:
    """A value. Raises CheckError if it is not certain."""
    given = find(key)
    if given is not None and given.needs:
        raise CheckError(f"{key} is not certain")
    return None if given is None else given.value


def _facts(find: Find, start: str) -> dict[str, Any]:
    """What the plan needs besides the values of ``gkd check``."""

    def model(key: str) -> Any:
        return _certain(find, f"{start}model.{key}")

    for key, text in UNKNOWN.items():
        if model(key) not in (None, False):
            raise CheckError(f"{text} is not known ({start}model.{key})")
    offloads = model("ac_offloading") is not None
    if not offloads and model("ac") is None:
        text = "what compiled layers keep without recomputation"
        raise CheckError(f"{text} is not known ({start}model.ac)")
    if model("ac") is not None and (model("ac.mode"), model("ac.freq")) != ("full", 1):
        raise CheckError(f"only full recomputation is known ({start}model.ac)")
    if model("reshard_after_forward") is not True:
        text = "FSDP that keeps what it has gathered is not known yet"
        raise CheckError(f"{text} ({start}model.reshard_after_forward)")
    optimizer = _certain(find, f"{start}optim.type") or "adamw"
    if optimizer != "adamw":
        raise CheckError(f"the state of the optimizer {optimizer} is not known")
    chunk = model(HEAD)
    if type(chunk) is not int and start:
        text = "the compiled loss on whole logits is not known"
        raise CheckError(f"{text} ({start}model.{HEAD})")
    shared = _certain(find, "weight_broadcast.type") if start else None
    own = _certain(find, f"{start}weight_broadcast.type") if start else None
    if "nixl" in (shared, own):
        raise CheckError("NIXL's buffers are not known yet (weight_broadcast.type)")
    return {
        "chunk": chunk if type(chunk) is int else 0,
        "offloads_inputs": offloads,
        "reduce": model("reduce_dtype"),
        "replicas": model("dp_replicate"),
        "sends": shared or own or "",
    }


def _served(find: Find, below: str) -> Served:
    """The vLLM server, which has its own GPUs (entrypoints/rl.py)."""
    start = f"{below}vllm."
    asked = [*UNSERVED, *SERVED.values(), "model"]
    path, doubt, said = None, "", dict[str, Any]()
    try:
        said = {key: _certain(find, f"{start}{key}") for key in asked}
        kind = _certain(find, f"{below}deployment.type") or "single_node"
        path = said["model"]
        strange = [f"{start}{key}" for key in UNSERVED if said[key]]
        strange += [f"the deployment {kind}"] * (kind != "single_node")
        doubt = f"the effect of {strange[0]} is not known" if strange else ""
    except CheckError as error:
        doubt = str(error)
    sizes = {name: said.get(key) for name, key in SERVED.items()}
    keys = {name: f"{start}{key}" for name, key in SERVED.items()}
    role = "rollout server" if below else "inference server"
    return Served(role, path, sizes, keys=keys, doubt=doubt)


def _job(
    values: Values, student: Model, teacher: Model | None, room: int | None
) -> Job:
    """The parts of a trainer, at full lengths: a micro-batch is packed up to a row's
    length (batch.py; sft/data.py, setup_dataloader)."""
    if values.get("doubt"):
        raise CheckError(values["doubt"])
    gpus, row, replicas = number(values, "trainer_gpus", "max_length", "replicas")
    context = number(values, "context_parallel_size")[0]
    weights, reduce = str(values.get("weights_dtype")), str(values["reduce"])
    for name, dtype in (("optimization_dtype", weights), ("reduce_dtype", reduce)):
        if dtype not in WIDTHS:
            raise CheckError(f"{name} is {dtype[:40]}")
    if any(layer.shape.count for layer in student.layers):
        raise CheckError("the memory of prime-rl's mixtures of experts is not known")
    if student.kind.startswith("gemma") and values["chunk"]:
        raise CheckError("the output matrix of Gemma's models is not known yet")
    if gpus % (replicas * context):
        raise CheckError(f"{gpus} GPUs cannot be divided by dp_replicate * cp")
    micro = values.get("micro_batch_size") or 1
    tokens = micro * row
    batch = values.get("train_batch_size" if "micro_batch_size" in values else "")
    batch = batch or values.get("ppo_mini_batch_size") or 0
    several = not batch or batch * context > micro * gpus
    is_away, leaves = values.get("offload_param"), values.get("offload_optimizer")
    trainer = Trainer(
        student,
        gpus=gpus,
        sharding="fsdp2",
        shards=gpus // replicas,
        apart=("embedding", "head"),
        context=context,
        weights=weights,
        step="foreach" if leaves else "fused",
        offload_weights="always" if is_away else "never",
        offload_states="always" if is_away else "but for steps" if leaves else "never",
        offload_inputs=values["offloads_inputs"],
        tokens=tokens,
        chunk=values["chunk"],
        micro_batches=1 + bool(several),
        reduce=reduce,
        loss="prime" if values["chunk"] else "cross-entropy",
    )
    return Job(
        trainer, memory=room, sends=bool(values["sends"]), bucket=_sent(values, student)
    )


def _sent(values: Values, student: Model) -> int:
    """Bytes of weights that are gathered in 16 bits to be sent: one tensor, or with
    NCCL a layer's or all that are in none, and a flat copy of them
    (transports/weights/nccl.py, broadcast_state_dict)."""
    layers = [layer.elements for layer in student.layers]
    if values["sends"] == "nccl":
        return 4 * max(*layers, student.elements - sum(layers))
    return math.ceil(2 * student.largest)
