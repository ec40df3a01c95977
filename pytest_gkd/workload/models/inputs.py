"""Which student, teacher and prompts this run uses, and who chose them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pytest_gkd.options import Settings
from pytest_gkd.workload.models import model_files, tiny


@dataclass(frozen=True)
class Inputs:
    """What the stages work on: the user's values, else generated ones.

    ``student`` and ``teacher`` are a model directory or a hub id. ``made`` names what
    was chosen here (``student``, ``teacher``, ``train_files``) and ``why`` says in
    words what was chosen and why. ``prompt_column`` is the one that the user named,
    unless the train files are generated.
    """

    student: str
    teacher: str
    train_files: tuple[str, ...]
    made: tuple[str, ...] = ()
    why: str = ""
    origins: Mapping[str, str] = field(default_factory=dict)
    prompt_column: str | None = None

    def origin(self, name: str) -> str:
        """Where the value of ``name`` came from, for error texts."""
        if name in self.made:
            return "made by pytest-gkd"
        return Settings(origins=self.origins).origin(name)


def resolve(settings: Settings, fallback_dir: Path) -> Inputs:
    """The user's inputs, completed.

    Nothing is generated if the user named both a student and train files. A student
    without a teacher teaches itself, since a generated teacher has another vocabulary;
    a teacher without a student is its own student for the same reason. ``fallback_dir``
    holds the generated files if the cache directory is not writable.
    """
    student, teacher = named(settings)
    train_files = settings.train_files
    made: list[str] = []
    reasons: list[str] = []
    if student and not settings.teacher:
        made.append("teacher")
        reasons.append("teacher is the student itself: none was named")
    elif student and not settings.student:
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
    return Inputs(
        student,
        teacher,
        train_files,
        tuple(made),
        "; ".join(reasons),
        settings.origins,
        None if "train_files" in made else settings.prompt_column,
    )


def named(settings: Settings) -> tuple[str | None, str | None]:
    """The user's student and teacher; if only one is named, it serves as both."""
    return (
        settings.student or settings.teacher,
        settings.teacher or settings.student,
    )


def prompt_limit(inputs: Inputs, settings: Settings) -> int:
    """The maximum number of tokens in a prompt.

    A default that nobody asked for leaves room for the new tokens in the student's
    context; a user's limit is taken as is.
    """
    limit = settings.max_prompt_length
    context = model_files.context_tokens(inputs.student, inputs.origin("student"))
    if context is None or limit != Settings.max_prompt_length:
        return limit
    return max(1, min(limit, context - settings.max_new_tokens))
