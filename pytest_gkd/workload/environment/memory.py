"""How much host memory this process may use, cgroup limits included."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

from pytest_gkd.processes import cgroup
from pytest_gkd.stage_api import Note, StageFault
from pytest_gkd.workload.environment.findings import size_text

MIB = 1 << 20
GIB = 1 << 30

# Roughly what a trainer and an engine need just to import torch and vLLM.
MEMORY_NOTE_BYTES = 4 * GIB


@dataclass(frozen=True)
class Memory:
    """Host memory in bytes; ``limit_bytes`` is the cgroup's, None without one."""

    total_bytes: int
    available_bytes: int
    limit_bytes: int | None


def read_memory() -> Memory:
    """The machine's memory, capped at the limit of this process's cgroup."""
    host = psutil.virtual_memory()
    available, limit = host.available, None
    place, names = cgroup.base(), ("memory.max", "memory.current")
    if first := cgroup.first_version("memory", "memory.limit_in_bytes"):
        place, names = first.parent, (first.name, "memory.usage_in_bytes")
    for directory in (place, *place.parents) if place else ():
        found, used = (_number(directory / name) for name in names)
        # Version 1 writes a number near 2**63 for "no limit".
        if found is not None and used is not None and found < host.total:
            limit = min(found, limit or found)
            # Page cache counts as used but can be reclaimed.
            available = min(available, found - used + _inactive(directory))
    return Memory(host.total, max(0, available), limit)


def _number(path: Path) -> int | None:
    text = path.read_text().strip() if path.exists() else "max"
    return int(text) if text.isdigit() else None


def _inactive(directory: Path) -> int:
    stat = directory / "memory.stat"
    if stat.exists():
        for line in stat.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name in ("inactive_file", "total_inactive_file"):
                return int(value)
    return 0


def judge_memory(memory: Memory) -> list[StageFault | Note]:
    """Low memory is only a note: how much a job needs depends on its model."""
    if memory.available_bytes >= MEMORY_NOTE_BYTES:
        return []
    limit = ""
    if memory.limit_bytes is not None:
        limit = f", limited to {size_text(memory.limit_bytes)} by the cgroup"
    text = f"{size_text(memory.available_bytes)} of host memory are available of "
    text += f"{size_text(memory.total_bytes)}{limit}; a trainer and an engine want "
    text += f"{size_text(MEMORY_NOTE_BYTES)} or more."
    return [Note("memory.low", text)]
