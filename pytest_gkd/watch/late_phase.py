"""Tells the stacks of a job whose marked phase is late, where nobody watches it.

``python -m pytest_gkd.watch.late_phase PID``, started by ``pytest_gkd.marks``.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from pytest_gkd import sanitize
from pytest_gkd.processes import procfs
from pytest_gkd.watch import job_links, stack_tree, waits
from pytest_gkd.watch.sampling import Sampler
from pytest_gkd.watch.scope import Scope


def main(pid: int) -> int:
    """Write who waits for whom, and the tree of the job's stacks."""
    scope = Scope(lambda table: _seeds(pid, table), frozenset({os.getpid()}))
    with tempfile.TemporaryDirectory(prefix="gkd-late-") as place:
        sample = Sampler(scope, lambda: (0, 0.0)).look(Path(place))
    links = job_links.known(sample.processes)
    lines = waits.picture(sample.processes, links).lines
    text = "\n".join([*lines, stack_tree.build(sample.processes).text()])
    told = "\n".join(f"gkd: {line}" for line in sanitize.text(text).splitlines())
    os.write(1, f"{told}\n".encode())
    return 0


def _seeds(pid: int, table: dict[int, procfs.Stat]) -> list[int]:
    """The process, and what launched it: the Pythons above it in its session."""
    found = [pid]
    while (one := table.get(found[-1])) and (above := table.get(one.ppid)):
        if above.session != one.session or not _is_python(above.pid):
            break
        found.append(above.pid)
    return found


def _is_python(pid: int) -> bool:
    return "python" in procfs.full_command(pid).partition(" ")[0]


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
