"""Tells up to which byte a log's errors did not stop the run: steps followed them."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator
from dataclasses import replace

from pytest_gkd.diagnosis import (
    exceptions,
    failure_lines,
    log_end,
    log_phases,
    prefixes,
    tool_output,
    work_signs,
)
from pytest_gkd.diagnosis.log_file import Log
from pytest_gkd.diagnosis.patterns import Match, Pattern
from pytest_gkd.diagnosis.scan import Hit
from pytest_gkd.diagnosis.work_signs import SEVERAL

# How many lines at the start of a log are those with which its program begins.
FIRST_LINES = 20

_LINE = Pattern(rb"[^\r\n]+")
# What a program does about an error after which it goes on, and what it says of one.
# Retry, skip, ignore, degrade, stand-in, do without; in Chinese, Japanese and German.
_IN_WORDS = (
    "重试|重新|跳过|忽略|降级|备用|回退|不影响|再試行|スキップ|無視|続行|代替"
    "|wird übersprungen|erneut|wird ignoriert|stattdessen"
    "|ignoré|réessa|nouvel essai|reintent|omitid[oa]|pulad[oa]|ignorad[oa]"
).encode()
_WITHOUT = (
    _IN_WORDS + rb"|\bfall(?:s|ing)? back\b|\bskip(?:s|ped|ping)\b|\bignor(?:ed|ing)\b"
    rb"|\bhalv(?:ed|ing)\b"
)
_HANDLED = Pattern(
    rb"(?i)" + _WITHOUT + rb"|\b(?:attempt|essai|tentativ[ae]|intento|versuch) \d"
    rb"|\bretr(?:y|ies|ied)|\bagain\b|\bskip\b"
    rb"|\bignore\b|\bre(?:start|set)(?:s|ed|ing|ting)?\b|\breduc(?:ed|ing)\b"
    rb"|^(?:\([^)]*\) *)?future: <Task finished"
)
# What tells of a model's answer, or of an agent; of tools log_end knows.
_OF_ANSWER = Pattern(
    rb"(?i)^.{0,60}?(?:\[(?:swe|agent)(?: \d+)?\] "
    rb"|\b(?:answer|candidate|completion|submission|solution) #?\d+(?::| [a-z]+ed\b)"
    rb"|\btool[_ ](?:call|result)\b|\bunit test \d+ of )"
)
# Ray Data says so of a data set that was made, and of one of which no more is read, as
# its reader failed; and the processes that make one.
_MADE = Pattern(rb"Dataset(?: \S+)? execution finished in \d")
_MAKES = Pattern(rb"^\(?(?:Map|Read|Write|raylet)")
# What it says just after one that it does without; Optuna goes on after such a trial.
_GOES_ON = Pattern(
    rb"(?i)" + _WITHOUT + rb"|\b(?:goes|going) on without|\bcontinu(?:es|ing)\b"
    rb"|[,;] using [A-Za-z]|\btrial \d+ failed(?:, because the obj| with value nan)"
    rb"|\b\w{2,20}(?:ed|ing)\b[^.;!?]{0,40}\binstead\b"
)
_RECOVERS = Pattern(rb"(?i)\brecover(?:s|ed|ing)\b")
_NOT_RECOVERED = Pattern(
    rb"\b(?:ERROR|CRITICAL|FATAL)\b|(?i:\b(?:not|cannot|never|fail\w*|unable)\b|n't\b)"
)
# A number that is none of a time or a release.
_MEASURED = Pattern(rb"(?m)(?:^|[^\d.:])\d{1,9}\.\d{1,12}(?:[^\d.]|$)")
# A request that was refused.
_REFUSED = Pattern(rb"\"POST [^\"\r\n]* HTTP/1\.\d\" (?:4\d\d|503)\b")
# Ray starts a worker anew, and gives it the task again.
_RAY_RETRIES = Pattern(
    rb"^\(raylet[^)]*\) .*(?:A worker died or was killed while executing a task"
    rb"|killed due to memory pressure)"
)
# What it says about one after which it waits, and about the last attempt.
_WAITS = Pattern(
    rb"(?i)\b(?:waiting (?:for|until|on)|still (?:waiting|trying to))\b"
    rb"|\bwill (?:be )?retr(?:y|ied)\b"
    rb"|\b(?:retry(?:ing)?|try(?:ing)? (?:again|anew|once more))\b.{0,40}"
    rb"\b(?:in|after) [\d.]"
    rb"|\b(?:attempt|try|retry(?:ing)?) [#(]?"
    rb"(?P<number>\d{1,4})(?: of | ?/ ?)(?P<all>\d{1,4})\b"
)
_TRIED_NEXT = Pattern(rb"(?i)^\W*(?:trying (?:to resume|again)|retrying|resuming)\b")
_SLEEPS = Pattern(
    rb"(?i)[^\r\n]*\b(?:sleeping|backing off|retrying) (?:for |in )?[\d.]+ ?s"
    rb"[^\r\n]*"
)
# Words of what is wrong.
_TROUBLE = Pattern(
    rb"(?i)error|fail|exception|abort|kill|timed? ?out|traceback|refus|cannot|unable"
    rb"|\bdied|\bdead|giv(?:e|ing) up|\bexit|\bstopp|\bsig[a-z]{3,4}\b"
    rb"|" + "错误|异常|失败".encode()
)
_TO_TRY = Pattern(rb"(?i)\b(?:try|tries|retry\w*|backing off|limit(?:ed)?|attempt)\b")
# An attempt that failed, and what follows if the next one did not.
_FAILED = Pattern(rb"(?i)\bfail|\berror|\brefused|\btimed out")
_WELL = Pattern(
    rb"(?i)\b(?:saved|written|succe\w+|done|completed?|ok|recovered|end|worked"
    rb"|(?:up|down)loaded|pushed)\b"
    rb"|" + "成功|完成|完了".encode()
)
_GIVES_UP = Pattern(
    rb"(?i)\b(?:killed|giv(?:es?|ing) up|gave up|stop(?:s|ped|ping)|died|abort\w*"
    rb"|all attempts|job failed|exit(?:ed|ing|s)?|unreachable)\b"
    rb"|Traceback \(most recent|" + "放弃|终止|退出".encode()
)
# A script ends Ray itself.
_RAY_STOPS = Pattern(
    rb"(?m)^(?:\++|\$) ray stop\b|^Stopped (?:all|only) \d+ .*Ray proc"
)
# What a job waits for in a cluster is there.
_COMES = Pattern(rb"(?m)^\(autoscaler [^)]*\) Resized to ")
# A launcher begins all ranks anew, or all is installed only now; a program goes on
# from what it had saved.
_ANEW = Pattern(rb"\bwill restart worker group\b")
_LEAVES = Pattern(
    rb"(?m)^E\d{4} |\bERROR\b|(?i:\btimed out\b|\bclos(?:ed|es|ing)\b|\bleft the\b)"
)
_INSTALLED = Pattern(rb"(?m)^Successfully installed ")
_RESUMES = Pattern(
    rb"(?i)(?:\b(?:can|could|may|will|be|to) (?:be )?)?"
    rb"\b(?:resum(?:ed|es|ing)|restored) (?:from|at)\b",
    unless=rb"(?i)^(?:can|could|may|will|be|to) ",
)
# The number of a step, or the epoch where a line has no other.
_STEP_NUMBER = Pattern(
    rb"(?i)(?:step|iter|iteration|update|round|batch)['\"]?(?: ?[=:#]| ) ?"
    rb"(?P<step>\d{1,9})"
    rb"|\| (?P<done>\d{1,9})/\d|^\[(?P<own>\d{1,9})\]|'epoch': (?P<epoch>\d{1,4}\.\d+)"
)
# Text that was executed as code, such as a model's answer.
_EXECUTED = re.compile(r"<(?:string|stdin|unknown)>$|(?:/var)?/tmp/tmp[^/]+(?:/|$)")
_SYNTAX = re.compile(r"(?:Syntax|Indentation|Tab)Error$")
# What a program may do without, though its main module itself asked for it.
_OPTIONAL = re.compile(r"(?:Import|ModuleNotFound)Error$")
# Processes that a training can do without for a while.
_ASIDE = Pattern(
    rb"(?i)env|reward|judge|metric|backup|sidecar|tool|sandbox|eval|exporter|dashboard"
)
_MAIN = Pattern(rb"(?i)train|learn|worker_?dict|policy|main|driver|master|runner")
# What no process survives.
_FATAL = {
    *("cuda.illegal-access", "env.gpu-hardware", "env.host-oom", "env.killed"),
    *("env.shm-too-small", "data.worker-died", "cuda.device-assert"),
}
# Programs that run beside a job.
_HELPERS = re.compile(
    r"/bin/(?:gpustat|nvitop|nvidia-smi|tensorboard|hf|aws|gsutil|huggingface-cli"
    r"|modelscope|rclone|s3cmd|ossutil\d*)$"
    r"|/(?:site|user)customize\.py$"
)
# A tool that signs its lines asks for something, in the last words of one.
_ASKS = Pattern(rb"^(?P<tool>[a-z][\w-]{1,20}: ).*: *$")
# What ends a wait in vain: of a queue, of Ray, of asyncio and concurrent.futures.
_IN_VAIN = re.compile(r"(?:^|[._])(?:Empty|(?:Get)?TimeoutError)$")
_DIGITS = re.compile(rb"\d+")
# What differs from one start of a program to the next.
_VARIES = re.compile(
    rb"[\d:.,/-]*\d{2}:\d\d[\d:.,+Z]*|\d{4}-\d\d-\d\d|\d{4,}(?:\.\d+)?|\x1b\[[\d;]*m"
    rb"|(?<=attempt)\W{1,4}\d+|(?<=restart)\w{0,6}\W{1,4}\d+|(?<=pid)\W{1,4}\d+"
)


def outlived_until(log: Log, steps: int = SEVERAL) -> int:
    """The byte before which every error is followed by ``steps`` steps; -1 for none.

    Where nothing else is wrong, fewer of them do, and other signs of work.
    """
    over = max(_made_until(log), _script_from(log.tail))
    until = max(_outlived_by(log, steps), log.tail_at + over if over >= 0 else -1)
    return max(until, _calm_from(log)) if steps > 1 else until


def _made_until(log: Log) -> int:
    """Where Ray Data says that a data set is made, if only what makes it failed."""
    made = _MADE.last(log.tail)
    if made < 0:
        return -1
    at = log.tail_at + made
    others = [
        chain[-1].process
        for chain in log.chains
        if chain[-1].at < at and not let_go(log, chain)
    ]
    others += [
        hit.process
        for hit in log.hits
        if hit.order < at and not (hit.weak or log.near.around(hit.order, hit.process))
    ]
    return made if all(_MAKES.search(one.encode()) for one in others) else -1


@functools.lru_cache(maxsize=64)
def _script_from(tail: bytes) -> int:
    """Where the last command begins of a script that went on after the training; or -1.

    It takes its leave: it did without what came between.
    """
    step = work_signs.last_step(tail)
    begun = [one.start() for one in log_end.COMMAND.finditer(tail, max(0, step))]
    if step < 0 or not begun or log_end.finished(tail[: begun[0]]) < 0:
        return -1
    leaves = log_end.takes_leave(b"".join(work_signs.last_lines(tail, 1)))
    return begun[-1] if leaves and _is_calm(tail[begun[-1] :]) else -1


def _outlived_by(log: Log, steps: int) -> int:
    """The same, by steps only.

    Those written after an exception that ended the program count only if it was
    restarted: buffered output is written at the very end.
    """
    until, anew = steps_from(log, steps), _begun_anew(log)
    if until < 0:
        raised = {chain[-1].process for chain in log.chains}
        raised |= {hit.process for hit in log.hits}
        done = work_signs.items(log.tail, steps, map(str.encode, raised))
        if steps == 1:
            done = max(done, work_signs.last_step(log.tail))
        until = log.tail_at + done if done >= 0 else -1
    until = max(until, anew)
    ends = [chain[-1].at for chain in log.chains if _ends_own(log, chain)]
    last = max((end for end in ends if end < until), default=-1)
    return until if last <= anew or _begun_again(log, last) else -1


def _calm_from(log: Log) -> int:
    """The byte of the last sign of work if nothing is wrong since it; or -1.

    It follows the last error, and no exception ended the process that had it. Of
    another kind of process two signs are asked for, and three if since the last several
    steps there was an error that no process survives; of any, one, if all began anew.
    """
    troubles = [(hit.order, hit.process, hit.cause) for hit in log.hits if not hit.weak]
    troubles += [(chain[-1].at, chain[-1].process, "") for chain in log.chains]
    if not troubles:
        return -1
    at, process, _ = max(troubles)
    until = _outlived_by(log, SEVERAL)
    again = _begun_again(log, at)
    fatal = any(one > until and cause in _FATAL for one, _, cause in troubles)
    found = [_steps_of(log)]
    ends = [chain[-1].at for chain in log.chains if _ends_own(log, chain)]
    if not ends or _begun_again(log, max(ends)):
        found += _regular(log, at)
    signs = []
    for who, starts in found:
        own = again or who == process.encode()
        asked = 2 if fatal and not again else 0 if own else 1
        if len(starts) > asked and (own or _may_go_on(process.encode(), who)):
            signs.append(log.tail_at + starts[asked])
    step = max(signs, default=-1)
    return step if at < step and _is_calm(_after(log, step)) else -1


def _steps_of(log: Log) -> tuple[bytes, tuple[int, ...]]:
    """The process that makes the last steps, and where they begin."""
    starts = [_outlived_by(log, count) - log.tail_at for count in (1, 2, SEVERAL)]
    line = work_signs.line_at(log.tail, max(0, starts[0]))
    return prefixes.split(line)[0], tuple(starts if starts[0] >= 0 else ())


def _regular(log: Log, at: int) -> Iterator[tuple[bytes, tuple[int, ...]]]:
    """The lines in which a number grows, of the program that had the error at a byte.

    They have to be known from before it, or to measure what trainings measure.
    """
    since = max(0, at - log.tail_at)
    others = log_end.OTHERS.search(log.tail, since)
    end = others.start() if others else len(log.tail)
    for who, starts in work_signs.regular(log.tail):
        line = work_signs.line_at(log.tail, starts[0])
        known = starts[-2] < since
        if since < starts[0] < end and (known or work_signs.measures(line)):
            yield who, starts


def _may_go_on(process: bytes, other: bytes) -> bool:
    """Whether work of the other tells that an error of the process ended nothing.

    The process is of a kind that a training can do without.
    """
    kinds = [one.translate(None, work_signs.NO_LETTERS) for one in (process, other)]
    aside = _ASIDE.search(process) and not _MAIN.search(process)
    return bool(aside) and kinds[0] != kinds[1]


def _is_past(log: Log, hit: Hit) -> bool:
    """Whether work was done after a line of no exception, and all ended well."""
    if log.near.around(hit.order, hit.process) or not log_end.ends_well(log.tail):
        return False
    after = _after(log, hit.order)
    return log_phases.WORKING.search(after) is not None and _is_calm(after)


def _is_calm(text: bytes) -> bool:
    """Whether no line but those of an exit says that anything is wrong."""
    return all(
        log_end.exit_noise(line) or _TROUBLE.search(line) is None
        for line in text.splitlines()
    )


def steps_from(log: Log, steps: int = SEVERAL) -> int:
    """The byte where the last ``steps`` steps begin, in any form; -1 without any."""
    until = log.metrics.went_on_from(steps)
    if until >= 0:
        return until
    counted = max(
        work_signs.numbered(log.tail, steps), work_signs.rows(log.tail, steps)
    )
    return log.tail_at + counted if counted >= 0 else -1


def counting(log: Log, *, run_over: bool) -> Iterator[Hit]:
    """The hits that the run did not survive, and those it survives silently.

    ``run_over`` says that all of its logs end with words to that effect. An error that
    the program handled in its last step is as weak as a warning, and so is one of a
    model's answer, or in code that it executed, if another followed it. Who went on
    but in the end waited in vain, did so for what had failed before.
    """
    steps = work_signs.steps(log.tail)
    works = log_end.works(log.tail)
    end = log_end.finished(log.tail)
    said_so = log.tail[max(0, end) :].partition(b"\n")[0]
    job_ended = end >= 0 and log_end.STATUS.search(said_so) is None
    stop = log_end.interrupted(log.tail)
    answers = _of_answers(log)
    starved = not run_over and _starved(log)
    until, last = (outlived_until(log, n) if log.hits else -1 for n in (SEVERAL, 1))
    known = {_words(hit.text.encode()) for hit in log.hits if hit.order < until}
    rows = work_signs.rows(log.tail)
    finite = max(log.metrics.finite_from, log.tail_at + rows if rows >= 0 else -1)
    for hit in map(_in_earnest, log.hits):
        at = hit.order - log.tail_at
        outlived = works and (
            at < len(log.tail) - work_signs.AFTER or work_signs.went_on(log.tail, at)
        )
        outlived = outlived or _is_answered(log, hit)
        symptom = hit.tier != "cause"
        ended = job_ended or (hit.order < until and _before_training(log, hit))
        if hit.signature.silent and hit.tier == "fallback" and ended:
            continue  # an engine ended with the run, or with its part of one
        if symptom and (log_end.exits(log.tail, at) or _is_past(log, hit)):
            continue
        if hit.signature.silent:
            skipped = hit.order < max(until, last) and _handled(log, hit)
            if hit.cause != "train.nan" or not (skipped or hit.order < finite):
                yield hit
        elif outlived or (symptom and work_signs.went_on(log.tail, at)):
            continue
        elif 0 <= stop <= at:
            continue  # a consequence of the interrupt
        elif 0 <= end <= at:
            shuts_down = failure_lines.shuts_down(log.tail, at)
            stopped = _RAY_STOPS.search(log.tail, end, at)
            shuts_down = shuts_down or bool(stopped and hit.cause.startswith("ray."))
            gone_on = symptom or shuts_down or hit.order < until
            if not (gone_on or _in_attempt(log, hit)):
                yield hit
        elif run_over or hit.order < until:
            if starved and not (symptom or hit.weak or _handled(log, hit)):
                yield hit
        elif (
            hit.order < last
            and (_handled(log, hit) or _words(hit.text.encode()) in known)
        ) or (
            _in_attempt(log, hit)
            or answers.holding(hit.order, hit.process)[1]
            or _of_answer(log, hit)
            or _in_refused(log, hit)
            or _ray_retries(log, hit)
            or _known_to_go_on(log, hit, known)
            or (hit.signature.waits and _has_waited(log, hit))
            or _in_ignored(log, hit)
        ):
            yield replace(hit, weak=True)
        elif not any(step > at + work_signs.AFTER for step in steps[-2:-1]):
            yield hit


def _before_training(log: Log, hit: Hit) -> bool:
    """Whether an engine's exit is told before the first of all steps."""
    exits = log_end.exit_noise(hit.text.encode())
    return exits and work_signs.first_step(log.tail) > hit.order - log.tail_at


def _has_waited(log: Log, hit: Hit) -> bool:
    """Whether what a line waits for has come, or a step was made since."""
    made = work_signs.last_step(log.tail) > hit.order - log.tail_at
    return made or _COMES.search(_after(log, hit.order)) is not None


def _in_earnest(hit: Hit) -> Hit:
    """The hit, no longer a mere warning if it reports the very last attempt."""
    found = _WAITS.search(hit.text.encode()) if hit.weak else None
    return replace(hit, weak=False) if found and _is_last(found) else hit


def waits(hit: Hit, log: Log) -> bool:
    """Whether the program waits or tries again after what the line says."""
    said = hit.text.encode()
    raised = log.near.around(hit.order, hit.process)
    inside = bool(raised) and raised[0].start <= hit.order <= raised[-1].at
    return (
        (hit.signature.waits and not inside) or _tries(said) or _is_tried_next(log, hit)
    )


def _is_answered(log: Log, hit: Hit) -> bool:
    """Whether a tool asked for something in this line and has spoken since."""
    asks = _ASKS.search(hit.text.encode()) if hit.signature.waits else None
    after = b"\n" + _after(log, hit.order)
    return asks is not None and b"\n" + asks[b"tool"] in after


def _is_tried_next(log: Log, hit: Hit) -> bool:
    """Whether the line after it says so, and something other than an end follows."""
    if hit.order < log.tail_at or log.near.around(hit.order, hit.process):
        return False
    line, _, after = _after(log, hit.order).partition(b"\n")
    said = _TRIED_NEXT.search(line[:200]) is not None
    return said and after.strip() != b"" and _GIVES_UP.search(after) is None


def _tried_again(log: Log, said: list[bytes], at: int) -> bool:
    """Whether ``said`` tells of an attempt, not the last, and the next one went well.

    ``at`` is the byte, of the whole log, of the last line that tells of it.
    """
    if not any(_FAILED.search(line) and _tries(line) for line in said):
        return False
    end = log.tail.find(b"\n", max(0, at - log.tail_at))
    after = log.tail[end:] if end >= 0 else b""
    return _ends_well(after)


def _caught(log: Log, chain: exceptions.Chain) -> bool:
    """Whether such an attempt ended in these exceptions, or the next line goes on."""
    if _ends_program(chain) and not _OPTIONAL.search(chain[-1].type):
        return False
    if _tried_again(log, _before(log, chain), chain[-1].at):
        return True
    after = _after(log, chain[-1].at)
    next_line = after.partition(b"\n")[0][:300]
    return (_goes_on(next_line) or _tries(next_line)) and _ends_well(after)


def _after(log: Log, at: int) -> bytes:
    """What follows the line at a byte of the whole log."""
    return log.tail[max(0, at - log.tail_at) :].partition(b"\n")[2]


def _goes_on(line: bytes) -> bool:
    """Whether the program says that it does without something, or recovers from it."""
    recovers = _RECOVERS.search(line) and not _NOT_RECOVERED.search(line)
    return bool(_GOES_ON.search(line) or recovers)


def _ends_well(after: bytes) -> bool:
    return _WELL.search(after) is not None and _GIVES_UP.search(after) is None


def _tries(line: bytes) -> bool:
    found = _WAITS.search(line)
    return found is not None and not _is_last(found)


def _is_last(found: Match) -> bool:
    """Whether the attempt that a line counts is the last of all."""
    return found[b"all"] is not None and int(found[b"number"]) >= int(found[b"all"])


def let_go(log: Log, chain: exceptions.Chain) -> bool:
    """Whether the program said of these exceptions that it does without or tries again.

    Or they are of a tool, a model's answer, a refused request or a destructor. Whether
    it went well in the end is another matter.
    """
    if _ends_program(chain) and not _OPTIONAL.search(chain[-1].type):
        return False
    own = (_is_of_tool, _is_of_answer, _ignored, _is_handled)
    if any(told(log, chain) for told in own):
        return True
    after = _after(log, chain[-1].at)[:1000].splitlines()[:3]
    tries = any(map(_tries, [*_before(log, chain), *after[:1]]))
    goes_on = any(map(_goes_on, after[:1]))
    return tries or goes_on or any(map(_REFUSED.search, after))


def failed(log: Log) -> bool:
    """Whether a line says that the program failed, and it did not go on after it.

    What ended no program before ends none as the last word.
    """
    until, last = (outlived_until(log, steps) for steps in (SEVERAL, 1))
    later = [one for one in log.chains if until <= one[-1].at < last]
    known = {_raised(one) for one in log.chains if one[-1].at < until}
    if later and all(_is_handled(log, one) or _raised(one) in known for one in later):
        until = last
    waiting = {hit.order - log.tail_at for hit in log.hits if waits(hit, log)}
    lines = _LINE.finditer(log.tail)
    waiting.update(one.start() for one in lines if _repeats(log.tail, one))
    for sleeps in _SLEEPS.finditer(log.tail):  # after what the line before it says
        after = log.tail[sleeps.end() :]
        if not (_TO_TRY.search(sleeps[0]) or _TO_TRY.search(after) or _steps(after)):
            continue
        end = max(0, log.tail.rfind(b"\n", 0, sleeps.start()))
        waiting.add(log.tail.rfind(b"\n", 0, end) + 1)
    ends_none = (_caught, _is_of_tool, _is_of_answer, _refused, _ignored)
    for chain in log.chains:
        again = _raised(chain) in known and not _ends_program(chain)
        again = again and not _is_complained_of(log, chain)
        if again or any(told(log, chain) for told in ends_none):
            waiting.update(_lines_of(log, chain))
    return failure_lines.failed(log.tail, until - log.tail_at, waiting, _ends(log))


def _ends(log: Log) -> set[int]:
    """Where in its tail the lines begin of what ended the program for good."""
    anew = _begun_anew(log)
    starts: set[int] = set()
    for chain in log.chains:
        if (
            _ends_own(log, chain)
            and chain[-1].at >= anew
            and not _begun_again(log, chain[-1].at)
        ):
            starts.update(_lines_of(log, chain))
    return starts


def _lines_of(log: Log, chain: exceptions.Chain) -> Iterator[int]:
    """Where in the tail the lines of chained exceptions begin."""
    start, end = (at - log.tail_at for at in (chain[0].start, chain[-1].at + 1))
    lines = _LINE.finditer(log.tail, max(0, start), max(0, end))
    return (line.start() for line in lines)


def _is_complained_of(log: Log, chain: exceptions.Chain) -> bool:
    """Whether an error's line follows the exceptions, and no step."""
    at = chain[-1].at - log.tail_at
    return _last_steps(log.tail) <= at < _last_complaint(log.tail)


@functools.lru_cache(maxsize=64)
def _last_complaint(tail: bytes) -> int:
    """Where the last error's line begins of which nothing is said that is done."""
    for line in reversed([*_LINE.finditer(tail)]):
        if failure_lines.complains(line[0]) and not _HANDLED.search(line[0]):
            return line.start()
    return -1


@functools.lru_cache(maxsize=64)
def _last_steps(tail: bytes) -> int:
    """Where the last step, row or numbered step begins; -1 without any."""
    return max(
        work_signs.last_step(tail), work_signs.rows(tail), work_signs.numbered(tail, 1)
    )


def _steps(text: bytes) -> bool:
    return _last_steps(text) >= 0


def _handled(log: Log, hit: Hit) -> bool:
    """Whether the program says about an error that it retries or does without."""
    chain = log.near.around(hit.order, hit.process)
    if chain:
        return _is_handled(log, chain)
    said, next_line = (
        hit.text.encode(),
        _after(log, hit.order).partition(b"\n")[0][:300],
    )
    same = prefixes.split(next_line)[0] == prefixes.split(said)[0]
    return bool(_HANDLED.search(said) or (same and _goes_on(next_line)))


def _in_attempt(log: Log, hit: Hit) -> bool:
    """Whether a line is of an attempt that is not the last, and the next went well.

    It is in the exceptions that ended the attempt, just before them, or alone, and then
    the line after it may count the next one.
    """
    if hit.order < log.tail_at:
        return False
    next_line = log.tail_at + log.tail.find(b"\n", hit.order - log.tail_at) + 1
    chain = log.near.around(next_line, hit.process)
    if chain and next_line <= max(one.end for one in chain) + 1:
        return _caught(log, chain)
    after = _after(log, hit.order)
    next_one = None if chain else _WAITS.search(after.partition(b"\n")[0][:300])
    tries = next_one and next_one[b"all"] and not _is_last(next_one)
    again = _tried_again(log, [hit.text.encode()], hit.order)
    return again or bool(tries and _ends_well(after))


def _of_answers(log: Log) -> exceptions.Places:
    """The exceptions of text that was executed as code, except the log's last."""
    return exceptions.Places(chain for chain in log.chains[:-1] if _is_executed(chain))


def _is_executed(chain: exceptions.Chain) -> bool:
    """Whether all of it was raised in text that was executed as code."""
    files = [frame.file for one in chain for frame in one.frames]
    return all(map(_EXECUTED.match, files)) and bool(
        files or _SYNTAX.match(chain[-1].type)
    )


def _is_of_answer(log: Log, chain: exceptions.Chain) -> bool:
    """Whether a model's answer raised, as one before it did that was survived."""
    if not _is_executed(chain):
        return False
    tail = log.tail
    works = max(
        work_signs.last_step(tail), work_signs.rows(tail, 1), work_signs.items(tail, 1)
    )
    first = next(filter(_is_executed, log.chains), chain)
    return first[-1].at < min(log.tail_at + works, chain[0].start)


def _repeats(tail: bytes, line: Match) -> bool:
    """Whether a line is a tool's, or quoted."""
    return tool_output.of_tool(line[0]) or tool_output.is_quoted(tail, line.start())


def _is_of_tool(log: Log, chain: exceptions.Chain) -> bool:
    """Whether a tool's exceptions begin here: all its lines or only this are marked."""
    start, end = (at - log.tail_at for at in (chain[0].start, chain[-1].at))
    lines = log.tail[max(0, start) : max(0, start, end) + 200].split(b"\n", 2)
    if start >= 0 and tool_output.is_quoted(log.tail, start):
        return True
    if start < 0 or not tool_output.of_tool(lines[0]):
        return False
    whole = any(map(tool_output.of_tool, lines[1:2]))
    return not whole or tool_output.of_tool(log.tail[max(0, end) :][:200])


def _in_refused(log: Log, hit: Hit) -> bool:
    chain = log.near.around(hit.order, hit.process)
    inside = bool(chain) and hit.order <= chain[-1].at
    return _refused(log, chain) if inside else _refused_at(log, hit.order)


def _refused(log: Log, chain: exceptions.Chain) -> bool:
    return not _ends_program(chain) and _refused_at(log, chain[-1].at)


def _refused_at(log: Log, at: int) -> bool:
    """Whether a server refused a request for the line at a byte, and works on.

    Nothing may have been raised since.
    """
    after = _after(log, at)
    refused = any(map(_REFUSED.search, after[:1000].splitlines()[:3]))
    last = not log.chains or log.chains[-1][-1].at <= at
    return refused and last and work_signs.SERVED.search(after) is not None


def _known_to_go_on(log: Log, hit: Hit, known: set[bytes]) -> bool:
    """Whether the line says so, or its words were survived, and nothing failed since.

    What others report of a process may be its last, though it was survived before.
    """
    said = hit.text.encode()
    at = hit.order - log.tail_at
    alone = not log.near.around(hit.order, hit.process)
    outside = hit.cause.partition(".")[0] in {"env", "ray", "comm", "vllm", "cuda"}
    outside = outside and hit.cause != "cuda.oom"
    after = _after(log, hit.order)
    works = _MEASURED.search(after) is not None or log_end.ends_well(log.tail)
    goes_on = _goes_on(said) and works
    survived = _words(said) in known and not outside and (works or not after.strip())
    if at < 0 or not alone or not (goes_on or survived):
        return False
    later = any(one[-1].at > hit.order for one in log.chains)
    return not later and not failure_lines.failed(log.tail, at)


def _ray_retries(log: Log, hit: Hit) -> bool:
    """Whether Ray reports a worker whose task it retries, and the log ends well."""
    told = _RAY_RETRIES.search(hit.text.encode()) is not None
    return told and work_signs.last_step(log.tail) < 0 and log_end.ends_well(log.tail)


def _in_ignored(log: Log, hit: Hit) -> bool:
    chain = log.near.around(hit.order, hit.process)
    return bool(chain) and hit.order <= chain[-1].at and _ignored(log, chain)


def _ignored(log: Log, chain: exceptions.Chain) -> bool:
    """Whether Python only printed the exceptions, as those of a destructor."""
    start = max(0, min(one.start for one in chain) - log.tail_at)
    end = max(0, log.tail.find(b"\n", start))  # of its first line, or the one before
    lines = log.tail[max(0, start - 2000) : end].splitlines()[-2:]
    process = chain[-1].process.encode()
    return any(
        failure_lines.IGNORED in one and prefixes.split(one)[0] == process
        for one in lines
    )


def _of_answer(log: Log, hit: Hit) -> bool:
    """Whether a line is a tool's, or of a model's answer, and an exception follows it.

    The lines of an exception follow the one that names the tool.
    """
    chain = log.near.around(hit.order, hit.process)
    inside = bool(chain) and hit.order <= max(one.end for one in chain)
    if tool_output.of_tool(hit.text.encode()) or (inside and _is_of_tool(log, chain)):
        return True
    if tool_output.is_quoted(log.tail, hit.order - log.tail_at):
        return True
    told = _OF_ANSWER.search(hit.text.encode()) is not None
    return told and bool(log.chains) and log.chains[-1][0].start > hit.order


def _raised(chain: exceptions.Chain) -> bytes:
    """What was raised last, without numbers."""
    return _words(f"{chain[-1].type}: {chain[-1].message}".partition("\n")[0].encode())


def _words(line: bytes) -> bytes:
    return _DIGITS.sub(b"", prefixes.split(line[:400])[1]).strip()


def _is_handled(log: Log, chain: exceptions.Chain) -> bool:
    return any(_HANDLED.search(line) for line in _before(log, chain))


def _before(log: Log, chain: exceptions.Chain) -> list[bytes]:
    """The two lines before a traceback, or the one before it and its first."""
    start = max(0, min(one.start for one in chain) - log.tail_at)
    end = log.tail.find(b"\n", start)  # of its first line, or of the one before it
    return work_signs.last_lines(log.tail[max(0, start - 2000) : max(0, end)], 2)


def _ends_program(chain: exceptions.Chain) -> bool:
    """Whether nobody caught the last of chained exceptions."""
    frames = chain[-1].frames
    return bool(frames) and frames[0].function == "<module>"


def _ends_own(log: Log, chain: exceptions.Chain) -> bool:
    """Whether nobody caught it, and no tool, answer or quotation holds it."""
    if not _ends_program(chain):
        return False  # like most
    of_other = _is_of_tool(log, chain) or _is_of_answer(log, chain)
    of_other = of_other or _is_of_helper(chain)
    executed = _is_executed(chain) and chain is not log.chains[-1]
    quoted = any(line.strip() == b"```" for line in _before(log, chain))
    return not (of_other or executed or quoted)


def _is_of_helper(chain: exceptions.Chain) -> bool:
    """Whether a program beside the run's own raised, or Python as it starts."""
    frames = chain[-1].frames
    return bool(frames) and _HELPERS.search(frames[0].file) is not None


def _starved(log: Log) -> bool:
    """Whether the program ended because it had waited in vain."""
    last = log.chains[-1] if log.chains else ()
    return bool(last) and _ends_program(last) and bool(_IN_VAIN.search(last[-1].type))


def _begun_anew(log: Log) -> int:
    """The byte where all is begun anew, or after its installation, if more is said."""
    anew, at = _ANEW.last(log.tail), _installed(log)
    after = log.tail[max(0, anew) :].partition(b"\n")[2]
    starts = _steps(after) or _opens(log, log.tail_at + anew)
    if anew > at and (starts or not _LEAVES.search(after)):
        at = anew
    after = log.tail[max(0, at) :].partition(b"\n")[2]
    return log.tail_at + at if at >= 0 and after.strip() else -1


def _installed(log: Log) -> int:
    """Where in its tail pip has installed what it needs, before any program ended."""
    at = _INSTALLED.last(log.tail)
    ended = (
        chain[-1].at < log.tail_at + at for chain in log.chains if _ends_program(chain)
    )
    return -1 if any(ended) else at


def _begun_again(log: Log, at: int) -> bool:
    """Whether the program resumes after this byte, or its opening lines appear again.

    What it says of a resumption before its steps may come late, out of a buffer. Or a
    script goes on with the program that trains; what had ended made no steps.
    """
    since = max(0, at - log.tail_at)
    resumes = _RESUMES.search(log.tail, since)
    told = log.tail[resumes.start() :][:400].partition(b"\n")[0] if resumes else b""
    other = log_end.COMMAND.search(log.tail, since)
    another = other and work_signs.last_step(log.tail) > other.start()
    trained = 0 <= work_signs.first_step(log.tail) < since
    resumed = told and _counts_anew(log.tail, since, told)
    return bool(resumed or (another and not trained)) or _opens(log, at)


def _counts_anew(tail: bytes, since: int, resumes: bytes) -> bool:
    """Whether a step is made again, or the next after one that a line names.

    The first step from ``since`` on; buffered ones go on where the last had ended.
    """
    places = work_signs.steps(tail)
    early = [at for at in places if at < since][-1:]
    late = [at for at in places if at >= since][:1]
    lines = (work_signs.line_at(tail, at)[:400] for at in [*early, *late])
    found = [one for line in lines if (one := _STEP_NUMBER.search(line))]
    if len(found) < 2:
        return False
    before, after = (one.groupdict() for one in found)
    saved = {float(number) for number in _DIGITS.findall(resumes)}
    return any(
        number is not None
        and (float(number) <= float(before[name] or -1) or float(number) - 1 in saved)
        for name, number in after.items()
    )


def _opens(log: Log, at: int) -> bool:
    """Whether the lines with which the program began appear again after this byte."""
    since = len(log.tail) - len(_after(log, at))
    begin = itertools.islice(_LINE.finditer(log.head[:at]), FIRST_LINES)
    spans = [(chain[0].start, chain[-1].at) for chain in log.chains]
    first = {
        _said(one[0])
        for one in begin
        if not any(start <= one.start() <= end for start, end in spans)
    }
    again = (_said(one[0]) for one in _LINE.finditer(log.tail, since))
    return any(words in first for words in again if len(words) > 12)


def _said(line: bytes) -> bytes:
    """A line without what differs from one start to the next; empty for a step."""
    if log_phases.STEP.search(line) or log_end.OTHERS.search(line):
        return b""
    return _VARIES.sub(b"", prefixes.split(line[:400])[1]).strip()
