"""What ``gkd gpu-report`` would have found on a machine, for tests of what follows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pytest_gkd import fault_specs
from pytest_gkd.gpu_report import result_files
from pytest_gkd.stage_specs import OF_EVERY_JOB

H100 = "NVIDIA H100 80GB HBM3"
TRANSPORTS = {"colocated": "in-process", "split": "nccl", "ray": "nccl"}


def stage(name: str, **changes: Any) -> dict[str, Any]:
    found = {"name": name, "outcome": "passed", "duration_s": 1.5, "budget_s": 60.0}
    return {**found, "cause": None, "flight_recorder": False, "facts": {}, **changes}


def run(name: str, stages: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    found = {
        "name": name,
        "layout": "split",
        "pass": None,
        "fault": None,
        "gpus": 2,
        "seconds": 60.0,
        "exit": 0,
        "stages": stages,
        "used_before_mib": [4, 4],
        "used_after_mib": [4, 5],
    }
    return {**found, **changes}


def whole(layout: str, which: str, transport: str = "") -> dict[str, Any]:
    """All stages, passed, on two GPUs or, by CUDA IPC, on one."""
    facts: dict[str, dict[str, Any]] = {
        "vllm": {
            "engine_dtype": "bfloat16",
            "engine_start_s": 90.0 if which == "cold" else 20.0,
            "compile_s": 72.5 if which == "cold" else 0.0,
            "tokens_per_s": 1000.0,
        },
        "nccl": {
            "backend": "nccl",
            "world_size": 2,
            "bus_bandwidth_gb_s": {"64 MiB": 300.0},
        },
        "weight_sync": {
            "transport": transport or TRANSPORTS[layout],
            "push_s": 0.01,
        },
        "training_step": {"loss": "topk"},
    }
    if transport == "cuda-ipc":
        facts["nccl"] = {"backend": "nccl", "world_size": 1}
    stages = [stage(name, facts=facts.get(name, {})) for name in OF_EVERY_JOB]
    name = f"{layout}, {which}"
    return run(name, stages, layout=layout, **{"pass": which})


def fault(name: str) -> dict[str, Any]:
    """A fault that was found as its entry says."""
    spec = fault_specs.find(name)
    found = stage(
        spec.stage,
        outcome=spec.outcome,
        cause=spec.causes[0] if spec.causes else None,
        flight_recorder=name == "nccl:rank-late",
    )
    return run(f"fault {name}", [found], fault=name, exit=spec.exit_code)


def everything() -> dict[str, Any]:
    """A machine with two GPUs on which all was seen."""
    full = stage("training_step", facts={"loss": "full"})
    vllm = stage("vllm", facts={"engine_dtype": "bfloat16"})
    needing = [n for n, one in fault_specs.load().items() if one.gpus]
    return {
        "schema": 1,
        "complete": True,
        "date": "2026-11-22",
        "gpus": [
            {
                "name": H100,
                "count": 2,
                "memory_mib": 81559,
                "capability": "9.0",
                "exclusive": False,
                "mig_instances": None,
            }
        ],
        "links": {"NVLink": 1},
        "driver": "580.95.05",
        "cuda": "13.0",
        "versions": {"python": "3.12.3", "torch": "2.13.0+cu130", "vllm": "0.33.0"},
        "runs": [
            *(whole(one, p) for one in TRANSPORTS for p in result_files.PASSES),
            whole("split", "cold", "cuda-ipc"),
            run("loss full", [vllm, full]),
            run("busy gpu", [stage("busy_gpu", facts={"waited_s": 61.0})]),
            *(fault(name) for name in (*needing, "nccl:rank-late")),
        ],
        "not_run": {},
        "nccl_tests_gb_s": {"67108864": 310.5},
    }


def write(place: Path, change: Callable[[dict[str, Any]], Any] | None = None) -> Path:
    """The file of ``everything``, changed, in ``place``."""
    found = everything()
    if change:
        change(found)
    path = place / "h100.json"
    path.write_text(json.dumps(found))
    return path
