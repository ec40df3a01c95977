"""Where users' own rules are: in packages declared by installed distributions."""

from __future__ import annotations

import importlib.util
from importlib import metadata
from pathlib import Path

GROUP = "pytest_gkd.rules"


def installed() -> list[Path]:
    """Every ``*.toml`` in the packages named by entry points of ``pytest_gkd.rules``.

    The packages are located, not imported. Raises LookupError if one does not exist.
    """
    files: list[Path] = []
    for entry in metadata.entry_points(group=GROUP):
        spec = importlib.util.find_spec(entry.value)
        if spec is None or not spec.submodule_search_locations:
            owner = entry.dist.name if entry.dist else "a distribution"
            raise LookupError(
                f"the entry point {entry.name!r} of {owner} in the group {GROUP} names "
                f"{entry.value!r}, which is not an installed package"
            )
        for place in spec.submodule_search_locations:
            files += sorted(Path(place).rglob("*.toml"))
    return files
