"""Checks NeMo-RL's configuration against its classes, as recorded for a release."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from pytest_gkd.job import pydantic_types
from pytest_gkd.job.arguments import MISSING, MOST_NEAR, UNKNOWN
from pytest_gkd.job.findings import Finding
from pytest_gkd.job.omegaconf import MISSING as STILL_TO_BE_GIVEN
from pytest_gkd.job.omegaconf import Config, UnresolvedError, flat
from pytest_gkd.job.overrides import Given, Override
from pytest_gkd.job.releases import Release
from pytest_gkd.job.shell_values import NOBODY, Text, Word
from pytest_gkd.options import near

MOST_TOLD = 40
# Sections passed on unchanged: to a dataset, an environment, another library, or merged
# over the policy's (models/generation/megatron/config.py).
FREE = re.compile(
    r"env\..*|data\.(?:train|validation|default)\..*|.*\b\w*kwargs\..*"
    r"|.*\.(?:mcore_generation_config|default_teacher_cfg|teacher_overrides)\..*"
)


def judged(
    config: Config, algorithm: str, schema: Mapping[str, Any], release: Release
) -> Iterator[Finding]:
    """Keys that nothing reads, values of a wrong type, and what is still to be
    given.
    """
    name = _master(config, algorithm, schema)
    if name:
        yield from _Judge(config, schema, release).section(name, "", is_held=True)
    for setting in config.settings.values():
        if setting.value == STILL_TO_BE_GIVEN:
            text = f"{setting.key} is {STILL_TO_BE_GIVEN}: it is still to be given"
            word = setting.word
            yield Finding(MISSING, "error", text, word.file, word.line, setting.key)


def default(key: str, algorithm: str, schema: Mapping[str, Any]) -> Given | None:
    """The class's default for a key that the configuration does not have."""
    name = _masters(schema).get(algorithm, "")
    *above, last = key.split(".")
    for part in above:
        classes = _classes(schema, _fields(schema, name).get(part, ""))
        name = classes[0] if classes else ""
    _, value = pydantic_types.read(_fields(schema, name).get(last, "Any"))
    return Given("default", value.value) if isinstance(value, ast.Constant) else None


def _masters(schema: Mapping[str, Any]) -> dict[str, str]:
    return dict(schema.get("masters", {}))


def _master(config: Config, algorithm: str, schema: Mapping[str, Any]) -> str:
    several = "xtoken_off_policy_distillation"
    is_several = algorithm == "distillation" and config.has("teachers")
    return _masters(schema).get(several if is_several else algorithm, "")


def _fields(schema: Mapping[str, Any], name: str) -> dict[str, str]:
    """The fields of a class, including those of its bases."""
    found = schema.get("classes", {}).get(name)
    if found is None:
        return {}
    inherited: dict[str, str] = {}
    for base in found["bases"]:
        inherited |= _fields(schema, base)
    fields: dict[str, str] = found["fields"]
    return inherited | fields


def _classes(schema: Mapping[str, Any], text: str) -> list[str]:
    """The recorded classes that an annotation accepts."""
    if not text:
        return []
    return [part for part in _members(text) if part in schema["classes"]]


@cache
def _members(text: str) -> tuple[str, ...]:
    """The types that an annotation accepts, by name."""
    parts = map(ast.unparse, pydantic_types.members(pydantic_types.read(text)[0]))
    return tuple(part.replace("__at__", "@") for part in parts)


@cache
def _shipped(release: Release) -> Config:
    """The keys of all configurations that a release ships."""
    trees = release.schema["configs"].values()
    keys = {key for tree in trees for key, _ in flat(tree)}
    # The teacher is configured like the policy.
    alike = {f"teacher{k[6:]}" for k in keys if k.startswith("policy.")}
    return Config(_settings(keys | alike))


class _Judge:
    """One pass over a configuration."""

    def __init__(
        self, config: Config, schema: Mapping[str, Any], release: Release
    ) -> None:
        self.config, self.schema, self.release = config, schema, release
        self.shipped = _shipped(release)
        self.told = self._looked = 0

    def section(self, name: str, key: str, *, is_held: bool) -> Iterator[Finding]:
        """Check a section of a class; ``is_held`` is whether pydantic checks it."""
        fields = _fields(self.schema, name)
        is_held = is_held and self.schema["validates"]
        more = self._derived(name)
        for part in self.config.below(key):
            whole = f"{key}.{part}" if key else part
            if part in fields:
                yield from self._field(fields[part], whole, is_held=is_held)
            elif part in more:
                yield from self._field(more[part], whole, is_held=False)
            else:
                is_closed = is_held and self.schema["classes"][name].get(
                    "closed", False
                )
                yield from self._unknown(whole, [*fields, *more], is_closed)
        for part, text in fields.items():
            whole = f"{key}.{part}" if key else part
            if is_held and not self.config.has(whole) and _is_required(text):
                line = f"NeMo-RL {self.release} refuses a configuration without {whole}"
                yield self._finding(MISSING, "error", f"{line} ({text})", whole)

    def _derived(self, name: str) -> dict[str, str]:
        """The fields of the classes derived from this one: what an engine adds."""
        found: dict[str, str] = {}
        for other, known in self.schema["classes"].items():
            if name in known["bases"]:
                found |= known["fields"] | self._derived(other)
        return found

    def _field(self, text: str, key: str, *, is_held: bool) -> Iterator[Finding]:
        node, _ = pydantic_types.read(text)
        classes = _classes(self.schema, text)
        if self.config.is_section(key):
            if classes:
                name, is_on = self._meant(classes, key)
                yield from self.section(name, key, is_held=is_held and is_on)
            elif is_held and not pydantic_types.fits(node, {}):
                line = f"{key} is a section; NeMo-RL {self.release} expects {text}"
                yield self._finding(UNKNOWN, "error", line, key)
            return
        try:
            given = self.config.value(key)
        except UnresolvedError:
            return  # already reported
        if given is None or given.needs or given.value == STILL_TO_BE_GIVEN:
            return
        if is_held and not pydantic_types.fits(node, given.value):
            shown = f"{key}: {given.value!r}"[:200]
            line = f"{shown}; NeMo-RL {self.release} expects {text.partition(' = ')[0]}"
            yield self._finding(UNKNOWN, "error", line, key)

    def _meant(self, classes: list[str], key: str) -> tuple[str, bool]:
        """Which class of a union a section has, and whether pydantic checks its fields.

        A disabled section has its own class, which accepts everything that would matter
        if it were enabled.
        """
        try:
            given = self.config.value(f"{key}.enabled")
        except UnresolvedError:
            given = None
        if len(classes) > 1 and given and not given.needs:
            return classes[0], bool(given.value)
        return classes[0], len(classes) == 1

    def _unknown(
        self, key: str, known: list[str], is_closed: bool
    ) -> Iterator[Finding]:
        above, _, name = key.rpartition(".")
        is_read = self.shipped.has(key) or name in self.schema["reads"]
        if not is_closed and (is_read or FREE.fullmatch(key)):
            return
        # A user's own top-level section may exist to be referred to.
        self._looked += not above
        if not above and (self._looked > MOST_NEAR or near(name, known) == "."):
            return
        self.told += 1
        if self.told > MOST_TOLD:
            return
        if is_closed:
            text = f"NeMo-RL {self.release} refuses the key {key}"
        else:
            text = f"NeMo-RL {self.release} takes the key {key}, and nothing reads it"
        places = [k for k in self.shipped.settings if k.endswith(f".{name}")]
        same = [k for k in places if k.partition(".")[0] == key.partition(".")[0]]
        if same:
            text += f"; it is read as {' or '.join(same[:2])}"
        else:
            siblings = [*known, *self.shipped.below(above)]
            text += near(name, dict.fromkeys(siblings))
        yield self._finding(UNKNOWN, "error" if is_closed else "warning", text, key)

    def _finding(self, cause: str, level: str, text: str, key: str) -> Finding:
        start = f"{key}."
        some = (
            s
            for k, s in self.config.settings.items()
            if k == key or k.startswith(start)
        )
        setting = next(some, None)
        file, line = (setting.word.file, setting.word.line) if setting else ("", 0)
        return Finding(cause, level, text, file, line, key)


def _settings(keys: Iterable[str]) -> Iterator[Override]:
    for key in sorted(keys):
        yield Override("", key, None, NOBODY, Word(Text(key), "", 0, key))


def _is_required(text: str) -> bool:
    _, value = pydantic_types.read(text)
    return value is None and not text.startswith("NotRequired")
