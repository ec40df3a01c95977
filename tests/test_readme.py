"""The README promises what is there: options, stages, budgets, make's targets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pytest_gkd.settings import OPTIONS
from pytest_gkd.specs import LAYOUTS, STAGES

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
