"""The ids of a tokenizer.json, read in chunks: many are tens of megabytes long."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

# A text, followed after a key by a number or the opening bracket of its value; or a
# lone bracket. An unfinished text extends to the end.
TOKEN = re.compile(
    rb'"(?P<text>(?:[^"\\]++|\\.)*+)(?:"|\\?\Z)\s*+'
    rb"(?:(?P<colon>:)\s*+(?P<value>\d{1,18}+|[\[{])?+)?+|[\[\]{}]",
    re.DOTALL,
)
PIECE = 1 << 20
LONGEST = 4 << 20
MOST_BYTES = 64 << 20


def read(path: Path) -> Iterator[tuple[bytes, int]]:
    """Each token in UTF-8 with its id; those of a Unigram model are listed by id.

    The tokens of ``vocab``, which is a mapping or a list, and of ``added_tokens``.
    Raises OSError if the file cannot be read, ValueError if it has none.
    """
    if not path.is_file() or path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{path} is not a file of at most {MOST_BYTES} bytes")
    missing = {b"vocab", b"added_tokens"}
    section, depth, number, key = b"", 0, 0, b""
    entry: dict[bytes, bytes] = {}
    for found in _tokens(path):
        text, value, sign = found["text"], found["value"], found[0]
        if not section:
            if text in missing and value in (b"{", b"["):
                section, depth, number = text + value, 1, 0
        elif text is None:
            depth += 1 if sign in b"[{" else -1
            if b"id" in entry and b"content" in entry:
                yield _plain(entry[b"content"]), int(entry[b"id"])
            entry, key = {}, b""
            if not depth:
                missing.discard(section[:-1])
                section = b""
            if not missing:
                return  # stops before the merges, which are as long again
        elif section == b"vocab{":
            if value is None or not value.isdigit():
                raise ValueError(f"{path} has a token whose id is not a number")
            yield _plain(text), int(value)
        elif section == b"vocab[":
            yield _plain(text), number
            number += 1
        elif found["colon"]:
            key = text
            depth += value in (b"{", b"[")
            if value is not None and value.isdigit():
                entry[key] = value
        else:
            entry[key] = text
    if b"vocab" in missing:
        raise ValueError(f"{path} has no vocabulary")


def _tokens(path: Path) -> Iterator[re.Match[bytes]]:
    left = b""
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            whole = left + piece
            left = b""
            for found in TOKEN.finditer(whole):
                if found.end() == len(whole):  # it may continue in the next chunk
                    left = found[0]
                    break
                yield found
            if len(left) > LONGEST:
                raise ValueError(f"{path} has a text of more than {LONGEST} bytes")
    yield from TOKEN.finditer(left)


def _plain(text: bytes) -> bytes:
    if b"\\" not in text:
        return text
    return str(json.loads(b'"%b"' % text)).encode("utf-8", "surrogatepass")
