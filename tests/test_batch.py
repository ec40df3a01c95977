"""How prompts and rollouts become one batch."""

from __future__ import annotations

import pytest

from pytest_gkd.workload.gkd.batch import Sequence, micro_batches, pad

PAIR = [Sequence((1, 2, 3), (4, 5)), Sequence((6,), (7, 8, 9))]


def test_sequences_are_padded_on_the_right() -> None:
    batch = pad(PAIR, 99)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 99]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]


def test_the_response_mask_marks_the_logits_that_predict_a_response_token() -> None:
    batch = pad(PAIR, 99)
    predicted = [
        [int(ids[t + 1]) for t in range(len(ids)) if mask[t]]
        for ids, mask in zip(batch.input_ids, batch.response_mask, strict=True)
    ]
    assert predicted == [list(sequence.response_ids) for sequence in PAIR]


def test_positions_find_the_same_tokens_as_the_mask() -> None:
    batch = pad(PAIR, 99)
    assert batch.mask.tolist() == [[True, True, False], [True, True, True]]
    for row, sequence in enumerate(PAIR):
        found = batch.input_ids[row, batch.positions[row] + 1]
        assert tuple(found[batch.mask[row]]) == sequence.response_ids


@pytest.mark.parametrize("pad_id", [None, -1])
def test_a_model_without_padding_token_is_padded_with_token_0(
    pad_id: int | None,
) -> None:
    assert pad(PAIR, pad_id).input_ids[1, -1] == 0


def test_lists_of_ids_are_accepted() -> None:
    assert Sequence([1, 2], [3]) == Sequence((1, 2), (3,))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "response", "named"),
    [((), (1,), "prompt_ids"), ((1,), (), "response_ids")],
)
def test_an_empty_side_is_refused(
    prompt: tuple[int, ...], response: tuple[int, ...], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        Sequence(prompt, response)


def test_no_sequences_are_refused() -> None:
    with pytest.raises(ValueError, match="no sequences"):
        pad([])


def test_micro_batches_cover_all_rows_in_order_within_the_limit() -> None:
    sequences = [Sequence(tuple(range(n)), (1,)) for n in (3, 9, 1, 1, 1, 20, 2)]
    limit = 20 * 10
    slices = list(micro_batches(sequences, vocab_size=10, max_logits=limit))
    rows = [row for part in slices for row in range(part.start, part.stop)]
    assert rows == list(range(len(sequences)))
    for part in slices:
        held = sequences[part]
        size = len(held) * max(len(s) for s in held) * 10
        assert size <= limit or len(held) == 1
    assert len(slices) == 4
