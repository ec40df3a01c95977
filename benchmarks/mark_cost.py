"""What ``with phase(...)`` costs in microseconds, watched and not.

python benchmarks/mark_cost.py prints the best and the median of fifteen rounds, beside
an empty ``with`` of a class in Python. Watched marks go to a file.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import timeit

ROUNDS = 15
STATEMENTS = {
    "with phase(name)": "with phase('weight-sync'): pass",
    "with phase(name, timeout_s)": "with phase('weight-sync', 600): pass",
    "an empty with": "with Empty(): pass",
}
SETUP = """
from pytest_gkd import phase
class Empty:
    __slots__ = ()
    def __enter__(self): return self
    def __exit__(self, *_): pass
"""


def measure(number: int) -> None:
    """Print the figures of this process, whose environment decides what is marked."""
    for name, statement in STATEMENTS.items():
        times = timeit.repeat(statement, SETUP, repeat=ROUNDS, number=number)
        each = [one / number * 1e6 for one in times]
        line = f"{name:28} best {min(each):7.2f} us, median "
        sys.stdout.write(f"{line}{statistics.median(each):7.2f} us\n")
    sys.stdout.flush()


def main() -> None:
    """Measure in a process that is not watched, and in one that is."""
    if len(sys.argv) > 1:
        measure(int(sys.argv[1]))
        return
    for title, on, number in (("not watched", "0", 50_000), ("watched", "1", 1_000)):
        sys.stdout.write(f"{title}\n")
        sys.stdout.flush()
        with tempfile.TemporaryFile() as log:
            subprocess.run(
                [sys.executable, __file__, str(number)],
                env={**os.environ, "GKD_MARKS": on},
                stderr=log,
                check=True,
            )


if __name__ == "__main__":
    main()
