"""Finds the lines of a text that hold a known signature, and what they say.

Text is bytes here: logs hold broken UTF-8, NUL bytes and lines of megabytes. A
signature is looked for as a plain string; only the line around a find is looked at
closer, and never more than ``WINDOW`` bytes of it, so no pattern meets a long line.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pytest_gkd import sanitize
from pytest_gkd.diagnosis.catalogue import Catalogue, Signature
from pytest_gkd.diagnosis.patterns import Match, Pattern, any_of

WINDOW = 3000
BEFORE = 600
MAX_HITS = 4
# How often a text is looked at in vain, from the start and from the end.
MAX_TRIES = 300
# How many shapes of lines are remembered, at most WINDOW bytes each.
SHAPES = 5000

_ZEROS = bytes.maketrans(b"0123456789", b"0" * 10)
_ANSI = Pattern(rb"(?:\x1b\[[0-9;?]*[A-Za-z]|\x00)+")
_NOTE = Pattern(
    rb"(?:NCCL )?\b(?:WARNING|WARN|INFO|DEBUG|warning|Warning)\b"
    rb"|(?:User|Future|Deprecation|Runtime|Resource)Warning"
    rb"|Generated text: |\bPrompt: ['\"]"
    rb"|^\W{0,3}(?:rank\d+\W{1,4})?[WI]\d{0,4} ",
    unless=rb"^NCCL ",
)
# What Ray, vLLM and torchrun put before the lines of their processes.
_PREFIX = Pattern(rb"^(?:\([\w.:]+ (?:rank=\d+ )?pid=\d+[^)]*\) *|\[default\d+\]:)+")
_ALARM = Pattern(rb"\b(?:ERROR|CRITICAL|FATAL)\b|\b[EF]\d{3,4} ")
_ACTOR = Pattern(rb"\(([\w.:]+) pid=(\d+)(?:, ip=([\d.]+))?\)")
_RANK = Pattern(rb"\[?\b[Rr]ank ?(\d+)\]|\[default(\d+)\]:|\bTP(\d+) pid=")
_REPEATED = Pattern(rb" *\[repeated \d+x across cluster\].*")
# 2026-11-21 10:00:00,123 | 11-21 10:00:00 (vLLM) | E1121 10:00:00.123456 or E918 (glog)
_TIME = Pattern(
    rb"(?:(?:\d{4}[-/])?(?P<month>\d\d)[-/](?P<day>\d\d)[ T]|[EWIF](?P<glog>\d{3,4}) )"
    rb"(?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d(?:[.,]\d{1,6})?)"
)


@dataclass(frozen=True)
class Hit:
    """A signature found: where, in which words, and with which facts.

    ``line`` counts from 1 and is None where lines have no numbers. ``order`` counts
    bytes from the start of the source. ``time_s`` is the line's own time, in seconds
    from the start of an unnamed year. ``weak`` says that the line calls itself a
    warning or a note.
    """

    cause: str
    signature: Signature
    tier: str
    source: str
    line: int | None
    text: str
    facts: Mapping[str, str] = field(default_factory=dict)
    weak: bool = False
    source_index: int = 0
    order: int = 0
    time_s: float | None = None
    process: str = ""


class Scanner:
    """Looks through one source, block by block, for the signatures of a catalogue.

    Of each signature the first ``MAX_HITS`` are kept, and the last ones: the root of a
    failure is among the first things that happened, unless the run outlived those.
    """

    def __init__(
        self,
        signatures: Mapping[bytes, list[tuple[str, Signature, str]]],
        source: str,
        source_index: int = 0,
    ) -> None:
        self.source = source
        self.source_index = source_index
        self.hits: list[Hit] = []
        self._open = dict(signatures)
        self._any_text = any_of(tuple(signatures))
        # Of two causes in one line the catalogue's first is told, every time.
        self._place_of = {text: place for place, text in enumerate(signatures)}
        self._by_gram: Mapping[bytes, Sequence[bytes]] = {}
        self._by_shape: dict[bytes, tuple[bytes, ...]] = {}
        self._tries: dict[bytes, int] = {}
        self._seen: dict[int, int] = {}
        self._last: dict[int, int] = {}
        self._closed: dict[bytes, tuple[list[tuple[str, Signature, str]], int]] = {}
        self._line = 1
        self._offset = 0

    def feed(self, block: bytes) -> None:
        """Look through the next block, which ends at a line end or at the end."""
        line, offset = self.place
        before = len(self.hits)
        end = 0
        while (found := self._any_text.search(block, end)) is not None:
            start = max(end, block.rfind(b"\n", end, found.start()) + 1)
            line += block.count(b"\n", end, start)
            end = block.find(b"\n", found.end())
            end = len(block) if end < 0 else end
            self.feed_line(block[start:end], line, offset + start)
        for at, hit in enumerate(self.hits[before:], before):
            if hit.time_s is None:
                when = time_of(block, hit.order - offset)
                self.hits[at] = replace(hit, time_s=when)
        self.place = line + block.count(b"\n", end), offset + len(block)

    @property
    def place(self) -> tuple[int, int]:
        """The number of the next line and the offset of the next byte."""
        return self._line, self._offset

    @place.setter
    def place(self, place: tuple[int, int]) -> None:
        self._line, self._offset = place

    @property
    def texts(self) -> list[bytes]:
        """The texts that are still looked for."""
        return list(self._open)

    def feed_line(self, line: bytes, number: int, offset: int) -> None:
        """Look through one line, which a filter found, with its place in the source.

        Lines that differ in their numbers alone are looked at once: which texts such
        a line may hold is remembered, with every digit as a 0.
        """
        self._line, self._offset = number, offset
        shape = line.translate(_ZEROS)
        may_hold = self._by_shape.get(shape)
        if may_hold is None:
            may_hold = self._texts_in(shape)
            if len(self._by_shape) >= SHAPES:
                self._by_shape.clear()
            if len(shape) <= WINDOW:
                self._by_shape[shape] = may_hold
        for text in may_hold:
            if text in self._open and text in line:
                self._search(text, line)

    def _texts_in(self, shape: bytes) -> tuple[bytes, ...]:
        """The texts that are in a line, digits as zeros, of this shape.

        They are found by four bytes of each, as one by one would take a hundred times
        as long.
        """
        if not self._by_gram:
            self._by_gram = _by_gram(tuple(self._open))
        grams: set[bytes] = set()
        for low in range(0, len(shape), 1 << 16):
            high = min(low + (1 << 16), len(shape) - 3)
            here = {shape[at : at + 4] for at in range(low, high)}
            grams |= here & self._by_gram.keys()
        found = (text for gram in grams for text in self._by_gram[gram])
        held = [text for text in found if text.translate(_ZEROS) in shape]
        return tuple(sorted(held, key=self._place_of.__getitem__))

    def _search(self, text: bytes, block: bytes) -> None:
        position = block.find(text)
        while position >= 0:
            start, end = segment(block, position)
            clean, at = tidy(block, start, position, end)
            for entry in self._open[text]:
                if self._seen.get(id(entry[1]), 0) < MAX_HITS:
                    self._look(entry, clean, at, block, start)
            tries = self._tries.get(text, 0) + 1
            self._tries[text] = tries
            if self._done(text) or tries >= MAX_TRIES:
                self._closed[text] = (self._open.pop(text), self._offset + end)
                return
            position = block.find(text, max(end, position + len(text)))

    def _done(self, text: bytes) -> bool:
        return self._enough(self._open[text])

    def _enough(self, entries: list[tuple[str, Signature, str]]) -> bool:
        return all(self._seen.get(id(one), 0) >= MAX_HITS for _, one, _ in entries)

    def look_back(self, tail: bytes, offset: int, number: Callable[[], int]) -> None:
        """Look for what is no longer looked for, from the end of the source backwards.

        ``tail`` is the last part of the source, which begins at ``offset`` and, told
        only when it is needed, at line ``number``.
        """
        before = len(self.hits)
        self._line, self._offset = 1, offset
        self._seen.clear()
        for text, (entries, closed_at) in self._closed.items():
            end, low = len(tail), max(0, closed_at - offset)
            for _ in range(MAX_TRIES):
                position = tail.rfind(text, low, end)
                if position < 0 or self._enough(entries):
                    break
                start, stop = segment(tail, position)
                clean, at = tidy(tail, start, position, stop)
                for entry in entries:
                    if self._seen.get(id(entry[1]), 0) < MAX_HITS:
                        self._look(entry, clean, at, tail, start)
                end = max(low, min(start, position))
        if len(self.hits) > before:
            more = number() - 1
            for at, hit in enumerate(self.hits[before:], before):
                self.hits[at] = replace(hit, line=(hit.line or 1) + more)

    def _look(
        self,
        entry: tuple[str, Signature, str],
        clean: bytes,
        at: int,
        block: bytes,
        start: int,
    ) -> None:
        cause, signature, tier = entry
        facts = signature.facts_in(clean)
        place = self._offset + start
        if facts is None or self._last.get(id(signature)) == place:
            return  # a line that holds two texts of a signature is one find
        self._last[id(signature)] = place
        self._seen[id(signature)] = self._seen.get(id(signature), 0) + 1
        self.hits.append(
            Hit(
                cause=cause,
                signature=signature,
                tier=signature.tier or tier,
                source=self.source,
                line=self._line + block.count(b"\n", 0, start),
                text=shown(clean),
                facts=facts,
                weak=not signature.loud and is_note(clean, at),
                source_index=self.source_index,
                order=place,
                time_s=time_of(block, start),
                process=process_of(clean),
            )
        )


@functools.lru_cache(maxsize=4)
def _by_gram(texts: tuple[bytes, ...]) -> Mapping[bytes, Sequence[bytes]]:
    """The texts by four bytes of each: those that the fewest of the others hold.

    Every digit counts as a 0. Kept, since each file of a job asks it of the same texts.
    """
    held: dict[bytes, set[bytes]] = {}
    for text in texts:
        shape = text.translate(_ZEROS)
        held[text] = {shape[at : at + 4] for at in range(len(shape) - 3)}
    common = Counter(gram for grams in held.values() for gram in grams)
    found: dict[bytes, list[bytes]] = {}
    for text, grams in held.items():
        rarest = min(grams, key=lambda gram: (common[gram], gram))
        found.setdefault(rarest, []).append(text)
    return found


def index(
    catalogue: Catalogue, *, of_stage: bool = False
) -> dict[bytes, list[tuple[str, Signature, str]]]:
    """The signatures that have text, by each of their texts, with cause and tier.

    Those that ask about a stage or its stacks are left out unless ``of_stage``.
    """
    found: dict[bytes, list[tuple[str, Signature, str]]] = {}
    for rule in catalogue.rules.values():
        for signature in rule.signatures:
            if not of_stage and (signature.of_stage or signature.source):
                continue
            for text in signature.text:
                entry = (rule.id, signature, rule.tier)
                found.setdefault(text.encode(), []).append(entry)
    return found


def segment(block: bytes, position: int) -> tuple[int, int]:
    """Where the line around ``position`` starts and ends; a progress bar's carriage
    returns end lines too. At most WINDOW bytes, at most BEFORE of them before."""
    low = max(0, position - BEFORE)
    start = max(block.rfind(b"\n", low, position), block.rfind(b"\r", low, position))
    start = low if start < 0 else start + 1
    high = min(len(block), position + WINDOW)
    ends = [block.find(mark, position, high) for mark in (b"\n", b"\r")]
    end = min((e for e in ends if e >= 0), default=high)
    return start, end


def tidy(block: bytes, start: int, position: int, end: int) -> tuple[bytes, int]:
    """The line without colours and fold marks, and where the find is in it."""
    before = _ANSI.without(block[start:position])
    after = _ANSI.without(block[position:end])
    return _REPEATED.without(before + after).rstrip(), len(before)


def blanked(text: bytes) -> bytes:
    """The text with spaces in the place of colours, so that every byte stays."""
    return _ANSI.without(text, fill=b" ")


def plain(line: bytes) -> bytes:
    """The line without colours, NUL bytes and the name of the process before it."""
    return _PREFIX.without(_ANSI.without(line).lstrip())


def is_note(line: bytes, at: int) -> bool:
    """Whether the words before ``at`` call the line a warning or a note."""
    before = _PREFIX.without(line[:at])
    return _NOTE.search(before) is not None and _ALARM.search(before) is None


def shown(line: bytes, width: int = 400) -> str:
    """The line as a report shows it."""
    text = sanitize.line(line.decode("utf-8", "replace"))
    return text if len(text) <= width else text[: width - 1] + "…"


def process_of(line: bytes) -> str:
    """Which process wrote the line, as ``rank 3`` or ``WorkerDict 4711``."""
    rank = _RANK.search(line)
    if rank is not None:
        number = next(group for group in rank.groups() if group is not None)
        return f"rank {int(number)}"
    actor = _ACTOR.search(line)
    if actor is None:
        return ""
    name, pid, host = (part.decode() if part else "" for part in actor.groups())
    return f"{name} {pid}" + (f" on {host}" if host else "")


def time_of(block: bytes, start: int) -> float | None:
    """The time of the line at ``start``, or of the nearest line with one before it."""
    end = block.find(b"\n", start)
    end = min(len(block) if end < 0 else end, start + 200)
    found = _TIME.search(block, start, end)
    if found is None:
        for before in _TIME.finditer(block, max(0, start - 4000), start):
            found = before
    return None if found is None else _seconds(found)


def _seconds(match: Match) -> float:
    date = match[b"glog"] or match[b"month"] + match[b"day"]
    days = int(date[:-2]) * 31 + int(date[-2:])
    clock = int(match[b"hour"]) * 3600 + int(match[b"minute"]) * 60
    return days * 86400 + clock + float(match[b"second"].replace(b",", b"."))


def clock(when: time.struct_time) -> float:
    """A moment as ``Hit.time_s`` counts it."""
    days = when.tm_mon * 31 + when.tm_mday
    return days * 86400.0 + when.tm_hour * 3600 + when.tm_min * 60 + when.tm_sec


def scan_texts(
    texts: Iterable[tuple[str, bytes]], catalogue: Catalogue
) -> Iterator[Hit]:
    """The hits of a stage's texts, each with its name, in their order."""
    signatures = index(catalogue, of_stage=True)
    for number, (name, text) in enumerate(texts):
        scanner = Scanner(signatures, name, number)
        scanner.feed(text)
        yield from scanner.hits
