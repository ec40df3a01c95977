"""What runs inside the Ray actors of the rollout, the trainer and the teacher?"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_gkd.fault import StageFault

if TYPE_CHECKING:
    from pytest_gkd.workload.layouts import Plan


@dataclass(frozen=True)
class Fault:
    """A StageFault as an answer: Ray would turn the exception into one of its own."""

    cause: str
    message: str
    facts: dict[str, Any]
    evidence: tuple[tuple[str, int | None, str], ...]

    def as_exception(self) -> StageFault:
        """The exception that was raised in the actor."""
        return StageFault(
            self.cause, self.message, facts=self.facts, evidence=self.evidence
        )


class Actor:
    """One role of the job and the objects that belong to it.

    The object is made in ``made``, not in the constructor: of an actor that dies there
    Ray only says that it died.
    """

    def __init__(self, role: str, plan: Plan) -> None:
        self._role = role
        self._plan = plan
        self._parts: dict[str, Any] | None = None

    def made(self) -> Fault | None:
        """Make the role's objects; returns None, or what is known to be wrong."""
        return self._answered(self._make)

    def call(self, part: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call ``method`` of one of the objects."""

        def made_and_called() -> Any:
            self._make()
            assert self._parts is not None
            return getattr(self._parts[part], method)(*args, **kwargs)

        return self._answered(made_and_called)

    def _answered(self, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except StageFault as fault:
            return Fault(fault.cause, fault.message, fault.facts, fault.evidence)

    def _make(self) -> None:
        if self._parts is None:
            # Imports are most of the time here, and collections during them are waste.
            gc.disable()
            try:
                self._parts = MAKERS[self._role](self._plan)
            finally:
                gc.enable()


def _rollout(plan: Plan) -> dict[str, Any]:
    from pytest_gkd.workload import engine

    engine.prepare_environment(plan.engine)
    engine.import_vllm()
    return {"": engine.Engine(plan.engine)}


def _trainer(plan: Plan) -> dict[str, Any]:
    from pytest_gkd.workload.sync import WeightSource
    from pytest_gkd.workload.trainer import Trainer

    trainer = Trainer(
        plan.student,
        device=plan.settings.device,
        dtype=plan.engine.dtype,
        learning_rate=plan.settings.learning_rate,
        trust_remote_code=plan.settings.trust_remote_code,
    )
    return {"": trainer, "source": WeightSource(trainer)}


def _teacher(plan: Plan) -> dict[str, Any]:
    from pytest_gkd.workload.teacher import Teacher

    teacher = Teacher(
        plan.teacher,
        device=plan.settings.device,
        dtype=plan.engine.dtype,
        trust_remote_code=plan.settings.trust_remote_code,
    )
    return {"": teacher}


MAKERS: dict[str, Callable[[Plan], dict[str, Any]]] = {
    "rollout": _rollout,
    "trainer": _trainer,
    "teacher": _teacher,
}
