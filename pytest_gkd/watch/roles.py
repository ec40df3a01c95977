"""What each process of a job does, told by its title and its environment.

Where the titles come from: Ray's ``ray::Class.method`` (python/ray/_raylet.pyx), vLLM's
``VLLM::EngineCore`` and ``VLLM::Worker_TP0`` (vllm/utils/system_utils.py,
set_process_title), a DataLoader's workers by multiprocessing's ``spawn_main`` or by a
fork that keeps the parent's title. torchrun and accelerate set RANK, LOCAL_RANK and
WORLD_SIZE; what sets its title may write it over its environment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pytest_gkd.watch.samples import Role

_LAUNCHER = re.compile(
    r"(?:^|[ /])(torchrun|accelerate launch|deepspeed|mpirun|srun)(?: |$)"
    r"|-m (torch\.distributed\.(?:run|launch))\b|-m (accelerate\.commands\.launch)\b"
)
_RAY_TITLE = re.compile(r"^ray::(?P<what>\S+)")
_RAY_SYSTEM = re.compile(
    r"^ray::(?P<own>(?:Dashboard|RuntimeEnv)Agent)$|(?:^|/)(?P<gcs>gcs_server)\b"
    r"|(?:^|/)(?P<raylet>raylet)(?: |$)"
    r"|ray/(?:dashboard|_private|autoscaler/_private)/(?P<agent>\w+)(?:\.py|/\w+\.py)|^(?P<title>ray-dashboard\S*)"
    r"|ray/core/src/ray/(?P<part>\w+/?\w*)|-m (?P<client>ray\.util\.client\.server)\b"
)
_SERVER = re.compile(
    r"\bvllm serve\b|-m vllm\.entrypoints\.\S*api_server|sglang\.launch_server"
    r"|\bsglang serve\b|\btext-generation-launcher\b|\btrl vllm-serve\b"
)
_ENGINE = re.compile(r"^VLLM::(?P<what>\S+)|\bsglang::(?P<sgl>\S+)")
_COMPILER = re.compile(
    r"^(?:\S*/)?(?:gcc|g\+\+|cc|c\+\+|cc1|cc1plus|clang\S*|nvcc|cicc|ptxas|ninja"
    r"|ld|as)(?: |$)"
)
_HELPER = re.compile(
    r"multiprocessing\.(?:resource_tracker|forkserver)|^(?:\S*/)?(?:tee|cat|tail|sleep"
    r"|timeout|env|nice|nohup|numactl|stdbuf|setsid|time|script|sudo)(?: |$)"
    r"|^(?:-|\S*/)?(?:ba|da|z|k)?sh(?: |$)"
)
_SPAWNED = re.compile(r"multiprocessing[. ](?:spawn|fork)\S*.*--multiprocessing-fork")
_SCRIPT = re.compile(r"(?:^| )(?:-m +)?([\w./-]+\.py|(?<=-m )[\w.]+)(?: |$)")


@dataclass(frozen=True)
class Facts:
    """What is known of a process; ``environ`` of another user's is empty."""

    pid: int
    ppid: int
    command: str
    environ: Mapping[str, str]


def roles(
    processes: list[Facts], driver: int | None = None, *, in_ray: bool = False
) -> dict[int, Role]:
    """The role of each process, by pid.

    ``driver`` is the command's own process; with ``in_ray`` it is one of Ray's, even if
    no process of Ray's is here. A process with its parent's command line is
    a fork of it, such as a DataLoader's worker of a rank, a task or the driver.
    """
    by_pid = {one.pid: one for one in processes}
    found = {one.pid: _alone(one) for one in processes}
    has_ray = in_ray or any(role.kind.startswith("ray-") for role in found.values())
    for one in processes:
        parent = by_pid.get(one.ppid)
        if parent is None:
            continue
        above, role = found[parent.pid], found[one.pid]
        forked = one.command == parent.command or _SPAWNED.search(one.command)
        below_own = above.kind in ("rank", "ray-actor", "ray-worker", "process")
        if forked and below_own and role.kind in ("rank", "process"):
            is_main = above.kind == "process" and not one.environ.get("RANK")
            number = _place(one, processes)
            whose = above.name if not is_main else (above.name or "the command")
            found[one.pid] = Role(
                "data-worker", f"worker process {number} of {whose}", above.rank
            )
        elif above.kind == "teacher" and role.kind in ("process", "engine"):
            name = f"{role.name or 'process'} of the teacher's server"
            found[one.pid] = Role(role.kind, name)
    if has_ray and driver is not None and found.get(driver, Role()).kind == "process":
        found[driver] = Role("ray-driver", "Ray driver")
    return _numbered(found)


def _alone(one: Facts) -> Role:
    """The role that a process's own title and environment tell."""
    command = one.command
    if found := _RAY_SYSTEM.search(command):
        name = next(filter(None, found.groups()))
        return Role("ray-system", f"Ray's {name.replace('gcs_server', 'GCS')}")
    if title := _RAY_TITLE.search(command):
        what = title["what"]
        # An actor's title has its method while that runs; a task's is its name.
        if what == "IDLE" or what[:1].islower():
            return Role("ray-worker", f"ray::{what}")
        return Role("ray-actor", f"ray::{what}", *_ranks(one))
    if found := _ENGINE.search(command):
        what = found["what"] or found["sgl"]
        kind = "engine" if "Engine" in what or "scheduler" in what else "engine-worker"
        return Role(kind, f"vLLM {what}" if found["what"] else f"SGLang {what}")
    if found := _LAUNCHER.search(command):
        return Role("launcher", next(filter(None, found.groups())))
    if _COMPILER.search(command):
        name = command.split()[0].rpartition("/")[2]
        return Role("compiler", f"compiler {name}")
    rank, local_rank, world_size = _ranks(one)
    if _HELPER.search(command):
        return Role("helper", command.split()[0].rpartition("/")[2])
    if _SERVER.search(command):
        return Role("teacher", "model server")
    if rank is not None:
        return Role("rank", f"rank {rank}", rank, local_rank, world_size)
    script = _SCRIPT.search(command)
    words = command.split()
    name = script[1] if script else (words[0] if words else "")
    return Role("process", name.rpartition("/")[2])


def _ranks(one: Facts) -> tuple[int | None, int | None, int | None]:
    """RANK, LOCAL_RANK and WORLD_SIZE, which Ray's ``env_vars`` give to actors, too."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    rank, local_rank, world_size = (_number(one.environ.get(n)) for n in names)
    return rank, local_rank, world_size


def _numbered(found: dict[int, Role]) -> dict[int, Role]:
    """Actors and engine workers of one name, told apart by their ranks or a number."""
    names: dict[str, list[int]] = {}
    for pid, role in sorted(found.items()):
        if role.kind in ("ray-actor", "engine", "engine-worker", "process"):
            names.setdefault(role.name, []).append(pid)
    for name, pids in names.items():
        for number, pid in enumerate(pids):
            old = found[pid]
            if old.rank is not None:
                found[pid] = replace(old, name=f"{name} rank {old.rank}")
            elif len(pids) > 1:
                found[pid] = replace(old, name=f"{name} #{number}")
    return found


def _place(one: Facts, processes: list[Facts]) -> int:
    """Which of its parent's alike children it is, from 0."""
    alike = sorted(
        other.pid
        for other in processes
        if other.ppid == one.ppid and other.command == one.command
    )
    return alike.index(one.pid)


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() and len(text) < 8 else None
