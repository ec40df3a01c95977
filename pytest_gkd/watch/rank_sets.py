"""Sets of ranks and processes in few words: ``0-6``, ``ranks 0-6``."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_gkd import rank_words
from pytest_gkd.watch.samples import ProcessSample

MOST = 8


def ranked(processes: Sequence[ProcessSample]) -> bool:
    """Whether each has a rank of its own."""
    ranks = {one.role.rank for one in processes}
    return None not in ranks and len(ranks) == len(processes)


def name(processes: Sequence[ProcessSample]) -> str:
    """``ranks 0-6``, else the roles with their pids, at most eight; those of other
    nodes with their nodes."""
    if not processes:
        return "nobody"
    if all(one.role.kind == "rank" for one in processes) and ranked(processes):
        return rank_words.name(_ranks(processes)) + nodes(processes)
    shown = ", ".join(one.label for one in processes[:MOST])
    more = f" and {len(processes) - MOST} more" if len(processes) > MOST else ""
    return shown + more


def nodes(processes: Sequence[ProcessSample]) -> str:
    """`` (4-7 on node-b)``: which of them, or how many, are on which other node."""
    parts = []
    for node in sorted({one.node for one in processes} - {""}):
        some = [one for one in processes if one.node == node]
        who = rank_words.spans(_ranks(some)) if ranked(some) else str(len(some))
        parts.append(
            f"on {node}" if len(some) == len(processes) else f"{who} on {node}"
        )
    return f" ({', '.join(parts)})" if parts else ""


def _ranks(processes: Sequence[ProcessSample]) -> list[int]:
    return [r for one in processes if (r := one.role.rank) is not None]
