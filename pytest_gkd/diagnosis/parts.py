"""Keeps the hits whose exception, frames and nearby lines fit their rule."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import PurePosixPath

from pytest_gkd.diagnosis.catalogue import Signature
from pytest_gkd.diagnosis.exceptions import Chain, Places, Raised
from pytest_gkd.diagnosis.frames import (
    in_library,
    is_at,
    is_general,
    own_words,
    phase_of,
)
from pytest_gkd.diagnosis.patterns import pattern_of
from pytest_gkd.diagnosis.scan import Hit
from pytest_gkd.diagnosis.stack_dump import Frame

# The class of an exception that a line quotes.
_QUOTED = re.compile(r"\b[A-Za-z_]\w*(?:Error|Exception)\b")

# Exceptions that are a fault of the code where they are raised, whatever the job asks.
_OF_CODE = re.compile(
    r"\b(?:UnboundLocal|Name|Syntax|Indentation|Tab|Recursion)Error\)?$"
)


def hold(hits: list[Hit], chains: Iterable[Chain]) -> list[Hit]:
    """The hits that count, with the facts of their exceptions, in order.

    ``chains`` are the exceptions of the same text. A hit without a tier is only the
    ``beside`` text of another rule, and is left out. A broad rule's hit in a frame is
    left out if another rule matches the message of the same exception; so is that of a
    place where any message may be raised, if the message itself names a cause, or the
    exception is a fault of the code there.
    """
    places = Places(chains)
    beside = [hit for hit in hits if not hit.tier]
    found, told, named = list[tuple[Hit, Raised | None]](), set[int](), set[int]()
    for hit in (hit for hit in hits if hit.tier):
        chain, one = places.holding(hit.order, hit.process)
        if (kept := _held(hit, chain, one, beside)) is not None:
            found.append((_linked(kept, chain, one), one))
            sure = hit.signature.confidence != "guess"
            if one and sure and hit.order >= one.at >= 0:
                told.add(id(one))
                if hit.tier == "cause" and hit.signature.text:
                    named.add(id(one))
    return [
        hit for hit, one in found if one is None or not _outdone(hit, one, told, named)
    ]


def _outdone(hit: Hit, one: Raised, told: set[int], named: set[int]) -> bool:
    """Whether the message of the exception tells more than this hit in it does.

    ``told`` are the exceptions whose message some rule matches, ``named`` those where
    a text of it names a cause.
    """
    in_frame = hit.tier == "fallback" and hit.order < one.at
    any_message = not (hit.signature.text or hit.signature.pattern)
    return (in_frame and id(one) in told) or (any_message and id(one) in named)


def _linked(hit: Hit, chain: Chain, one: Raised | None) -> Hit:
    """The hit with its place among chained exceptions."""
    if one is None:
        return hit
    link = next(number for number, each in enumerate(chain) if each is one)
    handling = sum(each.came == "context" for each in chain[: link + 1])
    start = min(each.start for each in chain)
    return replace(hit, chain=start, link=link, handling=handling)


def _held(hit: Hit, chain: Chain, one: Raised | None, beside: list[Hit]) -> Hit | None:
    asks = hit.signature
    if one is not None and _is_fault_of_code(hit, one):
        return None
    if asks.of_exception:
        if one is None or not _fits(asks, chain, one):
            return None
        if not asks.text and asks.raised and hit.order != one.at:
            return None
        hit = replace(hit, facts=_facts(one) | dict(hit.facts))
    if asks.in_library and one is not None and not in_library(one):
        return None
    if one is not None and _is_own(hit, one):
        if asks.library_message:
            return None
        if not asks.in_parts and not asks.own_words:
            hit = replace(hit, signature=replace(asks, confidence="guess"))
    if asks.phases and (phase_of(chain) or "unknown") not in asks.phases:
        return None
    near = [other for other in beside if other.signature.text == asks.beside]
    if asks.beside and not any(_together(hit, other, chain) for other in near):
        return None
    return hit


def _is_fault_of_code(hit: Hit, one: Raised) -> bool:
    """Whether only a place is known, of a fault of the code there.

    A rule may ask for such an exception, and a user's own for any at a place.
    """
    asks = hit.signature
    wanted = asks.raised or asks.own_words or hit.order >= one.at
    return not wanted and _OF_CODE.search(one.type) is not None


def _is_own(hit: Hit, one: Raised) -> bool:
    """Whether the program's own code wrote the words, and quotes no other exception."""
    if hit.order < one.at or not own_words(one):
        return False
    said = hit.text.partition(one.type)[2] if hit.order == one.at else hit.text
    return _QUOTED.search(said) is None


def _fits(asks: Signature, chain: Chain, one: Raised) -> bool:
    kind = one.type.partition("(")[0]
    if asks.raised and not any(f".{kind}".endswith(f".{n}") for n in asks.raised):
        return False
    last = one.frames[-1:]
    if asks.innermost and not any(
        is_at(f, word) for f in last for word in asks.innermost
    ):
        return False
    frames = [frame for other in chain for frame in other.frames]
    if asks.through and not any(is_at(f, w) for f in frames for w in asks.through):
        return False
    if asks.named and not _finds(asks.named, _names(chain, frames)):
        return False
    return not asks.code or _finds(asks.code, [_own_code(one)])


def _finds(pattern: str, texts: Iterable[str]) -> bool:
    like = pattern_of(pattern)
    return any(like.search(text.encode()) for text in texts)


def _names(chain: Chain, frames: Iterable[Frame]) -> Iterable[str]:
    """The processes, functions and files of chained exceptions."""
    yield from {one.process for one in chain}
    for frame in frames:
        yield f"{PurePosixPath(frame.file).name}:{frame.function}"


def _own_code(one: Raised) -> str:
    """The innermost line that is not a library's, as the traceback shows it."""
    own = (frame.code for frame in reversed(one.frames) if not is_general(frame))
    return next(filter(None, own), "")


def _together(hit: Hit, other: Hit, chain: Chain) -> bool:
    """Whether a hit is near enough: within so many lines, or in the same exceptions."""
    if hit.process != other.process:
        return False
    if hit.signature.within:
        return abs((hit.line or 0) - (other.line or 0)) <= hit.signature.within
    return any(one.start <= other.order < one.end for one in chain)


def _facts(one: Raised) -> dict[str, str]:
    """The facts of the exception itself that a rule may use."""
    facts = {
        "raised": one.type.partition("(")[0].rpartition(".")[2],
        "message": one.message.strip().partition("\n")[0],
    }
    if one.frames:
        facts["file"] = one.frames[-1].file
        facts["function"] = one.frames[-1].function
    return facts
