"""Training steps that do not train, and teachers that do not answer."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pytest_gkd.workload import ray_actors, trainer
from pytest_gkd.workload.inject.actors import await_mark, leave_mark, replace_role
from pytest_gkd.workload.inject.site import LATER, Site

if TYPE_CHECKING:
    from torch import Tensor

    from pytest_gkd.workload.layouts import Plan


def spoilt_teacher(site: Site) -> None:
    """A NaN in the teacher's weights file."""
    import numpy as np
    from safetensors.numpy import load_file, save_file

    path = site.copied_model("teacher") / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][0] = np.nan
    save_file(tensors, path, metadata={"format": "pt"})


def nan_gradient(site: Site) -> object:
    """The student's last norm gets a term that is 0 and has no finite slope there."""

    def spoil(model: Any) -> None:
        import torch

        def add_root_of_zero(module: Any, inputs: Any, output: Tensor) -> Tensor:
            return output + torch.sqrt(torch.relu(output) * 0.0)

        model.model.norm.register_forward_hook(add_root_of_zero)

    return _to_student(site, spoil)


def frozen(site: Site) -> object:
    """No parameter of the student wants a gradient."""
    return _to_student(site, lambda model: model.requires_grad_(requires_grad=False))


def detached(site: Site, *, where: str) -> object:
    """What the student's module ``where`` gives on is cut off from its graph."""

    def detach(model: Any) -> None:
        def cut(module: Any, inputs: Any, output: Any) -> Any:
            return output.detach()

        model.get_submodule(where).register_forward_hook(cut)

    return _to_student(site, detach)


def optimizer_of_a_copy(site: Site) -> object:
    """The optimizer was made for a copy of the student, as before a wrapper's."""

    def make_for_copy(model: Any, learning_rate: float) -> Any:
        site.struck()
        return make(copy.deepcopy(model), learning_rate)

    make = site.replace(trainer, "Optimizer", make_for_copy)
    return LATER


def settings_alone(site: Site) -> None:
    """The fault's settings are all of it."""
    del site


def uneven_batch(site: Site, *, prompts: int) -> None:
    """A batch that the ranks named in the settings cannot share."""
    site.settings(batch_size=prompts)


def kept_logits(site: Site) -> object:
    """Each step's logits are kept for later, as a metric that nobody empties."""
    kept: list[Tensor] = []
    loss = trainer.Trainer._loss

    def keep_and_go_on(self: Any, logits: Tensor, *args: Any) -> Tensor:
        site.struck()
        kept.append(logits)
        return loss(self, logits, *args)

    site.callback(kept.clear)
    site.replace(trainer.Trainer, "_loss", keep_and_go_on)
    return LATER


def teacher_killed(site: Site) -> object:
    """The teacher's actor ends itself with SIGKILL when it is asked."""
    replace_role(site, ray_actors.Teacher, Teacher)
    return await_mark(site)


def teacher_stopped(site: Site) -> object:
    """The teacher's actor stops itself with SIGSTOP when it is asked."""
    return teacher_killed(site)


class Teacher(ray_actors.Teacher):
    """A teacher's actor that does to itself what the fault's name says."""

    def parts(self) -> dict[str, Any]:
        """The teacher, without an answer."""
        made = super().parts()
        stopped = str(self.plan.settings.inject).endswith("stopped")
        number = signal.SIGSTOP if stopped else signal.SIGKILL
        return {"": SilentTeacher(made[""], self.plan, number)}


class SilentTeacher:
    """Signals its own process when it is asked for anything."""

    def __init__(self, teacher: Any, plan: Plan, number: int) -> None:
        self._teacher = teacher
        self._plan = plan
        self._number = number

    def topk(self, *args: Any, **kwargs: Any) -> Any:
        """The teacher's top-k, unless the signal ends this."""
        leave_mark(self._plan)
        os.kill(os.getpid(), self._number)
        return self._teacher.topk(*args, **kwargs)


def _to_student(site: Site, change: Callable[[Any], object]) -> object:
    """Change the student right after it was loaded."""

    def load_and_change(*args: Any, **kwargs: Any) -> Any:
        model = load(*args, **kwargs)
        change(model)
        site.struck()
        return model

    load = site.replace(trainer, "load_model", load_and_change)
    return LATER
