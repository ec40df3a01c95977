"""Keeps the hits whose exception, frames and nearby lines fit their rule."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pytest_gkd.diagnosis.catalogue import Signature
from pytest_gkd.diagnosis.exceptions import Chain, Frame, Places, Raised
from pytest_gkd.diagnosis.frames import phase_of
from pytest_gkd.diagnosis.scan import Hit


def asked(hits: Iterable[Hit]) -> bool:
    """Whether these hits must be checked beyond their own lines."""
    return any(hit.signature.in_parts or hit.tier == "fallback" for hit in hits)


def hold(hits: list[Hit], chains: Iterable[Chain]) -> list[Hit]:
    """The hits that count, with the facts of their exceptions, in order.

    ``chains`` are the exceptions of the same text. A hit without a tier is only the
    ``beside`` text of another rule, and is left out. A broad rule's hit in a frame is
    left out if another rule matches the message of the same exception.
    """
    places = Places(chains)
    beside = [hit for hit in hits if not hit.tier]
    found, told = list[tuple[Hit, Raised | None]](), set[int]()
    for hit in (hit for hit in hits if hit.tier):
        chain, one = places.holding(hit.order, hit.process)
        if (kept := _held(hit, chain, one, beside)) is not None:
            found.append((kept, one))
            sure = hit.signature.confidence != "guess"
            told |= {id(one)} if one and sure and hit.order >= one.at >= 0 else set()
    return [
        hit
        for hit, one in found
        if not (one and hit.tier == "fallback" and id(one) in told)
        or hit.order >= one.at
    ]


def _held(hit: Hit, chain: Chain, one: Raised | None, beside: list[Hit]) -> Hit | None:
    asks = hit.signature
    if asks.of_exception:
        if one is None or not _fits(asks, chain, one):
            return None
        if not asks.text and asks.raised and hit.order != one.at:
            return None
        hit = replace(hit, facts=_facts(one) | dict(hit.facts))
    if asks.phases and (phase_of(chain) or "unknown") not in asks.phases:
        return None
    near = [other for other in beside if other.signature.text == asks.beside]
    if asks.beside and not any(_together(hit, other, chain) for other in near):
        return None
    return hit


def _fits(asks: Signature, chain: Chain, one: Raised) -> bool:
    kind = one.type.partition("(")[0]
    if asks.raised and not any(f".{kind}".endswith(f".{n}") for n in asks.raised):
        return False
    last = one.frames[-1:]
    if asks.innermost and not any(
        _is(f, word) for f in last for word in asks.innermost
    ):
        return False
    frames = [frame for other in chain for frame in other.frames]
    return not asks.through or any(_is(f, w) for f in frames for w in asks.through)


def _is(frame: Frame, word: str) -> bool:
    """Whether a frame is in a function, in a file or folder, or both with a colon."""
    path, _, function = word.rpartition(":")
    if not path and ("/" in word or word.endswith(".py")):
        path, function = word, ""
    if function and frame.function.rpartition(".")[2] != function:
        return False
    file = "/" + frame.file.replace("\\", "/")
    return (
        f"/{path}" in file
        if path.endswith("/")
        else file.endswith(f"/{path}" * bool(path))
    )


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
