"""Sends weights from the trainer's process to the engine's.

Over a separate group that leaves ``torch.distributed``'s global state alone, in
buckets. Each bucket is announced with its size and, if it passes through host memory,
its hash: gloo silently accepts a message shorter than the buffer, which leaves garbage
in the weights.
"""

from __future__ import annotations

import datetime
import hashlib
import itertools
import math
import socket
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BUCKET_BYTES = 64 << 20
ALIGNMENT = 16
HOST = "127.0.0.1"
SENDER = 0

Info = tuple[str, str, tuple[int, ...]]
"""A tensor before it is there: name, dtype (``bfloat16``), shape."""


class BroadcastError(RuntimeError):
    """What arrived is not what was sent."""


@dataclass(frozen=True)
class Rendezvous:
    """Where and how the processes of one broadcast meet; plain data, to be sent.

    Rank 0 sends. ``timeout_s`` bounds each single operation under gloo; NCCL's are
    unbounded, so the caller needs its own deadline.
    """

    transport: str
    port: int
    world_size: int
    timeout_s: float


class GlooGroup:
    """A gloo group over the loopback interface."""

    def __init__(self, rendezvous: Rendezvous, rank: int, store: Any = None) -> None:
        import torch
        import torch.distributed as dist

        timeout = datetime.timedelta(seconds=rendezvous.timeout_s)
        if store is None:
            store = dist.TCPStore(
                HOST, rendezvous.port, is_master=False, timeout=timeout
            )
        self.device = torch.device("cpu")
        options = dist.ProcessGroupGloo._Options()
        # Without an explicit device gloo resolves this machine's hostname, which fails
        # in many containers and proves nothing about these two processes.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=HOST)]
        options._timeout = timeout
        self._group = dist.ProcessGroupGloo(
            dist.PrefixStore("gkd", store), rank, rendezvous.world_size, options
        )
        self._store = store

    def broadcast(self, tensor: Tensor) -> None:
        """Fill ``tensor`` (uint8, on ``device``) on every rank with rank 0's."""
        import torch.distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = SENDER, 0
        self._group.broadcast([tensor], options).wait()

    def close(self) -> None:
        """Leave the group; ranks still waiting for this one see it go."""
        del self._group, self._store


class NcclGroup:
    """An NCCL communicator over the processes' GPUs, through vLLM's own wrapper."""

    def __init__(self, rendezvous: Rendezvous, rank: int, device: torch.device) -> None:
        import torch
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        torch.cuda.set_device(device)
        self.device = device
        group = StatelessProcessGroup.create(
            host=HOST, port=rendezvous.port, rank=rank, world_size=rendezvous.world_size
        )
        self._communicator = PyNcclCommunicator(group, device=device)
        if self._communicator.disabled:
            # It would silently skip every broadcast.
            raise BroadcastError(
                f"vLLM's NCCL communicator is disabled on {device}; expected libnccl "
                "to be found and VLLM_DISABLE_PYNCCL to be unset"
            )

    def broadcast(self, tensor: Tensor) -> None:
        import torch

        stream = torch.cuda.current_stream(self.device)
        self._communicator.broadcast(tensor, src=SENDER, stream=stream)
        stream.synchronize()

    def close(self) -> None:
        """Free the GPU memory that each communicator holds."""
        self._communicator.destroy()


Group = GlooGroup | NcclGroup
"""The processes of a broadcast, seen from one of them."""


def open_rendezvous(
    transport: str, world_size: int, timeout_s: float
) -> tuple[Rendezvous, Any]:
    """A rendezvous at a free port, and the store that rank 0 must hold to the end."""
    import torch.distributed as dist

    # A port chosen by the store would be open on every interface.
    listener = socket.create_server((HOST, 0))
    port = listener.getsockname()[1]
    rendezvous = Rendezvous(transport, port, world_size, timeout_s)
    if transport == "nccl":
        listener.close()  # another program may take the port before it is used
        return rendezvous, None
    store = dist.TCPStore(
        HOST,
        port,
        is_master=True,
        timeout=datetime.timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return rendezvous, store


def join(
    rendezvous: Rendezvous, rank: int, device: torch.device, store: Any = None
) -> Group:
    """Join as ``rank``; waits for all the others. ``device`` holds the weights."""
    if rendezvous.transport == "nccl":
        return NcclGroup(rendezvous, rank, device)
    return GlooGroup(rendezvous, rank, store)


def buckets_of(
    infos: Iterable[Info], bucket_bytes: int = BUCKET_BYTES
) -> list[list[Info]]:
    """The buckets that both sides derive from the same list; none is empty.

    A bucket is at most ``bucket_bytes`` unless a single tensor is larger.
    """
    buckets: list[list[Info]] = []
    used = 0
    for info in infos:
        size = _aligned(nbytes(info))
        if not buckets or used + size > bucket_bytes:
            buckets.append([])
            used = 0
        buckets[-1].append(info)
        used += size
    return buckets


def nbytes(info: Info) -> int:
    """Size in bytes of the tensor that ``info`` announces."""
    import torch

    itemsize: int = getattr(torch, info[1]).itemsize
    return math.prod(info[2]) * itemsize


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _places(bucket: list[Info]) -> tuple[list[slice], int]:
    """The byte range of each tensor in its bucket, and the bucket's size."""
    sizes = [nbytes(info) for info in bucket]
    *starts, end = itertools.accumulate(map(_aligned, sizes), initial=0)
    pairs = zip(starts, sizes, strict=True)
    return [slice(start, start + size) for start, size in pairs], end


def send(group: Group, infos: list[Info], tensors: Iterable[tuple[str, Tensor]]) -> int:
    """Send ``tensors``, which come in the order of ``infos``; returns the bytes sent.

    Each is cast to the announced dtype. Raises BroadcastError if a tensor is not the
    one announced.
    """
    import torch

    source = iter(tensors)
    sent = 0
    for bucket in buckets_of(infos):
        places, total = _places(bucket)
        buffer = torch.zeros(total, dtype=torch.uint8, device=group.device)
        for info, place in zip(bucket, places, strict=True):
            name, tensor = next(source, ("nothing", None))
            shape = None if tensor is None else tuple(tensor.shape)
            if tensor is None or (name, shape) != (info[0], info[2]):
                raise BroadcastError(
                    f"the trainer gave {name} {shape} where {info[0]} {info[2]} was "
                    "announced"
                )
            data = tensor.detach().to(getattr(torch, info[1])).contiguous()
            buffer[place] = data.reshape(-1).view(torch.uint8)
        group.broadcast(bucket_header(buffer))
        group.broadcast(buffer)
        sent += buffer.numel()
    return sent


def receive(
    group: Group, infos: list[Info]
) -> Generator[tuple[str, Tensor], None, None]:
    """The tensors that rank 0 sends, as views of their bucket on the group's device.

    Raises BroadcastError if a bucket differs in size or content from what the sender
    announced.
    """
    import torch

    for number, bucket in enumerate(buckets_of(infos)):
        places, size = _places(bucket)
        buffer = torch.empty(size, dtype=torch.uint8, device=group.device)
        header = torch.zeros_like(bucket_header(buffer[:0]))
        group.broadcast(header)
        where = f"bucket {number} (from {bucket[0][0]} to {bucket[-1][0]})"
        announced = int(header.view(torch.int64)[0].item())
        if announced != size:
            raise BroadcastError(
                f"{where}: the sender announces {announced} bytes, the receiver "
                f"expects {size}"
            )
        group.broadcast(buffer)
        if not torch.equal(bucket_header(buffer), header):
            raise BroadcastError(
                f"{where}: {size} bytes arrived whose hash is not the sender's"
            )
        for (name, dtype, shape), place in zip(bucket, places, strict=True):
            yield name, buffer[place].view(getattr(torch, dtype)).view(shape)


def bucket_header(buffer: Tensor) -> Tensor:
    """40 bytes: the size as int64 and, for host memory, the content's SHA-256.

    On a GPU a hash would cost a copy of all weights to the host; NCCL does not
    truncate, and the digests that are compared after a push cover the rest.
    """
    import torch

    size = buffer.numel().to_bytes(8, "little")
    in_host_memory = buffer.device.type == "cpu"
    content = (
        hashlib.sha256(buffer.numpy().data).digest() if in_host_memory else bytes(32)
    )
    return torch.frombuffer(bytearray(size + content), dtype=torch.uint8).to(
        buffer.device
    )
