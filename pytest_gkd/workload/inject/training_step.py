"""Training steps that do not train, and teachers that do not answer."""

from __future__ import annotations

import copy
import itertools
import os
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pytest_gkd.clock import monotonic
from pytest_gkd.workload.gkd import trainer
from pytest_gkd.workload.gkd.teacher_targets import TeacherFull, TeacherTopK
from pytest_gkd.workload.inject.actors import await_mark, leave_mark, replace_role
from pytest_gkd.workload.inject.site import Site
from pytest_gkd.workload.layouts import local_layouts, ray_actors

if TYPE_CHECKING:
    from torch import Tensor

    from pytest_gkd.workload.layouts.job_config import JobConfig


SLOW_S = 600.0


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
    return _to_student(site, lambda model: model.requires_grad_(requires_grad=False))


def detached(site: Site, *, where: str) -> object:
    """The output of the student's module ``where`` is detached from the graph."""

    def detach(model: Any) -> None:
        def cut(module: Any, inputs: Any, output: Any) -> Any:
            return output.detach()

        model.get_submodule(where).register_forward_hook(cut)

    return _to_student(site, detach)


def optimizer_of_a_copy(site: Site) -> object:
    """The optimizer was built for a copy of the student, such as the one before
    wrapping."""

    def make_for_copy(make: Any, model: Any, *args: Any) -> Any:
        site.triggered()
        return make(copy.deepcopy(model), *args)

    return site.wrap(trainer, "Optimizer", make_for_copy)


def half_optimizer(site: Site) -> object:
    def make_and_drop(make: Any, *args: Any) -> Any:
        site.triggered()
        made = make(*args)
        for group in made.adamw.param_groups:
            group["params"] = group["params"][::2]
        return made

    return site.wrap(trainer, "Optimizer", make_and_drop)


def nan_in_second_step(site: Site) -> object:
    calls = itertools.count(1)

    def spoil_the_second(loss: Any, *args: Any) -> Any:
        value = loss(*args)
        if next(calls) != 2:
            return value
        site.triggered()
        return value * float("nan")

    return site.wrap(trainer.Trainer, "_loss", spoil_the_second)


def settings_alone(site: Site) -> None:
    """The settings alone are the fault."""
    del site


def uneven_batch(site: Site, *, prompts: int) -> None:
    """A batch that does not divide among the ranks named in the settings."""
    site.settings(batch_size=prompts)


def kept_logits(site: Site) -> object:
    """Each step's logits are kept, as by a metric that is never reset."""
    kept: list[Tensor] = []

    def keep_and_go_on(loss: Any, self: Any, logits: Tensor, *args: Any) -> Any:
        site.triggered()
        kept.append(logits)
        return loss(self, logits, *args)

    site.callback(kept.clear)
    return site.wrap(trainer.Trainer, "_loss", keep_and_go_on)


def teacher_ordeal(site: Site) -> object:
    """The teacher's actor, when called, does to itself what the fault's name says."""
    return replace_role(site, ray_actors.Teacher, Teacher)


def wrong_teacher(site: Site) -> object:
    """The teacher's answer is corrupted as the fault's name says."""
    if site.gkd.settings.layout == "ray":
        return teacher_ordeal(site)

    def load_and_wrap(load: Any, self: Any) -> WrongTeacher:
        return WrongTeacher(load(self), self.config)

    site.wrap(local_layouts._Local, "load_teacher", load_and_wrap)
    return await_mark(site)


class Teacher(ray_actors.Teacher):
    """A teacher actor that does to itself what the fault's name says."""

    def parts(self) -> dict[str, Any]:
        """The teacher, with no answer or a wrong one."""
        return {"": WrongTeacher(super().parts()[""], self.config)}


class WrongTeacher:
    """Answers with the right shape but the wrong content, or does not answer at all."""

    def __init__(self, teacher: Any, config: JobConfig) -> None:
        self._teacher = teacher
        self._config = config
        fault = str(config.settings.inject)
        self._late = "off-by-one" in fault
        self._factor = 2.0 if "temperature" in fault else 1.0
        self._worst = "tokens" in fault
        self._ordeal = ORDEALS.get(fault.rpartition("-")[2], lambda: None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._teacher, name)

    def topk(self, sequences: Any, k: int, **kwargs: Any) -> TeacherTopK:
        """The previous token's top k, those at another temperature, or the bottom k."""
        import numpy as np

        leave_mark(self._config)
        self._ordeal()
        asked = kwargs.pop("temperature")
        heat = asked * self._factor
        if self._worst:
            k = int(kwargs["vocab_size"])
        found = self._teacher.topk(sequences, k, temperature=heat, **kwargs)
        parts = [found.logprobs, found.ids]
        if self._worst:
            parts = [part[..., ::-1][..., :4].copy() for part in parts]
        logprobs, ids = (np.roll(part, self._late, axis=1) for part in parts)
        return TeacherTopK(logprobs, ids, found.mask, asked)

    def full(self, sequences: Any, **kwargs: Any) -> TeacherFull:
        """The previous token's distributions."""
        import numpy as np

        leave_mark(self._config)
        found = self._teacher.full(sequences, **kwargs)
        return TeacherFull(np.roll(found.logprobs, self._late, axis=1), found.mask)


def _compute() -> None:
    until = monotonic() + SLOW_S
    while monotonic() < until:
        pass


ORDEALS: dict[str, Callable[[], None]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "slow": _compute,
}


def _to_student(site: Site, change: Callable[[Any], object]) -> object:
    """Change the student right after it was loaded."""

    def load_and_change(load: Any, *args: Any, **kwargs: Any) -> Any:
        model = load(*args, **kwargs)
        change(model)
        site.triggered()
        return model

    return site.wrap(trainer, "load_model", load_and_change)
