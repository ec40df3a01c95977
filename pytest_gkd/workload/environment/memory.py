"""How much host memory there is for this process, cgroup limits included."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pytest_gkd.stage_api import Note, StageFault
from pytest_gkd.workload.environment.findings import size_text

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

# The imports of torch and vLLM alone, a trainer and an engine, want about this.
MEMORY_NOTE_BYTES = 4 * GIB


@dataclass(frozen=True)
class Memory:
    """Host memory in bytes; ``limit_bytes`` is the cgroup's, None without one."""

    total_bytes: int
    available_bytes: int
    limit_bytes: int | None


def read_memory(proc: Path = Path("/proc")) -> Memory:
    """Memory of the machine, cut to the limit of this process's cgroup."""
    fields = {}
    for line in (proc / "meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        fields[name] = int(rest.split()[0]) * KIB
    total, available = fields["MemTotal"], fields["MemAvailable"]
    limit = None
    for directory, limit_name, used_name in _cgroups(proc):
        found, used = _number(directory / limit_name), _number(directory / used_name)
        # Version 1 writes a number near 2**63 for "no limit".
        if found is not None and used is not None and found < total:
            limit = min(found, limit or found)
            # Cached files count as used but can be given back.
            available = min(available, found - used + _inactive(directory))
    return Memory(total, max(0, available), limit)


def _cgroups(proc: Path) -> list[tuple[Path, str, str]]:
    """This process's memory cgroup and its parents, with the names of their files."""
    base = Path("/sys/fs/cgroup")
    found = []
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = base, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root = base / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        # Inside a container the path may be the host's: its root is then ours.
        place = root / path.lstrip("/")
        found += [
            (directory, *names)
            for directory in dict.fromkeys((place, *place.parents, root))
            if directory.is_relative_to(root) and (directory / names[0]).exists()
        ]
    return found


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
    """Little memory is a note: how much a job needs depends on its model."""
    if memory.available_bytes >= MEMORY_NOTE_BYTES:
        return []
    limit = ""
    if memory.limit_bytes is not None:
        limit = f", limited to {size_text(memory.limit_bytes)} by the cgroup"
    return [
        Note(
            "memory.low",
            f"{size_text(memory.available_bytes)} of host memory are available of "
            f"{size_text(memory.total_bytes)}{limit}; a trainer and an engine want "
            f"{size_text(MEMORY_NOTE_BYTES)} or more.",
        )
    ]
