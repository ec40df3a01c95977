"""Which rank torchrun names, in its summary, as the one that failed first.

torch/distributed/elastic/multiprocessing/errors/__init__.py prints it: the others,
which it has ended itself, come before.
"""

from __future__ import annotations

from typing import NamedTuple

from pytest_gkd.diagnosis.patterns import Pattern

FIRST = b"Root Cause (first observed failure)"
# A line may begin with the name of whose it is.
_FIRST = Pattern(
    rb"Root Cause \(first observed failure\):\s*\n(?:[^\n]*\n){0,4}?"
    rb"[^\n]*\brank +: (?P<rank>\d{1,7}) \(local_rank: [^\n]*\n"
    rb"[^\n]*\bexitcode +: (?P<code>-?\d{1,7}) \(pid: (?P<pid>\d{1,10})\)"
)


class Failed(NamedTuple):
    """The rank, its pid on its own machine, and its exit code: -N where signal N ended
    it."""

    rank: int
    pid: int
    exit_code: int


def first_failed(text: bytes) -> Failed | None:
    """That of the last summary in a text; None without one."""
    found = [*_FIRST.finditer(text)][-1:]
    keys = (b"rank", b"pid", b"code")
    return next((Failed(*(int(one[key]) for key in keys)) for one in found), None)
