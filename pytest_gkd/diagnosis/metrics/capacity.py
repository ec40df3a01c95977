"""How much memory a card and the host have, according to a log."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_gkd.diagnosis.patterns import Pattern

_SIZE = rb"(\d{1,7}(?:\.\d{1,4})?) ?([KMGT]i?B)"
# torch's OOM (2.1 and later, and before), vLLM's start and its profiling, nvidia-smi's
# table. Programs that print GB here have divided by 1024.
_CARDS = (
    Pattern(rb"GPU \d{1,3} has a total capacity of " + _SIZE),
    Pattern(rb"\(GPU \d{1,3}; " + _SIZE + rb" total capacity"),
    Pattern(rb"Free memory on device[^()\r\n]{0,40}\(\d{1,5}(?:\.\d{1,4})?/" + _SIZE),
    Pattern(rb"total_gpu_memory \(" + _SIZE),
    Pattern(rb"\d{1,7}MiB / {1,9}" + _SIZE),
)
# Ray's node memory monitor.
_HOSTS = (
    Pattern(
        rb"Memory on the node[^\r\n]{0,120} was \d{1,6}(?:\.\d{1,4})?GB / " + _SIZE
    ),
)
_POWERS = {b"K": 10, b"M": 20, b"G": 30, b"T": 40}


@dataclass(frozen=True)
class Capacity:
    """Bytes of one card and of the host; None if the log does not say."""

    card: float | None = None
    host: float | None = None


def capacity(text: bytes) -> Capacity:
    """What the log says: the smallest card, which fills up first."""
    return Capacity(_least(_CARDS, text), _least(_HOSTS, text))


def _least(known: tuple[Pattern, ...], text: bytes) -> float | None:
    sizes = (
        float(match[1]) * 2.0 ** _POWERS[match[2][:1]]
        for pattern in known
        for match in pattern.finditer(text)
    )
    return min((size for size in sizes if size > 0), default=None)
