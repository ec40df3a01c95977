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

from dataclasses import dataclass

from pytest_gkd.diagnosis.patterns import Match, Pattern
from pytest_gkd.diagnosis.scan import plain

# Longer lines hold data, not metrics; verl prints some 150 numbers in 6 KB.
LONGEST = 1 << 15
MOST_NUMBERS = 500

_NUMBER = (
    rb"(?P<number>[-+]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.?\d*(?:[eE][-+]?\d+)?"
    rb"|\.\d+(?:[eE][-+]?\d+)?|nan|NaN|NAN|inf|Inf|INF|[Ii]nfinity))"
)
_UNIT = rb" ?(?P<unit>s/it|it/s|[KMGT]i?B|ms|sec|s|%|tok(?:en)?s/s|reqs?)?"
_PAIR = Pattern(
    rb"(?P<name>[A-Za-z_][\w./@-]*(?: ?\([\w /]+\))?)['\"]? ?[:=] ?"
    rb"['\"\[]?(?:np\.\w+\(|tensor\()?" + _NUMBER + _UNIT + rb"(?:[^\w./:+-]|\.?$|[.] )"
)
_SEGMENT = Pattern(
    rb"^\W*(?P<name>[A-Za-z][\w ./()-]{0,60}?)\.? *:? +" + _NUMBER + _UNIT + rb"\W*$"
)
_CELL = Pattern(
    rb"(?:[|\x82\x83]) *(?P<name>[A-Za-z][\w./@ -]{0,80}?) *(?:\||\xe2\x94[\x82\x83]) *"
    + _NUMBER
    + rb" *(?:\||\xe2\x94[\x82\x83])"
)
_BULLET = Pattern(
    rb"^\W*\xe2\x80\xa2 *(?P<name>[A-Za-z][\w ./-]{0,60}?): *" + _NUMBER + _UNIT
)
_ENGINE = Pattern(
    rb"(?P<name>Avg (?:prompt|generation) throughput|Running|Waiting"
    rb"|GPU KV cache usage): " + _NUMBER + _UNIT
)
_STEP = Pattern(
    rb"(?i)(?:^|[^\w/.-])['\"]?(?:train(?:ing)?/)?"
    rb"(?:global[_ ]?steps?|iteration|iter|steps?|rollout|epoch=\d+/micro_step=\d+/"
    rb"global_step|global_step/max_steps)['\"]? {0,9}[:=]? {0,9}'?(?P<step>\d{1,9})"
    rb"(?: ?/ {0,9}(?P<total>\d{1,9}))?(?:[^\w.]|$)"
)
_BAR = Pattern(
    rb"(?:^|\||\s)(?P<step>\d{1,9})/(?P<total>\d{1,9}) "
    rb"\[\d[\d:]*<(?:[\d:?]+|\d+ days?,[^,\]]*), *"
    rb"(?P<number>[\d.]+|\?) ?(?P<unit>s/it|it/s)"
)
# A bar with a title of its own counts prompts, files or shards.
_OTHER_BAR = Pattern(
    rb"[A-Za-z][^|%\r\n]{2,80}: *\d+%", unless=rb"(?i)train|epoch|step|iter"
)
_NAMED_UNIT = Pattern(rb"\((ms|[KMGT]i?B)\)$|_(gb|ms)$")
_SCALES = {b"ms": 1e-3, b"KB": 1e3, b"MB": 1e6, b"GB": 1e9, b"TB": 1e12, b"KiB": 2**10}
_SCALES |= {b"MiB": 2**20, b"GiB": 2**30, b"TiB": 2**40, b"%": 0.01}


@dataclass(frozen=True)
class Reading:
    """The numbers of one line by their names as printed; ``step`` where it tells one.

    Times are in seconds and sizes in bytes where the line names the unit. ``total`` is
    the number of steps that the run is to make.
    """

    values: dict[str, float]
    step: int | None = None
    total: int | None = None


def read(line: bytes) -> Reading:
    """The numbers in a line; without any the reading is empty.

    A line that only says which step begins gives a step and no values.
    """
    line = plain(line[:LONGEST])
    bar = _BAR.search(line)
    where = _STEP.search(line) if bar is None or _OTHER_BAR.search(line) else bar
    step = int(where[b"step"]) if where else None
    total = int(where[b"total"]) if where and where[b"total"] else None
    values: dict[str, float] = {}
    if bar is not None and bar[b"number"] != b"?":
        pace = float(bar[b"number"])
        values["s/it"] = pace if bar[b"unit"] == b"s/it" else 1 / pace if pace else 0.0
    for match in _matches(line):
        if len(values) < MOST_NUMBERS:
            values.setdefault(match[b"name"].decode().strip(), _value(match))
    return Reading(values, step, total)


def _matches(line: bytes) -> list[Match]:
    if b"\xe2\x80\xa2" in line:
        return list(_BULLET.finditer(line))
    if b"throughput: " in line:
        return list(_ENGINE.finditer(line))
    if cells := list(_CELL.finditer(line)):
        return cells
    found = list(_PAIR.finditer(line))
    if line.count(b"|") > 1 and _BAR.search(line) is None:
        parts = (_SEGMENT.search(part) for part in line.split(b"|"))
        found = [one for one in parts if one is not None] + found
    return found


def _value(match: Match) -> float:
    number = float(match[b"number"].replace(b",", b""))
    unit = match.groupdict().get(b"unit")
    if not unit and (named := _NAMED_UNIT.search(match[b"name"])):
        unit = next(filter(None, named.groups())).replace(b"gb", b"GB")
    return number * _SCALES.get(unit or b"", 1.0)
