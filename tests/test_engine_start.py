"""Where a vLLM engine's start went, as `gkd diagnose` tells it."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from pytest_gkd.diagnosis import catalogue, engine_start, logs
from pytest_gkd.diagnosis.log_report import LogReport
from pytest_gkd.report import render

# As older releases print it, and those from 0.21 on.
OLDER = """\
(Worker_TP0 pid=21) INFO 11-15 13:51:50 [default_loader.py:308] Loading weights took 3.74 seconds
(Worker_TP1 pid=22) INFO 11-15 13:51:51 [default_loader.py:308] Loading weights took 12.20 seconds
(Worker_TP0 pid=21) INFO 11-15 13:51:52 [gpu_model_runner.py:2905] Model loading took 7.5604 GiB and 18.012536 seconds
(Worker_TP1 pid=22) INFO 11-15 13:51:53 [gpu_model_runner.py:2905] Model loading took 12.9533 GiB and 4.452389 seconds
(Worker_TP0 pid=21) INFO 11-15 13:51:55 [backends.py:559] Dynamo bytecode transform time: 6.83 s
(Worker_TP0 pid=21) INFO 11-15 13:51:57 [monitor.py:34] torch.compile takes 28.89 s in total
(Worker_TP0 pid=21) INFO 11-15 13:52:37 [gpu_model_runner.py:3480] Graph capturing finished in 18 secs, took 1.58 GiB
(EngineCore_DP0 pid=20) INFO 11-15 13:52:38 [core.py:210] init engine (profile, create kv cache, warmup model) took 57.03 seconds
"""  # noqa: E501
NEWER = """\
(EngineCore pid=9) INFO 11-15 13:51:50 [default_loader.py:431] Loading weights took 3.74 seconds
(EngineCore pid=9) INFO 11-15 13:51:52 [gpu_model_runner.py:5150] Model loading took 7.56 GiB memory and 18.012536 seconds
(EngineCore pid=9) INFO 11-15 13:51:54 [backends.py:1102] vLLM's torch.compile cache is disabled.
(EngineCore pid=9) INFO 11-15 13:51:57 [monitor.py:60] torch.compile took 28.89 s in total
(EngineCore pid=9) INFO 11-15 13:52:38 [core.py:390] init engine (profile, create kv cache, warmup model) took 57.03 s (compilation: 28.89 s)
"""  # noqa: E501


def report(text: str) -> LogReport:
    return logs.examine([io.BytesIO(text.encode())], catalogue.load())


def told(text: str) -> dict[str, Any] | None:
    found: dict[str, Any] = json.loads(json.dumps(report(text).to_json()))
    start: dict[str, Any] | None = found["engine_start"]
    return start


def test_each_part_is_that_of_the_slowest_process() -> None:
    assert told(OLDER) == {
        "weights_s": 12.2,
        "model_s": 18.012536,
        "dynamo_s": 6.83,
        "compile_s": 28.89,
        "graphs_s": 18.0,
        "init_s": 57.03,
        "keeps_compiled": True,
    }


def test_what_is_not_told_is_null() -> None:
    assert told(NEWER) == {
        "weights_s": 3.74,
        "model_s": 18.012536,
        "dynamo_s": None,
        "compile_s": 28.89,
        "graphs_s": None,
        "init_s": 57.03,
        "keeps_compiled": False,
    }
    assert told("INFO 11-15 13:51:50 no engine here\n") is None


def test_a_slow_start_has_a_line_of_its_own() -> None:
    shown = " ".join(render.log_text(report(OLDER)).split())
    assert (
        "start vLLM needed 75 s for its model and its start: reading weights 12 s, "
        "torch.compile 29 s, of it Dynamo 7 s, CUDA graphs 18 s" in shown
    )
    assert "VLLM_DISABLE_COMPILE_CACHE" not in shown
    assert "every start compiles again" in render.log_text(report(NEWER)).replace(
        "\n        ", " "
    )


@pytest.mark.parametrize(
    "text",
    [
        OLDER.replace("57.03", "7.03"),
        f"{OLDER}RuntimeError: CUDA error: device-side assert triggered\n",
    ],
)
def test_a_fast_start_and_a_failure_have_none(text: str) -> None:
    assert "vLLM needed" not in render.log_text(report(text))


@pytest.mark.parametrize("texts", [(NEWER, OLDER), (OLDER, NEWER)])
def test_of_several_logs_the_slowest_counts(texts: tuple[str, str]) -> None:
    found = engine_start.of(text.encode() for text in texts)
    assert found is not None
    assert (found.weights_s, found.graphs_s) == (12.2, 18.0)
    assert not found.keeps_compiled
