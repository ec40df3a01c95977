"""What the environment stage found, and which finding is the most fundamental."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_gkd.stage_api import StageFault

Evidence = tuple[tuple[str, int | None, str], ...]

# What breaks everything comes before what breaks something. A full disk or a missing
# limit makes imports and Ray fail in ways that look like other causes; a missing or
# mismatched package does the same to the GPU checks; Ray is built on all of them.
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


@dataclass(frozen=True)
class Finding:
    """Something that will stop the job.

    ``cause`` is an id of the catalogue, or None where the cause is not known.
    """

    cause: str | None
    message: str
    facts: dict[str, Any] = field(default_factory=dict)
    evidence: Evidence = ()


@dataclass(frozen=True)
class Note:
    """Something the user should know that does not stop the job by itself."""

    id: str
    text: str

    def to_json(self) -> dict[str, str]:
        """As the report holds it."""
        return {"id": self.id, "text": self.text}


@dataclass
class Findings:
    """Everything found so far."""

    faults: list[Finding] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    def add(self, items: Iterable[Finding | Note]) -> None:
        """File each item as a fault or a note; what is known is not filed again.

        Two checks may find one package missing or broken: the first one tells it.
        """
        for item in items:
            if isinstance(item, Note):
                if item not in self.notes:
                    self.notes.append(item)
            elif not any(_same(item, known) for known in self.faults):
                self.faults.append(item)


def _same(one: Finding, other: Finding) -> bool:
    package = _name(one)
    return one == other or (
        one.cause == other.cause == "env.package-missing"
        and package != ""
        and package == _name(other)
    )


def _name(finding: Finding) -> str:
    """Of its package, without the extras and releases that somebody requires."""
    return re.split(r"[^\w.-]", str(finding.facts.get("package", "")))[0]


def ranked(findings: Sequence[Finding]) -> list[Finding]:
    """The most fundamental first; unknown causes last; found first wins a tie."""

    def place(finding: Finding) -> int:
        if finding.cause in RANKING:
            return RANKING.index(finding.cause)
        return len(RANKING) + (finding.cause is None)

    return sorted(findings, key=place)


def to_error(findings: Sequence[Finding]) -> Exception | None:
    """The exception that ends the stage, or None when nothing was found.

    The others follow in the message, a line each, and stand under ``also`` in the
    facts. A finding without a known cause becomes a plain RuntimeError, which the
    report shows as unknown.
    """
    if not findings:
        return None
    first, *rest = ranked(findings)
    message = first.message
    if rest:
        message += f"\nAlso found ({len(rest)}):\n" + "\n".join(
            f"[{other.cause or 'unknown'}] {other.message}" for other in rest
        )
    if first.cause is None:
        return RuntimeError(message)
    also = [{"cause": other.cause, "message": other.message} for other in rest]
    facts = {**first.facts, "also": also} if also else first.facts
    evidence = first.evidence + tuple(line for o in rest for line in o.evidence)
    return StageFault(first.cause, message, facts=facts, evidence=evidence)


def size_text(count: int) -> str:
    """A number of bytes in GiB, or MiB below that."""
    if count >= 2**30:
        return f"{count / 2**30:.1f} GiB"
    return f"{count / 2**20:.0f} MiB"
