"""Text in columns and lines by the width a terminal gives it.

A Chinese character is two columns wide, and a line may end after it without a space.
"""

from __future__ import annotations

import re
import textwrap

WIDTH = 80
# Chinese commas, stops and closing brackets: no line begins with one; nor does one end
# with an opening bracket (Unicode's line breaking, classes CL, EX and OP).
_CLOSE = "\uff0c\u3002\u3001\uff1b\uff1a\uff01\uff1f\uff09\u300b\u300d\u300f\u201d"
_OPEN = "\uff08\u300a\u300c\u300e\u201c"
_WIDE = "\u2e80-\u9fff\uf900-\uffef"
# What stays on one line: a wide character or a word, with its brackets and stops.
_UNIT = re.compile(
    rf"[{_OPEN}]*(?:[^\s{_WIDE}{_OPEN}]+|[{_WIDE}])[{_CLOSE}]*|[{_OPEN}]+|\s+"
)


def cells(text: str) -> int:
    """The columns that a text takes."""
    if text.isascii():
        return len(text)
    # Not at the top: a text in English does without it.
    from rich.cells import cell_len

    return cell_len(text)


def cut(text: str, limit: int) -> str:
    """The text in at most so many characters: at the end of a word, if there is one."""
    if len(text) <= limit:
        return text
    room = limit - 3
    ends = [unit.end() for unit in _UNIT.finditer(text, 0, room + 1)]
    # The last one goes on beyond the room, or is a space there.
    at = ends[-2] if ends[1:] and ends[-2] > room // 2 else room
    return f"{text[:at].rstrip()}..."


def cropped(text: str, width: int) -> str:
    """The text in at most ``width`` columns, with ``~`` at its end if it had more."""
    if cells(text) <= width:
        return text
    from rich.cells import set_cell_size

    return set_cell_size(text, max(0, width - 1)).rstrip() + "~"


def padded(text: str, width: int) -> str:
    """The text with spaces up to ``width`` columns."""
    return text + " " * (width - cells(text))


def wrapped(
    first: str, text: str, rest: str | None = None, width: int = WIDTH
) -> list[str]:
    """The text in lines of ``width`` columns, after ``first``, then ``rest`` or
    spaces."""
    after = " " * cells(first) if rest is None else rest
    if cells(text) == len(text) and cells(first) == len(first):
        return textwrap.wrap(
            text,
            width,
            initial_indent=first,
            subsequent_indent=after,
            # A word split in two may be a path, or start the next line with ::.
            break_long_words=False,
            break_on_hyphens=False,
        )
    lines, line = [], first
    empty = True
    for unit in _UNIT.findall(" ".join(text.split())):
        if not empty and cells(line) + cells(unit.rstrip()) > width:
            lines.append(line.rstrip())
            line, empty = after, True
        if not (empty and unit.isspace()):
            line, empty = line + unit, False
    return [*lines, line.rstrip()] if not empty else lines
