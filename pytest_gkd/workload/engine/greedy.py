"""Checks that the engine's greedy tokens came from the weights it should serve."""

from __future__ import annotations

from collections.abc import Sequence as Listing
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, dtype

# How far below the best a greedy token's log-probability may lie (nats) and still be
# called a near-tie. Two correct implementations of one model were measured to differ
# by 4.8e-6 in float32 (by 4e-4 where logits are capped, as in Gemma 2) and by 0.087 in
# bfloat16 (vLLM and transformers on a CPU). The same bounds hold for a difference in
# the log-probability of one token.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.15, "float16": 0.15}
# This many times further apart, it is not rounding: a hundredth of a nat in float32; in
# half precision one probability 4.5 times the other.
FAR = 10.0
# In half precision two correct implementations of a larger model may diverge now and
# then: in this share of positions, each by at most this many tolerances.
FEW = 0.1
NARROW = 3.0


@dataclass(frozen=True)
class GreedyCheck:
    """What a reference forward pass says about one greedy completion.

    ``positions`` response tokens were compared; ``disagreements`` are the indices
    of those further than ``tolerance`` (nats) below the reference's best,
    ``max_logprob_gap`` is the largest such distance. ``max_logprob_difference`` is the
    largest between the log-probabilities that engine and reference give one token, None
    where the engine gave none. ``expected`` and ``found`` are the reference's token and
    the engine's at the first disagreement.
    """

    positions: int
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
    def far(self) -> float:
        """Nats from which a difference in log-probability means a different result."""
        return FAR * self.tolerance

    @property
    def is_far(self) -> bool:
        """Whether their log-probabilities of a token differ by more than rounding."""
        return not (self.max_logprob_difference or 0.0) <= self.far

    @property
    def few_and_narrow(self) -> bool:
        """Whether the disagreement may be half-precision rounding of equal weights."""
        return (
            self.tolerance >= TOLERANCE["bfloat16"]
            and len(self.disagreements) <= max(1, FEW * self.positions)
            and self.max_logprob_gap <= NARROW * self.tolerance
        )


def tolerance_of(logits: Tensor, model_dtype: dtype | None = None) -> float:
    """How far two correct implementations may differ in these logits' dtype (nats).

    Or in ``model_dtype``, that of the parameters, if it is coarser: some classes cast
    their logits to float32 at the end. In half precision, two steps of the largest
    logit if that is more: bfloat16 has nothing between 32 and 32.25.
    """
    import torch

    given = (logits.dtype, model_dtype or logits.dtype)
    coarser = max(given, key=lambda dtype: torch.finfo(dtype).eps)
    tolerance = TOLERANCE.get(str(coarser).removeprefix("torch."), 1e-3)
    if coarser in (torch.bfloat16, torch.float16):
        step = torch.finfo(coarser).eps * float(logits.float().abs().max())
        tolerance = max(tolerance, 2 * step)
    return tolerance


def compare(
    logits: Tensor,
    response_ids: Listing[int],
    response_logprobs: Listing[float] | None = None,
    *,
    model_dtype: dtype | None = None,
) -> GreedyCheck:
    """Judge ``response_ids`` by the reference's ``logits`` [tokens, vocab].

    Within ``tolerance_of`` the logits and ``model_dtype``. A NaN disagrees. Raises
    ValueError when the lengths differ.
    """
    import torch

    for name, given in (("tokens", response_ids), ("logprobs", response_logprobs)):
        if given is not None and len(given) != logits.shape[0]:
            raise ValueError(
                f"the engine gave {len(given)} {name} and the reference "
                f"{logits.shape[0]} logits; expected one for each"
            )
    tolerance = tolerance_of(logits, model_dtype)
    logprobs = torch.log_softmax(logits.float(), -1).cpu()
    ids = torch.tensor(response_ids, dtype=torch.int64)
    best, expected = logprobs.max(-1)
    own = logprobs.gather(-1, ids[:, None])[:, 0]
    gap = best - own
    wrong = (~(gap <= tolerance)).nonzero()[:, 0].tolist()
    difference = None
    if response_logprobs is not None:
        difference = float((own - torch.tensor(response_logprobs)).abs().max())
    return GreedyCheck(
        positions=len(ids),
        tolerance=tolerance,
        max_logprob_gap=float(gap.max()),
        max_logprob_difference=difference,
        disagreements=tuple(wrong),
        expected=int(expected[wrong[0]]) if wrong else None,
        found=int(ids[wrong[0]]) if wrong else None,
    )
