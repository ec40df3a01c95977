"""How prompts and rollouts become one batch."""

from __future__ import annotations

import pytest

from pytest_gkd.workload.gkd import batch
from pytest_gkd.workload.gkd.batch import Sequence, micro_batches, pad

PAIR = [Sequence((1, 2, 3), (4, 5)), Sequence((6,), (7, 8, 9))]


def test_sequences_are_padded_on_the_right() -> None:
    made = pad(PAIR, 99)
    assert made.input_ids.tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 99]]
    assert made.attention_mask.tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]


def test_positions_are_those_that_predict_a_response_token() -> None:
    made = pad(PAIR, 99)
    assert made.mask.tolist() == [[True, True, False], [True, True, True]]
    for row, sequence in enumerate(PAIR):
        found = made.input_ids[row, made.positions[row] + 1]
        assert tuple(found[made.mask[row]]) == sequence.response_ids


@pytest.mark.parametrize(
    ("prompt", "response", "named"),
    [((), (1,), "prompt_ids"), ((1,), (), "response_ids")],
)
def test_an_empty_side_is_refused(
    prompt: tuple[int, ...], response: tuple[int, ...], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        Sequence(prompt, response)


def test_micro_batches_cover_all_rows_in_order_within_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sequences = [Sequence(tuple(range(n)), (1,)) for n in (3, 9, 1, 1, 1, 20, 2)]
    limit = 20 * 10
    monkeypatch.setattr(batch, "MAX_LOGITS", limit)
    slices = list(micro_batches(sequences, vocab_size=10))
    rows = [row for part in slices for row in range(part.start, part.stop)]
    assert rows == list(range(len(sequences)))
    for part in slices:
        held = sequences[part]
        size = len(held) * max(len(s) for s in held) * 10
        assert size <= limit or len(held) == 1
    assert len(slices) == 4
