"""What the words of a user's own program reveal about its phase."""

from __future__ import annotations

import functools
import re
import string
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pytest_gkd.diagnosis import prefixes
from pytest_gkd.diagnosis.patterns import Pattern


@dataclass(frozen=True, slots=True)
class _Rule:
    phase: str
    then: str
    loose: bool
    begun: bool
    like: Pattern


@functools.cache
def _table() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


@functools.cache
def _rules() -> list[_Rule]:
    """All rules, in order; read lazily, since most runs of the plugin need none."""
    table = _table()
    rules = []
    for row in table["rule"]:
        like = row["like"]
        for name, words in table["words"].items():  # these may refer to others
            like = like.replace(f"{{{name}}}", f"(?:{words})")
        phase, loose = row["phase"], row.get("loose", False)
        then, begun = row.get("then", phase), row.get("begun", False)
        rules.append(_Rule(phase, then, loose, begun, Pattern(like.encode())))
    return rules


# What is said of a completed phase, and what negates that.
_OVER = Pattern(
    rb"\b(?:done|finish(?:ed|es)?|complete[ds]?|ready|healthy|took|elapsed|ends?|ok"
    rb"|succe\w+|(?:in|after) \d+(?:\.\d+)? ?(?:s|ms|sec|secs|seconds|min|minutes))\b"
    rb"| 100%| \d+\.\d+ ?m?s$"
)
_PAST = Pattern(
    rb"\b(?:loaded|saved|written|wrote|pushed|sync(?:h?ed|h?roni[sz]ed)|sent|received"
    rb"|broadcasted|published|transferred|built|initiali[sz]ed|ended|scored|sampled"
    rb"|updated|generated|collected|merged|answered|restored|tokeni[sz]ed|prepared)\b"
)
_GOES_ON = Pattern(rb"\b[a-z]{2,}ing\b")
_OPEN = Pattern(
    rb"\b(?:wait\w*|until|till|to be|to become|to come|start(?:ing|s)?|begin\w*"
    rb"|(?:setting|warming|bringing|spinning) up)\b"
)
_WAITS = Pattern(rb"(?i)\bwait(?:ing|s)? (?:for|on)\b")
_PART = Pattern(
    rb"(?P<of>\b(?:step|epoch|iteration|iter|round) )?"
    rb"\b(?P<done>\d{1,9}) ?(?:/|of) ?(?P<all>\d{1,9})\b"
)
# A clause about what is not done, or may be, reveals nothing, except in a line that
# says that it is being retried.
_NOT = Pattern(
    rb"\b(?:no|not|non|without|skip\w*|disabled|never|none|fail\w*|cannot|(?:can|don|won"
    rb"|didn|isn) t|if|unless|will|would|should|could|may|deprecat\w*|warn\w*|error"
    rb"|exception|ignor\w*|un(?:used|set)|instead|please|default\w*|you|your|consider"
    rb"|recommend\w*|incompatible|supported|leaked)\b"
)
_TRIES = Pattern(
    rb"(?i)\bretr(?:y|ies|ying)\b|\battempt \d|\bagain in \d"
    rb"|^(?:\S+ )?no (?:new |full )?batch"
)
# Not the program's own words: frames and their code, exceptions, options.
_FOREIGN = Pattern(
    rb"^ *File \"|^ *[\w.]*(?:Error|Exception|Warning)\b|Traceback \(most|[~^]{3}"
    rb"|^ *(?:(?:return|raise|with|await|yield|assert|import|from|def|class|self)\b"
    rb".*[(.=]|[\w.,\[\]\"' ]+ = \S|[\w.]+\()|\w\($|\([^()]+:\d+\)$"
    rb"|^ *['\"]?[\w.\-]+['\"]? ?[:=] ?[^ ]+,?$|^ *[+$] |--\w+[ =]"
    rb"|'[\w.]+': |\.py:\d+: \w*Warning|\bwandb: "
    rb"|^\[?[EF]\d{4} |^ *frame #\d|^ *(?:for|if|elif|while|except|async)\b.*:$"
)
# The library's own log; its network calls what is done a completion.
_OF_NCCL = Pattern(rb" NCCL (?:INFO|WARN) |\bNET/\w+ : ")
# A logger's prefix: a time, the level, its name.
_LOGGER = Pattern(
    rb"^.{0,60}?\b(?:INFO|DEBUG)\b[\]|:\- ]*(?:[\w.]+(?::\d+)?(?:\]| -|:) ?(?:- )?)?"
)
# A name and its number: it does not say what is being done.
_METRIC = Pattern(rb"^(?:[a-z%]+ ){1,4}[0-9.]+(?:e ?[0-9]+)?%?$")
# A bar's state, and a value with its name.
_BAR = Pattern(rb"\d{1,3}%\|")
# A bar without a title is that of a training loop, as transformers' Trainer has it.
_BARE_BAR = Pattern(rb"^ *\d{1,3}%\|[^|]*\| \d+/\d+ \[")
_VALUE = re.compile(rb"(?<![=\w])[\w/]{1,60}=(?!=) ?(?:'[^']{0,200}'|[^\s,;|']{1,60})")
_ROLE = Pattern(rb"^[(\[](\w{3,40})")
_CLAUSES = Pattern(rb"[,;|]+ |\. |\xe2\x80\x94| - | -> |[()]")
# Python's re: a line is short, and these patterns do not backtrack.
_CAMEL = re.compile(rb"(?<=[a-z]{2})(?=[A-Z])")
_NO_WORD = re.compile(rb"[^a-z0-9.%/]+|(?<![0-9])[./]|[./](?![0-9])")
# A time, of which only numbers are left, before the words.
_CLOCK = re.compile(rb"^(?:\d{2,4} ){3,7}(?=[a-z])")
# What verl and ROLL hand from worker to worker, and how: nothing of a dataset.
_HOLDS_TENSORS = re.compile(rb"\bdata ?(?:protos?|refs?)\b|\bray get\b")
LONGEST = 300
_LETTERS = frozenset(string.ascii_letters.encode())

STARTS = ("config", "data", "ray-init", "actor-init", "rollout-init", "teacher-init")
_LOOP = ("weight-sync", "generation", "teacher", "training-step")
_BEGUN = ("first-step", "after-step", *_LOOP)
_OF_ROLE = (
    ("teacher-init", Pattern(rb"teacher")),
    ("rollout-init", Pattern(rb"rollout|engine|vllm|sglang|sampler|generat|infer")),
)


@dataclass(frozen=True, slots=True)
class Told:
    """The phase that words refer to, and whether they say that it is over."""

    phase: str
    over: bool = False


def of_lines(lines: Sequence[bytes], *, begun: bool) -> Told | None:
    """The last phase that lines refer to; ``begun``: whether steps have begun.

    What belongs to the start of a run never returns once steps have begun.
    """
    kinds = Counter(map(_kind, lines))
    last = None
    for line in lines:
        told = of_line(line, begun=begun, repeats=kinds[_kind(line)] > 1)
        if told and not (begun and told.phase in STARTS and told.phase != "data"):
            last = told
            begun = begun or told.phase in _BEGUN
    return last


def _kind(line: bytes) -> bytes:
    return bytes(filter(_LETTERS.__contains__, line[:100]))[:24]


def of_line(line: bytes, *, begun: bool, repeats: bool = False) -> Told | None:
    """What one line says, in the last of its clauses that says anything.

    A process named after a teacher speaks of the teacher's work. ``repeats`` says that
    other lines are like it.
    """
    if _OF_NCCL.search(line):
        return None
    process, words = prefixes.split(line[:LONGEST].lstrip(b" "))
    role = _ROLE.search(process or words)
    name = role[1] if role else b""
    words = words[logger.end() :] if (logger := _LOGGER.search(words)) else words
    if _FOREIGN.search(words):
        return None
    is_bar = _BAR.search(words) is not None
    loose, tries = begun or repeats or is_bar, _TRIES.search(words) is not None
    words = _VALUE.sub(b" ", words)
    clauses = _cut(words)
    if _WAITS.search(words):
        clauses.append(_plain(words))  # what it waits for may be in parentheses
    for clause in reversed(clauses):
        if _NOT.search(clause) and not tries:
            continue
        named = not is_bar and _METRIC.search(clause)
        if told := _of_clause(clause, begun=begun, loose=loose and not named):
            return _in_role(told, name)
    if not begun and _BARE_BAR.search(words) and not _OVER.search(b" " + words):
        return Told("first-step")
    if begun and b"teacher" in _plain(name):
        return Told("teacher", _is_over(_plain(words)))
    return None


def _in_role(told: Told, role: bytes) -> Told:
    """What is loaded in a teacher's or an engine's process is that role's start."""
    if told.phase != "actor-init":
        return told
    role = _plain(role)
    phases = (phase for phase, like in _OF_ROLE if like.search(role))
    return replace(told, phase=next(phases, told.phase))


def of_name(name: str, *, begun: bool = False) -> str:
    """The phase that a function's name refers to; empty for none."""
    # Every phase calls a model's own function.
    return "" if name == "forward" else _in_code(name, begun=begun, loose=False)


def of_file(name: str) -> str:
    """The phase that a file's name refers to, for when its functions' names do not."""
    return _in_code(name, begun=False, loose=True)


def of_part(name: bytes) -> str:
    """The phase to which a part of a step belongs, by its name."""
    return _in_code(name.decode("utf-8", "replace"), begun=True, loose=True)


def of_code(code: str, *, begun: bool) -> str:
    """The phase that a line of code refers to by what it creates and calls."""
    target, _, called = (text := code.partition("(")[0]).rpartition(" = ")
    return _in_code(text, begun=begun, loose=True) or _in_code(
        f"{called} {target}", begun=begun, loose=True
    )


def _in_code(text: str, *, begun: bool, loose: bool) -> str:
    words = _HOLDS_TENSORS.sub(b" ", _plain(text[:LONGEST].encode()))
    told = None if _NOT.search(words) else _of_clause(words, begun=begun, loose=loose)
    phase = told.phase if told else ""
    return "" if phase in ("first-step", "after-step") else phase


def _cut(words: bytes) -> list[bytes]:
    """The clauses of a line, in lower case, without punctuation."""
    places = [0]
    for found in _CLAUSES.finditer(words):
        places += found.span()
    places.append(len(words))
    parts = (words[a:b] for a, b in zip(places[::2], places[1::2], strict=True))
    return [plain for part in parts if (plain := _CLOCK.sub(b"", _plain(part)))]


def _plain(words: bytes) -> bytes:
    if not words.isascii():
        for term, english in _terms():
            words = words.replace(term, english)
    plain = _NO_WORD.sub(b" ", _CAMEL.sub(b" ", words).lower()).strip()
    for word, others in _synonyms():
        plain = others.sub(word, plain)
    return plain


def with_synonyms(name: str) -> str:
    """A name, and behind it what the rules call it."""
    return f"{name} {_plain(name.encode()).decode('utf-8', 'replace')}" if name else ""


@functools.cache
def _terms() -> list[tuple[bytes, bytes]]:
    """Terms of other languages and what the rules call them, the longest first."""
    table = sorted(_table()["in_english"].items(), key=lambda one: -len(one[0]))
    return [(term.encode(), f" {english} ".encode()) for term, english in table]


@functools.cache
def _synonyms() -> list[tuple[bytes, re.Pattern[bytes]]]:
    table = _table()["synonyms"].items()
    return [(w.encode(), re.compile(rf"\b(?:{o})\b".encode())) for w, o in table]


def _of_clause(clause: bytes, *, begun: bool, loose: bool) -> Told | None:
    for rule in _rules():
        counts = (loose or not rule.loose) and (begun or not rule.begun)
        if counts and rule.like.search(clause):
            return Told(rule.then if begun else rule.phase, _is_over(clause))
    return None


def _is_over(clause: bytes) -> bool:
    past = _PAST.search(clause) and not _GOES_ON.search(clause)
    if _OPEN.search(clause) or not (past or _OVER.search(clause)):
        return False
    parts = (one for one in _PART.finditer(clause) if not one[b"of"])
    return all(int(one[b"done"]) >= int(one[b"all"]) for one in parts)
