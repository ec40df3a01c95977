"""What is kept of a failed stage, and the diagnosis that is made from it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Literal

import pytest

from pytest_gkd.diagnosis.catalogue import load
from pytest_gkd.diagnosis.diagnose import Diagnosis
from pytest_gkd.processes.stacks import Stack
from pytest_gkd.report.record import FAILED, TIMEOUT, StageRecord
from pytest_gkd.run import findings
from pytest_gkd.run.findings import Findings
from pytest_gkd.run.pytest_report import Traceback
from pytest_gkd.stage_api import StageFault
from pytest_gkd.workload.inject.data import without_rights_of_root

DISK_FULL = "OSError: [Errno 28] No space left on device: '/data/ckpt/model.pt'"
FAULT = StageFault(
    "data.file-missing",
    "there is no file trian.jsonl",
    {"path": "trian.jsonl"},
    (("--gkd-train-files", None, "trian.jsonl"),),
)


@pytest.fixture
def report_dir(tmp_path: Path) -> Path:
    return tmp_path / "report"


@pytest.fixture
def found(report_dir: Path, tmp_path: Path) -> Findings:
    return Findings(report_dir, tmp_path, (), pytest.fail, lambda _: None)


def record(outcome: str = FAILED, message: str = "it broke") -> StageRecord:
    made = StageRecord("data", "stages/test_data.py::test_data", "host", 20.0)
    made.outcome, made.message = outcome, message
    return made


def diagnosis(made: StageRecord) -> Diagnosis:
    assert made.diagnosis is not None
    return made.diagnosis


# -- diagnosis ---------------------------------------------------------------------


def test_a_known_line_of_output_gives_its_cause_with_the_line(found: Findings) -> None:
    made = record()
    found.settle(made, f"step 1\n{DISK_FULL}\n")
    assert diagnosis(made).cause == "env.disk-full"
    assert diagnosis(made).advice
    assert ("output", 2, DISK_FULL) in diagnosis(made).evidence


def test_the_exceptions_text_is_looked_at_too(found: Findings) -> None:
    made = record()
    found.settle(made, "", error=DISK_FULL)
    assert diagnosis(made).cause == "env.disk-full"


def test_what_the_stages_children_wrote_is_looked_at_too(
    found: Findings, report_dir: Path
) -> None:
    output = report_dir / "output/data"
    output.mkdir(parents=True)
    (output / "rank1.log").write_text(f"one\ntwo\n{DISK_FULL}\n")
    made = record()
    found.settle(made, "nothing here")
    assert diagnosis(made).cause == "env.disk-full"
    assert diagnosis(made).evidence[0].source == "rank1.log"
    assert diagnosis(made).evidence[0].line == 3


def test_another_stages_output_is_not_looked_at(
    found: Findings, report_dir: Path
) -> None:
    output = report_dir / "output/nccl"
    output.mkdir(parents=True)
    (output / "rank1.log").write_text(DISK_FULL)
    made = record()
    found.settle(made, "nothing here")
    assert made.diagnosis is None


def test_a_cause_that_the_stage_named_stands_with_its_evidence_first(
    found: Findings,
) -> None:
    proof = load()["data.file-missing"].signatures[0].example
    made = record(message="there is no file trian.jsonl")
    found.settle(made, f"{DISK_FULL}\n{proof}", fault=FAULT, error=made.message)
    assert diagnosis(made).cause == "data.file-missing"
    assert diagnosis(made).confidence == "certain"
    # Its own output and traceback would only repeat it.
    assert diagnosis(made).evidence == (("--gkd-train-files", None, "trian.jsonl"),)


def test_a_line_that_the_stage_shows_of_a_childs_output_is_not_shown_twice(
    found: Findings, report_dir: Path
) -> None:
    proof = load()["data.file-missing"].signatures[0].example
    output = report_dir / "output/data/rank1.log"
    output.parent.mkdir(parents=True)
    other = proof.replace("train", "valid")
    output.write_text(f"{proof}\nmore\n{other}\n")
    shown = (str(output), 1, proof)
    found.settle(
        made := record(), "", fault=StageFault(FAULT.cause, "gone", evidence=(shown,))
    )
    assert diagnosis(made).evidence == (shown, ("rank1.log", 3, other))


def test_without_a_cause_the_telling_lines_are_kept(found: Findings) -> None:
    made = record()
    found.settle(made, "fine\nZorkError: the quux is frobbed\nfine\n")
    assert made.diagnosis is None
    assert made.telling[0] == ("output", 2, "ZorkError: the quux is frobbed")
    assert made.to_json()["telling"][0]["line"] == 2


def test_without_a_word_of_trouble_the_last_lines_are_kept(found: Findings) -> None:
    made = record()
    found.settle(made, "one\ntwo\nthree\n\nfour\n")
    assert ("output", 5, "four") in made.telling


def test_a_stage_that_left_nothing_is_unknown_without_lines(found: Findings) -> None:
    made = record()
    found.settle(made, "")
    assert (made.diagnosis, made.telling) == (None, [])


def test_a_process_that_was_killed_is_told_by_its_signal_which_names_no_reason(
    found: Findings,
) -> None:
    made = record(message="the process that ran it died: signal SIGKILL")
    found.settle(made, "", exit_signal="SIGKILL", crashed=True)
    assert diagnosis(made).cause == "env.killed"


def test_a_hang_is_told_by_what_the_stage_was_doing(found: Findings) -> None:
    made = StageRecord("weight_sync", "stages/test_weight_sync.py", "rollout", 60.0)
    made.outcome, made.step = TIMEOUT, "pushing the weights"
    found.settle(made, "")
    assert diagnosis(made).cause == "sync.stuck"


def test_a_hang_is_told_by_its_stacks(found: Findings, report_dir: Path) -> None:
    text = 'Thread 7 (idle): "MainThread"\n    _prepare_split (datasets/builder.py:9)\n'
    made = record(TIMEOUT)
    found.keep_stacks(made, [Stack(7, "7 python", report_dir / "7.txt", text)])
    found.settle(made, "")
    assert diagnosis(made).cause == "data.loader-stall"


# -- what is kept ------------------------------------------------------------------


def test_what_the_stage_printed_is_kept(found: Findings, report_dir: Path) -> None:
    found.settle(record(), "the last words\n")
    log = report_dir / "output/data/stage.log"
    assert log.read_text() == "the last words\n"


def test_the_end_of_a_flood_is_kept(
    found: Findings, report_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(findings, "OUTPUT_BYTES", 10)
    found.settle(record(), "x" * 100 + "the end")
    assert (report_dir / "output/data/stage.log").read_text() == "xxxthe end"


def test_of_a_huge_error_the_ends_are_looked_at_and_little_is_kept(
    found: Findings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(findings, "OUTPUT_BYTES", 1000)
    made = record()
    made.message = "x" * 50_000
    flood = "an ordinary line\n" * 5000
    error = (
        f"{flood}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    )
    found.settle(made, "", error=error)
    assert made.diagnosis is not None
    assert diagnosis(made).cause == "cuda.oom"
    assert (diagnosis(made).evidence[0].line or 0) < 100
    assert len(made.message) <= findings.MESSAGE_CHARS


def test_an_empty_log_is_not_made(found: Findings, report_dir: Path) -> None:
    found.settle(record(), " \n")
    assert not (report_dir / "output/data/stage.log").exists()


def test_the_childrens_files_are_listed_as_the_user_would_type_them(
    found: Findings, report_dir: Path
) -> None:
    output = report_dir / "output/data"
    output.mkdir(parents=True)
    for name in ("rank1.log", "rank0.log"):
        (output / name).touch()
    made = record()
    found.settle(made, "printed")
    assert made.output == [
        "report/output/data/rank0.log",
        "report/output/data/rank1.log",
    ]


def test_a_childs_file_that_is_no_text_is_read_all_the_same(
    found: Findings, report_dir: Path
) -> None:
    output = report_dir / "output/data"
    output.mkdir(parents=True)
    (output / "rank0.log").write_bytes(b"\xff\xfe\0\n" + DISK_FULL.encode())
    made = record()
    found.settle(made, "")
    assert diagnosis(made).cause == "env.disk-full"


def test_a_path_elsewhere_is_given_whole(found: Findings) -> None:
    assert found.relative(Path("/elsewhere/x")) == "/elsewhere/x"


def test_stacks_are_listed_with_where_they_stand(
    found: Findings, report_dir: Path
) -> None:
    text = 'Thread 7 (idle): "MainThread"\n    mine (test_mine.py:9)\n'
    path = report_dir / "stacks/data/7.txt"
    made = record(TIMEOUT)
    found.keep_stacks(made, [Stack(7, "7 python", path, text)])
    assert made.stacks == ["report/stacks/data/7.txt"]
    assert made.stuck == ["7 python: mine (test_mine.py:9)"]


def test_half_a_surrogate_pair_in_the_output_is_no_obstacle(found: Findings) -> None:
    made = record()
    found.settle(made, "bad \ud800 text")
    assert made.telling


def raised(error: Exception, style: Literal["long", "short"]) -> Traceback:
    """As pytest shows that it was raised, with this code on its way to another:
    OSError: [Errno 24] Too many open files
    """
    try:
        try:
            raise error
        except ValueError as first:
            raise OSError(24, "Too many open files") from first
    except (KeyError, OSError):
        shown = pytest.ExceptionInfo.from_current().getrepr(style=style)
    place = ("t", 0, "t")
    return Traceback.of(pytest.TestReport("t", place, {}, "failed", shown, "call"))


def test_source_code_in_a_traceback_proves_nothing(found: Findings) -> None:
    made = record()
    traceback = raised(KeyError("the moon"), "long")
    assert "Too many open files" in traceback.text
    found.settle(made, "all is well", traceback=traceback)
    assert made.diagnosis is None


@pytest.mark.parametrize("style", ["long", "short"])
def test_what_was_raised_is_looked_at_with_its_place_in_the_log(
    found: Findings, report_dir: Path, style: Literal["long", "short"]
) -> None:
    made = record()
    traceback = raised(ValueError("the moon"), style)
    found.settle(made, "all is well", traceback=traceback)
    assert diagnosis(made).cause == "env.too-many-files"
    _, line, text = diagnosis(made).evidence[0]
    log = (report_dir / "output/data/stage.log").read_text().split("\n")
    assert line is not None
    assert log[line - 1].split() == text.split()
    assert log[-1] == "all is well"
    kept = [line for line in traceback.said.split("\n") if line]
    assert sum(line.startswith("E ") for line in kept) == 2
    assert sum("test_findings.py:" in line for line in kept) == 2


def test_a_stopped_process_comes_first_in_the_advice(found: Findings) -> None:
    made = record(TIMEOUT)
    made.name, made.step = "vllm", "starting the engine"
    made.progress = {"stopped_pids": [4711]}
    found.settle(made, "")
    assert "kill -CONT 4711" in diagnosis(made).advice[0]


def test_a_diagnosis_is_whole_when_another_thread_can_see_it(found: Findings) -> None:
    seen = []

    class Watched(StageRecord):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name == "diagnosis":
                seen.append(copy.deepcopy(value))

    made = Watched("data", "stages/test_data.py::test_data", "host", 20.0)
    made.outcome, made.message = FAILED, "there is no file trian.jsonl"
    found.settle(made, DISK_FULL, fault=FAULT, error=made.message)
    assert seen == [None, made.diagnosis]


# -- what cannot be read, and what belongs to the stage ----------------------------


@pytest.fixture
def output(report_dir: Path) -> Path:
    made = report_dir / "output/data"
    made.mkdir(parents=True)
    return made


@pytest.mark.parametrize("hidden", ["the file", "the directory"])
def test_a_childs_file_that_cannot_be_read_is_told_and_the_others_are(
    report_dir: Path, tmp_path: Path, output: Path, hidden: str
) -> None:
    told: list[str] = []
    found = Findings(report_dir, tmp_path, (), told.append, lambda _: None)
    (output / "rank0.log").write_text("one\n")
    is_file = hidden == "the file"
    if is_file:
        (output / "rank1.log").write_text(DISK_FULL)
        (output / "rank0.log").chmod(0)
    else:
        output.chmod(0o600)
    made = record()
    with without_rights_of_root():
        found.settle(made, "")
        problems = found.sanitize_output(["data"])
    output.chmod(0o700)
    assert "report/output/data/rank0.log" in told[0]
    assert "Permission denied" in told[0]
    assert "report/output/data/rank0.log may hold secrets" in problems[0]
    assert len(told) == len(problems) == 1
    assert is_file == (made.diagnosis is not None)


def test_a_childs_file_that_is_gone_meanwhile_is_told(
    report_dir: Path, tmp_path: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    found = Findings(report_dir, tmp_path, (), told.append, lambda _: None)
    path = output / "rank0.log"
    path.write_text("one\n")
    opens = Path.open

    def gone(self: Path, *args: Any, **options: Any) -> Any:
        path.unlink(missing_ok=True)
        return opens(self, *args, **options)

    monkeypatch.setattr(Path, "open", gone)
    found.settle(record(), "")
    assert "No such file or directory" in told[0]


def test_a_stages_own_files_stay_where_a_log_is_rewritten(
    found: Findings, output: Path, tmp_path: Path
) -> None:
    (output / "a.log").write_text("HF_TOKEN=hf_" + "a1" * 20)
    (output / "a.log").chmod(0o640)
    (output / "a.log.part").write_text("mine")
    (output / "b.log").write_text("HF_TOKEN=hf_" + "a1" * 20)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("mine")
    (output / "b.log.part").symlink_to(elsewhere)
    assert found.sanitize_output(["data"]) == []
    assert (output / "a.log").read_text() == "HF_TOKEN=hf_***"
    assert (output / "a.log").stat().st_mode & 0o777 == 0o640
    assert (output / "a.log.part").read_text() == elsewhere.read_text() == "mine"
    assert (output / "b.log.part").is_symlink()
    assert len(list(output.iterdir())) == 4


def test_what_no_stage_wrote_is_not_rewritten(
    found: Findings, output: Path, tmp_path: Path
) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    log = theirs / "train.log"
    log.write_text("HF_TOKEN=hf_" + "a1" * 20)
    (output.parent / "train.log").hardlink_to(log)
    (output.parent / "linked").symlink_to(theirs)
    assert found.sanitize_output(["data", "linked"]) == []
    assert log.samefile(output.parent / "train.log")
    assert log.read_text() == "HF_TOKEN=hf_" + "a1" * 20
