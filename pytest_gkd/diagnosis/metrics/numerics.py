"""Whether rollout and trainer compute the same: their mismatch, and its growth.

Two engines never agree to the last bit: their kernels sum in different orders, and bf16
has three digits. DIFFERS says how much that amounts to, each with its source; beyond
twice that, and growing, the rollout no longer has the trainer's weights. Weights that
are not sent any more grow apart step by step; what leaps, or is GROSS and does not
grow, is computed otherwise: precision, sampling parameters, layout.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from pytest_gkd.diagnosis.metrics import statistics as robust
from pytest_gkd.diagnosis.metrics.judging import (
    ENOUGH,
    LASTS,
    SURE,
    Judges,
    NumberFinding,
    Run,
    above,
    below,
    found,
    since,
)
from pytest_gkd.diagnosis.metrics.series import Series

JUDGES = Judges()

# Metrics by name, their value if both compute alike, and the usual deviation from it.
DIFFERS = tuple(
    (re.compile(name, re.IGNORECASE), alike, usual)
    for name, alike, usual in (
        # Usually below 0.005; above 0.01 one of the engines is at fault
        # (verl-project/verl, docs/faq/faq.rst, calculate_log_probs).
        ("probs_diff", 0.0, 0.01),
        # Near 1; above 1.05 something is wrong (NVIDIA-NeMo/RL,
        # docs/guides/dtensor-tp-accuracy.md).
        (r"mult[_. ]prob[_. ]error", 1.0, 0.05),
        # 0.032 on average where weights were verified to be the same (NVIDIA-NeMo/RL,
        # docs/guides/checkpoint-engine-refit.md), 0.14 to 0.37 with experts that are
        # routed again (radixark/miles, issue 2722).
        (r"logprobs?[_.\w]*diff|logp_difference", 0.0, 0.1),
        # About 0.001 (NVIDIA-NeMo/RL, docs/guides/grpo.md, KL Divergence Error); 0.004
        # with experts (NVIDIA/Megatron-LM, pull request 7562).
        ("", 0.0, 0.01),
    )
)
# So many times what is usual is no precision in use, 8 bits and experts included.
GROSS = 10
# So many values of that say enough.
FEWEST = 3
# A difference that grows so many times in one step leaps.
LEAPS = 5
# Correlation of the probabilities: 0.9 with an output layer in bf16, where the weights
# were not at fault, 0.99 with one in fp32 (MiniMax-M1, arXiv 2506.13585, section 3.2).
CORRELATES = 0.9


@JUDGES.of("disagreement")
def _drifts(series: Series, run: Run) -> Iterator[NumberFinding]:
    series = series.finite()
    alike, usual = next(
        (alike, usual) for name, alike, usual in DIFFERS if name.search(series.name)
    )
    apart = [abs(value - alike) for value in series.values]
    beyond = all(one > GROSS * usual for one in apart[-FEWEST:])
    if len(apart) < (FEWEST if beyond else ENOUGH):
        return
    first = robust.median(apart[:3])  # it may begin to drift at once
    last = robust.median(apart[-max(3, len(apart) // 8) :])
    told = f"{alike + first:.4g} to {alike + last:.4g}"
    gross = min(first, last) > GROSS * usual
    grown = last > max(2 * usual, 3 * first)
    at = since(series, above(alike + max(usual, 3 * first)))
    leaps = 0 < at <= len(apart) - ENOUGH and grown
    if leaps:
        leaps = series.steps[at] - series.steps[at - 1] == 1
        leaps = leaps and apart[at] > max(LEAPS * apart[at - 1], last / 2)
    lasts = grown and last > GROSS * usual and len(apart) - at >= LASTS
    if leaps or lasts or ((grown or gross) and robust.trend(apart) > SURE):
        text = f"the rollout drifts from the trainer, {told}"
        cause = "sync.not-applied"
        if leaps:
            text = (
                f"the rollout leaves the trainer at once, {told}: precision, sampling "
                "parameters or routing rather than old weights"
            )
            cause = "vllm.wrong-output"
        yield found(series, at, cause, text)
    elif min(first, last) > usual:
        text = (
            f"rollout and trainer differ by more than numerics as a rule do, {told} "
            f"(up to {alike + usual:.4g}), and no more at the end: precision, sampling "
            "parameters or routing rather than weights"
        )
        yield found(series, 0, "vllm.wrong-output", text, certain=gross)


@JUDGES.of_ends("agreement")
def _disagrees(
    series: Series, run: Run, first: float, last: float
) -> Iterator[NumberFinding]:
    at = since(series, below(first - 0.05))
    falls = len(series) - at >= LASTS or robust.trend(series.values) < -SURE
    if last < min(CORRELATES, first - 0.05) and falls:
        text = f"the rollout drifts from the trainer, {first:.4g} to {last:.4g}"
        yield found(series, at, "sync.not-applied", text)
