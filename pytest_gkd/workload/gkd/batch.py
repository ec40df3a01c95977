"""Builds one rectangular batch of prompts and rollouts.

Prompt and response are concatenated and padded on the right. A causal model never looks
to the right, so padding cannot change a logit before it, however the architecture
treats an attention mask; and a tokenizer without a padding token needs no special case.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Listing
from dataclasses import dataclass
from typing import Any

# Logits of one forward pass, in elements: 1 GiB in float32. If the sequences need more,
# they are computed in turn, so a 150k vocabulary needs no more memory than this.
MAX_LOGITS = 1 << 28


@dataclass(frozen=True)
class Sequence:
    """One prompt with the rollout that followed it, as token ids."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        """Reject an empty side: there is nothing to predict, or to predict from."""
        for name, ids in vars(self).items():
            if not ids:
                raise ValueError(f"a sequence's {name} are empty; expected a token")

    def __len__(self) -> int:
        """Tokens in prompt and response together."""
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True)
class Batch:
    """Sequences as numpy arrays; ``tokens`` and ``response`` are the longest lengths.

    - ``input_ids``, ``attention_mask``: int64 [batch, tokens].
    - ``positions``: int64 [batch, response], the ``t`` whose logits predict response
      token ``j``, which is ``input_ids[:, t + 1]``; past the end of a response it
      repeats a valid position.
    - ``response_ids``: int64 [batch, response]; ``mask``: bool [batch, response], true
      for real response tokens.
    """

    input_ids: Any
    attention_mask: Any
    positions: Any
    response_ids: Any
    mask: Any


def pad(sequences: Listing[Sequence], pad_id: int = 0) -> Batch:
    """Concatenate and pad ``sequences``, of which there is at least one."""
    import numpy as np

    rows, tokens = len(sequences), max(len(s) for s in sequences)
    response = max(len(s.response_ids) for s in sequences)
    input_ids: Any = np.full((rows, tokens), pad_id, dtype=np.int64)
    attention_mask: Any = np.zeros((rows, tokens), dtype=np.int64)
    positions: Any = np.zeros((rows, response), dtype=np.int64)
    response_ids: Any = np.full((rows, response), pad_id, dtype=np.int64)
    mask: Any = np.zeros((rows, response), dtype=bool)
    for row, sequence in enumerate(sequences):
        start, length = len(sequence.prompt_ids), len(sequence.response_ids)
        input_ids[row, : start + length] = sequence.prompt_ids + sequence.response_ids
        attention_mask[row, : start + length] = 1
        positions[row] = start - 1
        positions[row, :length] += np.arange(length)
        response_ids[row, :length] = sequence.response_ids
        mask[row, :length] = True
    return Batch(input_ids, attention_mask, positions, response_ids, mask)


def micro_batches(sequences: Listing[Sequence], vocab_size: int) -> Iterator[slice]:
    """Consecutive rows whose padded logits stay within ``MAX_LOGITS`` elements.

    A sequence that exceeds it alone is a micro-batch of its own.
    """
    start, longest = 0, 0
    for row, sequence in enumerate(sequences):
        longest = max(longest, len(sequence))
        if row > start and (row - start + 1) * longest * vocab_size > MAX_LOGITS:
            yield slice(start, row)
            start, longest = row, len(sequence)
    if start < len(sequences):
        yield slice(start, len(sequences))
