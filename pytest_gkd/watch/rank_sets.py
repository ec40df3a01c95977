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
    """``ranks 0-6``, else the roles with their pids, at most eight."""
    if not processes:
        return "nobody"
    if all(one.role.kind == "rank" for one in processes) and ranked(processes):
        return rank_words.name(
            r for one in processes if (r := one.role.rank) is not None
        )
    shown = ", ".join(one.label for one in processes[:MOST])
    more = f" and {len(processes) - MOST} more" if len(processes) > MOST else ""
    return shown + more
