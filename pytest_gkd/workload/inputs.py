"""Which student, teacher and prompts does this run use, and who chose them?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_gkd.settings import Settings
from pytest_gkd.workload import tiny


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

    def origin(self, name: str) -> str:
        """Where the value of ``name`` came from, for error texts."""
        if name in self.made:
            return "made by pytest-gkd"
        return "--gkd-" + name.replace("_", "-")


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
    return Inputs(student, teacher, train_files, tuple(made), "; ".join(reasons))
