"""Where torch and its like are not installed, what needs them is skipped.

In the environment that make sets up from the lock they are all there; should one be
missing, that is an error.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gkd import language

if TYPE_CHECKING:
    from recorded import PutsOn, Recorded

    from pytest_gkd.processes.gpus import Usable

LOCKED = (
    *("accelerate", "datasets", "gguf", "grpc", "huggingface_hub", "numpy", "pyarrow"),
    *("ray", "safetensors", "tokenizers", "torch", "transformers", "vllm"),
)
HEAVY = (*LOCKED, "triton")  # in the lock for x86_64 only
MARKER = "needs(*modules): the processes that this test starts import these"


class Missing:
    """The last finder that Python asks: what it is asked for is not installed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: object = None
    ) -> ModuleSpec | None:
        if name in HEAVY:
            pytest.skip(f"{name} is not installed", allow_module_level=True)
        return None


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARKER)
    os.environ["LANGUAGE"] = "en"  # what the tests compare with, on every machine
    missing = [name for name in LOCKED if importlib.util.find_spec(name) is None]
    if missing and (Path(sys.prefix) / ".ready").exists():
        raise pytest.UsageError(
            f"the environment that make set up lacks {', '.join(missing)}"
        )


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    with asked_last(collector):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with asked_last(item):
        return (yield)


@contextmanager
def asked_last(node: pytest.Item | pytest.Collector) -> Iterator[None]:
    """For these tests alone: a stage may find that a package is missing and go on, as
    transformers does."""
    finders = [Missing()] if Path(__file__).parent in node.path.parents else []
    sys.meta_path += finders
    try:
        yield
    finally:
        for finder in finders:
            sys.meta_path.remove(finder)


@pytest.fixture(autouse=True)
def english() -> Iterator[None]:
    """Whatever language a test has chosen, the next one reads English."""
    yield
    language.use("en")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny student's folder, as it was made; no test changes it."""
    from pytest_gkd.workload.models import tiny

    root = tmp_path_factory.mktemp("tiny")
    tiny.write(root)
    return root / "student"


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    """A copy of it, which a test may change."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture(scope="session")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import recorded

    return recorded.library(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def on(nvml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PutsOn:
    """Puts this process on a recorded machine; returns what it may use there."""
    from pytest_gkd.processes import gpus

    monkeypatch.setattr(gpus, "LIBRARY", str(nvml))
    monkeypatch.setattr(gpus, "without_cuda", lambda: "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    place = tmp_path / "machine"
    monkeypatch.setenv("RECORDED_MACHINE", str(place))

    def put(machine: Recorded, visible: str | None = None) -> Usable:
        place.write_text(machine.lines())
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return gpus.usable()

    return put


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("needs"):
        for name in marker.args:
            importlib.util.find_spec(name)
