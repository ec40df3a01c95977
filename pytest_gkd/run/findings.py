"""Turns what a failed stage left behind into its diagnosis and the files to keep."""

from __future__ import annotations

import functools
import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gkd import sanitize
from pytest_gkd.diagnosis import stack_dump
from pytest_gkd.diagnosis.evidence import EvidenceLine, StageEvidence, TextSource
from pytest_gkd.files import make_way, read_end, shown_from, write_json, write_private
from pytest_gkd.processes import procfs, stacks
from pytest_gkd.report.record import OUTPUT_BYTES, TIMEOUT, StageRecord
from pytest_gkd.run.pytest_report import Traceback
from pytest_gkd.stage_api import NO_STAGE, StageFault

if TYPE_CHECKING:
    from pytest_gkd.diagnosis.catalogue import Catalogue

# Suffixes of the text files that stages' children write, and how much is read at once.
TEXTS = (".log", ".txt", ".out", ".err")
BLOCK_CHARACTERS = 1 << 20
MESSAGE_CHARS = 8000
NAME_CHARS = 60  # of a command that names a process


@dataclass
class Findings:
    """Keeps a failed stage's output and stacks in the report directory; diagnoses it.

    Paths in records are relative to ``base``, where pytest was started. ``rules`` are
    the user's own rule files. ``texts`` holds, by stage, its processes' output and
    stacks. ``tell`` gets what could not be kept, and why. ``prepare`` ensures that
    the report's directory exists and is ours, or raises OSError.
    """

    report_dir: Path
    base: Path
    rules: tuple[Path, ...]
    tell: Callable[[str], None]
    prepare: Callable[[Path], None]
    texts: dict[str, list[TextSource]] = field(default_factory=dict)
    _stack_texts: dict[str, list[TextSource]] = field(default_factory=dict)

    @functools.cached_property
    def _catalogue(self) -> Catalogue:
        from pytest_gkd.diagnosis.catalogue import load

        return load(self.rules)

    def relative(self, path: Path) -> str:
        """A path as the user would type it."""
        return shown_from(self.base, path)

    def keep_stacks(self, record: StageRecord, found: Iterable[stacks.Stack]) -> None:
        found = list(found)
        record.stacks = [self.relative(one.path) for one in found if not one.problem]
        problem = next((one.problem for one in found if one.problem), "")
        if problem:
            self.tell(f"stacks of {record.name} could not be saved: {problem}")
        record.stuck = [stack.where() for stack in found]
        self._stack_texts[record.name] = [
            TextSource(f"stacks/{stack.path.name}", stack.text) for stack in found
        ]
        if len(found) > 1:
            self._keep_tree(record, found)

    def _keep_tree(self, record: StageRecord, found: Sequence[stacks.Stack]) -> None:
        """All stacks as one tree, which the page of the run draws."""
        # Only a stage that stood still pays for these imports.
        from pytest_gkd.report.standstill_page import TREE
        from pytest_gkd.watch import stack_tree
        from pytest_gkd.watch.samples import ProcessSample, Role

        own = "the stage's own process"
        samples = [
            ProcessSample(
                one.pid,
                start=0,
                ppid=0,
                role=Role(name=own if one.is_root else _program(one)),
                command=one.command,
                threads=stack_dump.threads(one.text, one.pid),
            )
            for one in found
        ]
        path = self.report_dir / "stacks" / record.name / TREE
        try:
            self.prepare(self.report_dir)
            make_way(path)
            write_json(path, sanitize.data(stack_tree.build(samples).to_json()))
        except OSError as error:
            self.tell(f"stacks of {record.name} could not be saved: {error}")

    def settle(
        self,
        record: StageRecord,
        text: str,
        *,
        traceback: Traceback | None = None,
        fault: StageFault | None = None,
        error: str = "",
        exit_signal: str | None = None,
        crashed: bool = False,
    ) -> None:
        """Store what the stage printed and write the diagnosis into its record.

        ``text`` is what it printed, ``traceback`` what pytest shows before that,
        ``fault`` what the stage itself found, ``error`` the exception's text,
        ``exit_signal`` the name of the signal that ended its process.
        """
        text = sanitize.text(text)
        shown, said, lines = text, text, 0
        if traceback is not None:
            shown, said = f"{traceback.text}\n{text}", f"{traceback.said}\n{text}"
            lines = traceback.text.count("\n") + 1
        self._keep_output(record, shown)
        record.message = record.message[:MESSAGE_CHARS]
        texts = [TextSource("output", _ends(said)), *self._child_output(record)]
        stacks_of = self._stack_texts.get(record.name, [])
        self.texts[record.name] = [*texts, *stacks_of]
        texts = [TextSource("error", _ends(error))] * bool(error) + texts
        kind = "timeout" if record.outcome == TIMEOUT else "failed"
        evidence = StageEvidence(
            stage=record.name,
            outcome="crashed" if crashed else kind,
            fault=fault,
            message=record.message,
            texts=(*texts, *stacks_of),
            traceback_lines=lines,
            facts={**record.facts, **_stopped(record.progress)},
            exit_signal=exit_signal,
            doing=record.step,
            alive=(record.progress or {}).get("verdict") == "alive",
        )
        # A run without a failure saves these imports, a twentieth of a second.
        from pytest_gkd.diagnosis.diagnose import diagnose, telling_lines

        record.diagnosis = diagnose(evidence, self._catalogue, self.relative)
        if record.diagnosis is None:
            own = [EvidenceLine(*line) for line in fault.evidence] if fault else []
            record.telling = own or telling_lines(texts, 8)

    def _keep_output(self, record: StageRecord, text: str) -> None:
        if text.strip():
            path = self.report_dir / "output" / record.name / "stage.log"
            try:
                self.prepare(self.report_dir)
                make_way(path)
                write_private(path, text[-OUTPUT_BYTES:])
            except OSError as error:
                self.tell(f"what {record.name} printed could not be saved: {error}")

    def sanitize_output(self, stages: Iterable[str]) -> list[str]:
        """Sanitize the files the stages' children wrote; one line for each failure.

        Anything else in ``output``, or behind a link there, is the user's.
        """
        problems = []
        folders = (self.report_dir / "output" / n for n in (*stages, NO_STAGE))
        ours = (one for one in folders if os.path.realpath(one) == str(one))
        for path in sorted(path for folder in ours for path in folder.rglob("*")):
            if path.suffix not in TEXTS:
                continue
            try:
                if path.is_file() and not path.is_symlink():
                    sanitize_file(path)
            except OSError as error:
                problems.append(
                    f"{self.relative(path)} may hold secrets: it could not be "
                    f"rewritten without them ({error.strerror})"
                )
        return problems

    def _child_output(self, record: StageRecord) -> list[TextSource]:
        directory = self.report_dir / "output" / record.name
        texts = []
        for path in sorted(directory.glob("*")):
            shown = self.relative(path)
            try:
                if path.name == "stage.log" or not path.is_file():
                    continue
                record.output.append(shown)
                if path.suffix not in TEXTS:
                    continue  # marks and dumps, which are not text
                with path.open("rb") as file:
                    said = read_end(file, OUTPUT_BYTES)
            except OSError as error:
                self.tell(f"{shown} could not be read: {error.strerror}")
                continue
            texts.append(TextSource(path.name, sanitize.text(said)))
        return texts


def _ends(text: str) -> str:
    """The text, or only the beginning and end of a very long one."""
    half = OUTPUT_BYTES // 2
    return text if len(text) <= 2 * half else f"{text[:half]}\n{text[-half:]}"


def sanitize_file(path: Path) -> None:
    """Sanitize a text file that a stage left, if it needs it.

    Raises OSError if it cannot be read or written; it is then left unchanged.
    """
    changed = False
    # A temporary file with an unused name: the files next to it are the stage's own.
    number, name = tempfile.mkstemp(".part", "gkd-", path.parent)
    part = Path(name)
    try:
        with (
            open(number, "w", encoding="utf-8", newline="\n") as new,  # noqa: PTH123
            path.open(encoding="utf-8", errors="replace", newline="\n") as old,
        ):
            os.fchmod(number, stat.S_IMODE(os.fstat(old.fileno()).st_mode))
            while block := old.read(BLOCK_CHARACTERS):
                block += old.readline(BLOCK_CHARACTERS)
                shown = sanitize.text(block)
                changed |= shown != block
                new.write(shown)
        if changed:
            part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _stopped(progress: dict[str, Any] | None) -> dict[str, int]:
    """The process that was stopped by a signal, for the advice."""
    pids = (progress or {}).get("stopped_pids") or []
    return {"stopped_pid": pids[0]} if pids else {}


def _program(stack: stacks.Stack) -> str:
    """The command without the pid before it: equal for processes that are alike."""
    return procfs.shown(stack.command.removeprefix(f"{stack.pid} "), NAME_CHARS)
