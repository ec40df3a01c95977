"""What ``gkd check`` says of a command, for the tests of memory plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from test_estimate import HALF_B, QWEN_7B
from test_job_memory import shape

from pytest_gkd.__main__ import main
from pytest_gkd.job import models


class Checked:
    """What ``gkd check`` says of one command, with the models of this folder.

    ``{s}`` and ``{t}`` in it are the student and the teacher; ``judge`` is the
    framework with its release.
    """

    def __init__(self, place: Path, capsys: Any, judge: str) -> None:
        self.student = shape(place / "s", HALF_B)
        self.teacher = shape(place / "t", QWEN_7B)
        self._place, self._capsys, self._judge = place, capsys, judge

    def __call__(self, command: str, memory: str = "79GiB") -> dict[str, Any]:
        script = self._place / "run.sh"
        text = command.replace("{s}", str(self.student))
        script.write_text(text.replace("{t}", str(self.teacher)) + "\n")
        asked = (f"--framework={self._judge}", f"--machine=memory={memory}")
        main(["check", str(script), *asked, "--format=json"])
        found: dict[str, Any] = json.loads(self._capsys.readouterr().out)
        return found

    def parts(self, command: str, phase: str = "forward and backward") -> Any:
        """The parts of a phase."""
        found = self(command)
        assert found["memory"], found["no_memory_plan"]
        return next(row for row in found["memory"] if row["phase"] == phase)["bytes"]

    def elements(self) -> tuple[int, int]:
        """Of the student and the teacher."""
        both = models.read(self.student), models.read(self.teacher)
        return both[0].elements, both[1].elements
