"""What bash does to a text: quotes, patterns, ``${name%pattern}`` and the like."""

from __future__ import annotations

import fnmatch
import itertools
import posixpath
import re
from collections.abc import Callable

ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "e": "\x1b"}
# Longer patterns, or more stars, would be tried at too many places.
LONGEST_PATTERN = 200
LONGEST_TRIMMED = 4096
MOST_STARS = 3
MOST_BRACES = 64
BRACES = re.compile(r"\{([^{}\s]*,[^{}\s]*|(?:0|-?[1-9]\d*)\.\.(?:0|-?[1-9]\d*))\}")
# Special in a bash pattern, or read differently by fnmatch.
QUOTES = set("\"'\\$`")


def unescaped(text: str) -> str | None:
    """The text between ``$'`` and ``'``; None for unsupported escapes."""
    if re.search(r"\\[^ntr\\'\"e]", text):
        return None
    return re.sub(r"\\(.)", lambda m: ESCAPES[m[1]], text, flags=re.DOTALL)


def unquoted(text: str) -> str:
    """Outside quotes a backslash makes the next character literal."""
    return re.sub(r"\\(.)", r"\1", text.replace("\\\n", ""), flags=re.DOTALL)


def in_quotes(text: str) -> str:
    """In double quotes a backslash escapes only these (bash(1), Quoting)."""
    return re.sub(r'\\(?:\n|([$`"\\]))', lambda found: found[1] or "", text)


def fits(text: str, pattern: str) -> bool | None:
    """Whether the whole text matches the pattern; None if that is not supported."""
    if len(pattern) > LONGEST_PATTERN or len(text) > LONGEST_TRIMMED:
        return None
    if QUOTES & set(pattern) or pattern.count("*") > MOST_STARS or "(" in pattern:
        return None
    return fnmatch.fnmatchcase(text, pattern.replace("[^", "[!"))


def braced(text: str) -> list[str] | None:
    """``a{b,c}`` as two words (bash(1), Brace Expansion); None for too many."""
    done, found = [text], []
    while done:
        one = done.pop()
        match = BRACES.search(one)
        if match is None:
            found.append(one)
            continue
        inner = match[1]
        if "," in inner:
            parts = inner.split(",")
        else:
            first, last = (int(part) for part in inner.split(".."))
            step = 1 if last >= first else -1
            parts = [
                str(n) for n in itertools.islice(range(first, last + step, step), 65)
            ]
        if len(parts) + len(done) + len(found) > MOST_BRACES:
            return None
        done += [
            one[: match.start()] + part + one[match.end() :] for part in parts[::-1]
        ]
    return found


def changed(text: str, change: str) -> str | None:
    """``${name<change>}`` for a known value; None if the change is not supported."""
    cases = {"^^": text.upper(), ",,": text.lower()}
    cases |= {"^": text[:1].upper() + text[1:], ",": text[:1].lower() + text[1:]}
    if change in cases:
        return cases[change]
    found = re.fullmatch(r":\s*([0-9]{1,6})(?::\s*([0-9]{1,6}))?", change)
    if found:
        start = int(found[1])
        return text[start : start + int(found[2])] if found[2] else text[start:]
    if QUOTES & set(change) or "[" in change or "(" in change:
        return None
    if change[:1] in ("#", "%"):
        return _trimmed(text, change)
    found = re.fullmatch(r"(//?)([^/#%][^/]*)(?:/(.*))?", change, re.DOTALL)
    if found is None or set(found[2]) & set("*?"):
        return None
    return text.replace(found[2], found[3] or "", -1 if found[1] == "//" else 1)


def _trimmed(text: str, change: str) -> str | None:
    """The value without its shortest, or longest, matching prefix (#) or suffix (%)."""
    sign, longest = change[0], change[:2] == change[0] * 2
    pattern = change[2 if longest else 1 :]
    if fits(text, pattern) is None:
        return None
    sizes = range(len(text) + 1)
    for size in reversed(sizes) if longest else sizes:
        part = text[:size] if sign == "#" else text[len(text) - size :]
        if fits(part, pattern):
            return text[size:] if sign == "#" else text[: len(text) - size]
    return text


def printed(words: list[str], absolute: Callable[[str], str | None]) -> str | None:
    """The output of a program that depends on its words alone; None for all others.

    Links are not followed: for ``realpath`` and ``readlink -f`` that is a guess as
    good as the paths' names.
    """
    name, arguments = words[0], words[1:]
    if name == "dirname" and arguments[:1] == ["--"]:
        arguments = arguments[1:]
    if name == "readlink" and arguments[:1] == ["-f"]:
        name, arguments = "realpath", arguments[1:]
    if name == "expr":
        return _reckoned(arguments)
    if any(word.startswith("-") for word in arguments):
        return None
    if name == "echo":
        return " ".join(arguments)
    if name == "pwd" and not arguments:
        return absolute(".")
    if name == "dirname" and len(arguments) == 1:
        path = arguments[0].rstrip("/")
        return posixpath.dirname(path).rstrip("/") or (
            "/" if arguments[0][:1] == "/" else "."
        )
    if name == "basename" and len(arguments) in (1, 2):
        base = posixpath.basename(arguments[0].rstrip("/")) or "/"
        end = arguments[1] if len(arguments) > 1 else ""
        return base.removesuffix(end) if end and base != end else base
    if name == "realpath" and len(arguments) == 1:
        whole = absolute(arguments[0])
        return None if whole is None else posixpath.normpath(whole)
    if name == "seq":
        return _counted(arguments)
    return None


def _reckoned(arguments: list[str]) -> str | None:
    """The output of ``expr`` for integers and operators of the same precedence."""
    numbers, signs = arguments[::2], {*arguments[1::2]}
    is_whole = all(re.fullmatch(r"[0-9]{1,9}", number) for number in numbers)
    if not is_whole or len(arguments) % 2 == 0 or len(arguments) > 9:
        return None
    if not (signs <= {"+", "-"} or signs <= {"*", "/", "%"}):
        return None
    found = int(numbers[0])
    for sign, number in zip(arguments[1::2], map(int, numbers[1:]), strict=True):
        if sign in ("/", "%") and number == 0:
            return None
        found = {
            "+": found + number,
            "-": found - number,
            "*": found * number,
            "/": found // (number or 1),
            "%": found % (number or 1),
        }[sign]
    return str(found)


def _counted(arguments: list[str]) -> str | None:
    if not 1 <= len(arguments) <= 3:
        return None
    if not all(re.fullmatch(r"[0-9]{1,6}", word) for word in arguments):
        return None
    numbers = [int(word) for word in arguments]
    first = numbers[0] if len(numbers) > 1 else 1
    step = numbers[1] if len(numbers) == 3 else 1
    if step == 0 or (numbers[-1] - first) // step > 1000:
        return None
    return "\n".join(map(str, range(first, numbers[-1] + 1, step)))
