"""Estimates, before anything is loaded, each role's GPU and host memory needs.

Computed from config.json and the safetensors headers alone. ``least`` is what a part
takes whatever else happens: a stage is refused only if the sum of these exceeds the
memory. ``usual`` is what it typically takes, without activations; if that sum exceeds
the memory, a note says so.
"""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil

from pytest_gkd import checkpoint
from pytest_gkd.checkpoint import ITEM_BYTES
from pytest_gkd.options import Settings
from pytest_gkd.processes import gpus
from pytest_gkd.stage_api import StageFault
from pytest_gkd.workload.environment import gpu
from pytest_gkd.workload.environment import memory as env_memory
from pytest_gkd.workload.environment.findings import size_text
from pytest_gkd.workload.models import model_files
from pytest_gkd.workload.models.model_files import ModelFiles
from pytest_gkd.workload.models.weight_files import read_safetensors_header

if TYPE_CHECKING:
    from pytest_gkd.stage_api import StageContext
    from pytest_gkd.workload.layouts.job_config import JobConfig
    from pytest_gkd.workload.models.inputs import Inputs

GIB = 1 << 30
HOST = "host memory"
# A process's CUDA context with the kernels it loads; typically 0.3 to 0.6 GiB.
CONTEXT_BYTES = GIB // 2
# What this run's other stages may hold on a GPU for a while: the environment stage's
# probe a context, nccl's ranks buffers of up to 1 GiB each.
PASSING_BYTES = 4 * GIB
# torch and vLLM see up to 2 % less of a card than NVML reports.
UNSEEN = 0.05
FORMAT_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
# Parts that some loaders skip: vision and audio encoders, and draft-token layers.
_LEFT_OUT = re.compile(r"vision|visual|image|audio|speech|projector|mtp|nextn|eh_proj")
_EXPERT = re.compile(r"\bexperts?\b")
_LAYER = re.compile(r"\blayers\.(\d+)\.")
# Model types whose cache holds keys and values of every layer for every token.
QWEN = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe")
PLAIN_CACHE = ("llama", "mixtral", "granite", *QWEN)
STEP = 0.05
STAGES = ("vllm", "weight_sync", "training_step")
ROLES = ("engine", "student", "teacher")


@dataclass(frozen=True)
class Part:
    """What one part of a role takes, in bytes."""

    what: str
    usual: int
    least: int


@dataclass(frozen=True)
class Room:
    """One place's memory in bytes; ``passing`` is what this run itself may hold there
    for a while before it gives it back."""

    name: str
    free: int
    total: int
    passing: int = 0

    @property
    def most(self) -> int:
        """The most that can become free."""
        return self.free + self.passing


@dataclass(frozen=True)
class Size:
    """Elements and bytes of a model's weights in a given dtype.

    ``least`` and ``trained`` count what is certain: the bytes that are loaded, and the
    elements that get a gradient in every step. ``mapped`` says that the file stores
    them in that dtype, so that a CPU may keep them in the file's own pages.
    """

    elements: int
    nbytes: int
    least: int
    trained: int
    mapped: bool


def count(files: ModelFiles, dtype: str) -> Size | None:
    """The weights of a model loaded in ``dtype``; None for pickled ones."""
    config = {**files.config, **checkpoint.text_part(files.config)}
    # Files in Mistral's own format may lie next to those that are loaded.
    named = [p for p in files.weight_files if not p.name.startswith("consolidated")]
    used = named or files.weight_files
    if any(path.suffix != ".safetensors" for path in used):
        return None
    headers = (read_safetensors_header(path, str(files.directory)) for path in used)
    tensors = checkpoint.loaded(config, headers)
    stored_as = FORMAT_NAMES[dtype]
    quantized = "quantization_config" in config
    elements = nbytes = least = trained = 0
    for name, tensor in tensors.items():
        size = math.prod(tensor["shape"])
        low, high = tensor["data_offsets"]
        own = quantized or tensor["dtype"] not in ITEM_BYTES
        taken = high - low if own else size * ITEM_BYTES[stored_as]
        elements, nbytes = elements + size, nbytes + taken
        if not _may_be_left_out(name, config):
            least += taken
            trained += 0 if _EXPERT.search(name) or own else size
    mapped = all(tensor["dtype"] == stored_as for tensor in tensors.values())
    return Size(elements, nbytes, least, trained, mapped)


def _may_be_left_out(name: str, config: Mapping[str, Any]) -> bool:
    layer = _LAYER.search(name)
    layers = config.get("num_hidden_layers")
    beyond = layer and isinstance(layers, int) and int(layer[1]) >= layers
    return bool(beyond or _LEFT_OUT.search(name))


def training(size: Size, dtype: str, device: str) -> list[Part]:
    """What a step of ``optimizer.Optimizer`` takes on top of the weights, at its peak.

    Gradients, AdamW's two moments, and for 16 bits float32 copies of weights and
    gradients, which bfloat16 goes without on a GPU that has no room for them.
    """
    width = 4 if dtype == "float32" else 2
    gradients = Part("gradients", size.elements * width, size.trained * width)
    moments = Part("AdamW's moments", size.elements * 8, size.trained * 8)
    if dtype == "float32":
        return [gradients, moments]
    bare = dtype == "bfloat16" and device == "cuda"
    copies = 0 if bare else size.trained * 8
    return [
        gradients,
        Part("float32 copies", size.elements * 8, copies),
        Part(moments.what, moments.usual, size.trained * 4 if bare else moments.least),
    ]


def cache(config: Mapping[str, Any], tokens: int, width: int) -> Part:
    """The KV cache of one sequence of ``tokens``, in elements of ``width`` bytes."""
    usual = (checkpoint.cache_elements(config) or 0) * tokens * width
    layers = set(config.get("layer_types") or ["full_attention"])
    plain = config.get("model_type") in PLAIN_CACHE and layers == {"full_attention"}
    sliding = config.get("use_sliding_window")
    return Part("KV cache", usual, usual if plain and not sliding else 0)


def placement(settings: Settings) -> dict[str, tuple[int | str, ...]]:
    """The GPUs of each role, counted from 0: the engine on the first ones, trainer and
    teacher on one of the others each, as far as they go. On a CPU all are in host
    memory."""
    last = settings.gpus - 1
    size = settings.tensor_parallel_size
    if settings.device == "cpu":
        return dict.fromkeys(ROLES, (HOST,))
    if settings.layout == "colocated":
        return dict.fromkeys(ROLES, (0,))
    return {
        "engine": tuple(range(size)),
        "student": (min(size, last),),
        "teacher": (min(size + 1, last),),
    }


def rooms(settings: Settings) -> dict[int | str, Room]:
    """The memory of this machine: each GPU's by its number, and the host's.

    Omits GPUs that are MIG instances, for which NVML reports the whole card's memory,
    or share the host's memory, for which it reports none (0 bytes). Ray gives its
    actors any of the GPUs, so there each counts as the roomiest one.
    """
    memory = env_memory.read_memory()
    # Idle pages may be swapped out, and other processes of this run will end.
    passing = psutil.swap_memory().free
    for pid in gpu.run_pids() - {os.getpid()}:
        try:
            passing += psutil.Process(pid).memory_info().rss
        except psutil.NoSuchProcess:
            continue
    limit = memory.limit_bytes or memory.total_bytes
    found: dict[int | str, Room] = {
        HOST: Room(HOST, memory.available_bytes, limit, passing)
    }
    cards = gpus.usable().cards if settings.gpus else ()
    if any(card.instances is not None or not card.total_bytes for card in cards):
        return found
    for number, card in enumerate(cards):
        if settings.layout == "ray":
            card = max(cards, key=lambda one: one.free_bytes)
        name = f"GPU {card.index} ({card.name})"
        passing = min(PASSING_BYTES, card.total_bytes - card.free_bytes)
        found[number] = Room(name, card.free_bytes, card.total_bytes, passing)
    return found


class Estimate:
    """What a job's roles need, read before any of them is created."""

    def __init__(self, job: JobConfig, inputs: Inputs) -> None:
        """Read headers and the free memory. See ``model_files.inspect`` for faults."""
        self.engine = job.engine
        self.settings = job.settings
        self.on_cpu = job.settings.device == "cpu"
        self.ranks = job.settings.tensor_parallel_size
        self.share = job.settings.gpu_memory_utilization
        self.where = placement(job.settings)
        self.rooms = rooms(job.settings)
        totals = [self.rooms[n].total for n in self.where["engine"] if n in self.rooms]
        # The engine's share of its smallest GPU, in bytes.
        self.claim = int(self.share * min(totals, default=0))
        self.sizes: dict[str, Size] = {}
        self.config: Mapping[str, Any] = {}
        for role in ("student", "teacher"):
            files = model_files.inspect(getattr(inputs, role), inputs.origin(role))
            size = files and count(files, job.engine.dtype)
            if files and size:
                self.sizes[role] = size
                if role == "student":
                    text = checkpoint.text_part(files.config)
                    self.config = {**files.config, **text}

    def check(self, gkd: StageContext) -> None:
        """Refuse a stage that cannot fit, note one that may not, record the sums.

        Raises StageFault ``vllm.kv-cache``, ``vllm.gpu-memory-utilization``,
        ``cuda.oom`` or ``env.host-oom``.
        """
        needs = self.needs(gkd.stage)
        told = {
            room.name: {
                "free_gib": _gib(room.free),
                **{part.what: _gib(part.usual) for part in needs[place]},
            }
            for place, room in self.rooms.items()
            if place in needs
        }
        if told:
            gkd.fact("memory_estimate_gib", told)
        for text in self.judge(gkd.stage):
            gkd.note("memory.tight", f"It may not fit: {text}")

    def judge(self, stage: str) -> list[str]:
        """What may not fit, in words. Raises StageFault as ``check`` does."""
        return [
            tight
            for place, parts in self.needs(stage).items()
            if (room := self.rooms.get(place))
            if (tight := self._judge(stage, place, room, parts))
        ]

    def needs(self, stage: str) -> dict[int | str, list[Part]]:
        """What one of our stages allocates, by place; empty for a user's stage."""
        found: dict[int | str, list[Part]] = defaultdict(list)
        student, teacher = (self.sizes.get(role) for role in ("student", "teacher"))
        if stage not in STAGES or student is None:
            return found
        for place in self.where["engine"]:
            found[place] += self._engine(student)
        (trainer,), dtype = self.where["student"], self.engine.dtype
        untouched = self.on_cpu and student.mapped and stage == "vllm"
        what = f"the student's weights in training ({dtype})"
        weights = Part(what, student.nbytes, 0 if untouched else student.least)
        found[trainer].append(weights)
        if stage == "weight_sync":
            what = "the trainer's copy of its weights"
            found[HOST].append(Part(what, student.nbytes, student.least))
        if stage == "training_step":
            found[trainer] += training(student, dtype, self.settings.device)
        if stage == "training_step" and teacher:
            least = 0 if self.on_cpu and teacher.mapped else teacher.least
            weights = Part("the teacher's weights", teacher.nbytes, least)
            found[self.where["teacher"][0]].append(weights)
        return found

    def _engine(self, student: Size) -> list[Part]:
        """The engine's parts on each of its GPUs, or all on a CPU."""
        if self.on_cpu:
            reserved = self.engine.kv_cache_bytes or 0
            return [
                Part("the engine's weights", student.nbytes, student.least),
                Part("its KV cache", reserved, reserved if self._may_serve() else 0),
            ]
        # vLLM fills its share of the card with cache; what its profiling run's
        # activations took stays free, and is assumed to be less than half of that.
        own, certain = student.nbytes // self.ranks, student.least // self.ranks
        return [
            Part("the engine's weights", own, certain),
            Part(
                f"its KV cache up to {self.share:g} of the card",
                max(0, self.claim - own),
                max(0, int(self.claim * (1 - UNSEEN)) - own) // 2,
            ),
        ]

    def _judge(
        self, stage: str, place: int | str, room: Room, parts: list[Part]
    ) -> str:
        if place != HOST and place in self.where["engine"]:
            self._judge_engine(room)
        least, usual = sum(p.least for p in parts), sum(p.usual for p in parts)
        usual += self._contexts(place)
        listed = ", ".join(f"{p.what} {size_text(p.usual)}" for p in parts if p.usual)
        has = f"{room.name} has {size_text(room.free)} free of {size_text(room.total)}"
        if least > room.most:
            raise StageFault(
                "env.host-oom" if place == HOST else "cuda.oom",
                f"{stage} cannot fit, by the models' files: {has}, and at least "
                f"{size_text(least)} of the following is certain: {listed}",
                facts={
                    "place": room.name,
                    "needed_gib": _gib(least),
                    "free_gib": _gib(room.free),
                    **self._smaller_share(place, room, parts),
                },
            )
        if usual <= room.free:
            return ""
        return f"{has}; {listed} make {size_text(usual)}, without activations."

    def _judge_engine(self, room: Room) -> None:
        """Raise if the engine's share cannot hold its weights and one sequence, or
        exceeds what is free, where vLLM gives up (v1/worker/utils.py,
        request_memory)."""
        size, one = self.sizes["student"], self._sequence()
        least = size.least // self.ranks + one.least
        claims = (
            f"its share of {room.name}, {self.share:g} of {size_text(room.total)}, is "
            f"{size_text(self.claim)}"
        )
        if least > self.claim:
            raise StageFault(
                "vllm.kv-cache",
                f"the engine cannot fit, by the model's files: {claims}; its weights "
                f"take {size_text(size.nbytes // self.ranks)} of each of {self.ranks} "
                f"GPU(s) ({self.engine.dtype}) and one sequence of "
                f"{self.engine.max_model_len} tokens {size_text(one.usual)} of KV "
                "cache",
                facts={
                    "place": room.name,
                    "needed_gib": _gib(least),
                    "share_gib": _gib(self.claim),
                    **self._larger_share(room),
                },
            )
        if room.most < self.claim * (1 - UNSEEN):
            raise StageFault(
                "vllm.gpu-memory-utilization",
                f"the engine cannot start: {claims}, and {size_text(room.free)} is "
                "free",
                facts={
                    "place": room.name,
                    "free_gib": _gib(room.free),
                    **self._share_of_free(room),
                },
            )

    def _sequence(self) -> Part:
        width = 4 if self.engine.dtype == "float32" else 2
        whole = cache(self.config, self.engine.max_model_len, width)
        least = whole.least // self.ranks if self._may_serve() else 0
        return Part(whole.what, whole.usual // self.ranks, least)

    def _may_serve(self) -> bool:
        """Whether the model has enough positions; if not, vLLM rejects the length."""
        positions = model_files.positions(self.config)
        return positions is None or self.engine.max_model_len <= positions

    def _engine_wants(self) -> int:
        """Bytes on each GPU for weights, two sequences and 1 GiB."""
        own = self.sizes["student"].nbytes // self.ranks
        return own + 2 * self._sequence().usual + GIB

    def _larger_share(self, room: Room) -> dict[str, Any]:
        """What would let the engine fit: a larger share, or more GPUs."""
        found: dict[str, Any] = {}
        share = math.ceil(self._engine_wants() / room.total / STEP) * STEP
        others = {*self.where["student"], *self.where["teacher"]}
        alone = others.isdisjoint(self.where["engine"])
        if share <= (0.9 if alone else 0.5) and share * room.total <= room.free:
            found["share"] = f"{share:.2f}"
        heads, more = checkpoint.heads(self.config), 2 * self.ranks
        if heads and heads % more == 0 and self.settings.gpus > more:
            found["tensor_parallel"] = more
        return found

    def _smaller_share(
        self, place: int | str, room: Room, parts: list[Part]
    ) -> dict[str, Any]:
        """A share for the engine that may leave room for the rest."""
        if place == HOST or place not in self.where["engine"]:
            return {}
        rest = sum(p.least for p in parts[2:]) + GIB + self._contexts(place)
        share = math.floor((room.free - rest) / room.total / STEP) * STEP
        if self._engine_wants() / room.total <= share < self.share:
            return {"share": f"{share:.2f}"}
        return {}

    def _share_of_free(self, room: Room) -> dict[str, Any]:
        """A share for the engine within the memory that is free, if one suffices."""
        share = math.floor(room.free / room.total / STEP) * STEP
        enough = self._engine_wants() / room.total <= share
        return {"share": f"{share:.2f}"} if enough else {}

    def _contexts(self, place: int | str) -> int:
        """Bytes of the CUDA contexts on a GPU: one per role that has a process."""
        if place == HOST:
            return 0
        roles = sum(place in at for at in self.where.values())
        return CONTEXT_BYTES * (1 if self.settings.layout == "colocated" else roles)


def _gib(count: int) -> float:
    return round(count / GIB, 3)
