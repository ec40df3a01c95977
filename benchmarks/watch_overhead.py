"""What ``gkd watch`` costs a training, and how much memory it takes.

    python benchmarks/watch_overhead.py steps [--pairs N] [--windows N] [--hidden N]
                                              [--cpus N]
    python benchmarks/watch_overhead.py memory [--gigabytes N] [--hours N]

``steps``: a small training by tests/runs/programs/loop.py, whose steps it times itself
(milliseconds, to a tenth). First whole runs, alternating with and without the watcher,
every second pair in the other order; then one run under the watcher, which is stopped
and let go on in turn: those pairs are seconds apart, and a machine whose load changes
spoils them less, but the relay of the output works in both. The ratios are printed with
their mean and its 95 % interval (normal, of the logarithms), median and quartiles; what
a GPU would do is not timed here. ``--hidden`` sets how long a step takes; with
``--cpus=1`` training, watcher and relay share a core, the worst case of a job that
leaves none free.

``memory``: first so many GB that a command prints as fast as it can, through the
watcher, with the most that each of its processes ever held (VmHWM, proc_pid_status(5));
then so many hours, a look each second, by a clock that is moved in this process: the
same watch over a process that runs, fed with as much output.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil

PROGRAMS = Path(__file__).resolve().parent.parent / "tests/runs/programs"
WATCH = (sys.executable, "-m", "pytest_gkd", "watch")
STEP = re.compile(rb"elapsed time per iteration \(ms\): ([\d.]+)")
SKIPPED = 20  # the first steps of a run
WINDOW_S, SETTLE_S, CPU_S = 3.0, 0.5, 30.0
LINE = b"step: 1234 loss: 0.5432 grad_norm: 0.123 lr: 0.0001 tokens/s: 12345.6\n"
NOISE = b"INFO 11-21 10:00:00 [worker.py:123] received a batch of 128 rows, 42 wait\n"


def training(folder: Path, steps: int, hidden: int) -> list[str]:
    """A command that trains so many steps, each longer the more are hidden."""
    shutil.copytree(PROGRAMS, folder, dirs_exist_ok=True)
    rows = '{"prompt": [{"content": "What is a rank, and why does it wait?"}]}\n' * 64
    (folder / "prompts.jsonl").write_text(rows)
    return [
        *(sys.executable, "loop.py", "--style", "megatron", "--pace", "0"),
        *(f"--steps={steps}", f"--hidden={hidden}", "--save-interval=1000000000"),
    ]


def start(command: list[str], folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def step_times(command: list[str], folder: Path) -> list[float]:
    """Milliseconds of each step of a whole run, without the first."""
    process = start(command, folder)
    out, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{command} ended with {process.returncode}:\n{out.decode()}")
    return [float(one) for one in STEP.findall(out)][SKIPPED:]


def whole_runs(pairs: int, steps: int, hidden: int, folder: Path) -> Iterator[float]:
    """The ratios of the mean step with the watcher to that without."""
    alone = training(folder, SKIPPED + steps, hidden)
    commands = {"alone": alone, "watched": [*WATCH, "--", *alone]}
    for number in range(pairs):
        found = {
            name: statistics.mean(step_times(commands[name], folder))
            for name in sorted(commands, reverse=number % 2 == 1)
        }
        yield found["watched"] / found["alone"]


def windows(pairs: int, hidden: int, folder: Path) -> Iterator[float]:
    """The ratios of the mean step while the watcher runs to that while it does not."""
    process = start([*WATCH, "--", *training(folder, 10**7, hidden)], folder)
    assert process.stdout is not None
    try:
        for _ in range(SKIPPED):
            process.stdout.readline()
        before, begun = cpu_of(process.pid), time.monotonic()
        lines = sum(1 for _ in _window(process, CPU_S))
        spent = time.monotonic() - begun
        used = [
            now - then for now, then in zip(cpu_of(process.pid), before, strict=True)
        ]
        watcher, relay = (f"{100 * one / spent:.2f}" for one in used)
        print(
            f"{lines / spent:.1f} steps a second; the watcher uses {watcher} % of a "
            f"core, its relay {relay} %",
            flush=True,
        )
        for number in range(pairs):
            found = {}
            for name in ("SIGCONT", "SIGSTOP")[:: -1 if number % 2 else 1]:
                process.send_signal(getattr(signal, name))
                found[name] = statistics.mean(_window(process, WINDOW_S))
            yield found["SIGCONT"] / found["SIGSTOP"]
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.communicate()


def cpu_of(pid: int) -> tuple[float, float]:
    """Seconds of CPU of the watcher and of its relay so far."""
    family = psutil.Process(pid)
    relay = next(one for one in family.children() if "relay" in str(one.cmdline()))
    watcher_s, relay_s = (sum(one.cpu_times()[:2]) for one in (family, relay))
    return watcher_s, relay_s


def _window(process: subprocess.Popen[bytes], seconds: float) -> Iterator[float]:
    assert process.stdout is not None
    begun = time.monotonic()
    while (spent := time.monotonic() - begun) < seconds + SETTLE_S:
        found = STEP.search(process.stdout.readline())
        if found and spent > SETTLE_S:
            yield float(found[1])


def tell(title: str, ratios: Iterator[float]) -> None:
    found = sorted(ratios)
    low, middle, high = statistics.quantiles(found, n=4)
    logs = [math.log(one) for one in found]
    mean, error = statistics.mean(logs), statistics.stdev(logs) / len(logs) ** 0.5
    least, most = (math.exp(mean + sign * 1.96 * error) for sign in (-1, 1))
    print(
        f"{title}, {len(found)} pairs: a step takes {math.exp(mean):.4f} of what it "
        f"takes without (95 %: {least:.4f} to {most:.4f}; median {middle:.4f}, "
        f"quartiles {low:.4f} to {high:.4f}, all {found[0]:.4f} to {found[-1]:.4f})",
        flush=True,
    )


def printed(gigabytes: float, folder: Path) -> None:
    """Print the most memory of each of the watcher's processes, and how fast it was."""
    text = (NOISE * 99 + LINE) * 100
    program = (
        "import os\n"
        f"text = {text!r}\n"
        f"for _ in range({int(gigabytes * 1e9 / len(text))}):\n"
        "    while os.write(1, text) < len(text): pass\n"
    )
    (folder / "printing.py").write_text(program)
    begun = time.monotonic()
    process = subprocess.Popen(
        [*WATCH, f"--dir={folder / 'kept'}", "--", sys.executable, "printing.py"],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    most: dict[str, float] = {}
    while process.poll() is None:
        with contextlib.suppress(psutil.Error):
            family = psutil.Process(process.pid)
            for one in [family, *family.children(recursive=True)]:
                if "printing.py" in one.cmdline()[-1:] and "watch" not in one.cmdline():
                    continue
                name = "watcher" if one.pid == process.pid else "its other processes"
                most[name] = max(most.get(name, 0.0), high_water_mb(one.pid))
        time.sleep(0.2)
    if process.returncode:
        raise SystemExit(f"the watcher ended with {process.returncode}")
    spent = time.monotonic() - begun
    kept = sum(one.stat().st_size for one in (folder / "kept").rglob("*.log"))
    told = ", ".join(f"{name} {mb:.0f} MB" for name, mb in most.items())
    print(
        f"{gigabytes:g} GB printed, {gigabytes * 1000 / spent:.0f} MB/s, "
        f"{kept / 1e9:.2f} GB kept; at most: {told}",
        flush=True,
    )


def high_water_mb(pid: int) -> float:
    """The most memory that a process ever held, in MB; 0 once it has ended."""
    with contextlib.suppress(OSError, TypeError):
        status = Path(f"/proc/{pid}/status").read_text()
        found = re.search(r"VmHWM:\s+(\d+) kB", status)
        return int(found[1]) / 1000 if found else 0.0
    return 0.0


def moved_clock(hours: float, gigabytes: float, folder: Path) -> None:
    """Print the memory of a watch by the hour, which looks at each second of them."""
    import pytest_gkd.clock

    now = [1000.0]
    pytest_gkd.clock.monotonic = partial(now.__getitem__, 0)
    # Only now: they take the clock as it is when they are imported.
    from pytest_gkd.watch import arguments, samples, sampling, scope, screen, watcher

    total, said_at = 0, now[0]
    job = [subprocess.Popen(["sleep", "1000000"]) for _ in range(8)]
    sampler = sampling.Sampler(
        scope.Scope(lambda _: [one.pid for one in job]), lambda: (total, said_at)
    )
    watch = watcher.Watch(
        arguments.Asked(command=("train",), status=False),
        folder / "watch",
        screen.OwnScreen(status=False),
        sampler,
        samples.Usual(),
    )
    own, seconds = psutil.Process(), int(hours * 3600)
    noise = NOISE * int(gigabytes * 1e9 / seconds / len(NOISE))
    held = []
    try:
        for second in range(seconds):
            now[0] += 1.0
            data = noise + LINE.replace(b"1234", b"%d" % second)
            total, said_at = total + len(data), now[0]
            watch.tick(data)
            if second % 3600 == 3599:
                held.append(own.memory_info().rss / 1e6)
    finally:
        for one in job:
            one.kill()
            one.wait()
    print(
        f"{hours:g} simulated hours, {seconds} looks, {total / 1e9:.1f} GB of output: "
        f"{held[0]:.0f} MB after an hour, {held[-1]:.0f} MB at the end, never more "
        f"than {max(*held, high_water_mb(own.pid)):.0f} MB",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    steps = kinds.add_parser("steps")
    steps.add_argument("--pairs", type=int, default=8, help="of whole runs (8)")
    steps.add_argument("--windows", type=int, default=20, help="pairs of seconds (20)")
    steps.add_argument(
        "--steps", type=int, default=380, help="timed in each whole run (380)"
    )
    steps.add_argument(
        "--hidden", type=int, default=128, help="about 11 ms a step (128)"
    )
    steps.add_argument("--cpus", type=int, default=0, help="only so many (all)")
    memory = kinds.add_parser("memory")
    memory.add_argument("--gigabytes", type=float, default=10)
    memory.add_argument("--hours", type=float, default=24)
    asked = parser.parse_args()
    if asked.kind == "steps" and asked.cpus:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: asked.cpus])
    load, cpus = os.getloadavg()[0], len(os.sched_getaffinity(0))
    print(f"{cpus} CPUs, load {load:.1f} before", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if asked.kind == "steps":
            if asked.pairs:
                runs = whole_runs(asked.pairs, asked.steps, asked.hidden, folder)
                tell("whole runs", runs)
            if asked.windows:
                tell(
                    "the watcher stopped", windows(asked.windows, asked.hidden, folder)
                )
        else:
            printed(asked.gigabytes, folder)
            moved_clock(asked.hours, asked.gigabytes, folder)


if __name__ == "__main__":
    main()
