"""The page of a GitHub Actions job: what it says, and that nothing of it is markup."""

from __future__ import annotations

import os
from pathlib import Path

import fresh_python
import pytest

from pytest_gkd.diagnosis.diagnose import Diagnosis
from pytest_gkd.diagnosis.evidence import EvidenceLine
from pytest_gkd.report import step_summary
from pytest_gkd.report.record import FAILED, PASSED, RunRecord, StageRecord

ADVICE = ("Halve the micro batch: actor.micro_batch=1", "Ask <whoever> knows | this")


def run(*, message: str = "GPU 0 is full", step: str = "") -> RunRecord:
    stages = [
        StageRecord("data", "t::d", "host", 20, outcome=PASSED, duration_s=1.4),
        StageRecord(
            "vllm",
            "t::v",
            "rollout",
            120,
            outcome=FAILED,
            duration_s=7.5,
            step=step,
            message=message,
            diagnosis=Diagnosis(
                "cuda.oom",
                "certain",
                "the GPU is full",
                "It did not fit.",
                (EvidenceLine("stage.log", 3, "OOM **here**"),),
                ADVICE,
                "gkd explain cuda.oom --rules 'my rules/[oom].toml'",
            ),
        ),
    ]
    return RunRecord("2026-11-21T10:00:00", {}, {}, stages=stages)


def test_the_page_tells_each_stage_and_why_one_failed() -> None:
    text = step_summary.markdown(run(), ".gkd/last/report.json")
    assert "### gkd: 1 of 2 stages failed" in text
    assert "| data | passed | 1.4 s | 20 s |" in text
    assert "#### vllm: GPU 0 is full &#91;cuda.oom&#93;" in text
    assert "1. Halve the micro batch&#58; actor.micro&#95;batch&#61;1" in text
    assert "2. Ask &#60;whoever&#62; knows &#124; this" in text
    saw = "saw in stage.log: OOM &#42;&#42;here&#42;&#42;"
    assert 0 < text.find(saw) < text.find("It did not fit.")
    command = "gkd explain cuda.oom --rules 'my rules/&#91;oom&#93;.toml'"
    assert f"<code>{command}</code>" in text


def test_a_fault_that_was_put_in_is_told_first() -> None:
    record = run()
    assert "injected" not in step_summary.markdown(record, "r")
    record.injected = {"fault": "data:<b>", "how": ""}
    text = step_summary.markdown(record, "r")
    said = "this fault was injected&#58; data&#58;&#60;b&#62;"
    assert 0 < text.find(said) < text.find("| data")


@pytest.mark.parametrize(
    "hostile",
    [
        "<script>alert(1)</script>",
        "[click](http://example.org) ![x](http://example.org/x.png)",
        "a | b | c\n| d |\n# title",
        "`code` **bold** _it_ ~~gone~~ @everyone #1 :tada: $x$",
        "www.example.org https://example.org me@example.org",
        "</td></table>",
    ],
)
def test_nothing_that_a_run_says_is_markup(hostile: str) -> None:
    plain = step_summary.markdown(run(message="fine"), "r")
    text = step_summary.markdown(run(message=hostile), "r")
    assert len(text.splitlines()) == len(plain.splitlines())
    for mark in "<[]`*~@$":
        assert text.count(mark) == plain.count(mark), mark
    row = next(line for line in text.splitlines() if line.startswith("| vllm"))
    assert row.count("|") == 6
    assert "http:" not in text
    assert "www." not in text


def test_it_is_added_to_what_stands_there_and_stays_within_the_limit(
    tmp_path: Path,
) -> None:
    page = tmp_path / "page.md"
    page.write_text("theirs\n")
    assert step_summary.append(run(), "r", page) == ""
    assert page.read_text().startswith("theirs\n\n### gkd")
    page.write_text("x" * (step_summary.LIMIT_BYTES - 400))
    assert step_summary.append(run(), "r", page) == ""
    assert page.stat().st_size <= step_summary.LIMIT_BYTES
    assert page.read_text().endswith(step_summary.CUT)
    full = page.read_text() + "y" * (step_summary.LIMIT_BYTES - page.stat().st_size)
    page.write_text(full)
    assert step_summary.append(run(), "r", page) == ""
    assert page.read_text() == full


def test_a_page_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path, tmp_path / "no/such", tmp_path / "pipe"):
        problem = step_summary.append(run(), "r", place)
        assert problem.startswith(f"GITHUB_STEP_SUMMARY: cannot write to {place}: ")


@pytest.mark.parametrize("works", [True, False])
def test_a_run_writes_its_page_and_does_not_fail_by_it(
    tmp_path: Path, works: bool
) -> None:
    (tmp_path / "test_probe.py").write_text(
        "import pytest\n@pytest.mark.gkd_stage('fine')\ndef test_fine(): pass\n"
    )
    page = tmp_path / "page.md" if works else tmp_path
    done = fresh_python.run(
        "-m",
        "pytest",
        "--gkd-stages=fine",
        "test_probe.py",
        cwd=tmp_path,
        environ={"GITHUB_STEP_SUMMARY": str(page)},
    )
    assert done.returncode == 0, done.stdout
    if works:
        assert "### gkd: no stage failed" in page.read_text()
        assert "| fine | passed |" in page.read_text()
    else:
        assert "GITHUB_STEP_SUMMARY: cannot write to" in done.stdout
