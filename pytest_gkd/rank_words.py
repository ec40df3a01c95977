"""Ranks in few words: ``rank 1``, ``ranks 0-3,5``."""

from __future__ import annotations

from collections.abc import Iterable

MOST = 8  # parts


def spans(ranks: Iterable[int], most: int | None = None) -> str:
    """``0-3,5`` for 0, 1, 2, 3, 5; what is beyond ``most`` parts is only counted."""
    found: list[list[int]] = []
    for number in sorted(set(ranks)):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    left = sum(last - first + 1 for first, last in found[most or len(found) :])
    shown = [f"{a}" if a == b else f"{a}-{b}" for a, b in found[:most]]
    return ",".join(shown) + (f" and {left} more" if left else "")


def name(ranks: Iterable[int]) -> str:
    """``rank 1``, or ``ranks 0-3,5``; at most eight parts."""
    some = set(ranks)
    return f"rank{'s' if len(some) > 1 else ''} {spans(some, MOST)}"
