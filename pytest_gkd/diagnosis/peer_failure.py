"""Finds the exception of one process, known to no rule, of which others saw the end."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from pytest_gkd.diagnosis import frames, recovery
from pytest_gkd.diagnosis.evidence import EvidenceLine
from pytest_gkd.diagnosis.exceptions import Chain
from pytest_gkd.diagnosis.log_file import Log
from pytest_gkd.diagnosis.log_report import LogReport
from pytest_gkd.diagnosis.root_cause import Candidate
from pytest_gkd.diagnosis.scan import shown

# What a process raises because another one failed, or is late, or ended it.
_SEEN = re.compile(
    r"(?i)dist\w*error|nccl|gloo|c10d|rendezvous|collective|barrier|socket|connection"
    r"|broken ?pipe|\bpeer\b|timed? ?out|timeout|EOFError|Empty\b|exit|interrupt"
    r"|ChildFailed|CalledProcess|ProcessRaised|actor|worker|RayTask|engine|signal|killed"
    r"|terminated|abort|watchdog|process ?group|\branks?\b"
)


def behind(
    root: Candidate, found: Iterable[Candidate], logs: Iterable[Log]
) -> tuple[Log, Chain] | None:
    """The first exception that explains ``root``, which a sound process saw.

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
    for log in logs:
        outlived = recovery.outlived_until(log)
        for chain in log.chains:
            start, one = min(each.start for each in chain), chain[0]
            if (log.number, start) in known or start <= outlived:
                continue
            if (log.number, one.process) in saw or not (one.frames and one.type):
                continue
            if not _SEEN.search(f"{one.type} {one.message}"):
                return log, chain
    return None


def report(
    log: Log, chain: Chain, root: Candidate, phase: str, last: EvidenceLine | None
) -> LogReport:
    """The report of a run that ended by this exception, of which ``root`` is a sign.

    ``phase`` is told if the exception's frames tell none.
    """
    told = [EvidenceLine(log.name, None, shown(line.encode())) for line in _says(chain)]
    return LogReport(
        "unknown",
        frames.phase_of(chain, phase) or phase,
        last=last,
        telling=tuple(told),
        nearest=(root.cause,),
    )


def _says(chain: Chain) -> Iterator[str]:
    """What an exception says, and the innermost line of the program that raised it."""
    one = chain[0]
    said = one.message.partition("\n")[0]
    yield f"{one.process} {one.type}{': ' if said else ''}{said}".strip()
    own = [each for each in one.frames if not frames.is_general(each)] or one.frames
    place = f"{own[-1].file}:{own[-1].line} in {own[-1].function}"
    yield f"{place}: {own[-1].code}" if own[-1].code else place
