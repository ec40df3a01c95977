"""What to suspect if a run hangs: by its phase and its last sign of life.

One file per phase below ``hangs/`` holds the signs of that phase, each with what is
done and what is still open if it is the last, and the suspects that go with it, the
most likely first. A suspect is a cause of the catalogue with the observation that sets
it apart. The files are rejected by path and key like those of the catalogue.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_gkd import sanitize
from pytest_gkd.diagnosis import (
    log_phases,
    prefixes,
    silent_ranks,
    stack_dump,
    work_signs,
)
from pytest_gkd.diagnosis.catalogue import (
    FRAMEWORKS,
    Catalogue,
    Fix,
    RuleError,
    made,
    read_toml,
    wrong_form,
)
from pytest_gkd.diagnosis.frames import is_at
from pytest_gkd.diagnosis.patterns import Match, Pattern, PatternError, pattern_of
from pytest_gkd.diagnosis.scan import blanked
from pytest_gkd.diagnosis.stack_dump import Frame
from pytest_gkd.language import marked

# What a job may be known not to have: more than one rank, workers of a data loader, a
# compiler that runs, an engine for rollouts, who may be writing a file, a process in
# state D, an NVIDIA GPU, and an Xid in the kernel's log.
RANKS, DATA_WORKERS, COMPILERS = "ranks", "data-workers", "compilers"
ENGINES = "engines"
WRITERS, STATE_D, GPUS, XID = "writers", "state-d", "gpus", "xid"
THINGS = (RANKS, DATA_WORKERS, COMPILERS, ENGINES, WRITERS, STATE_D, GPUS, XID)
HANGS_DIR = Path(__file__).parent / "hangs"
# What its reader reads as sentences, and so in a language.
TEXTS = {"sign": ("done", "open"), "suspect": ("observation", "where")}
MAX_SUSPECTS = 5
WIDTH = 300  # characters in all that is said about a suspect: three lines

# Where in the loop a run is, before its last sign.
BEGUN = marked("step {step} of {steps} has begun: ")
DONE, DONE_OF = (
    marked("step {step} is done: "),
    marked("step {step} of {steps} is done: "),
)
NONE, NONE_OF = (
    marked("no step is done yet: "),
    marked("no step of {steps} is done yet: "),
)
# Phases of the loop, in which the number of completed steps says where the run is.
_LOOP = ("weight-sync", "generation", "teacher", "training-step", "checkpoint")
# verl's bar, the Trainer's own, which has no name before it; verl's line, NeMo-RL's.
_STEP = Pattern(
    rb"(?:Training Progress:|(?:^|[\r\n])) *\d+%\|[^|\r\n]{0,60}\|"
    rb" *(?P<step>\d{1,9})/(?P<steps>\d{1,9}) \["
    rb"|\bstep:(?P<alone>\d{1,9}) - |=== Step (?P<begun>\d{1,9})/(?P<all>\d{1,9}) ==="
)


@dataclass(frozen=True)
class Sign:
    """A last sign of life: what is ``done`` and what is ``open`` if it is the last.

    ``pattern`` is RE2's, over bytes; its named groups are the facts that ``done`` and
    ``open`` may use. Without one the sign applies if no other of the phase is found.
    ``suspects`` are names, the most likely first. One that ``outranks`` applies even if
    others of its phase follow it.
    """

    name: str
    done: str
    open: str
    suspects: tuple[str, ...]
    pattern: str = ""
    unless: str = ""
    example: str = ""
    near_miss: tuple[str, ...] = ()
    outranks: bool = False


@dataclass(frozen=True)
class Entry:
    """A suspect as a file defines it.

    ``observation`` sets it apart; ``command`` shows it, typed ``where``. ``process``
    are process names as logs have them, ``(NAME pid=1)``, the best first, whose id is
    ``<pid>`` in the command. ``stands`` are the places, in the form of a signature's
    ``through``, of which the process that waits stands in one: a stack in the log that
    shows none of them disproves the suspect; ``named`` is a pattern that a function or
    file of the same stack must match as well. ``frameworks`` are those whose runs it
    applies to. Of THINGS, it ``needs`` some to be possible, and ``besides`` some to be
    seen, as a stack alone does not show it.
    ``source`` says where the observation can be looked up, and whether it was seen.
    """

    name: str
    cause: str
    observation: str
    source: str
    command: str = ""
    where: str = ""
    process: tuple[str, ...] = ()
    stands: tuple[str, ...] = ()
    named: str = ""
    frameworks: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    besides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Suspect:
    """One cause that would explain the silence, and how to verify it.

    ``command`` is ready to paste, except for names in capitals, and typed
    ``where``. ``seen`` says that a stack shows where it stands.
    """

    cause: str
    observation: str
    where: str
    command: str
    source: str
    seen: bool = False


@dataclass(frozen=True)
class Suspicion:
    """What is known about a run that hangs, and what to suspect.

    ``last_sign`` is plain English, ``sign`` its name. ``missing_ranks`` have not said
    what the others said; ``missing`` is the sentence, also if only their number is
    known. ``suspects`` are in order, the most likely first.
    """

    sign: str
    last_sign: str
    missing_ranks: tuple[int, ...] = ()
    missing: str = ""
    suspects: tuple[Suspect, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The suspicion as ``gkd diagnose --format json`` prints it."""
        suspects = [vars(one) for one in self.suspects]
        return {**vars(self), "missing_ranks": [*self.missing_ranks]} | {
            "suspects": suspects
        }


@dataclass(frozen=True)
class Hangs:
    """All files: the signs of each phase, and the suspects by name."""

    signs: Mapping[str, tuple[Sign, ...]]
    suspects: Mapping[str, Entry]


@functools.cache
def load(directory: Path = HANGS_DIR) -> Hangs:
    """The files in a directory. Raises RuleError with what is wrong, a line each."""
    signs: dict[str, tuple[Sign, ...]] = {}
    suspects: dict[str, Entry] = {}
    wrong: list[str] = []
    for phase in log_phases.PHASES:
        path = directory / f"{phase}.toml"
        data = read_toml(path)
        if bad := list(_wrong(data, str(path))):
            wrong += bad
            continue
        signs[phase] = tuple(made(Sign, one) for one in data["sign"])
        for one in data.get("suspect", ()):
            if one["name"] in suspects:
                wrong.append(f"{path}: suspect {one['name']!r} is there twice")
            suspects[one["name"]] = made(Entry, one)
    for phase, of_phase in signs.items():
        for sign in of_phase:
            for name in sign.suspects:
                if name not in suspects and not wrong:
                    path = directory / f"{phase}.toml"
                    wrong.append(f"{path}: sign {sign.name!r}: no suspect {name!r}")
    if wrong:
        raise RuleError("\n".join(wrong))
    return Hangs(signs, suspects)


def _wrong(data: Mapping[str, Any], where: str) -> Iterator[str]:
    for key in data.keys() - {"sign", "suspect"}:
        yield f"{where}: unknown key {key!r}; known: sign, suspect"
    for key, kind in (("sign", Sign), ("suspect", Entry)):
        tables = data.get(key, [])
        if not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables):
            yield f"{where}: {key}: {tables!r} is not tables"
            continue
        for number, table in enumerate(tables, 1):
            at = f"{where}: {key} {number}"
            yield from wrong_form(table, kind, at)
            for name in _texts(table.get("frameworks")):
                if name not in FRAMEWORKS:
                    yield f"{at}: frameworks: {name!r} is not one of {FRAMEWORKS}"
            for field in ("needs", "besides"):
                for name in _texts(table.get(field)):
                    if name not in THINGS:
                        yield f"{at}: {field}: {name!r} is not one of {THINGS}"
    signs = data.get("sign")
    if not isinstance(signs, list) or not signs or signs[-1].get("pattern"):
        yield f"{where}: the last sign stands for all others, without a pattern"


def _texts(value: Any) -> list[str]:
    return [one for one in value if isinstance(one, str)] if value else []


def proofread(hangs: Hangs, catalogue: Catalogue) -> list[str]:
    """What is wrong in the files beyond their form, each as one sentence.

    Too slow for every start: every pattern is compiled and tested on its example.
    """
    found = []
    for phase, signs in hangs.signs.items():
        for sign in signs:
            found += [f"{phase}: {sign.name}: {one}" for one in _proofread(sign)]
    used = {one for signs in hangs.signs.values() for s in signs for one in s.suspects}
    for name, entry in hangs.suspects.items():
        if entry.cause not in catalogue:
            found.append(f"{name}: no cause {entry.cause!r}")
        if name not in used:
            found.append(f"{name}: no sign names it")
        command = _command(entry, {"pid": 99_999})
        told = "".join((entry.cause, entry.observation, entry.where, command))
        if len(told) > WIDTH:
            found.append(f"{name}: {len(told)} characters, at most {WIDTH}")
    return found


def _proofread(sign: Sign) -> Iterator[str]:
    try:
        groups = pattern_of(sign.pattern, sign.unless).groups
    except PatternError as error:
        yield f"{error}; RE2's syntax, without look-around"
        return
    for name in re.findall(r"\{(\w+)\}", sign.done + sign.open):
        if name not in groups:
            yield f"{{{name}}} is no group of the pattern"
    if not sign.pattern:
        return
    if not sign.near_miss:
        yield "near_miss is missing"
    for line, fits in [(sign.example, True), *((m, False) for m in sign.near_miss)]:
        if (_last(sign, line.encode()) is not None) is not fits:
            yield f"{line!r} must {'' if fits else 'not '}match"


def suspects(
    phase: str,
    text: bytes,
    frameworks: Iterable[str],
    facts: Mapping[str, Any] | None = None,
    frames: Sequence[Frame] = (),
    lacks: Collection[str] = (),
) -> Suspicion:
    """What a run waits for if it hangs in this phase with this text as its log.

    ``frames`` are those of all its processes, where these can be looked into; else the
    stacks in the text count. ``lacks`` are those of THINGS that the job is known not to
    have.

    The numbers ``step`` (completed), ``steps`` (total) and ``world_size`` in ``facts``
    take precedence over the text; all of them may fill placeholders in commands. If the
    text ends with stacks, the suspects that they show come first, also those of other
    signs of the phase, and those that they disprove are left out.
    """
    hangs, text, known = load(), blanked(text), dict(facts or {})
    sign, found = _sign(hangs.signs[phase], text)
    told = _groups(found)
    sentence = f"{sign.done}; {sign.open}".format_map(defaultdict(lambda: "?", told))
    ranks = silent_ranks.missing(text, _number(known.get("world_size")))
    possible = {n: e for n, e in hangs.suspects.items() if not {*e.needs} & {*lacks}}
    entries = [possible[name] for name in sign.suspects if name in possible]
    wanted = set(frameworks)
    fitting = [e for e in entries if not e.frameworks or wanted & set(e.frameworks)]
    seen: list[Entry] = []
    if shown := [*frames] or _shown(text):
        others = (name for one in hangs.signs[phase] for name in one.suspects)
        of_phase = dict.fromkeys([*sign.suspects, *others])
        seen = [e for e in map(possible.get, of_phase) if e and _in(e, shown)]
        # Below an event loop its tasks' own frames are not shown.
        hidden = any(is_at(frame, "asyncio/") for frame in shown)
        left = [e for e in fitting or entries if hidden or not e.stands]
        left = [e for e in left if e not in seen]
        fitting = [*seen, *left]
        entries = []
    return Suspicion(
        sign=sign.name,
        last_sign=_where(phase, text, known) + sentence,
        missing_ranks=ranks.ranks,
        missing=ranks.sentence,
        suspects=tuple(
            Suspect(
                entry.cause,
                entry.observation,
                entry.where,
                _command(entry, _process(entry, text) | told | known),
                entry.source,
                entry in seen and not {*entry.besides} & {*lacks},
            )
            for entry in (fitting or entries)[:MAX_SUSPECTS]
        ),
    )


def _shown(text: bytes) -> list[Frame]:
    """The frames of the stacks with which a text ends."""
    since = text.rfind(b"\n", 0, max(0, work_signs.last_work(text))) + 1
    lines = (prefixes.split(line)[1] for line in text[since:].splitlines())
    ending = b"\n".join(lines)
    first = log_phases.STACKS.search(ending)
    if first is None:
        return []
    begin = ending.rfind(b"\n", 0, first.start()) + 1
    threads = stack_dump.threads(ending[begin:].decode("utf-8", "replace"))
    return [frame for thread in threads for frame in thread.frames]


def _in(entry: Entry, shown: list[Frame]) -> bool:
    named = pattern_of(entry.named)
    return any(
        is_at(frame, place) for frame in shown for place in entry.stands
    ) and any(named.search(f"{one.file}:{one.function}".encode()) for one in shown)


def _sign(signs: tuple[Sign, ...], text: bytes) -> tuple[Sign, Match | None]:
    """The sign found last; of those at the same place the first in the file."""
    found = [(sign, _last(sign, text)) for sign in signs[:-1]]
    seen = [(sign, last) for sign, last in found if last is not None]
    return max(
        seen,
        key=lambda one: (one[0].outranks, one[1].start()),
        default=(signs[-1], None),
    )


def _last(sign: Sign, text: bytes) -> Match | None:
    return _final(pattern_of(sign.pattern, sign.unless).finditer(text))


def _final(found: Iterator[Match]) -> Match | None:
    kept = deque(found, maxlen=1)
    return kept[0] if kept else None


def _groups(found: Match | None) -> dict[str, str]:
    """The facts in the sign itself, sanitized for a terminal."""
    groups = found.groupdict() if found else {}
    return {
        name.decode(): sanitize.line(value.decode("utf-8", "replace"))[:60]
        for name, value in groups.items()
        if value is not None
    }


def _where(phase: str, text: bytes, facts: Mapping[str, Any]) -> str:
    """Which step of the loop the run is in, with a colon; empty if unknown."""
    step, steps = _number(facts.get("step")), _number(facts.get("steps"))
    if phase not in _LOOP:
        return ""
    bar = _final(_STEP.finditer(text))
    if bar and bar[b"begun"] and step in (None, int(bar[b"begun"])):
        return BEGUN.format(step=int(bar[b"begun"]), steps=int(bar[b"all"]))
    if step is None and bar:
        step, steps = int(bar[b"step"] or bar[b"alone"]), int(bar[b"steps"] or 0)
    if step is None:
        return ""
    if step:
        return (DONE_OF if steps else DONE).format(step=step, steps=steps)
    return (NONE_OF if steps else NONE).format(steps=steps)


def _number(value: Any) -> int | None:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and value >= 0 else None


def _process(entry: Entry, text: bytes) -> dict[str, Any]:
    """The last process to speak, by the first of the suspect's names that has one."""
    for name in entry.process:
        said = rf"\({re.escape(name)}(?:_\w{{1,12}})? (?:rank=\d+ )?pid=(\d{{1,9}})\b"
        if last := _final(pattern_of(said).finditer(text)):
            return {"pid": int(last[1])}
    return {}


def _command(entry: Entry, facts: Mapping[str, Any]) -> str:
    """The command with its placeholders filled from the facts."""
    return Fix("", entry.command).filled(facts)
