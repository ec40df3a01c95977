"""Where trainer, teacher and rollout engine live, and how weights move.

One interface with three implementations: in one process (``colocated``), engine and
trainer in separate processes (``split``), each a Ray actor (``ray``). Each creates a
job's parts where it wants them, and says how weights move; a part may be a proxy for
one in another process.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pytest_gkd.clock import monotonic
from pytest_gkd.options import BESIDE_THE_ENGINE, Settings
from pytest_gkd.stage_api import StageContext, StageFault
from pytest_gkd.workload.engine.engine import Completion, Engine
from pytest_gkd.workload.layouts.job_config import JobConfig, job_config
from pytest_gkd.workload.layouts.local_layouts import Colocated, Split
from pytest_gkd.workload.layouts.ray_layout import RayLayout
from pytest_gkd.workload.models import model_files
from pytest_gkd.workload.models.inputs import Inputs
from pytest_gkd.workload.sync import push
from pytest_gkd.workload.sync.transfer import Transfer

if TYPE_CHECKING:
    from pytest_gkd.workload.gkd.teacher import Teacher
    from pytest_gkd.workload.gkd.trainer import Trainer
    from pytest_gkd.workload.gkd.weight_source import WeightSource
    from pytest_gkd.workload.sync.push import ParameterMap


@dataclass(frozen=True)
class PushReport:
    """One weight push: tensors, bytes, seconds, and the transport."""

    tensors: int
    bytes: int
    seconds: float
    transport: str


Layout = Colocated | Split | RayLayout
LAYOUTS = {layout.name: layout for layout in (Colocated, Split, RayLayout)}


class Job:
    """A trainer, a teacher and a rollout engine that belong together.

    Each part is created on first use. ``broken`` is set when a stage fails: the engine
    may then hold half of the weights, or never answer again.
    """

    def __init__(self, gkd: StageContext, config: JobConfig, layout: Layout) -> None:
        self.config = config
        self.layout = layout
        self.broken = False
        self._gkd = gkd

    # -- parts -----------------------------------------------------------------------

    @cached_property
    def engine(self) -> Engine:
        return self.layout.start_engine()

    @cached_property
    def training(self) -> tuple[Trainer, WeightSource]:
        """The trainer, and the source that reads its weights for a push."""
        self._gkd.step("loading the trainer")
        return self.layout.load_trainer()

    @property
    def trainer(self) -> Trainer:
        return self.training[0]

    @property
    def source(self) -> WeightSource:
        return self.training[1]

    @cached_property
    def teacher(self) -> Teacher:
        self._gkd.step("loading the teacher")
        return self.layout.load_teacher()

    @cached_property
    def transfer(self) -> Transfer:
        return self.layout.transfer(self.engine, self.source)

    @cached_property
    def parameter_map(self) -> ParameterMap:
        """Which engine parameter takes which tensor, by the checkpoint's own names.

        Determined while both sides still hold that checkpoint.
        """
        self._gkd.step("matching parameters by name")
        return push.by_content(
            self._parameter_map_now(),
            lambda now: (self.engine.digests(now), self.source.digests(now)),
        )

    def _parameter_map_now(self) -> ParameterMap:
        names = [name for name, _, _ in self.trainer.parameter_info()]
        return self.engine.parameter_map(names)

    # -- work ------------------------------------------------------------------------

    def generate(
        self,
        prompts: list[list[int]],
        max_new_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> list[Completion]:
        """The engine's completions of ``prompts`` (token ids); greedy by default."""
        engine = self.engine
        self._gkd.step("generating")
        return engine.generate(
            prompts, max_new_tokens, temperature=temperature, seed=seed
        )

    def push_weights(self) -> PushReport:
        """Push the trainer's weights into the engine, after checking that they fit.

        Raises StageFault ``sync.name-or-shape`` or ``train.nan`` before anything is
        sent, ``sync.stuck`` if the push does not return, and whatever else the layout
        raises.
        """
        base = self.parameter_map
        transfer = self.transfer
        now = self._parameter_map_now()
        infos = self.source.infos(base)
        push.check_set(infos, base, now)
        push.check_finite(self.trainer.nonfinite(), len(infos))
        self._gkd.step(f"pushing weights ({transfer.transport})")
        started = monotonic()
        try:
            moved = transfer.push(infos)
        except Exception as error:
            fault = push.refusal(error, infos, base)
            if fault is None or isinstance(error, StageFault):
                raise
            raise fault from error
        seconds = monotonic() - started
        return PushReport(len(infos), moved, seconds, transfer.transport)

    def engine_digests(self) -> dict[str, str]:
        """A digest per tensor name of what the engine's processes hold."""
        mapped = self.parameter_map
        self._gkd.step("comparing checksums")
        return self.engine.digests(mapped)

    def trainer_digests(self) -> dict[str, str]:
        """The same for what the trainer holds, in the engine's dtypes."""
        return self.source.digests(self.parameter_map)

    def check_served(
        self, when: str, cause: str = "sync.not-applied"
    ) -> dict[str, str]:
        """Check by digests that the engine holds the trainer's weights.

        Raises StageFault ``cause``, or ``sync.name-or-shape`` for a tensor of another
        shape, which cannot be equal.
        """
        engine, mapped = self.engine_digests(), self.parameter_map
        push.check_shapes(self.source.infos(mapped), mapped, mapped)
        push.check_equal(engine, self.trainer_digests(), when, cause)
        return engine

    def describe(self) -> dict[str, Any]:
        """What runs, as findings for the report."""
        facts: dict[str, Any] = {
            "layout": self.layout.name,
            "layout_why": self.config.settings.layout_why,
            "transport": self.transfer.transport,
            "transport_why": self.transfer.why,
            **self.engine.describe(),
        }
        apart = (*self.parameter_map.unmapped, *self.parameter_map.unfilled)
        if apart:
            facts["tensors_without_partner_by_name"] = list(apart[:10])
        if self.parameter_map.by_content:
            facts["tensors_compared_by_content"] = len(self.parameter_map.by_content)
        return facts

    def close(self, *, for_another: bool = False) -> None:
        """End every process that the job started.

        ``for_another`` says that another job takes its place in this process, and needs
        the memory; otherwise the process itself is about to exit.
        """
        if for_another:
            for part in ("engine", "training", "teacher"):
                self.__dict__.pop(part, None)
        if for_another or not self.layout.ends_by_itself:
            self.layout.close()


def open_job(settings: Settings, gkd: StageContext, inputs: Inputs) -> Job:
    """A job in the layout that ``settings`` name; its parts are created on first use.

    Raises StageFault for models that do not exist and for contradictory settings,
    before anything heavy is imported.
    """
    for name in ("student", "teacher"):
        found = model_files.inspect(getattr(inputs, name), inputs.origin(name))
        if found is None:
            continue
        if name == "student":
            model_files.check_student(found, inputs.origin(name), settings.device)
        if untied := model_files.untied_head(found, inputs.origin(name)):
            gkd.note("model.untied-head", untied)
    check_layout(settings)
    config = job_config(settings, inputs, gkd.run_dir)
    made: Layout = LAYOUTS[settings.layout](config, gkd)
    return Job(gkd, config, made)


def check_layout(settings: Settings) -> None:
    """Raise StageFault ``config.invalid-combination`` for an impossible layout."""
    if settings.layout == "colocated" and settings.tensor_parallel_size > 1:
        raise StageFault(
            "config.invalid-combination",
            f"tensor parallel size {settings.tensor_parallel_size} "
            f"({settings.origin('tensor_parallel_size')}) with layout colocated "
            f"({settings.layout_why}): expected 1, for an engine that shares the "
            "trainer's process",
            facts={"tensor_parallel_size": settings.tensor_parallel_size},
        )
    wanted = settings.tensor_parallel_size + BESIDE_THE_ENGINE[settings.layout]
    if settings.exclusive and settings.gpus < wanted:
        raise StageFault(
            "config.invalid-combination",
            f"layout {settings.layout} ({settings.layout_why}) needs {wanted} GPUs "
            "where each takes one process at a time (exclusive compute mode), and "
            f"{settings.gpus} can be used; expected more GPUs, --gkd-layout=colocated, "
            "or GPUs in their default mode (nvidia-smi -c DEFAULT, as root)",
            facts={"gpus": settings.gpus, "wanted": wanted},
        )
