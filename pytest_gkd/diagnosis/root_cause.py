"""Separates the root cause from its consequences."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from pytest_gkd.diagnosis.catalogue import CONFIDENCES, TIERS, Catalogue
from pytest_gkd.diagnosis.scan import Hit


@dataclass(frozen=True)
class Candidate:
    """One cause with its hits, the best first, and how far it explains the failure.

    ``rank`` is the index in TIERS of its strongest hit; ``explained`` says that another
    cause found in the same run is known to bring this one about.
    """

    cause: str
    hits: tuple[Hit, ...]
    rank: int
    explained: bool

    @property
    def best(self) -> Hit:
        """The hit that represents the cause."""
        return self.hits[0]

    @property
    def weak(self) -> bool:
        """Whether only warnings and notes support the cause."""
        return self.best.weak

    @property
    def confidence(self) -> str:
        """How sure the cause itself is: certain, likely or guess."""
        return "guess" if self.weak else self.best.signature.confidence


def choose(hits: Iterable[Hit], catalogue: Catalogue) -> list[Candidate]:
    """The causes found, the root first.

    A cause that another found one explains comes after it: one that the catalogue
    knows to bring it about, or one shown by an earlier exception of the same chain.
    Among others the tier decides first: a cause before a symptom before a fallback.
    Then confidence, then which was first in time, across all sources if every line has
    a time, else in source order.
    """
    grouped: dict[str, list[Hit]] = {}
    for hit in _with_swallowed(_with_mismatch(list(hits), catalogue), catalogue):
        grouped.setdefault(hit.cause, []).append(hit)
    strong = {cause for cause, own in grouped.items() if not all(h.weak for h in own)}
    timed = all(hit.time_s is not None for own in grouped.values() for hit in own)
    found = [
        Candidate(
            cause=cause,
            hits=tuple(sorted(own, key=lambda hit: _hit_key(hit, timed))),
            rank=min(TIERS.index(hit.tier) for hit in own),
            explained=False,
        )
        for cause, own in grouped.items()
    ]
    found = [
        replace(
            one,
            explained=any(
                other.cause in strong and _explains(other, one, catalogue, timed)
                for other in found
            ),
        )
        for one in found
    ]
    return sorted(found, key=lambda one: _key(one, timed))


def _with_mismatch(hits: list[Hit], catalogue: Catalogue) -> list[Hit]:
    """The hits, and a mismatch if the watchdogs of two ranks prove one.

    A collective has the same number on every rank, so ranks that wait in number 7 of
    different kinds called different operations.
    """
    waiting: dict[str, Hit] = {}
    for hit in hits:
        number = hit.facts.get("seq")
        if number is None or "comm.mismatch" not in catalogue:
            continue
        first = waiting.setdefault(number, hit)
        ranks = (first.facts.get("rank"), hit.facts.get("rank"))
        if None in ranks or ranks[0] == ranks[1]:
            continue
        if first.facts["op"] != hit.facts["op"]:
            found = replace(hit, cause="comm.mismatch", tier="cause", facts={})
            sure = replace(hit.signature, confidence="likely", say="")
            return [*hits, replace(found, signature=sure)]
    return hits


def _with_swallowed(hits: list[Hit], catalogue: Catalogue) -> list[Hit]:
    """The hits; a mere warning counts if its known consequence occurred.

    Such as rows that a template rejected and that were skipped, until none was left.
    """
    known = {
        cause: hit.order
        for hit in hits
        if not hit.weak
        for cause in catalogue[hit.cause].consequence_of
    }
    return [
        replace(hit, weak=False)
        if hit.weak and hit.order < known.get(hit.cause, -1)
        else hit
        for hit in hits
    ]


def _brings(other: str, cause: str, catalogue: Catalogue) -> bool:
    """Whether ``other`` is known to bring ``cause`` about; ``*`` is anything known."""
    known = catalogue[cause].consequence_of
    if other == cause or other in known:
        return other != cause
    return "*" in known and "*" not in catalogue[other].consequence_of


def _explains(
    other: Candidate, one: Candidate, catalogue: Catalogue, timed: bool
) -> bool:
    """Whether ``one`` followed from ``other``.

    Of two that can bring each other about, the better one explains the other. What is
    said of the same line twice is one observation, of which the likelier tier counts.
    """
    if other is one:
        return False
    mutual = _brings(one.cause, other.cause, catalogue)
    if not _brings(other.cause, one.cause, catalogue):
        peer = catalogue[one.cause].seen_by_peer and _is_origin(other, catalogue)
        return not mutual and ((peer and _apart(other, one)) or _led_to(other, one))
    if other.rank > one.rank and _places(other) <= _places(one):
        return False
    return not mutual or _key(other, timed) < _key(one, timed)


def _is_origin(found: Candidate, catalogue: Catalogue) -> bool:
    """Whether it is a failure in itself, not what another process sees of one."""
    return found.rank == 0 and not catalogue[found.cause].seen_by_peer


def _apart(other: Candidate, one: Candidate) -> bool:
    """Whether ``other`` is seen in another exception or process than ``one``."""
    places = {(hit.source_index, hit.process, hit.chain) for hit in one.hits}
    return any(
        (hit.source_index, hit.process, hit.chain) not in places
        for hit in other.hits
        if not hit.weak and hit.tier == "cause"
    )


def _places(found: Candidate) -> set[tuple[int, int]]:
    return {(hit.source_index, hit.order) for hit in found.hits if not hit.weak}


def _led_to(other: Candidate, one: Candidate) -> bool:
    """Whether all of ``one`` is in exceptions that others, of ``other``, led to.

    The direct cause of an exception explains it. One that was being handled does so
    unless what is known of it is broader: a program may try one way and then another.
    """
    if other.confidence == "guess" or other.weak:
        return False
    first: dict[tuple[int, int], Hit] = {}
    for hit in sorted(other.hits, key=lambda hit: hit.link):
        if hit.chain >= 0 and not hit.weak:
            first.setdefault((hit.source_index, hit.chain), hit)
    return all(
        (root := first.get((hit.source_index, hit.chain))) is not None
        and root.link < hit.link
        and _is_as_narrow(root, hit)
        for hit in one.hits
        if not hit.weak
    )


def _is_as_narrow(root: Hit, hit: Hit) -> bool:
    if root.handling == hit.handling:
        return root.tier != "fallback" or hit.tier == "fallback"
    return TIERS.index(root.tier) <= TIERS.index(hit.tier)


def _hit_key(hit: Hit, timed: bool) -> tuple[object, ...]:
    return (
        hit.weak,
        TIERS.index(hit.tier),
        CONFIDENCES.index(hit.signature.confidence),
        *_when(hit, timed),
    )


def _when(hit: Hit, timed: bool) -> tuple[float, int, int]:
    return (hit.time_s or 0.0 if timed else 0.0, hit.source_index, hit.order)


def _key(found: Candidate, timed: bool) -> tuple[object, ...]:
    return (
        found.weak,
        found.explained,
        found.rank,
        found.confidence == "guess",
        *_when(found.best, timed),
    )
