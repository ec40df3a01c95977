"""How busy and how full a job's GPUs are, in few words."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_gkd import rank_words
from pytest_gkd.watch.samples import GpuSample


def in_a_line(gpus: Sequence[GpuSample]) -> str:
    """How busy they are, and how full the fullest is, with its node."""
    told = [one.percent for one in gpus if one.percent is not None]
    full = _fullest(gpus)
    memory = _memory(full) + (f" on {full.node}" if full.node else "")
    name = "GPU" if len(gpus) == 1 else f"{len(gpus)} GPUs"
    if not told:
        return f"{name} {memory}"
    span = f"{min(told)}" if min(told) == max(told) else f"{min(told)}-{max(told)}"
    return f"{name} {span} % {memory}"


def by_node(gpus: Sequence[GpuSample]) -> str:
    """Each node's, those that are equally busy together: who is idle among those that
    spin is seen."""
    parts = []
    for node in dict.fromkeys(one.node for one in gpus):
        some = [one for one in gpus if one.node == node]
        uses: dict[int | None, list[int]] = {}
        for one in some:
            uses.setdefault(one.percent, []).append(one.index)
        told = ", ".join(
            f"{rank_words.spans(numbers)} at {'?' if percent is None else percent} %"
            for percent, numbers in uses.items()
        )
        where = f"{node}: " if node else ""
        parts.append(f"{where}{told}, the fullest {_memory(_fullest(some))}")
    return "; ".join(parts)


def _fullest(gpus: Sequence[GpuSample]) -> GpuSample:
    return max(gpus, key=lambda one: one.used_bytes / max(1, one.total_bytes))


def _memory(one: GpuSample) -> str:
    return f"{one.used_bytes / 2**30:.0f}/{one.total_bytes / 2**30:.0f} GiB"
