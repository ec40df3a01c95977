"""How a log ends: finished, at rest, stuck or interrupted.

Each function examines the last part of a log. Offsets are in bytes from its start, -1
for none.
"""

from __future__ import annotations

import functools
import itertools

from pytest_gkd.diagnosis import clocks, log_phases, prefixes, tool_output, work_signs
from pytest_gkd.diagnosis.patterns import Match, Pattern
from pytest_gkd.diagnosis.scan import plain

# How long a run that made steps may go without one, whatever its pace was.
SILENCE_S = 1800
# This many lines without work are chatter; one may be the end of a long save.
CHATTER = 3
_UNFINISHED = Pattern(
    rb"\b[1-9]\d?%\|[^|]{0,99}(?P<state>\| \d+(?P<of>/\d+ \[))[^\]\r\n]{0,80}\]?\s*$"
)
# The last line of a traceback, which names the exception.
RAISED = Pattern(
    rb"(?m)^ *(?:\([^)]*\) *|\[\w+\]: *)*[\w.]*(?:Error|Exception|Interrupt|Exit)\b"
)
_DEAD = Pattern(
    rb"EngineDeadError|EngineCore encountered a(?:n issue| fatal error)"
    rb"|500 Internal Server Error|Engine core proc \S+ died"
)
# The program says so of itself, where its message begins or in an error's line; also in
# Chinese, Japanese and German.
_FAILS_IN_WORDS = "|".join(
    (
        "训练(?:任务|进程)?(?:已|被)?(?:失败|崩溃|中断|终止|异常(?:退出|终止|结束|中断))",
        "训练(?:过程中?)?(?:发生|出现)?(?:错误|异常).{0,60}(?:退出|终止|停止)",
        "(?:学習|訓練)(?:が|は|に)?(?:失敗|中断|異常終了)",
        r"(?:das |der )?(?:training|lauf) (?:\w+ ){0,3}(?:abgebrochen|fehlgeschlagen)",
    )
)
RUN_FAILED = Pattern(
    rb"(?i)^(?:.{0,60}(?:[:\]|)>-] *|\b(?:INFO|WARN|WARNING) +)"
    rb"|.{0,60}\b(?-i:ERROR|CRITICAL|FATAL|FEHLER)\b.{0,60}?(?:\b| ))?"
    rb"(?:(?:the |this )?"
    rb"(?:training|trainer|run|job|fit|main loop)(?: loop| has)?"
    rb" (?:failed|crashed|aborted)\b|" + _FAILS_IN_WORDS.encode() + rb").*",
    unless=rb"(?i)\bretr|\bagain\b|\brestart|\battempt|\bprevious|\bearlier|\blast\b"
    rb"|\bresum|\bif\b|\bcontinu|\bskip|\bignor|\b0 of \d"
    rb"|\b(?:eval\w*|trial|no|when|bench\w*|profil\w*)\b.{0,30}\b(?:run|job|training) "
    rb"|erneut|" + "率|重试|重启|跳过|忽略|恢复|再試行|再開|スキップ|なし".encode(),
)
# An exception that a line only names, or says to have caught.
NAMED = Pattern(
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
    unless=rb"(?i)\bnot\b|\b(?:step|iteration|round|batch) #?\d+ \w+\W*$",
)
# The same in Chinese, Japanese and German; and what only looks like it, such as a rate
# of completion or an end that was not normal.
_LEAVES_IN_WORDS = (
    "(?:训练|任务|评测)(?:已|全部)?(?:完成|结束)(?:率|度)?|(?:非|不|未)?正常(?:退出|结束)",
    "(?:学習|訓練|処理|ジョブ)(?:が|は)?(?:完了|終了)(?:率|度)?|(?:非|異)?正常終了",
    r"(?:退出码|終了コード)\W{1,5}0\b",
    r"(?i:training|lauf|job) (?:erfolgreich )?(?:beendet|abgeschlossen|fertig)",
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
    rb"|" + "|".join(_LEAVES_IN_WORDS).encode()
)
# Of a failure in other languages, and of an end that was none.
_ILL = Pattern(
    (
        "失败|错误|异常|中断|终止|不足|(?:非|不|未)正常|没有 ?正常|エラー|異常|失敗"
        "|応答しま|nicht mehr|breche ab|fehlgeschlagen|unreachable"
    ).encode()
)
# A shell reports a program of its script.
_KILLED = Pattern(
    rb"(?m)^\S+: line \d+: +\d+ (?:Killed|Segmentation fault|Aborted|Bus error)\b"
)
# Not if something is yet to come, or they speak of another's end.
_TO_COME = Pattern(
    rb"(?i)\b[a-z]{2,}ing\b|\b(?:next|then|now|starts?|waits?|step|round|of)\b"
    rb"|\b(?:status|code)\W{1,3}[1-9]|\bfail|\berror"
    rb"|\d ?/ ?\d"
)
COMPLAINS = Pattern(rb"^.{0,60}\b(?:ERROR|CRITICAL|FATAL)\b")
_NOT_YET = Pattern(
    rb"(?i)\b(?:wait\w*|until|when|once|after|before|not?|if|never|fail\w*|error)\b"
)
# A state in a record of JSON that is no good end.
_ILL_STATE = Pattern(
    rb"\"(?:status|state|result|outcome)\": ?\"[^\"]*\"",
    unless=rb"(?i)\"(?:ok|success\w*|succeeded|completed?|finished|done|passed)\"$",
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
# What Python's warnings print, two lines each.
_WARNS = Pattern(rb"Warning: |^ *(?:warnings\.)?warn\(")
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
# What a launcher says of one of its processes, which need not be the last of them.
STATUS = Pattern(rb"(?:code|status):? 0\b")
PART = Pattern(rb"(?i)\b(?:process|worker|rank|pid|actor|child)\b")
_HELPER = Pattern(
    rb"(?i)(?:^|[ \]])"
    rb"(?:engine|evaluator|helper|judge|rollout|sampler|server|teacher)s?(?: \d+)?"
    rb"(?: \(?pid \d+\)?)?:? (?:has |was )?(?:exited|finished|completed|ended)\b"
)
_FAILED_STATUS = Pattern(log_phases.EXIT + rb"-?[1-9]\d*")
STARTED_ANEW = Pattern(rb"(?i)restart|started (?:anew|again)|ignor")
# Of a process that its launcher ended.
_ENDED_BY = Pattern(rb" (?:-15|143)$")
# What pip says after that.
_OF_PIP = Pattern(
    rb"^(?:WARNING: |\[notice\]|\x1b|Successfully |Collecting |Installing )"
)
# What is printed while processes exit: by torch's stores and process groups, vLLM's and
# uvicorn's servers, Python and nanobind.
_EXITS = Pattern(
    rb"destroy_process_group\(\) was not called"
    rb"|Failed to check the \"should dump\" flag"
    rb"|(?:recvValue|sendBytes|recvBytes) failed on SocketImpl"
    rb"|Exception raised from (?:recv|send)\w+ at |\bframe #\d+: \S"
    rb"|Engine core proc \S+ died unexpectedly, shutting down client"
    rb"|VllmWorkerProcess pid \d+ died, exit code: -15|Killing local vLLM worker proc"
    rb"|Shutting down(?: FastAPI HTTP server\.)?$|Waiting for application shutdown"
    rb"|Application shutdown complete|Finished server process"
    rb"|^nanobind: |^ ?- leaked |resource_tracker: There appear"
    rb"|exited with code 0$|^wandb: |\bdied during shutdown\b"
)
# What Slurm's account (sacct) tells of a job, a task or a step that did not complete.
_BAD_STATE = Pattern(
    rb"(?m)^\d+[\w.+]* .{0,80}\b(?:FAILED|CANCELLED|TIMEOUT|NODE_FAIL|OUT_OF_ME\w*)\b"
)
# docker compose ends all containers once one has ended, and says so first.
_ENDS_THE_REST = b"Aborting on container exit"
# A server that was asked to end says this first (vllm/entrypoints/launcher.py).
_IS_ASKED_TO_END = b"Shutting down FastAPI HTTP server"
# What begins where a program has ended: a shell's or a notebook's next command, another
# file (tail's and head's heading).
_COMMAND = rb"(?m)^(?:(?:\++|\$) |!)\S"
COMMAND = Pattern(_COMMAND)
OTHERS = Pattern(_COMMAND + rb"|^==> .{1,200} <==\r?$")
# The status that a shell shows.
_SHOWN = rb"^\$ echo \"?\$(?:\?|\{?PIPESTATUS\S*|\{?rc\b\S*)\"?\r?\n"
_SHOWN_0 = Pattern(rb"(?m)" + _SHOWN + rb"0\r?$|^\+ exit 0\r?$")
_SHOWN_FAILURE = Pattern(rb"(?m)" + _SHOWN + rb"[1-9]|^\+ exit [1-9]")
# With which a program's last words begin or end, if it exits after them.
_DONE = Pattern(rb"(?i)^\W*(?:all )?done\b|[.;:,] (?:done|finished)\W*$")
# How much of what follows an end is read for an exception, in bytes.
_READ = 1 << 18
# torchrun's, after the exceptions of its ranks.
_SUMMARY = Pattern(rb"errors\.ChildFailedError: *\r?\n={9}")


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
        if b"COMPLETED" in match[0] and _BAD_STATE.search(tail):
            continue  # another job, or task of an array
        if b"installed" in match[0] and not _installs_only(tail[match.end() :]):
            continue
        found = match.start()
        break
    last = _last_words(tail)
    noise = last != work_signs.last_lines(tail, 25)
    part = last and (redrawn or noise) and _CLOSES_PART.search(last[-1][-200:])
    done = noise and last and _DONE.search(last[-1])
    if (done or _closes(last)) and not (
        part or (not redrawn and work_signs.counts_further(tail))
    ):
        found = max(found, tail.rfind(last[-1]))
    if found >= 0 and (
        log_phases.starts_after(tail, found)
        or work_signs.last_step(tail) > tail.find(b"\n", found) >= 0
        or _raises(tail[found:])
        or _ends_before_its_last_step(tail, found)
        or max(0, work_signs.last_step(tail)) <= _KILLED.last(tail[:found])
        or log_phases.STACKS.search(tail, found)
        or saves(tail)
    ):
        return -1
    return found


@functools.lru_cache(maxsize=64)
def saves(tail: bytes) -> bool:
    """Whether it says after the last of all steps that it saves, and no more."""
    end, step = log_phases.FINISHED.last(tail), work_signs.last_step(tail)
    if step >= 0:
        end = max(end, log_phases.ENDED.last(tail))
    spoken = [line for line in work_signs.last_lines(tail) if not _WARNS.search(line)]
    last = b"".join(spoken[-1:])
    begun = tail.rfind(b"\n", 0, step) + 1 if step >= 0 else 0
    if end < begun or end >= tail.rfind(last):
        return False  # a step followed, or the end is in the last line itself
    if told := log_phases.spoken_after(last):
        return told.phase == "checkpoint" and not told.over
    return log_phases.last_phase(last) == "checkpoint"


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
    if (
        tool_output.of_tool(line)
        or _HELPER.search(line)
        or work_signs.last_sign(tail) > found.end()
    ):
        return True
    if not (tail[found.end() :].strip() or PART.search(line)):
        return False  # of the whole job
    since = tail[
        max(0, work_signs.last_step(tail), work_signs.rows(tail), begin - _READ) :
    ].partition(_ENDS_THE_REST)[0]
    lines = [prefixes.bare(line) for line in since.splitlines()]
    statuses = (
        told[0]
        for line in lines
        if not (tool_output.of_tool(line) or STARTED_ANEW.search(line))
        and (told := _FAILED_STATUS.search(line))
    )
    failed = any(_ENDED_BY.search(status) is None for status in statuses)
    return failed or _UNCAUGHT.search(b"\n".join(lines)) is not None


def _raises(after: bytes) -> bool:
    """Whether the program itself then ended in an error, such as of its last save."""
    after = b"\n".join(map(prefixes.bare, after[-_READ:].splitlines()))
    raised = _UNCAUGHT.search(after) is not None
    last = work_signs.last_lines(after, 60 if _SUMMARY.search(after) else 3)
    return raised and any(map(log_phases.FAILED.search, last))


def _ends_before_its_last_step(tail: bytes, end: int) -> bool:
    """Whether the program failed with steps left, whatever a script then says."""
    step = work_signs.unfinished_at(tail)
    if not 0 <= step < end:
        return False
    since = tail[max(step, end - _READ) : end]
    return any(
        log_phases.FAILED.search(prefixes.bare(line)[:300])
        and not (tool_output.of_tool(line) or exit_noise(line))
        for line in tool_output.unquoted(since)
    )


def _closes(last: list[bytes]) -> bool:
    """Whether the very last line says that all is done, and none that it failed."""
    said = [one[:300] for one in last]
    failed = (log_phases.FAILED.search(one) or RUN_FAILED.search(one) for one in said)
    if not last or any(failed):
        return False
    if _CLOSING.search(last[-1][-200:]):
        return True
    return _saved(last[-1]) and work_signs.no_step_is_left(last)


def _last_words(tail: bytes) -> list[bytes]:
    """The last lines before those that are printed while processes exit."""
    said = work_signs.last_lines(tail, 25)
    while said and _EXITS.search(said[-1]):
        said.pop()
    return said


def exit_noise(line: bytes) -> bool:
    """Whether the line is one that is printed while processes exit."""
    return _EXITS.search(line) is not None


def _saved(line: bytes) -> bool:
    """Whether it says that something is saved, and where."""
    return _SAVED.search(line[-300:]) is not None and not _IN_PART.search(line[-300:])


def exits(tail: bytes, at: int) -> bool:
    """Whether the line at a byte is one of a program that exits after its last words.

    Its last words are closing ones, or say that something is saved and no step is left
    or the shell shows status 0. Only such lines follow, until the shell goes on.
    """
    begin = tail.rfind(b"\n", 0, at) + 1
    shell = OTHERS.search(tail, begin)
    end = shell.start() if shell else len(tail)
    own = (plain(line) for line in tail[begin:end].splitlines() if line.strip())
    if not all(map(_EXITS.search, own)) or _SHOWN_FAILURE.search(tail, end):
        return False
    said = work_signs.last_lines(tail[:begin], 25)
    if any(_IS_ASKED_TO_END in line for line in said[-3:]):
        return True
    if not (said := _last_words(tail[:begin])):
        return False
    if work_signs.counts_further(tail[:begin]) or _CLOSES_PART.search(said[-1]):
        return False
    saved = _saved(said[-1]) and _SHOWN_0.search(tail, end) is not None
    leaves = any(one.search(said[-1]) for one in (log_phases.FINISHED, _DONE))
    return saved or leaves or takes_leave(said[-1]) or _closes(said)


@functools.lru_cache(maxsize=64)
def ends_well(tail: bytes) -> bool:
    """Whether the last words say that something is saved, or all is done."""
    last = _last_words(tail)
    return _closes(last) or _saved(b"".join(last[-1:]))


def _broken(before: bytes) -> bool:
    """Whether a server's engine has died since the last request that it answered."""
    answered = max(0, log_phases.WORKING.last(before))
    return _DEAD.search(before, answered) is not None


def _quoted(text: bytes, at: int) -> bool:
    """Whether the match is inside a printed configuration."""
    start = text.rfind(b"\n", 0, at) + 1
    return text[start:at].count(b"':") > 3


def works(tail: bytes) -> bool:
    """Whether the last lines show work, with no sign of waiting after it."""
    last = work_signs.last_lines(tail)
    return any(log_phases.WORKING.search(line) for line in last) and not stuck(tail)


def at_rest(tail: bytes) -> bool:
    """Whether the last lines leave nothing to do: an end, or a ready server."""
    serves = work_signs.TRAINS.search(tail) is None and work_signs.last_step(tail) < 0
    ready = serves and any(
        log_phases.READY.search(one) for one in work_signs.last_lines(tail, 25)
    )
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
    bar = _UNFINISHED.search(b"".join(work_signs.last_lines(tail, 1)))
    if bar and tail.count(bar[b"of"]) == 1:
        return False
    step = tail.rfind(b"\n", 0, max(0, work_signs.last_step(tail))) + 1
    last = work_signs.last_lines(tail[step:], 25)
    ended = any(
        log_phases.ended(one) and not _full_again(one, tail[:step]) for one in last
    )
    if not ended and any(map(takes_leave, last[-1:])):
        since = max(0, step, work_signs.rows(tail, 1), work_signs.items(tail, 1))
        said = work_signs.last_lines(tail[since:], 25)
        ill = (COMPLAINS, NAMED, _ILL)
        ended = not any(bad.search(one) for bad in ill for one in said)
        ended = ended and not work_signs.counts_further(tail)
    return ended and not saves(tail)


def _full_again(bar: bytes, before: bytes) -> bool:
    """Whether a full bar is one of a step: it was full under the same title before."""
    title, full, _ = bar.partition(b": 100%|")
    return bool(full) and title.strip() + full in before


def takes_leave(line: bytes) -> bool:
    """Whether a last line says in the program's own words that all is done."""
    found = _FAREWELL.search(line[-300:])
    if found is None or _ILL.search(line[-300:]):
        return False
    more = found[b"more"] or b""
    said = (found[b"before"] or b"").removesuffix(more)
    ill = said == b"" and _ILL_STATE.search(line)
    return not (_NOT_YET.search(said) or _TO_COME.search(more) or ill)


def stuck(tail: bytes) -> bytes:
    """The line that proves that nothing moves any more; empty if there is none."""
    worked = max(
        0, work_signs.last_sign(tail), work_signs.last_step(tail), work_signs.rows(tail)
    )
    last = log_phases.last_mark(tail)
    # What waits may still be asked, and say that it is idle.
    line = work_signs.line_at(tail, last)
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
            return work_signs.line_at(tail, found[-1])
    silent = _silence_s(tail)
    return work_signs.last_lines(tail, 1)[0] if silent >= SILENCE_S else b""


def _silence_s(tail: bytes) -> float:
    """How long the log chattered after its last work, beyond five times its pace.

    A long pause that ended does not count: it was a save, and the line after it says
    so.
    """
    done, since = log_phases.STEP.last(tail), work_signs.last_work(tail)
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
    return sum(between) - 5 * (work_signs.pace_s(tail) or 0.0)


def _clocks_differ(text: bytes) -> bool:
    """Whether processes write times in different zones: times jump back and forth."""
    pairs = itertools.pairwise(clocks.of(text).seconds)
    return sum(late - early < -600 for early, late in pairs) > 2


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
    done = max(0, work_signs.last_step(tail), work_signs.rows(tail))
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
