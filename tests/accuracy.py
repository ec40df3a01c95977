"""Measure the log matcher: accuracy by cause, false alarms, speed against grep.

    python tests/accuracy.py [--logs DIR] [--missed-only] [--speed MIB]

Every log lies in a folder named after its cause, after ``hung.PHASE``, or ``healthy``.
A hang counts as right when its phase is right as well. The speed is measured on a log
of so many MiB, made of all the logs that fail and all that are healthy.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from pytest_gkd.diagnosis import catalogue as rules
from pytest_gkd.diagnosis import logs, scan
from pytest_gkd.diagnosis.logs import LogReport


@dataclass
class Count:
    """How many logs of one answer there are, and how many were told right."""

    logs: int = 0
    first: int = 0
    third: int = 0
    verdict: int = 0

    def add(self, expected: str, report: LogReport) -> bool:
        """Count one log; whether the first answer is right."""
        answers = [one.cause for one in report.causes] or [report.verdict]
        if report.verdict == "hung":
            answers = [f"hung.{report.phase}"]
        kind = expected.partition(".")[0]
        self.logs += 1
        self.first += answers[0] == expected
        self.third += expected in answers[:3]
        self.verdict += report.verdict == (kind if kind in ENDS else "failed")
        return answers[0] == expected


ENDS = ("healthy", "hung")


def accuracy(folder: Path, *, missed_only: bool) -> None:
    """Print what was missed, a line for each cause, and the totals."""
    catalogue = rules.load()
    counts: dict[str, Count] = defaultdict(Count)
    for path in sorted(folder.glob("*/*.log")):
        expected = path.parent.name
        report = logs.diagnose([path], catalogue)
        if not counts[expected].add(expected, report):
            told = [one.cause for one in report.causes] or [report.verdict]
            say(f"missed {expected}/{path.name}: {', '.join(told)} ({report.phase})")
    if not missed_only:
        say(f"{'cause':34}logs  top-1  top-3")
        for cause, count in sorted(counts.items()):
            say(f"{cause:34}{count.logs:4}{count.first:7}{count.third:7}")
    every = list(counts.items())
    causes = total([c for name, c in every if name.partition(".")[0] not in ENDS])
    hung = total([c for name, c in every if name.startswith("hung.")])
    healthy = counts["healthy"]
    say(f"causes {causes.logs}: top-1 {causes.first}, top-3 {causes.third}")
    say(f"hung {hung.logs}: verdict {hung.verdict}, with the phase {hung.first}")
    say(f"healthy {healthy.logs}: {healthy.logs - healthy.first} false alarms")


def total(counts: list[Count]) -> Count:
    """The sum of them."""
    return Count(
        sum(one.logs for one in counts),
        sum(one.first for one in counts),
        sum(one.third for one in counts),
        sum(one.verdict for one in counts),
    )


def speed(folder: Path, mib: int) -> None:
    """Time the matcher and grep on the same log of ``mib`` MiB."""
    block = b"".join(path.read_bytes() for path in sorted(folder.glob("*/*.log")))
    catalogue = rules.load()
    literals = scan.index(catalogue)
    with tempfile.TemporaryDirectory() as scratch:
        words = Path(scratch, "words")
        words.write_bytes(b"\n".join(literals) + b"\n")
        log = Path(scratch, "big.log")
        with log.open("wb") as stream:
            while stream.tell() < mib << 20:
                stream.write(block)
        size = log.stat().st_size / (1 << 20)
        grep_s = timed(["grep", "-c", "-F", "-f", str(words), str(log)])
        start = time.perf_counter()
        logs.diagnose([log], catalogue)
        ours_s = time.perf_counter() - start
    # Of this process: what the logs above needed is counted, and what grep needs not.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024
    say(f"{size:.0f} MiB, {len(literals)} literals: grep {size / grep_s:.0f} MiB/s, ")
    say(f"matcher {size / ours_s:.0f} MiB/s, ratio {grep_s / ours_s:.2f}")
    say(f"peak {peak} MiB, largest helper process {child} MiB")


def timed(command: list[str]) -> float:
    """How long a command takes, the file being in memory."""
    subprocess.run(["cat", command[-1]], check=False, stdout=subprocess.DEVNULL)
    start = time.perf_counter()
    subprocess.run(command, check=False, capture_output=True)
    return time.perf_counter() - start


def say(text: str) -> None:
    """Print a line."""
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--logs", type=Path, default=Path(__file__).parent / "logs")
    parser.add_argument("--missed-only", action="store_true")
    parser.add_argument("--speed", type=int, metavar="MIB", default=0)
    asked = parser.parse_args()
    accuracy(asked.logs, missed_only=asked.missed_only)
    if asked.speed:
        speed(asked.logs, asked.speed)
