"""Looks at a job's processes on another node of its Ray cluster and tells facts.

What is imported here is sent there as source text (``ray_helper_process.SENT``), as
pytest-gkd need not be installed there; of other packages only psutil, which Ray brings.
What the facts mean is judged where ``gkd watch`` runs.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections.abc import Mapping
from concurrent import futures
from concurrent.futures import Future
from typing import Any, TypeVar

import psutil

from pytest_gkd.clock import monotonic
from pytest_gkd.processes import (
    background,
    gpus,
    host_capabilities,
    kernel_calls,
    procfs,
    py_spy,
    resource_use,
)
from pytest_gkd.processes.kernel_calls import Call
from pytest_gkd.processes.procfs import Stat
from pytest_gkd.watch import flight_files, process_facts, rank_servers
from pytest_gkd.watch.flight_files import Recorder
from pytest_gkd.watch.scope import Scope, drives, works_for

T = TypeVar("T")
# Of an environment, which may hold secrets, nothing else leaves the node.
TOLD = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
MOST_STACKS = 256
LONGEST = 1 << 18  # characters of one process's stacks, or of a server's answer
DRIVERS_EVERY_S = 30.0
SERVERS = "NCCL's RAS and torch's debug server"
_THREADS = re.compile(r"(?m)^Thread (\d+)")


class Agent:
    """Answers what the processes of a job do on this node."""

    def __init__(self) -> None:
        self._jobs: set[str] = set()
        self._scope = Scope(self._seeds)
        self._gpus = gpus.Reader()
        self._drivers: list[int] = []
        self._drivers_at = float("-inf")

    def _seeds(self, table: dict[int, Stat]) -> list[int]:
        if monotonic() >= self._drivers_at + DRIVERS_EVERY_S:
            self._drivers_at = monotonic()
            self._drivers = [pid for pid in table if drives(pid, self._jobs)]
        return [*self._drivers, *(pid for pid in table if works_for(pid, self._jobs))]

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The facts as JSON can hold them.

        ``jobs`` are Ray's ids of the job; ``look`` is ``use`` (CPU, state, memory),
        ``stacks``, or ``native`` for those of C and C++ as well, within ``limit_s``
        seconds.
        """
        deadline = monotonic() + float(request["limit_s"])
        self._jobs = set(request["jobs"])
        closely = request["look"] != "use"
        found = self._scope.find(monotonic(), closely=closely)
        rows = [row for one in found.values() if (row := _row(one))]
        told: dict[str, Any] = {"host": socket.gethostname(), "processes": rows}
        told["gpus"] = [
            (one.index, one.percent, one.total_bytes - one.free_bytes, one.total_bytes)
            for one in self._gpus.cards()
            if one.total_bytes
        ]
        if closely:
            told["addresses"] = resource_use.own_addresses()
            told["may_trace"] = host_capabilities.may_trace()
            told["remote"] = list(self._scope.remote)
            told["unseen"] = list(self._scope.unseen)
            native = request["look"] == "native"
            recorders = background.begin(
                "gkd-recorders", lambda: _recorders(rows, native)
            )
            servers = background.begin("gkd-servers", lambda: _servers(rows, native))
            _look(rows, deadline, native=native)
            # A file system that does not answer holds them, and nothing else.
            unseen: list[str] = told["unseen"]
            records = _in_time("flight records", recorders, deadline, unseen) or {}
            for row in rows:
                row["recorder"] = records.get(row["pid"])
            told["servers"] = _in_time(SERVERS, servers, deadline, unseen) or {}
            told["gpus_at_work"] = gpus.at_work([row["pid"] for row in rows])
        return told


def _in_time(
    what: str, asked: Future[T], deadline: float, unseen: list[str]
) -> T | None:
    """What was asked for; else why there is none is added to ``unseen``."""
    futures.wait([asked], max(0.0, deadline - monotonic()))
    if not asked.done() or asked.exception():
        why = asked.exception() if asked.done() else "no answer in time"
        unseen.append(f"{what}: {why}")
        return None
    return asked.result()


def _row(one: Stat) -> dict[str, Any] | None:
    used = resource_use.of_process(one.pid)
    if used is None:
        return None
    environ = procfs.environ(one.pid)
    return {
        "pid": one.pid,
        "start": one.start,
        "ppid": one.ppid,
        "command": procfs.full_command(one.pid),
        "environ": {name: environ[name] for name in TOLD if name in environ},
        **used._asdict(),
    }


def _look(rows: list[dict[str, Any]], deadline: float, *, native: bool) -> None:
    """Add to each process what is seen closely."""
    asked = []
    for row in rows:
        row["tracer"] = process_facts.tracer(row["pid"])
    for row in rows[:MOST_STACKS]:
        with contextlib.suppress(psutil.NoSuchProcess):
            asked.append(psutil.Process(row["pid"]))
    texts = py_spy.dump(asked, deadline, native=native)
    for one in asked:
        if not py_spy.has_stacks(texts[one.pid]):
            texts[one.pid] = py_spy.note(one, texts[one.pid])
    for row in rows:
        pid = row["pid"]
        text = texts.get(pid, "it was not asked for its stacks")
        row["text"] = text[:LONGEST]
        row["facts"] = process_facts.of(pid)._asdict()
        row["connections"] = process_facts.connections(pid)
        row["calls"] = [
            (thread, *call)
            for thread in {pid, *map(int, _THREADS.findall(text))}
            if (call := kernel_calls.of(pid, thread))
        ]

    calls = [call for row in rows for call in row["calls"]]
    written = kernel_calls.pipes_in_use(Call(*call) for _, *call in calls)
    pids = [row["pid"] for row in rows]
    held = {target: kernel_calls.readers(target, pids) for target in written}
    for row in rows:
        row["pipes"] = [target for target in held if row["pid"] in held[target]]


def _recorders(rows: list[dict[str, Any]], native: bool) -> Mapping[int, Recorder]:
    """What the ranks' flight recorders hold, once a standstill is proven."""
    ranks = {row["pid"]: row["environ"].get("RANK", "") for row in rows}
    known = {pid: int(rank) for pid, rank in ranks.items() if rank.isdecimal()}
    return flight_files.ask(known) if native else {}


def _servers(rows: list[dict[str, Any]], native: bool) -> dict[str, Any]:
    """What servers inside the ranks say, once a standstill is proven."""
    told = rank_servers.ask(row["pid"] for row in rows) if native else {}
    return {
        name: one._replace(text=one.text[:LONGEST])._asdict()
        for name, one in told.items()
    }


def start() -> Any:
    """What answers a request, JSON in and JSON out."""
    agent = Agent()

    def answer(text: str) -> tuple[int, str]:
        told = agent.answer(json.loads(text))
        return len(told["processes"]), json.dumps(told)

    return answer
