"""What the teacher hands to the trainer.

Plain arrays, so that they may cross from one process to another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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
    """Float32 log-probabilities [positions, vocab] (nats) to judge a signal by.

    ``tolerance`` (nats) is what a sound answer may differ by.
    """

    logprobs: Any
    tolerance: float


Signal = TeacherTopK | TeacherFull


def count_nonfinite(signal: Signal) -> int:
    """NaN and +Inf in the teacher's log-probabilities; -Inf is a probability of 0."""
    import numpy as np

    values = signal.logprobs[signal.mask]
    return int((np.isnan(values) | np.isposinf(values)).sum())
