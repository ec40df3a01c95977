"""Runs a stage's real ranks, tracks where each is, and leaves none behind."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from pytest_gkd import typed_json
from pytest_gkd.clock import monotonic
from pytest_gkd.processes import tree
from pytest_gkd.stage_api import StageFault
from pytest_gkd.workload import exit_reasons
from pytest_gkd.workload.ranks.rank_plan import HOST, RankPlan
from pytest_gkd.workload.ranks.rank_records import (
    TAIL_LINES,
    RankRun,
    Watched,
    read_tail,
)

# After the first rank has failed, the others have this long to report what they saw.
GRACE_S = 1.5
# After the lifeline is cut: more than the host's own grace, then everything is killed.
END_S = 0.6
LOOK_S = 0.25
STACKS_S = 0.5

PROGRAM = "pytest_gkd.workload.ranks.launcher"
# BLAS threads would spin on the cores that the engine starts on, and those that exist
# before a fork are lost in the child.
THREADS = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"
)
# What torch itself can report about a collective that goes wrong: who calls what, who
# is missing, and each rank's last operations.
DEBUGGING = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "TORCH_FR_BUFFER_SIZE": "2000"}


def choose_backend(gpus: int) -> tuple[str, str]:
    """The backend of the ranks and, in words, why."""
    if gpus:
        return "nccl", f"{gpus} GPU(s) visible"
    return "gloo", "no GPU is visible"


def check_world_size(world_size: int, gpus: int) -> None:
    """Raise StageFault ``comm.world-size`` for more ranks than GPUs, if any."""
    if gpus and world_size > gpus:
        raise StageFault(
            "comm.world-size",
            f"{world_size} ranks are asked for and {gpus} GPU(s) are visible; expected "
            f"{gpus} ranks or fewer, as NCCL takes one rank per GPU",
            facts={"world_size": world_size, "gpus": gpus},
        )


def operation_timeout_s(remaining_s: float) -> float:
    """Each collective's timeout: short enough to expire, and for its text to be read.

    A third of what is left of the stage's budget, since gloo overshoots its timeouts by
    up to 2.6 times; at most 20 s.
    """
    return min(20.0, remaining_s / 3)


def reserve_s(remaining_s: float) -> float:
    """How much of the remaining time to reserve for ending ranks and the report."""
    return max(min(3.0, remaining_s / 4), remaining_s / 10)


def medians_s(found: Mapping[str, Any]) -> dict[int, float]:
    """A rank's all-reduce seconds, by size in bytes."""
    return {int(size): seconds for size, seconds in found["medians_s"].items()}


def listen(port: int = 0) -> socket.socket:
    """A listening socket on the loopback interface; 0 lets the kernel choose the port.

    Raises StageFault ``comm.port-in-use`` if another program holds ``port``.
    """
    listener = socket.socket()
    try:
        listener.bind((HOST, port))
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        listener.close()
        if error.errno != errno.EADDRINUSE:
            raise
        raise StageFault(
            "comm.port-in-use",
            f"{HOST}:{port}, where the ranks are to meet, is taken by another program "
            f"({error.strerror}); expected a free port",
            facts={"host": HOST, "port": port},
        ) from error
    return listener


class Launcher:
    """An interpreter with torch imported that forks ranks on request.

    A context manager: on exit every process it started is gone. ``output_dir`` gets the
    launcher's own log. It starts importing at once, in the background.
    """

    def __init__(self, output_dir: Path) -> None:
        output_dir.mkdir(parents=True, exist_ok=True)
        self._log = output_dir / "launcher.log"
        environment = {**os.environ, **THREADS, **DEBUGGING}
        environment.setdefault("NCCL_DEBUG", "WARN")
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with self._log.open("ab") as log, theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", PROGRAM, str(theirs.fileno())],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=(theirs.fileno(),),
            )
        self._leader = tree.leader(self._process.pid)

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        plan: RankPlan,
        budget_s: float,
        say: Callable[[str], None] = lambda _: None,
        port: int = 0,
        extra_s: Callable[[], float] = lambda: 0.0,
    ) -> RankRun:
        """Run ``plan`` for at most ``budget_s``, plus the moment that ending it takes.

        The limit also grows with ``extra_s()`` (see ``StageContext.extra``). Returns
        when every rank has ended, ``GRACE_S`` after the first failure, or when the
        budget is spent; no rank survives in any case. ``say`` is called with rank 0's
        current operation. Raises StageFault ``comm.port-in-use``.
        """
        started = monotonic()
        until = started + budget_s - extra_s()

        def deadline() -> float:
            return until + extra_s()

        Path(plan.output_dir).mkdir(parents=True, exist_ok=True)
        for rank in range(plan.world_size):
            for kind in ("log", "marks", "flight"):
                plan.file(kind, rank).unlink(missing_ok=True)
        lifeline_end, lifeline = os.pipe()
        events, events_end = os.pipe()
        watched = Watched(plan, events)
        try:
            # The events' end of file, and the log, tell if the launcher is gone.
            with (
                listen(port) as listener,
                contextlib.suppress(BrokenPipeError, ConnectionResetError),
            ):
                fds = [listener.fileno(), lifeline_end, events_end]
                socket.send_fds(self._control, [typed_json.dumps(plan).encode()], fds)
        except BaseException:
            os.close(lifeline)
            os.close(events)
            raise
        finally:
            os.close(lifeline_end)
            os.close(events_end)
        try:
            self._watch(watched, deadline, say)
            waited_s = monotonic() - started
            import_stuck = self._import_is_stuck(watched)
            seen = watched.records()
            is_ready = watched.forked
            doing = "importing torch" if watched.host_pid is None else "starting them"
            is_cut_off = watched.closed and (
                not is_ready or watched.codes.keys() < watched.pids.keys()
            )
        finally:
            os.close(lifeline)
            self._end_host(watched)
            os.close(events)
        error = ""
        if is_cut_off:
            error = self._launcher_error()
        elif not is_ready:
            error = f"its launcher (pid {self._process.pid}) was still {doing}"
        # Read the logs again: ranks that were called off have left their stacks there.
        records = tuple(replace(r, log_tail=read_tail(r.log)) for r in seen)
        return RankRun(
            plan,
            records,
            started,
            waited_s,
            watched.import_s,
            watched.fork_error,
            error,
            watched.host_pid if is_cut_off and is_ready else None,
            import_stuck,
        )

    def close(self) -> None:
        """Stop the launcher and whatever is left below it; reap it."""
        self._control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.5)
        tree.stop_session(self._leader)
        self._process.wait(5)

    def _watch(
        self,
        watched: Watched,
        deadline: Callable[[], float],
        say: Callable[[str], None],
    ) -> None:
        said = ""
        give_up = float("inf")
        while not watched.closed:
            left_s = min(give_up, deadline()) - monotonic()
            if left_s <= 0:
                return
            if select.select([watched.events], [], [], min(LOOK_S, left_s))[0]:
                watched.read()
            if any(watched.codes.values()) or watched.fork_error:
                first = min(watched.ends.values(), default=monotonic())
                give_up = first + GRACE_S
            if (now_at := watched.progress()) != said:
                said = now_at
                say(said)

    def _import_is_stuck(self, watched: Watched) -> bool:
        """Whether torch's import only waits; if so, it dumps its stack to the log."""
        if watched.host_pid is not None or watched.closed:
            return False
        found = psutil.Process(self._process.pid)
        is_stuck = exit_reasons.only_wait(
            lambda: [found, *found.children(recursive=True)]
        )
        if is_stuck:
            size = self._log.stat().st_size
            found.send_signal(signal.SIGUSR1)
            until = monotonic() + STACKS_S
            while self._log.stat().st_size == size and monotonic() < until:
                time.sleep(0.01)
        return is_stuck

    def _end_host(self, watched: Watched) -> None:
        if watched.host_pid is None and not watched.closed:
            # Still importing: it has no rank yet and must not start one later.
            tree.stop(self._process.pid, itself=True)
            return
        until = monotonic() + watched.plan.call_off_s + END_S
        while not watched.closed and (left_s := until - monotonic()) > 0:
            if select.select([watched.events], [], [], left_s)[0]:
                watched.read()
        if not watched.closed and watched.host_pid is not None:
            tree.stop(watched.host_pid, itself=True)
        # Ranks die with their host if it is killed, but maybe not yet.
        for rank in watched.pids.keys() - watched.codes.keys():
            tree.stop(watched.pids[rank], itself=True)

    def _launcher_error(self) -> str:
        state = "still runs"
        with contextlib.suppress(subprocess.TimeoutExpired):
            state = f"ended with {tree.exit_name(self._process.wait(0.5))}"
        lines = self._log.read_text("utf-8", "replace").strip().splitlines()
        return "\n".join([f"the launcher {state}", *lines[-TAIL_LINES:]])
