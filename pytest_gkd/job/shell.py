"""Reads a bash script: which commands it would start, and with which words.

Nothing of it is executed. What only execution could tell (a program's output, a
variable expected from outside, whether a file exists) is undetermined; if a branch
depends on it, both ways are followed.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from tree_sitter import Node, Parser

from pytest_gkd.job import script_file, shell_within
from pytest_gkd.job.shell_values import (
    EMPTY,
    GIVEN,
    HOLE,
    NOBODY,
    Command,
    Condition,
    Source,
    Text,
    Word,
    World,
    concatenated,
    merged,
    unknown,
)
from pytest_gkd.job.shell_words import BASH, NAME, Words, calculated, matches

# At most this many paths through undetermined branches are followed.
MOST_WORLDS = 16
MOST_ROUNDS = 256
MOST_STEPS = 10_000
# Five times as many as in any of 1,529 upstream scripts; the parser takes kilobytes for
# each nested one.
MOST_SIGNS = 10_000
MOST_DOCUMENTS = 500
SIGNS = re.compile(rb"[|&;<>(){}`]")
# Depth of functions calling functions, and files sourcing files.
DEEPEST = 16
SETS = re.compile(r"\$\{(\w+):?=")
NAMED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL | re.ASCII)
# set's flags that start exporting whatever is set from then on, and that stop it.
SHORT = {"-": re.compile(r"-[a-zA-Z]*a[a-zA-Z]*"), "+": re.compile(r"\+[a-zA-Z]*a\w*")}
ASSIGNS = re.compile(r"(?:[-+*/%]|\*\*)?=")
# declare's flags that change what an assignment means: -i, -l, -n, -u.
CHANGING = re.compile(r"[-+][a-zA-Z]*[ilnu][a-zA-Z]*")
# An option or a Hydra key: bash takes it at the start of a line for a command's name.
READ_WHOLE = re.compile(
    r"read\s+(?:(?:-r\s+)?-d|-rd)\s+(?:''|\"\")\s+([A-Za-z_]\w*)", re.ASCII
)
OPTION = re.compile(
    r"--?[A-Za-z][\w-]*(?:=.*)?|\+{0,2}[A-Za-z_]\w*(?:\.\w+)+=.*", re.DOTALL
)
SILENT = {
    *(
        "shopt",
        "trap",
        "wait",
        "sleep",
        "ulimit",
        "umask",
        ":",
        "true",
        "false",
        "test",
    ),
    *("echo", "mkdir", "ls", "date", "type", "hash", "kill", "pkill", "[", "popd"),
}
PREFIXES = {"time", "command", "builtin", "exec"}
# In a loop's condition: read NAME, NAME++, NAME = 1.
CHANGED = re.compile(
    r"\bread\s+(?:-\w+\s+)*(\w+)|(\w+)\s*(?:\+\+|--|[-+*/%]?=(?!=))|(?:\+\+|--)(\w+)"
)
CLAUSES = ("elif_clause", "else_clause")
TESTS = ("test_command", "compound_statement")
RUNS = ("command", "pipeline", "list")
WRITES = (">", ">|", ">>", "&>")
DOCUMENT = "heredoc_body"


class Input(NamedTuple):
    """What a command gets on its standard input: a text with its place, or a file."""

    node: int
    text: Text
    file: str
    line: int
    is_name: bool = False


@dataclass
class Script:
    """What was read: a world for each path that the script may take, and remarks.

    A remark is a file, a line, and what could not be followed there. ``is_whole`` is
    False if the script was not followed to its end. ``lost`` are lines that bash takes
    for separate commands though they look like options. ``text`` is all that was read,
    other files included.
    """

    worlds: list[World]
    remarks: list[tuple[str, int, str]] = field(default_factory=list)
    lost: list[tuple[str, int, str]] = field(default_factory=list)
    is_whole: bool = True
    text: str = ""


def read(
    path: Path, given: Mapping[str, str], arguments: Iterable[str] = (), text: str = ""
) -> Script:
    """Read the script at ``path``, or its ``text`` if that is given.

    ``given`` are variables set beforehand, ``arguments`` its own ("$@"). Raises OSError
    if it cannot be read, RecursionError if it is nested too deep.
    """
    reader = _Reader(path)
    words = tuple(Word(Text(a), "the command line", 0, a) for a in arguments)
    first = World(
        variables={n: (Word(Text(v), GIVEN, 0, v),) for n, v in given.items()},
        exported=frozenset(given),
        arguments=words,
    )
    source = Source(text.encode() or path.read_bytes(), str(path))
    reader.started = [(str(path.absolute()), tuple(word.text for word in words))]
    worlds = reader.source(source, [first])
    read = b"\n".join(reader.texts).decode("utf-8", "replace")
    return Script(worlds, reader.remarks, reader.lost, reader.is_whole, read)


class _Reader(Words):
    """Follows a script statement by statement, in all worlds at once."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), str(Path.cwd()))
        self.remarks: list[tuple[str, int, str]] = []
        self.lost: list[tuple[str, int, str]] = []
        self.is_whole = True
        self.texts: list[bytes] = []
        self._depth = 0
        self._sourced_bytes = 0  # over all files
        # Files, with their arguments, that are still being followed.
        self.started: list[tuple[str, tuple[Text, ...]]] = []
        self._input: Input | None = None
        self._waits = True

    def source(self, source: Source, worlds: list[World]) -> list[World]:
        """Follow a script, in all worlds."""
        outer = self._here
        self._here = source._replace(text=source.text.replace(b"\r\n", b"\n"))
        if not source.lines and source.text not in self.texts:
            self.texts.append(source.text)
        self._depth += 1
        try:
            signs, documents = (
                len(SIGNS.findall(self._source)),
                self._source.count(b"<<"),
            )
            if signs > MOST_SIGNS or documents > MOST_DOCUMENTS:
                self.is_whole = False
                said = f"more than {MOST_SIGNS:,} of |&;<>(){{}}`, or {MOST_DOCUMENTS} "
                said += "here-documents, are in it: it is not read"
                self.remarks.append((self._file, 1, said))
                return worlds
            root = Parser(BASH).parse(self._source).root_node
            if root.has_error and b"$(((" in self._source:
                # The parser does not know this in ${x:-$(((1 + 2) * 3))}; bash does:
                mended = self._source.replace(b"$(((", b"$(( (")
                self._here = self._here._replace(text=mended)
                root = Parser(BASH).parse(self._source).root_node
            if root.has_error:
                self._note_errors(root)
            return self._body(root, worlds)
        finally:
            self._depth -= 1
            self._here = outer

    def _note_errors(self, node: Node) -> None:
        for child in node.children:
            if child.type == "ERROR" or child.is_missing:
                self._remark(child, "this could not be parsed as bash")
            elif child.has_error:
                self._note_errors(child)

    def _remark(self, node: Node, text: str) -> None:
        remark = (self._file, self._line(node), text)
        if remark not in self.remarks[-50:]:
            self.remarks.append(remark)

    def _give_up(self, node: Node, text: str) -> None:
        self.is_whole = False
        self._remark(node, text)

    # -- statements ------------------------------------------------------------------

    def _body(self, node: Node, worlds: list[World]) -> list[World]:
        """All statements of a block, in order."""
        children = node.children
        # A node's next_sibling scans all of its siblings.
        for child, after in zip(children, [*children[1:], None], strict=False):
            if not child.is_named:
                continue
            if after is not None and after.type == "&":  # runs in a subshell
                worlds = [
                    inside.back_in(world)
                    for world in worlds
                    for inside in self._statement(child, [world], begun=True)
                ]
            else:
                worlds = self._statement(child, worlds, begun=False)
        return worlds

    def _statement(
        self, node: Node, worlds: list[World], *, begun: bool | None = None
    ) -> list[World]:
        """``begun`` is whether an & follows; None if the caller has not looked."""
        going = [world for world in worlds if not world.jump]
        follow = getattr(self, f"_do_{node.type}", None)
        if follow is None or not going:
            return worlds
        self._steps += len(going)
        if self._steps > MOST_STEPS:
            self._give_up(node, "the script does more than is followed; no further")
            return worlds
        outer = self._waits
        if begun is None:
            after = node.next_sibling
            begun = after is not None and after.type == "&"
        self._waits = outer and not begun
        found = merged(new for world in going for new in follow(node, world))
        self._waits = outer
        if len(found) > MOST_WORLDS:
            self._give_up(node, "more paths lead here than are followed")
            found = found[:MOST_WORLDS]
        rest = merged(world for world in worlds if world.jump)
        return [*found, *rest[:MOST_WORLDS]]

    def _do_variable_assignment(self, node: Node, world: World) -> list[World]:
        return [self._assign(node, self._assigned(node, world))]

    def _do_variable_assignments(self, node: Node, world: World) -> list[World]:
        for child in node.named_children:
            world = self._assign(child, self._assigned(child, world))
        return [world]

    def _assign(self, node: Node, world: World) -> World:
        target = node.child_by_field_name("name")
        value = node.child_by_field_name("value")
        assert target is not None
        name = self._raw(target)
        old = world.variables.get(name, ())
        adds = any(child.type == "+=" for child in node.children)
        if target.type == "subscript":  # one element: which one is seldom certain
            name = name.partition("[")[0]
            return world.with_variable(name, (self._unknown(node, name),), array=True)
        if value is not None and value.type == "array":
            keyed = any(self._raw(c).startswith("[") for c in value.named_children)
            words = [self._unknown(value, name)] if keyed else []
            words = words or self._arguments(value.named_children, world)
            words = [*old, *words] if adds else words
            world = world.with_variable(name, tuple(words), array=True)
        else:
            text = EMPTY if value is None else self._text(value, world)
            if adds:
                text = self._variable(name, world) + text
            if any(not one.isidentifier() for one in text.needs):
                # A program's output, say: the user may give the variable itself.
                if old and old[0].file == GIVEN:
                    return world
                text = Text(text.shape, text.needs | {name})
            word = self._word(text, node if value is None else value)
            is_array = name in world.arrays  # this sets its first element
            rest = old[1:] if is_array else ()
            world = world.with_variable(name, (word, *rest), array=is_array)
        return world

    def _do_declaration_command(self, node: Node, world: World) -> list[World]:
        keyword = node.children[0].type
        parts = [c for c in node.named_children if c.type != "comment"]
        flags = [self._raw(c) for c in parts if self._raw(c).startswith(("-", "+"))]
        is_local = keyword == "local" or (keyword != "export" and self._depth > 1)
        is_local = is_local and "-g" not in flags and keyword != "readonly"
        changes = any(CHANGING.fullmatch(flag) for flag in flags)
        is_export = keyword == "export" and not any("f" in flag for flag in flags)
        gives = is_export and "-n" not in flags
        gives = gives or any("x" in flag and flag[0] == "-" for flag in flags)
        hides = any(flag == "-n" or flag[0] + flag[-1] == "+x" for flag in flags)
        for child in parts:
            target = child.child_by_field_name("name")
            name = self._raw(child if target is None else target)
            found = NAMED.match(self._raw(child).strip("\"'"))
            name = found[1] if found else name
            if not NAME.fullmatch(name):
                if not self._raw(child).startswith(("-", "+")):
                    self._give_up(
                        node, "which variable is declared cannot be determined"
                    )
                continue
            if is_local:
                world = replace(world, local=world.local | {name})
            if child.type == "variable_assignment":
                world = self._assign(child, world)
            elif found is not None:
                text = self._text(child, world)
                needs = text.needs
                text = Text(text.shape.partition("=")[2], needs)
                world = world.with_variable(
                    name, (self._word(text, child),), array=False
                )
            if is_local and child.type == "variable_name":
                world = world.without_variables([name])
            if changes:
                world = world.with_variable(
                    name, (self._unknown(child, name),), array=name in world.arrays
                )
            if gives:
                world = world.exporting([name])
            elif hides and (is_export or not changes):
                world = replace(world, exported=world.exported - {name})
        return [world]

    def _do_unset_command(self, node: Node, world: World) -> list[World]:
        raw = [self._raw(child).strip("\"'") for child in node.named_children]
        for name in (text.partition("[")[0] for text in raw if "[" in text):
            word = self._unknown(node, name)
            world = world.with_variable(name, (word,), array=True)
        return [world.without_variables(n for n in raw if NAME.fullmatch(n))]

    def _do_program(self, node: Node, world: World) -> list[World]:
        return self._body(node, [world])

    _do_do_group = _do_else_clause = _do_negated_command = _do_program

    def _do_compound_statement(self, node: Node, world: World) -> list[World]:
        if node.children[0].type != "((":
            return self._body(node, [world])
        for child in node.named_children:
            world = self._set_number(child, world)
        return [world]

    def _do_ERROR(self, node: Node, world: World) -> list[World]:  # noqa: N802
        self._give_up(node, "what stands here is not followed")
        return [world]

    def _do_subshell(self, node: Node, world: World) -> list[World]:
        return [inside.back_in(world) for inside in self._body(node, [world])]

    def _do_pipeline(self, node: Node, world: World) -> list[World]:
        worlds = [world]
        children = node.named_children
        for before, child in zip([None, *children], children, strict=False):
            worlds = [
                inside.back_in(each)
                for each in worlds
                for inside in self._piped(before, child, each)
            ]
        return worlds

    def _piped(self, before: Node | None, child: Node, world: World) -> list[World]:
        text = None if before is None else self._printed(before, world)
        if text is None or before is None:
            return self._statement(child, [world])
        return self._fed(child, world, text, self._line(before))

    def _do_function_definition(self, node: Node, world: World) -> list[World]:
        name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
        if name is None or body is None:
            return [world]
        function = {self._raw(name): (body, self._here)}
        return [replace(world, functions={**world.functions, **function})]

    def _do_list(self, node: Node, world: World) -> list[World]:
        if len(node.children) != 3:
            return [world]
        left, sign, right = node.children[0], node.children[1].type, node.children[2]
        found = []
        for holds, each in self._decide(left, world):
            if holds == (sign == "&&"):
                found += self._statement(right, [each])
            else:
                found.append(each)
        return found

    def _do_if_statement(self, node: Node, world: World) -> list[World]:
        clauses = [node, *(c for c in node.children if c.type in CLAUSES)]
        return self._clauses(clauses, world)

    def _clauses(self, clauses: list[Node], world: World) -> list[World]:
        """Follow the first of the if, elif and else clauses whose condition holds."""
        if not clauses:
            return [world]
        parts = [c for c in clauses[0].named_children if c.type not in CLAUSES]
        then = next((c for c in clauses[0].children if c.type == "then"), None)
        ways = [(True, world)]
        for part in parts:
            if then is not None and part.start_byte < then.start_byte:
                ways = [way for _, each in ways for way in self._decide(part, each)]
        found = []
        for holds, each in ways:
            if not holds:
                found += self._clauses(clauses[1:], each)
                continue
            worlds = [each]
            for part in parts:
                if then is None or part.start_byte >= then.end_byte:
                    worlds = self._statement(part, worlds)
            found += worlds
        return found

    def _do_case_statement(self, node: Node, world: World) -> list[World]:
        value = node.child_by_field_name("value")
        items = [c for c in node.named_children if c.type == "case_item"]
        assert value is not None
        subject = self._text(value, world)
        ends = {c.type for item in items for c in item.children}
        if ends & {";&", ";;&"}:
            self._give_up(node, "a case that falls through is not followed")
        found: list[World] = []
        for item in items:
            self._steps += 1 + len(world.conditions) // 10
            if self._steps > MOST_STEPS:
                self._give_up(item, "the script does more than is followed; no further")
                break
            patterns = item.children_by_field_name("value")
            ids = {pattern.id for pattern in patterns}
            body = [c for c in item.named_children if c.id not in ids]
            holds = matches(
                subject,
                [(self._text(p, world), p.type, self._raw(p)) for p in patterns],
            )
            taken = [world]
            if holds is None:
                said = f"{self._raw(value)} is {' or '.join(map(self._raw, patterns))}"
                needs = subject.needs or frozenset({said})
                taken = [self._supposed(item, world, said, needs, holds=True)]
                world = self._supposed(item, world, said, needs, holds=False)
            if holds is not False:
                for statement in body:
                    taken = self._statement(statement, taken)
                found = merged([*found, *taken])
                if len(found) > MOST_WORLDS:
                    break
            if holds:
                return found
        return [*found, world]

    # -- loops -----------------------------------------------------------------------

    def _do_for_statement(self, node: Node, world: World) -> list[World]:
        name = node.child_by_field_name("variable")
        body = node.child_by_field_name("body")
        if name is None or body is None:
            return [world]
        values = node.children_by_field_name("value")
        if node.children[0].type == "select":
            return self._once(body, world, self._raw(name))
        words = self._arguments(values, world) if values else list(world.arguments)
        if any(not w.text.shape.strip("\ue000") and w.text.needs for w in words):
            # How many words it expands to cannot be determined.
            return self._once(body, world, self._raw(name))
        worlds, found = [world], []
        for word in words[:MOST_ROUNDS]:
            variable = self._raw(name)
            worlds = [w.with_variable(variable, (word,), array=False) for w in worlds]
            worlds, ended = self._round(body, worlds)
            found += ended
        if len(words) > MOST_ROUNDS:
            self._give_up(node, f"only {MOST_ROUNDS} rounds of the loop are followed")
        return [*found, *worlds]

    def _round(
        self, body: Node, worlds: list[World]
    ) -> tuple[list[World], list[World]]:
        """One iteration of a loop: the worlds that go on, and those that leave it."""
        going, left = [], []
        for world in self._statement(body, worlds):
            if world.jump in ("", "continue"):
                going.append(replace(world, jump=""))
            else:
                jump = "" if world.jump == "break" else world.jump
                left.append(replace(world, jump=jump))
        return merged(going), left

    def _rounds(
        self,
        node: Node,
        world: World,
        goes: Callable[[World], bool | None],
        then: Callable[[World], World] = lambda world: world,
    ) -> list[World]:
        """A loop that goes on while ``goes`` holds; None is undetermined."""
        body = node.child_by_field_name("body")
        if body is None:
            return [world]
        worlds, found = [world], []
        for _ in range(MOST_ROUNDS):
            going = []
            for each in worlds:
                holds = goes(each)
                if holds is None:
                    found += self._once(body, each)
                elif holds:
                    going.append(each)
                else:
                    found.append(each)
            if not going:
                return found
            worlds, left = self._round(body, going)
            worlds = [then(each) for each in worlds]
            found += left
            if all(any(each.holds_as(old) for old in going) for each in worlds):
                # Every further iteration is the same, as when waiting for a server.
                return found or worlds
        self._give_up(node, f"only {MOST_ROUNDS} rounds of the loop are followed")
        return [*found, *worlds]

    def _do_c_style_for_statement(self, node: Node, world: World) -> list[World]:
        first, condition, update = (
            node.child_by_field_name(name)
            for name in ("initializer", "condition", "update")
        )
        world = world if first is None else self._set_number(first, world)
        if condition is None or update is None:
            self._give_up(node, "a loop without a condition is not followed")
            return [world]

        def goes(each: World) -> bool | None:
            number = self._number(condition, each)
            return None if number is None else number != 0

        def then(each: World) -> World:
            return self._set_number(update, each)

        return self._rounds(node, world, goes, then)

    def _do_while_statement(self, node: Node, world: World) -> list[World]:
        """While or until."""
        parts = [c for c in node.children_by_field_name("condition") if c.is_named]
        stops = node.children[0].type == "until"
        changed = CHANGED.findall(" ".join(map(self._raw, parts)))
        names = [name for pair in changed for name in pair if NAME.fullmatch(name)]
        if names:  # the condition itself sets the variable that it tests
            body = node.child_by_field_name("body") or node
            for name in names:
                word = self._unknown(node, name)
                world = world.with_variable(name, (word,), array=False)
            return self._once(body, world, *names)

        def goes(each: World) -> bool | None:
            holds = self._condition(parts[-1], each)[0] if parts else None
            return None if holds is None else holds != stops

        return self._rounds(node, world, goes)

    def _once(self, body: Node, world: World, *names: str) -> list[World]:
        """A loop of unknown length: no iterations, or some with uncertain variables."""
        start = world
        for name in names:
            start = start.with_variable(name, (self._unknown(body, name),), array=False)
        unsure = []
        for each in self._statement(body, [start]):
            if each.jump in ("break", "continue"):
                each = replace(each, jump="")
            changed = [
                n for n, v in each.variables.items() if v != world.variables.get(n)
            ]
            for name in changed:
                word = self._unknown(body, name)
                each = each.with_variable(name, (word,), array=name in each.arrays)
            unsure.append(each)
        return [world, *unsure]

    # -- numbers ---------------------------------------------------------------------

    def _set_number(self, node: Node, world: World) -> World:
        """What an arithmetic expression does to a variable: ``i++``, ``n += 2``."""
        if node.type == "variable_assignment":
            return self._assign(node, world)
        if len(node.children) < 2:
            return world
        signs = [self._raw(c) for c in node.children]
        if len(signs) == 2 and set(signs) & {"++", "--"}:
            name = signs[0] if signs[1] in ("++", "--") else signs[1]
            old = self._named(name, world)
            value = None if old is None else old + (1 if "++" in signs else -1)
        elif len(signs) == 3 and ASSIGNS.fullmatch(signs[1]):
            name = signs[0]
            value = self._number(node.children[2], world)
            if signs[1] != "=" and value is not None:
                old = self._named(name, world)
                value = None if old is None else calculated(signs[1][:-1], old, value)
        else:
            return self._assigned(node, world)
        text = unknown(name) if value is None else Text(str(value))
        return world.with_variable(name, (self._word(text, node),), array=False)

    def _assigned(self, node: Node, world: World) -> World:
        """The world after assignments in words: ``${name:=default}``, ``$((n++))``."""
        for child in node.named_children:
            if child.type in ("command_substitution", "subshell"):
                continue
            if child.type == "expansion" and (found := SETS.match(self._raw(child))):
                word = self._word(self._text(child, world), child)
                world = world.with_variable(found[1], (word,), array=False)
            if child.type.endswith("_expression") and len(child.children) in (2, 3):
                signs = ["" if c.children else self._raw(c) for c in child.children]
                changes = set(signs) & {"++", "--"} or ASSIGNS.fullmatch(signs[1])
                for name in signs[::2] if changes and child.type != "test" else ():
                    if NAME.fullmatch(name) and self._in_numbers(child):
                        word = self._unknown(child, name)
                        world = world.with_variable(name, (word,), array=False)
            world = self._assigned(child, world)
        return world

    @staticmethod
    def _in_numbers(node: Node) -> bool:
        above: Node | None = node
        while above is not None and above.type != "arithmetic_expansion":
            above = above.parent
        return above is not None

    # -- commands --------------------------------------------------------------------

    def _do_redirected_statement(self, node: Node, world: World) -> list[World]:
        body = node.child_by_field_name("body")
        redirects = node.children_by_field_name("redirect")
        documents = [r for r in redirects if r.type == "heredoc_redirect"]
        worlds = [world] if body is None else self._redirected(body, redirects, world)
        files = [*redirects, *(c for d in documents for c in d.named_children)]
        worlds = [self._writes(body, files, documents, each) for each in worlds]
        # A command after a here-document is inside its node.
        for command in (c for d in documents for c in d.named_children):
            shows = body is not None and self._raw(body) == "cat"
            if shows and command.type == "pipeline" and len(documents) == 1:
                worlds = [
                    new
                    for each in worlds
                    for new in self._redirected(command, documents, each)
                ]
            elif command.type in RUNS:
                worlds = self._statement(command, worlds)
        read = READ_WHOLE.fullmatch(self._raw(body)) if body is not None else None
        if read and len(redirects) == len(documents) == 1:
            return [self._read(read[1], documents[0], each) for each in worlds]
        return worlds

    def _redirected(
        self, body: Node, redirects: Sequence[Node], world: World
    ) -> list[World]:
        """A command whose standard input is a here-document or a file."""
        for one in reversed(redirects):
            if one.type == "heredoc_redirect":
                place = next((c for c in one.children if c.type == DOCUMENT), one)
                text = self._marked(self._document, one, world)
                return self._fed(body, world, text, self._line(place))
            if one.type == "file_redirect" and one.children[0].type == "<":
                text = self._text(one.children[-1], world)
                return self._fed(body, world, text, self._line(one), is_name=True)
        return self._statement(body, [world])

    def _fed(
        self, node: Node, world: World, text: Text, line: int, *, is_name: bool = False
    ) -> list[World]:
        """A statement whose first command gets that on its standard input."""
        first = node
        while first.type in RUNS[1:] or first.type == "redirected_statement":
            first = first.named_children[0]
        outer = self._input
        self._input = Input(first.id, text, self._file, line, is_name)
        try:
            return self._statement(node, [world])
        finally:
            self._input = outer

    def _marked(
        self, read: Callable[[Node, World], Text], node: Node, world: World
    ) -> Text:
        """What the command reads, with marks where quoting removes line ends."""
        self._marks = True
        try:
            return read(node, world)
        finally:
            self._marks = False

    def _writes(
        self,
        body: Node | None,
        redirects: Iterable[Node],
        documents: Sequence[Node],
        world: World,
    ) -> World:
        """The world after writing scripts: ``cat <<EOF > job.sh``, or another text."""
        shows = body is not None and self._raw(body) == "cat"
        for one in redirects:
            if one.type != "file_redirect" or one.children[-2].type not in WRITES:
                continue
            name = self._text(one.children[-1], world).value
            if name is None or not shell_within.SCRIPT.fullmatch(name):
                continue
            source = None
            is_new = one.children[-2].type != ">>"
            if is_new and len(documents) == 1 and shows:
                inside = next(c for c in documents[0].children if c.type == DOCUMENT)
                text = self._marked(self._document, documents[0], world)
                if shell_within.is_whole(text):
                    line = self._line(inside)
                    source = shell_within.source(text, self._file, line)
            path = self._absolute(world, name).shape
            world = replace(world, written={**world.written, path: source})
        return world

    def _read(self, name: str, document: Node, world: World) -> World:
        """``read -r -d '' NAME`` of a here-document: all of it, stripped."""
        text = self._document(document, world)
        word = self._word(replace(text, shape=text.shape.strip(" \t\n")), document)
        return world.with_variable(name, (word,), array=False)

    def _do_command(self, node: Node, world: World) -> list[World]:
        world = self._assigned(node, world)
        before, parts = world, []
        for child in node.children:
            if child.type == "variable_assignment":
                target = child.child_by_field_name("name") or child
                before = self._assign(child, before).exporting([self._raw(target)])
            elif child.type == "command_name":
                parts += child.children
            else:
                parts.append(child)
        words = self._arguments(parts, world)
        if not words:
            return [before]
        # This includes the contents of arrays and quoted texts.
        if OPTION.fullmatch(words[0].text.shape):
            first = node.child_by_field_name("name") or node
            line = self._line(first)
            self.lost.append((self._file, line, self._raw(first)[:80]))
        ends = words[0].text.value == "exec" and len(words) > 1
        while len(words) > 1 and words[0].text.value in PREFIXES:
            words = words[1:]
        name = words[0].text.value or ""
        if name in BUILTINS:
            return BUILTINS[name](self, node, world, words[1:])
        if name in world.functions:
            called = self._call(name, before, tuple(words[1:]))
            return (
                called
                if before is world
                else [w.keeping(world, before) for w in called]
            )
        if name in SILENT:
            if name == "popd":
                world = replace(world, directory=unknown("the directory"))
            return [world]
        seen = _environment(before.environment(), words)
        command = Command(tuple(words), self._file, self._line(node), seen, self._waits)
        worlds = [world.with_command(command)]
        within = shell_within.script(words)
        if within is not None:
            text = self._given(parts, within.words, world)
            worlds = self._within(node, text, within, worlds[0], command)
        elif (within := shell_within.reads_its_input(words)) is not None:
            worlds = self._reads(node, parts, within, worlds[0], command)
        elif (within := shell_within.file(words)) is not None:
            file = within.words[0].text
            worlds = self._starts(node, file, within, worlds[0], command)
        return [replace(each, jump="exit") if ends else each for each in worlds]

    def _reads(
        self,
        node: Node,
        parts: Iterable[Node],
        within: shell_within.Within,
        world: World,
        command: Command,
    ) -> list[World]:
        """Follow a shell, ssh or sbatch whose script is its standard input."""
        for part in parts:
            if part.type == "herestring_redirect":
                inner = part.named_children[-1]
                text = self._marked(self._text, inner, world)
                there = text, self._file, self._line(inner)
                return self._within(node, there, within, world, command)
        given = self._input
        if given is None or given.node != node.id:
            return [world]
        if given.is_name:
            return self._starts(node, given.text, within, world, command)
        return self._within(node, given[1:4], within, world, command)

    def _given(
        self, parts: Iterable[Node], words: Sequence[Word], world: World
    ) -> tuple[Text, str, int]:
        """The text of the words, with the line ends that quoting removes, and where it
        begins.
        """
        first = words[0]
        file, line = first.file, first.line
        node = next(
            (
                part
                for part in parts
                if part.type == "string" and self._raw(part)[:500] == first.source
            ),
            None,
        )
        if len(words) > 1 or node is None:
            joined = [w.text if w is first else Text(" ") + w.text for w in words]
            return concatenated(joined), file, line
        inner = self._raw(node)[1:-1]
        name = re.fullmatch(r"\$\{?([A-Za-z_]\w*)\}?", inner, re.ASCII)
        if name and (set_by := world.variables.get(name[1])):
            return set_by[0].text, set_by[0].file, set_by[0].line
        return self._marked(self._text, node, world), file, line

    def _within(
        self,
        node: Node,
        text: tuple[Text, str, int],
        within: shell_within.Within,
        world: World,
        command: Command,
    ) -> list[World]:
        """Follow the text that a command hands to a shell."""
        if not shell_within.is_whole(text[0]):
            return [world]
        if self._depth >= DEEPEST:
            self._remark(node, "scripts within scripts are nested too deep to follow")
            return [world]
        return self._inside(shell_within.source(*text), within, world, command)

    def _starts(
        self,
        node: Node,
        name: Text,
        within: shell_within.Within,
        world: World,
        command: Command,
    ) -> list[World]:
        """Follow the file that a command hands to a shell.

        A file that starts no program of interest is ignored.
        """
        if name.value is None:
            self._remark(node, "which file is started here is not certain")
            return [world]
        path = self._absolute(world, name.shape).shape
        if path in world.written:
            source, why = world.written[path], "the script writes it itself"
        else:
            text, path = self._found(name.shape, world)
            source = None if text is None else Source(text, path)
            why = "it is not here, or too long"
        is_script = source and script_file.is_shells(source.text)
        if source is None or not is_script or self._depth >= DEEPEST:
            why = why if source is None else "it is not a bash script"
            self._remark(node, f"{name.shape} is started and not read: {why}")
            return [world]
        start = path, tuple(word.text for word in within.arguments)
        if start in self.started:  # sbatch "$0", which would recurse forever
            return [world]
        outer, before = self._script, (self.is_whole, self.lost[:], self.remarks[:])
        self._script = name
        if shell_within.is_copied(command.words):
            self._script = unknown("the path of Slurm's copy")
            source = source._replace(path=self._script)
        self.started.append(start)
        try:
            inside = self._inside(source, within, world, command)
        finally:
            self.started.pop()
            self._script = outer
        behind = len(world.commands)
        commands = (c for each in inside for c in each.commands[behind:])
        if any(shell_within.trains(one.words) for one in commands):
            return inside
        self.is_whole, self.lost, self.remarks = before
        return [world]

    def _inside(
        self,
        source: Source,
        within: shell_within.Within,
        world: World,
        command: Command,
    ) -> list[World]:
        """Follow a script as a process of its own.

        Its commands are prefixed with the words of a ``ray job submit``.
        """
        names = command.environment if within.inherits else {}
        start = replace(
            world,
            variables={name: (word,) for name, word in names.items()},
            arrays=frozenset(),
            exported=frozenset(names),
            exports=False,
            unset=frozenset(),
            local=frozenset(),
            functions={},
            arguments=within.arguments,
        )
        inside = self.source(source, [start])
        if shell_within.is_submitted(command.words):
            inside = [_submitted(each, len(world.commands), command) for each in inside]
        return [each.back_in(world) for each in inside]

    def _call(self, name: str, world: World, words: tuple[Word, ...]) -> list[World]:
        body, source = world.functions[name]
        if self._depth >= DEEPEST:
            self._give_up(body, f"{name} calls itself more often than is followed")
            return [world]
        outer, self._here = self._here, source
        self._depth += 1
        start = replace(world, arguments=words, local=frozenset())
        try:
            inside = self._statement(body, [start])
        finally:
            self._depth -= 1
            self._here = outer
        return [each.back_from(world) for each in inside]

    def _exit(self, node: Node, world: World, words: list[Word]) -> list[World]:
        return [replace(world, jump="exit")]

    def _jump(self, node: Node, world: World, words: list[Word]) -> list[World]:
        name = next(n for n in ("return", "break", "continue") if n in self._raw(node))
        if words and words[0].text.value != "1" and name != "return":
            self._give_up(node, f"{name} over several loops is not followed")
        return [replace(world, jump=name)]

    def _shift(self, node: Node, world: World, words: list[Word]) -> list[World]:
        number = words[0].text.value if words else "1"
        if number is None or not re.fullmatch("[0-9]{1,4}", number):
            self._give_up(
                node, "how far the arguments are shifted cannot be determined"
            )
            return [world]
        if int(number) > len(world.arguments):  # bash refuses, and shifts nothing
            return [world]
        return [replace(world, arguments=world.arguments[int(number) :])]

    def _set(self, node: Node, world: World, words: list[Word]) -> list[World]:
        values = [word.text.value for word in words]
        for sign in "-+":
            named = f"{sign}o" in values and "allexport" in values
            if named or any(SHORT[sign].fullmatch(v or "") for v in values):
                world = replace(world, exports=sign == "-")
        if "--" in values:
            rest = words[values.index("--") + 1 :]
        elif words and (values[0] or "")[:1] not in ("-", "+"):
            rest = words
        else:
            return [world]
        return [replace(world, arguments=tuple(rest))]

    def _cd(self, node: Node, world: World, words: list[Word]) -> list[World]:
        places = [w.text for w in words if w.text.shape not in ("--", "-P", "-L")]
        if not places:
            place = self._variable("HOME", world)
        elif places[0].needs or places[0].shape[:1] in ("-", "+"):
            place = unknown(self._raw(node))
        else:
            place = self._absolute(world, places[0].shape)
        return [replace(world, directory=place)]

    def _eval(self, node: Node, world: World, words: list[Word]) -> list[World]:
        self._remark(node, "eval is not followed; what it sets or starts is not known")
        return [world]

    def _let(self, node: Node, world: World, words: list[Word]) -> list[World]:
        for word in words:
            found = re.match(r"(?:\+\+|--)?([A-Za-z_]\w*)", word.text.shape, re.ASCII)
            if found:
                text = self._unknown(node, found[1])
                world = world.with_variable(found[1], (text,), array=False)
        return [world]

    def _printf(self, node: Node, world: World, words: list[Word]) -> list[World]:
        if words and words[0].text.value == "-v":
            return self._fills(node, world, words[1:2])
        return [world]

    def _fills(self, node: Node, world: World, words: list[Word]) -> list[World]:
        """``read``, ``mapfile`` and the like: what they put into variables."""
        for word in words:
            name = word.text.value or ""
            if NAME.fullmatch(name):
                text = self._unknown(node, name)
                world = world.with_variable(name, (text,), array=name in world.arrays)
        return [world]

    def _sourced(self, node: Node, world: World, words: list[Word]) -> list[World]:
        name = words[0].text.value if words else None
        if name is None:
            self._remark(node, "which file is sourced here cannot be determined")
            return [world]
        text, path = self._found(name, world)
        if text is None or self._depth >= DEEPEST:
            self._remark(
                node, f"{name} is sourced and not read; what it sets is unknown"
            )
            return [world]
        inner = replace(world, arguments=tuple(words[1:]) or world.arguments)
        inside = self.source(Source(text, path), [inner])
        return [
            replace(
                each,
                arguments=world.arguments,
                jump="" if each.jump == "return" else each.jump,
            )
            for each in inside
        ]

    def _found(self, name: str, world: World) -> tuple[bytes | None, str]:
        """A sourced file's text: from the script's directory, or beside this file."""
        places = [
            self._absolute(world, name),
            Text(str(Path(self._file).parent / name)),
        ]
        for place in places:
            path = Path(place.shape)
            try:
                here = path.stat()
                if not stat.S_ISREG(here.st_mode):
                    continue
                left = script_file.MOST_BYTES - self._sourced_bytes
                text = script_file.start_of(path, left + 1)
                self._sourced_bytes += len(text)
                if len(text) <= left:
                    return text, str(path)
            except (OSError, ValueError):
                continue
        return None, ""

    # -- branches --------------------------------------------------------------------

    def _decide(self, node: Node, world: World) -> list[tuple[bool, World]]:
        """The worlds that a condition leads to: one if it is certain, else two."""
        holds, needs = self._condition(node, world)
        worlds = [world]
        if node.type not in TESTS:
            worlds = self._statement(node, worlds)
        elif node.children[0].type == "((":
            worlds = self._do_compound_statement(node, world)
        found: list[tuple[bool, World]] = []
        for each in worlds:
            if holds is not None or each.jump:
                found.append((bool(holds), each))
                continue
            said = self._raw(node)
            found += [
                (way, self._supposed(node, each, said, needs, holds=way))
                for way in (True, False)
            ]
        return found

    def _supposed(
        self, node: Node, world: World, said: str, needs: frozenset[str], *, holds: bool
    ) -> World:
        condition = Condition(said[:200], self._file, self._line(node), holds, needs)
        return replace(world, conditions=(*world.conditions, condition))


def _submitted(world: World, first: int, job: Command) -> World:
    """Turn the commands since ``first`` into those of a job submitted to Ray."""
    within = tuple(
        command._replace(
            words=(*job.words, *command.words),
            environment={**job.environment, **command.environment},
        )
        for command in world.commands[first:]
    )
    return replace(world, commands=(*world.commands[:first], *within))


def _environment(given: dict[str, Word], words: Sequence[Word]) -> dict[str, Word]:
    """A command's environment, with what ``env`` among its words adds and removes."""
    names = shell_within.names(words)
    rest = list(words[names.index("env") + 1 :]) if "env" in names else []
    while rest:
        word = rest.pop(0)
        found = NAMED.fullmatch(word.text.shape)
        if found:
            text = Text(found[2], word.text.needs)
            given = {**given, found[1]: word._replace(text=text)}
        elif word.text.value in ("-i", "-", "--ignore-environment"):
            given = {}
        elif word.text.value == "-u" and rest:
            gone = rest.pop(0).text.value
            given = {name: given[name] for name in given if name != gone}
        else:
            break
    slurms = shell_within.exported(words)
    listed = slurms.text.shape.partition("=")[2].split(",") if slurms else ["ALL"]
    if "ALL" not in listed:
        given = {name: given[name] for name in given if name in listed}
    for found in map(NAMED.fullmatch, listed):
        if slurms and found:
            text = Text(found[2], slurms.text.needs if HOLE in found[2] else NOBODY)
            given = {**given, found[1]: slurms._replace(text=text)}
    return given


Builtin = Callable[[_Reader, Node, World, list[Word]], list[World]]
BUILTINS: dict[str, Builtin] = {
    "exit": _Reader._exit,
    "return": _Reader._jump,
    "break": _Reader._jump,
    "continue": _Reader._jump,
    "shift": _Reader._shift,
    "set": _Reader._set,
    "cd": _Reader._cd,
    "pushd": _Reader._cd,
    "eval": _Reader._eval,
    "let": _Reader._let,
    "printf": _Reader._printf,
    "read": _Reader._fills,
    "mapfile": _Reader._fills,
    "readarray": _Reader._fills,
    "getopts": _Reader._fills,
    "source": _Reader._sourced,
    ".": _Reader._sourced,
}
