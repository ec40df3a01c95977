"""Where a value came from, and what its relative paths are relative to.

On the command line: the working directory; in an ini file: that file's directory.
"""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pytest_gkd.files import shown_from
from pytest_gkd.options import WITH_FLAG, Option, SettingsError

# Flags with a value: what follows one after a space is not a path argument of pytest.
VALUED = {option.flag for option in WITH_FLAG if option.kind != "flag"}


@dataclass(frozen=True)
class Given:
    """A value as given (None or empty: not given), and where it came from.

    ``origin`` is for messages, such as ``--gkd-student`` or ``gkd_student in
    pytest.ini``. Relative paths in the value are relative to ``base``. ``is_flag`` says
    that it came from the command line.
    """

    value: Any
    origin: str
    base: Path
    is_flag: bool = False


def given(config: pytest.Config, option: Option) -> Given:
    """The value of an option: from the command line, else from the ini."""
    here = config.invocation_params.dir
    value = getattr(config.option, option.ini, None)
    if value not in (None, False, []):
        return Given(value, _flag(config, option.flag), here, is_flag=True)
    return _in_ini(config, option)


def entries(config: pytest.Config, option: Option) -> Iterator[list[tuple[str, str]]]:
    """A list's entries, each with its origin: command line first, then the ini."""
    values = getattr(config.option, option.ini) or ()
    yield [(one, _flag(config, option.flag, one)) for one in values]
    found = _in_ini(config, option)
    yield [(one, found.origin) for one in found.value or ()]


def _in_ini(config: pytest.Config, option: Option) -> Given:
    """What the ini file says, or ``-o`` instead of it.

    Raises SettingsError for a list (in TOML) where a single value is expected.
    """
    here = config.invocation_params.dir
    ini = option.ini
    value = config.getini(ini)
    if isinstance(value, list) and option.kind != "list":
        place = shown(config, config.inipath) if config.inipath else "the ini"
        text = ",".join(map(str, value))
        raise SettingsError(
            f"{ini} in {place}: {value!r} is a list, but one string is expected: "
            f'{ini} = "{text}"'
        )
    if any(entry.startswith(f"{ini}=") for entry in config.option.override_ini or ()):
        return Given(value, f"-o {ini}", here)
    file = config.inipath
    if file is None:
        return Given(value, ini, here)
    return Given(value, f"{ini} in {shown(config, file)}", file.parent)


def _flag(config: pytest.Config, flag: str, value: str | None = None) -> str:
    """The flag, and where it (with its ``value``, if given) was written, unless it was
    on the command line itself."""

    def holds(words: Any) -> bool:
        texts = [str(word) for word in words]
        if value is None:
            return any(text.split("=")[0] == flag for text in texts)
        apart = (flag, value) in itertools.pairwise(texts)
        return apart or f"{flag}={value}" in texts

    if holds(config.invocation_params.args):
        return flag
    if holds(_environment_args()):
        return f"{flag} in PYTEST_ADDOPTS"
    if holds(config.getini("addopts")) and config.inipath:
        return f"{flag} in addopts of {shown(config, config.inipath)}"
    return flag


def _environment_args() -> list[str]:
    return shlex.split(os.environ.get("PYTEST_ADDOPTS", ""))


def shown(config: pytest.Config, path: Path) -> str:
    """The shortest form of a path, seen from the working directory."""
    return shown_from(config.invocation_params.dir, path)


def files(one: Given) -> list[str]:
    """The paths in a value, relative to the working directory or absolute.

    URLs (``s3://...``) and paths that start with ``~`` are left unchanged.
    """
    return [_placed(name, one.base) for name in one.value or ()]


def model(name: str, base: Path) -> str:
    """A model's name: a path if it names something below ``base``, else a hub id."""
    placed = _placed(name, base)
    meant = name.startswith(".") or Path(name).exists() or Path(placed).exists()
    return placed if meant else name


def _placed(name: str, base: Path) -> str:
    if "://" in name or name.startswith("~") or base == Path.cwd():
        return name
    return str(base / name)


def lost_ini(config: pytest.Config) -> str:
    """Why pytest read a different ini file than it should have; empty if it did not.

    It looks for its ini file before it knows our options, so an existing path that
    follows one after a space is taken as a place to start from.
    """
    here = config.invocation_params.dir
    words = [*_environment_args(), *map(str, config.invocation_params.args)]
    taken = [
        (flag, path)
        for flag, path in itertools.pairwise(words)
        if flag in VALUED and not path.startswith("-") and (here / path).exists()
    ]
    if not taken or config.option.inifilename:
        return ""
    # pytest's own search, from the intended places.
    from _pytest.config.findpaths import locate_config

    meant = [here]
    if config.args_source == config.ArgsSource.ARGS:
        named = [here / arg.split("::")[0] for arg in config.args]
        meant = [path for path in named if path.exists()] or meant
    wanted = locate_config(here, [Path(os.path.commonpath(meant))])[1]
    if wanted == config.inipath:
        return ""
    flag, path = taken[0]
    return (
        f"{flag} {path}: write {flag}={path}. After a space, pytest uses the path to "
        f"find its ini file, and it read {config.inipath or 'none'} instead of "
        f"{wanted or 'none'}"
    )
