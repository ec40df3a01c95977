"""The watch itself: starts or finds the job, looks at it every second, and tells."""

from __future__ import annotations

from pytest_gkd.watch.arguments import Asked, WatchError


def run(asked: Asked) -> int:
    """Watch the job until it ends; returns the exit status (see ``exits``)."""
    raise WatchError("watch: is not there yet")
