"""Measure the log matcher: accuracy by cause, false alarms, speed against grep.

    python tests/accuracy.py [--logs DIR] [--speed MIB]

Every log lies in a folder named after its cause, after ``hung.PHASE``, or ``healthy``.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from pytest_gkd import logs, rules, scan


def verdict(report: logs.LogReport) -> list[str]:
    """The answers, best first."""
    if report.causes:
        return [one.cause for one in report.causes]
    if report.verdict == "hung":
        return [f"hung.{report.phase}"]
    return [report.verdict]


def accuracy(folder: Path) -> None:
    """Print what was missed and the totals."""
    catalogue = rules.load()
    right: dict[str, list[int]] = defaultdict(list)
    first = third = total = alarms = healthy = 0
    for path in sorted(folder.glob("*/*.log")):
        expected = path.parent.name
        answers = verdict(logs.diagnose([path], catalogue))
        total += 1
        first += answers[0] == expected
        third += expected in answers[:3]
        right[expected].append(answers[0] == expected)
        healthy += expected == "healthy"
        alarms += expected == "healthy" and answers[0] != "healthy"
        if answers[0] != expected:
            say(f"missed {expected}/{path.name}: {', '.join(answers)}")
    for cause, found in sorted(right.items()):
        if not all(found):
            say(f"{cause:32} {sum(found)}/{len(found)}")
    say(f"top-1 {first}/{total}  top-3 {third}/{total}  alarms {alarms}/{healthy}")


def speed(mib: int) -> None:
    """Time the matcher and grep on the same log of ``mib`` MiB."""
    samples = Path(__file__).parent.glob("logs/healthy/*.log")
    block = b"".join(sorted(path.read_bytes() for path in samples))
    catalogue = rules.load()
    with tempfile.TemporaryDirectory() as folder:
        words = Path(folder, "words")
        words.write_bytes(b"\n".join(scan.index(catalogue)) + b"\n")
        log = Path(folder, "big.log")
        with log.open("wb") as stream:
            while stream.tell() < mib << 20:
                stream.write(block)
        size = log.stat().st_size / (1 << 20)
        start = time.perf_counter()
        command = ["grep", "-c", "-F", "-f", str(words), str(log)]
        subprocess.run(command, check=False, capture_output=True)
        grep_s = time.perf_counter() - start
        start = time.perf_counter()
        logs.diagnose([log], catalogue)
        ours_s = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    say(f"{size:.0f} MiB: grep {size / grep_s:.0f} MiB/s, matcher {size / ours_s:.0f}")
    say(f"ratio {grep_s / ours_s:.2f}, peak {peak} MiB")


def say(text: str) -> None:
    """Print a line."""
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--logs", type=Path, default=Path(__file__).parent / "logs")
    parser.add_argument("--speed", type=int, metavar="MIB", default=0)
    asked = parser.parse_args()
    accuracy(asked.logs)
    if asked.speed:
        speed(asked.speed)
