"""Which known names are close to one that is not known: the one place that measures it.

How close is difflib's ratio, 2 M / T: M characters match of the T of both names.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# What may have been meant, offered beside a refusal: difflib's own cut-off.
CLOSE = 0.6
# A slip in names that are as alike as environment variables: a letter or two, so that
# NCCL_P2P_LEVEL and NCCL_P2P_DISABLE are not taken for one another.
SLIP = 0.86
# A slip in a long dotted key where any new key is allowed: a letter.
LETTER = 0.95


def near_names(
    word: str, known: Iterable[str], most: int = 3, cutoff: float = CLOSE
) -> list[str]:
    """The known names that ``word`` may be a slip of, the nearest first."""
    return difflib.get_close_matches(word, list(known), most, cutoff)
