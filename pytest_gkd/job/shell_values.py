"""What a shell script's words and variables are, as far as that is certain."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

# A private-use character for a part of a text that cannot be determined.
HOLE = "\ue000"
# Marks a line end that quoting removes from a quoted script.
JOINED = "\ue001"
# Nobody writes longer ones; this stops a script that doubles a variable in a loop.
LONGEST = 1 << 16
MOST_WORDS = 3_000
NOBODY: frozenset[str] = frozenset()


# The "file" of the variables that the user gives.
GIVEN = "--set"


@dataclass(frozen=True)
class Text:
    """A string, in whose ``shape`` a ``HOLE`` stands for each undetermined part.

    ``needs`` are then the variables, or the commands, that would determine them.
    """

    shape: str
    needs: frozenset[str] = NOBODY

    @property
    def value(self) -> str | None:
        """The string, None if it cannot be determined."""
        return None if self.needs else self.shape

    def __add__(self, other: Text) -> Text:
        if len(self.shape) + len(other.shape) > LONGEST:
            return unknown("a text of more than 64 KiB")
        return Text(self.shape + other.shape, self.needs | other.needs)


EMPTY = Text("")


def unknown(*needs: str) -> Text:
    """A wholly undetermined text, with at least one thing that would determine it."""
    return Text(HOLE, frozenset(needs))


def concatenated(parts: Iterable[Text]) -> Text:
    """The texts, concatenated."""
    whole = EMPTY
    for part in parts:
        whole += part
    return whole


class Word(NamedTuple):
    """A word as a command gets it, and where it was written: file, line, expression."""

    text: Text
    file: str
    line: int
    source: str


class Source(NamedTuple):
    """A text that is read, and its origin.

    ``lines`` are offsets in it with the line that begins there, for a text within
    another; ``needs`` are then what would determine the ``HOLE``s in it. ``path`` is
    its own path as it sees it, if that is not ``file``.
    """

    text: bytes
    file: str
    lines: tuple[tuple[int, int], ...] = ()
    needs: frozenset[str] = NOBODY
    path: Text | None = None

    def line(self, row: int, offset: int) -> int:
        """The line in the file, from the row and the offset in this text."""
        if not self.lines:
            return row + 1
        return self.lines[bisect.bisect(self.lines, (offset, LONGEST)) - 1][1]


class Condition(NamedTuple):
    """A branch that was taken or skipped without knowing whether bash would take it."""

    text: str
    file: str
    line: int
    holds: bool
    needs: frozenset[str]

    def __str__(self) -> str:
        if self.holds:
            return f"if {self.text} (line {self.line})"
        return f"unless {self.text} (line {self.line})"


class Command(NamedTuple):
    """A command that bash would start.

    ``environment`` are the variables that the script sets for it: exported, before the
    command, or after ``env``. What else it may inherit is not known. ``waits`` is
    whether the script waits for it to end, as without ``&``.
    """

    words: tuple[Word, ...]
    file: str
    line: int
    environment: Mapping[str, Word] = {}
    waits: bool = True


@dataclass(frozen=True)
class World:
    """The state of a script on one path through its branches.

    ``jump`` is break, continue or return while that is pending, exit at the end.
    ``trace`` represents the words and environments of all ``commands``, for comparing
    worlds; ``functions`` are a body and its source by name. ``exports`` is whether
    every variable set from now on is exported (``set -a``). ``written`` are the scripts
    that it has written itself, None if their text is unknown.
    """

    variables: dict[str, tuple[Word, ...]] = field(default_factory=dict)
    arrays: frozenset[str] = NOBODY
    exported: frozenset[str] = NOBODY
    exports: bool = False
    unset: frozenset[str] = NOBODY
    local: frozenset[str] = NOBODY
    functions: dict[str, Any] = field(default_factory=dict)
    commands: tuple[Command, ...] = ()
    conditions: tuple[Condition, ...] = ()
    arguments: tuple[Word, ...] = ()
    directory: Text = EMPTY
    written: dict[str, Source | None] = field(default_factory=dict)
    jump: str = ""
    trace: int = 0

    def with_variable(
        self, name: str, words: tuple[Word, ...], *, array: bool
    ) -> World:
        """The same, except for one variable."""
        if len(words) > MOST_WORDS:
            last = words[-1]
            text = unknown(f"an array of more than {MOST_WORDS} words")
            words = (last._replace(text=text),)
        arrays = self.arrays | {name} if array else self.arrays - {name}
        return replace(
            self,
            variables={**self.variables, name: words},
            arrays=arrays,
            exported=self.exported | {name} if self.exports else self.exported,
            unset=self.unset - {name},
        )

    def without_variables(self, names: Iterable[str]) -> World:
        """The same, with variables unset."""
        gone = frozenset(names)
        variables = {n: v for n, v in self.variables.items() if n not in gone}
        return replace(
            self,
            variables=variables,
            arrays=self.arrays - gone,
            exported=self.exported - gone,
            unset=self.unset | gone,
        )

    def exporting(self, names: Iterable[str]) -> World:
        """The same, with variables that commands see from now on."""
        return replace(self, exported=self.exported.union(names))

    def environment(self) -> dict[str, Word]:
        """A command's environment; bash does not export arrays."""
        names = sorted(self.exported & self.variables.keys() - self.arrays)
        return {name: self.variables[name][0] for name in names}

    def with_command(self, command: Command) -> World:
        """The same, after one more command."""
        words = tuple(word.text for word in command.words)
        given = tuple((name, word.text) for name, word in command.environment.items())
        trace = hash((self.trace, words, given))
        return replace(self, commands=(*self.commands, command), trace=trace)

    def back_in(self, outer: World) -> World:
        """The world after a subshell: its commands are kept, its variables are not."""
        return replace(
            outer,
            commands=self.commands,
            conditions=self.conditions,
            written=self.written,
            trace=self.trace,
        )

    def back_from(self, outer: World) -> World:
        """The world after a function, without its arguments and locals."""
        jump = "" if self.jump == "return" else self.jump
        world = replace(self, arguments=outer.arguments, local=outer.local, jump=jump)
        for name in self.local:
            if name in outer.variables:
                is_array = name in outer.arrays
                world = world.with_variable(name, outer.variables[name], array=is_array)
            else:
                world = world.without_variables([name])
                world = replace(world, unset=outer.unset)
        exported = (world.exported - self.local) | (outer.exported & self.local)
        return replace(world, exported=exported)

    def keeping(self, outer: World, inner: World) -> World:
        """The world after a call with variables before it, which are restored."""
        world = self
        for name in inner.variables:
            if inner.variables[name] is not outer.variables.get(name):
                if name not in outer.exported:
                    world = replace(world, exported=world.exported - {name})
                if name in outer.variables:
                    old, is_array = outer.variables[name], name in outer.arrays
                    world = world.with_variable(name, old, array=is_array)
                else:
                    world = world.without_variables([name])
        return replace(world, unset=outer.unset)

    def is_like(self, other: World) -> bool:
        """Whether the two differ only in the path that led here."""
        return self.trace == other.trace and self.holds_as(other)

    def holds_as(self, other: World) -> bool:
        """Whether the two differ only in that and in the commands that were started."""
        return (
            self.jump == other.jump
            and self.variables == other.variables
            and self.arguments == other.arguments
            and self.arrays == other.arrays
            and self.exported == other.exported
            and self.exports == other.exports
            and self.unset == other.unset
            and self.local == other.local
            and self.functions == other.functions
            and self.directory == other.directory
            and self.written == other.written
        )


def merged(worlds: Iterable[World]) -> list[World]:
    """The distinct worlds; equal ones become one with the conditions they share."""
    found: list[World] = []
    for world in worlds:
        for number, other in enumerate(found):
            if world.is_like(other):
                pairs = zip(world.conditions, other.conditions, strict=False)
                shared = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
                found[number] = replace(
                    other, conditions=tuple(pair[0] for pair in shared)
                )
                break
        else:
            found.append(world)
    return found
