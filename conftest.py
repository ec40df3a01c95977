"""From-source glue: a clone must be tested with its own plugin, not another's."""

from __future__ import annotations

from pathlib import Path

import pytest

import pytest_gkd


def pytest_sessionstart(session: pytest.Session) -> None:
    here = Path(__file__).parent
    loaded = Path(pytest_gkd.__file__).parent.parent
    if session.config.rootpath == here and loaded != here:
        raise pytest.UsageError(
            f"pytest_gkd is installed from {loaded}, not from this clone ({here}). "
            "Run `make test`, or `pip install --no-deps -e .` in this environment."
        )
