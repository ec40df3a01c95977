"""Several files that are one log, and the log files of a directory."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest
from test_rank_files import CATALOGUE, DONE, START, silent, steps

from pytest_gkd import __main__ as command
from pytest_gkd.diagnosis import log_file, log_sources, logs
from pytest_gkd.diagnosis.log_report import LogReport

FULL = "OSError: [Errno 28] No space left on device\n"


def written(folder: Path, files: dict[str, str]) -> list[Path]:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data = text.encode()
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return [folder / name for name in files]


def examined(folder: Path, files: dict[str, str]) -> LogReport:
    return logs.examine(written(folder, files), CATALOGUE)


def joined(report: LogReport) -> list[list[str]]:
    return [[Path(name).name for name in names] for names in report.joined]


PARTS = [steps(30), steps(60, first=31), steps(100, first=61) + DONE]


@pytest.mark.parametrize(
    "names",
    [
        ["train.log.2", "train.log.1", "train.log"],  # logrotate, RotatingFileHandler
        ["train.log.2.gz", "train.log.1.gz", "train.log"],
        ["train.log.old", "train.log", ""],
        ["train.log-20261119", "train.log-20261120.gz", "train.log"],
        ["train.log.2026-11-19", "train.log.2026-11-20", "train.log"],
        ["train.log.part8", "train.log.part9", "train.log.part10"],
        ["train.part1.log", "train.part2.log", "train.part3.log"],
        ["train.log.gz", "train.log", ""],
        ["log.0", "log.1", "log.2"],  # their times tell
        ["log.3", "log.2", "log.1"],
    ],
)
@pytest.mark.parametrize("shuffled", [False, True])
def test_parts_of_one_log_are_read_in_order(
    tmp_path: Path, names: list[str], shuffled: bool
) -> None:
    parts = PARTS if names[-1] else [PARTS[0], PARTS[1] + PARTS[2]]
    files = dict(zip(filter(None, names), parts, strict=True))
    if shuffled:
        files = dict(reversed(files.items()))
    report = examined(tmp_path, files)
    assert joined(report) == [[one for one in names if one]]
    assert (report.verdict, report.processes) == ("healthy", ())
    assert report.partial == ()


def test_the_metrics_of_all_parts_are_one_series(tmp_path: Path) -> None:
    files = {
        name: "".join(f"step:{n} - actor/loss:{1 / n}\n" for n in of)
        for name, of in (("a.log.1", range(1, 30)), ("a.log", range(30, 60)))
    }
    (series,) = examined(tmp_path, files).series
    assert (series.steps[0], series.steps[-1]) == (1, 59)


def test_a_find_is_told_with_its_part_and_its_line(tmp_path: Path) -> None:
    files = {"train.log.1": steps(40) + "a\n" * 3, "train.log": steps(50, first=41)}
    files["train.log"] += FULL
    report = examined(tmp_path, files)
    (line,) = report.causes[0].evidence
    assert (Path(line.source).name, line.line) == ("train.log", 11)
    assert report.last is not None
    assert (Path(report.last.source).name, report.last.line) == ("train.log", 11)
    files = {"train.log.1": steps(9) + FULL, "train.log": "exiting\n"}
    (line,) = examined(tmp_path, files).causes[0].evidence
    assert (Path(line.source).name, line.line) == ("train.log.1", 10)


def test_what_went_wrong_before_the_rotation_was_survived_after_it(
    tmp_path: Path,
) -> None:
    files = {"train.log.1": steps(9) + FULL, "train.log": steps(90, first=10) + DONE}
    report = examined(tmp_path, files)
    assert report.verdict == "healthy"
    ((cause, line),) = report.survived
    assert (cause, Path(line.source).name, line.line) == (
        "env.disk-full",
        "train.log.1",
        10,
    )


def test_a_part_that_ends_within_a_line_does_not_swallow_the_next(
    tmp_path: Path,
) -> None:
    files = {"train.log.1": steps(9) + "2026-11-21 10", "train.log": FULL}
    (line,) = examined(tmp_path, files).causes[0].evidence
    assert (line.text, line.line) == (FULL.strip(), 1)


def test_a_missing_part_is_told(tmp_path: Path) -> None:
    files = {"train.log.3": PARTS[0], "train.log.1": PARTS[1], "train.log": PARTS[2]}
    report = examined(tmp_path, files)
    assert joined(report) == [["train.log.3", "train.log.1", "train.log"]]
    (told,) = report.partial
    assert told.startswith(f"{tmp_path}/train.log.2: not among the files")


def test_files_that_overlap_in_time_are_ranks_whatever_their_names(
    tmp_path: Path,
) -> None:
    report = examined(tmp_path, {f"log.{n}": steps(90) for n in range(3)})
    assert (joined(report), len(report.processes)) == ([], 3)
    report = examined(tmp_path, {"a.log.1": steps(30), "a.log": steps(90)})
    assert (joined(report), report.verdict) == ([], "hung")
    (told,) = report.partial
    assert "times overlap" in told


def test_without_times_numbers_alone_are_ambiguous_and_it_is_said(
    tmp_path: Path,
) -> None:
    report = examined(tmp_path, {f"log.{n}": steps(9, timed=False) for n in (0, 1)})
    assert joined(report) == []
    (told,) = report.partial
    assert "are read as logs of several processes" in told
    # logrotate and Python's handlers write the log and its .1.
    names = {"a.log.1": steps(9, timed=False), "a.log": steps(19, first=9, timed=False)}
    report = examined(tmp_path, names)
    assert joined(report) == [["a.log.1", "a.log"]]


def test_a_packed_copy_is_left_out(tmp_path: Path) -> None:
    report = examined(tmp_path, {"a.log.gz": steps(30), "a.log": steps(90)})
    assert (joined(report), report.verdict) == ([], "running")
    assert report.partial == (
        f"{tmp_path}/a.log.gz: begins as {tmp_path}/a.log does: "
        "a packed copy, left out",
    )


def test_a_log_that_was_just_rotated_is_its_last_part(tmp_path: Path) -> None:
    report = examined(tmp_path, {"train.log": "", "train.log.1": PARTS[0]})
    assert (report.verdict, report.unreadable) == ("running", ())


def test_what_was_truncated_while_it_was_open_begins_with_zeros(
    tmp_path: Path,
) -> None:
    path = tmp_path / "train.log"
    with path.open("wb") as stream:
        os.truncate(path, 40 << 20)
        stream.seek(40 << 20)
        stream.write((steps(20) + FULL).encode())
    (line,) = logs.examine([path], CATALOGUE).causes[0].evidence
    assert line.line == 21


def test_parts_are_not_held_in_memory(tmp_path: Path) -> None:
    text = steps(99) * 3000
    files = {f"a.log.{n}": text for n in (3, 2, 1)} | {"a.log": text}
    paths = written(tmp_path, files)
    stream = paths[-1].open("rb")
    with stream:
        log = log_file.read(
            stream, str(paths[-1]), 0, CATALOGUE, earlier=tuple(paths[:-1])
        )
    assert log.lines == 99 * 3000 * 4
    assert len(log.head) + len(log.tail) <= 2 * log_file.EDGE


def test_many_files_are_kept_in_less_each() -> None:
    assert log_sources.edge(1) == log_file.EDGE
    assert log_sources.edge(64) * 2 * 64 <= 128 << 20
    assert log_sources.edge(2000) == 1 << 16


def test_a_directory_is_the_log_files_in_it(tmp_path: Path) -> None:
    root = "none_abc/attempt_{0}/{1}/{2}.log"
    files = {root.format(1, n, "stdout"): steps(90) for n in (0, 1, 2)}
    files |= {root.format(1, n, "stderr"): "" for n in (0, 1, 2)}
    files |= {root.format(0, 0, "stderr"): FULL, "none_abc/error.json": "{}"}
    files[root.format(1, 2, "stdout")] = steps(30)
    written(tmp_path, files)
    report = logs.examine([tmp_path], CATALOGUE)
    assert (report.verdict, silent(report)) == ("hung", ["rank 2"])
    assert report.unreadable == ()
    (told,) = report.partial
    assert told == (
        f"{tmp_path}: 3 log files were read; left out: 1 of earlier attempts, 3 empty"
    )


def test_the_newest_of_very_many_files_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_sources, "MOST_FILES", 4)
    for number, path in enumerate(
        written(tmp_path, {f"w{n}.log": steps(9) for n in range(6)})
    ):
        os.utime(path, (1000 + number, 1000 + number))
    (tmp_path / "latest.log").symlink_to("w5.log")
    report = logs.examine([tmp_path], CATALOGUE)
    assert len(report.processes) == 4
    assert report.partial == (
        f"{tmp_path}: 4 log files were read; left out: 2 older ones beyond 4",
    )


def test_a_directory_without_logs_is_an_error_that_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, {"config.json": "{}"})
    assert command.main(["diagnose", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"gkd: {tmp_path}: holds no log: no file ends in .log, .out or .err; name one\n"
    )


def test_a_file_that_is_named_twice_is_read_once(tmp_path: Path) -> None:
    paths = written(tmp_path, {"a.log": steps(30)})
    report = logs.examine([*paths, tmp_path, *paths], CATALOGUE)
    assert (report.verdict, report.processes) == ("running", ())


def test_the_json_names_the_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = written(tmp_path, {"a.log.1": PARTS[0], "a.log": PARTS[1]})
    command.main(["diagnose", *map(str, paths), "--format=json"])
    told = json.loads(capsys.readouterr().out)
    assert told["joined"] == [list(map(str, paths))]
    command.main(["diagnose", *map(str, paths)])
    assert f"{paths[0]}, {paths[1]}: read as one log" in capsys.readouterr().out


@pytest.mark.parametrize("mark", [b"", b"\xff\xfe"])
def test_utf16_is_read_with_and_without_its_mark(tmp_path: Path, mark: bytes) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(mark + (steps(20) + FULL).encode("utf-16-le"))
    (line,) = logs.examine([path], CATALOGUE).causes[0].evidence
    assert (line.line, line.text) == (21, FULL.strip())
    path.write_bytes((steps(20) + FULL).encode("utf-16-be"))
    (line,) = logs.examine([path], CATALOGUE).causes[0].evidence
    assert line.line == 21


def test_a_part_in_utf16_beside_one_that_is_not(tmp_path: Path) -> None:
    (tmp_path / "a.log.1").write_bytes(steps(30).encode("utf-16"))
    (tmp_path / "a.log").write_text(steps(60, first=31) + FULL)
    report = logs.examine([tmp_path / "a.log.1", tmp_path / "a.log"], CATALOGUE)
    assert joined(report) == [["a.log.1", "a.log"]]
    assert report.causes[0].evidence[0].line == 31


def test_times_without_a_date_go_on_over_midnight(tmp_path: Path) -> None:
    late = "".join(f"23:5{n}:00 step {n}/100 loss 0.4\n" for n in range(10))
    early = "".join(f"00:0{n}:00 step 1{n}/100 loss 0.4\n" for n in range(10))
    report = examined(tmp_path, {"a.log": early, "a.log.1": late})
    assert joined(report) == [["a.log.1", "a.log"]]
    assert (report.verdict, report.processes) == ("running", ())


def test_a_rotation_over_new_year_keeps_its_order(tmp_path: Path) -> None:
    old = steps(30).replace(f"{START:%Y-%m-%d}", "2026-12-31")
    new = steps(60, first=31).replace(f"{START:%Y-%m-%d}", "2027-01-01")
    report = examined(tmp_path, {"a.log": new, "a.log.1": old})
    assert joined(report) == [["a.log.1", "a.log"]]
