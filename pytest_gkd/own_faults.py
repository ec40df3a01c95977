"""Tells a bug in this package from one in what it calls."""

from __future__ import annotations

import traceback
from pathlib import Path
from types import ModuleType

from pytest_gkd.stage_api import StageFault

WORKLOAD = Path(__file__).parent / "workload"
# Injected faults must look like somebody else's.
INJECTED = WORKLOAD / "inject"
# What a bug in Python code raises. An OSError or a RuntimeError comes from the system,
# or from C++ below a line of ours, and does not incriminate that line.
MISTAKES = (
    AssertionError,
    AttributeError,
    LookupError,
    NameError,
    TypeError,
    ZeroDivisionError,
)
TEXT_CHARS = 500


def own_fault(error: BaseException, *places: Path) -> StageFault | None:
    """The fault ``internal.error`` if ``error`` is a bug in a line of ours.

    Judged by the innermost frame, which must be in the workload or below one of
    ``places``; what a package we call raises is that package's fault, or its caller's.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    if not isinstance(error, MISTAKES) or not frames or _of_release(error):
        return None
    frame, line = frames[-1]
    file = Path(frame.f_code.co_filename)
    ours = any(file.is_relative_to(place) for place in (WORKLOAD, *places))
    if not ours or file.is_relative_to(INJECTED):
        return None
    said = traceback.format_exception_only(error)[-1].strip()[:TEXT_CHARS]
    place = f"{file.parent.name}/{file.name}:{line}"
    return StageFault(
        "internal.error",
        f"a fault in pytest-gkd itself: {said} ({place}, in {frame.f_code.co_name})",
        facts={"raised_at": place},
    )


def _of_release(error: BaseException) -> bool:
    """Whether a package that we call lacks a name or an argument, as another release of
    it may; the catalogue recognizes that by the text."""
    if isinstance(error, AttributeError):
        if isinstance(error.obj, ModuleType):
            home = error.obj.__name__
        else:
            kind = error.obj if isinstance(error.obj, type) else type(error.obj)
            home = kind.__module__
        return home.partition(".")[0] not in ("builtins", "pytest_gkd")
    return isinstance(error, TypeError) and "unexpected keyword argument" in str(error)
