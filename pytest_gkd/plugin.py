"""pytest's way in: options, ini twins, marker; registers the rest when stages run."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from pytest_gkd.context import StageContext
from pytest_gkd.settings import Settings


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gkd_stage(name, *, lane, needs, timeout): x")


@pytest.fixture(scope="session")
def gkd() -> StageContext:
    """The running stage's settings, directories and voice."""
    base = Path(tempfile.mkdtemp(prefix="gkd-"))
    return StageContext(Settings(), run_dir=base, report_dir=base / "report")
