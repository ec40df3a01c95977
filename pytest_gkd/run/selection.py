"""Which stages were requested, with which budgets: parsed once, with their origin."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from pytest_gkd import options
from pytest_gkd.options import Budget, Settings, SettingsError
from pytest_gkd.run import keyword_selection, option_origins
from pytest_gkd.run.built_in_stages import is_built_in, stage_file, stages_dir
from pytest_gkd.stage_specs import BY_NAME, STAGES


@dataclass(frozen=True)
class Selection:
    """Which stages were requested, and how.

    ``names``, given by ``origin``, is None for every stage found. ``only`` is set if
    just stages were requested, so that other tests are left out. ``own_files`` are the
    user's: everything that pytest collects besides the files of ``builtin``.
    """

    names: tuple[str, ...] | None
    builtin: tuple[str, ...]
    only: bool
    own_files: tuple[str, ...]
    origin: str

    def args(self) -> list[str]:
        """The arguments that pytest collects from."""
        files = [str(stage_file(name)) for name in self.builtin]
        return [*(one for one in self.own_files if not is_built_in(one)), *files]


@dataclass(frozen=True)
class Request:
    """Everything the user requested, the same in every process of the run."""

    selection: Selection
    budgets: tuple[Budget, ...]
    settings: Settings

    def check_names(self, known: Iterable[str] = BY_NAME) -> None:
        """Raise SettingsError for a stage that is not in ``known``."""
        named = [(name, self.selection.origin) for name in self.selection.names or ()]
        named += [(one.stage, one.origin) for one in self.budgets]
        options.check_names(named, known)


def select(config: pytest.Config) -> Selection | None:
    """The stages that the command line or the ini requests, None for none."""
    asked = option_origins.given(config, options.STAGES)
    raw, origin = asked.value, asked.origin
    if config.option.gkd_stages is None:
        raw = raw or None
    given = config.args_source == config.ArgsSource.ARGS
    paths = tuple(config.args) if given else ()
    built_in = [arg for arg in paths if is_built_in(arg)]
    own = tuple(arg for arg in paths if arg not in built_in)
    if raw is not None:
        if os.path.sep in raw or (raw and Path(raw.split("::")[0]).exists()):
            raise SettingsError(
                f"{origin}: {raw!r} was taken for stage names. Write "
                f"{origin}=all {raw} to run every stage and the tests in {raw}"
            )
        names = options.read_stage_names(raw, origin)
        listed = option_origins.given(config, options.STAGE_FILES)
        own += tuple(option_origins.files(listed))
        if "all" in names:
            return Selection(None, offered(config), True, own, origin)
        chosen = tuple(name for name in BY_NAME if name in names)
        if not set(chosen) <= set(offered(config)):
            missing = next(name for name in chosen if name not in offered(config))
            raise SettingsError(f"{origin}: {_WANTS[missing]}")
        return Selection(names, chosen, True, own, origin)
    if built_in:
        chosen = tuple(
            name
            for name in offered(config)
            if any(_covers(arg, name) for arg in built_in)
        )
        return Selection(None, chosen, False, own, origin)
    chosen = keyword_selection.chosen(config, config.option)
    if not chosen:
        return None
    return Selection(None, chosen, False, tuple(config.args), origin)


def offered(config: pytest.Config) -> tuple[str, ...]:
    """The built-in stages available in this run."""
    return tuple(
        stage.name
        for stage in STAGES
        if not stage.option
        or option_origins.given(config, options.named(stage.option)).value
    )


def left_out(config: pytest.Config, selection: Selection) -> tuple[str, ...]:
    """A note on each stage that an option on the command line is for, and a list lacks.

    ``-k`` and paths say what they leave out themselves.
    """
    return tuple(
        f"{given.origin} is given, but {selection.origin} does not name the stage "
        f"{stage.name}, so it does not run"
        for stage in STAGES
        if stage.option and selection.names and stage.name not in selection.names
        for given in [option_origins.given(config, options.named(stage.option))]
        if given.value and given.origin.startswith("--")
    )


_WANTS = {
    "config": "the stage config judges the job's own configuration: name it with "
    "--gkd-config=FILE",
    "launch": "the stage launch runs the job's own command: give it with "
    '--gkd-launch="COMMAND"',
}


def _covers(arg: str, name: str) -> bool:
    path = Path(arg.split("::")[0]).absolute()
    return path in (stages_dir(), stage_file(name))


def check_paths(config: pytest.Config, selection: Selection) -> None:
    """Raise SettingsError for a path that does not exist, naming its origin.

    Otherwise each worker would find out by itself, each in its own way.
    """
    in_ini = option_origins.given(config, options.STAGE_FILES)
    listed = option_origins.files(in_ini)
    for name in selection.own_files:
        origin = in_ini.origin if name in listed else "command line"
        file = name.split("::")[0]
        bases = (config.invocation_params.dir, config.rootpath)
        if not any((base / file).exists() for base in bases):
            raise SettingsError(
                f"{origin}: file or directory not found: {file!r} (looked in "
                f"{' and '.join(dict.fromkeys(str(base) for base in bases))})"
            )


def budgets(config: pytest.Config) -> tuple[Budget, ...]:
    """Budgets from the command line, then from the ini: highest precedence first."""
    tables = option_origins.entries(config, options.TIMEOUT)
    return tuple(one for table in tables for one in options.read_budgets(table))
