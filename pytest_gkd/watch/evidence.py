"""What else tells why a job stands still, asked of whatever can answer.

Each source has a time of its own and may fail alone; nothing is signalled or ended. Of
NCCL's RAS threads: NCCL's user guide, "RAS"; of the debug server:
torch/distributed/debug.
"""

from __future__ import annotations

import contextlib
import html
import json
import os
import re
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from pytest_gkd import sanitize
from pytest_gkd.clock import monotonic
from pytest_gkd.diagnosis import flight_records
from pytest_gkd.files import make_way, write_private
from pytest_gkd.processes import oom, procfs
from pytest_gkd.watch import (
    flight_files,
    job_links,
    rank_sets,
    ray_places,
    stack_tree,
    waiting,
)
from pytest_gkd.watch.samples import NodeSample, ProcessSample
from pytest_gkd.watch.waits import Known, RayTask

MOST_BYTES = 64 << 20
RAS_PORT = 28028
DEBUG_PORT = 25999
ASK_S = 5.0  # one answer of a server
SHOWN = 6  # lines of one source in the report
TIGHT = 0.02  # of memory or a disk
KERNELS = re.compile(
    r"Out of memory:.*|oom-kill:.*|Memory cgroup out of memory.*|NVRM: Xid.*"
    r"|.*(?:nvidia|infiniband|mlx5)\S*:? .*(?:[Ee]rror|[Ff]atal|fell off).*"
    r"|INFO: task .* blocked for more than.*|nfs: server .* not responding.*"
    r"|.*I/O error.*|EXT4-fs error.*|XFS .*(?:[Cc]orruption|shutdown).*"
)
_RAS_SAYS = re.compile(
    r"(?i)error|warning|incomplete|mismatch|unresponsive|lagging|dead"
)
# torch/distributed/debug/_frontend.py, JSON_RESP_TEMPLATE
_RECORDS = re.compile(r"<h2>Rank (\d{1,7}): [^<]*</h2>\s*<pre>([^<]*)</pre>")
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Finding:
    """What one source says.

    ``said`` are sentences for the report, ``text`` is all of its answer, for a file;
    ``problem`` is why there is none.
    """

    name: str
    said: tuple[str, ...] = ()
    text: str = ""
    problem: str = ""


@dataclass
class Evidence:
    """What all sources say, and what ``waits`` can use of it."""

    findings: list[Finding] = field(default_factory=list)
    known: Known = field(default_factory=Known)

    @property
    def said(self) -> tuple[str, ...]:
        """A sentence for each find."""
        return tuple(line for one in self.findings for line in one.said[:SHOWN])

    @property
    def problems(self) -> tuple[str, ...]:
        """Why some could not be asked."""
        return tuple(f"{o.name}: {o.problem}" for o in self.findings if o.problem)


class Job:
    """The processes that are asked about, and what each source finds for ``waits``."""

    def __init__(
        self, processes: Sequence[ProcessSample], nodes: Sequence[NodeSample] = ()
    ) -> None:
        self.processes, self.nodes = processes, nodes
        self.links = job_links.known(processes)
        self.records: dict[tuple[str, int], flight_records.Record] = {}
        self.tasks: list[RayTask] = []
        self.wants: bool | None = None  # see ``Known.ray_wants``
        self.ports = _listening(processes)

    def ranks(self) -> list[ProcessSample]:
        return [
            one
            for one in self.processes
            if one.role.rank is not None and one.role.kind != "data-worker"
        ]


Source = Callable[[Job], Finding | None]


def collect(
    processes: Sequence[ProcessSample],
    directory: Path | None,
    limit_s: float,
    nodes: Sequence[NodeSample] = (),
) -> Evidence:
    """Ask all sources at once, for at most so many seconds.

    ``nodes`` are the other nodes that processes are on.

    Their answers go to files below ``directory``, where there is one. Raises nothing:
    what fails is a finding with a ``problem``.
    """
    job = Job(processes, nodes)
    found: dict[str, Finding | None] = {}

    def ask(name: str, source: Source) -> None:
        try:
            found[name] = source(job)
        except Exception as error:
            found[name] = Finding(name, problem=f"{type(error).__name__}: {error}")

    threads = []
    for name, source in SOURCES.items():
        # Daemons: one that a dead file system holds keeps nobody.
        thread = threading.Thread(target=ask, args=(name, source), daemon=True)
        thread.start()
        threads.append((name, thread))
    deadline = monotonic() + limit_s
    for name, thread in threads:
        thread.join(max(0.0, deadline - monotonic()))
        if thread.is_alive():
            found[name] = Finding(name, problem=f"no answer within {limit_s:.0f} s")
    findings = [_clean(one) for name in SOURCES if (one := found.get(name))]
    known = replace(
        job.links,
        records=dict(job.records),
        tasks=tuple(job.tasks),
        ray_wants=job.wants,
    )
    if directory is not None:
        findings = [keep(one, directory) for one in findings]
    return Evidence(findings, known)


def _clean(one: Finding) -> Finding:
    said = tuple(sanitize.line(line)[:500] for line in one.said)
    return Finding(one.name, said, sanitize.text(one.text), sanitize.line(one.problem))


def keep(one: Finding, directory: Path) -> Finding:
    if not one.text:
        return one
    path = directory / f"{one.name.replace(' ', '-')}.txt"
    try:
        make_way(path)
        write_private(path, one.text.rstrip() + "\n")
    except OSError as error:
        return replace(one, problem=f"{path}: {error.strerror}")
    return one


# -- collectives -------------------------------------------------------------------


def _flight_recorder(job: Job) -> Finding | None:
    """Ask each rank for its record by its pipe, and read those that are there."""
    ranks = {one.pid: one.role.rank for one in job.ranks() if one.role.rank is not None}
    asked = flight_files.ask({o.pid: ranks[o.pid] for o in job.ranks() if not o.node})
    asked |= {one.pid: one.recorder for one in job.ranks() if one.recorder}
    if not asked:
        return None
    name = "flight recorder"
    texts = []
    # The ranks of each kind by themselves: trainers and rollouts have a rank 0 each.
    groups: dict[str, dict[int, flight_records.Record]] = {}
    for one in (o for o in job.ranks() if o.pid in asked):
        recorder, rank, kind = asked[one.pid], ranks[one.pid], stack_tree.kind_of(one)
        if recorder.record:
            record = flight_records.read(recorder.record.encode())
            job.records[kind, rank] = groups.setdefault(kind, {})[rank] = record
            where = f"{one.node}:{recorder.path}" if one.node else recorder.path
            last = json.dumps(record["entries"][-1:])
            texts.append(f"rank {rank}: {where}\n{last}")
    if not groups:
        armed = (
            "armed, but no record came"
            if any(one.asked for one in asked.values())
            else "not armed; for the next attempt: export "
            f"{flight_files.PIPE}=/tmp/gkd-fr-  {flight_files.SIZES[1]}=2000 "
            "(see gkd env --debug)"
        )
        return Finding(name, (f"flight recorder of NCCL: {armed}",))
    said = []
    for kind, records in groups.items():
        mine = {ranks[o.pid] for o in job.ranks() if stack_tree.kind_of(o) == kind}
        missing = flight_records.find_missing(records, sorted(mine - records.keys()))
        told = (
            missing.text() if missing else "no collective that a rank has not entered"
        )
        said.append(f"flight recorder: {told}")
    return Finding(name, tuple(said), "\n".join(texts))


def _debug_server(job: Job) -> Finding | None:
    """torch.distributed.debug's server, where the job has started one."""
    port = next((p for p in job.ports if p == DEBUG_PORT), None)
    if port is None:
        return None
    name = "torch debug server"
    pages = {
        page: _get(f"http://127.0.0.1:{port}/{page}")
        for page in ("stacks", "fr_trace_json")
    }
    kinds = {stack_tree.kind_of(one) for one in job.ranks()}
    for rank, text in _RECORDS.findall(pages["fr_trace_json"]):
        with contextlib.suppress(flight_records.RecordError):
            record = flight_records.read(html.unescape(text).encode())
            if len(kinds) == 1:  # else nothing tells whose it is
                job.records.setdefault((min(kinds), int(rank)), record)
    plain = [
        f"{p}\n{re.sub('<[^>]*>', '', html.unescape(t))}" for p, t in pages.items()
    ]
    said = f"torch's debug server on port {port} has answered (its text is kept)"
    return Finding(name, (said,), "\n\n".join(plain))


def _ncclras(job: Job) -> Finding | None:
    """NCCL's own view of its communicators, from 2.24 on."""
    found = [p for p in job.ports if p == RAS_PORT]
    for one in job.ranks():
        told = procfs.environ(one.pid).get("NCCL_RAS_ADDR", "").rpartition(":")[2]
        if told.isdecimal() and int(told) in job.ports:
            found.append(int(told))
    if not found:
        return None
    with socket.create_connection(("127.0.0.1", found[0]), timeout=ASK_S) as talk:
        talk.sendall(b"verbose status\n")
        talk.settimeout(ASK_S)
        answer = b""
        with contextlib.suppress(TimeoutError):
            while len(answer) < MOST_BYTES and (part := talk.recv(1 << 16)):
                answer += part
    text = answer.decode("utf-8", "replace")
    bad = re.compile(
        r"ERROR|WARNING|INCOMPLETE|MISMATCH|unresponsive|lagging|dead", re.I
    )
    lines = [line for line in text.splitlines() if bad.search(line)]
    return Finding("ncclras", tuple(f"ncclras: {line.strip()}" for line in lines), text)


# -- Ray ---------------------------------------------------------------------------


def _ray(job: Job) -> Finding | None:
    """``ray status`` and the state API, by the job's own ``ray``."""
    cluster = ray_places.of_job(job.processes)
    if cluster is None:
        return None
    if not cluster.program:
        problem = f"no ray executable for the cluster at {cluster.address}"
        return Finding("ray", problem=problem)
    texts = cluster.ask("status", "tasks", "actors", "placement-groups")
    said = [f"Ray cannot place: {line}" for line in ray_places.demands(texts["status"])]
    job.tasks += ray_places.tasks(texts["tasks"], job.nodes)
    if len(re.findall(r"(?m)^ \d+ node_", texts["status"])) == 1:
        job.wants = bool(said)
    said += [f"Ray: {one}" for one in ray_places.pending(texts)]
    text = "\n\n".join(f"$ ray {what}\n{told}" for what, told in texts.items())
    return Finding("ray", tuple(dict.fromkeys(said)), text)


# -- servers -----------------------------------------------------------------------


def _endpoints(job: Job) -> Finding | None:
    """Whether the servers that the job waits for answer: connect, health, models."""
    addresses = [
        peer.address
        for one in job.processes
        if any((w := waiting.of(t)) and w.kind == "http" for t in one.threads)
        for peer in job.links.peers.get(one.pid, ())
        if peer.is_far or not one.node  # what is near to another node is not to this
    ]
    for port, pid in job.ports.items():
        role = next((o.role for o in job.processes if o.pid == pid), None)
        if role is not None and role.kind == "teacher":
            addresses.append(f"127.0.0.1:{port}")
    said, texts = [], []
    for address in list(dict.fromkeys(addresses))[:4]:
        answers = probe(address)
        said.append(f"server {address}: {answers}")
        texts.append(f"{address}\n{answers}")
    return Finding("endpoints", tuple(said), "\n\n".join(texts)) if said else None


def probe(address: str) -> str:
    host, _, port = address.rpartition(":")
    began = monotonic()
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=3).close()
    except OSError as error:
        return f"does not accept a connection ({error.strerror or error})"
    found = [f"accepts a connection after {1000 * (monotonic() - began):.0f} ms"]
    where = f"[{host}]" if ":" in host else host
    pages = ("health", "v1/models")
    found += [f"/{one} {_answers(f'http://{where}:{port}/{one}')}" for one in pages]
    return ", ".join(found)


def _answers(url: str) -> str:
    began = monotonic()
    try:
        with DIRECT.open(url, timeout=3) as answer:
            code = answer.status
    except urllib.error.HTTPError as error:
        code = error.code
    except (OSError, ValueError) as error:
        late = isinstance(error, TimeoutError) or "timed out" in str(error)
        return "does not answer within 3 s" if late else f"fails ({error})"
    except Exception as error:  # no HTTP at all
        return f"is no HTTP ({type(error).__name__})"
    return f"answers {code} after {1000 * (monotonic() - began):.0f} ms"


def _get(url: str) -> str:
    with DIRECT.open(url, timeout=ASK_S) as answer:
        return str(answer.read(MOST_BYTES).decode("utf-8", "replace"))


# -- the machine -------------------------------------------------------------------


def kernel_lines(job: Job) -> Finding | None:
    """What the kernel has said since the job began, where that may be read."""
    ticks = os.sysconf("SC_CLK_TCK")
    starts = [one.start for one in job.processes if not one.node]
    began = min(starts, default=0) / ticks
    lines = oom.kernels_lines(KERNELS, began)
    if not lines:
        return None
    said = tuple(f"kernel: {line}" for line in lines[-SHOWN:])
    return Finding("kernel", said, "\n".join(lines))


def _machine(job: Job) -> Finding | None:
    """Memory, disks and processes that the kernel holds."""
    said = []
    memory = psutil.virtual_memory()
    if memory.available < TIGHT * memory.total:
        gib = memory.available / 2**30
        said.append(f"memory: {gib:.1f} GiB of {memory.total / 2**30:.0f} GiB are left")
    places = {"/dev/shm", "/tmp"}  # noqa: S108 - where the system keeps them
    for one in job.processes:
        with contextlib.suppress(OSError):
            places.add(str(Path(f"/proc/{one.pid}/cwd").readlink()))
    for place in sorted(places):
        with contextlib.suppress(OSError):
            about = os.statvfs(place)
            if about.f_blocks and about.f_bavail < TIGHT * about.f_blocks:
                left = about.f_bavail * about.f_frsize / 2**30
                said.append(f"disk: {left:.2f} GiB are left below {place}")
            if about.f_files and about.f_favail < TIGHT * about.f_files:
                said.append(
                    f"disk: {about.f_favail} files may still be made in {place}"
                )
    held = [one for one in job.processes if one.state == "D"]
    if held:
        where = ", ".join(dict.fromkeys(one.wchan for one in held if one.wchan))
        said.append(
            f"{rank_sets.name(held)}: in state D, which no signal ends"
            + (f", in the kernel's {where}" if where else "")
        )
    return Finding("machine", tuple(said)) if said else None


def _listening(processes: Sequence[ProcessSample]) -> dict[int, int]:
    """The ports that the job's processes listen on, each with a pid."""
    found: dict[int, int] = {}
    for one in processes:
        with contextlib.suppress(psutil.Error, OSError):
            for each in psutil.Process(one.pid).net_connections("tcp"):
                if each.status == psutil.CONN_LISTEN:
                    found.setdefault(each.laddr.port, one.pid)
    return found


SOURCES: dict[str, Source] = {
    "flight recorder": _flight_recorder,
    "torch debug server": _debug_server,
    "ncclras": _ncclras,
    "ray": _ray,
    "endpoints": _endpoints,
    "kernel": kernel_lines,
    "machine": _machine,
}
