"""What is wrong when the engine answers otherwise, or refuses what it is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_gkd.options import Settings
from pytest_gkd.stage_api import StageFault
from pytest_gkd.workload.engine.greedy import GreedyCheck
from pytest_gkd.workload.gkd import rollouts
from pytest_gkd.workload.layouts import reference
from pytest_gkd.workload.sync import push
from pytest_gkd.workload.sync.push import ParameterMap

RIGHT = GreedyCheck(16, 1e-3, 0.0, 0.0, (), None, None)
WRONG = GreedyCheck(16, 1e-3, 7.5, 7.5, (3, 9), 37, 103)
DIGESTS = {"a.weight": "1", "b.weight": "2"}


def job(engine: dict[str, str], **more: Any) -> Any:
    """The part of a job that the verdict reads."""
    found = ParameterMap({"a.weight": "a.weight", "b.weight": "b.weight"}, {}, **more)
    return SimpleNamespace(
        parameter_map=found,
        engine_digests=lambda: engine,
        trainer_digests=lambda: DIGESTS,
    )


def judged(found: Any, *, pushed: bool = True) -> StageFault:
    with pytest.raises(StageFault) as caught:
        reference.judge(found, [RIGHT, WRONG], "after the push", pushed=pushed)
    return caught.value


def test_right_answers_are_no_fault() -> None:
    reference.judge(job(DIGESTS), [RIGHT, RIGHT], "after the push")


def test_the_right_tokens_with_other_probabilities_are_a_fault_of_their_own() -> None:
    near = replace(RIGHT, max_logprob_difference=4e-4)
    off, far = (replace(RIGHT, max_logprob_difference=x) for x in (4e-3, 4e-2))
    assert reference.deviation([RIGHT, near]) == ""
    assert "up to 0.004 nats" in reference.deviation([near, off])
    reference.judge(job(DIGESTS), [near, off], "after the push")
    with pytest.raises(StageFault, match=r"up to 0\.04 nats apart, 0\.01") as caught:
        reference.judge(job(DIGESTS), [near, far], "after the start", pushed=False)
    assert caught.value.cause == "vllm.wrong-output"
    assert "all 2 tensors in the engine equal the trainer's" in str(caught.value)


def test_in_half_precision_a_narrow_miss_with_equal_weights_is_told_and_no_fault() -> (
    None
):
    narrow = replace(
        WRONG, tolerance=0.15, max_logprob_gap=0.4, max_logprob_difference=0.4
    )
    narrow = replace(narrow, disagreements=(3,))
    told = reference.judge(job(DIGESTS), [RIGHT, narrow], "after the push")
    assert "narrowly, as half precision may round" in told
    assert "all 2 tensors in the engine equal the trainer's" in told
    for wrong in (
        replace(narrow, disagreements=(3, 9)),  # of 16
        replace(narrow, max_logprob_gap=0.6),
        replace(narrow, tolerance=1e-3),
    ):
        with pytest.raises(StageFault):
            reference.judge(job(DIGESTS), [RIGHT, wrong], "after the push")
    other = job({"a.weight": "1", "b.weight": "9"})
    with pytest.raises(StageFault):
        reference.judge(other, [RIGHT, narrow], "after the push")


def test_wrong_answers_of_other_weights_name_the_tensors() -> None:
    fault = judged(job({"a.weight": "1", "b.weight": "9"}))
    assert fault.cause == "vllm.wrong-output"
    assert "1 of 2 tensors in the engine are not the trainer's (b.weight)" in (
        fault.message
    )
    assert "completion 1 differs at 2 of 16 positions, first at 3" in fault.message


def test_wrong_answers_of_the_right_weights_are_the_engines_own() -> None:
    fault = judged(job(DIGESTS))
    assert fault.cause == "vllm.wrong-output"
    assert "all 2 tensors in the engine equal the trainer's" in fault.message
    unsure = judged(job(DIGESTS, by_content=frozenset({"a.weight"})))
    assert "1 of them but for the order of their elements" in unsure.message


def test_weights_that_were_never_sent_explain_wrong_answers_after_a_push() -> None:
    unfilled = ("c.weight", "c.weight_scale")
    fault = judged(job(DIGESTS, unfilled=unfilled))
    assert fault.cause == "sync.name-or-shape"
    assert "1 of the engine's parameters" in fault.message
    before = judged(job(DIGESTS, unfilled=unfilled), pushed=False)
    assert before.cause == "vllm.wrong-output"


SHAPES = {"a": ("float32", (4, 2)), "b": ("float32", (4,))}
BASE = ParameterMap({"a": "a", "b": "b"}, SHAPES, by_content=frozenset({"a"}))
INFOS = [("a", "float32", (2, 4)), ("b", "float32", (4,))]
REFUSED = RuntimeError("start (0) + length (4) exceeds dimension size (2).")


def test_a_tensor_of_another_shape_is_the_suspect_of_a_refused_push() -> None:
    fault = push.refusal(REFUSED, INFOS, BASE)
    assert fault is not None
    assert fault.cause == "sync.name-or-shape"
    assert "a has shape [2, 4], the engine's [4, 2]" in fault.message


def test_another_failure_or_no_suspect_stays_what_it_is() -> None:
    assert push.refusal(RuntimeError("Connection closed by peer"), INFOS, BASE) is None
    assert push.refusal(REFUSED, INFOS[1:], BASE) is None


def test_another_shape_is_named_before_weights_are_compared() -> None:
    parameter_map = ParameterMap({"b": "b"}, SHAPES)
    with pytest.raises(StageFault, match=r"shape \[5\]; expected \[4\]"):
        push.check_shapes([("b", "float32", (5,))], parameter_map, parameter_map)


def batch(
    prompts: int, ranks: int, named: Sequence[str] = ("batch_size", "world_size")
) -> Settings:
    origins = dict.fromkeys(named, "tox.ini")
    return Settings(batch_size=prompts, world_size=ranks, origins=origins)


def test_a_batch_that_the_ranks_cannot_share_is_refused() -> None:
    with pytest.raises(StageFault, match=r"6 prompts .* 4 ranks") as caught:
        rollouts.check_batch(batch(6, 4))
    assert caught.value.cause == "train.batch-size"


@pytest.mark.parametrize(
    "settings",
    [
        batch(8, 4),
        batch(6, 4, ["batch_size"]),  # nobody asked for four
        batch(Settings.batch_size, 3, ["world_size"]),  # nobody asked for this batch
    ],
)
def test_a_batch_that_they_can_share_or_that_nobody_named_is_not(
    settings: Settings,
) -> None:
    rollouts.check_batch(settings)
