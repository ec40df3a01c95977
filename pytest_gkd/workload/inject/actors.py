"""Injects a fault into a Ray actor, which is no child of the stage's process.

The actor's class is replaced by one that does it there. Ray finds that class by name in
its module, so it must be at module level, and be named after the role.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gkd.clock import monotonic
from pytest_gkd.workload.inject.site import Site
from pytest_gkd.workload.layouts import ray_actors, ray_layout

if TYPE_CHECKING:
    from pytest_gkd.workload.layouts.job_config import JobConfig


def replace_role(
    site: Site, role: type[ray_actors.Role], other: type[ray_actors.Role]
) -> object:
    """Make the actors of ``role`` from class ``other``, which leaves a mark."""
    roles = tuple(other if one is role else one for one in ray_layout.ROLES)
    site.replace(ray_layout, "ROLES", roles)
    site.replace(ray_actors, role.__name__, other)
    return await_mark(site)


def leave_mark(config: JobConfig) -> None:
    """In an actor: the fault takes effect now."""
    path = _mark(Path(config.engine.socket_dir).parent)
    draft = path.with_suffix(".part")
    draft.write_text(repr(monotonic()))
    draft.rename(path)


def await_mark(site: Site) -> object:
    """In the stage's process: report the mark once an actor has left it."""
    path = _mark(site.gkd.run_dir)

    def act() -> bool:
        left = path.exists()
        if left:
            site.triggered(float(path.read_text()))
        return left

    return site.repeat(act)


def _mark(run_dir: Path) -> Path:
    return run_dir / "fault" / "triggered"
