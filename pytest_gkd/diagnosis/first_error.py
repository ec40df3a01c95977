"""Finds the first error of a run that no rule explains, and where it was raised."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from pytest_gkd.diagnosis import frames, nearest, recovery
from pytest_gkd.diagnosis.evidence import EvidenceLine
from pytest_gkd.diagnosis.exceptions import Chain, Raised
from pytest_gkd.diagnosis.log_file import Log
from pytest_gkd.diagnosis.root_cause import Candidate
from pytest_gkd.diagnosis.scan import shown
from pytest_gkd.diagnosis.stack_dump import Frame

# What a process raises because another one failed, or is late, or ended it.
_SEEN = re.compile(
    r"(?i)dist\w*error|nccl|gloo|c10d|rendezvous|collective|barrier|socket|connection"
    r"|broken ?pipe|\bpeer\b|timed? ?out|timeout|EOFError|Empty\b|exit|interrupt"
    r"|ChildFailed|CalledProcess|ProcessRaised|actor|worker|RayTask|engine|signal|killed"
    r"|terminated|abort|watchdog|process ?group|\branks?\b"
)
# How many of its frames tell an error from others.
INNERMOST = 2

_PACKAGES = re.compile(r".*/(?:site|dist)-packages/")


@dataclass(frozen=True)
class FirstError:
    """An exception, ``raised`` in the run that wrote ``log``, with its ``chain``."""

    log: Log
    chain: Chain
    raised: Raised

    def lines(self) -> Iterator[EvidenceLine]:
        """What it says; then its innermost line, the framework's and the program's."""
        one = self.raised
        text = f"{one.process} {one.type}{': ' if self.message else ''}{self.message}"
        yield EvidenceLine(*self.log.place_at(one.at), shown(text.strip().encode()))
        for frame in self.places():
            file = _PACKAGES.sub("", frame.file)
            place = f"{file}:{frame.line} in {frame.function}"
            text = f"{place}: {frame.code}" if frame.code else place
            yield EvidenceLine(self.log.name, None, shown(text.encode()))

    @property
    def message(self) -> str:
        """The first line of its message; what follows may be of others."""
        return self.raised.message.partition("\n")[0]

    @property
    def is_origin(self) -> bool:
        """Whether it is a whole traceback, and not of what others see of a failure."""
        one = self.raised
        whole = bool(one.frames and one.type)
        return whole and not _SEEN.search(f"{one.type} {self.message}")

    def places(self) -> list[Frame]:
        """Its innermost frame, that of the framework and that of the program itself."""
        inner = self.raised.frames[::-1]
        of_job = (one for one in inner if not frames.is_general(one))
        own = filter(frames.is_own, inner)
        found = (next(iter(kind), None) for kind in (inner, of_job, own))
        return [*dict.fromkeys(filter(None, found))]

    def words(self) -> Iterator[str]:
        """What tells it from others, for ``nearest``: class, message, places, code."""
        one = self.raised
        kind = one.type.partition("(")[0].rpartition(".")[2]
        yield nearest.name(kind)
        said = f"{kind} {self.message} {one.frames[-1].code}"
        yield from nearest.words_of(said)
        for frame in one.frames[-INNERMOST:]:
            place = f"{PurePosixPath(frame.file).stem}:{frame.function}"
            yield from (nearest.name(place), *nearest.words_of(place))


def of(logs: Iterable[Log]) -> list[FirstError]:
    """The errors that a run did not outlive, with a traceback, first of each chain.

    Those that are raised because another process failed come after all others; what
    says the same as an earlier one is left out.
    """
    found = dict[tuple[str, str], FirstError]()
    for log in logs:
        for chain in _not_outlived(log):
            whole = (one for one in chain if one.frames and one.type)
            every = sorted((FirstError(log, chain, one) for one in whole), key=_echoes)
            for one in every[:1]:
                found.setdefault((one.raised.type, one.message), one)
    return sorted(found.values(), key=_echoes)


def behind(
    root: Candidate, found: Iterable[Candidate], logs: Iterable[Log]
) -> FirstError | None:
    """The first error that explains ``root``, which a sound process saw.

    It is of another process than all that shows ``root``, the run did not outlive it,
    and none of ``found`` is seen in it.
    """
    known = {
        (hit.source_index, hit.chain)
        for one in found
        if one.confidence != "guess"
        for hit in one.hits
    }
    saw = {(hit.source_index, hit.process) for hit in root.hits}
    every = (
        FirstError(log, chain, chain[0])
        for log in logs
        for chain in _not_outlived(log)
        if (log.number, min(each.start for each in chain)) not in known
        and (log.number, chain[0].process) not in saw
    )
    return next((one for one in every if one.is_origin), None)


def _not_outlived(log: Log) -> Iterator[Chain]:
    outlived = recovery.outlived_until(log)
    return (one for one in log.chains if min(each.start for each in one) > outlived)


def _echoes(found: FirstError) -> bool:
    return not found.is_origin
