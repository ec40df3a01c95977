"""Every fault that can be injected is found, named, ended and cleaned up after.

The real stages run in real processes, once per fault: ``make matrix``. What happened,
and how long after the fault, goes to ``.gkd/matrix/``.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_gkd import fault_specs
from pytest_gkd.fault_specs import FaultSpec
from pytest_gkd.processes import gpus, host_capabilities

RESULTS = Path(__file__).parent.parent / ".gkd/matrix"
MARK = "GKD_MATRIX_RUN"
LABEL = "gkd_injected"
SHM = Path("/dev/shm")
# No run of one fault may take longer; the budgets in it are far below.
SLOW = "GKD_MATRIX_SLOW" in os.environ  # make matrix-slow
LIMIT_S = 480 if SLOW else 240
CACHES = Path("/proc/sys/vm/drop_caches")
DEFAULT_BUDGET_S = 150


class Run:
    """One run of the stages with one fault in it."""

    def __init__(self, fault: FaultSpec, base: Path) -> None:
        self.mark = uuid.uuid4().hex
        self.base = base
        self.temporary = base / "t"
        self.temporary.mkdir()
        self.shm_before = {path.name for path in SHM.iterdir()}
        stages = [*fault.also_runs, fault.stage]
        budget_s = fault.budget_s or DEFAULT_BUDGET_S
        # This may itself run in a worker of pytest-xdist; the run must not think so.
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("PYTEST_")
        }
        started = time.monotonic()
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "pytest",
                "-p",
                "no:cacheprovider",
                f"--gkd-stages={','.join(stages)}",
                f"--gkd-inject={fault.name}",
                f"--gkd-timeout={fault.stage}={budget_s}",
                f"--gkd-report={base / 'r'}",
                f"--junitxml={base / 'junit.xml'}",
            ],
            cwd=base,
            env=environment
            | {MARK: self.mark, "LANGUAGE": "en", "TMPDIR": str(self.temporary)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            # A job in the background of a shell has it ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        try:
            self.out, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            self.out, _ = process.communicate()
            pytest.fail(f"the run did not end within {LIMIT_S} s:\n{self.out}")
        self.code = process.returncode
        self.seconds = time.monotonic() - started
        self.report: dict[str, Any] = json.loads((base / "r/report.json").read_text())

    def stage(self, name: str) -> dict[str, Any]:
        return next(s for s in self.report["stages"] if s["name"] == name)

    def living(self) -> list[str]:
        """Processes of the run that are still there, by pid and command."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if self.mark.encode() in (entry / "environ").read_bytes():
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                    found.append(f"{entry.name} {state} {command.decode()}")
            except (OSError, ValueError):
                continue  # it has ended, or is no process, or not ours to read
        return found

    def shared_memory(self) -> list[str]:
        """Segments that came with the run and that no process holds any more.

        One of what runs beside this may be seen before it is mapped or removed.
        """
        left, until = self._unmapped(), time.monotonic() + 30
        while left and time.monotonic() < until:
            time.sleep(0.2)
            left &= self._unmapped()
        return sorted(left)

    def _unmapped(self) -> set[str]:
        new = {path.name for path in SHM.iterdir()} - self.shm_before
        held = set()
        for maps in Path("/proc").glob("[0-9]*/maps"):
            try:
                text = maps.read_text()
            except OSError:
                continue
            held |= {name for name in new if f"{SHM}/{name}" in text}
        return new - held


def problems(fault: FaultSpec, run: Run) -> Iterator[str]:
    """What is not as the fault's entry says it must be."""
    stage = run.stage(fault.stage)
    cause = (stage["diagnosis"] or {}).get("cause")
    if stage["outcome"] != fault.outcome:
        yield f"outcome {stage['outcome']}, expected {fault.outcome}"
    if cause not in (fault.causes or (None,)):
        yield f"cause {cause}, expected {' or '.join(fault.causes) or 'none'}"
    told = run.out if fault.outcome == "passed" else stage["message"]
    if fault.says not in told:
        yield f"the message is {stage['message']!r}, expected {fault.says!r} in it"
    for name in fault.also_runs:
        if run.stage(name)["outcome"] != "passed":
            yield f"stage {name}: {run.stage(name)['outcome']}, expected passed"
    given = [note["id"] for note in stage["facts"].get("notes", [])]
    for note in fault.notes:
        if note not in given:
            yield f"no note {note}, only {', '.join(given) or 'none'}"
    if run.code != fault.exit_code:
        yield f"exit code {run.code}, expected {fault.exit_code}"
    if run.report["injected"]["fault"] != fault.name or "INJECTED" not in run.out:
        yield "the report or the terminal does not say that a fault was injected"
    if not run.report["ended"]:
        yield "the report has no end"
    junit = ET.parse(run.base / "junit.xml").getroot()
    if not list(junit.iter("testcase")):
        yield "the JUnit file names no test"
    told = [p.get("value") for p in junit.iter("property") if p.get("name") == LABEL]
    # An interrupted stage has no report, so that JUnit cannot tell of it either.
    if fault.outcome != "skipped" and told != [fault.name]:
        yield f"the JUnit file says {told} of what was injected"
    for line in run.living():
        yield f"left running: {line}"
    for name in run.shared_memory():
        yield f"left in {SHM}: {name}"
    for path in run.temporary.iterdir():
        if path.name.startswith("pytest-of-"):
            continue  # pytest's own; it keeps the last three
        yield f"left in the temporary directory: {path.name}"


def wanting(fault: FaultSpec) -> str:
    """What this machine lacks for the fault, empty for nothing."""
    if len(gpus.usable().cards) < fault.gpus:
        return f"needs {fault.gpus} GPU(s)"
    if "shared-gpu" in fault.needs and gpus.usable().exclusive:
        return "needs GPUs that take more than one process"
    if "cpu" in fault.needs and gpus.usable().cards:
        return "needs a machine without a GPU"
    if "mounts" in fault.needs and not host_capabilities.may_mount():
        return "needs the right to mount"
    return ""


@pytest.fixture
def base() -> Iterator[Path]:
    # Short: UNIX sockets lie below it.
    path = Path(tempfile.mkdtemp(prefix="gm"))
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize("name", list(fault_specs.load()))
def test_fault(name: str, base: Path) -> None:
    fault = fault_specs.find(name)
    if lack := wanting(fault):
        pytest.skip(lack)
    if SLOW and os.access(CACHES, os.W_OK):
        CACHES.write_text("3")
    run = Run(fault, base)
    stage = run.stage(fault.stage)
    record(
        name,
        {
            "outcome": stage["outcome"],
            "cause": (stage["diagnosis"] or {}).get("cause"),
            "verdict_after_s": stage["verdict_after_s"],
            "run_s": round(run.seconds, 1),
            "message": stage["message"],
        },
    )
    wrong = list(problems(fault, run))
    assert not wrong, "\n".join([*wrong, "", run.out[-6000:]])


def record(name: str, entry: dict[str, Any]) -> None:
    """Keep what was measured, for the table in docs/faults.md (see keep.py)."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"fault": name, **entry}, indent=1)
    (RESULTS / f"{name.replace(':', '.')}.json").write_text(text + "\n")
