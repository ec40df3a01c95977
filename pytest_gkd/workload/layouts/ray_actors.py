"""Runs inside the Ray actors of the rollout, the trainer and the teacher."""

from __future__ import annotations

import abc
import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pytest_gkd.stage_api import StageFault

if TYPE_CHECKING:
    from pytest_gkd.workload.layouts.job_config import JobConfig


class Role(abc.ABC):
    """One role of the job and the objects that belong to it, by name in ``parts``.

    They are made in ``made``, not in the constructor: of an actor that fails there,
    Ray only says that it died.
    """

    def __init__(self, config: JobConfig) -> None:
        self.config = config
        self._parts: dict[str, Any] | None = None

    @abc.abstractmethod
    def parts(self) -> dict[str, Any]:
        """Make the objects; the main one has the empty name."""

    def made(self) -> StageFault | None:
        """Make the objects; returns None, or what is known to be wrong."""

        def make() -> None:
            self._make()

        found: StageFault | None = self._answered(make)
        return found

    def call(self, part: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call ``method`` of one of the objects."""

        def answer() -> Any:
            return getattr(self._make()[part], method)(*args, **kwargs)

        return self._answered(answer)

    def _make(self) -> dict[str, Any]:
        if self._parts is None:
            # Imports are most of the time here, and collections during them are waste.
            gc.disable()
            try:
                self._parts = self.parts()
            finally:
                gc.enable()
        return self._parts

    def _answered(self, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except StageFault as fault:
            return fault  # a value: Ray would turn the exception into one of its own


# A class each: Ray titles the processes by it, as stacks and process lists show them.


class Rollout(Role):
    """vLLM, in the actor's own process."""

    def parts(self) -> dict[str, Any]:
        """The engine."""
        from pytest_gkd.workload.engine import engine

        engine.prepare_environment(self.config.engine)
        engine.import_vllm()
        return {"": engine.Engine(self.config.engine)}


class Trainer(Role):
    """The student in training."""

    def parts(self) -> dict[str, Any]:
        """The trainer and its weight source."""
        from pytest_gkd.workload.gkd import trainer
        from pytest_gkd.workload.gkd.weight_source import WeightSource

        made = trainer.Trainer(
            self.config.student,
            device=self.config.settings.device,
            dtype=self.config.engine.dtype,
            learning_rate=self.config.settings.learning_rate,
            trust_remote_code=self.config.settings.trust_remote_code,
        )
        return {"": made, "source": WeightSource(made)}


class Teacher(Role):
    """The teacher."""

    def parts(self) -> dict[str, Any]:
        """The teacher."""
        from pytest_gkd.workload.gkd import teacher

        made = teacher.Teacher(
            self.config.teacher,
            device=self.config.settings.device,
            dtype=self.config.engine.dtype,
            trust_remote_code=self.config.settings.trust_remote_code,
        )
        return {"": made}
