"""Checks the engine's answers by a forward pass with the weights it should hold."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pytest_gkd.stage_api import StageFault
from pytest_gkd.workload.sync import push

if TYPE_CHECKING:
    from pytest_gkd.workload.engine.engine import Completion
    from pytest_gkd.workload.engine.greedy import GreedyCheck
    from pytest_gkd.workload.layouts.layout import Job

# Short and plain: any language model can continue these confidently.
PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "One, two, three, four,",
)


def check(
    job: Job, prompts: list[list[int]], completions: list[Completion]
) -> list[GreedyCheck]:
    """Judge each greedy completion by one forward pass of the trainer's weights.

    Raises StageFault ``train.nan`` for a log-probability that is not a number.
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


def judge(
    job: Job, checks: list[GreedyCheck], when: str, *, pushed: bool = True
) -> str:
    """Raise StageFault unless the engine's answers are those of the reference.

    Returns, in words, what is no fault but worth reporting, else an empty text.

    ``when`` says what went before, such as ``after the push``, and ``pushed`` whether
    that was a push. If tokens or log-probabilities differ from the reference's, the
    engine's tensors tell why: weights that the trainer never sends
    (``sync.name-or-shape``), weights other than the trainer's, or the right ones, from
    which it computes something else (both ``vllm.wrong-output``).
    """
    problem = _wrong_tokens(checks) or _far_logprobs(checks)
    if not problem:
        return ""
    tokens, detail = problem
    tokens = f"{when} {tokens}"
    engine = job.engine_digests()
    others = push.differing(engine, job.trainer_digests())
    # Scales of quantized layers have other names; no trainer has them to send.
    endings = (".weight", ".bias") if pushed else ()
    never_sent = [name for name in job.parameter_map.unfilled if name.endswith(endings)]
    cause = "vllm.wrong-output"
    if others:
        why = (
            f"{len(others)} of {len(engine)} tensors in the engine are not the "
            f"trainer's ({push.some(others)})"
        )
    elif never_sent:
        cause = "sync.name-or-shape"
        why = (
            f"{len(never_sent)} of the engine's parameters are not among the tensors "
            f"that the trainer sends ({push.some(never_sent)})"
        )
    else:
        why = f"all {len(engine)} tensors in the engine equal the trainer's"
        if job.parameter_map.by_content:
            unsure = len(job.parameter_map.by_content)
            why += f", {unsure} of them but for the order of their elements"
        elif _is_rounding(checks):
            return f"{tokens}, narrowly, as half precision may round: {why}; {detail}"
    raise StageFault(
        cause,
        f"{tokens}: {why}; {detail}",
        facts={
            "first_completion": detail,
            "tensors": len(engine),
            "differing": others,
            "never_sent": never_sent[:10],
        },
    )


def _wrong_tokens(checks: list[GreedyCheck]) -> tuple[str, str] | None:
    wrong = [(n, found) for n, found in enumerate(checks) if not found.agree]
    if not wrong:
        return None
    number, first = wrong[0]
    return (
        f"{len(wrong)} of {len(checks)} greedy completions are not what the trainer's "
        "weights give",
        f"completion {number} differs at {len(first.disagreements)} of "
        f"{first.positions} positions, first at {first.disagreements[0]}: engine "
        f"{first.found}, reference {first.expected}, {first.max_logprob_gap:.3g} nats "
        f"apart at most, {first.tolerance:.3g} allowed",
    )


def _is_rounding(checks: list[GreedyCheck]) -> bool:
    wrong = [check for check in checks if not check.agree]
    narrow = all(check.few_and_narrow for check in wrong)
    return bool(wrong) and narrow and not any(check.is_far for check in checks)


def _far_logprobs(checks: list[GreedyCheck]) -> tuple[str, str] | None:
    far = [(n, found) for n, found in enumerate(checks) if found.is_far]
    if not far:
        return None
    number, first = far[0]
    return (
        f"the log-probabilities of {len(far)} of {len(checks)} greedy completions are "
        "not what the trainer's weights give",
        f"every token is right, but those of completion {number} are up to "
        f"{first.max_logprob_difference:.3g} nats apart, {first.far:.3g} allowed",
    )


def deviation(checks: list[GreedyCheck]) -> str:
    """In words, that log-probabilities deviate by more than rounding; empty if not."""
    apart = largest_difference(checks)
    tolerance = max(check.tolerance for check in checks)
    if apart is None or apart <= tolerance:
        return ""
    return (
        f"the engine's log-probabilities are up to {apart:.2g} nats from those of a "
        f"reference forward pass, where rounding gives less than {tolerance:.2g}: "
        "probability ratios between rollout and trainer will not start at 1"
    )


def same_answers(
    before: list[Completion], after: list[Completion], tolerance: float
) -> bool:
    """Whether tokens are the same and log-probabilities (nats) within ``tolerance``.

    Tokens alone are not enough: a model may say the same thing whatever its weights.
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
    """The largest difference (nats) in log-probabilities, engine to reference."""
    found = (check.max_logprob_difference for check in checks)
    return max((value for value in found if value is not None), default=None)
