"""Which stages exist: their order, lane, needs and time budget. Data, nothing else."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """One stage of the plan.

    ``lane`` names the worker process the stage runs in; stages of one lane share
    their imports and session fixtures. ``needs`` are stages whose failure makes this
    one pointless. ``budget_s`` is in seconds and excludes waiting for ``needs``;
    ``gpu_budget_s`` takes its place where there are GPUs: a first start compiles
    kernels (Triton, FlashInfer) for minutes, and models of several billion parameters
    are read from disk. What hangs is still ended early.
    ``shared`` marks a stage whose product (the engine) a later stage has to make
    itself when this one is not selected, and then needs this one's time for.
    ``of_config`` marks one that there is only where the job's own configuration is
    given.
    """

    name: str
    title: str
    lane: str
    needs: tuple[str, ...]
    budget_s: float
    shared: bool = False
    gpu_budget_s: float | None = None
    of_config: bool = False

    def budget(self, gpus: int) -> float:
        """Seconds, on a machine with so many GPUs in use."""
        return self.gpu_budget_s if gpus and self.gpu_budget_s else self.budget_s


# The order is the order of reports. Within the lane "host", data and tokenizer run
# first (see stage_plan.py): they are quick, and training_step waits for them.
STAGES: tuple[Stage, ...] = (
    Stage("config", "the job's own configuration", "host", (), 10, of_config=True),
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
)

BY_NAME = {stage.name: stage for stage in STAGES}
OF_EVERY_JOB = tuple(stage.name for stage in STAGES if not stage.of_config)

# The order in which a lane runs its stages where it differs from the order of reports.
LANE_ORDER: dict[str, tuple[str, ...]] = {
    "host": ("config", "data", "tokenizer", "environment", "nccl"),
}

# vLLM measures the GPU's memory while its engine starts and gives up when others take
# or free some meanwhile (vllm/v1/worker/gpu_worker.py, determine_available_memory):
# where there are GPUs, these stages wait until the first of those is over. An engine
# keeps a GPU that takes one process at a time: there they come before it.
USES_GPUS = ("nccl",)
STARTS_ENGINE = ("vllm", "weight_sync", "training_step")

LAYOUTS = ("colocated", "split", "ray")
