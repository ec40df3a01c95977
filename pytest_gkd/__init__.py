"""pytest-gkd: staged smoke tests for on-policy distillation and RL post-training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_gkd.marks import phase

__all__ = ["__version__", "phase"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Imported lazily: the plugin imports this package in every pytest run.
    if name == "phase":
        from pytest_gkd.marks import phase

        return phase
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
