"""Sets of ranks and processes in few words: ``0-6``, ``ranks 0-6``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pytest_gkd.watch.samples import ProcessSample

MOST = 8


def spans(numbers: Iterable[int]) -> str:
    """``0-3,5`` for 0, 1, 2, 3, 5."""
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


def ranked(processes: Sequence[ProcessSample]) -> bool:
    """Whether each has a rank of its own."""
    ranks = {one.role.rank for one in processes}
    return None not in ranks and len(ranks) == len(processes)


def name(processes: Sequence[ProcessSample]) -> str:
    """``ranks 0-6``, else the roles with their pids, at most eight."""
    if not processes:
        return "nobody"
    if all(one.role.kind == "rank" for one in processes) and ranked(processes):
        known = spans(r for one in processes if (r := one.role.rank) is not None)
        return f"rank{'s' if len(processes) > 1 else ''} {known}"
    shown = ", ".join(one.label for one in processes[:MOST])
    more = f" and {len(processes) - MOST} more" if len(processes) > MOST else ""
    return shown + more
