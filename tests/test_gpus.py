"""GPUs that a process may use, by CUDA_VISIBLE_DEVICES (pytest_gkd.gpus)."""

from __future__ import annotations

import pytest

from pytest_gkd import gpus


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (None, 4),
        ("0", 1),
        ("0,1,2,3", 4),
        ("3,1", 2),
        (" 1 , 2 ", 2),
        ("", 0),
        ("-1", 0),
        ("none", 0),
        ("NoDevFiles", 0),
        ("GPU-1c8a8d9a", 1),
        ("MIG-5f5e, MIG-6a6b", 2),
    ],
)
def test_the_variable_leaves_so_many_of_four(
    environment: str | None, expected: int
) -> None:
    assert gpus.visible(4, environment) == expected


@pytest.mark.parametrize(
    ("environment", "expected"), [("0,9,1", 1), ("4", 0), ("0,-1,1", 1), ("1,,2", 1)]
)
def test_entries_after_one_that_names_no_gpu_do_not_count(
    environment: str, expected: int
) -> None:
    assert gpus.visible(4, environment) == expected


def test_a_machine_without_a_gpu_has_none_whatever_the_variable_says() -> None:
    for environment in (None, "0", "GPU-1c8a8d9a"):
        assert gpus.visible(0, environment) == 0


def test_the_driver_is_asked_without_torch() -> None:
    assert 0 <= gpus.usable() <= gpus.driver_count()


def test_an_empty_variable_hides_every_gpu_of_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus.usable() == 0
