"""What became of a process of the job that gives no answer: killed, or stopped?"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import psutil

from pytest_gkd import process
from pytest_gkd.fault import StageFault

VMSTAT = Path("/proc/vmstat")
# vLLM 0.32, v1/engine/utils.py: exit codes by process, negative for a signal.
_CORES = re.compile(r"Failed core proc\(s\): \{(.*?)\}")
_CORE = re.compile(r"'(\w+)': (-\d+)")
# Ray 2.60, ray/exceptions.py.
_ACTOR_PID = re.compile(r"\bpid: (\d+)")
_RAYS_MONITOR = "running low on memory"


@dataclass(frozen=True)
class Stopped:
    """A process that a signal has stopped."""

    pid: int
    command: str

    def __str__(self) -> str:
        """As part of a sentence."""
        return f"process {self.command} is stopped by a signal (SIGSTOP)"


def stopped() -> list[Stopped]:
    """Every stopped process below this one."""
    found = []
    for one in process.descendants(os.getpid()):
        try:
            if one.status() == psutil.STATUS_STOPPED:
                found.append(Stopped(one.pid, process.describe(one)))
        except psutil.NoSuchProcess:
            continue
    return found


def stopped_facts(found: list[Stopped]) -> dict[str, int]:
    """What the advice for them needs."""
    return {"stopped_pid": found[0].pid} if found else {}


def oom_kills(vmstat: Path = VMSTAT) -> int:
    """Processes that the kernel has ended for memory since it booted (proc(5)).

    On the whole machine, in containers too; 0 where the kernel does not count.
    """
    try:
        lines = vmstat.read_text().splitlines()
    except OSError:
        return 0
    counts = [int(line.split()[1]) for line in lines if line.startswith("oom_kill ")]
    return counts[0] if counts else 0


def engine_fault(text: str, kills_before: int) -> StageFault | None:
    """The fault when a signal ended the engine's process before it was ready.

    ``text`` is what vLLM raised; it only names the process and its exit code.
    ``kills_before`` is ``oom_kills()`` of the time before the start. None when it
    ended by itself: it then told why, in its own output.
    """
    cores = _CORES.search(text)
    ends = _CORE.findall(cores[1]) if cores else []
    if not ends:
        return None
    name, code = ends[0]
    how = process.exit_name(int(code)).removeprefix("signal ")
    kills = oom_kills() - kills_before
    what = f"the engine's process {name} was ended by {how} while it started"
    facts = {"ended_by": how, "oom_kills": kills}
    if kills > 0 and how == "SIGKILL":
        return StageFault("env.host-oom", f"{what}{_for_memory(kills)}", facts=facts)
    return StageFault("vllm.engine-died", f"{what}{_for_memory(kills)}", facts=facts)


def actor_fault(role: str, asked: str, text: str, kills_before: int) -> StageFault:
    """The fault when the actor ``role`` died while it was ``asked`` for something.

    ``text`` is Ray's own, which only lists what might have happened.
    """
    pid = _ACTOR_PID.search(text)
    who = f"the {role} actor" + (f" (process {pid[1]})" if pid else "")
    kills = oom_kills() - kills_before
    facts = {"actor": role, "asked": asked, "oom_kills": kills}
    what = f"{who} died before it had answered {asked}"
    if _RAYS_MONITOR in text:
        return StageFault("ray.memory-monitor", f"{what}: {_RAYS_MONITOR}", facts=facts)
    cause = "teacher.unreachable" if role == "teacher" else "ray.actor-died"
    if kills > 0:
        cause = "env.host-oom"
    return StageFault(cause, f"{what}{_for_memory(kills)}", facts=facts)


def _for_memory(kills: int) -> str:
    """What the kernel's own count says of it."""
    return (
        f"; meanwhile the kernel ended {kills} process(es) for want of memory"
        if kills > 0
        else "; not by the kernel for want of memory, by its own count"
    )
