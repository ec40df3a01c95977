"""Clocks that jump, in one log and in those of ranks: nothing is called silent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from test_rank_files import at, judged, silent

HOUR_S, DAY_S = 3600, 86_400


def log(jump: Callable[[int], float], every_s: int = 10, last: int = 90) -> str:
    """A step every ``every_s``, in a clock that is off by what ``jump`` gives it."""
    return "".join(
        f"{at(every_s * n + jump(n))} INFO [trainer.py:7] step {n}/200 loss 0.4\n"
        for n in range(1, last + 1)
    )


JUMPS: dict[str, Callable[[int], float]] = {
    "back for good": lambda n: -1800 * (n > 40),
    "on for good": lambda n: 1800 * (n > 40),
    "summer begins": lambda n: HOUR_S * (n > 40),
    "summer ends": lambda n: -HOUR_S * (n > 40),
    "to and fro": lambda n: 900.0 * (n % 7 == 0) - 300 * (n % 5 == 0),
    "another day": lambda n: DAY_S * (n > 88),
    "the year 1970 at first": lambda n: -325 * DAY_S * (n < 4),
}


@pytest.mark.parametrize("jump", JUMPS.values(), ids=JUMPS)
def test_a_log_whose_clock_jumps_runs(
    tmp_path: Path, jump: Callable[[int], float]
) -> None:
    assert judged(tmp_path, {"a.log": log(jump)}).verdict == "running"


@pytest.mark.parametrize("jump", JUMPS.values(), ids=JUMPS)
@pytest.mark.parametrize("all_of_them", [True, False])
def test_ranks_whose_clocks_jump_are_not_silent(
    tmp_path: Path, jump: Callable[[int], float], all_of_them: bool
) -> None:
    files = {
        f"rank{n}.log": log(jump if all_of_them or n == 1 else lambda _: 0)
        for n in range(4)
    }
    report = judged(tmp_path, files)
    assert (report.verdict, silent(report)) == ("running", [])


def test_a_log_of_several_days_runs(tmp_path: Path) -> None:
    text = log(lambda _: 0, every_s=HOUR_S, last=150)
    report = judged(tmp_path, {"a.log": text})
    assert (report.verdict, report.progress and report.progress.pace_s) == (
        "running",
        HOUR_S,
    )
    files = {"rank0.log": text, "rank1.log": log(lambda _: 0, HOUR_S, last=100)}
    assert silent(judged(tmp_path, files)) == ["rank 1"]


def test_ranks_without_dates_are_compared_over_midnight(tmp_path: Path) -> None:
    def ranks(last: int) -> str:
        times = [(23 * 60 + 50 + n) % 1440 for n in range(1, last)]
        return "".join(
            f"{t // 60:02}:{t % 60:02}:00 step {n}/200 loss 0.4\n"
            for n, t in enumerate(times)
        )

    files = {f"rank{n}.log": ranks(90) for n in range(3)}
    report = judged(tmp_path, files)
    assert (report.verdict, silent(report)) == ("running", [])
    files["rank1.log"] = ranks(30)
    assert silent(judged(tmp_path, files)) == ["rank 1"]
