"""A command line's ``--option value`` words, as argparse would take them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_gkd.job.findings import Finding
from pytest_gkd.job.overrides import Override
from pytest_gkd.job.shell_values import Word
from pytest_gkd.options import near

UNKNOWN = "config.unknown-option"
MISSING = "config.missing-value"
# Similar names are suggested for this many unknown options; each takes milliseconds.
MOST_NEAR = 20
NUMBER = re.compile(r"-\d+|-\d*\.\d+")  # argparse's own _negative_number_matcher
TRUE = ("yes", "true", "t", "y", "1")
FALSE = ("no", "false", "f", "n", "0")
KINDS = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "json": "JSON",
    "dict": "a mapping, which only a configuration file can give",
}


@dataclass(frozen=True)
class Option:
    """An option of an argparse parser.

    ``key`` is its ``dest``. ``type`` is int, float, str, bool (transformers'
    ``string_to_bool``), json, dict (which no word can express), or a flag's constant as
    ``true`` or ``false``. ``nargs`` is argparse's: "" for one value, "?", "*", "+", or
    a number's digits. ``none`` says that "none" and "null" mean None, as in TRL's copy
    of HfArgumentParser.
    """

    key: str
    type: str = "str"
    nargs: str = ""
    choices: Sequence[Any] = ()
    none: bool = False

    @property
    def most(self) -> int:
        """The most words that it may take."""
        if self.type in ("true", "false"):
            return 0
        return {"": 1, "?": 1}.get(self.nargs) or (
            int(self.nargs) if self.nargs.isdigit() else 1 << 30
        )

    @property
    def least(self) -> int:
        """The fewest words that it must have."""
        if self.type in ("true", "false") or self.nargs in ("?", "*"):
            return 0
        return int(self.nargs) if self.nargs.isdigit() else 1

    def converted(self, text: str) -> Any:
        """A word as argparse would convert it. Raises ValueError if that fails."""
        if self.none and text.lower() in ("none", "null"):
            return None
        if self.choices:
            return {str(choice): choice for choice in self.choices}.get(text, text)
        if self.type == "int":
            return int(text)
        if self.type == "float":
            number = float(text)
            return number if math.isfinite(number) else text  # JSON has no infinity
        if self.type == "bool" and text.lower() in TRUE + FALSE:
            return text.lower() in TRUE
        if self.type == "json" and text.startswith("{"):
            try:
                return json.loads(text)
            except RecursionError:
                raise ValueError(text) from None
        if self.type in ("bool", "dict"):
            raise ValueError(text)
        return text


@dataclass
class Arguments:
    """What the words yield: settings, words of no option, and what argparse refuses."""

    said: list[Override] = field(default_factory=list)
    rest: list[Word] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


def parsed(
    words: Iterable[Word],
    options: Mapping[str, Option],
    whose: str,
    *,
    abbreviations: bool | Collection[str] = True,
    refuses: bool = True,
    positionals: bool = False,
    elsewhere: Callable[[str], str] = lambda name: "",
) -> Arguments:
    """The settings that a parser with these ``options`` makes of the words.

    ``whose`` names the parser in messages, such as "TRL 1.9.0". ``abbreviations`` is
    argparse's ``allow_abbrev``, or the options that may be abbreviated where several
    parsers read the words; ``refuses`` says whether an unknown option ends the program
    (parse_args) or is skipped (parse_known_args), ``positionals`` whether words without
    an option belong to the program rather than to an unknown option. ``elsewhere`` says
    which other release has an unknown option.
    """
    found = Arguments()
    waiting = list(words)
    looked = 0
    while waiting:
        word = waiting.pop(0)
        name, equals, inline = word.text.shape.partition("=")
        if word.text.needs and not (equals and "\ue000" not in name):
            found.said.append(Override("", "", None, word.text.needs, word))
            continue
        if not name.startswith("-") or NUMBER.fullmatch(name) or name == "-":
            found.rest.append(word)
            continue
        option, problem = _option(name, options, whose, abbreviations)
        if option is None:
            looked += 1
            if not problem:
                level = "error" if refuses else "warning"
                other = elsewhere(name)
                hint = near(name, options) if looked <= MOST_NEAR else "."
                hint = f"{other}." if other else hint
                more = "" if refuses else " It is ignored: nothing reads it."
                problem = f"{whose} has no option {name}{hint}{more}"
            else:
                level = "error"
            found.findings.append(_finding(UNKNOWN, level, problem, word, name))
            # Its values belong to no option.
            takes = not (equals or positionals)
            while waiting and takes and not _is_option(waiting[0]):
                waiting.pop(0)
            continue
        values = [word._replace(text=type(word.text)(inline, word.text.needs))]
        if not equals:
            values = []
            while waiting and len(values) < option.most and not _is_option(waiting[0]):
                values.append(waiting.pop(0))
        found.said.append(_setting(option, name, word, values, found.findings, whose))
    return found


def _is_option(word: Word) -> bool:
    shape = word.text.shape
    return len(shape) > 1 and shape[0] == "-" and not NUMBER.fullmatch(shape)


def _option(
    name: str,
    options: Mapping[str, Option],
    whose: str,
    abbreviations: bool | Collection[str],
) -> tuple[Option | None, str]:
    """The option of that name or, as in argparse, the only one with that prefix.

    To argparse, two spellings of one option are ambiguous, at least up to Python
    3.13.0.
    """
    if name in options:
        return options[name], ""
    if not (abbreviations and name.startswith("--")):
        return None, ""
    full_names = options if abbreviations is True else abbreviations
    fits = [full for full in full_names if full.startswith(name)]
    if len(fits) > 1:
        some = ", ".join(sorted(fits)[:4])
        return None, f"{name} may mean {some}: {whose} refuses it; write it in full"
    return (options[fits[0]], "") if fits else (None, "")


def _setting(
    option: Option,
    name: str,
    word: Word,
    values: Sequence[Word],
    findings: list[Finding],
    whose: str,
) -> Override:
    """One option with its values, converted; those that cannot be stay as written."""
    source = " ".join([word.source, *(v.source for v in values if v is not word)])
    here = word._replace(source=source if values else word.source)
    if option.type in ("true", "false"):
        return Override("", option.key, option.type == "true", frozenset(), here)
    needs = frozenset[str]().union(*(value.text.needs for value in values))
    if needs:
        return Override("", option.key, None, needs, here)
    if len(values) < option.least:
        text = f"{name} expects a value, and the next word is an option or the end"
        findings.append(_finding(MISSING, "error", text, word, option.key))
        return Override("", option.key, None, frozenset({f"{name}'s value"}), here)
    read = []
    for value in values:
        shape = value.text.shape
        try:
            read.append(option.converted(shape))
        except ValueError:
            text = f"{name} {shape[:60]}: {whose} expects {KINDS[option.type]}"
            findings.append(_finding(UNKNOWN, "error", text, word, option.key))
            return Override("", option.key, shape, frozenset(), here)
        if option.choices and read[-1] not in option.choices:
            some = ", ".join(map(str, option.choices))
            text = f"{name} {shape[:60]}: {whose} knows {some}"
            findings.append(_finding(UNKNOWN, "error", text, word, option.key))
    if option.nargs in ("", "?"):
        return Override("", option.key, read[0] if read else True, frozenset(), here)
    return Override("", option.key, read, frozenset(), here)


def _finding(cause: str, level: str, text: str, word: Word, key: str) -> Finding:
    return Finding(cause, level, text, word.file, word.line, key)
