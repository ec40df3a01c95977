"""The parts of a ROLL job whose trainer is under FSDP2, for its memory plan.

Rules are those of 8eb27cc2; files are named below roll/. Workers are separate
processes: models are in host memory while another has the GPU, AdamW's states are not
(distributed/strategy/fsdp2_strategy.py, offload_states).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pytest_gkd.job import beside_memory, looking
from pytest_gkd.job.beside_memory import Beside, Scorer
from pytest_gkd.job.engine_memory import MOST_SEQUENCES, Engine
from pytest_gkd.job.findings import CheckError
from pytest_gkd.job.fitting import Recipe, number, sampling_engine
from pytest_gkd.job.frameworks.roll.job import Look
from pytest_gkd.job.frameworks.roll.values import DTYPES
from pytest_gkd.job.memory import Job
from pytest_gkd.job.models import WIDTHS, Model
from pytest_gkd.job.training_memory import Trainer

Values = Mapping[str, Any]
# Bytes of logits per token and entry in a forward pass: in 16 bits, in float32, and
# their log-softmax (utils/functionals.py, log_probs_from_logits).
ASKED = 10
# Parts of strategy_config whose effect on the memory is not known, with the values
# that have none.
UNKNOWN: dict[str, tuple[Any, ...]] = {
    "reshard_after_forward": (None, True),
    "ep_size": (None, 1),
    "apply_tiled_mlp": (None, False),
    "apply_expert_patch": (None, False),
}


def recipe(look: Look) -> Recipe:
    """How its plan is made; ROLL's keys depend on the section, so none is changed."""
    return Recipe(_job, {}, looking.plan_facts(_facts, look))


def _facts(look: Look) -> dict[str, Any]:
    """What the plan needs besides the values of ``gkd check``.

    Raises CheckError for what is not planned.
    """
    own = look.trainer
    strategy = look.strategy(own)
    if look.is_rollout or not look.is_ppo or strategy != "fsdp2_train":
        whose = f"{look.root} under {strategy or 'no strategy'}"
        raise CheckError(f"of ROLL only RLVR and agents under fsdp2_train, not {whose}")
    for name, harmless in UNKNOWN.items():
        if look.part(own, name) not in harmless:
            raise CheckError(f"the memory of {name} is not known ({own})")
    for is_on, text in (
        (look.has_lora(), "what LoRA's layers keep"),
        (look("adv_estimator") == "gae", "the memory of a critic"),
        (look.number("entropy_loss_coef") > 0, "what the entropy's gradient keeps"),
        (look.is_on(f"{own}.use_dynamic_batching_in_train"), "a batch of that size"),
    ):
        if is_on:
            raise CheckError(f"{text} is not known")
    gpus = set(look.gpus(own))
    others = [*look.teachers(), *(["reference"] * look.has_reference())]
    for worker in look.workers():
        if worker.startswith("reward") and gpus & set(look.gpus(worker)):
            raise CheckError(f"the memory of {worker} beside the trainer is not known")
    return {
        "others": [_other(look, worker, gpus) for worker in others],
        "weights": _dtype(look, own, "float32"),
        "compute": _dtype(look, own, "bfloat16"),
        "reduce": _dtype(look, own, "float32", "reduce_dtype"),
        "apart": _apart(look, own),
        "defers": not look.part(own, "reduce_scatter_during_grad_accumulation", True),
        "asked": look.size(f"{own}.infer_batch_size"),
    }


def _dtype(look: Look, worker: str, usual: str, name: str = "param_dtype") -> str:
    said = str(look.part(worker, name, usual)).removeprefix("torch.")
    found = DTYPES.get(said, said)
    if found not in WIDTHS:
        raise CheckError(f"{name} of {worker} is {found[:40]}")
    return found


def _apart(look: Look, worker: str) -> tuple[str, ...]:
    """The FSDP2 groups beside the layers (utils/fsdp_utils.py, apply_fsdp2): an
    embedding that is not tied always, the output matrix if asked for.
    """
    has_head = look.part(worker, "wrap_policy.wrap_lm_output", False)
    return ("embedding", *(["head"] * bool(has_head)))


def _other(look: Look, worker: str, gpus: set[int]) -> dict[str, Any]:
    """A model that scores."""
    strategy, own = look.strategy(worker), look.gpus(worker)
    if strategy not in ("fsdp2_infer", "hf_infer") or look.part(
        worker, "offload_policy"
    ):
        raise CheckError(f"the memory of {worker} under {strategy} is not known")
    return {
        "role": "teacher" if worker.startswith("teacher") else worker,
        "rows": look.size(f"{worker}.infer_batch_size"),
        "ranks": len(own) if strategy == "fsdp2_infer" else look.per_worker(worker),
        "dtype": _dtype(look, worker, "bfloat16"),
        "shares": bool(gpus & set(own)),
    }


def _job(
    values: Values, student: Model, teacher: Model | None, room: int | None
) -> Job:
    """The parts of a job, at full lengths."""
    if values.get("doubt"):
        raise CheckError(values["doubt"])
    row, micro, gpus = number(
        values, "max_length", "per_device_train_batch_size", "trainer_gpus"
    )
    (accumulated,) = number(values, "gradient_accumulation_steps")
    context = values.get("context_parallel_size") or 1
    is_away, size = bool(values.get("offload_policy")), values.get("fsdp_size") or 1
    trainer = Trainer(
        student,
        gpus=gpus,
        shards=size if 1 < size < gpus else 0,
        sharding="fsdp2",
        apart=values["apart"],
        context=context,
        weights=values["weights"],
        compute=values["compute"],
        reduce=values["reduce"],
        offload_weights="always" if is_away else "between",
        offload_states="always" if is_away else "never",
        recompute=values.get("recompute") is not False,
        tokens=micro * row,
        micro_batches=1 + (accumulated > 1),
        keeps=values["defers"],
        loss="roll",
    )
    colocated = values.get("placement") != "split"
    asked = math.ceil(values["asked"] * row / context)
    return Job(
        trainer,
        _engine(values, student, row, sleeps=colocated),
        colocated=colocated,
        memory=room,
        bucket=(values.get("sync_bucket_megabytes") or 1024) << 20,
        scores=beside_memory.asked(trainer, asked, ASKED),
        others=tuple(
            _scored(one, teacher if one["role"] == "teacher" else student, row)
            for one in values["others"]
        ),
    )


def _scored(one: Mapping[str, Any], model: Model | None, row: int) -> Beside:
    if model is None:
        raise CheckError("the teacher's sizes are not known")
    scorer = Scorer(
        *(one["role"], model, one["rows"] * row, one["ranks"]),
        dtype=one["dtype"],
        logits=ASKED,
        offload="between",
    )
    return beside_memory.scored(scorer, shares=one["shares"])


def _engine(values: Values, student: Model, row: int, *, sleeps: bool) -> Engine:
    """Engines that free their memory after each rollout if the trainer is on their
    GPUs (distributed/strategy/vllm_strategy.py, offload_states).
    """
    kind = str(values.get("rollout_engine"))
    if kind not in ("vllm", "sglang"):
        raise CheckError(f"the memory of a rollout under {kind} is not known")
    if kind == "sglang" and not values.get("gpu_memory_utilization"):
        raise CheckError("SGLang chooses mem_fraction_static by the GPU")
    return sampling_engine(
        values,
        student,
        row,
        share=0.9,
        sequences=values.get("max_num_seqs") or MOST_SEQUENCES,
        batched_tokens=values.get("max_num_batched_tokens") or 8192,
        sleeps=sleeps,
        eager=bool(values.get("enforce_eager")),
        kind=kind,
    )
