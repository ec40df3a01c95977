"""What another node of a job's Ray cluster has answered (see ``node_agent``)."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pytest_gkd import sanitize
from pytest_gkd.diagnosis import stack_dump
from pytest_gkd.files import make_way, write_private
from pytest_gkd.processes import procfs, py_spy
from pytest_gkd.processes.kernel_calls import Call
from pytest_gkd.watch import process_facts, roles, stack_tree
from pytest_gkd.watch.flight_files import Recorder
from pytest_gkd.watch.process_facts import Connection
from pytest_gkd.watch.rank_servers import Answer
from pytest_gkd.watch.samples import PID_BITS, GpuSample, NodeSample, ProcessSample

LONGEST = 1 << 26  # bytes of an answer
_SPECIAL = re.compile(r"[^\w.-]")


@dataclass(frozen=True)
class Seen:
    """What the other nodes have answered.

    ``addresses`` are the IP addresses of the nodes that were seen, and of this one;
    ``lost`` are sentences of those that have left; ``dumps`` the texts of stacks by
    pid; ``servers`` of one node, as in ``samples.NodeSample``. The others are as in
    ``samples.JobSample``.
    """

    nodes: tuple[NodeSample, ...] = ()
    processes: tuple[ProcessSample, ...] = ()
    gpus: tuple[GpuSample, ...] = ()
    gpus_at_work: str = ""
    remote: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    addresses: frozenset[str] = frozenset()
    dumps: Mapping[int, str] = field(default_factory=dict)
    servers: Mapping[str, Answer] = field(default_factory=dict)

    def elsewhere(self, remote: Collection[str]) -> tuple[str, ...]:
        """Those of the addresses that are of no machine that is seen."""
        every = dict.fromkeys([*remote, *self.remote])
        return tuple(o for o in every if o.rpartition(":")[0] not in self.addresses)

    def keep(self, directory: Path) -> None:
        """Write the stacks of each process to a file."""
        for one in self.processes:
            if text := self.dumps.get(one.pid):
                name = f"{_SPECIAL.sub('_', one.node)}-{one.local_pid}.txt"
                with contextlib.suppress(OSError):  # the local ones tell of that
                    make_way(directory / name)
                    write_private(directory / name, f"{one.command}\n{text.rstrip()}\n")


def read(answer: str, name: str, number: int, now: float) -> Seen:
    """One node's answer. Raises KeyError, TypeError and ValueError as it is read."""
    unpacker = zlib.decompressobj()
    told = json.loads(unpacker.decompress(base64.b64decode(answer), LONGEST))
    base = number << PID_BITS
    rows = [row for row in told["processes"] if 0 < row["pid"] < 1 << PID_BITS]
    facts = [
        roles.Facts(base + r["pid"], base + r["ppid"], r["command"], r["environ"])
        for r in rows
    ]
    by_pid = roles.roles(facts)
    processes, dumps = [], {}
    for row in rows:
        pid = base + int(row["pid"])
        role = by_pid[pid]
        role = replace(role, name=sanitize.line(role.name)[:80])
        one = ProcessSample(
            pid,
            int(row["start"]),
            base + int(row["ppid"]),
            role,
            procfs.shown(row["command"]),
            sanitize.line(row["state"])[:1],
            float(row["cpu_s"]),
            row["io_bytes"],
            int(row["rss_bytes"]),
            node=name,
            at=now,
        )
        if "text" in row and role.kind not in stack_tree.BESIDE:
            dumps[pid] = sanitize.text(row["text"])
            one = _closely(one, row, dumps[pid])
        processes.append(one)
    blind = [one for one in processes if one.problem]
    unseen = [sanitize.line(f"{name}: {line}") for line in told.get("unseen", ())]
    if blind and not told["may_trace"]:
        unseen.append(f"no stacks on {name}: ptrace is not allowed there")
    elif blind:
        unseen.append(f"no Python stacks of {blind[0].label}: {blind[0].problem[:100]}")
    at_work = sanitize.line(told.get("gpus_at_work", ""))
    return Seen(
        processes=tuple(processes),
        gpus=tuple(_gpu(one, name) for one in told["gpus"]),
        gpus_at_work=f"{at_work} on {name}" if at_work else "",
        remote=tuple(map(sanitize.line, told.get("remote", ()))),
        unseen=tuple(unseen),
        addresses=frozenset(map(str, told.get("addresses", ()))),
        dumps=dumps,
        servers={
            str(server): Answer(*(sanitize.text(str(said[k])) for k in Answer._fields))
            for server, said in told.get("servers", {}).items()
        },
    )


def _closely(one: ProcessSample, row: Mapping[str, Any], text: str) -> ProcessSample:
    threads = stack_dump.threads(text, one.local_pid)
    calls = [(int(number), Call(*call)) for number, *call in row["calls"]]
    clean = [
        (n, c._replace(target=sanitize.line(c.target), name=sanitize.line(c.name)))
        for n, c in calls
    ]
    facts = process_facts.Facts(**row["facts"])
    stopped = one.state == "t" and not row["tracer"]
    return replace(
        one,
        threads=threads,
        problem="" if threads else py_spy.problem(text),
        state="S" if stopped else one.state,  # by who looks at it
        tracer=int(row["tracer"]),
        calls=tuple(clean),
        pipes=tuple(map(str, row["pipes"])),
        connections=tuple(_connection(one) for one in row["connections"]),
        recorder=_recorder(row.get("recorder")),
        **facts._replace(wchan=sanitize.line(facts.wchan))._asdict(),
    )


def _connection(row: Sequence[Any]) -> Connection:
    host, port, peer_host, peer_port, state, fd = row
    words = (sanitize.line(str(one)) for one in (host, peer_host, state))
    host, peer_host, state = words
    return Connection(host, int(port), peer_host, int(peer_port), state, int(fd))


def _recorder(row: Sequence[Any] | None) -> Recorder | None:
    if row is None:
        return None
    asked, path, record = row
    return Recorder(bool(asked), sanitize.line(str(path)), str(record))


def _gpu(row: Sequence[Any], node: str) -> GpuSample:
    index, percent, used, total = map(_whole, row)
    return GpuSample(index, percent, used, total, node)


def _whole(value: Any) -> Any:
    if not isinstance(value, (int, type(None))):
        raise TypeError(f"expected a number, got {type(value).__name__}")
    return value
