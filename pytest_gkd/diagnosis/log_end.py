"""How a log ends: finished, at work, stuck, interrupted or broken.

Each function examines the last part of a log. Offsets are in bytes from its start, -1
for none.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import string
from collections.abc import Container, Iterable

from pytest_gkd.diagnosis import clocks, log_phases, prefixes
from pytest_gkd.diagnosis.patterns import Match, Pattern
from pytest_gkd.diagnosis.scan import plain

# How long a run that made steps may go without one, whatever its pace was.
SILENCE_S = 1800
# This many lines without work are chatter; one may be the end of a long save.
CHATTER = 3
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
_NO_LETTERS = bytes(set(range(256)) - set(string.ascii_letters.encode()))
# Where it begins, its first whole numbers, and its decimal ones.
_Row = tuple[int, list[int], list[bytes]]
# How many of a known number of items are done, as a bar or a program's own line says.
_BRACKET = b"["
_SPEAKER = Pattern(rb"^\[[A-Za-z][\w.-]{1,30}\]")
_RAISES = Pattern(rb"\b\w+(?:Error|Exception)\b")
_TALLY = Pattern(rb"\b(?P<done>\d{1,9}) ?(?:/|of) ?(?P<all>\d{1,9})\b")
_LINE = Pattern(rb"[^\r\n]+")
_UNFINISHED = Pattern(
    rb"\b[1-9]\d?%\|[^|]{0,99}(?P<state>\| \d+(?P<of>/\d+ \[))[^\]\r\n]{0,80}\]?\s*$"
)
_NOISE = Pattern(
    rb"destroy_process_group|resource_tracker|shutting down"
    rb"|[Ss]hutdown|SIGTERM|atexit|leaked"
)
# The last line of a traceback, which names the exception.
RAISED = Pattern(
    rb"(?m)^ *(?:\([^)]*\) *|\[\w+\]: *)*[\w.]*(?:Error|Exception|Interrupt|Exit)\b"
)
# A part of a run that may stop while the run goes on; of some there may be only one.
_ONE_OF_MANY = (
    rb"\b(?:(?P<kind>env|environment|sandbox|container|tool|agent|shard)"
    rb"|episode|trial|rollout|sample|request|trajectory|row|item|example)s?"
    rb"[ #_=-]{1,2}(?P<number>\d+)\b"
)
_PART_OF_MANY = Pattern(rb"(?i)" + _ONE_OF_MANY)
_PART_STOPS = Pattern(rb"(?i)\bERROR\b\W*" + _ONE_OF_MANY)
_DEAD = Pattern(
    rb"EngineDeadError|EngineCore encountered a(?:n issue| fatal error)"
    rb"|500 Internal Server Error|Engine core proc \S+ died"
)
# An error as the very last line, which says that the program stops.
_STOPS = Pattern(
    rb"^.{0,60}\bERROR\b.{0,250}\b(?:stopping|aborting|giving up|exiting)\W*$"
)
# What Python prints before an exception that it cannot raise, as a destructor's.
IGNORED = b"Exception ignored in"
# An attempt that was the last, told in the last lines.
_GAVE_UP = Pattern(
    rb"(?i)^.*(?:\b(?:fail\w*|errors?|refused|timed out)\b.{0,200}|\bERROR:? \W*)"
    rb"\b(?:no (?:more|further) (?:retries|attempts|tries)|giving up|gave up)\b.*",
    unless=rb"(?i)\bskip|\bignor|\bcontinu|\bgo(?:es|ing) on\b",
)
# The program says so of itself, where its message begins or in an error's line.
_RUN_FAILED = Pattern(
    rb"(?i)^(?:.{0,60}(?:[:\]|)>-] *|\b(?:INFO|WARN|WARNING) +)"
    rb"|.{0,60}\b(?-i:ERROR|CRITICAL|FATAL)\b.{0,60}?\b)?(?:the |this )?"
    rb"(?:training|trainer|run|job|fit|main loop)(?: loop| has)?"
    rb" (?:failed|crashed|aborted)\b.*",
    unless=rb"(?i)\bretr|\bagain\b|\brestart|\battempt|\bprevious|\bearlier|\blast\b"
    rb"|\bresum|\bif\b|\bcontinu|\bskip|\bignor|\b0 of \d"
    rb"|\b(?:eval\w*|trial|no|when|bench\w*|profil\w*)\b.{0,30}\b(?:run|job|training) ",
)
_BEGINS = Pattern(rb"(?i)\b(?:attempting|retrying|rescheduling|resuming|restarting)\b")
# An exception that a line only names, or says to have caught.
_NAMED = Pattern(
    rb"(?i)^.*\b(?:exception|error|failed|failure|crash\w*)\b.{0,80}?"
    rb"\b(?-i:[A-Z])\w*(?:Error|Exception)\b.*",
    unless=rb"(?i)Exception ignored|\bskip|\bignor|\bretr|\bagain\b|\bcontinu",
)
# The closing words of a user's own program.
_CLOSING = Pattern(
    rb"(?i)\b(?:pipeline|job|run|training|distillation|evaluation|conversion|everything"
    rb"|all (?:steps|stages)|epochs?)\b.{0,30}"
    rb"\b(?:complete|completed|finished|done|ok|(?:status|code) 0)"
    rb"\W*(?:(?:after|in) [\d.]+ ?\w{0,10}\W*)?$|(?:^|[\]:] )all done\W*$"
    rb"|`Trainer\.fit` stopped: `max_\w+=\d+` reached\W*$",
    unless=rb"(?i)\bnot\b",
)
# Words with which a program takes its leave; a failure before them still counts.
_FAREWELL = Pattern(
    rb"(?i)^(?P<before>(?:.*[^\w.])?(?:"
    rb"(?:job|run|train(?:ing|er)?|distillation|orchestrator|schedule|sweep"
    rb"|all (?:steps|stages|epochs))\b[^,;.]{0,30}"
    rb"\b(?:complete|completed|finished|done|over|ended)(?P<more>\W{0,3}$| ?[,;(].*)"
    rb"|(?:finished|completed) (?:all )?\d+ (?:steps|iterations|epochs|updates)"
    rb"(?: in \d[\w .]{0,20})?\W*$"
    rb"|(?:good)?bye\W*$|exit(?:ing|ed)? cleanly\b|ended (?:normally|well)\W*$))"
    rb"|^\+ exit 0$|^\{.*\"(?:event|message|msg|type)\": ?"
    rb"\"(?:run|job|train(?:ing)?)[_ ](?:end|ended|exit|finished)\""
    rb"|(?:\xe8\xae\xad\xe7\xbb\x83|\xe4\xbb\xbb\xe5\x8a\xa1)(?:\xe5\xb7\xb2)?"
    rb"(?:\xe5\xae\x8c\xe6\x88\x90|\xe7\xbb\x93\xe6\x9d\x9f)"  # 训练, 任务, 完成, 结束
)
# Not if something is yet to come, or they speak of another's end.
_TO_COME = Pattern(
    rb"(?i)\b[a-z]{2,}ing\b|\b(?:next|then|now|starts?|waits?|step|round|of)\b"
    rb"|\b(?:status|code)\W{1,3}[1-9]|\bfail|\berror"
    rb"|\d ?/ ?\d"
)
_COMPLAINS = Pattern(rb"^.{0,60}\b(?:ERROR|CRITICAL|FATAL)\b")
_NOT_YET = Pattern(
    rb"(?i)\b(?:wait\w*|until|when|once|after|before|not?|if|never|fail\w*|error)\b"
)
# A state in a record of JSON that is no good end.
_ILL_STATE = Pattern(
    rb"\"(?:status|state|result|outcome)\": ?\"[^\"]*\"",
    unless=rb"(?i)\"(?:ok|success\w*|succeeded|completed?|finished|done|passed)\"$",
)
# Why a run may end before its last step.
_EARLY = Pattern(
    rb"(?i)\bearly[ _-]?stop|\bstop(?:s|ped|ping)? early|\bpatience\b|\bconverged\b"
    rb"|\b(?:target|budget|max_steps|limit)\b.{0,30}\b(?:reached|spent|used)"
)
# What may be over though a bar of other work is drawn once more.
_CLOSES_PART = Pattern(rb"(?i)\beval|\bconver|\bepoch|\bstage")
# Its last line where it says no such thing, told only once no step is left to do.
_SAVED = Pattern(
    rb"(?i)\b(?:saved|written|wrote|exported|uploaded|pushed)\b"
    rb"(?:.{0,80}\b(?:to|in|into|at)\b\W{0,3}[\w~./:-]{2,200}"
    rb"|\W{1,3}[\w~.:-]*(?:/[\w~./:-]{2,200}|\.[a-z]\w{1,11})"
    rb"(?: \([^()]{1,40}\))?)\W*$",
)
# What is saved of a run that did not come to its end.
_IN_PART = Pattern(
    rb"(?i)\b(?:partial(?:ly)?|incomplete|unfinished|emergency|so far)\b"
)
_COUNTER = Pattern(
    rb"\b(?:(\d{1,9}) {0,9}/ {0,9}|(?:[Ss]tep|[Bb]atch|[Uu]pdate) (\d{1,9}) of )"
    rb"(\d{1,9})\b"
)
# What Python's warnings print, two lines each.
_WARNS = Pattern(rb"Warning: |^ *(?:warnings\.)?warn\(")
# What the steps may be counted anew in; not the Trainer's epoch, such as 2.0.
_ROUND = Pattern(
    rb"(?i)\b(?:ep(?:och)?|e|stage|round|update|cycle)['\"]?\W{0,4}(?P<at>\d{1,6})"
    rb"(?P<part>\.\d)?(?: ?(?:/|of) ?(?P<of>\d{1,6}))?\b"
)
# What an engine is given, and what it gives back.
_ASKED = Pattern(
    rb"\] Added request "
    rb"|(?:(?:Processed|Rendering) prompts|Running batch): {1,4}\d{1,2}%"
)
_ANSWERED = Pattern(
    rb"\" 200 OK|Finished request |Aborted request|Request [\w.-]{1,80} aborted"
    rb"|(?:(?:Processed|Rendering) prompts|Running batch): {1,4}100%"
)
# A traceback that begins in the program's main module.
_UNCAUGHT = Pattern(
    rb"(?m)^(?:\[rank\d+\]: *)?Traceback \(most recent call last\):\r?\n"
    rb"(?:\[rank\d+\]: *)? *File \"[^<\"\r\n][^\"\r\n]*\", line \d+, in <module>"
)
# The name of a tool before what it printed.
_OF_TOOL = Pattern(
    rb"(?i)^.{0,60}?\[(?:[\w-]*sandbox[\w-]*|tool|interpreter)"
    rb"(?:[ :/#-]{1,2}[\w.-]+)?\] ",
    unless=rb"(?i)server|manager|registry|client|pool",
)
# What a launcher says of one of its processes, which need not be the last of them.
STATUS = Pattern(rb"(?:code|status):? 0\b")
_PART = Pattern(rb"(?i)\b(?:process|worker|rank|pid|actor|child)\b")
_HELPER = Pattern(
    rb"(?i)(?:^|[ \]])"
    rb"(?:engine|evaluator|helper|judge|rollout|sampler|server|teacher)s?(?: \d+)?"
    rb"(?: \(?pid \d+\)?)?:? (?:has |was )?(?:exited|finished|completed|ended)\b"
)
_FAILED_STATUS = Pattern(log_phases.EXIT + rb"-?[1-9]\d*")
# An actor that tells of what it had run for the model.
_RAN = Pattern(
    rb"(?i)pid=\d+[^)]{0,60}\).{0,60}?\b(?:container|sandbox|docker|podman|apptainer"
    rb"|test|snippet|trial)\b.{0,200}\bexit"
)
# A program that was run for one answer of the model.
_RAN_FOR = Pattern(
    rb"(?i)\b(?:test|program|script|snippet|code)s? (?:of|for) "
    rb"(?:answer|sample|completion|candidate|submission|solution)[ #]{1,2}\d+\b.{0,40}"
    + log_phases.EXIT
)
_STATUS_OF = Pattern(
    rb"\bprocess \d{1,9} " + log_phases.EXIT + rb"(?P<status>-?\d{1,3})\b"
)
# As docker compose tells it.
_ENDS = Pattern(rb"^(?P<who>[A-Za-z][\w.-]*-\d+) exited with code ")
_STARTED_ANEW = Pattern(rb"(?i)restart|started (?:anew|again)|ignor")
# Of a process that its launcher ended.
_ENDED_BY = Pattern(rb" (?:-15|143)$")
# What pip says after that.
_OF_PIP = Pattern(
    rb"^(?:WARNING: |\[notice\]|\x1b|Successfully |Collecting |Installing )"
)
# How many lines are the last ones, unless said otherwise.
_LAST = 12
# How much of what follows an end is read for an exception, in bytes.
_READ = 1 << 18
# torchrun's, after the exceptions of its ranks.
_SUMMARY = Pattern(rb"errors\.ChildFailedError: *\r?\n={9}")
# Loggers, processes and scripts of trainers; a path or a model may be called the same.
_TRAINS = Pattern(
    rb"WorkerDict|TaskRunner|actor_rollout|Trainer|\btrl\b|\bverl\b|(?i:deepspeed)"
    rb"|FSDPEngine|\(AReaL\)|\bopenrlhf[./](?:cli|trainer|models)|\bslime/(?:ray|backends)"
    rb"|\bskyrl[._](?:train|entrypoint)|\bnemo_rl[./]|\bprime_rl[./]|\[INFO:swift\]"
    rb"|\bllamafactory[./]|\bunsloth_zoo/|Unsloth: |\blightrft[./]"
    rb"|\bmegatron[./](?:core|training)|LLMRayActor|RolloutManager|\btrain_\w+\.py"
)


def last_lines(tail: bytes, count: int = _LAST) -> list[bytes]:
    """The last nonblank lines, without colours and prefixes."""
    lines = [plain(line) for line in tail[-20000:].splitlines()]
    return [line for line in lines if line.strip()][-count:]


@functools.lru_cache(maxsize=64)
def finished(tail: bytes) -> int:
    """Where the log says that the run is over; -1 if it does not.

    Nor if something starts afterwards: then another program ended.
    """
    settled = _settled(tail)
    redrawn, tail = settled is not tail, settled
    found = -1
    for match in reversed([*log_phases.FINISHED.finditer(tail)]):
        if _quoted(tail, match.start()):
            continue
        if b"server process" in match[0] and _broken(tail[: match.start()]):
            continue  # a server shuts down in an orderly way, whatever the reason
        if STATUS.search(match[0]) and _of_a_part(tail, match):
            continue
        if b"installed" in match[0] and not _installs_only(tail[match.end() :]):
            continue
        found = match.start()
        break
    last = last_lines(tail, 25)
    part = redrawn and _CLOSES_PART.search(last[-1][-200:])
    if _closes(last) and not (part or (not redrawn and _counts_further(tail))):
        found = max(found, tail.rfind(last[-1]))
    if found >= 0 and (
        log_phases.starts_after(tail, found)
        or last_step(tail) > tail.find(b"\n", found) >= 0
        or _raises(tail[found:])
        or saves(tail)
    ):
        return -1
    return found


@functools.lru_cache(maxsize=64)
def saves(tail: bytes) -> bool:
    """Whether it says after the last of all steps that it saves, and no more."""
    end, step = log_phases.FINISHED.last(tail), last_step(tail)
    if step >= 0:
        end = max(end, log_phases.ENDED.last(tail))
    spoken = [line for line in last_lines(tail) if not _WARNS.search(line)]
    last = b"".join(spoken[-1:])
    begun = tail.rfind(b"\n", 0, step) + 1 if step >= 0 else 0
    if end < begun or end >= tail.rfind(last):
        return False  # a step followed, or the end is in the last line itself
    if told := log_phases.spoken_after(last):
        return told.phase == "checkpoint" and not told.over
    return log_phases.last_phase(last) == "checkpoint"


def of_tool(line: bytes) -> bool:
    """Whether a tool that the model called printed the line."""
    return b"] " in line[:100] and _OF_TOOL.search(line[:200]) is not None


def _installs_only(after: bytes) -> bool:
    """Whether only pip says more after the line in which it says what it installed."""
    lines = filter(bytes.strip, after.partition(b"\n")[2].splitlines())
    return all(map(_OF_PIP.search, lines))


def _settled(tail: bytes) -> bytes:
    """The log without a last bar that shows again what it had before other words.

    A bar is drawn once more when it is closed, or when a line was written.
    """
    while True:
        begin = max(map(tail.rstrip().rfind, (b"\n", b"\r"))) + 1
        bar = _UNFINISHED.search(tail[begin:])
        if bar is None or bar[b"state"] not in tail[:begin]:
            return tail
        tail = tail[:begin]


def _of_a_part(tail: bytes, found: Match) -> bool:
    """Whether what ended with status 0 is a tool, or outlived something that failed."""
    begin = tail.rfind(b"\n", 0, found.start()) + 1
    line = tail[begin : found.end()]
    if of_tool(line) or _HELPER.search(line) or _last_work(tail) > found.end():
        return True
    if not (tail[found.end() :].strip() or _PART.search(line)):
        return False  # of the whole job
    since = tail[max(0, last_step(tail), rows(tail), begin - _READ) :]
    lines = [prefixes.bare(line) for line in since.splitlines()]
    statuses = (
        told[0]
        for line in lines
        if not (of_tool(line) or _STARTED_ANEW.search(line))
        and (told := _FAILED_STATUS.search(line))
    )
    failed = any(_ENDED_BY.search(status) is None for status in statuses)
    return failed or _UNCAUGHT.search(b"\n".join(lines)) is not None


def _raises(after: bytes) -> bool:
    """Whether the program itself then ended in an error, such as of its last save."""
    after = b"\n".join(map(prefixes.bare, after[-_READ:].splitlines()))
    raised = _UNCAUGHT.search(after) is not None
    last = last_lines(after, 60 if _SUMMARY.search(after) else 3)
    return raised and any(map(log_phases.FAILED.search, last))


def _closes(last: list[bytes]) -> bool:
    """Whether the very last line says that all is done, and none that it failed."""
    said = [one[:300] for one in last]
    failed = (log_phases.FAILED.search(one) or _RUN_FAILED.search(one) for one in said)
    if not last or any(failed):
        return False
    if _CLOSING.search(last[-1][-200:]):
        return True
    return _saved(last[-1]) and _no_step_is_left(last)


def _saved(line: bytes) -> bool:
    """Whether it says that something is saved, and where."""
    return _SAVED.search(line[-300:]) is not None and not _IN_PART.search(line[-300:])


def ends_well(tail: bytes) -> bool:
    """Whether the very last line says that something is saved, or all is done."""
    last = last_lines(tail, 25)
    return _closes(last) or _saved(b"".join(last[-1:]))


def _no_step_is_left(last: list[bytes]) -> bool:
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
    if not _no_step_is_left([last]):
        return 0
    steps = max(int(one[3]) for one in _COUNTER.finditer(last))
    lines = last_lines(tail, 100)
    full = Pattern(rb"\b%d {0,9}/ {0,9}%d\b|[Ss]tep %d of %d\b" % ((steps,) * 4))
    again = sum(full.search(line) is not None for line in lines) > 1
    rounds = [one for line in lines for one in _ROUND.finditer(line[:200])][-1:]
    ended = all(one[b"part"] or one[b"at"] == one[b"of"] for one in rounds)
    return steps if ended and not again else 0


def _says_it_failed(last: list[bytes]) -> bool:
    """Whether one of the last lines says so of the run, and none later begins anew."""
    late = itertools.takewhile(lambda one: not _BEGINS.search(one), reversed(last))
    return any(map(_RUN_FAILED.search, late))


def _steps_are_left(tail: bytes) -> bool:
    """Whether the log is one of an end, and the last step that counts itself is not."""
    return _counts_further(tail) and over(tail)


def _broken(before: bytes) -> bool:
    """Whether a server's engine has died since the last request that it answered."""
    answered = max(0, log_phases.WORKING.last(before))
    return _DEAD.search(before, answered) is not None


def _quoted(text: bytes, at: int) -> bool:
    """Whether the match is inside a printed configuration."""
    start = text.rfind(b"\n", 0, at) + 1
    return text[start:at].count(b"':") > 3


def steps(tail: bytes) -> list[int]:
    """Where the log shows that a training step is done."""
    return [match.start() for match in log_phases.STEP.finditer(tail)]


def works(tail: bytes) -> bool:
    """Whether the last lines show work, with no sign of waiting after it."""
    last = last_lines(tail)
    return any(log_phases.WORKING.search(line) for line in last) and not stuck(tail)


def went_on(tail: bytes, at: int) -> bool:
    """Whether the program shows that it works, well after this offset."""
    if _last_work(tail) >= max(0, at + AFTER):
        return True
    others = last_step(tail) >= 0 or _TRAINS.search(tail) is not None
    if others or b"EngineCore encountered a" in tail[max(0, at - 300) : at + 300]:
        return False  # who serves is another, or answers what it had done before
    served = SERVED.finditer(tail, max(0, at))
    return sum(1 for _ in itertools.islice(served, SEVERAL)) == SEVERAL


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
    """Whether the last of such lines is among the last of all."""
    last = items(tail, 1)
    return last >= 0 and tail.count(b"\n", last) <= _LAST


@functools.lru_cache(maxsize=64)
def _rows_and_items(
    tail: bytes,
) -> tuple[list[list[list[int]]], list[tuple[bytes, list[int]]]]:
    """Where the last rows of each kind and process, and items, begin; backwards."""
    kinds: dict[bytes, dict[bytes, list[_Row]]] = {}
    tallies: dict[tuple[bytes, bytes, bytes], list[tuple[int, int]]] = {}
    start = len(tail)
    for _ in range(MOST_ROWS):
        start = tail.rfind(b"\n", 0, max(0, start - 1)) + 1
        line = tail[start : start + 400].partition(b"\n")[0]
        counts = (b"/" in line or b" of " in line) and b"%|" not in line
        tally = _TALLY.search(line) if counts else None
        if (tally or b"." in line) and not _NO_ROW.search(line):
            process, words = prefixes.split(line)
            if tally and not _RAISES.search(line):
                told = line[: tally.start()].translate(None, _NO_LETTERS)[-60:]
                speaks = _SPEAKER.search(line)
                who = process or (speaks[0] if speaks else b"")
                done = tallies.setdefault((who, told, tally[b"all"]), [])
                done.append((start, int(tally[b"done"])))
            whole, decimals = _numbers(words)
            if decimals:
                kind = kinds.setdefault(words.translate(None, _NO_LETTERS)[:60], {})
                kind.setdefault(process, []).append((start, whole, decimals))
        if start == 0:
            break
    rows = ([*filter(None, map(_counted, kind.values()))] for kind in kinds.values())
    items = ((who, _rising(done)) for (who, *_), done in tallies.items())
    return [*filter(None, rows)], [one for one in items if one[1]]


def _counted(own: list[_Row]) -> list[int]:
    """Where the last rows in which several count begin; the last row comes first."""
    for at in range(len(own) - SEVERAL):
        window = own[at : at + SEVERAL + 1]
        if _counts(window):
            return [start for start, *_ in window]
    return []


def _rising(done: list[tuple[int, int]]) -> list[int]:
    """Where the last items begin that were done one after another, backwards."""
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
def _last_work(tail: bytes) -> int:
    """Where the last line that shows work begins; cached, since every hit needs it."""
    return log_phases.WORKING.last(tail)


def at_rest(tail: bytes) -> bool:
    """Whether the last lines leave nothing to do: an end, or a ready server."""
    serves = _TRAINS.search(tail) is None and last_step(tail) < 0
    ready = serves and any(log_phases.READY.search(one) for one in last_lines(tail, 25))
    return over(tail) or (ready and not _asked(tail))


def _asked(tail: bytes) -> bool:
    """Whether a request or a batch was taken in after the engine was ready, in vain."""
    asked = _ASKED.last(tail)
    return asked > log_phases.READY.last(tail) and _ANSWERED.last(tail) < asked


def over(tail: bytes) -> bool:
    """Whether the last lines are typical of an end, though none says so outright.

    Before a step they are of something else, such as the bar of the data; and a bar
    that is the last line, not full and of another total than those before it, is of
    work that began after the end.
    """
    bar = _UNFINISHED.search(b"".join(last_lines(tail, 1)))
    if bar and tail.count(bar[b"of"]) == 1:
        return False
    step = tail.rfind(b"\n", 0, max(0, last_step(tail))) + 1
    last = last_lines(tail[step:], 25)
    ended = any(map(log_phases.ended, last))
    if not ended and any(map(_takes_leave, last[-1:])):
        since = max(0, step, rows(tail, 1), items(tail, 1))
        said = last_lines(tail[since:], 25)
        ended = not any(_COMPLAINS.search(one) or _NAMED.search(one) for one in said)
        ended = ended and not _counts_further(tail)
    return ended and not saves(tail)


def _counts_further(tail: bytes) -> bool:
    """Whether steps are left by the last that counts itself, and none says why."""
    if (step := last_step(tail)) < 0 or _EARLY.search(tail, step):
        return False
    counter = _COUNTER.search(line_at(tail, step)[:400])
    return counter is not None and int(counter[1] or counter[2]) < int(counter[3])


def _takes_leave(line: bytes) -> bool:
    """Whether a last line says in the program's own words that all is done."""
    found = _FAREWELL.search(line[-300:])
    if found is None:
        return False
    more = found[b"more"] or b""
    said = (found[b"before"] or b"").removesuffix(more)
    ill = said == b"" and _ILL_STATE.search(line)
    return not (_NOT_YET.search(said) or _TO_COME.search(more) or ill)


def stuck(tail: bytes) -> bytes:
    """The line that proves that nothing moves any more; empty if there is none."""
    worked = max(0, _last_work(tail), last_step(tail), rows(tail))
    last = log_phases.last_mark(tail)
    line = line_at(tail, last)  # what waits may still be asked, and say that it is idle
    idle = b"eceived request" in line or b" throughput: 0.0 tokens/s, R" in line
    idle = idle or log_phases.IDLE.search(line) is not None
    since = worked if idle else max(worked, last)
    for mark, count, start in (
        (log_phases.WAITING, 2, since),
        (log_phases.IDLE, 3, worked),  # each of these lines is a mark itself
        (log_phases.STACKS, 1, since),
    ):
        found = [match.start() for match in mark.finditer(tail, start)]
        if len(found) >= count:
            return line_at(tail, found[-1])
    silent = _silence_s(tail)
    return last_lines(tail, 1)[0] if silent >= SILENCE_S else b""


def _silence_s(tail: bytes) -> float:
    """How long the log chattered after its last work, beyond five times its pace.

    A long pause that ended does not count: it was a save, and the line after it says
    so.
    """
    done, since = log_phases.STEP.last(tail), last_work(tail)
    if done < 0 or log_phases.FINISHED.search(tail, done):
        return 0.0
    clock = clocks.of(tail)
    begin = clock.at(since)
    after = [one.seconds for one in clock.stamps if one.at > since]
    if begin is None or _clocks_differ(tail):
        return 0.0
    between = [gap for gap in clocks.gaps([begin, *after]) if gap < SILENCE_S]
    if sum(gap > 0 for gap in between) < CHATTER:
        return 0.0
    return sum(between) - 5 * (pace_s(tail) or 0.0)


def last_work(tail: bytes) -> int:
    """Where the last step, answer or start of a phase is; -1 if there is none."""
    step = log_phases.STEP.last(tail)
    return max(step, _last_work(tail), log_phases.last_mark(tail))


def _clocks_differ(text: bytes) -> bool:
    """Whether processes write times in different zones: times jump back and forth."""
    pairs = itertools.pairwise(clocks.of(text).seconds)
    return sum(late - early < -600 for early, late in pairs) > 2


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


def interrupted(tail: bytes) -> int:
    """Where a signal from outside ended the run, with nothing started after it; or -1.

    A traceback that ends in the interrupt is part of it.
    """
    match = _interrupt(tail)
    if match is None:
        return -1
    before = tail.rfind(b"Traceback (most recent call last)", 0, match.start())
    call = RAISED.search(tail, before) if before >= 0 else None
    if call is None or call.start() < match.start():
        before = match.start()
    return tail.rfind(b"\n", 0, before) + 1


def ended_by(tail: bytes) -> str:
    """What ended the run from outside, such as ``SIGINT (Ctrl-C)``; empty for none."""
    match = _interrupt(tail)
    if match is None:
        return ""
    told = log_phases.signal(match)
    return f"{told} (Ctrl-C)" if told == "SIGINT" else told


@functools.lru_cache(maxsize=64)
def _interrupt(tail: bytes) -> Match | None:
    """The first line of such a signal after which the run makes no step."""
    done = max(0, last_step(tail), rows(tail))
    match = log_phases.INTERRUPT.search(tail, done)
    if match is None or log_phases.starts_after(tail, match.start()):
        return None
    return match


def stood_s(tail: bytes) -> float | None:
    """How long the log was silent before the signal; None if times are missing."""
    stop = interrupted(tail)
    clock = clocks.of(tail)
    before = [one.seconds for one in clock.stamps if one.at < stop]
    after = [one.seconds for one in clock.stamps if one.at >= stop]
    return max(0.0, after[0] - before[-1]) if before and after else None


def failed(
    tail: bytes,
    since: int = 0,
    waiting: Container[int] = (),
    ends: Container[int] = (),
) -> bool:
    """Whether a line from ``since`` on says that the program failed, and it stopped.

    Lines that begin at an offset in ``waiting`` do not count: the program waits after
    these; it has ended at one in ``ends``, whatever steps follow, as out of a buffer.
    Nor does what is told of a part that was started anew, if a step follows, or
    of what an actor ran for the model.
    """
    done = steps(tail)
    last = max(last_step(tail), rows(tail, 1), items(tail, 1))
    stop = interrupted(tail)
    for line in _LINE.finditer(tail, max(0, since)):
        at = line.start()
        if 0 <= stop <= at:
            return False
        if at in waiting:
            continue
        said = plain(line[0][:400])
        if b"Traceback" in said:
            said = prefixes.bare(said)
        if log_phases.FAILED.search(said[:300]):
            whole = line[0][:400]
            if _RAN.search(whole) and tail[line.end() :].strip():
                continue
            if _RAN_FOR.search(said) or (
                _is_known_end(tail, at) and _ran_programs(tail)
            ):
                continue
            anew = _STARTED_ANEW.search(said[:300]) and _PART.search(said[:300])
            if at < last and (anew or _of_another(whole, line_at(tail, last))):
                continue
            if IGNORED in line_at(tail, at - 1):
                continue
            around = tail[max(0, at - 600) : line.end()]
            over = at not in ends and any(step > at for step in done[-2:-1])
            over = over or went_on(tail, at)
            if _NOISE.search(around) is None and not over:
                return True
    after = last_lines(tail[max(0, last) :].partition(b"\n")[2])
    return (
        any(_stops(one, tail) for one in after[-1:])
        or any(_gave_up(one, tail) for one in after[-3:])
        or _says_it_failed(after)
        or (_steps_are_left(tail) and any(map(_NAMED.search, after)))
    )


def _of_another(line: bytes, step: bytes) -> bool:
    """Whether a line is of a process, or tells its end, that is of another kind.

    Than that which makes the step, as ``reward-1`` is of another than ``trainer-1``.
    """
    ended = _ENDS.search(line)
    own = ended[b"who"] if ended else prefixes.split(line)[0]
    others = prefixes.split(step)[0]
    kinds = [one.translate(None, _NO_LETTERS) for one in (own, others)]
    return all(kinds) and kinds[0] != kinds[1]


def _stops(line: bytes, tail: bytes) -> bool:
    return bool(_STOPS.search(line)) and not _is_one(_PART_STOPS.search(line), tail)


def _gave_up(line: bytes, tail: bytes) -> bool:
    return bool(_GAVE_UP.search(line)) and not _is_one(_PART_OF_MANY.search(line), tail)


def _is_one(part: Match | None, tail: bytes) -> bool:
    """Whether it is a part of which there are others, such as ``env 7`` of a run."""
    if part is None or part[b"kind"] is None:
        return part is not None
    return any(
        one[b"kind"] == part[b"kind"] and one[b"number"] != part[b"number"]
        for one in _PART_OF_MANY.finditer(tail)
    )


def _is_known_end(tail: bytes, at: int) -> bool:
    """Whether a process's status is told as one before, or a step follows it."""
    end = tail.find(b"\n", at)
    told = _STATUS_OF.search(tail, at, end if end >= 0 else len(tail))
    if told is None:
        return False
    forms = [
        tail[tail.rfind(b"\n", 0, one.start()) + 1 : one.end()]
        for one in _STATUS_OF.finditer(tail, 0, told.end())
    ]
    *known, own = (form.translate(None, _NO_LETTERS) for form in forms)
    return own in known or last_step(tail) > at


@functools.lru_cache(maxsize=64)
def _ran_programs(tail: bytes) -> bool:
    """Whether programs came and went that were run for others, some of them failing.

    Not processes that end together: something else is said between their ends.
    """
    ends = [
        (found.start(), found[b"status"] == b"0")
        for found in itertools.islice(_STATUS_OF.finditer(tail), MOST_ROWS)
    ]
    apart = all(
        tail.count(b"\n", a, b) > 1 for (a, _), (b, _) in itertools.pairwise(ends)
    )
    kept = [well for _, well in ends]
    between = kept[kept.index(True) : -1] if True in kept else []
    turned = sum(early and not late for early, late in itertools.pairwise(between))
    return apart and turned >= SEVERAL - 1


def complains(line: bytes) -> bool:
    """Whether a logger wrote the line as an error."""
    return _COMPLAINS.search(line) is not None


def shuts_down(tail: bytes, at: int) -> bool:
    """Whether the lines around this offset are those of a shutdown."""
    return _NOISE.search(tail[max(0, at - 600) : at + 400]) is not None
