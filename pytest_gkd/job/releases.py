"""The recorded releases of a framework's options, and which one judges a job."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from packaging.version import InvalidVersion, Version

from pytest_gkd import __version__
from pytest_gkd.job.findings import CheckError
from pytest_gkd.job.sources import SOURCES, files

SCHEMAS = Path(__file__).parent / "schemas"
UNKNOWN = "of unknown version"


@dataclass(frozen=True)
class Release:
    """A recorded release of a framework, or the installed copy of it.

    ``number`` is its version, ``rules`` the recorded release whose rules apply to it,
    ``schema`` what its framework's recorder reads from its sources.
    """

    framework: str
    number: str
    rules: str
    is_installed: bool
    schema: dict[str, Any] = field(repr=False, compare=False)

    def __str__(self) -> str:
        return self.number

    def is_at_least(self, release: str) -> bool:
        """Whether it is that release or a later one, judged by its version."""
        own = self.rules if self.number == UNKNOWN else self.number
        return Version(own) >= Version(release)


class Judged(NamedTuple):
    """The release that judges, what chose it, and why it is not the installed one."""

    release: Release
    by: str
    problems: tuple[str, ...] = ()


def recorded(framework: str) -> list[str]:
    """The recorded releases of a framework, oldest first."""
    found = SCHEMAS.glob(f"{framework}-[0-9]*.json")
    return sorted((p.stem.removeprefix(f"{framework}-") for p in found), key=Version)


@cache
def release(framework: str, number: str) -> Release:
    """A recorded release, as its framework's recorder wrote it."""
    text = (SCHEMAS / f"{framework}-{number}.json").read_text("utf-8")
    return Release(framework, number, number, False, json.loads(text))


def elsewhere(own: Release, has: Callable[[Release], bool]) -> str:
    """The nearest other recorded release that has what this one lacks, for a message.

    Empty if none has it. Older ones come first.
    """
    numbers, rules = recorded(own.framework), Version(own.rules)
    older = [one for one in reversed(numbers) if Version(one) < rules]
    newer = [one for one in numbers if Version(one) > rules]
    name = own.framework
    for number in (*older, *newer):
        if has(release(name, number)):
            had = f"; {name} {number} had it"
            return had if number in older else f"; {name} {number} has it"
    return ""


def newest(framework: str) -> Release:
    """The newest recorded release."""
    return release(framework, recorded(framework)[-1])


def fitting(framework: str, program: str, options: frozenset[str]) -> Judged:
    """The newest recorded release that fits, and why it was chosen.

    A release that lacks ``program``, or more than half of the ``options`` that it is
    given, is skipped for an older one; if all are, it is the newest.
    """
    if not options:
        return Judged(newest(framework), "the newest recorded")
    known = [release(framework, number) for number in reversed(recorded(framework))]
    has_program = any(program in one.schema for one in known)
    for one in known:
        whole = one.schema
        tables = [whole[program]] if program in whole else whole.values()
        names = {name for table in tables if isinstance(table, dict) for name in table}
        is_told = any(name.startswith("--") for name in names)
        has_most = not is_told or 2 * len(options & names) >= len(options)
        if has_most and has_program == (program in whole):
            own = "" if one is known[0] else " that has these options"
            return Judged(one, f"the newest recorded{own}")
    return Judged(known[0], "the newest recorded")


def judge(
    framework: str,
    asked: str = "",
    program: str = "",
    options: frozenset[str] = frozenset(),
) -> Judged:
    """The requested release, else the installed copy, else a recorded one.

    The latter is the newest that fits the options of a program's start. Raises
    CheckError if the requested one is neither recorded nor installed.
    """
    known = recorded(framework)
    if not known and asked in ("", __version__):  # our own workload
        own = Release(framework, __version__, __version__, False, {})
        return Judged(own, "the installed one")
    if asked in known:
        return Judged(release(framework, asked), "--framework")
    here = installed_copy(framework, tuple(sys.path), program, options)
    if asked and (here is None or here.release.number != asked):
        raise CheckError(
            f"{framework} {asked} is neither installed nor recorded; recorded releases "
            f"are {', '.join(known) or __version__}"
        )
    if here is not None:
        return here
    fits = fitting(framework, program, options)
    return fits._replace(by=f"{fits.by}, as none is installed")


def beside(own: Release, package: str) -> Judged:
    """A package that a framework needs: the installed one if the framework is."""
    if own.is_installed:
        return judge(package)
    return Judged(newest(package), "the newest recorded")


@cache
def installed_copy(
    framework: str, _path: tuple[str, ...], program: str, options: frozenset[str]
) -> Judged | None:
    """The copy that this process would import from ``sys.path``, None if there is none.

    Its sources are read in place, unless they are those of the recorded release.
    """
    version = files.version(framework)
    if version is None:
        return None
    number = version or UNKNOWN
    source = SOURCES.get(framework)
    known = recorded(framework)
    older, is_older = _nearest(framework, number)
    if source is None:
        if number in known:
            return Judged(release(framework, number), "the installed one")
        fits = fitting(framework, program, options)
        return fits._replace(by=f"{fits.by}, as the installed {number} is not")
    try:
        folder, texts = files.texts(source)
        if files.digest(texts) == older.schema.get("digest"):
            same = "" if older.number == number else f", the same as {older}"
            schema, by = older.schema, f"the installed one{same}"
        else:
            schema = _read(source, texts)
            if source.complete and is_older:
                schema = source.complete(schema, number, str(older), older.schema)
            by = f"read from {folder}; rules of {older}"
    except files.SourceError as error:
        other = release(framework, number) if number in known else newest(framework)
        by = "recorded" if number in known else "the newest recorded"
        text = f"the installed {framework} {number} is not read, but {other}: {error}"
        return Judged(other, by, (text,))
    copy = Release(framework, number, older.number, True, schema)
    others = [judge(name) for name in source.beside]
    for one in others:
        with_it = f"{one.release.framework} {one.release}"
        by += f"; {with_it} {'beside it' if one.release.is_installed else one.by}"
    return Judged(copy, by, tuple(p for one in others for p in one.problems))


def _nearest(framework: str, number: str) -> tuple[Release, bool]:
    """The nearest recorded release that is not newer, else the oldest; and which.

    For anything but a version it is the newest one.
    """
    known = recorded(framework)
    try:
        version = Version(number)
    except InvalidVersion:
        return newest(framework), True
    older = [one for one in known if Version(one) <= version]
    return release(framework, (older or known[:1])[-1]), bool(older)


def _read(source: files.Source, texts: files.Files) -> dict[str, Any]:
    """What the sources say, in the shape of a recorded release. Raises SourceError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in their strings
            said = json.dumps(source.read(texts), default=str)
    except files.SourceError:
        raise
    except Exception as error:  # an unknown layout can break any step of a reader
        why = f"{type(error).__name__}: {error}"[:120]
        raise files.SourceError(f"it is laid out otherwise ({why})") from error
    schema: dict[str, Any] = json.loads(said)
    return schema
