"""Finds a release that suits two packages that want different ones of a third."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from pytest_gkd.stage_api import Evidence, StageFault


@dataclass(frozen=True)
class Demand:
    """What one installed package requires of another, and the metadata's line."""

    name: str
    version: str
    requirement: Requirement
    line: str

    @property
    def wanted(self) -> str:
        """The other package, with the extras and releases that are required."""
        extras = ",".join(sorted(self.requirement.extras))
        name = self.requirement.name + (f"[{extras}]" if extras else "")
        return f"{name}{self.requirement.specifier}"

    def __str__(self) -> str:
        return f"{self.name} {self.version} requires {self.wanted}"

    @property
    def evidence(self) -> tuple[str, int | None, str]:
        """The line and where it stands."""
        source = f"{self.name} {self.version} METADATA"
        return source, None, f"Requires-Dist: {self.line}"


def judge_conflict(
    unmet: Demand, package: str, version: str, demands: Sequence[Demand]
) -> StageFault:
    """The finding for a demand that the installed ``version`` does not meet.

    ``demands`` are all that is required of that package. Where one of them leaves no
    release for ``unmet``, it is named; otherwise the facts hold what fits all.
    """
    against = next(
        (d for d in demands if not overlap(d.requirement, unmet.requirement)), None
    )
    facts: dict[str, Any] = {
        "package": package,
        "installed": version,
        "required": str(unmet.requirement.specifier),
        "required_by": f"{unmet.name} {unmet.version}",
    }
    evidence: Evidence = (unmet.evidence,)
    text = f"{unmet}, and {package} {version} is installed"
    if against is None:
        every = SpecifierSet()
        for demand in demands:
            every &= demand.requirement.specifier
        fitting = without_label(every & unmet.requirement.specifier)
        facts["fitting"] = f"{package}{fitting}"
    else:
        text += f"; {against}: no release meets both"
        evidence += (against.evidence,)
        facts["together"] = list(
            dict.fromkeys((unmet.name, *(d.name for d in demands), package))
        )
    return StageFault("env.package-conflict", f"{text}.", facts, evidence)


def without_label(specifier: SpecifierSet) -> SpecifierSet:
    """``==2.11.0`` of ``==2.11.0+cpu``: only PyTorch's own index has the latter."""
    return SpecifierSet(re.sub(r"\+[\w.]+", "", str(specifier)))


def overlap(one: Requirement, other: Requirement) -> bool:
    """Whether some version number meets both.

    It is looked for where it must be if there is one: at the bounds, just above them,
    and at zero.
    """
    both = one.specifier & other.specifier
    bounds = [specifier.version.removesuffix(".*") for specifier in both]
    tried = ["0", *bounds, *(f"{bound}.0.1" for bound in bounds)]
    return any(both.contains(version, prereleases=True) for version in tried)
