"""Machines with GPUs as NVML and nvidia-smi show them, replayed where there is none."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest

import pytest_gkd
from pytest_gkd.processes.gpus import Usable
from pytest_gkd.run.built_in_stages import stages_dir

# What the fixture ``on`` is: it takes a machine and, if any, CUDA_VISIBLE_DEVICES.
PutsOn = Callable[..., Usable]
HERE = Path(__file__).parent / "machines"
needs_compiler = pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")
H100, ADA, A100, T4, V100 = "9 0", "8 9", "8 0", "7 5", "7 0"


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
    ("process 0 1 97 79000",),
)
PAIR = Recorded(
    "580.95.05",
    tuple(
        gpu(n, "NVIDIA GeForce RTX 4090", ADA, total=24564, free=24200, mig=-1)
        for n in range(2)
    ),
)
EXCLUSIVE = Recorded("535.129.03", (gpu(0, "NVIDIA A100-SXM4-80GB", A100, mode=3),))
MIG = Recorded(
    "535.129.03",
    (
        gpu(0, "NVIDIA A100-SXM4-80GB", A100, mig=1),
        gpu(1, "NVIDIA A100-SXM4-80GB", A100),
    ),
    ("mig 0 MIG-11111111-aaaa", "mig 0 MIG-22222222-aaaa", "cuda 1"),
)
MIG_R570 = dataclasses.replace(MIG, driver="570.124.06", more=(*MIG.more[:2], "cuda 3"))
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


# -- a Python environment for such a machine ---------------------------------------

PLUGINS_OWN = (
    *("pytest", "pluggy", "iniconfig", "packaging", "pygments", "pytest-timeout"),
    *("pytest-xdist", "execnet", "psutil", "google-re2", "ahocorasick-rs"),
)
# Releases of one time; what is not in machines/packages says its version and no more.
VERSIONS = {
    "torch": "2.13.0+cu129",
    "vllm": "0.32.0",
    "transformers": "5.17.0",
    "datasets": "5.2.0",
    "safetensors": "0.8.0",
    "tokenizers": "0.23.3",
}
RAY = {"ray": "2.60.0"}


def python(
    place: Path, *, stages: Path | None = None, ray: bool = False, **versions: str
) -> Path:
    """The Python of a virtual environment where torch and vLLM are builds for CUDA.

    As far as the environment stage looks at them: see machines/packages. The plugin is
    this one, with the stages in ``stages`` for its own, and what it needs that of this
    environment. ``versions`` are other ones than in ``VERSIONS``.
    """
    venv.create(place, symlinks=True)
    (site,) = place.glob("lib/python*/site-packages")
    for name in PLUGINS_OWN:
        found = metadata.distribution(name)
        tops = {part.parts[0] for part in found.files or ()} - {"..", "__pycache__"}
        for top in tops:
            (site / top).symlink_to(str(found.locate_file(top)))
    (site / "pytest_gkd").mkdir()
    for part in Path(pytest_gkd.__file__).parent.iterdir():
        if part.name != "stages":  # which lie there in a wheel
            (site / "pytest_gkd" / part.name).symlink_to(part)
    (site / "stages").symlink_to(stages or stages_dir())
    info = _distribution(site, "pytest_gkd", pytest_gkd.__version__)
    (info / "entry_points.txt").write_text("[pytest11]\ngkd = pytest_gkd.plugin\n")
    for folder in ("packages", "ray") if ray else ("packages",):
        # Not a link: Python would leave its bytecode in the tree.
        shutil.copytree(HERE / folder, site, dirs_exist_ok=True)
    for name, version in {**VERSIONS, **(RAY if ray else {}), **versions}.items():
        _distribution(site, name, version)
        if not (site / name).exists():
            (site / f"{name}.py").write_text(f"__version__ = {version!r}\n")
    return place / "bin/python"


def _distribution(site: Path, name: str, version: str) -> Path:
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (info / "METADATA").write_text(text)
    return info


def run(
    machine: Recorded, place: Path, executable: Path, args: Sequence[str], **more: str
) -> subprocess.CompletedProcess[str]:
    """pytest in ``place``, on that machine, by the Python of such an environment."""
    own = ("PYTHON", "PYTEST", "CUDA", "NVIDIA", "RAY_", "VLLM_")
    told = {k: v for k, v in os.environ.items() if not k.startswith(own)}
    told |= environment(machine, place / "driver") | more
    return subprocess.run(
        [str(executable), "-m", "pytest", "-p", "no:cacheprovider", *args],
        cwd=place,
        env=told,
        capture_output=True,
        text=True,
        check=False,
    )
