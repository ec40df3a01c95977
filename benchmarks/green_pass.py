"""How long a whole green pass takes, against a bare engine start, in one run.

    python benchmarks/green_pass.py [--rounds N] [--mode inproc|multi]

Runs the two in turn (A B A B ...), after one round that only warms the page cache, and
prints each one's wall time in seconds and the ratio of the medians. ``inproc`` compares
the colocated layout with an in-process engine, ``multi`` the split layout with vLLM's
default multi-process engine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent


def timed(command: list[str], environment: dict[str, str]) -> float:
    """Wall time in seconds of a command that must succeed."""
    started = time.perf_counter()
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, check=False
    )
    spent = time.perf_counter() - started
    if done.returncode:
        sys.stderr.buffer.write(done.stdout + done.stderr)
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}")
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mode", choices=("inproc", "multi"), default="inproc")
    arguments = parser.parse_args()
    from pytest_gkd.options import Settings
    from pytest_gkd.workload.models.inputs import resolve

    with tempfile.TemporaryDirectory() as directory:
        model = str(resolve(Settings(), Path(directory)).student)
        layout = "colocated" if arguments.mode == "inproc" else "split"
        multi = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(layout == "split"))}
        stages = [sys.executable, "-m", "pytest", "--gkd-stages", "-q"]
        stages += [f"--gkd-layout={layout}", f"--gkd-report={directory}/report"]
        bare = [sys.executable, str(HERE / "bare_start.py"), model]
        times: dict[str, list[float]] = {"stages": [], "bare": []}
        for number in range(arguments.rounds + 1):
            for name, command in (("bare", bare), ("stages", stages)):
                spent = timed(command, multi if name == "bare" else {})
                if number:
                    times[name].append(spent)
    medians = {name: statistics.median(spent) for name, spent in times.items()}
    for name, spent in times.items():
        print(f"{name:7} {' '.join(f'{s:6.1f}' for s in spent)}  median", end=" ")
        print(f"{medians[name]:.1f} s")
    print(f"ratio stages/bare {medians['stages'] / medians['bare']:.2f}")


if __name__ == "__main__":
    main()
