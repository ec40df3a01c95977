"""Stage data: the train files load, and leave the job prompts to train on."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

import pytest

from pytest_gkd.context import StageContext
from pytest_gkd.workload import (
    cache_locks,
    datafiles,
    datarows,
    dataset_load,
    inputs,
    lengths,
)


@pytest.mark.gkd_stage("data")
def test_data(gkd: StageContext) -> None:
    """Files, then rows, then lengths; nothing heavy is imported before files are."""
    settings = gkd.settings
    gkd.step(f"looking at {_named(settings.train_files) or 'the train files'}")
    if settings.train_files:  # before anything is made for the run
        datafiles.check_files(settings.train_files, "--gkd-train-files")
    job = inputs.resolve(settings, gkd.run_dir)
    gkd.fact("train_files", list(job.train_files))
    gkd.fact("inputs_why", job.why or "all named by the user")
    files = datafiles.check_files(job.train_files, job.origin("train_files"))
    gkd.fact("size_bytes", sum(file.size_bytes for file in files))

    gkd.step(f"loading {_named(job.train_files)} with datasets")
    private = gkd.run_dir / "datasets"
    dataset = dataset_load.load(files, private)
    gkd.step("looking for locks in the datasets cache")
    arrow_files = [file["filename"] for file in dataset.cache_files]
    cache_locks.check(arrow_files, private, cache_locks.cache_root(os.environ))
    gkd.fact("rows", len(dataset))
    gkd.fact("columns", list(dataset.column_names))

    gkd.step("loading the student's tokenizer to measure prompts")
    measure, how = lengths.best(job, settings)
    gkd.fact("lengths_by", how)

    gkd.step(f"looking at {len(dataset)} rows")
    report = datarows.check_rows(
        dataset,
        files,
        measure,
        prompt_column=inputs.prompt_column(job, settings),
        max_prompt_length=settings.max_prompt_length,
        batch_size=settings.batch_size,
    )
    for name, value in dataclasses.asdict(report).items():
        gkd.fact(name, value)
    kept = f"{report.rows - report.too_long_rows} of {report.rows} prompts"
    gkd.fact("summary", f"{kept}, column {report.column!r} ({report.kind})")


def _named(files: Sequence[str]) -> str:
    """The first of the files, and how many more there are."""
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return "".join(files[:1]) + more
