"""Which known causes an unknown failure resembles most: guesses, by the words it uses.

Each cause is a document of its examples, texts and title; a failure's most informative
lines are ranked against them by BM25 (Robertson and Zaragoza, The Probabilistic
Relevance Framework: BM25 and Beyond, 2009).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable

from pytest_gkd.diagnosis import log_phases
from pytest_gkd.diagnosis.catalogue import Catalogue, Rule

K1, B = 1.2, 0.75
# One common word is no resemblance, nor are words that every fourth cause uses.
LEAST_WORDS, COMMON = 2, 4
# How much more a cause counts that occurs in the phase of the failure.
IN_PHASE = 2

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]{2,}")


def nearest(
    lines: Iterable[str], catalogue: Catalogue, phase: str = "", most: int = 3
) -> list[str]:
    """The causes that the lines resemble, nearest first; distant ones left out.

    ``phase`` is that of the failure, as far as it is known.
    """
    documents = {rule.id: _words(_text(rule)) for rule in catalogue.values()}
    asked = set(_words(" ".join(lines)))
    holding = Counter(word for words in documents.values() for word in words)
    every = len(documents)
    usual = sum(words.total() for words in documents.values()) / max(1, every)
    scores = {}
    for cause, words in documents.items():
        shared = {
            word for word in asked & words.keys() if holding[word] * COMMON < every
        }
        if len(shared) >= LEAST_WORDS:
            length = K1 * (1 - B + B * words.total() / usual)
            scores[cause] = sum(
                math.log(1 + (every - holding[word] + 0.5) / (holding[word] + 0.5))
                * words[word]
                * (K1 + 1)
                / (words[word] + length)
                for word in shared
            )
            scores[cause] *= IN_PHASE if phase in log_phases.phases_of(cause) else 1
    return sorted(scores, key=scores.__getitem__, reverse=True)[:most]


def _text(rule: Rule) -> str:
    shown = [
        part for one in rule.signatures for part in (one.example, one.say, *one.text)
    ]
    return " ".join([rule.title, *shown])


def _words(text: str) -> Counter[str]:
    return Counter(word.lower() for word in _WORD.findall(text))
