"""What a framework's reader returns, the same for every framework."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from pytest_gkd.job.findings import Finding
from pytest_gkd.job.fitting import Recipe
from pytest_gkd.job.launch import Launch
from pytest_gkd.job.overrides import Given, Override
from pytest_gkd.job.releases import Release
from pytest_gkd.job.shell_values import Word

UNKNOWN = "config.unknown-option"


class Pool(NamedTuple):
    """GPUs of a role: ``each`` of them on every one of ``nodes``, all or none.

    ``key`` is the framework's own for ``each``; ``is_launched`` is whether a launcher
    runs on every node, so that two parts cannot share one. With ``after`` they are
    parts that take the nodes' GPUs in order, following that many others of the job.
    """

    name: str
    nodes: Given
    each: Given
    key: str = ""
    is_launched: bool = False
    after: Given | None = None


class Variable(NamedTuple):
    """An environment variable that a configuration gives to workers.

    ``must_be_text`` is whether Ray gets the value unconverted, and refuses non-strings.
    """

    name: str
    value: Any
    word: Word
    must_be_text: bool = True


class Reading(NamedTuple):
    """A start of a framework, understood.

    ``said`` is what the user gave, ``values`` what the job makes of it by the names of
    ``gkd check``. ``problem`` says why its keys cannot be judged, if so. ``pools`` are
    GPUs that must be on the same node. ``recipe`` says how the memory plan is made.
    ``variables`` are the workers'.
    """

    said: list[Override]
    values: dict[str, Given]
    findings: list[Finding]
    problem: str = ""
    pools: tuple[Pool, ...] = ()
    recipe: Recipe | None = None
    variables: tuple[Variable, ...] = ()


@cache
def names(framework: str) -> dict[str, str]:
    """The framework's own keys for the values of ``gkd check``; empty if none."""
    text = (Path(__file__).parent / "names.toml").read_text("utf-8")
    return dict(tomllib.loads(text).get(framework, {}))


def launched(values: dict[str, Given]) -> tuple[Pool, ...]:
    """The trainer's pool if a launcher starts a process for each of its GPUs."""
    sizes = (values.get("nodes"), values.get("gpus_per_node"))
    if sizes[0] is None or sizes[1] is None:
        return ()
    return (Pool("the trainer", sizes[0], sizes[1], is_launched=True),)


def derived(expression: str, compute: Callable[..., Any], *parts: Given) -> Given:
    """A value computed from several, undetermined if one of them is.

    ``expression`` says which options it comes from.
    """
    needs = frozenset[str]().union(*(part.needs for part in parts))
    if needs:
        return Given("undetermined", None, None, needs, expression)
    source = "user" if any(part.source == "user" for part in parts) else "default"
    value = compute(*(part.value for part in parts))
    return Given(source, value, None, frozenset(), expression)


class Framework(Protocol):
    """A module of this package: one training framework.

    ``PROGRAM`` matches what starts it; a name in its group ``common`` may start others,
    too.
    """

    PROGRAM: re.Pattern[str]

    def is_own(self, keys: AbstractSet[str]) -> bool:
        """Whether a configuration file with these keys is this framework's.

        Likewise for a program of a common name with these words, or the words' files.
        """

    def read(self, launch: Launch, release: Release) -> Reading:
        """What a start of the framework means under a recorded release."""
