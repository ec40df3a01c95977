"""Checks that every row of the train files is one that the job can use."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from pytest_gkd.stage_api import StageFault
from pytest_gkd.workload.data import survey
from pytest_gkd.workload.data.dataset_load import Rows, locate
from pytest_gkd.workload.data.json_lines import corrupt
from pytest_gkd.workload.data.prompts import (
    CONVERSATIONS,
    ROLES,
    PromptColumn,
    RoughRenderer,
    Sizes,
    choose_column,
    kind_of,
    problem,
    problem_facts,
)
from pytest_gkd.workload.models.tokenizer_load import refusals

if TYPE_CHECKING:
    import pyarrow

_Entry = tuple[int, int, Any]  # row, bound in tokens, prompt

# Rows that are tokenized: a random sample of all rows, and another of those that may be
# too long by their size. 1000 give a share to within 3 in 100 (95 % confidence).
MEASURED_ROWS = 1000
PART_ROWS = 250  # tokenized at a time
# Tokens are shorter than this, in bytes of normalized text: a text that is certainly
# too long is not tokenized, which takes minutes for tens of megabytes.
LONGEST_TOKEN = 11 * 512
# Columns that only verl's own preparation writes (verl, docs/preparation).
VERLS_OWN = {"data_source", "reward_model"}
SEED = 0  # so that two runs draw the same rows


@dataclass(frozen=True)
class DataReport:
    """What the check of every row of the train files found.

    ``fitting_rows`` are within the length limit for certain: measured, or too small to
    exceed it. ``too_long_rows`` were measured and exceed it. ``unsure_rows`` may exceed
    it by their size and were not measured; ``kept_rows`` counts them by the share of a
    random sample of their kind that fits, so that it is an estimate unless
    ``unsure_rows`` is 0. ``longest_tokens`` is the longest of the ``measured_rows``,
    which include the largest prompt, and ``longest_fitting_tokens`` the longest of
    those within the limit (0 where none was measured). ``answered_rows`` are
    conversations whose last message is the assistant's, ``control_rows`` those that
    hold control tokens of the chat template, the first of them at ``control_place``.
    """

    rows: int
    kept_rows: int
    fitting_rows: int
    too_long_rows: int
    unsure_rows: int
    measured_rows: int
    longest_tokens: int
    longest_fitting_tokens: int
    answered_rows: int
    column: str
    kind: str
    control_rows: int = 0
    control_place: str = ""

    def __str__(self) -> str:
        """For the stage's line in the terminal."""
        unknown = self.unsure_rows + self.too_long_rows
        about, why = "", ""
        if self.unsure_rows:
            about = "about "
            why = f" (estimated: {self.measured_rows} of {self.rows} were measured)"
        fit = f"{about}{self.kept_rows} of {self.rows} prompts"
        return (
            f"{fit}{' fit' * bool(unknown)}{why}, column {self.column!r} ({self.kind})"
        )


def check_rows(
    rows: Rows,
    lengths: RoughRenderer,
    *,
    prompt_column: str | None,
    max_prompt_length: int,
    batch_size: int,
    origin: Callable[[str], str],
    progress: Callable[[int], None] = lambda _: None,
) -> DataReport:
    """Check the prompt of every row, and filter by length as the job does.

    ``origin`` says who gave a setting; ``progress`` is called now and then with the
    number of rows read so far. Raises StageFault ``data.empty`` (fewer rows than
    ``batch_size``), ``data.schema`` (no such column, or a row that cannot be used, by
    file and line), ``data.corrupt``, or ``data.too-long`` (fewer than ``batch_size``
    are within ``max_prompt_length``; of many rows, a random sample and then the
    smallest ones are measured).
    """
    where = ", ".join(file.path for file in rows.files[:3])
    column = choose_column(rows.columns, prompt_column, where, origin("prompt_column"))
    look = _Look(rows, column, lengths, max_prompt_length, batch_size)
    for table in rows.tables(column.columns):
        look.at(table)
        progress(look.rows)
    if look.worst is not None:
        raise _unusable(look, *look.worst)
    _check_form(look, prompt_column)
    if look.rows < batch_size:
        raise StageFault(
            "data.empty",
            f"{where}: {look.rows} rows; expected at least one batch of {batch_size}",
            facts={"rows": look.rows, "batch_size": batch_size},
        )
    found = _measured(look, batch_size)
    longest = max(length for length, _ in found.values())
    unsure = {
        row: length for row, (length, bound) in found.items() if bound > look.limit
    }
    over = [length for length in unsure.values() if length > look.limit]
    unseen = look.unsure - len(unsure)
    fitting = look.rows - look.unsure + len(unsure) - len(over)
    if fitting < batch_size:
        beyond = f" ({unseen} larger ones not measured)" if unseen else ""
        raise StageFault(
            "data.too-long",
            f"{where}: {fitting} of {look.rows} prompts are within {max_prompt_length} "
            f"tokens ({origin('max_prompt_length')}), expected a batch of "
            f"{batch_size}; the others have {min(over)} to {longest} tokens{beyond}",
            facts={
                "rows": look.rows,
                "fitting_rows": fitting,
                "measured_rows": len(found),
                "limit_tokens": max_prompt_length,
                "shortest_too_long_tokens": min(over),
                "longest_tokens": longest,
                "batch_size": batch_size,
            },
        )
    drawn = [unsure[row] <= look.limit for row, _, _ in look.unsure_sample.entries]
    share = sum(drawn) / len(drawn) if unseen else 0.0
    kept = look.rows - look.unsure + round(look.unsure * share)
    return DataReport(
        rows=look.rows,
        kept_rows=kept if unseen else fitting,
        fitting_rows=fitting,
        too_long_rows=len(over),
        unsure_rows=unseen,
        measured_rows=len(found),
        longest_tokens=longest,
        longest_fitting_tokens=max(
            (length for length, _ in found.values() if length <= look.limit), default=0
        ),
        answered_rows=look.answered,
        column=column.name,
        kind=look.kind,
        control_rows=look.controlled,
        control_place=look.control_place(),
    )


class _Kept:
    """The ``size`` rows with the smallest keys of all that were offered.

    With random keys they are a uniform random sample.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._best: list[tuple[float, _Entry]] = []  # by their keys

    @property
    def entries(self) -> list[_Entry]:
        return [entry for _, entry in self._best]

    def offer(
        self, keys: Any, places: Any, entries: Callable[[Any], Iterable[_Entry]]
    ) -> None:
        """Rows of a table at ``places``; ``keys`` has one key for each."""
        import numpy

        if len(self._best) == self.size:
            small = keys < self._best[-1][0]
            keys, places = keys[small], places[small]
        order = numpy.argsort(keys, kind="stable")[: self.size]
        if len(order):
            new = zip(keys[order].tolist(), entries(places[order]), strict=True)
            self._best = sorted([*self._best, *new], key=itemgetter(0))[: self.size]


@dataclass
class _Look:
    """The tally of the rows read so far; only rows to be measured are kept."""

    source: Rows
    column: PromptColumn
    lengths: RoughRenderer
    limit: int
    batch_size: int
    kind: str = ""
    rows: int = 0
    unsure: int = 0
    answered: int = 0
    first_answered: int | None = None
    controlled: int = 0
    first_controlled: int | None = None
    bad: int = 0
    worst: tuple[int, str, dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        import numpy

        self.roles: dict[str, int] = {}  # to the first row that has it
        self.sample, self.unsure_sample = _Kept(MEASURED_ROWS), _Kept(MEASURED_ROWS)
        self.smallest_unsure = _Kept(max(2 * MEASURED_ROWS, self.batch_size))
        self.largest = _Kept(1)
        self._controls = "|".join(map(re.escape, self.lengths.controls))
        self._random = numpy.random.default_rng(SEED)

    def at(self, table: pyarrow.Table) -> None:
        """Take in the next rows."""
        import numpy
        import pyarrow

        def values(places: Any) -> list[Any]:
            found = self.source.values(table.take(pyarrow.array(places)))
            return [self.column.of(row) for row in found]

        everyone = numpy.arange(len(table))
        seen = self._surveyed(table, lambda: values(everyone))
        places = numpy.asarray(seen.odd, dtype=numpy.int64)
        for place, value in zip(places, values(places), strict=True):
            self._judge(self.rows + int(place), value)
        for role, place in seen.roles.items():
            self.roles.setdefault(role, self.rows + place)
        if len(seen.answered) and self.first_answered is None:
            self.first_answered = self.rows + int(seen.answered[0])
        self.answered += len(seen.answered)
        if len(seen.controlled) and self.first_controlled is None:
            self.first_controlled = self.rows + int(seen.controlled[0])
        self.controlled += len(seen.controlled)
        if not self.bad:
            self._keep(seen.sizes, everyone, values)
        self.rows += len(table)

    def _surveyed(
        self, table: pyarrow.Table, values: Callable[[], list[Any]]
    ) -> survey.Survey:
        import pyarrow

        try:
            table.validate(full=True)
        except pyarrow.ArrowInvalid as error:
            raise self._not_text(table, error) from error
        found = None
        if len(self.column.columns) == 1:
            found = survey.survey(table.column(0).combine_chunks(), self._controls)
        found = found or survey.survey_values(values(), self._controls)
        self.kind = self.kind or found.kind
        return found

    def control_place(self) -> str:
        """Where the first row with a control token lies."""
        if self.first_controlled is None:
            return ""
        return locate(self.source.files, self.first_controlled)

    def _not_text(self, table: pyarrow.Table, error: Exception) -> StageFault:
        """The fault for the first row whose text is not UTF-8."""
        import pyarrow

        for place in range(len(table)):
            try:
                table.slice(place, 1).validate(full=True)
            except pyarrow.ArrowInvalid:
                where = locate(self.source.files, self.rows + place)
                return corrupt(where, f"is not UTF-8 in column {self.column.name!r}")
        return corrupt(self.source.files[0].path, f"is damaged: {error}")

    def _judge(self, row: int, value: Any) -> None:
        if not self.kind and value is not None:
            self.kind = kind_of(value)
        wrong = problem(value, self.kind)
        if wrong:
            self.bad += 1
            if self.worst is None:
                self.worst = row, wrong, problem_facts(value)

    def _keep(
        self, sizes: Sizes, everyone: Any, values: Callable[[Any], list[Any]]
    ) -> None:
        bounds = self.lengths.bounds(sizes)
        unsure = everyone[bounds > self.limit]
        self.unsure += len(unsure)

        def entries(places: Any) -> Iterable[_Entry]:
            rows = (self.rows + places).tolist()
            return zip(rows, bounds[places].tolist(), values(places), strict=True)

        chance = self._random.random
        self.sample.offer(chance(len(everyone)), everyone, entries)
        self.unsure_sample.offer(chance(len(unsure)), unsure, entries)
        self.smallest_unsure.offer(bounds[unsure], unsure, entries)
        self.largest.offer(-bounds, everyone, entries)


def _measured(look: _Look, batch_size: int) -> dict[int, tuple[int, int]]:
    """Row to its length in tokens and what bounds that; a batch that fits, if any."""
    entries = [*look.sample.entries, *look.unsure_sample.entries, *look.largest.entries]
    found: dict[int, tuple[int, int]] = {}
    for part in _parts(entries):
        found |= _measure(look, part)
    fitting = look.rows - look.unsure
    fitting += sum(n <= look.limit < bound for n, bound in found.values())
    # No batch yet: one may be among the others; try the smallest first.
    others = [entry for entry in look.smallest_unsure.entries if entry[0] not in found]
    for part in _parts(others):
        if fitting >= batch_size:
            break
        more = _measure(look, part)
        found |= more
        fitting += sum(length <= look.limit for length, _ in more.values())
    return found


def _measure(look: _Look, entries: Sequence[_Entry]) -> dict[int, tuple[int, int]]:
    """Row to its length in tokens, at least, and its bound."""
    huge = {
        row: (bound // LONGEST_TOKEN, bound)
        for row, bound, _ in entries
        if bound // LONGEST_TOKEN > look.limit
    }
    entries = [entry for entry in entries if entry[0] not in huge]
    prompts = [prompt for _, _, prompt in entries]
    try:
        lengths = look.lengths.lengths(prompts)
    except refusals():
        # Which row is it? If each passes on its own, the error stands.
        for row, _, prompt in sorted(entries, key=lambda entry: entry[0]):
            try:
                look.lengths.lengths([prompt])
            except refusals() as error:
                wrong = f"refused by the chat template: {error}"
                raise _unusable(look, row, wrong, {}) from error
        raise
    return huge | {
        row: (length, bound)
        for (row, bound, _), length in zip(entries, lengths, strict=True)
    }


def _parts(entries: Sequence[_Entry]) -> Iterator[Sequence[_Entry]]:
    for start in range(0, len(entries), PART_ROWS):
        yield entries[start : start + PART_ROWS]


def _check_form(look: _Look, named: str | None) -> None:
    """Check that conversations are of the form that trainers and chat template expect.

    An answer at the end of a prompt stays in it: verl (utils/dataset/rl_dataset.py)
    and TRL (experimental/distillation) have the student answer again, below it. If
    only a few rows are like that, it is a note.
    """
    name, source = look.column.name, look.source
    strange = [
        role
        for role in look.roles
        if role not in ROLES and not look.lengths.takes(role)
    ]
    if strange:
        row = min(look.roles[role] for role in strange)
        raise StageFault(
            "data.schema",
            f"{locate(source.files, row)}: column {name!r} has messages of role "
            f"{' and '.join(sorted(map(repr, strange), reverse=True))}, which the "
            "student's chat template does not know; expected system, user, assistant "
            "or tool (ms-swift renames human and gpt itself, verl and TRL do not)",
            facts={"prompt_column": name, "role": strange[0], "roles": [*look.roles]},
        )
    is_verls = name == "prompt" != named and set(source.columns) >= VERLS_OWN
    if look.kind == "text" and is_verls:
        raise StageFault(
            "data.schema",
            f"{source.files[0].path}: column {name!r} is text in data made for verl "
            f"({', '.join(sorted(VERLS_OWN))}), which expects a list of messages there "
            "and drops every row whose chat template fails",
            facts={"prompt_column": name, "verl_text": True},
        )
    if look.kind == "text" and name == "chosen":
        raise StageFault(
            "data.schema",
            f"{source.files[0].path}: there is no prompt column beside 'chosen', which "
            "is text that holds question and answer; expected the question alone",
            facts={"prompt_column": name, "columns": list(source.columns)},
        )
    most = 2 * look.answered > look.rows
    if look.first_answered is not None and most and name not in CONVERSATIONS:
        raise StageFault(
            "data.schema",
            f"{locate(source.files, look.first_answered)}: the last message of "
            f"{name!r} is the assistant's, in {look.answered} of {look.rows} rows: the "
            "answer is in the prompt, and the student is asked to answer after it",
            facts={"prompt_column": name, "answered_rows": look.answered},
        )


def _unusable(look: _Look, row: int, wrong: str, facts: dict[str, Any]) -> StageFault:
    """The fault for rows that the job cannot use, described by the first of them."""
    name, files, bad = look.column.name, look.source.files, max(look.bad, 1)
    place = locate(files, row)
    more = f"; {bad} of {look.rows} rows are like this" if bad > 1 else ""
    # If every row is bad, advice to drop the bad ones is useless.
    some = {"some_rows": True} if bad < look.rows else {}
    return StageFault(
        "data.schema",
        f"{place}: column {name!r} is {wrong}{more}",
        facts={
            "prompt_column": name,
            "path": files[0].path,
            "row": row,
            "place": place,
            "problem": wrong,
            "bad_rows": bad,
            **some,
            **facts,
        },
        evidence=((place, None, f"{name} is {wrong}"),),
    )
