"""How far a run had got when its log ends, and what that phase waits for."""

from __future__ import annotations

import bisect
import functools
import tomllib
from pathlib import Path
from typing import Any

from ahocorasick_rs import BytesAhoCorasick

from pytest_gkd.diagnosis import phase_words
from pytest_gkd.diagnosis.patterns import Match, Pattern
from pytest_gkd.marks import SIGN

_HERE = Path(__file__).parent
_TABLE = tomllib.loads((_HERE / "phases.toml").read_text("utf-8"))


def _framework(file: Path) -> tuple[dict[bytes, str], str]:
    """A framework's markers with their phases, and what follows one of its steps."""
    table: dict[str, Any] = tomllib.loads(file.read_text("utf-8"))
    marks = {
        mark.encode(): phase
        for phase, files in table.items()
        if isinstance(files, dict)
        for texts in files.values()
        for mark in texts
    }
    return marks, table.get("after_step", "")


_MARKERS = {
    mark.encode(): row["name"]
    for row in _TABLE["phase"]
    for mark in row.get("markers", ())
}
# What follows a step of the framework that has the marker.
_FOLLOWS: dict[bytes, str] = {}
for _file in sorted(_HERE.glob("phase_markers/*.toml")):
    _marks, _after = _framework(_file)
    _MARKERS |= _marks
    _FOLLOWS |= dict.fromkeys(_marks, _after) if _after else {}
_TEXTS = tuple(_MARKERS)
# Not for first-step, which is one phase or another, by the kind of job.
WAITS_FOR = {r["name"]: r["waits_for"] for r in _TABLE["phase"] if "waits_for" in r}
PHASES = tuple(WAITS_FOR)
_RAISED_IN: dict[str, str] = {
    name: r["name"] for r in _TABLE["phase"] for name in r.get("functions", ())
}

_OWN = SIGN.encode()
MOST_SPOKEN = 100
_RANK = Pattern(rb"(?i)(?:\brank[ _]?|\"rank\": ?|\[default|\[rank )(\d{1,6})\b")
# verl lists the parts of a step in the order in which they finished.
_TIMED = Pattern(rb"\btiming_s/([\w/]+)")

NCCL = Pattern(rb"\bNCCL (?:INFO|version) ?")
_NCCL_COMPLETE = Pattern(
    rb"\brank (?P<rank>\d{1,6}) nranks (?P<size>\d{1,6}) [^\r\n]{0,120}?"
    rb"(?:commId (?P<group>0x[\da-f]+) )?[^\r\n]{0,40}?Init COMPLETE"
    rb"(?:[^\r\n]{0,60}\[repeated (?P<times>\d{1,6})x)?"
)

CAUSED_IN: dict[str, str] = {
    c: row["name"] for row in _TABLE["phase"] for c in row.get("causes", ())
}

# One completed training step, however the framework prints it.
STEP = Pattern(
    rb"\bstep:\d+ - |\{'loss': |\{'train_loss|'reward': -?\d"
    rb"|\{'eps': \d+, 'objective/"  # of TRL's PPOTrainer
    rb"|Training (?:Progress|Batches Processed): +\d+%\|.{0,80}\| [1-9]\d*/"
    rb"|\b(?:iteration|[Ss]tep|global_step|iter|[Ee]poch|[Bb]atch|[Uu]pdate|[Rr]ound)"
    rb"[ =:]+\d+[^\r\n]{0,300}[Ll]oss"
    rb"|['\"](?:global_)?(?:step|iter(?:ation)?)['\"]: \d+"
    rb"[^\r\n]{0,300}loss['\"]: -?[\d.]"
    rb"|\| [1-9]\d*/\d+ \[[^\]\r\n]{0,80}(?:loss|v_num)=|\bstep=\d+, skipped="
    rb"|Total step time: [\d.]+ ?s|Finished: 'step', time cost: "
    rb"|INFO: update actor done"
)
# Nothing follows these but the end of the program.
FINISHED = Pattern(
    rb"'train_runtime': |train_runtime +=|Final validation metrics"
    rb"|Training Progress: +100%\|"
    rb"|\b[Tt]raining (?:is )?(?:completed?|finished|done|succeeded)\b"
    rb"|\b[Ff]inished [Tt]raining\b|[Tt]raining finished successfully"
    rb"|\[after training is done\]"
    rb"|\b[Dd]one training in [\d.]+ seconds"
    rb"|Max number of (?:steps|epochs) has been reached, stopping training"
    rb"|exiting program after [\d.]+ minutes|(?m:^Successfully completed\.\r?$)"
    rb"|Training took: |Finished server process|\bJob 'raysubmit_\w+' succeeded"
    rb"|\bSUCCEEDED\b|" + "正常終了|正常结束".encode() + rb""
    rb"|(?:(?:nicht|pas de|sans) )?\b(?:[Ff]in normale?|normal beendet)\b"
    rb"|\b(?:exited|finished|completed) with (?:exit )?(?:code|status):? 0\b"
    rb"|(?:(?:failed|died) with )?\bexit (?:code|status):? 0\b"
    rb"|\b(?:run|job|training) (?:finished|done|completed|ended),? (?:rc|exit)=0\b"
    rb"|(?m:^\d+(?:_\d+)? [^\r\n]{0,80}\bCOMPLETED +0:0\b)|Successfully installed "
    rb"|=+ \d+ passed(?:, \d+ (?:skipped|warnings?|deselected))* in [\d.]+s"
    rb"|(?m:^\d+ passed in [\d.]+s)"
    rb"|\b(?:All done|Run complete|Job completed|run completed)\b",
    unless=rb"^(?:failed|died) with |^(?:nicht|pas de|sans) |^(?:"
    + "非|不".encode()
    + rb")",
)
# The program works at this point; a later failure still counts.
WORKING = Pattern(
    rb"Application startup complete|Uvicorn running on"
    rb"|(?:GET|POST) /[\w/.?=&-]* HTTP/1\.\d\" 200"
    rb"|Processed prompts: 100%|Avg generation throughput: (?:[1-9]|0\.[1-9])"
    rb"|Generated text: |The server is fired up and ready to roll"
    rb"|(?m:^ *\d+ +\d+ +(?:float|half|double|b?float\d+|u?int\d+) .*\d+\.\d\d )",
    unless=rb"^(?:GET|POST) /(?:update_named_param|init_communicator|\w+_weight)",
)
# What a server prints once its engine works; a trainer's engine has only just started.
READY = Pattern(
    rb"init engine \(profile|Starting (?:vLLM|uvicorn)|Available routes are|Route: /"
    rb"|Supported tasks: |Waiting for application startup|Started server process"
    rb"|Running: 0 reqs|Heartbeat successful|\[shutdown\]|Application shutdown complete"
)
# Nothing moves: a process that waits says so again and again, or its stacks are shown.
WAITING = Pattern(rb"No available shared memory broadcast block found")
IDLE = Pattern(
    rb"Avg prompt throughput: 0\.0 tokens/s, Avg generation throughput: 0\.0 tokens/s"
    rb", Running: [1-9]"
)
STACKS = Pattern(
    rb"(?m)^ *Timeout \(\d+:\d\d:\d\d\)!"
    rb"|(?:\bStack|[Tt]hread .{0,80}) \(most recent call first\):"
    rb"|^ *Thread (?:0x)?[\dA-Fa-f]+ \((?:idle|active)",
)
# Someone waiting, or the cluster, ended the run: Python, a terminal, torchrun's
# SignalException, Lightning and Megatron-LM, SLURM, bash.
INTERRUPT = Pattern(
    rb"(?m)(?:^|\r) *(?:\([^)]*\) *|\[\w+\]: *)*(?P<python>KeyboardInterrupt)\s*$"
    rb"|(?:^|\r) *(?P<terminal>\^C)|\bgot signal: (?P<number>1|2|15)\b"
    rb"|Signal 2 \((?P<told>SIGINT)\)"
    rb"|[Rr]eceiv(?:ed|ing) (?:signal )?(?P<name>SIGINT|SIGTERM|SIGHUP)\b"
    rb"|[Rr]eceived signal (?P<plain>1|2|15)\b"
    rb"|(?P<slurm>CANCELLED AT) [\dT:-]+(?: DUE TO (?P<why>TIME LIMIT|PREEMPTION))?"
    rb"|^(?:[^ \r\n]{1,200}: line \d{1,6}: +\d{1,9} )?(?P<bash>Terminated|Hangup)"
    rb"(?: {2,}\S.*)?\r?$",
)
_SIGNALS = {b"1": "SIGHUP", b"2": "SIGINT", b"15": "SIGTERM"}
_SIGNALS |= {b"Terminated": "SIGTERM", b"Hangup": "SIGHUP"}
# Seen at the end of a run; some programs print it after a failure as well.
ENDED = Pattern(
    rb"max_steps reached|Model saved to|Saved model to|saved successfully"
    rb"|Evaluation complete|[Aa]ll (?:tests|checks) passed"
    rb"|Avg bus bandwidth|Out of bounds values : 0 OK|Serving Benchmark Result"
    rb"|was not called before program exit|\bexits successfully"
    rb"|wandb: Find logs at|wandb: Synced |Throughput: [\d.]+ requests/s"
    rb"|^ *100%\|[^|]{0,99}\| (?P<done>\d+)/(?P<all>\d+) \["
    rb"|(?:[Ee]poch|Episode)[^|]{0,40}: 100%\|"
)
# What comes before the exit status of a process, whoever tells it.
EXIT = (
    rb"(?:[Ee]xit(?:ed with)?|\b(?:ended|left|stopped|finished|returned)(?: with|,))"
    rb" (?:code|status):? "
)
# Python cannot read the program itself; this comes without a traceback.
_UNREADABLE = Pattern(rb"\^ *\r?\n[^\r\n]{0,100}\b(?:Syntax|Indentation|Tab)Error: ")
# A record of JSON of a run's end, and what in it says that it is no good one.
_END_EVENT = (
    rb"\"(?:run|job|train(?:ing)?)[_ ](?:end|ended|exit|exited|fail|failed|finished)\""
)
_BAD_VALUE = (
    rb"(?:: ?\"[\w ]{0,40}(?i:error|fail|failed|failure|crash|crashed|abort|aborted"
    rb"|killed)\"|\"(?:error|exception)\": ?(?:\"[^\"]|[\[{] ?[^\]} ]|true|[1-9])"
    rb"|\"(?:success|succeeded|ok)\": ?false|\"failed\": ?(?:true|[1-9])"
    rb"|\"(?:exit|return)_?(?:code|status)\": ?-?[1-9])"
)
_MILD = rb"\"level(?:name)?\": ?\"(?:warn|info|debug)"
# Signs that a program failed, whatever the reason.
FAILED = Pattern(
    rb"^(?:E +)?(?:\([^)]*\) *|\[rank\d+\]: *)*(?: *\+ Exception Group )?"
    rb"Traceback \(most recent call last\)"
    rb"|^(?:\([^)]*\) *|\[rank\d+\]: *)*[\w.]*(?:Error|Exception): "
    rb"|\[\w+\.py:\d+\] [\w.]*(?:Error|Exception): "
    rb"|^\{.{0,250}\"(?:exc_info|exception|stack_?trace|traceback)\": ?\"Traceback.*"
    rb"|slurmstepd: error|CANCELLED AT "
    rb"|\b(?:FATAL|CRITICAL)\b|Segmentation fault|core dumped"
    rb"|" + EXIT + rb"(?:[1-9]|-(?:[4678]|11)\b)"
    rb"|^\{.*"
    + _END_EVENT
    + rb".*"
    + _BAD_VALUE
    + rb"|^\{.*"
    + _BAD_VALUE
    + rb".*"
    + _END_EVENT
    + rb"|: ?\"(?:run|job|train(?:ing)?)[_ ](?:failed|crashed|aborted)\""
    rb"|^\{.*: ?\"exit(?:ed)?\".*\"(?:exit_?)?(?:code|status)\": ?-?[1-9]"
    rb"|Error executing job with overrides"
    rb"|exits with return code = -?[1-9]|\bfailed \(exitcode: -?[1-9]"
    rb"|Fatal Python error|terminate called after|Aborted(?: *$| {2,}|!)"
    rb"|\(Aborted\)|Signal: Aborted",
    unless=rb"(?i)^\{.*" + _MILD + rb".*\"Traceback|^\{.*\"Traceback.*" + _MILD,
)


def signal(found: Match) -> str:
    """The name of what ended the run, from a match of INTERRUPT."""
    if found[b"slurm"]:
        why = (found[b"why"] or b"a cancellation").decode().lower()
        return f"SLURM ({why})"
    name = found[b"name"] or found[b"told"]
    number = found[b"number"] or found[b"plain"] or found[b"bash"]
    return name.decode() if name else _SIGNALS.get(number, "SIGINT")


def last_mark(text: bytes) -> int:
    """The byte offset of the last phase marker; -1 if there is none."""
    return max((at for at, _ in _marked(text)), default=-1)


class Marks:
    """The phases of a text from a byte on, in the order of their markers."""

    def __init__(self, text: bytes, start: int = 0) -> None:
        start = max(0, start)
        self._text = text
        self._found = sorted(
            [(start + at, _MARKERS[mark]) for at, mark in _marked(text[start:])]
            + [(one.start(), "after-step") for one in STEP.finditer(text, start)]
        )

    def at(self, place: int) -> str:
        """The phase at the end of the line at a byte; empty before any marker."""
        end = self._text.find(b"\n", place)
        end = len(self._text) if end < 0 else end
        number = bisect.bisect_right(self._found, (end, "\x7f"))
        return self._found[number - 1][1] if number else ""


def last_phase(text: bytes, step: int = -1) -> str:
    """The phase after a text's last marker; ``step`` is the offset of a known step.

    May also be ``first-step`` where the first step begins, and ``after-step`` after a
    completed one: what a run does there depends on the kind of job.
    """
    at, phase = _last_sign(text, step)
    if at >= 0:
        return phase
    # Failing all else, NCCL's own lines indicate the workers' start.
    waits = NCCL.search(text) and b"Init COMPLETE" not in text
    return "actor-init" if waits or nccl_joining(text) else "unknown"


def spoken_after(text: bytes, step: int = -1) -> phase_words.Told | None:
    """The phase according to the lines after the last marker or step.

    If several ranks speak it is that of the one furthest behind: the others wait.
    """
    at, phase = _last_sign(text, step)
    lines = text[max(at, 0) :].splitlines()[at >= 0 :][-MOST_SPOKEN:]
    # Marks of the program's own have their own reader, ``phase_marks``.
    lines = [line for line in lines if _OWN not in line]
    ranks: dict[bytes, list[bytes]] = {}
    for line in lines:
        rank = _RANK.search(line[:200])
        ranks.setdefault(rank[1] if rank else b"", []).append(line)
    begun = at >= 0 and phase not in STARTS
    if len(ranks) - (b"" in ranks) < 2:
        return phase_words.of_lines(lines, begun=begun)
    told = [phase_words.of_lines(own, begun=begun) for own in ranks.values()]
    return min(filter(None, told), key=_how_far, default=None)


def _how_far(told: phase_words.Told) -> tuple[int, bool]:
    return PHASES.index(told.phase) if told.phase in PHASES else 99, told.over


def _last_sign(text: bytes, step: int) -> tuple[int, str]:
    found = [(at, len(mark), _MARKERS[mark]) for at, mark in _marked(text)]
    at, _, phase = max(found, default=(-1, 0, ""))
    step = max(step, STEP.last(text))
    return (at, phase) if at > step else (step, "after-step")


def _marked(text: bytes) -> list[tuple[int, bytes]]:
    """Where each marker begins; overlapping ones count as well."""
    found = _automaton().find_matches_as_indexes(text, overlapping=True)
    return [(start, _TEXTS[number]) for number, start, _ in found]


@functools.cache
def _automaton() -> BytesAhoCorasick:
    return BytesAhoCorasick(_TEXTS)


def nccl_joining(text: bytes) -> tuple[set[int], int] | None:
    """Who has joined an incomplete NCCL group, and its size.

    Only a group that more than half have joined: fewer are those of one node.
    """
    came: dict[tuple[bytes, int], set[int]] = {}
    for found in _NCCL_COMPLETE.finditer(text):
        size = int(found[b"size"])
        ranks = came.setdefault((found[b"group"] or b"", size), set())
        # Of those that Ray has folded only the number is known.
        ranks |= {int(found[b"rank"]), *range(-int(found[b"times"] or 1) + 1, 0)}
    for (_, size), ranks in came.items():
        if len(ranks) < size < 2 * len(ranks):
            return ranks, size
    return None


def of_unreadable(text: bytes, last: str) -> str:
    """``config`` if Python could not read a program that did not start, else empty."""
    started = last not in {"unknown", *STARTS}
    return "config" if not started and _UNREADABLE.search(text) else ""


def ended(line: bytes) -> bool:
    """Whether the line is typical of a run's end; for a bar, whether it is complete."""
    found = ENDED.search(line)
    return found is not None and found[b"done"] == found[b"all"]


def of_line(line: bytes) -> str:
    """The phase that a line within a step marks or mentions; empty if none."""
    at, phase = _last_sign(line, -1)
    if at < 0:
        told = phase_words.of_line(line, begun=True)
        phase = told.phase if told else ""
    return phase if phase in PHASES else ""


# What follows a phase of a step in most programs; after a checkpoint the next step.
# Counting and reporting after an update are still part of training.
_THEN = {
    "weight-sync": "generation",
    "generation": "training-step",
    "teacher": "training-step",
    "training-step": "training-step",
}


def following(phase: str, text: bytes) -> str:
    """The phase after a completed one, in the program that printed the text."""
    if phase in STARTS:
        return phase
    if phase == "generation" and b"teacher" in text.lower():
        return "teacher"
    return _THEN.get(phase, "after-step")


def after_step(text: bytes) -> str:
    """What follows a step of the framework that printed last; empty if unknown.

    If the last step reports two of its parts, their order takes precedence.
    """
    line = text.rfind(b"\n", 0, text.rfind(b"timing_s/")) + 1
    timed = _TIMED.finditer(text, line, text.find(b"\n", line) % (len(text) + 1))
    parts = dict.fromkeys(phase_words.of_part(one[1]) for one in timed)
    if len(order := [phase for phase in parts if phase in _THEN]) > 1:
        return order[0]
    found = [(at, _FOLLOWS[mark]) for at, mark in _marked(text) if mark in _FOLLOWS]
    return max(found, default=(-1, ""))[1]


STARTS = phase_words.STARTS


def starts_after(text: bytes, at: int) -> bool:
    """Whether a phase of the start of a run begins after byte ``at``."""
    return any(_MARKERS[mark] in STARTS for _, mark in _marked(text[at:]))


def raised_in(function: str) -> str:
    """The phase of a traceback's function, ``file.py:name``; empty if unknown."""
    return _RAISED_IN.get(function) or _RAISED_IN.get(function.partition(":")[2], "")


def phases_of(cause: str) -> set[str]:
    """The phase in which a cause or its family occurs; empty if in any."""
    return {CAUSED_IN[c] for c in (cause, cause.partition(".")[0]) if c in CAUSED_IN}


def caused_in(cause: str, last: str) -> str:
    """The phase in which a cause occurs, in a run ``last`` seen in another phase.

    A run goes forward: for a single cause, a start phase already passed is ruled out.
    """
    if phase := CAUSED_IN.get(cause.partition(".")[0]):
        return phase
    phase = CAUSED_IN.get(cause, last)
    at = PHASES.index(last) if last in PHASES and last != "unknown" else -1
    return phase if phase not in STARTS or PHASES.index(phase) >= at else last
