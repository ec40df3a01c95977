"""Did the engine answer as the weights it should hold would have it?"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pytest_gkd.fault import StageFault

if TYPE_CHECKING:
    from pytest_gkd.workload.engine import Completion
    from pytest_gkd.workload.greedy import GreedyCheck
    from pytest_gkd.workload.layouts import Job

# Short and plain: any language model has an opinion on how these go on.
PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "One, two, three, four,",
)


def check(
    job: Job, prompts: list[list[int]], completions: list[Completion]
) -> list[GreedyCheck]:
    """Judge greedy ``completions`` by one forward pass of the trainer's weights each.

    Raises StageFault ``train.nan`` for a log-probability that is no number.
    """
    for number, completion in enumerate(completions):
        bad = [p for p, v in enumerate(completion.logprobs) if not math.isfinite(v)]
        if bad:
            raise StageFault(
                "train.nan",
                f"the engine gives token {bad[0]} of completion {number} the "
                f"log-probability {completion.logprobs[bad[0]]}; expected a finite "
                "number",
                facts={"completion": number, "position": bad[0], "positions": len(bad)},
            )
    return [
        job.trainer.check_greedy(prompt, completion.token_ids, completion.logprobs)
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


def disagreement(checks: list[GreedyCheck]) -> str:
    """Where engine and reference part, in words; empty when they agree."""
    wrong = [(n, found) for n, found in enumerate(checks) if not found.agree]
    if not wrong:
        return ""
    number, first = wrong[0]
    return (
        f"{len(wrong)} of {len(checks)} greedy completions are not what the trainer's "
        f"weights give: completion {number} differs at {len(first.disagreements)} of "
        f"{first.positions} positions, first at {first.first_disagreement}, where the "
        f"engine chose token {first.found} and a reference forward pass "
        f"{first.expected} ({first.max_logprob_gap:.3g} nats apart at most, "
        f"{first.tolerance:.3g} allowed)"
    )


def same_answers(
    before: list[Completion], after: list[Completion], tolerance: float
) -> bool:
    """The same tokens, with log-probabilities (nats) within ``tolerance``.

    Tokens alone would not do: a model may say one thing whatever its weights.
    """
    return all(
        old.token_ids == new.token_ids
        and all(
            abs(a - b) <= tolerance
            for a, b in zip(old.logprobs, new.logprobs, strict=True)
        )
        for old, new in zip(before, after, strict=True)
    )


def largest_difference(checks: list[GreedyCheck]) -> float | None:
    """The largest difference (nats) of log-probabilities, engine to reference."""
    found = [c.max_logprob_difference for c in checks]
    known = [value for value in found if value is not None]
    return max(known, default=None)
