"""Hydra's overrides on a command line, and the defaults that they change."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from pytest_gkd.job import hydra_grammar
from pytest_gkd.job.hydra_grammar import Function, RefusedError, Sweep
from pytest_gkd.job.shell_values import NOBODY, Word

INTERPOLATION = re.compile(
    r"\$\{(?:oc\.select:)?\s*(?P<key>\.*[\w.]+)\s*(?:,(?P<other>[^${}]*))?\}"
)
DEEPEST = 10
WITHOUT_BLANKS = "write key=value without blanks around the ="
SWEEP = (
    "gives several values, which Hydra refuses without --multirun: write '[a,b]' for a "
    "list, or \"'a,b'\" for a text"
)


class Override(NamedTuple):
    """``key=value``; ``sign`` is ``+`` or ``++`` for a key that may be new, ``~`` for
    one that is deleted. ``value`` is undetermined if ``needs`` says what would
    determine it.
    """

    sign: str
    key: str
    value: Any
    needs: frozenset[str]
    word: Word


@dataclass(frozen=True)
class Given:
    """A key's value: ``user``, ``default``, or ``undetermined`` without ``needs``."""

    source: str
    value: Any = None
    word: Word | None = None
    needs: frozenset[str] = frozenset()
    expression: str = ""


def parsed(words: Iterable[Word]) -> Iterator[Override]:
    """The overrides among the words; Hydra's own options are skipped.

    A word of which not even the key is certain comes with an empty key. A key that a
    refused word would set is undetermined.
    """
    for word in words:
        shape, needs = word.text.shape, word.text.needs
        left, equals, _ = shape.partition("=")
        found = hydra_grammar.KEY.fullmatch(left)
        if needs:
            if found and equals:
                yield Override(found["sign"] or "", found["key"], None, needs, word)
            elif not shape.startswith("-"):
                yield Override("", "", None, needs, word)
            continue
        try:
            sign, key, value = hydra_grammar.assignment(shape)
        except RefusedError:
            if found and equals:
                needs = frozenset({"a word that Hydra refuses"})
                yield Override(found["sign"] or "", found["key"], None, needs, word)
            continue
        if isinstance(value, Sweep | Function):
            yield Override(sign, key, None, frozenset({value.text}), word)
        else:
            yield Override(sign, key, value, NOBODY, word)


def refused(words: Iterable[Word], *, sweeps: bool) -> Iterator[tuple[Word, str]]:
    """The words that Hydra's grammar refuses, and why, phrased to follow the word.

    ``sweeps`` is whether it accepts several values for one key, as with --multirun.
    """
    words = list(words)
    before = ""
    for number, word in enumerate(words):
        shape = word.text.shape
        if word.text.needs:
            before = ""
            continue
        after = words[number + 1].text.shape if number + 1 < len(words) else ""
        try:
            value = hydra_grammar.assignment(shape).value
        except RefusedError as error:
            if after.startswith("=") and "=" not in shape:
                yield word, f"and {after[:60]} are two words to bash: {WITHOUT_BLANKS}"
            elif not (shape.startswith("=") and before and "=" not in before):
                is_value = before.endswith("=") and "=" not in shape
                more = f", which ends {before[:60]}: {WITHOUT_BLANKS}"
                yield word, f"stands behind a blank{more}" if is_value else str(error)
        else:
            if isinstance(value, Sweep) and not sweeps:
                yield word, SWEEP
        before = shape


def literal(text: str) -> Any:
    """A value as Hydra reads it; one that it refuses, or has to compute, is a text."""
    try:
        value = hydra_grammar.value(text)
    except RefusedError:
        return text
    return text if isinstance(value, Sweep | Function) else value


def split(text: str) -> Iterator[str]:
    """Split at commas outside quotes and brackets."""
    depth, quote, start = 0, "", 0
    for at, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "[{(":
            depth += 1
        elif char in "]})":
            depth -= 1
        elif char == "," and not depth:
            yield text[start:at]
            start = at + 1
    yield text[start:]


class Job:
    """A release's keys with their defaults, and what a command line made of them."""

    def __init__(
        self, defaults: Mapping[str, Any], overrides: Iterable[Override]
    ) -> None:
        self._defaults = defaults
        self._given = {override.key: override for override in overrides}

    def knows(self, key: str) -> bool:
        """Whether the release has a default for the key."""
        return key in self._defaults

    def default(self, key: str) -> Any:
        """The release's default for the key, as written there."""
        return self._defaults.get(key)

    def given(self, pattern: str) -> list[str]:
        """The keys matching a pattern that the command line gives."""
        if "*" not in pattern:
            return [pattern] if pattern in self._given else []
        return [key for key in self._given if fnmatch.fnmatchcase(key, pattern)]

    def find(self, pattern: str) -> Given:
        """The value of a key; ``*`` in it matches any one name.

        If several matching keys differ, it is the list of their values.
        """
        keys = self.given(pattern)
        if not keys:
            if "*" not in pattern:
                return self.value(pattern)
            default = (k for k in self._defaults if fnmatch.fnmatchcase(k, pattern))
            return self.value(next(default, pattern))
        found = [self.value(key) for key in keys]
        known = list(dict.fromkeys(str(one.value) for one in found))
        if len(known) == 1 or any(one.needs for one in found):
            return next((one for one in found if one.needs), found[0])
        return Given("user", [one.value for one in found], found[0].word)

    def value(self, key: str, depth: int = 0) -> Given:
        """A key's value, with the interpolations of its default resolved."""
        if depth > DEEPEST:
            return Given("undetermined", needs=frozenset({key}))
        override = self._given.get(key)
        if override is not None and override.sign != "~":
            needs, value = override.needs, override.value
            if isinstance(value, str) and "${" in value and not needs:
                found = self._interpolated(key, value, depth)
                needs, value = found.needs, found.value
            source = "undetermined" if needs else "user"
            return Given(source, None if needs else value, override.word, needs)
        parts = key.split(".")
        sections = (".".join(parts[:n]) for n in range(1, len(parts)))
        above = next((one for one in sections if one in self._given), None)
        whole = override or (self._given[above] if above else None)
        if whole is not None:  # removed, or given as part of its section
            text = f"{whole.sign}{whole.key}"
            return Given("undetermined", None, whole.word, frozenset({text}))
        if key not in self._defaults:
            return Given("undetermined", needs=frozenset({key}))
        default = self._defaults[key]
        if not isinstance(default, str) or "${" not in default:
            return Given("default", default)
        return self._interpolated(key, default, depth)

    def _interpolated(self, key: str, default: str, depth: int) -> Given:
        found = INTERPOLATION.fullmatch(default)
        if found is None:
            return Given("undetermined", needs=frozenset({default}))
        other = found["key"]
        if other.startswith("."):
            levels = len(other) - len(other.lstrip("."))
            other = ".".join([*key.split(".")[:-levels], other.lstrip(".")])
        if other in self._defaults or other in self._given:
            return self.value(other, depth + 1)
        if found["other"] is not None:
            return Given("default", literal(found["other"]))
        return Given("undetermined", needs=frozenset({default}))
