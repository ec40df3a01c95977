"""Where users' own rules lie: packages that an installed distribution names."""

from __future__ import annotations

import importlib.util
from importlib import metadata
from pathlib import Path

GROUP = "pytest_gkd.rules"


def installed() -> list[Path]:
    """Every ``*.toml`` of the packages named by entry points of ``pytest_gkd.rules``.

    The packages are found, not imported. Raises LookupError for one that is not there.
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
