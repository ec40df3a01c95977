"""The trainer as a source of weights; lives in the trainer's process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_gkd.workload.sync import broadcast, parameters
from pytest_gkd.workload.sync.broadcast import Info, Rendezvous
from pytest_gkd.workload.sync.push import ParameterMap

if TYPE_CHECKING:
    from torch import Tensor

    from pytest_gkd.workload.gkd.trainer import Trainer


@dataclass
class WeightSource:
    """The trainer as a source of weights; lives in the trainer's process."""

    trainer: Trainer
    _store: Any = None
    # Tensors that the engine may still read through CUDA IPC.
    shared: list[Any] = field(default_factory=list)

    def infos(self, mapped: ParameterMap) -> list[Info]:
        """Name, dtype and shape of each tensor as it is sent: in the engine's dtype."""
        dtypes = mapped.dtypes()
        return [
            (name, dtypes.get(name, dtype), tuple(shape))
            for name, dtype, shape in self.trainer.parameter_info()
        ]

    def vocab_size(self) -> int:
        """Rows of the student's embedding."""
        return self.trainer.vocab_size

    def tensors(self, infos: Iterable[Info]) -> Iterator[tuple[str, Tensor]]:
        """The tensors, each in the dtype that ``infos`` gives it."""
        import torch

        dtypes = {name: getattr(torch, dtype) for name, dtype, _ in infos}
        for name, tensor in self.trainer.named_tensors():
            yield name, tensor.detach().to(dtypes[name])

    def digests(self, mapped: ParameterMap) -> dict[str, str]:
        """Digests in the engine's dtypes, to compare with the engine's own."""
        tensors = dict(self.tensors(self.infos(mapped)))
        named = {
            n: parameters.as_engine_holds(mapped.engine_names[n], t)
            for n, t in tensors.items()
            if n in mapped.engine_names
        }
        others = [t for n, t in tensors.items() if n not in named and mapped.unfilled]
        return parameters.digests(named, mapped.by_content, others)

    def identity(self) -> str:
        """Identifies the trainer's device: a GPU's UUID, or ``cpu``."""
        import torch

        device = self.device()
        if device.type != "cuda":
            return str(device)
        return str(torch.cuda.get_device_properties(device).uuid)

    def device(self) -> Any:
        """The device that holds the trainer's weights."""
        _, tensor = next(iter(self.trainer.named_tensors()))
        return tensor.device

    def open_rendezvous(
        self, transport: str, world_size: int, timeout_s: float
    ) -> Rendezvous:
        """Open the rendezvous that ``send`` then takes part in."""
        rendezvous, self._store = broadcast.open_rendezvous(
            transport, world_size, timeout_s
        )
        return rendezvous

    def send(self, rendezvous: Rendezvous, infos: list[Info]) -> int:
        """Broadcast the tensors to the engine's ranks; returns the bytes sent."""
        store, self._store = self._store, None
        group = broadcast.join(rendezvous, broadcast.SENDER, self.device(), store)
        with contextlib.closing(group):
            return broadcast.send(group, infos, self.tensors(infos))

    def share(self, infos: list[Info]) -> str:
        """Handles of the tensors for another process on the same GPU (CUDA IPC).

        The memory is kept until ``unshare``.
        """
        return self._share([tensor.contiguous() for _, tensor in self.tensors(infos)])

    def cannot_share(self, engine: Any) -> str:
        """Why ``engine`` cannot open this process's GPU memory; empty if it can.

        CUDA IPC is refused, for example, in containers that do not share a PID
        namespace, and by torch's expandable segments if the driver or the system is too
        old for them.
        """
        import torch

        sent = torch.arange(8, dtype=torch.float32, device=self.device())
        try:
            arrived = engine.open_shared(self._share([sent]))
        except RuntimeError as error:
            return " ".join(str(error).split())
        finally:
            self.unshare()
        wrong = [found for found in arrived if found != sent.tolist()]
        return str(wrong[0]) if wrong else ""

    def _share(self, tensors: list[Tensor]) -> str:
        import base64
        import pickle

        import torch
        from torch.multiprocessing.reductions import reduce_tensor

        self.shared = tensors
        torch.cuda.synchronize(self.device())
        handles = [reduce_tensor(tensor)[1] for tensor in tensors]
        return base64.b64encode(pickle.dumps(handles)).decode("ascii")

    def unshare(self) -> None:
        """Release the memory that ``share`` kept."""
        self.shared = []
