"""Finds known names similar to an unknown one; the only place that measures this.

Similarity is difflib's ratio, 2 M / T: of the T characters in both names, M match.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Suggestions in an error message, "did you mean": difflib's own default cutoff.
CLOSE = 0.6
# A typo in names as similar as environment variables: a letter or two, so that
# NCCL_P2P_LEVEL and NCCL_P2P_DISABLE are not taken for one another.
SLIP = 0.86
# A typo in a long dotted key where any new key is allowed: one letter.
LETTER = 0.95


def near_names(
    word: str, known: Iterable[str], most: int = 3, cutoff: float = CLOSE
) -> list[str]:
    """The known names that ``word`` may be a misspelling of, closest first."""
    return difflib.get_close_matches(word, list(known), most, cutoff)
