"""What a launcher without Ray has put on other nodes is said, once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from watch_helpers import watch

from pytest_gkd.watch import launched_nodes
from pytest_gkd.watch.roles import Facts

ON_EACH = "run gkd watch -- torchrun ... on each node"


@pytest.mark.parametrize(
    ("command", "environ", "said"),
    [
        ("python a.py", {"GROUP_WORLD_SIZE": "4"}, "3 of this job's 4 nodes are not"),
        ("python a.py", {"GROUP_WORLD_SIZE": "2"}, f"from here: {ON_EACH}"),
        (
            "python a.py",
            {"WORLD_SIZE": "32", "LOCAL_WORLD_SIZE": "8"},
            "24 of this job's 32 ranks",
        ),
        (
            "python a.py",
            {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            "2 of this job's 4 ranks",
        ),
        ("srun -N 4 python a.py", {}, "on 4 nodes, which are not seen"),
        ("/usr/bin/srun --nodes=2 a", {"SLURM_NNODES": "8"}, "on 2 nodes"),
        ("srun python a.py", {"SLURM_NNODES": "8"}, "on 8 nodes"),
        ("srun python a.py", {}, "on its node, which"),
    ],
)
def test_other_nodes_are_told(command: str, environ: dict[str, str], said: str) -> None:
    assert said in launched_nodes.not_seen([Facts(1, 0, command, environ)])


@pytest.mark.parametrize(
    ("command", "environ"),
    [
        ("python a.py", {}),
        ("python a.py", {"GROUP_WORLD_SIZE": "1", "WORLD_SIZE": "8"}),
        ("python a.py", {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}),
        # Within an allocation of several nodes, but not started on them.
        ("python a.py", {"SLURM_NNODES": "4"}),
        ("python a.py", {"WORLD_SIZE": "many", "LOCAL_WORLD_SIZE": "2"}),
        ("python srun_notes.py", {}),
    ],
)
def test_a_job_of_one_node_is_told_nothing(
    command: str, environ: dict[str, str]
) -> None:
    assert launched_nodes.not_seen([Facts(1, 0, command, environ)]) == ""


def test_it_is_among_the_first_lines(tmp_path: Path) -> None:
    code = "import time; time.sleep(3)"
    job = ("env", "GROUP_WORLD_SIZE=2", "WORLD_SIZE=2", sys.executable, "-c", code)
    found = watch(tmp_path, *job)
    told = b"gkd: 1 of this job's 2 nodes is not seen from here"
    assert found.stderr.count(told) == 1, found.stderr
