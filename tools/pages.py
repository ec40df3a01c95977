"""Make the documentation pages from the catalogue, the faults and recorded runs.

``python tools/pages.py docs`` writes them, ``--check`` says which are out of date.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fault_page
import model_page
import stage_page
import standstill_page

from pytest_gkd import fault_specs, language
from pytest_gkd.diagnosis import translated
from pytest_gkd.diagnosis.catalogue import Catalogue, Fix, Rule, formed, load
from pytest_gkd.gpu_report import result_files, result_page
from pytest_gkd.language import tr

MADE = "python tools/pages.py"
NOTE = f"<!-- Made from the advice files by {MADE}; do not edit. -->"
# The quick card: what is met most often, in the order in which a run comes to it.
CARD = (
    *("env.package-conflict", "env.no-gpu", "env.gpu-busy"),
    *("data.file-missing", "data.schema", "data.empty", "data.loader-stall"),
    *("tokenizer.vocab-mismatch", "ray.no-resources", "ray.memory-monitor"),
    *("vllm.kv-cache", "vllm.gpu-memory-utilization", "vllm.engine-start-timeout"),
    *("cuda.oom", "comm.collective-timeout", "comm.rendezvous"),
    *("sync.stuck", "sync.not-applied", "teacher.unreachable"),
    *("train.nan", "train.batch-size", "config.unknown-option"),
    *("config.framework-version", "env.variable-not-propagated"),
)
CARD_WORDS = {
    "en": (
        "Quick card",
        (
            "`gkd diagnose LOG...` names the root cause of a run; `gkd explain CAUSE`",
            "tells all that is known of it. The first error in time is the root, the",
            "loudest or last one seldom is.",
        ),
        ("Problem", "First step", "Cause"),
        "Common misconceptions",
    ),
    "zh": (
        "速查表",
        (
            "`gkd --lang=zh diagnose LOG...` 指出一次运行的根因；",
            "`gkd --lang=zh explain CAUSE` 给出关于该原因的全部内容。",
            "根因是时间上最早的错误，很少是最显眼或最后的那个。",
        ),
        ("问题", "第一步", "原因"),
        "常见误解",
    ),
}


def pages(catalogue: Catalogue, docs: Path | None = None) -> dict[str, str]:
    """Every page by its path below the documentation's directory ``docs``.

    The pages of faults and of models show what is recorded there, that of GPUs what is
    recorded beside it.
    """
    made = {
        f"causes/{rule.id}.md": page(rule, catalogue) for rule in catalogue.values()
    }
    made["causes/README.md"] = index(catalogue)
    made["quick-card.md"] = card(catalogue)
    language.use("zh")
    try:
        made["quick-card.zh.md"] = card(catalogue)
    finally:
        language.use("en")
    times = _recorded(docs, fault_page.TIMES)
    made["faults.md"] = fault_page.page(fault_specs.load().values(), times)
    results = result_files.load(docs.parent / result_files.DIRECTORY) if docs else ()
    made["gpu-results.md"] = result_page.page(results)
    if runs := _recorded(docs, model_page.RUNS):
        made["models.md"] = model_page.page(runs)
    if runs := _recorded(docs, standstill_page.RUNS):
        made["watch-standstills.md"] = standstill_page.page(runs)
    if docs and (runs := _recorded(docs, stage_page.RUNS)):
        running = (docs / "running.md").read_text("utf-8")
        made["stages.md"] = stage_page.page(runs, running)
    return made


def _recorded(docs: Path | None, name: str) -> dict[str, Any]:
    """What runs recorded in a file of ``docs``; empty where none did."""
    if docs is None or not (docs / name).exists():
        return {}
    found: dict[str, Any] = json.loads((docs / name).read_text("utf-8"))
    return found


def page(rule: Rule, catalogue: Catalogue) -> str:
    """One cause: what it is, how it looks, what to do, what is wrongly believed."""
    lines = [f"# {rule.id}: {rule.title}", "", NOTE, "", rule.why, ""]
    if rule.tier != "cause":
        lines += ["Usually it follows from something else; look for that first.", ""]
    after = [cause for cause in rule.consequence_of if cause in catalogue]
    if after:
        links = ", ".join(f"[{cause}]({cause}.md)" for cause in after)
        lines += [f"Often after: {links}.", ""]
    examples = [one.example for one in rule.signatures if one.example]
    if examples:
        lines += ["## How it looks", "", "```text", *examples, "```", ""]
    lines += ["## What to do", ""]
    for number, fix in enumerate(rule.general_first, 1):
        lines += _fix_lines(number, fix)
    if rule.confirm:
        lines += ["## Verify the fix", "", formed(rule.confirm), ""]
    if rule.myths:
        lines += ["## Common misconceptions", "", *_myths([rule]), ""]
    if rule.sources:
        lines += ["## Sources", ""]
        lines += [*(f"- {one.ref}: {one.says}" for one in rule.sources), ""]
    return "\n".join(lines)


def _fix_lines(number: int, fix: Fix) -> Iterator[str]:
    of = "" if fix.framework in ("any", "env") else f" ({fix.framework})"
    yield f"{number}. {formed(fix.do)}{of}."
    if fix.condition:
        yield f"    When: {fix.condition}."
    if fix.versions:
        yield f"    Versions: {fix.versions}."
    if fix.blanks:
        yield f"    Fill in: {fix.blanks}."
    if fix.run:
        yield from ("", "    ```sh", f"    {fix.form}", "    ```")
    yield ""


def index(catalogue: Catalogue) -> str:
    """The table from error text to cause to first fix."""
    lines = [
        "# Error text, cause, first step",
        "",
        NOTE,
        "",
        "| The log says | Cause | First step |",
        "| --- | --- | --- |",
    ]
    for rule in catalogue.values():
        text = next((one.text[0] for one in rule.signatures if one.text), rule.title)
        link = f"[{rule.id}]({rule.id}.md)"
        lines.append(
            f"| `{_cell(text)}` | {link} | {_cell(formed(rule.first_fix.do))} |"
        )
    return "\n".join([*lines, ""])


def card(catalogue: Catalogue) -> str:
    """The causes that are met most often, each with its first step, on one page."""
    title, intro, heads, misconceptions = CARD_WORDS[language.current()]
    lines = [f"# {title}", "", NOTE, "", *intro, "", f"| {' | '.join(heads)} |"]
    lines += ["| --- | --- | --- |"]
    rules = {rule.id: translated.rule(rule) for rule in catalogue.values()}
    for cause in CARD:
        rule = rules[cause]
        first = rule.first_fix
        run = f"{tr(': ')}`{_cell(first.form)}`" if first.run else ""
        link = f"[{cause}](causes/{cause}.md)"
        lines.append(
            f"| {_cell(rule.title)} | {_cell(formed(first.do))}{run} | {link} |"
        )
    lines += ["", f"## {misconceptions}", "", *_myths(rules.values()), ""]
    return "\n".join(lines)


def _myths(rules: Iterable[Rule]) -> list[str]:
    return [f"- *{myth.claim}* {myth.truth}" for rule in rules for myth in rule.myths]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").strip()


def stale(catalogue: Catalogue, root: Path) -> list[str]:
    """The pages below ``root`` that differ, are missing, or should not be there."""
    made = pages(catalogue, root)
    differ = [
        name
        for name, text in made.items()
        if not (root / name).is_file() or (root / name).read_text("utf-8") != text
    ]
    known = {Path(name).name for name in made if name.startswith("causes/")}
    there = (root / "causes").glob("*.md")
    return differ + [f"causes/{p.name}" for p in there if p.name not in known]


def main(arguments: Sequence[str]) -> int:
    """Write the pages, or with ``--check`` name the stale ones; 1 if there are any."""
    root = Path(next((a for a in arguments if not a.startswith("-")), "docs"))
    catalogue = load()
    wrong = stale(catalogue, root)
    if "--check" in arguments:
        sys.stdout.write("".join(f"{root / name}: out of date\n" for name in wrong))
        return 1 if wrong else 0
    made = pages(catalogue, root)
    theirs = [name for name in wrong if not _is_ours(root / name)]
    for name in set(wrong) - set(theirs):
        path = root / name
        if name in made:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(made[name], "utf-8")
        else:
            path.unlink()
    sys.stdout.write("".join(f"{root / n}: not made here, and left\n" for n in theirs))
    return 1 if theirs else 0


def _is_ours(path: Path) -> bool:
    """Whether a page may be written over or removed: it says that it was made here."""
    return not path.exists() or MADE in path.read_text("utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
