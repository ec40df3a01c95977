"""The student's own responses, and the teacher's log-probabilities for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_gkd.options import Settings
from pytest_gkd.stage_api import StageFault
from pytest_gkd.workload.gkd import teacher_targets
from pytest_gkd.workload.gkd.batch import Sequence

if TYPE_CHECKING:
    from pytest_gkd.stage_api import StageContext
    from pytest_gkd.workload.engine.engine import Completion
    from pytest_gkd.workload.gkd.teacher_targets import Signal


def check_batch(settings: Settings) -> None:
    """Check that the batch divides evenly among the ranks, if the user named both.

    No framework trains on a remainder: verl, DeepSpeed and LightRFT refuse to start.
    Raises StageFault ``train.batch-size``.
    """
    ranks, batch = settings.world_size, settings.batch_size
    named = {"batch_size", "world_size"} <= set(settings.origins)
    if named and batch % ranks:
        raise StageFault(
            "train.batch-size",
            f"a batch of {batch} prompts ({settings.origin('batch_size')}) cannot be "
            f"dealt out evenly to {ranks} ranks ({settings.origin('world_size')}); "
            f"expected a multiple of {ranks}",
            facts={"batch_size": batch, "world_size": ranks, "rest": batch % ranks},
        )


def sequences(
    prompts: list[list[int]], completions: list[Completion]
) -> list[Sequence]:
    """Prompts with their rollouts, without the empty ones.

    Raises StageFault ``train.batch-size`` if the student generated nothing at all.
    """
    found = [
        Sequence(tuple(prompt), completion.token_ids)
        for prompt, completion in zip(prompts, completions, strict=True)
        if completion.token_ids
    ]
    if not found:
        reasons = sorted({completion.finish_reason for completion in completions})
        raise StageFault(
            "train.batch-size",
            f"all {len(prompts)} rollouts are empty (finish reason "
            f"{', '.join(reasons) or 'none'}); expected a token to learn from",
            facts={"rollouts": len(prompts), "finish_reasons": reasons},
        )
    return found


def teacher_signal(
    gkd: StageContext, teacher: Any, batch: list[Sequence], vocab_size: int
) -> Signal:
    """The teacher's log-probabilities for ``batch``, in the form that the loss needs.

    ``vocab_size`` is the rows of the student's embedding. Raises StageFault
    ``teacher.wrong-output`` if they are not the teacher's own.
    """
    settings = gkd.settings
    gkd.step("computing the teacher's log-probabilities")
    signal: Signal
    if settings.loss == "topk":
        signal = teacher.topk(
            batch,
            settings.top_k,
            temperature=settings.temperature,
            vocab_size=vocab_size,
        )
    else:
        signal = teacher.full(batch, vocab_size=vocab_size)
    gkd.step("checking the teacher's answer against a forward pass")
    difference = teacher_targets.check_answer(
        teacher,
        batch,
        signal,
        temperature=settings.temperature,
        vocab_size=vocab_size,
    )
    gkd.fact("teacher_max_difference_nats", difference)
    return signal
