"""What the engine's lane tells of its imports, and when the stage believes it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from waiting import until

from pytest_gkd.options import Settings
from pytest_gkd.stage_api import StageContext
from pytest_gkd.workload.environment import checks, engine_imports
from pytest_gkd.workload.environment.engine_imports import EngineImports
from pytest_gkd.workload.environment.probe_judge import judge_imports

# A lane that imports packages made here, then stays, as a worker does.
LANE = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from pytest_gkd.workload.environment import engine_imports
try:
    with engine_imports.told(Path(sys.argv[2])):
        import vllm
finally:
    print("over", flush=True)
    time.sleep(600)
"""
PLATFORM = """
class current_platform:
    device_name, device_type = "", "cpu"
    import_kernels = staticmethod(lambda: None)
"""
Lane = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def lane(tmp_path: Path) -> Iterator[Lane]:
    """Start one whose ``vllm`` and ``torch`` have these sources."""
    packages = tmp_path / "packages"
    started: list[subprocess.Popen[str]] = []

    def start(
        vllm: str = "", cuda: str | None = None, **extensions: bytes
    ) -> subprocess.Popen[str]:
        (packages / "vllm").mkdir(parents=True)
        (packages / "vllm/__init__.py").write_text(vllm)
        (packages / "vllm/platforms.py").write_text(PLATFORM)
        for name, content in extensions.items():
            (packages / f"vllm/{name}.so").write_bytes(content)
        torch = f"class version: cuda, hip = {cuda!r}, None\n__version__ = '0'\n"
        (packages / "torch.py").write_text(torch)
        for name in ("safetensors", "tokenizers", "transformers"):
            (packages / f"{name}.py").write_text("")
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", LANE, str(packages), str(tmp_path)],
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        return started[0]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_imports_that_are_told_to_their_end_are_proven(
    lane: Lane, tmp_path: Path
) -> None:
    lane()
    found = EngineImports(tmp_path, 60)
    until(found.proven)
    assert not found.advances()
    outcome = found.outcome()
    assert judge_imports(outcome) == []
    done = [event["done"] for event in outcome.events if "done" in event]
    assert done[: len(engine_imports.MODULES)] == [
        f"import {name}" for name in engine_imports.MODULES
    ]
    assert outcome.found("platform") == "cpu"
    assert outcome.found("torch")["version"] == "0"


@pytest.mark.parametrize(
    "packages",
    [
        {"vllm": "raise ImportError('undefined symbol')"},
        {"vllm": "raise SystemExit(1)"},
        {"cuda": "13.0"},
    ],
    ids=["fails", "exits", "a build for GPUs"],
)
def test_an_import_that_fails_or_that_no_fork_may_do_is_given_up(
    lane: Lane, tmp_path: Path, packages: dict[str, str]
) -> None:
    process = lane(**packages)
    assert process.stdout is not None
    process.stdout.readline()
    found = EngineImports(tmp_path, 60)
    assert not found.advances()
    assert not found.proven()


def test_an_extension_that_does_not_load_is_looked_at_by_the_stage_itself(
    lane: Lane, tmp_path: Path
) -> None:
    lane(broken=b"no library")
    found = EngineImports(tmp_path, 60)
    until(lambda: any("end" in event for event in found.outcome().events))
    assert not found.proven()
    assert not found.advances()


def test_a_lane_that_is_gone_or_tells_nothing_does_not_advance(
    lane: Lane, tmp_path: Path
) -> None:
    process = lane("import time; time.sleep(600)")
    until(lambda: EngineImports(tmp_path, 60).outcome().phase == "import vllm")
    found = EngineImports(tmp_path, 60)
    assert found.advances()
    assert not EngineImports(tmp_path, 0).advances()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not found.advances()


def test_without_a_lane_nothing_is_waited_for(tmp_path: Path) -> None:
    found = EngineImports(tmp_path, 60)
    assert not found.advances()
    assert not found.proven()


@pytest.fixture
def imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., checks.Imports]:
    """The stage's own view, with datasets imported by an earlier stage."""
    # What a child would import, were it not told of by the lane.
    monkeypatch.setattr(checks, "IMPORTS", ("json", *engine_imports.MODULES[1:]))
    monkeypatch.setattr(engine_imports, "MODULES", ("json", *engine_imports.MODULES))

    def make(inject: str | None = None) -> checks.Imports:
        (tmp_path / "output").mkdir()
        gkd = StageContext(Settings(inject=inject), tmp_path, tmp_path)
        gkd.stage = "environment"
        return checks.Imports(gkd)

    return make


def test_the_stage_takes_the_lanes_word(
    lane: Lane, tmp_path: Path, imports: Callable[..., checks.Imports]
) -> None:
    lane()
    until(EngineImports(tmp_path, 60).proven)
    found = imports()
    assert not found.running()
    assert found.finish(0.0).found("platform") == "cpu"


@pytest.mark.parametrize("inject", [None, "environment:import-hangs"])
def test_the_stage_imports_itself_what_is_not_proven_for_it(
    lane: Lane,
    tmp_path: Path,
    imports: Callable[..., checks.Imports],
    monkeypatch: pytest.MonkeyPatch,
    inject: str | None,
) -> None:
    process = lane("" if inject else "raise ImportError")
    assert process.stdout is not None
    process.stdout.readline()
    if inject:
        until(EngineImports(tmp_path, 60).proven)
    monkeypatch.setattr(checks, "IMPORTS", ("json",))
    found = imports(inject)
    try:
        until(lambda: not found.running())
        events = found.finish(0.0).events
    finally:
        found.kill()
    done = [event["done"] for event in events if "done" in event]
    assert done == ["import json"]
    assert os.getpid() not in [event.get("pid") for event in events]
