"""What the last part of a log shows of work done: steps, rows, items and answers.

Offsets are in bytes from its start, -1 for none.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import string
from collections.abc import Iterable, Iterator

from pytest_gkd.diagnosis import clocks, log_phases, prefixes, tool_output
from pytest_gkd.diagnosis.patterns import Match, Pattern
from pytest_gkd.diagnosis.scan import plain

# A run outlived a line if it shows work at least this many bytes after it.
AFTER = 2000

# This many steps, or signs of a server's work, show that the run goes on.
SEVERAL = 3

# What a server prints as it works.
SERVED = Pattern(
    rb"POST /(?:v1/[\w/-]*|generate) HTTP/1\.\d\" 200"
    rb"|Avg generation throughput: (?:[1-9]|0\.[1-9])|gen throughput \(token/s\): [1-9]"
)
# Lines of any form that count and measure: neither a time nor a version is a number.
MOST_ROWS, COUNTERS = 4000, 6
_NUMBER = Pattern(rb"[\d.:]*\d[\d.:]*")
_NO_ROW = Pattern(
    rb"(?i)\b(?:nan|inf|waiting|retry(?:ing)?|attempt|elapsed|heartbeat|alive|monitor\w*"
    rb"|uptime|util(?:i[sz]ation)?|watchdog|polling|health\w*|gpu\d*)\b"
)
NO_LETTERS = bytes(set(range(256)) - set(string.ascii_letters.encode()))
# Where it begins, its first whole numbers, and its decimal ones.
_Row = tuple[int, list[int], list[bytes]]
# A step's number, in forms that the metrics reader does not know.
_NUMBERED = Pattern(
    rb"(?m)(?:(?:^|[\]:>] )\["
    rb"|\b(?:[Ss]tep|[Ii]ter(?:ation)?|[Uu]pdate|[Rr]ound)[ =:#]{1,2})"
    rb"(?P<number>\d{1,9})(?:\]|/\d+)?(?P<words>[ :,|-]+\w[^\r\n]{0,60})"
)
_BRACKET = b"["
_SPEAKER = Pattern(rb"^\[[A-Za-z][\w.-]{1,30}\]")
_RAISES = Pattern(rb"\b\w+(?:Error|Exception)\b")
# How many of a known number of items are done, as a bar or a program's own line says.
# Also as in 第 4 轮 / 共 200 轮.
_TALLY = Pattern(
    rb"\b(?P<done>\d{1,9}) ?(?:"
    + "轮|步|批|条|个|次|件|回".encode()
    + rb")? ?(?:/|of) ?(?:"
    + "共".encode()
    + rb")? ?(?P<all>\d{1,9})\b"
)
# What is left of a line's words, in any language, without its numbers.
_NO_WORDS = bytes(one for one in range(128) if chr(one) not in string.ascii_letters)
_TIME = Pattern(rb"\d{4}[-/.]\d\d[-/.]\d\d|\b\d{1,2}:\d\d(?::\d\d)?(?:[.,]\d{1,9})?\b")
# A number, also such as 1,536 or 0,902, and whether it is one of a duration.
_ANY_NUMBER = Pattern(
    rb"(?P<number>\d{1,12}(?:[.,]\d{1,12}){0,3})"
    rb"(?P<lasts> ?(?:ms|s|secs?|seconds?|min|minutes?|h|hours?)\b)?"
)
# What trainings measure and count, also in Spanish, Chinese and Japanese.
_MEASURES = Pattern(
    rb"(?i)\b(?:loss|reward|acc|accuracy|epochs?|kl|lr|ppl|elo|ce|nll|grad\w*|entropy"
    rb"|perplexity|tokens|tok/s|p\xc3\xa9rdida)\b|"
    + "损失|損失|奖励|報酬|准确率|正解率".encode()
)
_STORES = Pattern(rb"(?i)sav(?:e|ing)|dump|upload|emergency|shard|flush|clean|releas")
# Of these a growing number says nothing where nothing else is measured.
_IDLE = Pattern(
    rb"(?i)mem\b|memory|\brss\b|disk|\bsize|pending|progress\b|\bused\b|queue|swap"
    rb"|\bfree\b|throughput|stall|stuck|\blog\b"
)
_THOUSANDS = Pattern(rb"^\d{1,3}(?:[.,]\d{3}){1,3}$")
# Of these a growing number says nothing of work, also in Chinese, Japanese and German.
_NO_PROGRESS = Pattern(
    rb"(?i)wait|retr|exit|signal|kill|abort|\btr(?:y|ies|ied)\b|attempt|error|fail"
    rb"|exception|skip|drop|lost|timeout|timed out|\bping|sleep|idle|restart|\bno\b"
    rb"|\bnot\b|\bFile \"|\b0(?:\.0+)? ?[a-z]+/s\b|warte|versuch|nicht\b|"
    + "重试|等待|失败|错误|跳过|再試行|失敗|待機".encode()
)
# Why a run may end before its last step.
_EARLY = Pattern(
    rb"(?i)\bearly[ _-]?stop|\bstop(?:s|ped|ping)? early|\bpatience\b|\bconverged\b"
    rb"|\b(?:target|budget|max_steps|limit)\b.{0,30}\b(?:reached|spent|used)"
)
_COUNTER = Pattern(
    rb"\b(?:(\d{1,9}) {0,9}/ {0,9}|(?:[Ss]tep|[Bb]atch|[Uu]pdate) (\d{1,9}) of )"
    rb"(\d{1,9})\b"
)
# A bar without a title, as of transformers' Trainer; in the groups of _COUNTER.
_BARE_BAR = Pattern(rb"(?m)^ *\d{1,3}%\|[^|\r\n]{0,99}\| (\d{1,9})()/(\d{1,9}) \[")
# What the steps may be counted anew in; not the Trainer's epoch, such as 2.0.
_ROUND = Pattern(
    rb"(?i)\b(?:ep(?:och)?|e|stage|round|update|cycle)['\"]?\W{0,4}(?P<at>\d{1,6})"
    rb"(?P<part>\.\d)?(?: ?(?:/|of) ?(?P<of>\d{1,6}))?\b"
)
# How many lines are the last ones, unless said otherwise.
_LAST = 12
# Loggers, processes and scripts of trainers; a path or a model may be called the same.
TRAINS = Pattern(
    rb"WorkerDict|TaskRunner|actor_rollout|Trainer|\btrl\b|\bverl\b|(?i:deepspeed)"
    rb"|FSDPEngine|\(AReaL\)|\bopenrlhf[./](?:cli|trainer|models)|\bslime/(?:ray|backends)"
    rb"|\bskyrl[._](?:train|entrypoint)|\bnemo_rl[./]|\bprime_rl[./]|\[INFO:swift\]"
    rb"|\bllamafactory[./]|\bunsloth_zoo/|Unsloth: |\blightrft[./]"
    rb"|\bmegatron[./](?:core|training)|LLMRayActor|RolloutManager|\btrain_\w+\.py"
)


def last_lines(tail: bytes, count: int = _LAST) -> list[bytes]:
    """The last nonblank lines that quote nothing, without colours and prefixes."""
    lines = map(plain, reversed([*tool_output.unquoted(tail[-20000:])]))
    return [*itertools.islice(filter(bytes.strip, lines), count)][::-1]


def no_step_is_left(last: list[bytes]) -> bool:
    """Whether the last step that counts itself is the last one: ``step 100/100``."""
    steps = (one[:400] for one in reversed(last) if log_phases.STEP.search(one[:400]))
    found = ([*_COUNTER.finditer(one)] for one in steps)
    counters = next(filter(None, found), [])
    return bool(counters) and all(
        int(one[1] or one[2]) == int(one[3]) > 1 for one in counters
    )


def steps_done(tail: bytes) -> int:
    """How many steps a log has that ends with the last of them; 0 for any other.

    Not if the counter was full before, or if what holds the steps counts itself and is
    not at its end.
    """
    last = b"".join(last_lines(tail, 1))[:400]
    if not no_step_is_left([last]):
        return 0
    steps = max(int(one[3]) for one in _COUNTER.finditer(last))
    lines = last_lines(tail, 100)
    full = Pattern(rb"\b%d {0,9}/ {0,9}%d\b|[Ss]tep %d of %d\b" % ((steps,) * 4))
    again = sum(full.search(line) is not None for line in lines) > 1
    rounds = [one for line in lines for one in _ROUND.finditer(line[:200])][-1:]
    ended = all(one[b"part"] or one[b"at"] == one[b"of"] for one in rounds)
    return steps if ended and not again else 0


def steps(tail: bytes) -> list[int]:
    """Where the log shows that a training step is done."""
    return [match.start() for match in log_phases.STEP.finditer(tail)]


def went_on(tail: bytes, at: int) -> bool:
    """Whether the program shows that it works, well after this offset."""
    if last_sign(tail) >= max(0, at + AFTER):
        return True
    others = last_step(tail) >= 0 or TRAINS.search(tail) is not None
    if others or b"EngineCore encountered a" in tail[max(0, at - 300) : at + 300]:
        return False  # who serves is another, or answers what it had done before
    served = SERVED.finditer(tail, max(0, at))
    return sum(1 for _ in itertools.islice(served, SEVERAL)) == SEVERAL


@functools.lru_cache(maxsize=64)
def first_step(tail: bytes) -> int:
    """Where the first step begins, -1 without one."""
    found = log_phases.STEP.search(tail)
    return found.start() if found else -1


@functools.lru_cache(maxsize=64)
def last_step(tail: bytes) -> int:
    """Where the last step begins, -1 without one; cached, as many ask."""
    return log_phases.STEP.last(tail)


def rows(tail: bytes, steps: int = SEVERAL) -> int:
    """Where the last ``steps`` rows of something counted and measured begin; or -1.

    Such are lines of the same words in which a whole number grows evenly, and a decimal
    one does not, whatever they are called.
    """
    kinds, _ = _rows_and_items(tail)
    return max((min(own[steps - 1] for own in kind) for kind in kinds), default=-1)


def items(tail: bytes, steps: int = SEVERAL, raised: Iterable[bytes] = ()) -> int:
    """Where the last ``steps`` lines begin that tell one after another of work done.

    Of ``task 7 of 40``, in whatever words, but not of a bar; or -1. Such lines may be
    of any part of a run, such as its data, so they are no steps of it. Where processes
    have ``raised`` something, named ones tell of their own work only.
    """
    names = set(raised)
    _, kinds = _rows_and_items(tail)
    own = (
        starts[steps - 1]
        for who, starts in kinds
        if not who or names <= {who} or (who.startswith(_BRACKET) and names <= {b""})
    )
    return max(own, default=-1)


def ends_in_items(tail: bytes) -> bool:
    """Whether the last of such lines, or in which a number grows, is among the last."""
    rows = (starts[0] for _, starts in regular(tail))
    last = max([items(tail, 1), *(at for at in rows if measures(line_at(tail, at)))])
    return last >= 0 and tail.count(b"\n", last) <= _LAST


def _lines_back(tail: bytes) -> Iterator[tuple[int, bytes]]:
    """Where the last lines begin, and what they say, the last first."""
    start = len(tail)
    for _ in range(MOST_ROWS):
        start = tail.rfind(b"\n", 0, max(0, start - 1)) + 1
        yield start, tail[start : start + 400].partition(b"\n")[0]
        if start == 0:
            return


@functools.lru_cache(maxsize=64)
def _rows_and_items(
    tail: bytes,
) -> tuple[list[list[list[int]]], list[tuple[bytes, list[int]]]]:
    """Where the last rows of each kind and process, and items, begin; backwards."""
    kinds: dict[bytes, dict[bytes, list[_Row]]] = {}
    tallies: dict[tuple[bytes, bytes, bytes], list[tuple[int, int]]] = {}
    for start, line in _lines_back(tail):
        counts = (b"/" in line or b" of " in line) and b"%|" not in line
        tally = _TALLY.search(line) if counts else None
        if (tally or b"." in line) and not _NO_ROW.search(line):
            process, words = prefixes.split(line)
            if tally and not _RAISES.search(line):
                told = line[: tally.start()].translate(None, NO_LETTERS)[-60:]
                speaks = _SPEAKER.search(line)
                who = process or (speaks[0] if speaks else b"")
                done = tallies.setdefault((who, told, tally[b"all"]), [])
                done.append((start, int(tally[b"done"])))
            whole, decimals = _numbers(words)
            if decimals:
                kind = kinds.setdefault(words.translate(None, NO_LETTERS)[:60], {})
                kind.setdefault(process, []).append((start, whole, decimals))
    rows = ([*filter(None, map(_counted, kind.values()))] for kind in kinds.values())
    items = ((who, _rising(done)) for (who, *_), done in tallies.items())
    return [*filter(None, rows)], [one for one in items if one[1]]


@functools.lru_cache(maxsize=64)
def regular(tail: bytes) -> tuple[tuple[bytes, tuple[int, ...]], ...]:
    """The lines of each kind in which a number grows, the last first; whose they are.

    Of the same words, three times or more, whatever they count: tokens, games, per
    cent, epochs.
    """
    kinds: dict[tuple[bytes, bytes], list[tuple[int, list[float]]]] = {}
    for start, line in _lines_back(tail):
        says_none = b"%|" in line or _NO_PROGRESS.search(line)  # a bar is of anything
        idle = _NO_ROW.search(line) or _IDLE.search(line)
        if not says_none and (not idle or measures(line)):
            process, words = prefixes.split(line)
            numbers = _grown(_without_times(words))
            shape = words.translate(None, _NO_WORDS)[:60]
            if numbers and len(shape) >= SEVERAL:
                kinds.setdefault((process, shape), []).append((start, numbers))
    return tuple(
        (process, tuple(start for start, _ in own))
        for (process, _), own in kinds.items()
        if _grows(own)
    )


def _without_times(words: bytes) -> bytes:
    parts, place = [], 0
    for found in _TIME.finditer(words):
        parts.append(words[place : found.start()])
        place = found.end()
    return b" ".join([*parts, words[place:]])


def measures(line: bytes) -> bool:
    """Whether a line tells a number that trainings have, and stores nothing."""
    return _MEASURES.search(line) is not None and _STORES.search(line) is None


def _grown(words: bytes) -> list[float]:
    """The first numbers of a line that are none of a duration."""
    found = itertools.islice(_ANY_NUMBER.finditer(words), 2 * COUNTERS)
    return [_number(one[b"number"]) for one in found if not one[b"lasts"]]


def _number(text: bytes) -> float:
    if _THOUSANDS.search(text):
        return float(text.translate(None, b".,"))
    whole, _, decimals = text.replace(b",", b".").partition(b".")
    return float(whole + b"." + decimals.replace(b".", b""))


def _grows(own: list[tuple[int, list[float]]]) -> bool:
    """Whether a number grows in the last three lines, of which the last comes first."""
    if len(own) < SEVERAL:
        return False
    columns = zip(*(numbers for _, numbers in own[:SEVERAL]), strict=False)
    return any(
        all(late > early for late, early in itertools.pairwise(column))
        for column in columns
    )


@functools.lru_cache(maxsize=64)
def numbered(tail: bytes, steps: int) -> int:
    """Where the last ``steps`` numbered steps begin; -1 without any."""
    found: dict[bytes, dict[bytes, list[tuple[int, int]]]] = {}
    for one in _NUMBERED.finditer(tail):
        begin = tail.rfind(b"\n", 0, one.start() + 1) + 1
        process, _ = prefixes.split(tail[begin : one.end()])
        words = one[b"words"].translate(None, b"0123456789")
        places = found.setdefault(words, {}).setdefault(process, [])
        number = int(one[b"number"])
        if places and number == places[-1][0]:
            continue  # of another rank, unnamed
        if places and number < places[-1][0]:
            places.clear()
        places.append((number, one.start()))
    return max((_last_of_all(own, steps) for own in found.values()), default=-1)


def _last_of_all(processes: dict[bytes, list[tuple[int, int]]], steps: int) -> int:
    """Where the last ``steps`` steps of all begin, without replaced processes."""
    whole = [places for places in processes.values() if len(places) >= SEVERAL]
    begun = max((places[0][1] for places in whole), default=0)
    last = (places[-steps][1] for places in whole if places[-1][1] >= begun)
    return min(last, default=-1)


def _counted(own: list[_Row]) -> list[int]:
    """Where the last rows in which several count begin; the last row comes first."""
    for at in range(len(own) - SEVERAL):
        window = own[at : at + SEVERAL + 1]
        if _counts(window):
            return [start for start, *_ in window]
    return []


def _rising(done: list[tuple[int, int]]) -> list[int]:
    """Where the last items begin that were done one after another, backwards."""
    done = [next(same) for _, same in itertools.groupby(done, key=lambda one: one[1])]
    for at in range(len(done) - SEVERAL):
        window = done[at : at + SEVERAL + 1]
        if all(late > early for (_, late), (_, early) in itertools.pairwise(window)):
            return [start for start, _ in window]
    return []


def _numbers(words: bytes) -> tuple[list[int], list[bytes]]:
    """The first whole numbers of a line, and its decimal ones."""
    whole: list[int] = []
    decimals = []
    for match in _NUMBER.finditer(words):
        before, point, after = match[0].strip(b".:").partition(b".")
        if before.isdigit() and after.isdigit():
            decimals.append(match[0])
        elif before.isdigit() and not point and len(before) < 10:
            whole += [] if _names(words, match) else [int(before)]
    return whole[:COUNTERS], decimals


def _names(words: bytes, number: Match) -> bool:
    """Whether a number is of a name, such as ``cuda0`` or ``q8b``; not of ``u009``."""
    if not words[: number.start()][-1:].isalpha():
        return False
    longer = words[: number.start() - 1][-1:]
    return longer.isalnum() or words[number.end() :][:1].isalpha()


def _counts(own: list[_Row]) -> bool:
    """Whether rows, the last first, count evenly and measure something else."""
    wholes = zip(*(whole for _, whole, _ in own), strict=False)
    decimals = zip(*(measured for _, _, measured in own), strict=False)
    return any(
        values[0] > values[1]
        and len({late - early for late, early in itertools.pairwise(values)}) == 1
        for values in wholes
    ) and any(len(set(values)) > 2 for values in decimals)


@functools.lru_cache(maxsize=64)
def last_sign(tail: bytes) -> int:
    """Where the last line that shows work begins; cached, since every hit needs it."""
    return log_phases.WORKING.last(tail)


def counts_further(tail: bytes) -> bool:
    """Whether steps are left by the last that counts itself, and none says why."""
    return unfinished_at(tail) >= 0


def unfinished_at(tail: bytes) -> int:
    """Where the last step that counts itself begins, or its bar; -1 if none is left.

    Nor if something says why it ends early.
    """
    step = last_step(tail)
    counter = _COUNTER.search(line_at(tail, step)[:400]) if step >= 0 else None
    if counter is None:  # its bar may tell
        *_, counter = [None, *_BARE_BAR.finditer(tail, max(0, step - MOST_ROWS))]
        step = max(step, counter.start() if counter else -1)
    if counter is None or int(counter[1] or counter[2]) >= int(counter[3]):
        return -1
    return -1 if _EARLY.search(tail, step) else step


def last_work(tail: bytes) -> int:
    """Where the last step, answer or start of a phase is; -1 if there is none."""
    step = log_phases.STEP.last(tail)
    return max(step, last_sign(tail), log_phases.last_mark(tail))


def pace_s(tail: bytes) -> float | None:
    """Median seconds between the last steps; None if no line has a time."""
    done = _times(tail, steps(tail)[-20:])
    between = [late - early for early, late in itertools.pairwise(done)]
    return statistics.median(between) if between else None


def _times(tail: bytes, places: list[int]) -> list[float]:
    clock = clocks.of(tail)
    return [time for place in places if (time := clock.at(place)) is not None]


def line_at(text: bytes, at: int) -> bytes:
    """The line that holds a byte, without the blanks around it."""
    start = max(text.rfind(b"\n", 0, at), text.rfind(b"\r", 0, at)) + 1
    end = text.find(b"\n", at)
    return text[start : len(text) if end < 0 else end].strip()
