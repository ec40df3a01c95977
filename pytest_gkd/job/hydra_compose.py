"""Hydra's defaults lists: which files make up a configuration, and in what order.

After hydra/_internal/defaults_list.py and hydra/core/default_element.py of hydra-core
1.3.2.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pytest_gkd.job.findings import CheckError
from pytest_gkd.job.omegaconf import Config
from pytest_gkd.job.overrides import Override
from pytest_gkd.job.shell_values import Text, Word

ENTRY = re.compile(
    r"(?P<flags>(?:(?:optional|override)\s+)*)(?P<group>[^@\s]+)(?:@(?P<package>\S*))?"
)
INTERPOLATION = re.compile(r"\$\{([\w/@.]+)\}")
HEADER = re.compile(r"\A(?:\s*(?:#.*)?\n)*?#\s*@package\s+(?P<package>\S+)")
SELF, GLOBAL, HERE = "_self_", "_global_", "_here_"
DEEPEST = 20
MOST_FILES = 500


class ConfigFile(NamedTuple):
    """A file: the package of its header or None, its defaults list, its settings."""

    package: str | None
    defaults: list[Any]
    settings: list[Override]


def config_file(text: str, settings: Iterable[Override]) -> ConfigFile:
    """A file, from its text and what documents.settings makes of that."""
    header = HEADER.match(text)
    settings = list(settings)
    said = next((s.value for s in settings if s.key == "defaults"), None)
    rest = [s for s in settings if s.key.partition(".")[0] not in ("defaults", "hydra")]
    defaults: list[Any] = said if isinstance(said, list) else []
    return ConfigFile(header["package"] if header else None, defaults, rest)


class _Entry(NamedTuple):
    """An entry of a defaults list; ``group`` is empty for a file of the same folder."""

    group: str
    package: str | None
    name: Any
    optional: bool = False
    override: bool = False


@dataclass
class Composer:
    """Composes files; ``load`` returns one by its path, None if there is none.

    ``choices`` are names by group and package from the command line, ``added`` what it
    adds. Afterwards ``missing`` are the paths that were not found, with the file that
    needs each, and the section that its keys would be in.
    """

    load: Callable[[str], ConfigFile | None]
    choices: dict[tuple[str, str], Any] = field(default_factory=dict)
    added: list[tuple[str, str, Any]] = field(default_factory=list)
    missing: list[tuple[str, str, str]] = field(default_factory=list)
    _chosen: dict[str, str] = field(default_factory=dict)
    _read: int = 0

    def composed(self, primary: str) -> Config:
        """The configuration of that name with everything in its defaults lists."""
        return Config(self.settings(primary))

    def settings(self, primary: str) -> Iterator[Override]:
        """Its settings in their order; the later of two for one key wins."""
        first = self.load(primary)
        if first is None:
            self.missing.append((primary, "", ""))
            return
        more = [_Entry(g, package, name) for g, package, name in self.added]
        yield from self._file(primary, first, "", 0, more)

    def _file(
        self,
        path: str,
        source: ConfigFile,
        package: str,
        depth: int,
        more: Iterable[_Entry] = (),
    ) -> Iterator[Override]:
        if depth > DEEPEST:
            raise _too_many(path)
        entries = [e for raw in source.defaults for e in _entries(raw)] + [*more]
        parent = posixpath.dirname(path)
        for entry in entries:
            if entry.override:
                key = _place(parent, package, entry)
                # The outermost one wins, and the command line over all.
                self.choices.setdefault(key, entry.name)
        if not any(entry.name == SELF and not entry.group for entry in entries):
            entries.append(_Entry("", None, SELF))
        for entry in entries:
            if entry.override:
                continue
            if entry.name == SELF and not entry.group:
                yield from _inside(source.settings, package)
            else:
                yield from self._entry(path, package, entry, depth)

    def _entry(
        self, path: str, package: str, entry: _Entry, depth: int
    ) -> Iterator[Override]:
        group, final = _place(posixpath.dirname(path), package, entry)
        name = entry.name
        if entry.group:
            name = self.choices.get((group, final), name)
            key = group if final == group.replace("/", ".") else f"{group}@{final}"
            if isinstance(name, str):
                name = INTERPOLATION.sub(lambda m: self._chosen.get(m[1], m[0]), name)
                self._chosen[key] = name
        for one in name if isinstance(name, list) else [name]:
            if one is None:
                continue
            wanted = posixpath.normpath(f"{group}/{one}" if group else str(one))
            wanted = wanted.removesuffix(".yaml").removesuffix(".yml")
            self._read += 1
            if self._read > MOST_FILES:
                raise _too_many(path)
            source = self.load(wanted)
            if source is None:
                if not entry.optional:
                    self.missing.append((wanted, path, final))
                continue
            here = final
            if source.package is not None and entry.package is None:
                header = source.package.replace("_group_", group.replace("/", "."))
                here = _joined(package, header)
            yield from self._file(wanted, source, here, depth + 1)


def _too_many(path: str) -> CheckError:
    return CheckError(
        f"{path}: its defaults name more files, or deeper, than are followed "
        f"({MOST_FILES}, {DEEPEST}); give a configuration whose defaults name fewer"
    )


def _entries(raw: Any) -> Iterator[_Entry]:
    """The entries of a line of a defaults list; none if Hydra would refuse it."""
    pairs = raw.items() if isinstance(raw, Mapping) else [(None, raw)]
    for key, name in pairs:
        found = ENTRY.fullmatch(str(name if key is None else key).strip())
        if found is None:
            continue
        flags = found["flags"].split()
        optional, override = "optional" in flags, "override" in flags
        if key is None:
            yield _Entry("", found["package"], found["group"], optional)
        else:
            yield _Entry(found["group"], found["package"], name, optional, override)


def _place(parent: str, package: str, entry: _Entry) -> tuple[str, str]:
    """The group that an entry belongs to, and the package that it goes to."""
    group = entry.group or posixpath.dirname(str(entry.name))
    is_absolute = group.startswith("/") or str(entry.name).startswith("/")
    own = entry.package
    if own is None:
        own = "" if not group else group.strip("/").replace("../", "").replace("/", ".")
    if own == HERE:
        own = ""
    if not entry.group:
        # The name includes the group.
        return ("" if is_absolute else parent), _joined(package, own)
    whole = group.lstrip("/") if is_absolute else posixpath.join(parent, group)
    return posixpath.normpath(whole), _joined(package, own)


def _joined(parent: str, package: str) -> str:
    """A package within that of its parent; _global_ is the top."""
    whole = f"{parent}.{package}".strip(".")
    before, marker, after = whole.rpartition(GLOBAL)
    return after.strip(".") if marker else before + after


def _inside(settings: Iterable[Override], package: str) -> Iterator[Override]:
    for setting in settings:
        key = f"{package}.{setting.key}" if package else setting.key
        yield setting._replace(key=key)


def recorded(one: Mapping[str, Any]) -> ConfigFile:
    """A file as a schema records it: ``package``, ``defaults`` and ``keys``."""
    settings = [
        Override("", key, value, frozenset(), Word(Text(key), "", 0, f"{key}: {value}"))
        for key, value in one["keys"].items()
    ]
    return ConfigFile(one["package"], one["defaults"], settings)
