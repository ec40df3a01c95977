"""The times of a log, in every form in which programs write them."""

from __future__ import annotations

import pytest

from pytest_gkd.diagnosis import clocks, silence, work_signs

DAY = clocks.DAY_S
NOVEMBER_21 = 325 * DAY


@pytest.mark.parametrize(
    ("line", "hour", "written"),
    [
        ("2026-11-21 10:00:00,123 INFO a", 10, "2026-11-21 10:00:00"),
        ("[2026-11-21 10:00:00] a", 10, "2026-11-21 10:00:00"),
        ("2026-11-21T10:00:00.123456Z a", 10, "2026-11-21T10:00:00Z"),
        ("INFO 11-21 10:00:00 [a.py:1] a", 10, "11-21 10:00:00"),
        ("E1121 10:00:00.123456 a", 10, "11-21 10:00:00"),
        ("11/21/2026 10:00:00 - INFO - a", 10, "11/21/2026 10:00:00"),
        ("21/11/2026 10:00:00 a", 10, "21/11/2026 10:00:00"),
        ("21.11.2026 10:00:00 a", 10, "21.11.2026 10:00:00"),
        ("11/21/2026, 9:05:00 PM a", 21 + 1 / 12, "11/21/2026, 9:05:00 PM"),
        ("2026-11-21 12:00:00 AM a", 0, "2026-11-21 12:00:00 AM"),
        ("2026-11-21 12:00:00 p.m. a", 12, "2026-11-21 12:00:00 p.m."),
        ("21 Nov 2026 10:00:00 a", 10, "21 Nov 2026 10:00:00"),
        ("Sat Nov 21 10:00:00 2026 a", 10, "Nov 21 10:00:00"),
        ("Nov 21 10:00:00 node a", 10, "Nov 21 10:00:00"),
    ],
)
def test_a_time_with_a_date_is_read(line: str, hour: float, written: str) -> None:
    clock = clocks.Clock(line.encode())
    assert clock.dated
    assert clock.at(0) == pytest.approx(NOVEMBER_21 + hour * 3600, abs=1)
    assert clock.written(0) == written


@pytest.mark.parametrize(
    "line",
    [
        *("10:00:01 SUCCESS Step 12", "[10:00:01] a", "(Actor pid=7) 10:00:01 a"),
        *("INFO 10:00:01 a", "[rank0]: 10:00:01.5 a", "10:00:01 AM a"),
    ],
)
def test_a_time_alone_is_read_where_a_line_begins(line: str) -> None:
    clock = clocks.Clock(line.encode())
    assert not clock.dated
    assert clock.at(0) == pytest.approx(36_001, abs=1)


@pytest.mark.parametrize(
    "line",
    [
        "took 10:00:01 hours",
        " 5%| | 3/4 [00:10<01:30:00, 1.0s/it]",
        "2026-11-21 25:00:00 a",
        "10:61:00 a",
        "version 3/4 of 10:00:01",
        "0:00:07 is what a bar has taken",
    ],
)
def test_what_is_no_time_of_a_day_is_none(line: str) -> None:
    assert clocks.Clock(line.encode()).stamps == []


def test_only_a_day_beyond_the_twelfth_tells_day_from_month() -> None:
    lines = "3/4/2026 10:00:00 a\n4/4/2026 10:00:00 b\n"
    unknown = clocks.Clock(lines.encode())
    assert not unknown.dated  # two times of a day
    assert unknown.seconds == [36_000, 36_000]
    day_first = clocks.Clock((lines + "13/4/2026 10:00:00 c\n").encode())
    assert day_first.dated
    assert [one / DAY for one in clocks.gaps(day_first.seconds)] == [1, 9]
    month_first = clocks.Clock((lines + "4/13/2026 10:00:00 c\n").encode())
    assert [one / DAY for one in clocks.gaps(month_first.seconds)] == [31, 9]


def test_a_day_a_year_and_a_half_day_go_on() -> None:
    for lines in (
        "23:59:50 a\n00:00:10 b\n",
        "2026-12-31 23:59:50 a\n2027-01-01 00:00:10 b\n",
        "11:59:50 PM a\n12:00:10 AM b\n",
        "11:59:50 AM a\n12:00:10 PM b\n",
    ):
        assert clocks.gaps(clocks.Clock(lines.encode()).seconds) == [20], lines


def test_lines_that_name_their_zones_are_told_in_one() -> None:
    lines = b"2026-11-21T10:00:00Z a\n2026-11-21T12:00:30+02:00 b\n"
    assert clocks.gaps(clocks.Clock(lines).seconds) == [30]
    assert clocks.Clock(lines).zone_s == 0


def test_a_log_with_dates_has_no_times_without() -> None:
    lines = b"2026-11-21 10:00:00 a\n10:00:05 b\n2026-11-21 10:00:09 c\n"
    assert clocks.gaps(clocks.Clock(lines).seconds) == [9]


AM_PM = "".join(
    f"11/21/2026 9:{n:02d}:00 PM step:{n} - loss:0.4\n" for n in range(12)
).encode()
BARE = "".join(f"23:{n:02d}:00 step:{n} - loss:0.4\n" for n in range(12)).encode()


@pytest.mark.parametrize(
    ("tail", "now", "silent_s"),
    [
        (AM_PM, "21:12", 60),
        (AM_PM, "2026-11-21T21:12:00", 60),
        (BARE, "23:12", 60),
        (BARE, "00:11", 3600),  # of the next day
        (BARE, "2026-11-22 00:11", 3600),  # a date says nothing to a log without
        (b"3/4/2026 10:00:00 step:1 - loss:1\n", "10:01", 60),
    ],
)
def test_every_clock_tells_how_long_a_log_is_silent(
    tail: bytes, now: str, silent_s: float
) -> None:
    assert silence.seconds(tail, None, now) == silent_s


def test_every_clock_tells_the_pace() -> None:
    assert work_signs.pace_s(AM_PM) == 60
    assert work_signs.pace_s(BARE) == 60
