"""Tells from the ranks' flight recorders which collective a rank did not enter.

torch keeps the last collectives of each process group with their sequence numbers
(torch/csrc/distributed/c10d/FlightRecorder.hpp); a rank that ends leaves them as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pytest_gkd.workload.ranks.rank_plan import RankPlan


@dataclass(frozen=True)
class Missing:
    """The collective that some ranks entered last and others did not.

    ``sequence`` counts the collectives of the process group ``group``; ``sizes`` are
    the shapes of the inputs. ``silent`` ranks left no record: they were stopped,
    killed, or had not made the group yet.
    """

    group: str
    sequence: int
    operation: str
    sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    entered: tuple[int, ...]
    behind: Mapping[int, int]
    silent: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """As it stands among the facts of a report."""
        return {
            "group": self.group,
            "sequence": self.sequence,
            "operation": self.operation,
            "sizes": [list(size) for size in self.sizes],
            "dtypes": list(self.dtypes),
            "entered_by": list(self.entered),
            "behind": {str(rank): at for rank, at in self.behind.items()},
            "without_record": list(self.silent),
        }

    def text(self) -> str:
        """In one line."""
        tensors = ", ".join(
            f"{dtype}{list(size)}"
            for dtype, size in zip(self.dtypes, self.sizes, strict=False)
        )
        line = f"collective {self.sequence}, {self.operation} of {tensors}: entered by "
        line += f"rank {_ranks(self.entered)}"
        for rank, at in self.behind.items():
            line += f"; rank {rank} had entered {at}"
        if self.silent:
            line += f"; no record of rank {_ranks(self.silent)}"
        return line


def find_missing(plan: RankPlan) -> Missing | None:
    """The first collective that not every rank has entered; None if there is none."""
    records = {}
    for rank in range(plan.world_size):
        path = plan.file("flight", rank)
        if path.exists():
            records[rank] = json.loads(path.read_text("utf-8"))
    return compare(records, plan.world_size)


def compare(records: Mapping[int, Any], world_size: int) -> Missing | None:
    """Compare the records (as torch writes them) of the ranks that left one."""
    last: dict[str, dict[int, Any]] = {}
    for rank, record in records.items():
        for entry in record.get("entries", []):
            if entry.get("is_p2p"):
                continue
            group = f"{entry['pg_id']}"
            known = last.setdefault(group, {}).get(rank)
            number = entry["collective_seq_id"]
            if known is None or known["collective_seq_id"] < number:
                last[group][rank] = entry
    silent = tuple(rank for rank in range(world_size) if rank not in records)
    # The newest group first: what was entered last is what is waited for.
    for group, entries in sorted(
        last.items(), key=lambda item: -max(map(_created, item[1].values()))
    ):
        newest = max(entries.values(), key=lambda entry: entry["collective_seq_id"])
        sequence = newest["collective_seq_id"]
        there = [r for r, e in entries.items() if e["collective_seq_id"] == sequence]
        behind = {
            rank: entries[rank]["collective_seq_id"] if rank in entries else 0
            for rank in records
            if rank not in there
        }
        if behind or silent:
            return Missing(
                group,
                sequence,
                str(newest["profiling_name"]),
                tuple(tuple(size) for size in newest["input_sizes"]),
                tuple(newest["input_dtypes"]),
                tuple(sorted(there)),
                dict(sorted(behind.items())),
                silent,
            )
    return None


def _created(entry: Mapping[str, Any]) -> int:
    return int(entry["time_created_ns"])


def _ranks(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"
