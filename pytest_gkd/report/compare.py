"""Compares a run with an earlier one, or with those that were kept beside it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Any

from pytest_gkd import sanitize
from pytest_gkd.diagnosis.metrics.statistics import deviation
from pytest_gkd.language import marked, tr
from pytest_gkd.report import history
from pytest_gkd.report.record import OUTCOMES, PASSED, REPORT, RUNS, SCHEMA, SKIPPED

# How much longer a stage takes, or how far a number moves, before it is told: a busy
# machine alone makes a smaller difference.
CHANGED = 1.5
LEAST_S = 1.0
# Against the history: so many like runs, at least, and how many times as slow, or as
# little bandwidth, is worse. What lies within three standard deviations is usual.
LIKE, LEAST_LIKE = 10, 3
TWICE = 2.0
SPREAD = 3.0
SECONDS = marked("seconds")  # what a change of a stage's time is of
COMMIT = marked("commit")
TABLES = (marked("machine"), marked("versions"), marked("settings"))
LARGEST_BYTES = 64 << 20
LINE_CHARS = 300
SCHEMA_FILE = "report.schema.json"
# Where earlier runs are kept, as seen from a report (see run.report_directory).
KEPT = (RUNS, f"../{RUNS}")
# Of the settings, what says why another one was chosen.
_WHY = ("origins",)


class ReportError(LookupError):
    """There is no report where one was named; the text says where and why."""


@dataclass(frozen=True)
class Report:
    """A report.json: where it was and what it says, with sanitized texts."""

    name: str
    data: Mapping[str, Any]

    @property
    def stages(self) -> dict[str, Mapping[str, Any]]:
        return {str(stage.get("name")): stage for stage in self.data["stages"]}


@dataclass(frozen=True)
class Change:
    """What differs in ``where``, such as a stage or ``versions``.

    ``worse`` says that a gate should stop for it: a stage that passed before does not,
    or takes longer, or has half the bandwidth that is usual.
    """

    where: str
    what: str
    before: Any
    after: Any
    ratio: float | None = None
    worse: bool = False


@dataclass(frozen=True)
class Comparison:
    """``after`` against ``before``, the latest first; times against their median.

    ``like`` is how many like runs of the history were at hand, 10 at most.
    """

    after: Report
    before: Sequence[Report]
    changes: Sequence[Change] = field(default_factory=list)
    like: int = 0

    @property
    def worse(self) -> bool:
        return any(change.worse for change in self.changes)

    def to_json(self) -> dict[str, Any]:
        """The comparison for programs, schema 1."""
        return {
            "schema": 1,
            "report": self.after.name,
            "before": [one.name for one in self.before],
            "like_runs": self.like,
            "worse": self.worse,
            "changes": [vars(change) for change in self.changes],
        }


def read(path: Path, *, checked: bool = True) -> Report:
    """The report in a directory, or of that name, held against the schema if it is to
    be ``checked``. Raises ReportError."""
    file = path / REPORT if path.is_dir() else path
    name = sanitize.line(str(path))
    try:
        if not file.is_file():
            why = (
                tr("{file} is not a file; a run writes it")
                if file.exists()
                else tr("{file} does not exist; a run writes it")
            )
            raise ReportError(why.format(file=sanitize.line(str(file))))
        if file.stat().st_size > LARGEST_BYTES:
            large = tr("{report}: larger than any report ({number} bytes)")
            raise ReportError(large.format(report=name, number=LARGEST_BYTES))
        found = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or sanitize.line(str(error))
        cannot = tr("{report}: cannot be read: {why}")
        raise ReportError(cannot.format(report=name, why=why)) from None
    schema = found.get("schema") if isinstance(found, dict) else None
    if isinstance(schema, int) and schema != SCHEMA:
        other = tr("{report}: has schema {number}; this release reads {ours}")
        raise ReportError(other.format(report=name, number=schema, ours=SCHEMA))
    if checked and (wrong := _wrong(found)):
        told = sanitize.line(wrong)[:LINE_CHARS]
        wrong = tr("{report}: not a report of pytest --gkd-stages: {why}")
        raise ReportError(wrong.format(report=name, why=told))
    return Report(name, sanitize.data(found))


def _wrong(found: Any) -> str:
    """What breaks the schema of a report, with its place; empty if nothing does."""
    # Imported only here: nothing else needs it.
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match

    text = resources.files(__package__).joinpath(SCHEMA_FILE).read_text("utf-8")
    error = best_match(Draft202012Validator(json.loads(text)).iter_errors(found))
    return "" if error is None else f"{error.json_path}: {error.message}"


def kept(path: Path) -> list[Report]:
    """The earlier runs that are kept beside a report, the latest first."""
    folder = path if path.is_dir() else path.parent
    return list(earlier(folder, str(read(path).data.get("started"))))


def earlier(folder: Path, started: str, *, checked: bool = True) -> Iterator[Report]:
    """The same of the report in ``folder``, of a run that ``started`` then, as read.

    Unless they are ``checked``, only those should be asked for that nobody else can
    have written to.
    """
    places = ((folder / place).glob(f"*/{REPORT}") for place in KEPT)
    found = {str(one.parent.resolve()): one.parent for one in chain(*places)}
    for name in sorted(found, reverse=True):
        try:
            report = read(found[name], checked=checked)
        except ReportError:
            continue  # one that was cut off: the others serve
        if report.data.get("started") != started:
            yield report


def compare(
    after: Report,
    before: Sequence[Report],
    runs: Sequence[Mapping[str, Any]] = (),
) -> Comparison:
    """What changed from ``before``, one run or several of them, the latest first.

    Where the history's ``runs`` have enough that are like it, times and bandwidth are
    held against those instead.
    """
    known = history.like(after.data, runs)
    last = usual(after, known)
    changes = [
        *_outcomes(after, before),
        *_drift(after, last),
        *_numbers(after, before, last.keys()),
        *_commit(after, before[:1]),
        *chain(*(_named(table, after, before[:1]) for table in TABLES)),
    ]
    return Comparison(after, before, changes, min(len(known), LIKE))


def text(found: Comparison) -> str:
    """The comparison for a person."""
    than = [found.before[0].name] if found.before else []
    if len(found.before) > 1:
        kept = tr("the {number} runs kept beside it")
        than = [kept.format(number=len(found.before))]
    if found.like >= LEAST_LIKE:
        than.append(tr("the last {number} runs like it").format(number=found.like))
    against = tr("{report} against {others}")
    head = against.format(report=found.after.name, others=tr(" and ").join(than))
    if found.like >= LEAST_LIKE:
        head += tr(", times and bandwidth against the median of these")
    elif len(found.before) > 1:
        head += tr(", times against their median")
    if not than:
        few = tr(
            "{report}: {number} earlier run(s) like it in the history; {least} are "
            "needed to judge"
        )
        head = few.format(report=found.after.name, number=found.like, least=LEAST_LIKE)
    lines = [told(one) for one in found.changes] or [tr("no difference that counts")]
    return "\n".join([head, *(f"  {line}" for line in lines)])


def told(change: Change) -> str:
    """A change in one line."""
    ratio = "" if change.ratio is None else f"{change.ratio:.2g}"
    factor = tr(" ({number} times)").format(number=ratio) if ratio else ""
    mark = tr("WORSE ") if change.worse else ""
    what = f"{tr(change.where)} {tr(change.what)}".strip()
    values = f"{_shown(change.before)} -> {_shown(change.after)}"
    return f"{mark}{what}{tr(': ')}{values}{factor}"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if value is None:
        return tr("none")
    outcome, bracket, cause = str(value).partition(" [")
    if outcome in OUTCOMES:
        return sanitize.line(f"{tr(outcome)}{bracket}{cause}")
    return sanitize.line(str(value))[:120]


def _outcomes(after: Report, before: Sequence[Report]) -> Iterator[Change]:
    for name, stage in after.stages.items():
        earlier = [run.stages[name] for run in before if name in run.stages]
        if not earlier or earlier[0].get("outcome") == stage.get("outcome"):
            continue
        passed = earlier[0].get("outcome") == PASSED
        worse = passed and stage.get("outcome") not in (PASSED, SKIPPED)
        cause = (stage.get("diagnosis") or {}).get("cause")
        now = f"{stage.get('outcome')} [{cause}]" if cause else stage.get("outcome")
        yield Change(name, "", earlier[0].get("outcome"), now, worse=worse)


def usual(
    after: Report, known: Sequence[Mapping[str, Any]]
) -> dict[tuple[str, str], list[float]]:
    """By stage and number, its values in the last of the runs that are ``known`` to be
    like it; of a stage's time the number is "", of a bandwidth as the fact and size.

    Of fewer than three runs nothing is usual.
    """
    found: dict[tuple[str, str], list[float]] = {}
    for name in after.stages:
        for stage in history.passed(name, known, LIKE):
            for what, value in _measured(stage):
                found.setdefault((name, what), []).append(value)
    return {key: values for key, values in found.items() if len(values) >= LEAST_LIKE}


def _drift(
    after: Report, last: Mapping[tuple[str, str], Sequence[float]]
) -> Iterator[Change]:
    """Times and bandwidth that are not what they were in the last like runs.

    Of the bandwidths the best one is judged: small messages measure latency.
    """
    for name, stage in after.stages.items():
        if stage.get("outcome") != PASSED:
            continue
        measured = dict(_measured(stage))
        sizes = {k: v for k, v in measured.items() if k.startswith(history.BANDWIDTH)}
        best = max(sizes, key=lambda size: sizes[size], default="")
        for what, now in measured.items():
            values = last.get((name, what))
            if not values:
                continue
            then = statistics.median(values)
            apart = abs(now - then)
            is_time = what not in sizes
            if apart < SPREAD * deviation(values) or (is_time and apart < LEAST_S):
                continue
            ratio = now / then if then > 0 and now > 0 else None
            if ratio is None or 1 / CHANGED < ratio < CHANGED:
                continue
            slower = ratio >= TWICE if is_time else ratio <= 1 / TWICE
            worse = slower and (is_time or what == best)
            yield Change(name, what or SECONDS, then, now, ratio, worse)


def _numbers(
    after: Report, before: Sequence[Report], besides: Container[tuple[str, str]]
) -> Iterator[Change]:
    """Times and measured numbers of stages that passed then and now."""
    for name, stage in after.stages.items():
        if stage.get("outcome") != PASSED:
            continue
        known = [dict(_measured(one)) for one in _passed(name, before)]
        for what, now in _measured(stage):
            if (name, what) in besides:
                continue
            values = [one[what] for one in known if what in one]
            if not values:
                continue
            then = statistics.median(values)
            in_seconds = what == "" or what.endswith("_s")
            if in_seconds and abs(now - then) < LEAST_S:
                continue
            ratio = now / then if then > 0 and now > 0 else None
            if ratio is None or 1 / CHANGED < ratio < CHANGED:
                continue
            slower = what == "" and ratio > 1 and now > max(values)
            yield Change(name, what or SECONDS, then, now, ratio, slower)


def _passed(name: str, runs: Iterable[Report]) -> Iterator[Mapping[str, Any]]:
    for run in runs:
        stage = run.stages.get(name, {})
        if stage.get("outcome") == PASSED:
            yield stage


def _measured(stage: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """A stage's time, under "", and the numbers among its facts, by name."""
    waiting: list[tuple[str, Any]] = [("", stage.get("duration_s"))]
    if bandwidth := stage.get(history.BANDWIDTH):  # as the history has it
        waiting.append((history.BANDWIDTH, bandwidth))
    facts = stage.get("facts")
    waiting += facts.items() if isinstance(facts, dict) else ()
    for name, value in waiting:
        if isinstance(value, dict):
            waiting += ((f"{name} {key}", one) for key, one in value.items())
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield name, float(value)


def _commit(after: Report, before: Sequence[Report]) -> Iterator[Change]:
    now = after.data.get("commit")
    for run in before:
        if (then := run.data.get("commit")) != now:
            yield Change(COMMIT, "", then, now)


def _named(what: str, after: Report, before: Sequence[Report]) -> Iterator[Change]:
    """What differs in a table of names, such as the versions of packages."""
    for run in before:
        then, now = (run.data.get(what) or {}, after.data.get(what) or {})
        for name in sorted(then.keys() | now.keys()):
            if name in _WHY or name.endswith("_why"):
                continue
            if then.get(name) != now.get(name):
                yield Change(what, name, then.get(name), now.get(name))
