"""The releases of a framework whose keys are recorded, and which of them judges."""

from __future__ import annotations

import json
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.version import Version

from pytest_gkd import __version__
from pytest_gkd.job.findings import CheckError

SCHEMAS = Path(__file__).parent / "schemas"


def recorded(framework: str) -> list[str]:
    """The recorded releases of a framework, oldest first."""
    found = [p.stem.removeprefix(f"{framework}-") for p in _files(framework)]
    return sorted(found, key=Version)


def _files(framework: str) -> list[Path]:
    return list(SCHEMAS.glob(f"{framework}-[0-9]*.json"))


@cache
def schema(framework: str, release: str) -> dict[str, Any]:
    """What is recorded of a release, as its framework's recorder wrote it."""
    text = (SCHEMAS / f"{framework}-{release}.json").read_text("utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def judge(framework: str, package: str, asked: str) -> tuple[str, str]:
    """The release that judges, and why: the asked, the installed, or the newest one.

    Our own names have no other than the installed one. Raises CheckError where the
    asked one is not recorded.
    """
    known = recorded(framework) or [__version__]
    if asked:
        if asked not in known:
            raise CheckError(
                f"{framework} {asked} is not recorded; recorded are {', '.join(known)}"
            )
        return asked, "--framework"
    newest = known[-1]
    if newest == __version__ and not recorded(framework):
        return newest, "the installed one"
    try:
        installed = metadata.version(package)
    except metadata.PackageNotFoundError:
        return newest, "the newest recorded, as none is installed"
    if installed in known:
        return installed, "the installed one"
    return newest, f"the newest recorded, as the installed {installed} is not"
