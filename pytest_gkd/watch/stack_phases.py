"""Which phase of a run the stacks of its processes tell.

Those of whom the others wait for first, then of who waits for them, then of all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from pytest_gkd.diagnosis import frames, log_phases
from pytest_gkd.diagnosis.exceptions import Raised
from pytest_gkd.diagnosis.stack_dump import Frame
from pytest_gkd.processes.stacks import in_library
from pytest_gkd.watch.samples import ProcessSample
from pytest_gkd.watch.waits import NOTHING, Known, Picture

# Servers of rollouts, by their command; any other that a step asks is a teacher's.
_ROLLOUT = re.compile(r"(?i)vllm-serve|rollout|sampler|generat|policy")
_ACTOR = re.compile(r"ray::(\w+)")
# Files that are written all the time.
_LOGS = (".log", ".out", ".err", ".txt", ".jsonl", ".csv")


def of(
    processes: Sequence[ProcessSample],
    picture: Picture,
    odd: Sequence[int],
    known: str,
    links: Known = NOTHING,
) -> str:
    """The phase of a job that waits for ``odd``; ``known`` where no stack tells it."""
    by_pid = {one.pid: one for one in processes}
    whom = [by_pid[pid] for pid in odd if pid in by_pid]
    if any(one.role.kind == "data-worker" for one in whom):
        return "data"
    clients = [by_pid[pid] for pid in picture.clients if pid in by_pid]
    if phase := _of_request(clients, whom, known):
        return phase
    waiters = [by_pid[pid] for pid in picture.waiters if pid in by_pid]
    for one in (*whom, *waiters):
        if phase := of_process(one, known) or _of_write(one, links):
            return phase
    tables = (_by_table(one) for one in processes)
    return next(filter(None, tables), known)


def of_process(one: ProcessSample, known: str) -> str:
    """The phase that a process's main thread and its role tell; empty for none."""
    told = [_placed(frame) for frame in _frames(one) if not frame.is_native]
    actor = _ACTOR.match(one.role.name)
    raised = Raised(actor[1] if actor else "", 0, frames=told)
    return frames.phase_of((raised,), known)


def _placed(frame: Frame) -> Frame:
    """With a path that tells a program's own file from one of Python's library."""
    own = "/" not in frame.file and not in_library(frame)
    return replace(frame, file=f"./{frame.file}") if own else frame


def _by_table(one: ProcessSample) -> str:
    for frame in reversed(_frames(one)):
        file = frame.file.rpartition("/")[2]
        name = frame.function.rpartition(".")[2]  # py-spy's is qualified
        if phase := log_phases.raised_in(f"{file}:{name}"):
            return phase
    return ""


def _of_request(
    clients: Iterable[ProcessSample], servers: Iterable[ProcessSample], known: str
) -> str:
    """The phase in which a server's answer is awaited; empty where none is.

    Who computes a step's probabilities and asks a server for them asks a teacher.
    """
    served = " ".join(one.command for one in servers)
    is_rollout = "teacher" not in served.lower() and _ROLLOUT.search(served)
    for client in clients:
        phase = of_process(client, known)
        if phase and phase != "training-step":
            return phase
        if phase or known not in {"", "unknown", *log_phases.STARTS}:
            return "generation" if is_rollout else "teacher"
    return ""


def _of_write(one: ProcessSample, links: Known) -> str:
    """A file that a process of the job cannot write, and that is no log."""
    call = links.calls.get((one.pid, one.pid))
    if one.state != "D" or call is None or not call.writes:
        return ""
    is_file = call.target.startswith("/") and not call.target.endswith(_LOGS)
    return "checkpoint" if is_file else ""


def _frames(one: ProcessSample) -> Sequence[Frame]:
    main = next((thread for thread in one.threads if thread.is_main), None)
    return main.frames if main else ()
