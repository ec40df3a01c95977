"""Sound models pass: every text architecture that vLLM and transformers share.

Tiny and random ones go through vllm, weight_sync and training_step in every layout:
``make models``. What happened goes to ``.gkd/models/``; see keep.py for the table.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import make
import pytest

from pytest_gkd.stage_specs import LAYOUTS

RESULTS = Path(__file__).parent.parent / ".gkd/models"
STAGES = ("vllm", "weight_sync", "training_step")
# A slow machine, three stages, and one engine of several processes.
BUDGET_S = 300
LIMIT_S = 1000


@pytest.fixture
def base() -> Iterator[Path]:
    # Short: UNIX sockets lie below it.
    path = Path(tempfile.mkdtemp(prefix="gs"))
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", list(make.shapes()))
def test_model(name: str, layout: str, base: Path) -> None:
    model = make.make(name, base / "model")
    started = time.monotonic()
    stages, said = run(base, model, f"--gkd-stages={','.join(STAGES)}", layout)
    found = record(name, layout, stages, time.monotonic() - started)
    known = make.known(name, layout)
    assert found["failed"] == (known["stage"] if known else None), (
        f"expected {known or 'all to pass'}\n{said}"
    )
    if known and "cause" in known:
        assert found["cause"] == known["cause"], said


def run(
    base: Path, model: Path, stages: str, layout: str, *more: str
) -> tuple[dict[str, dict[str, Any]], str]:
    """The stages of a run by their names, and the end of what it said."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            stages,
            f"--gkd-student={model}",
            f"--gkd-teacher={model}",
            f"--gkd-layout={layout}",
            f"--gkd-timeout=all={BUDGET_S}",
            f"--gkd-report={base / 'r'}",
            *more,
        ],
        cwd=base,
        env={n: v for n, v in os.environ.items() if not n.startswith("PYTEST_")},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    report = json.loads((base / "r/report.json").read_text())
    return {stage["name"]: stage for stage in report["stages"]}, done.stdout[-6000:]


def record(
    name: str, layout: str, stages: dict[str, dict[str, Any]], seconds: float
) -> dict[str, Any]:
    """Keep what happened; ``failed`` is the first stage that did not pass."""
    bad = [s for s in STAGES if stages[s]["outcome"] != "passed"]
    first = stages[bad[0]] if bad else {}
    entry = {
        "model": name,
        "layout": layout,
        "failed": bad[0] if bad else None,
        "cause": (first.get("diagnosis") or {}).get("cause"),
        "message": first.get("message", ""),
        "difference_nats": stages["vllm"]["facts"].get("max_logprob_difference_nats"),
        "run_s": round(seconds, 1),
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    text = json.dumps(entry, indent=1)
    (RESULTS / f"{name}.{layout}.json").write_text(text + "\n")
    return entry
