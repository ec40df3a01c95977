"""The settings that stages take from a job's own configuration: ``--gkd-config``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from pytest_gkd import options
from pytest_gkd.options import CONFIG, FRAMEWORK, OPTIONS, SET, Option, SettingsError
from pytest_gkd.run import option_origins
from pytest_gkd.run.option_origins import Given

# Settings that a job names differently.
OWN_NAMES = {"top_k": "loss_topk", "beta": "loss_beta"}


@dataclass(frozen=True)
class JobSettings:
    """What the stages take from a job, by option name.

    ``told`` is what ``gkd check`` says about it, with the facts of this run: ``taken``
    lists the options that it decides, ``left`` says why others are not taken.
    """

    given: dict[str, Given]
    in_ini: bool
    told: dict[str, Any]

    def instead_of(self, own: Given, option: Option) -> Given:
        """The job's value of an option, unless the one given takes precedence.

        The command line does, and so does an ini file that itself names the job.
        """
        was_given = own.value not in (None, False, "", [])
        is_stronger = was_given and (own.is_flag or self.in_ini)
        if option.name not in self.given or is_stronger:
            return own
        self.told["taken"].append(option.name)
        return self.given[option.name]


def read(config: pytest.Config, gpus: int) -> JobSettings | None:
    """The settings of the user's job on a machine with ``gpus`` GPUs; None without one.

    Raises SettingsError for a file that cannot be read as a job.
    """
    named = option_origins.given(config, CONFIG)
    if not named.value:
        return None
    # Imported only here: its parsers are packages of their own.
    from pytest_gkd.job import check, written_secrets
    from pytest_gkd.job.findings import CheckError

    name, *arguments = named.value
    framework = option_origins.given(config, FRAMEWORK)
    try:
        variables = check.variables(option_origins.given(config, SET).value or ())
        found = check.check(
            named.base / name if (named.base / name).exists() else name,
            arguments,
            framework.value or "",
            variables,
        )
    except CheckError as error:
        said = written_secrets.in_error(error)
        raise SettingsError(f"{named.origin}: {said}") from None
    told = {**found.to_json(), "taken": [], "left": []}
    given = {}
    for option in OPTIONS:
        value = found.values.get(OWN_NAMES.get(option.name, option.name))
        if value is None or value.source != "user" or value.value in (None, [], ""):
            continue
        place = f"line {value.line} of {found.script}" if value.line else named.origin
        one = Given(_raw(value.value, option), place, named.base)
        if found.framework == "ms-swift" and option.name == "train_files":
            # dataset_syntax.py: the number of samples follows a #.
            one = replace(one, value=[name.partition("#")[0] for name in one.value])
        reason = _unusable(one, option, gpus, found.framework)
        if reason:
            told["left"].append(reason)
        else:
            given[option.name] = one
    return JobSettings(given, not named.is_flag, told)


def _raw(value: Any, option: Option) -> Any:
    """A value as it would come from the command line."""
    if option.kind != "list":
        return value if isinstance(value, str) else str(value)
    return [str(one) for one in (value if isinstance(value, list) else [value])]


def _unusable(one: Given, option: Option, gpus: int, framework: str) -> str:
    """Why the stages cannot use a value; empty if they can."""
    try:
        value = options.read_value(option, one.value, one.origin)
    except SettingsError as error:
        return str(error)
    if framework == "ms-swift" and option.name == "train_files":
        # Unless --use_hf is given, its hub is ModelScope, which stages cannot read.
        for name in one.value:
            if not (one.base / name).exists():
                return f"{one.origin}: no file {name}, so ms-swift would download it"
    if option.name == "tensor_parallel_size" and value > max(1, gpus):
        return (
            f"{one.origin}: tensor_parallel_size is {value}, and this machine shows "
            f"{gpus} GPU(s): the stages' engine runs without it"
        )
    return ""
