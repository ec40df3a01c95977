"""Runs inside the Ray actors of the rollout, the trainer and the teacher."""

from __future__ import annotations

import abc
import functools
from typing import TYPE_CHECKING, Any

from pytest_gkd.own_faults import own_fault
from pytest_gkd.stage_api import StageFault
from pytest_gkd.workload import collector

if TYPE_CHECKING:
    from pytest_gkd.workload.layouts.job_config import JobConfig


class Role(abc.ABC):
    """One role of the job and the objects that belong to it, by name.

    They are created by the first call, not in the constructor: if an actor fails there,
    Ray only says that it died.
    """

    def __init__(self, config: JobConfig) -> None:
        self.config = config

    @abc.abstractmethod
    def parts(self) -> dict[str, Any]:
        """Create the objects; the main one has the empty name."""

    def call(self, part: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call ``method`` of one of the objects; without a name, only create them.

        Returns a StageFault: Ray would turn the exception into one of its own.
        """
        try:
            made = self._made
            return getattr(made[part], method)(*args, **kwargs) if method else None
        except StageFault as fault:
            return fault
        except Exception as error:
            if own := own_fault(error):
                return own
            raise

    @functools.cached_property
    def _made(self) -> dict[str, Any]:
        with collector.paused():  # imports take most of the time here
            return self.parts()


# One class each: Ray puts its name in the process title, which stacks and ps show.


class Rollout(Role):
    """vLLM, in the actor's own process."""

    def parts(self) -> dict[str, Any]:
        from pytest_gkd.workload.engine import engine

        engine.prepare_environment(self.config.engine)
        engine.import_vllm()
        return {"": engine.Engine(self.config.engine)}


class Trainer(Role):
    """The student in training."""

    def parts(self) -> dict[str, Any]:
        trainer, source = self.config.load_trainer(self.config.settings.device)
        return {"": trainer, "source": source}


class Teacher(Role):
    """The teacher."""

    def parts(self) -> dict[str, Any]:
        return {"": self.config.load_teacher(self.config.settings.device)}
