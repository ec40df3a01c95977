"""How long a log is silent tells a hang from a run at work."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from pytest_gkd import __main__ as command
from pytest_gkd.diagnosis import silence

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


def test_a_moment_that_is_none_is_refused(
    capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    status = command.main(["diagnose", str(request.path), "--now=noon"])
    assert status == 2
    assert "gkd: --now=noon: is no moment; write it as" in capsys.readouterr().err
