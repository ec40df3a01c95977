"""What else tells why a job stands still, asked of whatever can answer.

Each source has a time of its own and may fail alone; nothing is signalled or ended.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from pytest_gkd import sanitize
from pytest_gkd.clock import monotonic
from pytest_gkd.diagnosis import flight_records
from pytest_gkd.files import make_way, write_private
from pytest_gkd.processes import oom
from pytest_gkd.watch import (
    flight_files,
    job_links,
    rank_servers,
    rank_sets,
    ray_places,
    stack_tree,
    waiting,
)
from pytest_gkd.watch.rank_servers import Answer
from pytest_gkd.watch.samples import NodeSample, ProcessSample
from pytest_gkd.watch.waits import Known, RayTask

SHOWN = 6  # lines of one source in the report
TIGHT = 0.02  # of memory or a disk
KERNELS = re.compile(
    r"Out of memory:.*|oom-kill:.*|Memory cgroup out of memory.*|NVRM: Xid.*"
    r"|.*(?:nvidia|infiniband|mlx5)\S*:? .*(?:[Ee]rror|[Ff]atal|fell off).*"
    r"|INFO: task .* blocked for more than.*|nfs: server .* not responding.*"
    r"|.*I/O error.*|EXT4-fs error.*|XFS .*(?:[Cc]orruption|shutdown).*"
)
# "#0-1 (27a079b828ff1a75) MISMATCH": a group, its communicator, and a hash of it.
_HASH = re.compile(r" \([0-9a-f]{16}\)")
# torch/distributed/debug/_frontend.py, JSON_RESP_TEMPLATE
_RECORDS = re.compile(r"<h2>Rank (\d{1,7}): ([^<]*)</h2>\s*<pre>([^<]*)</pre>")


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
        """A sentence for each find; a record may have come from two sources."""
        lines = (line for one in self.findings for line in one.said[:SHOWN])
        return tuple(dict.fromkeys(lines))

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
        self.ports = rank_servers.listening(
            one.pid for one in processes if not one.node
        )

    def answers(self, name: str) -> list[tuple[str, Answer]]:
        """What a server of ``rank_servers`` says, by node, this machine's first."""
        here = [one.pid for one in self.processes if not one.node]
        told = rank_servers.answer(name, here, self.ports)
        far = ((node.name, node.servers.get(name)) for node in self.nodes)
        return [(node, one) for node, one in (("", told), *far) if one is not None]

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
        told = _missing(job, kind, records)
        told = told or "no collective that a rank has not entered"
        said.append(f"flight recorder: {told}")
    return Finding(name, tuple(said), "\n".join(texts))


def _missing(job: Job, kind: str, records: Mapping[int, flight_records.Record]) -> str:
    """The collective that not all ranks of a kind have entered; empty for none."""
    mine = {one.role.rank for one in job.ranks() if stack_tree.kind_of(one) == kind}
    silent = sorted(r for r in mine if r is not None and r not in records)
    missing = flight_records.find_missing(records, silent)
    return missing.text() if missing else ""


def _debug_server(job: Job) -> Finding | None:
    """torch.distributed.debug's server, where the job has started one."""
    kinds = {stack_tree.kind_of(one) for one in job.ranks()}

    def said(node: str, one: Answer) -> list[str]:
        # TorchComms', and torch's own.
        theirs: dict[int, flight_records.Record] = {}
        ours: dict[int, flight_records.Record] = {}
        for rank, where, text in _RECORDS.findall(one.text):
            with contextlib.suppress(flight_records.RecordError):
                record = flight_records.read(html.unescape(text).encode())
                some = theirs if where.endswith(rank_servers.TORCHCOMMS) else ours
                some[int(rank)] = record
        where = f"{one.address} on {node}" if node else one.address
        lines = [f"torch's debug server at {where} has answered (its text is kept)"]
        is_cut = any(record.get("is_cut") for record in theirs.values())
        if is_cut:
            lines.append(
                "flight recorder of TorchComms: it no longer holds the first "
                "operations, from which they are counted; for the next attempt: export "
                "TORCHCOMM_FR_BUFFER_SIZE=100000"
            )
        if len(kinds) == 1:  # else nothing tells whose they are
            is_used = any(record["entries"] for record in theirs.values())
            records, kind = theirs if is_used and not is_cut else ours, min(kinds)
            for number, record in records.items():
                job.records.setdefault((kind, number), record)
            if told := _missing(job, kind, records):
                lines.append(f"flight recorder: {told}")
        return lines

    def plain(page: str) -> str:
        return re.sub("<[^>]*>", "", html.unescape(page))

    found = _of_servers(job, rank_servers.DEBUG, said, plain)
    if found is None and any(
        flight_files.uses_torchcomms(one.pid) for one in job.ranks() if not one.node
    ):
        advice = (
            "flight recorder of TorchComms: only torch's debug server gives it; for "
            "the next attempt call torch.distributed.debug.start_debug_server() on "
            "every rank"
        )
        return Finding(rank_servers.DEBUG, (advice,))
    return found


def _ncclras(job: Job) -> Finding | None:
    """NCCL's own view of its communicators, from 2.24 on."""
    return _of_servers(
        job,
        rank_servers.RAS,
        lambda _, one: [f"ncclras: {line}" for line in _complaints(one.text)],
    )


def _of_servers(
    job: Job,
    name: str,
    said: Callable[[str, Answer], list[str]],
    plain: Callable[[str], str] = str,
) -> Finding | None:
    answers = job.answers(name)
    if not answers:
        return None
    texts, problems = [], []
    lines: dict[str, None] = {}  # each node's RAS tells of all nodes of its job
    for node, one in answers:
        on = f" on {node}" if node else ""
        if one.problem:
            problems.append(f"{one.problem}{on}")
        else:
            lines |= dict.fromkeys(said(node, one))
            texts.append(f"{one.address}{on}\n{plain(one.text)}")
    return Finding(name, tuple(lines), "\n\n".join(texts), "; ".join(problems))


def _complaints(text: str) -> list[str]:
    """What RAS has under Errors and Warnings, a sentence for each communicator."""
    _, _, rest = text.replace("\r", "").partition("\nErrors\n======\n")
    blocks = re.split(r"\n{2,}", rest.replace("\nWarnings\n========\n", "\n\n"))
    told: list[str] = []
    for block in blocks:
        lines = [line.strip() for line in block.splitlines() if line.strip()]
        if not lines:
            continue
        # A communicator's second block, and a third, have no head of their own.
        is_head = not block.lstrip("\n").startswith(" ")
        head = _HASH.sub("", lines.pop(0)) if is_head else _head_of(told)
        told.append(f"{head}: {'; '.join(lines)}" if lines else head)
    return told


def _head_of(told: list[str]) -> str:
    return told[-1].partition(":")[0] if told else "communicator"


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
    for port, (pid, host) in job.ports.items():
        role = next((o.role for o in job.processes if o.pid == pid), None)
        if role is not None and role.kind == "teacher":
            addresses.append(rank_servers.address(host, port))
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
        with rank_servers.DIRECT.open(url, timeout=3) as answer:
            code = answer.status
    except urllib.error.HTTPError as error:
        code = error.code
    except (OSError, ValueError) as error:
        late = isinstance(error, TimeoutError) or "timed out" in str(error)
        return "does not answer within 3 s" if late else f"fails ({error})"
    except Exception as error:  # no HTTP at all
        return f"is no HTTP ({type(error).__name__})"
    return f"answers {code} after {1000 * (monotonic() - began):.0f} ms"


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


SOURCES: dict[str, Source] = {
    "flight recorder": _flight_recorder,
    "torch debug server": _debug_server,
    "ncclras": _ncclras,
    "ray": _ray,
    "endpoints": _endpoints,
    "kernel": kernel_lines,
    "machine": _machine,
}
