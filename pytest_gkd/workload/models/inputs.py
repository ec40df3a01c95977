"""Which student, teacher and prompts this run uses, and who chose them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_gkd.options import Settings
from pytest_gkd.stage_api import StageFault
from pytest_gkd.workload.models import model_files, tiny

# Rows looked through for short prompts; the data stage looks at every one.
MOST_ROWS = 20_000


@dataclass(frozen=True)
class Inputs:
    """What the stages work on; the user's values, or made ones where there are none.

    ``student`` and ``teacher`` are a model directory or a hub id. ``made`` names what
    was chosen here (``student``, ``teacher``, ``train_files``) and ``why`` says in
    words what was chosen and for what reason.
    """

    student: str
    teacher: str
    train_files: tuple[str, ...]
    made: tuple[str, ...] = ()
    why: str = ""
    origins: Mapping[str, str] = field(default_factory=dict)

    def origin(self, name: str) -> str:
        """Where the value of ``name`` came from, for error texts."""
        if name in self.made:
            return "made by pytest-gkd"
        return Settings(origins=self.origins).origin(name)


def resolve(settings: Settings, fallback_dir: Path) -> Inputs:
    """The user's inputs, completed.

    Nothing is made when the user named both a student and train files. A student
    without a teacher teaches itself, since a made teacher has another vocabulary; a
    teacher without a student is its own student for the same reason. ``fallback_dir``
    holds the made files when the cache directory cannot be written.
    """
    student, teacher = settings.student, settings.teacher
    train_files = settings.train_files
    made: list[str] = []
    reasons: list[str] = []
    if student and not teacher:
        teacher = student
        made.append("teacher")
        reasons.append("teacher is the student itself: none was named")
    elif teacher and not student:
        student = teacher
        made.append("student")
        reasons.append("student is the teacher itself: none was named")
    if not student or not teacher or not train_files:
        made_files = tiny.make(fallback_dir)
        if not student or not teacher:
            student, teacher = str(made_files.student), str(made_files.teacher)
            made += ["student", "teacher"]
            reasons.append("student and teacher are tiny random models: none was named")
        if not train_files:
            train_files = (str(made_files.train_file),)
            made.append("train_files")
            reasons.append("train files are a few hundred made prompts: none was named")
    why = "; ".join(reasons)
    return Inputs(student, teacher, train_files, tuple(made), why, settings.origins)


def prompt_column(inputs: Inputs, settings: Settings) -> str | None:
    """The column the user named, unless the train files are ours."""
    return None if "train_files" in inputs.made else settings.prompt_column


def prompt_limit(inputs: Inputs, settings: Settings) -> int:
    """Tokens that a prompt may have.

    A default that nobody asked for leaves room for the new tokens in the student's
    context; a limit of the user's is taken as it is.
    """
    limit = settings.max_prompt_length
    context = model_files.context_tokens(inputs.student, inputs.origin("student"))
    if context is None or limit != Settings.max_prompt_length:
        return limit
    return max(1, min(limit, context - settings.max_new_tokens))


def chat_prompts(inputs: Inputs, settings: Settings) -> str:
    """The user's train files, if the first prompt in them is chat messages.

    Empty for plain text and for prompts made here. Raises StageFault for files that
    cannot be read, or have no prompts.
    """
    from pytest_gkd.workload.data import dataset_load, prompts, train_files

    if "train_files" in inputs.made:
        return ""
    where = ", ".join(inputs.train_files[:3])
    files = train_files.check_files(inputs.train_files, inputs.origin("train_files"))
    row = next(dataset_load.first_rows(files), {})
    column = prompts.choose_column(
        list(row),
        prompt_column(inputs, settings),
        where,
        settings.origin("prompt_column"),
    )
    chats = prompts.kind_of(column.of(row)) == "messages"
    return where if chats else ""


def prompt_ids(
    inputs: Inputs, settings: Settings, n: int, tokenizer: Any = None
) -> list[list[int]]:
    """Token ids of the first ``n`` prompts that are within the length limit.

    The chat template is applied, with the generation prompt. ``tokenizer`` saves
    loading the student's again. Raises StageFault ``data.too-long`` or ``data.empty``
    when there are fewer than ``n``, and what ``train_files.check_files`` raises.
    """
    from pytest_gkd.workload.data import dataset_load, prompts, train_files
    from pytest_gkd.workload.models import tokenizer_load

    files = train_files.check_files(inputs.train_files, inputs.origin("train_files"))
    if tokenizer is None:
        tokenizer = tokenizer_load.load(
            inputs.student,
            inputs.origin("student"),
            trust_remote_code=settings.trust_remote_code,
        )
    renderer = prompts.Renderer(tokenizer)
    limit = prompt_limit(inputs, settings)
    found: list[list[int]] = []
    column: prompts.PromptColumn | None = None
    looked = 0
    for row in itertools.islice(dataset_load.first_rows(files), MOST_ROWS):
        if len(found) == n:
            break
        column = column or prompts.choose_column(
            list(row),
            prompt_column(inputs, settings),
            ", ".join(inputs.train_files),
            settings.origin("prompt_column"),
        )
        looked += 1
        prompt = column.of(row)
        kind = prompts.kind_of(prompt)
        wrong = prompts.problem(prompt, kind)
        if wrong:
            raise StageFault(
                "data.schema",
                f"{files[0].path} row {looked - 1}: column {column.name!r} is {wrong}",
                facts={"column": column.name, "row": looked - 1},
            )
        ids = renderer.ids([prompt])[0]
        if len(ids) <= limit:
            found.append(ids)
    if len(found) < n:
        cause = "data.too-long" if looked > len(found) else "data.empty"
        raise StageFault(
            cause,
            f"{', '.join(inputs.train_files[:3])}: {len(found)} of the first {looked} "
            f"prompts are within {limit} tokens "
            f"({settings.origin('max_prompt_length')}), wanted {n}",
            facts={"rows": looked, "fitting_rows": len(found), "limit_tokens": limit},
        )
    return found
