"""Where the built-in stages are, and how pytest finds the tests in their files."""

from __future__ import annotations

from pathlib import Path

import pytest


def stages_dir() -> Path:
    """Inside the package in the wheel, next to it in a clone."""
    here = Path(__file__).parent.parent
    inside = here / "stages"
    return inside if inside.is_dir() else here.parent / "stages"


def stage_file(name: str) -> Path:
    """The file of a built-in stage."""
    return stages_dir() / f"test_{name}.py"


def is_built_in(path: str) -> bool:
    """Whether a pytest argument (``FILE::NAME``) refers to one of those files."""
    place = Path(path.split("::")[0]).absolute()
    return stages_dir() in (place, place.parent)


class StageModule(pytest.Module):
    """A built-in stage file, collected whatever naming rules the user's ini sets."""

    def funcnamefilter(self, name: str) -> bool:
        return name.startswith("test_")

    def classnamefilter(self, name: str) -> bool:
        return False
