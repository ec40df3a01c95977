"""The environment stage's faults and notes, the most fundamental fault first."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pytest_gkd.stage_api import Note, StageFault

# What breaks everything comes first. A full disk or a limit set too low makes imports
# and Ray fail in ways that look like other causes; a missing or mismatched package does
# the same to the GPU checks; Ray builds on all of them.
RANKING: tuple[str, ...] = (
    "env.disk-full",
    "env.too-many-files",
    "env.file-size-limit",
    "env.permission",
    "env.loopback-down",
    "env.host-oom",
    "env.variable-invalid",
    "env.module-shadowed",
    "env.package-damaged",
    "env.package-missing",
    "env.driver-too-old",
    "env.gpu-hardware",
    "env.package-conflict",
    "env.no-gpu",
    "env.cuda-arch-mismatch",
    "env.gpu-busy",
    "env.shm-too-small",
    "env.compiler",
    "comm.interface",
    "env.import-stuck",
    "ray.connection",
    "ray.worker-start",
)


@dataclass
class FaultsAndNotes:
    """Everything found so far."""

    faults: list[StageFault] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    def add(self, items: Iterable[StageFault | Note]) -> None:
        """File each item as a fault or a note; duplicates are dropped.

        Two checks may find the same package missing or broken: the first one reports
        it.
        """
        for item in items:
            if isinstance(item, Note):
                if item not in self.notes:
                    self.notes.append(item)
            elif not any(_same(item, known) for known in self.faults):
                self.faults.append(item)


def _same(one: StageFault, other: StageFault) -> bool:
    package = _name(one)
    return (one.cause, one.message) == (other.cause, other.message) or (
        one.cause == other.cause == "env.package-missing"
        and package != ""
        and package == _name(other)
    )


def _name(fault: StageFault) -> str:
    """The name of its package, without the required extras and releases."""
    return re.split(r"[^\w.-]", str(fault.facts.get("package", "")))[0]


def most_fundamental(faults: Sequence[StageFault]) -> StageFault | None:
    """The fault that ends the stage, with the others attached; None if there is none.

    Ordered by ``RANKING``; unknown causes come last, and ties go to the one found
    first.
    """

    def place(fault: StageFault) -> int:
        if fault.cause in RANKING:
            return RANKING.index(fault.cause)
        return len(RANKING) + (fault.cause is None)

    if not faults:
        return None
    first, *rest = sorted(faults, key=place)
    evidence = first.evidence + tuple(line for one in rest for line in one.evidence)
    return StageFault(first.cause, first.message, first.facts, evidence, rest)


def size_text(count: int) -> str:
    """A number of bytes in GiB, or in MiB below 1 GiB."""
    if count >= 2**30:
        return f"{count / 2**30:.1f} GiB"
    return f"{count / 2**20:.0f} MiB"
