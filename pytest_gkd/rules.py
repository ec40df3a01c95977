"""What is a cause, and which causes are known? The types and the loader of the advice.

One cause is one TOML file below ``advice/``; its path without the suffix is its id
(``advice/comm/peer-died.toml`` is ``comm.peer-died``). The files are read as they are
and refused by path and key when they hold what this module does not know.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ADVICE_DIR = Path(__file__).with_name("advice")

TIERS = ("cause", "symptom", "fallback")
CONFIDENCES = ("certain", "likely", "guess")
FRAMEWORKS = (
    "any",
    "env",
    "pytorch",
    "vllm",
    "ray",
    "verl",
    "trl",
    "lightrft",
    "deepspeed",
)
KNOB_KINDS = (
    "env",
    "vllm",
    "ray",
    "torch",
    "verl",
    "trl",
    "lightrft",
    "deepspeed",
    "hydra",
    "hf",
    "cmd",
    "gkd",
)
OUTCOMES = ("failed", "timeout", "crashed")

_ID = re.compile(r"[a-z0-9]+\.[a-z0-9]+(-[a-z0-9]+)*")
_FIELD = re.compile(r"\{(\w+)\}")


class RuleError(ValueError):
    """An advice file that cannot be used; the text says which, where and why."""


@dataclass(frozen=True)
class Signature:
    """One way in which a cause shows itself.

    A line is a match when it holds one of ``text`` (exact, case-sensitive), none of
    ``unless``, and ``pattern`` (a regular expression, searched) where there is one.
    Named groups of the pattern are the facts that ``say`` may use. Without ``text``
    the signature speaks of the stage alone: its ``outcomes``, ``stages``, the signal
    it died of (``signals``) and what it was doing (``doing``, a regular expression).
    Where text and such conditions stand together, both must hold. ``source`` limits
    the text to ``stacks``. ``tier`` replaces the tier of the rule for this signature.
    ``loud`` lets a line count that calls itself a warning or a note, ``silent`` one
    that the run goes on after, even to its end.
    """

    text: tuple[str, ...] = ()
    pattern: str = ""
    unless: tuple[str, ...] = ()
    example: str = ""
    near_miss: tuple[str, ...] = ()
    say: str = ""
    confidence: str = "certain"
    tier: str = ""
    source: str = ""
    loud: bool = False
    silent: bool = False
    outcomes: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()
    signals: tuple[str, ...] = ()
    doing: str = ""

    @property
    def of_stage(self) -> bool:
        """Whether the signature asks about the stage, not only about text."""
        return bool(self.outcomes or self.stages or self.signals or self.doing)


@dataclass(frozen=True)
class Fix:
    """One thing to do: a sentence that starts with a verb, and how exactly.

    ``run`` is a command or a setting, ready to paste. ``framework`` says whose knob
    it is, ``when`` under which condition the fix is right, ``versions`` for which
    releases it holds, ``knobs`` what it names, each as ``kind:name``. A stage that
    told all of ``facts`` is given this fix first, any other not at all.
    """

    do: str
    run: str = ""
    when: str = ""
    framework: str = "any"
    versions: str = ""
    knobs: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """The fix on one line."""
        text = self.do + (f" ({self.when})" if self.when else "")
        return f"{text}: {self.run}" if self.run else text


@dataclass(frozen=True)
class Myth:
    """Advice that circulates and is false, and why it is."""

    claim: str
    truth: str


@dataclass(frozen=True)
class Source:
    """Where a statement comes from: an address or a file of a release."""

    ref: str
    says: str = ""


@dataclass(frozen=True)
class Rule:
    """One cause: how it is recognised, what it means and what to do about it.

    ``consequence_of`` lists causes that, found in the same run, explain this one;
    ``*`` stands for any other.
    """

    id: str
    title: str
    tier: str
    why: str
    signatures: tuple[Signature, ...] = ()
    fixes: tuple[Fix, ...] = ()
    confirm: str = ""
    consequence_of: tuple[str, ...] = ()
    myths: tuple[Myth, ...] = ()
    sources: tuple[Source, ...] = ()


@dataclass(frozen=True)
class Catalogue:
    """All rules by id, in the order of their ids."""

    rules: Mapping[str, Rule] = field(default_factory=dict)

    def __getitem__(self, cause: str) -> Rule:
        return self.rules[cause]

    def __contains__(self, cause: object) -> bool:
        return cause in self.rules

    def __len__(self) -> int:
        return len(self.rules)


_TEXT, _TEXTS, _FLAG, _TABLES = "a text", "a list of texts", "true or false", "tables"

_RULE_KEYS = {
    "title": _TEXT,
    "tier": _TEXT,
    "why": _TEXT,
    "confirm": _TEXT,
    "consequence_of": _TEXTS,
    "signature": _TABLES,
    "fix": _TABLES,
    "myth": _TABLES,
    "source": _TABLES,
}
_SIGNATURE_KEYS = {
    "text": _TEXTS,
    "pattern": _TEXT,
    "unless": _TEXTS,
    "example": _TEXT,
    "near_miss": _TEXTS,
    "say": _TEXT,
    "confidence": _TEXT,
    "tier": _TEXT,
    "source": _TEXT,
    "loud": _FLAG,
    "silent": _FLAG,
    "outcomes": _TEXTS,
    "stages": _TEXTS,
    "signals": _TEXTS,
    "doing": _TEXT,
}
_FIX_KEYS = {
    "do": _TEXT,
    "run": _TEXT,
    "when": _TEXT,
    "framework": _TEXT,
    "versions": _TEXT,
    "knobs": _TEXTS,
    "facts": _TEXTS,
}
_MYTH_KEYS = {"claim": _TEXT, "truth": _TEXT}
_SOURCE_KEYS = {"ref": _TEXT, "says": _TEXT}


def load(extra: Iterable[Path] = ()) -> Catalogue:
    """The built-in catalogue and the users' own files, whose rules win.

    A user's file holds one rule, with its ``id``. Raises RuleError by path and key.
    """
    own = {rule.id: rule for rule in (read_rule(path) for path in extra)}
    return Catalogue({**_built_in(), **own}) if own else Catalogue(_built_in())


@functools.cache
def _built_in() -> dict[str, Rule]:
    rules = {}
    for path in sorted(ADVICE_DIR.glob("*/*.toml")):
        rule = read_rule(path, f"{path.parent.name}.{path.stem}")
        rules[rule.id] = rule
    return rules


def read_rule(path: Path, cause: str | None = None) -> Rule:
    """One file as a Rule; ``cause`` is its id, otherwise the file says it as ``id``."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RuleError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RuleError(f"{path}: is not TOML: {error}") from error
    if cause is None:
        cause = data.pop("id", None)
        if not isinstance(cause, str):
            raise RuleError(f"{path}: id: a rule of your own needs an id, a text")
    return parse_rule(data, cause, str(path))


def parse_rule(data: Mapping[str, Any], cause: str, where: str) -> Rule:
    """TOML data as a Rule. Raises RuleError naming ``where`` and the key."""
    if not _ID.fullmatch(cause):
        raise RuleError(f"{where}: id {cause!r} is not of the form area.some-name")
    _check(data, _RULE_KEYS, where, ("title", "tier", "why"))
    _one_of(data["tier"], TIERS, f"{where}: tier")
    return Rule(
        id=cause,
        title=data["title"],
        tier=data["tier"],
        why=" ".join(data["why"].split()),
        confirm=data.get("confirm", ""),
        consequence_of=tuple(data.get("consequence_of", ())),
        signatures=tuple(
            _signature(table, f"{where}: signature {number}")
            for number, table in enumerate(data.get("signature", ()), 1)
        ),
        fixes=tuple(
            _fix(table, f"{where}: fix {number}")
            for number, table in enumerate(data.get("fix", ()), 1)
        ),
        myths=tuple(
            Myth(**_checked(table, _MYTH_KEYS, f"{where}: myth", ("claim", "truth")))
            for table in data.get("myth", ())
        ),
        sources=tuple(
            Source(**_checked(table, _SOURCE_KEYS, f"{where}: source", ("ref",)))
            for table in data.get("source", ())
        ),
    )


def _signature(table: Mapping[str, Any], where: str) -> Signature:
    signature = Signature(**_checked(table, _SIGNATURE_KEYS, where, ()))
    _one_of(signature.confidence, CONFIDENCES, f"{where}: confidence")
    if signature.tier:
        _one_of(signature.tier, TIERS, f"{where}: tier")
    if signature.source:
        _one_of(signature.source, ("stacks",), f"{where}: source")
    for outcome in signature.outcomes:
        _one_of(outcome, OUTCOMES, f"{where}: outcomes")
    if not signature.text and not signature.of_stage:
        raise RuleError(f"{where}: needs text, or a condition on the stage")
    if signature.pattern and not signature.text:
        raise RuleError(f"{where}: pattern needs text, the words its line must hold")
    for text in signature.text:
        if len(text) < 4:
            raise RuleError(f"{where}: text {text!r} is too short to tell anything")
    return signature


def _fix(table: Mapping[str, Any], where: str) -> Fix:
    fix = Fix(**_checked(table, _FIX_KEYS, where, ("do",)))
    _one_of(fix.framework, FRAMEWORKS, f"{where}: framework")
    for knob in fix.knobs:
        kind, colon, name = knob.partition(":")
        if not colon or not name or kind not in KNOB_KINDS:
            raise RuleError(
                f"{where}: knobs: {knob!r} is not kind:name with a kind of "
                f"{', '.join(KNOB_KINDS)}"
            )
    return fix


def _checked(
    table: Mapping[str, Any], keys: Mapping[str, str], where: str, needed: Iterable[str]
) -> dict[str, Any]:
    _check(table, keys, where, needed)
    return {k: tuple(v) if isinstance(v, list) else v for k, v in table.items()}


def _check(
    table: Mapping[str, Any], keys: Mapping[str, str], where: str, needed: Iterable[str]
) -> None:
    for key, value in table.items():
        kind = keys.get(key)
        if kind is None:
            raise RuleError(f"{where}: unknown key {key!r}; known: {', '.join(keys)}")
        if not _is(value, kind):
            raise RuleError(f"{where}: {key}: {value!r} is not {kind}")
    for key in needed:
        if not table.get(key):
            raise RuleError(f"{where}: {key} is missing")


def _is(value: Any, kind: str) -> bool:
    if kind == _TEXT:
        return isinstance(value, str)
    if kind == _FLAG:
        return isinstance(value, bool)
    item = str if kind == _TEXTS else dict
    return isinstance(value, list) and all(isinstance(part, item) for part in value)


def _one_of(value: str, choices: tuple[str, ...], where: str) -> None:
    if value not in choices:
        raise RuleError(f"{where}: {value!r} is not one of {', '.join(choices)}")


def proofread(rule: Rule, where: str) -> list[str]:
    """What is wrong in a rule beyond its form, each as one sentence with its place.

    Too slow for every start: every pattern is compiled and tried on its example.
    """
    found = []
    if len(rule.title) > 60:
        found.append(f"{where}: title: {len(rule.title)} characters, at most 60")
    for number, signature in enumerate(rule.signatures, 1):
        at = f"{where}: signature {number}"
        try:
            pattern = re.compile(signature.pattern)
        except re.error as error:
            found.append(f"{at}: pattern: {error}")
            continue
        found += [
            f"{at}: say: {{{name}}} is no group of the pattern"
            for name in _FIELD.findall(signature.say)
            if name not in pattern.groupindex
        ]
        if signature.text and not signature.example:
            found.append(f"{at}: example is missing")
        elif signature.text and not _fits(signature, pattern, signature.example):
            found.append(f"{at}: example does not match its own signature")
        found += [
            f"{at}: near_miss {line!r} matches"
            for line in signature.near_miss
            if _fits(signature, pattern, line)
        ]
    return found


def _fits(signature: Signature, pattern: re.Pattern[str], line: str) -> bool:
    return (
        any(text in line for text in signature.text)
        and not any(text in line for text in signature.unless)
        and pattern.search(line) is not None
    )
