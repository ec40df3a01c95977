"""Where each process of a run stands: its last line, and whether others went on."""

from __future__ import annotations

import bisect
import itertools
import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_gkd.diagnosis import failure_lines, log_end, prefixes, silence, work_signs
from pytest_gkd.diagnosis.clocks import stamps
from pytest_gkd.diagnosis.log_file import Log
from pytest_gkd.diagnosis.log_phases import FAILED, STEP
from pytest_gkd.diagnosis.patterns import Pattern
from pytest_gkd.diagnosis.scan import plain, shown
from pytest_gkd.diagnosis.silent_ranks import REPEATED, VARIES

# How much of a log's beginning and end shows who speaks in it, in bytes.
LOOKED_AT = 1 << 18
# How much of the end shows whether processes are named at all, in bytes.
SAMPLE = 20_000
# This many steps behind those that go on, a rank is not at work; this many short of
# those that have finished, it has not finished.
BEHIND, SHORT = 20, 2
# Clocks that differ by multiples of a quarter of an hour show different time zones.
QUARTER_S, LEAST_ZONE_S, SLACK_S = 900.0, 1700.0, 60.0

_LINE = Pattern(rb"[^\r\n]+")
_CLOCK = Pattern(rb"\d\d:\d\d:\d\d")
_STEP_NUMBER = Pattern(
    rb"\b(?:[Ss]tep|global_step|iteration|iter)[ =:]{1,2}(?P<step>\d{1,9})\b"
)
_TORCH = Pattern(rb"\[(?:rank|default|trainer)(\d{1,6})\]")
_DIGITS = re.compile(r"\d+")
_OF_RANK = re.compile(r"(?:^|[^a-z])rank[-_. ]?(\d{1,6})(?!.*\d)", re.IGNORECASE)
_STREAMS = {"stdout", "stderr", "stdout.log", "stderr.log"}


@dataclass(frozen=True)
class Process:
    """One process, a rank's files or the lines with its name, and its last line.

    ``until`` is that line's time as written, ``step`` the last step it reported.
    ``usual_s`` is the usual time between its lines, ``silent_s`` how long others went
    on after the last; None if no line has a time. ``silent`` says that it no longer
    says what others go on to say, ``trains`` that these are training steps,
    ``unfinished`` that it has made fewer of them than others, ``crashed`` that its last
    lines are those of a failure, ``number`` is its log's.
    """

    name: str
    rank: int | None
    file: str
    line: int | None
    text: str
    until: str
    step: int | None
    usual_s: float | None
    silent_s: float | None = None
    silent: bool = False
    trains: bool = False
    unfinished: bool = False
    crashed: bool = False
    number: int = 0

    def to_json(self) -> dict[str, Any]:
        """The process as ``gkd diagnose --format json`` prints it."""
        hidden = ("trains", "unfinished", "crashed", "number")
        return {key: value for key, value in vars(self).items() if key not in hidden}


@dataclass
class _Voice:
    """A process: what it said, ignoring numbers, and at which moments.

    A moment is a time in seconds, or an offset in a log whose lines are in order.
    ``at`` is the byte offset of its last line in what was kept of its log.
    """

    name: str
    rank: int | None
    log: Log
    kind: str = ""
    at: int = 0
    last: float = -math.inf
    step: int | None = None
    times: list[float] = field(default_factory=list)
    said: dict[bytes, list[float]] = field(default_factory=dict)
    steps: set[bytes] = field(default_factory=set)

    def hear(self, line: bytes, moment: float) -> None:
        """Record one of its lines, without its name."""
        words = _words(line)
        self.said.setdefault(words, []).append(moment)
        self.last = max(self.last, moment)
        if STEP.search(line[:400]):
            self.steps.add(words)
            number = _STEP_NUMBER.search(line[:400])
            self.step = int(number[b"step"]) if number else self.step

    @property
    def ended(self) -> bool:
        return log_end.finished(self.log.tail) >= 0 or log_end.over(self.log.tail)

    def process(self, edges: bytes, **told: Any) -> Process:
        end = edges.find(b"\n", self.at)
        line = edges[self.at : len(edges) if end < 0 else end]
        clock = [found[0] for found in _CLOCK.finditer(line[:200])][:1]
        gaps = [late - early for early, late in itertools.pairwise(self.times)]
        return Process(
            self.name,
            self.rank,
            *self.log.place(self.log.line_at(self.at, edges)),
            shown(plain(line[:2000])),
            clock[0].decode() if clock else "",
            self.step,
            statistics.median(gaps) if gaps else None,
            number=self.log.number,
            **told,
        )


def of(logs: Sequence[Log], *, stands: bool = False) -> tuple[Process, ...]:
    """The processes of a run, the first to fall silent first; none if only one ran.

    If the run ``stands`` still, one that lacks the others' last step is silent.
    """
    need = 1 if stands else BEHIND
    found = _of_files(logs, need) if len(logs) > 1 else _of_names(logs[0], need)
    found.sort(key=lambda one: (not one.silent, -(one.silent_s or 0.0), one.step or 0))
    return tuple(found)


def sentence(processes: Iterable[Process]) -> str:
    """Which fell silent first, after which line; empty if none did."""
    silent = [one for one in processes if one.silent]
    if not silent:
        return ""
    one, *others = silent
    place = f"{one.file}:{one.line}" if one.line else one.file
    when = f" at {one.until}" if one.until else ""
    step = "" if one.step is None else f", step {one.step}"
    usual = f" (usually one every {one.usual_s:.4g} s)" if one.usual_s else ""
    went = f" for {one.silent_s:.0f} s" if one.silent_s else ""
    also = f"; then {', '.join(each.name for each in others[:8])}" if others else ""
    return (
        f"{one.name} fell silent{' first' if others else ''}: its last line is "
        f"{place}{when}{step}{usual}; the others went on{went}{also}"
    )


def zones(logs: Sequence[Log]) -> list[float]:
    """What to add to each log's times to get the first log's clock.

    Derived from steps that both report, else from their first lines; 0 unless their
    clocks differ by multiples of a quarter of an hour.
    """
    found = [0.0]
    first = _marks(logs[0]) if len(logs) > 1 else {}
    for log in logs[1:]:
        own = _marks(log)
        steps = first.keys() & own.keys() - {-1} or first.keys() & own.keys()
        apart = statistics.median([first[one] - own[one] for one in steps] or [0.0])
        quarters = round(apart / QUARTER_S) * QUARTER_S
        is_zone = abs(apart) > LEAST_ZONE_S and abs(apart - quarters) < SLACK_S
        found.append(quarters if is_zone else 0.0)
    return found


def shifts_s(logs: Sequence[Log]) -> dict[int, float]:
    """The same by the logs' numbers."""
    return {log.number: s for log, s in zip(logs, zones(logs), strict=True)}


def _marks(log: Log) -> dict[int, float]:
    """When the log begins, as step -1, and when it reports each step, in seconds."""
    head = next(stamps(log.head[:LOOKED_AT]), None)
    found = {} if head is None else {-1: head[1]}
    for at, line, moment in _timed(log):
        number = _STEP_NUMBER.search(line[:400])
        if number and moment is not None and at:
            found[int(number[b"step"])] = moment
    return found


def _timed(log: Log) -> Iterable[tuple[int, bytes, float | None]]:
    """The last lines, each with its offset and the most recent time written."""
    text = log.tail[-LOOKED_AT:]
    times = [*stamps(text)]
    places = [place for place, _ in times]
    for line in _LINE.finditer(text):
        before = bisect.bisect(places, line.end()) - 1
        yield line.start(), line[0], times[before][1] if before >= 0 else None


def _of_files(logs: Sequence[Log], need: int) -> list[Process]:
    """One process for each file, or for both streams of a rank."""
    groups: dict[str, list[tuple[Log, float]]] = {}
    for log, shift_s in zip(logs, zones(logs), strict=True):
        path = Path(log.name)
        key = str(path.parent) if path.name in _STREAMS else log.name
        groups.setdefault(key, []).append((log, shift_s))
    if len(groups) < 2:
        return []
    names = _names(list(groups))
    voices = [_voice(*names[key], own) for key, own in groups.items()]
    return [_of_file(one, [v for v in voices if v is not one], need) for one in voices]


def _names(keys: Sequence[str]) -> dict[str, tuple[str, int | None]]:
    """Each file's display name, and its rank if its name alone gives that."""
    ranks: dict[str, int | None] = {}
    for key in keys:
        name = Path(key).name
        found = _OF_RANK.search(name.partition(".log")[0])
        number = found[1] if found else name[:6] if name.isdecimal() else ""
        ranks[key] = int(number) if number else None
    if len(set(ranks.values())) < len(keys):
        ranks = dict.fromkeys(keys)
    parts = {key: Path(key).parts for key in keys}
    top = min(map(len, parts.values())) - 1
    while top > 0 and len({one[:top] for one in parts.values()}) > 1:
        top -= 1
    return {
        key: (f"rank {rank}" if rank is not None else "/".join(parts[key][top:]), rank)
        for key, rank in ranks.items()
    }


def _voice(name: str, rank: int | None, files: list[tuple[Log, float]]) -> _Voice:
    """What the files of one process say, on the clock of the first of all files."""
    main, _ = max(files, key=lambda one: (one[0].metrics.last_step or -1, one[0].lines))
    edges = main.edges.rstrip()
    voice = _Voice(name, rank, main, at=edges.rfind(b"\n") + 1)
    for log, shift_s in files:
        for _, line, moment in _timed(log):
            voice.hear(line, -math.inf if moment is None else moment + shift_s)
        voice.times += [at + shift_s for _, at in stamps(log.tail[-LOOKED_AT:])]
    voice.times.sort()
    if main.metrics.last_step is not None:
        voice.step = main.metrics.last_step
    return voice


def _words(line: bytes) -> bytes:
    return VARIES.without(plain(line[:400]))[:80]


def _of_file(voice: _Voice, others: list[_Voice], need: int) -> Process:
    """A rank by its files: it is silent if its time or its steps lag behind."""
    log, alike = voice.log, [one for one in others if one.steps & voice.steps]
    fails = any(FAILED.search(line) for line in work_signs.last_lines(log.tail))
    crashed = fails and not voice.ended and failure_lines.failed(log.tail)
    lag, silent_s = _lag(voice, alike), _silent_s(voice, alike)
    may_stand = bool(alike) and not voice.ended and not crashed
    is_short = may_stand and (lag is None or lag >= min(need, SHORT))
    if need > 1 and silent_s is not None:
        late = silent_s > silence.usual_s(log.tail, log.steps_from)
    else:
        over = any(one.ended for one in alike)
        late = lag is not None and lag >= (min(need, SHORT) if over else need)
        if need == 1:
            ahead = sum((one.step or 0) > (voice.step or 0) for one in alike)
            late = late and 2 * ahead > len(alike) + 1
    stuck = may_stand and bool(log_end.stuck(log.tail))
    return voice.process(
        log.edges,
        silent_s=silent_s,
        silent=is_short and late,
        trains=True,
        unfinished=stuck or (is_short and (lag is not None or late)),
        crashed=crashed and (bool(voice.steps) or voice.rank is not None),
    )


def _lag(voice: _Voice, alike: list[_Voice]) -> float | None:
    """How far it is behind most others, in steps as it reports them."""
    told = sorted(one.step for one in alike if one.step is not None)
    if voice.step is None or not told:
        return None
    longest = voice.log.metrics.series()[:1]
    gaps = [b - a for one in longest for a, b in itertools.pairwise(one.steps)]
    return (told[len(told) // 2] - voice.step) / (statistics.median(gaps or [1]) or 1)


def _silent_s(voice: _Voice, alike: list[_Voice]) -> float | None:
    """How long most others went on reporting steps after its last line."""
    told = [[at for words in one.steps for at in one.said[words]] for one in alike]
    lasts = sorted(map(max, told))
    if not lasts or not math.isfinite(lasts[0]) or not math.isfinite(voice.last):
        return None
    return max(0.0, lasts[len(lasts) // 2] - voice.last)


def _of_names(log: Log, need: int) -> list[Process]:
    """The processes whose names prefix the lines of one log."""
    text = log.edges
    start = max(0, len(text) - LOOKED_AT)
    ends = text[-SAMPLE:].splitlines()
    if not any(prefixes.split(line.lstrip())[0] for line in ends):
        return []
    voices: dict[bytes, _Voice] = {}
    folded = set[bytes]()
    for low, high in ((0, min(start, LOOKED_AT)), (start, len(text))):
        for line in _LINE.finditer(text, low, high):
            # Colours before it have become spaces.
            name, words = prefixes.split(line[0][:2000].lstrip())
            if not name:
                continue
            voice = voices.get(name)
            if voice is None:
                voice = voices[name] = _named(name, log)
            voice.at = line.start()
            voice.times += [at for _, at in itertools.islice(stamps(words[:100]), 1)]
            fold = REPEATED.search(words) if b"[repeated " in words else None
            words = words[: fold.start()].rstrip() if fold else words
            voice.hear(words, voice.at)
            if fold:
                folded.add(_words(words))
    if len(voices) < 2:
        return []
    for name, voice in voices.items():
        if voice.at < start and (at := text.rfind(b"\n" + name)) > voice.at:
            voice.at = at + 1  # what it said between the beginning and the end
            voice.last = voice.at
    every = [*voices.values()]
    return [_of_name(one, every, folded, need, text) for one in every]


def _named(name: bytes, log: Log) -> _Voice:
    """A process by its line prefix."""
    rank = _TORCH.search(name)
    told = f"rank {int(rank[1])}" if rank else shown(name.strip(b"()[]<>:| "))
    kind = _DIGITS.sub("", name.decode("utf-8", "replace"))
    return _Voice(told, int(rank[1]) if rank else None, log, kind)


def _of_name(
    voice: _Voice, voices: list[_Voice], folded: set[bytes], need: int, text: bytes
) -> Process:
    """A process of one log: it is silent if most like it go on with its words."""
    others = [one for one in voices if one is not voice and one.kind == voice.kind]
    silent, trains, silent_s = False, False, None
    for words, own in voice.said.items():
        if len(own) < 2 or words in folded or not others:
            continue
        ahead = [
            one
            for one in others
            if _goes_on(one.said.get(words, []), own, voice.last, need)
        ]
        if 2 * len(ahead) >= len(others):
            silent, trains = True, trains or words in voice.steps
            lasts = [one.times[-1] for one in ahead if one.times]
            if lasts and voice.times:
                silent_s = max(0.0, statistics.median(lasts) - voice.times[-1])
    return voice.process(text, silent_s=silent_s, silent=silent, trains=trains)


def _goes_on(theirs: list[float], own: list[float], last: float, need: int) -> bool:
    """Whether another has since said it more often than in any burst before."""
    places = [bisect.bisect(theirs, at) for at in own]
    longest = max(late - early for early, late in itertools.pairwise(places))
    since = len(theirs) - bisect.bisect(theirs, last)
    if need == 1:  # the last of a round has not said it more often
        return since > 0 and len(theirs) > len(own)
    return since > max(need, 2 * longest)
