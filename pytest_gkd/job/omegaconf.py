"""OmegaConf's configurations: files that inherit, overrides, interpolations."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from pytest_gkd.job import documents
from pytest_gkd.job.overrides import Given, Override, literal, split
from pytest_gkd.job.shell_values import NOBODY, Word

RESOLVER = re.compile(r"\s*(?P<name>[A-Za-z_][\w.]*)\s*:(?P<arguments>.*)", re.DOTALL)
NODE = re.compile(r"\s*(?P<dots>\.*)(?P<key>[^\s{}]*)\s*")
# NeMo-RL registers resolvers of this kind; OmegaConf itself has oc.env and oc.select.
ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "max": max,
}
MISSING = "???"
DEEPEST = 20
Key = tuple[str, ...]


class UnresolvedError(ValueError):
    """An interpolation that OmegaConf refuses; the message is the rest of a sentence.

    ``key`` is where it is; others may refer to that key.
    """

    key = ""


class Config:
    """The settings of a configuration by their full keys.

    Lists and empty mappings are values; ``defaults`` are the files whose values the
    user has not written, ``environment`` the known variables, ``resolvers`` the names
    of further resolvers, whose values are unknown.
    """

    def __init__(self, settings: Iterable[Override] = ()) -> None:
        self.settings: dict[str, Override] = {}
        self.defaults: set[str] = set()
        self.environment: Mapping[str, Word] = {}
        self.resolvers: Collection[str] = ()
        self._sections: set[str] = set()
        self.merge(settings)

    def merge(self, settings: Iterable[Override]) -> None:
        """OmegaConf.merge: mappings are joined, other values are replaced."""
        for setting in settings:
            is_there = self.has(setting.key)
            is_empty = setting.value == {} and not setting.needs
            if is_there and setting.value == MISSING:
                continue
            if not (is_empty and self.is_section(setting.key)):
                self.put(setting)

    def put(self, setting: Override) -> None:
        """Set a key, replacing whatever was there."""
        self.remove(setting.key)
        for above in _above(setting.key):
            self.settings.pop(above, None)
            self._sections.add(above)
        self.settings[setting.key] = setting

    def remove(self, key: str) -> None:
        """Remove a key and everything below it."""
        self.settings.pop(key, None)
        if key in self._sections:
            for below in [k for k in self.settings if k.startswith(f"{key}.")]:
                del self.settings[below]

    def is_section(self, key: str) -> bool:
        """Whether there are keys below this one."""
        return key in self._sections and any(
            k.startswith(f"{key}.") for k in self.settings
        )

    def has(self, key: str) -> bool:
        """Whether the configuration has the key, as a value or as a section."""
        return key in self.settings or self.is_section(key)

    def below(self, key: str) -> list[str]:
        """The names of the keys directly below a section; an empty key is the top."""
        start = f"{key}." if key else ""
        names = (k[len(start) :] for k in self.settings if k.startswith(start))
        return list(dict.fromkeys(name.partition(".")[0] for name in names))

    def value(self, key: str, depth: int = 0) -> Given | None:
        """A key's value, interpolations resolved; None if it does not exist.

        For a section it is the mapping of what is below it.
        """
        if depth > DEEPEST:
            raise UnresolvedError(f"{key} refers to itself")
        setting = self.settings.get(key)
        if setting is not None:
            return self._of(setting, depth)
        if self.is_section(key):
            return self._section(key, depth)
        for above in _above(key):
            whole = self.settings.get(above)
            if whole is None:
                continue
            if whole.needs:
                return Given("undetermined", None, whole.word, whole.needs)
            rest = key.removeprefix(f"{above}.")
            if (found := _whole(whole.value)) and not RESOLVER.fullmatch(found):
                return self.value(
                    f"{_absolute(found, tuple(above.split('.')))}.{rest}", depth + 1
                )
            return self._inside(whole, rest)
        return None

    def _of(self, setting: Override, depth: int) -> Given:
        source = "default" if self.is_default(setting) else "user"
        if setting.needs:
            return Given("undetermined", None, setting.word, setting.needs)
        if "${" not in repr(setting.value):
            return Given(source, setting.value, setting.word)
        try:
            given = self._resolved(setting.value, tuple(setting.key.split(".")), depth)
        except UnresolvedError as error:
            error.key = error.key or setting.key
            raise
        if given.needs:
            return Given("undetermined", None, setting.word, given.needs)
        if given.source == "user" and source == "default":
            return given
        return Given(source, given.value, setting.word)

    def _section(self, key: str, depth: int) -> Given:
        found = {
            name: self.value(f"{key}.{name}", depth + 1) for name in self.below(key)
        }
        needs = NOBODY.union(*(one.needs for one in found.values() if one))
        source = "undetermined" if needs else "default"
        return Given(
            source, {n: one.value for n, one in found.items() if one}, None, needs
        )

    def _inside(self, whole: Override, rest: str) -> Given | None:
        """A part of a value that is stored whole, as a list or a mapping."""
        value = whole.value
        for part in rest.split("."):
            if isinstance(value, list) and part.isdigit() and int(part) < len(value):
                value = value[int(part)]
            elif isinstance(value, dict) and part in value:
                value = value[part]
            else:
                return None
        return Given("default" if self.is_default(whole) else "user", value, whole.word)

    def is_default(self, setting: Override) -> bool:
        """Whether it is from one of the framework's own files."""
        return not setting.word.file or setting.word.file in self.defaults

    # -- interpolations ------------------------------------------------------------

    def unresolved(self) -> list[tuple[Override, str]]:
        """The settings that OmegaConf cannot resolve, and why.

        If one only refers to another such setting, the other is reported.
        """
        found: list[tuple[Override, str]] = []
        roots: list[tuple[Override, str]] = []
        for setting in self.settings.values():
            if "${" in repr(setting.value):
                try:
                    self._of(setting, 0)
                except UnresolvedError as error:
                    is_root = error.key == setting.key
                    (roots if is_root else found).append((setting, str(error)))
        return roots or found[:1]

    def _resolved(self, value: Any, at: Key, depth: int) -> Given:
        if depth > DEEPEST:
            raise UnresolvedError(f"{'.'.join(at)} refers to itself")
        if isinstance(value, dict):
            parts = {
                k: self._resolved(v, (*at, k), depth + 1) for k, v in value.items()
            }
            return _joined({k: p.value for k, p in parts.items()}, parts.values())
        if isinstance(value, list):
            items = [
                self._resolved(v, (*at, str(n)), depth + 1) for n, v in enumerate(value)
            ]
            return _joined([item.value for item in items], items)
        if not isinstance(value, str) or "${" not in value:
            return Given("default", value)
        pieces = [
            self._expression(piece, at, depth)
            if is_expression
            else Given("default", piece)
            for piece, is_expression in _pieces(value)
        ]
        if len(pieces) == 1:
            return pieces[0]
        return _joined("".join(str(piece.value) for piece in pieces), pieces)

    def _expression(self, text: str, at: Key, depth: int) -> Given:
        """The value of what is between ``${`` and ``}``."""
        if found := RESOLVER.fullmatch(text):
            return self._call(found["name"], found["arguments"], at, depth)
        if "${" in text:
            return Given("undetermined", needs=frozenset({f"${{{text}}}"}))
        key = _absolute(text, at)
        given = self.value(key, depth + 1)
        if given is None:
            raise UnresolvedError(f"there is no key {key}")
        if given.value == MISSING:
            raise UnresolvedError(
                f"{key} is {MISSING}, a value that is still to be given"
            )
        return given

    def _call(self, name: str, text: str, at: Key, depth: int) -> Given:
        parts = [part.strip() for part in split(text)]
        if name == "oc.env":
            known = self.environment.get(parts[0])
            if known is None or known.text.needs:
                return Given("undetermined", needs=frozenset({parts[0]}))
            return Given("user", known.text.value, known)
        if name == "oc.select":
            key = _absolute(parts[0], ())
            other = Given("default", literal(parts[1]) if len(parts) > 1 else None)
            return self.value(key, depth + 1) or other
        if name not in ARITHMETIC:
            if name.startswith("oc.") or name in self.resolvers:
                return Given("undetermined", needs=frozenset({f"${{{name}:{text}}}"}))
            raise UnresolvedError(f"there is no resolver {name}")
        given = [
            self._resolved(part, at, depth + 1)
            if "${" in part
            else Given("default", literal(part))
            for part in parts
        ]
        whole = _joined(None, given)
        if whole.needs:
            return whole
        numbers = [one.value for one in given]
        if len(numbers) != 2 or any(type(n) not in (int, float) for n in numbers):
            raise UnresolvedError(f"{name} expects two numbers, got {numbers}")
        if name == "div" and not numbers[1]:
            raise UnresolvedError("it divides by zero")
        value = ARITHMETIC[name](*numbers)
        return Given(whole.source, value, whole.word)


def _joined(value: Any, parts: Iterable[Given]) -> Given:
    """A value made from several: the user's if one of them is."""
    parts = list(parts)
    needs = NOBODY.union(*(part.needs for part in parts))
    if needs:
        return Given("undetermined", None, None, needs)
    users = [part for part in parts if part.source == "user"]
    return Given("user", value, users[0].word) if users else Given("default", value)


def _above(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts))]


def _absolute(text: str, at: Key) -> str:
    """The full key that an interpolation in ``at`` names: a leading dot is a level
    up.
    """
    found = NODE.fullmatch(text)
    if found is None:
        raise UnresolvedError(f"${{{text}}} is not a key")
    levels = len(found["dots"])
    start = at[:-levels] if levels else ()
    key = re.sub(r"\[([^\]]*)\]", r".\1", found["key"])
    return ".".join([*start, key]).strip(".")


def _whole(value: Any) -> str | None:
    """The expression that a text consists of."""
    if not isinstance(value, str) or "${" not in value:
        return None
    pieces = list(_pieces(value))
    return pieces[0][0] if len(pieces) == 1 and pieces[0][1] else None


def _pieces(text: str) -> Iterator[tuple[str, bool]]:
    """A text's parts, plain ones and expressions; the latter are marked True."""
    at = 0
    while (start := text.find("${", at)) >= 0:
        if start > at:
            yield text[at:start], False
        depth, end = 1, start + 2
        while end < len(text) and depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        if depth:
            raise UnresolvedError("a ${ is never closed by a }")
        yield text[start + 2 : end - 1], True
        at = end
    if at < len(text):
        yield text[at:], False


def applied(
    config: Config, overrides: Iterable[Override]
) -> Iterator[tuple[Override, str]]:
    """Apply Hydra's overrides; those that it refuses, and why.

    As in hydra 1.3 (ConfigLoaderImpl._apply_overrides_to_config), with the
    configuration closed to new keys (struct).
    """
    for override in overrides:
        key, sign = override.key, override.sign
        setting = config.settings.get(key)
        is_there = config.has(key) or config.value(key) is not None
        is_null = setting is not None and setting.value is None and not setting.needs
        is_mapping = isinstance(override.value, dict)
        is_part = isinstance(override.value, list) or is_mapping
        if not key:
            continue
        if sign == "~":
            if not is_there or is_null:
                yield override, f"there is no {key} to remove"
            config.remove(key)
            continue
        if not sign and not is_there:
            yield override, f"the configuration has no key {key}"
        elif sign == "+" and is_there and not (is_null or is_part or override.needs):
            yield override, f"{key} is there already; leave out the + or write ++{key}"
        if is_mapping:  # merged with what is there without reading it
            needs = frozenset({str(override.value)})
            override = override._replace(value=None, needs=needs)
        config.put(override)


def dotlist(words: Iterable[Word]) -> tuple[list[Override], list[tuple[Word, str]]]:
    """OmegaConf's own command line, and what it refuses, as the rest of a sentence.

    As OmegaConf.from_cli of 2.3: a word without a = is a key whose value is null, a
    value is YAML. A mapping is given as each of its keys.
    """
    found: list[Override] = []
    refused: list[tuple[Word, str]] = []
    for word in words:
        left, equals, right = word.text.shape.partition("=")
        key = re.sub(r"\[([^\]]*)\]", r".\1", left).strip(".")
        if word.text.needs:
            is_known = equals and re.fullmatch(r"[\w.]+", key)
            needs = word.text.needs
            found.append(Override("", key if is_known else "", None, needs, word))
            continue
        try:
            value = documents.value_of(right)
        except ValueError as error:
            refused.append((word, f"is not read by YAML: {error}"))
            continue
        given = (
            flat(value, key) if isinstance(value, dict) and value else [(key, value)]
        )
        found += [Override("", name, one, NOBODY, word) for name, one in given]
    return found, refused


def flat(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of a tree by its full name; an empty mapping is a value."""
    for name, value in tree.items():
        key = f"{above}.{name}" if above else name
        if isinstance(value, dict) and value:
            yield from flat(value, key)
        else:
            yield key, value
