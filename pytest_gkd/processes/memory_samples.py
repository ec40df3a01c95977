"""How much memory is in use over a run, of the host and of each GPU: a few samples."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import psutil

from pytest_gkd.processes import background, gpus

EVERY_S = 0.5
# Of one series. Beyond, the higher of every two stays, and half as many are taken.
MOST = 240
MOST_GPUS = 16
HOST = "host"


@dataclass
class MemorySamples:
    """Takes a sample when it is asked to and one is due; it does not block.

    ``began`` is when the run did, like ``now`` in ``on_tick``. ``series`` holds one
    entry for the host and one a GPU, as report.json has them: ``of`` (host, or a GPU's
    index), ``total_bytes``, and ``used_bytes`` at ``at_s`` after ``began``. GPUs are
    read only ``with_gpus``, by ``reader`` in the background: a driver that has not
    answered (``asked``) is not asked again.
    """

    began: float
    with_gpus: bool
    series: list[dict[str, Any]] = field(default_factory=list)
    reader: gpus.Reader = field(default_factory=gpus.Reader)
    asked: Future[tuple[gpus.Card, ...]] | None = None
    _asked_at: float = 0.0
    _every_s: float = EVERY_S
    _next: float = 0.0

    def on_tick(self, now: float) -> None:
        """Take a sample if it is time."""
        if now < self._next:
            return
        self._next = now + self._every_s
        host = psutil.virtual_memory()
        self.add(HOST, host.total, host.total - host.available, now)
        if self.asked is not None:
            if not self.asked.done():
                return
            answered, self.asked = self.asked, None
            self._add_cards(answered.result(), self._asked_at)
        if self.with_gpus:
            self._asked_at = now
            self.asked = background.begin("gkd-gpu-memory", self.reader.cards)

    def _add_cards(self, cards: Iterable[gpus.Card], at: float) -> None:
        for card in cards:
            if card.total_bytes and card.index < MOST_GPUS:
                used = card.total_bytes - card.free_bytes
                self.add(card.index, card.total_bytes, used, at)

    def add(self, of: str | int, total: int, used: int, now: float) -> None:
        """Take in one sample, in bytes."""
        one = next((one for one in self.series if one["of"] == of), None)
        if one is None:
            one = {"of": of, "total_bytes": total, "at_s": [], "used_bytes": []}
            self.series.append(one)
        if len(one["at_s"]) >= MOST:
            for each in self.series:
                _halve(each)
            self._every_s *= 2
        one["at_s"].append(round(max(0.0, now - self.began), 2))
        one["used_bytes"].append(used)


def _halve(one: dict[str, Any]) -> None:
    """Keep the higher of every two samples."""
    pairs = list(zip(one["used_bytes"], one["at_s"], strict=True))
    kept = [max(pairs[at : at + 2]) for at in range(0, len(pairs), 2)]
    one["used_bytes"][:] = [used for used, _ in kept]
    one["at_s"][:] = [at for _, at in kept]
