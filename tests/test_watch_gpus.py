"""GPUs that spin for a rank which does not come: real ranks, a stand-in for NVML."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import live_jobs
import pytest
import recorded
from recorded import PutsOn, Recorded, needs_compiler

from pytest_gkd.clock import monotonic
from pytest_gkd.processes import host_capabilities
from pytest_gkd.watch import verdicts, waits
from pytest_gkd.watch.samples import AT_WORK, STUCK, Progress, Usual
from pytest_gkd.watch.sampling import Sampler
from pytest_gkd.watch.scope import Scope

TRACES = pytest.mark.skipif(not host_capabilities.may_trace(), reason="needs ptrace")


@pytest.mark.needs("torch")
@needs_compiler
@TRACES
def test_a_gpu_at_100_percent_is_no_work_while_ranks_wait_for_one(
    on: PutsOn, tmp_path: Path
) -> None:
    # As in a container, where the driver names the host's processes.
    unknown = f"process 0 {2**22 + 1} 97 100"
    on(Recorded("580.95.05", recorded.BUSY.gpus, (unknown,)))
    began = monotonic()
    with live_jobs.ranks(tmp_path, 4, odd=2) as found:
        job = found[0].pid
        sampler = Sampler(Scope(lambda _: [job]), lambda: (0, began))
        first = sampler.look(tmp_path / "first")
        second = sampler.look(tmp_path / "second")
    second = replace(second, at=first.at + 30)
    assert [gpu.percent for gpu in second.gpus] == [100]
    assert second.gpus_at_work == "GPU 0 is busy (100 %)"
    verdict = verdicts.compare(first, second, Progress(), Usual())
    assert verdict.word == STUCK
    odd = waits.picture(second.processes).odd
    (rank,) = [one for one in second.processes if one.pid in odd]
    assert rank.role.rank == 2
    # Of that rank alone, for which no other waits, the GPU may be at work.
    one, other = (replace(look, processes=(rank,)) for look in (first, second))
    assert verdicts.compare(one, other, Progress(), Usual()).word == AT_WORK
