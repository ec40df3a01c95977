"""Ranks that fail their part of a collective."""

from __future__ import annotations

import functools

from pytest_gkd.workload import rank_plan
from pytest_gkd.workload.inject.site import LATER, Site


def rank_fault(site: Site, *, rank: int, kind: str, at: str = "") -> object:
    """One rank does ``kind`` at the operation ``at``; see ``rank_plan.Fault``."""
    fault = rank_plan.Fault(rank, kind, at)
    plan = functools.partial(rank_plan.RankPlan, fault=fault)
    site.replace(rank_plan, "RankPlan", plan)
    return LATER
