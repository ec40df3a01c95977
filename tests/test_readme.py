"""The README promises what is there: options, stages, budgets, make's targets."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_gkd.options import OPTIONS
from pytest_gkd.stage_specs import LAYOUTS, STAGES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")


@pytest.mark.parametrize("flag", [option.flag for option in OPTIONS])
def test_every_option_is_in_the_readme(flag: str) -> None:
    assert re.search(rf"{re.escape(flag)}\b", README)


def test_no_option_in_the_readme_is_unknown() -> None:
    known = {option.flag for option in OPTIONS}
    known |= {"--gkd-stages", "--gkd-timeout", "--gkd-report"}
    assert set(re.findall(r"--gkd-[a-z-]+[a-z]", README)) <= known


def test_the_table_of_stages_is_that_of_the_specs() -> None:
    rows = re.findall(r"^\| (\w+) \| .* \| (\d+) s \|(.*)\|$", README, re.MULTILINE)
    told = [(name, float(budget), needs.strip()) for name, budget, needs in rows]
    assert told == [
        (stage.name, float(stage.budget_s), ", ".join(stage.needs)) for stage in STAGES
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_in_the_readme(layout: str) -> None:
    assert f"\n| {layout} |" in README


def test_makes_targets_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = re.findall(r"\bmake ([a-z][a-z-]*)", README)
    assert "matrix-slow" in targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_every_file_that_the_readme_links_to_is_there() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / link).exists(), link


def test_the_failure_that_the_readme_shows_is_the_one_that_is_printed(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "What is salt?"}\n')
    asked = ["--gkd-stages=data", "--gkd-train-files=trian.jsonl"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *asked],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    printed = done.stdout.replace(str(tmp_path), "/home/me/job")
    assert _words(_block(printed, "gkd: report")) == _words(_block(README, "```"))


def _block(text: str, end: str) -> str:
    start = text.index("stage data failed after")
    return text[start : text.index(end, start)]


def _words(text: str) -> list[str]:
    return re.sub(r"after [\d.]+ s", "after a moment", text).split()
