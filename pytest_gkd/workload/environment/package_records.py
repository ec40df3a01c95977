"""Which record of an installed package tells the release of the files that are there.

``pip install --target`` over another release leaves two records in one directory: the
new one beside the old files, or with ``--upgrade`` the old one beside the new files
(pip 26.1, commands/install.py, _handle_target_dir).
"""

from __future__ import annotations

import csv
import importlib.metadata
from collections.abc import Iterator
from importlib.metadata import Distribution
from pathlib import Path, PurePosixPath

from pytest_gkd.clock import monotonic

# Rewritten whenever its source is recompiled, so its absence or size means nothing.
COMPILED = ".pyc"
LIMIT_S = 2.0


def read(name: str) -> tuple[Distribution, str]:
    """The record of what is imported, and what to say where there are several.

    Raises importlib.metadata.PackageNotFoundError.
    """
    first = importlib.metadata.distribution(name)
    place = _place(first)
    every = {first.version: first}
    for one in importlib.metadata.distributions(name=name):
        if _place(one) == place:
            every.setdefault(one.version, one)
    if len(every) == 1:
        return first, ""
    told = f"{place} has several records of {name}: {' and '.join(sorted(every))}"
    deadline = monotonic() + LIMIT_S
    wrong = {version: _wrong(one, deadline) for version, one in every.items()}
    fitting = [version for version, number in wrong.items() if number == 0]
    if len(fitting) != 1:
        return first, (
            f"{told}; which of them its files are of cannot be told, and "
            f"{first.version} is judged. Install one of them into an empty directory."
        )
    return every[fitting[0]], (
        f"{told}; its files are those of {fitting[0]}, which is judged. Install one of "
        f"them into an empty directory: pip and others may report the other one."
    )


def _place(one: Distribution) -> Path:
    return Path(str(one.locate_file("")))


def _wrong(one: Distribution, deadline: float) -> int | None:
    """How many files differ from the record; None where it lists none of them."""
    if not one.read_text("RECORD"):
        return None
    number = sum(1 for _ in differences(one, deadline))
    return None if monotonic() > deadline else number


def differences(distribution: Distribution, deadline: float) -> Iterator[str]:
    """Each file of its modules that differs from the record, in words.

    Only sizes are compared: hashing torch takes longer than importing it.
    """
    # Not distribution.files: since Python 3.12 it omits missing files.
    record = (distribution.read_text("RECORD") or "").splitlines()
    for name, _, size_bytes in csv.reader(record):
        if monotonic() > deadline:
            return
        file = PurePosixPath(name)
        if not size_bytes or file.suffix == COMPILED or file.parts[0] == "..":
            continue
        path = Path(str(distribution.locate_file(name)))
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            yield f"{path} is gone"
            continue
        if size != int(size_bytes):
            yield f"{path} has {size} bytes, and {size_bytes} were installed"
