"""From-source glue: a clone must be tested with its own plugin, not another's."""

from __future__ import annotations

from pathlib import Path

import pytest

import pytest_gkd


def pytest_sessionstart(session: pytest.Session) -> None:
    here = Path(__file__).parent
    loaded = Path(pytest_gkd.__file__).parent.resolve()
    # For tools/release.py, which puts a link to the installed package there.
    own = (here / "pytest_gkd").resolve()
    if session.config.rootpath == here and loaded != own:
        raise pytest.UsageError(
            f"pytest_gkd is installed from {loaded.parent}, not from this clone "
            f"({here}). Run `make test`, or `pip install --no-deps -e .` in this "
            "environment."
        )
