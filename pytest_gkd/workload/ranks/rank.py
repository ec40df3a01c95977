"""The program of one rank.

It joins the others, runs the collectives of ``allreduce``, writes a mark before each,
and reports its findings at the end. It judges nothing: a rank that waits in a
collective cannot know why.
"""

from __future__ import annotations

import dataclasses
import datetime
import faulthandler
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from pytest_gkd import files
from pytest_gkd.clock import monotonic
from pytest_gkd.processes import prctl
from pytest_gkd.workload.ranks import allreduce
from pytest_gkd.workload.ranks.allreduce import Operation
from pytest_gkd.workload.ranks.rank_plan import (
    ENTERED,
    FINISHED,
    HOST,
    JOINED,
    RAISED,
    RENDEZVOUS,
    TRIGGERED,
    RankPlan,
)

if TYPE_CHECKING:
    from torch import Tensor


# An address reserved for documentation, which nobody has (RFC 5737).
NOBODY = "192.0.2.1"

# Exit codes. Anything else, and any signal, was not the rank's own choice.
DONE, FAILED, CALLED_OFF = 0, 1, 76
LEFT = 3

TEXT_LIMIT = 4000
WRONG_LIMIT = 20


def main(plan: RankPlan, rank: int, port: int, lifeline: int, parent: int) -> NoReturn:
    """Become rank ``rank``; called in a freshly forked process.

    ``lifeline`` is a pipe's read end: at its end of file the run is called off, and the
    rank dumps its stacks and flight record and exits. ``parent`` is the pid that forked
    it; the rank does not outlive it.
    """
    code = FAILED
    try:
        _settle(plan, rank, parent)
        body = Rank(plan, rank)
        threading.Thread(
            target=body.await_call_off, args=(lifeline,), daemon=True
        ).start()
        code = body.run(port)
    except BaseException:  # a fork must not unwind into its parent's frames
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


def _settle(plan: RankPlan, rank: int, parent: int) -> None:
    """Set up its own log, stacks on a signal, and death with the parent."""
    log = os.open(plan.file("log", rank), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    prctl.die_with_parent()
    if os.getppid() != parent:
        os._exit(CALLED_OFF)  # it died before the line above took effect


class Rank:
    """One rank's run: its marks, its fault, and its findings."""

    def __init__(self, plan: RankPlan, rank: int) -> None:
        self.plan = plan
        self.rank = rank
        self.wrong: list[dict[str, Any]] = []
        self._wrong_parts: set[int] = set()
        self._contributes_garbage = False
        self._fault = plan.fault if plan.fault and plan.fault.rank == rank else None
        self._marks = os.open(
            plan.file("marks", rank), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644
        )
        self._at = "the rendezvous"

    def run(self, port: int) -> int:
        """Run everything and return the exit code; exceptions go to the marks."""
        try:
            found = self._collectives(port)
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"[:TEXT_LIMIT]
            self.mark(RAISED, at=self._at, error=text)
            traceback.print_exc()
            self.dump_flight_record()
            return FAILED
        self.mark(FINISHED, **found)
        return DONE

    def mark(self, what: str, **more: Any) -> None:
        """Append one line to this rank's marks; a SIGKILL cannot lose it."""
        entry = {"rank": self.rank, "t": monotonic(), "what": what, **more}
        files.append_line(self._marks, files.json_line(entry))

    def await_call_off(self, lifeline: int) -> None:
        """Thread: when the lifeline ends, save the evidence and exit the process."""
        os.read(lifeline, 1)
        faulthandler.dump_traceback(all_threads=True)
        self.dump_flight_record()
        os._exit(CALLED_OFF)

    def dump_flight_record(self) -> None:
        """torch's record of the last collectives, as JSON next to the log.

        With NCCL there are two recorders: gloo's checks, which
        TORCH_DISTRIBUTED_DEBUG=DETAIL runs before each collective, wait for a rank, and
        NCCL is then never called.
        """
        import torch._C._distributed_c10d as c10d

        kinds = ("nccl", "fr") if self.plan.backend == "nccl" else ("fr",)
        record: dict[str, Any] = {}
        entries: list[dict[str, Any]] = []
        for kind in kinds:
            dump = getattr(c10d, f"_dump_{kind}_trace_json", None)
            if dump is None:
                print(f"this torch has no _dump_{kind}_trace_json")  # noqa: T201
                continue
            record |= json.loads(dump(True, False))
            # Each recorder numbers its groups from 0.
            entries += [{**one, "recorder": kind} for one in record.pop("entries", [])]
        record["entries"] = entries
        self.plan.file("flight", self.rank).write_text(json.dumps(record, indent=1))

    # -- the collectives -----------------------------------------------------------

    def _collectives(self, port: int) -> dict[str, Any]:
        import torch
        import torch.distributed as dist

        plan = self.plan
        device, device_name, nccl = torch.device("cpu"), "cpu", None
        options: dict[str, Any] = {}
        if plan.backend == "nccl":
            index = plan.devices[self.rank] if plan.devices else self.rank
            if plan.fault is not None and plan.fault.kind == "one-gpu":
                index = 0
            device = options["device_id"] = torch.device("cuda", index)
            torch.cuda.set_device(device)
            device_name = f"{device} {torch.cuda.get_device_name(device)}"
            nccl = ".".join(map(str, torch.cuda.nccl.version()))
        timeout = datetime.timedelta(seconds=plan.timeout_s)
        kind = self._commit(RENDEZVOUS)
        host = NOBODY if kind == "address" else HOST
        world_size = plan.world_size + (kind == "world-size")
        self.mark(RENDEZVOUS, world_size=world_size, at=f"{host}:{port}")
        store = dist.TCPStore(host, port, is_master=False, timeout=timeout)
        dist.init_process_group(
            plan.backend,
            store=dist.PrefixStore("gkd", store),
            rank=self.rank,
            world_size=world_size,
            timeout=timeout,
            **options,
        )
        self.mark(JOINED)
        operations = allreduce.checked_operations(plan.backend)
        for operation in operations:
            self._check(operation, device, None)
        # TORCH_DISTRIBUTED_DEBUG=DETAIL's checks cost milliseconds per call: more than
        # a small all-reduce. A group created with them off measures the transport.
        dist.set_debug_level(dist.DebugLevel.OFF)
        plain = dist.new_group(timeout=timeout)
        medians_s = {
            size_bytes: self._measure(size_bytes, device, plain)
            for size_bytes in plan.sizes_bytes
        }
        self._enter("barrier")
        dist.barrier(group=plain)
        found = {
            "device": device_name,
            "operations": len(operations),
            "medians_s": medians_s,
            "wrong": self.wrong[:WRONG_LIMIT],
            "wrong_parts": sorted(self._wrong_parts),
            "nccl": nccl,
        }
        if plan.backend == "nccl":
            dist.destroy_process_group()
        return found

    def _enter(self, name: str) -> str:
        """Report where this rank is; returns a fault to commit inside, usually none."""
        self._at = name
        kind = self._commit(name)
        self.mark(ENTERED, op=name)
        return kind

    def _check(self, operation: Operation, device: Any, group: Any) -> Tensor:
        """Run one collective and compare; returns the buffer, whatever it holds."""
        import torch
        import torch.distributed as dist

        kind = self._enter(operation.name)
        n, count = self.plan.world_size, operation.count
        dtype = getattr(torch, operation.dtype)
        if kind == "shape":
            count += 1
        if kind == "dtype":
            dtype = torch.uint8

        def period(rank: int) -> Tensor:
            return allreduce.contribution(rank, n, n, dtype, device)

        own = allreduce.contribution(self.rank, n, count, dtype, device)
        if self._contributes_garbage:
            own[0] += 1
        if operation.kind == "all_gather":
            parts = [torch.empty_like(own) for _ in range(n)]
            dist.all_gather(parts, own, group=group)
            pairs = [(part, period(rank)) for rank, part in enumerate(parts)]
        elif operation.kind == "broadcast" or kind == "op":
            dist.broadcast(own, n - 1, group=group)
            pairs = [(own, period(n - 1))]
        else:
            dist.all_reduce(own, group=group)
            pairs = [(own, allreduce.expected_sum(n, dtype, device))]
        for number, (got, expected) in enumerate(pairs):
            if kind == "garbage":
                got[0] += 1
            found = allreduce.first_difference(got, expected)
            if found is None:
                continue
            if operation.kind == "all_gather":
                self._wrong_parts.add(number)
            index, value, should = found
            entry = {"got": value, "expected": should, "index": index}
            self.wrong.append({**dataclasses.asdict(operation), **entry})
        return own

    def _measure(self, size_bytes: int, device: Any, group: Any) -> float:
        buffer = self._check(
            Operation("all_reduce", "float32", size_bytes // 4), device, group
        )
        self._enter(f"timed all_reduce of {allreduce.size_name(size_bytes)}")
        # Zeros, because sums of sums would overflow to infinity.
        return allreduce.time_all_reduce(buffer.zero_(), group)

    # -- faults --------------------------------------------------------------------

    def _commit(self, name: str) -> str:
        """The planned fault's kind if this is its place; committed if possible."""
        fault = self._fault
        if fault is None or (name == RENDEZVOUS and fault.at != RENDEZVOUS):
            return ""
        if not name.startswith(fault.at):
            return ""
        self._fault = None
        self.mark(TRIGGERED, kind=fault.kind)
        actions: Mapping[str, Any] = {
            "exit": lambda: os._exit(LEFT),
            "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
            "kill-host": lambda: os.kill(os.getppid(), signal.SIGKILL),
            "late": lambda: threading.Event().wait(4 * self.plan.timeout_s),
            "raise": self._raise,
            "contribution": lambda: setattr(self, "_contributes_garbage", True),
        }
        if fault.kind in actions:
            actions[fault.kind]()
        return fault.kind

    def _raise(self) -> None:
        raise MemoryError(f"rank {self.rank} was asked to fail")
