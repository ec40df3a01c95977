"""Hydra's override grammar: what a word means, or why Hydra refuses it.

After OverrideLexer.g4, OverrideParser.g4 and overrides_visitor.py of hydra-core 1.3.2.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

NAME = r"[A-Za-z_][\w-]*"
SPECIAL = r"[A-Za-z_$][\w$-]*"
UNSIGNED = r"(?:0|[1-9](?:_?[0-9])*)"
PACKAGE = rf"(?:(?:{SPECIAL}|{UNSIGNED})(?:\.(?:{SPECIAL}|{UNSIGNED}))+|{SPECIAL})"
KEY = re.compile(
    rf"(?P<sign>\+\+|\+|~)?(?P<key>(?:{PACKAGE}|{NAME}(?:/{NAME})+)(?:@{PACKAGE}?)?)",
    re.ASCII,
)
POINT = rf"(?:{UNSIGNED}?\.[0-9](?:_?[0-9])*|{UNSIGNED}\.)"
EXPONENT = rf"(?:{POINT}|{UNSIGNED})[eE][+-]?[0-9](?:_?[0-9])*"
WHOLE = re.compile(rf"[+-]?{UNSIGNED}")
REAL = re.compile(rf"[+-]?(?:{EXPONENT}|{POINT}|(?i:inf|nan))")
# Texts of these characters alone are one value, without quotes.
PLAIN = re.compile(r"[\w/\-+.$%*@?|:]+", re.ASCII)
# ANTLR takes the longest token; in this order that is the first match.
TOKEN = re.compile(
    r"(?P<opens>[ \t]*\([ \t]*|[\[{][ \t]*)|(?P<closes>[ \t]*[)\]}])"
    r"|(?P<divides>[ \t]*[,:=][ \t]*)|(?P<blank>[ \t]+)"
    r"|(?P<quoted>\"(?:[^\"\\]|\\(?s:.))*\"|'(?:[^'\\]|\\(?s:.))*')"
    r"|(?P<interpolation>\$\{[^}]+\})|(?P<escaped>(?:\\[\\()\[\]{}:=, \t])+)"
    rf"|(?P<name>{NAME})|(?P<number>{REAL.pattern}|{WHOLE.pattern})"
    r"|(?P<other>[/\-\\+.$%*@?|])",
    re.ASCII,
)
IN_A_KEY = {"name", "number", "other", "escaped", "blank"}
IN_A_TEXT = IN_A_KEY | {"interpolation", ":"}
WORDS = {"true": True, "false": False, "null": None}
SWEEPS = ("choice", "range", "interval", "glob", "tag", "sort", "shuffle")
CASTS = ("int", "float", "str", "bool")
DEEPEST = 50


class RefusedError(ValueError):
    """Why Hydra refuses a word, as the rest of a sentence that begins with it."""


class Sweep(NamedTuple):
    """Several values at once; --multirun starts a job for each."""

    text: str


class Function(NamedTuple):
    """A cast of anything but a plain value: only Hydra can tell the result."""

    text: str


class Assignment(NamedTuple):
    """``key=value``, with + or ++ for a key that may be new, or ~ to delete one.

    ``value`` is what Hydra makes of it: None, bool, int, float, str, list, dict, a
    Sweep or a Function.
    """

    sign: str
    key: str
    value: Any


def assignment(text: str) -> Assignment:
    """An override. Raises RefusedError if Hydra refuses it."""
    left, equals, right = text.partition("=")
    found = KEY.fullmatch(left)
    if found is None:
        raise RefusedError(_no_key(left, equals))
    sign, key = found["sign"] or "", found["key"]
    if not equals and sign != "~":
        raise RefusedError("has no value: expected is key=value")
    return Assignment(sign, key, value(right) if equals else None)


def value(text: str) -> Any:
    """The value after the =. Raises RefusedError if Hydra refuses it."""
    text = text.lstrip(" \t")
    if not text:
        return ""
    if PLAIN.fullmatch(text):
        return _typed(text)
    reader = _Reader(_tokens(text))
    found = [reader.element()]
    while reader.next == ",":
        reader.take()
        found.append(reader.element())
    if reader.next:
        raise RefusedError(reader.unexpected())
    return Sweep(text) if len(found) > 1 else found[0]


def _no_key(left: str, equals: str) -> str:
    if not left:
        return "has no key before the ="
    if left != left.strip():
        return "has a blank in its key: write key=value without blanks around the ="
    if ":" in left and not equals:
        return "is not an override: Hydra's are key=value, not key:value"
    if not equals or left.startswith("-"):
        return "is not an override, which is key=value"
    return f"has no key that Hydra reads: {left[:60]}"


def _typed(text: str) -> Any:
    """A text without quotes: null, true, a number, or the text itself."""
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    try:
        if WHOLE.fullmatch(text):
            return int(text)
    except ValueError:  # thousands of digits
        raise RefusedError("has a number with too many digits") from None
    if REAL.fullmatch(text):
        number = float(text)
        # Readers of this have no infinity; the text says the same.
        return number if abs(number) < float("inf") else text
    return text


def _tokens(text: str) -> list[tuple[str, str]]:
    """The tokens of a value by kind and text; a bracket or mark is its own kind."""
    found, at = [], 0
    while at < len(text):
        token = TOKEN.match(text, at)
        if token is None:
            raise RefusedError(_strange(text[at]))
        is_mark = token.lastgroup in ("opens", "closes", "divides")
        found.append((token[0].strip() if is_mark else str(token.lastgroup), token[0]))
        at = token.end()
    return found


def _strange(char: str) -> str:
    if char in "'\"":
        return f"has a {char} that nothing closes, which Hydra refuses"
    shown = {"\n": "a line break", "\r": "a carriage return"}.get(char, char)
    return f"has {shown} outside of quotes, which Hydra refuses: write \"key='value'\""


class _Reader:
    """Goes through the tokens of one value."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self._tokens = tokens
        self._at = 0
        self._depth = 0

    @property
    def next(self) -> str:
        """The kind of the next token; empty at the end."""
        return self._ahead(0)

    def take(self) -> str:
        """The text of the next token, which is consumed."""
        self._at += 1
        return self._tokens[self._at - 1][1]

    def unexpected(self) -> str:
        """Why Hydra refuses the next token, or the end."""
        if not self.next:
            return "ends where a bracket is still open"
        shown = self._tokens[self._at][1].strip()
        if self.next == "=":
            return "has a second = in its value"
        if self.next == "quoted":
            return f"has {shown[:30]} in quotes, and something before it"
        after = self._at and self._tokens[self._at - 1][0] == "quoted"
        if after:
            return "has something after the closing quote"
        return f"has a {shown[:30] or 'blank'} where Hydra's grammar expects none"

    def element(self) -> Any:
        """A text, list, mapping or call."""
        self._depth += 1
        if self._depth > DEEPEST:
            raise RefusedError("is nested deeper than can be followed")
        start = self._at
        if self.next == "[":
            self.take()
            found: Any = self._many("]", self.element)
        elif self.next == "{":
            self.take()
            found = dict(self._many("}", self._pair))
        elif self.next == "name" and self._ahead(1) == "(":
            name = self.take()
            self.take()
            arguments = self._many(")", self._argument)
            whole = "".join(text for _, text in self._tokens[start : self._at])
            found = _called(name, arguments, whole)
        else:
            found = self._primitive(IN_A_TEXT)
        self._depth -= 1
        return found

    def _ahead(self, number: int) -> str:
        at = self._at + number
        return self._tokens[at][0] if at < len(self._tokens) else ""

    def _many(self, end: str, read: Any) -> list[Any]:
        found = []
        if self.next != end:
            found.append(read())
            while self.next == ",":
                self.take()
                found.append(read())
        if self.next != end:
            raise RefusedError(self.unexpected())
        self.take()
        return found

    def _pair(self) -> tuple[str, Any]:
        if self.next == "quoted":
            raise RefusedError("has a mapping with a key in quotes: leave them out")
        key = self._primitive(IN_A_KEY)
        if self.next != ":":
            raise RefusedError(self.unexpected())
        self.take()
        return str(key), self.element()

    def _argument(self) -> Any:
        if self.next == "name" and self._ahead(1) == "=":
            return Function(self.take() + self.take() + str(self.element()))
        return self.element()

    def _primitive(self, kinds: set[str]) -> Any:
        if self.next == "quoted" and kinds is IN_A_TEXT:
            return _unquoted(self.take())
        start = self._at
        while self.next in kinds:
            self.take()
        taken = self._tokens[start : self._at]
        if not taken:
            raise RefusedError(self.unexpected())
        if taken[0][0] == "blank":
            taken = taken[1:]
        if taken and taken[-1][0] == "blank":
            taken = taken[:-1]
        if not taken:
            raise RefusedError("has nothing but blanks where a value is expected")
        if len(taken) == 1 and taken[0][0] in ("name", "number"):
            return _typed(taken[0][1])
        return "".join(t[1::2] if kind == "escaped" else t for kind, t in taken)


def _unquoted(text: str) -> str:
    r"""A text without its quotes; \' is ', and \\ before the closing quote is \."""
    runs = list(re.finditer(rf"\\+{text[0]}", text))
    inner = re.sub(rf"\\+{text[0]}", lambda run: run[0][1::2], text[1:])
    return inner if runs and runs[-1].end() == len(text) else inner[:-1]


def _called(name: str, arguments: list[Any], text: str) -> Any:
    if name in SWEEPS:
        return Sweep(text)
    if name not in CASTS:
        known = ", ".join(CASTS + SWEEPS)
        raise RefusedError(f"calls {name}(...), and Hydra knows {known}")
    if len(arguments) == 1 and type(arguments[0]) in (int, float, str):
        try:
            return {"int": int, "float": float, "str": str}[name](arguments[0])
        except (KeyError, ValueError):
            pass
    return Function(text)
