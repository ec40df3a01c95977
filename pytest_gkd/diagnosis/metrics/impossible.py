"""What the numbers of a sound run cannot be, because of what they mean.

A divergence is not negative; a policy that moves away from its reference differs from
it; a validation of weights that change does not come out the same to the last digit;
and whatever is trained does not repeat its losses one for one. Where a log may print a
number that means something else (a default, an estimate, the last known), it is a note.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence

from pytest_gkd.diagnosis.metrics import statistics as robust
from pytest_gkd.diagnosis.metrics.judging import (
    ENOUGH,
    LEAST,
    SURE,
    Judges,
    NumberFinding,
    Run,
    below,
    ends,
    found,
    since,
    window,
)
from pytest_gkd.diagnosis.metrics.series import Series

JUDGES = Judges()

# The least divergence that parts of two distributions can have, such as the likeliest
# tokens: p log(p / q) with q = 1 is least at p = 1/e (the log sum inequality; Cover and
# Thomas, Elements of Information Theory, 2.7.1). That of whole ones is 0.
LOWEST = -1 / math.e
# Adam may have moved a weight this far in all (a step moves it by about the rate:
# Kingma and Ba, arXiv 1412.6980, section 2.1), of which the loss usually shows some.
MOVED = 0.1
# No mean over tokens reaches this.
HUNDREDS = 100.0
# A loss that changed by no more than this share is the same.
SAME = 0.05
# The longest cycle of losses that is looked for.
MOST_PERIODS = 64
# Validations of the same weights that are no coincidence.
VALIDATIONS = 5
# A loss below this may be as low as its numbers go.
TINY = 1e-5
# What is printed in each step though measured now and then repeats itself, too: what
# repeats itself for so many times as long as ever before is not that.
LONGER = 5
# What last changes by no more than this share of what is usual approaches a floor.
SLOWED = 0.1

_DIVERGENCE = re.compile(
    r"distill?(?:ation)?_?/?loss|(?:^|[/_])(?:kd|jsd|gkd|rkl)_?loss"
)
_REFERENCE = re.compile(r"(?:^|/)(?:kl_loss|ref_kl|kl)(?:/mean|_mean)?$")
_COEFFICIENT = re.compile(r"kl_(?:loss_)?(?:coef|ctl|beta)")


@JUDGES.of("loss")
def _below_zero(series: Series, run: Run) -> Iterator[NumberFinding]:
    """A divergence or a cross-entropy that becomes negative.

    The loss of a policy may be negative; so may the estimate of a divergence by which
    one is trained (verl, trainer/distillation/losses.py: k1).
    """
    series = series.finite()
    divergence = _DIVERGENCE.search(series.name.lower()) is not None
    texts = run.only_imitates and not run.may_act
    if len(series) < 2 * ENOUGH or not (divergence or texts):
        return
    values = series.values
    at = since(series, below(0.0))
    before = values[max(0, at - window(series)) : at]
    last = robust.median(values[-window(series) :])
    if len(values) - at < ENOUGH or last > -LEAST or not (divergence or before):
        return
    usual = robust.median(before) if before else 0.0
    if before and (usual <= 0 or -last < SURE * robust.deviation(before)):
        return
    text = f"falls below 0, to {last:.4g}, as no divergence or cross-entropy can"
    fell = last < LOWEST and robust.median(values[: window(series)]) > -LOWEST
    certain = fell and divergence and texts
    yield found(series, at, "train.diverged", text, certain=certain)


@JUDGES.of("loss")
def _of_no_tokens(series: Series, run: Run) -> Iterator[NumberFinding]:
    """A loss of hundreds from the first step on that does not fall.

    Guessing costs the logarithm of the vocabulary, 12 for 150,000 tokens. One that is a
    sum over tokens falls all the same, but for a student that is trained already.
    """
    values = series.finite().values
    if len(values) < 5 or not run.only_imitates or min(values) < HUNDREDS:
        return
    if robust.trend(values) > -2:
        text = (
            f"is {robust.median(values):.4g} and does not fall; guessing costs about 12"
        )
        yield found(series, 0, "train.diverged", text, certain=False)


@JUDGES.of("KL", "policy loss")
def _no_distance(series: Series, run: Run) -> Iterator[NumberFinding]:
    """A distance to the reference that is exactly 0 though the policy moves.

    Without a reference OpenRLHF prints a KL of 0 (trainer/ppo_trainer.py), and verl a
    KL loss of 0 (workers/actor/dp_actor.py), but no coefficient. Values of few decimals
    may be rounded to 0.
    """
    if len(series) < 2 * ENOUGH or any(series.values):
        return
    if _REFERENCE.search(series.name.lower()) is None or not (run.moves and run.exact):
        return
    wanted = any(
        _COEFFICIENT.search(one.name) and len(one) >= ENOUGH and min(one.values) > 0
        for one in run.every
    )
    if wanted:
        text = "is exactly 0 in every step though the policy changes: is the policy "
        text += "its own reference?"
        yield found(series, 0, "train.diverged", text, certain=False)


@JUDGES.of("validation loss")
def _same_validation(series: Series, run: Run) -> Iterator[NumberFinding]:
    """Validations that do not change, though what they validate is trained.

    Where lines of training repeat the last one, nothing tells how many were made. If
    all have three decimals, the last may hide what changed.
    """
    values = series.values
    same = _repeated(values, 1)
    at = len(series) - same
    if same < max(VALIDATIONS, LONGER * _longest(values[:at], 1)):
        return
    if not _is_precise(values[-1]):
        return
    for one in run.of("loss"):
        earlier = sum(1 for step in one.steps if step < series.steps[at])
        if len(one) - earlier < 2 * same:
            continue
        trained = one.since(earlier).finite()
        if (levels := ends(trained)) is None:
            continue
        first, last = levels
        if last < 0.95 * first and robust.trend(trained.values) < -SURE:
            text = (
                f"is {series.values[-1]:.4g} in {same} validations while the loss "
                f"falls from {first:.4g} to {last:.4g}: the validated weights are not "
                "the trained ones"
            )
            certain = round(values[-1], 3) != values[-1]
            yield found(series, at, "sync.not-applied", text, certain=certain)
            return


@JUDGES.of("loss")
def _stands_still(series: Series, run: Run) -> Iterator[NumberFinding]:
    """A loss that repeats itself, or that its optimizer does not change.

    The latter only from the first step on: later a loss may have reached its plateau,
    where one of a student that is trained already begins.
    """
    series = series.finite()
    if len(series) < 2 * ENOUGH or run.rate == 0:
        return
    values = series.values
    period, same = _period(values)
    if same >= max(10, 2 * period, len(values) // 3):
        before = values[: len(values) - same]
        if max(map(abs, values[-period:])) < TINY:
            return
        if same < LONGER * _longest(before, period):
            return
        text = f"the same {period} values again and again from here on"
        if period == 1:
            text = f"is {values[-1]:.4g} in every step from here on"
        # Else it may not have been measured again, or have been learned to its floor.
        moves = [abs(late - early) for early, late in itertools.pairwise(before)]
        certain = min(len(before), same / 4) >= ENOUGH and (
            robust.median(moves[-ENOUGH:]) > SLOWED * robust.median(moves)
        )
        yield found(series, len(before), "train.no-grad", text, certain=certain)
        return
    if not run.only_imitates or len(values) < 4 * ENOUGH or min(values) <= 0:
        return
    if series.steps[0] > 2 * (series.steps[1] - series.steps[0]):
        return  # resumed
    third = len(values) // 3
    first, last = robust.median(values[:third]), robust.median(values[-third:])
    moved = (run.rate or 0.0) * (series.steps[-1] - series.steps[0])
    error = robust.deviation(values) * math.sqrt(math.pi / third)  # of last - first
    alike = abs(last - first) + error < SAME * first
    trained = any(robust.median(one) > 0 for one in run.gradients)
    if alike and moved >= MOVED and trained and _is_steady(values):
        text = (
            f"does not change, {first:.4g} in the first third and {last:.4g} in the "
            f"last, with a learning rate of {run.rate:.4g} and gradients other than 0: "
            "does the optimizer hold the model's parameters?"
        )
        yield found(series, 0, "train.no-grad", text, certain=False)


def _is_steady(values: Sequence[float]) -> bool:
    """Whether neither a trend nor a change of level is significant."""
    return abs(robust.trend(values)) < 2 and robust.change(values)[1] > 0.1


def _period(values: Sequence[float]) -> tuple[int, int]:
    """After how many values they come again, and for how many at the end; or 0, 0."""
    for period in range(1, min(MOST_PERIODS, len(values) // 3)):
        precise = sum(map(_is_precise, values[-period:])) > period / 2
        if precise and (same := _repeated(values, period)) > 2 * period:
            return period, same
    return 0, 0


def _repeated(values: Sequence[float], period: int) -> int:
    """How many values at the end equal those one period before, these included."""
    same = 0
    for at in range(len(values) - 1, period - 1, -1):
        if values[at] != values[at - period]:
            break
        same += 1
    return same + period if same else 0


def _longest(values: Sequence[float], period: int) -> int:
    """The most values in succession that equal those one period before."""
    longest = same = 0
    for early, late in zip(values, values[period:], strict=False):
        same = same + 1 if early == late else 0
        longest = max(longest, same + period if same else 0)
    return longest


def _is_precise(value: float) -> bool:
    """Whether it has so many digits that it does not come again by chance."""
    return len(repr(value).strip("-0.").replace(".", "").split("e")[0]) >= 4
