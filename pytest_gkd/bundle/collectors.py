"""What goes into a bundle, each kind by a collector of its own (see ``gathering``)."""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from pytest_gkd.bundle import log_extracts
from pytest_gkd.bundle.gathering import Collector, Missing, Part
from pytest_gkd.clock import monotonic
from pytest_gkd.diagnosis import catalogue, flight_records, log_sources, logs, own_rules
from pytest_gkd.files import json_text
from pytest_gkd.processes import gpus, host_summary, oom, procfs, stacks
from pytest_gkd.report import compare, render
from pytest_gkd.report.record import PAGE, REPORT, RUNS
from pytest_gkd.watch import flight_files
from pytest_gkd.watch.evidence import KERNELS

MOST_FILES = 400  # of a report's directory
MOST_LOGS = 64
MOST_RAY_LOGS = 16
MOST_MEMORY = 1 << 30  # for the pickles of flight records: a hostile one asks for more
SETTINGS = 4000  # characters of a run's settings
KTHREADD = 2  # the parent of the kernel's own threads
COLUMNS = "pid ppid state age_s rss_mib waits_in command"
COMMAND_S = 12.0
RAY_LOGS = Path("/tmp/ray/session_latest/logs")  # noqa: S108 - Ray's own default
_NOT_IN_NAMES = re.compile(r"[^\w.+-]+")


@dataclass(frozen=True)
class Asked:
    """What the user wants in the bundle: a report's directory, logs, live processes.

    ``wants_report`` says that the report is not merely the usual place of one.
    """

    report: Path
    wants_report: bool = False
    logs: tuple[Path, ...] = ()
    pids: tuple[int, ...] = ()
    rules: tuple[Path, ...] = ()
    limit_bytes: int = 16 << 20


def of(asked: Asked) -> list[Collector]:
    """All collectors for a request, and how long and how much each may take."""
    half, eighth = asked.limit_bytes // 2, asked.limit_bytes // 8
    share = half // max(1, min(len(asked.logs), MOST_LOGS))
    report = partial(report_parts, asked.report, 2 * eighth)
    found = [
        Collector("report", 20, 2 * eighth, report, is_named=asked.wants_report),
        Collector("configuration", 10, eighth // 4, partial(_configuration, asked)),
        Collector(
            "what was tried", 10, eighth // 4, partial(tried_parts, asked.report)
        ),
    ]
    if asked.logs:
        work = partial(_diagnosis, asked)
        found.append(Collector("diagnosis", 90, eighth // 2, work))
    for number, path in enumerate(asked.logs[:MOST_LOGS], 1):
        work = partial(_log, path, f"logs/{number:02}-{_named(path)}", share)
        found.append(Collector(str(path), 75, share, work, is_named=True))
    for pid in asked.pids:
        work = partial(stack_parts, pid)
        found.append(Collector(f"stacks of {pid}", 30, eighth, work, is_named=True))
    some = eighth // 4
    records = partial(flight_record_parts, 2 * some)
    return [
        *found,
        Collector("system", 20, some, _system),
        Collector("environment", 10, some, _environment),
        Collector("GPUs", 30, some, gpu_parts),
        Collector("Ray", 40, 2 * some, ray_parts),
        Collector("Ray's logs", 20, 2 * some, partial(_ray_logs, 2 * some)),
        Collector("flight records", 20, 2 * some, records, memory_bytes=MOST_MEMORY),
        Collector("kernel", 10, some, _kernel),
        Collector("processes", 15, some, _processes),
        Collector("network", 10, some, _network),
    ]


def _named(path: Path) -> str:
    """A file's name without anything that a shell or an archive would obey."""
    return _NOT_IN_NAMES.sub("_", path.name)[-80:].lstrip(".-") or "log"


# -- what was said -----------------------------------------------------------------


def report_parts(directory: Path, limit_bytes: int) -> Iterator[Part | Missing]:
    """Every text below a report's directory; no link is followed."""
    if not directory.is_dir():
        there = "is no directory" if directory.exists() else "does not exist"
        yield Missing(str(directory), f"{there}: no report of pytest --gkd-stages")
        return
    files = 0
    share = limit_bytes // 8
    for folder, folders, names in os.walk(directory):
        folders[:] = sorted(name for name in folders if name != RUNS)
        for name in sorted(names):
            path = Path(folder, name)
            files += 1
            if files > MOST_FILES:
                yield Missing(str(directory), f"files beyond the first {MOST_FILES}")
                return
            inside = path.relative_to(directory)
            shown = "/".join(_named(Path(part)) for part in inside.parts)
            if name.startswith(".") or name == PAGE:
                continue  # our marker, and the page made of report.json
            yield from log_extracts.extract(
                path, f"report/{shown}", share, 10, follow=False
            )
        for name in folders:
            path = Path(folder, name)
            if path.is_symlink():
                yield Missing(str(path), "is a link, which is not followed")


def _saved(directory: Path) -> dict[str, Any]:
    """A saved report; empty if there is none that can be read."""
    try:
        with log_extracts.opened(directory / REPORT, follow=False) as file:
            found = json.loads(file.read(32 << 20))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _configuration(asked: Asked) -> Iterator[Part | Missing]:
    """The job's own file, as the last run of the stages was given it."""
    settings = _saved(asked.report).get("settings")
    job = settings.get("job") if isinstance(settings, dict) else None
    given = job.get("script") if isinstance(job, dict) else None
    if isinstance(given, str) and given:
        path = Path(given)
        yield from log_extracts.extract(
            path, f"configuration/{_named(path)}", 1 << 19, 8
        )


def tried_parts(directory: Path) -> Iterator[Part | Missing]:
    """What changed since the runs before, and how each of them ended, with what."""
    if not (directory / REPORT).is_file():
        return
    last, before = compare.read(directory), compare.kept(directory)
    if not before:
        return
    yield Part("tried.txt", compare.text(compare.compare(last, before)) + "\n")
    for run in before:
        ended = ", ".join(
            f"{name} {one.get('outcome')}" for name, one in run.stages.items()
        )
        settings = json.dumps(run.data.get("settings"))[:SETTINGS]
        yield Part("tried.txt", f"\n{run.data.get('started')}: {ended}\n  {settings}\n")


def _log(path: Path, folder: str, limit_bytes: int) -> Iterator[Part | Missing]:
    if not path.is_dir():
        yield from log_extracts.extract(path, folder, limit_bytes, 60)
        return
    found = log_sources.find([path])
    yield from (Missing(str(path), text) for text in [*found.unreadable, *found.notes])
    files = [one.last for one in found.logs if isinstance(one.last, Path)]
    files += [part for one in found.logs for part in one.earlier]
    until = monotonic() + 60
    for one in files:
        left = max(1.0, until - monotonic())
        inside = one.relative_to(path) if one.is_relative_to(path) else Path(one.name)
        shown = "/".join(_named(Path(part)) for part in inside.parts)
        share = limit_bytes // len(files)
        yield from log_extracts.extract(one, f"{folder}/{shown}", share, left)


def _diagnosis(asked: Asked) -> Iterator[Part | Missing]:
    """What ``gkd diagnose`` says of the logs."""
    readable = [one for one in asked.logs if one.is_dir() or one.is_file()]
    if not readable:
        return
    rules = catalogue.load([*own_rules.installed(), *asked.rules])
    report = logs.examine(readable, rules)
    yield Part("diagnosis.txt", render.log_text(report) + "\n")
    yield Part("diagnosis.json", json_text(report.to_json()))


def stack_parts(pid: int) -> Iterator[Part | Missing]:
    """The stacks of a live process and those below it."""
    if not procfs.stat(pid):
        yield Missing(f"stacks of {pid}", "there is no such process")
        return
    with tempfile.TemporaryDirectory(prefix="gkd-bundle-") as made:
        place = Path(made).resolve()
        for one in stacks.collect(pid, place / "none", place, limit_s=20):
            yield Part(f"stacks/{one.pid}.txt", f"{one.command}\n{one.text}\n")


def flight_record_parts(limit_bytes: int) -> Iterator[Part | Missing]:
    """The records of collectives that torch or TorchComms has written, as JSON."""
    variables = (*flight_files.DUMPS, flight_files.TORCHCOMMS_DUMP)
    given = [os.environ[name] for name in variables if os.environ.get(name)]
    stems = [*given, *flight_files.default_stems(os.environ)]
    names = [
        name
        for stem in stems
        for name in sorted(glob.glob(f"{glob.escape(stem)}*"))[:MOST_LOGS]  # noqa: PTH207
    ]
    for name in names:
        path = Path(name)
        try:
            with log_extracts.opened(path) as file:
                age = time.time() - os.fstat(file.fileno()).st_mtime
                record = flight_records.read(file.read(flight_files.MOST_BYTES))
        except (OSError, flight_records.RecordError) as error:
            yield Missing(name, getattr(error, "strerror", None) or str(error))
            continue
        readable = flight_records.readable(record, limit_bytes // len(names))
        about = {**readable, "written_s_ago": round(age)}
        yield Part(f"flight-records/{_named(path)}.json", json_text(about))
    if not names:
        armed = "TORCH_NCCL_TRACE_BUFFER_SIZE=2000 and a timeout write them"
        yield Missing("flight records", f"none was written here ({armed})")


# -- the machine -------------------------------------------------------------------


def _system() -> Iterator[Part | Missing]:
    for line in host_summary.lines(with_gpus=False):
        if not line.startswith("variable "):  # see environment.txt
            yield Part("system.txt", line + "\n")


def _environment() -> Iterator[Part | Missing]:
    """The variables that matter to a job; of the others the names."""
    others = []
    for name, value in sorted(os.environ.items()):
        if host_summary.VARIABLES.fullmatch(name):
            yield Part("environment.txt", f"{name}={value}\n")
        else:
            others.append(name)
    yield Part("environment.txt", f"\nAlso set, values left out:\n{' '.join(others)}\n")


def gpu_parts() -> Iterator[Part | Missing]:
    for line in gpus.describe() or ["no NVIDIA driver answers"]:
        yield Part("gpu.txt", line + "\n")
    if shutil.which("nvidia-smi") is None:
        yield Missing("nvidia-smi", "is not installed")
        return
    for arguments in ([], ["topo", "-m"], ["nvlink", "--status"], ["-q"]):
        yield from _said("gpu.txt", ["nvidia-smi", *arguments])


def ray_parts() -> Iterator[Part | Missing]:
    """What Ray says of its nodes, tasks, actors and placement groups."""
    address = os.environ.get("RAY_ADDRESS", "")
    environ = dict(os.environ)
    for pid in sorted(procfs.table()):
        command = procfs.full_command(pid)
        if found := re.search(r"raylet.*--gcs-address=(\S+)", command):
            address = address or found[1]
            # What a cluster's token is told by; the rest is the job's own.
            own = procfs.environ(pid).items()
            environ |= {name: one for name, one in own if name.startswith("RAY_")}
    if not address:
        yield Missing("Ray", "no raylet runs here, and RAY_ADDRESS is not set")
        return
    beside = Path(sys.executable).with_name("ray")
    program = str(beside) if beside.exists() else shutil.which("ray")
    if program is None:
        yield Missing("Ray", f"no ray executable for the cluster at {address}")
        return
    environ["RAY_ADDRESS"] = address
    listed = ["--format=json", "--limit=500", "--timeout=10"]
    status = [*_said("ray.txt", [program, "status", "-v"], environ)]
    yield from status
    if any(isinstance(one, Missing) for one in status):
        return  # nothing answers
    kinds = ("nodes", "actors", "placement-groups", "tasks")
    commands = [[program, "list", kind, *listed] for kind in kinds]
    with ThreadPoolExecutor(len(commands)) as pool:
        for said in pool.map(lambda one: [*_said("ray.txt", one, environ)], commands):
            yield from said


def _ray_logs(limit_bytes: int) -> Iterator[Part | Missing]:
    if not RAY_LOGS.is_dir():
        return
    place = RAY_LOGS.resolve()
    paths = [one for one in place.iterdir() if one.suffix in (".out", ".err", ".log")]
    filled = [(one.stat().st_mtime, one) for one in paths if one.stat().st_size]
    newest = [one for _, one in sorted(filled, reverse=True)]
    if newest[MOST_RAY_LOGS:]:
        left = f"{len(newest) - MOST_RAY_LOGS} older logs are left out"
        yield Missing(str(RAY_LOGS), left)
    for one in newest[:MOST_RAY_LOGS]:
        share = limit_bytes // MOST_RAY_LOGS
        yield from log_extracts.extract(
            one, f"ray-logs/{_named(one)}", share, 5, follow=False
        )


def _kernel() -> Iterator[Part | Missing]:
    """The kernel's lines about memory, GPUs, links and disks."""
    try:
        os.close(os.open(oom.KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK))
    except OSError as error:
        hint = "a user who may read it: dmesg -T | tail -200"
        yield Missing("kernel", f"{oom.KERNEL_LOG}: {error.strerror} ({hint})")
        return
    found = oom.kernels_lines(KERNELS)
    said = found[-500:] or ["nothing of memory, GPUs, links or disks"]
    yield Part("kernel.txt", "\n".join(said) + "\n")


def _processes() -> Iterator[Part | Missing]:
    """This user's processes: what they run, wait in and use."""
    own, ticks = os.geteuid(), os.sysconf("SC_CLK_TCK")
    up_s = monotonic()
    yield Part("processes.txt", f"{COLUMNS}\n")
    for pid, here in sorted(procfs.table().items()):
        is_kernel = KTHREADD in (pid, here.ppid)
        if is_kernel or (own and procfs.user(pid) != own):
            continue
        rss = procfs.status_word(pid, "VmRSS") or "0"
        try:
            waits = Path(f"/proc/{pid}/wchan").read_text().strip()
        except OSError:
            waits = ""
        age = up_s - here.start / ticks
        waits = "-" if waits in ("", "0") else waits
        about = f"{here.state} {age:.0f} {int(rss) >> 10} {waits}"
        command = procfs.full_command(pid)[:1000]
        yield Part("processes.txt", f"{pid} {here.ppid} {about} {command}\n")


def _network() -> Iterator[Part | Missing]:
    """The interfaces with their addresses and errors, and the InfiniBand ports."""
    addresses, counts = psutil.net_if_addrs(), psutil.net_io_counters(pernic=True)
    for name, about in psutil.net_if_stats().items():
        state = f"{'up' if about.isup else 'down'} {about.speed} Mb/s mtu {about.mtu}"
        own = " ".join(one.address for one in addresses.get(name, ()))
        used = counts.get(name)
        wrong = (
            f"errors {used.errin}+{used.errout} dropped {used.dropin}" if used else ""
        )
        yield Part("network.txt", f"{name} {state} {own} {wrong}\n")
    for path in sorted(Path("/sys/class/infiniband").glob("*/ports/*/state")):
        rate = path.with_name("rate").read_text().strip()
        said = f"{path.parts[-4]} port {path.parts[-2]}: {path.read_text().strip()}"
        yield Part("network.txt", f"{said}, {rate}\n")


def _said(
    file: str, command: Sequence[str], environ: dict[str, str] | None = None
) -> Iterator[Part | Missing]:
    """What a command prints, within ``COMMAND_S`` seconds."""
    shown = " ".join([Path(command[0]).name, *command[1:]])
    try:
        done = subprocess.run(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=COMMAND_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        yield Missing(shown, f"no answer within {COMMAND_S:g} s")
        return
    except OSError as error:
        yield Missing(shown, error.strerror or str(error))
        return
    if done.returncode:
        yield Missing(
            shown, f"exit status {done.returncode}; what it said is in {file}"
        )
    yield Part(file, f"$ {shown}\n{done.stdout.decode('utf-8', 'replace')}\n")
