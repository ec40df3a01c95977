"""Translates texts whose values are filled in, by the templates they were made of."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

PLACE = re.compile(r"\{([^{}\s]+)\}")
# A template with fewer characters of its own, and not so many at its start, takes only
# single words with a number among them: "{count} rows" fits "512 rows", not every text
# that ends in "rows".
OWN_CHARS, FIRST_CHARS = 6, 4
# One with so many, or with a place as in "if {text} (line {line})", is known even
# around a value in words that are not, as an exception.
FIRM_CHARS = 12
PLACED = re.compile(r" \([a-z]+ \{[^{}\s]+\}\)$")
# What may stand behind a text of its own.
AMOUNT = re.compile(r" \d+(?:\.\d+)? \w+$")
MOST_JOINTS = 40
MOST_KEPT = 1_000
BRACKETS = (" (", ")")
BRACKET = re.compile(r"[()]")
STOPS = re.compile(r"[;:,] ")
# What is no name, path, place or number, and none of a list.
PROSE = re.compile(r"(?<![\w./'<-])(?<!, )[a-z]{2,}(?![\w/=',(-]|\.\w|:\d| \(pid )")
# A path, a name or a process, about which the next text says something.
SUBJECT = re.compile(
    r"(?:^|: )(?:[^\s:]*[/._=\d'][^\s:]*(?: row \d+)?|(?:ranks?|pid) \d[\d, and-]*"
    r"|.+ \(pid [^()]+\))$"
)
# Characters of languages that are written without blanks.
WIDE = re.compile("[\u3000-\u9fff\uff00-\uffef]")
WIDE_END = re.compile(f"{WIDE.pattern} $")
# A longer text was made of no template; the search takes more than linear time. Nor was
# one that takes more looks, or has texts nested deeper: none of ours took a tenth.
LONGEST = 4_000
MOST_LOOKS = 6_000
DEEPEST = 40


@dataclass(frozen=True)
class _Template:
    """``around`` are the texts around its ``places``, ``longest`` is one of them;
    ``loose`` ones take any value, ``firm`` ones of any words."""

    around: tuple[str, ...]
    longest: str
    places: tuple[str, ...]
    own: int
    loose: bool
    firm: bool
    translation: str

    @classmethod
    def of(cls, text: str, translation: str) -> _Template:
        parts = PLACE.split(text)
        around, places = tuple(parts[::2]), tuple(parts[1::2])
        own, first = sum(map(_chars, around)), _chars(around[0])
        brackets = around[0].startswith(" (") and around[-1].endswith(")")
        loose = own >= OWN_CHARS or first >= FIRST_CHARS or brackets
        firm = own >= FIRM_CHARS or bool(PLACED.search(text))
        longest = max(around, key=len)
        return cls(around, longest, places, own, loose, firm, translation)

    def is_in(self, text: str) -> bool:
        """Whether a part of the text may have been made of it."""
        return self.longest in text and all(part in text for part in self.around)

    def values(self, text: str) -> dict[str, str] | None:
        """What stands in its places if the text was made of it, else None."""
        first, *between, last = self.around
        end = len(text) - len(last)
        at = len(first)
        if at > end or not text.startswith(first) or not text.endswith(last):
            return None
        if not first and text[:1] in " ,;:.":  # its first value is missing
            return None
        found: dict[str, str] = {}
        for name, after in zip(self.places, [*between, None], strict=True):
            stop = end if after is None else text.find(after, at, end)
            value = text[at:stop]
            if stop < 0 or not _is_closed(value):
                return None
            if found.setdefault(name, value) != value:
                return None
            at = stop + len(after or "")
        told = " ".join(found.values())
        words = all(found.values()) and told.count(" ") < len(found)
        return found if self.loose or (words and re.search(r"\d", told)) else None

    def filled(self, values: Mapping[str, str]) -> str:
        """The translation with these values, without the blanks around those that were
        translated, too."""
        text, *rest = PLACE.split(self.translation)
        for name, after in zip(rest[::2], rest[1::2], strict=True):
            value = values[name]
            if WIDE_END.search(text) and WIDE.match(value):
                text = text[:-1]
            text += value
            if after[:1] == " " and WIDE.match(text[-1:]) and WIDE.match(after[1:]):
                after = after[1:]
            text += after
        return text


@dataclass(frozen=True)
class _Reading:
    """A text in the other language: how many of its characters were in a template, how
    many are in words that were in none, how many stops the values have in them, and how
    long the longest is. In a ``plain`` one nothing can be read further."""

    text: str
    known: int = 0
    unknown: int = 0
    stops: int = 0
    longest: int = 0
    plain: bool = False

    @classmethod
    def of(cls, text: str) -> _Reading:
        """A text that stays as it is."""
        return cls(text, 0, sum(map(len, PROSE.findall(text))))

    def __add__(self, other: _Reading) -> _Reading:
        return _Reading(
            self.text + other.text,
            self.known + other.known,
            self.unknown + other.unknown,
            max(self.stops, other.stops),
            max(self.longest, other.longest),
        )

    @property
    def explained(self) -> tuple[int, int, int]:
        """Of two readings that know as much, the one with the simpler values is right:
        the other has put more than a value into one."""
        return self.known - self.unknown, -self.stops, -self.longest


class FilledTexts:
    """Knows templates, with ``{name}`` for each place, and their translations.

    ``joints`` are what stands between texts that were made apart, and what stands there
    in the other language; ``stop`` is what ends a sentence, and between ``brackets``
    stands what is told more.
    """

    def __init__(
        self,
        texts: Mapping[str, str],
        joints: Mapping[str, str],
        stop: str,
        brackets: Sequence[str] = BRACKETS,
    ) -> None:
        self._texts, self._joints, self._stop = texts, joints, stop
        self._brackets = brackets
        made = [_Template.of(*one) for one in texts.items() if PLACE.search(one[0])]
        self._templates = sorted(made, key=lambda one: -one.own)
        self._told: dict[str, str] = {}

    def translate(self, text: str) -> str:
        """The text as far as it was made of these templates; the rest as it is."""
        if len(text) > LONGEST or " " not in text:
            return text
        if text not in self._told:
            if len(self._told) > MOST_KEPT:
                self._told.clear()
            fitting = [one for one in self._templates if one.is_in(text)]
            ends = self._stop, self._brackets
            search = _Search(self._texts, fitting, self._joints, *ends)
            try:
                self._told[text] = search.best(text).text
            except _TooMuchError:
                self._told[text] = text
        return self._told[text]


class _TooMuchError(Exception):
    """Too many ways to read a text."""


class _Search:
    """The readings of one text and its parts, by the ``templates`` that may fit."""

    def __init__(
        self,
        texts: Mapping[str, str],
        templates: Sequence[_Template],
        joints: Mapping[str, str],
        stop: str,
        brackets: Sequence[str],
    ) -> None:
        self._texts, self._templates = texts, templates
        self._joints, self._stop, self._brackets = joints, stop, brackets
        self._joint = re.compile("|".join(map(re.escape, joints)))
        self._found: dict[str, _Reading] = {}
        self._wholes: dict[str, list[_Reading]] = {}
        self._looks = self._depth = 0

    def best(self, text: str) -> _Reading:
        """The reading that explains most; the text itself if none explains enough.

        Raises _TooMuchError if that takes too long.
        """
        if " " not in text:
            return _Reading.of(text)
        if text not in self._found:
            self._depth += 1
            found = self._whole(text)[:]
            if not any(one.plain for one in found):
                found += self._parts(text)
            self._depth -= 1
            enough = (one for one in found if one.known >= one.unknown)
            own = _Reading.of(text)
            self._found[text] = max(enough, key=lambda one: one.explained, default=own)
        return self._found[text]

    def _whole(self, text: str) -> list[_Reading]:
        """The readings of the text as made of one template."""
        if text not in self._wholes:
            self._wholes[text] = list(self._by_template(text))
        return self._wholes[text]

    def _by_template(self, text: str) -> Iterator[_Reading]:
        if text in self._texts:
            yield _Reading(self._texts[text], _chars(text), plain=True)
            return
        amount = AMOUNT.search(text)
        if amount and text[: amount.start()] in self._texts:
            told = self._texts[text[: amount.start()]]
            yield _Reading(f"{told}{amount[0]}", _chars(text), plain=True)
        self._looks += 1
        if self._looks > MOST_LOOKS or self._depth > DEEPEST:
            raise _TooMuchError
        for template in self._templates:
            values = template.values(text)
            if values is not None:
                read = {name: self.best(value) for name, value in values.items()}
                told = template.filled({name: one.text for name, one in read.items()})
                known = template.own + sum(one.known for one in read.values())
                unknown = sum(one.unknown for one in read.values())
                unknown = min(unknown, known) if template.firm else unknown
                stops = sum(len(STOPS.findall(value)) for value in values.values())
                stops = max(stops, *(one.stops for one in read.values()))
                longest = max(map(len, values.values()))
                plain = not any(" " in value for value in values.values())
                yield _Reading(told, known, unknown, stops, longest, plain)
        if text.endswith("."):
            for one in self._whole(text[:-1]):
                yield one + _Reading(self._stop, 1)

    def _joined(self, text: str, joint: str) -> Iterator[_Reading]:
        """The text as two with this joint between them, one of which is known."""
        before, found, after = text.partition(joint)
        while found and after:
            # A comma may as well stand in a list of names.
            first = joint != ", " and self._whole(before)
            if first or self._whole(after):
                between = _Reading(self._joints[joint], _chars(joint))
                yield self.best(before) + between + self.best(after)
            more, found, after = after.partition(joint)
            before += joint + more

    def _parts(self, text: str) -> Iterator[_Reading]:
        """The text as two, the second of which goes on with a sentence or has its
        subject in the first."""
        for joint in itertools.islice(self._joint.finditer(text), MOST_JOINTS):
            before, after = text[: joint.start()], text[joint.end() :]
            for one in self._whole(text[joint.start() :]):
                yield self.best(before) + one
            if joint[0] == " " and (before.endswith(".") or SUBJECT.search(before)):
                for one in self._whole(after):
                    told = self.best(before)
                    wide = bool(WIDE.match(told.text[-1:]) and WIDE.match(one.text))
                    wide = wide or one.text.startswith(self._brackets[0])
                    blank = "" if wide or before.endswith(".") else " "
                    yield told + _Reading(blank) + one
                if before.endswith("."):
                    for one in self._whole(before):
                        yield one + self.best(after)
        for between in self._joints:
            if between != " ":
                yield from self._joined(text, between)
        yield from self._bracketed(text)

    def _bracketed(self, text: str) -> Iterator[_Reading]:
        """The text as one of which another in brackets at its end tells more; one of
        both is known."""
        start = text.find(" (") if text.endswith(")") else -1
        while start >= 0:
            inner = text[start + 2 : -1]
            if _is_closed(inner):
                told = self.best(inner)
                is_place = text[:start] in self._texts and not told.unknown
                if is_place or told.known > told.unknown:
                    opened, closed = (_Reading(one, 1) for one in self._brackets)
                    yield self.best(text[:start]) + opened + told + closed
                return
            start = text.find(" (", start + 1)


def _is_closed(text: str) -> bool:
    """Whether each bracket in it has its other one behind it."""
    depth = 0
    for one in BRACKET.findall(text):
        depth += 1 if one == "(" else -1
        if depth < 0:
            return False
    return depth == 0


def _chars(text: str) -> int:
    """How many characters it has but blanks."""
    return len("".join(text.split()))
