"""How a log usually continues after a line like its last one."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import Any

from pytest_gkd.diagnosis.scan import plain, shown

# This many of the last lines are examined: some dozens of steps.
MOST_LINES = 1_000
# How often, and in what share of cases, a follower must occur to be the usual one.
LEAST_TIMES, LEAST_SHARE = 3, 0.6

# What may differ between two lines of one kind: times, numbers, the state of a bar.
_DIFFERS = b"0123456789.:,+-#|% "


@dataclass(frozen=True, slots=True)
class UsualNext:
    """A line that followed one like the last in ``times`` of ``of`` cases."""

    text: bytes
    times: int
    of: int

    @property
    def shown(self) -> str:
        """The line as a report shows it."""
        return shown(self.text)

    def to_json(self) -> dict[str, Any]:
        """The same as ``gkd diagnose --format=json`` prints it."""
        return {"text": self.shown, "times": self.times, "of": self.of}


def usual_next(text: bytes) -> UsualNext | None:
    """The line that a log did not get to; None if nothing usual follows its last.

    ``text`` is the end of the log. Lines are of one kind if they differ only in
    numbers; those of several processes may be interleaved, which is why the most
    frequent follower counts, not every one.
    """
    lines = [line for line in text.splitlines()[-MOST_LINES:] if line.strip()]
    kinds = [plain(line[:400]).translate(None, _DIFFERS)[:120] for line in lines]
    if not kinds or _goes_on(kinds):
        return None
    after = Counter(
        follower
        for kind, follower in itertools.pairwise(kinds)
        if kind == kinds[-1] and follower != kind
    )
    if not after:
        return None
    (kind, times), of = after.most_common(1)[0], after.total()
    if times < LEAST_TIMES or times / of < LEAST_SHARE:
        return None
    return UsualNext(lines[len(kinds) - 1 - kinds[::-1].index(kind)], times, of)


def _goes_on(kinds: list[bytes]) -> bool:
    """Whether lines like the last ones usually repeated for longer than these have."""
    *before, last = [(kind, len([*same])) for kind, same in itertools.groupby(kinds)]
    as_long = [n for kind, n in before if kind == last[0] and n >= last[1]]
    return as_long.count(last[1]) < LEAST_SHARE * len(as_long)
