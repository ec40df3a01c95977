"""README and pages promise what is there: options, stages, budgets, make's targets."""

from __future__ import annotations

import html
import re
import tempfile
from pathlib import Path

import fresh_python
import pytest

from pytest_gkd.diagnosis import catalogue, diagnose
from pytest_gkd.options import OPTIONS, WITH_FLAG
from pytest_gkd.stage_specs import BY_NAME, LAYOUTS, OF_EVERY_JOB, STAGES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
CHINESE = (ROOT / "README.zh.md").read_text("utf-8")
RUNNING = (ROOT / "docs/running.md").read_text("utf-8")
TOLD = README + RUNNING + (ROOT / "docs/how-it-works.md").read_text("utf-8")
PICTURE = (ROOT / "docs/failure.svg").read_text("utf-8")
SCREEN = 60  # lines of the README

TAKES_A_LOCK_TWICE = """import threading

import pytest


@pytest.mark.gkd_stage("lock", timeout=100)
def test_lock(gkd):
    gkd.step("taking the lock")
    held = threading.Lock()
    while held.acquire():
        pass
"""


@pytest.mark.parametrize("flag", [option.flag for option in OPTIONS])
def test_every_option_is_told(flag: str) -> None:
    assert re.search(rf"{re.escape(flag)}\b", RUNNING)


def test_no_option_that_is_told_is_unknown() -> None:
    known = {option.flag for option in WITH_FLAG}
    assert set(re.findall(r"--gkd-[a-z-]+[a-z]", TOLD + CHINESE)) <= known


def test_the_table_of_stages_is_that_of_the_specs() -> None:
    rows = re.findall(r"^\| (\w+) \| .* \| (\d+) s \|(.*)\|$", RUNNING, re.MULTILINE)
    told = [(name, float(budget), needs.strip()) for name, budget, needs in rows]
    assert told == [
        (stage.name, float(stage.budget_s), ", ".join(stage.needs)) for stage in STAGES
    ]


def test_the_chinese_one_has_every_command_and_link_of_the_english_one() -> None:
    def named(text: str) -> set[str]:
        text = text.replace("gkd --lang=zh ", "gkd ").replace(
            "quick-card.zh", "quick-card"
        )
        return {*re.findall(r"`((?:gkd|pytest) .*?)`|\]\(([^)\s]+)\)", text)}

    assert named(README) - {("", "README.zh.md")} <= named(CHINESE)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_told(layout: str) -> None:
    assert f"\n| {layout} |" in RUNNING


def test_makes_targets_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = re.findall(r"\bmake ([a-z][a-z-]*)", TOLD)
    assert "matrix-slow" in targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_every_file_that_the_readme_links_to_is_there() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", README + CHINESE):
        assert (ROOT / link).exists(), link


@pytest.mark.parametrize(
    ("file", "text", "stage", "asked"),
    [
        (
            "train.jsonl",
            '{"prompt": "What is salt?"}\n',
            "data",
            "--gkd-train-files=trian.jsonl",
        ),
        ("test_probe.py", TAKES_A_LOCK_TWICE, "lock", "test_probe.py"),
    ],
    ids=["a missing file", "a hang"],
)
def test_the_failures_that_are_shown_are_printed_so(
    tmp_path: Path, file: str, text: str, stage: str, asked: str
) -> None:
    (tmp_path / file).write_text(text)
    wanted = [f"--gkd-stages={stage}", asked]
    done = fresh_python.run(
        "-m", "pytest", "-p", "no:cacheprovider", *wanted, cwd=tmp_path
    )
    printed = done.stdout.replace(str(tmp_path), "/home/me/job")
    told, ours = (_block(text, stage) for text in (RUNNING, printed))
    assert _words(ours) == _words(told)


def test_the_failure_that_the_chinese_readme_shows_is_printed_so() -> None:
    wanted = ["--gkd-stages=data", "--gkd-train-files=trian.jsonl", "--gkd-lang=zh"]
    # A path as long as that of pytest's own directory would be cut off.
    with tempfile.TemporaryDirectory() as place:
        Path(place, "train.jsonl").write_text('{"prompt": "What is salt?"}\n')
        done = fresh_python.run(
            "-m", "pytest", "-p", "no:cacheprovider", *wanted, cwd=Path(place)
        )
    printed = done.stdout.replace(place, "/home/me/job")
    told, ours = (_chinese_block(text) for text in (CHINESE, printed))
    assert ours == told


def _chinese_block(text: str) -> str:
    """What is told of the failure, without line ends and seconds."""
    found = re.search(r"^阶段 data .*?(?=^```|^gkd: )", text, re.DOTALL | re.MULTILINE)
    assert found
    return re.sub(r"在[\d.]+s后", "", "".join(found[0].split()))


def test_the_green_runs_that_are_shown_are_of_the_stages() -> None:
    budgets = {name: f"{BY_NAME[name].budget_s:g}" for name in OF_EVERY_JOB}
    blocks = re.findall(r"((?:^\w+ +passed +[\d.]+ s .*\n)+)", RUNNING, re.MULTILINE)
    assert len(blocks) == 2
    for block in blocks:
        line = r"^(\w+) +passed +[\d.]+ s of (\d+) s  +\S"
        assert dict(re.findall(line, block, re.MULTILINE)) == budgets


def test_the_readme_is_one_screen() -> None:
    assert README.count("\n") <= SCREEN


def test_the_picture_loads_nothing_and_is_small() -> None:
    assert re.findall(r"https?://[^\"\s]*", PICTURE) == ["http://www.w3.org/2000/svg"]
    assert "<script" not in PICTURE
    assert len(PICTURE) < 200_000


def test_the_picture_tells_what_such_a_failure_is_told_today() -> None:
    """Of a run of ``tools/failure_picture.py``, which is to be run again if not."""
    shown = html.unescape("\n".join(re.findall(r"<text[^>]*>(.*?)</text>", PICTURE)))
    words = " ".join(shown.split())
    cause = re.search(r"gkd explain (\S+)", words)
    assert cause
    rule = catalogue.load()[cause[1]]
    for line in diagnose.advice(rule, diagnose.STAGE_FRAMEWORKS, {}, stage="nccl"):
        assert line in words
    for stage in OF_EVERY_JOB:
        assert re.search(rf"\b{stage} (passed|failed) [\d.]+ s of", words)


def _block(text: str, stage: str) -> str:
    """What is told of a stage's failure."""
    found = re.search(
        rf"^stage {stage} .*?(?=^```|^gkd: )", text, re.DOTALL | re.MULTILINE
    )
    assert found
    return found[0]


def _words(text: str) -> list[str]:
    """Without what differs from run to run: seconds, and the ids of processes."""
    text = re.sub(r"after [\d.]+ s", "after a moment", text)
    text = re.sub(r"[\d.]+ s of CPU in [\d.]+ s", "no CPU in a while", text)
    return re.sub(r"\b\d+(?= \(|\.txt)", "PID", text).split()
