"""Which other nodes a launcher without Ray has put a job on, where nobody looks.

torchrun sets GROUP_WORLD_SIZE, its nodes, and LOCAL_WORLD_SIZE beside WORLD_SIZE
(torch.distributed.run, "Environment Variables"); Open MPI's mpirun sets
OMPI_COMM_WORLD_SIZE and OMPI_COMM_WORLD_LOCAL_SIZE; Slurm's srun has its daemons start
the tasks, on its own node as well, and takes SLURM_NNODES for --nodes (srun(1)).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from pytest_gkd.watch.roles import Facts

_SIZES = (
    ("WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
)
_SRUN = re.compile(r"(?:\S*/)?srun(?: |$)")
_NODES = re.compile(r" (?:-N ?|--nodes[= ])(\d+)")


def not_seen(processes: Iterable[Facts]) -> str:
    """Which nodes or ranks are elsewhere and what to do, in a sentence; else empty."""
    for one in processes:
        if _SRUN.match(one.command):
            found = _NODES.search(one.command.partition(" -- ")[0])
            told = found[1] if found else one.environ.get("SLURM_NNODES", "")
            where = f"{told} nodes" if told not in ("", "1") else "its node"
            return (
                f"srun has Slurm start the job's processes on {where}, which are not "
                "seen from here; to watch on each: srun ... gkd watch -- COMMAND"
            )
        nodes = _number(one.environ, "GROUP_WORLD_SIZE")
        if nodes > 1:
            others = f"{nodes - 1} of this job's {nodes} nodes"
            verb = "is" if nodes == 2 else "are"
            return (
                f"{others} {verb} not seen from here: run gkd watch -- torchrun ... on "
                "each node"
            )
        for every, local in _SIZES:
            size, here = _number(one.environ, every), _number(one.environ, local)
            if size > here > 0:
                return (
                    f"{size - here} of this job's {size} ranks are on other nodes, "
                    "which are not seen from here: run gkd watch on each node"
                )
    return ""


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 8 else 0
