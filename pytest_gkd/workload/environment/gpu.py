"""Finds the GPUs, who uses them, and what torch was built for."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from pytest_gkd.clock import monotonic

# Drivers before R510 do not know the last one.
GPU_FIELDS = "index,uuid,name,driver_version,memory.total,memory.used,compute_cap"
UNKNOWN_FIELD = "not a valid field to query"
APP_FIELDS = "gpu_uuid,pid,used_memory"


@dataclass(frozen=True)
class Gpu:
    """One GPU as nvidia-smi lists it; memory in MiB; ``capability`` like ``9.0``."""

    index: int
    uuid: str
    name: str
    driver: str
    total_mib: int
    used_mib: int
    capability: str = ""


@dataclass(frozen=True)
class GpuProcess:
    """One process that holds GPU memory (MiB; 0 if the driver does not report it)."""

    gpu_uuid: str
    pid: int
    used_mib: int
    user: str = ""
    name: str = ""


@dataclass(frozen=True)
class TorchBuild:
    """What torch was built for and whether its CUDA initializes here.

    ``archs`` are such as ``sm_90`` and ``compute_90``; ``complaints`` are warnings that
    torch gave while it looked for devices.
    """

    version: str
    cuda: str | None = None
    hip: str | None = None
    archs: tuple[str, ...] = ()
    available: bool = False
    devices: int = 0
    complaints: tuple[str, ...] = ()


@dataclass(frozen=True)
class Machine:
    """What nvidia-smi printed; ``error`` if it exists but failed."""

    gpus: tuple[Gpu, ...] = ()
    processes: tuple[GpuProcess, ...] = ()
    error: str = ""
    driver_loaded: bool = False


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """The answer to ``--query-gpu=GPU_FIELDS --format=csv,noheader,nounits``."""
    return tuple(
        Gpu(
            int(index), uuid, name, driver, _mib(total), _mib(used), "".join(capability)
        )
        for index, uuid, name, driver, total, used, *capability in _rows(text, 6, 7)
        if index.isdigit()
    )


def parse_processes(text: str) -> tuple[GpuProcess, ...]:
    """The answer to ``--query-compute-apps=APP_FIELDS``."""
    return tuple(
        GpuProcess(uuid, int(pid), _mib(used))
        for uuid, pid, used in _rows(text, 3)
        if pid.isdigit()
    )


def _rows(text: str, *lengths: int) -> Iterator[list[str]]:
    """The cells of each line with the expected number of them; other lines are
    messages."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) in lengths:
            yield cells


def _mib(text: str) -> int:
    """Drivers print ``[N/A]`` or ``[Not Supported]`` for what they cannot report."""
    return int(text) if text.isdigit() else 0


class NvidiaSmi:
    """nvidia-smi, started early and read late: it takes 50 ms to several seconds.

    A child process, because a broken driver can block a call into it forever.
    """

    def __init__(self) -> None:
        path = shutil.which("nvidia-smi")
        older = GPU_FIELDS.rpartition(",")[0]
        queries = (
            f"--query-gpu={GPU_FIELDS}",
            f"--query-compute-apps={APP_FIELDS}",
            f"--query-gpu={older}",
        )
        self._calls = [
            subprocess.Popen(
                [path, query, "--format=csv,noheader,nounits"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            for query in queries
            if path
        ]

    def read(self, timeout_s: float) -> Machine:
        """Its output, after waiting at most ``timeout_s`` in total."""
        machine = Machine(driver_loaded=Path("/proc/driver/nvidia/version").exists())
        outputs = []
        until = monotonic() + timeout_s
        for call in self._calls:
            try:
                output, _ = call.communicate(timeout=max(0.0, until - monotonic()))
            except subprocess.TimeoutExpired:
                self.stop()
                error = f"nvidia-smi gave no answer in {timeout_s:.1f} s"
                return replace(machine, error=error)
            if call.returncode != 0 and UNKNOWN_FIELD not in output:
                error = " ".join(output.split()) or f"exit status {call.returncode}"
                return replace(machine, error=error)
            outputs.append(output)
        if not outputs:
            return machine
        listed = parse_gpus(outputs[0]) or parse_gpus(outputs[2])
        processes = tuple(map(_named, parse_processes(outputs[1])))
        return replace(machine, gpus=listed, processes=processes)

    def stop(self) -> None:
        """Kill it; one stuck in the driver is left to the kernel."""
        for call in self._calls:
            if call.poll() is None:
                call.kill()


def _named(process: GpuProcess) -> GpuProcess:
    try:
        known = psutil.Process(process.pid)
        return replace(process, user=known.username(), name=known.name())
    except psutil.Error:
        # It belongs to another container, or has just ended.
        return process


def run_pids() -> frozenset[int]:
    """The processes of this run: everything below the outermost pytest above us."""
    me = psutil.Process()
    ours = [one for one in me.parents() if "pytest" in " ".join(_command(one))]
    top = [me, *ours][-1]
    return frozenset({top.pid, *(child.pid for child in top.children(recursive=True))})


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def gpu_facts(machine: Machine) -> dict[str, Any]:
    """The GPUs and the driver, for the report."""
    return {
        "driver": machine.gpus[0].driver if machine.gpus else None,
        "gpus": [
            {
                "index": gpu.index,
                "name": gpu.name,
                "compute_capability": gpu.capability,
                "memory_mib": gpu.total_mib,
                "used_mib": gpu.used_mib,
            }
            for gpu in machine.gpus
        ],
    }
