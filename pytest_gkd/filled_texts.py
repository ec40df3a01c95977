"""Translates texts whose values are filled in, by the templates they were made of."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass

PLACE = re.compile(r"\{([^{}\s]+)\}")
# A template with fewer characters of its own, and not so many at its start, takes only
# single words with a number among them: "{count} rows" fits "512 rows", not every text
# that ends in "rows".
OWN_CHARS, FIRST_CHARS = 8, 4
MOST_JOINTS = 40
# A path or a name at the end of a text, about which the next one says something.
SUBJECT = re.compile(r"(?:^|: )[^\s:]*[/._\d'][^\s:]*$")
# A longer text was made of no template; the search takes more than linear time.
LONGEST = 4_000


@dataclass(frozen=True)
class _Template:
    """``around`` are the texts around its ``places``; ``loose`` ones take any value."""

    around: tuple[str, ...]
    places: tuple[str, ...]
    loose: bool
    translation: str

    @classmethod
    def of(cls, text: str, translation: str) -> _Template:
        parts = PLACE.split(text)
        around, places = tuple(parts[::2]), tuple(parts[1::2])
        own, first = sum(map(_chars, around)), _chars(around[0])
        loose = own >= OWN_CHARS or first >= FIRST_CHARS
        return cls(around, places, loose, translation)

    def values(self, text: str) -> dict[str, str] | None:
        """What stands in its places if the text was made of it, else None."""
        first, *between, last = self.around
        end = len(text) - len(last)
        at = len(first)
        if at > end or not text.startswith(first) or not text.endswith(last):
            return None
        found: dict[str, str] = {}
        for name, after in zip(self.places, [*between, None], strict=True):
            stop = end if after is None else text.find(after, at, end)
            value = text[at:stop]
            if stop < 0 or found.setdefault(name, value) != value:
                return None
            at = stop + len(after or "")
        told = " ".join(found.values())
        words = told.count(" ") < len(found) and re.search(r"\d", told)
        return found if self.loose or words else None

    def filled(self, values: Mapping[str, str]) -> str:
        """The translation with these values."""
        return PLACE.sub(lambda one: values.get(one[1], one[0]), self.translation)


def _chars(text: str) -> int:
    """How many characters it has but blanks."""
    return len("".join(text.split()))


class FilledTexts:
    """Knows templates, with ``{name}`` for each place, and their translations.

    A translation may leave out a place, such as that of a plural's "s". ``joints`` are
    what stands between texts that were made apart, and what stands there when both are
    translated; ``stop`` is what ends a sentence.
    """

    def __init__(
        self, texts: Mapping[str, str], joints: Mapping[str, str], stop: str
    ) -> None:
        self._texts, self._joints, self._stop = texts, joints, stop
        self._joint = re.compile("|".join(map(re.escape, joints)))
        made = [_Template.of(*one) for one in texts.items() if PLACE.search(one[0])]
        # The one that explains most of a text is the likeliest.
        self._templates = sorted(made, key=lambda one: -len("".join(one.around)))
        self._known: dict[str, str | None] = {}

    def translate(self, text: str) -> str:
        """The text as far as it was made of these templates; the rest as it is."""
        if len(text) > LONGEST or " " not in text:
            return text
        if text not in self._known:
            self._known[text] = self._whole(text) or self._joined(text)
        return self._known[text] or text

    def _whole(self, text: str) -> str | None:
        """A text that was made of one template."""
        if text in self._texts:
            return self._texts[text]
        for template in self._templates:
            values = template.values(text)
            if values is not None:
                return template.filled(
                    {name: self.translate(value) for name, value in values.items()}
                )
        told = self._whole(text[:-1]) if text.endswith(".") else None
        return told and told + self._stop

    def _joined(self, text: str) -> str | None:
        """A text that was joined from others, at the first joint that shows it."""
        for joint in itertools.islice(self._joint.finditer(text), MOST_JOINTS):
            before, after = text[: joint.start()], text[joint.end() :]
            if told := self._whole(text[joint.start() :]):
                return self.translate(before) + told
            between = self._joints[joint[0]]
            if joint[0] == " " and not before.endswith("."):
                if not SUBJECT.search(before):
                    continue
                between = " "
            if told := self._whole(before):
                return told + between + self.translate(after)
            if told := self._whole(after):
                return self.translate(before) + between + told
        return None
