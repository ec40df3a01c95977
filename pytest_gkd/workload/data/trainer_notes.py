"""Tells what trainers do with these train files that the rows alone do not show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytest_gkd.options import Settings
from pytest_gkd.stage_api import Note, StageFault
from pytest_gkd.workload.data.dataset_load import Rows
from pytest_gkd.workload.data.prompts import COLUMNS, CONVERSATIONS, MATERIAL
from pytest_gkd.workload.data.train_rows import VERLS_OWN, DataReport
from pytest_gkd.workload.models import model_files, model_paths
from pytest_gkd.workload.models.inputs import Inputs

if TYPE_CHECKING:
    import pyarrow

MEDIA = ("images", "image", "videos", "video", "audios", "audio")
# Which trainers stop at non-empty columns if the student reads text only: verl at those
# that image_key and video_key name, TRL by name (sft_trainer.py, is_vision_dataset).
_VERL = "verl stops for want of a processor"
_TRL = "TRL stops because the dataset appears to be vision-related"
STOPPED_BY = {"images": f"{_VERL}, and {_TRL}", "image": _TRL, "videos": _VERL}
BY_NAME = ("images", "image")  # TRL stops at these even if they are empty
MEDIA_ROWS = 1000  # checked for images and audio
# If the length limit drops one prompt in ten, that is worth a note.
MANY_TOO_LONG = 0.1


def check_media(rows: Rows, job: Inputs) -> list[Note]:
    """Check that a text-only student is not given rows with images or audio.

    A student made here is nobody's choice and is not judged. Raises StageFault
    ``data.schema``.
    """
    if "student" in job.made or not _reads_text_only(job):
        return []
    columns = [name for name in MEDIA if name in rows.columns]
    known = [job.prompt_column] if job.prompt_column else COLUMNS
    parts = _media_parts(rows, [name for name in known if name in rows.columns][:1])
    if not columns:
        return parts
    table = next(rows.tables(columns, MEDIA_ROWS))
    filled = {name: _filled(table.column(name)) for name in columns}
    for column, trainers in STOPPED_BY.items():
        if filled.get(column):
            raise StageFault(
                "data.schema",
                f"column {column!r} is filled in {filled[column]} of the first "
                f"{len(table)} rows, and the student {job.student} reads text only: "
                f"{trainers}",
                facts={
                    "media": column,
                    "student": job.student,
                    "filled_rows": filled[column],
                },
            )
    return [Note("data.media-column", text) for text in _media_texts(filled)] + parts


def _media_parts(rows: Rows, columns: Sequence[str]) -> list[Note]:
    """What to say about messages with parts that are not text."""
    if not columns:
        return []
    looked = rows.values(next(rows.tables(columns, MEDIA_ROWS)))
    found = [_part_kinds(value) for row in looked for value in row.values()]
    kinds = sorted(set().union(*found))
    if not kinds:
        return []
    return [
        Note(
            "data.media-parts",
            f"In {sum(map(bool, found))} of the first {len(looked)} rows messages have "
            f"parts of type {' and '.join(map(repr, kinds))}; the student reads text "
            "only, and what its chat template makes of them is no picture or sound.",
        )
    ]


def _part_kinds(prompt: Any) -> set[str]:
    """The types of message parts that are not text."""
    messages = prompt if isinstance(prompt, list) else []
    contents = [m.get("content") for m in messages if isinstance(m, dict)]
    parts = [part for c in contents if isinstance(c, list) for part in c]
    kinds = {part.get("type") for part in parts if isinstance(part, dict)}
    return {kind for kind in kinds if isinstance(kind, str) and kind != "text"}


def _media_texts(filled: Mapping[str, int]) -> Iterator[str]:
    """What to say about columns that the student ignores."""
    for column in BY_NAME:
        if filled.get(column) == 0:
            yield (
                f"Column {column!r} is empty; for a student that reads text only TRL "
                "refuses the dataset all the same, for the column's name."
            )
    ignored = [name for name, rows in filled.items() if rows]
    if ignored:
        names = " and ".join(map(repr, ignored))
        subject = f"Columns {names} are" if len(ignored) > 1 else f"Column {names} is"
        yield f"{subject} no part of a prompt here: the student reads text only."


def _filled(column: pyarrow.ChunkedArray) -> int:
    """How many rows are not empty, without creating a Python value for any."""
    import pyarrow.compute as pc
    import pyarrow.types as types

    kind = column.type
    if types.is_list(kind) or types.is_large_list(kind):
        sizes = pc.list_value_length(column)
    elif types.is_string(kind) or types.is_binary(kind):
        sizes = pc.binary_length(column)
    else:
        return len(column) - int(column.null_count)
    return int(pc.sum(pc.greater(sizes, 0)).as_py() or 0)


def notes(
    rows: Rows, report: DataReport, settings: Settings, limit: int
) -> Iterator[Note]:
    """What is not wrong in itself but may be in the user's trainer.

    ``limit`` is the length limit for prompts, in tokens.
    """
    kinds = {file.kind for file in rows.files} - {"parquet", "json"}
    if kinds:
        yield Note(
            "data.format",
            f"{rows.files[0].path} is read as datasets reads it; verl (RLHFDataset) "
            "takes .parquet and .json files only.",
        )
    if rows.limit is not None and report.rows >= rows.limit:
        text = f"Only the first {rows.limit} rows were read, since they are on the hub."
        yield Note("data.first-rows", text)
    if any(report.column.endswith(f" + {name}") for name in MATERIAL):
        yield Note(
            "data.joined",
            f"A prompt is {report.column} here, as ms-swift joins them; verl, TRL and "
            "OpenRLHF read one column, and need one that holds both.",
        )
    yield from _ends(report)
    if report.control_rows:
        yield Note(
            "data.control-tokens",
            f"In {report.control_rows} of {report.rows} rows {report.column!r} holds "
            "control tokens of the student's chat template (the first at "
            f"{report.control_place}). A text that was rendered already is rendered "
            "once more, unless the trainer takes text as it is (TRL); in other text "
            "they end a turn early.",
        )
    if report.kind == "text" and set(rows.columns) >= VERLS_OWN:
        yield Note(
            "data.verl-text",
            f"Column {report.column!r} is text in data made for verl, which expects a "
            "list of messages in the column that data.prompt_key names.",
        )
    if report.kept_rows < report.rows * (1 - MANY_TOO_LONG):
        context = " and the student's context" * (limit < settings.max_prompt_length)
        about = "about " if report.unsure_rows else ""
        yield Note(
            "data.too-long",
            f"{about}{report.rows - report.kept_rows} of {report.rows} prompts are "
            f"longer than {limit} tokens "
            f"({settings.origin('max_prompt_length')}{context}); verl drops them "
            "with data.filter_overlong_prompts, and else stops at the first.",
        )


def _ends(report: DataReport) -> Iterator[Note]:
    """How conversations end, about which trainers make assumptions."""
    name, answered, rows = report.column, report.answered_rows, report.rows
    if report.kind != "messages":
        return
    if name not in CONVERSATIONS:
        if answered:
            yield Note(
                "data.answers",
                f"In {answered} of {rows} rows the last message of {name!r} is an "
                "answer, below which the student is asked to answer again.",
            )
    elif answered == rows:
        yield Note(
            "data.answers",
            f"The last message of {name!r} is an answer, which TRL and ms-swift cut "
            f"off; verl (data.prompt_key={name}) would leave it in the prompt.",
        )
    else:
        yield Note(
            "data.answers",
            f"In {rows - answered} of {rows} rows the last message of {name!r} is no "
            "answer; TRL's GKDTrainer takes the last one for it whoever wrote it, and "
            "the question is lost.",
        )


def _reads_text_only(job: Inputs) -> bool:
    """Whether the student has no encoder for anything but text; False if unknown."""
    found = model_paths.locate(job.student, job.origin("student"))
    if found is None:
        return False
    config = model_files.read_config(found.directory, job.origin("student"))
    encoders = ("vision", "visual", "audio", "image", "thinker")
    return not model_files.has_processor(found.directory) and not any(
        isinstance(value, dict) and name.startswith(encoders)
        for name, value in config.items()
    )
