"""Whether each of a job's GPU pools fits on the nodes of ``--machine``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pytest_gkd.job.findings import Finding
from pytest_gkd.job.fitting import MACHINE, Machine
from pytest_gkd.job.frameworks.reading import Pool

CAUSE = "ray.no-resources"
# The most ways to place the pools that are tried; beyond, nothing is reported.
MOST_TRIES = 5000


def findings(
    pools: Sequence[Pool], on: Machine, file: str, line: int
) -> Iterator[Finding]:
    """Pools that need more GPUs on a node than it has, or do not fit together."""
    if not on.gpus:
        return
    sizes = [(pool, pool.nodes.value, pool.each.value) for pool in pools]
    sizes = [(pool, nodes, each) for pool, nodes, each in sizes if nodes != 0]
    known = [(p, n, e) for p, n, e in sizes if type(n) is int and type(e) is int]
    for pool, nodes, each in known:
        word = pool.each.word or pool.nodes.word
        place = (word.file, word.line) if word else (file, line)
        if each > on.gpus:
            text = (
                f"{pool.name} needs {each} GPUs on one node, and each node of "
                f"{MACHINE} has {on.gpus}"
            )
            yield Finding(CAUSE, "error", text, *place, pool.key)
        elif pool.is_launched and on.nodes and nodes > on.nodes:
            text = f"{pool.name} needs {nodes} nodes, and {MACHINE} has {on.nodes}"
            yield Finding(CAUSE, "error", text, *place, pool.key)
        elif (first := _over_an_edge(pool, nodes, each, on)) is not None:
            text = (
                f"{pool.name} needs {each} GPUs on one node; behind the {first} GPUs "
                f"before it, one would begin at GPU {first % on.gpus} of a node, and "
                f"each node of {MACHINE} has {on.gpus}"
            )
            yield Finding(CAUSE, "error", text, *place, pool.key)
            return
    wanted = sorted(
        (each for _, n, each in known for _ in range(min(n, 999))), reverse=True
    )
    # More GPUs than there are in all is reported elsewhere.
    fits_in_all = sum(wanted) <= on.all_gpus and max(wanted, default=0) <= on.gpus
    if len(known) < len(sizes) or not on.nodes or not fits_in_all:
        return
    if _fits(wanted, [on.gpus] * on.nodes) is False:
        shapes = ", ".join(f"{p.name} {n} * {each}" for p, n, each in known)
        text = (
            f"{shapes} GPUs: a part is never spread over nodes, and {on.nodes} nodes "
            f"with {on.gpus} GPUs each have no place for all"
        )
        yield Finding(CAUSE, "error", text, file, line, "")


def _over_an_edge(pool: Pool, nodes: int, each: int, on: Machine) -> int | None:
    """The start of a part that spans two nodes, in a job that takes all GPUs.

    Which GPUs a smaller job gets is up to Ray.
    """
    before = pool.after.value if pool.after else None
    if not on.gpus or type(before) is not int or before + nodes * each != on.all_gpus:
        return None
    cut = (n for n in range(nodes) if (before + n * each) % on.gpus + each > on.gpus)
    return next((number * each + before for number in cut), None)


def _fits(wanted: Sequence[int], free: list[int]) -> bool | None:
    """Whether parts, largest first, fit into nodes; None if that takes too long."""
    tries = 0

    def place(at: int) -> bool | None:
        nonlocal tries
        tries += 1
        if at == len(wanted):
            return True
        if tries > MOST_TRIES:
            return None
        for room in sorted({one for one in free if one >= wanted[at]}):
            node = free.index(room)
            free[node] -= wanted[at]
            found = place(at + 1)
            free[node] += wanted[at]
            if found is not False:
                return found
        return False

    return place(0) if len(wanted) < 900 else None
