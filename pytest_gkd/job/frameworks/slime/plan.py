"""The parts of a slime or miles job, for its memory plan.

Rules are those of slime 0.2.4 to 0.3.1 and miles 0.1.0; files are named below slime/.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pytest_gkd.job import megatron_memory
from pytest_gkd.job.engine_memory import Engine
from pytest_gkd.job.findings import CheckError
from pytest_gkd.job.fitting import Recipe, number
from pytest_gkd.job.frameworks import megatron_trainer
from pytest_gkd.job.frameworks.slime.options import Known
from pytest_gkd.job.frameworks.slime.rules import teachers
from pytest_gkd.job.megatron_memory import PARTS
from pytest_gkd.job.memory import Job
from pytest_gkd.job.models import Model

Values = Mapping[str, Any]
# The options that express a change.
KEYS = {
    "max_tokens_per_gpu": ("--max-tokens-per-gpu",),
    "micro_batch_size": ("--micro-batch-size",),
    "gpu_memory_utilization": ("--sglang-mem-fraction-static",),
    "context_parallel_size": ("--context-parallel-size",),
    "train_tensor_parallel_size": ("--tensor-model-parallel-size",),
    "nodes": ("--actor-num-nodes",),
    "recompute": (
        "--recompute-granularity=full --recompute-method=uniform "
        "--recompute-num-layers=1",
    ),
    "offload_optimizer": (
        "--optimizer-cpu-offload --use-precision-aware-optimizer "
        "--optimizer-offload-fraction=1.0",
    ),
}
# Bytes of the loss per token and vocabulary entry, measured on the functions themselves
# (utils/ppo_utils.py, calculate_log_probs_and_entropy; miles' loss_hub/math_utils.py)
# by torch's profiler on a CPU, less the product of softmax and logits that CUDA does
# not materialise: alone, with a temperature, with a gradient of the entropy, with both.
LOSSES = {
    "0.2.4": (16, 20, 16, 20),
    "0.3.0": (18, 20, 18, 20),
    "0.3.1": (8, 12, 12, 12),
    "miles": (12, 16, 16, 20),
}
# Options whose effect on the memory is unknown, with the values that have none.
UNKNOWN: dict[str, tuple[str, tuple[Any, ...]]] = {
    "train_backend": ("the memory of that backend", ("megatron",)),
    "loss_type": ("the memory of a loss of one's own", ("policy_loss", "sft_loss")),
    "custom_model_provider_path": ("a model of one's own", ()),
    "only_train_params_name_list": ("how much is trained", ([],)),
    "freeze_params_name_list": ("how much is trained", ([],)),
    "use_critic": ("the memory of a critic", (False,)),
    "release_train": ("what a released trainer leaves", (False,)),
    "qkv_format": ("how rows are padded", ("thd",)),
    "allgather_cp": ("the memory of gathered context parallelism", (False,)),
    "true_on_policy_mode": ("the memory of that loss", (False,)),
    "offload_train_target": ("what offloading to that leaves", ("cpu",)),
    "rematerialize_param_from_master_weight": ("what that leaves", (False,)),
    "offload_optimizer_states": ("what that leaves", (False,)),
    "sglang_enable_dp_attention": ("SGLang's data parallel attention", (False,)),
    "sglang_config": ("a configuration of SGLang's own", ()),
    "sglang_kv_cache_dtype": ("the cache in that dtype", ("auto",)),
    "sglang_quantization": ("SGLang's own quantisation", ()),
}
FACTS = (
    *("entropy_coef", "rollout_temperature", "rollout_top_p", "offload_rollout"),
    *("update_weight_buffer_size", "log_probs_max_tokens_per_gpu", "num_critic_nodes"),
    *("debug_rollout_only", "debug_train_only", "advantage_estimator", "loss_type"),
    *("sglang_chunked_prefill_size", "sglang_max_running_requests"),
    *("sglang_disable_cuda_graph", "rollout_max_context_len", "use_opd", "opd_type"),
    *("rollout_external_engine_addrs", "load_debug_rollout_data", "ref_load"),
)


def recipe(known: Known) -> Recipe:
    """How its plan is made, with its options for what can be changed."""
    try:
        facts = _facts(known)
    except CheckError as error:
        facts = {"doubt": str(error)}
    # miles 0.1.0 uses SGLang 0.5.16, slime up to 0.3.1 earlier ones.
    in_chunks = known.name == "miles"
    servers = (one.served("teacher", in_chunks=in_chunks) for one in teachers(known))
    facts["teacher_gpus"] = 0  # in the trainer's plan: a server has its own
    return Recipe(_job, KEYS, facts, servers=tuple(servers))


def _facts(known: Known) -> dict[str, Any]:
    """What the plan needs besides the values of ``gkd check``.

    Raises CheckError if something is not certain, or its memory is not known.
    """

    def find(key: str) -> Any:
        if not known.has(key):
            return None
        given = known.find(key)
        if given.needs:
            raise CheckError(f"{key} is not certain")
        return given.value

    for key, (text, harmless) in UNKNOWN.items():
        value = find(key)
        if value is not None and value not in harmless:
            raise CheckError(f"{text} is not known ({key})")
    found = {key: find(key) for key in FACTS}
    if found["debug_rollout_only"]:
        raise CheckError("nothing is trained (debug_rollout_only)")
    if found["advantage_estimator"] == "ppo":
        raise CheckError("the memory of a critic is not known (advantage_estimator)")
    kind = "miles" if known.name == "miles" else str(known.release).split("+")[0]
    newest = "0.3.1" if known.is_at_least("0.3.1") else kind
    if newest not in LOSSES:
        raise CheckError(f"the memory of the loss of {known.name} {kind} is not known")
    if newest == "0.3.1" and found["rollout_top_p"] != 1:
        raise CheckError("the memory of the replay of rollout_top_p is not known")
    found["loss"] = LOSSES[newest]
    found["recompute"] = find("recompute_granularity") == "full"
    return found | {"megatron": megatron_trainer.settings(find)}


def _job(values: Values, student: Model, _: Model | None, room: int | None) -> Job:
    """The parts of a job, with rows at full length."""
    if values.get("doubt"):
        raise CheckError(values["doubt"])
    said = values["megatron"]
    response = number(values, "max_response_length")[0]
    prompt = values.get("max_prompt_length")
    length = values["rollout_max_context_len"]
    length = length or (prompt and prompt + response)
    context = values.get("context_parallel_size") or 1
    gpus = number(values, "trainer_gpus")[0]
    stages = said["pipeline_model_parallel_size"] or 1
    tensor = values.get("train_tensor_parallel_size") or 1
    rows = number(values, "ppo_mini_batch_size")[0] * tensor * stages * context / gpus
    scored = 0
    if values.get("use_dynamic_bsz"):
        budget = number(values, "max_tokens_per_gpu")[0] * context
        tokens = max(budget, length or response)
        tokens = min(tokens, math.ceil(rows) * length) if length else tokens
        scored = max((values["log_probs_max_tokens_per_gpu"] or 0) * context, tokens)
    elif length:
        tokens = number(values, "micro_batch_size")[0] * length
    else:
        raise CheckError(
            "nothing bounds the prompts of a micro-batch (--rollout-max-prompt-len)"
        )
    shared = values.get("placement") == "colocated"
    away = bool(values.get("offload_param"))
    trainer = megatron_trainer.trainer(
        said,
        values,
        student,
        tokens=tokens,
        micro_batches=megatron_trainer.micro_batches(rows, length, tokens, stages),
        loss=_loss(values),
        # Paused by torch_memory_saver; weights are sent from copies in host memory
        # (backends/megatron_utils/actor.py, sleep and update_weights).
        away=frozenset(PARTS if away else ()),
        away_to_send=frozenset(PARTS if away else ()),
        # Gathered and, for the engine on the same GPU, flattened (update_weight/
        # update_weight_from_tensor.py).
        copies=2 if shared else 1,
    )
    rollout = _rollout(values, student, length or response)
    if shared and rollout is None and values.get("rollout_gpus") != 0:
        raise CheckError("SGLang chooses its share (--sglang-mem-fraction-static)")
    return Job(
        trainer,
        rollout,
        # A teacher of the trainer (--opd-type megatron) takes turns with its weights,
        # and waits in host memory; a served one has its own rows.
        scores=megatron_memory.scoring(trainer, scored) if scored else {},
        colocated=shared,
        memory=room,
        bucket=values["update_weight_buffer_size"] or 512 << 20,
    )


def _loss(values: Values) -> int:
    """The release's loss, by the temperature and the entropy's coefficient."""
    is_trained = values["loss_type"] != "sft_loss"
    scales = values["rollout_temperature"] not in (None, 1)
    spreads = bool(values["entropy_coef"]) and is_trained
    return int(values["loss"][scales + 2 * spreads])


def _rollout(values: Values, student: Model, length: int) -> Engine | None:
    """SGLang's engines; None if there are none here, or their share is automatic."""
    share, gpus = values.get("gpu_memory_utilization"), values.get("rollout_gpus")
    is_elsewhere = values["debug_train_only"] or values["load_debug_rollout_data"]
    if not share or not gpus or is_elsewhere or values["rollout_external_engine_addrs"]:
        return None
    sleeps = values["offload_rollout"]
    if sleeps is None:
        sleeps = values.get("placement") == "colocated"
    return Engine(
        student,
        gpus=gpus,
        tensor=values.get("tensor_parallel_size") or 1,
        pipeline=values.get("pipeline_parallel_size") or 1,
        share=share,
        length=values.get("max_model_len") or length,
        sequences=values["sglang_max_running_requests"] or 1,
        batched_tokens=max(values["sglang_chunked_prefill_size"] or 8192, 512),
        sleeps=bool(sleeps),
        eager=bool(values["sglang_disable_cuda_graph"]),
        kind="sglang",
    )
