"""Copies with fewer layers pass all seven stages: ``make shrink``.

Of models of many architectures with eight layers,
made here, with the weights of the layers that are kept and with random ones. Seconds
and layers go to ``.gkd/shrunk/``.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import make
import pytest
from test_models import run

from pytest_gkd.stage_specs import STAGES

RESULTS = Path(__file__).parent.parent / ".gkd/shrunk"
TIMES = 4
# Layers that have one of each kind: windows in some, experts in some, Mamba in some.
FEW = {
    **dict.fromkeys(("llama", "llama-bfloat16", "mistral", "qwen2", "qwen2-tied"), 2),
    **dict.fromkeys(("qwen3", "qwen3-sharded", "qwen3_moe", "phi3", "olmo2"), 2),
    **dict.fromkeys(("gpt2", "falcon", "granite", "glm4", "gemma2"), 2),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe", "falcon_h1"), 2),
    **dict.fromkeys(("granitemoehybrid", "gpt_neox"), 2),
    "gemma3_text": 6,
    "olmo3": 4,
    "smollm3": 4,
    "cohere2": 4,
}


@pytest.fixture
def base() -> Iterator[Path]:
    # Short: UNIX sockets lie below it.
    path = Path(tempfile.mkdtemp(prefix="gs"))
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize("weights", ["real", "random"])
@pytest.mark.parametrize("name", FEW)
def test_shrunk(name: str, weights: str, base: Path) -> None:
    model = make.make(name, base / "model", TIMES)
    before = state(model)
    started = time.monotonic()
    which = ("--gkd-shrink", f"--gkd-shrink-weights={weights}")
    stages, said = run(base, model, "--gkd-stages", "colocated", *which)
    taken = time.monotonic() - started
    found = {name: stage["outcome"] for name, stage in stages.items()}
    copy = stages["vllm"]["facts"].get("shrunk", "")
    RESULTS.mkdir(parents=True, exist_ok=True)
    told = {"copy": copy, "run_s": round(taken, 1), **found}
    (RESULTS / f"{name}.{weights}.json").write_text(json.dumps(told, indent=1) + "\n")
    seven = [stage.name for stage in STAGES if not stage.option]
    assert found == dict.fromkeys(seven, "passed"), said
    assert f" with {FEW[name]} of {2 * TIMES} layers" in copy
    assert ("random" in copy) == (weights == "random")
    assert state(model) == before


def state(model: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of every file."""
    found = {path.name: path.stat() for path in model.iterdir()}
    return {name: (one.st_size, one.st_mtime_ns) for name, one in found.items()}
