"""verl's configuration: its own files, and the user's YAML that builds on them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_gkd.job import documents, hydra_compose, script_file
from pytest_gkd.job.arguments import MISSING
from pytest_gkd.job.findings import Finding
from pytest_gkd.job.hydra_compose import Composer, ConfigFile
from pytest_gkd.job.hydra_options import CommandLine
from pytest_gkd.job.launch import Launch
from pytest_gkd.job.omegaconf import Config
from pytest_gkd.job.overrides import Override
from pytest_gkd.job.releases import Release

OWN_CONFIG = "ppo_trainer"
SFT_CONFIG = "sft_trainer_engine"
# trainer/sft_trainer.py and sft_trainer_ray.py, of verl 0.8 and later
SFT = re.compile(
    r"(?:verl\.trainer\.|(?:.*/)?verl/trainer/)sft_trainer(?P<ray>_ray)?(?:\.py)?"
)
ENGINE = ("model_engine", "model_engine")
# recipe/gkd/main_gkd.py: @hydra.main(config_path="config", ...)
RECIPE = re.compile(r"(?:.*[./])?main_gkd(?:\.py)?")
RECIPES_CONFIG = "on_policy_distill_trainer"
FOLDER = "verl/trainer/config"
GROUP = re.compile(r"(?P<group>[\w/]+)(?:@(?P<package>[\w.]*))?")


@dataclass
class Composed:
    """A configuration: verl's own ``defaults``, and what the user's files ``give``.

    ``is_users`` is whether a user's file was read, ``is_alone`` whether nothing in it
    is verl's. ``unread`` are the sections whose files were not found. ``problem`` says
    why there is no configuration.
    """

    defaults: dict[str, Any] = field(default_factory=dict)
    given: list[Override] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    is_users: bool = False
    unread: list[str] = field(default_factory=list)
    problem: str = ""

    @property
    def is_alone(self) -> bool:
        """Whether nothing of it is verl's own."""
        return self.is_users and not self.defaults


def composed(
    launch: Launch, line: CommandLine, release: Release, own: Mapping[str, Any]
) -> Composed:
    """The configuration that Hydra would compose, without the overrides of its keys.

    ``own`` is verl's own configuration under the job's model engine.
    """
    configs: dict[str, Any] = release.schema.get("configs", {})
    files = _Files(configs)
    name, problem = _name(launch, line, files)
    if problem:
        return Composed(problem=problem)
    choices, added = _choices(line, {path.rpartition("/")[0] for path in configs})
    if not (files.places or added or choices.keys() - {ENGINE}) and name == OWN_CONFIG:
        return Composed(dict(own))
    composer = Composer(files.load, choices, added)
    found = Composed()
    config = Config()
    for setting in composer.settings(name):
        config.merge([setting])
        if setting.word.file not in files.users:
            found.defaults[setting.key] = setting.value
    settings = config.settings.values()
    found.given = [one for one in settings if one.word.file in files.users]
    found.is_users = bool(files.users)
    for path, wanted_by, section in composer.missing:
        if not wanted_by:
            return Composed(problem=f"the configuration is {path}: not recorded")
        text = f"{wanted_by} is to take {path}.yaml, which is not next to it"
        text += f" nor in verl {release}: Hydra refuses it, unless it is elsewhere"
        file = files.paths.get(wanted_by, launch.command.file)
        # The user's own copy of verl, or a folder of the searchpath, may have it.
        found.findings.append(Finding(MISSING, "warning", text, file, 0, path))
        found.unread.append(section)
    is_found = files.has_searchpath or "config_dir" in line.options
    is_found |= any(one.key == "hydra.searchpath" for one in line.overrides)
    if files.users and files.stood_in and not is_found:
        path = files.stood_in[0]
        text = (
            f"{path}.yaml is not next to it, and no hydra.searchpath names verl's own "
            "folder: Hydra finds it with hydra.searchpath=[pkg://verl.trainer.config]; "
            f"read is that of verl {release}"
        )
        found.findings.append(
            Finding(MISSING, "warning", text, files.users[0], 0, path)
        )
    return found


def _name(launch: Launch, line: CommandLine, files: _Files) -> tuple[str, str]:
    """The primary configuration's name, or why not; adds its places to ``files``."""
    if launch.document is not None:
        files.places.append(launch.document.parent)
        return launch.document.stem, ""
    is_recipe = bool(RECIPE.fullmatch(launch.program))
    own = SFT_CONFIG if SFT.fullmatch(launch.program) else OWN_CONFIG
    script = Path(launch.command.file).absolute()
    parents = [*script.parents[:6], Path.cwd()]
    given: dict[str, str] = {}
    for option in ("config_name", "config_path", "config_dir"):
        one = line.options.get(option)
        if one is None:
            continue
        if one.needs:
            what = option.replace("_", " ")
            return (
                "",
                f"the {what} cannot be determined: {', '.join(sorted(one.needs))}",
            )
        given[option] = str(one.value)
    name = given.get("config_name", RECIPES_CONFIG if is_recipe else own)
    name = name.removesuffix(".yaml").removesuffix(".yml")
    path = given.get("config_path", "config").removeprefix("file://")
    if is_recipe:
        files.places += [above / path for above in parents]
    elif path.strip("./") != "config":
        # Relative to the folder of verl's main_ppo.py, or of a copy of it.
        files.places += [above / "verl/trainer" / path for above in parents]
        files.places += [above / path for above in parents]
        if not any((place / f"{name}.yaml").is_file() for place in files.places):
            return "", f"the configuration {path}/{name}.yaml does not exist"
    if "config_dir" in given:
        files.places += [above / given["config_dir"] for above in parents]
    return name, ""


def _choices(
    line: CommandLine, groups: set[str]
) -> tuple[dict[tuple[str, str], Any], list[tuple[str, str, Any]]]:
    """The files that the command line chooses, and those that it adds."""
    choices: dict[tuple[str, str], Any] = {}
    added = []
    for override in group_choices(line.overrides, groups):
        found = GROUP.fullmatch(override.key)
        if found is None or override.needs:
            continue
        package = found["package"]
        if package is None:
            package = found["group"].replace("/", ".")
        if override.sign == "+":
            added.append((found["group"], package, override.value))
        else:
            value = None if override.sign == "~" else override.value
            choices[found["group"], package] = value
    return choices, added


def settings(said: list[Override], release: Release) -> list[Override]:
    """The overrides that set values, and choose no file."""
    groups = {path.rpartition("/")[0] for path in release.schema.get("configs", {})}
    chosen = list(group_choices(said, groups))
    return [one for one in said if one not in chosen]


def group_choices(said: list[Override], groups: set[str]) -> Iterator[Override]:
    """The overrides that choose a file and set no value."""
    for override in said:
        group = override.key.partition("@")[0]
        is_name = override.needs or isinstance(override.value, str | list | None)
        is_marked = "@" in override.key or "/" in override.key
        if (is_marked or group in groups) and is_name and "." not in group:
            yield override


@dataclass
class _Files:
    """The user's files, and the recorded ones if these do not exist."""

    recorded: Mapping[str, Any]
    places: list[Path] = field(default_factory=list)
    users: list[str] = field(default_factory=list)
    paths: dict[str, str] = field(default_factory=dict)
    stood_in: list[str] = field(default_factory=list)
    has_searchpath: bool = False

    def load(self, path: str) -> ConfigFile | None:
        """A file by its path below the folders that Hydra would search."""
        for place in self.places:
            for suffix in (".yaml", ".yml"):
                file = place / f"{path}{suffix}"
                if ".." in file.parts or not file.is_file():
                    continue
                text = script_file.text_of(file, is_script=False)
                settings = documents.settings_of(text, str(file), documents.OMEGACONF)
                is_verls = file.resolve().as_posix().endswith(f"{FOLDER}/{path}.yaml")
                if not is_verls:
                    self.users.append(str(file))
                self.paths[path] = str(file)
                self._look_in(settings)
                return hydra_compose.config_file(text, settings)
        return self._recorded(path)

    def _look_in(self, settings: list[Override]) -> None:
        """Where else files may be, according to ``hydra.searchpath``."""
        for setting in settings:
            if setting.key == "hydra.searchpath":
                self.has_searchpath = True
                places = setting.value if isinstance(setting.value, list) else []
                for one in places:
                    kind, _, place = str(one).partition("://")
                    if kind == "file" and place.strip("/") != FOLDER:
                        self.places.append(Path(place))

    def _recorded(self, path: str) -> ConfigFile | None:
        one = self.recorded.get(path)
        if one is None:
            return None
        self.stood_in.append(path)
        return hydra_compose.recorded(one)
