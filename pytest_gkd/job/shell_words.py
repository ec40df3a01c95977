"""The values of a shell's words, conditions and numbers, as far as they are certain."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import PurePosixPath

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

from pytest_gkd.job import shell_patterns
from pytest_gkd.job.shell_values import (
    EMPTY,
    HOLE,
    JOINED,
    MOST_WORDS,
    NOBODY,
    Source,
    Text,
    Word,
    World,
    concatenated,
    unknown,
)

NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "<<": operator.lshift,
    ">>": operator.rshift,
    "&": operator.and_,
    "|": operator.or_,
    "^": operator.xor,
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "&&": lambda a, b: bool(a and b),
    "||": lambda a, b: bool(a or b),
}
COMPARED = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
BIGGEST = 1 << 63
QUOTED = ("string", "raw_string")
EXPANSIONS = ("simple_expansion", "expansion", "command_substitution")
EXPANDED = {
    *EXPANSIONS,
    *("string", "raw_string", "ansi_c_string", "process_substitution"),
    *("arithmetic_expansion", "translated_string", "ERROR"),
}
# Marks blanks from an unquoted expansion until the word is split at them.
BLANK = "\0"
BASH = Language(tree_sitter_bash.language())
# Matches what is expanded in a text that the parser leaves as it is, and a HOLE.
NAMES = re.compile(rf"\\.|\$([A-Za-z_]\w*)|{HOLE}", re.DOTALL | re.ASCII)
ESCAPED_END = re.compile(r"(\\\\)|\\\n")
BLANKS = re.compile(r"[ \t\n]+")
# At the beginning of a word, or of an assignment's value (bash(1), Tilde Expansion).
TILDE = re.compile(r"(?:[A-Za-z_]\w*=)?~(?:/|$)", re.ASCII)
# A list or a range in braces, which bash may expand even if it is not read here.
MORE_BRACES = re.compile(r"\{[^{}\s]*(?:,|\.\.)[^\s]*\}")
LISTS = re.compile(r"\[@\]|\$@|\$\{@")
PLAIN = re.compile(r"[^\s\"'`$\\{~]*")
ARGUMENTS = re.compile(r"\$(?:[@*]|\{[@*](?::(?P<from>[0-9]{1,4}))?\})")
ALL_OF = re.compile(
    r"\$\{(?P<name>[A-Za-z_]\w*)\[[@*]\]"
    r"(?P<rest>:?[-+].*|:[0-9]{1,4}(?::[0-9]{1,4})?)?\}",
    re.DOTALL | re.ASCII,
)
PARAMETER = re.compile(
    r"\$\{(?P<length>#(?=[\w@*]))?(?P<indirect>!)?"
    r"(?P<name>[A-Za-z_]\w*|[0-9]+|[@*#?$!-])(?:\[(?P<index>[^\]]*)\])?",
    re.ASCII,
)
DEFAULT = re.compile(r":?[-=+?]")
# Variables that bash sets itself, to values that only a run could tell.
BASHS = {
    *("BASH", "BASHPID", "BASH_VERSION", "COLUMNS", "EPOCHSECONDS", "EUID", "GROUPS"),
    *("HOSTNAME", "HOSTTYPE", "LINENO", "LINES", "MACHTYPE", "OLDPWD", "OSTYPE"),
    *("PATH", "PPID", "RANDOM", "SECONDS", "SHELL", "SHLVL", "TERM", "UID", "USER"),
    *("?", "$", "!", "-", "_"),
}
# How statements begin that only test something.
TESTS = {"[", "[[", "!"}
Verdict = tuple[bool | None, frozenset[str]]


class Words:
    """Reads the words of a file whose syntax tree is known; ``_source`` is its text."""

    def __init__(self, file: str, place: str) -> None:
        self._here = Source(b"", file)
        self._marks = False
        self._script = Text(file)
        self._place = place
        self._steps = 0

    @property
    def _source(self) -> bytes:
        return self._here.text

    @property
    def _file(self) -> str:
        return self._here.file

    def _line(self, node: Node) -> int:
        return self._here.line(node.start_point.row, node.start_byte)

    def _held(self, text: str) -> Text:
        """A text as written; HOLEs remain only if they mark an undetermined part."""
        if not self._here.needs:
            text = text.replace(HOLE, "")
        return Text(text, self._here.needs if HOLE in text else NOBODY)

    def _raw(self, node: Node) -> str:
        return self._source[node.start_byte : node.end_byte].decode("utf-8", "replace")

    def _give_up(self, node: Node, text: str) -> None:
        """What is not followed from here on; subclasses that follow statements report
        it.
        """

    def _unsure(self, node: Node) -> Verdict:
        return None, frozenset({self._raw(node)[:200]})

    # -- conditions ------------------------------------------------------------------

    def _condition(self, node: Node, world: World) -> Verdict:
        """Whether it holds, None if undetermined, and what would determine it."""
        inner = [c for c in node.named_children if c.type != "comment"]
        if not node.children or not inner:
            inner = [node] if node.type in ("word", "number") else inner
        opening = node.children[0].type if node.children else ""
        if opening == "((" and inner:
            needs = self._needs(node, world)
            return _truth(self._number(inner[-1], world)), needs
        if node.type == "test_command" and len(inner) == 1:
            if opening == "[" and self._splits(inner[0], world):
                return self._unsure(node)
            return self._tested(inner[0], world)
        first = {c.children[0].type for c in inner if c.children}
        if node.type == "list" and len(inner) == 2 and first <= TESTS:
            return self._either(node, inner, world)
        if node.type == "negated_command" and len(inner) == 1:
            holds, needs = self._condition(inner[0], world)
            return (None if holds is None else not holds), needs
        if node.type == "command" and self._raw(node) in ("true", ":", "false"):
            return self._raw(node) != "false", frozenset()
        return self._unsure(node)

    def _either(self, node: Node, sides: list[Node], world: World) -> Verdict:
        """``[ ... ] || [ ... ]``, or with ``&&``: tests, which change nothing."""
        decides = node.children[1].type == "||"
        found = [self._condition(side, world) for side in sides]
        needs = found[0][1] | found[1][1]
        if any(holds is decides for holds, _ in found):
            return decides, needs
        if any(holds is None for holds, _ in found):
            return None, needs
        return not decides, needs

    def _splits(self, node: Node, world: World) -> bool:
        """Whether an operand of ``[`` is unquoted and not one word."""
        if node.type in EXPANSIONS:
            value = self._text(node, world).value
            return value is not None and len(value.split()) != 1
        if node.type in EXPANDED:
            return False
        return any(self._splits(child, world) for child in node.named_children)

    def _tested(self, node: Node, world: World) -> Verdict:
        """The expression in ``[ ]`` or ``[[ ]]``."""
        if node.type == "parenthesized_expression" and len(node.named_children) == 1:
            return self._tested(node.named_children[0], world)
        if node.type == "unary_expression" and len(node.children) == 2:
            return self._unary(node, world)
        if node.type == "binary_expression" and len(node.children) == 3:
            return self._compared(node, world)
        if node.type in ("word", "number", *EXPANDED, "concatenation"):
            text = self._text(node, world)
            return (None if text.value is None else text.value != ""), text.needs
        return self._unsure(node)

    def _unary(self, node: Node, world: World) -> Verdict:
        sign, operand = self._raw(node.children[0]), node.children[1]
        if sign == "!":
            if operand.type in ("word", *EXPANDED):
                return self._unsure(node)
            holds, needs = self._tested(operand, world)
            return (None if holds is None else not holds), needs
        text = self._text(operand, world)
        if sign in ("-z", "-n") and text.value is not None:
            return (text.value == "") == (sign == "-z"), text.needs
        if text.needs:
            return None, text.needs
        return self._unsure(node)

    def _compared(self, node: Node, world: World) -> Verdict:
        left, right = node.children[0], node.children[2]
        sign = self._raw(node.children[1])
        double = self._in_double(node)
        if sign in ("&&", "||", "-a", "-o"):
            (one, needs), (other, more) = (
                self._tested(part, world) for part in (left, right)
            )
            decisive = sign in ("||", "-o")
            if decisive in (one, other):
                return decisive, frozenset()
            return (None if None in (one, other) else not decisive), needs | more
        if left.type == "unary_expression":  # ! a = b
            return self._unsure(node)
        a, b = self._text(left, world), self._text(right, world)
        needs = a.needs | b.needs
        if sign in COMPARED:
            one_n, other_n = _integer(a.value), _integer(b.value)
            if one_n is None or other_n is None or "" in (a.value, b.value):
                return None, needs or frozenset({self._raw(node)})
            return bool(COMPARED[sign](one_n, other_n)), needs
        if sign in ("=", "==", "!="):
            kind = right.type if double else "string"
            holds = matches(a, [(b, kind, self._raw(right))])
            return (holds if sign != "!=" or holds is None else not holds), needs
        return None, needs or frozenset({self._raw(node)})

    def _in_double(self, node: Node) -> bool:
        above: Node | None = node
        while above is not None and above.type != "test_command":
            above = above.parent
        return above is not None and above.children[0].type == "[["

    # -- words -----------------------------------------------------------------------

    def _word(self, text: Text, node: Node) -> Word:
        source = self._raw(node)
        return Word(text, self._file, self._line(node), source[:500])

    def _unknown(self, node: Node, need: str) -> Word:
        return self._word(unknown(need[:200]), node)

    def _arguments(self, nodes: Iterable[Node], world: World) -> list[Word]:
        """The words that the nodes expand to. Adjacent nodes are one word to bash."""
        groups: list[list[Node]] = []
        for node in nodes:
            if node.type != "comment" and "redirect" not in node.type:
                if groups and groups[-1][-1].end_byte == node.start_byte:
                    groups[-1].append(node)
                else:
                    groups.append([node])
        found: list[Word] = []
        for group in groups:
            array = self._array(group[0], world) if len(group) == 1 else None
            found += self._split(group, world) if array is None else array
            if len(found) > MOST_WORDS:
                self._give_up(group[0], f"more than {MOST_WORDS} words; no further")
                del found[MOST_WORDS:]
                break
        self._steps += len(found) // 10
        return found

    def _split(self, nodes: list[Node], world: World) -> Iterator[Word]:
        """One word, or several if something unquoted in it contains blanks."""
        bounds = nodes[0].start_byte, nodes[-1].end_byte
        raw = self._source[bounds[0] : bounds[1]].decode("utf-8", "replace")
        if PLAIN.fullmatch(raw) and HOLE not in raw:
            yield self._word(Text(raw), nodes[0])
            return
        parts = [part for node in nodes for part in _parts(node)]
        text = self._joined(parts, *bounds, world, splits=True)
        # "a${list[@]}b" expands to as many words as the list has.
        is_list = LISTS.search(raw) and "${#" not in raw
        if is_list and (" " in text.shape or text.needs):
            yield self._partly(nodes[0], raw)
            return
        if "{" in raw and MORE_BRACES.search(raw):
            yield from self._braced(text, raw, nodes[0])
            return
        fields = text.shape.split(BLANK)
        if len(fields) > 1 or nodes[0].type in EXPANSIONS:
            fields = [one for one in fields if one]  # the shell drops an empty one
        for one in fields:
            needs = text.needs if HOLE in one else frozenset()
            yield self._word(Text(one, needs), nodes[0])

    def _partly(self, node: Node, raw: str) -> Word:
        """A word of which only the start is certain."""
        start = PLAIN.match(raw)
        begins = start[0] if start else ""
        return self._word(Text(begins + HOLE, frozenset({raw[:200]})), node)

    def _braced(self, text: Text, raw: str, node: Node) -> Iterator[Word]:
        """A word with braces: several words, if nothing in it is quoted or expanded."""
        plain = not set(raw) & set("\"'\\$`")
        words = shell_patterns.braced(raw) if plain else None
        if words is not None and any(MORE_BRACES.search(word) for word in words):
            words = None
        if words is None and MORE_BRACES.search(_without_quotes(raw)):
            yield self._partly(node, raw)
        elif words is None:
            yield self._word(text, node)
        else:
            for word in words:
                yield self._word(Text(word), node)

    def _array(self, node: Node, world: World) -> list[Word] | None:
        """The elements, if a word is nothing but ``${A[@]}``, ``"$@"`` or ``$*``."""
        raw = self._raw(node)
        quoted = raw.startswith('"') and raw.endswith('"') and len(raw) > 1
        inner = raw[1:-1] if quoted else raw
        if quoted and ("[*]" in inner or inner in ("$*", "${*}")):
            return None
        if found := ARGUMENTS.fullmatch(inner):
            start = int(found["from"] or 1)
            words = world.arguments[max(0, start - 1) :]
        elif found := ALL_OF.fullmatch(inner):
            name, rest = found["name"], found["rest"] or ""
            if name not in world.variables:
                is_empty = rest[:1] in (":", "-", "+") or name in world.unset
                return [] if is_empty else [self._unknown(node, name)]
            words = world.variables[name]
            if rest[:1] == ":" and rest[1:2].isdigit():
                if any(w.text.needs for w in words):
                    return [self._unknown(node, name)]
                first, _, count = rest[1:].partition(":")
                words = words[int(first) :][: int(count) if count else None]
        else:
            return None
        return list(words) if quoted else list(self._unquoted(words, world, node))

    def _unquoted(
        self, words: Iterable[Word], world: World, node: Node
    ) -> Iterator[Word]:
        """Each word split at its blanks, as an expansion without quotes is."""
        for word in words:
            if "IFS" in world.variables:
                yield self._unknown(node, "IFS")
                continue
            for part in BLANKS.split(word.text.shape.strip(" \t\n")):
                if part:
                    needs = word.text.needs if HOLE in part else frozenset()
                    yield word._replace(text=Text(part, needs))

    def _text(self, node: Node, world: World) -> Text:
        """The value of a word, or of a part of one, as one string."""
        raw = self._raw(node)
        kind = node.type
        bounds = node.start_byte, node.end_byte
        if kind == "raw_string":
            return self._held(raw[1:-1])
        if kind == "ansi_c_string":
            plain = shell_patterns.unescaped(raw[2:-1])
            return unknown(raw) if plain is None else self._held(plain)
        if kind in ("string", "translated_string"):
            start = node.start_byte + raw.index('"') + 1
            end = node.end_byte - 1
            return self._joined(node.children, start, end, world, quoted=True)
        if kind == "simple_expansion":
            return self._variable(raw.lstrip()[1:], world)
        if kind == "expansion":
            return self._expansion(node, world)
        if kind == "arithmetic_expansion":
            parts = node.named_children
            number = self._number(parts[-1], world) if parts else 0
            if number is None:
                return unknown(*(self._needs(node, world) or {raw[:200]}))
            return Text(str(number))
        if kind == "command_substitution":
            return self._output(node, world)
        if kind in ("process_substitution", "ERROR"):
            return unknown(raw[:200])
        if node.named_children and kind not in ("word", "number", "regex"):
            return self._joined(node.children, *bounds, world)
        return concatenated(self._literal(*bounds, world, quoted=False))

    def _joined(
        self,
        nodes: Iterable[Node],
        start: int,
        end: int,
        world: World,
        *,
        quoted: bool = False,
        splits: bool = False,
    ) -> Text:
        """The nodes and the text between them, from start to end, in one string.

        With ``splits``, blanks from an unquoted expansion become ``BLANK``.
        """
        parts, at = [], start
        for node in nodes:
            if node.start_byte < at or node.end_byte > end:
                continue
            if node.type in EXPANDED or (node.named_child_count and not quoted):
                begins = at == start
                bounds = at, self._begin(node)
                parts += self._literal(*bounds, world, quoted=quoted, begins=begins)
                if splits and node.type == "expansion":
                    part = self._expansion(node, world, splits=True)
                else:
                    part = self._text(node, world)
                if splits and node.type in EXPANSIONS:
                    if "IFS" in world.variables and BLANKS.search(part.shape):
                        part = unknown("IFS")
                    part = Text(BLANKS.sub(BLANK, part.shape), part.needs)
                parts.append(part)
                at = node.end_byte
        parts += self._literal(at, end, world, quoted=quoted, begins=at == start)
        return concatenated(parts)

    def _begin(self, node: Node) -> int:
        """Where it starts. To the parser the blanks between two expansions in a string
        are part of the second."""
        raw = self._raw(node)
        is_one = node.type in (*EXPANSIONS, "arithmetic_expansion")
        blanks = len(raw) - len(raw.lstrip()) if is_one else 0
        return int(node.start_byte) + blanks

    def _literal(
        self, start: int, end: int, world: World, *, quoted: bool, begins: bool = True
    ) -> list[Text]:
        """A text of the source; the parser leaves some ``$name`` in it (``a:$b``).

        ``begins`` is whether it is at the start of a word, where ``~/`` may be.
        """
        text = self._source[start:end].decode("utf-8", "replace")
        if not self._here.needs:
            text = text.replace(HOLE, "")
        if self._marks and quoted:
            text = ESCAPED_END.sub(lambda found: found[1] or JOINED, text)
        plain = shell_patterns.in_quotes if quoted else shell_patterns.unquoted
        found, at = [], 0
        for match in NAMES.finditer(text):
            if match[1] or match[0] == HOLE:
                before = Text(plain(text[at : match.start()]))
                name = match[1]
                part = self._variable(name, world) if name else self._held(HOLE)
                found += [before, part]
                at = match.end()
        found.append(Text(plain(text[at:])))
        if begins and not quoted and TILDE.match(text):
            head, _, rest = found[0].shape.partition("~")
            home = self._variable("HOME", world)
            found[:1] = [Text(head), home, Text(rest)]
        return found

    def _variable(self, name: str, world: World) -> Text:
        """``$name``; a variable that is not set is undetermined."""
        if name in world.variables:
            words = world.variables[name]
            return words[0].text if words else EMPTY
        if name == "#":
            return Text(str(len(world.arguments)))
        if name in ("@", "*"):
            return _spaced(world.arguments, world)
        if name == "0":
            return self._script
        if name == "BASH_SOURCE":
            return self._here.path or Text(self._file)
        if re.fullmatch("[0-9]{1,4}", name) and 0 < int(name) <= len(world.arguments):
            return world.arguments[int(name) - 1].text
        if name == "PWD":
            return self._absolute(world, ".")
        if name in world.unset:
            return EMPTY
        return unknown(name)

    def _is_set(self, name: str, world: World) -> bool:
        if name.isdigit():
            return len(name) < 4 and int(name) <= len(world.arguments)
        return name in world.variables or name in ("#", "PWD", "BASH_SOURCE")

    def _expansion(self, node: Node, world: World, *, splits: bool = False) -> Text:
        raw = self._raw(node).lstrip()
        found = PARAMETER.match(raw)
        if found is None:
            return unknown(raw[:200])
        name, index = found["name"], found["index"]
        rest = raw[found.end() : -1]
        start = self._begin(node) + len(raw[: found.end()].encode())
        if found["length"]:
            return self._length(name, index, world)
        if found["indirect"]:
            target = self._variable(name, world)
            if index is not None or rest or target.needs:
                return unknown(raw[:200])
            return self._variable(target.shape, world)
        sign = DEFAULT.match(rest)
        value = self._element(name, index, world)
        if sign is not None:
            bounds = start + len(sign[0]), node.end_byte - 1
            other = self._joined(node.children, *bounds, world)
            if splits and set(rest) & set("\"'") and BLANKS.search(other.shape):
                other = unknown(raw[:200])  # quoted blanks in it do not split
            return self._defaulted(name, sign[0], value, other, world)
        if rest and name in ("@", "*"):
            return unknown(raw[:200])
        if not rest or value.needs:
            return value
        if name in world.arrays and index in ("@", "*"):
            return unknown(raw[:200])
        if rest[0] in "#%":  # each prefix, or suffix, is matched against the pattern
            self._steps += len(value.shape) ** 2 >> 14
        plain = self._filled(rest, world)
        changed = None if plain is None else shell_patterns.changed(value.shape, plain)
        return unknown(raw[:200]) if changed is None else Text(changed)

    def _filled(self, text: str, world: World) -> str | None:
        """A pattern with its ``$name`` and ``${name}`` filled in."""
        parts = []
        for part in re.split(r"(\$\{?[A-Za-z_]\w*\}?)", text, flags=re.ASCII):
            if part.startswith("$"):
                value = self._variable(part.strip("${}"), world).value
                if value is None:
                    return None
                part = value
            parts.append(part)
        return "".join(parts)

    def _defaulted(
        self, name: str, sign: str, value: Text, other: Text, world: World
    ) -> Text:
        if name in BASHS and name not in world.variables:
            return unknown(name)
        is_set = self._is_set(name, world)
        if is_set and sign[0] == ":":
            if value.needs and not value.shape.replace(HOLE, ""):
                return Text(HOLE, value.needs)  # it may be empty, too
            is_set = value.shape != ""
        if sign[-1] == "+":
            return other if is_set else EMPTY
        if is_set:
            return value
        return unknown(name) if sign[-1] == "?" else other

    def _element(self, name: str, index: str | None, world: World) -> Text:
        words = world.variables.get(name)
        if name == "BASH_SOURCE" or index is None or words is None:
            return self._variable(name, world)
        if index in ("@", "*"):
            return _spaced(words, world)
        if re.fullmatch("[0-9]{1,5}", index) and not any(w.text.needs for w in words):
            return words[int(index)].text if int(index) < len(words) else EMPTY
        return unknown(f"{name}[{index}]")

    def _length(self, name: str, index: str | None, world: World) -> Text:
        if index in ("@", "*") or name in ("@", "*"):
            words = world.variables.get(name, ())
            words = world.arguments if name in ("@", "*") else words
            if any(word.text.needs for word in words):
                return unknown(name)
            return Text(str(len(words)))
        value = self._element(name, index, world)
        return value if value.needs else Text(str(len(value.shape)))

    def _output(self, node: Node, world: World) -> Text:
        """What a command prints, if that can be told without execution."""
        inner = [c for c in node.named_children if c.type != "comment"]
        nothing = unknown(self._raw(node)[:200])
        if len(inner) != 1:
            return nothing
        command = inner[0]
        if command.type == "subshell" and command.end_byte == node.end_byte - 1:
            return self._calculated(node, world) or nothing
        if command.type == "list":
            return self._entered(command, world) or nothing
        return self._printed(command, world) or nothing

    def _printed(self, command: Node, world: World) -> Text | None:
        """What a single command prints; None if that is not certain."""
        if command.type == "redirected_statement":
            return self._shown(command, world)
        if command.type != "command":
            return None
        words = self._arguments(_command_parts(command), world)
        values = [word.text.value for word in words]
        known = [value for value in values if value is not None]
        if not known or len(known) < len(values) or known[0] in world.functions:
            return None
        place = world.directory
        text = shell_patterns.printed(
            known, lambda path: self._absolute(world, path, place).value
        )
        return None if text is None else Text(text)

    def _calculated(self, node: Node, world: World) -> Text | None:
        """``$((1 + 2))``, which the parser takes for a subshell in ``${x:-...}``."""
        raw = self._raw(node).lstrip()
        if not raw.startswith("$(("):
            return None
        outer, self._here = self._here, self._here._replace(text=f": {raw}".encode())
        try:
            command = Parser(BASH).parse(self._source).root_node.named_children[0]
            read = command.named_children[-1]
            is_number = read.type == "arithmetic_expansion"
            return self._text(read, world) if is_number else None
        finally:
            self._here = outer

    def _entered(self, command: Node, world: World) -> Text | None:
        """``cd DIRECTORY && pwd``."""
        before, after = command.named_children[0], command.named_children[-1]
        if before.type == "redirected_statement":
            before = before.named_children[0]
        if self._raw(after).split() not in (["pwd"], ["pwd", "-P"]):
            return None
        if before.type != "command" or len(command.children) != 3:
            return None
        words = self._arguments(_command_parts(before), world)
        places = [w.text for w in words[1:] if w.text.shape not in ("--", "-P")]
        if not words or words[0].text.value != "cd" or len(places) != 1:
            return None
        if places[0].needs or places[0].shape.startswith("-"):
            return None
        return self._absolute(world, places[0].shape)

    def _shown(self, command: Node, world: World) -> Text | None:
        """``cat <<EOF``."""
        kinds = [r.type for r in command.children_by_field_name("redirect")]
        body = command.child_by_field_name("body")
        if kinds != ["heredoc_redirect"] or body is None or self._raw(body) != "cat":
            return None
        redirect = command.children_by_field_name("redirect")[0]
        parts = {"heredoc_start", "heredoc_body", "heredoc_end"}
        if {c.type for c in redirect.named_children} - parts:
            return None  # a pipe, say
        text = self._document(redirect, world)
        return Text(text.shape.rstrip("\n"), text.needs)

    def _document(self, node: Node, world: World) -> Text:
        body = next((c for c in node.children if c.type == "heredoc_body"), None)
        start = next((c for c in node.children if c.type == "heredoc_start"), None)
        if body is None or start is None:
            return EMPTY
        raw = self._raw(body).replace("\\\n", "")
        # In double quotes a quote is escaped, too, but not here.
        if node.children[0].type == "<<-" or re.search(r"\\(?![$`\\])", raw):
            return unknown("a here-document")
        if not NAME.fullmatch(self._raw(start)):  # quoted delimiter: literal text
            return self._held(self._raw(body))
        bounds = body.start_byte, body.end_byte
        text = self._joined(body.children, *bounds, world, quoted=True)
        return Text(text.shape.replace("\\\n", ""), text.needs)

    def _absolute(self, world: World, path: str, place: Text | None = None) -> Text:
        """A path relative to the script's current directory; links are not followed."""
        place = world.directory if place is None else place
        if place.needs and not path.startswith("/"):
            return place
        whole = PurePosixPath(self._place, place.shape.replace(HOLE, ""), path)
        parts: list[str] = []
        for part in whole.parts:
            if part == ".." and len(parts) > 1:
                parts.pop()
            elif part != "..":
                parts.append(part)
        return Text(str(PurePosixPath(*parts)))

    # -- numbers ---------------------------------------------------------------------

    def _number(self, node: Node, world: World) -> int | None:
        """The value of an arithmetic expression; None if undetermined."""
        kind, parts = node.type, node.children
        if kind in ("number", "word", "variable_name"):
            raw = self._raw(node)
            return self._named(raw, world) if NAME.fullmatch(raw) else _integer(raw)
        if kind in (*EXPANSIONS, "string", "concatenation"):
            return _integer(self._text(node, world).value)
        if kind == "parenthesized_expression" and len(node.named_children) == 1:
            return self._number(node.named_children[0], world)
        numbers = [self._number(child, world) for child in node.named_children]
        values = [number for number in numbers if number is not None]
        if len(values) < len(numbers) or not values:
            return None
        if kind == "unary_expression" and len(values) == 1:
            if parts[-1].type.endswith("nary_expression"):
                return None  # the parser gives the sign a wider scope than it has
            sign = self._raw(parts[0])
            return {"-": -values[0], "+": values[0], "!": int(not values[0])}.get(sign)
        if kind == "ternary_expression" and len(values) == 3:
            return values[1] if values[0] else values[2]
        if kind == "binary_expression" and len(values) == 2:
            sign = self._raw(parts[1])
            inside = {self._raw(c.children[1]) for c in parts if len(c.children) == 3}
            signs = [c for c in parts if c.type == "unary_expression"]
            if sign == "**" and ("**" in inside or signs):
                return None  # right-associative, and binds tighter than a sign
            return calculated(sign, *values)
        return None

    def _named(self, name: str, world: World) -> int | None:
        return _integer(self._variable(name, world).value)

    def _needs(self, node: Node, world: World) -> frozenset[str]:
        """What would determine the variables below a node."""
        found: frozenset[str] = frozenset()
        for child in node.named_children:
            raw = self._raw(child)
            if child.type == "variable_name" or NAME.fullmatch(raw):
                found |= self._variable(raw, world).needs
            elif child.type in EXPANSIONS:
                found |= self._text(child, world).needs
            else:
                found |= self._needs(child, world)
        return found


def _parts(node: Node) -> list[Node]:
    return node.children if node.type == "concatenation" else [node]


def _command_parts(command: Node) -> list[Node]:
    """The nodes of a command's words, its name first."""
    found = []
    for child in command.children:
        if child.type == "command_name":
            found += child.children
        elif child.type != "variable_assignment":
            found.append(child)
    return found


def _without_quotes(raw: str) -> str:
    return re.sub(r"'[^']*'|\"(?:\\.|[^\"\\])*\"|\$\{[^{}]*\}|\\.", "x", raw)


def _integer(text: str | None) -> int | None:
    """A number as bash reads it; None for other texts and for other bases."""
    found = re.fullmatch(r"\s*([+-]?)(0|[1-9][0-9]{0,18})?\s*", text or "")
    if text is None or found is None:
        return None
    value = int(found[1] + (found[2] or "0"))
    return value if abs(value) < BIGGEST else None


def calculated(sign: str, a: int, b: int) -> int | None:
    """``a sign b`` in 64 bits; None if bash's own result may differ."""
    if sign == "**":
        return None if b < 0 or b > 63 or abs(a**b) >= BIGGEST else a**b
    if (sign in ("/", "%") and b == 0) or (sign in ("<<", ">>") and not 0 <= b < 64):
        return None
    if sign in ("/", "%"):  # truncated towards zero, as in C
        whole = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
        return whole if sign == "/" else a - b * whole
    found = OPERATIONS.get(sign)
    value = None if found is None else int(found(a, b))
    return value if value is not None and abs(value) < BIGGEST else None


def _truth(number: int | None) -> bool | None:
    return None if number is None else number != 0


def _spaced(words: Iterable[Word], world: World) -> Text:
    words = list(words)
    if "IFS" in world.variables:
        return unknown("IFS")
    parts: list[Text] = []
    for word in words:
        parts += [Text(" ")] if parts else []
        parts.append(word.text)
    return concatenated(parts)


def matches(subject: Text, patterns: Iterable[tuple[Text, str, str]]) -> bool | None:
    """Whether a pattern matches; each has its text, its kind of node, its source.

    Quoted patterns are literal.
    """
    unsure = False
    for pattern, kind, source in patterns:
        if source == "*":
            return not unsure or None
        if subject.needs or pattern.needs:
            unsure = True
            continue
        if kind in QUOTED:
            holds: bool | None = subject.shape == pattern.shape
        elif shell_patterns.QUOTES & set(source) - {"$"}:
            holds = None  # partly quoted
        else:
            holds = shell_patterns.fits(subject.shape, pattern.shape)
        if holds:
            return True
        unsure = unsure or holds is None
    return None if unsure else False
