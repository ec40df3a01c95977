"""Digests and fingerprints of tensors."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from pytest_gkd.workload.sync.digest import digest, digests, fingerprint


def test_a_digest_is_the_sha256_of_the_contiguous_bytes(torch: Any) -> None:
    tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    expected = hashlib.sha256(tensor.t().contiguous().numpy().tobytes()).hexdigest()
    assert digest(tensor.t()) == expected
    assert digest(tensor) != expected


def test_digests_keep_the_order_of_the_names(torch: Any) -> None:
    named = {name: torch.full((3,), float(ord(name))) for name in "zebra"}
    found = digests(named)
    assert list(found) == list("zebra")
    assert found == {name: digest(tensor) for name, tensor in named.items()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("place", [0, 3, 12])
def test_a_fingerprint_sees_the_smallest_change_anywhere(
    torch: Any, dtype: str, place: int
) -> None:
    kind = getattr(torch, dtype)
    before = torch.ones(13, dtype=kind)
    after = before.clone()
    after[place] += torch.finfo(kind).eps
    assert fingerprint(before) == fingerprint(before.clone())
    assert fingerprint(before) != fingerprint(after)


@pytest.mark.parametrize(("before", "after"), [([3, 5], [4, 4]), ([3, 5], [-3, 5])])
def test_changes_that_cancel_in_one_sum_show_in_the_other(
    torch: Any, before: list[int], after: list[int]
) -> None:
    pair = [torch.tensor(words, dtype=torch.int64) for words in (before, after)]
    assert fingerprint(pair[0]) != fingerprint(pair[1])


def test_a_tensor_inside_another_need_not_be_aligned(torch: Any) -> None:
    whole = torch.arange(9, dtype=torch.float16)
    assert fingerprint(whole[1:]) == fingerprint(whole[1:].clone())
