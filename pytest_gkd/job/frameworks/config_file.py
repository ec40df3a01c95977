"""The file that a program takes by ``--config``, with Hydra's overrides beside it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pytest_gkd.job import documents, hydra_compose, script_file
from pytest_gkd.job.arguments import MISSING
from pytest_gkd.job.findings import Finding
from pytest_gkd.job.hydra_compose import Composer, ConfigFile
from pytest_gkd.job.launch import ADDED, Launch
from pytest_gkd.job.overrides import Override
from pytest_gkd.job.shell_values import Text, Word

# argparse also takes abbreviations of --config; everything else goes on to Hydra.
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
    """A file by its path: absolute, or from the script's directory, above it, or
    here.
    """
    places = [*(script.absolute().parents if script.is_file() else ()), Path()]
    return next((p / name for p in places if (p / name).is_file()), None)


class Composed:
    """What Hydra makes of a file and of the files beside it that its defaults name.

    ``said`` are overrides; ``chosen`` are those among them that choose a file.
    """

    def __init__(self, path: Path, said: Iterable[Override] = ()) -> None:
        self._folder, self._primary = path.parent, str(path)
        self._paths: dict[str, Path] = {}
        choices: dict[tuple[str, str], Any] = {}
        added: list[tuple[str, str, Any]] = []
        self.chosen = [one for one in said if self._is_choice(one)]
        for one in self.chosen:
            group, _, package = one.key.partition("@")
            package = package or group.replace("/", ".")
            if one.sign == "+":
                added.append((group, package, one.value))
            else:
                choices[group, package] = None if one.sign == "~" else one.value
        composer = Composer(self._load, choices, added)
        self.config = composer.composed(path.stem)
        self.findings = [
            Finding(
                MISSING,
                "error",
                f"{wanted_by} is to take {missing}.yaml, which is not there",
                str(self._paths.get(wanted_by, path)),
                0,
                "defaults",
            )
            for missing, wanted_by, _ in composer.missing
        ]

    def _is_choice(self, one: Override) -> bool:
        group = one.key.partition("@")[0]
        is_name = isinstance(one.value, str | list) or one.sign == "~"
        is_group = bool(group) and "." not in group and not one.needs
        return is_name and is_group and (self._folder / group).is_dir()

    def _load(self, name: str) -> ConfigFile | None:
        for suffix in (".yaml", ".yml"):
            file = self._folder / f"{name}{suffix}"
            if file.is_file():
                text = script_file.text_of(file, is_script=False)
                self._paths[name] = file
                is_empty = not re.search(r"^\s*[^#\s]", text, re.MULTILINE)
                if is_empty and str(file) != self._primary:
                    return ConfigFile(None, [], [])  # which Hydra accepts
                settings = documents.settings_of(text, str(file), documents.OMEGACONF)
                return hydra_compose.config_file(text, settings)
        return None

    def others(self) -> Iterator[str]:
        """The top-level keys from other files: not all of them matter to every job."""
        for key, one in self.config.settings.items():
            if one.word.file and one.word.file not in (self._primary, ADDED):
                yield key.partition(".")[0]
