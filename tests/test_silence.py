"""How long a log is silent tells a hang from a run at work."""

from __future__ import annotations

import json
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
        ("10:00:57", 0),  # by another watch
        ("09:55:00", 86_400 - 358),  # of the next day
        ("10:00:30.5", 0),
        ("2026-11-21T10:01:58", 60),
        ("2026-11-21T10:01:58.250", 60),
        ("20261121T100158", 60),
        ("2026-W47-6T10:01:58", 60),
        ("2026-11-21T10:01:58Z", 60),  # the lines name no zone
        ("2026-11-21T10:01:58+02:00", 60),
        ("10:00", 0),  # the minute of the last line
        ("2026-11-21 10:00", 0),
    ],
)
def test_the_time_now_is_in_the_logs_own_clock(now: str, silent_s: float) -> None:
    assert silence.seconds(SAVING, None, now) == silent_s


@pytest.mark.parametrize(
    ("now", "silent_s"),
    [
        ("2026-11-21T10:01:58Z", 60),
        ("2026-11-21T12:01:58+02:00", 60),
        ("2026-11-21T05:01:58-0500", 60),
        ("2026-11-21 10:01:58", 60),
        ("11:02:58+01", 120),
    ],
)
def test_a_zone_counts_where_the_lines_name_theirs(now: str, silent_s: float) -> None:
    line = b"2026-11-21T10:00:58Z step 7\n"
    assert silence.seconds(line, None, now) == silent_s


def test_a_last_line_a_second_after_the_minute_of_now_is_of_today() -> None:
    assert silence.seconds(b"2026-11-21 10:01:00 step 7\n", None, "10:00") == 0


def test_a_file_without_dates_tells_by_itself() -> None:
    stamp = time.time() - 90
    line = time.strftime("%H:%M:%S step 7\n", time.localtime(stamp)).encode()
    told = silence.seconds(line, stamp)
    assert told is not None
    assert 80 < told < 600


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


@pytest.mark.parametrize(
    "last",
    [
        b"saving model to out\n/opt/a.py:9: FutureWarning: old\n  warnings.warn(\n",
        b"Model saved to out\nPushing to hub...\n",
    ],
)
@pytest.mark.parametrize("steps", [b"step 9/9\n", b""])
def test_a_run_that_saves_or_uploads_after_its_summary_is_not_finished(
    last: bytes, steps: bytes
) -> None:
    summary = steps + b"{'train_runtime': 12.0}\n"
    assert log_end.finished(summary) >= 0
    assert log_end.finished(summary + last) == -1


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


SAVE = STEPS + b"2026-11-21 10:00:58 INFO Saving checkpoint\n"
BEAT = b"2026-11-21 1%d:%02d:58 INFO [beat.py:3] the monitor is alive\n"


def test_an_hour_of_saving_that_has_just_ended_is_no_hang() -> None:
    assert log_end.stuck(SAVE + b"2026-11-21 11:00:58 INFO saved to /ckpt\n") == b""
    twice = b"2026-11-21 12:00:58 INFO uploaded\n"
    assert log_end.stuck(SAVE + b"2026-11-21 11:00:58 INFO saved\n" + twice) == b""
    after = b"".join(b"2026-11-21 11:0%d:58 INFO a\n" % n for n in range(1, 5))
    assert log_end.stuck(SAVE + b"2026-11-21 11:00:58 INFO saved\n" + after) == b""


def test_lines_that_show_no_work_for_an_hour_are_a_hang() -> None:
    beats = b"".join(BEAT % (n // 60, n % 60) for n in range(10, 70, 10))
    assert log_end.stuck(SAVE + beats) != b""
    assert log_end.stuck(SAVE + beats + LINE % (2, 1, 99)) == b""  # it went on


@pytest.mark.parametrize("prefix", ["", "(TaskRunner pid=7) ", "[rank0]:"])
@pytest.mark.parametrize(
    ("end", "by"),
    [
        ("KeyboardInterrupt\n", "SIGINT (Ctrl-C)"),
        ("^C", "SIGINT (Ctrl-C)"),
        (
            "torch.distributed.elastic.multiprocessing.api.SignalException: Process 9 "
            "got signal: 15\n",
            "SIGTERM",
        ),
        ("Received SIGTERM: 15\n", "SIGTERM"),
        ("exiting program after receiving SIGTERM.\n", "SIGTERM"),
    ],
)
def test_a_sound_run_that_was_ended_from_outside_was_interrupted(
    prefix: str, end: str, by: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if end == "^C" and prefix:
        pytest.skip("a terminal writes no prefix")
    path = tmp_path / "a.log"
    path.write_bytes(STEPS + f"{prefix}{end}".encode())
    assert command.main(["diagnose", str(path)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert out.startswith(f"interrupted: ended from outside by {by} at ")
    assert "(step 57, 3 s a step)" in out
    assert "nothing failed" in out


SLURM = (
    "slurmstepd: error: *** JOB 12 ON node3 CANCELLED AT 2026-11-21T%s DUE TO TIME "
    "LIMIT ***\n"
)


@pytest.mark.parametrize(
    ("at", "verdict"), [("10:01:03", "interrupted"), ("14:01:03", "hung")]
)
def test_what_stood_still_before_its_end_is_hung(
    at: str, verdict: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(STEPS + (SLURM % at).encode())
    status = command.main(["diagnose", str(path), "--format=json"])
    told = json.loads(capsys.readouterr().out)
    assert (told["verdict"], status) == (verdict, verdict == "hung")
    assert told["ended_by"] == "SLURM (time limit)"
    assert bool(told["suspects"]) == (verdict == "hung")


def test_an_error_before_the_signal_is_the_cause(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    error = b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n"
    path.write_bytes(STEPS + error + (SLURM % "10:01:03").encode())
    assert command.main(["diagnose", str(path)]) == 1


def test_a_run_that_goes_on_after_a_signal_was_not_ended_by_it() -> None:
    went_on = STEPS + b"Received SIGTERM: 15\n" + STEPS.replace(b"10:0", b"10:1")
    assert log_end.ended_by(went_on) == ""


def test_where_the_silence_begins_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(SAVING)
    command.main(["diagnose", str(path), "--now=10:10:58", "--format=json"])
    told = json.loads(capsys.readouterr().out)["silence"]
    assert told == {
        "since": "2026-11-21 10:00:58",
        "file": str(path),
        "line": 21,
        "seconds": 600.0,
        "usual_s": 60.0,
    }
    command.main(["diagnose", str(path), "--now=10:10:58"])
    out = " ".join(capsys.readouterr().out.split())
    assert out.startswith("hung: stopped during the checkpoint")
    assert f"{path}:21: 600 s until now; usual there: up to 60.0 s" in out


def test_chatter_does_not_move_where_the_silence_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.log"
    beats = b"".join(BEAT % (n // 60, n % 60) for n in range(10, 70, 10))
    path.write_bytes(SAVING + beats)
    command.main(["diagnose", str(path), "--now=11:10:58", "--format=json"])
    told = json.loads(capsys.readouterr().out)["silence"]
    assert (told["line"], told["seconds"]) == (21, 4200.0)


def test_what_is_usual_is_that_of_the_phase() -> None:
    """Saves take five minutes here, steps three seconds."""

    def line(at: int, text: str) -> str:
        return f"2026-11-21 1{at // 3600}:{at // 60 % 60:02}:{at % 60:02} {text}\n"

    text = ""
    for n in range(5):
        start = n * 360
        text += line(start, "INFO Saving checkpoint")
        text += "".join(
            line(start + 300 + s, f"step:{20 * n + s // 3} - loss:0.4")
            for s in range(0, 60, 3)
        )
    assert silence.usual_s(text.encode()) == 60  # twenty steps
    text += line(1800, "INFO Saving checkpoint")
    assert silence.usual_s(text.encode()) == 600
