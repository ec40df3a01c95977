"""Ranks that fail their part of a collective."""

from __future__ import annotations

import functools
import socket
from typing import Any

from pytest_gkd.workload.inject.site import Site
from pytest_gkd.workload.ranks import group, rank_plan


def rank_fault(site: Site, *, rank: int, kind: str, at: str = "") -> object:
    """One rank does ``kind`` at the operation ``at``; see ``rank_plan.RankFault``."""
    fault = rank_plan.RankFault(rank, kind, at)
    plan = functools.partial(rank_plan.RankPlan, fault=fault)
    site.replace(rank_plan, "RankPlan", plan)
    if kind == "missing":
        return None

    def run(before: Any, *args: Any, **options: Any) -> Any:
        found = before(*args, **options)
        for record in found.records:
            for mark in record.marks:
                if mark["what"] == rank_plan.TRIGGERED:
                    site.triggered(mark["t"])
        return found

    return site.wrap(group.Launcher, "run", run)


def port_in_use(site: Site) -> None:
    holder = site.enter_context(socket.create_server((rank_plan.HOST, 0)))
    port = holder.getsockname()[1]
    listen = group.listen
    site.replace(group, "listen", lambda _=0: listen(port))
