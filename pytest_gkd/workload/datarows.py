"""Is every row of the train files one that the job can use?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pytest_gkd.fault import StageFault
from pytest_gkd.workload.datafiles import DataFile
from pytest_gkd.workload.dataset_load import bad_text, locate
from pytest_gkd.workload.prompts import choose_column, kind_of, problem

READ_ROWS = 500
# Rows that are cut into tokens, evenly spread over all rows and again over those that
# may be too long. The rest is judged by its size, which is quick and errs to the safe
# side.
MEASURED_ROWS = 1000


class Lengths(Protocol):
    """What measures prompts: exactly, and by a bound that is quick to have."""

    def lengths(self, prompts: Sequence[Any]) -> list[int]:
        """Tokens of each prompt."""

    def bound(self, prompt: Any) -> int:
        """Tokens that the prompt cannot exceed."""


@dataclass(frozen=True)
class DataReport:
    """What every row of the train files came to.

    ``fitting_rows`` are within the length limit for certain: measured, or too small to
    exceed it. ``too_long_rows`` were measured and exceed it. ``unsure_rows`` may exceed
    it by their size and were not measured (none below 1000 rows). ``longest_tokens`` is
    the longest of the ``measured_rows``, which include the largest prompt.
    """

    rows: int
    fitting_rows: int
    too_long_rows: int
    unsure_rows: int
    measured_rows: int
    longest_tokens: int
    column: str
    kind: str


def check_rows(
    dataset: Any,
    files: Sequence[DataFile],
    lengths: Lengths,
    *,
    prompt_column: str | None,
    max_prompt_length: int,
    batch_size: int,
) -> DataReport:
    """Look at the prompt of every row, and filter by length as the job does.

    Raises StageFault ``data.empty`` (no rows, or fewer than ``batch_size``),
    ``data.schema`` (no such column, or a row that cannot be used, by file and line),
    or ``data.too-long`` (fewer than ``batch_size`` are within ``max_prompt_length``;
    of many rows, a spread sample and then the smallest ones are measured).
    """
    rows = len(dataset)
    where = ", ".join(file.path for file in files[:3])
    column = choose_column(dataset.column_names, prompt_column, where)
    if rows < batch_size:
        raise StageFault(
            "data.empty",
            f"{where}: {rows} rows; expected at least one batch of {batch_size}",
            facts={"rows": rows, "batch_size": batch_size}
            | ({} if rows else {"path": files[0].path}),
        )
    kind, bounds = _survey(dataset, column, files, lengths)
    unsure = [row for row, bound in enumerate(bounds) if bound > max_prompt_length]
    fitting = rows - len(unsure)
    sample = {*_spread(range(rows)), *_spread(unsure), bounds.index(max(bounds))}
    tokens: dict[int, int] = {}
    for part in _parts(sorted(sample)):
        tokens |= _measure(dataset, column, files, lengths, part)
    fitting += sum(tokens.get(row, bounds[row]) <= max_prompt_length for row in unsure)
    # No batch yet: one may be among the others, the smallest of them first.
    others = sorted((bounds[row], row) for row in unsure if row not in tokens)
    for looked, part in enumerate(_parts([row for _, row in others])):
        if fitting >= batch_size:
            break
        found = _measure(dataset, column, files, lengths, part)
        tokens |= found
        more = sum(length <= max_prompt_length for length in found.values())
        fitting += more
        if not more and (looked + 1) * READ_ROWS >= MEASURED_ROWS:
            break  # what is larger still will hardly fit
    longest = max(tokens.values())
    if fitting < batch_size:
        too_long = [length for length in tokens.values() if length > max_prompt_length]
        unseen = rows - len(tokens)
        beyond = f" ({unseen} larger ones not measured)" if unseen else ""
        raise StageFault(
            "data.too-long",
            f"{where}: {fitting} of {rows} prompts are within {max_prompt_length} "
            f"tokens (--gkd-max-prompt-length), expected a batch of {batch_size}; the "
            f"others have {min(too_long)} to {longest} tokens{beyond}",
            facts={
                "rows": rows,
                "fitting_rows": fitting,
                "measured_rows": len(tokens),
                "limit_tokens": max_prompt_length,
                "shortest_too_long_tokens": min(too_long),
                "longest_tokens": longest,
                "batch_size": batch_size,
            },
        )
    return DataReport(
        rows=rows,
        fitting_rows=fitting,
        too_long_rows=sum(length > max_prompt_length for length in tokens.values()),
        unsure_rows=sum(row not in tokens for row in unsure),
        measured_rows=len(tokens),
        longest_tokens=longest,
        column=column,
        kind=kind,
    )


def _survey(
    dataset: Any, column: str, files: Sequence[DataFile], lengths: Lengths
) -> tuple[str, list[int]]:
    """The kind of prompt, and of every row the tokens it cannot exceed."""
    kind = ""
    bounds: list[int] = []
    bad: list[tuple[int, str]] = []
    narrow = dataset.select_columns([column])
    for start in range(0, len(narrow), READ_ROWS):
        try:
            prompts = narrow[start : start + READ_ROWS][column]
        except UnicodeDecodeError as error:
            raise bad_text(files) or error from error
        for row, prompt in enumerate(prompts, start):
            if not kind and prompt is not None:
                kind = kind_of(prompt)
                if kind not in ("text", "messages"):
                    wrong = f"of type {kind}; expected text or a list of messages"
                    raise _unusable(files, column, [(row, wrong)])
            wrong = problem(prompt, kind)
            if wrong:
                bad.append((row, wrong))
            bounds.append(0 if wrong else lengths.bound(prompt))
    if bad:
        raise _unusable(files, column, bad)
    return kind, bounds


def _measure(
    dataset: Any,
    column: str,
    files: Sequence[DataFile],
    lengths: Lengths,
    rows: Sequence[int],
) -> dict[int, int]:
    """Row to its length in tokens."""
    prompts = dataset.select(rows)[column][:]
    try:
        return dict(zip(rows, lengths.lengths(prompts), strict=True))
    except Exception:
        # A chat template refuses what it does not know, such as a role. Which row?
        for row, prompt in zip(rows, prompts, strict=True):
            try:
                lengths.lengths([prompt])
            except Exception as error:
                wrong = f"refused by the chat template: {error}"
                raise _unusable(files, column, [(row, wrong)]) from error
        raise


def _parts(rows: Sequence[int]) -> Iterator[Sequence[int]]:
    for start in range(0, len(rows), READ_ROWS):
        yield rows[start : start + READ_ROWS]


def _spread(rows: Sequence[int]) -> Sequence[int]:
    """At most MEASURED_ROWS of the rows, evenly spread."""
    step = -(-len(rows) // MEASURED_ROWS)
    return rows[:: step or 1]


def _unusable(
    files: Sequence[DataFile], column: str, bad: list[tuple[int, str]]
) -> StageFault:
    """The fault for rows that the job cannot use, told by the first of them."""
    row, wrong = bad[0]
    place = locate(files, row)
    more = f"; {len(bad)} rows like this" if len(bad) > 1 else ""
    return StageFault(
        "data.schema",
        f"{place}: column {column!r} is {wrong}{more}",
        facts={
            "prompt_column": column,
            "path": files[0].path,
            "row": row,
            "place": place,
            "problem": wrong,
            "bad_rows": len(bad),
        },
        evidence=((place, None, f"{column} is {wrong}"),),
    )
