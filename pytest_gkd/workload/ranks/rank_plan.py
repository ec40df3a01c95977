"""What a rank is told to do, and where it leaves its findings.

Plain data that the stage, the launcher and the ranks share.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pytest_gkd.diagnosis import flight_records
from pytest_gkd.workload.ranks import allreduce

HOST = "127.0.0.1"

# The events in a rank's marks, in the order of a run.
RENDEZVOUS, JOINED, ENTERED, RAISED, TRIGGERED, FINISHED = (
    "rendezvous",
    "joined",
    "entered",
    "failed",
    "triggered",
    "done",
)


@dataclass(frozen=True)
class RankFault:
    """A fault that one rank really commits, to see how it is reported.

    ``kind``: ``exit``, ``kill``, ``stop``, ``late``, ``raise``, ``shape``, ``dtype``,
    ``op``, ``garbage`` (what it receives is corrupted), ``contribution`` (what it sends
    is, from then on), ``kill-host`` (of the process that forked the ranks), ``address``
    (it looks for the others where nobody is), ``world-size`` (it expects one rank
    more), ``one-gpu`` (all ranks take GPU 0) or ``missing`` (the rank is never
    started). ``at`` is the start of an operation's name, or ``rendezvous``; empty means
    the first collective.
    """

    rank: int
    kind: str
    at: str = ""


@dataclass(frozen=True)
class RankPlan:
    """What all ranks of one run do; plain data that travels as JSON (typed_json).

    ``backend`` is ``gloo`` (tensors on the CPU) or ``nccl`` (on GPUs). ``timeout_s``
    bounds the rendezvous and each collective; gloo may take 2.6 times as long.
    ``sizes_bytes`` are the buffers whose bus bandwidth is measured, ``devices`` the
    ranks' GPU numbers.
    """

    world_size: int
    backend: str
    timeout_s: float
    output_dir: str
    sizes_bytes: tuple[int, ...] = allreduce.BANDWIDTH_BYTES
    fault: RankFault | None = None
    devices: tuple[int, ...] = ()

    @property
    def call_off_s(self) -> float:
        """How long ranks have to dump their stacks once a run is called off."""
        return max(1.0, self.timeout_s / 10)

    def file(self, kind: str, rank: int) -> Path:
        """The path of a rank's ``log``, ``marks`` or ``flight`` (recorder)."""
        names = {
            "log": f"rank{rank}.log",
            "marks": f"rank{rank}.marks.jsonl",
            "flight": f"flight-rank{rank}.json",
        }
        return Path(self.output_dir) / names[kind]

    def flight_records(self) -> dict[int, flight_records.Record]:
        """The flight records of those ranks that saved one."""
        paths = {rank: self.file("flight", rank) for rank in range(self.world_size)}
        return {
            rank: flight_records.read(path.read_bytes())
            for rank, path in paths.items()
            if path.exists()
        }
