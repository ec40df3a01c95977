"""What is wrong with a rule beyond its form: tested on its own and others' examples."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from pytest_gkd.diagnosis import catalogue, exceptions, parts
from pytest_gkd.diagnosis.catalogue import (
    OF_EXCEPTION,
    Rule,
    Signature,
)
from pytest_gkd.diagnosis.patterns import PatternError, pattern_of
from pytest_gkd.diagnosis.scan import Hit, Scanner, index

_FIELD = re.compile(r"\{(\w+)\}")


def check(paths: Iterable[Path]) -> dict[Path, list[str]]:
    """All errors in users' files, each as one sentence with its place.

    Raises RuleError for a file that cannot be read.
    """
    found: dict[Path, list[str]] = {}
    good: dict[Path, Rule] = {}
    for path in paths:
        data = catalogue.read_toml(path)
        found[path] = catalogue.wrong_in(data, data.pop("id", None), str(path))
        if found[path]:
            for at, signature in catalogue.sound_signatures(data, str(path)):
                found[path] += _proofread(signature, at)
        else:
            good[path] = catalogue.read_rule(path)
            found[path] = proofread(good[path], str(path))
    for path, rule in good.items():
        found[path] += _takes_others(rule, good.values(), str(path))
    return found


def proofread(rule: Rule, where: str) -> list[str]:
    """What is wrong in a rule beyond its form, each as one sentence with its place.

    Too slow for every start: every pattern is compiled and tested on its example.
    """
    found = []
    if len(rule.title) > 60:
        found.append(f"{where}: title: {len(rule.title)} characters, at most 60")
    for number, signature in enumerate(rule.signatures, 1):
        found += _proofread(signature, f"{where}: signature {number}")
    return found


def _proofread(signature: Signature, at: str) -> Iterator[str]:
    broken = False
    for key in ("pattern", "unless_pattern", "named", "code", "doing"):
        try:
            pattern_of(getattr(signature, key))
        except PatternError as error:
            broken = True
            yield f"{at}: {key}: {error}; RE2's syntax, without look-around"
    if broken:
        return
    known = {*pattern_of(signature.pattern).groups}
    if signature.of_exception:
        known |= OF_EXCEPTION
    for name in _FIELD.findall(signature.say):
        if name not in known:
            yield f"{at}: say: {{{name}}} is not a group of the pattern"
    if signature.anchors and not signature.example:
        yield f"{at}: example is missing"
    elif signature.anchors and not fits(signature, signature.example):
        yield f"{at}: example does not match its own signature"
    for line in signature.near_miss:
        if fits(signature, line):
            yield f"{at}: near_miss {line!r} matches"
    if signature.unless_pattern:
        open_to_all = replace(signature, unless_pattern="")
        if not any(map(open_to_all.takes, signature.near_miss)):
            yield f"{at}: unless_pattern: no near_miss shows what it is for"


def _takes_others(rule: Rule, own: Iterable[Rule], where: str) -> Iterator[str]:
    """Near misses of other rules that this rule matches.

    For built-in rules, only single lines that none of them matches either.
    """
    others = {one.id: one for one in own if one.id != rule.id}
    built_in = {k: one for k, one in catalogue.load().items() if k != rule.id}
    for number, signature in enumerate(rule.signatures, 1):
        for other in {**built_in, **others}.values():
            for line in (line for one in other.signatures for line in one.near_miss):
                if not fits(signature, line):
                    continue
                harmless = "\n" not in line and not _hits(index(built_in), line)
                if other.id in others or harmless:
                    yield (
                        f"{where}: signature {number}: also matches what {other.id} "
                        f"names as a near miss: {line!r}"
                    )


def fits(signature: Signature, text: str) -> bool:
    """Whether a signature matches in a text of one or more lines."""
    if not any(word in text for word in signature.anchors):
        return False
    rule = Rule("a.rule", "", "cause", "", signatures=(signature,))
    found = _hits(index({rule.id: rule}, of_stage=True), text)
    return any(hit.signature is signature for hit in found)


def _hits(
    signatures: dict[bytes, list[tuple[str, Signature, str]]], text: str
) -> list[Hit]:
    scanner = Scanner(signatures, "example")
    data = text.encode()
    scanner.feed(data)
    scanner.finish()
    return parts.hold(scanner.hits, exceptions.read(data))
