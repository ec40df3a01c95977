"""Writes HTML pages, never over a file that another tool or the user has made."""

from __future__ import annotations

import os
from pathlib import Path

from pytest_gkd import sanitize
from pytest_gkd.files import write_whole
from pytest_gkd.report.compare import ReportError
from pytest_gkd.report.record import PAGE_HEAD, PAGE_SIGN


def write(text: str, path: Path) -> None:
    """Write a page; its directory is absolute, without links, and exists.

    Raises ReportError if what has that name is not ours, and OSError if it cannot be
    written.
    """
    for file in (path, path.with_name(f"{path.name}.part")):
        if os.path.lexists(file) and not _is_ours(file):
            raise ReportError(
                f"{sanitize.line(str(file))} was not made by pytest-gkd and is left as "
                "it is: move it elsewhere"
            )
    write_whole(path, text)


def _is_ours(file: Path) -> bool:
    if file.is_symlink() or not file.is_file():
        return False
    with file.open("rb") as opened:
        return PAGE_SIGN in opened.read(PAGE_HEAD)
