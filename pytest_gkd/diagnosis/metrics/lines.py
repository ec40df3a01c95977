"""Reads the numbers in a line of metrics, in whichever form a framework prints them.

The forms, each from its own logging call:

- ``step:3 - actor/loss:0.4 - timing_s/gen:1.2`` (verl,
  utils/logger/aggregate_logger.py);
- ``{'loss': 0.4, 'grad_norm': '1.2'}`` (transformers 4 and 5, trainer_callback.py; TRL,
  ms-swift), ``step 3: {'train/loss': 0.4}`` (slime), ``Global step 3: {...}``
  (OpenRLHF), and JSON lines;
- ``iteration 3/ 100 | lm loss: 4.0E-01 | ...`` (Megatron-LM, training/training.py) and
  ``Step 3 | 1.2s | Loss 0.4 | ...`` (prime-rl, trainer/rl/train.py);
- ``step=3, skipped=0, lr=[1e-06]`` and ``steps: 3 loss: 0.4`` (DeepSpeed, runtime/);
- ``3/100 [00:12<06:30, 4.02s/it, loss=0.4]`` (tqdm);
- ``  • Loss: 0.4`` below ``Step 3/100`` (NeMo-RL, algorithms/grpo.py);
- ``│ ppo_actor/loss/avg │ 4.0e-01 │`` (AReaL, utils/printing.py);
- ``Avg generation throughput: 3.2 tokens/s, Running: 3 reqs`` (vLLM, v1/metrics).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pytest_gkd.diagnosis.metrics.roles import role

# Longer lines hold data, not metrics; verl prints some 150 numbers in 6 KB.
LONGEST = 1 << 15
MOST_NUMBERS = 500

# Python's re, because it is ten times as fast here as RE2's wrapper; every repetition
# is bounded, so its time grows linearly with the line.
_NUMBER = (
    rb"([-+]?(?:\d{1,3}(?:,\d{3}){1,4}(?:\.\d{1,20})?|\d{1,20}\.?\d{0,20}(?:[eE][-+]?"
    rb"\d{1,3})?|\.\d{1,20}|nan|NaN|NAN|inf|Inf|INF|[Ii]nfinity))"
    rb"(?:(?<=nan)\.0)?"  # as tqdm's bars of Lightning write it
)
_UNIT = rb" ?(s/it|it/s|[KMGT]i?B|ms|sec|s|%|tok(?:en)?s/s|reqs?|)"
_NAME = rb"(?<![\w./@-])([A-Za-z_][\w./@-]{0,80}(?: ?\([\w /]{1,20}\))?)"
_PAIR = re.compile(
    _NAME
    + rb"['\"]? ?[:=] ?['\"\[]?(?:np\.\w{1,12}\(|tensor\()?"
    + _NUMBER
    + _UNIT
    + rb"(?![\w./:+-]|\.\w)"
)
_WORDS = rb"([A-Za-z][\w ./()-]{0,60}?)"
_SEGMENT = re.compile(
    rb"[^\w]{0,9}" + _WORDS + rb"\.? {0,9}:? {1,20}" + _NUMBER + _UNIT + rb"[^\w]{0,9}"
)
# prime-rl's time of a step has no name.
_SECONDS = re.compile(rb" {0,20}(\d{1,9}\.\d{0,9})s {0,20}")
_BOX = "\u2502".encode()
_BAR_OF_TABLE = rb"(?:[|]|\xe2\x94\x82)"
_CELL = re.compile(
    b"(?="
    + _BAR_OF_TABLE
    + rb" {0,40}([A-Za-z][\w ./@-]{0,80}?) {0,40}"
    + _BAR_OF_TABLE
    + rb" {0,20}"
    + _NUMBER
    + rb"() {0,40}"
    + _BAR_OF_TABLE
    + b")"
)
_BULLET_MARK = "\u2022".encode()
_BULLET = re.compile(_BULLET_MARK + rb" {0,9}" + _WORDS + rb": {0,9}" + _NUMBER + _UNIT)
_ENGINE = re.compile(
    rb"(Avg (?:prompt|generation) throughput|Running|Waiting|GPU KV cache usage): "
    + _NUMBER
    + _UNIT
)
_COLOUR = re.compile(rb"\x1b\[[\d;]{0,20}[A-Za-z]")
_STEP = re.compile(
    rb"(?i)(?<![\w/.-])['\"]?(?:train(?:ing)?/)?(?:global[_ ]?steps?|iteration|iter"
    rb"|steps?|rollout|epoch=\d{1,9}/micro_step=\d{1,9}/global_step|global_step/max_steps)"
    rb"['\"]? {0,9}[:=]? {0,9}'?(\d{1,9})(?: ?/ {0,9}(\d{1,9}))?(?![\w.]\d|\w)"
)
_BAR = re.compile(
    rb"(?<![\w/])(\d{1,9})/(\d{1,9}) \[\d[\d:]{0,12}<"
    rb"(?:[\d:?]{1,12}|\d{1,5} days?,[^,\]]{0,12}), {0,4}"
    rb"(\d{1,9}(?:\.\d{0,9})?|\?) ?(s/it|it/s)"
)
# A bar with a title of its own counts prompts, files or shards.
_OTHER_BAR = re.compile(rb"[A-Za-z][^|%\r\n]{2,80}: {0,4}\d{1,3}%")
_TRAINING_BAR = re.compile(rb"(?i)train|epoch|step|iter")
_EPOCH = re.compile(rb"\bEpoch (\d{1,6}):")
# How verl before 0.5 printed a learning rate of 1e-6 (utils/logger: ``{v:.3f}``).
_ROUNDED = re.compile(rb"-?0\.0{2,4}")
_NAMED_UNIT = re.compile(rb"\((ms|[KMGT]i?B)\)$|_(gb|ms)$")
# These print MB or GB after dividing by 1024 (verl, workers/engine_workers.py;
# DeepSpeed, utils/timer.py; Megatron-LM, training/utils.py).
_SCALES = {b"ms": 1e-3, b"%": 0.01, b"gb": 2.0**30}
_SCALES |= {
    letter + unit: 2.0**power
    for letter, power in ((b"K", 10), (b"M", 20), (b"G", 30), (b"T", 40))
    for unit in (b"B", b"iB")
}


@dataclass(frozen=True)
class Reading:
    """The numbers of one line by their printed names; ``step`` if it states one.

    Times are in seconds and sizes in bytes if the line names the unit. ``total`` is the
    planned number of steps.
    """

    values: dict[str, float]
    step: int | None = None
    total: int | None = None


def read(line: bytes) -> Reading:
    """The numbers in a line; if there are none, the reading is empty.

    A line that only announces a step gives a step and no values.
    """
    line = line[:LONGEST]
    if b"\x1b" in line:
        line = _COLOUR.sub(b"", line)
    bar = _BAR.search(line)
    if bar is not None and _other(line):
        return Reading({})
    where = bar or _STEP.search(line)
    step = int(where[1]) if where else None
    total = int(where[2]) if where and where[2] else None
    if bar is not None and (epoch := _EPOCH.search(line, 0, bar.start())):
        # Such a bar restarts in each epoch.
        step, total = int(bar[1]) + int(epoch[1]) * int(bar[2]), None
    values: dict[str, float] = {}
    if bar is not None and bar[3] != b"?":
        pace = float(bar[3])
        values["s/it"] = pace if bar[4] == b"s/it" else 1 / pace if pace else 0.0
    for name, number, unit in _numbers(line, bar is not None)[:MOST_NUMBERS]:
        told = name.decode().strip()
        if _ROUNDED.fullmatch(number) is None or role(told) != "learning rate":
            values.setdefault(told, _value(name, number, unit))
    return Reading(values, step, total)


def _other(line: bytes) -> bool:
    title = _OTHER_BAR.search(line)
    return title is not None and _TRAINING_BAR.search(title[0]) is None


def _numbers(line: bytes, bar: bool) -> list[tuple[bytes, bytes, bytes]]:
    """Names, numbers and units."""
    if _BULLET_MARK in line:
        return _BULLET.findall(line)
    if b"throughput: " in line:
        return _ENGINE.findall(line)
    if (_BOX in line or line.count(b"|") > 2) and (cells := _CELL.findall(line)):
        return cells
    if line.count(b"|") > 1 and not bar:
        parts = [_SEGMENT.fullmatch(part) for part in line.split(b"|")]
        if found := [(part[1], part[2], part[3]) for part in parts if part]:
            timed = [_SECONDS.fullmatch(part) for part in line.split(b"|")]
            return found + [(b"step_time", part[1], b"") for part in timed if part]
    return _PAIR.findall(line)


def _value(name: bytes, number: bytes, unit: bytes) -> float:
    if not unit and (named := _NAMED_UNIT.search(name)):
        unit = named[1] or named[2]
    return float(number.replace(b",", b"")) * _SCALES.get(unit, 1.0)
