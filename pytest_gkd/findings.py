"""From what a failed stage left behind to its diagnosis, and to files that stay."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pytest_gkd import stacks
from pytest_gkd.match import (
    StageEvidence,
    TextSource,
    diagnose,
    telling_lines,
)
from pytest_gkd.record import TIMEOUT, StageRecord
from pytest_gkd.rules import load

_SAID = re.compile(r"E |\S+:\d+: |[A-Z].*:$")
OUTPUT_LIMIT = 4 * 1024 * 1024


class Findings:
    """Keeps a failed stage's output and stacks in the report directory; diagnoses it.

    Paths in records are relative to ``base``, where pytest was started. ``rules`` are
    files of users' own.
    """

    def __init__(
        self, report_dir: Path, base: Path, rules: Iterable[Path] = ()
    ) -> None:
        self.report_dir = report_dir
        self._base = base
        self._catalogue = load(rules)
        self._stack_texts: dict[str, list[TextSource]] = {}

    def relative(self, path: Path) -> str:
        """A path as the user would type it."""
        try:
            return str(path.relative_to(self._base))
        except ValueError:
            return str(path)

    def keep_stacks(self, record: StageRecord, found: Iterable[stacks.Stack]) -> None:
        found = list(found)
        record.stacks = [self.relative(stack.path) for stack in found]
        record.stuck = [stack.where() for stack in found]
        self._stack_texts[record.name] = [
            TextSource(f"stacks/{stack.path.name}", stack.text) for stack in found
        ]

    def settle(
        self,
        record: StageRecord,
        text: str,
        *,
        fault: dict[str, Any] | None = None,
        error: str = "",
        exit_signal: str | None = None,
        crashed: bool = False,
        source_lines: int = 0,
    ) -> None:
        """Store what the stage printed and write the diagnosis into its record.

        The first ``source_lines`` lines of ``text`` are a traceback as pytest prints
        it, with source code in between.
        ``fault`` is what a StageFault carried, ``error`` the exception's text,
        ``exit_signal`` the name of the signal that ended its process.
        """
        self._keep_output(record, text)
        texts = [TextSource("error", error)] if error else []
        said = without_source(text, source_lines)
        texts += [TextSource("output", said), *self._child_output(record)]
        kind = "timeout" if record.outcome == TIMEOUT else "failed"
        evidence = StageEvidence(
            stage=record.name,
            outcome="crashed" if crashed else kind,
            cause=fault["cause"] if fault else None,
            message=record.message,
            texts=(*texts, *self._stack_texts.get(record.name, [])),
            facts={
                **record.facts,
                **_stopped(record.progress),
                **(fault["facts"] if fault else {}),
            },
            exit_signal=exit_signal,
            doing=record.step,
        )
        diagnosis = diagnose(evidence, self._catalogue)
        if diagnosis is None:
            lines = telling_lines(texts, 8)
            record.telling = [dataclasses.asdict(line) for line in lines]
            return
        record.diagnosis = diagnosis.to_json()
        if fault:
            proofs = [
                {"source": source, "line": line, "text": shown}
                for source, line, shown in fault["evidence"]
            ]
            # The stage knows; lines of its own traceback would only repeat it. Unless
            # it knows only that a process ended: what that printed says more.
            cause = record.diagnosis["cause"]
            asks = cause != fault["cause"] or self._catalogue[cause].tier == "fallback"
            others = [
                line
                for line in record.diagnosis["evidence"]
                if line["source"] not in ("error", "failure", "output")
                or (asks and line["source"] == "output" and line["line"] > source_lines)
            ]
            record.diagnosis["evidence"] = proofs + others

    def _keep_output(self, record: StageRecord, text: str) -> None:
        if text.strip():
            path = self.report_dir / "output" / record.name / "stage.log"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text[-OUTPUT_LIMIT:], "utf-8", "replace")

    def _child_output(self, record: StageRecord) -> list[TextSource]:
        directory = self.report_dir / "output" / record.name
        texts = []
        for path in sorted(directory.glob("*")):
            if path.name == "stage.log" or not path.is_file():
                continue
            record.output.append(self.relative(path))
            if path.suffix not in (".log", ".txt"):
                continue  # marks and dumps, which say nothing in words
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - OUTPUT_LIMIT))
                texts.append(
                    TextSource(path.name, file.read().decode("utf-8", "replace"))
                )
        return texts


def without_source(text: str, lines: int) -> str:
    """Empty the source code in the first ``lines`` lines, pytest's long traceback.

    Code names errors that did not happen: those it would raise, imports or documents.
    What was raised stands in lines that begin with E or name a file.
    """
    parts = text.split("\n")
    said = [line if _SAID.match(line) else "" for line in parts[:lines]]
    return "\n".join(said + parts[lines:])


def _stopped(progress: dict[str, Any] | None) -> dict[str, int]:
    """The process that a signal has stopped, for the advice."""
    pids = (progress or {}).get("stopped_pids") or []
    return {"stopped_pid": pids[0]} if pids else {}


def without_timeout_dump(text: str) -> str:
    """Drop the stacks that pytest-timeout printed; py-spy's, taken before, say more."""
    return re.sub(r"^~+ Stack of .*?(?=^-- |\Z)", "", text, flags=re.M | re.S)
