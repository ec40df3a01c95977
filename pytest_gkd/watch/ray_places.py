"""What of a job has no place in its Ray cluster, told by the job's own ``ray``."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_gkd import sanitize
from pytest_gkd.clock import monotonic
from pytest_gkd.diagnosis import frames
from pytest_gkd.diagnosis.exceptions import Raised
from pytest_gkd.diagnosis.stack_dump import Frame
from pytest_gkd.processes import procfs
from pytest_gkd.watch import own_frames, waiting
from pytest_gkd.watch.samples import PID_BITS, NodeSample, ProcessSample
from pytest_gkd.watch.waits import RayTask

ASK_S = 18.0  # a Ray command imports for seconds
MOST = 6  # demands
OWN = "gkd_watch"
TASKS_OVER = ("FINISHED", "FAILED", "NIL")
_WORKERS = ("ray-actor", "ray-worker", "engine", "engine-worker")
_IDLE = ("idle", "broadcast", "ray")


@dataclass(frozen=True)
class Cluster:
    """A cluster's GCS; ``program`` is the job's ``ray``, empty where there is none."""

    address: str
    program: str
    environ: Mapping[str, str] = field(repr=False)

    def ask(self, *what: str) -> dict[str, str]:
        """What ``ray status`` and ``ray list ...`` print, within ``ASK_S`` seconds."""
        listed = ["--format=json", "--limit=1000", f"--timeout={ASK_S / 2:.0f}"]
        started = {}
        for name in what:
            words = [name] if name == "status" else ["list", name, *listed]
            words += ["--detail"] * (name == "tasks")
            started[name] = subprocess.Popen(
                [self.program, *words],
                env={**self.environ, "RAY_ADDRESS": self.address},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
        deadline = monotonic() + ASK_S
        texts = {}
        for name, child in started.items():
            try:
                left_s = max(0.1, deadline - monotonic())
                texts[name] = child.communicate(timeout=left_s)[0]
            except subprocess.TimeoutExpired:
                child.kill()
                child.communicate()
                texts[name] = f"no answer within {ASK_S:.0f} s"
        return texts


def of_job(processes: Iterable[ProcessSample]) -> Cluster | None:
    """The cluster that the job itself has started."""
    address, program = "", ""
    environ: dict[str, str] = {}
    for one in processes:
        if one.role.kind != "ray-system":
            continue
        command = procfs.full_command(one.pid)
        if found := re.search(r"--gcs-address=(\S+)", command):
            address = address or found[1]
        place, _, _ = command.partition("/site-packages/ray/")
        beside = Path(place).parents[1] / "bin/ray" if place.startswith("/") else None
        if beside is not None and beside.exists():
            program = program or str(beside)
        # Also what a cluster's token is told by.
        environ = procfs.environ(one.pid) if "raylet" in command else environ
    if not address:
        return None
    program = program or shutil.which("ray", path=environ.get("PATH")) or ""
    return Cluster(address, program, environ)


def waits_for_no_actor(processes: Sequence[ProcessSample]) -> bool:
    """Whether a program waits in Ray, and no actor, task or engine of it is at work.

    Their main threads wait for work or for others, the rest of them for anything.
    """
    found = [one for one in processes if one.threads and one.role.kind in _WORKERS]
    callers = [one for one in processes if _kinds(one)[:1] == ["ray"]]
    return bool(callers) and all(
        kinds[0] in _IDLE and all(kinds) for one in found if (kinds := _kinds(one))
    )


def _kinds(one: ProcessSample) -> list[str]:
    """What the threads of a process wait for, the main one first; without idle ones."""
    told = [thread for thread in one.threads if own_frames.own(thread)]
    waits = map(waiting.of, sorted(told, key=lambda thread: not thread.is_main))
    return [wait.kind if wait else "" for wait in waits]


def unplaced(processes: Sequence[ProcessSample]) -> tuple[str, ...]:
    """What the job's Ray has no place for, in words; asked only where that matters."""
    cluster = of_job(processes) if waits_for_no_actor(processes) else None
    if cluster is None or not cluster.program:
        return ()
    texts = cluster.ask("status")
    if not (wanted := demands(texts["status"])):
        return ()
    named = pending(cluster.ask("actors", "placement-groups"))
    return tuple(sanitize.line(one)[:300] for one in named or wanted)


def phase_of(lacking: Iterable[str]) -> str:
    """The start of the role whose actor has no place, else that of Ray's first task."""
    for one in lacking:
        if found := re.match(r"actor (\w+)", one):
            start = Raised(found[1], 0, frames=[Frame("actor.py", 1, "__init__")])
            if phase := frames.phase_of((start,)):
                return phase
    return "ray-init"


def demands(status: str) -> list[str]:
    """What waits for resources, of ``ray status``."""
    _, _, behind = status.partition("Demands:")
    lines = [line.strip() for line in behind.splitlines()]
    return [line for line in lines if line.startswith("{")][:MOST]


def pending(texts: Mapping[str, str]) -> list[str]:
    """The actors and placement groups that wait, where the dashboard tells them."""
    found = []
    for what in ("actors", "placement-groups"):
        for row in _rows(texts.get(what, "")):
            state = str(row.get("state", ""))
            if "PENDING" in state or "RESTARTING" in state or state == "RESCHEDULING":
                told = row.get("class_name") or row.get("name") or ""
                name = what[:-1].replace("-", " ")
                found.append(f"{name} {told} is {state}")
    return list(dict.fromkeys(found))


def tasks(text: str, nodes: Sequence[NodeSample] = ()) -> list[RayTask]:
    """The tasks that are not over, of ``ray list tasks --detail``.

    Their pids are as those of processes on these other nodes.
    """
    base = {one.id: one.number << PID_BITS for one in nodes}
    return [
        RayTask(
            str(row.get("task_id", "")),
            str(row.get("parent_task_id", "")),
            str(row.get("name", "")),
            str(row.get("state", "")),
            pid + base.get(str(row.get("node_id")), 0) if pid else 0,
            str(row.get("actor_id") or ""),
        )
        for row in _rows(text)
        for pid in (int(row.get("worker_pid") or 0),)
        if row.get("type") != "ACTOR_CREATION_TASK"
        and row.get("state") not in TASKS_OVER
    ]


def _rows(text: str) -> list[dict[str, Any]]:
    with contextlib.suppress(ValueError):
        start = text.index("[\n") if "[\n" in text else text.index("[")
        rows, _ = json.JSONDecoder().raw_decode(text[start:])
        found = [row for row in rows if isinstance(row, dict)]
        # What looks at other nodes for us is not the job's.
        return [row for row in found if OWN not in _names(row)]
    return []


def _names(row: Mapping[str, Any]) -> set[str]:
    told = (str(row.get(key) or "") for key in ("name", "class_name"))
    return {one.partition(".")[0] for one in told}
