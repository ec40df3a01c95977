"""How long a green pass of all stages takes, against a bare engine start.

    python benchmarks/green_pass.py [--warm N] [--cold N] [--mode inproc|multi]

Pairs of the two run in turn, every second pair in the other order: ``--warm`` pairs
after one that only fills the page cache, then ``--cold`` pairs with the page cache
dropped before each run. Printed are the median, the least and the most: of the seconds
of wall time, of the processor time (of all processes of a run that it waited for), and
of the ratios within the pairs; the medians of what the stages spent it on; how soon a
missing train file is told of, and how long pytest alone takes. ``inproc`` compares the
colocated layout with an in-process engine, ``multi`` the split layout with vLLM's
default multi-process engine. Run it on a machine that does nothing else.

What a stage spends: ``imports`` as its import clock has it (to half a second, with
those of its processes, and in the environment stage with those of the engine's lane,
which it waits for while Ray starts), ``engine`` the engine's start without them,
``work`` all the rest. The two lanes run at the same time: a column has no sum.

Python keeps its byte code, as that of an installed package is kept: a checkout without
it, under PYTHONDONTWRITEBYTECODE, is compiled anew by every process of a run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DROP = Path("/proc/sys/vm/drop_caches")
PARTS = ("imports", "engine", "work")
MISSING_ROUNDS = 5
NAMES = {"stages": "all stages", "bare": "bare start"}


@dataclass(frozen=True)
class Run:
    """One run: seconds of wall and processor time, and by stage those of its parts."""

    wall_s: float
    cpu_s: float
    parts_s: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def timed(command: list[str], environment: Mapping[str, str]) -> tuple[Run, str]:
    """A command that must succeed, and what it prints."""
    with tempfile.TemporaryFile() as output:
        started = time.perf_counter()
        process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "", **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        _, status, used = os.wait4(process.pid, 0)
        spent = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        said = output.read().decode("utf-8", "replace")
    if process.returncode:
        sys.stderr.write(said)
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return Run(spent, used.ru_utime + used.ru_stime), said


class Contest:
    """The two commands, and a directory for the model and the reports."""

    def __init__(self, directory: Path, mode: str) -> None:
        from pytest_gkd.options import Settings
        from pytest_gkd.workload.models.inputs import resolve

        model = str(resolve(Settings(), directory).student)
        layout = "colocated" if mode == "inproc" else "split"
        self._report = directory / "report"
        self._multi = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(mode == "multi"))}
        self._bare = [sys.executable, str(HERE / "bare_start.py"), model]
        self.stages = [sys.executable, "-m", "pytest", "--gkd-stages"]
        self.stages += [f"--gkd-layout={layout}", f"--gkd-report={self._report}"]

    def run(self, name: str) -> Run:
        """One of them, once."""
        if name == "bare":
            run, said = timed(self._bare, self._multi)
            parts = json.loads(said.strip().splitlines()[-1])
            return Run(run.wall_s, run.cpu_s, {"bare start": parts})
        run, _ = timed(self.stages, {})
        report = json.loads((self._report / "report.json").read_text())
        return Run(run.wall_s, run.cpu_s, spending(report["stages"], run.wall_s))

    def pairs(self, count: int, before: Callable[[], None]) -> Iterator[dict[str, Run]]:
        """Both in turn; ``before`` is called ahead of each run."""
        for number in range(count):
            pair = {}
            for name in sorted(NAMES, reverse=number % 2 == 1):
                before()
                pair[name] = self.run(name)
            yield pair


def spending(
    stages: Iterable[Mapping[str, Any]], wall_s: float
) -> dict[str, dict[str, float]]:
    """By stage, the seconds of its parts; and what pytest takes around its lanes."""
    found: dict[str, dict[str, float]] = {}
    lanes: dict[str, float] = {}
    for stage in stages:
        total_s, facts = stage["duration_s"], stage["facts"]
        imports_s = min(total_s, facts.get("extra_s", {}).get("imports", 0.0))
        own_s = total_s - imports_s
        starts = stage["name"] == "vllm"
        engine_s = min(own_s, facts["engine_start_s"]) if starts else 0.0
        parts = (imports_s, engine_s, own_s - engine_s)
        found[stage["name"]] = dict(zip(PARTS, parts, strict=True))
        lanes[stage["lane"]] = lanes.get(stage["lane"], 0.0) + total_s
    around_s = wall_s - max(lanes.values())
    return {**found, "around them": {"imports": 0.0, "engine": 0.0, "work": around_s}}


def cache_dropper() -> tuple[Callable[[], None], str]:
    """What empties the page cache, and in words how."""
    try:
        DROP.write_text("1\n")
    except OSError:
        return forget_files, "with the environment's files put out of the page cache"

    def drop() -> None:
        os.sync()
        DROP.write_text("1\n")

    return drop, "with the page cache dropped before each run"


def forget_files() -> None:
    """Ask the kernel to forget all files of this Python and its packages.

    What another process has mapped stays (posix_fadvise(2)).
    """
    for root in {sys.prefix, sys.base_prefix}:
        for path in Path(root).rglob("*"):
            with contextlib.suppress(OSError):
                if not path.is_file():
                    continue
                number = os.open(path, os.O_RDONLY)
                os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(number)


def spread(values: Iterable[float], digits: int = 1) -> str:
    """Median, least and most."""
    ordered = sorted(values)
    middle, low, high = statistics.median(ordered), ordered[0], ordered[-1]
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def tell(title: str, pairs: list[dict[str, Run]]) -> None:
    """Print what a series of pairs came to."""
    print(f"\n{title}, {len(pairs)} pairs: median (least to most)")
    for name, words in NAMES.items():
        runs = [pair[name] for pair in pairs]
        wall = spread(run.wall_s for run in runs)
        cpu = spread(run.cpu_s for run in runs)
        print(f"  {words:11} {wall:21} s, processor {cpu} s")
    ratios = [pair["stages"].wall_s / pair["bare"].wall_s for pair in pairs]
    print(f"  {'ratio':11} {spread(ratios, 2)}")
    print(f"  {'seconds in':13} {' '.join(f'{part:>7}' for part in PARTS)}")
    for name in NAMES:
        runs = [pair[name] for pair in pairs]
        for stage in runs[0].parts_s:
            medians = (
                statistics.median(run.parts_s[stage][part] for run in runs)
                for part in PARTS
            )
            print(f"  {stage:13} {' '.join(f'{s:7.1f}' for s in medians)}")


def told_after(command: list[str], line: str) -> float:
    """Seconds from a command's start to a line that it prints; then it is ended."""
    started = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    said = ""
    for text in process.stdout:
        said += text
        if re.match(line, text):
            spent = time.perf_counter() - started
            process.send_signal(signal.SIGINT)
            process.communicate()
            return spent
    raise SystemExit(f"no line {line!r} in:\n{said}")


def tell_missing_file(contest: Contest, directory: Path) -> None:
    """Print how soon a train file that is not there is told of."""
    missing = [*contest.stages, f"--gkd-train-files={directory}/missing.jsonl"]
    empty = directory / "test_nothing.py"
    empty.write_text("def test_nothing(): pass\n")
    alone = [sys.executable, "-m", "pytest", "-q", "-p", "no:gkd", str(empty)]
    told = [told_after(missing, r"data +failed") for _ in range(MISSING_ROUNDS)]
    pytest = [timed(alone, {})[0].wall_s for _ in range(MISSING_ROUNDS)]
    print(f"\na missing train file is told after {spread(told, 2)} s")
    print(f"pytest alone, with one empty test: {spread(pytest, 2)} s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--warm", type=int, default=8, help="pairs (8)")
    parser.add_argument("--cold", type=int, default=4, help="pairs (4)")
    parser.add_argument("--mode", choices=("inproc", "multi"), default="inproc")
    asked = parser.parse_args()
    load, cpus = os.getloadavg()[0], len(os.sched_getaffinity(0))
    print(f"{cpus} CPUs, load {load:.1f} before, nice {os.nice(0)}, {asked.mode}")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        contest = Contest(directory, asked.mode)
        if asked.warm:
            list(contest.pairs(1, lambda: None))
            tell("warm", list(contest.pairs(asked.warm, lambda: None)))
            tell_missing_file(contest, directory)
        if asked.cold:
            drop, how = cache_dropper()
            tell(f"cold, {how}", list(contest.pairs(asked.cold, drop)))


if __name__ == "__main__":
    main()
