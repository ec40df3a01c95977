"""Trainer and engine in one process, or in processes side by side."""

from __future__ import annotations

from typing import Any

from pytest_gkd.processes import gpus
from pytest_gkd.stage_api import StageContext
from pytest_gkd.workload.deadline import both, within
from pytest_gkd.workload.engine import compiling
from pytest_gkd.workload.engine import engine as engines
from pytest_gkd.workload.environment import engine_imports
from pytest_gkd.workload.layouts.estimate import places
from pytest_gkd.workload.layouts.plan import Plan
from pytest_gkd.workload.sync.broadcast import Info, nbytes

# Both texts seen with vLLM 0.32 and Olmo2ForCausalLM: the first of a model that was
# loaded before the engine, the second of one that was loaded after.
SHARED_CLASS = (
    "vLLM runs this model by transformers' own {0} and changes that class for "
    "torch.compile: a trainer of it in the engine's process then fails (\"'{0}' object "
    'has no attribute \'do_not_compile\'", "Current vLLM config is not set"). This run '
    "kept vLLM from changing it; your job does not, and needs an engine in processes "
    "of its own, as in layout split"
)


class _Local:
    """Trainer and teacher in this process."""

    def __init__(self, plan: Plan, gkd: StageContext) -> None:
        self.plan = plan
        self.gkd = gkd
        self._engine: engines.Engine | None = None
        engines.prepare_torch(plan.engine)

    def start_engine(self) -> engines.Engine:
        self.gkd.step("importing vLLM")
        engines.prepare_environment(self.plan.engine)
        with engine_imports.told(self.gkd.run_dir):
            engines.import_vllm()
        with compiling.told(
            self.gkd.step, "starting the engine", on_gpu=self.plan.settings.gpus > 0
        ):
            self._engine = self.new_engine()
        return self._engine

    def new_engine(self) -> engines.Engine:
        return engines.Engine(self.plan.engine, self.budget_s)

    def budget_s(self) -> float:
        return self.gkd.working_s()

    def load_trainer(self) -> tuple[Any, Any]:
        from pytest_gkd.workload.gkd.trainer import Trainer
        from pytest_gkd.workload.sync.push import WeightSource

        trainer = Trainer(
            self.plan.student,
            device=self.device(trainer=True),
            dtype=self.plan.engine.dtype,
            learning_rate=self.plan.settings.learning_rate,
            trust_remote_code=self.plan.settings.trust_remote_code,
        )
        return trainer, WeightSource(trainer)

    def load_teacher(self) -> Any:
        from pytest_gkd.workload.gkd.teacher import Teacher

        return Teacher(
            self.plan.teacher,
            device=self.device(trainer=False),
            dtype=self.plan.engine.dtype,
            trust_remote_code=self.plan.settings.trust_remote_code,
        )

    def device(self, *, trainer: bool) -> str:
        del trainer
        return self.plan.settings.device

    def close(self, *, for_another: bool) -> None:
        engine, self._engine = self._engine, None
        # In one process there is nothing to end, and taking it down costs 2 s.
        if engine is not None and (for_another or self.plan.engine.multiprocess):
            engine.close()


class Colocated(_Local):
    """Everything in this process; a push is a load in place."""

    name = "colocated"

    def new_engine(self) -> engines.Engine:
        from pytest_gkd.workload.engine import engine_worker

        with engine_worker.trainers_classes_kept(
            self.plan.engine.architectures
        ) as kept:
            engine = super().new_engine()
        if kept:
            self.gkd.note("vllm.shared-class", SHARED_CLASS.format(", ".join(kept)))
        return engine

    def transport(self, engine: Any, source: Any) -> tuple[str, str]:
        del engine, source
        return "in-process", "trainer and engine share a process"

    def carry(
        self,
        transport: str,
        engine: Any,
        source: Any,
        infos: list[Info],
        budget_s: float,
    ) -> int:
        del transport, budget_s
        engine.load(source.tensors(infos))
        return sum(nbytes(info) for info in infos)


class Split(_Local):
    """The trainer here, vLLM's core and workers in processes of their own."""

    name = "split"

    def device(self, *, trainer: bool) -> str:
        """The first GPUs are the engine's; trainer and teacher get what is left."""
        settings = self.plan.settings
        if settings.device == "cpu":
            return "cpu"
        role = "student" if trainer else "teacher"
        return f"cuda:{places(settings)[role][0]}"

    def transport(self, engine: Any, source: Any) -> tuple[str, str]:
        transport, why = choose_transport(engine, source, same_gpu="cuda-ipc")
        problem = source.cannot_share(engine) if transport == "cuda-ipc" else ""
        if problem:
            transport = "gloo"
            why += f"; through host memory, as CUDA IPC does not work here: {problem}"
        return transport, why

    def carry(
        self,
        transport: str,
        engine: Any,
        source: Any,
        infos: list[Info],
        budget_s: float,
    ) -> int:
        if transport == "cuda-ipc":
            handles = source.share(infos)
            what = "the load from the trainer's GPU memory"
            within(
                budget_s,
                lambda: engine.take_shared(infos, handles),
                what,
                "sync.stuck",
            )
            source.unshare()
            return sum(nbytes(info) for info in infos)
        ranks = 1 + self.plan.engine.tensor_parallel_size
        meeting = source.call_meeting(transport, ranks, operation_budget_s(budget_s))
        sent, _ = both(
            (f"sending by {transport}", lambda: source.send(meeting, infos)),
            (
                "the engine's load of what is sent",
                lambda: engine.receive(infos, meeting),
            ),
            budget_s,
            "sync.stuck",
        )
        return int(sent)


def operation_budget_s(budget_s: float) -> float:
    """Seconds for one operation of a broadcast whose whole may take ``budget_s``.

    gloo names the side that does not answer, but was measured to take up to 2.6 times
    its timeout; it should still come before our own deadline, which names none.
    """
    return max(2.0, min(30.0, budget_s / 3.0))


def choose_transport(engine: Any, source: Any, *, same_gpu: str) -> tuple[str, str]:
    """The transport between two processes, and why.

    ``same_gpu`` is what they use when all are on one GPU. NCCL takes one rank a GPU,
    and memory of a GPU cannot be opened from every other one.
    """
    trainer: str = source.identity()
    ranks: list[str] = [rank["uuid"] for rank in engine.identities()]
    if trainer == "cpu":
        return "gloo", "weights are in host memory"
    if {trainer} == set(ranks):
        return same_gpu, "trainer and engine share a GPU, which NCCL refuses"
    # Instances under MIG have UUIDs of their own; to NCCL they are one (issue 1716).
    if len(set(gpus.physical([trainer, *ranks]))) <= len(ranks):
        return "gloo", "some of the processes share a GPU, which NCCL refuses"
    return "nccl", f"trainer and engine are on {1 + len(ranks)} GPUs"
