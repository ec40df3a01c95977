"""The documentation pages are exactly what the catalogue makes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import model_page
import pages
import pytest
import yaml

from pytest_gkd.diagnosis import catalogue
from pytest_gkd.report import explain

DOCS = Path(__file__).parent.parent / "docs"
CATALOGUE = catalogue.load()


def test_the_pages_are_up_to_date() -> None:
    assert pages.stale(CATALOGUE, DOCS) == [], "run python tools/pages.py docs"


def test_a_changed_page_is_found_and_written_again(tmp_path: Path) -> None:
    pages.main([str(tmp_path)])
    changed = tmp_path / "causes" / "cuda.oom.md"
    changed.write_text(pages.NOTE)
    stray = tmp_path / "causes" / "no.such-cause.md"
    stray.write_text(pages.NOTE)
    wrong = ["causes/cuda.oom.md", "causes/no.such-cause.md"]
    assert pages.stale(CATALOGUE, tmp_path) == wrong
    assert pages.main([str(tmp_path), "--check"]) == 1
    pages.main([str(tmp_path)])
    assert pages.main([str(tmp_path), "--check"]) == 0


@pytest.mark.parametrize("name", sorted(pages.pages(CATALOGUE)))
def test_every_link_leads_to_a_page(name: str) -> None:
    made = pages.pages(CATALOGUE)
    folder = Path(name).parent
    for part in made[name].split("](")[1:]:
        target = part.partition(")")[0]
        if target.endswith(".md"):
            # What is above docs is not made.
            assert str(folder / target) in made or (DOCS / folder / target).exists()


def test_the_sites_navigation_has_every_page() -> None:
    """`make site` finds what leads nowhere, but not what nothing leads to."""
    told = yaml.safe_load((DOCS.parent / "mkdocs.yml").read_text("utf-8"))
    assert told["not_in_nav"] == "docs/causes/*.md\n", "their index links to them"
    sections = (next(iter(one.values())) for one in told["nav"])
    found = [
        next(iter(page.values()))
        for section in sections
        for page in (section if isinstance(section, list) else [{"": section}])
    ]
    there = [path for path in DOCS.rglob("*.md") if path.parent.name != "causes"]
    wanted = {path.relative_to(DOCS.parent).as_posix() for path in there}
    wanted |= {"README.md", "README.zh.md", "CHANGELOG.md", "gpu-results/README.md"}
    assert sorted(found) == sorted({*wanted, "docs/causes/README.md"})


CONDITIONAL = catalogue.Fix(
    "Continue it", "kill -CONT <stopped_pid>", facts=("stopped_pid",)
)
GENERAL = catalogue.Fix("Dump its stacks", "py-spy dump --pid <pid>")


def with_fixes(cause: str, *fixes: catalogue.Fix) -> catalogue.Catalogue:
    changed = dataclasses.replace(CATALOGUE[cause], fixes=fixes)
    return {**CATALOGUE, cause: changed}


@pytest.mark.parametrize(
    "name", ["quick-card.md", "quick-card.zh.md", "causes/README.md"]
)
def test_the_first_step_is_one_that_holds_whatever_a_stage_has_seen(name: str) -> None:
    made = pages.pages(with_fixes("sync.stuck", CONDITIONAL, GENERAL))[name]
    (row,) = [line for line in made.splitlines() if "[sync.stuck]" in line]
    assert "Dump its stacks" in row
    assert "Continue it" not in row


def test_a_fix_that_needs_a_fact_comes_last_and_says_which() -> None:
    shown = with_fixes("sync.stuck", CONDITIONAL, GENERAL)
    for text in (
        pages.page(shown["sync.stuck"], shown),
        explain.cause_text(shown["sync.stuck"]),
    ):
        general, conditional = map(text.index, ("1. Dump", "2. Continue"))
        assert general < conditional
        assert "hen: the failed stage reported stopped_pid" in text[conditional:]


def test_every_placeholder_is_said_to_be_one_beside_its_command() -> None:
    shown = with_fixes("sync.stuck", GENERAL)
    assert "`py-spy dump --pid PID` |" in pages.card(shown)
    assert "    Fill in: PID.\n" in pages.page(shown["sync.stuck"], shown)
    assert "     fill in: PID\n" in explain.cause_text(shown["sync.stuck"])


def test_pages_that_were_not_made_here_are_left(tmp_path: Path) -> None:
    (tmp_path / "causes").mkdir()
    for name in ("causes/mine.md", "quick-card.md"):
        (tmp_path / name).write_text("mine")
    assert pages.main([str(tmp_path)]) == 1
    for name in ("causes/mine.md", "quick-card.md"):
        assert (tmp_path / name).read_text() == "mine"


def test_the_page_of_models_counts_what_ran_in_each_layout() -> None:
    passed = {"failed": None, "difference_nats": 1e-6, "whose": None, "why": None}
    failed = passed | {"failed": "vllm", "whose": "vLLM", "why": "no kernel"}
    models = {"a": {"colocated": passed, "ray": failed}, "b": {"colocated": failed}}
    made = model_page.page({"machine": "here", "date": "today", "models": models})
    assert "- colocated: 1 passed, 1 failed, 0 not run" in made
    assert "- split: 0 passed, 0 failed, 2 not run" in made
    assert "- ray: 0 passed, 1 failed, 1 not run" in made
