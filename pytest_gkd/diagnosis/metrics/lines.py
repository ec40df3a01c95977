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
- ``Avg generation throughput: 3.2 tokens/s, Running: 3 reqs`` (vLLM, v1/metrics);
- ``iter 3: loss 0.4, time 12.1ms`` (nanoGPT, train.py), ``Loss 0.4 (0.5)``
  (pytorch/examples, imagenet/main.py), ``step 3 | loss 0.4 | norm 1.2 | 12 tok/s``
  (llm.c): a known name and its number without a sign between them;
- a header and its rows, separated by commas, tabs or bars (``Table``).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
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
_RATE = rb"tok(?:en)?s?/s(?:ec)?"
_UNIT = rb" ?(s/it|it/s|[KMGT]i?B|[kKMG]|ms|sec|s|%|" + _RATE + rb"|reqs?|)"
# A name may be Chinese, in UTF-8: these are the bytes.
_NAME = (
    rb"(?<![\w./@-])(?<![\xe4-\xe9][\x80-\xbf]{2})([A-Za-z_\xe4-\xe9][\w./@\x80-\xbf\xe4-\xe9-]{0,80}"
    rb"(?: (?:train|val)(?=:)| ?\([\w /]{1,20}\))?)"
)
_OF_ALL = rb"(?:/ ?\d{1,7}(?:\.\d{1,3})?(?= ?[KMGT]i?B\b))?"  # 31.2/80.0 GiB
_PAIR = re.compile(
    _NAME
    + rb"(?:['\"]? ?(?:[:=]|->|\xef\xbc\x9a) {0,8}|['\"], )['\"\[]?"
    + rb"(?:np\.\w{1,12}\(|tensor\()?"
    + _NUMBER
    + _OF_ALL
    + _UNIT
    + rb"(?![\w./+-]|:\S|\.\w)"
)
_SPACED = re.compile(
    rb"(?<!\()"
    + _NAME
    + rb" {1,9}"
    + _NUMBER
    + _UNIT
    + rb"(?! {1,9}\d|[\w./+-]|[:=]|\.\w)"
)
# ``310 tokens per second``, ``31.5 GB used``, ``0.66it/s``: the number comes first.
_FIRST = re.compile(
    rb"(?<![\w./,:=-])(?<![:=] )"
    + _NUMBER
    + rb" ?(?:()((?:it|steps?|tok(?:en)?s?|samples)(?:/| per )s(?:ec(?:ond)?)?)"
    rb"|([MG]i?B) ((?:gpu |GPU )?(?:memory |mem )?(?:used|allocated|reserved)))\b"
)
# What stands before a name belongs to it: all since a comma, and words that tell one
# metric of a name from another, as in ``train loss: 2.3``.
_BEFORE = re.compile(
    rb"(?:(?:^|[,;:|\t] ?)((?:[A-Za-z][\w.-]{0,20} ){1,4})"
    rb"|((?:\b(?i:train(?:ing)?|val(?:id(?:ation)?)?|eval|test|actor|critic|policy|value"
    rb"|average|avg|mean|total|lm|grad(?:ient)?|learning|step|iter(?:ation)?|peak|gpu"
    rb"|gen|data|reward|entropy|generation|response|completion)\.? ){1,2}))$"
)
LONGEST_BEFORE = 80
# A line with so many colons, or with quotes, has whole names and a sign after each.
MANY = 40
# A longer line is no list of names and numbers without signs.
LONGEST_SPACED = 1000
MOST_PARTS = 100
_WORDS = rb"([A-Za-z][\w ./()-]{0,60}?)"
_SEGMENT = re.compile(
    rb"[^\w]{0,9}" + _WORDS + rb"\.? {0,9}:? {1,20}" + _NUMBER + _UNIT + rb"[^\w]{0,9}"
)
# prime-rl's time of a step has no name, nor have those of llm.c.
_NAMELESS = re.compile(
    rb" {0,20}(\d{1,9}(?:\.\d{0,9})?) ?(s|ms|" + _RATE + rb") {0,20}"
)
# Columns that are set apart by blanks alone.
BLANKS = b"  "
_BOXES = "\u2502".encode(), "\u2503".encode()
BARS = b"|", *_BOXES
# A table's header has at least so many columns, and at most so many bytes.
FEWEST_COLUMNS = 3
MOST_OF_HEADER = 2000
_COLUMN_WORD = rb"[A-Za-z_(\[%](?!an\b|nf\b)[\w./@()\[\]%-]{0,40}"
_COLUMN = re.compile(_COLUMN_WORD + rb"(?: (?:/|" + _COLUMN_WORD + rb")){0,4}")
_RULE = re.compile(r"[|+:=\-\s\u2500-\u257f]{3,400}")
_STEPS = re.compile(rb"(?i)(?:(?:global|current|training)_?)?(?:steps?|iter(?:ation)?)")
_ORDERS = re.compile(rb"(?i)time(?:stamp)?|date|epoch")
_ONLY_NUMBER = re.compile(_NUMBER + _UNIT)
# Of a part between bars that is no metric: ``iter 3 step 1``.
_WITH_NUMBER = re.compile(rb"[A-Za-z]\w* \d")
_BAR_OF_TABLE = rb"(?:[|]|\xe2\x94[\x82\x83])"
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
# The engine's own metrics as it serves them, and what nvidia-smi prints without a name.
_SERVED = re.compile(
    rb"^([a-zA-Z_]\w{0,30}:\w{1,80})\{[^}]{0,200}\} " + _NUMBER + rb"()\s*$"
)
_USED = re.compile(rb"(\d{1,7})(MiB) / {1,9}\d{1,7}MiB")
_ENGINE = re.compile(
    rb"(Avg (?:prompt|generation) throughput|Running|Waiting|GPU KV cache usage): "
    + _NUMBER
    + _UNIT
)
_COLOUR = re.compile(rb"\x1b\[[\d;]{0,20}[A-Za-z]")
_STEP = re.compile(
    rb"(?i)(?<![\w/.-])['\"]?(?:train(?:ing)?/)?(?:global[_ ]?steps?|iteration|iter"
    rb"|steps?|" + "schritt|passo|paso|(?:e|é)tape|步|ステップ".encode() + rb"|rollout"
    rb"|num_updates|\[batch|epoch=\d{1,9}/micro_step=\d{1,9}/global_step|global_step/max_steps)"
    rb"['\"]? {0,9}[:=]? {0,9}'?(\d{1,9})(?: ?/ {0,9}(\d{1,9}))?(?![\w.]\d|\w)"
)
_BAR = re.compile(
    rb"(?<![\w/])(\d{1,9})/(\d{1,9}) \[\d[\d:]{0,12}<"
    rb"(?:[\d:?]{1,12}|\d{1,5} days?,[^,\]]{0,12}), {0,4}"
    rb"(\d{1,9}(?:\.\d{0,9})?|\?) ?(s/it|it/s)"
)
# A bar with a title of its own counts prompts, files or shards.
_OTHER_BAR = re.compile(rb"[A-Za-z][^|%\r\n]{2,80}: {0,4}\d{1,3}%")
_TRAINING_BAR = re.compile(rb"(?i)train|epoch|step|iter|loss")
_EPOCH = re.compile(rb"\bEpoch (\d{1,6}):")
_TIMES = {b"s", b"ms", b"sec"}
_TIMED = {"step time", "part of the step", "other"}
# How verl before 0.5 printed a learning rate of 1e-6 (utils/logger: ``{v:.3f}``).
_ROUNDED = re.compile(rb"-?0\.0{2,4}")
_NAMED_UNIT = re.compile(rb"(?i)(?:[\[( ]|_)(ms|[kmgt]i?b)[\])]?$|^(gb)_")
# These print MB or GB after dividing by 1024 (verl, workers/engine_workers.py;
# DeepSpeed, utils/timer.py; Megatron-LM, training/utils.py).
_SCALES = {b"ms": 1e-3, b"%": 0.01, b"k": 1e3, b"K": 1e3, b"M": 1e6, b"G": 2.0**30}
_SCALES |= {
    letter + unit: 2.0**power
    for letter, power in ((b"K", 10), (b"M", 20), (b"G", 30), (b"T", 40))
    for unit in (b"B", b"iB")
}
_SCALES |= {unit.lower(): scale for unit, scale in _SCALES.items()}


@dataclass(frozen=True)
class Reading:
    """The numbers of one line by their printed names; ``step`` if it states one.

    Times are in seconds and sizes in bytes if the line names the unit. ``total`` is the
    planned number of steps. ``loose`` says that the line may be of one thing of many,
    not of a time: a row of a table that counts no steps, a layer, a sample.
    """

    values: dict[str, float]
    step: int | None = None
    total: int | None = None
    loose: bool = False


_OF_EACH = re.compile(
    rb"(?i)\b(?:layer|sample|prompt|example|module|block|category|task|context|answer"
    rb"|request|document|row|item)s?[ #:=_-]{1,2}\d"
)


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
    for name, number, unit in _numbers(line, bar is not None, where is not None)[
        :MOST_NUMBERS
    ]:
        told = name.decode("utf-8", "replace").strip()
        what = role(told)
        if unit in _TIMES and what not in _TIMED:
            continue  # the time that a reward takes
        if _ROUNDED.fullmatch(number) is None or what != "learning rate":
            values.setdefault(told, _value(name, number, unit))
    loose = step is None and _OF_EACH.search(line[:200]) is not None
    return Reading(values, step, total, loose)


@dataclass(frozen=True)
class Table:
    """The columns of a table whose header was printed: comma, tab or bar between them.

    As a logger of CSV, a notebook, ``nvidia-smi --format=csv`` and Markdown have them.
    """

    names: tuple[str, ...]
    separator: bytes

    @classmethod
    def of(cls, header: bytes) -> Table | None:
        """The table that this line begins, if at least two metrics are its columns."""
        if len(header) > MOST_OF_HEADER:
            return None
        for separator in (b",", b"\t", *BARS, BLANKS):
            cells = _cells(header, separator)
            if len(cells) < FEWEST_COLUMNS or not all(map(_COLUMN.fullmatch, cells)):
                continue
            names = tuple(cell.decode() for cell in cells)
            known = {role(name) for name in names} - {"other"}
            ordered = any(
                _STEPS.fullmatch(cell) or _ORDERS.fullmatch(cell) for cell in cells
            )
            if len(known) + ordered > 1 and known:
                return cls(names, separator)
        return None

    def row(self, line: bytes) -> Reading | None:
        """The numbers of a row, an empty reading of a rule, None of any other line."""
        if _RULE.fullmatch(line.decode("utf-8", "replace").strip()):
            return Reading({})
        cells = _cells(line, self.separator)
        if self.separator == BLANKS and len(cells) == 1 + len(self.names):
            cells = cells[1:]  # pandas' index
        if len(cells) != len(self.names):
            return None
        found = [_ONLY_NUMBER.fullmatch(cell) for cell in cells]
        words = sum(1 for cell in cells if cell) - sum(map(bool, found))
        if 2 * words > len(cells):
            return None
        step = None
        values = {}
        for name, number in zip(self.names, found, strict=True):
            if number is None:
                continue
            if _STEPS.fullmatch(name.encode()) and number[1].isdigit():
                step = int(number[1])
            else:
                values[name] = _value(name.encode(), number[1], number[2])
        return Reading(values, step, loose=step is None)


def _cells(line: bytes, separator: bytes) -> list[bytes]:
    parts = line.strip().split(separator) if separator == BLANKS else None
    cells = [cell.strip(b" \r") for cell in parts or line.split(separator)]
    if parts:
        return [cell for cell in cells if cell]
    return cells[1:-1] if separator in BARS else cells


def _other(line: bytes) -> bool:
    title = _OTHER_BAR.search(line)
    return title is not None and _TRAINING_BAR.search(title[0]) is None


def _numbers(line: bytes, bar: bool, stepped: bool) -> list[tuple[bytes, bytes, bytes]]:
    """Names, numbers and units."""
    if _BULLET_MARK in line and (bullets := _BULLET.findall(line)):
        return bullets
    if b" throughput: " in line and (of_engine := _ENGINE.findall(line)):
        return of_engine
    if served := _SERVED.findall(line):
        return served
    if b"MiB / " in line and (used := _USED.search(line)):
        return [(b"memory.used", used[1], used[2])]
    bars = line.count(b"|")
    if (bars > 2 or any(box in line for box in _BOXES)) and (
        cells := _CELL.findall(line)
    ):
        return cells
    if bars > 1 and not bar:
        found = [one for part in line.split(b"|", MOST_PARTS) for one in _part(part)]
        if found:
            return found
    return _pairs(line, stepped=stepped, bar=bar)


def _part(part: bytes) -> list[tuple[bytes, bytes, bytes]]:
    """What stands between two bars."""
    whole = _SEGMENT.fullmatch(part)
    if whole and not _WITH_NUMBER.search(whole[1]):
        return [(whole[1], whole[2], whole[3])]
    if nameless := _NAMELESS.fullmatch(part):
        number, unit = nameless[1], nameless[2]
        return [(b"step_time" if unit in (b"s", b"ms") else unit, number, unit)]
    return _pairs(part, enough=1)


def _pairs(
    text: bytes, enough: int = 2, *, stepped: bool = False, bar: bool = False
) -> list[tuple[bytes, bytes, bytes]]:
    """Names with a sign after them, and, if ``enough`` are known, those without one.

    A single one may be part of a sentence, if it is not the end of a step's line.
    """
    quoted = b"': " in text or b'": ' in text
    if quoted or text.count(b":") > MANY or len(text) > LONGEST_SPACED * 10:
        return _PAIR.findall(text)
    signed = _whole(_PAIR.finditer(text), text)
    if len(text) > LONGEST_SPACED:
        return signed
    spaced = [
        one for one in _whole(_SPACED.finditer(text), text) if _known(one[0]) != "other"
    ]
    known = [*spaced]
    if not bar:
        known += [
            (rate or b"memory " + of, number, unit)
            for number, _, rate, unit, of in _FIRST.findall(text)
        ]
    others = any(_known(name) != "other" for name, _, _ in signed)
    if spaced and stepped and text.rstrip().endswith(spaced[-1][1] + spaced[-1][2]):
        enough = 1
    return signed + known if len(known) + others >= enough else signed


def _whole(
    found: Iterable[re.Match[bytes]], text: bytes
) -> list[tuple[bytes, bytes, bytes]]:
    """The names with the words before them."""
    every, end = [], 0
    for one in found:
        start = one.start()
        before = _BEFORE.search(text, max(end, start - LONGEST_BEFORE), start)
        name = (before[1] or before[2]) + one[1] if before else one[1]
        every.append((name, one[2], one[3]))
        end = one.end()
    return every


def _known(name: bytes) -> str:
    return role(name.decode("utf-8", "replace").strip())


def names_unit(name: str) -> bool:
    """Whether a name has the unit of its values, which are in bytes or seconds then."""
    return _unit_of(name.encode()) != b""


@functools.lru_cache(maxsize=4096)
def _unit_of(name: bytes) -> bytes:
    named = _NAMED_UNIT.search(name)
    return (named[1] or named[2]).lower() if named else b""


def _value(name: bytes, number: bytes, unit: bytes) -> float:
    scale = _SCALES.get(unit or _unit_of(name), 1.0)
    return float(number.replace(b",", b"")) * scale
