"""Stage nccl: every rank's all-reduce is correct; the bus bandwidth between them."""

from __future__ import annotations

import pytest

from pytest_gkd.stage_api import StageContext


@pytest.mark.gkd_stage("nccl")
def test_nccl(gkd: StageContext) -> None:
    from pytest_gkd.processes import gpus
    from pytest_gkd.workload import loopback
    from pytest_gkd.workload.ranks import allreduce, group
    from pytest_gkd.workload.ranks.rank_plan import RankPlan
    from pytest_gkd.workload.ranks.rank_verdict import judge

    settings = gkd.settings
    backend, why = group.choose_backend(settings.gpus)
    gkd.fact("backend", backend)
    gkd.fact("backend_why", why)
    gkd.fact("world_size", settings.world_size)
    gkd.fact("world_size_why", settings.world_size_why)
    loopback.require()
    group.check_world_size(settings.world_size, settings.gpus)
    cards = gpus.usable().cards if backend == "nccl" else ()
    remaining_s = gkd.remaining_s()
    plan = RankPlan(
        settings.world_size,
        backend,
        group.operation_timeout_s(remaining_s),
        str(gkd.output_dir),
        allreduce.sizes(
            backend, settings.world_size, min((c.free_bytes for c in cards), default=0)
        ),
        devices=gpus.first_devices(cards),
    )

    gkd.step("importing torch in the launcher")
    with group.Launcher(gkd.output_dir) as launcher:
        budget_s = remaining_s - group.reserve_s(remaining_s)
        run = launcher.run(plan, budget_s, gkd.step, extra_s=gkd.extra)
    error = judge(run)
    if error is not None:
        raise error

    found = [record.found for record in run.records if record.found is not None]
    seconds = allreduce.slowest([group.medians_s(one) for one in found])
    table = allreduce.bandwidths(seconds, settings.world_size)
    gkd.fact("torch_import_s", run.import_s)
    gkd.fact("devices", [one["device"] for one in found])
    gkd.fact("checked_operations", found[0]["operations"])
    gkd.fact("bus_bandwidth_gb_s", table)
    gkd.fact("latency_us", round(seconds[min(seconds)] * 1e6, 1))
    if found[0]["nccl"] is not None:
        gkd.fact("nccl_version", found[0]["nccl"])
    where = f"{settings.world_size} rank(s), {backend}"
    slow = allreduce.too_slow(
        table,
        settings.min_bus_bandwidth,
        where,
        settings.origin("min_bus_bandwidth"),
    )
    if slow:  # what was asked for is not met, which is no mistake of ours
        pytest.fail(slow, pytrace=False)
    bus = "no bus to measure with a single rank"
    if table:
        size, best = max(table.items(), key=lambda entry: entry[1])
        bus = f"best bus bandwidth {best} GB/s at {size}"
    gkd.fact("summary", f"{where}, {bus}")
