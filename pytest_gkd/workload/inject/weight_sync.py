"""Weight pushes that are rejected, go astray, or are cut off halfway."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from pytest_gkd.workload.engine import engine as engines
from pytest_gkd.workload.gkd import trainer
from pytest_gkd.workload.gkd.weight_source import WeightSource
from pytest_gkd.workload.inject.actors import leave_mark, replace_role
from pytest_gkd.workload.inject.site import Site
from pytest_gkd.workload.layouts import ray_actors
from pytest_gkd.workload.sync import broadcast, weights

if TYPE_CHECKING:
    from torch import Tensor

    from pytest_gkd.workload.layouts.job_config import JobConfig
    from pytest_gkd.workload.sync.broadcast import Info, Rendezvous

Tensors = dict[str, "Tensor"]
MATRIX = "model.layers.0.mlp.up_proj.weight"


def renamed(site: Site, *, prefix: str, of: str = "") -> None:
    """The trainer's tensors get a prefix: all of them, or those named ``of``."""

    def with_prefix(found: Tensors) -> Tensors:
        return {
            f"{prefix}{name}" if of in name else name: tensor
            for name, tensor in found.items()
        }

    _give(site, with_prefix)


def resized_embedding(site: Site, *, rows: int) -> object:
    """The trainer's embedding grows, as it does for an added token."""

    def load_and_resize(load: Any, *args: Any, **kwargs: Any) -> Any:
        model = load(*args, **kwargs)
        size = model.get_input_embeddings().weight.shape[0] + rows
        model.resize_token_embeddings(size, mean_resizing=False)
        site.triggered()
        return model

    return site.wrap(trainer, "load_model", load_and_resize)


def transposed(site: Site) -> None:
    _give(site, lambda found: found | {MATRIX: found[MATRIX].T})


def nan_weight(site: Site) -> object:
    def perturb_and_spoil(perturb: Any, model: Any, *args: Any) -> None:
        perturb(model, *args)
        weights.own_tensors(model)[MATRIX][0, 0] = float("nan")
        site.triggered()

    return site.wrap(weights, "perturb", perturb_and_spoil)


def dropped(site: Site) -> object:
    def drop(load: Any, self: Any, sent: Iterable[tuple[str, Tensor]]) -> None:
        for _ in sent:
            site.triggered()

    return site.wrap(engines.Engine, "load", drop)


def half_loaded(site: Site) -> object:
    def receive_half(receive: Any, *args: Any) -> Iterator[tuple[str, Tensor]]:
        arrived = list(receive(*args))
        site.triggered()
        yield from arrived[: len(arrived) // 2]

    return site.wrap(broadcast, "receive", receive_half)


def half_sent(site: Site) -> None:
    _give(site, lambda found: dict(itertools.islice(found.items(), len(found) // 2)))


def _give(site: Site, change: Callable[[Tensors], Tensors]) -> None:
    """The trainer sends what ``change`` makes of its tensors."""
    site.wrap(weights, "named_weights", lambda named, model: change(named(model)))


def receiver_stopped(site: Site) -> object:
    stage_pid, calls = os.getpid(), itertools.count(1)

    def stop_in_the_second(send: Any, *args: Any) -> None:
        if next(calls) == 2 and os.getpid() != stage_pid:
            site.triggered()
            os.kill(os.getpid(), signal.SIGSTOP)
        send(*args)

    return site.wrap(broadcast.GlooGroup, "broadcast", stop_in_the_second)


def trainer_killed(site: Site) -> object:
    return replace_role(site, ray_actors.Trainer, Trainer)


class Trainer(ray_actors.Trainer):
    """A trainer actor that does not survive its first push."""

    def parts(self) -> dict[str, Any]:
        """The trainer, with a weight source that ends the process."""
        made = super().parts()
        return made | {"source": DyingSource(made["source"].trainer, self.config)}


class DyingSource(WeightSource):
    """Ends its process halfway through a push."""

    def __init__(self, trainer: Any, config: JobConfig) -> None:
        super().__init__(trainer)
        self._config = config
        self._sending = False

    def send(self, rendezvous: Rendezvous, infos: list[Info]) -> int:
        """Join the group, send half of the tensors, and die."""
        self._sending = True
        return super().send(rendezvous, infos)

    def tensors(self, infos: Iterable[Info]) -> Iterator[tuple[str, Tensor]]:
        """The tensors; the second half of them never arrives in a push."""
        infos = list(infos)
        for number, pair in enumerate(super().tensors(infos)):
            if self._sending and number == len(infos) // 2:
                leave_mark(self._config)
                os.kill(os.getpid(), signal.SIGKILL)
            yield pair
