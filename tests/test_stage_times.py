"""What is compiled or made once is in no time that a stage reports."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pytest_gkd.workload.layouts import reference
from stages import test_vllm as vllm
from stages import test_weight_sync as weight_sync


class Stage:
    """Takes a stage's facts; its clock is moved by hand."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self.fact = self.facts.__setitem__
        self.now = 0.0

    def step(self, text: str) -> None:
        del text

    def note(self, cause: str, text: str) -> None:
        self.facts[cause] = text


class Job:
    """Its first call of anything takes 100 s, the next one 2 s."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._took: dict[str, float] = {}
        self._pushed = 0
        self.engine = SimpleNamespace(
            encode=lambda texts: [[1] for _ in texts], slow_loading=lambda: ""
        )
        self.trainer = SimpleNamespace(
            snapshot=lambda: None,
            perturb=lambda seed: None,
            restore=lambda: None,
            load_facts=lambda: {"trainer_load_s": 3.0},
        )
        self.transfer = SimpleNamespace(transport="nccl", why="two GPUs")

    def _seconds(self, what: str) -> float:
        seconds, self._took[what] = self._took.get(what, 100.0), 2.0
        self._stage.now += seconds
        return seconds

    def generate(self, prompts: list[list[int]], tokens: int) -> list[Any]:
        self._seconds("generate")
        return [SimpleNamespace(token_ids=(1,) * tokens) for _ in prompts]

    def push_weights(self) -> Any:
        self._pushed += 1
        return SimpleNamespace(
            tensors=1, bytes=8, transport="nccl", seconds=self._seconds("push")
        )

    def check_served(self, *_: str) -> dict[str, str]:
        return {"weight": str(self._pushed % 2)}

    def describe(self) -> dict[str, Any]:
        return dict.fromkeys(("engine", "engine_dtype", "engine_start_s"), 0)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    made = Stage()
    check = SimpleNamespace(tolerance=0.1)
    monkeypatch.setattr(vllm, "monotonic", lambda: made.now)
    monkeypatch.setattr(reference, "check", lambda *_: [check])
    monkeypatch.setattr(reference, "judge", lambda *_, **__: "")
    monkeypatch.setattr(reference, "deviation", lambda _: "")
    monkeypatch.setattr(reference, "largest_difference", lambda _: 0.0)
    monkeypatch.setattr(reference, "same_answers", lambda *_: False)
    return made


def test_throughput_is_that_of_the_second_generation(stage: Stage) -> None:
    vllm.test_vllm(stage, Job(stage))  # type: ignore[arg-type]
    tokens = len(reference.PROMPTS) * vllm.NEW_TOKENS
    assert stage.facts["generated_tokens"] == tokens
    assert stage.facts["tokens_per_s"] == tokens / 2


def test_a_slow_loading_becomes_a_note(stage: Stage) -> None:
    job = Job(stage)
    job.engine.slow_loading = lambda: "reading 15.0 GB took 30 s"
    vllm.test_vllm(stage, job)  # type: ignore[arg-type]
    assert stage.facts["vllm.loading-slow"] == "reading 15.0 GB took 30 s"


def test_the_time_of_a_push_is_that_of_the_second(stage: Stage) -> None:
    weight_sync.test_weight_sync(stage, Job(stage))  # type: ignore[arg-type]
    assert stage.facts["first_push_s"] == 100.0
    assert stage.facts["push_s"] == 2.0
    assert stage.facts["trainer_load_s"] == 3.0
    assert stage.facts["summary"].endswith("nccl, 2.000 s a push")
