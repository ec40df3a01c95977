"""Which process a line of a log belongs to, by its prefix."""

from __future__ import annotations

import itertools
import re

from pytest_gkd.diagnosis.patterns import Pattern

# Longer than any prefix. For so few bytes Python's re is ten times as fast as RE2's
# wrapper, and this runs on every line near a match.
_LONGEST = 1000

# Ray's and vLLM's (Name pid=7), NeMo-RL's (Name[rank=0] pid=7), torch's [rank1]:,
# Ray Data's (MapWorker(MapBatches(f)) pid=7),
# torchrun's [default3]: or [15:6]:, mpirun's [1,0]<stderr>:, srun's 12:,
# compose's trainer-1 |, kubectl's [pod/trainer-0/main], programs' own [sampler-3].
_PROCESS = re.compile(
    rb" {0,4}(?:\([\w.:-]{1,60}(?:\[[\w=,]{1,40}\])?(?:[ ,+=][^()\r\n]{0,80})?\)"
    rb"|\([\w.:>-]{1,60}\([^\r\n]{1,160}?\) pid=\d{1,9}(?:, ip=[\w.:]{1,60})?\)"
    rb"|\[(?:rank|default|trainer)\d+\]:?|\[(?:\d{1,4}:(?:\d|\d{3})|(?:\d|\d{3,4}):\d\d)\]:"
    rb"|\[pod/[\w./-]{1,200}\]"
    rb"|\[(?:r|g|w|gpu|dp|node|host)[-_]?\d{1,4}\]:?"
    rb"|\[(?:worker|actor|sampler|learner|trainer|rollout|engine|teacher)"
    rb"(?:[-_]\d{1,4})?\]:?"
    rb"|\[[\d,]{1,9}\]<\w+>:?|\d{1,4}:(?: |\Z)"
    rb"|[A-Za-z][\w.-]{1,60} *\|(?: |\Z))"
)
# What loggers put before every line of a text: vLLM's, glog's, a container's time.
_LOGGER = re.compile(
    rb"(?:(?:ERROR|CRITICAL|WARNING|INFO|DEBUG) \d\d-\d\d \d\d:\d\d:\d\d "
    rb"(?:\[[^\]\r\n]{1,80}\]|[\w.]+:\d+\])"
    rb"|[EWIFC]\d{3,4} \d\d:\d\d:\d\d[.\d]* +\d+ [^\]\r\n]{1,120}\](?: \[\d+\])?"
    rb"|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[.\d]*(?:Z|[+-]\d\d:?\d\d)"
    rb"(?: (?:stdout|stderr) [FP])?)(?: |\Z)"
)
# A time that ts of moreutils or a program's start script puts there, and journald's,
# with the program's name and process.
_TIME = (
    rb"(?:\[?\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?"
    rb"(?:Z|[+-]\d\d:?\d\d)?\]?(?: (?:stdout|stderr) [FP])?"
    rb"|\[?\d\d:\d\d:\d\d(?:[.,]\d{1,9})?\]?"
    rb"|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?: [\w.-]{1,60} (?P<who>[\w.@-]{1,60}"
    rb"\[\d{1,9}\]):)?) "
)
_BEFORE_ALL = re.compile(_TIME)
MARK = b"Traceback (most recent call last)"
_TIMED = Pattern(
    rb"(?m)^(?:\([^)\r\n]{1,80}\) )?"
    + _TIME.replace(b"?P<who>", b"")
    + rb"(?:.{0,200}Traceback \(most recent call last\)|  File \")"
)
# A traceback that begins on a bar's line, which does not end until the bar is full.
_ON_A_BAR = re.compile(
    rb"\| *\d+/\d+ \[[^\]]*\] *(?=(?:\[\w+\]: *|\([^()]*\) *)?Traceback \(most)"
)

# The host that pdsh, which DeepSpeed starts other nodes with, puts before every line.
_ON_A_HOST = Pattern(
    rb"(?m)^(?P<host>[\w.-]{1,60}): (?:\[rank\d+\]: *)?"
    rb"Traceback \(most recent call last\)"
)

# So many lines of hosts are looked at.
MOST_HOSTS = 1_000
# The first byte of any of these, except compose's.
_FIRST = b"([0123456789EWIFCD"


def are_timed(text: bytes) -> bool:
    """Whether a time is put before every line, also before those of tracebacks."""
    return _TIMED.search(text) is not None


def untimed(line: bytes) -> tuple[bytes, bytes]:
    """The process that a time before a line names, if any, and the line without it."""
    found = _BEFORE_ALL.match(line)
    return (found["who"] or b"", line[found.end() :]) if found else (b"", line)


def hosts(text: bytes) -> tuple[bytes, ...]:
    """The hosts that stand before the lines of a traceback, also of its frames."""
    begun = itertools.islice(_ON_A_HOST.finditer(text), MOST_HOSTS)
    found = {one[b"host"] + b": " for one in begun}
    return tuple(
        one
        for one in found
        if b'\n%s  File "' % one in text or b"\n%s[rank" % one in text
    )


def off_the_bar(line: bytes) -> bytes:
    """A line without the bar on which its traceback begins."""
    found = _ON_A_BAR.search(line) if MARK in line else None
    return line[found.end() :] if found else line


def bare(line: bytes) -> bytes:
    """A line without all that may stand before a traceback."""
    line = split(untimed(split(line)[1])[1])[1]
    return split(off_the_bar(line))[1]


def split(line: bytes) -> tuple[bytes, bytes]:
    """The process as written, empty if there is none, and the line without it.

    A logger's prefix is in neither. The line keeps its own indentation.
    """
    first = line[:5].lstrip()[:1]
    if not first or (first not in _FIRST and b"|" not in line[:70]):
        return b"", line  # like most lines
    process, rest = b"", line[:_LONGEST]
    for _ in range(4):  # Ray's around torch's around a logger's
        if found := _PROCESS.match(rest):
            process += found[0].strip()
        elif not (found := _LOGGER.match(rest)):
            break
        rest = rest[found.end() :]
        if not found[0].endswith(b" "):
            rest = rest.removeprefix(b" ")
    return process, rest + line[_LONGEST:]
