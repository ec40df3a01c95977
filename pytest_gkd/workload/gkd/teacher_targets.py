"""The teacher's targets for the trainer, checked against a plain forward pass.

Plain arrays, so that they may cross process boundaries. A signal of the right shape may
be shifted by one token, or have another temperature, and a loss falls all the same: the
student learns the wrong thing.
"""

from __future__ import annotations

from collections.abc import Sequence as Listing
from dataclasses import dataclass
from typing import Any

from pytest_gkd.stage_api import StageFault
from pytest_gkd.workload.gkd.batch import Sequence

# Long enough to detect a shift, short enough for a 150k vocabulary.
POSITIONS = 16
# Rounding alone may route a single token of a mixture of experts differently.
OUTLIER = 8.0
# Temperatures must differ by more than this for the message to name the other one.
ANOTHER = 0.01


@dataclass(frozen=True)
class TeacherTopK:
    """The teacher's most likely tokens, aligned with the response tokens.

    ``logprobs`` float32 and ``ids`` int64 are [batch, response, k], most likely first:
    log-probabilities (nats) of the full softmax at ``temperature``. ``mask`` is bool
    [batch, response], false past the end of a response, where the rest is padding.
    """

    logprobs: Any
    ids: Any
    mask: Any
    temperature: float = 1.0


@dataclass(frozen=True)
class TeacherFull:
    """The teacher's whole distribution, aligned with the response tokens.

    ``logprobs`` float32 [batch, response, vocab], in nats at temperature 1; ``mask``
    bool [batch, response].
    """

    logprobs: Any
    mask: Any


@dataclass(frozen=True)
class PlainLogprobs:
    """Float32 log-probabilities [positions, vocab] (nats) to check a signal against.

    A correct answer may differ by ``tolerance`` (nats).
    """

    logprobs: Any
    tolerance: float


Signal = TeacherTopK | TeacherFull


def count_nonfinite(signal: Signal) -> int:
    """NaN and +Inf in the teacher's log-probabilities; -Inf is a probability of 0."""
    import numpy as np

    values = signal.logprobs[signal.mask]
    return int((np.isnan(values) | np.isposinf(values)).sum())


def check_answer(
    teacher: Any,
    sequences: Listing[Sequence],
    signal: Signal,
    *,
    temperature: float,
    vocab_size: int,
) -> float | None:
    """Check ``signal`` at the start of a response that is long enough.

    Of those, the one with the shortest prompt: on a GPU that an engine has filled, a
    long one may not fit.

    ``temperature`` is the requested one; a ``TeacherFull`` has 1. Returns the largest
    difference (nats, the mean over a position's tokens), or None for a signal that is
    not finite, which the step judges. Raises StageFault ``teacher.wrong-output``.
    """
    if count_nonfinite(signal):
        return None
    count = min(POSITIONS, max(len(s.response_ids) for s in sequences))
    enough = [n for n, s in enumerate(sequences) if len(s.response_ids) >= count]
    row = min(enough, key=lambda n: len(sequences[n].prompt_ids))
    asked = temperature if isinstance(signal, TeacherTopK) else 1.0
    plain: PlainLogprobs = teacher.plain_logprobs(
        sequences[row], count, temperature=asked, vocab_size=vocab_size
    )
    given, ids = _of(signal, row, count)
    distances = _distances(given, ids, plain)
    difference = float(distances.max())
    if _agree(distances, plain.tolerance):
        return difference
    how = _explain(given, ids, plain, asked)
    raise StageFault(
        "teacher.wrong-output",
        f"the teacher's log-probabilities of sequence {row} are up to {difference:.3g} "
        f"nats from those of a forward pass of the teacher, {plain.tolerance:.3g} "
        f"allowed{how}",
        facts={
            "sequence": row,
            "positions": count,
            "difference_nats": difference,
            "tolerance_nats": plain.tolerance,
            "temperature": asked,
        },
    )


def _of(signal: Signal, row: int, count: int) -> tuple[Any, Any]:
    """The signal's log-probabilities and their token ids, both [count, k]."""
    import numpy as np

    given = signal.logprobs[row, :count]
    if isinstance(signal, TeacherTopK):
        return given, signal.ids[row, :count]
    return given, np.broadcast_to(np.arange(given.shape[-1]), given.shape)


def _distances(given: Any, ids: Any, plain: PlainLogprobs, skip: int = 0) -> Any:
    """Mean difference (nats) per position, over the given tokens or the best ones.

    The larger of the two. ``skip`` omits the first positions of ``plain``.
    """
    import numpy as np

    logprobs = plain.logprobs[skip : skip + len(given)]
    expected = np.take_along_axis(logprobs, ids, axis=-1)
    # The most likely tokens, whichever they are: ties may come in any order.
    best = [
        np.sort(values, axis=-1)[:, -ids.shape[-1] :] for values in (given, logprobs)
    ]
    return np.maximum(_apart(given, expected), _apart(*best))


def _apart(one: Any, other: Any) -> Any:
    import numpy as np

    # A token with zero probability on both sides makes no difference.
    nothing = np.isneginf(one) & np.isneginf(other)
    return np.abs(np.where(nothing, 0, one) - np.where(nothing, 0, other)).mean(-1)


def _agree(distances: Any, tolerance: float) -> bool:
    import numpy as np

    middle, worst = float(np.median(distances)), float(distances.max())
    return middle <= tolerance and worst <= OUTLIER * tolerance


def _explain(given: Any, ids: Any, plain: PlainLogprobs, asked: float) -> str:
    """What would make the teacher's answer right, in words; empty if nothing would."""
    import numpy as np

    if len(given) > 1:
        late = _distances(given[1:], ids[1:], plain)
        early = _distances(given[:-1], ids[:-1], plain, skip=1)
        for word, distances in (("late", late), ("early", early)):
            if _agree(distances, plain.tolerance):
                return f": they are right, but stand one token {word}"
    # Between two tokens, log-probabilities differ as logits divided by temperature.
    expected = np.take_along_axis(plain.logprobs, ids, axis=-1)
    spreads = [float((v.max(-1) - v.min(-1)).sum()) for v in (expected, given)]
    ratio = spreads[0] / spreads[1] if spreads[1] else 1.0
    if np.isfinite(ratio) and abs(ratio - 1.0) > ANOTHER:
        scaled = [v - v.mean(-1, keepdims=True) for v in (given * ratio, expected)]
        if _agree(_apart(*scaled), plain.tolerance * max(1.0, ratio)):
            return f": they are of temperature {asked * ratio:.3g}, not {asked:g}"
    return ""
