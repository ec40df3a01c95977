"""Planted secrets of many kinds, and ordinary texts that look like them.

See tests/bundle_texts/README.md. Values are made anew from a seed.
"""

from __future__ import annotations

import base64
import random
import shlex
import string
import struct
import tomllib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent / "bundle_texts"
LETTERS = string.ascii_letters + string.digits
ALPHABETS = {
    "alnum": LETTERS,
    "hex": "0123456789abcdef",
    "word": LETTERS + "_-",
    "base64": LETTERS + "+/",
    "base64lower": string.ascii_lowercase + string.digits,
    "base32": string.ascii_uppercase + "234567",
    "digit": string.digits,
    "punct": LETTERS + "!$%^*~.",
}
WORDS = ("correct", "horse", "battery", "staple", "violet", "harbour", "lantern")
SEED = 20261126


class Planted(NamedTuple):
    """A text with a secret in it, and the parts of it that must not be readable."""

    kind: str
    carrier: str  # log, environment, configuration or stack
    text: str
    parts: tuple[str, ...]
    is_held_out: bool

    def survivors(self, redacted: str) -> list[str]:
        """The parts of which something can still be read: eight characters in a row."""
        return [part for part in self.parts if _is_readable(part, redacted)]


def _is_readable(part: str, redacted: str) -> bool:
    # A line of 8 characters of a longer part tells enough to be called a leak.
    width = min(8, len(part))
    return any(part[at : at + width] in redacted for at in range(len(part) - width + 1))


def secrets(seed: int = SEED, file: str = "secrets.toml") -> Iterator[Planted]:
    """Every kind in every carrier that fits it."""
    kinds = tomllib.loads((HERE / file).read_text())
    for number, (kind, about) in enumerate(kinds.items()):
        value, parts = _value(about["value"], random.Random(f"{seed} {kind}"))
        held_out = number % 2 == 1
        for carrier, text in _carriers(about, value):
            yield Planted(kind, carrier, text, parts, held_out)


def _carriers(about: dict[str, str], value: str) -> Iterator[tuple[str, str]]:
    for text in about["texts"]:
        yield "log", text.format(s=value)
    name = about["name"]
    if not name:
        return
    low = name.lower()
    if "\n" not in value:
        yield "environment", f"LANG=C\n{name}={value}\nHOME=/root"
        yield "configuration", f"logger: wandb\n{low}: {value}\nseed: 1"
        yield "configuration", f"export {name}='{value}'"
        yield "configuration", f'{{"seed": 1, "{low}": "{value}"}}'
        yield "log", f"+ {name}={shlex.quote(value)} python train.py"
    shown = value.replace("\n", "\\n")
    yield (
        "stack",
        f'    init (client.py:12)\n        Arguments:\n            {low}: "{shown}"',
    )
    yield "stack", f"TypeError: bad call init({low}='{shown}', retries=3)"
    yield "stack", f"environ({{'HOME': '/root', '{name}': '{shown}'}})"


def _value(parts: list[str], chance: random.Random) -> tuple[str, tuple[str, ...]]:
    made, hidden = [], []
    for part in parts:
        alphabet, colon, length = part.rpartition(":")
        if colon and alphabet in (*ALPHABETS, "uuid", "words") and length.isdecimal():
            one = _random(alphabet, int(length), chance)
            hidden += one.split(" ")
            made.append(one)
        else:
            made.append(part)
    return "".join(made), tuple(hidden)


def _random(alphabet: str, length: int, chance: random.Random) -> str:
    if alphabet == "uuid":
        return str(uuid.UUID(int=chance.getrandbits(128), version=4))
    if alphabet == "words":
        return " ".join(chance.sample(WORDS, length))
    while True:
        found = "".join(chance.choices(ALPHABETS[alphabet], k=length))
        if length < 8 or any(c.isdigit() for c in found):
            return found


class Ordinary(NamedTuple):
    """A text that redaction must not change."""

    text: str
    is_held_out: bool


def ordinary(seed: int = SEED) -> Iterator[Ordinary]:
    """The texts, and base64 of tensors and images in the ways that they are logged."""
    found = tomllib.loads((HERE / "ordinary.toml").read_text())
    for number, text in enumerate(found["texts"]):
        yield Ordinary(text, number % 2 == 1)
    chance = random.Random(f"{seed} blobs")
    for number, blob in enumerate(found["blobs"]):
        kind, _, count = blob.partition(":")
        encoded = base64.b64encode(_bytes(kind, int(count), chance)).decode()
        yield Ordinary(f'{{"shape": [{count}], "data": "{encoded}"}}', number % 2 == 1)
        yield Ordinary(f"logprobs payload {encoded} end", number % 2 == 0)


def _bytes(kind: str, count: int, chance: random.Random) -> bytes:
    if kind == "int64":
        return struct.pack(
            f"<{count}q", *(chance.randrange(151936) for _ in range(count))
        )
    if kind == "uint8image":
        return b"\x89PNG\r\n\x1a\n" + chance.randbytes(count)
    floats = struct.pack(f"<{count}f", *(chance.gauss(0, 0.02) for _ in range(count)))
    if kind == "float32":
        return floats
    return b"".join(floats[at + 2 : at + 4] for at in range(0, len(floats), 4))
