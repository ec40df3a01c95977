"""``gkd env``: what a maintainer first asks about the machine, to paste in an issue.

Read from metadata and the system; nothing heavy is imported.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from pytest_gkd.processes import cgroup, gpus

PACKAGES = re.compile(
    r"torch|torchvision|torchaudio|triton|vllm(-.+)?|ray|transformers|datasets|numpy"
    r"|tokenizers|safetensors|accelerate|peft|trl|verl|lightrft|deepspeed|flash[-_]attn"
    r"|pyarrow|psutil|py-spy|google-re2|ahocorasick[-_]rs|execnet|pluggy|pytest|nvidia-nccl-.+|sglang"
)
VARIABLES = re.compile(
    r"(CUDA|NCCL|GLOO|UCX|NVIDIA|TORCH|PYTORCH|VLLM|RAY|HF|HUGGINGFACE|HUGGING_FACE"
    r"|TRANSFORMERS|DATASETS|TOKENIZERS|OMP|MKL|KMP|PYTEST|PYTHON|LD|SLURM|WANDB|VERL"
    r"|TRITON|MASTER|DS)_.*|(LOCAL_|WORLD_)?(RANK|SIZE)|TMPDIR|XDG_CACHE_HOME"
    r"|PYTHON[A-Z]+|CI|(https?|no|all)_proxy",
    re.IGNORECASE,
)
# cgroup v2 (Documentation/admin-guide/cgroup-v2.rst); "max" means no limit.
LIMITS = ("memory.max", "memory.swap.max", "cpu.max", "pids.max")
SHM = Path("/dev/shm")  # noqa: S108 - where the system keeps it
GIB = 1 << 30


def lines(*, with_gpus: bool = True) -> Iterator[str]:
    """The report, one fact per line; whoever displays it masks secrets.

    Without GPUs it asks no driver, which may hang.
    """
    yield f"os          {platform.platform()}"
    yield from (f"os-release  {name}" for name in _release())
    python = f"{platform.python_implementation()} {platform.python_version()}"
    yield f"python      {python}"
    yield f"cpus        {len(os.sched_getaffinity(0))} usable of {os.cpu_count()}"
    memory = psutil.virtual_memory()
    room = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB available"
    yield f"memory      {room}"
    limits = list(cgroup_limits())
    yield from limits or ["cgroup      no visible limit"]
    for place in dict.fromkeys((SHM, Path(os.environ.get("TMPDIR") or "/tmp"))):  # noqa: S108
        yield _room(place)
    if with_gpus:
        found = gpus.describe() or ["no NVIDIA driver answers"]
        yield from (f"gpu         {text}" for text in found)
    yield from (f"package     {text}" for text in _packages())
    for name in sorted(os.environ):
        if VARIABLES.fullmatch(name):
            yield f"variable    {name}={os.environ[name]}"


def machine(cards: Sequence[str]) -> dict[str, Any]:
    """What kind of machine it is, given its GPUs' product names: equal for machines
    that should be equally fast, without a name of this one."""
    return {
        "cpu": _cpu(),
        "cpus": len(os.sched_getaffinity(0)),
        "gpu": cards[0] if cards else "",
    }


def _cpu() -> str:
    """The model, which not every architecture tells; else the architecture."""
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open() as file:
        for line in file:
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
            if not line.strip():
                break  # the first processor's lines end here
    return platform.machine()


def _release() -> Iterator[str]:
    with contextlib.suppress(OSError):  # a system without the file
        yield platform.freedesktop_os_release().get("PRETTY_NAME", "unnamed")


def cgroup_limits() -> Iterator[str]:
    """One line for each limit on this process, from its cgroup and those above."""
    place = cgroup.base()
    for directory in (place, *place.parents) if place else ():
        for name in LIMITS:
            try:
                value = (directory / name).read_text().strip()
            except OSError:
                continue  # the controller is off here, or this is above the mount
            if not value.startswith("max"):
                yield f"cgroup      {name} {value} in {directory}"


def _room(place: Path) -> str:
    try:
        usage = shutil.disk_usage(place)
    except OSError as error:
        return f"disk        {place}: {error.strerror}"
    room = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free"
    return f"disk        {place} {room}"


def _packages() -> list[str]:
    """The relevant packages and every pytest plugin, with versions."""
    found = set()
    for one in metadata.distributions():
        name = one.metadata["Name"] or ""
        plugin = any(entry.group == "pytest11" for entry in one.entry_points)
        if plugin or PACKAGES.fullmatch(name.lower()):
            found.add(f"{name} {one.version}{' (pytest plugin)' if plugin else ''}")
    return sorted(found, key=str.lower)
