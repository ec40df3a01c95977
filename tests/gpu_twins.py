"""GPU memory and NCCL on a CPU: what weights travel through, with the same calls.

``Communicator`` stands for vLLM's PyNcclCommunicator, with gloo beneath; ``share`` and
``opened`` for torch's CUDA IPC, with files. ``install`` puts them in their places.
"""

from __future__ import annotations

import datetime
import os
import tempfile
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import reductions

# Where NCCL would wait without end.
ENDLESS = datetime.timedelta(hours=1)
STREAM = SimpleNamespace(synchronize=lambda: None)
# Of the 14 arguments of rebuild_cuda_tensor the seventh is the GPU's number.
ARGUMENTS, NUMBER = 14, 6


class Communicator:
    """Rank 0's bytes reach every rank; once destroyed it does nothing, in silence.

    A rank that is gone, or never comes, is waited for without end, but that gloo tells
    of a connection that closes.
    """

    made: list[Communicator] = []  # noqa: RUF012 - those of this process

    def __init__(self, group: Any, device: Any) -> None:
        self.device = torch.device(device)
        self.disabled = False
        self.sent: list[int] = []
        Communicator.made.append(self)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = ENDLESS
        self._group: Any = dist.ProcessGroupGloo(
            dist.PrefixStore("twin", group.store), group.rank, group.world_size, options
        )

    def broadcast(self, tensor: Any, src: int, stream: Any) -> None:
        if self.disabled:
            return
        assert tensor.device == self.device
        self.sent.append(tensor.numel())
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self._group.broadcast([tensor], options).wait()

    def destroy(self) -> None:
        self.disabled = True
        self._group = None


def share(tensor: Any) -> tuple[None, tuple[Any, ...]]:
    """In the place of ``reduce_tensor``: a handle that another process can open."""
    descriptor, path = tempfile.mkstemp(prefix="gpu")
    os.close(descriptor)
    torch.save(tensor.detach().clone(), path)
    return None, (path, *range(1, ARGUMENTS))


def opened(path: str, *rest: Any) -> Any:
    """In the place of ``rebuild_cuda_tensor``."""
    assert len(rest) == ARGUMENTS - 1
    assert rest[NUMBER - 1] != NUMBER  # the receiver's own number, not the sender's
    return torch.load(path)


def install(setattr: Any = setattr) -> None:
    """Put all but the communicator in place; ``setattr`` may take it back later."""
    setattr(torch.cuda, "set_device", lambda device: None)
    setattr(torch.cuda, "current_stream", lambda device: STREAM)
    setattr(torch.cuda, "synchronize", lambda device: None)
    setattr(reductions, "reduce_tensor", share)
    setattr(reductions, "rebuild_cuda_tensor", opened)
