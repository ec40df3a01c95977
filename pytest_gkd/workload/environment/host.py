"""Checks for enough disk, shared memory and open files, and for a compiler."""

from __future__ import annotations

import os
import resource
import shutil
import sysconfig
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pytest_gkd import hub_cache
from pytest_gkd.stage_api import Note, StageFault
from pytest_gkd.workload.environment.findings import size_text
from pytest_gkd.workload.environment.memory import GIB, MIB, judge_memory, read_memory

SHM = Path("/dev/shm")  # noqa: S108 - the place itself is what is judged

# vLLM, Ray and torch write caches, logs and sockets; with less they fail midway.
DISK_FREE_BYTES = 1 * GIB
INODES_FREE = 10_000
# A container has 64 MiB by default (Docker's --shm-size), too little for NCCL between
# several GPUs, vLLM's message queues and DataLoader workers; NCCL's troubleshooting
# guide recommends 1 GiB.
SHM_FAIL_BYTES = 128 * MIB
SHM_NOTE_BYTES = 512 * MIB
SHM_FREE_BYTES = 16 * MIB
# Below 1024, Linux's own default, one engine's imports and sockets exhaust them. Ray
# and vLLM raise the soft limit to the hard one (at most 65536) by themselves; Ray warns
# below 4096 and recommends 8192 (ray/_private/worker.py).
FILES_FAIL = 1024
# Compiled kernel caches, Ray's object store and a model's shards are larger.
FILE_SIZE_FAIL_BYTES = 1 * GIB
FILES_NOTE = 8192


@dataclass(frozen=True)
class Disk:
    """Free space below one directory; ``device`` tells if two paths share a disk."""

    label: str
    path: str
    device: int
    free_bytes: int
    total_bytes: int
    free_inodes: int
    total_inodes: int
    writable: bool


def nearest(path: Path) -> Path:
    """The path itself, or its nearest existing ancestor."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def read_disk(label: str, path: Path) -> Disk:
    """Space available to the user (without root's reserve) below ``path``."""
    place = nearest(path)
    usage = os.statvfs(place)
    return Disk(
        label,
        str(path),
        place.stat().st_dev,
        usage.f_bavail * usage.f_frsize,
        usage.f_blocks * usage.f_frsize,
        usage.f_favail,
        usage.f_files,
        os.access(place, os.W_OK),
    )


def cache_dirs(environ: Mapping[str, str]) -> dict[str, Path]:
    """The directories that downloads and compiled kernels go to, by label."""
    home = Path(environ.get("HOME") or str(Path.home()))
    cache = Path(environ.get("XDG_CACHE_HOME") or home / ".cache")
    return {
        "HF_HOME": hub_cache.home(environ),
        "VLLM_CACHE_ROOT": Path(environ.get("VLLM_CACHE_ROOT") or cache / "vllm"),
        "TMPDIR": Path(environ.get("TMPDIR") or "/tmp"),  # noqa: S108
    }


def judge_disk(disk: Disk, *, ours: bool) -> list[StageFault | Note]:
    """Judge the space below one directory.

    One that this run writes to (``ours``) must be writable; a cache may well be
    read-only if everything is already in it.
    """
    where = f"{disk.path} ({disk.label})"
    items: list[StageFault | Note] = []
    facts = {"path": disk.path, "free_bytes": disk.free_bytes}
    if disk.free_bytes < DISK_FREE_BYTES:
        text = f"{where} has {size_text(disk.free_bytes)} free of "
        text += f"{size_text(disk.total_bytes)}; at least "
        text += f"{size_text(DISK_FREE_BYTES)} is expected."
        items.append(StageFault("env.disk-full", text, facts))
    # Some file systems (btrfs, overlay on some hosts) do not count inodes: total 0.
    if disk.total_inodes and disk.free_inodes < INODES_FREE:
        text = f"{where} has {disk.free_inodes} inodes free of {disk.total_inodes}; "
        text += f"at least {INODES_FREE} are expected."
        inodes = {**facts, "free_inodes": disk.free_inodes}
        items.append(StageFault("env.disk-full", text, inodes))
    if not disk.writable:
        text = f"{where} is not writable by user id {os.getuid()}."
        if ours:
            items.append(StageFault("env.permission", text, facts))
        else:
            items.append(Note("cache.read-only", text))
    return items


def judge_shm(
    total_bytes: int, free_bytes: int, *, gpus: int
) -> list[StageFault | Note]:
    """Shared memory (bytes) against what NCCL, vLLM and DataLoader workers need."""
    facts = {"total_bytes": total_bytes, "free_bytes": free_bytes}
    room = f"{SHM} has {size_text(free_bytes)} free of {size_text(total_bytes)}"
    ranks = gpus > 1  # one rank has nobody to share memory with
    if free_bytes < SHM_FREE_BYTES or (ranks and total_bytes < SHM_FAIL_BYTES):
        expected = SHM_FAIL_BYTES if ranks else SHM_FREE_BYTES
        text = f"{room}; at least {size_text(expected)} is expected"
        text += f" with {gpus} GPUs." if ranks else "."
        return [StageFault("env.shm-too-small", text, facts)]
    if total_bytes < SHM_NOTE_BYTES:
        text = f"{room}; NCCL's guide recommends 1.0 GiB in a container."
        return [Note("shm.small", text)]
    return []


def judge_files(soft: int, hard: int) -> list[StageFault | Note]:
    """This process's limits on open files (RLIMIT_NOFILE)."""
    text = f"the open file limit (ulimit -n) is {soft}, hard limit {hard}"
    if soft < FILES_FAIL:
        text += f"; at least {FILES_FAIL} is expected."
        return [StageFault("env.too-many-files", text, {"soft": soft, "hard": hard})]
    if max(soft, min(hard, 65536)) < FILES_NOTE:
        return [Note("files.low", f"{text}; Ray recommends {FILES_NOTE}.")]
    return []


def judge_file_size(limit_bytes: int) -> list[StageFault | Note]:
    """The soft limit on file size (RLIMIT_FSIZE)."""
    if limit_bytes == resource.RLIM_INFINITY:
        return []
    text = f"the file size limit (ulimit -f) is {size_text(limit_bytes)}"
    if limit_bytes >= FILE_SIZE_FAIL_BYTES:
        return [Note("file-size.limited", f"{text}; checkpoints may be larger.")]
    text += f"; at least {size_text(FILE_SIZE_FAIL_BYTES)} is expected."
    return [StageFault("env.file-size-limit", text, {"limit_bytes": limit_bytes})]


def read_compiler(environ: Mapping[str, str]) -> tuple[str | None, str]:
    """The C compiler that Triton would use (its path, or None), and its origin.

    Triton takes CC as is, else clang or gcc on PATH (triton/runtime/build.py); cc is
    Inductor's fallback.
    """
    path = environ.get("PATH")
    if asked := environ.get("CC"):
        return shutil.which(asked.split()[0], path=path), f"CC={asked}"
    found = (shutil.which(name, path=path) for name in ("gcc", "clang", "cc"))
    return next(filter(None, found), None), "PATH"


def judge_compiler(
    compiler: str | None, source: str, header: Path, *, gpus: int
) -> list[StageFault | Note]:
    """Triton compiles a launcher per kernel: on GPUs it needs both, on CPU neither
    until torch.compile is used."""
    texts = []
    if compiler is None and source == "PATH":
        texts.append("no C compiler was found on PATH (gcc, clang or cc)")
    elif compiler is None:
        texts.append(f"{source} names no program")
    if not header.exists():
        texts.append(f"the Python header {header} does not exist")
    if gpus:
        facts = {"source": source}
        return [StageFault("env.compiler", f"{text}.", facts) for text in texts]
    return [
        Note("compiler.missing", f"{text}; torch.compile needs it.") for text in texts
    ]


def shadowing(directory: Path, modules: tuple[str, ...]) -> list[StageFault | Note]:
    """Files in the working directory that a script started there would import instead
    of the installed packages."""
    items: list[StageFault | Note] = []
    for module in modules:
        for path in (directory / f"{module}.py", directory / module / "__init__.py"):
            if path.exists():
                text = f"{path} hides the installed package {module} from scripts "
                text += "started there."
                items.append(Note("package.shadowed", text))
    return items


def read_host(
    ours: Mapping[str, Path], environ: Mapping[str, str], *, gpus: int
) -> tuple[list[StageFault | Note], dict[str, object]]:
    """Read and judge everything here; ``ours`` are directories this run writes to.

    Returns the findings, and the facts for the report.
    """
    items: list[StageFault | Note] = []
    places = {**ours, **cache_dirs(environ)}
    disks = [read_disk(label, path) for label, path in places.items()]
    full: set[int] = set()
    for disk in disks:
        for item in judge_disk(disk, ours=disk.label in ours):
            # One full disk is one finding, however many directories are on it.
            if isinstance(item, StageFault) and item.cause == "env.disk-full":
                if disk.device in full:
                    continue
                full.add(disk.device)
            items.append(item)
    shm = read_disk("shared memory", SHM)
    items += judge_shm(shm.total_bytes, shm.free_bytes, gpus=gpus)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (2**31 if n == resource.RLIM_INFINITY else n for n in (soft, hard))
    items += judge_files(soft, hard)
    file_size, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    items += judge_file_size(file_size)
    memory = read_memory()
    items += judge_memory(memory)
    compiler, source = read_compiler(environ)
    header = Path(sysconfig.get_path("include")) / "Python.h"
    items += judge_compiler(compiler, source, header, gpus=gpus)
    facts: dict[str, object] = {
        "disk": {
            disk.label: {"path": disk.path, "free_gib": round(disk.free_bytes / GIB, 1)}
            for disk in disks
        },
        "shm_mib": round(shm.total_bytes / MIB),
        "open_files": {"soft": soft, "hard": hard},
        "file_size_bytes": None if file_size == resource.RLIM_INFINITY else file_size,
        "memory": {
            name.replace("_bytes", "_mib"): value and round(value / MIB)
            for name, value in asdict(memory).items()
        },
        "compiler": compiler,
    }
    return items, facts
