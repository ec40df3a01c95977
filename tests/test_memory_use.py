"""Memory that grows with every step is told from memory that is made once."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_step import FIRST

from pytest_gkd.stage_api import StageFault
from pytest_gkd.workload.gkd import memory_use
from pytest_gkd.workload.gkd.batch import Sequence
from pytest_gkd.workload.gkd.step import StepReport

MB = 1_000_000


def steps(*held: int | None) -> list[StepReport]:
    return [replace(FIRST, allocated_bytes=count) for count in held]


def test_memory_that_grows_with_every_step_is_a_leak() -> None:
    with pytest.raises(StageFault, match=r"by 2\.0, 3\.0 MB") as caught:
        memory_use.judge_memory(steps(10 * MB, 12 * MB, 15 * MB), "cpu")
    assert caught.value.cause == "train.memory-leak"
    assert caught.value.facts["growth_bytes"] == [2 * MB, 3 * MB]


@pytest.mark.parametrize(
    "held",
    [
        (10 * MB, 90 * MB, 90 * MB),  # made once
        (10 * MB, 10 * MB, 90 * MB),
        (90 * MB, 10 * MB, 20 * MB),
        (10 * MB, 10 * MB + 9_000, 10 * MB + 18_000),  # what a healthy step leaves
        (10 * MB, 90 * MB),  # too few to tell
        (None, None, None),
        (10 * MB, None, 90 * MB),
    ],
)
def test_anything_else_is_none(held: tuple[int | None, ...]) -> None:
    memory_use.judge_memory(steps(*held), "cpu")


@pytest.mark.parametrize(
    ("held", "taken"),
    [
        ([0, 10, 20, 20], 4),  # another thread's, in two steps running
        ([0, 0], 3),
        ([0, 10, 20, 30, 40, 50, 60], 6),
    ],
)
def test_more_steps_are_taken_while_memory_grows(held: list[int], taken: int) -> None:
    reports = iter(steps(*(MB * count for count in [*held, *held[-1:] * 6])))
    assert len(memory_use.steps_again(lambda: next(reports), 3, 6)) == taken


def test_what_torch_allocates_is_seen_and_what_it_frees() -> None:
    import torch

    before = memory_use.allocated_bytes("cpu")
    kept = torch.empty(8 * MB, dtype=torch.uint8)
    with_it = memory_use.allocated_bytes("cpu")
    del kept
    after = memory_use.allocated_bytes("cpu")
    assert before is not None
    assert with_it is not None
    assert after is not None
    assert with_it - before >= 8 * MB
    assert after - before < memory_use.GROWTH_BYTES


@pytest.mark.usefixtures("torch")
def test_memory_that_is_freed_meanwhile_hides_no_allocation() -> None:
    code = """
import torch
from pytest_gkd.workload.gkd import memory_use
held, empty = [bytearray(8 << 20)], torch.empty
def free_once(*args, **named):
    held.clear()
    return empty(*args, **named)
torch.empty = free_once
assert memory_use.allocated_bytes("cpu") is not None
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_real_steps_are_level_until_one_keeps_its_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pytest_gkd.workload.gkd import trainer as trainer_module
    from pytest_gkd.workload.gkd.loss import topk_forward_kl
    from pytest_gkd.workload.gkd.teacher import Teacher
    from pytest_gkd.workload.models import tiny

    made = tiny.make(tmp_path)
    trainer = trainer_module.Trainer(made.student)
    prompts = [tuple(range(5 + row, 35 + row)) for row in range(4)]
    batch = [Sequence(prompt, prompt[:16]) for prompt in prompts]
    signal = Teacher(str(made.teacher)).topk(batch, 64, vocab_size=trainer.vocab_size)

    def train() -> list[StepReport]:
        return [trainer.gkd_step(batch, signal, collect=True) for _ in range(3)]

    healthy = train()
    assert not memory_use.grows(healthy), memory_use.growths(healthy)
    kept: list[Any] = []

    def keep(*args: Any, **named: Any) -> Any:
        kept.append(topk_forward_kl(*args, **named))
        return kept[-1]

    monkeypatch.setattr(trainer_module, "topk_forward_kl", keep)
    leaking = train()
    assert memory_use.grows(leaking), memory_use.growths(leaking)
