"""Measure the log matcher: accuracy by cause, false alarms, speed against grep.

    python tests/accuracy.py [--logs DIR] [--missed-only] [--speed MIB]

Every log lies in a folder named after its cause, after ``hung.PHASE``, or ``healthy``.
A hang counts as right when its phase is right as well. The speed is measured on a log
of so many MiB, made of all the logs that fail and all that are healthy.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
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
ROUNDS = 5


def accuracy(folder: Path, *, missed_only: bool) -> None:
    """Print what was missed, a line for each cause, and the totals."""
    catalogue = rules.load()
    counts: dict[str, Count] = defaultdict(Count)
    for path in sorted(folder.glob("*/*.log")):
        expected = path.parent.name
        report = logs.examine([path], catalogue)
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
    """Time `gkd diagnose` and grep in turn on the same log of ``mib`` MiB.

    grep counts the lines that hold one of the catalogue's texts.
    """
    block = b"".join(path.read_bytes() for path in sorted(folder.glob("*/*.log")))
    texts = scan.index(rules.load())
    with tempfile.TemporaryDirectory() as scratch:
        words = Path(scratch, "words")
        words.write_bytes(b"\n".join(texts) + b"\n")
        log = Path(scratch, "big.log")
        with log.open("wb") as stream:
            while stream.tell() < mib << 20:
                stream.write(block)
        size = log.stat().st_size / (1 << 20)
        grep = ["grep", "-c", "-F", "-f", str(words), str(log)]
        ours = [sys.executable, "-m", "pytest_gkd", "diagnose", str(log)]
        rounds = [(measured(grep), measured(ours)) for _ in range(ROUNDS)]
    say(f"{size:.0f} MiB, {len(texts)} texts, {ROUNDS} rounds, median (range)")
    for at, name in ((0, "elapsed"), (1, "CPU time")):
        times = [(theirs[at], own[at]) for theirs, own in rounds]
        say(f"{name}: grep {spread(size / one for one, _ in times)} MiB/s")
        say(f"  gkd diagnose {spread(size / one for _, one in times)} MiB/s")
        say(f"  ratio {spread((one / other for one, other in times), 2)}")
    say(f"peak {spread(own[2] / 1024 for _, own in rounds)} MiB")


def measured(command: list[str]) -> tuple[float, float, int]:
    """Elapsed and CPU seconds of a command and its peak in KiB; its file is cached."""
    with Path(command[-1]).open("rb") as log:
        while log.read(1 << 20):
            pass
    with tempfile.TemporaryFile() as output:  # to /dev/null grep stops at once
        start = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=output, env={**os.environ, "LC_ALL": "C"}
        )
        _, status, usage = os.wait4(process.pid, 0)
        elapsed = time.perf_counter() - start
        assert output.tell(), f"{command} says nothing"
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode in {0, 1}
    return elapsed, usage.ru_utime + usage.ru_stime, usage.ru_maxrss


def spread(values: Iterable[float], digits: int = 0) -> str:
    """The median and the range, such as ``90 (80 to 120)``."""
    low, *_, high = found = sorted(values)
    shown = [f"{one:.{digits}f}" for one in (statistics.median(found), low, high)]
    return "{} ({} to {})".format(*shown)


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
