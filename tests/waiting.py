"""Waits for what comes by itself."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(holds: Callable[[], object], limit_s: float = 120.0) -> None:
    """Return once ``holds`` gives something true; fail after ``limit_s`` seconds."""
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, f"it did not come to that in {limit_s:g} s"
        time.sleep(0.01)
