"""Trainer and engine in one process, or in separate processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_gkd.stage_api import StageContext
from pytest_gkd.workload.engine import compiling
from pytest_gkd.workload.engine import engine as engines
from pytest_gkd.workload.environment import engine_imports
from pytest_gkd.workload.layouts.estimate import HOST, placement
from pytest_gkd.workload.layouts.job_config import JobConfig
from pytest_gkd.workload.sync import transfer
from pytest_gkd.workload.sync.transfer import InProcess, Transfer

if TYPE_CHECKING:
    from pytest_gkd.workload.gkd.teacher import Teacher
    from pytest_gkd.workload.gkd.trainer import Trainer
    from pytest_gkd.workload.gkd.weight_source import WeightSource

# Both texts seen with vLLM 0.32 and Olmo2ForCausalLM: the first for a model loaded
# before the engine, the second for one loaded after it.
SHARED_CLASS = (
    "vLLM runs this model by transformers' own {0} and changes that class for "
    "torch.compile: a trainer of it in the engine's process then fails (\"'{0}' object "
    'has no attribute \'do_not_compile\'", "Current vLLM config is not set"). This run '
    "kept vLLM from changing it; your job does not, and needs an engine in processes "
    "of its own, as in layout split"
)


class _Local:
    """Trainer and teacher in this process."""

    def __init__(self, config: JobConfig, gkd: StageContext) -> None:
        self.config = config
        self.gkd = gkd
        self._engine: engines.Engine | None = None
        engines.prepare_torch(config.engine)

    def start_engine(self) -> engines.Engine:
        self.gkd.step("importing vLLM")
        engines.prepare_environment(self.config.engine)
        with engine_imports.told(self.gkd.run_dir):
            engines.import_vllm()
        with compiling.told(
            self.gkd, "starting the engine", on_gpu=self.config.settings.gpus > 0
        ):
            self._engine = self.new_engine()
        return self._engine

    def new_engine(self) -> engines.Engine:
        return engines.Engine(self.config.engine, self.gkd.working_s)

    def load_trainer(self) -> tuple[Trainer, WeightSource]:
        return self.config.load_trainer(self.device("student"))

    def load_teacher(self) -> Teacher:
        return self.config.load_teacher(self.device("teacher"))

    def device(self, role: str) -> str:
        place = placement(self.config.settings)[role][0]
        return "cpu" if place == HOST else f"cuda:{place}"

    def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()


class Colocated(_Local):
    """Everything in this process; a push loads weights in place."""

    name = "colocated"
    ends_by_itself = True  # shutting the engine down first would cost 2 s

    def new_engine(self) -> engines.Engine:
        from pytest_gkd.workload.engine import engine_worker

        with engine_worker.trainers_classes_kept(
            self.config.engine.architectures
        ) as kept:
            engine = super().new_engine()
        if kept:
            self.gkd.note("vllm.shared-class", SHARED_CLASS.format(", ".join(kept)))
        return engine

    def transfer(self, engine: Any, source: Any) -> Transfer:
        return InProcess(engine, source, self.gkd.working_s)


class Split(_Local):
    """The trainer here, vLLM's core and workers in processes of their own."""

    name = "split"
    ends_by_itself = False

    def transfer(self, engine: Any, source: Any) -> Transfer:
        return transfer.choose(engine, source, self.gkd.working_s, opens_memory=True)
