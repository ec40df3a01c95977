"""How long a log is silent tells a hang from a run at work."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from pytest_gkd import __main__ as command
from pytest_gkd.diagnosis import log_end, silence

LINE = b"2026-11-21 10:0%d:%02d INFO [trainer.py:7] step %d loss 0.4\n"
STEPS = b"".join(LINE % (n // 60, n % 60, n) for n in range(0, 60, 3))  # ends 10:00:57
SAVING = STEPS + b"2026-11-21 10:00:58 INFO Saving checkpoint\n"


@pytest.mark.parametrize(
    ("now", "silent_s"),
    [
        ("10:01:58", 60),
        ("10:02", 62),
        ("2026-11-21 11:00:58", 3600),
        ("11-22T10:00:58", 86_400),
        ("10:00:57", 86_399),  # of the next day
        ("10:00", 0),  # the minute of the last line
        ("2026-11-21 10:00", 0),
    ],
)
def test_the_time_now_is_in_the_logs_own_clock(now: str, silent_s: float) -> None:
    assert silence.seconds(SAVING, None, now) == silent_s


def test_a_file_that_is_being_written_tells_by_itself_and_a_copy_does_not() -> None:
    stamp = time.time() - 90
    line = time.strftime("%Y-%m-%d %H:%M:%S step 7\n", time.localtime(stamp)).encode()
    told = silence.seconds(line, stamp)
    assert told is not None
    assert 80 < told < 600
    assert silence.seconds(line, stamp - 86_400) is None
    assert silence.seconds(b"no time\n", stamp) is None


def test_without_times_the_file_tells_when_its_last_line_was_written() -> None:
    moment = time.mktime(time.strptime("2026-11-21 10:00:00", "%Y-%m-%d %H:%M:%S"))
    assert silence.seconds(b"no time\n", moment, "2026-11-21 10:00:30") == 30
    assert silence.seconds(b"no time\n", None, "10:00") is None


def test_twenty_steps_and_twice_the_longest_silence_are_usual() -> None:
    assert silence.usual_s(SAVING) == 60
    assert silence.usual_s(b"2026-11-21 09:55:00 start\n" + SAVING) == 600
    assert silence.usual_s(b"no time\n") == silence.LEAST_S


def test_the_silences_of_a_start_are_not_those_of_its_steps() -> None:
    start = b"2026-11-21 09:55:00 loading the model\n"
    assert silence.usual_s(start + SAVING, len(start)) == 60


@pytest.mark.parametrize(("now", "verdict"), [("10:01:30", "run"), ("10:05", "hung")])
def test_a_log_that_stops_while_it_saves_is_hung_after_a_while(
    now: str, verdict: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(SAVING)
    status = command.main(["diagnose", str(path), f"--now={now}"])
    out = capsys.readouterr().out
    assert out.startswith(verdict)
    assert status == (verdict == "hung")


@pytest.mark.parametrize("now", ["noon", "25:00", "10:60", "2026-13-01 10:00"])
def test_a_moment_that_is_none_is_refused(
    now: str, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    status = command.main(["diagnose", str(request.path), f"--now={now}"])
    assert status == 2
    assert (
        f"gkd: --now={now}: is not a valid time; write it as" in capsys.readouterr().err
    )


def test_a_moment_is_refused_though_the_log_alone_decides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.log"
    path.write_text("'train_runtime': 3.0\n")
    assert command.main(["diagnose", str(path), "--now=noon"]) == 2
    assert "is not a valid time" in capsys.readouterr().err


def test_the_second_of_the_last_line_is_now() -> None:
    assert silence.seconds(b"2026-11-21 10:00:00,500 step 7\n", None, "10:00:00") == 0


@pytest.mark.parametrize(
    ("last", "now"),
    [("11-30", "12-01"), ("02-28", "03-01"), ("10-31", "11-01")],
)
def test_a_month_ends_at_midnight(last: str, now: str) -> None:
    line = f"2026-{last} 23:59:50 step 7\n".encode()
    assert silence.seconds(line, None, f"2026-{now} 00:00:20") == 30
    assert (
        log_end.stuck(
            line.replace(b"step 7", b"step:7 - loss")
            + b"%s 00:00:20 a\n" % now.encode()
        )
        == b""
    )


def test_clocks_of_two_zones_in_one_log_are_no_silence() -> None:
    lines = [
        f"2026-11-21 02:{n:02d}:00 step:{n} - loss:1\n2026-11-21 10:{n:02d}:30 saved\n"
        for n in range(9)
    ]
    assert log_end.stuck("".join(lines).encode()) == b""
    assert log_end.stuck("".join([*lines[:1]]).encode()) != b""
