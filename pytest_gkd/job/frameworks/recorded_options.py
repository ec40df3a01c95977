"""The recorded options of an argparse program, a start's settings, and its rules.

A schema has a table for each parser: options by name, as sources/add_argument.py writes
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Generic, NamedTuple, TypeVar

from pytest_gkd.job.arguments import MISSING, Option
from pytest_gkd.job.findings import CheckError, Finding
from pytest_gkd.job.frameworks.reading import names
from pytest_gkd.job.launch import Launch
from pytest_gkd.job.overrides import Given, Job, Override
from pytest_gkd.job.releases import Release

CONFLICT = "config.invalid-combination"


class Parser(NamedTuple):
    """The options of a release by name; their defaults, names and types by key.

    ``kinds`` are the types of numbers, ``added`` keys to which each mention adds a
    value, ``required`` names without which the program does not start.
    """

    options: dict[str, Option]
    defaults: dict[str, Any]
    names: dict[str, str]
    kinds: dict[str, str]
    added: frozenset[str]
    required: tuple[str, ...]


@cache
def parser(release: Release, *tables: str) -> Parser:
    """The parser of some tables of a release's schema; a later namesake wins."""
    whole = release.schema
    records = {name: r for table in tables for name, r in whole[table].items()}
    found = Parser({}, {}, {}, {}, frozenset(_added(records)), _required(records))
    for name, record in records.items():
        key, kind = _key(name, record), record.get("type", "str")
        found.options[name] = Option(
            key=key,
            type=kind,
            nargs=record.get("nargs", ""),
            choices=record.get("choices", ()),
        )
        found.names.setdefault(key, name)
        if kind in ("int", "float"):
            found.kinds[key] = kind
        default = record.get("default")
        if default != "?":
            given = found.defaults.get(key) if default is None else default
            found.defaults[key] = given
    return found


def _key(name: str, record: Mapping[str, Any]) -> str:
    return str(record.get("key") or name.lstrip("-").replace("-", "_"))


def _added(records: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    return (_key(name, record) for name, record in records.items() if "adds" in record)


def _required(records: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    return tuple(name for name, record in records.items() if record.get("required"))


class UnsureError(Exception):
    """A value that cannot be determined."""


class Known:
    """The settings of a start, as far as they are certain.

    ``SIZES`` are keys of numbers that must be at least one.
    """

    SIZES: frozenset[str] = frozenset()

    def __init__(
        self,
        release: Release,
        parser: Parser,
        launch: Launch,
        said: Sequence[Override],
    ) -> None:
        self.name, self.release = release.framework, release
        self.parser, self.launch = parser, launch
        self._job = Job(parser.defaults, said)
        self._given = {override.key: override for override in said}
        words = (o for o in said if not o.key)
        # What would determine the words that may be any option.
        self.open = frozenset[str]().union(*(o.needs for o in words))

    def find(self, key: str) -> Given:
        """A key's value; a default is uncertain if some words may be any option."""
        given = self._job.value(key)
        if given.source == "default" and self.open:
            return Given("undetermined", None, None, self.open)
        kind = self.parser.kinds.get(key)
        single = not isinstance(given.value, list) and given.value is not None
        if kind and single and not self._fits(given.value, kind, key):
            needs = frozenset({f"a value of {key} that is right"})
            return Given("undetermined", None, given.word, needs)
        return given

    def _fits(self, value: Any, kind: str, key: str) -> bool:
        """Whether it is a number and, for a size, one that can be divided by."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and (kind == "float" or key not in self.SIZES or value > 0)

    def __getitem__(self, key: str) -> Any:
        """A key's certain value. Raises UnsureError."""
        given = self.find(key)
        if given.needs:
            raise UnsureError(key)
        return given.value

    def has(self, key: str) -> bool:
        """Whether the release has an option with this key."""
        return key in self.parser.defaults

    def option(self, key: str) -> str:
        """The name of the option that sets a key."""
        return self.parser.names.get(key, f"--{key}")

    def is_given(self, key: str) -> bool:
        """Whether the user gives it."""
        return key in self._given

    def fault(self, cause: str, level: str, message: str, *keys: str) -> Finding:
        """A finding at the last of the keys that the user gives."""
        words = [self._given[key].word for key in keys if key in self._given]
        word = words[-1] if words else self.launch.command.words[0]
        key = next(iter(keys), "")
        return Finding(cause, level, message, word.file, word.line, key)

    def sizes(self) -> Iterator[Finding]:
        """Sizes below one, which nothing can be divided by."""
        for key, override in self._given.items():
            value = override.value
            if key in self.SIZES and isinstance(value, int) and value < 1:
                text = f"{self.option(key)} is {value}, and must be at least 1"
                yield self.fault(CONFLICT, "error", text, key)

    def missing(self) -> Iterator[Finding]:
        """Options that the parser itself requires."""
        for name in self.parser.required:
            key = self.parser.options[name].key
            if not self.open and not self.is_given(key):
                text = f"{self.name} {self.release} refuses a start without {name}"
                yield self.fault(MISSING, "error", text, key)


K = TypeVar("K", bound=Known)


class Rule(NamedTuple, Generic[K]):
    """``wrong`` tells from a start's settings whether to report ``message``.

    ``keys`` tell where: at the last of them that the user gives. {key} in the message
    stands for its value, {--key} for the option that sets it.
    """

    keys: str
    wrong: Callable[[K], Any]
    message: str
    cause: str = CONFLICT
    level: str = "error"


def judged(
    v: K,
    rules: Iterable[Rule[K]],
    checks: Iterable[Callable[[K], Iterator[Finding]]] = (),
) -> Iterator[Finding]:
    """All that is wrong with a start, as far as its values are certain."""
    for rule in rules:
        try:
            if rule.wrong(v):
                text = rule.message.format_map(_Shown(v))
                yield v.fault(rule.cause, rule.level, text, *rule.keys.split())
        except UnsureError:
            continue
    for check in checks:
        try:
            yield from check(v)
        except UnsureError:
            continue


class _Shown(dict[str, Any]):
    """The values and options in a message; "?" for an undetermined value."""

    def __init__(self, v: Known) -> None:
        super().__init__()
        self._known = v

    def __missing__(self, key: str) -> Any:
        if key.startswith("--"):
            return self._known.option(key[2:])
        try:
            return self._known[key]
        except UnsureError:
            return "?"


def plan_facts(
    known: Known, framework: str, bound: Sequence[str], facts: Callable[[Any], Any]
) -> tuple[dict[str, tuple[str, ...]], dict[str, Any]]:
    """The options that a memory plan may change, and what ``facts`` says about a job.

    Those in ``bound`` are left out. An unknown fact becomes the ``doubt``.
    """
    table = names(framework) | names(f"{framework}-memory")
    keys: dict[str, tuple[str, ...]] = {
        name: (known.option(key),)
        for name, key in table.items()
        if known.has(key) and name not in bound
    }
    try:
        return keys, facts(known)
    except UnsureError as error:
        return keys, {"doubt": f"{known.option(str(error))} is not known"}
    except CheckError as error:
        return keys, {"doubt": str(error)}


def refuse_unknown(known: Known, unknown: Mapping[str, str]) -> None:
    """Raise CheckError if an option is given whose effect on the memory is unknown."""
    for key, text in unknown.items():
        if known.has(key) and known[key]:
            raise CheckError(f"{text} is not known ({known.option(key)})")
