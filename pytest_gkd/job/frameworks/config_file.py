"""The file that a program takes by ``--config``, with Hydra's overrides beside it."""

from __future__ import annotations

import re
from pathlib import Path

from pytest_gkd.job.launch import Launch
from pytest_gkd.job.shell_values import Text, Word

# argparse takes what --config is abbreviated to; all else goes on to Hydra.
CONFIG = re.compile(r"(?P<option>--c(?:o(?:n(?:f(?:ig?)?)?)?)?)(?:=(?P<value>.*))?")


def given(launch: Launch) -> tuple[Word | None, list[Word]]:
    """The word of --config, and all other words; argparse takes the last one."""
    found, rest = None, []
    words = iter(launch.arguments)
    for word in words:
        option = CONFIG.fullmatch(word.text.shape)
        if option is None:
            rest.append(word)
        elif option["value"] is not None:
            found = word._replace(text=Text(option["value"], word.text.needs))
        else:
            found = next(words, None)
    return found, rest


def find(script: Path, name: str) -> Path | None:
    """A file by its path: absolute, from the script's directory or above, or here."""
    places = [*(script.absolute().parents if script.is_file() else ()), Path()]
    return next((p / name for p in places if (p / name).is_file()), None)
