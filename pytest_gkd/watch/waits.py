"""Who waits for whom, in words; a cycle is a deadlock.

From the stacks, and from what else is known: flight records, Ray's tasks, connections
and the kernel calls that threads are in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pytest_gkd import rank_words
from pytest_gkd.diagnosis import flight_records
from pytest_gkd.diagnosis.stack_dump import Thread
from pytest_gkd.language import marked
from pytest_gkd.processes.kernel_calls import Call
from pytest_gkd.watch import own_frames, rank_sets, stack_tree, waiting
from pytest_gkd.watch.samples import ProcessSample
from pytest_gkd.watch.waiting import Wait

MUTUAL = ("collective", "store", "gpu")  # which other ranks have to come to as well
# Operations that are named as what is waited for, not as a call.
_THINGS = ("a ", "an ", "its ", "the ")
# Kernel calls that say little by their names.
_KERNEL_WORDS = {"futex": marked("futex(): for a lock, an event or a thread")}
STOPPED = {
    "T": marked("is stopped (SIGSTOP or Ctrl-Z)"),
    "t": marked("is held by a debugger"),
}


@dataclass(frozen=True)
class RayTask:
    """A task or method call of Ray's: ``name`` is ``Actor.method``.

    ``pid`` runs it, 0 before anybody does; ``parent`` is the id of the task that
    called it, ``actor`` of the actor that it is a method of.
    """

    id: str
    parent: str
    name: str
    state: str
    pid: int = 0
    actor: str = ""


@dataclass(frozen=True)
class Peer:
    """The other end of a connection, ``host:port``, and its process if it is here.

    ``is_far`` says that it is another machine's, ``fd`` is the descriptor of this end.
    """

    address: str
    pid: int | None = None
    is_far: bool = False
    fd: int = -1


@dataclass(frozen=True)
class Known:
    """What else is known, each of it empty where it is not.

    ``records`` are flight records by kind of process and rank, ``calls`` the kernel
    call of each thread by pid and thread number, ``readers`` who reads a pipe of a
    node, ``peers`` the ends of the connections that a process has made. ``ray_wants``
    says whether Ray, of one node, lacks resources for something; ``ended`` are
    processes of the job that are there no more.
    """

    records: Mapping[tuple[str, int], flight_records.Record] = field(
        default_factory=dict
    )
    tasks: Sequence[RayTask] = ()
    peers: Mapping[int, Sequence[Peer]] = field(default_factory=dict)
    calls: Mapping[tuple[int, int], Call] = field(default_factory=dict)
    readers: Mapping[tuple[str, str], Sequence[int]] = field(default_factory=dict)
    ray_wants: bool | None = None
    ended: Sequence[ProcessSample] = ()


NOTHING = Known()


@dataclass(frozen=True)
class Picture:
    """Sentences, the most telling first, and the processes that others wait for.

    ``odd`` are the pids at the end of the waiting, ``absent`` names the ranks or the
    server that are waited for and are no process here; ``deadlock`` says that some wait
    in a circle. ``waiters`` are the pids that wait for the odd ones, the nearest first;
    ``clients`` those of them that wait for a server's answer over HTTP.
    """

    lines: tuple[str, ...] = ()
    odd: tuple[int, ...] = ()
    deadlock: bool = False
    absent: str = ""
    waiters: tuple[int, ...] = ()
    clients: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Edge:
    """Some wait in an operation for others, or for what ``beyond`` says."""

    who: tuple[ProcessSample, ...]
    operation: str
    whom: tuple[ProcessSample, ...] = ()
    beyond: str = ""
    mutual: bool = False
    absent: str = ""
    is_request: bool = False


def picture(processes: Sequence[ProcessSample], known: Known = NOTHING) -> Picture:
    """Who waits for whom among the processes of a job."""
    return _Job(processes, known).picture()


def places(
    processes: Sequence[ProcessSample], known: Known = NOTHING
) -> tuple[str, ...]:
    """What each process does, a sentence each; of those nobody is seen to wait for."""
    job = _Job(processes, known)
    return tuple(f"{one.label} {job.doing(one)}" for one in processes)


class _Job:
    def __init__(self, processes: Sequence[ProcessSample], known: Known) -> None:
        self.known = known
        self.processes = [one for one in processes if one.state not in "ZX"]
        self.by_pid = {one.pid: one for one in self.processes}
        self.waits = {one.pid: self._wait(one) for one in self.processes}

    def picture(self) -> Picture:
        edges = [
            *self._ranks(),
            *self._ray(),
            *self._engines(),
            *self._data(),
            *self._connections(),
            *self._pipes(),
        ]
        lines = [self._sentence(edge) for edge in edges]
        circles = [*self._circles(edges)]
        locks = [*self._locks()]
        waited = [one.pid for edge in edges for one in edge.whom]
        absent = next((edge.absent for edge in edges if edge.absent), "")
        waiters = {one.pid for e in edges if e.whom or e.absent for one in e.who}
        ends = [pid for pid in waited if pid not in waiters]
        ends = ends or ([] if absent else waited)
        return Picture(
            tuple(dict.fromkeys([*circles, *locks, *lines])),
            tuple(dict.fromkeys(ends)),
            bool(circles or locks) or any(edge.mutual for edge in edges),
            absent,
            tuple(_behind(edges, ends)),
            tuple(_clients(edges, ends)),
        )

    # -- one process -------------------------------------------------------------------

    def _wait(self, process: ProcessSample) -> Wait | None:
        """What its main thread waits for; a collective of any thread counts first."""
        found = [waiting.of(thread) for thread in process.threads]
        own = found[0] if process.threads and process.threads[0].is_main else None
        if own is not None and own.kind in MUTUAL:
            return own
        others = (one for one in found if one and one.kind == "collective")
        return next(others, own)

    def doing(self, process: ProcessSample) -> str:
        """What a process does, as the end of a sentence: ``is in save (a.py:3)``."""
        if process.state in STOPPED:
            return STOPPED[process.state]
        if not process.threads:
            return f"shows no stack{self._kernel_place(process)}"
        main = process.threads[0]
        wait = self.waits[process.pid]
        if wait and wait.kind == "loop":
            for other in process.threads[1:]:
                if own_frames.own(other) and (
                    place := own_frames.last_own(other.frames)
                ):
                    return f"has a thread in {place}"
        call = self._call(process, main)
        if wait and wait.kind == "idle":
            return f"waits for {wait.operation}: it is idle"
        if wait and wait.kind != "sleep":
            is_call = wait.kind in MUTUAL and not wait.operation.startswith(_THINGS)
            if is_call:
                return f"waits in {_placed(wait)}"
            return f"waits for {_placed(wait)}"
        frame = own_frames.last_own(own_frames.own(main))
        where = f"is in {frame}" if frame else "has no frames of Python"
        return where + (f", {call}" if call else "")

    def _kernel_place(self, process: ProcessSample) -> str:
        """Where the kernel has a process without stacks, which tells something."""
        call = self.known.calls.get((process.pid, process.pid))
        if process.state == "R":
            return ", and runs"
        if call:
            return f", and waits in {_KERNEL_WORDS.get(call.name) or call}"
        if process.wchan.strip("0"):
            return f", and waits in the kernel's {process.wchan}"
        return f" ({process.problem})" if process.problem else ""

    def _call(self, process: ProcessSample, thread: Thread) -> str:
        found = self.known.calls.get((process.pid, thread.number or process.pid))
        if found and found.name != "futex":
            return str(found)
        name = waiting.native_call(thread)
        return f"{name}()" if name else ""

    # -- ranks -------------------------------------------------------------------------

    def _ranks(self) -> Iterable[_Edge]:
        """The ranks of each kind: who is in a collective, who is elsewhere."""
        kinds: dict[str, list[ProcessSample]] = {}
        for one in self.processes:
            if one.role.rank is not None and one.role.kind != "data-worker":
                kinds.setdefault(stack_tree.kind_of(one), []).append(one)
        for kind, ranks in kinds.items():
            if kind.startswith("ray::") and not rank_sets.ranked(ranks):
                continue  # several groups of one class: who waits for whom is unknown
            yield from self._peers(kind, sorted(ranks, key=lambda r: r.role.rank or 0))

    def _peers(self, kind: str, ranks: Sequence[ProcessSample]) -> Iterable[_Edge]:
        inside: dict[str, list[ProcessSample]] = {}
        for one in ranks:
            wait = self.waits[one.pid]
            if wait and wait.kind in MUTUAL and one.state not in STOPPED:
                inside.setdefault(wait.operation, []).append(one)
        inside = dict(sorted(inside.items(), key=lambda item: -len(item[1])))
        waiters = [one for some in inside.values() for one in some]
        if not waiters:
            return
        elsewhere = [one for one in ranks if one not in waiters]
        size = max([len(ranks), *(one.role.world_size or 0 for one in ranks)])
        if size == 1:
            return  # which waits for no other
        absent = sorted({*range(size)} - {one.role.rank for one in ranks})
        missing = self._missing(ranks)
        numbered = f" #{missing.sequence}" if missing else ""
        if elsewhere:
            operations = " and ".join(inside)
            if missing and all(self._is(one, "gpu") for one in waiters):
                operations = missing.operation  # which the stacks cannot show
            number = numbered if len(inside) == 1 else ""
            yield _Edge(tuple(waiters), f"{operations}{number}", tuple(elsewhere))
        elif absent and len(ranks) < size:
            where = f"{rank_words.name(absent)} of {size}"
            beyond = f"{where}, which no process of this machine is"
            operation = f"{next(iter(inside))}{numbered}"
            absence = f"{where} (not on this machine)"
            yield _Edge(tuple(waiters), operation, (), beyond, absent=absence)
        if missing and missing.behind and not elsewhere:
            late = [r for r in ranks if str(r.role.rank) in missing.behind]
            came = [r for r in ranks if r.role.rank in missing.entered_by]
            if late and came:
                operation = f"{missing.operation} #{missing.sequence}"
                yield _Edge(tuple(came), operation, tuple(late))
        elif len(inside) > 1 and not elsewhere:
            (first, some), *others = inside.items()
            for operation, rest in others:
                yield _Edge(tuple(some), first, tuple(rest), mutual=True)
                yield _Edge(tuple(rest), operation, tuple(some), mutual=True)
        elif not elsewhere and not absent:
            yield self._together(waiters, numbered)

    def _together(self, ranks: Sequence[ProcessSample], numbered: str) -> _Edge:
        """All are in one operation: called from one place, or from several."""
        places: dict[str, list[ProcessSample]] = {}
        for one in ranks:
            wait = self.waits[one.pid]
            places.setdefault(str(wait and wait.at), []).append(one)
        wait = self.waits[ranks[0].pid]
        operation = f"{wait.operation if wait else ''}{numbered}"
        if len(places) > 1:
            told = "; ".join(
                f"{rank_sets.name(some)} from {place}" for place, some in places.items()
            )
            beyond = f"each other, called from different places ({told})"
        elif wait and wait.kind == "gpu":
            beyond = (
                "the GPU: whether a collective of NCCL's runs there, and which rank it "
                "lacks, only flight records or ncclras tell"
            )
        else:
            beyond = "each other, from the same place: nobody is missing here"
        return _Edge(tuple(ranks), operation, (), beyond)

    def _missing(self, ranks: Sequence[ProcessSample]) -> flight_records.Missing | None:
        here = {one.role.rank for one in ranks}
        kind = stack_tree.kind_of(ranks[0])
        records = {r: o for (k, r), o in self.known.records.items() if k == kind}
        records = {rank: one for rank, one in records.items() if rank in here}
        if not records:
            return None
        silent = sorted(r for r in here if r is not None and r not in records)
        return flight_records.find_missing(records, silent)

    # -- Ray, engines, data loaders ----------------------------------------------------

    def _ray(self) -> Iterable[_Edge]:
        callers = self._in("ray")
        if self.known.tasks:
            yield from self._ray_tasks(callers)
            return
        busy = [
            one
            for one in self.processes
            if one.role.kind in ("ray-actor", "ray-worker")
            and "IDLE" not in one.role.name
            and one not in callers
            and not self._is(one, "idle")
        ]
        middle = [one for one in callers if one.role.kind == "ray-actor"]
        for caller in callers:
            below = busy if caller in middle else [o for o in middle if o != caller]
            others = tuple(one for one in middle if one != caller)
            whom, beyond = tuple(below or busy), ""
            if not whom and others and self.known.ray_wants is False:
                whom = others  # whose turns come when these calls have ended
            elif not whom:
                beyond = "a task that no process is at work on"
                beyond += ": it may lack resources, or wait behind a call that waits"
            yield _Edge((caller,), self._operation(caller), whom, beyond)

    def _ray_tasks(self, callers: Sequence[ProcessSample]) -> Iterable[_Edge]:
        """By who called which task, which is in Ray's own list."""
        tasks = {task.id: task for task in self.known.tasks}
        serving = {t.actor: t.pid for t in self.known.tasks if t.pid and t.actor}
        for caller in callers:
            own = {t.id for t in tasks.values() if t.pid == caller.pid}
            is_driver = caller.role.kind not in ("ray-actor", "ray-worker")
            called = [
                t
                for t in tasks.values()
                if (t.parent in own or (is_driver and t.parent not in tasks))
                and t.state not in ("FINISHED", "FAILED", "NIL")
            ]
            for task in called:
                pid = task.pid or serving.get(task.actor, 0)
                process = self.by_pid.get(pid)
                operation = f"{self._operation(caller)} of the task {task.name}"
                if process is None or process == caller:
                    beyond = _unplaced(task, caller if process else None)
                    yield _Edge((caller,), operation, (), beyond, process == caller)
                else:
                    yield _Edge((caller,), operation, (process,))

    def _engines(self) -> Iterable[_Edge]:
        """vLLM's client waits for its engine, the engine for its workers."""
        for kind, below in (
            ("engine", "engine"),
            ("broadcast", "engine-worker"),
            ("workers", "engine-worker"),
        ):
            for one in self._in(kind):
                if kind == "broadcast" and one.role.kind == "engine-worker":
                    continue  # that is how it waits for work
                whom = [o for o in self.processes if o.role.kind == below]
                own = [o for o in whom if self._is_below(o, one)] or whom
                gone = [o for o in self.known.ended if o.role.kind == below]
                if own:
                    yield _Edge((one,), self._operation(one), tuple(own))
                elif gone:
                    beyond = f"{rank_sets.name(gone)}, which has ended"
                    operation = self._operation(one)
                    yield _Edge((one,), operation, (), beyond, absent=beyond)

    def _data(self) -> Iterable[_Edge]:
        for one in self._in("data"):
            workers = [
                o
                for o in self.processes
                if o.ppid == one.pid and o.role.kind in ("data-worker", "process")
            ]
            busy = tuple(o for o in workers if not self._is(o, "idle"))
            beyond = ""
            if not busy:
                number = len(workers)
                beyond = f"a worker, of which {number or 'none'} are there, all idle"
                if not number:
                    beyond = "a worker that is not there any more"
            yield _Edge((one,), self._operation(one), busy, beyond)

    def _connections(self) -> Iterable[_Edge]:
        for kind in ("http", "socket"):
            for one in self._in(kind):
                peers = awaited_peers(one, self.known)
                here = [
                    self.by_pid[p.pid]
                    for p in peers
                    if p.pid in self.by_pid and self._may_be_awaited(p.pid)
                ]
                addresses = [p.address for p in peers if p.pid not in self.by_pid]
                far = ", ".join(dict.fromkeys(addresses))
                beyond = ""
                if not here and far:
                    beyond = f"{far}, which is none of the job's processes here"
                if here or beyond:
                    yield _Edge(
                        (one,),
                        self._operation(one),
                        tuple(here),
                        beyond,
                        absent=f"{far} (not of the job)" if beyond else "",
                        is_request=kind == "http",
                    )

    def _may_be_awaited(self, pid: int) -> bool:
        """Not Ray's own processes, to which every other of Ray's is connected."""
        return self.by_pid[pid].role.kind != "ray-system"

    def _pipes(self) -> Iterable[_Edge]:
        """Who writes to a full pipe waits for its reader."""
        for (pid, _), call in self.known.calls.items():
            one = self.by_pid.get(pid)
            if one is None or not call.name.startswith("write"):
                continue
            if not call.target.startswith(("pipe:", "socket:")):
                continue
            others = [
                p
                for p in self.known.readers.get((one.node, call.target), ())
                if p != pid
            ]
            here = tuple(
                self.by_pid[p]
                for p in others
                if p in self.by_pid and self._may_be_awaited(p)
            )
            fd = {1: " (its standard output)", 2: " (its standard error)"}
            beyond = "" if here else "whoever has the other end, and does not read"
            yield _Edge(
                (one,), f"write() to a full pipe{fd.get(call.fd, '')}", here, beyond
            )

    # -- circles -----------------------------------------------------------------------

    def _circles(self, edges: Sequence[_Edge]) -> Iterable[str]:
        """Chains of waiting that come back to where they began."""
        for edge in edges:
            if edge.mutual and edge.beyond:
                yield f"deadlock: {self._sentence(edge)}"
        follows: dict[int, set[int]] = {}
        for edge in edges:
            for one in edge.who:
                follows.setdefault(one.pid, set()).update(o.pid for o in edge.whom)
        for edge in edges:
            for one in edge.who:
                follows[one.pid] = follows.get(one.pid, set()) | {
                    o.pid for o in edge.whom
                }
        for circle in _strongly_connected(follows):
            names = " -> ".join(self.by_pid[pid].label for pid in [*circle, circle[0]])
            if len(circle) > 8:
                names = rank_sets.name([self.by_pid[pid] for pid in circle])
            yield f"deadlock: they wait for each other: {names}"

    def _locks(self) -> Iterable[str]:
        """Threads of one process that all wait for locks, or for who waits for one.

        Ray begins a thread for a call that comes, so one of its own proves nothing.
        """
        for process in self.processes:
            busy = [t for t in process.threads if own_frames.own(t)]
            waits = {id(t): waiting.of(t) for t in busy}
            locks = [t for t in busy if (w := waits[id(t)]) and w.kind == "lock"]
            others = [t for t in busy if t not in locks]
            wait_on = ("thread", "event", "queue")
            if locks and len(process.threads) == 1 and "ray" not in process.role.kind:
                place = own_frames.last_own(locks[0].frames)
                yield (
                    f"{process.label} waits for a lock in {place}, and has no other "
                    "thread that could free it"
                )
            if len(locks) < 2 or not all(
                (w := waits[id(t)]) and w.kind in wait_on for t in others
            ):
                continue
            places = "; ".join(
                f"{t.name or 'a thread'} in {own_frames.last_own(t.frames)}"
                for t in locks
            )
            yield (
                f"deadlock: {len(locks)} threads of {process.label} wait for locks, "
                f"and no thread of it is at work that could free one: {places}"
            )

    # -- words -------------------------------------------------------------------------

    def _sentence(self, edge: _Edge) -> str:
        """``ranks 0-6 wait in all_reduce for rank 7, which is in save (a.py:3)``."""
        by_doing: dict[str, list[ProcessSample]] = {}
        for one in edge.whom:
            by_doing.setdefault(self.doing(one), []).append(one)
        parts = [
            f"{rank_sets.name(some)}, which {_plural(doing, some)}"
            for doing, some in sorted(by_doing.items(), key=lambda item: len(item[1]))
        ]
        who, what = rank_sets.name(edge.who), edge.operation
        whom = edge.beyond or "; ".join(parts)
        if what.startswith(_THINGS):
            if len(edge.who) > 1:
                return f"{who} wait for {what}: {whom}"
            return f"{who} waits for {what}: {whom}"
        if len(edge.who) > 1:
            return f"{who} wait in {what} for {whom}"
        return f"{who} waits in {what} for {whom}"

    def _operation(self, one: ProcessSample) -> str:
        wait = self.waits[one.pid]
        return _placed(wait) if wait else ""

    def _in(self, kind: str) -> list[ProcessSample]:
        return [one for one in self.processes if self._is(one, kind)]

    def _is(self, one: ProcessSample, kind: str) -> bool:
        wait = self.waits[one.pid]
        return wait is not None and wait.kind == kind

    def _is_below(self, one: ProcessSample, other: ProcessSample) -> bool:
        seen = set()
        pid = one.ppid
        while pid in self.by_pid and pid not in seen:
            if pid == other.pid:
                return True
            seen.add(pid)
            pid = self.by_pid[pid].ppid
        return pid == other.pid


def awaited_peers(one: ProcessSample, known: Known) -> Sequence[Peer]:
    """The ends of the connections by which a process may wait for an answer.

    Only that of the descriptor which its main thread reads, where the kernel tells it.
    """
    peers = known.peers.get(one.pid, ())
    call = known.calls.get((one.pid, one.pid))
    exactly = [peer for peer in peers if call and 0 <= call.fd == peer.fd]
    return exactly or peers


def _behind(edges: Sequence[_Edge], ends: Iterable[int]) -> Iterable[int]:
    """Who waits for these, then who waits for those, and so on."""
    seen = set(ends)
    near = set(ends)
    while near:
        who = [
            one.pid
            for edge in edges
            if near & {o.pid for o in edge.whom}
            for one in edge.who
        ]
        near = set(who) - seen
        yield from (pid for pid in dict.fromkeys(who) if pid in near)
        seen |= near


def _clients(edges: Sequence[_Edge], ends: Sequence[int]) -> Iterable[int]:
    """Who asks the odd ones over HTTP, or, without any, a server that is not here."""
    for edge in edges:
        if edge.is_request:
            whom = {one.pid for one in edge.whom}
            if whom & set(ends) or (edge.absent and not ends):
                yield from (one.pid for one in edge.who)


def _placed(wait: Wait) -> str:
    """The operation, and the program's frame that called it."""
    if wait.at is None:
        return wait.operation
    at = f"{wait.at.function}, {wait.at.file}:{wait.at.line})"
    if wait.operation.endswith(")"):
        return f"{wait.operation[:-1]}, called from {at}"
    return f"{wait.operation} ({at}"


def is_locked(process: ProcessSample, known: Known) -> bool:
    """Whether its main thread waits for a lock, of Python's or of a file's, and no
    other thread of it writes a file."""
    if not process.threads or not process.threads[0].is_main:
        return False
    own = known.calls.get((process.pid, process.pid))
    wait = waiting.of(process.threads[0])
    calls = [call for (pid, _), call in known.calls.items() if pid == process.pid]
    if any(call.writes for call in calls):
        return False
    is_file = own is not None and own.name in ("flock", "fcntl")
    return is_file or (wait is not None and wait.kind == "lock")


def is_in_collective(process: ProcessSample) -> bool:
    """Whether a thread of it is in a call that other ranks have to come to as well."""
    found = map(waiting.of, process.threads)
    return any(one is not None and one.kind in ("collective", "store") for one in found)


def _plural(doing: str, some: Sequence[ProcessSample]) -> str:
    if len(some) == 1:
        return doing
    # With more of the sentence than the verb, a translation knows it again.
    if doing.startswith("is in "):
        return f"are in {doing.removeprefix('is in ')}"
    if doing.startswith("waits in "):
        return f"wait in {doing.removeprefix('waits in ')}"
    if doing.startswith("waits for "):
        return f"wait for {doing.removeprefix('waits for ')}"
    first, _, rest = doing.partition(" ")
    verbs = {"is": "are", "has": "have"}
    return f"{verbs.get(first, first)} {rest}"


def _unplaced(task: RayTask, caller: ProcessSample | None) -> str:
    if caller:
        return (
            f"{task.name}, a method of its own actor, which runs one call at a time: "
            "it waits for itself"
        )
    return f"{task.name}, which no process runs (Ray says {task.state})"


def _strongly_connected(follows: Mapping[int, set[int]]) -> list[list[int]]:
    """Circles of more than one, each once (Tarjan's algorithm)."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    found: list[list[int]] = []

    def visit(node: int) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in follows.get(node, ()):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            circle = stack[at:]
            del stack[at:]
            if len(circle) > 1:
                found.append(circle)

    for node in follows:
        if node not in index:
            visit(node)
    return found
