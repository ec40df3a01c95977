"""Checks prime-rl's configuration against its classes, as recorded for a release."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

from pytest_gkd.job import pydantic_types
from pytest_gkd.job.arguments import MISSING, UNKNOWN
from pytest_gkd.job.findings import Finding
from pytest_gkd.job.overrides import Given
from pytest_gkd.job.shell_values import Word
from pytest_gkd.options import near

MOST_TOLD = 40
MOST_MEMBERS = 200
# Variables that the launcher sets itself (configs/shared.py, PROTECTED_ENV_VARS).
PROTECTED = {
    *("CUDA_VISIBLE_DEVICES", "PRL_RUN_ID", "PRL_RUN_NAME", "WANDB_RUN_ID"),
    *("WANDB_SHARED_MODE", "WANDB_SHARED_LABEL", "WANDB_SHARED_PRIMARY"),
    "WANDB_SHARED_FINISHER",
}


# Validators of whole sections whose effect is known (559b4477).
FOLLOWED = {
    *("_resolve_env", "parse_extra_values", "auto_setup_shared_configs"),
    *("normalize_deployment", "propagate_model_to_inference"),
}


class Uncertain(NamedTuple):
    """A value that depends on something that is not known."""

    needs: frozenset[str]


class Settings:
    """What the user gave: tables, lists and values, each with the word it is from."""

    def __init__(self) -> None:
        self.tree: dict[str, Any] = {}
        self.words: dict[str, Word] = {}

    def merge(self, tree: Mapping[str, Any], words: Mapping[str, Word]) -> None:
        """Tables are merged, all else is replaced (pydantic_config 0.4.3, _deep_merge).

        ``words`` are by the dotted keys of what is in ``tree``.
        """
        _join(self.tree, tree)
        self.words |= words

    def put(self, key: str, value: Any, word: Word | None) -> None:
        """Set one key, replacing what was there; a section's place is its first key."""
        above = key
        while word and (above := above.rpartition(".")[0]):
            self.words.setdefault(above, word)
        for name in reversed(key.split(".")):
            value = {name: value}
        self.merge(value, {key: word} if word else {})

    def get(self, key: str) -> Any:
        """What is given under a key; None if nothing is."""
        value: Any = self.tree
        for name in key.split("."):
            if isinstance(value, list) and name.isdigit() and int(name) < len(value):
                value = value[int(name)]
            elif isinstance(value, dict):
                value = value.get(name)
            else:
                return None
        return value

    def word(self, key: str) -> Word | None:
        """Where a key is given, or else the section that it is in."""
        while key and key not in self.words:
            key = key.rpartition(".")[0]
        return self.words.get(key)


def _join(base: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict):
            own = base.get(key)
            base[key] = own if isinstance(own, dict) else {}
            _join(base[key], value)
        else:
            base[key] = value


class Classes:
    """The recorded classes of a release."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._classes = schema["classes"]
        self.checks = frozenset(schema["checks"])

    def fields(self, name: str) -> dict[str, str]:
        """The fields of a class, including those of its bases."""
        found: dict[str, str] = {}
        for base in self._classes[name]["bases"]:
            found |= self.fields(base)
        own: dict[str, str] = self._classes[name]["fields"]
        return found | own

    def renaming(self, name: str) -> set[str]:
        """Validators of a class that may accept keys that it has no field for."""
        found = {
            one for base in self._classes[name]["bases"] for one in self.renaming(base)
        }
        return found | set(self._classes[name].get("before", ())) - FOLLOWED

    def folded(self, above: str, name: str) -> dict[str, str]:
        """Fields that a class accepts on behalf of one of its sections, if the class
        above folds them there (0.6's fold_student_shortcuts).
        """
        found: dict[str, str] = {}
        for own in self._classes[above].get("folds", ()):
            texts = self.fields(name).values()
            if any(own in self.of(pydantic_types.read(text)[0]) for text in texts):
                found |= self.fields(own)
        return found

    def canonical(self, name: str, key: str) -> str:
        """The field that a key of a class refers to."""
        return str(self._classes[name].get("aliases", {}).get(key, key))

    def takes_any(self, name: str) -> bool:
        """Whether a class accepts keys that it has no field for."""
        return bool(self._classes[name].get("any"))

    def of(self, node: ast.expr) -> list[str]:
        """The recorded classes that a type accepts."""
        names = map(ast.unparse, pydantic_types.members(node))
        return [name for name in names if name in self._classes]

    def within(self, node: ast.expr) -> list[str]:
        """The classes that are the values of a list or of a mapping."""
        for one in pydantic_types.members(node):
            if isinstance(one, ast.Subscript):
                parts = one.slice
                last = parts.elts[-1] if isinstance(parts, ast.Tuple) else parts
                if ast.unparse(one.value) in ("list", "dict"):
                    return self.of(last)
        return []

    def default(self, value: ast.expr | None) -> str:
        """The class of a default; empty if that is not a class."""
        value = value.body if isinstance(value, ast.Lambda) else value
        if isinstance(value, ast.Call):
            name = ast.unparse(value.func)
            return name if name in self._classes else ""
        return ""

    def tags(self, name: str) -> list[Any]:
        """The values of ``type`` that select this class."""
        node, _ = pydantic_types.read(self.fields(name).get("type", "Any"))
        parts = getattr(node, "slice", None)
        return [parts.value] if isinstance(parts, ast.Constant) else []

    def knows(self, name: str, key: str) -> bool:
        """Whether a class, with its sections, has the key or accepts any."""
        names = [name]
        for part in key.split("."):
            if any(map(self.takes_any, names)):
                return True
            fields = [self.fields(one) for one in names]
            nodes = [pydantic_types.read(f[part])[0] for f in fields if part in f]
            if not nodes:
                return False
            names = [one for n in nodes for one in (*self.of(n), *self.within(n))]
        return True

    def meant(self, text: str, value: Mapping[str, Any]) -> tuple[str, str]:
        """The class of a table, or why it has none.

        pydantic_config 0.4.3, _default_discriminator_types: without a type it is the
        default's class.
        """
        node, default = pydantic_types.read(text)
        names = self.of(node)
        if len(names) < 2:
            return (names or [""])[0], ""
        known = ", ".join(str(tag) for name in names for tag in self.tags(name))
        if "type" not in value:
            name = self.default(default) if isinstance(default, ast.Call) else ""
            return name, "" if name else f"needs a type: {known}"
        kind = value["type"]
        for name in names:
            if kind in self.tags(name):
                return name, ""
        if isinstance(kind, Uncertain):
            return "", ""
        return "", f"has the type {kind!r}; known values are {known}"

    def find(self, settings: Settings, top: str, key: str) -> Given | None:
        """A value, given or the class's default; None in a section that does not exist.

        The value of a section is what is given in it. A number in ``key`` is the index
        of a table in a list.
        """
        name, is_given, text = top, True, ""
        value: Any = settings.tree
        inner: list[str] = []
        for part in key.split("."):
            if isinstance(value, Uncertain):
                break
            if value is None or value == "None":
                return None
            if not isinstance(value, dict | list):  # of a wrong type, which is reported
                return Given("undetermined", needs=frozenset({key}))
            if inner and not name:
                value = value[int(part)] if isinstance(value, list) else value[part]
                name, inner = inner[0] if len(inner) == 1 else "", []
                continue
            text = self.fields(name).get(part, "") if name else ""
            node, default = pydantic_types.read(text or "Any")
            inner = self.within(node)
            if isinstance(value, dict) and part in value:
                value = value[part]
            elif not text or not (is_constant(default) or self.default(default)):
                return None
            else:
                is_given = False
                value = default.value if isinstance(default, ast.Constant) else {}
            name = ""
            if isinstance(value, dict) and text:
                name = "" if is_given else self.default(default)
                name = name or self.meant(text, value)[0]
        value = None if value == "None" else value
        word = settings.word(key) if is_given else None
        if isinstance(value, Uncertain):
            return Given("undetermined", None, word, value.needs)
        value = converted(text or "int | float | bool | str", value)
        return Given("user" if is_given else "default", value, word)


def is_constant(node: ast.expr | None) -> bool:
    """Whether a default is a plain value."""
    return isinstance(node, ast.Constant) and node.value is not ...


def converted(text: str, value: Any) -> Any:
    """A text of the command line converted to its field's type, as pydantic does."""
    if not isinstance(value, str):
        return value
    kinds = [ast.unparse(one) for one in pydantic_types.members(_node(text))]
    if "bool" in kinds and value.lower() in pydantic_types.TRUTHS:
        return value.lower() in pydantic_types.TRUTHS[6:]
    for kind, convert in (("int", int), ("float", float)):
        if kind in kinds:
            try:
                return convert(value)
            except ValueError:
                continue
    return value


def _node(text: str) -> ast.expr:
    return pydantic_types.read(text)[0]


class Judge:
    """One pass over a configuration; ``sections`` are its tables with their class.

    ``whose`` names the release in messages.
    """

    def __init__(self, settings: Settings, classes: Classes, whose: str) -> None:
        self._settings, self._classes, self._whose = settings, classes, whose
        self.sections: list[tuple[str, str]] = []
        self._told = 0

    def section(
        self,
        name: str,
        value: Mapping[str, Any],
        key: str = "",
        above: str = "",
    ) -> Iterator[Finding]:
        """Check a table of a class: unknown keys, types, bounds, missing keys.

        ``above`` is the class of the table that it is in.
        """
        self.sections.append((name, key))
        fields = self._classes.fields(name)
        folded = self._classes.folded(above, name) if above else {}
        given = {self._classes.canonical(name, part): part for part in value}
        for field, part in given.items():
            whole = f"{key}.{part}" if key else part
            if field in fields:
                yield from self._field(fields[field], value[part], whole, name)
            elif field in folded:
                yield from self._field(folded[field], value[part], whole, name)
            elif not self._classes.takes_any(name):
                renaming = self._classes.renaming(name)
                yield from self._unknown(whole, fields, renaming)
        for field, text in fields.items():
            whole = f"{key}.{field}" if key else field
            default = pydantic_types.read(text)[1]
            if field not in given and default is None:
                line = f"{self._whose} refuses a configuration without {whole}"
                yield self._finding(MISSING, line, whole)

    def _field(
        self, text: str, value: Any, key: str, above: str = ""
    ) -> Iterator[Finding]:
        node = _node(text)
        if value == "None":  # pydantic_config 0.4.3, _none_str_to_none
            value = None
        if isinstance(value, Uncertain):
            return
        classes, inner = self._classes.of(node), self._classes.within(node)
        if isinstance(value, dict) and classes:
            name, problem = self._classes.meant(text, value)
            if problem:
                line = f"{key} {problem}; {self._whose} refuses it"
                yield self._finding(UNKNOWN, line, key)
            elif name:
                yield from self.section(name, value, key, above)
            return
        for part, one in _members(value) if inner else ():
            if isinstance(one, dict):
                name, problem = self._classes.meant(f"{' | '.join(inner)}", one)
                if name:
                    yield from self.section(name, one, f"{key}.{part}")
        if "reject_protected_env_vars" in text and isinstance(value, dict):
            for variable in sorted(PROTECTED & value.keys()):
                line = f"{key} sets {variable}, which the launcher of prime-rl sets"
                yield self._finding(UNKNOWN, line, f"{key}.{variable}")
        is_class = bool(classes) and not isinstance(value, dict | list)
        others = [one for one in pydantic_types.members(node) if not self._is(one)]
        # A validator may convert it first.
        fits = "BeforeValidator" in text or (
            any(pydantic_types.fits(one, value) for one in others)
            if is_class
            else pydantic_types.fits(node, value)
        )
        shown = f"{key}: {value!r}"[:200]
        expected = text.partition(" = ")[0].replace("__at__", " of ")
        if not fits:
            line = f"{shown}; {self._whose} expects {expected[:200]}"
            yield self._finding(UNKNOWN, line, key)
        elif problem := pydantic_types.out_of_bounds(node, converted(text, value)):
            line = f"{shown}; {self._whose} expects {problem}"
            yield self._finding(UNKNOWN, line, key)

    def _is(self, node: ast.expr) -> bool:
        return bool(self._classes.of(node))

    def _unknown(
        self, key: str, fields: Mapping[str, str], renaming: Iterable[str]
    ) -> Iterator[Finding]:
        self._told += 1
        if self._told <= MOST_TOLD:
            hint = near(key.rpartition(".")[2].replace("-", "_"), fields)
            names = ", ".join(sorted(renaming))
            may_be = f", and whether its {names} reads it is not known" if names else ""
            text = f"{self._whose} has no key {key}{may_be}{hint}"
            level = "warning" if names else "error"
            yield self._finding(UNKNOWN, text, key, level)

    def _finding(
        self, cause: str, text: str, key: str, level: str = "error"
    ) -> Finding:
        word = self._settings.word(key)
        file, line = (word.file, word.line) if word else ("", 0)
        return Finding(cause, level, text, file, line, key)


def _members(value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, list):
        value = {str(number): one for number, one in enumerate(value[:MOST_MEMBERS])}
    return islice(value.items(), MOST_MEMBERS) if isinstance(value, dict) else ()
