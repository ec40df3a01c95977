"""Ranks in words, wherever they are told."""

from __future__ import annotations

import pytest

from pytest_gkd import rank_words


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        ([1], "rank 1"),
        ([5, 0, 2, 1, 3, 3], "ranks 0-3,5"),
        (range(1024), "ranks 0-1023"),
        (range(0, 18, 2), "ranks 0,2,4,6,8,10,12,14 and 1 more"),
        ([*range(0, 15, 2), 20, 21], "ranks 0,2,4,6,8,10,12,14 and 2 more"),
    ],
)
def test_ranks_are_told_in_few_words(ranks: list[int], told: str) -> None:
    assert rank_words.name(ranks) == told


def test_spans_are_whole_where_nothing_is_said_of_their_number() -> None:
    assert rank_words.spans(range(0, 40, 2)).count(",") == 19
    assert rank_words.spans([]) == ""
