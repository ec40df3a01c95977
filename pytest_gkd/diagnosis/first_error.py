"""Finds the first error of a run that no rule explains, and where it was raised."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from pytest_gkd.diagnosis import clocks, frames, nearest, recovery, standing
from pytest_gkd.diagnosis.evidence import EvidenceLine
from pytest_gkd.diagnosis.exceptions import Chain, Raised
from pytest_gkd.diagnosis.log_file import Log
from pytest_gkd.diagnosis.root_cause import Candidate
from pytest_gkd.diagnosis.scan import shown
from pytest_gkd.diagnosis.stack_dump import Frame

# What a process raises because another one failed, or is late, or ended it: by its
# class, or by what it says.
_ECHO = re.compile(
    r"(?:^|\.)(?:Dist\w*Error|(?:Ray)?(?:Actor|Worker|Node|Owner|Task)\w*Error"
    r"|RayChannel\w*|WorkerCrashed\w*|ChildFailed\w*|CalledProcess\w*"
    r"|Process(?:Raised|Exited)\w*|\w*Connect\w*|Remote\w*|\w*Timeout\w*|EOFError"
    r"|BrokenPipe\w*|Empty|SystemExit|\w*Interrupt\w*|\w*Engine\w*Error|\w*Dead\w*"
    r")(?:\(|$)"
)
_SAYS_SO = re.compile(
    r"(?i)\b(?:nccl|gloo|c10d|rendezvous|collective|barrier|sockets?|connections?"
    r"|broken ?pipe|peers?|tim(?:ed|e) ?out|timeout|exited|exits? (?:code|with)"
    r"|sig[a-z]{3,5}|signal \d+|killed|terminated|watchdog|process ?group"
    r"|ranks? (?:\d|died|failed)|(?:actor|worker|engine)s?(?: \w+)? (?:died|failed"
    r"|exited|crashed|dead|gone|encountered|initialization)|engine ?(?:core|loop)"
    r")\b"
)
_RAY = re.compile(r"^ray\.exceptions\.|\bray::")
# How many of its frames tell an error from others.
INNERMOST = 2
MOST_PATH = 80

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
        source, line = self.log.place_at(one.at)
        yield EvidenceLine(source, line, shown(text.strip().encode()))
        for frame in self.places():
            file = _PACKAGES.sub("", frame.path)
            file = file if len(file) <= MOST_PATH else f"…{file[1 - MOST_PATH :]}"
            place = f"{file}:{frame.line} in {frame.function}"
            text = f"{place}: {frame.code}" if frame.code else place
            yield EvidenceLine(source, None, shown(text.encode()))

    @property
    def time_s(self) -> float | None:
        """When it was raised, in seconds of its log's clock; None if nothing tells."""
        log = self.log
        return clocks.of(log.tail).at(max(0, self.chain[0].start - log.tail_at))

    @property
    def message(self) -> str:
        """The first line of its message, with the next if that is but a heading."""
        first, _, rest = self.raised.message.partition("\n")
        more = rest.partition("\n")[0].strip() if first.endswith(":") else ""
        return f"{first} {more}".rstrip()

    @property
    def says(self) -> str:
        """Class and message, without the numbers in which two ranks may differ."""
        return re.sub(r"\d+", "", f"{self.raised.type}: {self.message}")

    @functools.cached_property
    def is_origin(self) -> bool:
        """Whether it is more than what a process sees of another one's failure."""
        kind = self.raised.type
        return not (_ECHO.search(kind) or _SAYS_SO.search(self.message))

    @functools.cached_property
    def let_go(self) -> bool:
        """Whether the program said that it does without, or tries again."""
        return recovery.let_go(self.log, self.chain)

    @property
    def is_first(self) -> bool:
        """Whether the run may have failed of it, not of another one."""
        return self.is_origin and not self.let_go

    @property
    def of_worker(self) -> bool:
        """Whether a worker or an engine raised it, as far as it shows; not a driver."""
        every = (frame for one in self.chain for frame in one.frames)
        return bool(
            self.raised.process
            or any(_RAY.search(f"{one.type} {one.message}") for one in self.chain)
            or any(map(frames.is_of_engine, every))
        )

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
            place = f"{PurePosixPath(frame.path).stem}:{frame.function}"
            yield from (nearest.name(place), *nearest.words_of(place))


def of(logs: Sequence[Log]) -> list[FirstError]:
    """The errors that a run did not outlive, with a traceback, first of each chain.

    What the program let go and what is raised because another process failed come after
    all others; what says the same as an earlier one is left out. Those of several logs
    are in the order of their times, if all have one.
    """
    every = [one for log in logs for one in _first_of_each(log)]
    if len(logs) > 1:
        shifts_s = standing.shifts_s(logs)
        times = [one.time_s for one in every]
        if None not in times:
            every.sort(key=lambda one: (one.time_s or 0) + shifts_s[one.log.number])
    found = dict[str, FirstError]()
    for one in sorted(every, key=_follows):
        found.setdefault(one.says, one)
    return [*found.values()]


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
    return next((one for one in every if _is_whole(one) and one.is_first), None)


def _first_of_each(log: Log) -> Iterator[FirstError]:
    """Of each of the log's chains that the run did not outlive the first, if any."""
    for chain in _not_outlived(log):
        whole = filter(_is_whole, (FirstError(log, chain, one) for one in chain))
        yield from sorted(whole, key=_follows)[:1]


def _not_outlived(log: Log) -> Iterator[Chain]:
    outlived = recovery.outlived_until(log)
    return (one for one in log.chains if min(each.start for each in one) > outlived)


def _is_whole(found: FirstError) -> bool:
    return bool(found.raised.frames and found.raised.type)


def _follows(found: FirstError) -> tuple[bool, bool]:
    return found.let_go, not found.is_origin
