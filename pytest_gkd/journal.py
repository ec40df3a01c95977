"""Files that survive a killed process: workers' events, verdicts, the report."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class EventWriter:
    """Appends events to a file, one JSON line each, in one write call.

    A line is either whole or, when the process is killed inside the write, missing
    its end; readers wait for the newline.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, event: dict[str, Any]) -> None:
        """Append one event; values that JSON does not know become their text."""
        line = json.dumps(event, default=str) + "\n"
        os.write(self._fd, line.encode("utf-8", "replace"))


class EventReader:
    """Reads what was appended to every ``*.jsonl`` of a directory since last time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._offsets: dict[Path, int] = {}

    def read(self) -> Iterator[dict[str, Any]]:
        """New events, each with ``worker``, the name of its file."""
        for path in sorted(self._directory.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            for line in whole.splitlines():
                yield {**json.loads(line), "worker": path.stem}


def write_json(path: Path, data: Any) -> None:
    """Write a whole file or leave the old one: write beside it, then rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = _finite(data)
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(json.dumps(data, indent=1, default=str) + "\n", "utf-8")
    temporary.replace(path)


def _finite(data: Any) -> Any:
    """NaN and infinities, which JSON has not, as their names."""
    if isinstance(data, float) and not math.isfinite(data):
        return str(data)
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return data


class VerdictReader:
    """Reads how stages of other workers ended, as the controller writes it down."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._outcomes: dict[str, str] = {}

    def outcome(self, name: str) -> str | None:
        """The stage's outcome, None while it is open."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            verdict = json.loads(line)
            self._outcomes[verdict["stage"]] = verdict["outcome"]
        return self._outcomes.get(name)
