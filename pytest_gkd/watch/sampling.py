"""Looks at a job's processes: cheaply every second, closely where it seems to stand."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import psutil

from pytest_gkd import sanitize
from pytest_gkd.clock import monotonic
from pytest_gkd.diagnosis import stack_dump
from pytest_gkd.processes import (
    gpus,
    host_capabilities,
    procfs,
    py_spy,
    resource_use,
    stacks,
)
from pytest_gkd.processes.procfs import Stat
from pytest_gkd.watch import (
    far_peers,
    launched_nodes,
    process_facts,
    ray_nodes,
    ray_places,
    roles,
)
from pytest_gkd.watch.node_answers import Seen
from pytest_gkd.watch.samples import GpuSample, JobSample, ProcessSample, Role
from pytest_gkd.watch.scope import Scope

# Titles change when an actor begins a task; they are read again after this time.
TITLES_EVERY_S = 5.0
GPUS_EVERY_S = 5.0
LOOK_LIMIT_S = 10.0
NATIVE_S = 20.0
FAR_S = 6.0  # for its flight records, and the way
# Nobody reads the stacks of more; and each takes py-spy a tenth of a second of CPU.
MOST_STACKS = 256
MOST_NATIVE = 64


class Sampler:
    """Takes samples of one job.

    ``nodes`` are the others of a Ray cluster, ``elsewhere`` says what another launcher
    has put where it is not seen.

    ``output`` gives all bytes of output so far and when the last came, ``blocked_s``
    for how long nobody reads what is passed on.
    """

    def __init__(
        self,
        scope: Scope,
        output: Callable[[], tuple[int, float]],
        blocked_s: Callable[[], float] = lambda: 0.0,
        driver: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.scope = scope
        self._output, self._blocked_s, self._driver = output, blocked_s, driver
        self._known: dict[tuple[int, int], tuple[Role, str]] = {}
        self._titles_at = self._gpus_at = float("-inf")
        self._gpus: tuple[GpuSample, ...] = ()
        self._gpu_reader = gpus.Reader()
        self.nodes = ray_nodes.RayNodes()
        self.elsewhere = ""

    def take(self) -> JobSample:
        """A cheap look, without stacks."""
        now = monotonic()
        found = self.scope.find(now)
        self._name(found, now)
        processes = []
        for pid, one in sorted(found.items()):
            used = resource_use.of_process(pid)
            if used is not None:
                role, command = self._known.get((pid, one.start), (Role(), ""))
                processes.append(
                    ProcessSample(
                        pid,
                        one.start,
                        one.ppid,
                        role,
                        command,
                        used.state,
                        used.cpu_s,
                        used.io_bytes,
                        used.rss_bytes,
                    )
                )
        if now >= self._gpus_at + GPUS_EVERY_S:
            self._gpus_at, self._gpus = now, self._read_gpus()
        output_bytes, output_at = self._output()
        self.nodes.refresh(self.scope.raylet, self.scope.jobs, now)
        far = self.nodes.last
        return JobSample(
            now,
            time.clock_gettime(time.CLOCK_BOOTTIME),
            output_bytes,
            output_at,
            (*processes, *far.processes),
            (*self._gpus, *far.gpus),
            resource_use.network_bytes(),
            self._blocked_s(),
            nodes=far.nodes,
            unseen=(*self.scope.unseen, *filter(None, (self.elsewhere,))),
        )

    def look(self, out: Path) -> JobSample:
        """A close look: with the stacks of each process, whose files go to ``out``.

        Usage is read first: to be looked at makes a process run.
        """
        self.scope.find(monotonic(), closely=True)
        answers = self._ask_nodes("stacks")
        sample = self.take()
        here = [one for one in sample.processes if not one.node]
        asked = []
        for one in here:
            if one.role.kind not in ("helper", "ray-system", "compiler"):
                try:
                    asked.append(psutil.Process(one.pid))
                except psutil.NoSuchProcess:
                    continue
        tracers = {one.pid: process_facts.tracer(one.pid) for one in here}
        here = [
            # Whose stacks are taken, by us or by others, is stopped for a moment.
            replace(one, state="S")
            if one.state == "t" and not tracers[one.pid]
            else one
            for one in here
        ]
        out = out.absolute()
        found = stacks.collect_of(
            asked,
            out / "none",
            out,
            limit_s=LOOK_LIMIT_S,
            most=MOST_STACKS,
        )
        texts = {one.pid: one.text for one in found}
        looked = tuple(
            _closely(one, texts.get(one.pid), tracers[one.pid]) for one in here
        )
        lost = far_peers.unanswered(looked) if self.scope.remote else ()
        far = answers.result()
        return replace(
            sample,
            processes=(*looked, *far.processes),
            remote=far.elsewhere(self.scope.remote),
            gpus_at_work=gpus.at_work(one.pid for one in here) or far.gpus_at_work,
            unanswered=(*lost, *far.lost),
            unplaced=ray_places.unplaced((*looked, *far.processes)),
            nodes=far.nodes,
            unseen=(*sample.unseen, *_unseen(looked), *far.unseen),
        )

    def natively(self, sample: JobSample, out: Path) -> JobSample:
        """The same look, with the frames of C and C++ where py-spy can tell them.

        They tell which lock or collective a process waits in, and take py-spy seconds.
        """
        answers = self._ask_nodes("native")
        alive = [
            psutil.Process(one.pid)
            for one in sample.processes
            if one.threads and procfs.is_alive(one.pid, one.start)
        ]
        found = stacks.collect_of(
            alive, out / "none", out, limit_s=NATIVE_S, native=True, most=MOST_NATIVE
        )
        threads = {one.pid: stack_dump.threads(one.text, one.pid) for one in found}
        far = answers.result()
        far.keep(out)
        known = {one.pid: one for one in far.processes}
        servers = {one.number: one.servers for one in far.nodes}
        return replace(
            sample,
            unseen=tuple(dict.fromkeys((*sample.unseen, *far.unseen))),
            nodes=tuple(
                replace(one, servers=servers.get(one.number, {}))
                for one in sample.nodes
            ),
            processes=tuple(
                _with_more(one, known[one.pid])
                if one.pid in known
                else replace(one, threads=threads.get(one.pid) or one.threads)
                for one in sample.processes
            ),
        )

    def _ask_nodes(self, look: str) -> Future[Seen]:
        limit_s = LOOK_LIMIT_S if look == "stacks" else NATIVE_S + FAR_S
        return self.nodes.begin(self.scope.raylet, self.scope.jobs, look, limit_s)

    def _read_gpus(self) -> tuple[GpuSample, ...]:
        return tuple(
            GpuSample(
                card.index,
                card.percent,
                card.total_bytes - card.free_bytes,
                card.total_bytes,
            )
            for card in self._gpu_reader.cards()
            if card.total_bytes  # one that is lost tells nothing
        )

    def _name(self, found: dict[int, Stat], now: float) -> None:
        names = {(pid, one.start) for pid, one in found.items()}
        if names <= self._known.keys() and now < self._titles_at + TITLES_EVERY_S:
            return
        self._titles_at = now
        facts = [
            roles.Facts(pid, one.ppid, procfs.full_command(pid), procfs.environ(pid))
            for pid, one in found.items()
        ]
        in_ray = bool(self.scope.sessions)
        if not in_ray and not self.elsewhere:
            self.elsewhere = sanitize.line(launched_nodes.not_seen(facts))
        told = roles.roles(facts, self._driver(), in_ray=in_ray)
        self._known = {
            (one.pid, found[one.pid].start): (
                replace(told[one.pid], name=sanitize.line(told[one.pid].name)[:80]),
                procfs.shown(one.command),
            )
            for one in facts
        }


def _with_more(one: ProcessSample, later: ProcessSample) -> ProcessSample:
    """A process of another node, with what it has told since, which may lack stacks."""
    return later if later.threads else replace(one, recorder=later.recorder)


def _closely(one: ProcessSample, text: str | None, tracer: int) -> ProcessSample:
    if text is None:
        return one
    threads = stack_dump.threads(text, one.pid)
    return replace(
        one,
        threads=threads,
        problem="" if threads else py_spy.problem(text),
        tracer=tracer,
        **process_facts.of(one.pid)._asdict(),
    )


def _unseen(looked: tuple[ProcessSample, ...]) -> list[str]:
    problems = [one for one in looked if one.problem]
    if not problems:
        return []
    if not host_capabilities.may_trace():
        return [
            "no stacks: ptrace is not allowed here (--cap-add=SYS_PTRACE in Docker, "
            "kernel.yama.ptrace_scope=0 or root elsewhere allow it); what CPU, GPU, "
            "disk and output tell is all that is known"
        ]
    some = ", ".join(one.label for one in problems[:3])
    more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
    return [f"no Python stacks of {some}{more}: {problems[0].problem[:100]}"]
