"""Which ranks have not said what the others said, from a log of all of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from pytest_gkd import rank_words, sanitize
from pytest_gkd.diagnosis import log_phases
from pytest_gkd.diagnosis.patterns import Pattern

# Only the end of a log shows who is behind.
TAIL = 1 << 18

# What a library says about ranks that did not come.
_NAMED = Pattern(
    rb"Ranks? (?P<ranks>\d[\d, ]{0,300}) failed to pass monitoredBarrier"
    rb"|missing ranks: (?P<listed>\d[\d, ]{0,300})"
)
_COUNTED = Pattern(
    rb"(?P<said>\d{1,6})/(?P<world>\d{1,6}) clients joined"
    rb"|\(world_size=(?P<size>\d{1,6}), num_workers_joined=(?P<joined>\d{1,6})"
)
# How a line names the rank that prints it, and the size of a group of ranks.
_RANK = Pattern(
    rb"\[(?:rank|Rank |default)(?P<tag>\d{1,6})\]"
    rb"|\(Worker_TP(?P<tp>\d{1,6}) pid="
    rb"|\brank (?P<nccl>\d{1,6}) nranks \d"
    rb"|zero_pp_rank_(?P<zero>\d{1,6})_|\b[Rr]ank[ :=]{1,2}(?P<plain>\d{1,6})\b"
)
_WORLD = Pattern(
    rb"\bnranks (?P<a>\d{1,6})\b|world[_ ]size[ =:_']{1,3}(?P<b>\d{1,6})\b"
    rb"|world_size_(?P<c>\d{1,6})_rank"
)
REPEATED = Pattern(rb"\[repeated (?P<times>\d{1,6})x across cluster\]")
VARIES = Pattern(rb"(?:0x)?[\dA-Fa-f]*\d[\dA-Fa-f]*|\([\w ]* ?pid=[^)]{0,60}\)")
_MARKS = Pattern(rb"^(?:[ :,]*(?:\[[^\]\r\n]{0,120}\]|\([^)\r\n]{0,120}\)))*[ :,]*")
_LINE = Pattern(rb"[^\r\n]+")


@dataclass(frozen=True)
class Missing:
    """The ranks that are behind, and a sentence saying with what."""

    ranks: tuple[int, ...] = ()
    sentence: str = ""


@dataclass
class _Said:
    """A line, ignoring numbers: where it began, who said it, how often unnamed."""

    at: int
    ranks: set[int] = field(default_factory=set)
    folded: int = 0
    words: bytes = b""

    @property
    def count(self) -> int:
        return len(self.ranks) + self.folded


def missing(text: bytes, world_size: int | None = None) -> Missing:
    """The ranks that have not said what most of the others have.

    What a library says about them takes precedence over what the ranks' lines imply: a
    line that more than half of them have printed, while the others have printed nothing
    at all since it appeared.
    """
    joining = log_phases.nccl_joining(text)
    if joining is not None and min(joining[0]) >= 0:
        ranks = tuple(sorted({*range(joining[1])} - joining[0]))
        told = f"{rank_words.name(ranks)} of {joining[1]} did not say 'Init COMPLETE'"
        return Missing(ranks, told)
    text = text[-TAIL:]
    return _told(text) or _concluded(text, world_size or _world(text)) or Missing()


def _told(text: bytes) -> Missing | None:
    last, at = None, -1
    for found in _NAMED.finditer(text):
        listed = (found[b"ranks"] or found[b"listed"]).replace(b" ", b"").split(b",")
        ranks = tuple(sorted({int(one[:9]) for one in listed if one}))
        last, at = (
            Missing(ranks, f"{rank_words.name(ranks)} did not come"),
            found.start(),
        )
    for found in _COUNTED.finditer(text):
        said = int(found[b"said"] or found[b"joined"])
        world = int(found[b"world"] or found[b"size"])
        if found.start() > at and said < world:
            last, at = Missing((), f"{said} of {world} have joined"), found.start()
    return last


def _world(text: bytes) -> int:
    """The largest group of ranks that the text names; 0 if it names none."""
    found = (next(filter(None, one.groups())) for one in _WORLD.finditer(text))
    return max((int(size) for size in found), default=0)


def _concluded(text: bytes, world: int) -> Missing | None:
    if world <= 2:
        return None  # of two ranks one speaks alone in any log
    lines: dict[bytes, _Said] = {}
    spoke: dict[int, int] = {}
    for line in _LINE.finditer(text):
        found = _RANK.search(line[0][:400])
        if found is None:
            continue
        rank, at = int(next(filter(None, found.groups()))), line.start()
        fold = REPEATED.search(line[0])
        words = line[0][: fold.start()] if fold else line[0]
        said = lines.setdefault(VARIES.without(words), _Said(at))
        if rank < world:
            said.ranks.add(rank)
            spoke[rank] = at
        said.folded += int(fold[b"times"]) if fold else 0
        said.words = words[found.end() :]
    behind = [one for one in lines.values() if world < 2 * one.count < 2 * world]
    for last in sorted(behind, key=lambda one: -one.at):
        what = _shown(last.words)
        if last.folded:
            told = f"{last.count} of {world} ranks have said {what!r}"
            return Missing((), told)
        silent = sorted(set(range(world)) - last.ranks)
        if all(spoke.get(rank, -1) < last.at for rank in silent):
            told = f"{rank_words.name(silent)} of {world} did not say {what!r}"
            return Missing(tuple(silent), told)
    return None


def _shown(words: bytes) -> str:
    """The start and the end of what was said, without marks such as ``[E1121 …]``."""
    lead = _MARKS.search(words)
    text = sanitize.line(words[lead.end() if lead else 0 :].decode("utf-8", "replace"))
    return text if len(text) <= 70 else f"{text[:35]}…{text[-34:]}"
