"""A start that compiles kernels says so, as long as it does."""

from __future__ import annotations

import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from pytest_gkd.workload.engine import compiling

PATIENCE_S = 60.0


class Said(list[str]):
    """What was said, and waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self._more = threading.Condition()

    def say(self, text: str) -> None:
        with self._more:
            self.append(text)
            self._more.notify_all()

    def wait(self, count: int) -> None:
        with self._more:
            assert self._more.wait_for(lambda: len(self) >= count, PATIENCE_S)


def test_a_compiler_below_is_told_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "EVERY_S", 0.02)
    sleep = shutil.which("sleep")
    assert sleep is not None
    compiler = Path(shutil.copy(sleep, tmp_path / "ptxas"))
    said = Said()
    with compiling.told(said.say, "starting the engine", on_gpu=True):
        with subprocess.Popen([compiler, "600"]) as child:
            try:
                said.wait(2)
            finally:
                child.kill()
        said.wait(3)
    assert said == [
        "starting the engine",
        "starting the engine: compiling kernels (ptxas)",
        "starting the engine",
    ]


def test_what_goes_wrong_goes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "EVERY_S", 0.02)
    said = Said()
    for on_gpu in (True, False):
        with (
            pytest.raises(ValueError, match="no engine"),
            compiling.told(said.say, "x", on_gpu=on_gpu),
        ):
            raise ValueError("no engine")
    assert not any(t.name == "gkd-compiling" for t in threading.enumerate())
