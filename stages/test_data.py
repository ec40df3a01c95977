"""Stage data: the train files load, and leave the job prompts to train on."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence

import pytest

from pytest_gkd.stage_api import StageContext
from pytest_gkd.workload.data import (
    cache_locks,
    dataset_load,
    lengths,
    train_files,
    train_rows,
    trainer_notes,
)
from pytest_gkd.workload.data.prompts import Renderer
from pytest_gkd.workload.models import inputs

TELL_S = 1.0


@pytest.mark.gkd_stage("data")
def test_data(gkd: StageContext) -> None:
    """Files, then rows, then lengths; no heavy import before the files are checked."""
    settings = gkd.settings
    gkd.step(f"checking {_named(settings.train_files) or 'the train files'}")
    if settings.train_files:  # before anything is generated for the run
        train_files.check_files(settings.train_files, settings.origin("train_files"))
    job = inputs.resolve(settings, gkd.run_dir)
    gkd.fact("train_files", list(job.train_files))
    gkd.fact("inputs_why", job.why or "all named by the user")
    files = train_files.check_files(job.train_files, job.origin("train_files"))
    size_bytes = sum(file.size_bytes for file in files)
    gkd.fact("size_bytes", size_bytes)
    gkd.allow("data", size_bytes / train_files.SLOW_BYTES_PER_S)

    gkd.step(f"opening {_named(job.train_files)} with datasets")
    private = gkd.run_dir / "datasets"
    rows = dataset_load.open_rows(files, private)
    gkd.fact("columns", list(rows.columns))
    gkd.step("looking for locks in the datasets cache")
    cache_locks.check(rows.cache_dirs, private, cache_locks.cache_root(os.environ))

    gkd.step("loading the student's tokenizer to measure prompts")
    measure, how = lengths.best(job, settings)
    gkd.fact("lengths_by", how)
    media = trainer_notes.check_media(rows, job)
    measured = isinstance(measure, Renderer)
    if not measured:
        gkd.note(
            "data.lengths-estimated",
            f"Prompts are measured in {how} (pytest --gkd-stages=tokenizer says more).",
        )
    limit = settings.max_prompt_length
    if measured:
        limit = inputs.prompt_limit(job, settings)

    gkd.step(f"checking the rows of {_named(job.train_files)}")
    report = train_rows.check_rows(
        rows,
        measure,
        prompt_column=job.prompt_column,
        max_prompt_length=limit,
        batch_size=settings.batch_size,
        origin=settings.origin,
        progress=_teller(gkd),
    )
    for name, value in dataclasses.asdict(report).items():
        gkd.fact(name, value)
    gkd.fact("summary", str(report))
    if measured:
        lengths.check_context(job, settings, report.longest_fitting_tokens)
    for note in (*media, *trainer_notes.notes(rows, report, settings, limit)):
        gkd.note(note.id, note.text)


def _teller(gkd: StageContext) -> Callable[[int], None]:
    """Reports how many rows have been read, once a second."""
    last = time.monotonic()

    def tell(rows: int) -> None:
        nonlocal last
        if time.monotonic() - last >= TELL_S:
            last = time.monotonic()
            gkd.step(f"checking the rows: {rows} read")

    return tell


def _named(files: Sequence[str]) -> str:
    """The first file, and how many more there are."""
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return "".join(files[:1]) + more
