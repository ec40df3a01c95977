"""Starts ranks without each paying for an import of torch.

A program: ``python -m pytest_gkd.workload.ranks.launcher FD``. One interpreter imports
torch and does nothing else with it, so that it has no thread, no CUDA context and no
torch operation behind it when it forks. Each run gets its own child process, the host,
which holds the TCP store (as torchrun's agent does), forks the ranks and reports how
each ends. ``group.Launcher`` is the other side.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import json
import os
import select
import signal
import socket
import sys
from dataclasses import dataclass, field
from typing import Any

from pytest_gkd import typed_json
from pytest_gkd.clock import monotonic
from pytest_gkd.processes import kill, prctl
from pytest_gkd.workload.ranks import rank as program
from pytest_gkd.workload.ranks.rank_plan import HOST, RankPlan


def main(arguments: list[str]) -> None:
    """Serve runs that arrive on the UNIX socket ``arguments[0]`` until it closes.

    A run is one message: the plan as JSON, with three descriptors: the store's
    listening socket, the lifeline's read end and the events' write end.
    """
    control = socket.socket(fileno=int(arguments[0]))
    gc.disable()
    faulthandler.register(signal.SIGUSR1, chain=False)  # should the import hang
    started = monotonic()
    import torch.distributed  # noqa: F401 - the reason why this program exists

    import_s = monotonic() - started
    gc.freeze()  # else a collection in a rank would touch, and so copy, every page
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1 << 16, 3)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            parent = os.getppid()
            control.close()
            host = Host(typed_json.loads(RankPlan, message.decode()), *fds)
            prctl.die_with_parent()  # and the ranks with this process
            if os.getppid() != parent:
                os._exit(1)
            host.emit("ready", import_s=round(import_s, 2), pid=os.getpid())
            host.run()
            os._exit(0)
        for fd in fds:
            os.close(fd)
        os.waitpid(pid, 0)


@dataclass
class Host:
    """One run: the store, the ranks, and the events reported about them."""

    _plan: RankPlan
    _listener: int
    _lifeline: int
    _events: int
    _rank_by_fd: dict[int, int] = field(default_factory=dict, init=False)
    _pids: dict[int, int] = field(default_factory=dict, init=False)

    def emit(self, event: str, **more: Any) -> None:
        """Write one JSON line for the stage, which may be gone."""
        entry = {"event": event, "t": monotonic(), **more}
        with contextlib.suppress(BrokenPipeError):
            os.write(self._events, json.dumps(entry).encode() + b"\n")

    def run(self) -> None:
        """Fork the ranks, hold the store, report every end."""
        import torch.distributed as dist

        with socket.socket(fileno=os.dup(self._listener)) as listening:
            port = listening.getsockname()[1]
        fault = self._plan.fault
        missing = fault.rank if fault and fault.kind == "missing" else None
        for rank in range(self._plan.world_size):
            if rank == missing:
                continue
            try:
                self._start(rank, port)
            except OSError as error:
                self.emit("fork-failed", rank=rank, error=str(error))
                kill.everything(kill.Below(os.getpid()))
                break
        self.emit("forked")
        # Only now: the store runs a thread, and threads do not survive a fork.
        store = dist.TCPStore(
            HOST,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=self._plan.timeout_s),
            master_listen_fd=self._listener,
        )
        self._watch()
        del store

    def _start(self, rank: int, port: int) -> None:
        ours, theirs = os.pipe()
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            os.close(ours)
            os.close(theirs)
            raise
        if pid == 0:
            # ``theirs`` stays open only in the rank: its end of file means the rank has
            # ended.
            for fd in (*self._rank_by_fd, ours, self._events, self._listener):
                os.close(fd)
            program.main(self._plan, rank, port, self._lifeline, parent)
        os.close(theirs)
        self._rank_by_fd[ours] = rank
        self._pids[rank] = pid
        self.emit("started", rank=rank, pid=pid)

    def _watch(self) -> None:
        """Wait for the last rank to end; once called off, not much longer."""
        poll = select.poll()
        for fd in (self._lifeline, *self._rank_by_fd):
            poll.register(fd, select.POLLIN)
        kill_at: float | None = None
        while self._rank_by_fd:
            left_s = None if kill_at is None else max(0.0, kill_at - monotonic())
            for fd, _ in poll.poll(None if left_s is None else left_s * 1e3):
                poll.unregister(fd)
                if fd == self._lifeline:
                    kill_at = monotonic() + self._plan.call_off_s
                else:
                    self._report_end(self._rank_by_fd.pop(fd))
            if kill_at is not None and monotonic() >= kill_at:
                kill.everything(kill.Below(os.getpid()))
                kill_at = monotonic() + self._plan.call_off_s

    def _report_end(self, rank: int) -> None:
        at = monotonic()
        _, status = os.waitpid(self._pids.pop(rank), 0)
        code = os.waitstatus_to_exitcode(status)
        self.emit("ended", rank=rank, code=code, ended_at=at)


if __name__ == "__main__":
    main(sys.argv[1:])
