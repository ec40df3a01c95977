"""Translates the texts of a cause, which diagnoses and reports hold in English.

The catalogue's own text is recognized in them, with the facts filled in, and its
translation gets the same facts. ``translated`` asks this where the language is not
English.
"""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any, TypeVar

from pytest_gkd.diagnosis import suspects
from pytest_gkd.diagnosis.catalogue import (
    FIELD,
    PLACE,
    TEXTS,
    Fix,
    Rule,
    built_in,
)
from pytest_gkd.diagnosis.diagnose import Diagnosis
from pytest_gkd.diagnosis.suspects import Suspicion
from pytest_gkd.language import marked, tr, tr_filled

Told = TypeVar("Told")
# Between what is done and what is open.
BUT = marked("; ")
# No text with its facts is longer; the search for the places takes more than linear
# time.
LONGEST = 4_000


def rule(told: Rule) -> Rule:
    """A rule with all that its reader sees translated."""
    return _whole(told)


def _whole(told: Told) -> Told:
    changed: dict[str, Any] = {}
    for one in fields(told):  # type: ignore[arg-type]
        value = getattr(told, one.name)
        if one.name in TEXTS.get(type(told), ()):
            changed[one.name] = tr(value)
        elif isinstance(value, tuple) and value and type(value[0]) in TEXTS:
            changed[one.name] = tuple(map(_whole, value))
    return replace(told, **changed)  # type: ignore[type-var]


def diagnosis(found: Diagnosis) -> Diagnosis:
    """A diagnosis with its headline, its reason and its advice translated."""
    return replace(
        found,
        title=title(found.cause, found.title),
        why=tr(found.why),
        advice=tuple(advice(found.cause, line) for line in found.advice),
    )


def title(cause: str, text: str) -> str:
    """A headline of the cause; after the cause's title if what a stage has said in its
    own words has no translation."""
    known = built_in().get(cause)
    if known is None:
        return text
    if text == known.title:
        return tr(text)
    for signature in known.signatures:
        if signature.say and (told := _refilled(signature.say, text)):
            return told
    told = tr_filled(text)
    return told if told != text else tr(known.title) + tr(": ") + text


def advice(cause: str, text: str) -> str:
    """A line of advice of the cause, its command unchanged."""
    known = built_in().get(cause)
    if known is None:
        return text
    return next((told for fix in known.fixes if (told := _fix(fix, text))), text)


def last_sign(phase: str, suspicion: Suspicion) -> str:
    """The last sign of life of a run that hangs in this phase."""
    text = suspicion.last_sign
    steps = (suspects.BEGUN, suspects.DONE_OF, suspects.DONE)
    for sign in suspects.load().signs.get(phase, ()):
        for step in (*steps, suspects.NONE_OF, suspects.NONE, ""):
            said = (step, sign.done, BUT, sign.open)
            found = _matched(_pattern("".join(said), FIELD), text)
            if found and sign.name == suspicion.sign:
                return _filled("".join(map(tr, said)), FIELD, found.groupdict())
    return text


def _fix(fix: Fix, text: str) -> str:
    """The line that this fix has given, translated; empty if it is not its line."""
    framework, when = re.escape(fix.framework), re.escape(fix.when)
    if when:
        when = rf" \((?:(?P<of_>{framework}); )?{when}\)"
    else:
        when = rf"(?: \((?P<of_>{framework})\))?"
    run = r"(?:: (?P<run_>.*))?"
    found = _matched(_pattern(fix.do, PLACE) + when + run, text)
    if found is None or bool(found["run_"]) != bool(fix.run):
        return ""
    told = _filled(tr(fix.do), PLACE, found.groupdict())
    conditions = [one for one in (found["of_"], tr(fix.when)) if one]
    if conditions:
        told += tr(" ({condition})").format(condition="; ".join(conditions))
    if found["run_"]:
        told += tr(": ") + found["run_"]
    return told


def _refilled(say: str, text: str) -> str:
    """The translation of ``say`` with the facts in ``text``; empty if the text was not
    made from it."""
    found = _matched(_pattern(say, FIELD), text)
    return _filled(tr(say), FIELD, found.groupdict()) if found else ""


def _matched(pattern: str, text: str) -> re.Match[str] | None:
    return re.fullmatch(pattern, text, re.DOTALL) if len(text) <= LONGEST else None


def _pattern(template: str, places: re.Pattern[str]) -> str:
    """What matches a filled template, each place as a group of its name."""
    seen: set[str] = set()
    made = ""
    for number, part in enumerate(places.split(template)):
        if number % 2 == 0:
            made += re.escape(part)
        elif part in seen:
            made += f"(?P={part})"
        else:
            seen.add(part)
            made += f"(?P<{part}>.+?)"
    return made


def _filled(template: str, places: re.Pattern[str], facts: dict[str, str | Any]) -> str:
    return places.sub(lambda found: facts[found[1]], template)
