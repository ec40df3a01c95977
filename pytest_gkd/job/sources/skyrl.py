"""The classes that SkyRL's programs read their options into, and what they register."""

from __future__ import annotations

import re

from pytest_gkd.job.sources import classes
from pytest_gkd.job.sources.files import Files, Schema, Source, SourceError, matching

CONFIG = "skyrl/train/config/config.py"
CODE = (
    rf"{CONFIG}|skyrl/train/config/sft_config\.py|skyrl/train/(?:entrypoints/)?main_\w+\.py"
    r"|skyrl_gym/.*|examples/.*|integrations/.*"
)
TAKES = re.compile(r"\b(?P<name>\w+)\.from_cli_overrides\((?:sys\.)?argv")
# make_config (skyrl/train/config/config.py) derives a class from each one passed to it.
MADE = re.compile(r"^(?P<name>\w+) = make_config\((?P<given>[^)]*)\)", re.MULTILINE)
GIVEN = re.compile(r"(\w+)_cls=(\w+)")
REGISTERS = {
    "estimators": re.compile(
        r"(?:register_advantage_estimator|AdvantageEstimatorRegistry\.register)"
        r"\(\"([\w+]+)\""
    ),
    "losses": re.compile(
        r"(?:register_policy_loss|PolicyLossRegistry\.register)\(\"([\w+]+)\""
    ),
}
ENUMS = {"estimators": "AdvantageEstimator", "losses": "PolicyLossType"}


def read(files: Files) -> Schema:
    """The classes, as classes.typed returns them, and what is registered by name.

    ``estimators`` and ``losses`` are keyed by the program module that registers them,
    SkyRL's own by an empty name.
    """
    if CONFIG not in files:
        raise SourceError(f"it has no {CONFIG}")
    found = classes.typed({n: made(t) for n, t in files.items()}, CODE, TAKES)
    own = "".join(matching(files, r".*/ppo_utils\.py").values())
    for key, pattern in REGISTERS.items():
        members = re.search(rf"^class {ENUMS[key]}\(.*\n((?: .*\n|\n)*)", own, re.M)
        names = re.findall(
            r"^    [A-Z_]+ = \"(.+)\"$", members[1] if members else "", re.M
        )
        found[key] = {"": names} | {
            classes.module(file): registered
            for file, text in matching(files, r"examples/.*").items()
            if (registered := pattern.findall(text))
        }
    return found


def made(text: str) -> str:
    """A program's text with the classes that make_config creates in it."""
    return MADE.sub(_class, text)


def _class(found: re.Match[str]) -> str:
    given = dict(GIVEN.findall(found["given"]))
    name, lines = found["name"], []
    base = ", ".join(("SkyRLTrainConfig", "TrainerConfig"))
    lines += [f"from skyrl.train.config.config import {base}"]
    if "algorithm" in given and "trainer" not in given:
        made = given["trainer"] = f"{name}Trainer"
        own = given["algorithm"]
        lines += ["@dataclass", f"class {made}(TrainerConfig):"]
        lines += [f"    algorithm: {own} = {own}()"]
    lines += ["@dataclass", f"class {name}(SkyRLTrainConfig):"]
    for section in ("trainer", "generator"):
        if own := given.get(section):
            lines += [f"    {section}: {own} = {own}()"]
    return "\n".join(lines)


def completed(schema: Schema, _release: str, _last: str, older: Schema) -> Schema:
    """Adds the examples of an older release, which an installed package lacks."""
    own = {
        key: {
            module: one
            for module, one in older[key].items()
            if module.startswith(("examples.", "integrations."))
        }
        for key in ("programs", *REGISTERS)
    }
    more = {key: {**own[key], **schema[key]} for key in own}
    return {**schema, **more, "classes": {**older["classes"], **schema["classes"]}}


SOURCE = Source(
    {
        "skyrl": (
            "skyrl/**/*.py",
            "examples/train*/**/*.py",
            "integrations/**/*.py",
        ),
        "skyrl_gym": ("skyrl_gym/envs/*/env.py",),
    },
    read,
    completed,
)
