"""Did the engine's greedy tokens come from the weights we think it serves?"""

from __future__ import annotations

from collections.abc import Sequence as Listing
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# How far below the best a greedy token's log-probability may lie (nats) and still be
# called a near-tie. Two correct implementations of one model were measured to differ
# by 4.8e-6 in float32 and by 0.087 in bfloat16 (vLLM and transformers on a CPU).
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.15, "float16": 0.15}


@dataclass(frozen=True)
class GreedyCheck:
    """What a reference forward pass says about one greedy completion.

    ``positions`` response tokens were compared; ``exact`` of them are the reference's
    argmax, ``near_ties`` are within ``tolerance`` (nats) of it, the others disagree.
    ``max_logprob_gap`` is the largest distance (nats) of a token of the engine's from
    the reference's best; ``max_logprob_difference`` the largest between the
    log-probabilities that engine and reference give one token, None where the engine
    gave none. ``expected`` and ``found`` are the reference's token and the engine's at
    ``first_disagreement``, an index into the response.
    """

    positions: int
    exact: int
    near_ties: int
    tolerance: float
    max_logprob_gap: float
    max_logprob_difference: float | None
    disagreements: tuple[int, ...]
    expected: int | None
    found: int | None

    @property
    def agree(self) -> bool:
        """Every token is the reference's, or nearly ties with it."""
        return not self.disagreements

    @property
    def first_disagreement(self) -> int | None:
        """The first response position that disagrees, if one does."""
        return self.disagreements[0] if self.disagreements else None


def compare(
    logits: Tensor,
    response_ids: Listing[int],
    response_logprobs: Listing[float] | None = None,
    *,
    tolerance: float | None = None,
) -> GreedyCheck:
    """Judge ``response_ids`` by the reference's ``logits`` [tokens, vocab].

    ``tolerance`` (nats) defaults to that of the logits' dtype, and in half precision
    to two steps of the largest logit where that is more: bfloat16 has nothing between
    32 and 32.25. A NaN disagrees. Raises ValueError when the lengths differ.
    """
    import torch

    for name, given in (("tokens", response_ids), ("logprobs", response_logprobs)):
        if given is not None and len(given) != logits.shape[0]:
            raise ValueError(
                f"the engine gave {len(given)} {name} and the reference "
                f"{logits.shape[0]} logits; expected one for each"
            )
    if tolerance is None:
        tolerance = TOLERANCE.get(str(logits.dtype).removeprefix("torch."), 1e-3)
        if logits.dtype in (torch.bfloat16, torch.float16):
            step = torch.finfo(logits.dtype).eps * float(logits.float().abs().max())
            tolerance = max(tolerance, 2 * step)
    logprobs = torch.log_softmax(logits.float(), -1).cpu()
    ids = torch.tensor(list(response_ids), dtype=torch.int64)
    best, expected = logprobs.max(-1)
    own = logprobs.gather(-1, ids[:, None])[:, 0]
    gap = best - own
    exact = (expected == ids) & gap.isfinite()
    near = ~exact & (gap <= tolerance)
    wrong = (~exact & ~near).nonzero()[:, 0].tolist()
    difference = None
    if response_logprobs is not None:
        difference = float((own - torch.tensor(list(response_logprobs))).abs().max())
    return GreedyCheck(
        positions=len(ids),
        exact=int(exact.sum()),
        near_ties=int(near.sum()),
        tolerance=tolerance,
        max_logprob_gap=float(gap.max()),
        max_logprob_difference=difference,
        disagreements=tuple(wrong),
        expected=int(expected[wrong[0]]) if wrong else None,
        found=int(ids[wrong[0]]) if wrong else None,
    )
