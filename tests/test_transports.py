"""By what means weights travel between processes, with stand-ins for GPUs and NCCL."""

from __future__ import annotations

import base64
import pickle
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pytest_gkd.workload import broadcast, engine, local_layouts
from pytest_gkd.workload.broadcast import Meeting

torch = pytest.importorskip("torch")

from pytest_gkd.workload.engine_worker import WeightReceiver  # noqa: E402
from pytest_gkd.workload.sync import WeightSource  # noqa: E402

VALUES = [float(number) for number in range(8)]


class Engine:
    """Ranks on these devices, which open shared memory as ``opened`` does."""

    def __init__(
        self, *uuids: str, opened: Callable[[str], Any] = lambda handles: VALUES
    ) -> None:
        self._uuids = uuids
        self._opened = opened

    def identities(self) -> list[dict[str, str]]:
        return [{"uuid": uuid} for uuid in self._uuids]

    def open_shared(self, handles: str) -> list[Any]:
        return [self._opened(handles) for _ in self._uuids]


def source_on(uuid: str) -> WeightSource:
    """A weight source on the CPU that says it is on that GPU."""

    class Source(WeightSource):
        def identity(self) -> str:
            return uuid

    weights = {"a": torch.ones(2, 2)}
    return Source(SimpleNamespace(named_tensors=weights.items))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA IPC with host memory: a handle is the values themselves."""
    from torch.multiprocessing import reductions

    def reduce_tensor(tensor: Any) -> tuple[Any, tuple[Any, ...]]:
        return None, (tensor.tolist(), *range(1, 14))

    def rebuild(values: list[Any], *rest: Any) -> Any:
        assert rest[5] == 3  # the receiver's own number of the GPU
        return torch.tensor(values)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(reductions, "reduce_tensor", reduce_tensor)
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", rebuild)


@pytest.mark.parametrize(
    ("trainer", "ranks", "transport"),
    [
        ("cpu", ["cpu"], "gloo"),
        ("A", ["A"], "cuda-ipc"),
        ("A", ["A", "A"], "cuda-ipc"),
        ("A", ["B"], "nccl"),
        ("A", ["B", "C"], "nccl"),
        # Rank 0 could not open memory of the GPU that rank 1 shares with the trainer.
        ("B", ["A", "B"], "gloo"),
        # NCCL takes one rank a GPU.
        ("A", ["B", "B"], "gloo"),
    ],
)
def test_the_transport_is_one_that_every_rank_can_use(
    trainer: str, ranks: list[str], transport: str
) -> None:
    split = local_layouts.Split.__new__(local_layouts.Split)
    found, why = split.transport(Engine(*ranks), source_on(trainer))
    assert found == transport
    assert why


def test_memory_that_cannot_be_opened_goes_through_the_host_and_says_why() -> None:
    split = local_layouts.Split.__new__(local_layouts.Split)
    refused = "RuntimeError: pidfd_getfd: Operation not permitted"
    found, why = split.transport(Engine("A", opened=lambda _: refused), source_on("A"))
    assert found == "gloo"
    assert why.endswith(f"as CUDA IPC does not work here: {refused}")


def test_memory_that_cannot_be_shared_goes_through_the_host_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(tensor: Any) -> Any:
        raise RuntimeError("CUDA error: invalid\nargument")

    monkeypatch.setattr("torch.multiprocessing.reductions.reduce_tensor", refuse)
    assert source_on("A").cannot_share(Engine("A")) == "CUDA error: invalid argument"


def test_other_values_than_were_shared_are_told() -> None:
    engine = Engine("A", opened=lambda _: [0.0])
    assert source_on("A").cannot_share(engine) == "[0.0]"


def test_a_rank_opens_what_is_shared_and_tells_why_it_cannot() -> None:
    receiver = WeightReceiver()
    receiver.device = torch.device("cuda", 3)
    shared = source_on("A")
    assert shared.cannot_share(Engine("A", opened=receiver.gkd_open)) == ""
    broken = base64.b64encode(pickle.dumps([()])).decode()
    assert str(receiver.gkd_open(broken)).startswith("IndexError: ")


# -- NCCL --------------------------------------------------------------------------


class Communicator:
    """vLLM's communicator, which remembers what was asked of it."""

    made: list[Communicator]

    def __init__(self, group: Any, device: Any) -> None:
        self.disabled = False
        self.destroyed = False
        self.sent: list[int] = []
        Communicator.made.append(self)

    def broadcast(self, tensor: Any, src: int, stream: Any) -> None:
        assert src == 0
        self.sent.append(tensor.numel())

    def destroy(self) -> None:
        self.destroyed = True


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> list[Communicator]:
    """vLLM's wrapper of NCCL, without NCCL; the communicators that were made."""
    pynccl, utils = ModuleType("pynccl"), ModuleType("utils")
    pynccl.PyNcclCommunicator = Communicator  # type: ignore[attr-defined]
    group = SimpleNamespace(create=lambda **where: where)
    utils.StatelessProcessGroup = group  # type: ignore[attr-defined]
    at = "vllm.distributed"
    for name in ("vllm", at, f"{at}.device_communicators"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, f"{at}.device_communicators.pynccl", pynccl)
    monkeypatch.setitem(sys.modules, f"{at}.utils", utils)
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    Communicator.made = []
    return Communicator.made


def test_a_communicator_is_given_back_after_each_push(
    nccl: list[Communicator],
) -> None:
    source = source_on("A")
    meeting = Meeting("nccl", 1, 2, 9.0)
    for _ in range(2):
        source.send(meeting, [("a", "float32", (2, 2))])
    assert [one.destroyed for one in nccl] == [True, True]
    assert nccl[0].sent == [40, 16]


def test_a_communicator_is_given_back_after_a_push_that_failed(
    nccl: list[Communicator],
) -> None:
    wrong = [("a", "float32", (4, 2))]
    with pytest.raises(broadcast.BroadcastError):
        source_on("A").send(Meeting("nccl", 1, 2, 9.0), wrong)
    assert nccl[0].destroyed


# -- the engine --------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
def test_several_ranks_are_processes_of_the_engines_own(size: int) -> None:
    """Within a placement group of Ray's vLLM would have Ray start them."""
    config = engine.EngineConfig(
        "m", "cpu", "float32", 128, None, 0.3, size, False, False, "/s", True
    )
    found = engine._arguments(config).get("distributed_executor_backend")
    assert found == ("mp" if size > 1 else None)
