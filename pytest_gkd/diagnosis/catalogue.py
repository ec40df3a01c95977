"""The catalogue of causes: its types, and the loader of the advice files.

One cause is one TOML file below ``advice/``; its path without the suffix is its id
(``advice/comm/peer-died.toml`` is ``comm.peer-died``). The files are read as is, and
rejected by path and key if they contain what this module does not know.
"""

from __future__ import annotations

import functools
import re
import shlex
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from pytest_gkd.diagnosis.log_phases import PHASES
from pytest_gkd.diagnosis.patterns import pattern_of
from pytest_gkd.language import tr
from pytest_gkd.near_names import near_names

Made = TypeVar("Made")
ADVICE_DIR = Path(__file__).parent.parent / "advice"

PLACE = re.compile(r"<([a-z]\w*)>")  # in a fix, for the fact with that name
FIELD = re.compile(r"\{(\w+)\}")  # the same in a signature's ``say``

TIERS = ("cause", "symptom", "fallback")
CONFIDENCES = ("certain", "likely", "guess")
TRAINERS = ("verl", "trl", "lightrft", "deepspeed")
FRAMEWORKS = ("any", "env", "pytorch", "vllm", "sglang", "ray", *TRAINERS)
_LIBRARIES = (*TRAINERS, "peft", "hydra", "hf")
KNOB_KINDS = ("env", "vllm", "sglang", "ray", "torch", *_LIBRARIES, "cmd", "gkd")
# A stage is stuck if its time ran out and it made no visible progress.
OUTCOMES = ("failed", "timeout", "crashed", "stuck")
_ANCHORS = ("text", "raised", "innermost", "through")
_OF_STAGE = ("outcomes", "stages", "signals", "doing")

_ID = re.compile(r"[a-z0-9]+\.[a-z0-9]+(-[a-z0-9]+)*")
# Facts of an exception that a signature's ``say`` may use.
OF_EXCEPTION = frozenset({"raised", "message", "file", "function"})


class RuleError(ValueError):
    """An unusable advice file; the text says which, where and why."""


@dataclass(frozen=True)
class Signature:
    """One way in which a cause shows itself.

    A line matches if it contains one of ``text`` (exact, case-sensitive), none of
    ``unless``, and ``pattern`` (a regular expression, searched) if there is one. A
    match of the pattern does not count if ``unless_pattern`` matches within it; the
    next one may. Both are RE2's, over bytes. Named groups of the pattern are the facts
    that ``say`` may use; ``name2`` stands for ``name`` where that group matched
    nothing. Without ``text`` or an exception the signature is about the stage alone:
    its ``outcomes``, ``stages``, the signal that killed it (``signals``) and what it
    was doing (``doing``, a regular expression). With both text and such conditions,
    both must hold. ``source`` limits the text to ``stacks``. ``tier`` overrides the
    rule's tier for this signature.

    The line may have to belong to an exception: of a class in ``raised``, with its
    innermost frame in ``innermost``, with any frame of it or of those chained to it in
    ``through``; a frame is given as a function, a library's file or folder, or
    ``file.py:function``. ``named`` is a pattern that a process, function or file on the
    way must match (``RewardWorker``, ``llm_judge``, ``teacher.py``), ``code`` one for
    the innermost line of the program that the traceback shows. ``in_library`` leaves
    out exceptions that a program's own code raised, ``library_message`` those alone
    that it raised by a ``raise`` or ``assert``. Text alone is only a guess in such a
    message, which may mean anything, unless its ``own_words`` are as sure in any
    program that trains, as those of a user's own rule are. ``beside`` requires another
    line of the same process with one of its texts, in the same exceptions or ``within``
    this many lines. ``phases`` limits it to exceptions raised in these phases, by their
    frames (``unknown`` if these do not tell, or without an exception): a message of
    Python's own says nothing about the place. ``loud`` lets a line count that calls
    itself a warning or a note; ``silent`` one after which the run goes on, even to its
    end; after one that ``waits`` it hangs and does not end.
    """

    text: tuple[str, ...] = ()
    pattern: str = ""
    unless: tuple[str, ...] = ()
    unless_pattern: str = ""
    example: str = ""
    near_miss: tuple[str, ...] = ()
    say: str = ""
    confidence: str = "certain"
    tier: str = ""
    source: str = ""
    loud: bool = False
    silent: bool = False
    waits: bool = False
    outcomes: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()
    signals: tuple[str, ...] = ()
    doing: str = ""
    raised: tuple[str, ...] = ()
    innermost: tuple[str, ...] = ()
    through: tuple[str, ...] = ()
    named: str = ""
    code: str = ""
    in_library: bool = False
    library_message: bool = False
    own_words: bool = False
    beside: tuple[str, ...] = ()
    within: int = 0
    phases: tuple[str, ...] = ()

    @property
    def of_exception(self) -> bool:
        """Whether the line must belong to a particular kind of exception."""
        return bool(
            self.raised or self.innermost or self.through or self.named or self.code
        )

    @property
    def in_parts(self) -> bool:
        """Whether the line alone is not enough for a match."""
        of_place = self.in_library or self.library_message
        return self.of_exception or of_place or bool(self.beside or self.phases)

    @property
    def anchors(self) -> tuple[str, ...]:
        """The strings of which the line must contain one."""
        frames = self.innermost or self.through
        return self.text or self.raised or tuple(one.split(":")[0] for one in frames)

    @property
    def of_stage(self) -> bool:
        """Whether the signature has conditions on the stage, not only on text."""
        return any(getattr(self, key) for key in _OF_STAGE)

    def takes(self, line: str) -> bool:
        """Whether the line alone would match."""
        words = any(text in line for text in self.anchors)
        return words and self.facts_in(line.encode()) is not None

    def facts_in(self, line: bytes) -> dict[str, str] | None:
        """The facts in a line that contains a ``text``; None if it does not match."""
        if self.unless and any(map(line.__contains__, _encoded(self.unless))):
            return None
        if not self.pattern:
            return {}
        match = pattern_of(self.pattern, self.unless_pattern).search(line)
        if match is None:
            return None
        facts = {
            name.decode(): value.decode("utf-8", "replace").strip()
            for name, value in match.groupdict().items()
            if value is not None
        }
        return {name.rstrip("23456789"): facts[name] for name in facts} | facts


@functools.cache
def _encoded(texts: tuple[str, ...]) -> tuple[bytes, ...]:
    return tuple(text.encode() for text in texts)


@dataclass(frozen=True)
class Fix:
    """One thing to do: a sentence that starts with a verb, and how exactly.

    ``run`` is a command or a setting, ready to paste; ``<name>`` in it is a placeholder
    for the fact with that name. ``framework`` says whose knob it is, ``when`` under
    which condition the fix is right, ``versions`` for which releases it holds,
    ``knobs`` what it names, each as ``kind:name``. A stage that reported all of
    ``facts`` is offered this fix first, any other not at all; so is who sees one of
    ``said`` in the headline or in a line that shows the cause.
    """

    do: str
    run: str = ""
    when: str = ""
    framework: str = "any"
    versions: str = ""
    knobs: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()
    said: tuple[str, ...] = ()

    @property
    def form(self) -> str:
        """``run`` with unknown values in capitals, which are inert in a shell."""
        return formed(self.run)

    @property
    def blanks(self) -> str:
        """What the reader has to fill in, such as ``PID``; usually nothing."""
        names = dict.fromkeys(one[1].upper() for one in PLACE.finditer(self.run))
        return tr(" and ").join(names)

    @property
    def condition(self) -> str:
        """When this fix is right; empty for one that never does harm."""
        if not self.when and self.said:
            words = tr(" or ").join(repr(one) for one in self.said)
            return tr("the log says {words}").format(words=words)
        if self.when or not self.facts:
            return self.when
        facts = tr(" and ").join(self.facts)
        return tr("the failed stage reported {facts}").format(facts=facts)

    @property
    def is_special(self) -> bool:
        """Whether it is only for some of those who have the cause."""
        return bool(self.facts or self.said)

    def line(self, facts: Mapping[str, Any]) -> str:
        """The fix on one line, its placeholders filled from ``facts``."""
        text = self.do + (f" ({self.when})" if self.when else "")
        text = PLACE.sub(
            lambda found: str(facts.get(found[1]) or found[1].upper()), text
        )
        run = self.filled(facts)
        return f"{text}: {run}" if run else text

    def filled(self, facts: Mapping[str, Any]) -> str:
        """``run`` with its placeholders filled from ``facts``.

        A placeholder without a fact, or whose fact could break out of its string or
        word, becomes its name in capitals, for the reader to fill in.
        """

        def value(found: re.Match[str]) -> str:
            before = self.run[: found.start()]
            quoted = any(before.count(mark) % 2 for mark in ("'", '"'))
            return _word(facts.get(found[1]), quoted=quoted) or found[1].upper()

        return PLACE.sub(value, self.run)


def formed(text: str) -> str:
    """The text with its placeholders in capitals."""
    return PLACE.sub(lambda found: found[1].upper(), text)


def _word(fact: Any, *, quoted: bool) -> str:
    """A fact as part of a command; empty if it is not safe there.

    Facts may come from a log, and the command is meant to be pasted into a shell.
    """
    if isinstance(fact, (list, tuple)) and not quoted:
        return " ".join(_word(one, quoted=False) for one in fact)
    if not isinstance(fact, (str, int, float)) or not str(fact).isprintable():
        return ""
    text = str(fact)
    if quoted:
        return "" if set(text) & set("'\"\\`$!") else text
    return shlex.quote(text) if text else ""


@dataclass(frozen=True)
class Myth:
    """Advice that circulates and is false, and why it is."""

    claim: str
    truth: str


@dataclass(frozen=True)
class Source:
    """The source of a statement: a URL or a file of a release."""

    ref: str
    says: str = ""


@dataclass(frozen=True)
class Rule:
    """One cause: how it is recognized, what it means and what to do about it.

    ``consequence_of`` lists causes that, if found in the same run, explain this one;
    ``*`` stands for any other. ``seen_by_peer`` says that it is what a sound process
    sees of another one's failure, so that the cause found there explains it. ``file``
    is the file of a user's own rule.
    """

    id: str
    title: str
    tier: str
    why: str
    confirm: str = ""
    consequence_of: tuple[str, ...] = ()
    seen_by_peer: bool = False
    signatures: tuple[Signature, ...] = ()
    fixes: tuple[Fix, ...] = ()
    myths: tuple[Myth, ...] = ()
    sources: tuple[Source, ...] = ()
    file: str = ""

    @property
    def general_first(self) -> list[Fix]:
        """The fixes for a reader who only knows the cause; special ones last."""
        return sorted(self.fixes, key=lambda fix: fix.is_special)

    @property
    def first_fix(self) -> Fix:
        """What to try if only the cause is known."""
        return min(self.fixes, key=lambda fix: (fix.is_special, bool(fix.when)))


# All rules by id, in the order of their ids.
Catalogue = Mapping[str, Rule]

# What its reader reads as sentences, and so in a language.
TEXTS: Mapping[type, tuple[str, ...]] = {
    Rule: ("title", "why", "confirm"),
    Signature: ("say",),
    Fix: ("do", "when", "versions"),
    Myth: ("claim", "truth"),
}

# What a key must hold, in words, by the type of its field.
_HOLDS = {
    "str": "a text",
    "tuple[str, ...]": "a list of strings",
    "bool": "true or false",
    "int": "a whole number",
}
# The fields of a rule that are lists of tables: their key, and each table's type.
_TABLES = {
    "signatures": ("signature", Signature),
    "fixes": ("fix", Fix),
    "myths": ("myth", Myth),
    "sources": ("source", Source),
}


@functools.cache
def keys(kind: type) -> Mapping[str, str]:
    """The keys of a Rule's file or of one of its tables, each with what it must hold.

    They are the fields; a rule's ``id`` and ``file`` come from elsewhere.
    """
    found = {}
    for one in fields(kind):
        if one.name in _TABLES:
            found[_TABLES[one.name][0]] = "tables"
        elif one.name not in ("id", "file"):
            found[one.name] = _HOLDS[str(one.type)]
    return found


def load(extra: Iterable[Path] = ()) -> Catalogue:
    """The built-in catalogue and the users' own files, whose rules take precedence.

    A user's file holds one rule, with its ``id`` (docs/own-rules.md). Raises RuleError
    by path and key.
    """
    own = {rule.id: rule for rule in (read_rule(path) for path in extra)}
    return {**built_in(), **own}


@functools.cache
def built_in() -> Mapping[str, Rule]:
    """The built-in rules by id."""
    paths = sorted(ADVICE_DIR.glob("*/*.toml"))
    rules = (read_rule(path, f"{path.parent.name}.{path.stem}") for path in paths)
    return {rule.id: rule for rule in rules}


def read_rule(path: Path, cause: str | None = None) -> Rule:
    """One file as a Rule; ``cause`` is its id, else the file gives ``id``."""
    data = read_toml(path)
    if cause is not None:
        return parse_rule(data, cause, str(path))
    rule = parse_rule(data, data.pop("id", None), str(path))
    own = tuple(replace(one, own_words=True) for one in rule.signatures)
    return replace(rule, file=str(path), signatures=own)


def read_toml(path: Path) -> dict[str, Any]:
    """A file's contents. Raises RuleError with its path."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RuleError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RuleError(f"{path} is not valid TOML: {error}") from error


def parse_rule(data: Mapping[str, Any], cause: Any, where: str) -> Rule:
    """TOML data as a Rule. Raises RuleError with all errors, a line each."""
    if wrong := wrong_in(data, cause, where):
        raise RuleError("\n".join(wrong))
    parts = {**data, "id": cause, "why": " ".join(data["why"].split())}
    for name, (key, kind) in _TABLES.items():
        parts[name] = [made(kind, one) for one in parts.pop(key, ())]
    return made(Rule, parts)


def made(kind: type[Made], table: Mapping[str, Any]) -> Made:
    """One of a file's types, its lists converted to tuples."""
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in table.items()})


def wrong_in(data: Mapping[str, Any], cause: Any, where: str) -> list[str]:
    """All errors in the form of TOML data, a sentence each."""
    return list(_wrong(data, cause, where))


def sound_signatures(
    data: Mapping[str, Any], where: str
) -> Iterator[tuple[str, Signature]]:
    """The well-formed signatures of data that may be malformed, each with its place."""
    for number, table in enumerate(_tables(data, "signature"), 1):
        at = f"{where}: signature {number}"
        if not any(_wrong_table(table, Signature, at)):
            yield at, made(Signature, table)


def _wrong(data: Mapping[str, Any], cause: Any, where: str) -> Iterator[str]:
    if cause is None:
        yield f"{where}: id is missing: a rule of your own needs one, as area.some-name"
    elif not isinstance(cause, str) or not _ID.fullmatch(cause):
        yield f"{where}: id {cause!r} is not of the form area.some-name"
    yield from wrong_form(data, Rule, where)
    yield from _choice(data, "tier", TIERS, where)
    for key, kind in _TABLES.values():
        for number, table in enumerate(_tables(data, key), 1):
            yield from _wrong_table(table, kind, f"{where}: {key} {number}")


def _wrong_table(table: Mapping[str, Any], kind: type, where: str) -> Iterator[str]:
    yield from wrong_form(table, kind, where)
    if kind is Signature:
        yield from _wrong_signature(table, where)
    elif kind is Fix:
        yield from _wrong_fix(table, where)


def _wrong_signature(table: Mapping[str, Any], where: str) -> Iterator[str]:
    yield from _choice(table, "confidence", CONFIDENCES, where)
    yield from _choice(table, "tier", TIERS, where)
    yield from _choice(table, "source", ("stacks",), where)
    yield from _choice(table, "outcomes", OUTCOMES, where)
    yield from _choice(table, "phases", PHASES, where)
    texts = next(filter(None, map(table.get, _ANCHORS)), None)
    if not texts and not any(map(table.get, _OF_STAGE)):
        yield f"{where}: needs text, an exception, or a condition on the stage"
    for key in ("named", "code"):
        if table.get(key) and not texts:
            yield f"{where}: {key} needs an exception, such as raised, or a text"
    if table.get("pattern") and not texts:
        yield f"{where}: pattern needs text, the words its line must contain"
    if table.get("beside") and not texts:
        yield f"{where}: beside needs text, or an exception that it is beside"
    if table.get("within") and not table.get("beside"):
        yield f"{where}: within needs beside, the text of the other line"
    if table.get("unless_pattern") and not table.get("pattern"):
        yield f"{where}: unless_pattern needs a pattern, whose matches it excludes"
    for text in texts if isinstance(texts, list) else ():
        if isinstance(text, str) and len(text) < 4:
            yield f"{where}: text {text!r} is too short to identify anything"


def _wrong_fix(table: Mapping[str, Any], where: str) -> Iterator[str]:
    yield from _choice(table, "framework", FRAMEWORKS, where)
    knobs = table.get("knobs")
    for knob in knobs if isinstance(knobs, list) else ():
        kind, colon, name = str(knob).partition(":")
        if not colon or not name or kind not in KNOB_KINDS:
            yield (
                f"{where}: knobs: {knob!r} is not kind:name with a kind of "
                f"{', '.join(KNOB_KINDS)}"
            )


def _tables(data: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    tables = data.get(key)
    return tables if tables is not None and _is(tables, "tables") else []


def wrong_form(table: Mapping[str, Any], kind: type, where: str) -> Iterator[str]:
    """What is unknown, missing or of the wrong type in a table, a sentence each."""
    known = keys(kind)
    for key, value in table.items():
        if key not in known:
            near = near_names(key, known, 1)
            meant = f" (did you mean {near[0]!r}?)" if near else ""
            yield f"{where}: unknown key {key!r}{meant}; known: {', '.join(known)}"
        elif not _is(value, known[key]):
            yield f"{where}: {key}: {value!r} is not {known[key]}"
    for one in fields(kind):
        if one.default is MISSING and one.name in known and not table.get(one.name):
            yield f"{where}: {one.name} is missing"


def _is(value: Any, what: str) -> bool:
    if what == _HOLDS["str"]:
        return isinstance(value, str)
    if what == _HOLDS["bool"]:
        return isinstance(value, bool)
    if what == _HOLDS["int"]:
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0
    item = dict if what == "tables" else str
    return isinstance(value, list) and all(isinstance(part, item) for part in value)


def _choice(
    table: Mapping[str, Any], key: str, choices: tuple[str, ...], where: str
) -> Iterator[str]:
    value = table.get(key) or []
    for one in value if isinstance(value, list) else [value]:
        if isinstance(one, str) and one not in choices:
            yield f"{where}: {key}: {one!r} is not one of {', '.join(choices)}"


def explain_command(rule: Rule, shown: Callable[[Path], str] = str) -> str:
    """The command that prints the whole rule; ``shown`` converts a path for display."""
    file = f" --rules {shlex.quote(shown(Path(rule.file)))}" if rule.file else ""
    return f"gkd explain {rule.id}{file}"
