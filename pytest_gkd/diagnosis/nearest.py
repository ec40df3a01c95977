"""Which known causes an unknown failure resembles most: guesses, by the words it uses.

Each cause is a document of its examples, texts and title, and of the first errors of
the development logs that have it (``nearest_words.json``, made by
``tools/nearest_words.py``). What a failure says is ranked against them by BM25
(Robertson and Zaragoza, The Probabilistic Relevance Framework: BM25 and Beyond, 2009).
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable
from importlib import resources

from pytest_gkd.diagnosis import log_phases
from pytest_gkd.diagnosis.catalogue import Catalogue, Rule

K1, B = 2.0, 0.75
# One word is no resemblance, besides those that every second cause uses; nor is less
# than this share of what all the words could score. Of 40 guesses below it about set 10
# of tests/written_runs one was right.
LEAST_WORDS, COMMON, LEAST_SHARE = 2, 2, 0.09
# How often a cause's words include a phase in which it is known to occur.
IN_PHASE = 2

WORDS = "nearest_words.json"
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]{2,}")


def nearest(
    said: Iterable[str], catalogue: Catalogue, phase: str = "", most: int = 3
) -> list[str]:
    """The causes that these words resemble, nearest first; distant ones left out.

    ``said`` are words as ``words_of`` gives them and whole names (``name``), ``phase``
    is that of the failure, as far as it is known.
    """
    known = json.loads(resources.files(__package__).joinpath(WORDS).read_text("utf-8"))
    documents = {
        rule.id: _document(rule) + Counter(known.get(rule.id, {}))
        for rule in catalogue.values()
    }
    asked = {*said, name(phase)}
    holding = Counter(word for words in documents.values() for word in words)
    every = len(documents)
    rarity = {
        word: math.log(1 + (every - holding[word] + 0.5) / (holding[word] + 0.5))
        for word in asked
    }
    rare = {word for word in asked - {name(phase)} if holding[word] * COMMON < every}
    usual = sum(words.total() for words in documents.values()) / max(1, every)
    scores = {}
    for cause, words in documents.items():
        shared = asked & words.keys()
        if len(rare & shared) >= LEAST_WORDS:
            length = K1 * (1 - B + B * words.total() / usual)
            scores[cause] = sum(
                rarity[word] * words[word] * (K1 + 1) / (words[word] + length)
                for word in shared
            )
    least = LEAST_SHARE * (K1 + 1) * sum(rarity.values())
    near = [cause for cause, score in scores.items() if score > least]
    return sorted(near, key=scores.__getitem__, reverse=True)[:most]


def words_of(text: str) -> list[str]:
    """The words of a text, in lower case; those of compound names apart."""
    return [word.lower() for word in _WORD.findall(text)]


def name(whole: str) -> str:
    """The word that stands for a whole name: a class, a function, a phase."""
    return f"@{whole}"


def _document(rule: Rule) -> Counter[str]:
    shown = [
        part for one in rule.signatures for part in (one.example, one.say, *one.text)
    ]
    phases = [name(one) for one in log_phases.phases_of(rule.id)] * IN_PHASE
    return Counter([*words_of(" ".join([rule.title, *shown])), *phases])
