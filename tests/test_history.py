"""What remains of all runs of a report's directory, and drift against it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import report_schema
from test_plugin import Run

from pytest_gkd.__main__ import main
from pytest_gkd.files import write_whole
from pytest_gkd.report import compare, history
from pytest_gkd.report.compare import Report

PROBE = """
import pytest

@pytest.mark.gkd_stage("probe", timeout=60)
def test_probe(gkd):
    gkd.fact("bus_bandwidth_gb_s", {"1 MiB": 2.0, "odd": "text"})
"""


def made(
    number: int, seconds: float = 4.0, gb_s: float = 100.0, **more: Any
) -> dict[str, Any]:
    """A report of one stage that passed; ``number`` orders them in time."""
    stage = {
        **report_schema.STAGE,
        "name": "nccl",
        "outcome": "passed",
        "duration_s": seconds,
        "facts": {history.BANDWIDTH: {"4 KiB": 0.01, "64 MiB": gb_s}},
    }
    started = f"2026-11-26T01:{number // 60:02}:{number % 60:02}+00:00"
    return {**report_schema.EMPTY, "started": started, "stages": [stage], **more}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines() if line]


def judged(
    after: dict[str, Any], earlier: list[dict[str, Any]], *kept: dict[str, Any]
) -> compare.Comparison:
    runs = [history.entry(one) for one in earlier]
    return compare.compare(Report("r", after), [Report("k", one) for one in kept], runs)


# -- the file --------------------------------------------------------------------------


def test_every_run_adds_its_line_which_others_cannot_read(tmp_path: Path) -> None:
    (tmp_path / "test_probe.py").write_text(PROBE)
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path))
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-qm", "x", "--allow-empty"], check=True)
    for _ in range(2):
        Run(tmp_path, "--gkd-stages=probe", "test_probe.py")
    path = tmp_path / ".gkd/history.jsonl"
    first, second = lines(path)
    assert path.stat().st_mode & 0o777 == 0o600
    probe = first["stages"]["probe"]
    assert probe["outcome"] == "passed"
    assert probe["duration_s"] >= 0
    assert probe["bus_bandwidth_gb_s"] == {"1 MiB": 2.0}
    assert first["like"] == second["like"]
    assert first["like"]["machine"]["cpus"] == len(os.sched_getaffinity(0))
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
    assert first["commit"] == head.stdout.strip()
    assert first["versions"]["pytest"] == pytest.__version__
    # A directory of one's own holds its own.
    Run(tmp_path, "--gkd-stages=probe", "--gkd-report=mine", "test_probe.py")
    Run(tmp_path, "--gkd-stages=probe", "--gkd-report=mine", "test_probe.py")
    assert len(lines(tmp_path / "mine/history.jsonl")) == 2
    assert len(lines(path)) == 2
    assert len(history.of_report(tmp_path / "mine/report.json")) == 2
    (kept,) = (tmp_path / "mine/runs").iterdir()
    assert len(history.of_report(kept)) == 2


def test_runs_at_once_lose_no_line_and_stay_within_the_bound(tmp_path: Path) -> None:
    path, runs, each = tmp_path / "history.jsonl", 4, 80
    code = (
        "import sys, pathlib\n"
        "from pytest_gkd.report import history\n"
        "for n in range(int(sys.argv[2])):\n"
        "    told = {'pytest-gkd': 1, 'started': f'{sys.argv[3]} {n:04}'}\n"
        "    history.append(pathlib.Path(sys.argv[1]), told | {'stages': {}})\n"
    )
    command = [sys.executable, "-c", code, str(path), str(each)]
    started = [subprocess.Popen([*command, str(n)]) for n in range(runs)]
    assert [one.wait(60) for one in started] == [0] * runs
    told = [line["started"] for line in lines(path)]
    assert len(told) == len(set(told)) == history.MOST_RUNS
    # Of each run it is the latest lines that stayed, in their order.
    for run in map(str, range(runs)):
        mine = [one for one in told if one.startswith(run)]
        assert mine == [f"{run} {n:04}" for n in range(each - len(mine), each)]


def test_the_oldest_go_where_lines_are_long(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    for number in range(40):
        told = history.entry(made(number, versions={"torch": "x" * 10_000}))
        history.append(path, told)
        assert path.stat().st_size <= history.MOST_BYTES
    found = history.of_report(tmp_path)
    assert 20 < len(found) < 30
    assert found[-1]["started"] == made(39)["started"]
    assert not list(tmp_path.glob("*.part"))


def test_a_line_that_was_cut_off_costs_no_other(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    history.append(path, history.entry(made(1)))
    history.append(path, history.entry(made(2)))
    path.write_bytes(path.read_bytes()[:-20])
    history.append(path, history.entry(made(3)))
    found = history.of_report(tmp_path)
    assert [one["started"] for one in found] == [made(1)["started"], made(3)["started"]]


def test_a_file_that_another_run_has_just_replaced_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "history.jsonl"
    history.append(path, history.entry(made(1)))
    lock = history.lock

    def replaced_meanwhile(file: int) -> bool:
        monkeypatch.setattr(history, "lock", lock)
        write_whole(path, path.read_text() + path.read_text())
        return lock(file)

    monkeypatch.setattr(history, "lock", replaced_meanwhile)
    history.append(path, history.entry(made(2)))
    assert len(lines(path)) == 3


@pytest.mark.parametrize(
    ("theirs", "why"),
    [
        *(
            (kind, "not made by pytest-gkd")
            for kind in ("file", "link", "pipe", "part")
        ),
        ("directory", "Is a directory"),
    ],
)
def test_what_is_not_ours_stays_and_the_run_says_so(
    tmp_path: Path, theirs: str, why: str
) -> None:
    (tmp_path / "test_probe.py").write_text(PROBE)
    place = tmp_path / ".gkd"
    place.mkdir()
    path = place / "history.jsonl"
    match theirs:
        case "file":
            path.write_text('{"mine": 1}\n')
        case "link":
            (tmp_path / "far").write_bytes(history.SIGN)
            path.symlink_to(tmp_path / "far")
        case "directory":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "part":
            for number in range(history.MOST_RUNS):
                history.append(path, history.entry(made(number)))
            (place / "history.jsonl.part").write_text("mine")
    before = path.read_bytes() if path.is_file() else b""
    done = Run(tmp_path, "--gkd-stages=probe", "test_probe.py")
    assert done.code == 0
    (note,) = done.report["notes"]
    assert "this run is not in the history .gkd/history.jsonl: " in note
    assert why in note
    after = path.read_bytes() if path.is_file() else b""
    assert after == before
    if theirs == "part":
        assert (place / "history.jsonl.part").read_text() == "mine"


def test_a_history_of_somebody_elses_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text('{"started": "x", "stages": {}}\n')
    assert history.of_report(tmp_path) == []
    told = history.entry(made(1))
    broken = [
        {**told, "stages": [1]},
        {**told, "stages": {"a": 1}},
        {**told, "started": 1},
    ]
    path.write_text("\n".join(map(json.dumps, [told, *broken])) + "\n[[[\n")
    assert [one["started"] for one in history.of_report(tmp_path)] == [told["started"]]


# -- drift -----------------------------------------------------------------------------


def test_twice_as_slow_as_the_last_ten_is_worse() -> None:
    # Long ago it was slow: only the last ten count.
    long_ago = [made(n, 20.0) for n in range(20)]
    usual = [made(20 + n, 4.0 + n / 10) for n in range(10)]
    found = judged(made(60, 9.0), long_ago + usual)
    (change,) = found.changes
    assert (found.worse, found.like) == (True, 10)
    assert (change.where, change.what, change.before) == ("nccl", "seconds", 4.45)
    assert "r against the last 10 runs like it" in compare.text(found)
    assert not judged(made(60, 8.0), usual).worse
    assert not judged(made(60, 5.0), usual).changes


def test_where_times_vary_widely_twice_the_median_is_usual() -> None:
    values = [2.0, 9.0, 3.0, 11.0, 2.5, 10.0, 4.0, 8.0, 3.5, 4.5]
    usual = [made(n, value) for n, value in enumerate(values)]
    assert not judged(made(60, 9.0), usual).changes
    assert judged(made(60, 30.0), usual).worse


def test_half_the_best_bandwidth_is_worse_and_of_a_small_message_it_is_not() -> None:
    usual = [made(n, gb_s=100.0 + n) for n in range(5)]
    found = judged(made(60, gb_s=40.0), usual)
    (change,) = found.changes
    assert (change.what, change.worse) == ("bus_bandwidth_gb_s 64 MiB", True)
    slow = made(60, gb_s=100.0)
    slow["stages"][0]["facts"][history.BANDWIDTH]["4 KiB"] = 0.001
    found = judged(slow, usual)
    assert [one.what for one in found.changes] == ["bus_bandwidth_gb_s 4 KiB"]
    assert not found.worse


@pytest.mark.parametrize(
    "other",
    [
        {"settings": {"layout": "split"}},
        {"settings": {"student": "other"}},
        {"settings": {"gpus": 8}},
        {"machine": {"cpu": "slow", "cpus": 2, "gpu": ""}},
        {"injected": {"fault": "nccl:hang"}},
    ],
)
def test_only_runs_of_the_same_kind_are_held_against_it(other: dict[str, Any]) -> None:
    unlike = [made(n, 1.0, **other) for n in range(20)]
    like = [made(30 + n, 8.0) for n in range(3)]
    assert judged(made(60, 8.0), unlike + like).changes == []
    assert judged(made(60, 8.0), unlike).like == 0


def test_a_run_is_not_held_against_itself_or_against_later_ones() -> None:
    after = made(5)
    assert judged(after, [made(1), made(2), after, made(6)]).like == 2


def test_until_the_history_has_three_like_runs_the_kept_ones_judge() -> None:
    earlier = [made(n, 4.0) for n in range(2)]
    after, kept = made(60, 6.5), made(1, 4.0)
    assert judged(after, earlier, kept).worse
    assert not judged(after, [*earlier, made(3, 4.0)], kept).worse


def test_a_stage_that_failed_then_or_now_has_no_usual_time() -> None:
    earlier = [made(n, 1.0) for n in range(9)]
    for one in earlier[2:]:
        one["stages"][0]["outcome"] = "timeout"
    assert judged(made(60, 50.0), earlier).changes == []


def test_gkd_report_judges_by_the_history_alone_where_no_run_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a CI has it that keeps this one small file from job to job."""
    (tmp_path / "report.json").write_text(json.dumps(made(60, 9.0)))
    path = tmp_path / "history.jsonl"
    assert main(["report", str(tmp_path)]) == 2
    assert "no earlier run is kept beside it" in capsys.readouterr().err
    # The first run of a gate has nothing to be held against, which is no failure.
    history.append(path, history.entry(made(0)))
    assert main(["report", str(tmp_path)]) == 0
    assert "1 earlier run(s) like it in the history" in capsys.readouterr().out
    for number in range(1, 12):
        history.append(path, history.entry(made(number)))
    history.append(path, history.entry(made(60, 9.0)))  # itself
    assert main(["report", str(tmp_path)]) == 1
    assert "WORSE nccl seconds: 4 -> 9 (2.2 times)" in capsys.readouterr().out
    assert main(["report", "--format=json", str(tmp_path)]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["like_runs"], found["before"]) == (10, [])
    earlier = tmp_path / "earlier"
    earlier.mkdir()
    (earlier / "report.json").write_text(json.dumps(made(50, 8.5)))
    assert main(["report", str(tmp_path), str(earlier)]) == 0
