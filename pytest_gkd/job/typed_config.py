"""Configurations that are read into dataclasses: defaults, and what is invalid."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from pytest_gkd.job import pydantic_types
from pytest_gkd.job.arguments import MISSING, UNKNOWN
from pytest_gkd.job.findings import Finding
from pytest_gkd.job.omegaconf import MISSING as STILL_TO_BE_GIVEN
from pytest_gkd.job.omegaconf import Config, UnresolvedError, flat
from pytest_gkd.job.overrides import Override
from pytest_gkd.job.shell_values import NOBODY, Text, Word
from pytest_gkd.options import near

MOST_TOLD = 40
MOST_MEMBERS = 50
Fits = Callable[[ast.expr, Any], bool]


class Classes:
    """The recorded classes of a release (sources/classes.py)."""

    def __init__(self, classes: Mapping[str, Any]) -> None:
        self._classes = classes

    def fields(self, name: str) -> dict[str, str]:
        """The fields of a class, including those of its bases."""
        found: dict[str, str] = {}
        for base in reversed(self._classes[name]["bases"]):
            found |= self.fields(base)
        own: dict[str, str] = self._classes[name]["fields"]
        return found | own

    def family(self, name: str) -> list[str]:
        """A class and all of its bases."""
        bases = self._classes[name]["bases"]
        return [name, *(one for base in bases for one in self.family(base))]

    def of(self, node: ast.expr) -> list[str]:
        """The recorded classes that a type accepts."""
        written = map(ast.unparse, pydantic_types.members(node))
        names = (name.replace("__at__", "@") for name in written)
        return [name for name in names if name in self._classes]

    def valued(self, node: ast.expr, given: Config, key: str) -> list[str]:
        """The classes of a mapping's values, if everything given is a section."""
        parts = given.below(key)
        if not parts or not all(given.is_section(f"{key}.{part}") for part in parts):
            return []
        kinds = [
            one
            for one in pydantic_types.members(node)
            if isinstance(one, ast.Subscript)
            if ast.unparse(one.value).lower() == "dict"
        ]
        return [name for one in kinds for name in self.within(one)]

    def within(self, node: ast.expr) -> list[str]:
        """The classes that are the members of a list, or the values of a mapping."""
        for one in pydantic_types.members(node):
            if isinstance(one, ast.Subscript):
                parts = one.slice
                last = parts.elts[-1] if isinstance(parts, ast.Tuple) else parts
                kind = ast.unparse(one.value).lower()
                if kind == "tuple" and isinstance(parts, ast.Tuple):
                    return self.of(parts.elts[0])
                if kind in ("list", "dict"):
                    return self.of(last)
        return []

    def defaults(
        self, name: str, given: Config, *, keeps: bool, key: str = ""
    ) -> Iterator[Override]:
        """The values of what is not given, according to its class.

        A section that is None by default is created if a part of it is given. ``keeps``
        is whether a partly given section keeps the arguments that its default was
        created with; else it has its class's own defaults.
        """
        for whole, default in self._made(name, given, key, {}, keeps=keeps):
            if default is not None:
                yield from _literal(default, whole)

    def missing(self, name: str, given: Config) -> list[str]:
        """Required keys that are not given."""
        made = self._made(name, given, "", {}, keeps=True)
        return [key for key, default in made if default is None and not given.has(key)]

    def _made(
        self,
        name: str,
        given: Config,
        key: str,
        more: Mapping[str, ast.expr],
        *,
        keeps: bool,
    ) -> Iterator[tuple[str, ast.expr | None]]:
        """All keys with their default, None for those without one."""
        for field, text in self.fields(name).items():
            whole = f"{key}.{field}" if key else field
            node, default = pydantic_types.read(text)
            default = more.get(field, default)
            is_part, classes = given.is_section(whole), self.of(node)
            setting = given.settings.get(whole)
            if setting is not None and classes and setting.value != {}:
                continue  # a section that is given as a whole, or as null
            call = self._call(default)
            if is_part and (inside := self.valued(node, given, whole)):
                for part in given.below(whole):
                    below = f"{whole}.{part}"
                    yield from self._made(inside[0], given, below, {}, keeps=keeps)
            elif call:
                kept = call.keywords if keeps or not is_part else []
                inner = {k.arg: k.value for k in kept if k.arg}
                own = ast.unparse(call.func).replace("__at__", "@")
                yield from self._made(own, given, whole, inner, keeps=keeps)
            elif is_part and classes:
                yield from self._made(classes[0], given, whole, {}, keeps=keeps)
            else:
                yield whole, default

    def _call(self, default: ast.expr | None) -> ast.Call | None:
        if isinstance(default, ast.Call):
            name = ast.unparse(default.func).replace("__at__", "@")
            return default if name in self._classes else None
        return None


def _literal(default: ast.expr, key: str) -> Iterator[Override]:
    try:
        value = ast.literal_eval(default)
    except (ValueError, TypeError, SyntaxError):
        needs = frozenset({f"the default of {key}"})
        yield Override("", key, None, needs, _nowhere(key))
        return
    is_section = isinstance(value, dict) and value
    for name, one in flat(value, key) if is_section else [(key, value)]:
        yield Override("", name, one, NOBODY, _nowhere(name))


def _nowhere(key: str) -> Word:
    return Word(Text(key), "", 0, key)


class Judge:
    """One pass over what is given; ``sections`` are its sections with their class.

    ``whose`` names the release in messages, ``defaults`` are all keys that it has, and
    ``unread`` fields of a class that its code reads nowhere. ``fits`` says whether a
    type accepts a value. ``instead`` says what replaced a name. ``is_sure`` is whether
    the classes are those of the program that is started, whose user may derive from
    them; ``refuses`` whether an unknown key ends it. ``passed`` are top-level names
    that are judged elsewhere; ``takes_null`` is whether null is valid for any section.
    """

    def __init__(
        self,
        given: Config,
        classes: Classes,
        whose: str,
        defaults: Config,
        unread: Mapping[str, Iterable[str]],
        fits: Fits,
        *,
        is_sure: bool = True,
        instead: Mapping[str, str] | None = None,
        refuses: bool = True,
        passed: Collection[str] = (),
        takes_null: bool = True,
    ) -> None:
        self._takes_null = takes_null
        self._instead, self._refuses, self._passed = instead or {}, refuses, passed
        self._given, self._classes, self._whose = given, classes, whose
        self._defaults, self._unread, self._fits = defaults, unread, fits
        self._is_sure = is_sure
        self._told = 0

    def whole(self, name: str) -> Iterator[Finding]:
        """Check everything given, and what is required but not given."""
        yield from self.section(name)
        for key in self._classes.missing(name, self._given):
            line = f"{self._whose} refuses a configuration without {key}"
            yield self._finding(MISSING, "error", line, key, key.rpartition(".")[0])

    def section(self, name: str, key: str = "") -> Iterator[Finding]:
        """Check what is given of a class: unknown keys, types, unread keys."""
        fields = self._classes.fields(name)
        family = self._classes.family(name)
        unread = {field for one in family for field in self._unread.get(one, ())}
        for part in self._given.below(key):
            whole = f"{key}.{part}" if key else part
            if part not in fields:
                if whole not in self._passed:
                    yield from self._unknown(whole, fields)
                continue
            yield from self._field(fields[part], whole)
            if part in unread and self._differs(whole):
                line = f"{self._whose} takes the key {whole}, and nothing reads it"
                yield self._finding(UNKNOWN, "warning", line, whole)

    def _differs(self, key: str) -> bool:
        try:
            default, given = self._defaults.value(key), self._given.value(key)
        except UnresolvedError:
            return False
        return default is None or given is None or default.value != given.value

    def _field(self, text: str, key: str) -> Iterator[Finding]:
        node, _ = pydantic_types.read(text)
        classes, expected = self._classes.of(node), text.partition(" = ")[0]
        expected = expected.replace("__at__", " of ")[:200]
        if self._given.is_section(key):
            if inside := self._classes.valued(node, self._given, key):
                for part in self._given.below(key):
                    yield from self.section(inside[0], f"{key}.{part}")
            elif classes:
                yield from self.section(classes[0], key)
            elif not self._fits(node, {}):
                line = f"{key} is a section; {self._whose} expects {expected}"
                yield self._finding(UNKNOWN, "error", line, key)
            return
        try:
            given = self._given.value(key)
        except UnresolvedError:
            return  # already reported
        if given is None or given.needs or given.value == STILL_TO_BE_GIVEN:
            return
        inner = self._classes.within(node)
        if inner and isinstance(given.value, list):
            for number, one in enumerate(given.value[:MOST_MEMBERS]):
                yield from self._member(inner[0], one, f"{key}.{number}", key)
        is_none = given.value is None and self._takes_null
        if classes and (given.value == {} or is_none):
            return
        if not self._fits(node, given.value):
            shown = f"{key}: {given.value!r}"[:200]
            line = f"{shown}; {self._whose} expects {expected}"
            yield self._finding(UNKNOWN, "error", line, key)

    def _member(self, name: str, value: Any, key: str, place: str) -> Iterator[Finding]:
        if not isinstance(value, dict):
            return
        fields = self._classes.fields(name)
        for part in value:
            if part not in fields:
                yield from self._unknown(f"{key}.{part}", fields, place)

    def _unknown(
        self, key: str, fields: Iterable[str], place: str = ""
    ) -> Iterator[Finding]:
        self._told += 1
        if self._told > MOST_TOLD:
            return
        name = key.rpartition(".")[2]
        if self._is_sure:
            text = f"{self._whose} has no key {key}"
        else:
            text = f"{self._whose} itself has no key {key}"
        same = [k for k in self._defaults.settings if k.endswith(f".{name}")]
        top = key.partition(".")[0]
        same = [k for k in same if k.partition(".")[0] == top] or same
        if name in self._instead:
            text += f"; {self._instead[name]}"
        elif same:
            text += f"; it is read as {' or '.join(same[:2])}"
        else:
            text += near(name, dict.fromkeys(fields))
        if not self._refuses:
            text = f"{text.rstrip('.')} (it is passed over, and nothing reads it)"
        level = "error" if self._is_sure and self._refuses else "warning"
        yield self._finding(UNKNOWN, level, text, key, place or key)

    def _finding(
        self, cause: str, level: str, text: str, key: str, place: str = ""
    ) -> Finding:
        start = place or key
        some = (
            setting
            for name, setting in self._given.settings.items()
            if name == start or name.startswith(f"{start}.")
        )
        setting = next(some, None)
        file, line = (setting.word.file, setting.word.line) if setting else ("", 0)
        return Finding(cause, level, text, file, line, key)
