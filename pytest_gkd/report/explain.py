"""Renders a cause, the list of causes and the faults that can be injected."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from pytest_gkd.columns import wrapped
from pytest_gkd.diagnosis import translated
from pytest_gkd.diagnosis.catalogue import Catalogue, Rule, formed
from pytest_gkd.fault_specs import FaultSpec
from pytest_gkd.language import tr
from pytest_gkd.near_names import near_names


def cause_text(rule: Rule) -> str:
    """Everything the catalogue knows about one cause."""
    rule = translated.rule(rule)
    lines = [f"{rule.id}: {rule.title}", ""]
    lines += wrapped("", rule.why)
    if rule.tier != "cause":
        lines += [
            "",
            tr("Usually it follows from something else; look for that first."),
        ]
    after = [cause for cause in rule.consequence_of if cause != "*"]
    if after:
        lines += wrapped(tr("Often after: "), ", ".join(after))
    examples = [one.example for one in rule.signatures if one.example]
    if examples:
        lines += ["", tr("How it looks:"), *(f"  {text}" for text in examples)]
    lines += ["", tr("What to do:")]
    for number, fix in enumerate(rule.general_first, 1):
        of = "" if fix.framework in ("any", "env") else f" [{fix.framework}]"
        lines += wrapped(f"  {number}. ", formed(fix.do) + of)
        for label, text in (
            (tr("when: "), fix.condition),
            (tr("versions: "), fix.versions),
            (tr("fill in: "), fix.blanks),
        ):
            lines += [f"     {label}{text}"] if text else []
        lines += [f"       {fix.form}"] if fix.run else []
    if rule.confirm:
        lines += ["", *wrapped(tr("Verify the fix: "), formed(rule.confirm))]
    for myth in rule.myths:
        lines += ["", *wrapped(tr("Common misconception: "), myth.claim)]
        lines += wrapped("  ", myth.truth)
    if rule.sources:
        lines += ["", tr("Sources:")]
        lines += [f"  {one.ref}: {one.says}" for one in rule.sources]
    return "\n".join(lines)


def cause_json(rule: Rule) -> dict[str, Any]:
    """One cause as ``gkd explain --format json`` prints it."""
    told = ("do", "run", "when", "framework", "versions", "knobs")
    return {
        "schema": 1,
        "cause": rule.id,
        "title": rule.title,
        "tier": rule.tier,
        "why": rule.why,
        "confirm": formed(rule.confirm),
        "consequence_of": list(rule.consequence_of),
        "examples": [one.example for one in rule.signatures if one.example],
        "fixes": [
            {key: getattr(fix, key) for key in told} | {"run": fix.form}
            for fix in rule.fixes
        ],
        "myths": [asdict(one) for one in rule.myths],
        "sources": [asdict(one) for one in rule.sources],
    }


def near_causes(word: str, catalogue: Catalogue) -> list[Rule]:
    """The rules that a word may refer to, by id, similar id or title; at most ten."""
    rules = catalogue.values()
    word = word.lower()
    in_id = [rule for rule in rules if word in rule.id]
    close = near_names(word, catalogue)
    in_title = [
        rule for rule in rules if word in f"{rule.title}\n{tr(rule.title)}".lower()
    ]
    found = [*in_id, *(catalogue[cause] for cause in close), *in_title]
    return list({rule.id: rule for rule in found}.values())[:10]


def faults_text(faults: Iterable[FaultSpec]) -> str:
    """Each fault that can be injected, what it does, and what it is diagnosed as."""
    faults = list(faults)
    width = max(len(fault.name) for fault in faults)
    return "\n".join(
        tr("{name}  {how} (found as {causes})").format(
            name=f"{fault.name:<{width}}",
            how=tr(fault.how),
            causes=tr(" or ").join(fault.causes) or fault.outcome,
        )
        for fault in faults
    )


def faults_json(faults: Iterable[FaultSpec]) -> dict[str, Any]:
    """The faults as ``gkd faults --format json`` prints them."""
    told = ("name", "how", "stage", "outcome", "causes", "needs")
    return {
        "schema": 1,
        "faults": [{key: getattr(fault, key) for key in told} for fault in faults],
    }


def list_text(catalogue: Catalogue) -> str:
    """One line per rule: its id and title."""
    width = max(len(cause) for cause in catalogue)
    return "\n".join(
        f"{rule.id:<{width}}  {tr(rule.title)}" for rule in catalogue.values()
    )
