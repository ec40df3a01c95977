"""Machines with GPUs as NVML and nvidia-smi show them, replayed where there is none."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "machines"
needs_compiler = pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")
H100, A100, T4, V100 = "9 0", "8 0", "7 5", "7 0"


@dataclass(frozen=True)
class Recorded:
    """A machine: a line for each thing that machines/nvml.c knows."""

    driver: str
    gpus: tuple[str, ...] = ()
    more: tuple[str, ...] = ()

    def lines(self) -> str:
        head = [f"driver {self.driver}"] if self.driver else []
        gpus = [f"gpu {line}" for line in self.gpus]
        return "\n".join([*head, *gpus, *self.more, ""])


def gpu(number: int, what: str, capability: str, **changes: int) -> str:
    """A line of ``machines/nvml.c``; ``mig`` is -1 for a GPU that knows no MIG."""
    told = {"total": 81559, "free": 80900, "percent": 0, "mode": 0, "mig": 0, **changes}
    memory = f"{told['total']} {told['free']}"
    rest = f"{told['percent']} {told['mode']} {told['mig']}"
    return f"GPU-{number:08d}-aaaa {memory} {capability} {rest} {what}"


ONE_H100 = Recorded("580.95.05", (gpu(0, "NVIDIA H100 80GB HBM3", H100),))
EIGHT_H100 = Recorded(
    "580.95.05", tuple(gpu(n, "NVIDIA H100 80GB HBM3", H100) for n in range(8))
)
ONE_T4 = Recorded(
    "550.54.15", (gpu(0, "Tesla T4", T4, total=15360, free=15000, mig=-1),)
)
BUSY = Recorded(
    "580.95.05",
    (gpu(0, "NVIDIA A100-SXM4-80GB", A100, percent=100, free=2000),),
    ("process 0 1 97",),
)
EXCLUSIVE = Recorded("535.129.03", (gpu(0, "NVIDIA A100-SXM4-80GB", A100, mode=3),))
MIG = Recorded(
    "535.129.03",
    (
        gpu(0, "NVIDIA A100-SXM4-80GB", A100, mig=1),
        gpu(1, "NVIDIA A100-SXM4-80GB", A100),
    ),
    ("mig 0 MIG-11111111-aaaa", "mig 0 MIG-22222222-aaaa"),
)
MIG_R570 = dataclasses.replace(MIG, driver="570.124.06")
DRIVER_470 = Recorded(
    "470.256.02", (gpu(0, "Tesla V100-SXM2-16GB", V100, total=16160, mig=-1),)
)
NO_DRIVER = Recorded("", (gpu(0, "NVIDIA H100 80GB HBM3", H100),))


def library(place: Path) -> Path:
    """A stand-in for libnvidia-ml.so.1, in ``place``."""
    built = place / "libnvidia-ml.so.1"
    call = ["cc", "-shared", "-fPIC", "-o", str(built), str(HERE / "nvml.c")]
    subprocess.run(call, check=True, capture_output=True)
    return built


def environment(machine: Recorded, place: Path) -> dict[str, str]:
    """Variables for a process that is to believe itself on that machine.

    ``place`` gets the recording, the driver's library and an nvidia-smi.
    """
    place.mkdir(exist_ok=True)
    library(place)
    record = place / "machine"
    record.write_text(machine.lines())
    smi = place / "nvidia-smi"
    smi.write_text(f"#!{sys.executable}\n{(HERE / 'nvidia_smi.py').read_text()}")
    smi.chmod(0o755)
    if not machine.driver:
        smi.unlink()
    return {
        "RECORDED_MACHINE": str(record),
        "LD_LIBRARY_PATH": str(place),
        "PATH": f"{place}:{os.environ['PATH']}",
    }
