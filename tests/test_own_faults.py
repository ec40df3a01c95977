"""A fault in this package is told as one, and one of what it calls is not."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_gkd.options import Settings
from pytest_gkd.own_faults import own_fault
from pytest_gkd.run.built_in_stages import stage_file, stages_dir
from pytest_gkd.stage_api import StageFault
from pytest_gkd.workload.engine import engine_errors
from pytest_gkd.workload.engine.engine import Engine
from pytest_gkd.workload.engine.engine_config import EngineConfig
from pytest_gkd.workload.inject.site import Site
from pytest_gkd.workload.layouts.ray_actors import Role
from pytest_gkd.workload.models import tokenizer_check
from pytest_gkd.workload.sync import parameters, push


def raised(function: Any, *args: Any) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - which one is the point
        function(*args)
    return caught.value


def ours() -> Exception:
    """A mistake whose innermost frame is in what the stages run."""
    return raised(lambda: push.read_map([], {"parameters": None}, shards=False))


def test_a_mistake_in_a_line_of_ours_is_our_fault() -> None:
    fault = own_fault(ours())
    assert fault is not None
    assert fault.cause == "internal.error"
    assert fault.message.startswith("a fault in pytest-gkd itself: ")
    assert "sync/push.py:" in fault.message


class Tokenizer:
    """Stands for a package: it raises in a line of its own."""

    def encode(self, *args: Any, **kwargs: Any) -> Any:
        return dict[str, int]()["missing"]


def test_what_a_package_raises_that_we_have_called_is_not() -> None:
    error = raised(tokenizer_check.check_round_trip, Tokenizer(), "--gkd-student")
    assert isinstance(error, KeyError)
    assert own_fault(error) is None


def test_what_the_system_raises_in_a_line_of_ours_is_not(tmp_path: Path) -> None:
    error = raised(engine_errors.forget, str(tmp_path / "x\0"))
    assert isinstance(error, ValueError)
    (tmp_path / engine_errors.RECORD).mkdir()
    error = raised(engine_errors.forget, str(tmp_path))
    assert isinstance(error, OSError)
    assert own_fault(error) is None


class Release:
    """Stands for a class of a package in a release that lacks what we call."""


@pytest.mark.parametrize(
    ("model", "is_ours"), [(Release(), False), (pytest, False), (None, True)]
)
def test_a_name_that_a_release_lacks_is_left_to_the_catalogue(
    model: Any, is_ours: bool
) -> None:
    error = raised(parameters.unfused, model)
    assert isinstance(error, AttributeError)
    assert (own_fault(error) is not None) == is_ours


def test_an_argument_that_a_release_lacks_is_left_to_the_catalogue() -> None:
    def encode(text: str) -> None:
        del text

    tokenizer = SimpleNamespace(encode=encode)
    error = raised(tokenizer_check.check_round_trip, tokenizer, "--gkd-student")
    assert isinstance(error, TypeError)
    assert own_fault(error) is None


def test_what_is_injected_is_somebody_elses() -> None:
    error = raised(Site, None, None)
    assert isinstance(error, AttributeError)
    assert own_fault(error) is None


def test_a_built_in_stage_is_ours_and_another_file_is_not(tmp_path: Path) -> None:
    for file, is_ours in ((stage_file("data"), True), (tmp_path / "test_x.py", False)):
        spoiled = compile("{}['a']", str(file), "exec")
        error = raised(exec, spoiled)
        assert (own_fault(error, stages_dir()) is not None) == is_ours


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_fault_of_ours_in_a_process_of_the_engine_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_ours: bool
) -> None:
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))
    logger = logging.getLogger(engine_errors.LOGGERS[0])
    monkeypatch.setattr(logger, "filters", [])
    engine_errors.keep()
    error = ours() if is_ours else KeyError("x.weight")

    def call() -> list[Any]:
        logger.error("WorkerProc hit an exception.", exc_info=error)
        raise RuntimeError("Call to collective_rpc method failed")

    made = Engine.__new__(Engine)
    settings = Settings(layout="split")
    made.config = EngineConfig("m", settings, "float32", 64, None, str(tmp_path), True)
    made.cores = []
    wanted = str(own_fault(error)) if is_ours else "Call to collective_rpc"
    with pytest.raises((StageFault, RuntimeError), match=re.escape(wanted)) as told:
        made.watched(call, "the call of gkd_parameters")
    assert isinstance(told.value, StageFault) == is_ours


class Spoiled(Role):
    """An actor's object with a mistake in a line of ours."""

    def parts(self) -> dict[str, Any]:
        push.read_map([], {"parameters": None}, shards=False)
        return {}


def test_a_fault_of_ours_in_a_ray_actor_is_told() -> None:
    fault = Spoiled.__new__(Spoiled).call("", "anything")
    assert fault.cause == "internal.error"


STAGE = """
import pytest
from pytest_gkd.workload.sync import push

@pytest.mark.gkd_stage("probe", timeout=60)
def test_probe():
    push.read_map([], {"elsewhere": {}}, shards=False)
"""


def test_a_stage_that_fails_by_a_fault_of_ours_says_so(tmp_path: Path) -> None:
    (tmp_path / "test_probe.py").write_text(STAGE)
    arguments = ("-p", "no:cacheprovider", "--gkd-stages=probe", "test_probe.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    report = json.loads((tmp_path / ".gkd/last/report.json").read_text())
    (stage,) = report["stages"]
    assert stage["diagnosis"]["cause"] == "internal.error"
    assert stage["message"].startswith(
        "a fault in pytest-gkd itself: KeyError: 'parameters' (sync/push.py:"
    )
    assert "gkd env" in done.stdout
