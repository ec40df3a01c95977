"""Pushes of weights that are refused, go astray, or are cut off in the middle."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from pytest_gkd.workload.engine import engine as engines
from pytest_gkd.workload.gkd import trainer
from pytest_gkd.workload.gkd.weight_source import WeightSource
from pytest_gkd.workload.inject.actors import await_mark, leave_mark, replace_role
from pytest_gkd.workload.inject.site import LATER, Site
from pytest_gkd.workload.layouts import ray_actors
from pytest_gkd.workload.sync import broadcast, weights

if TYPE_CHECKING:
    from torch import Tensor

    from pytest_gkd.workload.layouts.job_config import JobConfig
    from pytest_gkd.workload.sync.broadcast import Info, Rendezvous

MATRIX = "model.layers.0.mlp.up_proj.weight"


def renamed(site: Site, *, prefix: str, of: str = "") -> None:
    """The trainer's tensors get a prefix: all of them, or those named ``of``."""
    named = weights.named_weights

    def with_prefix(model: Any) -> dict[str, Tensor]:
        return {
            f"{prefix}{name}" if of in name else name: tensor
            for name, tensor in named(model).items()
        }

    site.replace(weights, "named_weights", with_prefix)


def resized_embedding(site: Site, *, rows: int) -> object:
    """The trainer's embedding grows, as it does for a token that was added."""

    def load_and_resize(*args: Any, **kwargs: Any) -> Any:
        model = load(*args, **kwargs)
        size = model.get_input_embeddings().weight.shape[0] + rows
        model.resize_token_embeddings(size, mean_resizing=False)
        site.triggered()
        return model

    load = site.replace(trainer, "load_model", load_and_resize)
    return LATER


def transposed(site: Site) -> None:
    """The trainer gives one matrix away transposed."""
    named = weights.named_weights

    def with_transposed(model: Any) -> dict[str, Tensor]:
        found = named(model)
        return found | {MATRIX: found[MATRIX].T}

    site.replace(weights, "named_weights", with_transposed)


def nan_weight(site: Site) -> object:
    """The update leaves a NaN in one of the trainer's weights."""
    perturb = weights.perturb

    def perturb_and_spoil(model: Any, seed: int, scale: float) -> None:
        perturb(model, seed, scale)
        weights.own_tensors(model)[MATRIX][0, 0] = float("nan")
        site.triggered()

    site.replace(weights, "perturb", perturb_and_spoil)
    return LATER


def dropped(site: Site) -> object:
    """The engine answers a push with success and loads nothing of it."""

    def drop(self: Any, sent: Iterable[tuple[str, Tensor]]) -> None:
        for _ in sent:
            site.triggered()

    site.replace(engines.Engine, "load", drop)
    return LATER


def half_loaded(site: Site) -> object:
    """The engine's process takes all that is sent, and loads the first half of it."""
    receive = broadcast.receive

    def receive_half(*args: Any) -> Generator[tuple[str, Tensor], None, None]:
        arrived = list(receive(*args))
        site.triggered()
        yield from arrived[: len(arrived) // 2]

    site.replace(broadcast, "receive", receive_half)
    return LATER


def half_sent(site: Site) -> None:
    """The trainer gives away only the first half of its tensors, from the start."""
    named = weights.named_weights

    def half(model: Any) -> dict[str, Tensor]:
        found = named(model)
        return dict(islice(found.items(), len(found) // 2))

    site.replace(weights, "named_weights", half)


def receiver_stopped(site: Site) -> object:
    """The engine's worker is stopped when the first bucket has been announced."""
    broadcast_one = broadcast.GlooGroup.broadcast
    stage_pid = os.getpid()
    calls: list[int] = []

    def stop_in_the_second(self: Any, tensor: Tensor) -> None:
        calls.append(1)
        if os.getpid() != stage_pid and len(calls) == 2:
            site.triggered()
            os.kill(os.getpid(), signal.SIGSTOP)
        broadcast_one(self, tensor)

    site.replace(broadcast.GlooGroup, "broadcast", stop_in_the_second)
    return LATER


def trainer_killed(site: Site) -> object:
    """The trainer's actor ends itself with SIGKILL when half of its tensors are out."""
    replace_role(site, ray_actors.Trainer, Trainer)
    return await_mark(site)


class Trainer(ray_actors.Trainer):
    """A trainer's actor that does not survive its first push."""

    def parts(self) -> dict[str, Any]:
        """The trainer, and a weight source that ends the process."""
        made = super().parts()
        return made | {"source": DyingSource(made["source"].trainer, self.config)}


class DyingSource(WeightSource):
    """Ends its process half-way through a push."""

    def __init__(self, trainer: Any, config: JobConfig) -> None:
        super().__init__(trainer)
        self._config = config
        self._sending = False

    def send(self, rendezvous: Rendezvous, infos: list[Info]) -> int:
        """Join the group, give away half of the tensors, and die."""
        self._sending = True
        return super().send(rendezvous, infos)

    def tensors(self, infos: Iterable[Info]) -> Iterator[tuple[str, Tensor]]:
        """The tensors; the second half of them never comes in a push."""
        infos = list(infos)
        for number, pair in enumerate(super().tensors(infos)):
            if self._sending and number == len(infos) // 2:
                leave_mark(self._config)
                os.kill(os.getpid(), signal.SIGKILL)
            yield pair
