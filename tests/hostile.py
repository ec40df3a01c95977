"""Lines that make a backtracking search slow, made from a line that a pattern fits."""

from __future__ import annotations

import re
from collections.abc import Iterator

LENGTH = 3300
SEAS = ("a", " ", "0", "_", ".", "(", "'", '"', "a.", "a b ", "1 ", "Error: ", "[1] ")


def lines(example: str, texts: tuple[str, ...] = ()) -> Iterator[bytes]:
    """Lines of some LENGTH characters that nearly fit what fits ``example``.

    Each piece of the example, from a word to all of it, is repeated in its place, and
    half of what follows left out: each way to read the repetitions fails at the end.
    """
    words = re.findall(r"\w+|\W", example)
    for at in range(len(words)):
        before, rest = "".join(words[:at]), "".join(words[at + 1 :])
        for piece in (words[at], "".join(words[at : at + 2]), example):
            sea = piece * (LENGTH // len(piece))
            yield f"{before}{sea}{rest[: len(rest) // 2]}".encode()
    for sea in SEAS:
        for text in texts:
            yield (sea * 600)[:600].encode() + text.encode() + sea.encode() * LENGTH
