"""What a job that stands still is known not to have, which rules suspects out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from pytest_gkd.diagnosis import suspects
from pytest_gkd.watch import waits
from pytest_gkd.watch.samples import JobSample, ProcessSample
from pytest_gkd.watch.verdicts import BESIDE

DRIVER = Path("/dev/nvidiactl")
_IN_ENGINE = re.compile(r"(?:^|/)(?:vllm|sglang)/")
_BELOW = (*BESIDE, "data-worker", "compiler")


def known(
    sample: JobSample,
    odd: Sequence[ProcessSample],
    links: waits.Known,
    said: str,
) -> frozenset[str]:
    """Those of ``suspects.THINGS`` that it does not have.

    ``odd`` are the processes that the others wait for, ``said`` is what was found out
    besides. Of what runs on machines that are not seen nothing is known.
    """
    return frozenset(_lacks(sample, odd, links, said))


def _lacks(
    sample: JobSample,
    odd: Sequence[ProcessSample],
    links: waits.Known,
    said: str,
) -> Iterator[str]:
    if not any(one.state == "D" for one in sample.processes):
        yield suspects.STATE_D
    if "Xid" not in said:
        yield suspects.XID
    if odd and all(waits.is_locked(one, links) for one in odd):
        yield suspects.WRITERS
    if sample.remote or any(one.problem for one in sample.nodes):
        return
    # A container may have GPUs and no NVML to tell of them.
    if not sample.gpus and not DRIVER.exists():
        yield suspects.GPUS
    kinds = {one.role.kind for one in sample.processes}
    if "data-worker" not in kinds:
        yield suspects.DATA_WORKERS
    if "compiler" not in kinds:
        yield suspects.COMPILERS
    if not kinds & {"engine", "engine-worker", "teacher"} and not any(
        _IN_ENGINE.search(frame.file)
        for one in sample.processes
        for thread in one.threads
        for frame in thread.frames
    ):
        yield suspects.ENGINES
    if _is_alone([one for one in sample.processes if one.role.kind not in _BELOW]):
        yield suspects.RANKS


def _is_alone(working: Sequence[ProcessSample]) -> bool:
    """Whether the job is one process that has no other ranks."""
    if len(working) != 1:
        return False
    (one,) = working
    has_peers = one.role.rank is not None and one.role.world_size != 1
    return not has_peers and not waits.is_in_collective(one)
