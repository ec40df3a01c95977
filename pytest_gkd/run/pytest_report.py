"""Renders a stage's failure for pytest's terminal and for JUnit."""

from __future__ import annotations

import json
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from _pytest._code.code import ReprFileLocation, TerminalRepr
from _pytest._io import TerminalWriter
from _pytest.junitxml import bin_xml_escape, xml_key

from pytest_gkd import columns, sanitize
from pytest_gkd.diagnosis.evidence import TextSource
from pytest_gkd.processes import tree
from pytest_gkd.report import render
from pytest_gkd.report.record import StageRecord

# Limits for JUnit, in characters: of one value, of one text and of all texts.
PROPERTY = 1_000
TEXT = 16_000
TEXTS = 64_000


class StageFailure(TerminalRepr):
    """What pytest shows and JUnit stores for a failed stage."""

    def __init__(self, record: StageRecord, block: list[str], traceback: Any) -> None:
        self.reprcrash = ReprFileLocation(record.nodeid, 0, render.headline(record))
        self._block = block
        self._traceback = traceback

    def toterminal(self, tw: TerminalWriter) -> None:
        for number, line in enumerate(self._block):
            tw.line(line, red=number == 0, bold=number == 0)
        if self._traceback is None:
            return
        tw.line("")
        if hasattr(self._traceback, "toterminal"):
            self._traceback.toterminal(tw)
        else:
            tw.line(str(self._traceback))


class Traceback(NamedTuple):
    """pytest's traceback: ``text`` as shown, ``said`` without the source code.

    Both have the same lines. Source code names errors that did not happen: those that
    it might raise, imports or documents.
    """

    text: str
    said: str

    @classmethod
    def of(cls, report: pytest.TestReport) -> Traceback:
        """The traceback of a report received from its worker."""
        text, said = report.longreprtext, set(_between_code(report.longrepr))
        lines = text.split("\n")
        kept = (one if one.startswith("E ") or one in said else "" for one in lines)
        return cls(text, "\n".join(kept))


def _between_code(shown: object) -> Iterator[str]:
    """The lines that say where something was raised, and what it was the cause of."""
    for frames, _, description in getattr(shown, "chain", ()):
        yield description or ""
        for entry in frames.reprentries:
            if place := getattr(entry, "reprfileloc", None):
                message = place.message.partition("\n")[0]
                yield f"{place.path}:{place.lineno}: {message}"


def properties(record: StageRecord, report: str) -> dict[str, str]:
    """What reporters such as JUnit are told about a stage, each value limited to 1000
    characters. Facts are named ``gkd_NAME``; the others are set unless empty."""
    facts = {f"gkd_{name}": _plain(value) for name, value in record.facts.items()}
    others = {
        "gkd_outcome": record.outcome or "",
        "gkd_cause": record.diagnosis.cause if record.diagnosis else "",
        "gkd_step": record.step,
        "gkd_budget_s": f"{record.budget_s:g}",
        "gkd_blocked_by": ", ".join(record.blocked_by),
        "gkd_stacks": ", ".join(record.stacks),
        "gkd_output": ", ".join(record.output),
        "gkd_injected": record.injected,
        "gkd_report": report,
    }
    known = facts | {name: text for name, text in others.items() if text}
    return {name: columns.cut(text, PROPERTY) for name, text in known.items()}


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def tell_junit(
    config: pytest.Config,
    report: pytest.TestReport,
    values: Mapping[str, str],
    texts: Iterable[TextSource],
) -> None:
    """Put a stage's properties and its processes' output into the JUnit file.

    pytest itself takes properties only from the teardown's report, which a test whose
    process died lacks, and output only if junit_logging is set.
    """
    xml = config.stash.get(xml_key, None)
    if xml is None:
        return
    case = xml.node_reporter(report)
    case.properties = [pair for pair in case.properties if pair[0] not in values]
    if report.when != "teardown":  # for which pytest adds them itself
        for name, value in sanitize.data(dict(values)).items():
            case.add_property(name, value)
    shown = [
        f"---- {source.name} ----\n{sanitize.text(source.text)[-TEXT:]}\n"
        for source in texts
        if source.text.strip()
    ]
    if shown:
        element = ET.Element("system-out")
        element.text = bin_xml_escape("".join(shown)[:TEXTS])
        case.append(element)


def add_to_junit(config: pytest.Config, report: pytest.TestReport) -> None:
    """Pass a report to the JUnit file only, if there is one."""
    xml = config.stash.get(xml_key, None)
    if xml is not None:
        xml.pytest_runtest_logreport(report)


def raised_in(excinfo: pytest.ExceptionInfo[BaseException]) -> tuple[Path, int, str]:
    """Which hook an error comes from: its file, the line reached, and its name.

    That is the last one that pluggy called; whatever that called in turn is not to
    blame.
    """
    entries = list(excinfo.traceback)
    modules = [str(entry.frame.f_globals.get("__name__")) for entry in entries]
    calls = [at for at, name in enumerate(modules) if name.startswith("pluggy")]
    entry = entries[min(max(calls, default=-2) + 1, len(entries) - 1)]
    return Path(entry.path), entry.lineno + 1, entry.name


def ending_of(node: Any) -> tuple[int | None, str]:
    """How a worker process whose connection is lost ended, as a number and in words.

    The number is negative for a signal. A process that is still alive is ended, since
    nobody can tell it what to do any more.
    """
    popen = getattr(getattr(node.gateway, "_io", None), "popen", None)
    if popen is None:
        return None, "the process that ran it is gone"
    try:
        status = int(popen.wait(timeout=2))
    except subprocess.TimeoutExpired:
        tree.stop(popen.pid, itself=True)
        return None, (
            "the process that ran it closed its connection to pytest (os.closerange?), "
            "and was ended"
        )
    return status, f"the process that ran it died: {tree.exit_name(status)}"
