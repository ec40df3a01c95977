"""By what means weights travel between processes, with stand-ins for GPUs and NCCL."""

from __future__ import annotations

import base64
import datetime
import pickle
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pytest_gkd.options import Settings
from pytest_gkd.processes import gpus
from pytest_gkd.stage_api import StageFault
from pytest_gkd.workload.engine import engine
from pytest_gkd.workload.engine.engine_config import EngineConfig
from pytest_gkd.workload.layouts.layout import check_layout
from pytest_gkd.workload.sync import broadcast, transfer
from pytest_gkd.workload.sync.broadcast import Rendezvous

torch = pytest.importorskip("torch")

import gpu_twins  # noqa: E402

from pytest_gkd.workload.engine.engine_worker import WeightReceiver  # noqa: E402
from pytest_gkd.workload.gkd.weight_source import WeightSource  # noqa: E402
from pytest_gkd.workload.layouts.ray_actors import Role  # noqa: E402

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


def between(engine: Engine, trainer: str) -> transfer.Transfer:
    return transfer.choose(engine, source_on(trainer), lambda: 1.0, opens_memory=True)


@pytest.fixture(autouse=True)
def host_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """CUDA IPC with host memory."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gpu_twins.install(monkeypatch.setattr)


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
    found = between(Engine(*ranks), trainer)
    assert found.transport == transport
    assert found.why
    aside = transfer.choose(
        Engine(*ranks), source_on(trainer), lambda: 1.0, opens_memory=False
    )
    assert aside.transport == transport.replace("cuda-ipc", "gloo")


def test_instances_of_one_gpu_do_not_meet_by_nccl(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cards = (
        gpus.Card(0, "GPU-A", instances=(gpus.Instance("MIG-B", 1),)),
        gpus.Card(1, "GPU-C"),
    )
    monkeypatch.setattr(gpus, "read", lambda: gpus.Machine("570.124.06", cards))
    for trainer, rank, transport in (
        ("B", "A", "gloo"),
        ("B", "C", "nccl"),
        ("B", "B", "cuda-ipc"),
    ):
        assert between(Engine(rank), trainer).transport == transport


def test_memory_that_cannot_be_opened_goes_through_the_host_and_says_why() -> None:
    refused = "RuntimeError: pidfd_getfd: Operation not permitted"
    found = between(Engine("A", opened=lambda _: refused), "A")
    assert found.transport == "gloo"
    assert found.why.endswith(f"as CUDA IPC does not work here: {refused}")


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


def receiver_on(device: Any) -> WeightReceiver:
    """As in vLLM 0.22 on a CPU, where only the worker's runner has a device."""
    receiver: Any = WeightReceiver()
    receiver.device = None
    receiver.model_runner = SimpleNamespace(device=device)
    return receiver  # type: ignore[no-any-return]


def test_a_rank_tells_the_device_that_its_weights_are_on() -> None:
    told = receiver_on(torch.device("cpu")).gkd_identity()
    assert told == {"device": "cpu", "uuid": "cpu"}


def test_a_rank_opens_what_is_shared_and_tells_why_it_cannot() -> None:
    receiver = receiver_on(torch.device("cuda", 3))
    shared = source_on("A")
    assert shared.cannot_share(Engine("A", opened=receiver.gkd_open)) == ""
    broken = base64.b64encode(pickle.dumps([()])).decode()
    assert str(receiver.gkd_open(broken)).startswith("IndexError: ")


# -- pushed -------------------------------------------------------------------------

WEIGHTS = {"a": torch.full((2, 2), 3.0), "b": torch.arange(5.0).to(torch.bfloat16)}
INFOS: list[broadcast.Info] = [("a", "float32", (2, 2)), ("b", "bfloat16", (5,))]
TRANSPORTS = ("gloo", "nccl", "cuda-ipc")
ENOUGH_S, SHORT_S = 60.0, 3.0


class Model:
    """The engine's, which keeps what it is given."""

    def __init__(self) -> None:
        self.loaded: dict[str, Any] = {}

    def modules(self) -> list[Any]:
        return []

    def load_weights(self, weights: Any) -> None:
        self.loaded |= {name: tensor.clone() for name, tensor in weights}


class Rank(Engine):
    """One of the engine's ranks, whose calls run in this process."""

    def __init__(self) -> None:
        super().__init__("A")
        self.model = Model()
        self.receiver = receiver_on(torch.device("cpu", 3))
        self.receiver.rank = 0
        self.receiver.model_runner.get_model = lambda: self.model

    def receive(self, infos: list[Any], rendezvous: Rendezvous) -> None:
        # NCCL's buffers are where the weights are.
        self.receiver.model_runner.device = torch.device("cpu")
        self.receiver.gkd_receive(infos, asdict(rendezvous))

    def take_shared(self, infos: list[Any], handles: str) -> None:
        self.receiver.gkd_import(infos, handles)

    def load(self, weights: Any) -> None:
        self.receiver.gkd_load(weights)


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> list[gpu_twins.Communicator]:
    """vLLM's wrapper of NCCL, without NCCL; the communicators that were made."""
    pynccl, utils = ModuleType("pynccl"), ModuleType("utils")
    pynccl.PyNcclCommunicator = gpu_twins.Communicator  # type: ignore[attr-defined]

    def create(host: str, port: int, rank: int, world_size: int) -> Any:
        limit = datetime.timedelta(seconds=SHORT_S)  # vLLM's is five minutes
        store = torch.distributed.TCPStore(host, port, world_size, rank == 0, limit)
        return SimpleNamespace(store=store, rank=rank, world_size=world_size)

    utils.StatelessProcessGroup = SimpleNamespace(create=create)  # type: ignore[attr-defined]
    at = "vllm.distributed"
    for name in ("vllm", at, f"{at}.device_communicators"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, f"{at}.device_communicators.pynccl", pynccl)
    monkeypatch.setitem(sys.modules, f"{at}.utils", utils)
    monkeypatch.setattr(gpu_twins.Communicator, "made", [])
    return gpu_twins.Communicator.made


@pytest.fixture(autouse=True)
def no_call_is_left() -> Iterator[None]:
    """What gives up leaves calls behind; in C code they would outlive Python."""
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("gkd: "):
            thread.join(ENOUGH_S)
            assert not thread.is_alive(), thread.name


def trainer() -> WeightSource:
    return WeightSource(SimpleNamespace(named_tensors=WEIGHTS.items))  # type: ignore[arg-type]


def push(
    transport: str,
    engine: Any,
    source: WeightSource,
    infos: list[broadcast.Info] = INFOS,
    budget_s: float = ENOUGH_S,
) -> int:
    made: transfer.Transfer
    if transport == "in-process":
        made = transfer.InProcess(engine, source, lambda: budget_s)
    elif transport == "cuda-ipc":
        made = transfer.SharedMemory(engine, source, lambda: budget_s, "")
    else:
        made = transfer.Broadcast(engine, source, lambda: budget_s, "", transport, 2)
    return made.push(infos)


@pytest.mark.parametrize("transport", ["in-process", *TRANSPORTS])
def test_weights_arrive_whole_by_every_transport(
    transport: str, nccl: list[gpu_twins.Communicator]
) -> None:
    engine, source = Rank(), trainer()
    for _ in range(2):
        engine.model.loaded = {}
        assert push(transport, engine, source) > 0
        assert engine.model.loaded.keys() == WEIGHTS.keys()
        for name, tensor in WEIGHTS.items():
            assert torch.equal(engine.model.loaded[name], tensor)
    # Each push has a communicator a side, given back after it.
    assert len(nccl) == (4 if transport == "nccl" else 0)
    assert all(one.disabled for one in nccl)
    assert source.shared == []


@pytest.mark.parametrize("transport", ["gloo", "nccl"])
def test_an_engine_that_expects_other_tensors_is_told_the_size(
    transport: str, nccl: list[gpu_twins.Communicator]
) -> None:
    class Other(Rank):
        def receive(self, infos: list[Any], rendezvous: Rendezvous) -> None:
            super().receive(infos[:1], rendezvous)

    expected = "announces 32 bytes, the receiver expects 16"
    with pytest.raises(broadcast.BroadcastError, match=expected):
        push(transport, Other(), trainer())
    assert all(one.disabled for one in nccl)


@pytest.mark.parametrize("transport", ["gloo", "nccl"])
def test_a_trainer_that_gives_another_tensor_is_told_so_on_both_sides(
    transport: str, nccl: list[gpu_twins.Communicator]
) -> None:
    wrong: list[broadcast.Info] = [("a", "float32", (4, 2))]
    with pytest.raises(broadcast.BroadcastError, match=r"the trainer gave a \(2, 2\)"):
        push(transport, Rank(), trainer(), wrong)
    assert all(one.disabled for one in nccl)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_engine_that_is_lost_is_the_reason_and_not_the_wait_for_it(
    transport: str, nccl: list[gpu_twins.Communicator]
) -> None:
    class Lost(Rank):
        def receive(self, infos: list[Any], rendezvous: Rendezvous) -> None:
            raise StageFault("env.host-oom", "the engine's rank 0 was killed")

        take_shared = receive  # type: ignore[assignment]

    with pytest.raises(StageFault, match="rank 0 was killed"):
        push(transport, Lost(), trainer(), budget_s=SHORT_S)


@pytest.mark.parametrize("transport", ["gloo", "nccl"])
def test_a_sender_that_hangs_is_named(
    transport: str, nccl: list[gpu_twins.Communicator]
) -> None:
    source, go_on = trainer(), threading.Event()

    def hang() -> Any:
        go_on.wait()
        return iter(())

    source.trainer = SimpleNamespace(  # type: ignore[assignment]
        named_tensors=lambda: WEIGHTS.items() if go_on.is_set() else hang()
    )
    source.device = lambda: torch.device("cpu")  # type: ignore[method-assign]
    with pytest.raises(StageFault) as told:
        push(transport, Rank(), source, budget_s=SHORT_S)
    go_on.set()
    assert told.value.cause == "sync.stuck"
    assert f"the trainer's broadcast by {transport}" in told.value.facts["waited_for"]


def test_an_engine_that_does_not_open_the_memory_in_time_is_named() -> None:
    class Hung(Rank):
        def take_shared(self, infos: list[Any], handles: str) -> None:
            go_on.wait()

    go_on, source = threading.Event(), trainer()
    with pytest.raises(StageFault, match="the trainer's GPU memory") as told:
        push("cuda-ipc", Hung(), source, budget_s=0.2)
    assert told.value.cause == "sync.stuck"
    assert source.shared  # the engine may still read it
    go_on.set()


def test_a_communicator_that_is_disabled_is_no_push(
    nccl: list[gpu_twins.Communicator], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Disabled(gpu_twins.Communicator):
        def __init__(self, group: Any, device: Any) -> None:
            super().__init__(group, device)
            self.disabled = True

    pynccl: Any = sys.modules["vllm.distributed.device_communicators.pynccl"]
    monkeypatch.setattr(pynccl, "PyNcclCommunicator", Disabled)
    with pytest.raises(broadcast.BroadcastError, match="communicator is disabled"):
        push("nccl", Rank(), trainer())


# -- the engine --------------------------------------------------------------------


def test_an_actor_touches_nothing_before_it_is_asked() -> None:
    """The trainer's is there while the engine starts and measures the GPU's memory."""

    class Probe(Role):
        def parts(self) -> dict[str, Any]:
            raise AssertionError("made too early")

    config: Any = None
    with pytest.raises(AssertionError, match="too early"):
        Probe(config).call("", "")


@pytest.mark.parametrize(
    ("layout", "gpus", "size", "wanted"),
    [
        ("colocated", 1, 1, None),
        ("split", 1, 1, 2),
        ("split", 2, 1, None),
        ("split", 2, 2, 3),
        ("ray", 2, 1, 3),
        ("ray", 3, 1, None),
    ],
)
def test_a_gpu_for_one_process_is_not_shared(
    layout: str, gpus: int, size: int, wanted: int | None
) -> None:
    given: dict[str, Any] = {"layout": layout, "tensor_parallel_size": size}
    check_layout(Settings(gpus=gpus, **given))
    if wanted is None:
        check_layout(Settings(gpus=gpus, exclusive=True, **given))
        return
    with pytest.raises(StageFault, match=f"needs {wanted} GPUs") as told:
        check_layout(Settings(gpus=gpus, exclusive=True, **given))
    assert told.value.cause == "config.invalid-combination"


@pytest.mark.parametrize(
    ("device", "size", "multiprocess", "executor"),
    [
        ("cpu", 1, False, engine.UNIPROC),
        ("cpu", 1, True, None),
        ("cpu", 2, False, "mp"),
        ("cuda", 1, False, None),
        ("cuda", 2, True, "mp"),
    ],
)
def test_the_engine_has_the_processes_that_were_asked_for(
    device: str, size: int, multiprocess: bool, executor: str | None
) -> None:
    """Within a placement group of Ray's vLLM would have Ray start several ranks; on a
    CPU vLLM 0.22 would start another process for one."""
    layout = "split" if multiprocess else "ray"
    gpus = 0 if device == "cpu" else size + 1
    settings = Settings(gpus=gpus, layout=layout, tensor_parallel_size=size)
    config = EngineConfig("m", settings, "float32", 128, None, "/s", offline=True)
    found = engine.arguments(config).get("distributed_executor_backend")
    assert found == executor
