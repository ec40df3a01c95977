"""The faults that can be injected: name, stage, effect and expected diagnosis. Data."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from pytest_gkd import typed_json
from pytest_gkd.near_names import near_names

DIRECTORY = Path(__file__).parent / "faults"


class UnknownFaultError(LookupError):
    """There is no fault with that name; the text suggests similar ones."""


@dataclass(frozen=True)
class FaultSpec:
    """One fault and what the stages must make of it.

    ``name`` is ``FILE:NAME``, as in ``nccl:rank-killed``. ``how`` says in one line what
    it does. ``outcome`` and ``causes`` (one of them, as the diagnosis) are what
    ``stage`` must end with. ``does`` is the function in ``workload/inject/FILE.py``
    that injects it, called with ``arguments``. ``settings`` are settings that the fault
    requires, ``budget_s`` (seconds) is the stage's budget in the matrix, ``needs`` what
    the machine must have (``gpu``, ``two-gpus``, ``cpu`` for no GPU, ``mounts`` for
    permission to mount, ``shared-gpu`` for GPUs that take more than one process),
    ``exit_code`` is pytest's. ``also_runs`` are stages that the matrix runs with it and
    that must pass.
    ``notes`` are ids of notes that the stage must give, for what does not stop a job by
    itself; ``says`` is part of the message, or of what the terminal shows for a stage
    that passed.
    """

    name: str
    how: str
    stage: str
    outcome: str
    causes: tuple[str, ...]
    does: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    budget_s: float | None = None
    needs: tuple[str, ...] = ()
    exit_code: int = 1
    also_runs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    says: str = ""

    @property
    def group(self) -> str:
        """The file that defines the fault, and its module below workload/inject."""
        return self.name.split(":")[0]

    @property
    def gpus(self) -> int:
        """How many GPUs it needs."""
        return 2 if "two-gpus" in self.needs else int("gpu" in self.needs)


@cache
def load(directory: Path = DIRECTORY) -> Mapping[str, FaultSpec]:
    """Every fault by name, in file order.

    Raises ValueError for a malformed entry, with its file and name.
    """
    found: dict[str, FaultSpec] = {}
    for path in sorted(directory.glob("*.toml")):
        for entry in tomllib.loads(path.read_text("utf-8")).get("fault", []):
            spec = _read(path, entry)
            if spec.name in found:
                raise ValueError(f"{path}: {spec.name} is listed twice")
            found[spec.name] = spec
    return found


def _read(path: Path, entry: Mapping[str, Any]) -> FaultSpec:
    where = f"{path} ({entry.get('name', 'a fault without a name')})"
    name = str(entry.get("name"))
    found = {"does": name.replace("-", "_")}
    if path.stem != "any":
        found["stage"] = path.stem
    try:
        spec = typed_json.read(FaultSpec, {**found, **entry})
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return replace(spec, name=f"{path.stem}:{name}")


def find(name: str) -> FaultSpec:
    """The fault ``name``, or ``NAME@STAGE`` for one that may be injected in any stage.

    Raises UnknownFaultError.
    """
    faults = load()
    plain, _, stage = name.partition("@")
    if plain not in faults:
        close = near_names(plain, faults)
        near = f" Near: {', '.join(close)}." if close else ""
        raise UnknownFaultError(f"there is no fault {plain!r}.{near}")
    spec = faults[plain]
    if not stage:
        return spec
    if spec.group != "any":
        raise UnknownFaultError(f"{plain!r} can be injected in stage {spec.stage} only")
    return replace(spec, stage=stage)
