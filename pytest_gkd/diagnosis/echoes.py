"""Recognizes what a log only echoes: commands, options, help texts, samples.

Failure words in these say nothing about the run: an option may be named after an error,
a help text may explain one, and a model may write one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from pytest_gkd.diagnosis import prefixes
from pytest_gkd.diagnosis.catalogue import Signature
from pytest_gkd.diagnosis.patterns import Pattern

# How much text before a line may reveal what the line is, in bytes and in lines.
CONTEXT, LINES = 2000, 40

# A shell's echo (set -x, a prompt), and what launchers say they run.
_TRACED = Pattern(rb"^\++ \S|^\$ \S|^[\w.-]+@[\w.-]+:\S*[$#] \S")
_PROGRAM = Pattern(
    rb"^(?:[^:=\r\n]{0,60}\b(?i:cmd|command|running|executing|launching|entrypoint)\b"
    rb"[^:=\r\n]{0,20}[:=] *)?(?:\w+=\S* +)*(?:exec |nohup |sudo )?(?:[\w./-]*/)?"
    rb"(?:python[\d.]*|torchrun|accelerate|deepspeed|ray|vllm|sglang|bash|srun|sbatch"
    rb"|swift|megatron|docker|uv|mpirun) (?:[^:\r\n]* )?"
    rb"(?:--?\w[\w-]*|[^\s:]+\.(?:py|sh))(?: |$)"
)
_ARGV = Pattern(
    rb"\[['\"](?:[\w./-]*/)?(?:python[\d.]*|torchrun|bash|vllm)['\"], "
    rb"|Error executing job with overrides: \["
)
_RESULT = Pattern(rb"\]?['\"]? (?:returned|died|timed out|failed|exits with)")

_USAGE = Pattern(rb"^(?i:usage): ")
_OPTIONS = Pattern(rb"^(?:[\w -]*arguments|(?i:options)|\w[\w ]* options):$")
_OPTION = Pattern(rb"^ +(?:-\w\b|--\w)")

# One option of many: of YAML, of transformers' arguments, of Megatron's list.
_SETTINGS = (
    Pattern(rb"^ *(?:- )?[a-z_][\w./-]*:(?: [^ ].*)?$|^ *- [^ ].*$"),
    Pattern(rb"^ *[a-z_]\w*=.*,$"),
    Pattern(rb"^ *[a-z_]\w* \.{3,} "),
)
_LEAST = 2  # of the lines before one that are options as well
# A tool's name before each of its lines, where an option's would stand once.
_SIGNED = Pattern(rb"^ *[a-z_][\w./-]*: ")
# Keys of values that are reported, not set.
_TELLS = Pattern(
    rb"(?i)^(?:fatal|warning|note|hint|info): |^[\w./-]+: error: "
    rb"|^\W*(?:err(?:ors?)?|level\w*|message|msg|text"
    rb"|detail|reason|state|lastState|status|exitCode|exit_?code|exception|traceback"
    rb"|stack|log|event)\b['\"]?[:=]"
)
_KEY = Pattern(rb"['\"][\w./-]+['\"]: ?")
_WORD = Pattern(rb"\b[a-z_]\w*=(?:['\"\[{(]|None|True|False|[\w./-]+, )")
_RAISED = Pattern(rb"^[\w.]*(?:Error|Exception)(?:\(\w+\))?: ")
_METRICS = Pattern(rb"^\W*['\"](?:loss|reward|eval_|train_|grad_norm|step|epoch)")

_TAG = Pattern(
    rb"^(?:\[INFO:swift\] )?\[(?P<tag>prompt|response|ground_truth|score|INPUT|LABELS"
    rb"|INPUT_IDS|LABELS_IDS|[a-z_]+)\](?: |$)"
)
_SAMPLES = {b"prompt", b"response", b"INPUT", b"LABELS", b"INPUT_IDS", b"LABELS_IDS"}
_CHAT = Pattern(
    rb"<\|im_start\|>(?:system|user|assistant)|<\|start_header_id\|>|<start_of_turn>"
    rb"|<\xef\xbd\x9c(?:User|Assistant)\xef\xbd\x9c>"
)
# Lines at which any prompt or answer has ended.
_ENDS = Pattern(
    rb"^Traceback \(most|^\d{4}-\d\d-\d\d|^(?:INFO|WARNING|ERROR|CRITICAL)\b"
    rb"|^\[\w+:\w+\]"
)
_CLOSED = Pattern(rb"<\|im_end\|>|<\|eot_id\|>|<end_of_turn>")
_FRAME = Pattern(rb"^ *File \"[^\"]*\", line \d+|^\W*[\w./<>-]+:\d+ in [\w.<>]+\W*$")
_BOXED_CODE = Pattern(rb"^\W*\d+ \xe2\x94\x82 ")
_TABLE = tuple(one.encode() for one in ("│ │", "│ ┃", "┃ ┃"))
# A text that is an input, an output, a label, a prediction, in quotes of its language.
_QUOTES = {one[0].encode(): one[1].encode() for one in ("「」", "“”")}
_GIVEN = Pattern(
    "(?:入力|出力|予測|正解|输入|输出|预测|标签|样本)[^ ]{0,6} ?$".encode()
)
# A text beside its label, in quotes.
_LABELLED = Pattern(
    rb"\b(?:gold|pred\w*|label|truth|expected)=\S.{0,200}?"
    rb"\b(?:text|prompt|input|response|completion)=(?P<quote>['\"])"
)
# Every sample, or the lines above it, contains one of these.
_IN_SAMPLE = Pattern(
    rb"\[(?:prompt|response|INPUT|LABELS|INPUT_IDS|LABELS_IDS)\]"
    rb"|<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>|<\xef\xbd\x9c"
    rb"|\b(?:gold|pred\w*|label|truth|expected)=|" + b"|".join((*_TABLE, *_QUOTES))
)


def kind(before: bytes, line: bytes, at: int) -> str:
    """The kind of echo that the text at a byte of a line is; empty if it is none.

    ``command``, ``help``, ``options``, ``sample``, or ``source``: a line of a traceback
    that names a function or shows its code. ``before`` is the text before the line, of
    which the last ``CONTEXT`` bytes count; both are without colours.
    """
    process, own = prefixes.split(line)
    place = at - (len(line) - len(own))
    if place < 0:
        return ""
    before = before[-CONTEXT:]
    above = _Above(before.splitlines()[: -LINES - 1 : -1], process)
    for name, tells in _KINDS.items():
        if name == "sample" and not _IN_SAMPLE.search(before + line):
            continue  # like most lines, and this is called often
        if tells(above, own, place):
            return name
    return ""


@dataclass
class _Above:
    """Those of the lines above that belong to one process, the nearest first.

    Split lazily, since usually only the first few are needed.
    """

    lines: list[bytes]
    process: bytes

    def __iter__(self) -> Iterator[bytes]:
        for line in self.lines:
            of, own = prefixes.split(line)
            if of == self.process:
                yield own.rstrip()


def _command(above: Iterable[bytes], line: bytes, at: int) -> bool:
    lines = [line]
    for one in above:
        if not one.endswith(b"\\"):
            break
        lines.append(one)
    first = lines[-1]
    begun = _TRACED.search(first) is not None or _PROGRAM.search(first) is not None
    if len(lines) == 1 and not begun:
        found = _ARGV.search(line)
        if found is None or found.start() > at:
            return False
        return _RESULT.search(line, found.end(), at) is None
    return begun


def _help(above: Iterable[bytes], line: bytes, at: int) -> bool:
    if _USAGE.search(line):
        return True
    if not line.startswith((b" ", b"\t")):
        return False
    for one in above:
        if one and not one.startswith((b" ", b"\t")):
            return bool(_USAGE.search(one) or _OPTIONS.search(one))
    return False


def _options(above: Iterable[bytes], line: bytes, at: int) -> bool:
    return _in_lines(above, line) or _in_line(line, at)


def _in_lines(above: Iterable[bytes], line: bytes) -> bool:
    """Whether the line is one of many that each set an option."""
    if _TELLS.search(line) or _RAISED.search(line):
        return False
    near = list(itertools.islice(filter(bytes.strip, above), 6))
    signed = _SIGNED.search(line)
    for setting in _SETTINGS:
        goes_on = line.startswith(b"    ") and near and setting.search(near[0])
        if not goes_on and setting.search(line) is None:
            continue
        others = sum(
            setting.search(one) is not None and _TELLS.search(one) is None
            for one in near
            if signed is None or not one.startswith(signed[0])
        )
        if others >= _LEAST:
            return True
    return False


def _in_line(line: bytes, at: int) -> bool:
    """Whether the place is a value in a printed dictionary or object."""
    if _RAISED.search(line) or _METRICS.search(line.lstrip()):
        return False
    keys = [one.start() for one in _KEY.finditer(line, 0, at + 1)]
    if keys and (_within(line, at, b"{}") or not line[: keys[0]].strip(b" {[(")):
        behind = b"{" in line[:at] and not _within(line, at, b"{}")
        return not behind and _sets(line, keys, at)
    words = [one.start() for one in _WORD.finditer(line, 0, at + 1)]
    many = len(words) > _LEAST and _within(line, at, b"()")
    return many and _sets(line, words, at)


def _within(line: bytes, at: int, marks: bytes) -> bool:
    """Whether a bracket opened before the place is still open there."""
    return line.count(marks[:1], 0, at) > line.count(marks[1:], 0, at)


def _sets(line: bytes, keys: list[int], at: int) -> bool:
    """Whether the last key before the place is one that is set, not reported."""
    return _TELLS.search(line[keys[-1] : at + 1]) is None


def _sample(above: Iterable[bytes], line: bytes, at: int) -> bool:
    if line.startswith(_TABLE):
        return True
    if _CHAT.search(line, 0, at) or _is_given(line, at):
        return True
    for one in (line, *above):
        if tag := _TAG.search(one):
            return tag[b"tag"] in _SAMPLES
        if _ENDS.search(one):
            return False
        if one is not line and (_CHAT.search(one) or _CLOSED.search(one)):
            return _CHAT.last(one) > _CLOSED.last(one)
    return False


def _is_given(line: bytes, at: int) -> bool:
    """Whether the place is in quotes behind a word such as input or prediction."""
    labelled = _LABELLED.search(line, 0, at)
    if labelled and line.find(labelled[b"quote"], labelled.end(), at) < 0:
        return True
    for opens, closes in _QUOTES.items():
        begin = line.rfind(opens, 0, at + 1)
        if begin >= 0 and line.find(closes, begin, at) < 0:
            return _GIVEN.search(line[max(0, begin - 30) : begin]) is not None
    return False


def _source(above: Iterable[bytes], line: bytes, at: int) -> bool:
    if _FRAME.search(line) or _BOXED_CODE.search(line):
        return True
    for one in (line, *itertools.islice(above, 6)):
        if not one.startswith(b"    "):
            return one is not line and _FRAME.search(one) is not None
    return False


def of_source(signature: Signature) -> bool:
    """Whether a rule is about source lines: its example is one."""
    if not signature.text:
        return not signature.raised
    for line in signature.example.splitlines():
        _, own = prefixes.split(line.encode())
        shows = _FRAME.search(own) or _BOXED_CODE.search(own) or own.startswith(b"    ")
        if shows and any(text in line for text in signature.text):
            return True
    return False


_KINDS: dict[str, Callable[[Iterable[bytes], bytes, int], bool]] = {
    "command": _command,
    "help": _help,
    "options": _options,
    "sample": _sample,
    "source": _source,
}
