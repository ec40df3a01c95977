"""Measure the log matcher: accuracy by cause, false alarms, speed against grep.

    python tests/accuracy.py [--logs DIR] [--missed-only] [--speed MIB]
    python tests/accuracy.py --runs | --metrics-runs | --written
        [--set N] [--show-held-out]

Every log lies in a folder named after its cause, after ``hung.PHASE``, ``healthy`` or
``running``. A hang is judged an hour after its last line, and counts as right when its
phase is right as well. The speed is measured on a log of so many MiB, made of all the
logs that fail and all that are healthy.

``--runs`` judges the logs of real runs (tests/runs) by their labels, ``--metrics-runs``
those in which only numbers tell (tests/metrics_runs), ``--written`` those that were
written by hand (tests/written_runs). What is missed of those held out is not named, so
that no rule is fitted to them.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_gkd.diagnosis import catalogue as rules
from pytest_gkd.diagnosis import clocks, logs, scan
from pytest_gkd.diagnosis.log_report import LogReport


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
        kind = expected.partition(".")[0]
        if report.verdict == "hung" and (kind == "hung" or not report.causes):
            answers = [f"hung.{report.phase}"]
        self.logs += 1
        self.first += answers[0] == expected
        self.third += expected in answers[:3]
        self.verdict += report.verdict == (kind if kind in ENDS else "failed")
        return answers[0] == expected


ENDS = ("healthy", "running", "interrupted", "hung")
ROUNDS = 5


def accuracy(folder: Path, *, missed_only: bool) -> None:
    """Print what was missed, a line for each cause, and the totals."""
    catalogue = rules.load()
    counts: dict[str, Count] = defaultdict(Count)
    for path in sorted(folder.glob("*/*.log")):
        expected = path.parent.name
        now = later(path) if expected.startswith("hung.") else ""
        report = logs.examine([path], catalogue, now=now)
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
    healthy = total([counts[name] for name in ENDS[:3]])
    say(f"causes {causes.logs}: top-1 {causes.first}, top-3 {causes.third}")
    say(f"hung {hung.logs}: verdict {hung.verdict}, with the phase {hung.first}")
    say(f"healthy {healthy.logs}: {healthy.logs - healthy.first} false alarms")


def later(path: Path, after_s: int = 3600) -> str:
    """The time so long after a log's last line, in its own clock, for --now."""
    whole = path.read_bytes()
    tail = (gzip.decompress(whole) if path.suffix == ".gz" else whole)[-200_000:]
    end = clocks.of(tail).at(len(tail))
    if end is None:
        moment = time.localtime(path.stat().st_mtime + after_s)
        return time.strftime("%Y-%m-%d %H:%M:%S", moment)
    days, seconds = divmod(int(end) + after_s, 86_400)
    date = datetime.date(2026, 1, 1) + datetime.timedelta(days - 1)
    clock = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    return f"{date:%m-%d} {clock}"


def total(counts: list[Count]) -> Count:
    """The sum of them."""
    return Count(
        sum(one.logs for one in counts),
        sum(one.first for one in counts),
        sum(one.third for one in counts),
        sum(one.verdict for one in counts),
    )


def runs(folder: Path, *, show_held_out: bool, of_set: int = 0) -> None:
    """Print how the logs of real runs are judged, by share and with each miss.

    ``of_set`` limits it to the labels with this ``set``, those without one are set 1.
    """
    catalogue = rules.load()
    labels = tomllib.loads((folder / "labels.toml").read_text("utf-8"))["run"]
    labels = [one for one in labels if of_set in {0, one.get("set", 1)}]
    for part in ("development", "held_out"):
        counts: dict[str, list[int]] = {what: [0, 0] for what in FIGURES}
        of_part = [
            (label, path)
            for label in labels
            for path in (folder / part).glob(f"{label['name']}.log*")
        ]
        if not of_part:
            continue
        for label, path in of_part:
            # As its owner sees it: a hang after it stood still, others at once.
            now = later(path, label.get("stood", 1))
            report = logs.examine([path], catalogue, now=now)
            told = [one.cause for one in report.causes][:1] or [""]
            for what, well in figures(label, report).items():
                counts[what][0] += well
                counts[what][1] += 1
                if not well and (part == "development" or show_held_out):
                    say(
                        f"missed {label['name']}, {what}: {label.get('cause', '')}"
                        f" ({label['outcome']}, {label.get('phase', '')}),"
                        f" told {told[0]} ({report.verdict}, {report.phase})"
                    )
        say(f"{part}: {len(of_part)} logs")
        for what, (right, every) in counts.items():
            if every:
                say(f"  {what:48}{right:4} of {every:3}  {right / every:.2f}")


FIGURES = (
    "cause right first",
    "silent failure's cause right first",
    "cause that is named is right",
    "hang recognised",
    "phase",
    "healthy or survived not called failed or hung",
    "running not called failed or hung",
    "running called running",
    "only numbers tell: not called healthy or running",
    "only numbers tell: and its cause right first",
    "only numbers tell: told, if as a note",
    "sound: without a note",
    "no known cause fits: none is named",
    "cause is known and none named: it is a guess",
    "ended in an error: called failed or unknown",
    "cause is among those told",
    "its cause first, or none where none fits",
    "cause told as certain is right",
    "cause told as likely is right",
)


def figures(label: dict[str, Any], report: LogReport) -> dict[str, bool]:
    """Which of FIGURES a log counts for, and whether it was judged right."""
    wanted = {label.get("cause", ""), *label.get("also", ())} - {""}
    named = report.causes[0].cause if report.causes else ""
    outcome, sound = label["outcome"], report.verdict not in {"failed", "hung"}
    found = {}
    if outcome == "failed":
        if not label.get("silent"):
            found[FIGURES[14]] = report.verdict in {"failed", "unknown"}
            causes = {one.cause for one in report.causes}
            if wanted:
                found[FIGURES[15]] = bool(wanted & causes)
            if wanted and not causes:
                found[FIGURES[13]] = bool(wanted.intersection(report.nearest))
        if wanted:
            found[FIGURES[1 if label.get("silent") else 0]] = named in wanted
        if not label.get("cause"):
            found[FIGURES[12]] = named in {"", *wanted}
        if not label.get("silent"):
            found[FIGURES[16]] = named in {label.get("cause", ""), *wanted}
        if named:
            found[FIGURES[2]] = named in wanted
            sure = report.causes[0].confidence == "certain"
            found[FIGURES[17 if sure else 18]] = named in wanted
    elif outcome == "hung":
        found[FIGURES[3]] = report.verdict == "hung"
    elif outcome == "silent":
        told = report.verdict not in {"healthy", "running"}
        accepted = {label["cause"], *label.get("also", ())}
        right = named in accepted or ("" in accepted and report.verdict == "failed")
        found |= {FIGURES[8]: told, FIGURES[9]: told and right}
        found[FIGURES[10]] = told or bool(report.notes)
    elif outcome == "running":
        found |= {FIGURES[6]: sound, FIGURES[7]: report.verdict == "running"}
    else:
        found[FIGURES[5]] = sound
    if outcome in {"healthy", "running"}:
        found[FIGURES[11]] = not report.notes
    if label.get("phase") and not label.get("silent"):
        open_to = {label["phase"], *label.get("also_phase", ())}
        found[FIGURES[4]] = report.phase in open_to
    return found


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
    parser.add_argument("--runs", action="store_true")
    parser.add_argument("--metrics-runs", action="store_true")
    parser.add_argument("--written", action="store_true")
    parser.add_argument("--show-held-out", action="store_true")
    parser.add_argument("--set", type=int, metavar="N", default=0)
    parser.add_argument("--speed", type=int, metavar="MIB", default=0)
    asked = parser.parse_args()
    folders = ("metrics_runs", "written_runs", "runs")
    asks = (asked.metrics_runs, asked.written, asked.runs)
    chosen = next((one for one, is_it in zip(folders, asks, strict=True) if is_it), "")
    if chosen:
        folder = Path(__file__).parent / chosen
        runs(folder, show_held_out=asked.show_held_out, of_set=asked.set)
    else:
        accuracy(asked.logs, missed_only=asked.missed_only)
    if asked.speed:
        speed(asked.logs, asked.speed)
