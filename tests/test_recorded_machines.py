"""Whole runs on recorded machines with GPUs: what their users see, end to end.

Real pytest, its lanes and the real environment stage, beside builds of torch and vLLM
for CUDA (recorded.python); what would compute has a stand-in that takes a file's lock
where the real stage takes GPU memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import recorded
from recorded import Recorded

from pytest_gkd.run.built_in_stages import stage_file

pytestmark = recorded.needs_compiler

# While the engine starts it holds a lock that stands for the GPU, and goes on until the
# other lane had its turn; where a GPU takes one process it keeps the lock.
GPU = """
import contextlib, fcntl, os, time
from pathlib import Path

DIRECTORY = Path(os.environ["RECORDED_MACHINE"]).parent
KEPT = []

@contextlib.contextmanager
def touching(settings, *, alone):
    if not settings.gpus:
        yield
        return
    with contextlib.ExitStack() as held:
        gpu = held.enter_context((DIRECTORY / "gpu").open("a"))
        how = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
        fcntl.flock(gpu, how | fcntl.LOCK_NB)
        yield
        if settings.exclusive and alone:
            KEPT.append(held.pop_all())

def said(what):
    (DIRECTORY / what).touch()

def hear(what, seconds):
    until = time.monotonic() + seconds
    while not (DIRECTORY / what).exists() and time.monotonic() < until:
        time.sleep(0.02)
"""
ENGINE = """
import pytest
from gpu import hear, touching
from pytest_gkd.workload.layouts import local_layouts
from pytest_gkd.workload.layouts.job_config import job_config
from pytest_gkd.workload.models import inputs

@pytest.mark.gkd_stage("vllm")
def test_vllm(gkd):
    found = inputs.Inputs("model", "model", ("prompts.jsonl",))
    made = job_config(gkd.settings, found, gkd.run_dir)
    split = local_layouts.Split(made, gkd)
    gkd.fact("dtype", made.engine.dtype)
    gkd.fact("share", made.settings.gpu_memory_utilization)
    gkd.fact("trainer", split.device("student"))
    with touching(gkd.settings, alone=True):
        hear("environment is over", 60)
        hear("nccl has begun", 1)
"""
RANKS = """
import pytest
from gpu import said, touching
from pytest_gkd.processes import gpus
from pytest_gkd.workload.ranks import group

@pytest.mark.gkd_stage("nccl")
def test_nccl(gkd):
    said("nccl has begun")
    settings = gkd.settings
    group.check_world_size(settings.world_size, settings.gpus)
    gkd.fact("backend", group.choose_backend(settings.gpus)[0])
    gkd.fact("devices", gpus.first_devices(gpus.usable().cards))
    with touching(settings, alone=False):
        pass
"""
SAYS_WHEN_OVER = """
from gpu import said

def pytest_runtest_teardown(item):
    said(item.name.removeprefix("test_") + " is over")
"""


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stages where the plugin's own lie, under their names."""
    place = tmp_path_factory.mktemp("stages")
    for name, text in (
        ("gpu", GPU),
        ("test_vllm", ENGINE),
        ("test_nccl", RANKS),
        ("conftest", SAYS_WHEN_OVER),
        ("test_environment", stage_file("environment").read_text("utf-8")),
    ):
        (place / f"{name}.py").write_text(text)
    return place


Pythons = Callable[..., Path]


@pytest.fixture(scope="module")
def pythons(tmp_path_factory: pytest.TempPathFactory, stages: Path) -> Pythons:
    """The Python with such packages, made once."""
    made: dict[str, Path] = {}

    def python(**packages: Any) -> Path:
        name = repr(packages)
        if name not in made:
            place = tmp_path_factory.mktemp("python")
            made[name] = recorded.python(place, stages=stages, **packages)
        return made[name]

    return python


@dataclass(frozen=True)
class Seen:
    """What is there, and what the user of it sees of all stages."""

    machine: Recorded
    layout: str
    device: str
    ranks: tuple[int, ...]
    dtype: str = "bfloat16"
    share: float = 0.3
    trainer: str = "cuda:0"
    finding: str = ""
    told: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    visible: str = ""
    packages: dict[str, Any] = field(default_factory=dict)


ON_EIGHT: dict[str, Any] = {
    "device": "8 GPU(s)",
    "ranks": tuple(range(8)),
    "share": 0.85,
}
ON_TWO: dict[str, Any] = {"device": "2 GPU(s)", "ranks": (0, 1)}
MACHINES = {
    "one H100": Seen(recorded.ONE_H100, "split (one GPU is visible)", "1 GPU(s)", (0,)),
    "eight": Seen(
        recorded.EIGHT_H100,
        "ray (8 GPUs are visible)",
        trainer="cuda:1",
        packages={"ray": True},
        **ON_EIGHT,
    ),
    "eight without Ray": Seen(
        recorded.EIGHT_H100,
        "split (8 GPUs are visible and Ray is not installed)",
        trainer="cuda:1",
        **ON_EIGHT,
    ),
    "a Ray that is not installed": Seen(
        recorded.EIGHT_H100,
        "ray (--gkd-layout)",
        trainer="cuda:1",
        args=("--gkd-layout=ray",),
        finding="env.package-missing",
        told=("ray is not installed, and the layout is 'ray' (--gkd-layout)",),
        **ON_EIGHT,
    ),
    "a pair without peer access": Seen(
        recorded.PAIR,
        "split (2 GPUs are visible and Ray is not installed)",
        trainer="cuda:1",
        share=0.85,
        **ON_TWO,
    ),
    "a pair under one engine": Seen(
        recorded.PAIR,
        "split (2 GPUs are visible and Ray is not installed)",
        trainer="cuda:1",
        args=("--gkd-tensor-parallel-size=2",),
        **ON_TWO,
    ),
    "MIG": Seen(
        recorded.MIG,
        "split (one GPU is visible)",
        "1 GPU(s) (MIG: 1 CUDA device(s) on 1 of 2 physical GPU(s))",
        (0,),
    ),
    "MIG since R570": Seen(
        recorded.MIG_R570,
        "split (2 GPUs are visible and Ray is not installed)",
        "3 GPU(s) (MIG: 3 CUDA device(s) on 2 of 2 physical GPU(s))",
        (0, 2),
        share=0.85,
        trainer="cuda:1",
    ),
    "UUIDs": Seen(
        replace(recorded.EIGHT_H100, more=("cuda 2",)),
        "split (2 GPUs are visible and Ray is not installed)",
        trainer="cuda:1",
        share=0.85,
        visible="GPU-00000003,GPU-00000001",
        **ON_TWO,
    ),
    "UUIDs and an older vLLM": Seen(
        replace(recorded.EIGHT_H100, more=("cuda 2",)),
        "split (2 GPUs are visible and Ray is not installed)",
        trainer="cuda:1",
        share=0.85,
        visible="GPU-00000003,GPU-00000001",
        packages={"vllm": "0.21.0"},
        finding="env.variable-invalid",
        told=("CUDA_VISIBLE_DEVICES=3,1 names the same ones",),
        **ON_TWO,
    ),
    "driver 470": Seen(
        recorded.DRIVER_470,
        "split (one GPU is visible)",
        "1 GPU(s)",
        (0,),
        dtype="float16",
        finding="env.driver-too-old",
        told=("driver 470.256.02 does not run CUDA 12.9", "525.60.13 or newer"),
    ),
    "T4": Seen(
        recorded.ONE_T4, "split (one GPU is visible)", "1 GPU(s)", (0,), "float16"
    ),
    "busy": Seen(
        recorded.BUSY,
        "split (one GPU is visible)",
        "1 GPU(s)",
        (0,),
        finding="env.gpu-busy",
        told=("GPU 0 has 79000 of 81559 MiB taken by pid 1 ",),
    ),
    "exclusive": Seen(
        recorded.EXCLUSIVE,
        "colocated (one GPU is visible, which takes one process at a time)",
        "1 GPU(s)",
        (0,),
    ),
    "no driver": Seen(
        recorded.NO_DRIVER,
        "colocated (no GPU is visible)",
        "cpu",
        (),
        dtype="float32",
        trainer="cpu",
        finding="env.no-gpu",
        told=("no NVIDIA driver was found on this machine",),
    ),
}


@pytest.mark.parametrize("name", MACHINES)
def test_what_the_user_of_a_recorded_machine_sees(
    name: str, pythons: Pythons, tmp_path: Path
) -> None:
    seen = MACHINES[name]
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"dtype": "bfloat16"}')
    variables = {"CUDA_VISIBLE_DEVICES": seen.visible} if seen.visible else {}
    asked = ("--gkd-stages=environment,vllm,nccl", *seen.args)
    run = recorded.run(
        seen.machine, tmp_path, pythons(**seen.packages), asked, **variables
    )
    text = run.stdout + run.stderr
    assert (tmp_path / ".gkd/last/report.json").exists(), text
    report = json.loads((tmp_path / ".gkd/last/report.json").read_text())
    stages = {stage["name"]: stage for stage in report["stages"]}

    assert f"gkd: layout {seen.layout}, device {seen.device}, 2 lane(s)" in text
    # Nobody came upon the lock of another, in whichever lane.
    assert stages["vllm"]["outcome"] == "passed", text
    assert stages["nccl"]["outcome"] == "passed", text
    has_gpu = seen.device != "cpu"
    assert report["settings"]["world_size"] == (len(seen.ranks) or 2)
    assert stages["vllm"]["budget_s"] == (600 if has_gpu else 120)
    assert stages["nccl"]["budget_s"] == (120 if has_gpu else 60)
    assert stages["nccl"]["facts"]["backend"] == ("nccl" if has_gpu else "gloo")
    assert stages["nccl"]["facts"]["devices"] == list(seen.ranks)
    engine = stages["vllm"]["facts"]
    assert (engine["dtype"], engine["share"]) == (seen.dtype, seen.share)
    assert engine["trainer"] == seen.trainer
    found = stages["environment"]
    cause = (found["diagnosis"] or {}).get("cause") or ""
    assert (found["outcome"], cause) == (
        "failed" if seen.finding else "passed",
        seen.finding,
    ), text
    lines = " ".join(text.split())
    for part in seen.told:
        assert part in lines
