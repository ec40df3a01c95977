"""The built-in stages: their order, lane, needs and time budget. Data, nothing else."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """One stage of the plan.

    ``lane`` names the worker process the stage runs in; stages in the same lane share
    imports and session fixtures. ``needs`` are stages whose failure makes this one
    pointless. ``budget_s`` is in seconds and excludes waiting for ``needs``;
    ``gpu_budget_s`` replaces it if there are GPUs: a first start compiles kernels
    (Triton, FlashInfer) for minutes, and models of several billion parameters are read
    from disk. What hangs is still ended early.
    ``shared`` marks a stage whose product (the engine) a later stage has to create
    itself if this one is not selected, for which it then gets this one's budget, too.
    ``option`` names the option without which it does not exist, ``config`` for
    ``--gkd-config``; such a stage is about the user's own job, not about ours.
    """

    name: str
    title: str
    lane: str
    needs: tuple[str, ...]
    budget_s: float
    shared: bool = False
    gpu_budget_s: float | None = None
    option: str = ""

    def budget(self, gpus: int) -> float:
        """The budget in seconds on a machine with ``gpus`` GPUs in use."""
        return self.gpu_budget_s if gpus and self.gpu_budget_s else self.budget_s


# In report order. Within the lane "host", data and tokenizer run first (see
# stage_plan.py): they are quick, and training_step waits for them.
STAGES: tuple[Stage, ...] = (
    Stage("config", "the job's own configuration", "host", (), 10, option="config"),
    Stage("environment", "versions, GPU, disk, limits, Ray", "host", (), 30),
    Stage("data", "train files", "host", (), 20),
    Stage("tokenizer", "student and teacher tokenizers", "host", (), 30),
    Stage("vllm", "rollout engine", "rollout", (), 120, shared=True, gpu_budget_s=600),
    Stage("nccl", "all-reduce", "host", (), 60, gpu_budget_s=120),
    Stage(
        "weight_sync",
        "trainer to rollout engine",
        "rollout",
        ("vllm",),
        60,
        gpu_budget_s=180,
    ),
    Stage(
        "training_step",
        "one GKD step",
        "rollout",
        ("data", "tokenizer", "vllm", "weight_sync"),
        300,
        gpu_budget_s=600,
    ),
    # In the engine's lane: it gets the machine once that engine is ended.
    Stage(
        "launch",
        "the job itself, up to its first step",
        "rollout",
        (
            *("config", "environment", "data", "tokenizer", "vllm", "nccl"),
            *("weight_sync", "training_step"),
        ),
        1200,
        gpu_budget_s=1800,
        option="launch",
    ),
)

BY_NAME = {stage.name: stage for stage in STAGES}
OF_EVERY_JOB = tuple(stage.name for stage in STAGES if not stage.option)

# The order in which a lane runs its stages where it differs from report order.
LANE_ORDER: dict[str, tuple[str, ...]] = {
    "host": ("config", "data", "tokenizer", "environment", "nccl"),
}

# vLLM measures the GPU's memory while its engine starts and gives up if others allocate
# or free some meanwhile (vllm/v1/worker/gpu_worker.py, determine_available_memory): if
# there are GPUs, USES_GPUS wait until the first of STARTS_ENGINE is over. An engine
# holds on to a GPU that takes one process at a time: in that case they run before it.
USES_GPUS = ("nccl",)
STARTS_ENGINE = ("vllm", "weight_sync", "training_step")

LAYOUTS = ("colocated", "split", "ray")
