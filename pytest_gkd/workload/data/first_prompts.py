"""Takes the first prompts of the train files, for stages that need a few of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from pytest_gkd.options import Settings
from pytest_gkd.stage_api import StageFault
from pytest_gkd.workload.data import dataset_load, lengths, prompts, train_files
from pytest_gkd.workload.models.inputs import Inputs, prompt_limit

# Rows looked through for short prompts; the data stage looks at every one.
MOST_ROWS = 20_000


def chat_prompts(inputs: Inputs, settings: Settings) -> str:
    """The user's train files, if their first prompt consists of chat messages.

    Empty for plain text and for prompts made here. Raises StageFault for files that
    cannot be read or contain no prompts.
    """
    if "train_files" in inputs.made:
        return ""
    _, _, found = _opened(inputs, settings)
    chats = prompts.kind_of(next(found)) == "messages"
    return _named(inputs) if chats else ""


def prompt_ids(inputs: Inputs, settings: Settings, n: int) -> list[list[int]]:
    """Token ids of the first ``n`` prompts within the length limit.

    The chat template is applied, with the generation prompt. Raises StageFault
    ``data.too-long`` or ``data.empty`` if there are fewer than ``n``, and what
    ``train_files.check_files`` and ``tokenizer_load.load`` raise.
    """
    files, column, taken = _opened(inputs, settings)
    renderer = lengths.renderer(inputs, settings)
    limit = prompt_limit(inputs, settings)
    found: list[list[int]] = []
    looked = 0
    for prompt in itertools.islice(taken, MOST_ROWS):
        wrong = prompts.problem(prompt, prompts.kind_of(prompt))
        if wrong:
            place = dataset_load.locate(files, looked)
            raise StageFault(
                "data.schema",
                f"{place}: column {column.name!r} is {wrong}",
                facts={"column": column.name, "row": looked},
            )
        looked += 1
        ids = renderer.ids([prompt])[0]
        if len(ids) <= limit:
            found.append(ids)
        if len(found) == n:
            return found
    raise StageFault(
        "data.too-long" if looked > len(found) else "data.empty",
        f"{_named(inputs)}: {len(found)} of the first {looked} prompts are within "
        f"{limit} tokens ({settings.origin('max_prompt_length')}), wanted {n}",
        facts={"rows": looked, "fitting_rows": len(found), "limit_tokens": limit},
    )


def _opened(
    inputs: Inputs, settings: Settings
) -> tuple[tuple[train_files.DataFile, ...], prompts.PromptColumn, Iterator[Any]]:
    """The train files, their column of prompts, and the prompts, at least one."""
    files = train_files.check_files(inputs.train_files, inputs.origin("train_files"))
    rows = dataset_load.first_rows(files)
    first = next(rows)
    column = prompts.choose_column(
        list(first),
        inputs.prompt_column,
        _named(inputs),
        settings.origin("prompt_column"),
    )
    return files, column, map(column.of, itertools.chain([first], rows))


def _named(inputs: Inputs) -> str:
    return ", ".join(inputs.train_files[:3])
