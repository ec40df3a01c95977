"""What a run learns: losses, gradients, rewards, entropy, lengths, experts.

What no engineer would let run on is certain: NaN or infinity, a gradient or learning
rate of 0, a reward that never changes or is lost again, a model worse than at its
start. What may be as intended is not: a loss that rises when harder data comes, an
entropy or a length that falls while the reward rises, a validation loss that turns up.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from pytest_gkd.diagnosis.metrics import statistics as robust
from pytest_gkd.diagnosis.metrics.judging import (
    ENOUGH,
    FAR,
    LASTS,
    LEAST,
    SURE,
    Judges,
    NumberFinding,
    Run,
    above,
    below,
    ends,
    found,
    levels,
    since,
    window,
)
from pytest_gkd.diagnosis.metrics.roles import role
from pytest_gkd.diagnosis.metrics.series import Series

JUDGES = Judges()

# If this share of responses is truncated, the reward of the rest means nothing.
NEARLY_ALL = 0.95
# A loss that varies so many times less than before comes from fewer data.
SMOOTHER = 10
# So many values are a level at once.
FIRST = 5
# A policy may well give answers of equally many tokens, if of fewer than this.
SHORT = 64
# A loss that rises so many nats above its lowest, and above its start, is no harder
# data: of a language model that is a likelihood of a twentieth, token by token.
GUESSES = 3.0
# A cross-entropy at this level that does not fall is that of guessing among thousands.
UNTAUGHT = 8.0
HUNDREDS = 100.0
# So many values in succession that rise have a chance of 1 in their factorial, 720.
RISES = 6
# Peaks that come so often, so high, are a habit of the run.
PEAKS, HIGH = 5, 3.0
# What shows that a policy changes, whatever it learns.
_CHANGES = ("entropy", "response length", "KL")


@JUDGES.of(
    *("loss", "policy loss", "value loss", "gradient norm", "entropy", "KL", "reward"),
    *("validation loss", "validation score"),
)
def _not_finite(series: Series, run: Run) -> Iterator[NumberFinding]:
    at = since(series, lambda value: not math.isfinite(value))
    lasting = 2 if role(series.name).endswith("loss") else 3  # as the scale is found
    if len(series) - at >= min(lasting, len(series)) and not _goes_on(series, run):
        before = series.finite()
        usual = (
            f"{robust.median(before.values):.4g} before"
            if len(before)
            else "no number before"
        )
        text = f"is {series.values[at]} from here on; {usual}"
        yield found(series, at, "train.nan", text)


def _goes_on(series: Series, run: Run) -> bool:
    """Whether another metric of its kind has finite values after its last one."""
    last = series.places[-1][1]
    return any(
        role(one.name) == role(series.name)
        and len(one) >= 3
        and one.places[-3][1] > last
        and all(map(math.isfinite, one.values[-3:]))
        for one in run.every
    )


@JUDGES.of("loss", "gradient norm")
def _not_finite_now_and_then(series: Series, run: Run) -> Iterator[NumberFinding]:
    """A loss that is not finite again and again, in more than a tenth of the steps."""
    late = series.values[len(series) // 2 :]
    lost = [one for one in late if not math.isfinite(one)]
    if len(late) >= 4 * ENOUGH and len(late) / 10 < len(lost) < len(late) / 2:
        at = next(at for at, one in enumerate(series.values) if not math.isfinite(one))
        text = f"is not finite in {len(lost)} of the last {len(late)} steps"
        yield found(series, at, "train.nan", text, certain=False)


@JUDGES.of("gradient norm")
def _no_gradient(series: Series, run: Run) -> Iterator[NumberFinding]:
    at = since(series, lambda value: abs(value) < 1e-9)
    part = any(abs(values[-1]) > 1e-9 for values in run.gradients)
    if len(series) - at >= 5 and not run.solved(series.steps[at]):
        text = "is 0 from here on"
        yield found(series, at, "train.no-grad", text, certain=not part)


@JUDGES.of("loss", "gradient norm")
def _diverges(series: Series, run: Run) -> Iterator[NumberFinding]:
    """A loss or a gradient that ends far above its lowest level.

    The loss of a run with rewards follows the KL term, from 0 upwards (huggingface/trl
    f2cd577, docs/source/grpo_trainer.md, Computing the loss).
    """
    series = series.finite()
    width = window(series)
    if len(series) < ENOUGH or min(series.values) < 0:
        return
    values = series.values
    is_loss = role(series.name) == "loss"
    known = levels(values, width)
    end = len(values) - width
    lowest = min((at for at in known if at <= end - width // 2), key=known.__getitem__)
    best, last = max(known[lowest], LEAST), known[end]
    if is_loss and last < 0.5 and any(role(one.name) == "reward" for one in run.every):
        return
    usual = values[lowest : lowest + width]
    spread = max(robust.deviation(usual), 0.02 * best)
    at = min(since(series, above(best + FAR * spread)), len(series) - 1)
    lasts = len(series) - at > width  # as after a jump at which the run ended
    rises = robust.trend(values[lowest:]) > SURE
    factor = (1.2 if last > 1.1 * known[0] else 1.5) if is_loss else 10.0
    if last > factor * best and last > best + SURE * spread and (rises or lasts):
        text = f"rises from {best:.4g} to {last:.4g}"
        worse = _is_broken if is_loss else _explodes
        certain = worse(run, known[0], best, last, values[at:]) and last > 1.5 * best
        yield found(series, at, "train.diverged", text, certain=certain)


@JUDGES.of("loss", "gradient norm")
def _rises_at_once(series: Series, run: Run) -> Iterator[NumberFinding]:
    """Few values, too few for a level, of which each exceeds the one before.

    That so many in succession do is no chance (RISES), and a warm-up does not triple a
    loss.
    """
    series = series.finite()
    values = series.values
    if not RISES - 1 <= len(values) < 2 * ENOUGH or not run.only_imitates:
        return
    lowest = min(range(len(values)), key=values.__getitem__)
    rising = values[lowest:]
    least = 3.0 if role(series.name) == "loss" else 30.0
    if len(rising) < RISES - 1 or rising[0] <= 0 or rising[-1] < least * rising[0]:
        return
    if all(early < late for early, late in itertools.pairwise(rising)):
        text = f"rises in each step, from {rising[0]:.4g} to {rising[-1]:.4g}"
        yield found(series, lowest + 1, "train.diverged", text, certain=False)


@JUDGES.of("loss")
def _starts_over(series: Series, run: Run) -> Iterator[NumberFinding]:
    """A loss that is, at once, back where it began, and falls again as it did then.

    Weights that were not loaded look like that, and so may other data.
    """
    series = series.finite()
    values = series.values
    if len(values) < 4 * ENOUGH or not run.only_imitates or min(values) <= 0:
        return
    first = robust.median(values[:3])
    for at in range(2 * ENOUGH, len(values) - ENOUGH):
        before = robust.median(values[at - ENOUGH : at])
        gap = first - before
        if gap < 0.3 * first or values[at - 1] > before + 0.2 * gap:
            continue
        after, most = values[at : at + ENOUGH], max(values[:3]) + 0.3 * gap
        back = before + 0.8 * gap < min(after[:3]) <= max(after) < most
        if back and min(after) > before + 0.4 * gap:
            text = (
                f"leaps from {before:.4g} to {after[0]:.4g}, near the {first:.4g} at "
                "which it began: were the weights loaded?"
            )
            yield found(series, at, "train.diverged", text, certain=False)
            return


@JUDGES.of("loss")
def _untaught(series: Series, run: Run) -> Iterator[NumberFinding]:
    """A cross-entropy as high as by guessing, from the first step on, and level."""
    series = series.finite()
    values = series.values
    if len(values) < 4 * ENOUGH or not run.only_imitates:
        return
    level = robust.median(values)
    high = min(values) >= UNTAUGHT and max(values) < min(2 * level, HUNDREDS)
    if high and robust.trend(values) > -2:
        text = f"stays at {level:.4g} in {len(values)} steps, as by guessing"
        yield found(series, 0, "train.diverged", text, certain=False)


@JUDGES.of("loss")
def _leaps_again_and_again(series: Series, run: Run) -> Iterator[NumberFinding]:
    """A loss with peaks throughout, of which each passes: some batches are broken.

    Peaks after which a run recovers are usual, but rare (Chowdhery et al., PaLM, arXiv
    2204.02311, section 5.1: some 20 in a whole training).
    """
    series = series.finite()
    values = series.values
    if len(values) < 8 * ENOUGH or not run.only_imitates or min(values) <= 0:
        return
    usual = robust.median(values)
    limit = max(HIGH * usual, usual + FAR * robust.deviation(values))
    limit = max(limit, robust.median(values[:3]))  # a loss near 0 varies by as much
    high = [at for at in range(len(values) // 10, len(values)) if values[at] > limit]
    peaks = [at for at in high if values[at - 1] <= limit]
    if len(peaks) < PEAKS or len(high) > len(values) / 4:
        return
    if peaks[-1] >= len(values) * 3 // 4:
        most = robust.median([values[at] for at in high])
        text = (
            f"leaps to {most:.4g} {len(peaks)} times and falls to {usual:.4g} again: "
            "what is in those batches?"
        )
        yield found(series, peaks[0], "train.diverged", text, certain=False)


@JUDGES.of_ends("value loss")
def _critic(
    series: Series, run: Run, first: float, last: float
) -> Iterator[NumberFinding]:
    """A critic whose error explodes: worse than a constant, or than any return.

    A value loss may well grow with the returns (from 0, when rewards first come).
    """
    values = series.values
    known = levels(values, window(series))
    best = max(min(known.values()), LEAST)
    at = since(series, above(10 * best))
    if last < 10 * best or len(values) - at <= window(series):
        return
    largest = max(map(abs, run.returns), default=0.0)
    if last <= largest**2:  # a mean square
        return
    beyond = largest > 0 and last > 100 * largest**2
    text = f"rises from {best:.4g} to {last:.4g}"
    worse = run.explained is not None and run.explained < -1
    certain = last > 100 * best and (beyond or worse)
    yield found(series, at, "train.diverged", text, certain=certain)


@JUDGES.of("loss")
def _same_batch(series: Series, run: Run) -> Iterator[NumberFinding]:
    """A loss that loses its noise: batches differ, one and the same batch does not.

    The noise is the median of the second differences, relative to the loss; neither
    the rate nor a trend changes it. A task that is learned to its floor loses it too.
    """
    series = series.finite()
    if len(series) < 4 * ENOUGH or not run.only_imitates or min(series.values) <= 0:
        return
    values = series.values
    noise = [
        abs(early - 2 * middle + late) / middle
        for early, middle, late in zip(values, values[1:], values[2:], strict=False)
    ]
    part = len(noise) // 4
    usual, now = robust.median(noise[:part]), robust.median(noise[-part:])
    if now > 0 and usual > SMOOTHER * now and usual > 0.01:
        at = 1 + _since(noise, usual / SMOOTHER)
        text = (
            f"step-to-step noise fell from {usual:.2%} to {now:.2%}: the same batch "
            "again and again?"
        )
        yield found(series, at, "train.diverged", text, certain=False)


def _since(noise: list[float], limit: float) -> int:
    """The index from which the noise stays below, in the median of nine."""
    at = len(noise) - 9
    while at > 0 and robust.median(noise[at - 1 : at + 8]) < limit:
        at -= 1
    return at


@JUDGES.of("loss")
def _contradicts(series: Series, run: Run) -> Iterator[NumberFinding]:
    """A distillation whose loss leaps above all it was before anything was learned.

    The student's own answers are likely to it; a teacher that finds some of them less
    likely than those of the untrained student may answer of other tokens.
    """
    series = series.finite()
    values = series.values
    if len(values) < 4 * ENOUGH or min(values) <= 0 or not run.of("response length"):
        return
    if not (run.only_imitates or run.distils):
        return
    first, last = values[:ENOUGH], robust.median(values[-window(series) :])
    leaps = [at for at, value in enumerate(values) if value > 1.2 * max(first)]
    if 2 <= len(leaps) < len(values) / 8 and last < 0.5 * robust.median(first):
        text = (
            f"leaps to {values[leaps[0]]:.4g} in {len(leaps)} steps, above the "
            f"{robust.median(first):.4g} of the untrained student; usually {last:.4g}"
        )
        yield found(series, leaps[0], "teacher.wrong-output", text, certain=False)


@JUDGES.of("preference accuracy")
def _at_chance(series: Series, run: Run) -> Iterator[NumberFinding]:
    """Preferences that are guessed: half of the pairs, and a loss twice its first.

    What the first is depends on the kind of loss: log 2 in DPO (Rafailov et al., arXiv
    2305.18290, equation 7), 25 in IPO with a beta of 0.1.
    """
    series = series.finite()
    if len(series) < 4 * ENOUGH:
        return
    last = robust.median(series.values[-(len(series) // 3) :])
    if not 0.4 <= last <= 0.6 or robust.trend(series.values) > 2:
        return
    worse = any(
        0 < 2 * two[0] < two[1] and robust.trend(one.finite().values) > SURE
        for one in run.of("loss")
        if (two := ends(one)) is not None
    )
    text = f"ranks {last:.0%} of the pairs correctly at the end: chance level"
    yield found(series, 0, "train.diverged", text, certain=worse)


@JUDGES.of("response length")
def _limited(series: Series, run: Run) -> Iterator[NumberFinding]:
    """Answers whose mean length is exactly their largest: all are cut off there.

    A limit below half of the usual length is a fault though the policy may learn to
    keep to it; but a policy may also learn to say as much each time, and get more for
    it. If it is far above that, no answer ends any more, which a policy does not learn
    in one step; where the truncated are counted, they tell.
    """
    series = series.finite()
    values = series.values
    same = len(values) >= ENOUGH and min(values) == max(values)
    if same and values[0] >= SHORT and values[0].is_integer():
        text = f"{values[0]:.4g} in every step: does any answer end?"
        yield found(series, 0, "tokenizer.eos-token", text, certain=False)
        return
    most = list(itertools.accumulate(reversed(values), max))[::-1]  # from here on
    for at in range(ENOUGH, len(values) - ENOUGH):
        limit = most[at]
        if values[at] == limit and values[at : at + ENOUGH].count(limit) > ENOUGH / 2:
            break
    else:
        return
    before, after = values[:at], values[at:]
    usual = robust.median(before)
    counted = [
        value
        for one in run.of("truncated")
        for step, value in zip(one.steps, one.values, strict=True)
        if series.steps[at] <= step <= series.steps[at + ENOUGH - 1]
    ]
    if limit < 0.5 * usual and (not counted or robust.median(counted) >= 0.5):
        text = f"at most {limit:.4g} from here on, {usual:.4g} before: cut short"
        certain = bool(counted) or not run.improves
        yield found(series, at, "train.diverged", text, certain=certain)
        return
    lasts = after.count(limit) >= NEARLY_ALL * len(after)
    if lasts and limit > 1.5 * max(usual, before[-1]) and not run.of("truncated"):
        text = f"{limit:.4g} in nearly every step from here on: no answer ends any more"
        yield found(series, at, "tokenizer.eos-token", text)


@JUDGES.of("reward")
def _not_learned(series: Series, run: Run) -> Iterator[NumberFinding]:
    """A reward without any trend in a policy that changes all the same."""
    series = series.finite()
    values = series.values
    if len(values) < 8 * ENOUGH or not run.counts(series, constant=True):
        return
    changes = [one.finite().values for what in _CHANGES for one in run.of(what)]
    moves = any(abs(robust.trend(one)) > 2 * SURE for one in changes if len(one) > 2)
    if moves and robust.trend(values) < 1:
        text = f"does not rise in {len(values)} steps, though the policy changes"
        yield found(series, 0, "train.diverged", text, certain=False)


@JUDGES.of("likelihood of the chosen")
def _unlikely(series: Series, run: Run) -> Iterator[NumberFinding]:
    """Preferred answers that become less likely than the rejected ones were.

    That they become somewhat less likely is usual (Rafailov et al., arXiv 2404.12358);
    their log-likelihood does not become a multiple of what it was. That of longer
    answers does, but not their reward, which is relative to the reference. Batches
    differ in length, and what a rate far too high does begins at once.
    """
    series = series.finite()
    others = [one.finite().values for one in run.of("likelihood of the rejected")]
    if len(series) < 2 * ENOUGH or not any(others):
        return
    first, *rejected = (
        robust.median(values[:FIRST])
        for values in (series.values, *filter(None, others))
    )
    last, least = robust.median(series.values[-window(series) :]), min(rejected)
    if first < 0 and last < 2 * first and last < least:
        at = since(series, below(min(2 * first, least)))
        text = f"falls from {first:.4g} to {last:.4g}, below the {least:.4g} of the "
        text += "rejected answers at first"
        falls = any(
            robust.trend(one.finite().values) < -SURE
            for one in run.every
            if one.name.endswith("rewards/chosen")
        )
        certain = last < 4 * first and falls
        yield found(series, at, "train.diverged", text, certain=certain)


def _is_broken(
    run: Run, first: float, best: float, last: float, risen: list[float]
) -> bool:
    """Whether a rising loss means a worse model, not harder data.

    Harder data would be learned again, with gradients and learning rate as before; and
    the reward rises with neither.
    """
    if run.improves and any(role(one.name) == "reward" for one in run.every):
        return False
    gradients, rate = run.grown("gradient norm"), run.grown("learning rate") or 1.0
    if last > 1.1 * first:  # worse than at its start
        if run.only_imitates and last > best + GUESSES:
            return True
        as_before = gradients is not None and gradients < 1.5 and rate < 2
        return not as_before or last > 3 * best
    return last > 3 * best and robust.trend(risen) > -SURE


def _explodes(
    run: Run, first: float, best: float, last: float, risen: list[float]
) -> bool:
    """Whether gradients rose by more than clipping can handle."""
    return run.improves is False or (last > 100 * best and not run.improves)


@JUDGES.of_ends("entropy")
def _entropy(
    series: Series, run: Run, first: float, last: float
) -> Iterator[NumberFinding]:
    if first <= 0:
        return
    trend = robust.trend(series.values)
    certain = run.improves is False
    told = f"from {first:.4g} to {last:.4g}"
    if last < 0.3 * first and trend < -SURE:
        at, text = since(series, below(0.3 * first)), f"collapses {told}"
        yield found(series, at, "train.diverged", text, certain=certain)
    elif last > 2 * first and last > first + 1 and trend > SURE:
        at, text = since(series, above(2 * first)), f"runs away {told}"
        yield found(series, at, "train.diverged", text, certain=certain)


@JUDGES.of_ends("KL")
def _far_away(
    series: Series, run: Run, first: float, last: float
) -> Iterator[NumberFinding]:
    """A divergence from the reference that grows ever more, beyond a nat.

    A sum over the tokens of an answer may; a mean over them hardly.
    """
    values = series.values
    middle = robust.median(values[len(values) // 3 : 2 * len(values) // 3])
    if last < 1 or last < 10 * max(first, middle, LEAST):
        return
    if robust.trend(values[len(values) // 2 :]) > SURE:
        at = since(series, above(last / 10))
        text = f"grows ever faster, from {middle:.4g} to {last:.4g}"
        yield found(series, at, "train.diverged", text, certain=False)


@JUDGES.of_ends("clipped share")
def _clipped(
    series: Series, run: Run, first: float, last: float
) -> Iterator[NumberFinding]:
    if first < 0.3 and last > 0.5:
        at = since(series, above(0.4))
        text = f"from {first:.4g} to {last:.4g} of the updates are clipped"
        yield found(series, at, "train.diverged", text, certain=False)


@JUDGES.of("validation score")
def _score_falls(series: Series, run: Run) -> Iterator[NumberFinding]:
    """What was learned is lost again, as validations show.

    Those are few and of few examples, so each of the last three must show it.
    """
    series = series.finite()
    values = series.values
    if len(values) < 5 or min(values) < 0:
        return
    triples = [min(values[at : at + 3]) for at in range(len(values) - 2)]
    highest = max(range(len(triples)), key=triples.__getitem__)
    best, last = triples[highest], max(values[-3:])
    if best > 0.05 and last < 0.5 * best:
        at = since(series, below(0.5 * best))
        text = f"falls from {best:.4g} to {robust.median(values[-3:]):.4g}"
        certain = last < 0.3 * best and len(values) - at >= LASTS
        yield found(series, at, "train.diverged", text, certain=certain)


@JUDGES.of("skipped steps")
def _skipped(series: Series, run: Run) -> Iterator[NumberFinding]:
    """Each step is left out, as after an overflow, to the end of the log.

    The number is that of all steps so far (DeepSpeed, runtime/engine.py) or of those
    since the last line (Megatron-LM, training/training.py).
    """
    series = series.finite()
    counts, steps = series.values, series.steps
    at = len(counts)
    while at > 1:
        since_last = steps[at - 1] - steps[at - 2]
        told = {counts[at - 1], counts[at - 1] - counts[at - 2]}
        if since_last not in told:
            break
        at -= 1
    if len(counts) - at >= 4 * ENOUGH:
        text = "every step from here on is skipped: its gradients are not finite"
        yield found(series, at, "train.nan", text)


@JUDGES.of_ends("dead experts")
def _dead(
    series: Series, run: Run, first: float, last: float
) -> Iterator[NumberFinding]:
    if last >= first + 1 and robust.trend(series.values) > 2 * SURE:
        text = f"rises from {first:.4g} to {last:.4g}"
        at = since(series, above(first))
        yield found(series, at, "train.moe", text, certain=False)


@JUDGES.of("validation loss")
def _overfits(series: Series, run: Run) -> Iterator[NumberFinding]:
    series = series.finite()
    if len(series) < 5:
        return
    values = series.values
    lowest = min(range(len(values)), key=values.__getitem__)
    best, last = max(values[lowest], LEAST), values[-1]
    if last > 1.2 * best and robust.trend(values[lowest:]) > 2:
        text = f"rises from {best:.4g} to {last:.4g} while the training goes on"
        # The best checkpoint is kept, or the model is worse than it ever was.
        lost = last - best > 0.5 * (values[0] - best)
        certain = (last > 1.5 * best and lost) or last > values[0]
        yield found(series, lowest + 1, "train.diverged", text, certain=certain)


@JUDGES.of("learning rate")
def _no_learning_rate(series: Series, run: Run) -> Iterator[NumberFinding]:
    at = since(series, lambda value: value == 0)
    if len(series) - at >= max(5, len(series) // 10):
        yield found(series, at, "train.no-grad", "is 0 from here on")


@JUDGES.of("learning rate")
def _rate_explodes(series: Series, run: Run) -> Iterator[NumberFinding]:
    """A rate that grows by ever more, to the end; a warm-up's grows evenly."""
    values = series.finite().values
    if len(values) < 4 * ENOUGH or min(values) < 0:
        return
    quarter, middle, last = (values[len(values) * k // 4 - 1] for k in (1, 2, 4))
    if quarter > 0 and last > 4 * middle > 6 * quarter and last == max(values):
        at = since(series, above(2 * middle))
        text = f"grows ever faster, from {middle:.4g} to {last:.4g}"
        yield found(series, at, "train.diverged", text, certain=False)


@JUDGES.of_ends("staleness")
def _old_rollouts(
    series: Series, run: Run, first: float, last: float
) -> Iterator[NumberFinding]:
    """Answers of ever older weights: the trainer outruns what it is given."""
    grows = robust.trend(series.values[len(series) // 2 :]) > SURE
    if grows and last > 3 * max(first, 1) and last >= 5:
        at = since(series, above(2 * max(first, 1)))
        text = f"rollouts grow ever older, from {first:.4g} to {last:.4g}"
        yield found(series, at, "sync.not-applied", text, certain=False)


@JUDGES.of_ends("loss scale")
def _loss_scale(
    series: Series, run: Run, first: float, last: float
) -> Iterator[NumberFinding]:
    if last <= 1 and first >= 64:
        text = f"falls from {first:.4g} to {last:.4g}: gradients overflow"
        yield found(series, since(series, below(first)), "train.nan", text)


@JUDGES.of("reward", "accuracy")
def _falls(series: Series, run: Run) -> Iterator[NumberFinding]:
    if role(series.name) == "reward" and not run.counts(series):
        return
    series = series.finite()
    width = window(series)
    if len(series) < 2 * ENOUGH:
        return
    values = series.values
    known = levels(values, width)
    highest = max(known, key=known.__getitem__)
    best, last = known[highest], known[len(values) - width]
    spread = max(robust.deviation(values[highest : highest + width]), LEAST)
    if (
        last < best - max(0.2 * abs(best), 3 * spread)
        and len(values) - highest >= ENOUGH
        and robust.trend(values[highest:]) < -SURE
    ):
        lost = best - last
        at = since(series, below(best - max(3 * spread, lost / 5)))
        # Harder prompts cost some of what was learned, not most of it.
        certain = lost > 0.5 * (best - known[0]) or lost > 0.5 * abs(best)
        text = f"falls from {best:.4g} to {last:.4g}"
        yield found(series, at, "train.diverged", text, certain=certain)


@JUDGES.of("reward")
def _constant(series: Series, run: Run) -> Iterator[NumberFinding]:
    if not run.counts(series, constant=True):
        return
    at = since(series, lambda value: value == series.values[-1])
    learned = robust.trend(series.values[:at]) > SURE
    if learned and series.values[-1] == max(series.values):
        before = series.values[max(0, at - ENOUGH) : at]
        leap = series.values[-1] - robust.median(before or [0.0])
        lasts = len(series) - at >= max(10, len(series) // 3)
        if (
            lasts
            and at >= 2 * ENOUGH
            and leap > FAR * max(robust.deviation(before), LEAST)
        ):
            text = (
                f"leaps from {before[-1]:.4g} to {series.values[-1]:.4g} and is that "
            )
            text += (
                "in every step from here on: does the reward still tell answers apart?"
            )
            yield found(series, at, "train.diverged", text, certain=False)
        return  # everything is solved
    # A hard task may give 0 for long, an easy one all that there is.
    differed = at > 0 and series.values[-1] not in {0, max(series.values)}
    if len(series) - at >= max(ENOUGH if differed else 10, len(series) // 3):
        text = f"is {series.values[-1]:.4g} in every step from here on"
        yield found(series, at, "train.diverged", text)


@JUDGES.of_ends("truncated")
def _truncated(
    series: Series, run: Run, first: float, last: float
) -> Iterator[NumberFinding]:
    if max(series.values) > 1:
        return  # how many they are, or how long
    if min(first, last, robust.median(series.values)) >= 0.9:
        text = f"{last:.0%} of the responses never end"
        certain = last >= NEARLY_ALL or not run.improves
        yield found(series, 0, "tokenizer.eos-token", text, certain=certain)
    elif last >= 0.5 and last > first + 0.2:
        # Answers grow while a model learns to reason, but some should still end.
        at = since(series, above(first + 0.2))
        if len(series) - at < LASTS and robust.trend(series.values) <= SURE:
            return
        certain = run.improves is False or last >= NEARLY_ALL
        text = f"from {first:.3g} to {last:.3g} of the responses are cut off"
        yield found(series, at, "train.diverged", text, certain=certain)


@JUDGES.of_ends("response length")
def _lengths(
    series: Series, run: Run, first: float, last: float
) -> Iterator[NumberFinding]:
    if last < 0.25 * first and robust.trend(series.values) < -SURE:
        at, text = since(series, below(0.25 * first)), "collapses from"
        text = f"{text} {first:.4g} to {last:.4g}"
        certain = run.improves is False
        yield found(series, at, "train.diverged", text, certain=certain)


@JUDGES.of_ends("imbalance")
def _experts(
    series: Series, run: Run, first: float, last: float
) -> Iterator[NumberFinding]:
    first = max(first, LEAST)
    if last > 2 * first and robust.trend(series.values) > SURE:
        at, text = since(series, above(2 * first)), f"from {first:.4g} to {last:.4g}"
        late = robust.trend(series.values[len(series) // 2 :])
        certain = last > 3 * first and late > SURE
        yield found(series, at, "train.moe", f"rises {text}", certain=certain)
