"""What is imported with garbage collection off is not walked once it is on again."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from pytest_gkd.workload import collector

MANY = 50_000


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    was_on = gc.isenabled()
    yield
    gc.unfreeze()
    (gc.enable if was_on else gc.disable)()


def test_what_was_made_inside_is_walked_by_no_collection() -> None:
    gc.enable()
    with collector.paused():
        assert not gc.isenabled()
        made: list[list[int]] = [[] for _ in range(MANY)]
    assert gc.isenabled()
    assert gc.get_freeze_count() > len(made)
    assert len(gc.get_objects()) < MANY  # of those that a collection walks


def test_within_another_pause_nothing_is_frozen_or_turned_on() -> None:
    gc.disable()
    before = gc.get_freeze_count()
    with collector.paused():
        pass
    assert not gc.isenabled()
    assert gc.get_freeze_count() == before
