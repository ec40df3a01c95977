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
    the shapes of the inputs, ``behind`` has the last sequence number of each rank.
    Ranks ``without_record`` were stopped, killed, or had not made the group yet. The
    fields stand as they are among the facts of a report.
    """

    group: str
    sequence: int
    operation: str
    sizes: list[list[int]]
    dtypes: list[str]
    entered_by: list[int]
    behind: dict[str, int]
    without_record: list[int]

    def text(self) -> str:
        """In one line."""
        pairs = zip(self.dtypes, self.sizes, strict=False)
        tensors = ", ".join(f"{dtype}{size}" for dtype, size in pairs)
        line = f"collective {self.sequence}, {self.operation} of {tensors}: entered by "
        line += f"rank {_ranks(self.entered_by)}"
        for rank, at in self.behind.items():
            line += f"; rank {rank} had entered {at}"
        if self.without_record:
            line += f"; no record of rank {_ranks(self.without_record)}"
        return line


def find_missing(plan: RankPlan) -> Missing | None:
    """The first collective that not every rank has entered; None if there is none."""
    paths = {rank: plan.file("flight", rank) for rank in range(plan.world_size)}
    silent = [rank for rank, path in paths.items() if not path.exists()]
    records = {
        rank: json.loads(path.read_text("utf-8"))
        for rank, path in paths.items()
        if rank not in silent
    }
    last: dict[str, dict[int, Any]] = {}
    for rank, record in records.items():
        for entry in record.get("entries", []):
            if entry.get("is_p2p"):
                continue
            newest_by_rank = last.setdefault(f"{entry['pg_id']}", {})
            known = newest_by_rank.get(rank, entry)
            newest_by_rank[rank] = max(known, entry, key=_number)
    # The newest group first: what was entered last is what is waited for.
    for group, entries in sorted(
        last.items(), key=lambda item: -max(map(_created, item[1].values()))
    ):
        newest = max(entries.values(), key=_number)
        last_number = _number(newest)
        reached = {r: _number(entries[r]) if r in entries else 0 for r in records}
        behind = {str(r): n for r, n in reached.items() if n < last_number}
        if behind or silent:
            return Missing(
                group,
                last_number,
                str(newest["profiling_name"]),
                newest["input_sizes"],
                newest["input_dtypes"],
                [rank for rank, number in reached.items() if number == last_number],
                behind,
                silent,
            )
    return None


def _number(entry: Mapping[str, Any]) -> int:
    return int(entry["collective_seq_id"])


def _created(entry: Mapping[str, Any]) -> int:
    return int(entry["time_created_ns"])


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"
