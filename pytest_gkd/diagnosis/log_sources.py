"""Which files are the parts of one log, and which log files a directory contains."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from pytest_gkd.diagnosis.clocks import DAY_S, YEAR_S, stamps
from pytest_gkd.diagnosis.log_file import EDGE, beginning, ending

# The most log files taken from a directory, newest first, and names examined for them.
MOST_FILES = 256
MOST_NAMES = 20_000
# Bytes kept of all logs together, and of each at least.
KEPT, LEAST_KEPT = 64 << 20, 1 << 16

# Allowed overlap of parts, for a clock that is corrected; of parts that span hours,
# for one that is set back.
OVERLAP_S, HOUR_S = 60.0, 3700.0

_LOG = re.compile(
    r"(?:.*\.(?:log|out|err)|stdout|stderr)"
    r"(?:[.-](?:\d{1,8}|old|part\d+|\d{4}-\d\d-\d\d[\w.-]*))?"
    r"(?:\.(?:gz|bz2|xz|zst))?",
    re.IGNORECASE,
)
_PACKED = re.compile(r"\.(?:gz|bz2|xz|zst)$")
_ATTEMPT = re.compile(r"attempt_(\d{1,6})")
_PART = re.compile(r"(.+?)[._-]?part[-_.]?(\d{1,6})(\.\w+)?")
_DATED = re.compile(r"(.+?)[.-](\d{4}-\d\d-\d\d[\d_.T-]*|\d{8}(?:-?\d+)?)")
_NUMBERED = re.compile(r"(.+?)\.(\d{1,4})")
_OF_RANKS = re.compile(r"(?i)rank|worker|node|proc|gpu|task")


@dataclass(frozen=True)
class Source:
    """One log: a stream, or a file with its older parts."""

    last: Path | IO[bytes]
    earlier: tuple[Path, ...] = ()


@dataclass
class Sources:
    """The logs to read, and notes on files that are not read as requested.

    ``notes`` is about files that were left out or may be misread, ``unreadable`` about
    directories without logs.
    """

    logs: list[Source] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)


@dataclass(frozen=True, order=True)
class _Member:
    """A file that may be a part; ``age`` sorts oldest first, ``number`` -1 is none."""

    age: tuple[int, str | int]
    path: Path = field(compare=False)
    base: str = field(compare=False)
    number: int = field(compare=False, default=-1)

    @property
    def kind(self) -> int:
        return self.age[0]


PART, DATED, OLD, NUMBERED, PACKED, BARE = range(6)


def edge(logs: int) -> int:
    """How many bytes of each log's beginning and end are kept, for this many logs."""
    return max(LEAST_KEPT, min(EDGE, KEPT // max(1, logs)))


def find(given: Iterable[Path | IO[bytes]]) -> Sources:
    """The logs at the given paths: directories searched, parts of a log joined."""
    found = Sources()
    groups: dict[object, list[_Member]] = {}
    seen = set[Path]()
    for one in given:
        if not isinstance(one, Path):
            found.logs.append(Source(one))
            continue
        for path in _within(one, found) if one.is_dir() else [one]:
            if not path.is_file():
                found.logs.append(Source(path))
            elif (real := path.resolve()) not in seen:
                seen.add(real)
                member = _member(path)
                groups.setdefault((real.parent, member.base), []).append(member)
    for members in groups.values():
        found.logs += _joined(members, found.notes)
    return found


def _member(path: Path) -> _Member:
    name = _PACKED.sub("", path.name)
    if part := _PART.fullmatch(name):
        number = int(part[2])
        base = f"{part[1]}.part{part[3] or ''}"
        return _Member((PART, number), path, base, number)
    if dated := _DATED.fullmatch(name):
        return _Member((DATED, dated[2]), path, dated[1])
    if name.endswith(".old"):
        return _Member((OLD, 0), path, name.removesuffix(".old"))
    if numbered := _NUMBERED.fullmatch(name):
        number = int(numbered[2])
        return _Member((NUMBERED, -number), path, numbered[1], number)
    return _Member((BARE if name == path.name else PACKED, 0), path, name)


def _joined(members: list[_Member], notes: list[str]) -> list[Source]:
    """One source if these are the parts of a log, else one for each."""
    members = _without_copies(sorted(members), notes)
    members = [one for one in members if one.path.stat().st_size] or members[:1]
    alone = [Source(one.path) for one in members]
    if len(members) == 1:
        return alone
    kinds = {one.kind for one in members}
    # Numbers alone may be those of ranks; with the log itself they are a rotation's.
    by_name = kinds != {NUMBERED} and kinds != {PACKED, BARE}
    follows = _follow(members, by_name)
    if follows is False and not by_name and _follow(members[::-1], by_name):
        members, follows = members[::-1], True
    names = ", ".join(str(one.path) for one in members)
    if follows is False and by_name:
        notes.append(
            f"{names}: are named as parts of one log, but their times overlap; they "
            "are read as logs of several processes"
        )
    elif follows is None and not by_name and not _OF_RANKS.search(members[0].base):
        notes.append(
            f"{names}: may be parts of one log, but no times tell; they are read as "
            "logs of several processes"
        )
    if not (by_name if follows is None else follows):
        return alone
    notes += _missing(members)
    *earlier, last = [one.path for one in members]
    return [Source(last, tuple(earlier))]


def _without_copies(members: list[_Member], notes: list[str]) -> list[_Member]:
    """All but the compressed copies of files that exist as well."""
    kept = []
    plain = {one.path.name: one for one in members if not _PACKED.search(one.path.name)}
    for one in members:
        other = plain.get(_PACKED.sub("", one.path.name))
        if other is not None and other is not one:
            ours, theirs = beginning(one.path), beginning(other.path)
            size = min(len(ours), len(theirs))
            if size and ours[:size] == theirs[:size]:
                notes.append(
                    f"{one.path}: begins as {other.path} does: a packed copy, left out"
                )
                continue
        kept.append(one)
    return kept


def _follow(members: Sequence[_Member], by_name: bool) -> bool | None:
    """Whether each begins when the one before has ended; None if times are missing."""
    spans = [_span(one.path) for one in members]
    for (first_s, last_s), (next_s, _) in itertools.pairwise(spans):
        if first_s is None or next_s is None:
            return None
        later_s = _since(first_s, next_s)
        if (last_s is None or not by_name) and later_s <= OVERLAP_S:
            return False
        if last_s is not None:
            long_s = _since(first_s, last_s)
            allowed_s = HOUR_S if long_s > 3 * HOUR_S else min(OVERLAP_S, long_s / 10)
            if _since(next_s, last_s) > allowed_s:
                return False
    return True


def _since(early_s: float, late_s: float) -> float:
    """Seconds from one time to another, neither of which has a year, or a date."""
    span_s = DAY_S if max(early_s, late_s) < DAY_S else YEAR_S
    return (late_s - early_s + span_s / 2) % span_s - span_s / 2


def _span(path: Path) -> tuple[float | None, float | None]:
    """The first and the last time in a file; the last only if it is cheap to read."""
    first = next(stamps(beginning(path)), (0, None))[1]
    last = [moment for _, moment in stamps(ending(path))][-1:]
    return first, last[0] if last else None


def _missing(members: Sequence[_Member]) -> Iterable[str]:
    """The parts missing from the sequence of those that exist."""
    numbered = {one.number: one for one in members if one.number >= 0}
    if not numbered:
        return
    low = 1 if members[-1].kind == BARE else min(numbered)
    high = max(numbered)
    gone = [number for number in range(low, high) if number not in numbered]
    name = _PACKED.sub("", numbered[high].path.name)
    paths = [
        str(numbered[high].path.with_name(str(number).join(name.rsplit(str(high), 1))))
        for number in gone[:4]
    ]
    if gone:
        more = f" and {len(gone) - 4} more" if len(gone) > 4 else ""
        told = "not among the files; what it holds was not judged"
        yield f"{', '.join(paths)}{more}: {told}"


def _within(directory: Path, found: Sources) -> list[Path]:
    """The log files below a directory; what is left out is noted."""
    logs: list[Path] = []
    left = {"of earlier attempts": 0, "empty": 0}
    names_seen = 0
    for folder, folders, names in os.walk(directory):
        _leave_earlier(folder, folders, left)
        folders.sort()
        names_seen += len(names)
        for name in names:
            path = Path(folder, name)
            if _LOG.fullmatch(name) and path.is_file() and not path.is_symlink():
                if path.stat().st_size:
                    logs.append(path)
                else:
                    left["empty"] += 1
        if names_seen > MOST_NAMES:
            left[f"or more beyond {MOST_NAMES} names"] = 1
            break
    logs.sort(key=lambda path: path.stat().st_mtime)
    left[f"older ones beyond {MOST_FILES}"] = len(logs[:-MOST_FILES])
    logs = sorted(logs[-MOST_FILES:])
    if not logs:
        found.unreadable.append(
            f"{directory}: holds no log: no file ends in .log, .out or .err; name one"
        )
    elif any(left.values()):
        told = ", ".join(f"{number} {what}" for what, number in left.items() if number)
        found.notes.append(
            f"{directory}: {len(logs)} log files were read; left out: {told}"
        )
    return logs


def _leave_earlier(folder: str, folders: list[str], left: dict[str, int]) -> None:
    """Skip all of torchrun's attempts but the last, in place."""
    attempts = {int(m[1]): m[0] for m in map(_ATTEMPT.fullmatch, folders) if m}
    for number in sorted(attempts)[:-1]:
        folders.remove(attempts[number])
        for _, _, names in os.walk(Path(folder, attempts[number])):
            left["of earlier attempts"] += sum(
                _LOG.fullmatch(name) is not None for name in names
            )
