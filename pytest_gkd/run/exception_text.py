"""Renders an exception that a stage raised as text, and sanitizes its report."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import pytest

from pytest_gkd import sanitize
from pytest_gkd.diagnosis import shadowed_imports
from pytest_gkd.stage_api import StageFault

RAISED_LENGTH = 500


def shadowed(error: Exception, traceback: str) -> StageFault | None:
    """The fault, if an import found a file of the user's instead of a package."""
    shadow = shadowed_imports.met(f"{error}\n{traceback}")
    if shadow is None:
        return None
    facts = {"package": shadow.name, "file": str(shadow.file)}
    proof = ("import", None, str(shadow))
    return StageFault("env.module-shadowed", str(error), facts, (proof,))


def raised(excinfo: pytest.ExceptionInfo[BaseException]) -> str:
    """An exception and where it was raised, without calling any of its own code."""
    args = BaseException.args.__get__(excinfo.value)  # type: ignore[attr-defined]
    said = f": {args[0][:RAISED_LENGTH]}" if args and type(args[0]) is str else ""
    last = excinfo.traceback[-1]
    where = f"{Path(last.path).name}:{last.lineno + 1}"
    return f"{type(excinfo.value).__name__}{said} ({where})"


def error_text(excinfo: pytest.ExceptionInfo[BaseException]) -> str:
    """What pytest says about an exception, without its module.

    For one from a Ray actor, its own last lines, not Ray's name for the call.
    """
    text = excinfo.exconly(tryshort=True)
    if "RayTaskError(" in text.partition(":")[0]:
        text = re.split(r'(?m)^ +File ".*\n(?: .*\n)*', text)[-1]
    return without_count(re.sub(r"^(?:\w+\.)+(?=\w+: )", "", text))


def told(error: BaseException) -> str:
    """An exception and where it was raised, on one line.

    Uses only what is least likely to fail: the stage may have replaced half of ``os``.
    """
    said = "".join(traceback.format_exception_only(error)).strip()
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    return f"{said} ({frame.f_code.co_filename}:{line})"


def sanitize_report(config: pytest.Config, report: pytest.TestReport) -> None:
    """Sanitize what pytest, its JUnit file and other plugins show of a stage.

    Done here, in the worker, since pytest-xdist cannot even transmit a lone surrogate.
    """
    report.sections = sanitize.data(report.sections)
    report.user_properties = sanitize.data(report.user_properties)
    if report.longrepr is not None:
        data = config.hook.pytest_report_to_serializable(config=config, report=report)
        data["longrepr"] = sanitize.data(data["longrepr"])
        copy = config.hook.pytest_report_from_serializable(config=config, data=data)
        report.longrepr = copy.longrepr


def without_count(text: str) -> str:
    """An exception's text without pydantic's first line, which only counts errors.

    Nor with the input that it then shows: all of vLLM's arguments.
    """
    text = re.sub(
        r"^ValidationError: \d+ validation errors? for \w+\n(?:\S+\n)?\s+"
        r"(?:\w+ error, )?(?=\S)",
        "ValidationError: ",
        text,
    )
    return re.sub(r" \[type=\w+, input_value=.*, input_type=\w+\]", "", text)
