"""Where in a job a traceback was raised, told by the functions on the way."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_gkd.diagnosis import log_phases
from pytest_gkd.diagnosis.patterns import Pattern

# How far around a line its traceback is looked for.
BEFORE, AFTER = 60_000, 20_000

# What Ray, vLLM, torchrun and its like put before the lines of a process.
_PROCESS = Pattern(rb"^\s*(?:\([\w.:]+ [^)]{0,80}\)|\[[\w:-]{1,40}\]:?)")
# A frame as Python, rich's boxes and faulthandler print it.
_FRAME = Pattern(
    rb"(?:File \"(?:[^\"\r\n]*[/\\\\])?(?P<file>[^\"\r\n/\\\\]+)\", line \d+,? in"
    rb"|(?:[\w.-]*/)*(?P<boxed>[\w.-]+\.py):\d+ in) (?:\w+\.)*(?P<function>\w+)"
)
_START = Pattern(rb"Traceback \(most recent call last\)")
# Between the traceback of an exception and that of another that came of it.
_CHAINED = Pattern(
    rb"During handling of the above exception|was the direct cause of the following"
)
# An exception's own line, which ends its frames.
_RAISED = Pattern(
    rb"^\W*[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Fault)\b(?:\(\w+\))?(?::|\s*$)"
)

_LIKE = (
    ("weight-sync", Pattern(rb"(?i)(?:sync|push|send|receive|broadcast)_\w*weight")),
    ("checkpoint", Pattern(rb"(?i)(?:save|load|write|restore)_\w*(?:checkpoint|ckpt)")),
    ("teacher", Pattern(rb"(?i)teacher")),
    (
        "generation",
        Pattern(rb"(?i)generate|rollout|sample_\w*(?:token|answer|completion)"),
    ),
    ("training-step", Pattern(rb"(?i)train_?(?:step|batch|epoch)|backward")),
)


def phase_of(text: bytes, at: int) -> str:
    """The phase that the traceback around a place of the text was raised in.

    Of chained exceptions the first counts, since the others came of it. Empty where
    there is no traceback, or none of its functions tells.
    """
    low = max(0, at - BEFORE)
    window = text[low : at + AFTER]
    starts = [match.start() for match in _START.finditer(window, 0, at - low + 1)]
    chain = starts[-1:]
    for before in reversed(starts[:-1]):
        if _CHAINED.search(window, before, chain[0]) is None:
            break
        chain.insert(0, before)
    for told in (log_phases.raised_in, _by_name):
        for start in chain:
            phase = ""
            for function in _functions(window, start):
                phase = told(function) or phase
            if phase:
                return phase
    return ""


def _by_name(function: str) -> str:
    """What the name of a function tells that is the user's own."""
    name = function.partition(":")[2].encode()
    return next((phase for phase, like in _LIKE if like.search(name)), "")


def _functions(text: bytes, start: int) -> Iterator[str]:
    """The functions of the traceback that begins there, as ``file.py:function``.

    The outermost comes first.

    Lines of other processes in between are passed over.
    """
    begin = text.rfind(b"\n", 0, start) + 1
    process = _process(text[begin : begin + 200])
    for line in text[start:].splitlines()[1:]:
        if _process(line) != process:
            continue
        own = line[len(process) :]
        if found := _FRAME.search(own):
            file = (found[b"file"] or found[b"boxed"]).decode("utf-8", "replace")
            yield f"{file}:{found[b'function'].decode()}"
        elif _RAISED.search(own):
            return


def _process(line: bytes) -> bytes:
    found = _PROCESS.search(line)
    return found[0] if found else b""
