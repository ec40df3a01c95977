"""Finds the lines of a text that contain a known signature, and their facts.

Text is bytes here: logs contain broken UTF-8, NUL bytes and lines of megabytes. The
texts of all signatures are searched for at once, by an Aho-Corasick automaton; only the
line around a match is examined further, and never more than ``WINDOW`` bytes of it, so
no pattern meets a long line.
"""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ahocorasick_rs import BytesAhoCorasick, Implementation

from pytest_gkd import sanitize
from pytest_gkd.diagnosis import echoes, prefixes
from pytest_gkd.diagnosis.catalogue import Catalogue, Signature
from pytest_gkd.diagnosis.clocks import CONTEXT, time_of
from pytest_gkd.diagnosis.patterns import Pattern

WINDOW = 3000
BEFORE = 600
MAX_HITS, MOST_RAISED, MOST_IN_PARTS = 4, 16, 40
# How many occurrences of a text are tried, from the start and from the end.
MAX_TRIES = 300
# Longer lines are searched in parts.
LONG = 1 << 16
# Bytes after which a faster automaton pays, which takes ten times as long to build.
REBUILD_BYTES = 1 << 22
# Blocks that are searched at the same time, while those before are examined.
THREADS = 2

_ANSI = Pattern(rb"(?:\x1b\[[0-9;?]*[A-Za-z]|\x00)+")
_TO_TIDY = (b"\x1b", b"\x00", b" [repeated ")
_NOTE = Pattern(
    rb"(?:NCCL )?\b(?:WARNING|WARN|INFO|DEBUG|warning|Warning)\b"
    rb"|(?:User|Future|Deprecation|Runtime|Resource)Warning"
    rb"|Generated text: |\bPrompt: ['\"]"
    rb"|^\W{0,3}(?:rank\d+\W{1,4})?[WI]\d{0,4} ",
    unless=rb"^NCCL ",
)
# The prefixes of process output from Ray, vLLM and torchrun.
_PREFIX = Pattern(rb"^(?:\([\w.:]+ (?:rank=\d+ )?pid=\d+[^)]*\) *|\[default\d+\]:)+")
_ALARM = Pattern(rb"\b(?:ERROR|CRITICAL|FATAL)\b|\b[EF]\d{3,4} ")
_REPEATED = Pattern(rb" *\[repeated \d+x across cluster\].*")


@dataclass(frozen=True)
class Hit:
    """A matched signature: where, in which words, and with which facts.

    ``line`` counts from 1 and is None where lines have no numbers. ``order`` is the
    byte offset in the source. ``time_s`` is the line's own time, in seconds from the
    start of an unnamed year. ``weak`` says that the line calls itself a warning or a
    note. ``chain`` is the byte where the chained exceptions begin that hold the line,
    -1 if none do, ``link`` the number of the exception among them, and ``handling``
    how many of them were raised while another was handled, up to this one. ``process``
    is the one that the line belongs to, as its prefix gives it.
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
    chain: int = -1
    link: int = 0
    handling: int = 0
    process: str = ""


class Watcher(Protocol):
    """Wants whole lines that contain one of its ``markers``, until it is ``full``."""

    markers: tuple[bytes, ...]

    @property
    def full(self) -> bool: ...
    @property
    def follows(self) -> bool:
        """Whether it wants the line after the last one too, whatever that contains."""

    def take(self, line: bytes, number: int, order: int) -> None:
        """Take a line, its number from 1, and its byte offset in the source."""

    def pass_by(
        self, text: bytes, start: int, end: int, number: int, order: int
    ) -> None:
        """Lines that a full watcher skips, except those that it picks."""

    def forget(self, order: int) -> None:
        """Drop what it picked from this byte on: those lines are given to it again."""


# A cause's id, one of its signatures, and the cause's tier.
Entry = tuple[str, Signature, str]


class _Part(NamedTuple):
    """A text that is searched from ``new`` to ``end``, and the matches.

    ``start`` is the byte of the source where the text begins. ``found`` gives for each
    match its index in ``texts``, and its start and end relative to ``new``.
    """

    text: bytes
    new: int
    end: int
    start: int
    texts: tuple[bytes, ...]
    found: Callable[[], list[tuple[int, int, int]]]

    @property
    def keep(self) -> int:
        """Where in ``text`` the part begins that is repeated in the next one."""
        return max(0, self.end - CONTEXT)


class Scanner:
    """Searches one source, block by block, for the signatures of a catalogue.

    While threads search blocks for texts, the matches of an earlier one are examined:
    the automaton releases the GIL. Of each signature the first ``MAX_HITS``
    are kept, and the last ones: the root of a failure is among the first things that
    happened, unless the run outlived those. A ``watcher`` is given its lines on the
    way, and those of the end in any case.
    """

    def __init__(
        self,
        signatures: Mapping[bytes, list[Entry]],
        source: str,
        source_index: int = 0,
        watcher: Watcher | None = None,
    ) -> None:
        self.source = source
        self.source_index = source_index
        self.hits: list[Hit] = []
        self.lines = 0
        self._open = dict(signatures)
        self._closed: dict[bytes, tuple[list[Entry], int]] = {}
        self._tries = Counter[bytes]()
        self._seen = Counter[int]()
        self._full = set[int]()  # the signatures of which no more hits are kept
        self._last: dict[int, int] = {}
        # In the catalogue's order: of two causes in one line the first is reported.
        self._watcher = watcher
        markers = watcher.markers if watcher is not None else ()
        self._watched = frozenset(markers)
        self._taken = -1
        self._texts = tuple(dict.fromkeys((*signatures, *markers)))
        self._automaton = _automaton(self._texts)
        self._rebuild_at = REBUILD_BYTES
        # The text kept, where it begins, and from where it is still new.
        self._kept = b""
        self._kept_at = 0
        self._new = 0
        # The parts being searched, and the offset of the part being examined.
        self._finder = ThreadPoolExecutor(THREADS)
        self._ahead = deque[_Part]()
        self._offset = 0
        self._line = 1
        self._counted = 0, 1

    def feed(self, block: bytes) -> None:
        """Search the next block, up to its last line end if that is near."""
        text = self._kept + block
        end = max(self._new, text.rfind(b"\n") + 1)
        self._pass_on(text, end if len(text) - end <= LONG else len(text) - WINDOW)
        if self._offset >= self._rebuild_at:
            self._rebuild_at *= 8
            self._drain()  # what is being searched holds the automaton
            self._texts = tuple(dict.fromkeys((*self._open, *self._watched)))
            del self._automaton  # a second one beside it takes 40 MiB
            self._automaton = BytesAhoCorasick(
                self._texts, implementation=Implementation.DFA
            )

    def finish(self, tail: bytes = b"") -> None:
        """Search the last line, which has no line end, and then backwards from there.

        ``tail`` is the last part of the source: texts that occurred so often that they
        are no longer searched for are searched for there, backwards.
        """
        self._pass_on(self._kept, len(self._kept), last=True)
        self._drain()
        self._finder.shutdown()
        self.lines = self._line - 1 + self._kept.count(b"\n")
        self._line = 1 + self.lines - tail.count(b"\n")
        self._offset += len(self._kept) - len(tail)
        self._look_back(tail)

    def _pass_on(self, text: bytes, end: int, *, last: bool = False) -> None:
        """Search the text from where it is new up to ``end``, and keep the rest.

        Meanwhile the matches in an earlier text are examined.
        """
        search: Callable[[], list[tuple[int, int, int]]] = functools.partial(
            self._automaton.find_matches_as_indexes,
            memoryview(text)[self._new :],
            overlapping=True,
        )
        # A text of one block, such as a stage's, needs no thread.
        use_thread = self._ahead and not last
        found = self._finder.submit(search).result if use_thread else search
        part = _Part(text, self._new, end, self._kept_at, self._texts, found)
        self._kept, self._kept_at = text[part.keep :], part.start + part.keep
        self._new = end - part.keep
        self._ahead.append(part)
        if len(self._ahead) > THREADS:
            self._advance(self._ahead.popleft())

    def _drain(self) -> None:
        while self._ahead:
            self._advance(self._ahead.popleft())

    def _advance(self, part: _Part) -> None:
        """Examine the matches in a part."""
        text, new, end, self._offset, texts, _ = part
        by_line = sorted(
            (_line_start(text, new + at), place, new + at)
            for place, at, _ in part.found()
            if new + at < end
            and ((words := texts[place]) in self._open or words in self._watched)
        )
        until: dict[bytes, int] = {}
        counted, number = 0, self._line
        if self._watched:
            self._follow(text, self._taken - self._offset, end)
        for start, place, position in by_line:
            words = texts[place]
            if words in self._watched and self._offset + start > self._taken:
                number += text.count(b"\n", counted, start)
                counted = start
                self._watch(text, start, number)
                self._follow(text, start, end)
            if words in self._open and position >= until.get(words, 0):
                until[words] = self._search(words, text, position)
        if self._watcher is not None and not self._watched:
            start = text.find(b"\n", max(0, new - 1, self._taken - self._offset)) + 1
            start = start or end
            number = self._line + text.count(b"\n", 0, start)
            self._watcher.pass_by(text, start, end, number, self._offset + start)
        self._line += text.count(b"\n", 0, part.keep)
        self._offset += part.keep

    def _follow(self, text: bytes, start: int, end: int) -> None:
        """Give the watcher the lines after the one at ``start`` that it wants."""
        watcher = self._watcher
        while watcher is not None and watcher.follows and self._watched:
            start = text.find(b"\n", max(0, start), end) + 1
            if not start or text.find(b"\n", start, end) < 0:
                return  # the rest comes with the next part
            number = self._line + text.count(b"\n", 0, start)
            self._watch(text, start, number)

    def _watch(self, text: bytes, start: int, number: int) -> None:
        assert self._watcher is not None
        self._taken = self._offset + start
        end = _find(text, b"\r", start, _find(text, b"\n", start, start + LONG))
        self._watcher.take(text[start:end], number, self._taken)
        if self._watcher.full:
            self._watched = frozenset()

    def _search(self, words: bytes, text: bytes, position: int) -> int:
        """Examine one match; returns the end of the line, as far as it was examined."""
        entries = self._open[words]
        _, end = self._try(entries, text, position)
        self._tries[words] += 1
        if self._enough(entries) or self._tries[words] >= MAX_TRIES:
            self._closed[words] = (self._open.pop(words), self._offset + end)
        return end

    def _enough(self, entries: list[Entry]) -> bool:
        return all(id(one) in self._full for _, one, _ in entries)

    def _look_back(self, tail: bytes) -> None:
        self._seen.clear()
        self._full.clear()
        if self._watcher is not None and self._watcher.full:
            self._watch_end(tail)
        for words, (entries, closed_at) in self._closed.items():
            end, low = len(tail), max(0, closed_at - self._offset)
            for _ in range(MAX_TRIES):
                position = tail.rfind(words, low, end)
                if position < 0 or self._enough(entries):
                    break
                start, _ = self._try(entries, tail, position)
                end = max(low, min(start, position))

    def _watch_end(self, tail: bytes) -> None:
        """Give the watcher those lines of the tail that it has not received."""
        assert self._watcher is not None
        self._watcher.forget(max(self._offset, self._taken + 1))
        markers = _automaton(self._watcher.markers)
        end = 0
        for _, at, _ in markers.find_matches_as_indexes(tail):
            if at < end:
                continue  # in the line that was given last
            start = tail.rfind(b"\n", end, at) + 1 or end
            start = tail.rfind(b"\r", start, at) + 1 or start
            end = _find(tail, b"\r", at, _find(tail, b"\n", at, len(tail)))
            if self._offset + start > self._taken:
                number = self._number(tail, start)
                self._watcher.take(tail[start:end], number, self._offset + start)

    def _try(self, entries: list[Entry], text: bytes, position: int) -> tuple[int, int]:
        """Try the signatures on the line at ``position``; returns its start and end."""
        start, end = segment(text, position)
        clean, at = tidy(text, start, position, end)
        place = self._offset + start
        echo: str | None = None
        for cause, signature, tier in entries:
            if id(signature) in self._full:
                continue
            if signature.raised and not signature.text and not _names(clean, at):
                continue  # not the line that an exception ends with
            facts = signature.facts_in(clean)
            if facts is None or self._last.get(id(signature)) == place:
                continue  # a line with two texts of a signature is one hit
            self._last[id(signature)] = place
            if echo is None:
                before = uncoloured(text[max(0, start - echoes.CONTEXT) : start])
                echo = echoes.kind(before, clean, at)
            if echo and not (echo == "source" and echoes.of_source(signature)):
                continue
            self._seen[id(signature)] += 1
            if self._seen[id(signature)] >= _most(signature):
                self._full.add(id(signature))
            self.hits.append(
                Hit(
                    cause=cause,
                    signature=signature,
                    tier=signature.tier or tier,
                    source=self.source,
                    line=self._number(text, start),
                    text=shown(clean),
                    facts=facts,
                    weak=not signature.loud and is_note(clean, at),
                    source_index=self.source_index,
                    order=place,
                    time_s=time_of(text, start),
                    process=prefixes.split(clean)[0].decode("utf-8", "replace"),
                )
            )
        return start, end

    def _number(self, text: bytes, start: int) -> int:
        """The number of the line that begins here, counted from the last lookup."""
        order, number = self._counted
        at = order - self._offset
        if not 0 <= at <= len(text):
            at, number = 0, self._line
        low, high = sorted((at, start))
        lines = text.count(b"\n", low, high)
        number += lines if start >= at else -lines
        self._counted = self._offset + start, number
        return number


def _names(line: bytes, at: int) -> bool:
    """Whether a class is named here as the line that ends a traceback names it."""
    name = line[at : at + 200].partition(b":")[0].partition(b"(")[0].rstrip()
    return name.replace(b".", b"").replace(b"_", b"").isalnum()


@functools.lru_cache(maxsize=4)
def _automaton(texts: tuple[bytes, ...]) -> BytesAhoCorasick:
    """Cached, since every file of a job is searched for the same texts."""
    return BytesAhoCorasick(texts, implementation=Implementation.ContiguousNFA)


def _most(signature: Signature) -> int:
    """How many hits to keep: more for those that depend on more than their own line,
    and for ``beside`` texts."""
    if signature.raised and not signature.text:
        return MOST_RAISED  # lines that name its class, not frames
    if signature.of_exception or signature.beside or not signature.example:
        return MOST_IN_PARTS
    return 2 * MAX_HITS if signature.phases else MAX_HITS


def _line_start(text: bytes, position: int) -> int:
    low = max(0, position - LONG)
    low = max(low, text.rfind(b"\n", low, position) + 1)
    return max(low, text.rfind(b"\r", low, position) + 1)


def index(catalogue: Catalogue, *, of_stage: bool = False) -> dict[bytes, list[Entry]]:
    """The signatures that have text, by each of their texts, with cause and tier.

    ``beside`` texts have no tier. Signatures about a stage or its stacks are left out
    unless ``of_stage``.
    """
    found: dict[bytes, list[Entry]] = {}
    for rule in catalogue.values():
        for signature in rule.signatures:
            if not of_stage and (signature.of_stage or signature.source):
                continue
            for text in signature.anchors:
                entry = (rule.id, signature, rule.tier)
                found.setdefault(text.encode(), []).append(entry)
            beside = Signature(text=signature.beside, loud=True)
            for text in signature.beside:
                found.setdefault(text.encode(), []).append((rule.id, beside, ""))
    return found


def _find(text: bytes, mark: bytes, start: int, end: int) -> int:
    """The first offset of the mark between two offsets, or else the second of them."""
    place = text.find(mark, start, end)
    return end if place < 0 else place


def segment(block: bytes, position: int) -> tuple[int, int]:
    """Start and end of the line around ``position``; a progress bar's carriage returns
    end lines too. At most WINDOW bytes after it and BEFORE bytes before it."""
    low = max(0, position - BEFORE)
    start = max(block.rfind(b"\n", low, position), block.rfind(b"\r", low, position))
    start = low if start < 0 else start + 1
    high = min(len(block), position + WINDOW)
    return start, _find(block, b"\r", position, _find(block, b"\n", position, high))


def tidy(block: bytes, start: int, position: int, end: int) -> tuple[bytes, int]:
    """The line without colours and fold marks, and the match's offset in it."""
    line = block[start:end]
    if not any(map(line.__contains__, _TO_TIDY)):
        return line.rstrip(), position - start  # like most lines
    before = uncoloured(block[start:position])
    line = before + uncoloured(block[position:end])
    if b"[repeated " in line:
        line = _REPEATED.without(line)
    return line.rstrip(), len(before)


def blanked(text: bytes) -> bytes:
    """The text with spaces in place of colours, so that byte offsets stay the same."""
    return _ANSI.without(text, fill=b" ")


def uncoloured(line: bytes) -> bytes:
    """The line without colours and NUL bytes."""
    return _ANSI.without(line) if b"\x1b" in line or b"\x00" in line else line


def plain(line: bytes) -> bytes:
    """The line without colours, NUL bytes and its process prefix."""
    line = uncoloured(line).lstrip()
    return _PREFIX.without(line) if line.startswith((b"(", b"[")) else line


def is_note(line: bytes, at: int) -> bool:
    """Whether the words before ``at`` call the line a warning or a note."""
    before = _PREFIX.without(line[:at])
    return _NOTE.search(before) is not None and _ALARM.search(before) is None


def shown(line: bytes, width: int = 400) -> str:
    """The line as a report shows it."""
    text = sanitize.line(line.decode("utf-8", "replace"))
    return text if len(text) <= width else text[: width - 1] + "…"
