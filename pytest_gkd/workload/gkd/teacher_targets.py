"""What the teacher hands to the trainer, and whether it fits the batch.

Plain arrays, so that they may cross from one process to another.
"""

from __future__ import annotations

from collections.abc import Sequence as Listing
from dataclasses import dataclass
from typing import Any

from pytest_gkd.stage_api import StageFault
from pytest_gkd.workload.gkd.batch import Sequence, pad


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


def check_signal(
    signal: Signal,
    sequences: Listing[Sequence],
    loss: str,
    temperature: float,
    vocab_size: int,
) -> None:
    """The signal is what ``loss`` (``topk`` or ``full``) needs for these sequences.

    Raises TypeError for a signal of the other kind; ValueError for an unknown loss,
    another batch or another temperature; and StageFault ``tokenizer.vocab-mismatch``
    when the teacher's tokens reach past ``vocab_size``, the student's embedding.
    """
    kinds: dict[str, type] = {"topk": TeacherTopK, "full": TeacherFull}
    if loss not in kinds:
        raise ValueError(f"loss is {loss!r}; expected topk or full")
    if not isinstance(signal, kinds[loss]):
        raise TypeError(
            f"loss {loss!r} got a {type(signal).__name__} from the teacher; expected a "
            f"{kinds[loss].__name__}"
        )
    mask = pad(sequences).mask
    if signal.mask.shape != mask.shape or (signal.mask != mask).any():
        raise ValueError(
            f"the teacher's mask {signal.mask.shape} is not that of these "
            f"{len(sequences)} sequences {mask.shape}; expected the same batch"
        )
    if not isinstance(signal, TeacherTopK):
        return
    if signal.temperature != temperature:
        raise ValueError(
            f"the teacher's log-probabilities are of temperature {signal.temperature} "
            f"and the loss of {temperature}; expected the same"
        )
    largest = int(signal.ids.max())
    if largest >= vocab_size:
        raise StageFault(
            "tokenizer.vocab-mismatch",
            f"token id {largest} is among the teacher's top-k; expected 0 to "
            f"{vocab_size - 1}, the student's embedding",
            facts={"token_id": largest, "embedding_rows": vocab_size},
        )


def count_nonfinite(signal: Signal) -> int:
    """NaN and +Inf in the teacher's log-probabilities; -Inf is a probability of 0."""
    import numpy as np

    values = signal.logprobs[signal.mask]
    return int((np.isnan(values) | np.isposinf(values)).sum())
