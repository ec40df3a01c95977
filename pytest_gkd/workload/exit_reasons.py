"""Why a process of the job does not answer: it was killed, or is stopped."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.process import BaseProcess

import psutil

from pytest_gkd.processes import oom, tree
from pytest_gkd.stage_api import StageFault

JOIN_S = 1.0
# How many samples, and how far apart, before processes are said to be waiting.
LOOKS = 4
LOOK_S = 0.1
IDLE = (psutil.STATUS_SLEEPING, psutil.STATUS_DISK_SLEEP, psutil.STATUS_STOPPED)
# Ray 2.60, ray/exceptions.py.
_ACTOR_PID = re.compile(r"\bpid: (\d+)")
_RAYS_MONITOR = "running low on memory"


@dataclass(frozen=True)
class Stopped:
    """A process stopped by a signal."""

    pid: int
    command: str

    def __str__(self) -> str:
        """As part of a sentence."""
        return f"process {self.command} is stopped by a signal (SIGSTOP)"


def stopped() -> list[Stopped]:
    """Every stopped process below this one."""
    found = []
    for one in tree.descendants(os.getpid()):
        with contextlib.suppress(psutil.NoSuchProcess):
            if one.status() == psutil.STATUS_STOPPED:
                found.append(Stopped(one.pid, tree.describe(one)))
    return found


def only_wait(family: Callable[[], Iterable[psutil.Process]]) -> bool:
    """Whether none of the processes used or wanted a CPU in ``LOOKS`` samples.

    One that is starved of CPU is "running" all the same.
    """
    seen = set()
    for look in range(LOOKS):
        time.sleep(LOOK_S if look else 0)
        for member in family():
            with contextlib.suppress(psutil.NoSuchProcess):
                if member.status() not in IDLE:
                    return False
                times = member.cpu_times()
                seen.add((member.pid, times.user + times.system))
    return len(seen) == len({pid for pid, _ in seen})


def stopped_facts(found: list[Stopped]) -> dict[str, int]:
    """What the advice for them needs."""
    return {"stopped_pid": found[0].pid} if found else {}


def oom_kills() -> int:
    """The number of processes the kernel has OOM-killed since boot.

    Machine-wide, in containers too; 0 if the kernel does not count them.
    """
    return oom.kills() or 0


@contextlib.contextmanager
def recorded() -> Iterator[list[BaseProcess]]:
    """The processes that multiprocessing starts here inside the block.

    vLLM reports failed ones by exit codes that it may have read too early.
    """
    found: list[BaseProcess] = []
    start = BaseProcess.start

    def start_and_record(self: BaseProcess) -> None:
        start(self)
        found.append(self)

    BaseProcess.start = start_and_record  # type: ignore[method-assign]
    try:
        yield found
    finally:
        BaseProcess.start = start  # type: ignore[method-assign]


def exit_codes(processes: Iterable[BaseProcess]) -> dict[str, int]:
    """The exit codes of those that failed; negative: a signal."""
    for one in processes:
        if not one.is_alive():
            one.join(JOIN_S)  # its pipes close a moment before its exit status is known
    return {one.name: one.exitcode for one in processes if one.exitcode}


def ended_fault(codes: Mapping[str, int], when: str, kills_before: int) -> StageFault:
    """The fault when processes of the engine have ended.

    ``codes`` are their exit codes, at least one; ``when`` completes the sentence, and
    ``kills_before`` is an earlier value of ``oom_kills()``.
    """
    name, code = min(codes.items(), key=lambda entry: entry[1])  # a signal first
    how = tree.exit_name(code).removeprefix("signal ")
    cause, kills = "vllm.engine-died", oom_kills() - kills_before
    if code > 0:
        text = f"the engine's process {name} ended {when}, with {how}; its own output "
        text += "says why"
        return StageFault(cause, text, {"exit_code": code})
    if how == "SIGXFSZ":
        cause = "env.file-size-limit"
    elif how == "SIGKILL" and kills > 0:
        cause = "env.host-oom"
    text = f"the engine's process {name} was ended by {how} {when}{_for_memory(kills)}"
    return StageFault(cause, text, {"ended_by": how, "oom_kills": kills})


def actor_fault(role: str, asked: str, text: str, kills_before: int) -> StageFault:
    """The fault when the actor ``role`` died while it was ``asked`` for something.

    ``text`` is Ray's own, which only lists possible reasons.
    """
    pid = _ACTOR_PID.search(text)
    who = f"the {role} actor" + (f" (process {pid[1]})" if pid else "")
    kills = oom_kills() - kills_before
    facts = {"died_actor": role, "asked": asked, "oom_kills": kills}
    what = f"{who} died before it had answered {asked}"
    if _RAYS_MONITOR in text:
        return StageFault("ray.memory-monitor", f"{what}: {_RAYS_MONITOR}", facts=facts)
    cause = "teacher.unreachable" if role == "teacher" else "ray.actor-died"
    if kills > 0:
        cause = "env.host-oom"
    return StageFault(cause, f"{what}{_for_memory(kills)}", facts=facts)


def _for_memory(kills: int) -> str:
    """What the kernel's own OOM count says about it."""
    if kills > 0:
        return f"; meanwhile the kernel ended {kills} process(es) for lack of memory"
    return "; by the kernel's count it was not for lack of memory"
