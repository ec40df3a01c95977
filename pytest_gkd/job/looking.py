"""What is certain in a configuration, for values and rules on several keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from pytest_gkd.job import model_files
from pytest_gkd.job.findings import CheckError, Finding
from pytest_gkd.job.omegaconf import Config, UnresolvedError
from pytest_gkd.job.overrides import Given

CONFLICT = "config.invalid-combination"
Fault = tuple[str, str]


class NotCertainError(Exception):
    """A value that depends on something that is not known."""

    def __init__(self, needs: frozenset[str]) -> None:
        super().__init__(", ".join(sorted(needs)))
        self.needs = needs


def plan_facts(facts: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """What ``facts`` says of a job for its memory plan, or the ``doubt`` that keeps the
    job from one."""
    try:
        return facts(*arguments)
    except NotCertainError as error:
        return {"doubt": f"{error} is not certain"}
    except CheckError as error:
        return {"doubt": str(error)}


class Look:
    """The certain values of a configuration; ``given`` collects those looked at."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.given: list[Given] = []

    def __call__(self, key: str, default: Any = None) -> Any:
        """The value of a key. Raises NotCertainError if it is not known."""
        try:
            given = self.config.value(key)
        except UnresolvedError as error:
            raise NotCertainError(frozenset({str(error)})) from None
        if given is None:
            return default
        if given.needs:
            raise NotCertainError(given.needs)
        self.given.append(given)
        return given.value

    def whole(self, key: str, default: int | None = None) -> int:
        """The same, for an integer."""
        value = self(key, default)
        if type(value) is not int:
            raise NotCertainError(frozenset({key}))
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """The same, for a number."""
        value = self(key, default)
        if type(value) not in (int, float):
            raise NotCertainError(frozenset({key}))
        number: float = value
        return number

    def size(self, key: str, default: int | None = None) -> int:
        """The same, for a number of parts: at least 1; rules on sizes report others."""
        value = self.whole(key, default)
        if value < 1:
            raise NotCertainError(frozenset({key}))
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        """The same, for a mapping; one that does not exist is empty."""
        value = self(key) or {}
        if not isinstance(value, dict):
            raise NotCertainError(frozenset({key}))
        return value

    def is_on(self, key: str) -> bool:
        """The same, for a flag; one that does not exist is off."""
        return bool(self(key, False))


AnyLook = TypeVar("AnyLook", bound=Look)
Derived = Mapping[str, tuple[Callable[[AnyLook], Any], str]]


def derived(
    config: Config, table: Derived[AnyLook], look: Callable[[Config], AnyLook]
) -> dict[str, Given]:
    """Values made from several keys: each has a function, and says from which keys.

    None is a value that the job does not have.
    """
    found: dict[str, Given] = {}
    for name, (function, expression) in table.items():
        own = look(config)
        try:
            value = function(own)
        except NotCertainError as error:
            found[name] = Given(
                "undetermined", needs=error.needs, expression=expression
            )
            continue
        if value is not None:
            is_users = any(given.source == "user" for given in own.given)
            word = own.given[-1].word if len(own.given) == 1 else None
            source = "user" if is_users else "default"
            found[name] = Given(source, value, word, expression=expression)
    return found


def broken(
    config: Config,
    rules: Iterable[Callable[[AnyLook], Iterator[Fault]]],
    level: str,
    look: Callable[[Config], AnyLook],
    cause: str = CONFLICT,
) -> Iterator[Finding]:
    """What rules find in a configuration, each as a key with a sentence.

    A rule that needs what cannot be determined says nothing.
    """
    for rule in rules:
        try:
            faults = list(rule(look(config)))
        except NotCertainError:
            continue
        for key, text in faults:
            yield Finding(cause, level, text, *place(config, key), key)


def place(config: Config, key: str) -> tuple[str, int]:
    """The file and line of a key; for a section, or a key that is not there, those of
    the first key beside or below it, else none.
    """
    while key and key not in config.settings:
        inside = (
            one.word
            for name, one in config.settings.items()
            if name.startswith(f"{key}.") and one.word.file
        )
        if word := next(inside, None):
            return word.file, word.line
        key = key.rpartition(".")[0]
    setting = config.settings.get(key)
    return (setting.word.file, setting.word.line) if setting else ("", 0)


def tokenizers(config: Config, student: str, teacher: str) -> Iterator[Finding]:
    """A teacher with another tokenizer, which is sent the student's token ids.

    ``student`` and ``teacher`` are the keys of both models.
    """
    look = Look(config)
    try:
        said, in_earnest = model_files.other_tokenizer(look(student), look(teacher))
    except NotCertainError:
        return
    if said:
        setting = config.settings[teacher]
        level = "error" if in_earnest else "warning"
        place = setting.word.file, setting.word.line
        yield Finding("tokenizer.vocab-mismatch", level, said, *place, teacher)
