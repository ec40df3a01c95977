"""Runs collectors beside each other, each in a process with a deadline of its own.

A process, not a thread: what a dead file system, a driver or a network mount holds in
the kernel can be left behind, while a thread would keep this process from ending. What
a collector said before its deadline counts.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import resource
import selectors
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pytest_gkd.clock import monotonic
from pytest_gkd.processes import prctl

AT_ONCE = 16
_READ = 1 << 16
_REAP_S = 0.5


class Part(NamedTuple):
    """Text for a file of the bundle; several for one file follow each other."""

    file: str
    text: str


class Missing(NamedTuple):
    """What could not be had, and why."""

    what: str
    why: str


class Collector(NamedTuple):
    """``work`` yields what it finds, for ``limit_s`` seconds and ``limit_bytes``.

    ``is_named`` says that the user asked for this by its name; ``memory_bytes`` is
    what its process and those that it starts may have, if not 0.
    """

    name: str
    limit_s: float
    limit_bytes: int
    work: Callable[[], Iterator[Part | Missing]]
    is_named: bool = False
    memory_bytes: int = 0


@dataclass
class _Running:
    collector: Collector
    pid: int
    pipe: int
    deadline: float
    rest: bytes = b""
    found: list[Part | Missing] = field(default_factory=list)


def gather(collectors: Sequence[Collector]) -> list[list[Part | Missing]]:
    """What each of them found, in their order; raises nothing that one of them raises.

    At most ``AT_ONCE`` run at a time, so that all take the longest deadline, not the
    sum. Ends them however this ends.
    """
    waiting = list(enumerate(collectors))
    running: dict[int, tuple[int, _Running]] = {}
    done: dict[int, list[Part | Missing]] = {}
    ready = selectors.DefaultSelector()
    try:
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                number, collector = waiting.pop(0)
                with _uninterrupted():
                    one = _begin(collector, [r.pipe for _, r in running.values()])
                    running[one.pipe] = (number, one)
                    ready.register(one.pipe, selectors.EVENT_READ)
            first = min(one.deadline for _, one in running.values())
            events = ready.select(max(0.0, first - monotonic()))
            over = {key.fd for key, _ in events if _is_over(running[key.fd][1])}
            for pipe, (_, one) in running.items():
                if pipe not in over and monotonic() > one.deadline:
                    why = f"no answer within {one.collector.limit_s:g} s"
                    one.found.append(Missing(one.collector.name, why))
                    over.add(pipe)
            for pipe in over:
                number, one = running.pop(pipe)
                ready.unregister(pipe)
                _end(one)
                done[number] = one.found
    finally:
        ready.close()
        for _, one in running.values():
            _end(one)
    return [done[number] for number in sorted(done)]


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Put Ctrl-C off: within fork's own hooks (os.register_at_fork) Python drops a
    KeyboardInterrupt, and right after it nobody would know of the process."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(collector: Collector, others: list[int]) -> _Running:
    read, write = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setsid()
            prctl.die_with_parent()
            if os.getppid() == parent:
                for other in (*others, read):
                    os.close(other)
                _become_quiet()
                if collector.memory_bytes:
                    _limit_memory(collector.memory_bytes)
                _work(collector, write)
                status = 0
        finally:
            os._exit(status)
    os.close(write)
    os.set_blocking(read, False)
    return _Running(collector, pid, read, monotonic() + collector.limit_s)


def _become_quiet() -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # the parent has had enough
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    faulthandler.disable()  # that it died is told, and where helps nobody
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nowhere, descriptor)


def _limit_memory(limit_bytes: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or hard > limit_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, hard))


def _work(collector: Collector, pipe: int) -> None:
    left = collector.limit_bytes
    try:
        for found in collector.work():
            if isinstance(found, Part):
                left -= len(found.text)
                if left < 0:
                    why = f"the rest is left out: over {collector.limit_bytes} bytes"
                    _send(pipe, Missing(found.file, why))
                    return
            _send(pipe, found)
    except Exception as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        _send(pipe, Missing(collector.name, reason))


def _send(pipe: int, found: Part | Missing) -> None:
    line = json.dumps([type(found).__name__, *found]).encode() + b"\n"
    while line:
        line = line[os.write(pipe, line) :]


def _is_over(one: _Running) -> bool:
    """Read what there is; whether that was all."""
    try:
        data = os.read(one.pipe, _READ)
    except BlockingIOError:
        return False
    *lines, one.rest = (one.rest + data).split(b"\n")
    for line in lines:
        kind, *values = json.loads(line)
        one.found.append((Part if kind == "Part" else Missing)(*values))
    if data:
        return False
    _, status = _reaped(one.pid, _REAP_S)
    if status and os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        one.found.append(Missing(one.collector.name, f"its reader died ({name})"))
    one.pid = 0 if status is not None else one.pid
    return True


def _end(one: _Running) -> None:
    """End what is left of it; what the kernel does not let go is left behind."""
    os.close(one.pipe)
    if not one.pid:
        return
    for kill in (os.killpg, os.kill):  # it may not have a session of its own yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(one.pid, signal.SIGKILL)
    _reaped(one.pid, _REAP_S)


def _reaped(pid: int, limit_s: float) -> tuple[int, int | None]:
    until = monotonic() + limit_s
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found or monotonic() > until:
            return found, status if found else None
        time.sleep(0.005)
